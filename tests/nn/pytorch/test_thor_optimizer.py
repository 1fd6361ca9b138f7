"""THOR in PyTorch's form: the steps of `nn.thor`, with groups, schedulers and a state."""

import copy
import io
import tempfile
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

import torch.distributed.checkpoint as dcp
from fusestep.nn import thor
from fusestep.nn import torch as fused
from torch_training import FOLDERS, through_folder

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


def by_file(_: Any, optimizer: Any, *__: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_earlier_version(model: Any, optimizer: Any, *_: Any) -> Any:
    """States by the names of `nn.thor`, beside those of parameters."""
    found = by_file(model, optimizer)
    found["state"] = {}
    arrays = optimizer._thor.state_dict().items()
    found["thor"] = {name: torch.from_numpy(array) for name, array in arrays}
    return found


def by_saving_itself(_: Any, optimizer: Any, __: Any, resumed: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
        dcp.load({"optimizer": resumed}, checkpoint_id=folder)


def by_accelerate(_: Any, optimizer: Any, *__: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer).state_dict()


def by_folder(*given: Any, of: str) -> None:
    through_folder(*given, **FOLDERS[of])


WAYS = [by_file, by_earlier_version, *(partial(by_folder, of=of) for of in FOLDERS),
        by_saving_itself, by_accelerate]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*distributed is.*:UserWarning")
@pytest.mark.parametrize("n", [0, 6])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_from_its_state(way: Any, n: int) -> None:
    model, other = net(), net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    for k in range(n):
        backward(optimizer, model, k)
        optimizer.step()
    resumed = fused.Thor(other, 0.5, 0.5, **OPTIONS)
    if (state := way(model, optimizer, other, resumed)) is not None:
        resumed.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    for k in range(n, n + 6):
        for each, own in ((optimizer, model), (resumed, other)):
            backward(each, own, k)
            each.step()
    assert_equal(model, other)
    assert resumed.param_groups[0]["lr"] == 0.1


def test_states_are_named_where_they_lie() -> None:
    """`state_dict` has copies, beside entries of others; both are those after the last step."""
    model = net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    first = model[0].weight
    optimizer.state[first]["own"], optimizer.state["wrapper"] = 3, None
    for k in range(5):  # in the last one factors are computed anew
        backward(optimizer, model, k)
        optimizer.step()
    saved, arrays = optimizer.state_dict(), optimizer._thor.state_dict()
    shown = optimizer.state[first]
    for found in (shown, saved["state"][0]):
        assert found["own"] == 3 and found["global_step"].item() == found["step"].item() == 5
        assert found["refreshes"].item() == 2
        for role in ("moments", "matrix_a_inv", "matrix_g_inv"):
            assert torch.equal(found[role], torch.from_numpy(arrays[f"{role}.0.weight"]))
    assert saved["state"]["wrapper"] is None
    kept = saved["state"][0]["moments"].clone()
    optimizer.state[model[0].bias] = 3  # where a dict should be
    assert optimizer.state_dict()["state"][1].keys() == {"global_step", "step", "moments"}
    backward(optimizer, model, 5)
    optimizer.step()
    assert torch.equal(saved["state"][0]["moments"], kept)
    assert not torch.equal(shown["moments"], kept)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[first]["moments"], kept)
    assert optimizer.state[first]["own"] == 3 and optimizer.state["wrapper"] is None


def lacking(saved: Any, what: str) -> Any:
    if what in saved:
        return {name: part for name, part in saved.items() if name != what}
    states = copy.deepcopy(saved["state"])
    if what == "a parameter":
        del states[1]
    elif what == "all states":
        states = {}
    elif what == "other counts":
        states[1]["global_step"] += 1
    elif what == "no tensor":
        states[1]["moments"] = None
    elif what == "no states":
        states[1] = None
    elif what == "another shape":
        states[1]["moments"] = torch.ones(3)
    elif what == "freed":
        states[1]["moments"].untyped_storage().resize_(0)
    else:
        del states[0][what]
    return {**saved, "state": states}


LACKS: dict[str, tuple[Any, str]] = {
    "state": (KeyError, "state"), "param_groups": (KeyError, "param_groups"),
    "a parameter": ((KeyError, ValueError), "0.bias|global_step"),
    "all states": (KeyError, "global_step|moments"), "moments": (KeyError, "moments.0.weight"),
    "matrix_g_inv": (KeyError, "matrix_g_inv.0.weight"), "refreshes": (KeyError, "refreshes"),
    "global_step": (ValueError, "'global_step' differs between parameters"),
    "other counts": (ValueError, "'global_step' differs between parameters"),
    "no tensor": (KeyError, "moments.0.bias"),
    "no states": (TypeError, "^Thor: state of parameter 1 has a wrong type: expected a dict, got"),
    "another shape": (ValueError, "moments.0.bias"), "freed": (RuntimeError, "has no memory"),
}  # fmt: skip


@pytest.mark.parametrize("what", LACKS)
def test_a_state_that_does_not_fit_changes_nothing(what: str) -> None:
    model = net()
    optimizer = fused.Thor(model, 0.1, 0.2, **OPTIONS)
    backward(optimizer, model, 0)
    optimizer.step()
    saved = lacking(optimizer.state_dict(), what)
    other = fused.Thor(net(), 0.3, 0.2, **OPTIONS)
    before = copy.deepcopy(other.state_dict())
    kind, text = LACKS[what]
    with pytest.raises(kind, match=text):
        other.load_state_dict(saved)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, states in before["state"].items():
        assert all(torch.equal(after["state"][key][name], x) for name, x in states.items())


def test_a_hook_may_give_another_state() -> None:
    model, other = net(), net()
    optimizer, resumed = (fused.Thor(m, 0.1, 0.2, **OPTIONS) for m in (model, other))
    backward(optimizer, model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    resumed.register_load_state_dict_pre_hook(lambda _, __: saved)
    resumed.load_state_dict(resumed.state_dict())
    assert resumed.state[other[0].weight]["step"].item() == 1


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
