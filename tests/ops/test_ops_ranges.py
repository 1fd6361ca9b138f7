"""Operators outside of Adam's family: ranges of their scalars and attributes, and LARSUpdate.

What all operators refuse alike (dtypes, shapes, memory, indices, kinds of scalars) is tested in
test_ops_bad_input.py, for every operator of the table in `helpers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusestep import ConversionError, ops

from helpers import BF16, assert_same_bits, assert_within_ulps, refused, unchanged
from operators import LARS_UPDATE, OPERATORS, Operator


def reject(
    operator: Operator, changes: dict[str, Any], error: type[BaseException], text: str, **made: Any
) -> None:
    """The call is refused, with the operator's name in front, and no array has changed."""
    __tracebackhide__ = True
    inputs = {**operator.inputs(), **changes}
    with refused(error, f"^{operator.name}: {text}", inputs):
        operator.call(inputs, **made)


def accept(operator: Operator, changes: dict[str, Any], **made: Any) -> list[np.ndarray]:
    """The variables after the call."""
    inputs = {**operator.inputs(), **changes}
    operator.call(inputs, **made)
    return [inputs[name] for name in operator.variables]


def refuse_attribute(cls: Any, error: type[BaseException], text: str, **attributes: Any) -> None:
    __tracebackhide__ = True
    with pytest.raises(error, match=f"^{cls.__name__}: {text}"):
        cls(**attributes)


# Epsilon

DIVIDED = [op for op in OPERATORS.values() if "epsilon" in op.scalars]


@pytest.mark.parametrize("operator", DIVIDED, ids=lambda op: op.name)
@pytest.mark.parametrize("epsilon", [1e-46, np.float64(7e-46), -1e-46])
def test_epsilon_that_is_0_in_float32(operator: Operator, epsilon: float) -> None:
    """Where moments are 0 it would be 0/0."""
    zeros = {name: np.zeros((5, 3), np.float32) for name in operator.variables}
    text = f"epsilon is 0 in float32: expected at least 1e-45, or 0 itself, got {epsilon}$"
    reject(operator, {**zeros, "epsilon": epsilon}, ValueError, text)
    accept(operator, {"epsilon": 1e-45})
    accept(operator, {"epsilon": 0.0})  # it is what was asked for


@pytest.mark.parametrize(
    "operator", [op for op in DIVIDED if not op.only_float32], ids=lambda op: op.name
)
def test_small_epsilon_of_other_dtypes(operator: Operator) -> None:
    """16-bit variables are computed in float32; in float64 it is a number as any other."""
    inputs = {**operator.inputs(dtype=np.float16), "epsilon": 1e-46}
    with refused(ValueError, "epsilon is 0 in float32", inputs):
        operator.call(inputs)
    inputs = {**operator.inputs(dtype=np.float64), "epsilon": 1e-46}
    for name in operator.variables:
        inputs[name][...] = 0.0
    inputs[operator.gradient][...] = 0.0
    operator.call(inputs)
    assert all(np.isfinite(inputs[name]).all() for name in operator.variables)


def test_epsilon_attribute_that_is_0_in_float32() -> None:
    operator = OPERATORS["ApplyAdamWithAmsgrad"]
    reject(operator, {}, ValueError, "epsilon is 0 in float32", epsilon=1e-46)
    operator.call(operator.inputs(dtype=np.float64), epsilon=1e-46)


# FTRL

FTRL = OPERATORS["ApplyFtrl"]
SPARSE_FTRL = [ops.FusedSparseFtrl, ops.SparseApplyFtrl]
FTRL_ATTRIBUTES = {"lr": 0.1, "l1": 0.1, "l2": 0.1, "lr_power": -0.5}
RATE = "lr is out of range: expected positive, .*reciprocal.* float32.*, got "
POWER = "lr_power is out of range: expected .*at most 0, got "
FTRL_RANGES = [
    ("lr", 0.0, f"{RATE}0.0"),
    ("lr", -0.1, f"{RATE}-0.1"),
    ("lr", 1e-39, f"{RATE}1e-39"),
    ("lr", 1e-50, f"{RATE}1e-50"),
    ("l1", -1e-6, "l1 is out of range: expected at least 0, got -1e-06"),
    ("l2", -1.0, "l2 is out of range: expected at least 0, got -1.0"),
    ("lr_power", 0.5, f"{POWER}0.5"),
    ("lr_power", 1e-9, f"{POWER}1e-09"),
]


