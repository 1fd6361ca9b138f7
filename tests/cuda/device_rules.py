"""Rules such as users write, with states and sums that none of the package has."""
# ruff: noqa: ARG001 (whoever calls such a function decides what it takes)

import math
from typing import Any

import numpy as np
from fusestep.nn import Formula, FusedOptimizer, Rule, State


def novo_update(w, g, m, v, count, hp):
    m = hp.beta1 * m + hp.scale * g
    return w - hp.lr * m - hp.decay * v * count * w, m


def novo_measure(w, g, m, v, count, hp):
    return (g,)


def novo_factor(squares, v, count, size, one_minus_beta2, epsilon):
    v = v + one_minus_beta2 * (squares / size - v)
    return 1.0 / (math.sqrt(v) + epsilon), v, count + 1


def novo_scalars(real, lr, decay, step, constants, powers):
    beta1, beta2, epsilon = constants
    return real(beta1), real(1.0 - beta2), real(epsilon), real(lr), real(decay), real(1.0)


NOVO = Rule(
    novo_update,
    (State("m"), State("v", "tensor", initial=0.5), State("count", "tensor", 1.0, dtype=np.int32)),
    ("beta1", "one_minus_beta2", "epsilon", "lr", "decay", "scale"), novo_measure, 1, novo_factor,
    "scale", takes=("v", "count", "size", "one_minus_beta2", "epsilon"), decays=True)  # fmt: skip
"""A second moment and a count for each tensor, which the update sees as they were."""


def aligned_update(w, g, hp):
    return w - hp.lr * g - hp.decay * w


def aligned_measure(w, g, hp):
    return w, w * g, g, g


def aligned_factor(of_w, products, sum_of_g, of_g):
    cosine = products / math.sqrt(of_w * of_g) if of_w * of_g > 0.0 else 0.0
    return 1.0 + cosine, 1.0 / (1.0 + abs(sum_of_g))


def aligned_scalars(real, lr, decay, step, constants, powers):
    return real(lr), real(decay)


ALIGNED = Rule(
    aligned_update, (), ("lr", "decay"), aligned_measure, 4, aligned_factor, ("lr", "decay"),
    signed=(1, 2), decays=True)  # fmt: skip
"""Four sums, two of them signed, and two factors."""


def counted_update(w, g, hp):
    return w - hp.lr * g


def counted_factor(count):
    return 1.0 / (1.0 + count), count + 1


def counted_scalars(real, lr, decay, step, constants, powers):
    return (real(lr),)


COUNTED = Rule(
    counted_update, (State("count", "row", dtype=np.int32),), ("lr",), factor=counted_factor,
    factor_of="lr", scope="row", takes=("count",))  # fmt: skip
"""A rate that falls with the updates of a row; nothing is measured."""


def centred_update(w, g, m, hp):
    m = m + hp.one_minus_beta * (g - m)
    return w - hp.lr * m - hp.shift, m


def centred_measure(w, g, m, hp):
    return g, g, m


def centred_factor(sum_of_g, of_g, of_m, spread, size, count):
    mean = sum_of_g / size
    spread = spread + (of_g / size - mean * mean) + of_m / size
    return 1.0 / math.sqrt(1.0 + spread), mean, spread, count + 1


def centred_scalars(real, lr, decay, step, constants, powers):
    return real(0.25), real(lr), real(lr)


CENTRED = Rule(
    centred_update,
    (State("spread", "row"), State("m"), State("count", "row", initial=3, dtype=np.int32)),
    ("one_minus_beta", "lr", "shift"), centred_measure, 3, centred_factor, ("lr", "shift"),
    signed=(0,), scope="row", takes=("spread", "size", "count"))  # fmt: skip
"""Three sums of a row, one of them signed, and states of rows around that of elements."""

OF_TENSORS: tuple[tuple[Rule, Formula], ...] = (
    (NOVO, Formula(novo_scalars, (0.9, 0.75, 1e-3))), (ALIGNED, Formula(aligned_scalars)),
)  # fmt: skip
OF_ROWS: tuple[tuple[Rule, Formula], ...] = (
    (COUNTED, Formula(counted_scalars)), (CENTRED, Formula(centred_scalars)))  # fmt: skip


class Own(FusedOptimizer):
    """An optimizer of any of them."""

    def __init__(self, params: Any, of: tuple[Rule, Formula], **options: Any) -> None:
        self._of = of
        super().__init__(0.1, params, rule=of[0], **options)

    def formula(self) -> Formula:
        return self._of[1]
