"""MXNet's Adam: what happens to the gradient first, and how its scalars are rounded.

Update and states are those of `adam`; the scalars are where the numbers differ from MindSpore's.
MXNet's kernels take every hyper-parameter as a float32 field, for float64 weights too, and subtract
``1 - beta`` from that: ``1 - float32(0.999)`` is 1.3e-5 below 0.001, which shows in every step.
The same update out of composed array operations (``use_fused_step=False`` in MXNet 2.0) takes
Python's doubles instead, ``1 - beta`` included. The correction of the bias is part of the
learning rate and is computed in double precision in both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .adam import AdamHP, AdamWeightDecayHP
from .gradient import CLIP, COUPLED_DECAY, SCALE
from .rule import Prologue

VERSIONS = ("2.0", "1.9")
"""Whose order of clipping and weight decay."""


def conditioning(version: str, *, scales: bool, clips: bool, decays: bool) -> Prologue:
    """What happens to the gradient: 2.0 clips before the decay is added, 1.9 after it."""
    scale, clip, decay = (
        (part,) if acts else ()
        for part, acts in ((SCALE, scales), (CLIP, clips), (COUPLED_DECAY, decays))
    )
    return scale + (decay + clip if version == "1.9" else clip + decay)


def conditioning_scalars(
    prologue: Prologue, rescale: float, bound: float, decay: float
) -> tuple[float, ...]:
    """The scalars of a `conditioning`, in the order of its parts."""
    of_part = {SCALE: (rescale,), CLIP: (bound,), COUPLED_DECAY: (decay, 0.0)}
    return tuple(x for part in prologue for x in of_part[part])


def bias_corrected(lr: float, beta1: float, beta2: float, t: int) -> float:
    """``lr * sqrt(1 - beta2**t) / (1 - beta1**t)`` at update ``t`` = 1, 2, ..."""
    return lr * (math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t))


def rounded(real: Any, value: float, *, composed: bool) -> Any:
    """A scalar in the type of the arithmetic, by way of float32 unless ``composed``."""
    return real(value) if composed else real(np.float32(value))


def _complement(real: Any, beta: float, composed: bool) -> Any:
    return real(1.0 - beta) if composed else real(1.0) - real(np.float32(beta))


def adam_hp(
    real: Any, step_size: float, beta1: float, beta2: float, epsilon: float, *, composed: bool
) -> AdamHP:
    """The scalars of Adam for a corrected learning rate."""
    return AdamHP(
        _complement(real, beta1, composed),
        _complement(real, beta2, composed),
        rounded(real, step_size, composed=composed),
        rounded(real, epsilon, composed=composed),
    )


def adam_weight_decay_hp(
    real: Any,
    step_size: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    *,
    composed: bool,
) -> AdamWeightDecayHP:
    """The scalars of Adam with decoupled decay, which the corrected rate multiplies too."""
    adam = adam_hp(real, step_size, beta1, beta2, epsilon, composed=composed)
    return AdamWeightDecayHP(*adam, rounded(real, decay, composed=composed))