@pytest.mark.parametrize(("name", "value", "text"), FTRL_RANGES)
def test_scalar_of_ftrl_out_of_range(name: str, value: float, text: str) -> None:
    reject(FTRL, {name: value}, ValueError, text)


@pytest.mark.parametrize("cls", SPARSE_FTRL)
@pytest.mark.parametrize(("name", "value", "text"), FTRL_RANGES)
def test_attribute_of_ftrl_out_of_range(cls: Any, name: str, value: float, text: str) -> None:
    refuse_attribute(cls, ValueError, text, **{**FTRL_ATTRIBUTES, name: value})


@pytest.mark.parametrize("cls", SPARSE_FTRL)
@pytest.mark.parametrize("name", FTRL_ATTRIBUTES)
@pytest.mark.parametrize("value", [1, 0, np.int64(1), True, None, "0.1", [0.1], np.array(0.1)])
def test_attribute_of_ftrl_that_is_no_float(cls: Any, name: str, value: Any) -> None:
    text = f"{name} has a wrong type: expected a float, got {type(value).__name__}"
    refuse_attribute(cls, TypeError, text, **{**FTRL_ATTRIBUTES, name: value})


@pytest.mark.parametrize("cls", SPARSE_FTRL)
@pytest.mark.parametrize("name", FTRL_ATTRIBUTES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_attribute_of_ftrl_that_is_not_finite(cls: Any, name: str, value: float) -> None:
    refuse_attribute(cls, ValueError, f"{name} is not finite", **{**FTRL_ATTRIBUTES, name: value})


@pytest.mark.parametrize("cls", SPARSE_FTRL)
def test_attributes_of_ftrl_have_no_defaults(cls: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'lr_power'"):
        cls(0.1, 0.1, 0.1)


@pytest.mark.parametrize("cls", SPARSE_FTRL)
def test_bounds_of_ftrl_are_accepted(cls: Any) -> None:
    """Of either kind of float; ints are only refused as attributes."""
    made = cls(np.float32(3e-39), 0.0, np.float64(0.0), 0.0)
    assert (made.lr, made.l1, made.l2, made.lr_power) == (float(np.float32(3e-39)), 0.0, 0.0, 0.0)
    zeros = accept(FTRL, {"l1": 0, "l2": 0, "lr": 1, "lr_power": 0})
    assert_same_bits(zeros[0], accept(FTRL, {"l1": 0.0, "l2": 0.0, "lr": 1.0, "lr_power": 0.0})[0])


# Proximal Adagrad

PROXIMAL = [op for name, op in OPERATORS.items() if "ProximalAdagrad" in name]


@pytest.mark.parametrize("operator", PROXIMAL, ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["l1", "l2"])
def test_negative_regularisation(operator: Operator, name: str) -> None:
    text = f"{name} is out of range: expected at least 0, got -0.5"
    reject(operator, {name: -0.5}, ValueError, text)
    accept(operator, {name: 0})


# Momentum and SGD

MOMENTUM, SGD = OPERATORS["ApplyMomentum"], OPERATORS["SGD"]


@pytest.mark.parametrize("name", ["dampening", "weight_decay"])
def test_attribute_of_sgd(name: str) -> None:
    text = f"{name} is out of range: expected at least 0, got -0.1"
    refuse_attribute(ops.SGD, ValueError, text, **{name: -0.1})
    refuse_attribute(ops.SGD, ValueError, f"{name} is not finite", **{name: np.nan})
    for value in ("0.1", None, True):
        refuse_attribute(ops.SGD, TypeError, f"{name} has a wrong type", **{name: value})


def test_sgd_takes_nesterov_or_dampening() -> None:
    text = "dampening excludes nesterov: expected 0.0, got 0.5"
    refuse_attribute(ops.SGD, ValueError, text, nesterov=True, dampening=0.5)
    assert ops.SGD(nesterov=True, dampening=0.0).nesterov


def test_momentum_of_sgd_is_not_negative() -> None:
    reject(SGD, {"momentum": -0.9}, ValueError, "momentum is out of range: expected at least 0")
    accept(MOMENTUM, {"momentum": -0.9})  # published without a range


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["accum", "stat"])
def test_states_of_sgd_are_checked_without_momentum_too(name: str, momentum: float) -> None:
    changes = {"momentum": momentum, name: np.ones(4, np.float32)}
    reject(SGD, changes, ValueError, f"{name} differs in shape from parameters")
    changes[name] = np.ones((5, 3))
    reject(SGD, changes, ConversionError, f"{name} differs in dtype from parameters")
    changes[name] = np.broadcast_to(np.float32(1), (5, 3))
    reject(SGD, changes, ValueError, f"{name} is read-only")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_of_sgd_that_overlap(momentum: float) -> None:
    """Also where they have no part in the step."""
    shared = np.ones((5, 3), np.float32)
    changes = {"momentum": momentum, "parameters": shared, "accum": shared}
    reject(SGD, changes, ValueError, "accum shares memory with parameters|parameters shares")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.nan, ValueError, "is not finite"),
        (1e39, ValueError, "is too large: expected a float32 number"),
        ("1", TypeError, "has a wrong type: expected a number, got str"),
        (True, TypeError, "has a wrong type: expected a number, got bool"),
    ],
)
def test_gradient_scale(value: Any, error: type[BaseException], text: str) -> None:
    refuse_attribute(ops.ApplyMomentum, error, f"gradient_scale {text}", gradient_scale=value)


