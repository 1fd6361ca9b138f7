"""PyTorch's compiled steps, as its tutorial on compiled optimizers shows.

They need a compiler, and are compiled for each optimizer and shape anew, which takes seconds.
"""

from __future__ import annotations

from torch_worker import Torch
from worker_protocol import serve


class CompiledTorch(Torch):  # type: ignore[misc]
    """The library, on ``threads`` threads."""

    compiles = True


if __name__ == "__main__":
    serve(CompiledTorch)
