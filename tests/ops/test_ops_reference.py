"""Operators outside of Adam's family against the reference: what they hand to their rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import reference
import reference_elementwise as elementwise
from operators import OPERATORS, Operator
from reference import wide

RENAMED = {"learning_rate": "lr", "decay": "rho"}
NESTEROV = {"use_nesterov": True}

# Operator, arguments of its constructor, the reference of that.
CALLS: list[tuple[str, dict[str, Any], Any]] = [
    ("ApplyMomentum", {}, elementwise.momentum),
    ("ApplyMomentum", NESTEROV, partial(elementwise.momentum, nesterov=True)),
    (
        "ApplyMomentum",
        {"gradient_scale": 0.3},
        lambda w, g, *s, **k: elementwise.momentum(w, 0.3 * g, *s, **k),
    ),
    ("SGD", {}, partial(elementwise.sgd_stat, one_minus_dampening=1.0)),
    ("SGD", {"dampening": 0.4}, partial(elementwise.sgd_stat, one_minus_dampening=0.6)),
    (
        "SGD",
        {"nesterov": True, "weight_decay": 0.2},
        lambda w, g, *s, **k: elementwise.sgd_stat(
            w, g + 0.2 * wide(w), *s, one_minus_dampening=1.0, nesterov=True, **k
        ),
    ),
    ("ApplyRMSProp", {}, elementwise.rmsprop),
    ("ApplyCenteredRMSProp", {}, elementwise.rmsprop_centered),
    ("ApplyAdagrad", {}, elementwise.adagrad),
    ("ApplyAdagrad", {"update_slots": False}, partial(elementwise.adagrad, update_slots=False)),
    ("ApplyProximalAdagrad", {}, elementwise.proximal_adagrad),
    ("ApplyFtrl", {}, elementwise.ftrl),
    ("FusedSparseFtrl", {}, elementwise.ftrl),
    ("SparseApplyFtrl", {"lr_power": -0.3}, elementwise.ftrl),
    ("FusedSparseProximalAdagrad", {}, elementwise.proximal_adagrad),
    ("SparseApplyProximalAdagrad", {}, elementwise.proximal_adagrad),
]


def known_scalars(operator: Operator, inputs: dict[str, Any], made: dict[str, Any]) -> Any:
    """The scalars of a call and of its constructor, by the names of the reference."""
    given = {name: inputs[name] for name in operator.scalars}
    given |= {name: made.get(name, value) for name, value in operator.attributes.items()}
    known = {RENAMED.get(name, name): value for name, value in given.items()}
    if "rho" in known:
        known["one_minus_rho"] = 1.0 - known["rho"]
    return known


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "made", "step"), CALLS, ids=lambda x: None if callable(x) else str(x)
)
def test_operators_meet_the_reference(name: str, made: dict, step: Any, dtype: Any) -> None:
    operator = OPERATORS[name]
    if name.startswith("Fused"):
        dtype = np.float32
    inputs = operator.inputs((40, 3), dtype)
    if operator.takes_rows:
        inputs["indices"] = np.array([7, 39, 7, 0])
    before = [inputs[variable].copy() for variable in operator.variables]
    step = partial(step, **known_scalars(operator, inputs, made))
    g = wide(inputs[operator.gradient])
    if operator.takes_rows:
        expected = reference.lazy_step(step, before[0], inputs["indices"], g, *before[1:])
    else:
        expected = step(before[0], g, *before[1:])
    operator.call(inputs, **made)
    tolerance = 1e-13 if dtype == np.float64 else 2e-6
    for variable, exact in zip(operator.variables, expected, strict=True):
        np.testing.assert_allclose(
            inputs[variable], exact, rtol=tolerance, atol=tolerance, err_msg=variable
        )


def test_every_operator_meets_a_reference() -> None:
    adam = {name for name in OPERATORS if "Adam" in name}
    assert {
        name for name, _, _ in CALLS
    } | adam == OPERATORS.keys()  # LARSUpdate: test_two_stage.py
