"""Bounds: plain loops with the reads and writes of a step, and next to no arithmetic.

A step cannot be faster than the memory it must move. How fast that is depends on the shape of
the loop, so each bound is written in several shapes, and the fastest of them, measured in the
same run and on the same arrays, is the bound:

* ``flat``: one ``prange`` over the elements;
* ``chunks of 16 Ki``, ``chunks of 64 Ki``: ``prange`` over chunks of so many elements;
* ``one part per thread``: ``prange`` over as many contiguous parts as there are threads.

The bound of a step with two passes is a loop that only reads, followed by such a loop.

The arithmetic adds ``zero * g``: it has to be done, since ``zero`` is an argument, but leaves
the arrays as they are, so a bound can run between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, prange

from ..kernels.cache import KernelCache, fingerprint
from .workers.worker_protocol import Job

_ZERO = np.float32(0.0)


def _compiled(function: Callable[..., None]) -> Any:
    compiled = njit(parallel=True, nogil=True)(function)
    compiled._cache = KernelCache(f"bound {fingerprint(function)}")
    return compiled


def _flat_12(w, g, zero):  # type: ignore[no-untyped-def]
    for i in prange(w.size):
        w[i] += zero * g[i]


def _flat_20(w, m, g, zero):  # type: ignore[no-untyped-def]
    for i in prange(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]


def _flat_24(w, m, v, zero):  # type: ignore[no-untyped-def]
    for i in prange(w.size):
        w[i] += zero
        m[i] += zero
        v[i] += zero


def _flat_28(w, m, v, g, zero):  # type: ignore[no-untyped-def]
    for i in prange(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]
        v[i] += zero * g[i]


def _flat_36(w, m, v, vhat, g, zero):  # type: ignore[no-untyped-def]
    for i in prange(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]
        v[i] += zero * g[i]
        vhat[i] += zero * g[i]


# The same loops on slices: a chunk is one of these. Numba vectorises a slice where it would
# not vectorise the same loop from ``start`` to ``stop``.


@njit(nogil=True)
def _span_12(w, g, zero):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] += zero * g[i]


@njit(nogil=True)
def _span_20(w, m, g, zero):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]


@njit(nogil=True)
def _span_24(w, m, v, zero):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] += zero
        m[i] += zero
        v[i] += zero


@njit(nogil=True)
def _span_28(w, m, v, g, zero):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]
        v[i] += zero * g[i]


@njit(nogil=True)
def _span_36(w, m, v, vhat, g, zero):  # type: ignore[no-untyped-def]
    for i in range(w.size):
        w[i] += zero * g[i]
        m[i] += zero * g[i]
        v[i] += zero * g[i]
        vhat[i] += zero * g[i]


def _chunks_12(w, g, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((w.size + chunk - 1) // chunk):
        a, b = c * chunk, min((c + 1) * chunk, w.size)
        _span_12(w[a:b], g[a:b], zero)


def _chunks_20(w, m, g, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((w.size + chunk - 1) // chunk):
        a, b = c * chunk, min((c + 1) * chunk, w.size)
        _span_20(w[a:b], m[a:b], g[a:b], zero)


def _chunks_24(w, m, v, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((w.size + chunk - 1) // chunk):
        a, b = c * chunk, min((c + 1) * chunk, w.size)
        _span_24(w[a:b], m[a:b], v[a:b], zero)


def _chunks_28(w, m, v, g, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((w.size + chunk - 1) // chunk):
        a, b = c * chunk, min((c + 1) * chunk, w.size)
        _span_28(w[a:b], m[a:b], v[a:b], g[a:b], zero)


def _chunks_36(w, m, v, vhat, g, zero, chunk):  # type: ignore[no-untyped-def]
    for c in prange((w.size + chunk - 1) // chunk):
        a, b = c * chunk, min((c + 1) * chunk, w.size)
        _span_36(w[a:b], m[a:b], v[a:b], vhat[a:b], g[a:b], zero)


# Loops that only read. "reassoc" lets them add in packed registers.


@njit(nogil=True, fastmath={"reassoc"})
def _read_1(a):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(a.size):
        total += a[i]
    return total


@njit(nogil=True, fastmath={"reassoc"})
def _read_2(a, b):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(a.size):
        total += a[i] + b[i]
    return total


@njit(nogil=True, fastmath={"reassoc"})
def _read_4(a, b, c, d):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(a.size):
        total += (a[i] + b[i]) + (c[i] + d[i])
    return total


def _reads_1(a, sums, chunk):  # type: ignore[no-untyped-def]
    for c in prange((a.size + chunk - 1) // chunk):
        sums[c] = _read_1(a[c * chunk : (c + 1) * chunk])


def _reads_2(a, b, sums, chunk):  # type: ignore[no-untyped-def]
    for k in prange((a.size + chunk - 1) // chunk):
        i, j = k * chunk, min((k + 1) * chunk, a.size)
        sums[k] = _read_2(a[i:j], b[i:j])


def _reads_4(a, b, c, d, sums, chunk):  # type: ignore[no-untyped-def]
    for k in prange((a.size + chunk - 1) // chunk):
        i, j = k * chunk, min((k + 1) * chunk, a.size)
        sums[k] = _read_4(a[i:j], b[i:j], c[i:j], d[i:j])


# By bytes of an element.
_FLAT = {
    12: _compiled(_flat_12),
    20: _compiled(_flat_20),
    24: _compiled(_flat_24),
    28: _compiled(_flat_28),
    36: _compiled(_flat_36),
}
_CHUNKS = {
    12: _compiled(_chunks_12),
    20: _compiled(_chunks_20),
    24: _compiled(_chunks_24),
    28: _compiled(_chunks_28),
    36: _compiled(_chunks_36),
}
_READS = {1: _compiled(_reads_1), 2: _compiled(_reads_2), 4: _compiled(_reads_4)}


@dataclass(frozen=True)
class Bound:
    """What a step must move: arrays, all float32 and of one size.

    Args:
        variables: read and written.
        gradient: read.
        passes: for each pass before, the arrays that it reads.
    """

    variables: tuple[np.ndarray, ...] = ()
    gradient: np.ndarray | None = None
    passes: tuple[tuple[np.ndarray, ...], ...] = ()

    @property
    def bytes(self) -> int:
        """What the loops move."""
        gradients = () if self.gradient is None else (self.gradient,)
        read = sum((*self.passes, gradients), ())
        return sum(2 * a.nbytes for a in self.variables) + sum(a.nbytes for a in read)


def jobs(bound: Bound, threads: int) -> dict[str, Job]:
    """One job per shape of the loop; no value changes.

    Args:
        bound: the arrays.
        threads: the number of parts of the last shape.
    """
    flat = [a.reshape(-1) for a in bound.variables]
    if bound.gradient is not None:
        flat.append(bound.gradient.reshape(-1))
    width = 8 * len(bound.variables) + (4 if bound.gradient is not None else 0)
    passes = [[a.reshape(-1) for a in arrays] for arrays in bound.passes]
    n = flat[0].size
    chunks = {
        "chunks of 16 Ki": 16384,
        "chunks of 64 Ki": 65536,
        "one part per thread": -(-max(n, 1) // threads),
    }

    def chunked(chunk: int) -> Job:
        sums = np.zeros(-(-n // chunk), np.float32)

        def step() -> None:
            for arrays in passes:
                _READS[len(arrays)](*arrays, sums, chunk)
            _CHUNKS[width](*flat, _ZERO, chunk)

        return Job(step)

    shapes = {name: chunked(size) for name, size in chunks.items()}
    if passes:
        return shapes
    return {"flat": Job(lambda: _FLAT[width](*flat, _ZERO)), **shapes}
