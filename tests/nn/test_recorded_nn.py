"""Optimizers against runs of MindSpore, and those that it does not have against runs of others.

What runs of PyTorch and others say of optimizers that MindSpore has too, the references must meet,
in test_references.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import recorded
import recorded_nn
import recorded_quirks
import recorded_torch
import reference
import reference_elementwise as elementwise
from fusestep import nn
from helpers import assert_same_bits
from recorded import Case, all_cases, assert_close_recorded
from recorded_quirks import Formula

# test_thor_recorded.py has those of nn.thor, which go by layers.
CASES = {name: case for name, case in all_cases("nn_*").items() if case.api != "nn.thor"}

SUMMED = "rows of equal indices are summed first; MindSpore's default target "
FIXED_RATE = (
    "a fixed rate stays as given; MindSpore makes it (lr + 1) - 1 in float32 where another "
    "group has a schedule"
)
# Optimizers whose groups were recorded with a fixed rate beside a schedule.
MIXED_RATES = (
    "Adagrad", "Adam", "AdamWeightDecay", "Momentum", "ProximalAdagrad", "RMSProp", "SGD",
)  # fmt: skip
# Cases that are not compared as they stand, with what fusestep does instead.
QUIRKS = {
    "nn_Adam/amsgrad_nesterov": (
        "use_amsgrad with use_nesterov raises ValueError; MindSpore ignores use_nesterov"),
    "nn_Adam/sparse_default_target_n0": SUMMED + "adds their squares",
    "nn_Adam/sparse_lazy_default_target_n0": SUMMED + "lets the last one win",
    "nn_AdamOffload_LazyAdam/LazyAdam_sparse_default": SUMMED + "lets the last one win",
    "nn_Adagrad/accum0": "no epsilon; MindSpore's CPU kernel adds 1e-8 under the root",
    "nn_Adagrad/no_update_slots": (
        "the accumulator keeps its values; MindSpore's CPU kernel ignores update_slots=False"),
    **{f"nn_{name}/groups_dynamic_lr": FIXED_RATE for name in MIXED_RATES},
}  # fmt: skip
# Deviations of MindSpore from its documentation that fusestep has too.
SHARED_QUIRKS = {"nn_AdaFactor/lr_list"}

# Cases in which an element of this cancels. What is left of it holds the rounding errors of what
# it was, which no order of float32 operations tried here has in common with MindSpore's in every
# element.
CANCELLING = {
    "nn_AdaFactor/defaults": "an averaged update that was 7e-4 is 2e-6",
    "nn_AdaFactor/warmup": "an averaged update that was 2e-7 is 2e-10",
    "nn_AdaFactor/external_lr": "an averaged update that was 8e-3 is 5e-5",
    "nn_AdaFactor/external_lr_scaled": "an averaged update that was 4e-3 is 4e-5",
    "nn_AdaFactor/clip_decay_eps": "an averaged update that was 2e-3 is 3e-5",
    "nn_Adagrad/no_update_slots": "one step takes a weight from 0.5 to 0.01",
    "nn_Adam/sparse_target_cpu": "three steps take a weight from 0.2 to 0.002",
    "nn_Adam/sparse_target_cpu_nesterov_all_rows": "three steps take a weight from 0.4 to 0.006",
    "nn_ASGD/averages_schedule": "a weight goes from 0.09 to 0.002",
    "nn_FTRL/groups_wd_only": "a weight goes from 0.4 to 0.004",
    "nn_FTRL/l2_power": "weights go from 0.2 to 2e-4 and from 0.6 to 8e-4",
    "nn_LARS/plain": "an accumulated gradient that was 0.06 is 7e-4",
    "nn_LARS/wd_clip": "an accumulated gradient that was 0.3 is 0.008",
    "nn_LARS/clip_dynamic_lr": "an accumulated gradient that was 0.7 is 0.004",
    "nn_Momentum/weight_decay": "an accumulated gradient that was 0.6 is 0.004",
    "nn_Momentum/dynamic_wd": "an accumulated gradient that was 0.7 is 0.006",
    "nn_RMSProp/m2": "a moment that was 9e-3 is 4e-4",
}
# More roundings than one: an update of Adafactor goes through three means and three roots, here
# in float32 on both sides. The library's is nearer to the reference than MindSpore's.
ROUNDINGS = {"nn_AdaFactor/warmup": 3.0}

METHODS = [name for name, case in CASES.items() if case.api == "nn.Optimizer"]
COMPARED = [name for name in CASES if name not in QUIRKS and name not in METHODS]


def rounding(case: Case, before: np.ndarray) -> np.ndarray:
    """The magnitude whose rounding errors an element may hold after a step."""
    if case.name not in CANCELLING:
        return np.zeros(before.shape)
    return ROUNDINGS.get(case.name, 1.0) * np.abs(before)


def compare(case: Case, opt: Any) -> None:
    """Run all steps of a case; check every parameter after each, and the states at the end."""
    found = recorded_nn.arrays(opt)
    reached = dict.fromkeys(found, 0.0)
    for t, step in enumerate(case.steps, 1):
        reached = {e: np.maximum(reached[e], rounding(case, array)) for e, array in found.items()}
        assert opt(recorded_nn.gradients(case, step)) == (True,) * len(opt.parameters)
        found = recorded_nn.arrays(opt)
        for entry in found.keys() & step.outputs.keys():
            expected, label = step.outputs[entry], f"{entry} after step {t}"
            assert_close_recorded(found[entry], expected, expected.dtype, label, reached[entry])
    # Of all this only the counts of updates and the rates were not recorded.
    kept = {entry for entry in found if not entry.startswith(("s:step.", "s:learning_rate"))}
    unkept = {f"s:{name}" for name in recorded_nn.unkept_states(case)}
    assert step.outputs.keys() == kept | unkept


def test_every_case_is_compared_or_decided() -> None:
    assert {*COMPARED, *METHODS, *DECIDED} == set(CASES)
    assert DECIDED.keys() == QUIRKS.keys()
    quirks = {name for name, case in CASES.items() if "quirk" in case.meta}
    assert quirks - QUIRKS.keys() == SHARED_QUIRKS
    assert CASES.keys() - set(METHODS) >= CANCELLING.keys() >= ROUNDINGS.keys()


def test_every_file_is_tested() -> None:
    # test_schedules.py has lr_schedules.
    assert recorded.files("*") == ["lr_schedules", *recorded.files("nn_*"), *recorded.files("op_*")]


@pytest.mark.parametrize("name", COMPARED)
def test_recorded(name: str) -> None:
    case = CASES[name]
    opt = recorded_nn.build(case)
    assert [p.name for p in opt.parameters] == [name for name, _ in case.meta["params"]]
    compare(case, opt)


@pytest.mark.parametrize("name", METHODS)
def test_recorded_methods(name: str) -> None:
    case = CASES[name]
    (step,) = case.steps
    opt = recorded_nn.build(case)
    given = recorded_nn.gradients(case, step)
    for method in ("decay_weight", "scale_grad"):
        for i, found in enumerate(getattr(opt, method)(given)):
            entry = f"{method}_{i}"
            assert_close_recorded(found, step.outputs[entry], case.dtype, entry)
    rates = np.atleast_1d(np.float32(opt.get_lr()))
    assert_close_recorded(rates, step.outputs["get_lr"], np.float32, "get_lr")


# --------------------------------------------------------------------------------------- States


@pytest.mark.parametrize("name", [n for n in CASES if recorded_nn.unkept_states(CASES[n])])
def test_states_that_are_not_kept_hold_nothing(name: str) -> None:
    case = CASES[name]
    states = recorded_nn.recorded_states(case)
    # A moment that equals the last step does so up to the rounding of the parameter.
    size = max(float(np.abs(array).max()) for array in case.initial.values())
    for state, expected in recorded_nn.unkept_states(case).items():
        reached = size if state.startswith("moment.") else 0.0
        assert_close_recorded(states[state], expected, case.dtype, state, reached)


@pytest.mark.parametrize("name", [n for n in CASES if n not in METHODS])
def test_final_states_can_be_loaded(name: str) -> None:
    case = CASES[name]
    # What cannot be built with Nesterov's step has the same states without it.
    changed = {"use_nesterov": False} if name == "nn_Adam/amsgrad_nesterov" else {}
    opt = recorded_nn.build(case, **changed)
    # Of MindSpore's states, the recordings leave out the rates.
    rates = {n: a for n, a in opt.state_dict().items() if n.startswith("learning_rate")}
    states = recorded_nn.recorded_states(case)
    opt.load_state_dict(states | rates)
    loaded = opt.state_dict()
    for state in states.keys() - recorded_nn.unkept_states(case):
        assert_same_bits(loaded[state], states[state], state)
    for parameter in opt.parameters:
        assert loaded[f"step.{parameter.name}"] == len(case.steps)


# -------------------------------------------------------------------------------------- Decided


def decided(case: Case, states: Sequence[str], formula: Formula, recorded_by: Formula) -> None:
    """Every step of the library is `formula`; the recording follows `recorded_by` instead."""
    opt = recorded_nn.build(case)
    start = recorded_nn.arrays(opt)
    of_parameter = [
        [f"p{i}", *(f"s:{state}.{name}" for state in states)]
        for i, (name, _) in enumerate(case.meta["params"])
    ]
    for t, step in enumerate(case.steps, 1):
        before = recorded_nn.arrays(opt)
        opt(recorded_nn.gradients(case, step))
        after = recorded_nn.arrays(opt)
        for i, entries in enumerate(of_parameter):
            w, *others = (before[entry] for entry in entries)
            expected = formula(t)(w, recorded_quirks.gradient_of(step, i), *others)
            for entry, values in zip(entries, expected, strict=True):
                label, reached = f"{entry} after step {t}", rounding(case, before[entry])
                assert_close_recorded(after[entry], values, case.dtype, label, reached)

    def follow(by: Formula) -> None:
        for i, entries in enumerate(of_parameter):
            begin = [start[entry] for entry in entries]
            recorded_quirks.assert_follows(case, entries, begin, by, i)

    follow(recorded_by)
    with pytest.raises(AssertionError, match="elements are off"):
        follow(formula)


def amsgrad_with_nesterov(case: Case) -> None:
    """Refused; what MindSpore computes is AMSGrad without Nesterov's step."""
    with pytest.raises(ValueError, match="use_nesterov"):
        recorded_nn.build(case)
    compare(case, recorded_nn.build(case, use_nesterov=False))


