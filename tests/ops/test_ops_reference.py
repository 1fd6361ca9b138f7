"""Every operator against the reference: what it hands to its rule, and rules of its own."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import reference_elementwise as elementwise
from helpers import STORAGE_DTYPES
from operators import OPERATORS, Operator
from reference import wide
from roundings import Rounded, assert_rounded

RENAMED = {"learning_rate": "lr", "decay": "rho"}
NESTEROV = {"use_nesterov": True}

# Operator, arguments of its constructor, the reference of that; those of Adam's family have ``hp``.
CALLS: list[tuple[str, dict[str, Any], Any]] = [
    *(
        (name, made, partial(reference.adam, nesterov=bool(made)))
        for name in ("Adam", "AdamNoUpdateParam", "FusedSparseAdam", "FusedSparseLazyAdam")
        for made in ({}, NESTEROV)),
    ("AdamWeightDecay", {}, reference.adam_weight_decay),
    ("ApplyAdamWithAmsgrad", {}, reference.adam_amsgrad),
    ("ApplyAdamWithAmsgradV2", {}, reference.adam_amsgrad),
    ("ApplyMomentum", {}, elementwise.momentum),
    ("ApplyMomentum", NESTEROV, partial(elementwise.momentum, nesterov=True)),
    (
        "ApplyMomentum",
        {"gradient_scale": 0.3, **NESTEROV},
        lambda w, g, *s, **k: elementwise.momentum(w, 0.3 * g, *s, nesterov=True, **k)),
    ("SGD", {}, partial(elementwise.sgd_stat, one_minus_dampening=1.0)),
    ("SGD", {"dampening": 0.4}, partial(elementwise.sgd_stat, one_minus_dampening=0.6)),
    (
        "SGD",
        {"nesterov": True, "weight_decay": 0.2},
        lambda w, g, *s, **k: elementwise.sgd_stat(
            w, g + 0.2 * wide(w), *s, one_minus_dampening=1.0, nesterov=True, **k)),
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
]  # fmt: skip


def known_scalars(
    operator: Operator, inputs: dict[str, Any], made: dict[str, Any], real: Any = np.float64
) -> dict[str, Any]:
    """The scalars of a call and of its constructor, rounded, by the names of the reference."""
    given = {name: inputs[name] for name in operator.scalars}
    if "Adam" in operator.name:  # two of them are published with constants
        given = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, **given}
        return {"hp": reference.adam_scalars(**given, real=real)}
    given |= {name: made.get(name, value) for name, value in operator.attributes.items()}
    known = {RENAMED.get(name, name): float(real(value)) for name, value in given.items()}
    if "rho" in known:
        known["one_minus_rho"] = float(real(1.0) - real(known["rho"]))
    return known


EACH_CALL = [
    pytest.param(*call, dtype, id=f"{call[0]}-{call[1]}-{dtype}")
    for call in CALLS
    for dtype in (STORAGE_DTYPES[:1] if OPERATORS[call[0]].takes_rows else STORAGE_DTYPES)
]


@pytest.mark.parametrize(("name", "made", "step", "dtype"), EACH_CALL)
def test_operators_meet_the_reference(name: str, made: dict, step: Any, dtype: Any) -> None:
    operator, real = OPERATORS[name], np.float64 if dtype == np.float64 else np.float32
    inputs = operator.inputs((40, 3), dtype)
    if operator.takes_rows:
        inputs["indices"] = np.array([7, 39, 7, 0])
    before = [inputs[variable].copy() for variable in operator.variables]
    step, gradient = partial(step, **known_scalars(operator, inputs, made, real)), operator.gradient
    returned = operator.call(inputs, **made)
    found = [inputs[variable] for variable in operator.variables]
    if name == "AdamNoUpdateParam":  # the step alone, of a parameter that it does not know
        before, found = [np.zeros((40, 3)), *before], [returned, *found]
    if not operator.takes_rows:
        expected = step(*map(Rounded, (before[0], inputs[gradient], *before[1:])))
        for k, (array, exact) in enumerate(zip(found, expected, strict=True)):
            assert_rounded(array, exact, real, 2.0, f"array {k} ")
        return
    apply = reference.dense_equivalent_step if operator.every_row else reference.lazy_step
    exact = apply(step, before[0], inputs["indices"], wide(inputs[gradient]), *before[1:])
    tolerance = {2: 1e-2, 4: 2e-6, 8: 1e-13}[dtype.itemsize]
    for variable, array, value in zip(operator.variables, found, exact, strict=True):
        np.testing.assert_allclose(wide(array), value, tolerance, tolerance, err_msg=variable)


def test_every_operator_meets_a_reference() -> None:
    """That of LARSUpdate is in test_measure.py."""
    assert {name for name, *_ in CALLS} == OPERATORS.keys()
