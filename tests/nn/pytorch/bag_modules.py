"""Modules of bags, and what tests compare of them."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused

SIZES = [(9, 4), (30, 8)]
IDS = [torch.tensor([[1, 2, 2], [5, 8, 1]]), torch.tensor([[7, 7, 29], [0, 3, 7]])]


def modules_of(mode: str = "sum", dtype=torch.float64, kind=None, **options) -> Any:
    torch.manual_seed(0)
    if kind is torch.nn.Embedding:
        return torch.nn.ModuleList(kind(n, d, dtype=dtype) for n, d in SIZES)
    return torch.nn.ModuleList(
        torch.nn.EmbeddingBag(n, d, mode=mode, dtype=dtype, **options) for n, d in SIZES
    )


def pair(mode: str = "sum", dtype: Any = torch.float64) -> tuple[Any, Any, Any, Any]:
    """PyTorch's modules with its Adagrad, and bags that step in backward, from one start."""
    theirs = modules_of(mode, dtype)
    ours = fused.EmbeddingBags(copy.deepcopy(theirs))
    dense = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    optimizer = fused.Adagrad(ours.parameters(), lr=0.1)
    ours.update_in_backward(optimizer)
    return theirs, dense, ours, optimizer


def stepping(kind=fused.LazyAdam, tables=None, lr: float = 0.1, **options) -> tuple[Any, Any]:
    """Bags of float32, of these tables or those of `modules_of`, that step in backward."""
    bags = fused.EmbeddingBags(modules_of(dtype=torch.float32) if tables is None else tables)
    optimizer = kind(bags.parameters(), lr=lr, **options)
    bags.update_in_backward(optimizer)
    return bags, optimizer


def pooled(modules: Any, ids: Any, factors: Any = None) -> Any:
    each = factors or [None] * len(ids)
    return torch.cat(
        [m(i, per_sample_weights=f) for m, i, f in zip(modules, ids, each, strict=True)], dim=1
    )


def assert_close(one: Any, other: Any, **options: Any) -> None:
    __tracebackhide__ = True
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **options)


def before(bags: Any) -> list[Any]:
    return [w.detach().clone() for w in bags.parameters()]


def assert_as(bags: Any, tables: list[Any]) -> None:
    __tracebackhide__ = True
    for weight, table in zip(bags.parameters(), tables, strict=True):
        assert torch.equal(weight.detach(), table)
