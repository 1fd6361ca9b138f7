"""Indices of 32 bits to such of 64, on the device."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .backend import load_int32, store_int64
from .launch import on_elements


@cuda.jit
def widen_kernel(source, n, out):
    """``out[i] = source[i]``: of ``int32`` to ``int64``."""
    i = cuda.grid(1)
    if i < n:
        store_int64(out + 8 * i, load_int32(source + 4 * i))


def widen(source: int, n: int, out: int, stream: Any) -> None:
    """Enqueue writing ``n`` ``int32`` at an address to another one as ``int64``."""
    if n:
        on_elements(widen_kernel, n, stream)(source, n, out)
