"""Rules of four and five states, which no rule of the package has, and their float64 reference."""

import math
from typing import Any

import numpy as np
from fusestep.kernels.rule import Rule, product, rule_helper

Array = Any
HP = ("lr", "decay", "rest", "epsilon")
SCALARS = (0.01, 0.9, 0.1, 1e-3)


@rule_helper
def _four(w: Any, g: Any, a: Any, b: Any, c: Any, d: Any, hp: Any) -> Any:
    change = g - d
    a = hp.decay * a + product(hp.rest, g)
    b = hp.decay * b + product(hp.rest, change)
    c = hp.decay * c + product(hp.rest, change * change)
    w = w - hp.lr * (a + b) / (math.sqrt(c) + hp.epsilon)
    return w, a, b, c, g


def _five(w: Any, g: Any, a: Any, b: Any, c: Any, d: Any, e: Any, hp: Any) -> Any:
    w, a, b, c, d = _four(w, g, a, b, c, d, hp)
    return w, a, b, c, d, e + hp.rest * w


def _sizes(w: Any, g: Any, a: Any, b: Any, c: Any, d: Any, hp: Any) -> Any:
    return w, g * hp.decay, a - b, c, d


NAMES = ("a", "b", "c", "d", "e")
FOUR = Rule(_four, NAMES[:4], HP, _sizes, 5)
FIVE = Rule(_five, NAMES, HP)


def expected(w: Array, g: Array, states: list[Array], scalars: Array) -> list[Array]:
    """The parameter and the states after one step."""
    lr, decay, rest, epsilon = scalars
    a, b, c, d, *others = states
    a, b = decay * a + rest * g, decay * b + rest * (g - d)
    c = decay * c + rest * np.square(g - d)
    w = w - lr * (a + b) / (np.sqrt(c) + epsilon)
    return [w, a, b, c, g, *(e + rest * w for e in others)]


def expected_sizes(w: Array, g: Array, states: list[Array], scalars: Array) -> list[float]:
    """The sums of squares of what `FOUR` measures."""
    a, b, c, d = states
    return [float(np.sum(np.square(x))) for x in (w, g * scalars[1], a - b, c, d)]
