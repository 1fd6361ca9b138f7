"""Clipping by norm: a gradient times a factor that follows from its L2 norm."""

from __future__ import annotations

from typing import Any

from ..rule import Rule


def scaled(out: Any, g: Any, hp: Any) -> Any:
    """The scaled gradient in the first slot."""
    return hp.factor * g


def scaled_in_place(w: Any, g: Any, hp: Any) -> Any:
    """The gradient in the first slot, the only one read: one that comes twice is not packed."""
    return hp.factor * w


def norm(out: Any, g: Any, hp: Any) -> Any:
    """First stage: the norm of the gradient."""
    return (g,)


SCALED = Rule(scaled, (), ("factor",), norm, 1)
SCALED_IN_PLACE = Rule(scaled_in_place, (), ("factor",))
