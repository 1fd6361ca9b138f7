"""Prodigy: Adam whose steps are as long as the distance that the parameters seem to have to go.

With ``d`` the estimate of that distance before the step, ``r = d*lr`` (times Adam's bias
correction, if asked), the parameters ``p0`` at their first update and all tensors together::

    N <- beta3*N + d/d0 * r * <g, p0 - w>
    m <- beta1*m + (1 - beta1)*d*g
    v <- beta2*v + (1 - beta2)*d*d*g*g
    s <- beta3*s + d/d0 * r * g                (d in the place of r, if asked)
    D  = d_coef * N / sum|s|
    d <- min(max of all D and d0, growth_rate * d)   (the first time max(d, D) in the place of d)
    w <- w - decay*r*w - r * m / (sqrt(v) + d*epsilon)

Everything but the last ``d`` is the estimate before the step. Where ``beta1`` is 0, ``d*g`` takes
the place of ``m``, with the new ``d``. A step in which ``sum|s|`` is 0 is none. Mishchenko and
Defazio (2024), arXiv:2306.06101.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..rule import Rule, product, rule_helper
from ..state import PARAMETER, State


@rule_helper
def second_moment(g: Any, v: Any, hp: Any) -> Any:
    """The second moment of gradients in units of the distance."""
    return hp.beta2 * v + product(hp.square_step, g * g)


@rule_helper
def travelled(g: Any, s: Any, hp: Any) -> Any:
    """The weighted sum of gradients."""
    return hp.beta3 * s + product(hp.sum_step, g)


def prodigy(w: Any, g: Any, m: Any, v: Any, s: Any, p0: Any, hp: Any) -> Any:
    """Prodigy, with a first moment."""
    m = hp.beta1 * m + product(hp.mean_step, g)
    v = second_moment(g, v, hp)
    w = w - hp.decay * w - hp.step * m / (math.sqrt(v) + hp.epsilon)
    return w, m, v, travelled(g, s, hp)


def prodigy_plain(w: Any, g: Any, v: Any, s: Any, p0: Any, hp: Any) -> Any:
    """Prodigy, without a first moment."""
    v = second_moment(g, v, hp)
    w = w - hp.decay * w - hp.step * (hp.size * g) / (math.sqrt(v) + hp.epsilon)
    return w, v, travelled(g, s, hp)


@rule_helper
def progress_plain(w: Any, g: Any, v: Any, s: Any, p0: Any, hp: Any) -> Any:
    """First stage: how far the gradients agree with the way from ``p0``, and the length of s."""
    return hp.gain * (g * (p0 - w)), hp.counted * abs(travelled(g, s, hp))


def progress(w: Any, g: Any, m: Any, v: Any, s: Any, p0: Any, hp: Any) -> Any:
    """`progress_plain` of a rule that has a first moment too."""
    return progress_plain(w, g, v, s, p0, hp)


@rule_helper
def distance(
    gained: Any, length: Any, d: Any, d_max: Any, d_numerator: Any, beta3: Any, d0: Any,
    d_coef: Any, growth_rate: Any,
) -> Any:  # fmt: skip
    """The factor of ``epsilon``, then the numbers after the step."""
    d_numerator = beta3 * d_numerator + gained
    estimate = d_coef * d_numerator / length
    # While the distance is still its first value it may grow at once, later by `growth_rate` alone.
    before = estimate if d == d0 and estimate > d else d
    d_max = estimate if estimate > d_max else d_max
    grown = before * growth_rate
    d = grown if grown < d_max else d_max
    return d, d, d_max, d_numerator


def distance_plain(
    gained: Any, length: Any, d: Any, d_max: Any, d_numerator: Any, beta3: Any, d0: Any,
    d_coef: Any, growth_rate: Any,
) -> Any:  # fmt: skip
    """`distance` of a rule whose direction is the gradient, with the factor of that."""
    arguments = gained, length, d, d_max, d_numerator, beta3, d0, d_coef, growth_rate
    d, _, d_max, d_numerator = distance(*arguments)
    return d, d, d, d_max, d_numerator


def rests(_gained: Any, length: Any) -> bool:
    """Whether a step is none: nothing has a gradient, or every rate is 0."""
    return bool(length == 0.0)


def prodigy_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of an update, in float64 and rounded to ``real`` once.

    The constants are those of `prodigy_constants`. A parameter with a rate of 0 keeps its states
    and goes on along them.
    """
    beta1, beta2, beta3, epsilon, d, rate, decoupled, sum_step, gain = constants
    step_scalars = real(rate), real(decoupled * decay * rate), real(epsilon)
    if lr == 0.0:
        kept = real(1.0), real(0.0), real(1.0), real(0.0), real(1.0), real(0.0)
        return (*kept, real(0.0), real(0.0), *step_scalars, real(1.0))
    moments = real(beta1), real((1.0 - beta1) * d), real(beta2), real((1.0 - beta2) * d * d)
    return (*moments, real(beta3), real(sum_step), real(gain), real(1.0), *step_scalars, real(1.0))


# The last two are those of a distance of 1 until the new one is known.
_HP = ("beta1", "mean_step", "beta2", "square_step", "beta3", "sum_step", "gain", "counted",
       "step", "decay", "epsilon", "size")  # fmt: skip
_SHARED: dict[str, Any] = {
    "hp": _HP,
    "n_measured": 2,
    "signed": (0, 1),
    "scope": "step",
    "takes": ("d", "d_max", "d_numerator", "beta3", "d0", "d_coef", "growth_rate"),
    "rests": rests,
}
_OTHERS = State("exp_avg_sq"), State("s"), State("p0", initial=PARAMETER, is_read=True)
_AVERAGED: dict[str, Any] = {
    "states": (State("exp_avg"), *_OTHERS),
    "measure": progress,
    "factor": distance,
    "factor_of": ("epsilon",),
    **_SHARED,
}
_PLAIN: dict[str, Any] = {
    "states": _OTHERS,
    "measure": progress_plain,
    "factor": distance_plain,
    "factor_of": ("epsilon", "size"),
    **_SHARED,
}
PRODIGY = Rule(prodigy, decays=True, **_AVERAGED)
PRODIGY_COUPLED = Rule(prodigy, **_AVERAGED)
PRODIGY_PLAIN = Rule(prodigy_plain, decays=True, **_PLAIN)
PRODIGY_PLAIN_COUPLED = Rule(prodigy_plain, **_PLAIN)
RULES = {  # by whether there is a first moment, and whether the decay is decoupled
    (True, True): PRODIGY,
    (True, False): PRODIGY_COUPLED,
    (False, True): PRODIGY_PLAIN,
    (False, False): PRODIGY_PLAIN_COUPLED,
}


def correction(beta1: float, beta2: float, step: int) -> float:
    """Adam's bias correction of update ``step`` = 1, 2, ..."""
    return float(math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step))


def prodigy_constants(
    betas: tuple[float, float, float], epsilon: float, d: float, d0: float, lr: float,
    bias_correction: float, *, decoupled: bool, safeguarded: bool,
) -> Numbers:  # fmt: skip
    """The constants of an update, for `prodigy_scalars`.

    beta1, beta2, beta3, epsilon, the distance, ``r``, how much of the weight decay is decoupled,
    what ``s`` takes of a gradient, and ``d/d0 * r``.
    """
    r, scale = d * lr * bias_correction, d / d0
    return (*betas, epsilon, d, r, float(decoupled), scale * (d if safeguarded else r), scale * r)
