"""Rules: the formulas in plain Python, the compiled steps to the ulp, and that all scalars act."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusestep import nn, ops
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.formula import running_power
from fusestep.kernels.rule import Rule, hp_type
from fusestep.kernels.rules import adam as rules
from fusestep.kernels.rules import gradient as prologues
from fusestep.kernels.rules import mxnet
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.step import DenseUpdate, Variables

import reference
from helpers import FAR, assert_within_ulps, distance
from rule_cases import with_prologues

HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
# Powers of the third update; the fourth scalar of decay is only in its rule.
POWERS = {"beta1_power": 0.9**3, "beta2_power": 0.99**3}
DECAY = {"decay": 0.05}


# Each rule of the family: how its scalars are made, and the reference step (w, g, *states, hp).
RULES: dict[str, tuple[Rule, dict[str, float], Callable[..., Any]]] = {
    "adam": (rules.ADAM, POWERS, reference.adam),
    "nesterov": (
        rules.ADAM_NESTEROV,
        POWERS,
        lambda *a: reference.adam(*a, nesterov=True),
    ),
    "amsgrad": (rules.ADAM_AMSGRAD, POWERS, reference.adam_amsgrad),
    "delta": (rules.ADAM_DELTA, POWERS, lambda _, *a: reference.adam_delta(*a)),
    "nesterov_delta": (
        rules.ADAM_NESTEROV_DELTA,
        POWERS,
        lambda _, *a: reference.adam_delta(*a, nesterov=True),
    ),
    "weight_decay": (rules.ADAM_WEIGHT_DECAY, DECAY, reference.adam_weight_decay),
    "mxnet": (mxnet.MXNET_ADAM, POWERS, reference.adam),
    "mxnet_decay": (mxnet.MXNET_ADAMW, DECAY, reference.adam_weight_decay),
    "mxnet_decay_composed": (mxnet.MXNET_ADAMW_COMPOSED, DECAY, reference.adamw_composed),
}
EACH_RULE = pytest.mark.parametrize("name", RULES)


def scalars(name: str, real: Any) -> tuple[tuple[Any, ...], reference.AdamScalars]:
    """The scalars of a rule, rounded to `real`, for the library and for the reference."""
    rule, extra, _ = RULES[name]
    hp = hp_type(rule, ())
    expected = reference.adam_scalars(**HYPER, **extra, real=real)
    if name.startswith("mxnet"):  # how it rounds is tested with its optimizers
        return hp(*(real(getattr(expected, field)) for field in rule.hp)), expected
    lr, *constants = HYPER.values()
    if rule is rules.ADAM_WEIGHT_DECAY:
        made = rules.adam_weight_decay_scalars(real, lr, DECAY["decay"], 3, tuple(constants), ())
    else:
        made = rules.adam_scalars(real, lr, 0.0, 3, tuple(constants), tuple(POWERS.values()))
    return hp(*made), expected


def samples(n: int, n_states: int, seed: int) -> list[np.ndarray]:
    """Parameter, gradient and states over four decades, with zeros and cancelling moments."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.uniform(np.log(1e-2), np.log(1e2), (2 + n_states, n)))
    w, g, m = size[:3] * rng.choice([-1.0, 1.0], (3, n))
    v = size[3] ** 2
    # beta1*m + (1 - beta1)*g is nearly 0 for a tenth of the elements, and exactly 0 for others.
    k = n // 10
    m[:k] = -g[:k] / 9
    w[k : 2 * k] = g[2 * k : 3 * k] = m[3 * k : 4 * k] = v[4 * k : 5 * k] = 0.0
    return [w, g, m, v, *size[4:] ** 2]


@EACH_RULE
def test_rule_in_plain_python(name: str) -> None:
    """Scalars in, scalars out: each element by itself, as the formulas have it."""
    rule, _, formula = RULES[name]
    hp, expected_hp = scalars(name, np.float64)
    arrays = samples(40, len(rule.states), seed=1)
    expected = np.array(formula(*arrays, expected_hp))
    n = len(arrays) - len(rule.beside)  # of which its function knows nothing
    arrays, expected = arrays[:n], expected[: n - 1]
    for i, element in enumerate(zip(*arrays, strict=True)):
        found = rule.update(*element, hp)
        assert all(isinstance(x, float) for x in found)
        np.testing.assert_allclose(found, expected[:, i], rtol=1e-13, atol=1e-15)


