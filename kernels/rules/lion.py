"""Evolved sign momentum: steps of one size, along the signs of an average.

Chen et al. (2023), arXiv:2302.06675, algorithm 2; ``decay`` is decoupled.
"""

from __future__ import annotations

from typing import Any

from ..formula import Numbers
from ..idle import Idle, IdleStep
from ..rule import Rule, product, sign
from .idle import marching


def lion(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """Lion: the sign is that of an average which forgets faster than the one that is kept."""
    ahead = hp.beta1 * m + product(hp.one_minus_beta1, g)
    w = w - hp.lr * (sign(ahead, hp) + hp.decay * w)
    return w, hp.beta2 * m + product(hp.one_minus_beta2, g)


def lion_scalars(
    real: Any, lr: float, decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``, ``1 - beta`` taken after that rounding."""
    beta1, beta2 = constants
    betas = real(beta1), real(1.0) - real(beta1), real(beta2), real(1.0) - real(beta2)
    return (*betas, real(lr), real(decay), real(0.0), real(1.0))


def idle_lion(hp: Any, decay: float) -> IdleStep:
    """Lion without a gradient: the sign of the average stays."""
    return IdleStep(1.0 - hp.lr * hp.decay, (hp.beta2,), hp.lr)


_HP = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "lr", "decay", "zero", "one")
LION = Rule(lion, ("exp_avg",), _HP, decays=True, idle=Idle(marching, idle_lion, by_sign=True))
