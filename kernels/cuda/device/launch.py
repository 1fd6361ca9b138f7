"""Grids of loops, and launches that are made again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .backend import GEOMETRY, launcher


def on_elements(loop: Any, n: int, stream: Any) -> Any:
    """A loop with a thread for each of ``n`` elements, one at least."""
    return launcher(loop, max(1, -(-n // GEOMETRY.rows)), GEOMETRY.rows, stream)


def tile_grid(width: int, length: int, threads: int) -> tuple[int, int, int]:
    """Threads of a block along tiles (a power of 2) and along rows, and the groups of tiles."""
    n_tiles = max(1, -(-width // length))
    # A power of 2: sums over lanes halve them.
    across = min(threads, 1 << (n_tiles - 1).bit_length())
    return across, threads // across, -(-n_tiles // across)


class Launches:
    """Launches that follow one another in every step, rebuilt only where they differ.

    ``make(call)`` gives them for a stream, scratch memory and tables, each as a function, and
    whether that takes the guard: what differs from step to step is the last argument of a loop.
    """

    def __init__(self, make: Callable[[Any], Iterable[tuple[Callable[..., Any], bool]]]) -> None:
        self._make, self._launches = make, list[tuple[Callable[..., Any], bool]]()
        self._of: tuple[Any, ...] = ()

    def run(self, call: Any, table: int) -> None:
        """Enqueue them for a `LaunchContext`; their tables lie at an address."""
        of = call.stream, call.scratch, table
        if of != self._of:
            self._launches, self._of = [*self._make(call)], of
        for launch, takes_guard in self._launches:
            if takes_guard:
                launch(call.guard)
            else:
                launch()
