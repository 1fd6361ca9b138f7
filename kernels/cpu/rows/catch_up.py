"""Catching up: rows that slept take the steps that they have missed, each row once."""

from __future__ import annotations

import threading
from array import array
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ...element import Kernel, kernel
from ...idle import NODES
from ...idle_table import LEAST, SLEEP, IdleTable
from ...inner import njit
from ..blocks import blocks
from ..compiler.compile import part
from ..compiler.intrinsics import (
    as_pointer,
    atomic_exchange,
    call_address,
    copy_bytes,
    load_int64,
    prefetch_line,
)
from ..compiler.lines import LINE, prefetch
from ..compiler.records import index_at, int64s
from ..headers.arrays import address_of
from ..process.forks import in_child
from ..threads.parallel import Loop, get_num_threads
from ..threads.workspace import borrow, give_back
from .step import ROW_COST, UPDATE_SERIAL_BELOW

_LINES_AHEAD, _MOST_AHEAD = 96, 16  # as of rows that are updated
_LAST_AHEAD = 32  # ids whose counts are on their way
_PART_IDS, _PART_ROWS = 1_024, 4_096  # of a stretch of ids, or of a table


class CatchUpCall(NamedTuple):
    """Arguments of the loops, all ``int64``."""

    indices: int  # [n] of any order; 0: the rows from ``first`` on
    index_bytes: int
    first: int
    n: int
    ahead: int  # rows that are on their way
    last: int  # int32 [rows]: the last step of each row
    rows: int  # of the table; others are passed over
    now: int  # the step that rows are brought up to
    mark: int  # what is their last step then
    closed_from: int
    arrays: int  # address of the addresses of the parameter and its states
    n_arrays: int
    row_bytes: int  # as of `RowCall`
    width: int
    many: int  # block of many steps
    many_hp: int  # [SLEEP] of its scalars, for rows whose last step was t at t % SLEEP
    many_bytes: int
    # For steps that are taken one by one: all up to ``paths`` with the scalars of `Idle.update`.
    steps: int  # float64 [SLEEP, 5]
    largest: int  # float64 [1]: the largest of their sizes
    drift: int  # block of many steps on a drift in the place of the parameter
    behind_drift: int  # block of many steps that adds the drift
    paths: int  # the place of the first path among the scalars
    nodes: int  # that of epsilon, before the nodes
    real_bytes: int
    scratch: int  # for each slot: addresses, scalars, the drift of a row
    scratch_bytes: int
    listed: int  # int64 [_PART_IDS, 2] for each slot: rows and their last steps
    behind: int  # int64 [1]: not 0 if any row was


# The numbers of a step: factors of weight, first moment and root, size and epsilon.
_WEIGHT, _FIRST, _ROOT, _SIZE, _EPSILON = range(5)


@njit(inline="always")
def _real(address, n_bytes, k):
    """Number ``k`` in the type of the arithmetic."""
    if n_bytes == 4:
        return np.float64(carray(as_pointer(address), k + 1, np.float32)[k])
    return carray(as_pointer(address), k + 1, np.float64)[k]


@njit(inline="always")
def _put(address, n_bytes, k, x):
    if n_bytes == 4:
        carray(as_pointer(address), k + 1, np.float32)[k] = np.float32(x)
    else:
        carray(as_pointer(address), k + 1, np.float64)[k] = x


