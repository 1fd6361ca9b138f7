"""Adagrad and its proximal form.

::

    A <- A + g*g
    w <- w - lr * g / sqrt(A)

Duchi, Hazan and Singer (2011), JMLR 12. There is no epsilon: an accumulator of 0 has seen no
gradient (or none whose square is a number above 0), and then nothing moves.

The proximal form (Duchi and Singer, 2009) follows the step of size ``e = lr / sqrt(A)`` with
soft thresholding by ``e*l1`` and shrinking by ``1 + e*l2``.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule, product
from .idle import fading


def adagrad(w: Any, g: Any, accum: Any, hp: Any) -> Any:
    """Adagrad. (A NaN in the accumulator is not 0: it reaches the parameter.)"""
    accum = accum + g * g
    return (w if accum == hp.zero else w - hp.lr * g / math.sqrt(accum)), accum


def adagrad_fixed(w: Any, g: Any, accum: Any, hp: Any) -> Any:
    """Adagrad with an accumulator that is read and not updated."""
    return (w if accum == hp.zero else w - hp.lr * g / math.sqrt(accum)), accum


def proximal_adagrad(w: Any, g: Any, accum: Any, hp: Any) -> Any:
    """Adagrad's step, then the proximal operator of ``l1*|w| + l2/2*w*w`` for its size."""
    accum = accum + g * g
    size = hp.lr / math.sqrt(accum)
    stepped = w - size * g
    magnitude = abs(stepped) - size * hp.l1
    magnitude = hp.zero if magnitude < hp.zero else magnitude
    shrunk = math.copysign(magnitude, stepped) / (hp.one + size * hp.l2)
    # At 0 the size is infinite, and a gradient of 0 times that a NaN.
    return (w if accum == hp.zero else shrunk), accum


def adadelta(w: Any, g: Any, accum: Any, accum_update: Any, hp: Any) -> Any:
    """Adagrad whose sum fades, and steps in the units of those before them."""
    accum = hp.rho * accum + product(hp.one_minus_rho, g * g)
    step = math.sqrt(accum_update + hp.epsilon) / math.sqrt(accum + hp.epsilon) * g
    return w - hp.lr * step, accum, hp.rho * accum_update + product(hp.one_minus_rho, step * step)


def adagrad_scalars(
    real: Any, lr: float, _decay: float, _step: int, _constants: Numbers, _powers: Numbers
) -> Numbers:
    """The learning rate, rounded to ``real``."""
    return real(lr), real(0.0)


def proximal_adagrad_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``."""
    l1, l2 = constants
    return real(lr), real(l1), real(l2), real(0.0), real(1.0)


def adadelta_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``, ``1 - rho`` taken after that rounding."""
    rho, epsilon = constants
    return real(lr), real(rho), real(1.0) - real(rho), real(epsilon)


def idle_adagrad(hp: Any, decay: float) -> IdleStep:
    """Adagrad without a gradient: nothing changes."""
    return IdleStep(states=(1.0,))


IDLE = Idle(fading, idle_adagrad, moving=None)
_HP = ("lr", "zero")
_PROXIMAL_HP = ("lr", "l1", "l2", "zero", "one")
ADAGRAD = Rule(adagrad, ("accum",), _HP, idle=IDLE)
ADAGRAD_FIXED = Rule(adagrad_fixed, ("accum",), _HP)
PROXIMAL_ADAGRAD = Rule(proximal_adagrad, ("accum",), _PROXIMAL_HP)
ADADELTA = Rule(adadelta, ("accum", "accum_update"), ("lr", "rho", "one_minus_rho", "epsilon"))
