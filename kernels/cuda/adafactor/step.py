"""One step of Adafactor on any number of tensors on the device, enqueued on a stream.

Matrices take three passes over their elements: sums of squares over rows and columns, the sizes of
directions and parameters, and the update. What follows from a pass is computed on the device before
the next one. Vectors take two passes, of which the first is that of any two-stage rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...element import Kernel
from ..device.launch import on_grid
from . import layout as factored_layout
from .layout import FactoredTables
from .lines import lines_kernel, row_factors_kernel
from .passes import direction_kernel, update_kernel
from .sizes import Options, sizes_kernel
from .sums import squares_kernel

_WIDEST = 16  # bytes of a load


def length_of(kernel: Kernel) -> int:
    """Elements of a thread's widest loads."""
    return _WIDEST // min(storage.itemsize for storage in (kernel.w, kernel.g, *kernel.s))


class Loops(NamedTuple):
    """The loops of a step on matrices, in order."""

    squares: Any
    lines: Any
    row_factors: Any
    direction: Any
    sizes: Any
    update: Any


def loops_of(kernel: Kernel, options: Options) -> Loops:
    """The loops for some storage types."""
    prologue, w, g, real = kernel.prologue, kernel.w, kernel.g, kernel.real
    length, threads = length_of(kernel), factored_layout.THREADS
    return Loops(
        squares_kernel(prologue, w, g, length, threads, factored_layout.ROUNDS),
        lines_kernel(prologue, real, threads),
        row_factors_kernel(prologue, real, threads),
        direction_kernel(prologue, w, g, length, threads, options.scale_parameter),
        sizes_kernel(real, options, threads, factored_layout.ROW_BYTES),
        update_kernel(prologue, w, g, kernel.s[0] if kernel.s else None, length, threads),
    )


def enqueue(
    loops: Loops, tables: FactoredTables, table: int, sums: int, guard: int, stream: Any
) -> None:
    """Enqueue the loops of a step on matrices, in place.

    Args:
        loops: these.
        tables: the tensors, for the `length_of` the kernel.
        table: address of both tables, from `FactoredTables.at`.
        sums: address of room for `SUMS_BYTES` of each block.
        guard: address of the guard of the call, or 0.
        stream: of Numba.
    """
    n = tables.n_tensors
    lines = table + n * factored_layout.ROW_BYTES

    def launch(loop: Any, blocks: int, *arguments: int) -> None:
        on_grid(loop, blocks, factored_layout.THREADS, stream)(*arguments, guard)

    launch(loops.squares, tables.n_blocks, table, n)
    launch(loops.lines, tables.n_line_blocks, lines, 2 * n)
    launch(loops.row_factors, tables.n_chunk_blocks, lines, n)
    launch(loops.direction, tables.n_blocks, table, n, sums)
    launch(loops.sizes, n, table, n, tables.n_blocks, sums)
    launch(loops.update, tables.n_blocks, table, n)