@njit
def _walk(c, slot, row, since):
    """One row, step by step as far as that has to be: as many steps at a time as there are paths.

    The drift is summed by itself, so that the weight is rounded once.
    """
    arrays = c.scratch + slot * c.scratch_bytes
    hp, b = arrays + 8 * c.n_arrays, c.real_bytes
    drift, every = hp + c.many_bytes, carray(as_pointer(c.steps), (SLEEP, 5), np.float64)
    for a in range(1, c.n_arrays):
        int64s(arrays, c.n_arrays)[a] = load_int64(c.arrays + 8 * a)
    int64s(arrays, c.n_arrays)[0] = drift - row * c.width * b
    for k in range(c.width):
        _put(drift, b, k, 0.0)
    for k in range(1, c.paths):  # the states stay
        _put(hp, b, k, 1.0)
    first = root = 1.0
    largest = carray(as_pointer(c.largest), 1, np.float64)[0]
    t, stop, moved = since, min(c.now, c.closed_from), 0.0
    while t < c.now:
        weight = 1.0
        if t < stop and largest * first >= LEAST * moved * root:
            epsilon = every[(t + 1) % SLEEP, _EPSILON]
            for k in range(NODES):
                path, node = 0.0, 1.0
                if t < stop and (every[(t + 1) % SLEEP, _EPSILON] > 0.0) == (epsilon > 0.0):
                    t += 1
                    step = every[t % SLEEP]
                    moved += abs(step[_SIZE]) * first
                    for earlier in range(c.paths, c.paths + k):
                        _put(hp, b, earlier, _real(hp, b, earlier) * step[_WEIGHT])
                    weight, first = weight * step[_WEIGHT], first * step[_FIRST]
                    root *= step[_ROOT]
                    less = epsilon / step[_EPSILON] if epsilon > 0.0 else 1.0
                    path, node = step[_SIZE] * first * less, root * less
                _put(hp, b, c.paths + k, path)
                _put(hp, b, c.nodes + 1 + k, node)
        else:  # the rest, as of a row that took step t
            scalars = c.many_hp + t % SLEEP * c.many_bytes
            weight, epsilon, t = _real(scalars, b, 0), _real(scalars, b, c.nodes), c.now
            for k in range(NODES):
                _put(hp, b, c.paths + k, _real(scalars, b, c.paths + k) * first)
                _put(hp, b, c.nodes + 1 + k, _real(scalars, b, c.nodes + 1 + k) * root)
        _put(hp, b, c.nodes, epsilon)
        if t < c.now:
            _put(hp, b, 0, weight)
            call_address(c.drift, arrays, row, 1, c.width, 0, hp)
            continue
        # The last of them come with the weight and the states.
        for k in range(c.width):
            _put(drift, b, k, _real(drift, b, k) * weight)
        copy_bytes(hp, c.many_hp + since % SLEEP * c.many_bytes, c.paths * b)
        call_address(c.behind_drift, c.arrays, row, 1, c.width, drift, hp)


@njit
def _catch_up(c, slot, row, rows, since):
    # Counts that others have written over lead to wrong numbers, but to no other memory.
    since = max(since, c.now - SLEEP + 1, 0)
    if since >= c.closed_from:
        scalars = c.many_hp + since % SLEEP * c.many_bytes
        call_address(c.many, c.arrays, row, rows, c.width, 0, scalars)
        return
    for k in range(rows):
        _walk(c, slot, row + k, since)


@njit(inline="always")
def _last_of(c):
    # The number of rows is not told; all that are asked for are there.
    return carray(as_pointer(c.last), 1 << 40, np.int32)


@njit(inline="always")
def _prefetch_row(c, row):
    for a in range(c.n_arrays):
        sizes = c.row_bytes + 16 * a
        n_bytes = c.width * load_int64(sizes) + load_int64(sizes + 8)
        prefetch(load_int64(c.arrays + 8 * a) + row * n_bytes, n_bytes)


@part(CatchUpCall)
def _catch_up_ids(index, slot, c):
    """The rows of a stretch of the ids that no other part has claimed: first they are listed."""
    last, begin = _last_of(c), index * _PART_IDS
    end, n = min(begin + _PART_IDS, c.n), 0
    listed = int64s(c.listed + slot * 16 * _PART_IDS, 2 * _PART_IDS)
    for k in range(begin, end):
        if k + _LAST_AHEAD < end:
            prefetch_line(c.last + 4 * index_at(c.indices, c.index_bytes, k + _LAST_AHEAD))
        row = index_at(c.indices, c.index_bytes, k)
        if 0 <= row < c.rows and last[row] < c.mark:
            since = np.int64(atomic_exchange(c.last + 4 * row, c.mark))
            if since < c.now:
                listed[2 * n], listed[2 * n + 1] = row, since
                n += 1
    if n > 0:
        int64s(c.behind, 1)[0] = 1
    for k in range(min(c.ahead, n)):
        _prefetch_row(c, listed[2 * k])
    for k in range(n):
        if k + c.ahead < n:
            _prefetch_row(c, listed[2 * (k + c.ahead)])
        _catch_up(c, slot, listed[2 * k], 1, listed[2 * k + 1])


@part(CatchUpCall)
def _catch_up_stretch(index, slot, c):
    """Rows that lie together; those with the same last step are updated together."""
    last = _last_of(c)
    row = c.first + index * _PART_ROWS
    end = min(row + _PART_ROWS, c.first + c.n)
    while row < end:
        since, begin = np.int64(last[row]), row
        while row < end and last[row] == since:
            if since < c.mark:
                last[row] = c.mark
            row += 1
        if since < c.now:
            int64s(c.behind, 1)[0] = 1
            _catch_up(c, slot, begin, row - begin, since)


