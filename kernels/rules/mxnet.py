"""MXNet's Adam and AdamW: the rules, what happens to the gradient first, and the scalars.

With a step size ``l`` that holds the learning rate and the correction of the bias::

    m <- beta1*m + (1 - beta1)*g
    v <- beta2*v + ((1 - beta2)*g)*g
    w <- w - l * m / (sqrt(v) + epsilon)                     Adam
    w <- w - l * (m / (sqrt(v) + epsilon) + decay*w)         AdamW

The form of the moments is MXNet's, not that of `adam`: with ``beta = 0`` nothing of the past is
left, and ``v`` stays finite up to gradients of 1e20, whose square is no float32.

With ``multi_precision`` a 16-bit weight is the rounded copy of a float32 master, which is written
on the way (`keeping.MASTER`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from ..formula import ROUNDING, TYPECODES, Numbers, to_float32
from ..rule import Prologue, Rule, product, rule_helper
from .gradient import CLIP, COUPLED_DECAY, SCALE

VERSIONS = ("2.0", "1.9")
"""Whose order of clipping and weight decay."""


@rule_helper
def moments(g: Any, m: Any, v: Any, hp: Any) -> Any:
    """The exponential moving averages of the gradient and of its square.

    Every product is rounded, as in MXNet's builds for x86, which have no FMA: where two terms
    cancel, the result is that of MXNet to the last bit.
    """
    m = product(hp.beta1, m) + product(hp.one_minus_beta1, g)
    return m, product(hp.beta2, v) + product(product(hp.one_minus_beta2, g), g)


@rule_helper
def adam(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam."""
    m, v = moments(g, m, v, hp)
    return w - hp.step_size * m / (math.sqrt(v) + hp.epsilon), m, v


@rule_helper
def adamw(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """AdamW: the old weight decays."""
    m, v = moments(g, m, v, hp)
    return w - hp.lr * (m / (math.sqrt(v) + hp.epsilon) + hp.decay * w), m, v


@rule_helper
def adamw_composed(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """AdamW out of MXNet's composed operations: the weight decays after it has stepped."""
    m, v = moments(g, m, v, hp)
    w = w - hp.lr * (m / (math.sqrt(v) + hp.epsilon))
    return w - hp.lr * hp.decay * w, m, v


# A model has few different options, and its weights are often updated one by one.
_remembered = lru_cache(maxsize=64)

# Before the rule


@_remembered
def conditioning(
    version: str, rescale: float, bound: float, decay: float, *, composed: bool
) -> Prologue:
    """The gradient transforms: 2.0 clips before the decay is added, 1.9 after it.

    A factor that rounds to 1, a bound of 0 or below and a decay that rounds to 0 cost nothing.
    """
    scale = (SCALE,) if rounding(np.float64, composed=composed)(rescale) != 1 else ()
    clip = (CLIP,) if bound > 0 else ()
    added = (COUPLED_DECAY,) if to_float32(decay) > 0 else ()
    return scale + (added + clip if version == "1.9" else clip + added)


@_remembered
def conditioning_scalars(
    real: Any, prologue: Prologue, rescale: float, bound: float, decay: float, *, composed: bool
) -> tuple[Any, ...]:
    """The scalars of a `conditioning`, one after the other; the bound is float32 in any case."""
    rounded = rounding(real, composed=composed)
    scalars = {
        SCALE: (rounded(rescale),),
        CLIP: (to_float32(bound),),
        COUPLED_DECAY: (rounded(decay), 0.0),
    }
    return tuple(x for transform in prologue for x in scalars[transform])


# Scalars
#
# MXNet's kernels take every hyper-parameter as a float32 field, for float64 weights too, and
# subtract 1 - beta from that: 1 - float32(0.999) is 1.3e-5 below 0.001, which shows in every step.
# The same update out of composed array operations (use_fused_step=False in 2.0) takes Python's
# doubles instead, 1 - beta included. The bias is corrected in double precision in both.


@_remembered
def bias_corrected(lr: float, beta1: float, beta2: float, t: int) -> float:
    """``lr * sqrt(1 - beta2**t) / (1 - beta1**t)`` at update ``t`` = 1, 2, ..."""
    return lr * (math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t))


def rounding(real: Any, *, composed: bool) -> Callable[[float], float]:
    """The rounding to the type of the arithmetic, through float32 unless ``composed``."""
    return ROUNDING[real] if composed else to_float32


@_remembered
def adam_scalars(real: Any, beta1: float, beta2: float, *others: float, composed: bool) -> Numbers:
    """The scalars of Adam or AdamW; ``others``: the corrected rate, epsilon and AdamW's decay."""
    numbers: Iterable[float] = (beta1, beta2, *others)
    beta1, beta2, *rest = numbers if composed else array("f", numbers)
    betas = beta1, 1.0 - beta1, beta2, 1.0 - beta2
    return tuple(array(TYPECODES[real], (*betas, *rest)))


MOMENTS = ("mean", "var")
_ADAM_HP = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "epsilon")
_ADAMW_HP = (*_ADAM_HP[:4], "lr", "epsilon", "decay")
MXNET_ADAM = Rule(adam, MOMENTS, _ADAM_HP)
MXNET_ADAMW = Rule(adamw, MOMENTS, _ADAMW_HP, decays=True)
MXNET_ADAMW_COMPOSED = Rule(adamw_composed, MOMENTS, _ADAMW_HP, decays=True)