@pytest.mark.parametrize("use_nesterov", [False, True])
def test_gradient_scale_of_zero_forgets_the_gradient(use_nesterov: bool) -> None:
    nothing = {"gradient": np.zeros((5, 3), np.float32)}
    found = accept(MOMENTUM, {}, gradient_scale=0.0, use_nesterov=use_nesterov)
    expected = accept(MOMENTUM, nothing, use_nesterov=use_nesterov)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# RMSProp


def test_centered_rmsprop_that_waits_moves_its_means_only() -> None:
    """Through the operator: a mean gradient that leaves no positive variance."""
    operator = OPERATORS["ApplyCenteredRMSProp"]
    inputs = operator.inputs()
    inputs["mean_gradient"][:] = 3.0
    with unchanged(inputs["var"], inputs["moment"]):
        operator.call(inputs)
    assert (inputs["mean_gradient"] != 3.0).all()


# Adagrad


def test_adagrad_without_update_slots_reads_its_accumulator() -> None:
    operator = OPERATORS["ApplyAdagrad"]
    inputs, before = operator.inputs(), operator.inputs()
    with unchanged(inputs["accum"]):
        operator.call(inputs, update_slots=False)
    expected = before["var"] - 0.1 * before["grad"] / np.sqrt(before["accum"])
    assert_within_ulps(inputs["var"], expected, np.abs(before["var"]) + np.abs(expected))


# LARSUpdate: it writes nothing

WEIGHT_OR_GRADIENT = pytest.mark.parametrize("name", ["weight", "gradient"])


@WEIGHT_OR_GRADIENT
@pytest.mark.parametrize("dtype", [np.int32, np.complex64, bool, object, ">f4"])
def test_lars_array_of_a_wrong_dtype(name: str, dtype: Any) -> None:
    changes = {name: LARS_UPDATE.inputs()[name].astype(dtype)}
    text = f"{name} has a wrong dtype: expected float32, float64, float16, bfloat16, got "
    reject(LARS_UPDATE, changes, TypeError, text)


@WEIGHT_OR_GRADIENT
@pytest.mark.parametrize("value", [None, 0.5, [1.0], "w"])
def test_lars_array_that_is_none(name: str, value: Any) -> None:
    text = f"{name} is no array: expected an array, got {type(value).__name__}"
    reject(LARS_UPDATE, {name: value}, TypeError, text)


