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
from typing import Any, NamedTuple

import numpy as np

from .formula import Numbers
from .rule import Rule, product, rule_helper

_SMALLEST = 1e-30


class AdafactorHP(NamedTuple):
    """Scalars of Adafactor.

    ``step`` and ``decay`` are those of a parameter of size 1 until the sizes are known.
    """

    beta2: Any
    one_minus_beta2: Any
    epsilon1: Any
    smallest: Any
    largest: Any
    beta1: Any
    one_minus_beta1: Any
    step: Any
    decay: Any


@rule_helper
def squared(g: Any, hp: Any) -> Any:
    """What the moving averages of the second moment average."""
    return g * g + hp.epsilon1


@rule_helper
def factored_direction(g: Any, row: Any, column: Any, hp: Any) -> Any:
    """``g / (sqrt(R / mean(R)) * sqrt(C))``, given the reciprocals of the two roots."""
    reciprocal = row * column
    return g * (hp.largest if reciprocal > hp.largest else reciprocal)


@rule_helper
def full_direction(g: Any, v: Any, hp: Any) -> Any:
    """The direction of a vector, and its new second moment."""
    v = hp.beta2 * v + product(hp.one_minus_beta2, squared(g, hp))
    v = hp.smallest if v < hp.smallest else v
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


def adafactor_hp(
    real: Any,
    rho: float,
    beta1: float,
    decay_rate: float,
    epsilon1: float,
    decay: float,
    step: int,
) -> AdafactorHP:
    """The scalars of update ``step``, computed in float64 and rounded to ``real`` once."""
    one_minus_beta2 = float(step) ** -decay_rate
    return AdafactorHP(
        real(1.0 - one_minus_beta2),
        real(one_minus_beta2),
        real(epsilon1),
        real(_SMALLEST),
        real(1.0 / _SMALLEST),
        real(beta1),
        real(1.0) - real(beta1),
        real(rho),
        real(decay * rho),
    )


def adafactor_scalars(
    real: Any, rho: float, decay: float, step: int, constants: Numbers, _powers: Numbers
) -> AdafactorHP:
    """A `Formula` of `adafactor_hp`."""
    beta1, decay_rate, epsilon1 = constants
    return adafactor_hp(real, rho, beta1, decay_rate, epsilon1, decay, step)


def relative_size(of_w: np.ndarray, epsilon2: float) -> np.ndarray:
    """``max(epsilon2, |w|)``: what a step is relative to."""
    size: np.ndarray = np.maximum(epsilon2, of_w)
    return size


def clipping(of_u: np.ndarray, clip_threshold: float) -> np.ndarray:
    """``1 / max(1, |u| / clip_threshold)``: what limits the size of a direction."""
    return 1.0 / np.maximum(1.0, of_u / clip_threshold)


_HP = AdafactorHP._fields
ADAFACTOR = Rule(adafactor, ("exp_avg", "exp_avg_sq"), _HP, adafactor_norms, 2)
ADAFACTOR_PLAIN = Rule(adafactor_plain, ("exp_avg_sq",), _HP, adafactor_plain_norms, 2)