def test_prologue_in_plain_python() -> None:
    hp = SimpleNamespace(weight_decay=0.5, no_decay=0.0, grad_scale=0.25)
    assert prologues.coupled_decay(3.0, -4.0, hp) == 1.0
    assert prologues.scale(3.0, -4.0, hp) == 0.75
    hp.weight_decay = 0.0
    assert prologues.coupled_decay(3.0, np.inf, hp) == 3.0
    hp = SimpleNamespace(clip_bound=0.5)
    given = [0.5, -0.5, 0.25, 7.0, -7.0, np.inf, -np.inf]
    clipped = [prologues.clip(g, 1.0, hp) for g in given]
    assert clipped == [0.5, -0.5, 0.25, 0.5, -0.5, 0.5, -0.5]
    assert np.isnan(prologues.clip(np.nan, 1.0, hp))


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_scalars_are_rounded_before_they_are_subtracted(real: Any) -> None:
    hp, expected = scalars("adam", real)
    assert all(type(x) is real for x in hp)
    assert hp.one_minus_beta2 == real(1) - real(0.99)
    assert hp.step_size == real(expected.step_size)
    assert hp.epsilon == real(1e-3)
    # 1 - 0.999 between float32 numbers is 1.3e-5 below 0.001, which shows in every step.
    constants = (0.9, 0.999, 1e-6)
    ours = rules.adam_weight_decay_scalars(np.float32, 0.1, 0.0, 1, constants, ())
    assert ours[1] == np.float32(0.0009999871) != np.float32(0.001)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999])
def test_running_power_is_the_rounded_product(beta: float) -> None:
    expected = reference.beta_powers(beta, 50)
    assert [running_power(np.float32, beta, t) for t in range(1, 51)] == expected
    # Not in order either: a resumed run asks for one in the middle.
    assert running_power(np.float32, beta, 37) == expected[36]
    assert running_power(np.float64, beta, 7) == pytest.approx(beta**7, rel=1e-14)
    assert running_power(np.float32, beta, 0) == 1


def test_amsgrad_keeps_a_nan_of_v() -> None:
    hp, _ = scalars("amsgrad", np.float64)
    _, _, v, vhat = rules.adam_amsgrad(1.0, np.nan, 0.0, 0.5, 7.0, hp)
    assert np.isnan([v, vhat]).all()


PROLOGUE = (prologues.COUPLED_DECAY, prologues.SCALE)
# Neither is exact in binary, so that their rounding counts.
DECAY_FACTOR, GRAD_SCALE = 0.003, 0.3


def run_compiled(
    name: str, arrays: list[np.ndarray], g: np.ndarray, prologue: tuple[Any, ...]
) -> None:
    """One compiled step on `arrays` (parameter, then states), in place."""
    rule, real = RULES[name][0], np.float64 if arrays[0].dtype == np.float64 else np.float32
    hp, _ = scalars(name, real)
    row = (*hp, DECAY_FACTOR, 0.0, GRAD_SCALE) if prologue else hp
    assert len(hp_type(rule, prologue)._fields) == len(row)
    variables, places = Variables.of([tuple(arrays)]), np.array([g.ctypes.data])
    given = places, STORAGES[g.dtype], np.array([row], real), np.zeros(1, np.int64)
    commit([DenseUpdate(rule, prologue, variables, *given).prepared()])


def largest_terms(
    name: str, w: Any, g: Any, states: list[Any], hp: Any, expected: tuple[Any, ...]
) -> list[np.ndarray]:
    """What each result is a sum of, with every term's absolute value.

    Moments: both summands. The step: the numerator so measured over the denominator that the
    rounding errors are divided by. A parameter: its old value, the step and the decay.
    """
    m, v = reference.moments(np.abs(g), np.abs(states[0]), states[1], hp)
    ahead = hp.beta1 * m + hp.one_minus_beta1 * np.abs(g) if "nesterov" in name else m
    denominator = np.sqrt(expected[3] if name == "amsgrad" else expected[2]) + hp.epsilon
    rate = hp.lr if "decay" in name else hp.step_size
    step = rate * ahead / denominator
    old = 0.0 if name.endswith("delta") else np.abs(w) * (1 + hp.lr * hp.decay)
    return [old + step, m, v, *([expected[-1]] if name == "amsgrad" else [])]


STEPPED = with_prologues(RULES, PROLOGUE)


@pytest.mark.parametrize(("name", "dtype", "prologue"), STEPPED)
def test_compiled_step_within_4_ulps(name: str, dtype: np.dtype, prologue: tuple[Any, ...]) -> None:
    """Three steps, each against the float64 reference on the state that the step began with.

    The reference gets the scalars as they were rounded, and the unit is the last place of the
    storage type, at the size of the largest term: in float64 the reference itself is off by
    as much, which the factor 2 allows for.
    """
    rule, _, formula = RULES[name]
    real = np.float64 if dtype == np.float64 else np.float32
    _, hp = scalars(name, real)
    w, _, *states = samples(600, len(rule.states), seed=2)
    arrays = [a.astype(dtype) for a in (w, *states)]
    for step in range(3):
        gradient = samples(600, len(rule.states), seed=3 + step)[1].astype(dtype)
        before = [reference.wide(a) for a in arrays]
        g = reference.wide(gradient)
        size = np.abs(g)
        if prologue:
            decay, scale = float(real(DECAY_FACTOR)), float(real(GRAD_SCALE))
            g, size = (g + decay * before[0]) * scale, (size + decay * np.abs(before[0])) * scale
        expected = formula(before[0], g, *before[1:], hp)
        run_compiled(name, arrays, gradient, prologue)
        scales = largest_terms(name, before[0], size, before[1:], hp, expected)
        for role, found, exact, scale in zip(
            ("w", *rule.names), arrays, expected, scales, strict=True
        ):
            ulps = 8.0 if dtype == np.float64 else 4.0
            assert_within_ulps(found, exact, scale, ulps, f"{role} after step {step + 1}")


