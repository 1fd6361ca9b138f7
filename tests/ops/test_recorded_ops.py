"""Operators against runs of MindSpore."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import recorded_quirks
import reference
import reference_elementwise as elementwise
from operators import OPERATORS, Operator
from recorded import Case, Step, all_cases, assert_close_recorded

CASES = all_cases("op_*")

# Cases that are not compared as they stand, with what fusestep does instead.
QUIRKS = {
    "op_FusedSparseAdam/nesterov_partial_rows": (
        "absent rows step along beta1*m; MindSpore moves them by uninitialised memory"),
    "op_ApplyAdamWithAmsgradV2/multi_step_float16": (
        "float32 scalars and arithmetic, one rounding at the store; MindSpore rounds every "
        "operation to float16, 1 - 0.999 among them: 2 % too small"),
    "op_FusedSparseFtrl/SparseApplyFtrl_6": (
        "rows of equal indices are summed first; MindSpore applies one after the other"),
    "op_misc_dense/ApplyAdagrad_slots0": (
        "the accumulator keeps its values; MindSpore's CPU kernel ignores update_slots=False"),
    "op_misc_dense/ApplyAdagrad_zero_accum": (
        "no epsilon; MindSpore's CPU kernel adds 1e-8 under the root"),
    "op_misc_dense/ApplyFtrl_l1_0.05_lp0.0": (
        "l1 has the sign of linear; in MindSpore's dense CPU kernel it is always positive"),
    "op_misc_dense/ApplyMomentum_nesterov1": (
        "use_nesterov makes Nesterov's step; MindSpore's CPU kernel ignores it"),
    "op_misc_dense/ApplyRMSProp_big_eps": (
        "epsilon is under the root; MindSpore's CPU kernel adds it to the root in whole SIMD blocks"
    ),
}  # fmt: skip
# Deviations of MindSpore from its documentation that fusestep has too.
SHARED_QUIRKS = {f"op_FusedSparseProximalAdagrad/c{i}" for i in range(4)}
COMPARED = [name for name in CASES if name not in QUIRKS]

# Cases in which an element of this cancels. What is left of it holds the rounding errors of what
# it was, which no order of float32 operations tried here has in common with MindSpore's in every
# element.
CANCELLING = {
    "op_FusedSparseFtrl/SparseApplyFtrl_6": "terms of 6 leave a linear coefficient of 0.04",
    "op_misc_dense/ApplyFtrl_l1_0.0_lp-0.5": "terms of 3 leave a coefficient of -0.02",
    "op_misc_dense/ApplyCenteredRMSProp_mom0.0": "a mean gradient that was 0.1 is 3e-4",
    "op_misc_dense/SGD_wd0.1_mu0.9_d0.0_n1": "an accumulator that was 0.7 is 0.004",
    "op_misc_dense/ApplyCenteredRMSProp_mom0.9": "a mean gradient that was 0.1 is 3e-4",
}

# Recorded with indices out of range, which fusestep drops only when it is told to.
OUT_OF_RANGE = (
    "op_FusedSparseAdam/all_out_of_range", "op_FusedSparseFtrl/FusedSparseFtrl_4",
    "op_FusedSparseProximalAdagrad/c3")  # fmt: skip


POWERS = ("beta1_power", "beta2_power")
SCALARS = (*POWERS, "lr", "beta1", "beta2", "epsilon")
AMSGRAD = ("var", "m", "v", "vhat")
FTRL_SCALARS = ("lr", "l1", "l2", "lr_power")


def operator_of(case: Case) -> Operator:
    """The operator of which a case is."""
    return OPERATORS[case.api.removeprefix("ops.")]


def build(case: Case, other: Operator | None = None, **extra: Any) -> Any:
    """The operator of a case, or another one, with the options of the case."""
    operator = other or operator_of(case)
    known = {name: case.hyper[name] for name in operator.constructor if name in case.hyper}
    return operator.make(**known, **extra)


def apply(op: Any, case: Case, arrays: dict[str, np.ndarray], step: Step) -> dict[str, np.ndarray]:
    """Make one recorded call on `arrays`; everything that is recorded after it."""
    operator = operator_of(case)
    known = {**case.hyper, **step.inputs, **arrays, operator.gradient: step.inputs["grad"]}
    returned = op(*(known[name] for name in operator.arguments))
    if "store_return" in case.meta:
        return {**arrays, case.meta["store_return"]: returned}
    returned = returned if isinstance(returned, tuple) else (returned,)
    for name, array in zip(operator.returned, returned, strict=True):
        np.testing.assert_array_equal(array, arrays[name], err_msg=f"returned {name}")
    return arrays


def copies(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays that a test may write to."""
    return {name: array.copy() for name, array in arrays.items()}


