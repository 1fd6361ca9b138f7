"""The Adam family in MindSpore's form: step size corrected for bias, epsilon outside.

With ``beta1_power = beta1**t`` and ``beta2_power = beta2**t`` at update ``t = 1, 2, ...``::

    m <- m + (1 - beta1)*(g - m)
    v <- v + (1 - beta2)*(g*g - v)
    w <- w - l * m / (sqrt(v) + epsilon),   l = lr * sqrt(1 - beta2_power) / (1 - beta1_power)

This is the form at the end of section 2 of Kingma and Ba (2015), arXiv:1412.6980. It equals
the textbook form with ``epsilon / sqrt(1 - beta2_power)`` in the place of its epsilon.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule, product, rule_helper
from ..state import State
from .idle import drifting, drifting_by_largest


@rule_helper
def moments(g: Any, m: Any, v: Any, hp: Any) -> Any:
    """The exponential moving averages of the gradient and of its square.

    ``m + (1 - beta1)*(g - m)`` is ``beta1*m + (1 - beta1)*g`` with the rounding of the original:
    where the two terms nearly cancel, the other form is off by more than the comparison allows.
    """
    return m + hp.one_minus_beta1 * (g - m), v + hp.one_minus_beta2 * (g * g - v)


def adam(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam."""
    m, v = moments(g, m, v, hp)
    return w - hp.step_size * m / (math.sqrt(v) + hp.epsilon), m, v


