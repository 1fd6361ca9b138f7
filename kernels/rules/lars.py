"""LARS: a factor per tensor that makes a gradient proportional to the parameter's norm.

::

    c  = coefficient * |w| / (|g| + decay*|w| + epsilon)
    g <- c * (g + decay*w)

You, Gitman and Ginsburg (2017), arXiv:1708.03888. With clipping, ``c`` becomes
``max(min(c / lr, 1), 0)``, so that the local rate ``c * lr`` never exceeds ``lr``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .rule import Rule


class LarsHP(NamedTuple):
    """Scalars of the gradient as an array of its own."""

    ratio: Any
    decay: Any


def lars_gradient(w: Any, g: Any, hp: Any) -> Any:
    """The new gradient, in the place of a copy of the parameter."""
    return hp.ratio * (g + hp.decay * w)


def lars_ratio(
    norm_w: np.ndarray,
    norm_g: np.ndarray,
    decay: np.ndarray,
    coefficient: float,
    epsilon: float,
) -> np.ndarray:
    """``c`` of each tensor, in float64, from the L2 norms.

    It is 1 where the denominator is 0, and at most the largest float32, so that a gradient of 0
    stays 0 whatever ``epsilon``.
    """
    denominator = norm_g + decay * norm_w + epsilon
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(denominator == 0, 1.0, coefficient * norm_w / denominator)
    held: np.ndarray = np.minimum(ratio, float(np.finfo(np.float32).max))
    return held


def clipped_ratio(ratio: np.ndarray, lr: np.ndarray) -> np.ndarray:
    """``max(min(ratio / lr, 1), 0)``; with a rate of 0 the limit, which is 1 or, for 0, 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(ratio == 0, ratio, ratio / lr)
    return np.clip(relative, 0.0, 1.0)


LARS_GRADIENT = Rule(lars_gradient, (), LarsHP._fields)