class SleepingTable(NamedTuple):
    """A parameter in whose rows steps may be missing, and its states; addresses."""

    many: Kernel  # of the idle form of the rule
    addresses: tuple[int, ...]  # the parameter and the states of the rule
    width: int
    last: int  # int32 [rows]: the step that each row has taken last
    rows: int


_advancing = threading.Lock()  # lookups of several threads find the same scalars


@in_child
def _release_lock() -> None:
    # A thread that held it in the parent does not exist here.
    global _advancing
    _advancing = threading.Lock()


class CatchUp:
    """Bringing some rows of a table up to a step: to be run by `commit`.

    Args:
        table: the table.
        scalars: those of the steps up to ``now``.
        now: the step to which rows are brought.
        mark: what is written as their last step: that of a gradient which follows, or ``now``.
        rows: the rows: the address of ids, their bytes, and how many there are; or 0, the first of
            rows that lie together, and how many there are.
        owners: what keeps the memory of all these alive.
    """

    def __init__(
        self, table: SleepingTable, scalars: IdleTable, now: int, mark: int,
        rows: tuple[int, int, int], owners: Any = None,
    ) -> None:  # fmt: skip
        if scalars.step != now or not scalars.is_whole:
            with _advancing:
                scalars.advance(now)
        if scalars.places is None:
            every = scalars.many
            scalars.places = address_of(every), every.strides[0], address_of(scalars.steps)
        many, addresses, width, last, n_rows = table
        indices, index_bytes, n = rows
        is_small = n * (width + ROW_COST) < UPDATE_SERIAL_BELOW
        threads = 1 if is_small else get_num_threads()
        n_parts = -(-n // (_PART_IDS if indices else _PART_ROWS))
        # A slot has the addresses, the scalars and the drift of a row.
        words, one_by_one, largest = 0, (0, 0), 0.0
        if scalars.closed_from > 0:
            words = len(addresses) + 1 + scalars.places[1] // 8 + 1 + width
            words, one_by_one = -(-words // 8) * 8, _one_by_one(many, scalars.n_states)
            largest = float(np.abs(scalars.steps[:, _SIZE]).max())
        self._largest = array("d", (largest,))
        listed = 2 * _PART_IDS if indices else 0
        self._block = block = borrow(len(addresses) + 8 + threads * (words + listed))
        block.words[: len(addresses)] = addresses
        scratch = block.address + 8 * (len(addresses) + 8)
        self._behind, self._scalars, self._owners = array("q", (0,)), scalars, owners
        many_hp, many_bytes, steps = scalars.places
        drift, behind_drift = one_by_one
        self._call = array("q", CatchUpCall(
            indices=indices, index_bytes=index_bytes, first=0 if indices else index_bytes, n=n,
            ahead=_ahead(many, width), last=last, rows=n_rows, now=now, mark=mark,
            closed_from=scalars.closed_from, arrays=block.address, n_arrays=len(many.storages),
            row_bytes=address_of(many.row_bytes), width=width,
            many=blocks(many).update_zero.address, many_hp=many_hp, many_bytes=many_bytes,
            steps=steps, largest=self._largest.buffer_info()[0], drift=drift,
            behind_drift=behind_drift, paths=1 + scalars.n_states, nodes=scalars.n_sums,
            real_bytes=many.real.itemsize, scratch=scratch, scratch_bytes=8 * words,
            listed=scratch + 8 * threads * words, behind=self._behind.buffer_info()[0],
        ))  # fmt: skip
        function = _catch_up_ids if indices else _catch_up_stretch
        address, threads = self._call.buffer_info()[0], min(threads, n_parts)
        self.loops = (Loop(function.address, n_parts, address, threads),)

    @property
    def found_any(self) -> bool:
        """Whether any row was behind and may have changed, once the loop has run."""
        return self._behind[0] != 0 and self._scalars.changes

    def release(self) -> None:
        """Give back the borrowed block."""
        give_back(self._block)


@cache
def _ahead(many: Kernel, width: int) -> int:
    """`CatchUpCall.ahead`."""
    lines = sum(-(-width * x.itemsize // LINE) + 1 for x in many.storages)
    return max(2, min(_MOST_AHEAD, _LINES_AHEAD // lines))


@cache
def _one_by_one(many: Kernel, n_states: int) -> tuple[int, int]:
    """The blocks for a drift in the place of the parameter, and for a weight beside a drift."""
    drift = kernel(many.rule.plain or many.rule, (), many.real, many.real, many.s[:n_states])
    return blocks(drift).update_zero.address, blocks(many).update_real.address