def adam_nesterov(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam that steps along the moment it will have after seeing ``g`` once more."""
    m, v = moments(g, m, v, hp)
    ahead = m + hp.one_minus_beta1 * (g - m)
    return w - hp.step_size * ahead / (math.sqrt(v) + hp.epsilon), m, v


def adam_amsgrad(w: Any, g: Any, m: Any, v: Any, vhat: Any, hp: Any) -> Any:
    """AMSGrad over the biased ``v``; a NaN in ``v`` stays a NaN, as in the original."""
    m, v = moments(g, m, v, hp)
    vhat = vhat if vhat > v else v
    return w - hp.step_size * m / (math.sqrt(vhat) + hp.epsilon), m, v, vhat


def adam_delta(delta: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam's step without taking it: the first slot receives ``w_new - w_old``."""
    m, v = moments(g, m, v, hp)
    return -hp.step_size * m / (math.sqrt(v) + hp.epsilon), m, v


def adam_nesterov_delta(delta: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Nesterov's step without taking it."""
    m, v = moments(g, m, v, hp)
    ahead = m + hp.one_minus_beta1 * (g - m)
    return -hp.step_size * ahead / (math.sqrt(v) + hp.epsilon), m, v


def adam_weight_decay(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Decoupled decay, no bias correction: ``w - lr * (m / (sqrt(v) + epsilon) + decay*w)``."""
    m, v = moments(g, m, v, hp)
    return w - hp.lr * (m / (math.sqrt(v) + hp.epsilon) + hp.decay * w), m, v


def adamax(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """AdaMax: Adam by the largest gradient that was seen, an old one fading."""
    m = hp.beta1 * m + product(hp.one_minus_beta1, g)
    faded, size = hp.beta2 * v, abs(g)
    v = size if faded < size else faded
    return w - hp.step_size * m / (v + hp.epsilon), m, v


def adan(w: Any, g: Any, m: Any, v: Any, n: Any, previous: Any, hp: Any) -> Any:
    """Adan: Nesterov's momentum by way of the change of the gradient."""
    change = hp.later * (g - previous)
    ahead = g + hp.beta2 * change
    m = m + hp.one_minus_beta1 * (g - m)
    v = v + hp.one_minus_beta2 * (change - v)
    n = n + hp.one_minus_beta3 * (ahead * ahead - n)
    step = (hp.step_size * m + product(hp.change_size, v)) / (math.sqrt(n) * hp.root + hp.epsilon)
    return hp.shrink * (w - step), m, v, n, g


def adam_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """Round the hyper-parameters as MindSpore does.

    Every argument is rounded to ``real``, the powers by whoever gives them, and ``1 - beta`` is
    taken after that rounding. The step size is computed in float64 from the rounded arguments and
    rounded once. Where the first power is 1 it is infinite (or NaN where its numerator is 0), as in
    the original.
    """
    beta1_power, beta2_power = powers
    numerator = float(real(lr)) * math.sqrt(1.0 - float(beta2_power))
    correction = 1.0 - float(beta1_power)
    # Python raises where C divides by 0, so the infinity (or the NaN that 0 / 0 is) is made by a
    # product.
    step_size = numerator / correction if correction != 0.0 else numerator * math.inf
    *complements, epsilon = _constants(real, *constants)
    return (*complements, real(step_size), epsilon)


def adam_weight_decay_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of Adam without bias correction."""
    *complements, epsilon = _constants(real, *constants)
    return (*complements, real(lr), epsilon, real(decay))


def usual_adam_scalars(
    real: Any, lr: float, _decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of Adam's usual form: epsilon is added to the root of the corrected moment.

    That is the step of `adam_scalars` with ``epsilon * sqrt(1 - beta2**t)``. All is computed in
    float64 and rounded once.
    """
    beta1, beta2, epsilon = constants
    root = math.sqrt(1.0 - beta2**step)
    step_size = lr * root / (1.0 - beta1**step)
    return real(1.0 - beta1), real(1.0 - beta2), real(step_size), real(epsilon * root)


def usual_adam_weight_decay_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """The scalars of AdamW's usual form, with bias correction: as `usual_adam_scalars`.

    The step size is a factor of the decay too, which is divided by what corrects it.
    """
    adam = usual_adam_scalars(real, lr, decay, step, constants, powers)
    beta1, beta2, _ = constants
    return (*adam, real(decay * (1.0 - beta1**step) / math.sqrt(1.0 - beta2**step)))


def adamax_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """The scalars of AdaMax, whose second moment, a maximum, needs no correction."""
    beta1, beta2, epsilon = constants
    step_size = float(real(lr)) / (1.0 - float(powers[0]))
    complement, _, epsilon = _constants(real, beta1, beta2, epsilon)
    return real(beta1), complement, real(beta2), real(step_size), epsilon


def adan_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every beta is rounded to ``real`` first; all else is computed in float64 and rounded once."""
    beta1, beta2, beta3, epsilon = constants
    beta1, beta2, beta3 = float(real(beta1)), float(real(beta2)), float(real(beta3))
    step_size, change_size = lr / (1.0 - beta1**step), lr * beta2 / (1.0 - beta2**step)
    complements = real(1.0 - beta1), real(1.0 - beta2), real(1.0 - beta3)
    step_scalars = real(step_size), real(change_size), real(1.0 / math.sqrt(1.0 - beta3**step))
    shrink, later = real(1.0 / (1.0 + lr * decay)), real(1.0 if step > 1 else 0.0)
    return (real(beta2), *complements, *step_scalars, real(epsilon), shrink, later)


# The constants are the same in every step, and to round them takes longer than to look them up.
@lru_cache(maxsize=256)
def _constants(real: Any, beta1: float, beta2: float, epsilon: float) -> tuple[Any, Any, Any]:
    """Both ``1 - beta``, and epsilon."""
    return real(1.0) - real(beta1), real(1.0) - real(beta2), real(epsilon)


def by_row_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of Adam whose bias is corrected by the count of each row."""
    beta1, beta2, epsilon, usual = constants
    *complements, epsilon = _constants(real, beta1, beta2, epsilon)
    return (*complements, real(lr), epsilon, real(usual))


def corrections(updates: Any, one_minus_beta1: Any, one_minus_beta2: Any) -> Any:
    """``1 - beta1**t``, ``sqrt(1 - beta2**t)`` and ``t``, at the next update of a row."""
    t = updates + 1
    root = math.sqrt(1.0 - (1.0 - one_minus_beta2) ** t)
    return 1.0 - (1.0 - one_minus_beta1) ** t, root, t


corrections = rule_helper(corrections)


def by_row(updates: Any, one_minus_beta1: Any, one_minus_beta2: Any, usual: Any) -> Any:
    """Factors of step size and epsilon, which is inside of the correction if ``usual`` is 1."""
    first, root, t = corrections(updates, one_minus_beta1, one_minus_beta2)
    return root / first, root if usual > 0.0 else 1.0, t


def _fading(hp: Any) -> tuple[float, float]:
    return 1.0 - hp.one_minus_beta1, 1.0 - hp.one_minus_beta2


def idle_adam(hp: Any, decay: float) -> IdleStep:
    """Adam without a gradient."""
    return IdleStep(1.0, _fading(hp), hp.step_size, hp.epsilon)


def idle_nesterov(hp: Any, decay: float) -> IdleStep:
    """Along the moment that it will have after one more such step."""
    return IdleStep(1.0, _fading(hp), hp.step_size * _fading(hp)[0], hp.epsilon)


def idle_amsgrad(hp: Any, decay: float) -> IdleStep:
    """AMSGrad without a gradient: the largest second moment stays."""
    return IdleStep(1.0, (*_fading(hp), 1.0), hp.step_size, hp.epsilon)


def idle_weight_decay(hp: Any, decay: float) -> IdleStep:
    """Adam with a decoupled decay, without a gradient."""
    return IdleStep(1.0 - hp.lr * hp.decay, _fading(hp), hp.lr, hp.epsilon)


MOMENTS = ("moment1", "moment2")
_HP = ("one_minus_beta1", "one_minus_beta2", "step_size", "epsilon")
_WEIGHT_DECAY_HP = ("one_minus_beta1", "one_minus_beta2", "lr", "epsilon", "decay")
ADAM = Rule(adam, MOMENTS, _HP, idle=Idle(drifting, idle_adam, root=1))
ADAM_NESTEROV = Rule(adam_nesterov, MOMENTS, _HP, idle=Idle(drifting, idle_nesterov, root=1))
ADAM_AMSGRAD = Rule(
    adam_amsgrad, (*MOMENTS, "vhat"), _HP, idle=Idle(drifting_by_largest, idle_amsgrad, root=2)
)
UPDATES = State("updates", "row", dtype=np.int32)
_BY_ROW: dict[str, Any] = {
    "states": (*MOMENTS, UPDATES),
    "hp": (*_HP, "usual"),
    "factor": by_row,
    "factor_of": ("step_size", "epsilon"),
    "takes": ("updates", "one_minus_beta1", "one_minus_beta2", "usual"),
    "scope": "row",
}
ADAM_BY_ROW = Rule(adam, **_BY_ROW)
ADAM_NESTEROV_BY_ROW = Rule(adam_nesterov, **_BY_ROW)
ADAM_DELTA = Rule(adam_delta, MOMENTS, _HP)
ADAM_NESTEROV_DELTA = Rule(adam_nesterov_delta, MOMENTS, _HP)
ADAMAX = Rule(adamax, MOMENTS, ("beta1", "one_minus_beta1", "beta2", "step_size", "epsilon"))
ADAM_WEIGHT_DECAY = Rule(
    adam_weight_decay, ("adam_m", "adam_v"), _WEIGHT_DECAY_HP, decays=True,
    idle=Idle(drifting, idle_weight_decay, root=1),
)  # fmt: skip
ADAN = Rule(
    adan,
    ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"),
    ("beta2", "one_minus_beta1", "one_minus_beta2", "one_minus_beta3", "step_size", "change_size",
     "root", "epsilon", "shrink", "later"),
    decays=True,
)  # fmt: skip
