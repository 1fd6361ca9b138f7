"""Float64 NumPy reference of the elementwise optimizers that are not of the Adam family.

Each function is one step, ``(w, g, *states, scalars by name) -> (w, *states)``: arrays of any
dtype go in, new float64 arrays come out. The scalars are used as they are given: whoever calls
decides how they were rounded. Nothing is shared with the library.

Formulas: Polyak's and Nesterov's momentum as in Sutskever et al. (2013); Duchi et al. (2011) for
Adagrad and its proximal form; Hinton's lecture 6e and Graves (2013), arXiv:1308.0850, for both
forms of RMSProp; McMahan et al. (2013) for FTRL. Where MindSpore's kernels agree on something
else, the function says so.

An element is left alone only where its condition holds, so a NaN always reaches the parameter.
"""

import numpy as np
from numpy.typing import ArrayLike
from reference import Array, wide


def sgd(w: ArrayLike, g: ArrayLike, *, lr: float) -> tuple[Array]:
    """Plain descent."""
    return (wide(w) - lr * wide(g),)


def momentum(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, momentum: float,
    one_minus_dampening: float = 1.0, nesterov: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Heavy ball; with `nesterov` the step looks one more momentum ahead."""
    w, g = wide(w), wide(g)
    accum = momentum * wide(accum) + one_minus_dampening * g
    direction = g + momentum * accum if nesterov else accum
    return w - lr * direction, accum


def sgd_momentum(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, momentum: float,
    one_minus_dampening: float, nesterov: bool, t: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Heavy ball that begins, at t = 1, with the first gradient as it is: nn.SGD."""
    w, g = wide(w), wide(g)
    accum = g if t == 1 else momentum * wide(accum) + one_minus_dampening * g
    direction = g + momentum * accum if nesterov else accum
    return w - lr * direction, accum


def sgd_stat(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, stat: ArrayLike, *, lr: float, momentum: float,
    one_minus_dampening: float, nesterov: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Heavy ball in which elements with ``stat > 0`` start from the bare gradient. The gradient
    that starts an element is not dampened; its `stat` becomes 0. This is ops.SGD with momentum > 0;
    without momentum it is `sgd`, and both states stay as they are."""
    w, g = wide(w), wide(g)
    fresh = wide(stat) > 0
    accum = np.where(fresh, g, momentum * wide(accum) + one_minus_dampening * g)
    direction = g + momentum * accum if nesterov else accum
    return w - lr * direction, accum, np.where(fresh, 0.0, wide(stat))


def rmsprop(
    w: ArrayLike, g: ArrayLike, mean_square: ArrayLike, moment: ArrayLike = 0.0, *, lr: float,
    rho: float, one_minus_rho: float, momentum: float, epsilon: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradient over its root mean square, epsilon under the root; lr enters before momentum."""
    w, g = wide(w), wide(g)
    mean_square = rho * wide(mean_square) + one_minus_rho * g**2
    moment = momentum * wide(moment) + lr * g / np.sqrt(mean_square + epsilon)
    return w - moment, mean_square, moment


def rmsprop_centered(
    w: ArrayLike, g: ArrayLike, mean_gradient: ArrayLike, mean_square: ArrayLike,
    moment: ArrayLike = 0.0, *, lr: float, rho: float, one_minus_rho: float, momentum: float,
    epsilon: float,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """RMSProp over the variance of the gradient instead of its mean square. Where rounding left no
    positive variance plus epsilon, parameter and moment wait; the two means do not. That is what
    MindSpore's CPU kernel does (its GPU kernel makes NaN)."""
    w, g, moment = wide(w), wide(g), wide(moment)
    mean_gradient = rho * wide(mean_gradient) + one_minus_rho * g
    mean_square = rho * wide(mean_square) + one_minus_rho * g**2
    variance = mean_square - mean_gradient**2 + epsilon
    waits = variance <= 0
    root = np.sqrt(np.where(waits, 1.0, variance))
    moment = np.where(waits, moment, momentum * moment + lr * g / root)
    return np.where(waits, w, w - moment), mean_gradient, mean_square, moment


def adagrad(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, update_slots: bool = True
) -> tuple[Array, Array]:
    """Gradient over the root of the sum of its squares, without an epsilon. Nothing moves where the
    accumulator is 0. Without `update_slots` it keeps its value."""
    w, g, accum = wide(w), wide(g), wide(accum)
    if update_slots:
        accum = accum + g**2
    return w - _rate(lr, accum) * g, accum


def proximal_adagrad(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, *, lr: float, l1: float, l2: float
) -> tuple[Array, Array]:
    """Adagrad, then the proximal step of ``l1*|w| + l2*w**2/2`` at each element's own rate. The
    documentation has `lr` in the proximal step; every kernel of MindSpore has ``lr / sqrt(accum)``,
    which is also what the paper derives. A rate of 0 moves nothing."""
    w, g = wide(w), wide(g)
    accum = wide(accum) + g**2
    rate = _rate(lr, accum)
    target = w - rate * g
    shrunk = np.sign(target) * np.maximum(np.abs(target) - rate * l1, 0.0)
    return shrunk / (1.0 + rate * l2), accum


def ftrl(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, linear: ArrayLike, *, lr: float, l1: float,
    l2: float, lr_power: float, beta: float = 0.0, l2_shrinkage: float = 0.0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Follow the regularised leader, element by element: 0 while ``|linear| <= l1``. The new
    parameter depends on the old one only through `linear`. `lr_power` is the exponent of the
    accumulator in the learning rate, -0.5 in the paper; l2 counts twice, as published. `beta` and
    `l2_shrinkage` are those of ``update_step`` in Keras 3."""
    w, g, accum = wide(w), wide(g), wide(accum)
    new_accum = accum + g**2
    old_power, power = accum**-lr_power, new_accum**-lr_power
    shrunk = g + 2.0 * l2_shrinkage * w
    linear = wide(linear) + shrunk - (power - old_power) / lr * w
    quadratic = power / lr + 2.0 * (l2 + beta / (2.0 * lr))
    leader = (np.sign(linear) * l1 - linear) / quadratic
    return np.where(np.abs(linear) <= l1, 0.0, leader), new_accum, linear


def adamax(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, *, lr: float, beta1: float,
    one_minus_beta1: float, beta2: float, eps: float, beta1_power: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Algorithm 2 of Kingma and Ba (2015), with MindSpore's epsilon in the denominator. A NaN is
    not the largest, there and here: it comes to the parameter by way of `m`."""
    w, g, faded = wide(w), wide(g), beta2 * wide(v)
    m = beta1 * wide(m) + one_minus_beta1 * g
    v = np.where(np.abs(g) > faded, np.abs(g), faded)
    return w - lr / (1.0 - beta1_power) * m / (v + eps), m, v


def adadelta(
    w: ArrayLike, g: ArrayLike, accum: ArrayLike, accum_update: ArrayLike, *, lr: float, rho: float,
    one_minus_rho: float, epsilon: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Algorithm 1 of Zeiler (2012), times `lr`."""
    w, g, accum_update = wide(w), wide(g), wide(accum_update)
    accum = rho * wide(accum) + one_minus_rho * g**2
    step = np.sqrt(accum_update + epsilon) / np.sqrt(accum + epsilon) * g
    return w - lr * step, accum, rho * accum_update + one_minus_rho * step**2


def asgd(
    w: ArrayLike, g: ArrayLike, average: ArrayLike, *, lr: float, lambd: float, alpha: float,
    t0: float, t: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Bottou's averaged descent for a fixed `lr`, with rates that are one step old, as published. A
    first step of an average is what is averaged."""
    eta = lr / (1.0 + lambd * lr * (t - 1)) ** alpha
    w, average = (1.0 - lambd * eta) * wide(w) - eta * wide(g), wide(average)
    later = max(1.0, t - 1 - t0)
    return w, w if t == 1 or later == 1.0 else average + (w - average) / later


def rprop(
    w: ArrayLike, g: ArrayLike, prev: ArrayLike, size: ArrayLike, *, lr: float, etaminus: float,
    etaplus: float, step_size_min: float, step_size_max: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Riedmiller and Braun (1993), without their weight backtracking, as in PyTorch too. A size
    that is 0 has not begun: it is `lr`."""
    w, g, size = wide(w), wide(g), wide(size)
    turn, size = g * wide(prev), np.where(size == 0, lr, size)
    size = np.where(turn > 0, size * etaplus, np.where(turn < 0, size * etaminus, size))
    size = np.minimum(np.maximum(size, step_size_min), step_size_max)
    g = np.where(turn < 0, 0.0, g)
    return w - np.sign(g) * size, g, size


def lion(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, *, lr: float, decay: float, beta1: float,
    one_minus_beta1: float, beta2: float, one_minus_beta2: float,
) -> tuple[Array, Array]:  # fmt: skip
    """Algorithm 2 of Chen et al. (2023)."""
    w, g, m = wide(w), wide(g), wide(m)
    direction = np.sign(beta1 * m + one_minus_beta1 * g)
    return w - lr * (direction + decay * w), beta2 * m + one_minus_beta2 * g


def adan(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, n: ArrayLike, previous: ArrayLike, *,
    lr: float, decay: float, beta1: float, beta2: float, beta3: float, eps: float, t: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Algorithm 1 of Xie et al. (2022) with betas and bias corrections of its authors' code."""
    w, g = wide(w), wide(g)
    change = g - wide(previous) if t > 1 else 0.0 * g
    m = beta1 * wide(m) + (1.0 - beta1) * g
    v = beta2 * wide(v) + (1.0 - beta2) * change
    n = beta3 * wide(n) + (1.0 - beta3) * (g + beta2 * change) ** 2
    direction = m / (1.0 - beta1**t) + beta2 * v / (1.0 - beta2**t)
    direction = direction / (np.sqrt(n / (1.0 - beta3**t)) + eps)
    return (w - lr * direction) / (1.0 + lr * decay), m, v, n, g


def _rate(lr: float, accum: Array) -> Array:
    """``lr / sqrt(accum)``, and 0 where nothing has been accumulated."""
    empty = accum == 0
    return np.where(empty, 0.0, lr / np.sqrt(np.where(empty, 1.0, accum)))