@pytest.mark.parametrize("shape", [(), (3,), (5, 4), (15,), (5, 3, 1)])
def test_lars_gradient_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    changes = {"gradient": np.ones(shape, np.float32)}
    text = r"gradient has a wrong shape: expected \(5, 3\), got "
    reject(LARS_UPDATE, changes, ValueError, text)


@pytest.mark.parametrize(
    ("weight", "gradient"), [(np.float32, np.float64), (np.float16, BF16), (BF16, np.float32)]
)
def test_lars_gradient_of_higher_precision(weight: Any, gradient: Any) -> None:
    changes = {
        "weight": np.ones((5, 3)).astype(weight),
        "gradient": np.ones((5, 3)).astype(gradient),
    }
    reject(LARS_UPDATE, changes, ConversionError, "gradient has a higher dtype")


@pytest.mark.parametrize("name", LARS_UPDATE.scalars)
def test_scalar_of_lars(name: str) -> None:
    text = f"{name} is out of range: expected at least 0, got -1.0"
    reject(LARS_UPDATE, {name: -1.0}, ValueError, text)
    reject(LARS_UPDATE, {name: np.nan}, ValueError, f"{name} is not finite")
    reject(LARS_UPDATE, {name: np.ones(2)}, ValueError, f"{name} has a wrong shape")
    for value in (None, "1", True, 1j, [1.0]):
        text = f"{name} has a wrong type: expected a number, got {type(value).__name__}"
        reject(LARS_UPDATE, {name: value}, TypeError, text)


@pytest.mark.parametrize("name", ["epsilon", "hyperpara"])
def test_attribute_of_lars(name: str) -> None:
    text = f"{name} is out of range: expected at least 0, got -1.0"
    refuse_attribute(ops.LARSUpdate, ValueError, text, **{name: -1.0})
    refuse_attribute(ops.LARSUpdate, ValueError, f"{name} is not finite", **{name: np.inf})
    for value in (1, True, None, "0.1"):
        text = f"{name} has a wrong type: expected a float, got {type(value).__name__}"
        refuse_attribute(ops.LARSUpdate, TypeError, text, **{name: value})
    refuse_attribute(ops.LARSUpdate, TypeError, "use_clip has a wrong type", use_clip=1)


def test_lars_takes_no_other_keyword() -> None:
    """There is nothing to lock: it updates nothing."""
    text = "argument 'use_locking' is unknown: expected one of epsilon, hyperpara, use_clip"
    refuse_attribute(ops.LARSUpdate, TypeError, text, use_locking=True)
    text = "argument 'hyperparam' is unknown: .* did you mean 'hyperpara'"
    refuse_attribute(ops.LARSUpdate, KeyError, text, hyperparam=0.1)


def test_lars_reads_arrays_of_any_layout() -> None:
    """Read-only, strided, in the memory of each other: they are not written to."""
    inputs = LARS_UPDATE.inputs()
    expected = LARS_UPDATE.call(inputs)
    wide = np.zeros((10, 6), np.float32)
    wide[::2, ::2] = inputs["weight"]
    wide.flags.writeable = False
    given = {**inputs, "weight": wide[::2, ::2], "gradient": np.asfortranarray(inputs["gradient"])}
    with unchanged(given):
        assert_same_bits(LARS_UPDATE.call(given), expected)
    same = {**inputs, "gradient": inputs["weight"]}
    with unchanged(same):
        result = LARS_UPDATE.call(same)
    assert not np.shares_memory(result, inputs["weight"])


@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 1e-39])
def test_lars_of_a_gradient_that_is_zero(epsilon: float) -> None:
    """The factor is |w| / epsilon, also beyond float32; the new gradient is 0, not NaN."""
    zeros = np.zeros((5, 3), np.float32)
    changes = {"gradient": zeros, "norm_gradient": 0.0, "weight_decay": 0.0}
    inputs = {**LARS_UPDATE.inputs(), **changes}
    assert_same_bits(LARS_UPDATE.call(inputs, epsilon=epsilon, hyperpara=1.0), zeros)
