"""The place of epsilon that makes one optimizer of two."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

NAMES = ["Adam", "AdamW", "LazyAdam"]
SMALL = 1e-8  # gradients beside which epsilon matters


def parameters() -> tuple[Any, Any]:
    return torch.nn.Parameter(torch.zeros(6, 2)), torch.nn.Parameter(torch.zeros(3))


def gradients(table: Any, dense: Any, k: int) -> None:
    rows = torch.tensor([[k % 6, 3, 3]])
    values = SMALL * torch.arange(1.0, 7.0).reshape(3, 2)
    table.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=False)
    dense.grad = SMALL * torch.tensor([1.0, -2.0, k])


def of_two(name: str, package: Any) -> tuple[Any, Any]:
    table, dense = parameters()
    rest = {"Adam": "Adam", "AdamW": "AdamW", "LazyAdam": "Adam"}[name]
    optimizers = package.SparseAdam([table], lr=0.1), getattr(package, rest)([dense], lr=0.1)
    for k in range(5):
        gradients(table, dense, k)
        for optimizer in optimizers:
            optimizer.step()
    return table, dense


def of_one(name: str, *, eps_hat: bool) -> tuple[Any, Any]:
    table, dense = parameters()
    own = {"params": [table], "sparse": "touched", "weight_decay": 0.0, "eps_hat": eps_hat}
    optimizer = getattr(fused, name)([own, {"params": [dense]}], lr=0.1)
    for k in range(5):
        gradients(table, dense, k)
        optimizer.step()
    return table, dense


@pytest.mark.parametrize("name", NAMES)
def test_one_optimizer_has_the_numbers_of_two(name: str) -> None:
    found, of_torch = of_one(name, eps_hat=True), of_two(name, torch.optim)
    for mine, same, theirs in zip(found, of_two(name, fused), of_torch, strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=0.0)
    table, _ = of_one(name, eps_hat=False)
    assert (table / of_torch[0])[3].min() > 1.5  # what the other place of epsilon makes of it


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_option_like_others(name: str) -> None:
    cls = getattr(fused, name)
    table, _ = parameters()
    assert inspect.signature(cls).parameters["eps_hat"].default is False
    optimizer = cls([table], eps_hat=True)
    assert optimizer.param_groups[0]["eps_hat"] is True
    with pytest.raises(TypeError, match=f"{name}: eps_hat has a wrong type: expected a bool"):
        cls([table], eps_hat=1)
    with pytest.raises(TypeError, match="eps_hat has a wrong type"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "eps_hat": None})
    other = torch.optim.Adam([table])
    optimizer.load_state_dict(other.state_dict())  # which does not have it
    assert optimizer.param_groups[0]["eps_hat"] is True
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="eps_hat"):
        fused.SparseAdam([table], eps_hat=True)
