"""Float64 NumPy reference of the Adam family, written from the published formulas.

It shares nothing with the library: no import, no helper, no rounding rule. Arrays of any dtype
go in and float64 arrays come out; nothing is changed in place. The scalars are used as they are
given: whoever calls decides how they were rounded, with `adam_scalars` or with an object of his
own that has the same attributes.

Formulas: Kingma and Ba (2015), arXiv:1412.6980, end of section 2; AMSGrad as MindSpore's
ApplyAdamWithAmsgrad documents it; decoupled decay as MindSpore's AdamWeightDecay does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from roundings import Rounded

Array = NDArray[np.float64]
# (w, g, *states) -> (new w, *new states)
Step = Callable[..., tuple[Array, ...]]


@dataclass(frozen=True)
class AdamScalars:
    """The scalars of one update, in float64, after whatever rounding the caller wants."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    lr: float
    epsilon: float
    decay: float = 0.0


def adam_scalars(
    lr: float, beta1: float, beta2: float, epsilon: float, beta1_power: float = 0.0,
    beta2_power: float = 0.0, decay: float = 0.0, real: Any = np.float32,
) -> AdamScalars:  # fmt: skip
    """Round every hyper-parameter to ``real``; ``1 - beta`` is taken between rounded numbers. The
    step size ``lr * sqrt(1 - beta2_power) / (1 - beta1_power)`` is not rounded again. With both
    powers 0 it is ``lr``: Adam without bias correction."""
    lr, beta1, beta2, epsilon, beta1_power, beta2_power, decay = (
        float(real(x)) for x in (lr, beta1, beta2, epsilon, beta1_power, beta2_power, decay)
    )
    return AdamScalars(
        beta1=beta1, one_minus_beta1=float(real(1.0 - beta1)), beta2=beta2,
        one_minus_beta2=float(real(1.0 - beta2)),
        step_size=lr * np.sqrt(1.0 - beta2_power) / (1.0 - beta1_power), lr=lr, epsilon=epsilon,
        decay=decay)  # fmt: skip


def usual_adam_scalars(
    lr: float, beta1: float, beta2: float, epsilon: float, t: int, decay: float, real: Any
) -> AdamScalars:
    """Those with which `adam` and `adam_weight_decay` are Adam and AdamW at update t = 1, 2, ...
    Each is rounded to ``real`` once."""
    root, first = np.sqrt(1.0 - beta2**t), 1.0 - beta1**t
    size = float(real(lr * root / first))
    return AdamScalars(
        beta1=float(real(beta1)), one_minus_beta1=float(real(1.0 - beta1)),
        beta2=float(real(beta2)), one_minus_beta2=float(real(1.0 - beta2)), step_size=size, lr=size,
        epsilon=float(real(epsilon * root)), decay=float(real(decay * first / root)))  # fmt: skip


def beta_powers(beta: float, steps: int, real: Any = np.float32) -> list[Any]:
    """``beta**t`` for ``t = 1 .. steps`` as MindSpore keeps it: a running product, rounded."""
    powers = []
    power = real(1.0)
    for _ in range(steps):
        power = power * real(beta)
        powers.append(power)
    return powers


def adam(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: Any, *, nesterov: bool = False
) -> tuple[Array, Array, Array]:
    """Adam with the bias correction in the step size and epsilon outside of the root."""
    delta, m, v = adam_delta(g, m, v, hp, nesterov=nesterov)
    return wide(w) + delta, m, v


def adam_delta(
    g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: Any, *, nesterov: bool = False
) -> tuple[Array, Array, Array]:
    """What Adam would add to the parameter, and the new moments."""
    m, v = moments(g, m, v, hp)
    direction = hp.beta1 * m + hp.one_minus_beta1 * wide(g) if nesterov else m
    return -hp.step_size * direction / (np.sqrt(v) + hp.epsilon), m, v


def adam_amsgrad(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, vhat: ArrayLike, hp: Any
) -> tuple[Array, Array, Array, Array]:
    """AMSGrad: the denominator is the largest biased second moment seen so far."""
    m, v = moments(g, m, v, hp)
    vhat = np.maximum(wide(vhat), v)
    return wide(w) - hp.step_size * m / (np.sqrt(vhat) + hp.epsilon), m, v, vhat


def adam_weight_decay(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: Any
) -> tuple[Array, Array, Array]:
    """Decoupled decay of the old parameter, times the learning rate; no bias correction."""
    m, v = moments(g, m, v, hp)
    return wide(w) - hp.lr * (m / (np.sqrt(v) + hp.epsilon) + hp.decay * wide(w)), m, v


def adamw_composed(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: Any
) -> tuple[Array, Array, Array]:
    """Decoupled decay of the parameter that has stepped, times the learning rate."""
    m, v = moments(g, m, v, hp)
    stepped = wide(w) - hp.lr * m / (np.sqrt(v) + hp.epsilon)
    return stepped - hp.lr * hp.decay * stepped, m, v


def moments(g: ArrayLike, m: ArrayLike, v: ArrayLike, hp: Any) -> tuple[Array, Array]:
    """Exponential moving averages of the gradient and of its square."""
    g = wide(g)
    m = hp.beta1 * wide(m) + hp.one_minus_beta1 * g
    v = hp.beta2 * wide(v) + hp.one_minus_beta2 * g**2
    return m, v


def merge_rows(indices: ArrayLike, values: ArrayLike) -> tuple[NDArray[np.intp], Array]:
    """The distinct indices in increasing order and, for each, the sum of its gradient rows."""
    rows, slots = np.unique(np.asarray(indices), return_inverse=True)
    sums = np.zeros((rows.size, *np.shape(values)[1:]))
    np.add.at(sums, slots.reshape(-1), wide(values))
    return rows, sums


def lazy_step(
    step: Step, w: ArrayLike, indices: ArrayLike, values: ArrayLike, *states: ArrayLike
) -> tuple[Array, ...]:
    """Apply ``step(w, g, *states)`` once to every named row; the others stay as they are."""
    rows, sums = merge_rows(indices, values)
    arrays = [wide(w), *map(wide, states)]
    new_rows = step(arrays[0][rows], sums, *(state[rows] for state in arrays[1:]))
    for array, new in zip(arrays, new_rows, strict=True):
        array[rows] = new
    return tuple(arrays)


def dense_equivalent_step(
    step: Step, w: ArrayLike, indices: ArrayLike, values: ArrayLike, *states: ArrayLike
) -> tuple[Array, ...]:
    """Apply ``step(w, g, *states)`` to every row; rows that are not named have ``g = 0``."""
    return step(wide(w), densify(indices, values, np.shape(w)), *states)


def densify(indices: ArrayLike, values: ArrayLike, shape: Sequence[int]) -> Array:
    """The dense gradient that a row-sparse one stands for."""
    dense = np.zeros(shape)
    np.add.at(dense, np.asarray(indices), wide(values))
    return dense


def wide(array: Any) -> Any:
    """A float64 copy; numbers that carry the bounds of their errors stay what they are."""
    return array if isinstance(array, Rounded) else np.array(array, dtype=np.float64)
