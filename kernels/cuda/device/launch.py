"""Grids of loops."""

from __future__ import annotations

from typing import Any

from .backend import GEOMETRY, launcher


def on_elements(loop: Any, n: int, stream: Any) -> Any:
    """A loop with a thread for each of ``n`` elements, one at least."""
    return launcher(loop, max(1, -(-n // GEOMETRY.rows)), GEOMETRY.rows, stream)


def tile_grid(width: int, length: int, threads: int) -> tuple[int, int, int]:
    """Threads of a block along tiles (a power of 2) and along rows, and the groups of tiles."""
    n_tiles = max(1, -(-width // length))
    across = min(threads, 1 << (n_tiles - 1).bit_length())
    return across, threads // across, -(-n_tiles // across)
