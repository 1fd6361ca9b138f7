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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from ..kernels.cpu.compiler.lines import prefetch
from .workers.worker_protocol import Job

Arrays = tuple[np.ndarray, ...]
_SERIAL_BELOW = 2**20  # bytes
_AHEAD = 8  # rows that are fetched before their turn


class Shape(NamedTuple):
    """How a loop is cut: into chunks of so many of ``n`` elements, in parallel or not."""

    chunk: Callable[[int], int]
    parallel: bool = True

    def rows(self, count: int, width: int) -> int:
        """How many rows come to a chunk."""
        return max(1, self.chunk(max(1, count * width)) // max(1, width))


@dataclass(frozen=True)
class Stream:
    """One pass over arrays of one length."""

    updated: Arrays = ()  # read and written
    read: Arrays = ()  # read
    written: Arrays = ()  # written

    @property
    def bytes(self) -> int:
        """Bytes that the loop moves."""
        return sum(a.nbytes for a in (*self.updated, *self.updated, *self.read, *self.written))

    def run(self, shape: Shape) -> Callable[[], None]:
        """The pass in a shape."""
        # What is there anyway; but one array that is two to the compiler would not be packed.
        read = self.read or (self.updated[:1] if len(self.updated) > 1 else ())
        arrays = tuple(a.reshape(-1) for a in _bits((*self.updated, *read, *self.written)))
        chunk, zero = shape.chunk(max(1, arrays[0].size)), _zero(arrays)
        results = np.zeros(-(-arrays[0].size // chunk), arrays[0].dtype)
        loop = _compiled(_stream(len(self.updated), len(read), len(self.written)), shape.parallel)
        return lambda: loop(arrays, zero, chunk, results)


@dataclass(frozen=True)
class Rows:
    """One pass over rows scattered over tables ``[N, D]``."""

    rows: np.ndarray  # int64: which rows, each once
    updated: Arrays  # read and written at these rows

    @property
    def bytes(self) -> int:
        """Bytes that the loop moves, without the list of rows, which is no part of the task."""
        return sum(2 * self.rows.size * a.strides[0] for a in self.updated)

    def run(self, shape: Shape) -> Callable[[], None]:
        """The pass in a shape."""
        chunk = shape.rows(self.rows.size, self.updated[0].shape[1])
        tables, zero = _bits(self.updated), _zero(self.updated)
        loop = _compiled(_over_rows, shape.parallel)
        return lambda: loop(tables, self.rows, zero, chunk)


@dataclass(frozen=True)
class Gather:
    """Rows of a table, copied side by side, or as many in turn put together as come to a bag."""

    indices: np.ndarray  # int64 ``[B]``
    table: np.ndarray  # ``[N, D]``
    out: np.ndarray  # ``[bags, D]``, all bags being of one size

    @property
    def bytes(self) -> int:
        """Bytes that the loop moves: rows that come again are read from the cache."""
        different = np.unique(self.indices).size
        return self.indices.nbytes + different * self.table.strides[0] + self.out.nbytes

    def run(self, shape: Shape) -> Callable[[], None]:
        """The pass in a shape."""
        chunk = shape.rows(self.indices.size, self.out.shape[1])
        (table, out), loop = _bits((self.table, self.out)), _compiled(_gathered, shape.parallel)
        bag = self.indices.size // max(1, len(out))
        return lambda: loop(table, self.indices, out, max(1, chunk // max(1, bag)), bag)


Pass = Stream | Rows | Gather


def jobs(passes: Sequence[Pass], threads: int) -> dict[str, Job]:
    """One job per shape of the loops; no updated value changes.

    Args:
        passes: what a step must move, in order.
        threads: the number of parts of one of the shapes.
    """
    shapes = {
        "chunks of 4 Ki": Shape(lambda _: 2**12),
        "chunks of 16 Ki": Shape(lambda _: 2**14),
        "chunks of 64 Ki": Shape(lambda _: 2**16),
        "one part per thread": Shape(lambda n: -(-n // threads)),
    }
    if sum(p.bytes for p in passes) < _SERIAL_BELOW:
        shapes["serial"] = Shape(lambda n: n, parallel=False)

    def job(shape: Shape) -> Job:
        runs = [p.run(shape) for p in passes]

        def step() -> None:
            for run in runs:
                run()

        return Job(step)

    return {name: job(shape) for name, shape in shapes.items()}


def _bits(arrays: Arrays) -> Arrays:
    return tuple(a.view(f"u{a.itemsize}") for a in arrays)


def _zero(arrays: Arrays) -> Any:
    return np.dtype(f"u{arrays[0].itemsize}").type(0)


# -- the loops ------------------------------------------------------------------------------------


@cache
def _compiled(function: Callable[..., None], parallel: bool) -> Any:
    return njit(parallel=parallel, nogil=True)(function)


@cache
def _stream(updated: int, read: int, written: int) -> Callable[..., None]:
    """The loop over chunks of so many arrays of each kind.

    Its text is written here, with a name for each array and a slice of each: Numba vectorises no
    loop over a tuple of arrays, nor the same one from ``start`` to ``stop``. Of what is only read
    the result shows that something was done.
    """
    names = "abcdefgh"[: updated + read + written]
    elements = [f"{name}[i]" for name in names]
    operands = elements[updated : updated + read]
    if updated or written:
        masked = f"({' ^ '.join(operands)}) & zero" if read else "zero"
        body = [
            f"masked = {masked}",
            *(f"{element} ^= masked" for element in elements[:updated]),
            *(f"{element} = masked" for element in elements[updated + read :]),
        ]
    else:
        body = [f"total |= {' | '.join(operands)}"]
    lines = [
        "def span(arrays, start, stop, zero):",
        *(f"    {name} = arrays[{k}][start:stop]" for k, name in enumerate(names)),
        "    total = zero",
        "    for i in range(a.size):",
        *(f"        {line}" for line in body),
        "    return total",
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    span = njit(nogil=True)(scope["span"])

    def over_chunks(arrays, zero, chunk, results):  # type: ignore[no-untyped-def]
        n = arrays[0].size
        for c in prange((n + chunk - 1) // chunk):
            results[c] = span(arrays, c * chunk, min((c + 1) * chunk, n), zero)

    return over_chunks


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


def _gathered(table, indices, out, chunk, bag):  # type: ignore[no-untyped-def]
    for c in prange((len(out) + chunk - 1) // chunk):
        for b in range(c * chunk, min((c + 1) * chunk, len(out))):
            target = out[b]
            for k in range(b * bag, (b + 1) * bag):
                _fetch(table, indices, k + _AHEAD)
                source = table[indices[k]]
                if k == b * bag:
                    for d in range(source.size):
                        target[d] = source[d]
                else:
                    for d in range(source.size):
                        target[d] |= source[d]
