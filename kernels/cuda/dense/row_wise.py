"""Rules that measure rows, on a device: some threads of a block, its *lanes*, share a row.

They read the row twice: they add up what is measured of it, one of them works out what follows, and
all of them update it. A lane has every so many tiles of columns, and the lanes are added up in a
tree. More lanes than tiles add nothing but zeros, so the bits of a row depend on its width and the
storage types alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...element import Kernel, following, scaling
from ..device.backend import GEOMETRY, launcher, on_device
from ..device.functions import DEVICE
from ..device.guard import is_closed
from ..device.launch import tile_grid
from ..device.part import LaunchContext
from ..device.records import Word, hp_reader, row_finder, size_of, table_of
from ..device.sums import add_lanes, putter, taker
from .tiles import (
    address_reader,
    are_aligned,
    by_tiles,
    element_bytes,
    length_of,
    reduced_summed_tile,
    scope_states,
    update_summed_tile,
    wide_loader,
    with_sum,
)

THREADS = GEOMETRY.dense.threads


class Lane(NamedTuple):
    """A thread of a row."""

    thread: Any  # of the block
    lane: Any  # of the row
    lanes: Any  # how many there are, a power of 2


def _over_row(make: Callable[[int], Any], length: int) -> Any:
    """``over_row(position, width, is_aligned, *what)``: a function of tiles on those of a lane."""
    tile_loop = by_tiles(make, length)

    @cuda.jit(device=True)
    def over_row(position, width, is_aligned, *what):
        column = position.lane * length
        while column < width:
            tile_loop(column, width, is_aligned, *what)
            column += position.lanes * length

    return over_row


def _reduced_tile(kernel: Kernel, length: int) -> Any:
    """``reduced_tile(i, arrays, (), (total,), hp, sums)``: `reduced_summed_tile`, at an address."""
    reduce = reduced_summed_tile(kernel, length)
    read_hp = hp_reader(kernel.rule, kernel.prologue, kernel.real)

    @cuda.jit(device=True)
    def reduced_tile(i, arrays, how, tiles, hp, sums):
        # Not before the sum: they would take registers.
        reduce(i, arrays, how, tiles, read_hp(hp), sums)

    return reduced_tile


def row_updater(kernel: Kernel, gradient: Callable[[int], Any], threads: int) -> Any:
    """``update_row(position, row, width, is_aligned, arrays, source, hp)``: the rows of a block.

    ``gradient(n)`` is as in `with_sum`; ``arrays`` is where addresses lie, ``hp`` where the scalars
    do. All threads of a block call it; a width of 0 is that of one without a row.
    """
    rule, length = kernel.rule, length_of(kernel)
    n_values, n_factors = rule.n_measured, len(rule.scaled_fields)
    n_shared = max(n_values, n_factors)
    reduce = on_device(lambda *_: None)
    if rule.measure is not None:
        reduce = _over_row(lambda n: with_sum(kernel, gradient, _reduced_tile, n), length)
    update = _over_row(lambda n: with_sum(kernel, gradient, update_summed_tile, n), length)
    follow, scale = following(kernel, DEVICE), scaling(kernel, DEVICE)
    load_states, store_states = scope_states(kernel, n_factors)
    read_arrays, read_hp = address_reader(kernel), hp_reader(rule, kernel.prologue, kernel.real)
    take, take_factors, put = taker(n_values), taker(n_factors), putter(n_factors)

    @cuda.jit(device=True)
    def update_row(position, row, width, is_aligned, arrays, source, hp):
        sums, first = cuda.local.array(n_shared, float64), row * width
        for k in range(n_shared):
            sums[k] = 0.0
        # Threads without a row take part with a width of 0: the sum over lanes has barriers.
        reduce(position, width, is_aligned, first, arrays, source, hp, sums)
        shared = cuda.shared.array((n_shared, threads), float64)
        # All have read the factors of the rows before, which lie in the same shared memory.
        cuda.syncthreads()
        for k in range(n_shared):
            shared[k, position.thread] = sums[k]
        add_lanes(shared, position.thread, position.lane, position.lanes, 1, n_values)
        if width > 0 and position.lane == 0:
            places, row_sums = read_arrays(arrays), shared[:, position.thread]
            states = load_states(row, places, (), ())
            numbers = follow(take(row_sums), states, width, read_hp(hp))
            store_states(row, places, (), (), numbers)
            put(row_sums, numbers)
        cuda.syncthreads()
        if width > 0:
            scaled = scale(read_hp(hp), take_factors(shared[:, position.thread - position.lane]))
            update(position, width, is_aligned, first, arrays, source, scaled)

    return update_row


class RowsRow(NamedTuple):
    """A tensor of a launch."""

    hp: Word  # address of the scalars
    values: Word  # address of the gradient
    arrays: Word  # where the addresses of the parameter and of its states lie
    rows: Word
    width: Word  # elements of a row
    log_lanes: Word  # logarithm of the threads that share a row
    first_block: Word
    is_aligned: Word  # whether tiles are moved by vectors


def _dense_gradient(kernel: Kernel, length: int) -> Any:
    """``load(total, column, first, values)``: as `with_sum` takes it."""
    start = wide_loader(kernel.g, kernel.real, length)

    @cuda.jit(device=True)
    def load(total, column, first, values):
        start(total, values, first + column)

    return load


@cache
def row_wise_kernel(kernel: Kernel) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, guard)``: the loop of a rule that measures rows."""
    find = row_finder(RowsRow, "first_block")
    update = row_updater(kernel, partial(_dense_gradient, kernel), THREADS)

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        block, thread = np.int64(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        of = find(table, n_tensors, block)
        lanes = np.int64(1) << of.log_lanes
        position = Lane(thread, thread & (lanes - 1), lanes)
        # A shift: the lanes of a row are a power of 2, and a division takes tens of instructions.
        row = ((block - of.first_block) * THREADS + thread) >> of.log_lanes
        width = of.width if row < of.rows else np.int64(0)
        update(position, row, width, of.is_aligned, of.arrays, (of.values,), of.hp)

    return loop


class RowWiseStep:
    """A `DevicePart`: the step of a rule that measures rows, on dense gradients of some tensors.

    There are int64 ``[T, 1 + number of states]`` addresses of parameters and states, and ``[T]`` of
    gradients, sizes, and elements of a row.
    """

    def __init__(
        self, kernel: Kernel, addresses: np.ndarray, gradients: np.ndarray, sizes: np.ndarray,
        widths: np.ndarray,
    ) -> None:  # fmt: skip
        self._update = row_wise_kernel(kernel)
        length, n, n_rows = length_of(kernel), len(sizes), sizes // widths
        lanes = (tile_grid(width, length, THREADS)[0] for width in widths.tolist())
        logs = np.array([n_lanes.bit_length() - 1 for n_lanes in lanes])
        blocks = -(-(n_rows << logs) // THREADS)
        ends = np.cumsum(blocks)
        self._strides = widths[:, None] * element_bytes(kernel)
        self._rows = RowsRow(0, 0, 0, n_rows, widths, logs, ends - blocks, 0)
        self.put(addresses, gradients)
        self._n_tensors, self._n_blocks, self._table = n, int(ends[-1]), 0
        self.n_words = n * size_of(RowsRow) // 8 + addresses.size
        self.loops, self.scratch_bytes = [self._update], 0

    def put(self, addresses: np.ndarray, gradients: np.ndarray) -> None:
        """Take over where the tensors and their gradients lie now."""
        self._addresses = addresses
        places = np.column_stack([gradients, addresses, self._strides])
        self._rows = self._rows._replace(values=gradients, is_aligned=are_aligned(places))

    def words(self, place: int, hp: Any) -> np.ndarray:
        # Behind the table lies what it points at.
        self._table, n = place, self._n_tensors
        lists = place + n * size_of(RowsRow) + np.arange(n) * self._addresses.strides[0]
        table = table_of(self._rows._replace(hp=hp, arrays=lists), n)
        return np.concatenate([table, self._addresses.ravel()])

    def enqueue(self, call: LaunchContext) -> None:
        if self._n_blocks:
            loop = launcher(self._update, self._n_blocks, THREADS, call.stream)
            loop(self._table, self._n_tensors, call.guard)