def scalars(case: Case, step: Step, real: Any = np.float32) -> reference.AdamScalars:
    """The scalars of a step of Adam for the reference, rounded to `real`."""
    known = {**case.hyper, **step.inputs}
    return reference.adam_scalars(**{name: float(known[name]) for name in SCALARS}, real=real)


def test_every_case_is_compared_or_decided() -> None:
    assert set(COMPARED) | set(DECIDED) == set(CASES)
    assert DECIDED.keys() == QUIRKS.keys()
    quirks = {name for name, case in CASES.items() if "quirk" in case.meta}
    assert quirks - QUIRKS.keys() == SHARED_QUIRKS
    without = {"AdamWeightDecay", "SparseApplyProximalAdagrad", "ApplyProximalAdagrad"}
    assert {operator_of(case).name for case in CASES.values()} == OPERATORS.keys() - without


def compare(case: Case, op: Any) -> None:
    """Run all steps of a case; check every variable after each."""
    arrays = copies(case.initial)
    reached = dict.fromkeys(arrays, 0.0)
    for t, step in enumerate(case.steps, 1):
        before = copies(arrays)
        found = apply(op, case, arrays, step)
        if case.name in CANCELLING:
            new = recorded_quirks.terms(case, before, found)
            reached = {entry: np.maximum(reached[entry], new[entry]) for entry in new}
        assert found.keys() == step.outputs.keys()
        for entry, expected in step.outputs.items():
            label, most = f"{entry} after step {t}", reached.get(entry, 0.0)
            assert_close_recorded(found[entry], expected, case.dtype, label, most)


@pytest.mark.parametrize("name", COMPARED)
def test_recorded(name: str) -> None:
    dropping = {"out_of_range": "drop"} if name in OUT_OF_RANGE else {}
    compare(CASES[name], build(CASES[name], **dropping))


def not_fused(case: Case) -> Operator | None:
    """That of the same formula: of MindSpore's CPU kernels one sums no rows, one is missing."""
    return OPERATORS.get(operator_of(case).name.replace("FusedSparse", "SparseApply"))


@pytest.mark.parametrize(
    "name", [n for n in COMPARED if not_fused(CASES[n]) not in (None, operator_of(CASES[n]))]
)
def test_recorded_by_the_operator_that_is_not_fused(name: str) -> None:
    compare(CASES[name], build(CASES[name], not_fused(CASES[name]), out_of_range="drop"))


def nesterov_on_absent_rows(case: Case) -> None:
    """Named rows and both moments as recorded, all rows as the reference has them."""
    op = build(case)
    before = copies(case.initial)
    for t, step in enumerate(case.steps, 1):
        hp = scalars(case, step)
        arrays = copies(before)
        apply(op, case, arrays, step)
        expected = reference.dense_equivalent_step(
            partial(reference.adam, hp=hp, nesterov=True), before["var"], step.inputs["indices"],
            step.inputs["grad"], before["m"], before["v"])  # fmt: skip
        for entry, values in zip(("var", "m", "v"), expected, strict=True):
            assert_close_recorded(arrays[entry], values, case.dtype, f"{entry} after step {t}")
        for entry, select in (("var", case.meta["defined_rows"][str(t)]), ("m", ...), ("v", ...)):
            assert_close_recorded(
                arrays[entry][select], step.outputs[entry][select], case.dtype,
                f"recorded {entry} after step {t}")  # fmt: skip
        # The recorded step 2 goes on from what MindSpore made of the absent rows.
        before = step.outputs


def amsgrad(case: Case, step: Step, at: Any, real: Any) -> dict[str, np.ndarray]:
    """The exact step from `at` with scalars rounded to `real`."""
    w, *states = (at[entry] for entry in AMSGRAD)
    new = reference.adam_amsgrad(w, step.inputs["grad"], *states, scalars(case, step, real))
    return dict(zip(AMSGRAD, new, strict=True))


