"""What users exchange between two steps, and what a step may not take over from the one before."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from fusestep.nn import torch as fused  # noqa: E402

from torch_training import DENSE, assert_close, assert_equal_models, net, train  # noqa: E402


def options_of(name: str) -> dict[str, Any]:
    """With states."""
    return {"momentum": 0.9} if name == "SGD" else {}


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("name", DENSE)
def test_a_parameter_exchanged_in_its_group(name: str, grows: bool) -> None:
    """As in Gaussian splatting: points are added or removed, and their states with them."""
    results = []
    for package in (fused, torch.optim):
        torch.manual_seed(2)
        points = Parameter(torch.randn(6, 3, dtype=torch.float64))
        group = {"params": [points], "name": "xyz"}
        optimizer = getattr(package, name)([group], lr=0.01, **options_of(name))
        for step in range(8):
            if step == 4:
                group = optimizer.param_groups[0]
                old = group["params"][0]
                state = optimizer.state.pop(old)
                rows = [0, 1, 2, 3, 4, 5, 5, 1] if grows else [0, 2, 5]
                new = Parameter(old.detach()[rows])
                for role, tensor in state.items():
                    if isinstance(tensor, torch.Tensor) and tensor.shape == old.shape:
                        state[role] = tensor[rows]
                if name != "Adafactor":  # its states are of the whole; it begins anew
                    optimizer.state[new] = state
                group["params"][0] = points = new
            points.grad = torch.cos(points.detach() * (step + 1))
            optimizer.step()
        results.append([points])
        assert len(optimizer.state) == 1
    assert_close(*results)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
def test_groups_of_both_weight_decays(name: str) -> None:
    models = net(), net()
    for model, package in zip(models, (fused, torch.optim), strict=True):
        last = {"params": model[2].parameters(), "decoupled_weight_decay": True}
        groups = [{"params": model[0].parameters()}, last]
        train(model, getattr(package, name)(groups, lr=0.05, weight_decay=0.1), range(4))
    assert_equal_models(*models)


# What a step takes over from the one before, where it may not


def ones(*shape: int, n: int = 1) -> list[Any]:
    made = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(n)]
    for parameter in made:
        parameter.grad = torch.ones(shape)
    return made


def test_a_parameter_that_goes_to_another_group() -> None:
    first, second, third = ones(3, n=3)
    groups = [{"params": [first, second], "lr": 0.0}, {"params": [third], "lr": 1.0}]
    optimizer = fused.SGD(groups, lr=1.0)
    optimizer.step()
    optimizer.step(param=second)
    one, other = optimizer.param_groups
    other["params"].insert(0, one["params"].pop())
    optimizer.step()
    assert second.tolist() == [-1.0] * 3
    optimizer.step(param=second)
    assert second.tolist() == [-2.0] * 3
    other["params"].pop(0)
    with pytest.raises(ValueError, match="foreign"):
        optimizer.step(param=second)


def test_a_parameter_that_is_turned_in_its_place() -> None:
    (parameter,) = ones(2, 2)
    optimizer = fused.SGD([parameter], lr=1.0)
    parameter.grad.zero_()
    optimizer.step()
    parameter.data = parameter.data.t()
    parameter.grad.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    optimizer.step()
    assert parameter.tolist() == [[0.0, -1.0], [0.0, 0.0]]


def test_gradients_that_come_and_go_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = ones(3, n=4)
    optimizer = fused.Adam(parameters)
    bound = []
    make = type(optimizer)._entry
    monkeypatch.setattr(type(optimizer), "_entry", lambda *a: bound.append(1) or make(*a))
    for k in range(8):
        parameters[0].grad = torch.ones(3) if k % 2 else None
        optimizer.step()
    assert sum(bound) == 4
    assert [optimizer.state[p]["step"].item() for p in parameters] == [4.0, 8.0, 8.0, 8.0]


def test_clipping_again_goes_on_from_there() -> None:
    (parameter,) = ones(1)
    parameter.grad = torch.tensor([100.0])
    optimizer = fused.SGD([parameter], lr=1.0)
    assert fused.clip_grad_norm_([parameter], 1.0, optimizer=optimizer).item() == 100.0
    again = fused.clip_grad_norm_([parameter], float("inf"), optimizer=[optimizer])
    assert again.item() == pytest.approx(1.0)
    assert fused.clip_grad_norm_([parameter], 0.5, optimizer=optimizer).item() == pytest.approx(1.0)
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.5)


def test_state_dtype_of_states_that_are_made_at_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = fused.Adagrad([parameter], state_dtype=torch.float32)
    assert optimizer.state[parameter]["sum"].dtype == torch.float32


def test_skip_nonfinite_is_of_the_optimizer() -> None:
    (parameter,) = ones(1)
    with pytest.raises(ValueError, match="no option of groups"):
        fused.SGD([{"params": [parameter], "skip_nonfinite": True}])
    optimizer, other = fused.SGD([parameter], skip_nonfinite=True), fused.SGD(ones(1))
    parameter.grad = torch.tensor([torch.nan])
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert (copied.skipped_steps, copied.skip_nonfinite) == (1, True)
    other.load_state_dict(optimizer.state_dict())
    assert not other.skip_nonfinite


def test_what_fails_leaves_groups_as_they_were() -> None:
    (parameter, later) = ones(1, n=2)
    optimizer = fused.Adam([parameter], lr=0.1)
    with pytest.raises(ValueError, match="sparse"):
        optimizer.add_param_group({"params": [later], "sparse": "bogus"})
    optimizer.add_param_group({"params": [later], "sparse": "all"})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(differentiable=True, lr=5.0)
    with pytest.raises(RuntimeError, match="differentiable"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.param_groups[0]["differentiable"]


def test_a_momentum_of_rows_from_pytorch() -> None:
    """Its SGD keeps a sparse momentum of sparse gradients."""
    results = []
    for package, options in ((torch.optim, {}), (fused, {"sparse": "all"})):
        table = torch.nn.Parameter(torch.zeros(4, 2))
        first = torch.optim.SGD([table], lr=0.1, momentum=0.9)
        values = torch.ones(2, 2)
        table.grad = torch.sparse_coo_tensor([[1, 3]], values, (4, 2), check_invariants=False)
        first.step()
        optimizer = package.SGD([table], lr=0.1, momentum=0.9, **options)
        optimizer.load_state_dict(first.state_dict())
        optimizer.step()
        results.append(table.detach().clone())
    torch.testing.assert_close(*results)
