"""Bounds: plain loops with the reads and writes of a step, and next to no arithmetic.

A step cannot be faster than the memory it must move. How fast that is depends on the shape of
the loop, so each bound is written in several shapes, and the fastest of them, measured in the
same run and on the same arrays, is the bound:

* ``flat``: one ``prange`` over the elements;
* ``chunks of 16 Ki``, ``chunks of 64 Ki``: ``prange`` over chunks of so many elements;
* ``one part per thread``: ``prange`` over as many contiguous parts as there are threads.

The arithmetic adds ``zero * g``: it has to be done, since ``zero`` is an argument, but leaves
the arrays as they are, so a bound can run between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# By number of arrays: three variables; three and a gradient; four and a gradient.
_FLAT = {3: _compiled(_flat_24), 4: _compiled(_flat_28), 5: _compiled(_flat_36)}
_CHUNKS = {3: _compiled(_chunks_24), 4: _compiled(_chunks_28), 5: _compiled(_chunks_36)}


def jobs(arrays: Sequence[np.ndarray], threads: int) -> dict[str, Job]:
    """One job per shape of the loop over these arrays.

    Args:
        arrays: float32, of one size: w, m, v; or w, m, v and gradient; or w, m, v, vhat and
            gradient. No value changes.
        threads: the number of parts of the last shape.
    """
    flat = [array.reshape(-1) for array in arrays]
    chunks = {
        "chunks of 16 Ki": 16384,
        "chunks of 64 Ki": 65536,
        "one part per thread": -(-max(flat[0].size, 1) // threads),
    }

    def chunked(size: int) -> Job:
        return Job(lambda: _CHUNKS[len(flat)](*flat, _ZERO, size))

    whole = Job(lambda: _FLAT[len(flat)](*flat, _ZERO))
    return {"flat": whole, **{name: chunked(size) for name, size in chunks.items()}}
