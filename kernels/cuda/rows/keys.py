"""The keys of a row-sparse step: made and checked in one loop, then sorted."""

from __future__ import annotations

from typing import Any, Protocol

from ..device.launch import on_grid
from ..device.memory import Places
from . import update as rows
from .sort import counting, scanning, scattering, scratch_words, sort_keys
from .table import Sizes

THREADS = 256


class Sorter(Protocol):
    """A sort of int64 keys that a framework has.

    Attributes:
        can_be_captured: whether its memory is kept for a CUDA graph that holds it.
    """

    can_be_captured: bool

    def room(self, n: int) -> int:
        """The address of room for ``n`` keys."""

    def sort(self) -> int:
        """Enqueue the sort of the keys there; the address at which they will lie."""


def make_keys(
    table: int,
    n_tables: int,
    sizes: Sizes,
    dropped_row: int,
    keys: int,
    check: tuple[int, int],
    stream: Any,
) -> None:
    """Enqueue the check of all indices, and the keys.

    Args:
        table: address of the table of tables.
        n_tables: its rows.
        sizes: theirs.
        dropped_row: the row of bad indices, or -1: they close the guard.
        keys: address for the keys, or 0: indices are checked only.
        check: address of the guard, and what is added to a bad position.
        stream: of Numba.
    """
    blocks = max(1, -(-sizes.n // THREADS))
    on_grid(rows.check_kernel, blocks, THREADS, stream)(
        table, n_tables, sizes.n, sizes.position_bits, dropped_row, keys, *check
    )


class Keys:
    """The sections of a room in which keys are made and sorted.

    Args:
        sizes: of the tables.
        places: gets the sections.
        sorts: whether the keys are sorted by this package.
    """

    def __init__(self, sizes: Sizes, places: Places, *, sorts: bool) -> None:
        self._sizes, self._sorts = sizes, sorts
        n = sizes.n if sorts else 0
        self._keys, self._spare = (places.add(8 * n) for _ in range(2))
        self._scratch = places.add(8 * scratch_words(n) if sorts else 0)

    def loops(self) -> list[Any]:
        """All loops that are launched."""
        sorting = [counting(), scanning(), scattering()] if self._sizes.n and self._sorts else []
        return [rows.check_kernel, *sorting]

    def enqueue(
        self,
        base: int,
        table: int,
        n_tables: int,
        dropped_row: int,
        check: tuple[int, int],
        sorter: Sorter | None,
        stream: Any,
    ) -> int:
        """Enqueue making and sorting them; their address.

        Args:
            base: where the room begins.
            table: as `make_keys`.
            n_tables: as `make_keys`.
            dropped_row: as `make_keys`.
            check: as `make_keys`.
            sorter: sorts them; None: the sort of this package.
            stream: of Numba.
        """
        sizes = self._sizes
        keys = base + self._keys if sorter is None else sorter.room(sizes.n)
        make_keys(table, n_tables, sizes, dropped_row, keys, check, stream)
        if sorter is not None:
            return sorter.sort()
        spare, scratch = base + self._spare, base + self._scratch
        # Positions are in order before and stay so.
        return sort_keys(keys, spare, scratch, sizes.n, sizes.position_bits, sizes.row_bits, stream)
