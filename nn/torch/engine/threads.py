"""PyTorch's number of threads as a limit: steps take no more where the user has lowered it."""

from __future__ import annotations

import torch

from ....kernels.cpu.threads.parallel import share_openmp_threads

as_torch = share_openmp_threads(torch.get_num_threads, "torch.set_num_threads")
"""Decorator: loops use no more threads than PyTorch, if it has fewer than at import."""
