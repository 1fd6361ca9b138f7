"""Optimizers of users in PyTorch's form: their rules and scalars are looked at before a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import Rule  # noqa: E402
from fusestep.nn import torch as fused  # noqa: E402
from fusestep.nn.torch.engine.part import Method  # noqa: E402

from own_functions import AVERAGED, MEASURED, PLAIN, raising  # noqa: E402


class Own(fused.FusedOptimizer):
    rule: Rule = AVERAGED
    found: Any = (0.5,)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.5, "weight_decay": 0.0}, **options)

    def method(self, group: Any) -> Method:  # noqa: ARG002
        return Method(self.rule)

    def scalars(self, group: Any, step: float) -> Any:  # noqa: ARG002
        return self.found


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a rule that raises": (
        {"rule": replace(PLAIN, update=raising)}, ValueError, "update 'raising' can raise",
    ),
    "other arguments": (
        {"rule": replace(PLAIN, states=("m",))}, TypeError, "update 'plain' takes other arguments",
    ),
    "a name of what comes before": (
        {"rule": replace(PLAIN, hp=("lr", "grad_scale"))}, ValueError,
        "hp of the rule has a name of what comes before the rule",
    ),
    "too many": (
        {"found": (0.5, 0.5)}, ValueError, r"scalars returns another number of scalars: expected 1",
    ),
    "too few": ({"found": ()}, ValueError, "scalars returns another number of scalars"),
    "None": ({"found": (None,)}, TypeError, "lr of scalars has a wrong type"),
    "NaN": ({"found": (math.nan,)}, ValueError, "lr of scalars is NaN"),
}  # fmt: skip


def _table(*, sparse: bool) -> Any:
    table = torch.nn.Embedding(4, 2, sparse=sparse)
    torch.nn.init.ones_(table.weight)
    table(torch.tensor([1, 3, 1])).sum().backward()
    return table


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name: str, sparse: bool) -> None:
    """Nothing has changed then, and the next step is that of a new optimizer."""
    attributes, kind, match = CASES[name]
    table, other = _table(sparse=sparse), _table(sparse=sparse)
    opt = Own(table.parameters(), sparse="touched")
    for each, value in attributes.items():
        setattr(opt, each, value)
    for _ in range(2):
        with pytest.raises(kind, match=f"^Own: {match}"):
            opt.step()
    assert (table.weight == 1).all() and not opt.state
    for each in attributes:
        delattr(opt, each)
    opt.step()
    Own(other.parameters(), sparse="touched").step()
    assert torch.equal(table.weight, other.weight) and not (table.weight == 1).all()


def test_what_measures_takes_no_sparse_gradients() -> None:
    table = _table(sparse=True)
    opt = Own(table.parameters(), sparse="touched")
    opt.rule = MEASURED
    match = "^Own: sparse_update does not fit a rule that measures whole tensors"
    with pytest.raises(ValueError, match=match):
        opt.step()


def test_scalars_of_the_package_are_not_looked_at() -> None:
    """PyTorch takes a learning rate that is NaN, also in a subclass."""

    class Same(fused.SGD):
        pass

    table = _table(sparse=False)
    Same(table.parameters(), lr=torch.tensor(math.nan)).step()
    assert table.weight.isnan().all()


def test_a_method_may_follow_from_other_things_than_options() -> None:
    table = _table(sparse=False)
    opt = Own(table.parameters())
    opt.step()
    assert set(opt.state[table.weight]) == {"step", "m"}
    opt.rule = PLAIN
    before = table.weight.detach().clone()
    opt.step()
    assert torch.equal(table.weight, before - 0.5 * table.weight.grad)
