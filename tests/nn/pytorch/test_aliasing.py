"""Tensors that share memory: refused before anything is written, unless no element is shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

from torch_training import everything  # noqa: E402

N, D = 600, 16


def rows(indices: Any, values: Any) -> Any:
    return torch.sparse_coo_tensor(indices[None], values, (N, D), check_invariants=False)


def table() -> Any:
    return torch.nn.Parameter(torch.arange(N * D, dtype=torch.float32).reshape(N, D))


ALIASES: dict[str, Callable[[Any, Any], Any]] = {
    "values": lambda w, _: rows(torch.arange(N - 1, -1, -1), w.detach()),
    "some values": lambda w, _: rows(torch.arange(5), w.detach()[7:12]),
    "values of a state": lambda _, state: rows(torch.arange(N), state["exp_avg"]),
    "indices": lambda w, _: rows(w.detach().view(-1)[:8].view(torch.int64), torch.ones(4, D)),
    "indices of a state": lambda _, state: rows(
        state["exp_avg_sq"].view(-1)[:8].view(torch.int64), torch.ones(4, D)
    ),
    "dense": lambda w, _: w.detach(),
    "dense state": lambda _, state: state["exp_avg"],
}


@pytest.mark.parametrize("earlier_steps", [0, 1, 3])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_gradient_in_the_memory_of_the_step(alias: str, earlier_steps: int) -> None:
    """Also where it comes only in a later step, which looks at tensors in another way."""
    w = table()
    optimizer = fused.LazyAdam([w], lr=0.5)
    for _ in range(earlier_steps):
        dense = "dense" in alias
        w.grad = torch.ones(N, D) if dense else rows(torch.arange(4), torch.ones(4, D))
        optimizer.step()
    if not earlier_steps:
        zeros = {name: torch.zeros(N, D) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[w] = {"step": torch.tensor(0.0), **zeros}
    w.grad = ALIASES[alias](w, optimizer.state[w])
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="shares memory: expected memory of its own"):
        optimizer.step()
    assert all(map(torch.equal, everything(optimizer), before))
    w.grad = rows(torch.arange(4), torch.ones(4, D))
    optimizer.step()


def test_a_gradient_in_the_memory_of_another_parameter() -> None:
    first, second = table(), table()
    optimizer = fused.SGD([first, second], lr=0.5)
    second.grad = rows(torch.arange(N), first.detach())
    optimizer.step()  # the other one is not written
    first.grad = torch.ones(N, D)
    with pytest.raises(RuntimeError, match="gradient of parameter 1"):
        optimizer.step()


def interleaved() -> list[Any]:
    """Views of three tensors that share none of their elements."""
    columns, every_other, hole = torch.zeros(6, 4), torch.zeros(7), torch.zeros(3, 4)
    views = [columns[:, :3], columns[:, 3:], every_other[::2], every_other[1::2]]
    views += [hole[:, :2], hole[0, 2:]]
    return [torch.nn.Parameter(view) for view in views]


def test_views_that_share_no_element() -> None:
    results = []
    for package in (fused, torch.optim):
        parameters = interleaved()
        optimizer = package.Adam(parameters, lr=0.1)
        for k in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, k + 1.0)
            optimizer.step()
        results.append([p.detach().clone() for p in parameters])
    torch.testing.assert_close(*results)


def test_views_that_share_an_element() -> None:
    whole = torch.zeros(6, 4)
    views = [torch.nn.Parameter(view) for view in (whole[:, :3], whole[:, 2:])]
    for view in views:
        view.grad = torch.ones_like(view)
    with pytest.raises(RuntimeError, match=r"parameter 1 shares memory.* that of parameter 0"):
        fused.SGD(views, lr=1.0).step()
    assert not whole.any()


def test_strides_that_are_interleaved() -> None:
    """Elements 0, 2, 4, 3, 5, 7; the others stay."""
    whole = torch.zeros(8)
    parameter = torch.nn.Parameter(whole.as_strided((2, 3), (3, 2)))
    parameter.grad = torch.ones(2, 3)
    fused.SGD([parameter], lr=1.0).step()
    assert whole.tolist() == [-1.0, 0.0, -1.0, -1.0, -1.0, -1.0, 0.0, -1.0]
    parameter = torch.nn.Parameter(whole.as_strided((2, 3), (2, 2)))
    parameter.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        fused.SGD([parameter], lr=1.0).step()


def test_a_parameter_that_is_listed_twice() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    one.grad, other.grad = torch.ones(3), torch.ones(3)
    with warnings.catch_warnings(action="ignore"):  # PyTorch's
        optimizer = fused.SGD([one, other, one], lr=1.0)
    with pytest.raises(RuntimeError, match=r"SGD: parameter 2 .* that of parameter 0"):
        optimizer.step()
    assert one.tolist() == [0.0] * 3


STATES: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "stride 0": (lambda *_: {"exp_avg": torch.zeros(1).expand(4)}, "single memory location"),
    "itself": (lambda *_: {"exp_avg": torch.zeros(5).as_strided((4,), (0,))}, "single memory"),
    "each other": (lambda own, _: {"exp_avg": own["exp_avg_sq"]}, "shares memory"),
    "another's": (lambda _, other: {"exp_avg": other["exp_avg"]}, "shares memory"),
    "the count": (lambda _, other: {"step": other["step"]}, "state 'step' .* shares memory"),
    "strided": (lambda *_: dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(8)[::2]),
                "shares memory"),
}  # fmt: skip


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("case", STATES)
def test_states_that_share_memory(case: str, loaded: bool) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = fused.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    change, text = STATES[case]
    saved = optimizer.state_dict()
    states = [optimizer.state[p] for p in parameters]
    if loaded:
        saved["state"][1] = saved["state"][1] | change(*reversed(list(saved["state"].values())))
        optimizer.load_state_dict(saved)
    else:
        states[1].update(change(states[1], states[0]))
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert all(map(torch.equal, everything(optimizer), before))
