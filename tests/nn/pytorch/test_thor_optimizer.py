"""THOR in PyTorch's form: the steps of `nn.thor`, with groups, schedulers and a state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from fusestep.nn import thor  # noqa: E402
from fusestep.nn import torch as fused  # noqa: E402

OPTIONS: dict[str, Any] = {"batch_size": 16, "frequency": 4}


def net() -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers)


def backward(optimizer: Any, model: Any, seed: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()


def assert_equal(model: Any, other: Any) -> None:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_steps_are_those_of_thor_under_a_scheduler() -> None:
    mine, other = net(), net()
    ours = fused.Thor(mine, 0.1, 0.2, 0.8, 0.01, nesterov=True, clip_grad=True, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 3, 0.5)
    rates = [0.1 * 0.5 ** (k // 3) for k in range(10)]
    dampings = [0.2] * 5 + [0.3] * 5
    theirs = thor(
        other, rates, dampings, 0.8, 0.01, use_nesterov=True, enable_clip_grad=True, **OPTIONS
    )
    for k in range(10):
        ours.param_groups[0]["damping"] = dampings[k]
        for optimizer, model in ((ours, mine), (theirs, other)):
            backward(optimizer, model, k)
            optimizer.step()
        scheduler.step()
        assert_equal(mine, other)


def test_a_run_goes_on_from_its_state() -> None:
    model = net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    for k in range(6):
        backward(optimizer, model, k)
        optimizer.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    other = net()
    resumed = fused.Thor(other, 0.5, 0.5, **OPTIONS)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    for k in range(6, 12):
        for each, own in ((optimizer, model), (resumed, other)):
            backward(each, own, k)
            each.step()
    assert_equal(model, other)


@pytest.mark.parametrize("key", ["state", "param_groups", "thor"])
def test_a_state_that_lacks_a_part_changes_nothing(key: str) -> None:
    model = net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    backward(optimizer, model, 0)
    optimizer.step()
    saved = {name: part for name, part in optimizer.state_dict().items() if name != key}
    other = fused.Thor(net(), 0.1, 0.2, **OPTIONS)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(KeyError, match=key):
        other.load_state_dict(saved)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["thor"][name], x) for name, x in before["thor"].items())


def test_what_it_refuses() -> None:
    model = net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    with pytest.raises(TypeError, match="load the state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="and no others"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="Invalid learning rate"):
        fused.Thor(model, -0.1, **OPTIONS)
    with pytest.raises(ValueError, match="damping"):
        fused.Thor(model, 0.1, 0.0, **OPTIONS)
    optimizer.param_groups[0]["lr"] = -1.0
    before = [p.detach().clone() for p in model.parameters()]
    backward(optimizer, model, 0)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
