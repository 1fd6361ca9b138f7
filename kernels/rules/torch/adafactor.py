"""PyTorch's Adafactor, whose matrices are those of `rules.adafactor` with other scalars.

With ``q = g*g`` (no epsilon is added), and ``epsilon`` where a divisor needs it::

    r  = R*C / max(mean(R), epsilon)    of a matrix;  of a vector  r = v
    u  = g / sqrt(max(r, epsilon**2))

``largest`` is ``1 / epsilon``, and ``smallest_mean`` is ``epsilon``. PyTorch's averages are `lerp`,
and from an infinity that they begin with no way leads to another number: they become NaN.
"""

from __future__ import annotations

import math
from typing import Any

from ...rule import Rule, product, rule_helper
from ...state import State
from ..adafactor import (
    HP,
    LINES,
    SIZES,
    averaged_mean,
    descended,
    factored_direction,
    factored_plain,
)


@rule_helper
def nan_of_infinity(state: Any, mean: Any, hp: Any) -> Any:
    """0, or a NaN if a `lerp` from ``state`` to ``mean`` begins with what is not finite."""
    return product(hp.zero, state if hp.share > hp.zero else mean)


@rule_helper
def averaged(state: Any, mean: Any, hp: Any) -> Any:
    """The second moment of a row or a column."""
    return averaged_mean(state, mean, hp) + nan_of_infinity(state, mean, hp)


@rule_helper
def direction(g: Any, v: Any, hp: Any) -> Any:
    """The direction of a vector, and its new second moment."""
    v = v + hp.one_minus_beta2 * (g * g - v) + nan_of_infinity(v, g * g, hp)
    reciprocal = hp.one / math.sqrt(v)
    return g * (hp.largest if reciprocal > hp.largest else reciprocal), v


def adafactor(w: Any, g: Any, v: Any, hp: Any) -> Any:
    """Adafactor on a vector."""
    u, v = direction(g, v, hp)
    return descended(w, hp.step * u, hp), v


def norms(w: Any, g: Any, v: Any, hp: Any) -> Any:
    """First stage: the sizes of the parameter and of the direction."""
    u, _ = direction(g, v, hp)
    return w, u


def step_factor(
    squares_of_w: Any, squares_of_u: Any, size: Any, epsilon2: Any, clip_threshold: Any
) -> Any:
    """A factor of the step alone: the decay is not relative to the parameter's size.

    A size that is a NaN is none: the smallest one, or one that is not clipped, takes its place.
    """
    relative = math.sqrt(squares_of_w / size)
    relative = relative if relative > epsilon2 else epsilon2
    excess = math.sqrt(squares_of_u / size) / clip_threshold
    return relative / excess if excess > 1.0 else relative


_HP = (*HP, "one", "zero", "share")
_TAKES = "size", "epsilon2", "clip_threshold"
_SIZES = {**SIZES, "factor": step_factor, "factor_of": "step", "takes": _TAKES}
TORCH_ADAFACTOR_MATRIX = Rule(
    factored_plain, (State("row_var", "row"), State("col_var", "column")), _HP,
    factored_direction, lines=LINES._replace(average=averaged), **_SIZES,
)  # fmt: skip
TORCH_ADAFACTOR = Rule(
    adafactor, ("variance",), _HP, norms, matrix=TORCH_ADAFACTOR_MATRIX, **_SIZES
)
