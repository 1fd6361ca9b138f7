"""Elementwise rules outside of Adam's family as a table: scalars, reference, largest terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rule import Prologue, Rule, hp_type
from fusestep.kernels.rules import adagrad, ftrl, lars, norm, rmsprop, sgd
from fusestep.kernels.rules.gradient import COUPLED_DECAY, SCALE, TRUST
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.row_step import RowGradient, RowUpdate
from fusestep.ops.runtime.step import DenseUpdate, Variables

import reference_elementwise as elementwise
from helpers import STORAGE_DTYPES, more
from reference import wide

Array = Any
Known = dict[str, float]
F32, F64, *HALVES = STORAGE_DTYPES

# The prologue of an optimizer with weight decay and loss scale, and that of LARS. The factors
# are not exact in binary, so that their rounding counts.
OPTIMIZER: Prologue = (COUPLED_DECAY, SCALE)
LARS: Prologue = (SCALE, COUPLED_DECAY, TRUST)
FACTORS = {SCALE: (0.3,), COUPLED_DECAY: (0.003, 0.0), TRUST: (0.7,)}
NEUTRAL = {SCALE: (1.0,), COUPLED_DECAY: (0.0, 0.0), TRUST: (1.0,)}


def condition(g: Array, w: Array, prologue: Prologue, real: Any) -> tuple[Array, Array]:
    """In float64 what a prologue makes of a gradient, and the size of the terms of that."""
    g, w = wide(g), wide(w)
    size = np.abs(g)
    for part in prologue:
        factor = float(real(FACTORS[part][0]))
        if part is COUPLED_DECAY:
            g, size = g + factor * w, size + factor * np.abs(w)
        else:
            g, size = factor * g, factor * size
    return g, size


@dataclass(frozen=True)
class RuleCase:
    """One rule and what it is compared with.

    Attributes:
        rule: the update rule.
        make: the library's scalars, as the function of a `Formula`.
        given: hyper-parameters: the learning rate, then the constants of the formula.
        step: ``(w, g, *states, **known) -> (w, *states)``, the float64 reference.
        terms: ``(w, g, states, known, new) -> sizes``: for each result the largest term that it
            is a sum of, every term with its absolute value; ``new`` is the reference's result.
        kinds: what each state holds: "signed" numbers, a sum of "squares", a "mean" whose square
            is below the squares that come after it, or the "stat" of a first step.
        renamed: names of the reference where they differ from those given.
    """

    rule: Rule
    make: Callable[..., Any]
    given: dict[str, float]
    step: Callable[..., tuple[Array, ...]]
    terms: Callable[..., list[Array]]
    kinds: tuple[str, ...]
    renamed: dict[str, str] = field(default_factory=dict)

    def hp(self, real: Any, **changed: float) -> Any:
        """The library's scalars."""
        lr, *constants = {**self.given, **changed}.values()
        return hp_type(self.rule, ())(*self.make(real, lr, 0.0, 2, tuple(constants), ()))

    def known(self, real: Any, **changed: float) -> Known:
        """The reference's: each rounded to `real`, complements taken after that."""
        given = {**self.given, **changed}
        known = {self.renamed.get(k, k): float(real(x)) for k, x in given.items()}
        for name in ("rho", "dampening"):
            if name in known:
                known[f"one_minus_{name}"] = float(real(1.0) - real(known[name]))
        known.pop("dampening", None)
        return known

    def samples(self, n: int, seed: int) -> list[Array]:
        """Parameter, gradient and states over four decades, with zeros and sums that cancel."""
        rng = np.random.default_rng(seed)
        size = np.exp(rng.uniform(np.log(1e-2), np.log(1e2), (2 + len(self.kinds), n)))
        w, g = size[:2] * rng.choice([-1.0, 1.0], (2, n))
        states = []
        for kind, x in zip(self.kinds, size[2:], strict=True):
            if kind == "signed":
                x = x * rng.choice([-1.0, 1.0], n)
                x[: n // 10] = -g[: n // 10]
            elif kind == "squares":
                x = x**2
            elif kind == "mean":  # of gradients whose mean square is the next state
                x = size[3 + len(states)] * rng.uniform(-0.9, 0.9, n)
            else:
                x = rng.choice([0.0, 1.0], n)
            states.append(x)
        # Zeros alone, and gradients of 0 where nothing was accumulated.
        k = n // 10
        w[k : 2 * k] = g[2 * k : 3 * k] = 0.0
        for state, kind in zip(states, self.kinds, strict=True):
            if kind != "mean":
                state[3 * k : 4 * k] = 0.0
        g[3 * k : 7 * k // 2] = 0.0
        return [w, g, *states]


def sgd_terms(w: Array, g: Array, _: Any, k: Known, __: Any) -> list[Array]:
    """The old parameter and the step."""
    return [np.abs(w) + k["lr"] * np.abs(g)]


def momentum_terms(
    w: Array, g: Array, states: Any, k: Known, _: Any, *, nesterov: bool = False
) -> list[Array]:
    """Both summands of the accumulator; the parameter and its step along that sum."""
    accum = k["momentum"] * np.abs(states[0]) + k.get("one_minus_dampening", 1.0) * np.abs(g)
    ahead = np.abs(g) + k["momentum"] * accum if nesterov else accum
    return [np.abs(w) + k["lr"] * ahead, accum]


def first_step_terms(
    w: Array, g: Array, states: Any, k: Known, _: Any, *, nesterov: bool = False
) -> list[Array]:
    """As `momentum_terms`, without the dampening where the gradient starts; `stat` is exact."""
    undampened = {**k, "one_minus_dampening": 1.0}
    new = [momentum_terms(w, g, states, x, _, nesterov=nesterov) for x in (undampened, k)]
    return [*(np.where(states[1] > 0, a, b) for a, b in zip(*new, strict=True)), 0.0 * w]


def rmsprop_terms(w: Array, g: Array, states: Any, k: Known, new: Any) -> list[Array]:
    """The parameter, the moment and the step; the mean square is a sum of positive terms."""
    moment = k["lr"] * np.abs(g) / np.sqrt(new[1] + k["epsilon"])
    if len(states) == 1:
        return [np.abs(w) + moment, new[1]]
    moment = moment + k["momentum"] * np.abs(states[1])
    return [np.abs(w) + moment, new[1], moment]


def centered_terms(w: Array, g: Array, states: Any, k: Known, new: Any) -> list[Array]:
    """The step by so much more than its size as the variance is smaller than its terms."""
    mean = k["rho"] * np.abs(states[0]) + k["one_minus_rho"] * np.abs(g)
    variance = new[2] - new[1] ** 2 + k["epsilon"]
    condition = (new[2] + mean**2 + k["epsilon"]) / np.abs(variance)
    moment = k["lr"] * np.abs(g) / np.sqrt(np.abs(variance)) * condition
    if len(states) == 2:
        return [np.abs(w) + moment, mean, new[2]]
    moment = moment + k["momentum"] * np.abs(states[2])
    return [np.abs(w) + moment, mean, new[2], moment]


def rate_of(accum: Array, lr: float) -> Array:
    """Adagrad's rate of each element, 0 where nothing was accumulated."""
    return np.where(accum > 0, lr / np.sqrt(np.where(accum > 0, accum, 1.0)), 0.0)


def adagrad_terms(w: Array, g: Array, _: Any, k: Known, new: Any) -> list[Array]:
    """The parameter and the step; the accumulator is a sum of positive terms."""
    return [np.abs(w) + rate_of(new[1], k["lr"]) * np.abs(g), new[1]]


def proximal_terms(w: Array, g: Array, _: Any, k: Known, new: Any) -> list[Array]:
    """The parameter, the step and the threshold, all shrunk."""
    rate = rate_of(new[1], k["lr"])
    return [(np.abs(w) + rate * (np.abs(g) + k["l1"])) / (1 + rate * k["l2"]), new[1]]


def ftrl_terms(w: Array, g: Array, states: Any, k: Known, new: Any) -> list[Array]:
    """Both roots count in `linear`, though they nearly cancel; then what is divided."""
    old, root = (a ** -k["lr_power"] for a in (states[0], new[1]))
    beta, shrinkage = k.get("beta", 0.0), k.get("l2_shrinkage", 0.0)
    linear = np.abs(states[1]) + np.abs(g) + ((root + old) / k["lr"] + 2 * shrinkage) * np.abs(w)
    return [(k["l1"] + linear) / ((beta + root) / k["lr"] + 2 * k["l2"]), new[1], linear]


def ftrl_scalars(
    rule: Rule, real: Any, lr: float, decay: float, step: int, constants: Any, _: Any
) -> Any:
    """Those of a rule, whichever the power is."""
    l1, l2, lr_power, beta, shrinkage = (*constants, 0.0, 0.0)[:5]
    last = {"power": -lr_power, "two_shrinkage": 2.0 * shrinkage}
    more = [x for name, x in last.items() if name in rule.hp]
    functions = ftrl.ftrl_scalars, ftrl.ftrl_last_scalars, ftrl.ftrl_power_shrunk_scalars
    return functions[len(more)](real, lr, decay, step, (l1, l2, beta, *more), ())


def ftrl_case(rule: Rule, **changed: float) -> RuleCase:
    """One of its four rules."""
    given, kinds = {**_FTRL, **changed}, ("squares", "signed")
    make = partial(ftrl_scalars, rule)
    return RuleCase(rule, make, given, elementwise.ftrl, ftrl_terms, kinds)


def lars_gradient(
    _: Array, g: Array, w: Array, *, ratio: float, decay: float
) -> tuple[Array, Array]:
    """The gradient after weight decay, times a factor that is given; the weight stays."""
    return ratio * (wide(g) + decay * wide(w)), wide(w)


def lars_terms(_: Array, g: Array, states: Any, k: Known, __: Any) -> list[Array]:
    """The gradient and the decay; the weight is exact."""
    return [k["ratio"] * (np.abs(g) + k["decay"] * np.abs(states[0])), 0.0 * g]


def scaled(_: Array, g: Array, *, factor: float) -> tuple[Array]:
    """The gradient times a factor."""
    return (factor * wide(g),)


def scaled_in_place(w: Array, _: Array, *, factor: float) -> tuple[Array]:
    """The first array times a factor."""
    return (factor * wide(w),)


def scaled_in_place_terms(w: Array, _: Array, __: Any, k: Known, ___: Any) -> list[Array]:
    """One product."""
    return [k["factor"] * np.abs(w)]


def scaled_terms(_: Array, g: Array, __: Any, k: Known, ___: Any) -> list[Array]:
    """One product."""
    return [k["factor"] * np.abs(g)]


def rounded(real: Any, lr: float, _: Any, __: Any, constants: Any, ___: Any) -> Any:
    """Scalars that are only rounded."""
    return tuple(map(real, (lr, *constants)))


_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}
_RMSPROP = {"lr": 0.1, "decay": 0.9, "epsilon": 1e-3}
_MOMENT = {**_RMSPROP, "momentum": 0.8}
_PROXIMAL = {"lr": 0.3, "l1": 0.6, "l2": 0.2}
_FTRL = {"lr": 0.6, "l1": 0.7, "l2": 0.2, "lr_power": -0.5}
_KERAS = {"beta": 0.8, "l2_shrinkage": 0.3}
_RHO = {"decay": "rho"}

CASES = {
    "sgd": RuleCase(sgd.SGD, sgd.sgd_scalars, {"lr": 0.1}, elementwise.sgd, sgd_terms, ()),
    "momentum": RuleCase(
        sgd.MOMENTUM, sgd.momentum_scalars, _SGD, elementwise.momentum, momentum_terms, ("signed",)
    ),
    "momentum_nesterov": RuleCase(
        sgd.MOMENTUM_NESTEROV, sgd.momentum_scalars, _SGD,
        partial(elementwise.momentum, nesterov=True),
        partial(momentum_terms, nesterov=True), ("signed",),
    ),
    "sgd_first_step": RuleCase(
        sgd.SGD_FIRST_STEP, sgd.first_step_scalars, _SGD,
        elementwise.sgd_stat, first_step_terms, ("signed", "stat"),
    ),
    "sgd_first_step_nesterov": RuleCase(
        sgd.SGD_FIRST_STEP_NESTEROV, sgd.first_step_scalars, _SGD,
        partial(elementwise.sgd_stat, nesterov=True),
        partial(first_step_terms, nesterov=True), ("signed", "stat"),
    ),
    "rmsprop": RuleCase(
        rmsprop.RMSPROP, rmsprop.rmsprop_scalars, _RMSPROP,
        lambda w, g, s, **k: elementwise.rmsprop(w, g, s, 0.0, momentum=0.0, **k)[:2],
        rmsprop_terms, ("squares",), _RHO,
    ),
    "rmsprop_momentum": RuleCase(
        rmsprop.RMSPROP_MOMENTUM, rmsprop.rmsprop_momentum_scalars, _MOMENT,
        elementwise.rmsprop, rmsprop_terms, ("squares", "signed"), _RHO,
    ),
    "rmsprop_centered": RuleCase(
        rmsprop.RMSPROP_CENTERED, rmsprop.rmsprop_scalars, _RMSPROP,
        lambda w, g, *s, **k: elementwise.rmsprop_centered(w, g, *s, 0.0, momentum=0.0, **k)[:3],
        centered_terms, ("mean", "squares"), _RHO,
    ),
    "rmsprop_centered_momentum": RuleCase(
        rmsprop.RMSPROP_CENTERED_MOMENTUM, rmsprop.rmsprop_momentum_scalars, _MOMENT,
        elementwise.rmsprop_centered, centered_terms, ("mean", "squares", "signed"), _RHO,
    ),
    "adagrad": RuleCase(
        adagrad.ADAGRAD, adagrad.adagrad_scalars, {"lr": 0.3},
        elementwise.adagrad, adagrad_terms, ("squares",),
    ),
    "adagrad_fixed": RuleCase(
        adagrad.ADAGRAD_FIXED, adagrad.adagrad_scalars, {"lr": 0.3},
        partial(elementwise.adagrad, update_slots=False), adagrad_terms, ("squares",),
    ),
    "proximal_adagrad": RuleCase(
        adagrad.PROXIMAL_ADAGRAD, adagrad.proximal_adagrad_scalars, _PROXIMAL,
        elementwise.proximal_adagrad, proximal_terms, ("squares",),
    ),
    "ftrl": ftrl_case(ftrl.FTRL),
    "ftrl_power": ftrl_case(ftrl.FTRL_POWER, lr_power=-0.3),
    "ftrl_shrunk": ftrl_case(ftrl.FTRL_SHRUNK, **_KERAS),
    "ftrl_power_shrunk": ftrl_case(ftrl.FTRL_POWER_SHRUNK, lr_power=-0.3, **_KERAS),
    "lars_gradient": RuleCase(
        lars.LARS_GRADIENT, rounded, {"ratio": 0.3, "decay": 0.6},
        lars_gradient, lars_terms, ("signed",),
    ),
    "scaled": RuleCase(
        norm.SCALED, rounded, {"factor": 0.3}, scaled, scaled_terms, ()
    ),
    "scaled_in_place": RuleCase(
        norm.SCALED_IN_PLACE, rounded, {"factor": 0.3}, scaled_in_place, scaled_in_place_terms, ()
    ),
}  # fmt: skip


def with_prologues(names: Iterable[str], prologue: Prologue) -> list[Any]:
    """Rule, storage type and prologue, as parameters of a test.

    Every rule in both forms in float32, and one of them in float64, the other in a 16-bit type:
    neither rule nor prologue sees the storage, but for the type of the arithmetic.
    """
    chosen: list[Any] = []
    for k, name in enumerate(names):
        half, forms = HALVES[k // 2 % 2], ((), prologue)
        some = [*product((F32,), forms), (F64, forms[k % 2]), (half, forms[1 - k % 2])]
        for one in product(STORAGE_DTYPES, forms):
            of = pytest.param if one in some else more
            chosen.append(of(name, *one, id=f"{name}-{one[0]}-{'prologue' if one[1] else 'plain'}"))
    return chosen


def real_of(dtype: np.dtype) -> Any:
    """The scalar type of the arithmetic."""
    return np.float64 if dtype == np.float64 else np.float32


def hp_row(
    rule: Rule, prologue: Prologue, scalars: Any, real: Any, factors: Any = FACTORS
) -> Array:
    """One row of scalars, those of a prologue at its end."""
    row = np.array([(*scalars, *(x for part in prologue for x in factors[part]))], real)
    assert row.shape[1] == len(hp_type(rule, prologue)._fields)
    return row


def run_dense(
    rule: Rule,
    arrays: list[Array],
    g: Array,
    scalars: Any,
    prologue: Prologue = (),
    factors: Any = FACTORS,
) -> None:
    """One dense step on one tensor: its parameter and states, in place."""
    hp = hp_row(rule, prologue, scalars, real_of(arrays[0].dtype), factors)
    variables, places = Variables.of([tuple(arrays)]), np.array([g.ctypes.data])
    given = variables, places, STORAGES[g.dtype], hp, np.zeros(1, np.int64)
    commit([DenseUpdate(rule, prologue, *given).prepared()])


def run_rows(
    rule: Rule, arrays: list[Array], indices: Array, values: Array, scalars: Any,
    prologue: Prologue = (), *, lazy: bool = True,
) -> None:  # fmt: skip
    """One row-sparse step on one table."""
    hp = hp_row(rule, prologue, scalars, real_of(arrays[0].dtype))
    gradient = RowGradient.of(indices, values)
    variables = Variables.of([tuple(arrays)])
    update = RowUpdate.of(["test"], rule, prologue, variables, [gradient], hp, [0], lazy)
    commit([update.prepared()])
