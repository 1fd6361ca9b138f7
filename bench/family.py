"""The dense steps of all optimizers, set up for one float32 tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import nn
from . import traffic
from .bounds import Bound
from .work import DENSE, Work, normal
from .workers.worker_protocol import Job


@dataclass(frozen=True)
class Member:
    """An optimizer as a case.

    Args:
        make: the optimizer of a list of parameters.
        states: how many arrays of the parameter's size it keeps.
        first_pass: what a two-stage rule reads before the update: the parameter ("w"), the
            gradient ("g") and its states ("s").
        shape: of the parameter, given the number of elements.
    """

    make: Callable[[list[np.ndarray]], Any]
    states: int
    first_pass: tuple[str, ...] = ()
    shape: Callable[[int], tuple[int, ...]] = lambda n: (n,)


def square(n: int) -> tuple[int, ...]:
    """The shape of a square matrix of about ``n`` elements."""
    side = max(1, round(n**0.5))
    return side, side


_LR = 1e-3
FAMILY = {
    "sgd": Member(lambda p: nn.SGD(p, _LR), 0),
    "momentum": Member(lambda p: nn.Momentum(p, _LR, 0.9), 1),
    "rmsprop": Member(lambda p: nn.RMSProp(p, _LR), 1),
    "rmsprop-momentum": Member(lambda p: nn.RMSProp(p, _LR, momentum=0.9), 2),
    "rmsprop-centered": Member(lambda p: nn.RMSProp(p, _LR, centered=True), 2),
    "adagrad": Member(lambda p: nn.Adagrad(p, learning_rate=_LR), 1),
    "proximal-adagrad": Member(
        lambda p: nn.ProximalAdagrad(p, learning_rate=_LR, l1=1e-4, l2=1e-4), 1
    ),
    "ftrl": Member(lambda p: nn.FTRL(p, learning_rate=_LR), 2),
    "ftrl-power": Member(lambda p: nn.FTRL(p, learning_rate=_LR, lr_power=-0.4), 2),
    "adam-weight-decay": Member(lambda p: nn.AdamWeightDecay(p, _LR, weight_decay=0.01), 2),
    "lamb": Member(lambda p: nn.Lamb(p, _LR), 2, ("w", "g", "s")),
    "lars": Member(lambda p: nn.LARS(nn.Momentum(p, _LR, 0.9)), 1, ("w", "g")),
    "adafactor": Member(lambda p: nn.AdaFactor(p, beta1=None), 0, shape=square),
}


def dense(name: str, n: int = DENSE) -> Work:
    """One optimizer on one tensor of ``n`` elements."""
    member = FAMILY[name]
    shape = member.shape(n)
    rng = np.random.default_rng(0)
    w, g = normal(rng, shape), normal(rng, shape)
    optimizer = member.make([w])
    states = tuple(state for state in optimizer._state_arrays().values() if state.shape == w.shape)
    assert len(states) == member.states
    reads = {"w": (w,), "g": (g,), "s": states}
    first = tuple(array for which in member.first_pass for array in reads[which])
    bound = Bound((w, *states), g, (first,) if first else ())
    return Work(
        jobs={f"nn.{type(optimizer).__name__}": Job(lambda: optimizer((g,)))},
        variables=(w, *states),
        bytes=traffic.dense(w.size, 1 + len(states)) + traffic.read(w.size, len(first)),
        shapes=[shape],
        inputs={"gradient": [g]},
        size={"elements": w.size},
        bound=bound,
    )


def setup(name: str) -> Callable[[], Work]:
    """The set-up of a case."""
    return partial(dense, name)
