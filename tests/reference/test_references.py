"""The float64 references of the optimizers beside Adam, against runs of the original systems.

The library takes no part: a reference is stepped from the recorded start with the recorded
gradients, and everything that was recorded is compared. What remains is the rounding of the
original system, so an element may also miss by two units in the last place of every value that
it has had.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recorded
import recorded_torch
import reference
import reference_elementwise as elementwise
import reference_layerwise as layerwise
from recorded import Case

Scalars = SimpleNamespace
# (w, g, *states) -> (w, *states)
Formula = Callable[..., tuple[Any, ...]]


def bind(step: Callable[..., Any], h: Scalars, **changed: Any) -> Any:
    """A reference with the scalars that it names."""
    names = inspect.getfullargspec(step).kwonlyargs
    return partial(step, **{k: v for k, v in {**vars(h), **changed}.items() if k in names})


def compare(found: Any, expected: np.ndarray, label: str, reached: Any, slack: float = 1) -> None:
    """Every element, at the precision of what was recorded."""
    expected = expected.reshape(np.shape(found))
    if expected.dtype == np.float64:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15, err_msg=label)
    else:
        found = np.asarray(found).astype(expected.dtype)
        recorded.assert_close_recorded(found, expected, expected.dtype, label, slack * reached)


def add_sizes(reached: list[Any], values: Any) -> list[Any]:
    """Magnitudes summed over the steps, as their rounding errors add up."""
    return [total + np.abs(x) for total, x in zip(reached, values, strict=True)]


# Where the originals carry more rounding than that, by how much; see `add_sizes`.
SLACK = {
    # Three means and three roots in float32 make an update, and the average of updates cancels.
    "nn_AdaFactor/warmup": 2,
    # Epsilon beside the root is 7e-7 of the smallest root, and the buffer cancels.
    "torch_rmsprop_centered_mom": 3,
}


# ------------------------------------------------------------------------------------ MindSpore

# Not compared, with the reason: the references have the documented formula.
QUIRKS = {
    "op_misc_dense/ApplyAdagrad_slots0": "CPU updates the accumulator all the same",
    "op_misc_dense/ApplyAdagrad_zero_accum": "CPU adds 1e-8 under the root, which shows here",
    "op_misc_dense/ApplyFtrl_l1_0.05_lp0.0": "CPU has +l1 for both signs of linear",
    "op_misc_dense/ApplyRMSProp_big_eps": "CPU adds epsilon to the root in whole SIMD blocks",
    "op_misc_dense/ApplyMomentum_nesterov1": "CPU ignores use_nesterov",
    "op_FusedSparseFtrl/SparseApplyFtrl_6": "equal indices one after the other, not summed",
    "nn_Adagrad/accum0": "CPU adds 1e-8 under the root, which shows where g**2 is 5e-4",
    "nn_Adagrad/no_update_slots": "CPU updates the accumulator all the same",
}
# Recorded with a quirk that the references share: the form of the kernels was chosen.
SHARED_QUIRKS = {
    *(f"op_FusedSparseProximalAdagrad/c{i}" for i in range(4)),
    "nn_AdaFactor/lr_list",
}


@dataclass(frozen=True)
class Family:
    """One recorded callable.

    `formula` makes a step of the scalars at hand. `states` are the recorded names in the order
    of the reference, for optimizers with the initial values, given or by hyper-parameter.
    """

    formula: Callable[[Scalars], Formula]
    states: dict[str, float | str]
    defaults: dict[str, Any] = field(default_factory=dict)
    variable: str = "var"
    decoupled: bool = False


def plain(step: Formula) -> Callable[[Scalars], Formula]:
    """Recorded hyper-parameters that have the names of the reference's."""
    return lambda h: bind(step, h)


def momentum(h: Scalars) -> Formula:
    return bind(elementwise.momentum, h, nesterov=h.use_nesterov)


def rmsprop(h: Scalars) -> Formula:
    step = elementwise.rmsprop_centered if h.centered else elementwise.rmsprop
    return bind(step, h, rho=h.decay, one_minus_rho=complement(h.decay))


