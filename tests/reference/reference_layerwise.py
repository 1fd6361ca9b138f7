"""Float64 NumPy reference of the optimizers that look at a whole tensor, or at all of them.

Each function is one step, ``(w, g, *states, scalars by name) -> (w, *states)``, or prepares
gradients for one: arrays of any dtype go in, new float64 arrays come out. The scalars are used
as they are given. Nothing is shared with the library.

Formulas: You et al. (2020), arXiv:1904.00962, for LAMB; You et al. (2017), arXiv:1708.03888, for
LARS; Shazeer and Stern (2018), arXiv:1804.04235, for Adafactor; Pascanu et al. (2013) for the
norm of all gradients. MindSpore's kernels decide where they differ from the papers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from reference import Array, merge_rows, wide

# Of MindSpore's Adafactor: no factor of the second moment and no denominator is smaller.
FLOOR = 1e-30

# A row-sparse gradient: (indices, values).
Gradient = ArrayLike | tuple[ArrayLike, ArrayLike]


def lamb(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, *, lr: float, beta1: float,
    one_minus_beta1: float, beta2: float, one_minus_beta2: float, beta1_power: float,
    beta2_power: float, epsilon: float, decay: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """LAMB as MindSpore's GPU and Ascend kernels have it: ``|w| / |update|``, never clipped. The
    powers are those of this step, ``beta**t`` with t = 1 at the first."""
    w = wide(w)
    m = beta1 * wide(m) + one_minus_beta1 * wide(g)
    v = beta2 * wide(v) + one_minus_beta2 * wide(g) ** 2
    mean, square = m / (1.0 - beta1_power), v / (1.0 - beta2_power)
    update = mean / (np.sqrt(square) + epsilon) + decay * w
    return w - lr * _norm_ratio(w, update) * update, m, v


def lamb_clipped(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, *, lr: float, beta1: float,
    one_minus_beta1: float, beta2: float, one_minus_beta2: float, beta1_power: float,
    beta2_power: float, epsilon: float, decay: float, norm_decay: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """LAMB as MindSpore 1.x had it: the ratio lies in [0, 10] and 1 stands in for zero norms. The
    ratio has a norm of its own: epsilon under the root, and `norm_decay`, the optimizer's decay,
    also for a parameter whose `decay` is 0. Its gate is the norm of the raw gradient."""
    w, g = wide(w), wide(g)
    m = beta1 * wide(m) + one_minus_beta1 * g
    v = beta2 * wide(v) + one_minus_beta2 * g**2
    mean, square = m / (1.0 - beta1_power), v / (1.0 - beta2_power)
    update = mean / (np.sqrt(square) + epsilon) + decay * w
    measured = mean / np.sqrt(square + epsilon) + norm_decay * w
    ratio = min(_norm(w) / _norm(measured), 10.0) if _norm(w) > 0 and _norm(g) > 0 else 1.0
    return w - lr * ratio * update, m, v


def lars_gradient(
    w: ArrayLike, g: ArrayLike, *, coefficient: float, epsilon: float, decay: float,
    lr: float | None = None,
) -> Array:  # fmt: skip
    """The gradient that LARS hands to the optimizer inside of it, decay included. With `lr`, the
    rate of that optimizer, the factor is divided by it and limited to [0, 1] (use_clip), so that no
    parameter learns faster than at `lr`."""
    w, g = wide(w), wide(g)
    factor = coefficient * _norm(w) / (_norm(g) + decay * _norm(w) + epsilon)
    if lr is not None:
        factor = max(min(factor / lr, 1.0), 0.0)
    return factor * (g + decay * w)


def adafactor(
    w: ArrayLike, g: ArrayLike, exp_avg: ArrayLike | None, *second_moment: ArrayLike, lr: float,
    beta2: float, one_minus_beta2: float, beta1: float | None = None, one_minus_beta1: float = 0.0,
    epsilon1: float = 1e-30, epsilon2: float = 1e-3, clip_threshold: float = 1.0,
    scale_parameter: bool = True, decay: float = 0.0, compression: bool = False,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Adafactor: ``(w, exp_avg, *second_moment)`` after one step.

    The second moment is either ``row, column``, with the last two axes of `w` factored and the
    leading ones a batch, or one array of the shape of `w`, which `compression` rounds to float16
    after its use. `beta2` is that of this step, ``1 - t**-decay_rate``; `lr` is the relative or
    the given rate, before the parameter's root mean square scales it. Without `beta1`,
    `exp_avg` is not read and comes back as it came.
    """
    w, g = wide(w), wide(g)
    square = g**2 + epsilon1
    if len(second_moment) == 2:
        row, column = map(wide, second_moment)
        row = beta2 * row + one_minus_beta2 * square.mean(-1)
        column = np.maximum(beta2 * column + one_minus_beta2 * square.mean(-2), FLOOR)
        update = g / _outer_root(row, column)
        states = (row, column)
    else:
        (full,) = map(wide, second_moment)
        full = np.maximum(beta2 * full + one_minus_beta2 * square, FLOOR)
        update = g / np.sqrt(full)
        states = (wide(np.float16(full)) if compression else full,)
    rate = lr * max(epsilon2, _rms(w)) if scale_parameter else lr
    update = update * rate / max(1.0, _rms(update) / clip_threshold)
    if beta1 is not None:
        # The average is taken of updates that already hold their learning rates.
        exp_avg = update = beta1 * wide(exp_avg) + one_minus_beta1 * update
    return w - update - decay * rate * w, exp_avg, *states


def global_norm(gradients: Sequence[Gradient]) -> float:
    """Euclidean norm of all gradients taken together; rows of equal indices are summed first."""
    parts = [merge_rows(*g)[1] if isinstance(g, tuple) else wide(g) for g in gradients]
    return float(np.sqrt(sum(np.sum(part**2) for part in parts)))


def clip_by_global_norm(gradients: Sequence[Gradient], clip_norm: float) -> list[Gradient]:
    """All gradients times ``clip_norm / max(norm, clip_norm)``; pairs keep their indices."""
    factor = clip_norm / max(global_norm(gradients), clip_norm)
    return [
        (g[0], factor * wide(g[1])) if isinstance(g, tuple) else factor * wide(g) for g in gradients
    ]


def _outer_root(row: Array, column: Array) -> Array:
    """Root of the rank-one second moment whose row and column means are given."""
    mean = np.maximum(row.mean(-1, keepdims=True), FLOOR)
    root = np.sqrt(row / mean)[..., :, None] * np.sqrt(column)[..., None, :]
    return np.maximum(root, FLOOR)


def _norm_ratio(w: Array, update: Array) -> float:
    """``|w| / |update|``, or 1 where one of the norms is 0."""
    w_norm, update_norm = _norm(w), _norm(update)
    return w_norm / update_norm if w_norm > 0 and update_norm > 0 else 1.0


def _norm(array: Array) -> float:
    """Euclidean norm over all axes."""
    return float(np.sqrt(np.sum(array**2)))


def _rms(array: Array) -> float:
    """Root mean square over all axes."""
    return float(np.sqrt(np.mean(array**2)))
