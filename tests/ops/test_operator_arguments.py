"""Arguments of operators: their published order, that each of them acts, and what is special."""

import inspect
import threading
from typing import Any

import numpy as np
import pytest
from fusestep import ops
from fusestep.bench.registry import ELSEWHERE
from fusestep.ops.primitive import Primitive
from fusestep.ops.runtime import locks
from helpers import FAR, assert_same_bits, distance, refused, unchanged
from operators import ADAM_UPDATE, EVERY_OPERATOR, LARS_UPDATE, OPERATORS, Operator

EACH = pytest.mark.parametrize("operator", EVERY_OPERATOR.values(), ids=str)
MOMENTUM, SGD, FTRL = (OPERATORS[name] for name in ("ApplyMomentum", "SGD", "ApplyFtrl"))


def results(operator: Operator, **changes: Any) -> list[np.ndarray]:
    """All variables after a call, and what it returned if that is another array."""
    inputs = operator.inputs()
    inputs |= {name: value for name, value in changes.items() if name in inputs}
    returned = operator.call_with(inputs, **changes)
    found = [inputs[name] for name in operator.variables]
    return found if operator.returned else [returned, *found]


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
    assert found == EVERY_OPERATOR.keys()
    assert list(inspect.signature(ops.global_norm).parameters) == ["x"]
    expected = ["x", "clip_norm", "use_norm", "in_place"]
    assert list(inspect.signature(ops.clip_by_global_norm).parameters) == expected


@pytest.mark.parametrize("operator", [*EVERY_OPERATOR.values(), ADAM_UPDATE], ids=str)
def test_each_argument_acts(operator: Operator) -> None:
    """But `use_locking`, which waits, and what acts on bad indices or rows alone."""
    for name in (*operator.scalars, *operator.constructor):
        known = operator.known(name)
        if known.moved is not ELSEWHERE:
            plain = results(operator, **known.beside)
            moved = results(operator, **{**known.beside, name: known.moved})
            assert distance(moved, plain) > FAR, name
        else:
            assert name in ("use_locking", "out_of_range", "lazy_update")


@pytest.mark.parametrize("operator", [*OPERATORS.values(), ADAM_UPDATE], ids=str)
@pytest.mark.parametrize("use_locking", [False, True])
def test_use_locking_waits_for_other_calls(operator: Operator, use_locking: bool) -> None:
    """A call stands still as long as another one of the process runs."""
    inputs, plain = operator.inputs(), operator.inputs()
    op = operator.new(use_locking=use_locking)
    thread = threading.Thread(target=op, args=tuple(inputs.values()))
    with locks.exclusive():
        thread.start()
        thread.join(0.03 if use_locking else 60)
        assert thread.is_alive() == use_locking
    thread.join()
    operator.call(plain)
    for name in operator.variables:
        assert_same_bits(inputs[name], plain[name])


@EACH
def test_repr_names_the_attributes(operator: Operator) -> None:
    made = operator.new(**({} if operator is LARS_UPDATE else {"use_locking": True}))
    assert repr(made).startswith(f"{operator.name}(")
    assert all(f"{name}={getattr(made, name)!r}" in repr(made) for name in operator.constructor)


@pytest.mark.parametrize("name", ["ApplyAdamWithAmsgradV2", "Adam", "AdamNoUpdateParam"])
def test_dense_beta1_power_of_one_is_not_refused(name: str) -> None:
    # As in MindSpore, and as documented: the step is infinite.
    operator = OPERATORS[name]
    result = operator.call({**operator.inputs(), "beta1_power": 1.0})
    first = result[0] if isinstance(result, tuple) else result
    assert not np.isfinite(first).any()


@pytest.mark.parametrize("cls", [ops.FusedSparseFtrl, ops.SparseApplyFtrl])
def test_attributes_of_ftrl(cls: Any) -> None:
    """They have no defaults, and are floats."""
    with refused(TypeError, "missing 1 required positional argument: 'lr_power'"):
        cls(0.1, 0.1, 0.1)
    made = cls(np.float32(3e-39), 0.0, np.float64(0.0), 0.0)
    assert (made.lr, made.l1, made.l2, made.lr_power) == (float(np.float32(3e-39)), 0.0, 0.0, 0.0)


def test_sgd_takes_nesterov_or_dampening() -> None:
    with refused(ValueError, "SGD: dampening excludes nesterov: expected 0.0, got 0.5"):
        ops.SGD(nesterov=True, dampening=0.5)
    assert ops.SGD(nesterov=True, dampening=0.0).nesterov


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_without_momentum_is_plain(dampening: float) -> None:
    """Accumulator and stat have no part in it, nor has dampening: as published."""
    inputs, before = SGD.inputs(), SGD.inputs()
    with unchanged(inputs["accum"], inputs["stat"]):
        SGD.call_with(inputs | {"momentum": 0.0}, dampening=dampening)
    expected = before["parameters"] - np.float32(0.1) * inputs["gradient"]
    np.testing.assert_allclose(inputs["parameters"], expected, rtol=1e-6)


def test_learning_rate_of_lars_needs_use_clip() -> None:
    """Without, it has no part in the formula."""
    plain, moved = results(LARS_UPDATE), results(LARS_UPDATE, learning_rate=1e-5)
    assert_same_bits(moved[0], plain[0])


def test_lars_takes_no_other_keyword() -> None:
    """There is nothing to lock: it updates nothing."""
    text = "argument 'use_locking' is unknown: expected one of epsilon, hyperpara, use_clip"
    with refused(TypeError, f"LARSUpdate: {text}"):
        ops.LARSUpdate(use_locking=True)


def test_lars_reads_arrays_in_the_memory_of_each_other() -> None:
    inputs = LARS_UPDATE.inputs()
    same, apart = ({**inputs, "gradient": g} for g in (inputs["weight"], inputs["weight"].copy()))
    with unchanged(same):
        result = LARS_UPDATE.call(same)
    assert_same_bits(result, LARS_UPDATE.call(apart))


@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 1e-39])
def test_lars_of_a_gradient_that_is_zero(epsilon: float) -> None:
    """The factor is |w| / epsilon, also beyond float32; the new gradient is 0, not NaN."""
    zeros = np.zeros((5, 3), np.float32)
    changes = {"gradient": zeros, "norm_gradient": 0.0, "weight_decay": 0.0}
    inputs = {**LARS_UPDATE.inputs(), **changes}
    assert_same_bits(LARS_UPDATE.call(inputs, epsilon=epsilon, hyperpara=1.0), zeros)
