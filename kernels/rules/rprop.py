"""Resilient backpropagation: each element has a step size of its own, and only signs count.

A size grows while the gradient keeps its sign, and shrinks when that changes; then the element
waits for one step. Riedmiller and Braun (1993).
"""

from __future__ import annotations

from typing import Any

from ..formula import Numbers
from ..rule import Rule, sign


def rprop(w: Any, g: Any, prev: Any, size: Any, hp: Any) -> Any:
    """Rprop. A size of 0 is one that has not begun; it begins with the learning rate."""
    turn, size = g * prev, (hp.lr if size == hp.zero else size)
    size = size * (hp.grow if turn > hp.zero else (hp.shrink if turn < hp.zero else hp.one))
    size = hp.smallest if size < hp.smallest else size
    size = hp.largest if size > hp.largest else size
    g = hp.zero if turn < hp.zero else g
    return w - sign(g, hp) * size, g, size


def rprop_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``."""
    shrink, grow, smallest, largest = constants
    sizes = real(shrink), real(grow), real(smallest), real(largest)
    return (real(lr), *sizes, real(0.0), real(1.0))


_HP = ("lr", "shrink", "grow", "smallest", "largest", "zero", "one")
RPROP = Rule(rprop, ("prev", "step_size"), _HP)
