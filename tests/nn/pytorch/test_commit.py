"""Beside parameters a step writes counts, single numbers, and what autograd looks at."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

from torch_training import everything  # noqa: E402

NUMBERS = {"NAdam": ("step", "mu_product"), "ASGD": ("step", "eta", "mu"), "Adam": ("step",)}


def stepped(name: str, **options: Any) -> tuple[Any, Any, Any]:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(fused, name)([parameter], **options)
    parameter.grad = torch.ones(4)
    optimizer.step()
    return parameter, optimizer, optimizer.state[parameter]


def require_gradients(x: Any) -> Any:
    return x.detach().clone().requires_grad_()


def infer(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


def in_one_dimension(x: Any) -> Any:
    return x.reshape(1).clone()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "change", [require_gradients, infer, in_one_dimension, torch.Tensor.double]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_kind(name: str, change: Any, grad: bool) -> None:
    _, optimizer, state = stepped(name)
    twin = copy.deepcopy(optimizer)
    (other,) = twin.state.values()
    for number in NUMBERS[name]:
        state[number] = change(state[number])
    for each in (optimizer, twin):
        each.param_groups[0]["params"][0].grad = torch.full((4,), 0.5)
        with torch.set_grad_enabled(grad):
            each.step()
            each.step()
    for role, x in other.items():
        torch.testing.assert_close(state[role].detach().reshape(x.shape), x, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_other_dtypes(dtype: Any) -> None:
    """PyTorch gives those that it loads the dtype of the parameter."""
    _, optimizer, state = stepped("NAdam")
    before = state["mu_product"].item()
    state["mu_product"] = state["mu_product"].to(dtype)
    state["step"] = torch.tensor(1, dtype=torch.int64)
    optimizer.step()
    assert state["mu_product"].dtype == dtype
    assert state["mu_product"].item() < before
    assert state["step"].item() == 2


@pytest.mark.parametrize("name", ["mu_product", "step"])
@pytest.mark.parametrize(
    "value", [None, "1", torch.ones(2), torch.ones(0), torch.ones((), dtype=bool)]
)
def test_numbers_that_are_none(name: str, value: Any) -> None:
    parameter, optimizer, state = stepped("NAdam")
    state[name] = value
    before = parameter.detach().clone()
    text = "lacks" if value is None else f"state '{name}' of parameter 0 is no number"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert torch.equal(parameter, before)


def test_counts_of_python() -> None:
    """Of `SparseAdam` they are ints, or what was put there."""
    table = torch.nn.Parameter(torch.ones(5, 2))
    optimizer = fused.SparseAdam([table])
    table.grad = torch.ones(5, 2).to_sparse(1)
    for k in range(6):
        optimizer.step()
        state = optimizer.state[table]
        assert float(state["step"]) == k + 1
        if k == 2:
            state["step"] = torch.tensor(3.0)
        if k == 4:
            state["step"] = 5.0


@pytest.mark.parametrize("how", ["plain", "strided", "rows"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adafactor"])
def test_autograd_sees_that_states_have_changed(name: str, how: str) -> None:
    if how == "rows" and name == "Adafactor":
        pytest.skip("takes none")
    data = torch.ones(4, 6)[:, ::2] if how == "strided" else torch.ones(4, 3)
    parameter = torch.nn.Parameter(data)
    options = {"momentum": 0.9} if name == "SGD" else {}
    options |= {"sparse": "all"} if how == "rows" else {}
    optimizer = getattr(fused, name)([parameter], **options)
    optimizer.zero_grad()
    for _ in range(3):
        parameter.grad = torch.ones(4, 3).to_sparse(1) if how == "rows" else torch.ones(4, 3)
        tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
        before = [t._version for t in tensors]
        optimizer.step()
        assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    for saved in optimizer.state[parameter].values():
        weight = torch.ones(saved.shape, requires_grad=True)
        loss = (weight * saved).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_loaded_state_that_lacks_some() -> None:
    parameter, optimizer, _ = stepped("Adam")
    for missing in ("exp_avg", "exp_avg_sq", "step"):
        saved = copy.deepcopy(optimizer.state_dict())
        fresh = fused.Adam([parameter])
        if missing == "step":  # PyTorch looks for it at once
            fresh.load_state_dict(saved)
            del fresh.state[parameter][missing]
        else:
            del saved["state"][0][missing]
            fresh.load_state_dict(saved)
        before = everything(fresh)
        with pytest.raises(RuntimeError, match=f"state of parameter 0 lacks '{missing}': expected"):
            fresh.step()
        assert all(map(torch.equal, everything(fresh), before))
    optimizer.param_groups[0]["amsgrad"] = True  # as in PyTorch, where it is a KeyError
    with pytest.raises(RuntimeError, match="lacks 'max_exp_avg_sq'"):
        optimizer.step()


def test_a_momentum_that_begins_later() -> None:
    """As in PyTorch it begins with the gradient."""
    parameter, optimizer, _ = stepped("SGD", lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones(4))


def test_inference_tensors() -> None:
    """They have no count of changes."""
    with torch.inference_mode():
        parameter = torch.ones(6)[::2]
        plain = torch.ones(3)
        plain.grad, parameter.grad = torch.ones(3), torch.ones(3)
        optimizer = fused.SGD([plain, parameter], lr=1.0)
    for _ in range(3):
        optimizer.step()
    assert plain.tolist() == parameter.tolist() == [-2.0] * 3