def fixed_rate_beside_a_schedule(case: Case) -> None:
    """The rate as given; with the rate that MindSpore really used, its numbers."""
    given = np.float32(case.hyper["learning_rate"])
    found = recorded_nn.build(case).get_lr()[1:]
    assert [np.float32(rate) for rate in found] == [given, given]  # NumPy 1 compares as float64
    used = (given + np.float32(1)) - np.float32(1)
    assert used != given
    compare(case, recorded_nn.build(case, learning_rate=float(used)))


def summed_rows(case: Case, driver: Callable[..., Any], recorded_by: Callable[..., Any]) -> None:
    """Rows of equal indices are summed before Adam's step."""
    powers1, powers2 = (reference.beta_powers(beta, len(case.steps)) for beta in (0.9, 0.999))
    hps = [
        reference.adam_scalars(case.hyper["learning_rate"], 0.9, 0.999, 1e-8, *powers)
        for powers in zip(powers1, powers2, strict=True)
    ]
    decided(
        case, ("moment1", "moment2"),
        lambda t: recorded_quirks.merged(driver, partial(reference.adam, hp=hps[t - 1])),
        lambda t: partial(recorded_by, hp=hps[t - 1]))  # fmt: skip


def adagrad(case: Case, update_slots: bool) -> None:
    """No epsilon, and an accumulator that can be kept."""
    lr = float(np.float32(case.hyper["learning_rate"]))
    decided(
        case, ("accum",), lambda _: partial(elementwise.adagrad, lr=lr, update_slots=update_slots),
        lambda _: partial(recorded_quirks.adagrad, lr=lr))  # fmt: skip


