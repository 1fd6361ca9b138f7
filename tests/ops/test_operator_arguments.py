"""Arguments of operators: their published order, and that each of them acts."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest

from fusestep import ops
from fusestep.ops.primitive import Primitive
from fusestep.ops.runtime import locks

from helpers import FAR, assert_same_bits, distance
from operators import LARS_UPDATE, OPERATORS, Operator

EVERY = {**OPERATORS, LARS_UPDATE.name: LARS_UPDATE}
EACH = pytest.mark.parametrize("operator", EVERY.values(), ids=EVERY)

# For each argument a value that is far from the one in the tables of `helpers`. 1e-8 is not
# neutral only beside gradients of its size; an epsilon of 0.1 acts everywhere.
MOVED = {
    "beta1_power": 0.5,
    "beta2_power": 0.5,
    "lr": 0.02,
    "learning_rate": 0.02,
    "beta1": 0.5,
    "beta2": 0.9,
    "epsilon": 0.1,
    "decay": 0.5,
    "momentum": 0.3,
    "l1": 0.5,
    "l2": 1.0,
    "lr_power": -0.3,
    "norm_weight": 1.0,
    "norm_gradient": 1.0,
    "weight_decay": 0.7,
}

# The same for arguments of constructors, by operator. use_locking is tested below, and in
# test_locking.py; out_of_range acts on bad indices: test_ops_bad_input.py.
ELSEWHERE = {"use_locking", "out_of_range", "unknown"}
NESTEROV = {"use_nesterov": True}
FTRL = {"lr": 0.02, "l1": 0.5, "l2": 1.0, "lr_power": -0.3}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "FusedSparseAdam": NESTEROV,
    "FusedSparseLazyAdam": NESTEROV,
    "Adam": NESTEROV,
    "AdamNoUpdateParam": NESTEROV,
    "AdamWeightDecay": {},
    "ApplyAdamWithAmsgrad": {"beta1": 0.5, "beta2": 0.9, "epsilon": 0.1},
    "ApplyAdamWithAmsgradV2": {},
    "ApplyMomentum": {"use_nesterov": True, "gradient_scale": 2.0},
    "SGD": {"dampening": 0.5, "weight_decay": 0.3, "nesterov": True},
    "ApplyRMSProp": {},
    "ApplyCenteredRMSProp": {},
    "ApplyAdagrad": {"update_slots": False},
    "ApplyProximalAdagrad": {},
    "ApplyFtrl": {},
    "FusedSparseFtrl": FTRL,
    "SparseApplyFtrl": FTRL,
    "FusedSparseProximalAdagrad": {},
    "SparseApplyProximalAdagrad": {},
    "LARSUpdate": {"epsilon": 0.5, "hyperpara": 0.01, "use_clip": True},
}


def results(operator: Operator, changes: dict[str, Any], **constructor: Any) -> list[np.ndarray]:
    """All variables after a call, and what it returned if that is another array."""
    inputs = {**operator.inputs(), **changes}
    returned = operator.call(inputs, **constructor)
    found = [inputs[name] for name in operator.variables]
    return found if operator.returned else [returned, *found]


def acts(operator: Operator, changes: dict[str, Any], **constructor: Any) -> bool:
    """Whether the change moves a result, with the other arguments of `constructor`."""
    return distance(results(operator, changes, **constructor), results(operator, {})) > FAR


@EACH
def test_arguments_have_their_published_order(operator: Operator) -> None:
    signature = inspect.signature(operator.make.__call__)
    assert tuple(signature.parameters) == ("self", *operator.arguments)


def test_every_operator_is_in_the_tables() -> None:
    found = {
        name
        for name in ops.__all__
        if isinstance(getattr(ops, name), type) and issubclass(getattr(ops, name), Primitive)
    }
    assert found == EVERY.keys() == ATTRIBUTES.keys()


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op in EVERY.values()
        for name in op.scalars
        if (op.name, name) != ("LARSUpdate", "learning_rate")
    ],
)
def test_scalar_acts(operator: Operator, name: str) -> None:
    assert acts(operator, {name: MOVED[name]})


@pytest.mark.parametrize(
    ("operator", "name", "value"),
    [
        pytest.param(EVERY[op], name, value, id=f"{op}-{name}")
        for op, attributes in ATTRIBUTES.items()
        for name, value in attributes.items()
    ],
)
def test_constructor_argument_acts(operator: Operator, name: str, value: Any) -> None:
    assert acts(operator, {}, **{name: value})


@EACH
def test_every_constructor_argument_is_in_the_table(operator: Operator) -> None:
    """A new argument must be added to what is tested above."""
    known = inspect.signature(operator.make).parameters.keys()
    assert known - ELSEWHERE == ATTRIBUTES[operator.name].keys()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("use_locking", [False, True])
def test_use_locking_waits_for_other_calls(operator: Operator, use_locking: bool) -> None:
    """A call stands still as long as another one of the process runs."""
    inputs, plain = operator.inputs(), operator.inputs()
    op = operator.new(use_locking=use_locking)
    thread = threading.Thread(target=op, args=tuple(inputs.values()))
    with locks.turn():
        thread.start()
        thread.join(0.03 if use_locking else 60)
        assert thread.is_alive() == use_locking
    thread.join()
    operator.call(plain)
    for name in operator.variables:
        assert_same_bits(inputs[name], plain[name])


def test_learning_rate_of_lars_acts_with_use_clip() -> None:
    """It is the bound of the local rate; without use_clip it has no part in the formula."""
    clipped = results(LARS_UPDATE, {"learning_rate": 0.5}, use_clip=True)
    assert distance(clipped, results(LARS_UPDATE, {"learning_rate": 0.9}, use_clip=True)) > FAR
    assert not acts(LARS_UPDATE, {"learning_rate": 0.5})


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_without_momentum_is_plain(dampening: float) -> None:
    """Accumulator and stat have no part in it, nor has dampening: as published."""
    operator = OPERATORS["SGD"]
    inputs = {**operator.inputs(), "momentum": 0.0}
    before = {name: inputs[name].copy() for name in operator.variables}
    operator.call(inputs, dampening=dampening)
    expected = before["parameters"] - np.float32(0.1) * inputs["gradient"]
    np.testing.assert_allclose(inputs["parameters"], expected, rtol=1e-6)
    for name in ("accum", "stat"):
        np.testing.assert_array_equal(inputs[name], before[name])


def test_arguments_of_the_norm_functions_are_tested() -> None:
    """What they do is in test_norm.py."""
    assert list(inspect.signature(ops.global_norm).parameters) == ["x"]
    expected = ["x", "clip_norm", "use_norm", "in_place"]
    assert list(inspect.signature(ops.clip_by_global_norm).parameters) == expected
