"""Stochastic gradient descent, plain and with momentum.

With momentum ``mu``, dampening ``d`` and the accumulated gradient ``a``::

    a <- mu*a + (1 - d)*g
    w <- w - lr*a,   or Nesterov's  w - lr*(g + mu*a)

This is the form of Sutskever et al. (2013) with the learning rate outside of ``a``.
"""

from __future__ import annotations

from typing import Any

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule, product, rule_helper
from .idle import gliding, shrinking


def sgd(w: Any, g: Any, hp: Any) -> Any:
    """Plain descent."""
    return w - hp.lr * g


def momentum(w: Any, g: Any, a: Any, hp: Any) -> Any:
    """Descent along the accumulated gradient."""
    a = hp.momentum * a + product(hp.one_minus_dampening, g)
    return w - hp.lr * a, a


def momentum_nesterov(w: Any, g: Any, a: Any, hp: Any) -> Any:
    """Descent along what the accumulated gradient would be after seeing ``g`` once more."""
    a = hp.momentum * a + product(hp.one_minus_dampening, g)
    return w - hp.lr * (g + hp.momentum * a), a


@rule_helper
def first_or_later(g: Any, a: Any, stat: Any, hp: Any) -> Any:
    """The accumulated gradient, ``g`` itself at a first update; which is then marked as done."""
    later = hp.momentum * a + product(hp.one_minus_dampening, g)
    # Both values first, then a choice: branches would keep the loop from being vectorised.
    is_first = stat > hp.zero
    return (g if is_first else later), (hp.zero if is_first else stat)


def sgd_first_step(w: Any, g: Any, a: Any, stat: Any, hp: Any) -> Any:
    """Momentum whose first update, where ``stat > 0``, accumulates ``g`` undampened."""
    a, stat = first_or_later(g, a, stat, hp)
    return w - hp.lr * a, a, stat


def sgd_first_step_nesterov(w: Any, g: Any, a: Any, stat: Any, hp: Any) -> Any:
    """`sgd_first_step` with Nesterov's step."""
    a, stat = first_or_later(g, a, stat, hp)
    return w - hp.lr * (g + hp.momentum * a), a, stat


def asgd(w: Any, g: Any, average: Any, hp: Any) -> Any:
    """Descent that shrinks the parameter, and the average of where it has been."""
    w = hp.shrink * w - product(hp.eta, g)
    # ``w`` itself where ``mu`` is 1: the sum would round.
    return w, (w if hp.mu >= hp.one else average + (w - average) * hp.mu)


def sgd_scalars(
    real: Any, lr: float, _decay: float, _step: int, _constants: Numbers, _powers: Numbers
) -> Numbers:
    """The learning rate, rounded to ``real``."""
    return (real(lr),)


def momentum_scalars(
    real: Any, lr: float, _decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``, ``1 - dampening`` taken after that rounding.

    The first update is not dampened: its accumulator begins at 0, and becomes the gradient.
    """
    momentum, dampening = constants
    dampening = dampening if step > 1 else 0.0
    return real(lr), real(momentum), real(1.0) - real(dampening)


def first_step_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """`momentum_scalars` of a rule that knows by itself which update is the first."""
    return (*momentum_scalars(real, lr, decay, 2, constants, powers), real(0.0))


def asgd_scalars(
    real: Any, lr: float, _decay: float, step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """``1 - lambd*eta``, ``eta``, ``mu`` and 1; ``lr`` is that of the update before."""
    lambd, alpha, t0 = constants
    eta = lr / (1.0 + lambd * lr * (step - 1)) ** alpha
    mu = 1.0 / max(1.0, step - 1 - t0) if step > 1 else 1.0
    return real(1.0 - lambd * eta), real(eta), real(mu), real(1.0)


def idle_sgd(hp: Any, decay: float) -> IdleStep:
    """Plain descent without a gradient, but for a coupled decay."""
    return IdleStep(1.0 - hp.lr * decay)


def idle_momentum(hp: Any, decay: float) -> IdleStep:
    """Momentum without a gradient, but for a coupled decay."""
    pull = hp.one_minus_dampening * decay
    return IdleStep(1.0 - hp.lr * pull, (hp.momentum,), hp.lr, pull=pull)


def idle_nesterov(hp: Any, decay: float) -> IdleStep:
    """Nesterov's momentum without a gradient, but for a coupled decay."""
    # ``g`` is ``decay*w`` then, which acts by itself and through ``a``.
    pull, ahead = hp.one_minus_dampening * decay, hp.lr * hp.momentum
    return IdleStep(1.0 - hp.lr * decay - ahead * pull, (hp.momentum,), ahead, pull=pull)


_MOMENTUM_HP = ("lr", "momentum", "one_minus_dampening")
SGD = Rule(sgd, (), ("lr",), idle=Idle(shrinking, idle_sgd, moving=None, coupled=True))
MOMENTUM = Rule(
    momentum, ("accum",), _MOMENTUM_HP, layerwise=True,
    idle=Idle(gliding, idle_momentum, coupled=True),
)  # fmt: skip
MOMENTUM_NESTEROV = Rule(
    momentum_nesterov, ("accum",), _MOMENTUM_HP, layerwise=True,
    idle=Idle(gliding, idle_nesterov, coupled=True),
)  # fmt: skip
_STATES, _FIRST_STEP_HP = ("accum", "stat"), (*_MOMENTUM_HP, "zero")
SGD_FIRST_STEP = Rule(sgd_first_step, _STATES, _FIRST_STEP_HP)
SGD_FIRST_STEP_NESTEROV = Rule(sgd_first_step_nesterov, _STATES, _FIRST_STEP_HP)
ASGD = Rule(asgd, ("ax_",), ("shrink", "eta", "mu", "one"))