def float16_variables(case: Case) -> None:
    """The parameter as recorded; every variable as one rounding of the exact step. The recorded
    second moments are those of scalars in float16."""
    op, arrays, before = build(case), copies(case.initial), case.initial
    for t, step in enumerate(case.steps, 1):
        expected = amsgrad(case, step, arrays, np.float32)
        apply(op, case, arrays, step)
        for entry, values in expected.items():
            assert_close_recorded(arrays[entry], values, case.dtype, f"{entry} after step {t}")
        found = step.outputs
        assert_close_recorded(arrays["var"], found["var"], case.dtype, f"recorded var, step {t}")
        original = amsgrad(case, step, before, np.float16)
        for entry in ("v", "vhat"):
            label = f"recorded {entry} after step {t}"
            assert_close_recorded(found[entry], original[entry], case.dtype, label)
        before = found


def decided(case: Case, by: Any, recorded_by: Any) -> None:
    """Every step of the library is `by`; the recording follows `recorded_by` instead."""
    op, arrays, entries = build(case), copies(case.initial), operator_of(case).returned
    for t, step in enumerate(case.steps, 1):
        before = copies(arrays)
        w, *states = (before[entry] for entry in entries)
        expected = by(w, recorded_quirks.gradient_of(step), *states)
        apply(op, case, arrays, step)
        cancels = case.name in CANCELLING
        reached = recorded_quirks.terms(case, before, arrays) if cancels else {}
        for entry, values in zip(entries, expected, strict=True):
            label, most = f"{entry} after step {t}", reached.get(entry, 0.0)
            assert_close_recorded(arrays[entry], values, case.dtype, label, most)
    start = [case.initial[entry] for entry in entries]
    recorded_quirks.assert_follows(case, entries, start, lambda _: recorded_by)
    with pytest.raises(AssertionError, match="elements are off"):
        recorded_quirks.assert_follows(case, entries, start, lambda _: by)


def rounded(case: Case, *names: str) -> dict[str, float]:
    """Recorded hyper-parameters as float32 numbers."""
    return {name: float(np.float32(case.hyper[name])) for name in names}


def adagrad(case: Case) -> None:
    """Without an epsilon, and with an accumulator that can be kept."""
    lr = rounded(case, "lr")["lr"]
    step = partial(elementwise.adagrad, lr=lr, update_slots=case.hyper["update_slots"])
    decided(case, step, partial(recorded_quirks.adagrad, lr=lr))


def dense_ftrl(case: Case) -> None:
    """With the sign of `linear` on l1."""
    h = rounded(case, *FTRL_SCALARS)
    decided(case, partial(elementwise.ftrl, **h), partial(recorded_quirks.ftrl, **h))


def rows_of_ftrl(case: Case) -> None:
    """Once for every index, with the sum of its rows."""
    step = partial(elementwise.ftrl, **rounded(case, *FTRL_SCALARS))
    summed = recorded_quirks.merged(reference.lazy_step, step)
    decided(case, summed, partial(recorded_quirks.one_by_one, step))


def nesterov_momentum(case: Case) -> None:
    """With Nesterov's step."""
    h = rounded(case, "learning_rate", "momentum")
    step = partial(elementwise.momentum, lr=h["learning_rate"], momentum=h["momentum"])
    decided(case, partial(step, nesterov=True), step)


def rmsprop(case: Case) -> None:
    """With epsilon under the root."""
    h = rounded(case, "learning_rate", "decay", "momentum", "epsilon")
    h["lr"], h["rho"] = h.pop("learning_rate"), h.pop("decay")
    h["one_minus_rho"] = float(np.float32(1 - h["rho"]))
    decided(case, partial(elementwise.rmsprop, **h), partial(recorded_quirks.rmsprop, **h))


DECIDED = {
    "op_FusedSparseFtrl/SparseApplyFtrl_6": rows_of_ftrl,
    "op_misc_dense/ApplyAdagrad_slots0": adagrad, "op_misc_dense/ApplyAdagrad_zero_accum": adagrad,
    "op_misc_dense/ApplyFtrl_l1_0.05_lp0.0": dense_ftrl,
    "op_misc_dense/ApplyMomentum_nesterov1": nesterov_momentum,
    "op_misc_dense/ApplyRMSProp_big_eps": rmsprop,
    "op_FusedSparseAdam/nesterov_partial_rows": nesterov_on_absent_rows,
    "op_ApplyAdamWithAmsgradV2/multi_step_float16": float16_variables,
}  # fmt: skip


@pytest.mark.parametrize("name", QUIRKS)
def test_decided_behaviour(name: str) -> None:
    DECIDED[name](CASES[name])
