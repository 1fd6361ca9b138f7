"""Adagrad and Adam with one second moment for each row.

With the mean over the elements of a row::

    s <- s + mean(g*g)
    w <- w - lr * g / (sqrt(s) + epsilon)

and, with a first moment for each element and the bias-corrected moments at update
``t = 1, 2, ...``::

    m <- m + (1 - beta1)*(g - m)
    v <- v + (1 - beta2)*(mean(g*g) - v)
    w <- w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + epsilon)

A decoupled weight decay takes ``lr * decay * w`` too. What belongs to a row is computed in float64.

Mudigere et al. (2021), arXiv:2104.05158, section 4.1.3, for tables of recommenders.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule
from ..state import State
from .adam import UPDATES, corrections
from .adam import adam_scalars as scalars_of_adam
from .idle import shrinking


def squares(w: Any, g: Any, hp: Any) -> Any:
    """The measured value of an element without a first moment."""
    return (g,)


def squares_beside_moment(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """The measured value of an element with one."""
    return (g,)


def adagrad_row(sum_of_squares: Any, size: Any, accum: Any, epsilon: Any) -> Any:
    """The reciprocal of the divisor of a row, and its accumulator."""
    accum = accum + sum_of_squares / size
    return 1.0 / (math.sqrt(accum) + epsilon), accum


def row_wise_adagrad(w: Any, g: Any, hp: Any) -> Any:
    """Adagrad on an element."""
    return w - hp.step * g


def row_wise_adagrad_decoupled(w: Any, g: Any, hp: Any) -> Any:
    """Adagrad on an element, with a decoupled weight decay."""
    return w - hp.step * g - hp.decay * w


def adam_row(
    sum_of_squares: Any, size: Any, v: Any, one_minus_beta2: Any, correction2: Any, epsilon: Any
) -> Any:
    """The reciprocal of the divisor of a row, and its second moment."""
    v = v + one_minus_beta2 * (sum_of_squares / size - v)
    return 1.0 / (math.sqrt(correction2 * v) + epsilon), v


def adam_row_by_count(
    sum_of_squares: Any, size: Any, v: Any, updates: Any, one_minus_beta1: Any,
    one_minus_beta2: Any, epsilon: Any, usual: Any,
) -> Any:  # fmt: skip
    """`adam_row` whose bias is corrected by the count of the row, which comes last."""
    first, root, t = corrections(updates, one_minus_beta1, one_minus_beta2)
    v = v + one_minus_beta2 * (sum_of_squares / size - v)
    divisor = math.sqrt(v) + epsilon * (root if usual > 0.0 else 1.0)
    return root / (divisor * first), v, t


def row_wise_adam(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """Adam on an element, with a decoupled weight decay."""
    m = m + hp.one_minus_beta1 * (g - m)
    return w - hp.step * m - hp.decay * w, m


def adagrad_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``."""
    (epsilon,) = constants
    return real(epsilon), real(lr)


def adagrad_decoupled_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of Adagrad, then the share of the parameter that decays."""
    (epsilon,) = constants
    return real(epsilon), real(lr), real(lr * decay)


def adam_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """Adam's scalars, of which the step size holds both corrections, and the decay."""
    scalars = scalars_of_adam(real, lr, decay, step, constants, powers)
    complement1, complement2, size, epsilon = scalars
    return complement1, complement2, real(1.0), epsilon, size, real(lr * decay)


def idle_adagrad(hp: Any, decay: float) -> IdleStep:
    """Adagrad without a gradient: nothing but a decoupled decay."""
    return IdleStep(1.0 - getattr(hp, "decay", 0.0), (1.0,))


def by_row_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """The scalars of Adam whose bias is corrected by the count of each row."""
    beta1, beta2, epsilon, usual = constants
    complements = real(1.0) - real(beta1), real(1.0) - real(beta2)
    return (*complements, real(epsilon), real(lr), real(lr * decay), real(usual))


# A step is the rate until a row is measured, then it divided by the root of its second moment.
_MEASURED: dict[str, Any] = {"n_measured": 1, "factor_of": "step", "scope": "row"}
_ADAGRAD: dict[str, Any] = {
    "states": (State("accum", "row"),),
    "measure": squares,
    "factor": adagrad_row,
    "takes": ("size", "accum", "epsilon"),
    "idle": Idle(shrinking, idle_adagrad, moving=None),
    **_MEASURED,
}
ROW_WISE_ADAGRAD = Rule(row_wise_adagrad, hp=("epsilon", "step"), **_ADAGRAD)
ROW_WISE_ADAGRAD_DECOUPLED = Rule(
    row_wise_adagrad_decoupled, hp=("epsilon", "step", "decay"), decays=True, **_ADAGRAD
)
ROW_WISE_ADAM = Rule(
    row_wise_adam,
    (State("moment1"), State("moment2", "row")),
    ("one_minus_beta1", "one_minus_beta2", "correction2", "epsilon", "step", "decay"),
    squares_beside_moment,
    factor=adam_row,
    takes=("size", "moment2", "one_minus_beta2", "correction2", "epsilon"),
    decays=True,
    **_MEASURED,
)
ROW_WISE_ADAM_BY_ROW = Rule(
    row_wise_adam,
    (State("moment1"), State("moment2", "row"), UPDATES),
    ("one_minus_beta1", "one_minus_beta2", "epsilon", "step", "decay", "usual"),
    squares_beside_moment,
    factor=adam_row_by_count,
    takes=("size", "moment2", "updates", "one_minus_beta1", "one_minus_beta2", "epsilon", "usual"),
    decays=True,
    **_MEASURED,
)