def sgd(h: Scalars) -> Formula:
    """Without momentum the two states exist but stay as they are."""
    if h.momentum == 0:
        return lambda w, g, *states: (*elementwise.sgd(w, g, lr=h.lr), *states)
    return bind(elementwise.sgd_stat, h, one_minus_dampening=complement(h.dampening))


def lamb(h: Scalars) -> Formula:
    """The recorded leaf was the current kernel in the cases _v2, that of 1.x in _v1.

    The latter knew one decay only, so `norm_decay` is not told apart from `decay` here.
    """
    powers = {"beta1_power": h.beta1**h.t, "beta2_power": h.beta2**h.t}
    step = layerwise.lamb_clipped if h.case.endswith("_v1") else layerwise.lamb
    return bind(step, h, decay=h.parameter_decay, norm_decay=h.parameter_decay, **powers)


def lars(h: Scalars) -> Formula:
    """LARS around Momentum, whose decay it takes over; filtered parameters have none at all."""
    step = momentum(h)
    if "LayerNorm" in h.name or "bias" in h.name:
        return step
    lr = h.lr if h.use_clip else None
    condition = bind(layerwise.lars_gradient, h, decay=h.parameter_decay, lr=lr)
    return lambda w, g, accum: step(w, condition(w, g), accum)


def adafactor(h: Scalars) -> Formula:
    """A rate that is no float turns off the scaling by the parameter."""
    relative = min(1e-6 * h.t if h.warmup_init else 1e-2, h.t**-0.5)
    return bind(
        layerwise.adafactor,
        h,
        lr=relative if h.relative_step else h.lr,
        beta2=1 - h.t**-h.decay_rate,
        one_minus_beta2=h.t**-h.decay_rate,
        epsilon1=real(h.eps[0]),
        epsilon2=real(h.eps[1]),
        scale_parameter=h.scale_parameter and not isinstance(h.learning_rate, list),
        decay=h.parameter_decay,
    )


BETAS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}
SGD = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
PROXIMAL = {"accum": 0.1, "l1": 0.0, "l2": 0.0}
RMSPROP = {"decay": 0.9, "momentum": 0.0, "epsilon": 1e-10, "centered": False}
FTRL = {"initial_accum": 0.1, "lr_power": -0.5, "l1": 0.0, "l2": 0.0}
HEAVY_BALL = {"momentum": 0.9, "use_nesterov": False}
ADAFACTOR = {"learning_rate": 0.0, "eps": [1e-30, 1e-3], "decay_rate": 0.8, "beta1": 0.9}
ADAFACTOR |= {"scale_parameter": True, "relative_step": True, "warmup_init": False}
ftrl, proximal = plain(elementwise.ftrl), plain(elementwise.proximal_adagrad)
FAMILIES = {
    "ops.ApplyAdagrad": Family(plain(elementwise.adagrad), {"accum": 0}),
    "ops.ApplyFtrl": Family(ftrl, {"accum": 0, "linear": 0}),
    "ops.FusedSparseFtrl": Family(ftrl, {"accum": 0, "linear": 0}),
    "ops.SparseApplyFtrl": Family(ftrl, {"accum": 0, "linear": 0}),
    "ops.FusedSparseProximalAdagrad": Family(proximal, {"accum": 0}),
    "ops.ApplyRMSProp": Family(rmsprop, {"mean_square": 0, "moment": 0}, {"centered": False}),
    "ops.ApplyCenteredRMSProp": Family(
        rmsprop, {"mean_gradient": 0, "mean_square": 0, "moment": 0}, {"centered": True}
    ),
    "ops.ApplyMomentum": Family(momentum, {"accumulation": 0}, variable="variable"),
    "ops.SGD": Family(sgd, {"accum": 0, "stat": 0}, variable="parameters"),
    "nn.AdaFactor": Family(adafactor, {}, ADAFACTOR, decoupled=True),
    "nn.Adagrad": Family(plain(elementwise.adagrad), {"accum": "accum"}, {"accum": 0.1}),
    "nn.FTRL": Family(ftrl, {"moments": "initial_accum", "linear": 0}, FTRL),
    "nn.LARS(nn.Momentum(momentum=.9))": Family(lars, {"moments": 0}, HEAVY_BALL, decoupled=True),
    "nn.Lamb": Family(lamb, {"lamb_m": 0, "lamb_v": 0}, BETAS, decoupled=True),
    "nn.Momentum": Family(momentum, {"moments": 0}, HEAVY_BALL),
    "nn.ProximalAdagrad": Family(proximal, {"accum": "accum"}, PROXIMAL),
    "nn.RMSProp": Family(rmsprop, {"mean_square": 1, "moment": 0}, RMSPROP),
    "nn.SGD": Family(sgd, {"accum": 0, "stat": 1}, SGD),
}
CASES = {name: c for name, c in recorded.all_cases("*").items() if c.api in FAMILIES}
COMPARED = [name for name in CASES if name not in QUIRKS]


