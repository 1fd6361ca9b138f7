"""What an optimizer keeps alive: parameters and states, and nothing of a step that is over."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

MEGABYTE = 2**20
N = 16 * MEGABYTE  # 64 MB: the system gets so much back at once


def used() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.mark.parametrize("kind", ["dense", "strided", "rows"])
def test_gradients_and_copies_are_let_go(kind: str) -> None:
    """Also those of the step that bound the tensors."""
    whole = torch.ones(N // 256, 512 if kind == "strided" else 256)
    parameter = torch.nn.Parameter(whole[:, ::2] if kind == "strided" else whole)
    optimizer = fused.SGD([parameter], lr=0.1)
    before = used()
    for _ in range(2):
        parameter.grad = _gradient(kind, parameter)
        optimizer.step()
        assert used() - before > 48 * MEGABYTE  # the gradient is there
        parameter.grad = None
        assert used() - before < 40 * MEGABYTE


def _gradient(kind: str, parameter: Any) -> Any:
    if kind != "rows":
        return torch.ones(parameter.shape)
    indices = torch.arange(len(parameter), dtype=torch.int64)[None]
    values = torch.ones(parameter.shape)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
