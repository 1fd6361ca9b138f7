"""Launching a loop, without Numba's advice on the size of grids."""

from __future__ import annotations

import threading
from typing import Any

from numba import config

from .backend import launcher

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


def tile_grid(n_tiles: int, threads: int) -> tuple[int, int, int]:
    """Threads of a block along the tiles of a row and along rows, and the groups of tiles.

    The first is a power of 2.
    """
    tiles = min(threads, 1 << (max(1, n_tiles) - 1).bit_length())
    return tiles, threads // tiles, -(-max(1, n_tiles) // tiles)
