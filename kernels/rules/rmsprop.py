"""RMSProp: the gradient over the root of its running mean square.

::

    s  <- s + (1 - rho)*(g*g - s)
    mo <- mu*mo + lr * g / sqrt(s + epsilon)
    w  <- w - mo

The centered form subtracts the square of the running mean ``mg`` of the gradient under the
root, which makes it a running variance (Graves, 2013, arXiv:1308.0850, equations 38 to 45).
Without momentum ``mo`` is the step itself and need not be kept.
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule, rule_helper
from .idle import fading, fading_two, gliding_behind


@rule_helper
def moving_average(average: Any, x: Any, hp: Any) -> Any:
    """``decay*average + (1 - decay)*x``, in the form that rounds as the original does."""
    return average + hp.one_minus_decay * (x - average)


def rmsprop(w: Any, g: Any, s: Any, hp: Any) -> Any:
    """RMSProp without momentum."""
    s = moving_average(s, g * g, hp)
    return w - hp.lr * g / math.sqrt(s + hp.epsilon), s


def rmsprop_momentum(w: Any, g: Any, s: Any, mo: Any, hp: Any) -> Any:
    """RMSProp."""
    s = moving_average(s, g * g, hp)
    mo = hp.momentum * mo + hp.lr * g / math.sqrt(s + hp.epsilon)
    return w - mo, s, mo


def rmsprop_centered(w: Any, g: Any, mg: Any, s: Any, hp: Any) -> Any:
    """Centered RMSProp without momentum; where the variance is not positive, ``w`` stays."""
    mg = moving_average(mg, g, hp)
    s = moving_average(s, g * g, hp)
    variance = s - mg * mg + hp.epsilon
    # "not positive" as "<=", so that a NaN takes the step and shows.
    return (w if variance <= hp.zero else w - hp.lr * g / math.sqrt(variance)), mg, s


def rmsprop_centered_momentum(w: Any, g: Any, mg: Any, s: Any, mo: Any, hp: Any) -> Any:
    """Centered RMSProp; where the variance is not positive, ``w`` and ``mo`` stay."""
    mg = moving_average(mg, g, hp)
    s = moving_average(s, g * g, hp)
    variance = s - mg * mg + hp.epsilon
    step = hp.momentum * mo + hp.lr * g / math.sqrt(variance)
    stays = variance <= hp.zero
    return (w if stays else w - step), mg, s, (mo if stays else step)


def rmsprop_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``, ``1 - rho`` taken after that rounding."""
    rho, epsilon = constants
    return real(lr), real(1.0) - real(rho), real(epsilon), real(0.0)


def rmsprop_momentum_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """`rmsprop_scalars`, then the momentum."""
    rho, epsilon, momentum = constants
    return (*rmsprop_scalars(real, lr, decay, step, (rho, epsilon), powers), real(momentum))


def idle_rmsprop(hp: Any, decay: float) -> IdleStep:
    """RMSProp without a gradient."""
    return IdleStep(states=(1.0 - hp.one_minus_decay,))


def idle_momentum(hp: Any, decay: float) -> IdleStep:
    """RMSProp with momentum, which already contains the learning rate."""
    return IdleStep(states=(1.0 - hp.one_minus_decay, hp.momentum), size=1.0)


def idle_centered(hp: Any, decay: float) -> IdleStep:
    """Centered RMSProp without momentum."""
    return IdleStep(states=(1.0 - hp.one_minus_decay,) * 2)


_HP = ("lr", "one_minus_decay", "epsilon", "zero")
_MOMENTUM_HP = (*_HP, "momentum")
RMSPROP = Rule(rmsprop, ("mean_square",), _HP, idle=Idle(fading, idle_rmsprop, moving=None))
RMSPROP_MOMENTUM = Rule(
    rmsprop_momentum, ("mean_square", "moment"), _MOMENTUM_HP,
    idle=Idle(gliding_behind, idle_momentum, moving=1),
)  # fmt: skip
RMSPROP_CENTERED = Rule(
    rmsprop_centered, ("mean_grad", "mean_square"), _HP,
    idle=Idle(fading_two, idle_centered, moving=None),
)  # fmt: skip
RMSPROP_CENTERED_MOMENTUM = Rule(
    rmsprop_centered_momentum, ("mean_grad", "mean_square", "moment"), _MOMENTUM_HP
)
