"""Stochastic gradient descent, plain and with momentum.

With momentum ``mu``, dampening ``d`` and the accumulated gradient ``a``::

    a <- mu*a + (1 - d)*g
    w <- w - lr*a,   or Nesterov's  w - lr*(g + mu*a)

This is the form of Sutskever et al. (2013) with the learning rate outside of ``a``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .formula import Numbers
from .rule import Rule, product, rule_helper


class SgdHP(NamedTuple):
    """Scalars of the plain step."""

    lr: Any


class MomentumHP(NamedTuple):
    """Scalars of the steps with momentum."""

    lr: Any
    momentum: Any
    one_minus_dampening: Any


class FirstStepHP(NamedTuple):
    """Scalars of the steps that know the first one of each element."""

    lr: Any
    momentum: Any
    one_minus_dampening: Any
    zero: Any


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
    is_first = stat > hp.zero
    return (g if is_first else later), (hp.zero if is_first else stat)


def sgd_first_step(w: Any, g: Any, a: Any, stat: Any, hp: Any) -> Any:
    """Momentum whose first update, where ``stat > 0``, accumulates ``g`` undampened."""
    a, stat = first_or_later(g, a, stat, hp)
    return w - hp.lr * a, a, stat


def sgd_first_step_nesterov(w: Any, g: Any, a: Any, stat: Any, hp: Any) -> Any:
    """As `sgd_first_step`, with Nesterov's step."""
    a, stat = first_or_later(g, a, stat, hp)
    return w - hp.lr * (g + hp.momentum * a), a, stat


def sgd_hp(real: Any, lr: float) -> SgdHP:
    """The learning rate, rounded to ``real``."""
    return SgdHP(real(lr))


def momentum_hp(real: Any, lr: float, momentum: float, dampening: float = 0.0) -> MomentumHP:
    """Every argument rounded to ``real``, ``1 - dampening`` taken after that rounding."""
    return MomentumHP(real(lr), real(momentum), real(1.0) - real(dampening))


def first_step_hp(real: Any, lr: float, momentum: float, dampening: float) -> FirstStepHP:
    """As `momentum_hp`."""
    return FirstStepHP(*momentum_hp(real, lr, momentum, dampening), real(0.0))


def sgd_scalars(
    real: Any, lr: float, _decay: float, _step: int, _constants: Numbers, _powers: Numbers
) -> SgdHP:
    """A `Formula` of `sgd_hp`."""
    return sgd_hp(real, lr)


def momentum_scalars(
    real: Any, lr: float, _decay: float, step: int, constants: Numbers, _powers: Numbers
) -> MomentumHP:
    """A `Formula` of `momentum_hp` whose first update is not dampened.

    The accumulator begins at 0, so that update makes it the gradient.
    """
    momentum, dampening = constants
    return momentum_hp(real, lr, momentum, dampening if step > 1 else 0.0)


SGD = Rule(sgd, (), SgdHP._fields)
MOMENTUM = Rule(momentum, ("accum",), MomentumHP._fields, layerwise=True)
MOMENTUM_NESTEROV = Rule(momentum_nesterov, ("accum",), MomentumHP._fields, layerwise=True)
SGD_FIRST_STEP = Rule(sgd_first_step, ("accum", "stat"), FirstStepHP._fields)
SGD_FIRST_STEP_NESTEROV = Rule(sgd_first_step_nesterov, ("accum", "stat"), FirstStepHP._fields)
