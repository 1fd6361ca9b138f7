"""Prodigy on PyTorch's tensors, beside the float64 reference, and the original where it is."""

import contextlib
import io
import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from reference_prodigy import OPTIONS, reference_with

SHAPES = [(7, 5), (11,), (), (2, 3, 4)]


def starts() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    one, other = ([np.array(rng.standard_normal(s)) for s in SHAPES] for _ in range(2))
    return one, other


def gradient(w: np.ndarray, end: np.ndarray, k: int, i: int) -> np.ndarray | None:
    found = np.array((1.0 + 0.3 * math.sin(k + i)) * (w - end))
    return None if (k + i) % 7 == 3 else found


@pytest.mark.parametrize("label", OPTIONS)
def test_a_hundred_steps_of_the_reference(label: str) -> None:
    """Two groups, schedules of the rate, missing gradients; gradients are left as they are."""
    options, (start, end) = OPTIONS[label], starts()
    exact = reference_with((start[:2], start[2:]), options)
    params = [torch.nn.Parameter(torch.tensor(w)) for w in start]
    optimizer = fused.Prodigy([{"params": params[:2]}, {"params": params[2:]}], **options)
    lr = options.get("lr", 1.0)
    for k in range(100):
        every = [w for group in exact.groups for w in group.params]
        given = [gradient(w, e, k, i) for i, (w, e) in enumerate(zip(every, end, strict=True))]
        for p, g in zip(params, given, strict=True):
            p.grad = None if g is None else torch.tensor(g)
        kept = [None if p.grad is None else p.grad.clone() for p in params]
        for group, mine in zip(exact.groups, optimizer.param_groups, strict=True):
            group.lr = mine["lr"] = lr * (1.0 - k / 200)
        exact.step([given[:2], given[2:]])
        optimizer.step()
        for p, g in zip(params, kept, strict=True):
            assert g is None or torch.equal(p.grad, g)
    found = optimizer.param_groups[1]
    assert (found["k"], found["d_max"] >= found["d"]) == (100, True)
    assert math.isclose(found["d"], exact.d, rel_tol=1e-10)
    assert math.isclose(found["d_numerator"], exact.d_numerator, rel_tol=1e-7)
    for p, w in zip(params, (w for group in exact.groups for w in group.params), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(find_spec("prodigyopt") is None, reason="needs prodigyopt")
@pytest.mark.parametrize("label", OPTIONS)
def test_a_hundred_steps_of_the_original(label: str) -> None:
    from prodigyopt import Prodigy as Original

    options, (start, end) = OPTIONS[label], starts()
    mine, theirs = ([torch.nn.Parameter(torch.tensor(w)) for w in start] for _ in range(2))
    optimizer = fused.Prodigy(mine, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        original = Original(theirs, **options)
    for k in range(100):
        for params in (mine, theirs):
            for i, (p, e) in enumerate(zip(params, end, strict=True)):
                # Of the original's parameters, so that nothing is magnified from step to step.
                g = gradient(theirs[i].detach().numpy(), e, k, i)
                p.grad = None if g is None else torch.tensor(g)
        optimizer.step()
        original.step()
    assert math.isclose(
        optimizer.param_groups[0]["d"], original.param_groups[0]["d"], rel_tol=1e-10
    )
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_states_that_were_lost_are_missed() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, fresh = fused.Prodigy([p]), fused.Prodigy([q])
    p.grad = torch.ones(2)
    optimizer.step()
    for states in ({}, {0: {}}):
        saved = {**optimizer.state_dict(), "state": states}
        with pytest.raises(
            ValueError, match=r"the states are missing: .* a run of 1 steps, got no"
        ):
            fresh.load_state_dict(saved)
        assert fresh.param_groups[0]["k"] == 0 and not fresh.state


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "decouple": False,
                                          "safeguard_warmup": True}])  # fmt: skip
def test_a_step_without_a_rate_makes_states_and_counts_nothing(options: Any) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fused.Prodigy([p], **options)
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.zeros(3)
    optimizer.step()
    states = dict(optimizer.state[p])
    assert torch.equal(states.pop("p0"), torch.ones(3))
    assert len(states) == 4 and not any(state.any() for state in states.values())
    assert optimizer.param_groups[0]["k"] == 0 and torch.equal(p, torch.ones(3))


def test_a_step_without_a_denominator_is_none() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fused.Prodigy([p])
    p.grad = torch.zeros(3)
    optimizer.step()
    assert optimizer.param_groups[0]["k"] == 0 and torch.equal(p, torch.ones(3))


def test_what_it_refuses() -> None:
    def new() -> Any:
        return torch.nn.Parameter(torch.ones(2, 2))

    for options, text in (
        ({"lr": 0.0}, "Invalid learning rate"), ({"d0": 0.0}, "Invalid d0 value"),
        ({"eps": 0.0}, "Invalid epsilon value"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"beta3": 1.0}, "Invalid beta parameter at index 0"),
        ({"d_coef": -1.0}, "Invalid d_coef value"),
        ({"slice_p": 11}, "slice_p=11 is not supported"),
        ({"fsdp_in_use": True}, "fsdp_in_use=True is not supported"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            fused.Prodigy([new()], **options)
    p, q = new(), new()
    optimizer = fused.Prodigy([{"params": [p], "lr": 0.5}, {"params": [q]}])
    for x in (p, q):
        x.grad = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="learning rates of groups differ"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(param=...\) is not supported"):
        optimizer.step(param=p)
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (2, 2), check_invariants=False)
    with pytest.raises(RuntimeError, match="Prodigy does not support sparse gradients"):
        fused.Prodigy([p]).step()
    assert torch.equal(p, torch.ones(2, 2)) and torch.equal(q, torch.ones(2, 2))
