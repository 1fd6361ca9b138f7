"""PyTorch's Adagrad and RMSprop: epsilon is added to the root.

::

    A <- A + g*g                            w <- w - l * g / (sqrt(A) + epsilon)
    v <- alpha*v + ((1 - alpha)*g)*g        w <- w - l * g / (sqrt(v) + epsilon)

The centered form takes the root of ``v - a*a`` with the running mean ``a`` of the gradient, and a
momentum averages what is multiplied by ``l``.
"""

from __future__ import annotations

import math
from typing import Any

from ...idle import Idle, IdleStep
from ...rule import Rule, product, rule_helper
from ..adagrad import IDLE
from ..idle import fading, fading_two, gliding_behind
from .adam import kept_of, lerp


def adagrad(w: Any, g: Any, total: Any, hp: Any) -> Any:
    """Adagrad."""
    total = total + g * g
    return w - hp.lr * g / (math.sqrt(total) + hp.epsilon), total


@rule_helper
def mean_square(g: Any, v: Any, hp: Any) -> Any:
    """The moving average of the squared gradient."""
    return hp.alpha * v + product(hp.one_minus_alpha * g, g)


@rule_helper
def deviation(v: Any, a: Any, hp: Any) -> Any:
    """The divisor of the centered form."""
    # A product that is rounded before the subtraction, as PyTorch's is.
    return math.sqrt(v - product(a, a)) + hp.epsilon


def rmsprop(w: Any, g: Any, v: Any, hp: Any) -> Any:
    """RMSprop."""
    v = mean_square(g, v, hp)
    return w - hp.lr * g / (math.sqrt(v) + hp.epsilon), v


def rmsprop_momentum(w: Any, g: Any, v: Any, buffer: Any, hp: Any) -> Any:
    """RMSprop with momentum."""
    v = mean_square(g, v, hp)
    buffer = hp.momentum * buffer + g / (math.sqrt(v) + hp.epsilon)
    return w - hp.lr * buffer, v, buffer


def rmsprop_centered(w: Any, g: Any, v: Any, a: Any, hp: Any) -> Any:
    """Centered RMSprop."""
    v, a = mean_square(g, v, hp), lerp(a, g, hp.share, hp.zero)
    return w - hp.lr * g / deviation(v, a, hp), v, a


def rmsprop_centered_momentum(w: Any, g: Any, v: Any, buffer: Any, a: Any, hp: Any) -> Any:
    """Centered RMSprop with momentum."""
    v, a = mean_square(g, v, hp), lerp(a, g, hp.share, hp.zero)
    buffer = hp.momentum * buffer + g / deviation(v, a, hp)
    return w - hp.lr * buffer, v, buffer, a


def idle_rmsprop(hp: Any, decay: float) -> IdleStep:
    """RMSprop without a gradient."""
    return IdleStep(states=(hp.alpha,))


def idle_momentum(hp: Any, decay: float) -> IdleStep:
    """RMSprop with momentum."""
    return IdleStep(states=(hp.alpha, hp.momentum), size=hp.lr)


def idle_centered(hp: Any, decay: float) -> IdleStep:
    """Centered RMSprop without momentum."""
    return IdleStep(states=(hp.alpha, kept_of(hp)))


_HP = ("lr", "alpha", "one_minus_alpha", "epsilon")
_MOMENTUM_HP = (*_HP, "momentum")
_SQUARE, _BUFFER, _MEAN = "square_avg", "momentum_buffer", "grad_avg"
TORCH_ADAGRAD = Rule(adagrad, ("sum",), ("lr", "epsilon"), idle=IDLE)
TORCH_RMSPROP = Rule(rmsprop, (_SQUARE,), _HP, idle=Idle(fading, idle_rmsprop, moving=None))
TORCH_RMSPROP_MOMENTUM = Rule(
    rmsprop_momentum, (_SQUARE, _BUFFER), _MOMENTUM_HP,
    idle=Idle(gliding_behind, idle_momentum, moving=1),
)  # fmt: skip
TORCH_RMSPROP_CENTERED = Rule(
    rmsprop_centered, (_SQUARE, _MEAN), (*_HP, "share", "zero"),
    idle=Idle(fading_two, idle_centered, moving=None),
)  # fmt: skip
TORCH_RMSPROP_CENTERED_MOMENTUM = Rule(
    rmsprop_centered_momentum, (_SQUARE, _BUFFER, _MEAN), (*_MOMENTUM_HP, "share", "zero")
)
