"""Totals of a tensor, and what follows: the factors of its scalars, and its own new states.

One block for each tensor adds up what other blocks have left of its sums. The scalars are changed
at once, before the update reads them; the new states of the tensor come to their places after it,
since it is given the old ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float64, types

from ...element import Kernel, following, scaling
from ...storage import numba_type
from ..device.backend import GEOMETRY, launcher, reader, store_float64, storer
from ..device.functions import DEVICE
from ..device.guard import is_closed
from ..device.part import LaunchContext
from ..device.records import hp_reader, row_reader
from ..device.sums import add_tree, putter, strided_partial_sum, taker
from .tiles import scope_states

THREADS = GEOMETRY.totals
Constants = tuple[tuple[str, float], ...]
"""Numbers that `Rule.factor` takes, by name; they are compiled in."""


@cache
def totals_kernel(kernel: Kernel, record: Any, constants: Constants) -> Any:
    """``loop[n_tensors, THREADS](table, n_tensors, n_blocks, parts, new, guard)``.

    The rows of the table are of ``record``, with the addresses of the gradient, the parameter and
    its states at the end. ``new`` is where the new states of each tensor are to lie, as float64.
    """
    rule, real = kernel.rule, kernel.real
    n_values, n_factors = rule.n_measured, len(rule.scaled_fields)
    n_new, row_at = len(rule.factor_states), row_reader(record, 2 + len(kernel.s))
    follow, scale = following(kernel, DEVICE, dict(constants)), scaling(kernel, DEVICE)
    read_hp, store_hp = hp_reader(rule, kernel.prologue, real), storer(numba_type(real))
    load_states = scope_states(kernel, n_factors).load
    take, put, n_kept = taker(n_values), putter(n_new, n_factors), max(1, n_new)

    @cuda.jit
    def loop(table, n_tensors, n_blocks, parts, new, guard):
        if is_closed(guard):
            return
        t, thread = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        row, end = row_at(table, t), n_blocks
        # The parts of a tensor end where those of the next one begin.
        if t + 1 < n_tensors:
            end = row_at(table, t + 1).first_block
        shared = cuda.shared.array((n_values, THREADS), float64)
        for k in range(n_values):
            total = strided_partial_sum(parts, row.first_block, end, k, n_values, thread, THREADS)
            shared[k, thread] = total
        add_tree(shared, thread, THREADS, n_values)
        if thread == 0:
            hp, states = read_hp(row.hp), load_states(0, row.arrays[1:], (), ())
            numbers = follow(take(shared[:, 0]), states, max(1, row.size), hp)
            store_hp(row.hp, scale(hp, numbers))
            kept = cuda.local.array(n_kept, float64)
            put(kept, numbers)
            for k in range(n_new):
                store_float64(new + (t * n_new + k) * 8, kept[k])

    return loop


@cache
def states_kernel(kernel: Kernel, record: Any) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, new, guard)``: the new states to their places."""
    n_new, row_at = len(kernel.rule.factor_states), row_reader(record, 2 + len(kernel.s))
    read, store_states = reader(types.UniTuple(types.float64, n_new)), scope_states(kernel, 0).store

    @cuda.jit
    def loop(table, n_tensors, new, guard):
        t = cuda.grid(1)
        # The last block has threads without a tensor.
        if t < n_tensors and not is_closed(guard):
            store_states(0, row_at(table, t).arrays[1:], (), (), read(new + t * n_new * 8))

    return loop


class Totals:
    """The loops after the sums of so many tensors of a table, whose rows are of ``record``."""

    def __init__(self, kernel: Kernel, record: Any, constants: Constants, n_tensors: int) -> None:
        self._n, n_new = n_tensors, len(kernel.rule.factor_states)
        self._follow = totals_kernel(kernel, record, constants)
        self._store = states_kernel(kernel, record) if n_new else None
        self.loops = [loop for loop in (self._follow, self._store) if loop]
        self.scratch_bytes = 8 * n_tensors * n_new  # of new states

    def follow(self, table: int, n_blocks: int, parts: int, new: int, call: LaunchContext) -> None:
        """Enqueue all but the new states, given the parts of so many blocks; addresses."""
        loop = launcher(self._follow, self._n, THREADS, call.stream)
        loop(table, self._n, n_blocks, parts, new, call.guard)

    def store(self, table: int, new: int, call: LaunchContext) -> None:
        """Enqueue what comes after the update."""
        if self._store:
            loop = launcher(self._store, -(-self._n // THREADS), THREADS, call.stream)
            loop(table, self._n, new, call.guard)
