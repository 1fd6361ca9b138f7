"""PyTorch's Adafactor, whose matrices are those of `rules.adafactor` with other scalars.

With ``q = g*g`` (no epsilon is added), and ``epsilon`` where a divisor needs it::

    r  = R*C / max(mean(R), epsilon)    of a matrix;  of a vector  r = v
    u  = g / sqrt(max(r, epsilon**2))

``largest`` is ``1 / epsilon``, and ``smallest_mean`` is ``epsilon``.
"""

from __future__ import annotations

import math
from typing import Any

from ...rule import Rule, rule_helper
from ...state import State
from ..adafactor import (
    HP,
    LINES,
    SIZES,
    descended,
    factored_direction,
    factored_plain,
    size_factors,
)


@rule_helper
def direction(g: Any, v: Any, hp: Any) -> Any:
    """The direction of a vector, and its new second moment."""
    v = v + hp.one_minus_beta2 * (g * g - v)
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


@rule_helper
def step_factor(*arguments: Any) -> Any:
    """A factor of the step alone: the decay is not relative to the parameter's size."""
    return size_factors(*arguments)[0]


_HP = (*HP, "one")
_SIZES = {**SIZES, "factor": step_factor, "factor_of": "step"}
TORCH_ADAFACTOR_MATRIX = Rule(
    factored_plain, (State("row_var", "row"), State("col_var", "column")), _HP,
    factored_direction, lines=LINES, **_SIZES,
)  # fmt: skip
TORCH_ADAFACTOR = Rule(
    adafactor, ("variance",), _HP, norms, matrix=TORCH_ADAFACTOR_MATRIX, **_SIZES
)
