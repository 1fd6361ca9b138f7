"""How a weight is kept: what lies beside it in memory, and how both make one number.

A weight of 16 bits forgets updates that are smaller than half a unit of its last place. What lies
beside it remembers them: a rule sees the number that both make, in the type of the arithmetic, and
its result is written to both in the same pass. `rule.Rule.kept` makes a rule of any elementwise or
row-wise one; its own function knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .state import State


@dataclass(frozen=True, eq=False)
class Keeping:
    """A way to keep a weight; compared by identity.

    Attributes:
        name: part of kernel names.
        beside: the states that lie beside the weight, one for each element.
        load: ``load(w, *beside)``: the weight as a number. None: ``w`` is all of it, and the rest
            is only written.
        store: ``store(x, rounded)``: what is written beside the weight, a tuple, for its new value
            ``x`` and what is left of this where the weight itself is stored.
    """

    name: str
    beside: tuple[State, ...]
    load: Callable[..., Any] | None
    store: Callable[..., Any]

    def __reduce__(self) -> Any:
        return keeping_of, (self.name,)


def keeping_of(name: str) -> Keeping:
    """The way of a name."""
    return next(known for known in (MASTER, KAHAN) if known.name == name)


def _copied(x: Any, rounded: Any) -> Any:
    return (x,)


def _joined(w: Any, remainder: Any) -> Any:
    return w + remainder


def _left(x: Any, rounded: Any) -> Any:
    return (x - rounded,)


MASTER = Keeping("master", (State("copy"),), None, _copied)
"""A weight in full precision, and a rounded copy in another storage: never read, written on the
way (MXNet's ``multi_precision``)."""
KAHAN = Keeping("kahan", (State("remainder"),), _joined, _left)
"""A rounded weight, and what rounding has cut off, rounded too (Kahan's compensated sum)."""
