"""PyTorch's Rprop: a size of 0 is a size, and a NaN has the sign 0."""

from __future__ import annotations

from typing import Any

from ...rule import Rule


def rprop(w: Any, g: Any, prev: Any, size: Any, hp: Any) -> Any:
    """Rprop, whose sizes begin with the learning rate before the first update."""
    turn = g * prev
    size = size * (hp.grow if turn > hp.zero else (hp.shrink if turn < hp.zero else hp.one))
    size = hp.smallest if size < hp.smallest else size
    size = hp.largest if size > hp.largest else size
    g = hp.zero if turn < hp.zero else g
    sign = hp.one if g > hp.zero else (-hp.one if g < hp.zero else hp.zero)
    return w - sign * size, g, size


TORCH_RPROP = Rule(
    rprop, ("prev", "step_size"), ("shrink", "grow", "smallest", "largest", "zero", "one")
)
