"""Adafactor: a second moment kept as row and column means, and a step relative to the parameter.

For a matrix (of each leading index of a larger tensor), at update ``t = 1, 2, ...`` with
``beta2 = 1 - t**(-decay_rate)``::

    q = g*g + epsilon1
    R <- beta2*R + (1 - beta2)*(mean of q over each row)
    C <- beta2*C + (1 - beta2)*(mean of q over each column)
    u  = g / (sqrt(R / mean(R)) * sqrt(C))

for a vector ``v <- beta2*v + (1 - beta2)*q`` and ``u = g / sqrt(v)``. Then, with the root mean
squares ``|.|`` over the whole parameter and ``a = rho * max(epsilon2, |w|)``::

    u <- a * u / max(1, |u| / clip_threshold)
    M <- beta1*M + (1 - beta1)*u       (M = u without a first moment)
    w <- w - M - decay*a*w

Shazeer and Stern (2018), arXiv:1804.04235, algorithms 4 to 6. Means are held above 1e-30.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..rule import Lines, Rule, product, rule_helper
from ..state import State

_SMALLEST = 1e-30


@rule_helper
def squared(g: Any, hp: Any) -> Any:
    """The squared gradient plus epsilon, of which the second moment keeps averages."""
    return g * g + hp.epsilon1


@rule_helper
def averaged_mean(state: Any, mean: Any, hp: Any) -> Any:
    """The moving average of the means of a row or a column; every product is rounded."""
    return product(hp.beta2, state) + product(hp.one_minus_beta2, mean)


@rule_helper
def held_up(v: Any, smallest: Any) -> Any:
    """A second moment that can be divided by; a NaN stays a NaN."""
    # Not ``max``: the comparison with a NaN is false, so that it stays.
    return smallest if v < smallest else v


@rule_helper
def row_factor(row: Any, mean: Any) -> Any:
    """``1 / sqrt(R / mean(R))``."""
    return math.sqrt(mean / row)


@rule_helper
def column_factor(column: Any) -> Any:
    """``1 / sqrt(C)``, in float64."""
    return 1.0 / math.sqrt(column)


@rule_helper
def factored_direction(g: Any, row: Any, column: Any, hp: Any) -> Any:
    """``g / (sqrt(R / mean(R)) * sqrt(C))``, given the reciprocals of the two roots."""
    reciprocal = row * column
    # The reciprocal may be infinite, and a gradient of 0 times that would be a NaN: ``largest`` is
    # the reciprocal of the smallest divisor that there is to be.
    return g * (hp.largest if reciprocal > hp.largest else reciprocal)


@rule_helper
def factored(w: Any, g: Any, average: Any, row: Any, column: Any, hp: Any) -> Any:
    """Adafactor on an element of a matrix, with a first moment."""
    average = averaged(factored_direction(g, row, column, hp), average, hp)
    return descended(w, average, hp), average


@rule_helper
def factored_plain(w: Any, g: Any, row: Any, column: Any, hp: Any) -> Any:
    """Adafactor on an element of a matrix, without a first moment."""
    return descended(w, product(hp.step, factored_direction(g, row, column, hp)), hp)


@rule_helper
def full_direction(g: Any, v: Any, hp: Any) -> Any:
    """The direction of a vector, and its new second moment."""
    v = hp.beta2 * v + product(hp.one_minus_beta2, squared(g, hp))
    v = held_up(v, hp.smallest)
    return g / math.sqrt(v), v


@rule_helper
def averaged(u: Any, average: Any, hp: Any) -> Any:
    """The first moment of the scaled directions."""
    return hp.beta1 * average + product(hp.one_minus_beta1, hp.step * u)


@rule_helper
def descended(w: Any, step: Any, hp: Any) -> Any:
    """The parameter after the step and the decoupled decay."""
    return w - step - hp.decay * w


def adafactor(w: Any, g: Any, average: Any, v: Any, hp: Any) -> Any:
    """Adafactor on a vector, with a first moment."""
    u, v = full_direction(g, v, hp)
    average = averaged(u, average, hp)
    return descended(w, average, hp), average, v


def adafactor_norms(w: Any, g: Any, average: Any, v: Any, hp: Any) -> Any:
    """First stage: the sizes of the parameter and of the direction."""
    u, _ = full_direction(g, v, hp)
    return w, u


def adafactor_plain(w: Any, g: Any, v: Any, hp: Any) -> Any:
    """Adafactor on a vector, without a first moment."""
    u, v = full_direction(g, v, hp)
    return descended(w, hp.step * u, hp), v


def adafactor_plain_norms(w: Any, g: Any, v: Any, hp: Any) -> Any:
    """First stage: the sizes of the parameter and of the direction."""
    u, _ = full_direction(g, v, hp)
    return w, u


def adafactor_scalars(
    real: Any, rho: float, decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of update ``step``, computed in float64 and rounded to ``real`` once."""
    beta1, decay_rate, epsilon1 = constants
    one_minus_beta2 = float(step) ** -decay_rate
    return (
        real(1.0 - one_minus_beta2),
        real(one_minus_beta2),
        real(epsilon1),
        real(_SMALLEST),
        real(_SMALLEST),
        real(1.0 / _SMALLEST),
        real(beta1),
        real(1.0) - real(beta1),
        real(rho),
        real(decay * rho),
    )


