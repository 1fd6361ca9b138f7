"""The update rules of NumPy's steps.

A rule is a function ``rule(t, w, g, *states, a, b)`` of float32 arrays: the number of the step,
the parameter, the gradient, the states, and two scratch arrays. It changes everything but ``g``
in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from worker_protocol import LR

Array = np.ndarray

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_DECAY = 0.01
_MOMENTUM = 0.9
_RHO, _RMS_EPSILON = 0.9, 1e-10
_TINY = 1e-30  # so that nothing is divided by zero
_L1 = _L2 = 1e-4
_MAX_NORM = 1.0

# -- parts of rules -------------------------------------------------------------------------------


def _average(s: Array, x: Array, rate: float, a: Array) -> None:
    """``s = rate * s + (1 - rate) * x``; ``x`` may be ``a``."""
    s *= rate
    s += np.multiply(x, 1 - rate, out=a)


def _average_square(s: Array, g: Array, rate: float, a: Array) -> None:
    _average(s, np.multiply(g, g, out=a), rate, a)


def _moments(g: Array, m: Array, v: Array, a: Array) -> None:
    _average(m, g, _BETA1, a)
    _average_square(v, g, _BETA2, a)


def _quotient(x: Array, factor: float, a: Array) -> Array:
    """``factor * x / a``, in ``a``."""
    np.divide(x, a, out=a)
    a *= factor
    return a


def _by_root(x: Array, s: Array, epsilon: float, factor: float, a: Array) -> Array:
    """``factor * x / (sqrt(s) + epsilon)``, in ``a``; ``s`` may be ``a``."""
    np.sqrt(s, out=a)
    a += epsilon
    return _quotient(x, factor, a)


def _norm(x: Array) -> float:
    flat = x.reshape(-1).astype(np.float32, copy=False)
    return math.sqrt(np.dot(flat, flat))


# -- rules of single elements ---------------------------------------------------------------------


def _adam_update(t: int, w: Array, m: Array, v: Array, a: Array) -> None:
    """``w -= lr * mhat / (sqrt(vhat) + epsilon)``, the corrections moved to the scalars."""
    root = (1 - _BETA2**t) ** 0.5
    w -= _by_root(m, v, _EPSILON * root, LR * root / (1 - _BETA1**t), a)


def _adam(t: int, w: Array, g: Array, m: Array, v: Array, a: Array, _b: Array) -> None:
    _moments(g, m, v, a)
    _adam_update(t, w, m, v, a)


def _amsgrad(
    t: int, w: Array, g: Array, m: Array, v: Array, vhat: Array, a: Array, _b: Array
) -> None:
    _moments(g, m, v, a)
    _adam_update(t, w, m, np.maximum(vhat, v, out=vhat), a)


def _adamw(t: int, w: Array, g: Array, m: Array, v: Array, a: Array, b: Array) -> None:
    w *= 1 - LR * _DECAY
    _adam(t, w, g, m, v, a, b)


def _sgd(_t: int, w: Array, g: Array, a: Array, _b: Array) -> None:
    w -= np.multiply(g, LR, out=a)


def _momentum(t: int, w: Array, g: Array, m: Array, a: Array, b: Array) -> None:
    m *= _MOMENTUM
    m += g
    _sgd(t, w, m, a, b)


def _nesterov(t: int, w: Array, g: Array, m: Array, a: Array, b: Array) -> None:
    m *= _MOMENTUM
    m += g
    np.multiply(m, _MOMENTUM, out=b)
    b += g
    _sgd(t, w, b, a, b)


def _rms_step(g: Array, s: Array, a: Array) -> Array:
    """The learning rate times the gradient over its root mean square, in ``a``."""
    _average_square(s, g, _RHO, a)
    np.add(s, _RMS_EPSILON, out=a)
    return _quotient(g, LR, np.sqrt(a, out=a))


def _rmsprop(_t: int, w: Array, g: Array, s: Array, a: Array, _b: Array) -> None:
    w -= _rms_step(g, s, a)


def _rmsprop_momentum(_t: int, w: Array, g: Array, s: Array, m: Array, a: Array, _b: Array) -> None:
    step = _rms_step(g, s, a)
    m *= _MOMENTUM
    m += step
    w -= m


def _rmsprop_centered(
    _t: int, w: Array, g: Array, s: Array, mean: Array, a: Array, b: Array
) -> None:
    _average_square(s, g, _RHO, a)
    _average(mean, g, _RHO, a)
    np.subtract(s, np.multiply(mean, mean, out=b), out=a)
    a += _RMS_EPSILON
    w -= _quotient(g, LR, np.sqrt(a, out=a))


def _adagrad(_t: int, w: Array, g: Array, s: Array, a: Array, _b: Array) -> None:
    s += np.multiply(g, g, out=a)
    w -= _by_root(g, s, _TINY, LR, a)


def _row_wise_adagrad(_t: int, w: Array, g: Array, s: Array, a: Array, b: Array) -> None:
    s += np.multiply(g, g, out=a).mean(1)
    np.divide(LR, np.sqrt(s) + _TINY, out=b[:, 0])
    w -= np.multiply(g, b[:, :1], out=a)


def _row_wise_adam(t: int, w: Array, g: Array, m: Array, v: Array, a: Array, b: Array) -> None:
    np.subtract(g, m, out=a)
    a *= 1 - _BETA1
    m += a
    v += (1 - _BETA2) * (np.multiply(g, g, out=a).mean(1) - v)
    size = LR / (1 - _BETA1**t)
    np.divide(size, np.sqrt(v / (1 - _BETA2**t)) + _EPSILON, out=b[:, 0])
    w -= np.multiply(m, b[:, :1], out=a)


def _proximal_adagrad(_t: int, w: Array, g: Array, s: Array, a: Array, b: Array) -> None:
    """``b`` is the element's learning rate; then soft threshold and shrinking by it."""
    s += np.multiply(g, g, out=a)
    np.sqrt(s, out=b)
    b += _TINY
    np.divide(LR, b, out=b)
    w -= np.multiply(b, g, out=a)
    np.multiply(b, _L1, out=a)
    np.abs(w, out=b)
    b -= a
    np.copysign(np.maximum(b, 0, out=b), w, out=w)
    a *= _L2 / _L1
    a += 1
    w /= a


