"""Bounds: plain loops with the reads and writes of a step, and next to no arithmetic.

A step cannot be faster than the memory it must move. How fast that is depends on the shape of
the loop, so each bound is run in several shapes, and the fastest of them, measured in the same
run and interleaved with the step, is the bound:

* ``chunks of 4 Ki``, ``16 Ki``, ``64 Ki``: ``prange`` over chunks of so many elements;
* ``one part per thread``: ``prange`` over as many contiguous parts as there are threads;
* ``serial``, for less than 1 MB: one thread, without the start of a parallel loop.

Each pass of a step is a loop of its own. The loops see arrays as unsigned integers of the same
width and compute ``w ^= g & zero``: it has to be done, since ``zero`` is an argument, but leaves
the arrays as they are, so a bound can run between two steps. Rows that lie far apart are fetched
before their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from ..kernels.cpu.compiler.lines import prefetch
from .workers.worker_protocol import Job

Arrays = tuple[np.ndarray, ...]
_SERIAL_BELOW = 2**20  # bytes
_AHEAD = 8  # rows that are fetched before their turn


@dataclass(frozen=True)
class Stream:
    """One pass over arrays of one length.

    Args:
        updated: read and written.
        read: read.
        written: written.
    """

    updated: Arrays = ()
    read: Arrays = ()
    written: Arrays = ()

    @property
    def bytes(self) -> int:
        """What the loop moves."""
        return sum(a.nbytes for a in (*self.updated, *self.updated, *self.read, *self.written))


@dataclass(frozen=True)
class Rows:
    """One pass over rows scattered over tables ``[N, D]``.

    Args:
        rows: int64: which rows, each once.
        updated: read and written at these rows.
    """

    rows: np.ndarray
    updated: Arrays

    @property
    def bytes(self) -> int:
        """What the loop moves, without the list of rows, which is no part of the task."""
        return sum(2 * self.rows.size * a.strides[0] for a in self.updated)


@dataclass(frozen=True)
class Gather:
    """Rows of a table, copied side by side.

    Args:
        indices: int64 ``[B]``.
        table: ``[N, D]``.
        out: ``[B, D]``.
    """

    indices: np.ndarray
    table: np.ndarray
    out: np.ndarray

    @property
    def bytes(self) -> int:
        """What the loop moves: rows that come again are read from the cache."""
        different = np.unique(self.indices).size
        return self.indices.nbytes + different * self.table.strides[0] + self.out.nbytes


Pass = Stream | Rows | Gather


@dataclass(frozen=True)
class Bound:
    """What a step must move: its passes over memory, in order."""

    passes: tuple[Pass, ...] = ()

    @property
    def bytes(self) -> int:
        """What the loops move."""
        return sum(p.bytes for p in self.passes)


# Loops over a span of the arrays, by how many are (updated, read, written). Slices, because
# Numba vectorises them where it would not vectorise the same loop from ``start`` to ``stop``.


@njit(nogil=True)
def _update_1_alone(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a = arrays[0][start:stop]
    for i in range(a.size):
        a[i] ^= zero


@njit(nogil=True)
def _update_1(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, g = arrays[0][start:stop], arrays[1][start:stop]
    for i in range(a.size):
        a[i] ^= g[i] & zero


@njit(nogil=True)
def _update_2(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, g = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    for i in range(a.size):
        masked = g[i] & zero
        a[i] ^= masked
        b[i] ^= masked


@njit(nogil=True)
def _update_3(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, c = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    g = arrays[3][start:stop]
    for i in range(a.size):
        masked = g[i] & zero
        a[i] ^= masked
        b[i] ^= masked
        c[i] ^= masked


@njit(nogil=True)
def _update_4(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, c = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    d, g = arrays[3][start:stop], arrays[4][start:stop]
    for i in range(a.size):
        masked = g[i] & zero
        a[i] ^= masked
        b[i] ^= masked
        c[i] ^= masked
        d[i] ^= masked


@njit(nogil=True)
def _update_4_read_2(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, c = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    d, g, h = arrays[3][start:stop], arrays[4][start:stop], arrays[5][start:stop]
    for i in range(a.size):
        masked = (g[i] ^ h[i]) & zero
        a[i] ^= masked
        b[i] ^= masked
        c[i] ^= masked
        d[i] ^= masked


@njit(nogil=True)
def _update_5(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, c = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    d, e, g = arrays[3][start:stop], arrays[4][start:stop], arrays[5][start:stop]
    for i in range(a.size):
        masked = g[i] & zero
        a[i] ^= masked
        b[i] ^= masked
        c[i] ^= masked
        d[i] ^= masked
        e[i] ^= masked


@njit(nogil=True)
def _update_2_write_1(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, g = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    out = arrays[3][start:stop]
    for i in range(a.size):
        masked = g[i] & zero
        a[i] ^= masked
        b[i] ^= masked
        out[i] = masked


@njit(nogil=True)
def _write_1(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    g, out = arrays[0][start:stop], arrays[1][start:stop]
    for i in range(g.size):
        out[i] = g[i] & zero


@njit(nogil=True)
def _read_2_write_1(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, g, out = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    for i in range(g.size):
        out[i] = (a[i] ^ g[i]) & zero


@njit(nogil=True)
def _read_1(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, total = arrays[0][start:stop], zero
    for i in range(a.size):
        total |= a[i]
    return total


@njit(nogil=True)
def _read_2(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, total = arrays[0][start:stop], arrays[1][start:stop], zero
    for i in range(a.size):
        total |= a[i] | b[i]
    return total


@njit(nogil=True)
def _read_4(arrays, start, stop, zero):  # type: ignore[no-untyped-def]
    a, b, c = arrays[0][start:stop], arrays[1][start:stop], arrays[2][start:stop]
    d, total = arrays[3][start:stop], zero
    for i in range(a.size):
        total |= (a[i] | b[i]) | (c[i] | d[i])
    return total


class Loop(NamedTuple):
    """One loop, compiled in two ways."""

    parallel: Any
    serial: Any


def _loop(span: Any) -> Loop:
    """``span`` over chunks of arrays."""

    def over_chunks(arrays, zero, chunk):  # type: ignore[no-untyped-def]
        n = arrays[0].size
        for c in prange((n + chunk - 1) // chunk):
            span(arrays, c * chunk, min((c + 1) * chunk, n), zero)

    return _compiled(over_chunks)


def _sum_loop(span: Any) -> Loop:
    """Likewise where only the result shows that something was done."""

    def over_chunks(arrays, zero, chunk, results):  # type: ignore[no-untyped-def]
        n = arrays[0].size
        for c in prange((n + chunk - 1) // chunk):
            results[c] = span(arrays, c * chunk, min((c + 1) * chunk, n), zero)

    return _compiled(over_chunks)


@njit(nogil=True)
def _fetch(table, rows, k):  # type: ignore[no-untyped-def]
    if k < rows.size:
        row = table[rows[k]]
        prefetch(row.ctypes.data, row.nbytes)


def _over_rows(tables, rows, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((rows.size + chunk - 1) // chunk):
        for k in range(c * chunk, min((c + 1) * chunk, rows.size)):
            for table in tables:
                _fetch(table, rows, k + _AHEAD)
                values = table[rows[k]]
                for d in range(values.size):
                    values[d] ^= zero


def _gathered(table, indices, out, chunk):  # type: ignore[no-untyped-def]
    for c in prange((indices.size + chunk - 1) // chunk):
        for b in range(c * chunk, min((c + 1) * chunk, indices.size)):
            _fetch(table, indices, b + _AHEAD)
            source, target = table[indices[b]], out[b]
            for d in range(source.size):
                target[d] = source[d]


def _compiled(function: Callable[..., None]) -> Loop:
    return Loop(njit(parallel=True, nogil=True)(function), njit(nogil=True)(function))


_STREAMS = {
    (1, 0, 0): _loop(_update_1_alone),
    (1, 1, 0): _loop(_update_1),
    (2, 1, 0): _loop(_update_2),
    (3, 1, 0): _loop(_update_3),
    (4, 1, 0): _loop(_update_4),
    (4, 2, 0): _loop(_update_4_read_2),
    (5, 1, 0): _loop(_update_5),
    (2, 1, 1): _loop(_update_2_write_1),
    (0, 1, 1): _loop(_write_1),
    (0, 2, 1): _loop(_read_2_write_1),
}
_READS = {1: _sum_loop(_read_1), 2: _sum_loop(_read_2), 4: _sum_loop(_read_4)}
_ROWS, _GATHER = _compiled(_over_rows), _compiled(_gathered)


class Shape(NamedTuple):
    """How a loop is cut: into chunks of so many of ``n`` elements, in parallel or not."""

    chunk: Callable[[int], int]
    parallel: bool = True

    def of(self, loop: Loop) -> Any:
        """The function to call."""
        return loop.parallel if self.parallel else loop.serial


def jobs(bound: Bound, threads: int) -> dict[str, Job]:
    """One job per shape of the loops; no updated value changes.

    Args:
        bound: the passes.
        threads: the number of parts of one of the shapes.
    """
    shapes = {
        "chunks of 4 Ki": Shape(lambda _: 2**12),
        "chunks of 16 Ki": Shape(lambda _: 2**14),
        "chunks of 64 Ki": Shape(lambda _: 2**16),
        "one part per thread": Shape(lambda n: -(-n // threads)),
    }
    if bound.bytes < _SERIAL_BELOW:
        shapes["serial"] = Shape(lambda n: n, parallel=False)
    return {
        name: Job(_in_turn([_run(p, shape) for p in bound.passes]))
        for name, shape in shapes.items()
    }


def _in_turn(runs: list[Callable[[], None]]) -> Callable[[], None]:
    def step() -> None:
        for run in runs:
            run()

    return step


def _run(p: Pass, shape: Shape) -> Callable[[], None]:
    if isinstance(p, Stream):
        return _stream(p, shape)
    if isinstance(p, Rows):
        chunk = _row_chunk(shape, p.rows.size, p.updated[0].shape[1])
        tables, zero, loop = _bits(p.updated), _zero(p.updated), shape.of(_ROWS)
        return lambda: loop(tables, p.rows, zero, chunk)
    chunk = _row_chunk(shape, *p.out.shape)
    (table, out), loop = _bits((p.table, p.out)), shape.of(_GATHER)
    return lambda: loop(table, p.indices, out, chunk)


def _row_chunk(shape: Shape, rows: int, width: int) -> int:
    return max(1, shape.chunk(max(1, rows * width)) // max(1, width))


def _stream(p: Stream, shape: Shape) -> Callable[[], None]:
    # What is there anyway; but one array that is two to the compiler would not be packed.
    read = p.read or (p.updated[:1] if len(p.updated) > 1 else ())
    form = len(p.updated), len(read), len(p.written)
    arrays = tuple(a.reshape(-1) for a in _bits((*p.updated, *read, *p.written)))
    chunk, zero = shape.chunk(max(1, arrays[0].size)), _zero(arrays)
    if p.updated or p.written:
        loop = shape.of(_STREAMS[form])
        return lambda: loop(arrays, zero, chunk)
    results = np.zeros(-(-arrays[0].size // chunk), arrays[0].dtype)
    summing = shape.of(_READS[len(arrays)])
    return lambda: summing(arrays, zero, chunk, results)


def _bits(arrays: Arrays) -> Arrays:
    return tuple(a.view(f"u{a.itemsize}") for a in arrays)


def _zero(arrays: Arrays) -> Any:
    return np.dtype(f"u{arrays[0].itemsize}").type(0)
