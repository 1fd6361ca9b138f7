"""The first stage of two-stage rules: what is measured of each tensor, and what follows from it.

Each block sums the squares of its chunk; one block for each tensor then adds the sums of the chunks
and changes the scalars of the tensor. So the second stage finds them complete, the host is not
asked, and the bits are the same in every run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64

from ...element import Kernel
from ..device.functions import device_function
from ..device.guard import is_closed
from ..device.records import multiplier, row_reader
from ..device.sums import MOST_VALUES, add_tree, share_of_parts, store_part
from .chunks import THREADS, TensorRow, on_chunk
from .tiles import measured_tile


@cache
def chunk_sums_kernel(kernel: Kernel) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, parts, guard)``: the squares of each chunk.

    Table and blocks are those of the dense loop.
    """
    add_chunk, n_values = on_chunk(kernel, measured_tile), kernel.rule.n_measured

    @cuda.jit
    def loop(table, n_tensors, parts, guard):
        if is_closed(guard):
            return
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        own = cuda.local.array(MOST_VALUES, float64)
        own[0] = own[1] = own[2] = 0.0
        add_chunk(table, n_tensors, own)
        shared = cuda.shared.array((MOST_VALUES, THREADS), float64)
        shared[0, thread], shared[1, thread], shared[2, thread] = own[0], own[1], own[2]
        store_part(parts, block, shared, thread, THREADS, n_values)

    return loop


def totals_kernel(record: Any, n_words: int, n_values: int, follow: Any) -> Any:
    """``loop[n_tensors, THREADS](table, n_tensors, n_blocks, parts, guard)``.

    It adds the parts of the blocks of a tensor and calls ``follow(shared, row)`` with what they add
    up to in ``shared[:, 0]``. The rows are of ``record``, with ``n_words`` words at the end.
    """
    row_at = row_reader(record, n_words)

    @cuda.jit
    def loop(table, n_tensors, n_blocks, parts, guard):
        if is_closed(guard):
            return
        t, thread = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        row, end = row_at(table, t), n_blocks
        if t + 1 < n_tensors:
            end = row_at(table, t + 1).first_block
        shared = cuda.shared.array((MOST_VALUES, THREADS), float64)
        for k in range(n_values):
            shared[k, thread] = share_of_parts(parts, row.first_block, end, k, thread, THREADS)
        add_tree(shared, thread, THREADS, n_values)
        if thread == 0:
            follow(shared, row)

    return loop


@cache
def factor_kernel(kernel: Kernel) -> Any:
    """`totals_kernel` of ``rule.factor``: it multiplies the field ``factor_of`` of the scalars."""
    rule, multiply = kernel.rule, multiplier(kernel.real)
    n_values, factor = rule.n_measured, device_function(rule.factor)
    offset = kernel.column[rule.factor_of] * kernel.real.itemsize

    @cuda.jit(device=True)
    def follow(shared, row):
        if n_values == 1:
            multiply(row.hp + offset, factor(shared[0, 0]))
        elif n_values == 2:
            multiply(row.hp + offset, factor(shared[0, 0], shared[1, 0]))
        else:
            multiply(row.hp + offset, factor(shared[0, 0], shared[1, 0], shared[2, 0]))

    return totals_kernel(TensorRow, 2 + len(kernel.s), n_values, follow)
