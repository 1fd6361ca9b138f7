"""What users exchange between two steps: memory, states, parameters and options."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from fusestep.nn import torch as fused  # noqa: E402

from torch_training import (  # noqa: E402
    DENSE,
    EVERY,
    TABLES,
    Tagger,
    assert_close,
    assert_equal_models,
    assert_same_bits,
    loss_of,
    net,
    train,
)


def options_of(name: str) -> dict[str, Any]:
    """With states."""
    return {"momentum": 0.9} if name == "SGD" else {}


def both(name: str) -> list[tuple[Any, Any]]:
    """A model and its optimizer, ours and PyTorch's."""
    made, options = [], options_of(name)
    for package in (fused, torch.optim):
        model = net()
        made.append((model, getattr(package, name)(model.parameters(), **options)))
    return made


def assert_equal(pairs: list[tuple[Any, Any]]) -> None:
    (mine, ours), (other, theirs) = pairs
    assert_equal_models(mine, other)
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()


def to_transposed(tensor: Any) -> Any:
    """Equal, in other memory of another order."""
    made = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(
        tuple(range(tensor.dim()))[::-1]
    )
    return made.copy_(tensor)


def to_strided(tensor: Any) -> Any:
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("to", [torch.clone, to_transposed, to_strided])
@pytest.mark.parametrize("name", DENSE)
def test_memory_of_parameters(name: str, to: Any) -> None:
    pairs = both(name)
    for model, optimizer in pairs:
        train(model, optimizer, range(2))
        for p in model.parameters():
            old = p.data
            p.data = to(p.data)
            old.fill_(torch.nan)  # nothing may look there any more
        train(model, optimizer, range(2, 5))
    assert_equal(pairs)


@pytest.mark.parametrize("to", [torch.clone, to_transposed, to_strided])
@pytest.mark.parametrize("name", DENSE)
def test_states(name: str, to: Any) -> None:
    pairs = both(name)
    for model, optimizer in pairs:
        train(model, optimizer, range(2))
        for p in model.parameters():
            for role, old in optimizer.state[p].items():
                if isinstance(old, torch.Tensor):
                    optimizer.state[p][role] = to(old)
                    old.fill_(torch.nan)
        train(model, optimizer, range(2, 5))
    assert_equal(pairs)


@pytest.mark.parametrize("name", DENSE)
def test_states_written_in_place(name: str) -> None:
    pairs = both(name)
    for model, optimizer in pairs:
        train(model, optimizer, range(2))
        for p in model.parameters():
            for old in optimizer.state[p].values():
                if isinstance(old, torch.Tensor) and old.is_floating_point():
                    old.mul_(2.0)
        train(model, optimizer, range(2, 5))
    assert_equal(pairs)


@pytest.mark.parametrize("name", DENSE)
def test_states_forgotten(name: str) -> None:
    if name == "Adagrad":
        pytest.skip("PyTorch's makes states in its constructor alone")
    pairs = both(name)
    for model, optimizer in pairs:
        train(model, optimizer, range(2))
        optimizer.state.clear()
        train(model, optimizer, range(2, 4))
        del optimizer.state[model[0].weight]
        train(model, optimizer, range(4, 6))
    assert_equal(pairs)


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


@pytest.mark.parametrize("name", EVERY)
def test_parameters_that_are_frozen_for_a_time(name: str) -> None:
    """Those without a gradient keep everything; afterwards they go on."""
    model = Tagger() if name in TABLES else net()
    modules = [model.words, model.tags] if name in TABLES else [model[0], model[2]]
    options = {"sparse": "touched"} if name in TABLES else {}
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = getattr(fused, name)(parameters, **options)
    train(model, optimizer, range(2))
    frozen = list(modules[1].parameters())
    values = [p.detach().clone() for p in frozen]
    states = [[torch.as_tensor(x).clone() for x in optimizer.state[p].values()] for p in frozen]
    modules[1].requires_grad_(False)
    train(model, optimizer, range(2, 4))
    assert_same_bits(frozen, values)
    for p, state in zip(frozen, states, strict=True):
        assert_same_bits(map(torch.as_tensor, optimizer.state[p].values()), state)
    modules[1].requires_grad_(True)
    train(model, optimizer, range(4, 6))
    assert not any(torch.equal(p, value) for p, value in zip(frozen, values, strict=True))


OPTIONS = {
    "SGD": {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "RMSprop": {"alpha": 0.5, "eps": 1e-3},
    "Adam": {"betas": (0.5, 0.7), "weight_decay": 0.1},
    "AdamW": {"betas": (0.5, 0.7), "weight_decay": 0.0},
    "NAdam": {"momentum_decay": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"betas": (0.5, 0.7), "decoupled_weight_decay": True, "weight_decay": 0.1},
    "Adamax": {"eps": 1e-3, "weight_decay": 0.1},
    "Adadelta": {"rho": 0.5, "weight_decay": 0.1},
    "ASGD": {"t0": 2, "lambd": 0.1, "weight_decay": 0.1},
    "Rprop": {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.1)},
    "Adafactor": {"d": 2.0, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", DENSE)
def test_options_of_groups(name: str) -> None:
    """They are read in every step, and may differ between groups."""
    pairs = both(name)
    for model, optimizer in pairs:
        optimizer.param_groups[0]["params"], last = list(model[0].parameters()), model[2]
        optimizer.add_param_group({"params": list(last.parameters())})
        train(model, optimizer, range(3))
        optimizer.param_groups[1].update(OPTIONS[name])
        train(model, optimizer, range(3, 6))
        for group in optimizer.param_groups:
            group["maximize"] = True
        train(model, optimizer, range(6, 8))
    assert_equal(pairs)


@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_every_form(name: str) -> None:
    """Strided, expanded from one number, of one memory with another, negated lazily, reused."""
    pairs = both(name)
    for model, optimizer in pairs:
        first, bias, second, last = model.parameters()
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % 4 == 1:
                first.grad = to_transposed(first.grad)
                last.grad = to_strided(last.grad)
            elif step % 4 == 2:
                bias.grad = torch.tensor(0.5, dtype=torch.float64).expand(5)
                second.grad = first.grad.reshape(-1)[:15].view(3, 5)
            elif step % 4 == 3:
                first.grad = torch.complex(first.grad, first.grad).conj().imag  # -first.grad
            optimizer.step()
    assert_equal(pairs)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
def test_groups_of_both_weight_decays(name: str) -> None:
    models = net(), net()
    for model, package in zip(models, (fused, torch.optim), strict=True):
        last = {"params": model[2].parameters(), "decoupled_weight_decay": True}
        groups = [{"params": model[0].parameters()}, last]
        train(model, getattr(package, name)(groups, lr=0.05, weight_decay=0.1), range(4))
    assert_equal_models(*models)
