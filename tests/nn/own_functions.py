"""Rules of users, and their functions, for tests of what is refused.

No file of tests: pytest would put calls into the assertion of a rule.
"""

import math
from typing import Any

import numba
import numpy as np
from fusestep.kernels.rule import rule_helper
from fusestep.nn import Formula, FusedOptimizer, Rule

TABLE, ARRAY = (1.0, 2.0), np.arange(3.0)


class Own(FusedOptimizer):
    """With a formula that can be exchanged."""

    function: Any = staticmethod(lambda _real, lr, *_: (lr,))
    others: tuple[Any, ...] = ()

    def formula(self) -> Any:
        return Formula(self.function, *self.others)


def plain(w: Any, g: Any, hp: Any) -> Any:
    return w - hp.lr * g


def averaged(w: Any, g: Any, m: Any, hp: Any) -> Any:
    m = m + hp.lr * (g - m)
    return w - hp.lr * m, m


PLAIN, AVERAGED = Rule(plain, (), ("lr",)), Rule(averaged, ("m",), ("lr",))
MEASURED = Rule(
    plain, (), ("lr",), lambda w, g, _hp: (w, g), 2, lambda of_w, of_g: of_w + of_g, "lr"
)  # fmt: skip


def raising(w: Any, g: Any, hp: Any) -> Any:
    if g > hp.lr:
        raise ValueError("too large")
    return w - g


def asserting(w: Any, g: Any, hp: Any) -> Any:
    assert g < hp.lr
    return w - g


def printing(w: Any, g: Any, hp: Any) -> Any:
    if g > hp.lr:
        print(g)
    return w - g


def importing(w: Any, g: Any, _: Any) -> Any:
    import cmath

    return w - g * cmath.e


def branch(w: Any, g: Any, hp: Any) -> Any:
    return None if g > hp.lr else w


@numba.njit
def _inverse(x: Any) -> Any:
    return 1.0 / x


@rule_helper
def _halved(x: Any, hp: Any) -> Any:
    return x / (hp.lr + hp.lr)


def unusual(w: Any, g: Any, m: Any, hp: Any) -> Any:
    """What is no error in a rule: it gives NaN and infinities, or is code that cannot raise."""
    total = _halved(w, hp) + math.sqrt(g) + math.log(m) + g / m + g % m + w**g + w**2
    for k in range(3):
        total = total + k * m
    if hp.lr != hp.lr and hp.lr == hp.lr:
        raise ValueError("never")
    largest = max(w, g) - min(w, m) + abs(g) + round(w) + math.floor(g) + int(m)
    part = 7 % int(hp.lr + hp.lr) + (3 // int(hp.lr + hp.lr)) + TABLE[1] + ARRAY[2]
    other = _inverse(g) + math.hypot(w, g) + math.copysign(w, m) + np.sign(g)
    return total + largest + part if w < g < m else other, 0.5 * m
