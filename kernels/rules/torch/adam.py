"""PyTorch's Adam family.

With a step size ``l`` that holds the correction of the first moment, and ``root`` that of the
second, ``1 / sqrt(1 - beta2**t)``::

    m <- m + (1 - beta1)*(g - m),   from beta1 = 0.5 downwards  g - beta1*(g - m)
    v <- beta2*v + ((1 - beta2)*g)*g
    w <- shrink*w - l * m / (sqrt(v)*root + epsilon)

``shrink`` is the decoupled decay, ``1 - lr*weight_decay``. The scalars come from `nn.torch`, in
float64, and are rounded once.
"""

from __future__ import annotations

import math
from typing import Any

from ...idle import Idle, IdleStep
from ...rule import Rule, product, rule_helper
from ..adam import UPDATES, corrections
from ..idle import drifting, drifting_by_largest


@rule_helper
def lerp(x: Any, y: Any, share: Any, zero: Any) -> Any:
    """Linear interpolation from ``x`` to ``y``, begun at the nearer; `share_of` gives ``share``."""
    # `share_of` is negative where it counts from ``y``: the sign tells which is the nearer.
    return (x if share > zero else y) + share * (y - x)


def share_of(weight: float) -> float:
    """The way to the second of two numbers as a part of their distance, from the nearer one.

    From the other one the weight 1 would not always lead to the second: ``x + (y - x)`` rounds.
    """
    return weight if weight < 0.5 else weight - 1.0


@rule_helper
def average(g: Any, m: Any, hp: Any) -> Any:
    """The first moment."""
    return lerp(m, g, hp.share, hp.zero)


@rule_helper
def square(g: Any, v: Any, hp: Any) -> Any:
    """The second moment; it stays finite up to gradients of 5e20, whose square is no float32."""
    return hp.beta2 * v + product(hp.one_minus_beta2 * g, g)


@rule_helper
def larger(x: Any, y: Any) -> Any:
    """The larger of two numbers; a NaN if one is."""
    # ``x != x`` keeps a NaN of ``x``; one of ``y`` makes the comparison false and is returned.
    return x if x > y or x != x else y


def adam(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """Adam and AdamW."""
    m, v = average(g, m, hp), square(g, v, hp)
    step = hp.step_size * m / (math.sqrt(v) * hp.root + hp.epsilon)
    return hp.shrink * w - step, m, v


def adam_amsgrad(w: Any, g: Any, m: Any, v: Any, largest: Any, hp: Any) -> Any:
    """AMSGrad, over the biased second moment."""
    m, v = average(g, m, hp), square(g, v, hp)
    largest = larger(largest, v)
    step = hp.step_size * m / (math.sqrt(largest) * hp.root + hp.epsilon)
    return hp.shrink * w - step, m, v, largest


def nadam(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """NAdam: a part of the step along the gradient itself."""
    m, v = average(g, m, hp), square(g, v, hp)
    step = (hp.gradient_size * g + product(hp.step_size, m)) / (math.sqrt(v) * hp.root + hp.epsilon)
    return hp.shrink * w - step, m, v


def radam(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    """RAdam: adaptive once the variance of the second moment is known well enough."""
    m, v = average(g, m, hp), square(g, v, hp)
    size = math.sqrt(v) + hp.epsilon if hp.adapts > hp.zero else hp.one
    return hp.shrink * w - hp.step_size * m / size, m, v


def adamax(w: Any, g: Any, m: Any, u: Any, hp: Any) -> Any:
    """Adamax: by the largest gradient that was seen, an old one fading."""
    m = average(g, m, hp)
    u = larger(hp.beta2 * u, abs(g) + hp.epsilon)
    return w - hp.step_size * m / u, m, u


def by_row(updates: Any, share: Any, one_minus_beta2: Any, hat: Any) -> Any:
    """Factors of step size and root from the count of a row; the root has none if ``hat`` is 1."""
    first, root, t = corrections(updates, share if share > 0.0 else 1.0 + share, one_minus_beta2)
    return (root if hat > 0.0 else 1.0) / first, 1.0 if hat > 0.0 else 1.0 / root, t


def kept_of(hp: Any) -> float:
    """The share of a number that `lerp` to 0 leaves."""
    return float(1.0 - hp.share if hp.share > hp.zero else -hp.share)


def idle_adam(hp: Any, decay: float) -> IdleStep:
    """Adam and AdamW without a gradient."""
    # Numerator and denominator divided by ``root``, as an idle step has none.
    size, epsilon = hp.step_size / hp.root, hp.epsilon / hp.root
    return IdleStep(hp.shrink, (kept_of(hp), hp.beta2), size, epsilon)


def idle_amsgrad(hp: Any, decay: float) -> IdleStep:
    """AMSGrad without a gradient: the largest second moment stays."""
    step = idle_adam(hp, decay)
    return step._replace(states=(*step.states, 1.0))


_STATES = ("exp_avg", "exp_avg_sq")
_MOMENTS_HP = ("share", "zero", "beta2", "one_minus_beta2")
_HP = (*_MOMENTS_HP, "step_size", "root", "epsilon", "shrink")
_RADAM_HP = (*_MOMENTS_HP, "step_size", "epsilon", "shrink", "adapts", "one")
TORCH_ADAM = Rule(adam, _STATES, _HP, decays=True, idle=Idle(drifting, idle_adam, root=1))
TORCH_AMSGRAD = Rule(
    adam_amsgrad, (*_STATES, "max_exp_avg_sq"), _HP, decays=True,
    idle=Idle(drifting_by_largest, idle_amsgrad, root=2),
)  # fmt: skip
TORCH_ADAM_BY_ROW = Rule(
    adam, (*_STATES, UPDATES), (*_HP, "hat"), factor=by_row, factor_of=("step_size", "root"),
    takes=("updates", "share", "one_minus_beta2", "hat"), scope="row", decays=True,
)  # fmt: skip
TORCH_NADAM = Rule(nadam, _STATES, (*_HP, "gradient_size"), decays=True)
TORCH_RADAM = Rule(radam, _STATES, _RADAM_HP, decays=True)
TORCH_ADAMAX = Rule(
    adamax, ("exp_avg", "exp_inf"), ("share", "zero", "beta2", "step_size", "epsilon")
)