def real(x: float) -> float:
    """A hyper-parameter as MindSpore holds it, in float32."""
    return float(np.float32(x))


def complement(x: float) -> float:
    """``1 - x`` between float32 numbers."""
    return float(np.float32(1) - np.float32(x))


SCHEDULES = {"0.1/(1+step)": lambda s: 0.1 / (1 + s), "0.05+0.01*step": lambda s: 0.05 + 0.01 * s}


def at(value: Any, step: int) -> float:
    """A number, a list by step or the text of either or of a schedule, at step 0, 1, 2, ..."""
    if isinstance(value, str):
        value = SCHEDULES.get(value, lambda _: float(value))(step)
    return real(value[step] if isinstance(value, list) else value)


def group_option(case: Case, name: str, key: str, default: Any) -> Any:
    """``lr`` or ``wd`` of a parameter: that of its group if it has one."""
    groups = dict(re.findall(r"\{([\w.]+): ([^}]*)\}", case.hyper.get("groups", "")))
    return dict(re.findall(r"(\w+)=([^,]+)", groups.get(name, ""))).get(key, default)


def weight_decay(case: Case, name: str, step: int) -> float:
    """Decay of a parameter; without groups most optimizers spare some by name."""
    spares = "groups" not in case.hyper and case.api not in ("nn.FTRL", "nn.AdaFactor")
    if spares and re.search("beta|gamma", name):
        return 0.0
    return at(group_option(case, name, "wd", case.hyper.get("weight_decay", 0.0)), step)


def scalars(case: Case, name: str, t: int) -> Scalars:
    """Everything that a formula may ask for at step t, the numbers rounded to float32."""
    given = {**FAMILIES[case.api].defaults, **case.hyper}
    h = Scalars(**{k: real(v) if isinstance(v, float) else v for k, v in given.items()})
    h.case, h.name, h.t = case.name, name, t
    h.lr = at(group_option(case, name, "lr", given.get("lr", given.get("learning_rate"))), t - 1)
    if "lr=0.1/(1+step)" in given.get("groups", "") and name != "dense.weight":
        # Beside a schedule MindSpore makes every fixed rate a sum of float32 numbers.
        h.lr = real(real(h.lr + 1.0) - 1.0)
    h.parameter_decay = weight_decay(case, name, t - 1)
    for beta in {"beta1", "beta2"} & given.keys():
        setattr(h, f"one_minus_{beta}", complement(given[beta]))
    return h


def pipeline(case: Case, formula: Formula, h: Scalars) -> Formula:
    """What an optimizer does to a gradient first: coupled decay times the scale, then unscaling."""
    if FAMILIES[case.api].decoupled:
        return formula
    scale = case.hyper.get("loss_scale", 1.0)
    decay = real(h.parameter_decay * scale)
    return lambda w, g, *states: formula(w, (g + decay * w) * real(1 / scale), *states)


def advance(formula: Formula, w: Any, inputs: dict[str, np.ndarray], i: int, states: Any) -> Any:
    """One step of parameter `i`; rows outside of a table were dropped by the original."""
    if "indices" in inputs:
        inside = (inputs["indices"] >= 0) & (inputs["indices"] < len(w))
        indices, rows = inputs["indices"][inside], inputs["grad"][inside]
        return reference.lazy_step(formula, w, indices, rows, *states)
    gradient = inputs["grad"] if "grad" in inputs else inputs[f"g{i}"]
    return formula(w, reference.wide(gradient), *states)


