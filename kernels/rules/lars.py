"""LARS: a factor per tensor that makes a gradient proportional to the parameter's norm.

::

    c  = coefficient * |w| / (|g| + decay*|w| + epsilon)
    g <- c * (g + decay*w)

You, Gitman and Ginsburg (2017), arXiv:1708.03888. With clipping, ``c`` becomes
``max(min(c / lr, 1), 0)``, so that the local rate ``c * lr`` never exceeds ``lr``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..rule import Rule, rule_helper
from ..state import State

_LARGEST = float(np.finfo(np.float32).max)


def lars_gradient(out: Any, g: Any, w: Any, hp: Any) -> Any:
    """The new gradient, in the first slot."""
    return hp.ratio * (g + hp.decay * w)


@rule_helper
def ratio(norm_w: Any, norm_g: Any, decay: Any, coefficient: Any, epsilon: Any) -> Any:
    """``c`` of a tensor, in float64, from the L2 norms.

    It is 1 where the denominator is 0, and at most the largest float32, so that a gradient of 0
    stays 0 whatever ``epsilon``.
    """
    denominator = norm_g + decay * norm_w + epsilon
    if denominator == 0.0:
        return 1.0
    factor = coefficient * norm_w / denominator
    return _LARGEST if factor > _LARGEST else factor


def clipped(ratio: Any, lr: Any) -> Any:
    """``max(min(ratio / lr, 1), 0)``; with a rate of 0 the limit, which is 1 or, for 0, 0."""
    if ratio == 0.0:
        return 0.0
    if lr == 0.0 or ratio / lr > 1.0:
        return 1.0
    return ratio / lr


def lars_ratio(
    norm_w: np.ndarray, norm_g: np.ndarray, decay: np.ndarray, coefficient: float, epsilon: float
) -> np.ndarray:
    """`ratio` of each tensor."""
    tensors = zip(norm_w.tolist(), norm_g.tolist(), decay.tolist(), strict=True)
    return np.array([ratio(*norms, coefficient, epsilon) for norms in tensors])


def clipped_ratio(ratios: np.ndarray, lr: np.ndarray) -> np.ndarray:
    """`clipped` of each tensor."""
    return np.array([clipped(*pair) for pair in zip(ratios.tolist(), lr.tolist(), strict=True)])


LARS_GRADIENT = Rule(lars_gradient, (State("weight", is_read=True),), ("ratio", "decay"))
