"""Elementwise rules outside of Adam's family as a table: scalars, reference, samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import reference_elementwise as elementwise
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rule import Prologue, Rule, hp_type
from fusestep.kernels.rules import adagrad, ftrl, lars, norm, rmsprop, sgd
from fusestep.kernels.rules.gradient import COUPLED_DECAY, SCALE, TRUST
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.row_step import RowGradient, RowUpdate
from fusestep.ops.runtime.step import DenseUpdate, Variables
from reference import wide

Array = Any
Known = dict[str, float]

# The prologue of an optimizer with weight decay and loss scale, and that of LARS. The factors
# are not exact in binary, so that their rounding counts.
OPTIMIZER: Prologue = (COUPLED_DECAY, SCALE)
LARS: Prologue = (SCALE, COUPLED_DECAY, TRUST)
FACTORS = {SCALE: (0.3,), COUPLED_DECAY: (0.003, 0.0), TRUST: (0.7,)}
NEUTRAL = {SCALE: (1.0,), COUPLED_DECAY: (0.0, 0.0), TRUST: (1.0,)}


@dataclass(frozen=True)
class RuleCase:
    """One rule and what it is compared with.

    Attributes:
        rule: the update rule.
        make: the library's scalars, as the function of a `Formula`.
        given: hyper-parameters: the learning rate, then the constants of the formula.
        step: ``(w, g, *states, **known) -> (w, *states)``, the float64 reference.
        kinds: what each state holds: "signed" numbers, a sum of "squares", a "mean" whose square
            is below the squares that come after it, or the "stat" of a first step.
        renamed: names of the reference where they differ from those given.
    """

    rule: Rule
    make: Callable[..., Any]
    given: dict[str, float]
    step: Callable[..., tuple[Array, ...]]
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


def ftrl_scalars(rule: Rule, real, lr: float, decay: float, step: int, constants, _) -> Any:
    """Those of a rule, whichever the power is."""
    l1, l2, lr_power, beta, shrinkage = (*constants, 0.0, 0.0)[:5]
    last = {"power": -lr_power, "two_shrinkage": 2.0 * shrinkage}
    more = [x for name, x in last.items() if name in rule.hp]
    functions = ftrl.ftrl_scalars, ftrl.ftrl_last_scalars, ftrl.ftrl_power_shrunk_scalars
    return functions[len(more)](real, lr, decay, step, (l1, l2, beta, *more), ())


def ftrl_case(rule: Rule, **changed: float) -> RuleCase:
    """One of its four rules."""
    given, kinds = {**_FTRL, **changed}, ("squares", "signed")
    return RuleCase(rule, partial(ftrl_scalars, rule), given, elementwise.ftrl, kinds)


def lars_gradient(
    _: Array, g: Array, w: Array, *, ratio: float, decay: float
) -> tuple[Array, Array]:
    """The gradient after weight decay, times a factor that is given; the weight stays."""
    return ratio * (wide(g) + decay * wide(w)), wide(w)


def scaled(_: Array, g: Array, *, factor: float) -> tuple[Array]:
    """The gradient times a factor."""
    return (factor * wide(g),)


def scaled_in_place(w: Array, _: Array, *, factor: float) -> tuple[Array]:
    """The first array times a factor."""
    return (factor * wide(w),)


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
    "sgd": RuleCase(sgd.SGD, sgd.sgd_scalars, {"lr": 0.1}, elementwise.sgd, ()),
    "momentum": RuleCase(
        sgd.MOMENTUM, sgd.momentum_scalars, _SGD, elementwise.momentum, ("signed",)),
    "momentum_nesterov": RuleCase(
        sgd.MOMENTUM_NESTEROV, sgd.momentum_scalars, _SGD,
        partial(elementwise.momentum, nesterov=True), ("signed",)),
    "sgd_first_step": RuleCase(
        sgd.SGD_FIRST_STEP, sgd.first_step_scalars, _SGD, elementwise.sgd_stat, ("signed", "stat")),
    "sgd_first_step_nesterov": RuleCase(
        sgd.SGD_FIRST_STEP_NESTEROV, sgd.first_step_scalars, _SGD,
        partial(elementwise.sgd_stat, nesterov=True), ("signed", "stat")),
    "rmsprop": RuleCase(
        rmsprop.RMSPROP, rmsprop.rmsprop_scalars, _RMSPROP,
        lambda w, g, s, **k: elementwise.rmsprop(w, g, s, 0.0, momentum=0.0, **k)[:2], ("squares",),
        _RHO),
    "rmsprop_momentum": RuleCase(
        rmsprop.RMSPROP_MOMENTUM, rmsprop.rmsprop_momentum_scalars, _MOMENT, elementwise.rmsprop,
        ("squares", "signed"), _RHO),
    "rmsprop_centered": RuleCase(
        rmsprop.RMSPROP_CENTERED, rmsprop.rmsprop_scalars, _RMSPROP,
        lambda w, g, *s, **k: elementwise.rmsprop_centered(w, g, *s, 0.0, momentum=0.0, **k)[:3],
        ("mean", "squares"), _RHO),
    "rmsprop_centered_momentum": RuleCase(
        rmsprop.RMSPROP_CENTERED_MOMENTUM, rmsprop.rmsprop_momentum_scalars, _MOMENT,
        elementwise.rmsprop_centered, ("mean", "squares", "signed"), _RHO),
    "adagrad": RuleCase(
        adagrad.ADAGRAD, adagrad.adagrad_scalars, {"lr": 0.3}, elementwise.adagrad, ("squares",)),
    "adagrad_fixed": RuleCase(
        adagrad.ADAGRAD_FIXED, adagrad.adagrad_scalars, {"lr": 0.3},
        partial(elementwise.adagrad, update_slots=False), ("squares",)),
    "proximal_adagrad": RuleCase(
        adagrad.PROXIMAL_ADAGRAD, adagrad.proximal_adagrad_scalars, _PROXIMAL,
        elementwise.proximal_adagrad, ("squares",)),
    "ftrl": ftrl_case(ftrl.FTRL),
    "ftrl_power": ftrl_case(ftrl.FTRL_POWER, lr_power=-0.3),
    "ftrl_shrunk": ftrl_case(ftrl.FTRL_SHRUNK, **_KERAS),
    "ftrl_power_shrunk": ftrl_case(ftrl.FTRL_POWER_SHRUNK, lr_power=-0.3, **_KERAS),
    "lars_gradient": RuleCase(
        lars.LARS_GRADIENT, rounded, {"ratio": 0.3, "decay": 0.6}, lars_gradient, ("signed",)),
    "scaled": RuleCase(norm.SCALED, rounded, {"factor": 0.3}, scaled, ()),
    "scaled_in_place": RuleCase(
        norm.SCALED_IN_PLACE, rounded, {"factor": 0.3}, scaled_in_place, ()),
}  # fmt: skip


def real_of(dtype: np.dtype) -> Any:
    """The scalar type of the arithmetic."""
    return np.float64 if dtype == np.float64 else np.float32


def hp_row(rule: Rule, prologue: Prologue, scalars, real, factors=FACTORS) -> Array:
    """One row of scalars, those of a prologue at its end."""
    row = np.array([(*scalars, *(x for part in prologue for x in factors[part]))], real)
    assert row.shape[1] == len(hp_type(rule, prologue)._fields)
    return row


def run_dense(
    rule: Rule, arrays: list[Array], g: Array, scalars: Any, prologue: Prologue = (),
    factors: Any = FACTORS,
) -> None:  # fmt: skip
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
    given = Variables.of([tuple(arrays)]), [gradient], STORAGES[values.dtype], hp, [0], lazy
    update = RowUpdate.of(["test"], rule, prologue, *given)
    commit([update.prepared()])