def replay(case: Case, i: int, name: str, start: dict[str, Any]) -> None:
    """Step parameter `i` and its states; compare each entry of `start` wherever it was recorded."""
    family, values = FAMILIES[case.api], [reference.wide(x) for x in start.values()]
    reached = add_sizes([0.0] * len(values), values)
    for t, step in enumerate(case.steps, 1):
        h = scalars(case, name, t)
        old, *states = values
        values = advance(pipeline(case, family.formula(h), h), old, step.inputs, i, states)
        reached = add_sizes(reached, values)
        if "linear" in family.states:
            # Each step adds the difference of two terms of this size, and its rounding stays.
            reached[2] += np.abs(old) * values[1] ** -h.lr_power / h.lr
        for entry, value, most in zip(start, values, reached, strict=True):
            if entry in step.outputs:
                label = f"{entry} after step {t}"
                compare(value, step.outputs[entry], label, most, SLACK.get(case.name, 1))


def initial_states(case: Case, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """States of a parameter as an optimizer makes them."""
    if case.api != "nn.AdaFactor":
        family = FAMILIES[case.api]
        given = {**family.defaults, **case.hyper}
        states = {"mean_grad": 0, **family.states} if given.get("centered") else family.states
        return {f"s:{k}.{name}": np.full(shape, given.get(v, v)) for k, v in states.items()}
    factors = {"row_": shape[:-1], "col_": shape[:-2] + shape[-1:]}
    second = factors if len(shape) > 1 else {"": shape}
    squares = {f"s:exp_avg_sq_{k}{name}": np.zeros(v) for k, v in second.items()}
    return {f"s:exp_avg.{name}": np.zeros(shape), **squares}


def test_every_case_is_compared_or_excused() -> None:
    assert set(FAMILIES) == {case.api for case in CASES.values()}
    quirks = {name for name, case in CASES.items() if "quirk" in case.meta}
    assert quirks - QUIRKS.keys() == SHARED_QUIRKS
    assert QUIRKS.keys() < CASES.keys()


@pytest.mark.parametrize("name", [name for name in COMPARED if name.startswith("op_")])
def test_operator(name: str) -> None:
    case = CASES[name]
    entries = (FAMILIES[case.api].variable, *FAMILIES[case.api].states)
    assert all(step.outputs.keys() == set(entries) for step in case.steps)
    replay(case, 0, "", {entry: case.initial[entry] for entry in entries})


@pytest.mark.parametrize("name", [name for name in COMPARED if name.startswith("nn_")])
def test_optimizer(name: str) -> None:
    case = CASES[name]
    left = dict(case.steps[-1].outputs)
    for i, (parameter, shape) in enumerate(case.meta["params"]):
        start = {f"p{i}": case.initial[f"p{i}"], **initial_states(case, parameter, tuple(shape))}
        replay(case, i, parameter, start)
        left = {entry: value for entry, value in left.items() if entry not in start}
    for entry, value in left.items():
        # Counters, the momentum that some keep as a state, and what AdaFactor leaves unused.
        momentum = np.float32(case.hyper.get("momentum", 0.9 if "LARS" in case.api else 0.0))
        expected = momentum if entry == "s:momentum" else np.float32(0)
        assert value == (len(case.steps) if entry.endswith("_step") else expected)


# ------------------------------------------------------------- PyTorch, pytorch_optimizer, optax

RUNS = recorded_torch.runs()
# Recorded beside the states: counters, norms that say how a step was made, places of factors.
BY_PRODUCTS = {"step", "RMS", "weight_norm", "adam_norm", "trust_ratio", "v_row", "v_col"}


@pytest.mark.parametrize("name", RUNS)
def test_run(name: str) -> None:
    run = RUNS[name]
    for i, trace in enumerate(run.traces):
        states = recorded_torch.states(run, i)
        assert trace.states.keys() - states.keys() <= BY_PRODUCTS
        values = [reference.wide(trace.weights[0]), *states.values()]
        reached = add_sizes([0.0] * len(values), values)
        for t in range(1, run.steps + 1):
            gradient = recorded_torch.gradients(run, t)[i]
            values = recorded_torch.formula(run, t)(values[0], gradient, *values[1:])
            reached = add_sizes(reached, values)
            expected = [trace.weights[t], *(trace.states[state][t - 1] for state in states)]
            for entry in zip(values, expected, ["w", *states], reached, strict=True):
                compare(*entry, SLACK.get(name, 1))


# ------------------------------------------------------------------- What no recording comes to


def test_elementwise_branches() -> None:
    zero, one = np.zeros(2), np.ones(2)
    for step, scalars in ((elementwise.adagrad, {}), (elementwise.proximal_adagrad, {"l1": 1.0})):
        w, accum = bind(step, Scalars(lr=0.1, l2=1.0, **scalars))(one, zero, zero)
        np.testing.assert_array_equal([w, accum], [one, zero])
    _, accum = elementwise.adagrad(one, one, one, lr=0.1, update_slots=False)
    np.testing.assert_array_equal(accum, one)
    h = Scalars(lr=1.0, rho=1.0, one_minus_rho=0.0, momentum=1.0, epsilon=1.0)
    centered = bind(elementwise.rmsprop_centered, h)
    w, *_, moment = centered(one, one, [2.0, 0.0], zero, one)  # variance -3 and 1
    np.testing.assert_array_equal([w, moment], [[1.0, -1.0], [1.0, 2.0]])
    w, *_ = bind(elementwise.rmsprop, h, epsilon=3.0)(one, one, one, zero)
    np.testing.assert_array_equal(w, one / 2)
    h = Scalars(lr=1.0, momentum=0.5, one_minus_dampening=0.1)
    new = bind(elementwise.sgd_stat, h)(one, one, [4.0, 4.0], [1.0, 0.0])
    np.testing.assert_allclose(new, [[0.0, -1.1], [1.0, 2.1], [0.0, 0.0]])


def test_lamb_ratios() -> None:
    h = {"lr": 1.0, "beta1": 0.0, "one_minus_beta1": 1.0, "beta2": 0.0, "one_minus_beta2": 1.0}
    h |= {"beta1_power": 0.0, "beta2_power": 0.0, "epsilon": 0.0, "decay": 0.0}
    zero, four = np.zeros(1), np.full(1, 4.0)
    for step in (layerwise.lamb, partial(layerwise.lamb_clipped, norm_decay=0.5)):
        assert step(zero, four, zero, zero, **h)[0] == -1.0
    assert layerwise.lamb(9 * four, four, zero, zero, **h)[0] == 0.0
    clipped = partial(layerwise.lamb_clipped, 9 * four, four, zero, zero, **h)
    assert clipped(norm_decay=0.0)[0] == 26.0
    assert clipped(norm_decay=0.5)[0] == 36.0 - 36.0 / 19.0
    h["beta1"] = h["beta2"] = 1.0
    assert layerwise.lamb_clipped(four, zero, four, 4 * four, norm_decay=0.0, **h)[0] == 3.0


def test_adafactor_branches() -> None:
    h = {"lr": 0.1, "beta2": 0.5, "one_minus_beta2": 0.5}
    w, g, square = np.ones(3), np.full(3, 0.3), np.full(3, 0.2)
    bare, compressed = (
        layerwise.adafactor(w, g, None, square, compression=flag, **h) for flag in (False, True)
    )
    np.testing.assert_array_equal(compressed[0], bare[0])
    np.testing.assert_array_equal(compressed[2], np.float16(bare[2]))
    small, *_ = layerwise.adafactor(0 * w, g, None, square, epsilon2=0.5, **h)
    np.testing.assert_allclose(small, (bare[0] - w) / 2)


def test_global_norm() -> None:
    rows = (np.array([2, 0, 2]), np.array([[1.0], [4.0], [2.0]]))
    assert layerwise.global_norm([rows, np.full(3, 2.0), np.zeros((0, 4))]) == np.sqrt(37)
    (indices, values), dense = layerwise.clip_by_global_norm([rows, np.full(6, 2.0)], 3.5)
    np.testing.assert_array_equal(indices, rows[0])
    np.testing.assert_allclose(values, rows[1] / 2)
    np.testing.assert_allclose(dense, 1.0)
    assert layerwise.clip_by_global_norm([np.ones(4)], 3.0)[0].tolist() == [1.0] * 4
