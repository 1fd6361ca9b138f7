"""Launching a loop, without Numba's advice on the size of grids."""

from __future__ import annotations

import threading
from typing import Any

from numba import config

from .backend import GEOMETRY, launcher

_lock = threading.Lock()


def on_grid(loop: Any, grid: Any, block: Any, stream: Any) -> Any:
    """``loop[grid, block, stream]``, to be called with the arguments of the loop.

    A grid of few blocks is right for a few small tensors, but Numba would warn of it. The setting
    is the process's, so it is changed for the moment that counts only.
    """
    with _lock:
        before = config.CUDA_LOW_OCCUPANCY_WARNINGS
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        try:
            return launcher(loop, grid, block, stream)
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


def on_elements(loop: Any, n: int, stream: Any) -> Any:
    """A loop with a thread for each of ``n`` elements, one at least."""
    return on_grid(loop, max(1, -(-n // GEOMETRY.rows)), GEOMETRY.rows, stream)


def tile_grid(width: int, length: int, threads: int) -> tuple[int, int, int]:
    """Threads of a block along tiles (a power of 2) and along rows, and the groups of tiles."""
    n_tiles = max(1, -(-width // length))
    across = min(threads, 1 << (n_tiles - 1).bit_length())
    return across, threads // across, -(-n_tiles // across)
