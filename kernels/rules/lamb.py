"""LAMB: Adam's direction, scaled per tensor to the norm of the parameter.

With the bias-corrected moments at update ``t = 1, 2, ...``::

    m  <- m + (1 - beta1)*(g - m)
    v  <- v + (1 - beta2)*(g*g - v)
    u   = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + epsilon) + decay*w
    w  <- w - lr * |w| / |u| * u

You et al. (2020), arXiv:1904.00962. The ratio of the norms is 1 where either of them is 0. The
first form published limits the ratio to [0, 10], takes epsilon under the root in the norm of
``u`` only, and needs a gradient that is not 0 instead of a direction that is not 0.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..rule import Rule, rule_helper
from .adam import moments

_MOST_RATIO = 10.0


@rule_helper
def direction(w: Any, m: Any, v: Any, hp: Any) -> Any:
    """The direction of the step, from the updated moments."""
    return hp.correction1 * m / (math.sqrt(hp.correction2 * v) + hp.epsilon) + hp.decay * w


def lamb(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """LAMB's second stage: the update."""
    m, v = moments(g, m, v, hp)
    return w - hp.step * direction(w, m, v, hp), m, v


def lamb_norms(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """LAMB's first stage: the norms of the parameter and of the direction."""
    m, v = moments(g, m, v, hp)
    return w, direction(w, m, v, hp)


def lamb_clipped_norms(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """First stage of the first form: its direction, and the norm of the gradient."""
    m, v = moments(g, m, v, hp)
    u = hp.correction1 * m / math.sqrt(hp.correction2 * v + hp.epsilon) + hp.decay * w
    return w, u, g


def _correction(real: Any, beta: float, step: int) -> Any:
    """``1 / (1 - beta**step)`` in float64 from the rounded ``beta``, rounded once."""
    return real(1.0 / (1.0 - math.pow(float(real(beta)), float(step))))


def lamb_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``, ``1 - beta`` taken after that rounding."""
    beta1, beta2, epsilon = constants
    complements = real(1.0) - real(beta1), real(1.0) - real(beta2)
    corrections = _correction(real, beta1, step), _correction(real, beta2, step)
    return (*complements, *corrections, real(epsilon), real(decay), real(lr))


def ratio(square_of_w: Any, square_of_u: Any) -> Any:
    """The ratio of the norms of a tensor, in float64, from the sums of `lamb_norms`."""
    norm_w, norm_u = math.sqrt(square_of_w), math.sqrt(square_of_u)
    return norm_w / norm_u if norm_w > 0.0 and norm_u > 0.0 else 1.0


def clipped_ratio(square_of_w: Any, square_of_u: Any, square_of_g: Any) -> Any:
    """The trust ratio within [0, 10], from the sums of `lamb_clipped_norms`."""
    norm_w, norm_u = math.sqrt(square_of_w), math.sqrt(square_of_u)
    if not (norm_w > 0.0 and square_of_g > 0.0):
        return 1.0
    # As a product: the norm of the direction may be 0.
    if norm_w > _MOST_RATIO * norm_u:
        return _MOST_RATIO
    return norm_w / norm_u


# The last is the learning rate until the norms are known, then it times their ratio.
_HP = ("one_minus_beta1", "one_minus_beta2", "correction1", "correction2", "epsilon", "decay",
       "step")  # fmt: skip
_STATES = ("lamb_m", "lamb_v")
LAMB = Rule(lamb, _STATES, _HP, lamb_norms, 2, ratio, "step", decays=True)
LAMB_CLIPPED = Rule(lamb, _STATES, _HP, lamb_clipped_norms, 3, clipped_ratio, "step", decays=True)