def relative_rate(step: int, warmup_init: bool) -> float:
    """The learning rate of update ``step`` where none is given."""
    largest = 1e-6 * step if warmup_init else 1e-2
    return min(largest, 1.0 / math.sqrt(step))


def size_factors(
    squares_of_w: Any, squares_of_u: Any, size: Any, epsilon2: Any, clip_threshold: Any,
    scale_parameter: Any,
) -> Any:  # fmt: skip
    """Factors of ``step`` and ``decay``, in float64, from sums over ``size`` elements.

    ``max(epsilon2, |w|)`` with ``scale_parameter``, else 1, is a factor of both; ``1 / max(1, |u| /
    clip_threshold)`` one of the step.
    """
    relative = 1.0
    if scale_parameter:
        relative = math.sqrt(squares_of_w / size)
        relative = epsilon2 if relative < epsilon2 else relative
    excess = math.sqrt(squares_of_u / size) / clip_threshold
    return relative if excess <= 1.0 else relative / excess, relative


# The last two are those of a parameter of size 1 until the sizes are known.
HP = ("beta2", "one_minus_beta2", "epsilon1", "smallest", "smallest_mean", "largest", "beta1",
      "one_minus_beta1", "step", "decay")  # fmt: skip
LINES = Lines(
    squared, averaged_mean, held_up, row_factor, column_factor, "smallest", "smallest_mean",
    "scale_parameter",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "n_measured": 2,
    "factor": size_factors,
    "factor_of": ("step", "decay"),
    "takes": ("size", "epsilon2", "clip_threshold", "scale_parameter"),
    "decays": True,
}
"""What follows from the sizes of a parameter and of its direction, of matrices and vectors."""
_LINE_STATES = State("exp_avg_sq_row", "row"), State("exp_avg_sq_col", "column")
ADAFACTOR_MATRIX = Rule(
    factored, (State("exp_avg"), *_LINE_STATES), HP, factored_direction, lines=LINES, **SIZES
)
ADAFACTOR = Rule(
    adafactor, ("exp_avg", "exp_avg_sq"), HP, adafactor_norms, matrix=ADAFACTOR_MATRIX, **SIZES
)
ADAFACTOR_PLAIN_MATRIX = Rule(
    factored_plain, _LINE_STATES, HP, factored_direction, lines=LINES, **SIZES
)
ADAFACTOR_PLAIN = Rule(
    adafactor_plain, ("exp_avg_sq",), HP, adafactor_plain_norms, matrix=ADAFACTOR_PLAIN_MATRIX,
    **SIZES,
)  # fmt: skip
