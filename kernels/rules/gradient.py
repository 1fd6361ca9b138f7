"""Gradient transforms: what happens to a gradient element before the rule sees it.

Each is a scalar function ``g' = transform(g, w, hp)``. They are composed with the rule at compile
time, in the order in which they are listed (a *prologue*), so they cost no pass over memory, and an
absent one costs nothing. Each is rounded by itself, so a parameter steps the same whether or not
others that share its call have one.
"""

from __future__ import annotations

from typing import Any

from ..rule import GradientTransform


def coupled_decay(g: Any, w: Any, hp: Any) -> Any:
    """L2 regularisation: ``g + weight_decay * w``, and exactly ``g`` where the decay is 0.

    The test keeps ``0 * inf`` out of parameters that share a call with decayed ones. It is
    the same for a whole tensor, so it costs a blend and no branch.
    """
    return g + hp.weight_decay * w if hp.weight_decay > hp.no_decay else g


def scale(g: Any, w: Any, hp: Any) -> Any:
    """``g * grad_scale``, such as the reciprocal of the loss scale."""
    return g * hp.grad_scale


def trust(g: Any, w: Any, hp: Any) -> Any:
    """``g * trust_ratio``: the factor of a layer-wise adaptive optimizer."""
    return g * hp.trust_ratio


def clip(g: Any, w: Any, hp: Any) -> Any:
    """``g`` bounded by ``[-clip_bound, clip_bound]``; a NaN stays a NaN."""
    bounded = hp.clip_bound if g > hp.clip_bound else g
    return -hp.clip_bound if g < -hp.clip_bound else bounded


CLIP = GradientTransform(clip, ("clip_bound",), lambda _, __, bound: (bound,))
COUPLED_DECAY = GradientTransform(
    coupled_decay, ("weight_decay", "no_decay"), lambda decay, _, __: (decay, 0.0)
)
SCALE = GradientTransform(scale, ("grad_scale",), lambda _, factor, __: (factor,))
TRUST = GradientTransform(trust, ("trust_ratio",), lambda _, __, ___: (1.0,))  # until measured