LAZY = partial(summed_rows, driver=reference.lazy_step, recorded_by=recorded_quirks.adam_last_wins)
DECIDED: dict[str, Callable[[Case], None]] = {
    "nn_Adam/amsgrad_nesterov": amsgrad_with_nesterov,
    "nn_Adam/sparse_default_target_n0": partial(
        summed_rows, driver=reference.dense_equivalent_step,
        recorded_by=recorded_quirks.adam_sum_of_squares),
    "nn_Adam/sparse_lazy_default_target_n0": LAZY,
    "nn_AdamOffload_LazyAdam/LazyAdam_sparse_default": LAZY,
    "nn_Adagrad/accum0": partial(adagrad, update_slots=True),
    "nn_Adagrad/no_update_slots": partial(adagrad, update_slots=False),
    **{f"nn_{name}/groups_dynamic_lr": fixed_rate_beside_a_schedule for name in MIXED_RATES},
}  # fmt: skip


@pytest.mark.parametrize("name", QUIRKS)
def test_decided_behaviour(name: str) -> None:
    DECIDED[name](CASES[name])


# FBGEMM's EXACT_ROWWISE_ADAGRAD

RUN = np.load(recorded.DATA / "fbgemm" / "rowwise_adagrad.npz")
DECAYS = {
    "none": {}, "l2": {"weight_decay": 0.1},
    "decouple": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}  # fmt: skip