def _ftrl(_t: int, w: Array, g: Array, s: Array, z: Array, a: Array, b: Array) -> None:
    """``w = -z * lr / sqrt(s)``: no regularisation, learning rate power -0.5."""
    np.sqrt(s, out=a)
    s += np.multiply(g, g, out=b)
    a -= np.sqrt(s, out=b)
    a *= w
    a *= 1 / LR
    z += g
    z += a
    b += _TINY
    np.multiply(np.divide(z, b, out=b), -LR, out=w)


# -- rules that look at the whole tensor ----------------------------------------------------------


def _lamb(t: int, w: Array, g: Array, m: Array, v: Array, a: Array, _b: Array) -> None:
    _moments(g, m, v, a)
    np.multiply(v, 1 / (1 - _BETA2**t), out=a)
    _by_root(m, a, 1e-6, 1 / (1 - _BETA1**t), a)
    w_norm, update_norm = _norm(w), _norm(a)
    a *= LR * (w_norm / update_norm if w_norm > 0 and update_norm > 0 else 1.0)
    w -= a


def _lars(t: int, w: Array, g: Array, m: Array, a: Array, b: Array) -> None:
    np.multiply(g, 1e-3 * _norm(w) / (_norm(g) + 1e-5), out=b)
    _momentum(t, w, b, m, a, b)


def _adafactor(t: int, w: Array, g: Array, *rest: Array) -> None:
    """The second moment as the outer product of its means over rows and columns.

    A parameter of one axis has one moment, which is not factored.
    """
    *moments, a, _ = rest
    beta2 = 1 - t**-0.8
    np.multiply(g, g, out=a)
    if len(moments) == 1:
        a += 1e-30
        _average(moments[0], a, beta2, a)
        np.divide(g, np.sqrt(moments[0], out=a), out=a)
    else:
        row, column = moments
        for mean, axis in ((row, -1), (column, -2)):
            mean *= beta2
            mean += (1 - beta2) * (a.mean(axis) + 1e-30)
        np.divide(1, np.sqrt(row / row.mean(-1, keepdims=True))[..., None], out=a)
        np.multiply(g, a, out=a)
        np.multiply(a, (1 / np.sqrt(column))[..., None, :], out=a)
    size = w.size**0.5
    a *= LR * max(1e-3, _norm(w) / size) / max(1.0, _norm(a) / size)
    w -= a


def clip(gradients: Sequence[Array]) -> None:
    """Scale all gradients so that their common norm is at most 1."""
    norm = math.sqrt(sum(_norm(g) ** 2 for g in gradients))
    for g in gradients:
        g *= _MAX_NORM / max(norm, _MAX_NORM)


# Rule and number of states. An elementwise rule may be applied to any part of a tensor.
ELEMENTWISE: dict[str, tuple[Callable[..., None], int]] = {
    "adam": (_adam, 2),
    "amsgrad": (_amsgrad, 3),
    "adamw": (_adamw, 2),
    "sgd": (_sgd, 0),
    "momentum": (_momentum, 1),
    "nesterov": (_nesterov, 1),
    "rmsprop": (_rmsprop, 1),
    "rmsprop-momentum": (_rmsprop_momentum, 2),
    "rmsprop-centered": (_rmsprop_centered, 2),
    "adagrad": (_adagrad, 1),
    "proximal-adagrad": (_proximal_adagrad, 1),
    "ftrl": (_ftrl, 2),
}
TENSORWISE: dict[str, tuple[Callable[..., None], int]] = {
    "lamb": (_lamb, 2),
    "lars": (_lars, 1),
    "adafactor": (_adafactor, 0),  # and those that `rule_and_states` says
}
# These may be applied to some of the rows; the states are those of elements, and one of rows.
_ROW_WISE: dict[str, tuple[Callable[..., None], int]] = {
    "row-wise-adagrad": (_row_wise_adagrad, 0),
    "row-wise-adam": (_row_wise_adam, 1),
}


def rule_and_states(name: str, shape: tuple[int, ...]) -> tuple[Callable[..., None], list[Array]]:
    """The rule of that name for a parameter of that shape, and its states, all zero."""
    rule, count = {**ELEMENTWISE, **TENSORWISE, **_ROW_WISE}[name]
    shapes = [shape] * count
    if name in _ROW_WISE:
        shapes.append(shape[:1])
    if name == "adafactor":
        shapes = [shape] if len(shape) < 2 else [shape[:-1], shape[:-2] + shape[-1:]]
    return rule, [zeros(of) for of in shapes]


def zeros(shape: tuple[int, ...]) -> Array:
    """In memory that has been written, unlike that of ``np.zeros``."""
    array = np.empty(shape, np.float32)
    array.fill(0)
    return array
