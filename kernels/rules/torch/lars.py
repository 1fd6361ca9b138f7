"""LARS around momentum, as it is written for PyTorch: one rule that measures and steps.

::

    g <- trust * (g + decay*w),   trust = coefficient * |w| / (|g| + decay*|w| + epsilon)
    a <- momentum*a + (1 - dampening)*g
    w <- w - lr*a,   or Nesterov's  w - lr*(g + momentum*a)
"""

from __future__ import annotations

import math
from typing import Any

from ...rule import Rule, product, rule_helper
from ..lars import ratio


@rule_helper
def scaled(w: Any, g: Any, hp: Any) -> Any:
    """The gradient with decay, times the trust ratio."""
    return hp.trust * (g + hp.decay * w)


@rule_helper
def accumulated(g: Any, a: Any, hp: Any) -> Any:
    """The momentum."""
    return hp.momentum * a + product(hp.one_minus_dampening, g)


def lars(w: Any, g: Any, a: Any, hp: Any) -> Any:
    """LARS."""
    a = accumulated(scaled(w, g, hp), a, hp)
    return w - hp.lr * a, a


def lars_nesterov(w: Any, g: Any, a: Any, hp: Any) -> Any:
    """LARS with Nesterov's step."""
    g = scaled(w, g, hp)
    a = accumulated(g, a, hp)
    return w - hp.lr * (g + hp.momentum * a), a


def norms(w: Any, g: Any, a: Any, hp: Any) -> Any:
    """First stage: the norms of parameter and gradient."""
    return w, g


def trust(squares_of_w: Any, squares_of_g: Any, decay: Any, coefficient: Any, epsilon: Any) -> Any:
    """The trust ratio; 1 where a norm is 0, or the coefficient a NaN, which stands for none."""
    if math.isnan(coefficient) or squares_of_w == 0.0 or squares_of_g == 0.0:
        return 1.0
    return ratio(math.sqrt(squares_of_w), math.sqrt(squares_of_g), decay, coefficient, epsilon)


# The trust ratio is 1 until the norms are known.
_HP = ("lr", "momentum", "one_minus_dampening", "trust", "decay")
_NORMS: dict[str, Any] = {
    "measure": norms,
    "n_measured": 2,
    "factor": trust,
    "factor_of": "trust",
    "takes": ("weight_decay", "trust_coefficient", "epsilon"),
    "decays": True,
}
TORCH_LARS = Rule(lars, ("momentum_buffer",), _HP, **_NORMS)
TORCH_LARS_NESTEROV = Rule(lars_nesterov, ("momentum_buffer",), _HP, **_NORMS)