@pytest.mark.parametrize("mode", DECAYS)
def test_steps_are_those_of_fbgemm(mode: str) -> None:
    """Lookups of one row each, many of them equal: the table and the accumulators of its rows."""
    table = nn.Parameter(RUN["w0"].copy(), "table")
    options: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8, **DECAYS[mode]}
    opt = nn.RowWiseAdagrad([table], **options)
    for k, (ids, gradient) in enumerate(zip(RUN["ids"], RUN["grads"], strict=True)):
        opt((nn.RowTensor(ids, gradient, table.shape),))
        # Sums of up to 20 float32 rows, in another order.
        np.testing.assert_allclose(table.data, RUN[f"{mode}/w"][k], rtol=3e-6, atol=1e-6)
        np.testing.assert_allclose(opt.accum[0], RUN[f"{mode}/momentum1"][k], rtol=2e-6)


# Lion of optax, Adan of pytorch_optimizer, Adam with the usual place of epsilon

# How each is made; its states by their recorded names, with the sign in which they were recorded;
# how many roundings of what they have been the elements of a state may hold, where they cancel.
OF_OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, tuple[str, int]], dict[str, float]]] = {
    "optax_lion": (
        lambda p: nn.Lion(p, 0.01, weight_decay=0.1),
        {"mu": ("exp_avg.p", 1)},
        {"mu": 2.0},  # optax rounds 1 - beta2 once, here it is the difference of float32 numbers
    ),
    "po_adan": (
        lambda p: nn.Adan(p, 0.01, weight_decay=0.1),
        {
            **{name: (f"{name}.p", 1) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq")},
            "previous_grad": ("previous_grad.p", -1)},
        {"exp_avg": 1.0, "exp_avg_diff": 1.0}),
    # Weights alone, to 1e-6: optax corrects biases in float32, where 1 - beta2 has few digits left.
    "optax_adam": (lambda p: nn.Adam(p, 0.01, eps_hat=False), {}, {}),
    **dict.fromkeys(
        ("optax_adamw", "torch_adamw"),
        (
            lambda p: nn.AdamWeightDecay(p, 0.01, eps=1e-8, weight_decay=0.1, correct_bias=True),
            {},
            {})),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHERS)
def test_steps_are_those_of_other_systems(name: str) -> None:
    """Parameters and states after each step."""
    make, states, cancelling = OF_OTHERS[name]
    run = recorded_torch.runs()[name]
    params = [nn.Parameter(x.weights[0].copy(), f"p{i}") for i, x in enumerate(run.traces)]
    opt = make(params)
    for t in range(1, run.steps + 1):
        opt(recorded_torch.gradients(run, t))
        held = opt.state_dict()
        for i, (p, trace) in enumerate(zip(params, run.traces, strict=True)):
            if not states:
                np.testing.assert_allclose(p.data, trace.weights[t], rtol=0, atol=1e-6)
                continue
            assert_close_recorded(p.data, trace.weights[t], np.float32, f"p{i} after step {t}")
            assert states.keys() == trace.states.keys() - {"step"}
            for entry, (ours, sign) in states.items():
                past = trace.states[entry][:t]
                reached = cancelling.get(entry, 0.0) * np.abs(past[:-1]).max(0, initial=0.0)
                label = f"{entry} of p{i} after step {t}"
                assert_close_recorded(
                    sign * held[f"{ours}{i}"], past[-1], np.float32, label, reached
                )
