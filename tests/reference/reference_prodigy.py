"""Float64 NumPy reference of Prodigy as the class `Prodigy` of prodigyopt 1.1.2 computes it.

The method: Mishchenko and Defazio (2024), arXiv:2306.06101. Where package and paper differ, this
follows the package. `slice_p` is 1 and nothing is distributed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Group:
    """Parameters, changed in place, and the scalars that every group may have for itself."""

    params: Sequence[Array]
    lr: float = 1.0
    weight_decay: float = 0.0
    eps: float = 1e-8
    safeguard_warmup: bool = False


@dataclass
class State:
    """What one parameter remembers; `p0` is its value when it first came with a gradient."""

    p0: Array
    m: Array = field(init=False)
    v: Array = field(init=False)
    s: Array = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.m, self.v, self.s = (np.zeros_like(self.p0) for _ in range(3))


@dataclass
class Prodigy:
    """Prodigy over groups whose learning rates are all `lr`, the largest, or 0.

    With d the estimate before the step, c the bias correction (1 if off) and t = k + 1::

        c = sqrt(1 - beta2^t) / (1 - beta1^t)             e = d * lr * c
        g = g + decay * p                                 coupled decay, written to the gradient

    in the groups whose own rate is positive, and over their parameters::

        num = beta3 * num + (d / d0) * e * sum <g, p0 - p>
        m = beta1 * m + (1 - beta1) * d * g               v = beta2 * v + (1 - beta2) * d^2 * g^2
        s = beta3 * s + (d / d0) * e * g                  with safeguard_warmup d instead of e
        den = sum |s|                                     0: the step ends, `num` stays as it was

        d_hat = d_coef * num / den                        base = max(d, d_hat) if d = d0 else d
        d_max = max(d_max, d_hat)                         d' = min(d_max, growth_rate * base)

    and then in all groups, those of rate 0 too::

        p = p - decay * e * p                             decoupled decay
        p = p - e * u / (sqrt(v) + d' * eps)              u = m, but d' * g where beta1 = 0

    A parameter without a gradient is skipped throughout; its `s` is not in `den`.
    """

    groups: Sequence[Group]
    betas: tuple[float, float] = (0.9, 0.999)
    beta3: float | None = None
    decouple: bool = True
    use_bias_correction: bool = False
    d0: float = 1e-6
    d_coef: float = 1.0
    growth_rate: float = math.inf
    k: int = 0
    d_numerator: float = 0.0
    d_denom: float | None = None
    d_hat: float | None = None

    def __post_init__(self) -> None:
        self.d = self.d_max = self.d0
        self.states: list[list[State | None]] = [[None for _ in g.params] for g in self.groups]

    def step(self, grads: Sequence[Sequence[Array | None]]) -> bool:
        """One step, with gradients by group and parameter; False if it ended at the denominator."""
        (beta1, beta2), d, lr = self.betas, self.d, max(group.lr for group in self.groups)
        beta3 = math.sqrt(beta2) if self.beta3 is None else self.beta3
        t = self.k + 1
        correction = math.sqrt(1 - beta2**t) / (1 - beta1**t) if self.use_bias_correction else 1.0
        rate, scale = d * lr * correction, d / self.d0

        gained, denominator = 0.0, 0.0
        for group, gradients, states in zip(self.groups, grads, self.states, strict=True):
            if group.lr not in (lr, 0.0):
                raise RuntimeError("the learning rates of groups may only be equal or 0")
            for i, (p, g) in enumerate(zip(group.params, gradients, strict=True)):
                if g is None:
                    continue
                if group.weight_decay != 0.0 and not self.decouple:
                    g += group.weight_decay * p
                state = states[i] = states[i] or State(p.copy())
                if group.lr > 0.0:
                    gained += scale * rate * float(np.sum(g * (state.p0 - p)))
                    state.m = beta1 * state.m + (1 - beta1) * d * g
                    state.v = beta2 * state.v + (1 - beta2) * d**2 * g**2
                    state.s = beta3 * state.s + scale * (d if group.safeguard_warmup else rate) * g
                    denominator += float(np.sum(np.abs(state.s)))
        if denominator == 0.0:
            return False

        self.d_numerator = beta3 * self.d_numerator + gained
        self.d_denom = denominator
        self.d_hat = self.d_coef * self.d_numerator / denominator
        base = max(d, self.d_hat) if d == self.d0 else d
        self.d_max = max(self.d_max, self.d_hat)
        self.d = min(self.d_max, self.growth_rate * base)
        self.k = t

        for group, gradients, states in zip(self.groups, grads, self.states, strict=True):
            for p, g, state in zip(group.params, gradients, states, strict=True):
                if g is None or state is None:
                    continue
                state.step += 1
                if group.weight_decay != 0.0 and self.decouple:
                    p -= group.weight_decay * rate * p
                update = state.m if beta1 > 0.0 else self.d * g
                p -= rate * update / (np.sqrt(state.v) + self.d * group.eps)
        return True


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {}, "rate": {"lr": 0.5}, "bias correction": {"use_bias_correction": True},
    "decoupled": {"weight_decay": 0.1}, "coupled": {"weight_decay": 0.1, "decouple": False},
    "safeguarded": {"safeguard_warmup": True, "lr": 0.3}, "d0": {"d0": 1e-3},
    "d_coef": {"d_coef": 2.0}, "growing slowly": {"growth_rate": 1.05}, "beta3": {"beta3": 0.9},
    "betas": {"betas": (0.8, 0.99)}, "no first moment": {"betas": (0.0, 0.99)},
    "no first moment, coupled": {"betas": (0.0, 0.99), "decouple": False, "weight_decay": 0.01},
    "eps": {"eps": 0.1},
}  # fmt: skip
"""Options that tell runs apart."""
_OF_GROUPS = "lr", "weight_decay", "eps", "safeguard_warmup"


def reference_with(groups: Iterable[list[Array]], options: dict[str, Any]) -> Prodigy:
    """On copies of the parameters of some groups, each with these options."""
    own = {name: x for name, x in options.items() if name in _OF_GROUPS}
    rest = {name: x for name, x in options.items() if name not in _OF_GROUPS}
    return Prodigy([Group([w.copy() for w in ws], **own) for ws in groups], **rest)