# Sensitivity of optimizers; that of operators is in test_operator_arguments.py.

SHAPE = (6, 4)
LEARNING = {"learning_rate": 0.05, "eps": 0.01}


def trained(optimizer: type, rows: bool = False, **options: Any) -> list[np.ndarray]:
    """Parameters and states after three steps from the same start with the same gradients."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal(SHAPE).astype(np.float32)
    opt = optimizer([nn.Parameter(w, "w")], **{**LEARNING, **options})
    for indices in ([4, 1, 4], [0, 2, 2], [5, 4, 5]):
        g = rng.standard_normal(SHAPE).astype(np.float32)
        given = ops.RowTensor(np.array(indices), g[:3], SHAPE) if rows else g
        opt((given,))
    return [w, *(state for states in opt._states.values() for state in states)]


OPTIMIZER_OPTIONS: dict[str, Any] = {
    "learning_rate": 0.1,
    "beta1": 0.5,
    "beta2": 0.9,
    "eps": 0.1,
    "weight_decay": 0.3,
    "loss_scale": 4.0,
    "use_nesterov": True,
    "state_dtype": np.float16,
}
CLASSES = (nn.Adam, nn.LazyAdam, nn.AdamOffload, nn.AdamWeightDecay)
CLASS_OPTIONS = [
    pytest.param(cls, name, id=f"{cls.__name__}-{name}")
    for cls in CLASSES
    for name in OPTIMIZER_OPTIONS
    if name in inspect.signature(cls).parameters
]


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(("cls", "name"), CLASS_OPTIONS)
def test_optimizer_option_acts(cls: type, name: str, rows: bool) -> None:
    base = {"sparse_update": "dense_equivalent"} if rows else {}
    # A 16-bit state is off by its rounding, which is 2**-11.
    far = 1e-4 if name == "state_dtype" else FAR
    moved = trained(cls, rows, **base, **{name: OPTIMIZER_OPTIONS[name]})
    assert distance(moved, trained(cls, rows, **base)) > far


@pytest.mark.parametrize(
    "name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "loss_scale"]
)
def test_amsgrad_option_acts(name: str) -> None:
    moved = trained(nn.Adam, use_amsgrad=True, **{name: OPTIMIZER_OPTIONS[name]})
    plain = trained(nn.Adam, use_amsgrad=True)
    assert distance(moved[:1], plain[:1]) > FAR
    assert distance(moved, plain) > FAR


@pytest.mark.parametrize("cls", [nn.Adam, nn.LazyAdam, nn.AdamOffload])
def test_loss_scale_moves_the_parameter_too(cls: type) -> None:
    # Adam forgives a factor of the gradient, except for epsilon: here it is large enough.
    assert distance(trained(cls, loss_scale=4.0)[:1], trained(cls)[:1]) > FAR


def test_loss_scale_undoes_a_scaled_gradient() -> None:
    """With a power of 2 to the last bit."""
    rng = np.random.default_rng(6)
    start, g = rng.standard_normal((2, 50)).astype(np.float32)
    plain, scaled = start.copy(), start.copy()
    nn.Adam([plain], weight_decay=0.1)((g,))
    nn.Adam([scaled], weight_decay=0.1, loss_scale=1024)((1024 * g,))
    np.testing.assert_array_equal(plain, scaled)


@pytest.mark.parametrize("cls", CLASSES)
def test_sparse_update_acts(cls: type) -> None:
    lazy, dense = (
        trained(cls, rows=True, sparse_update=how) for how in ("lazy", "dense_equivalent")
    )
    assert distance(lazy, dense) > FAR


def test_use_lazy_acts() -> None:
    assert distance(trained(nn.Adam, rows=True, use_lazy=True), trained(nn.Adam, rows=True)) > FAR


def test_use_amsgrad_acts() -> None:
    """After a large gradient has gone by: before that both divide by the same."""
    weights = []
    for use_amsgrad in (False, True):
        w = np.ones(3, np.float32)
        opt = nn.Adam([w], 0.1, beta2=0.5, use_amsgrad=use_amsgrad)
        for g in (10.0, 0.1, 0.1, 0.1):
            opt((np.full(3, g, np.float32),))
        weights.append(w)
    assert distance(weights[:1], weights[1:]) > FAR


def test_every_argument_of_an_optimizer_is_known() -> None:
    """A new argument must be added to a test of what it does."""
    tested = {*OPTIMIZER_OPTIONS, "sparse_update", "use_lazy", "use_amsgrad"}
    tested |= {"clipvalue", "clipnorm"}  # in `test_keras`, with every class
    # What they do is no number: concurrency, errors, and steps that are skipped.
    elsewhere = {"params", "unknown", "use_locking", "use_offload", "skip_nonfinite"}
    for cls in CLASSES:
        assert set(inspect.signature(cls).parameters) <= tested | elsewhere
