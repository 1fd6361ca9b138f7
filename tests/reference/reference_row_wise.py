"""Float64 NumPy reference of Adagrad and Adam with one second moment for each row.

Each function is one step, as in reference_elementwise.py. Rows are what the first axis numbers; a
vector is one row.

Formulas: `EXACT_ROWWISE_ADAGRAD` and `PARTIAL_ROWWISE_ADAM` of FBGEMM; Mudigere et al. (2021),
arXiv:2104.05158.
"""

import numpy as np
from numpy.typing import ArrayLike
from reference import AdamScalars, Array, wide


def adagrad(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, eps: float
) -> tuple[Array, Array]:
    """One accumulator a row; a coupled weight decay is part of the gradient."""
    w, g = wide(w), wide(g)
    accum = wide(accum) + _mean_squares(g)
    return w - lr * g / (_beside(g, np.sqrt(accum)) + eps), accum


def adagrad_decoupled(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, eps: float, decay: float
) -> tuple[Array, Array]:
    """The same with a weight decay of its own."""
    stepped, accum = adagrad(w, g, accum, lr=lr, eps=eps)
    return stepped - lr * decay * wide(w), accum


def adam(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: AdamScalars
) -> tuple[Array, Array, Array]:
    """One second moment a row; the step size holds the bias corrections."""
    w, g = wide(w), wide(g)
    m = hp.beta1 * wide(m) + hp.one_minus_beta1 * g
    v = hp.beta2 * wide(v) + hp.one_minus_beta2 * _mean_squares(g)
    step = hp.step_size * m / (_beside(g, np.sqrt(v)) + hp.epsilon)
    return w - step - hp.lr * hp.decay * w, m, v


def _mean_squares(g: Array) -> Array:
    """Of each row, ``[rows]``."""
    n = np.ndim(g)
    found = np.average(g * g, tuple(range(min(1, n - 1), n)))
    return found if n > 1 else np.atleast_1d(found)


def _beside(g: Array, of_rows: Array) -> Array:
    """A number of each row, to be broadcast to its elements."""
    return np.reshape(of_rows, (-1, *(1,) * (np.ndim(g) - 1)))
