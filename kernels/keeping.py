"""How a weight is kept: what lies beside it in memory, and how both make one number.

A weight of 16 bits forgets updates that are smaller than half a unit of its last place. What lies
beside it remembers them: a rule sees the number that both make, in the type of the arithmetic, and
its result is written to both in the same pass. `rule.Rule.kept` makes a rule of any elementwise or
row-wise one; its own function knows nothing of it.
"""

from __future__ import annotations

from typing import Any

from .rule import Keeping
from .state import State


def _copied(x: Any, rounded: Any) -> Any:
    return (x,)


def _joined(w: Any, remainder: Any) -> Any:
    return w + remainder


def _left(x: Any, rounded: Any) -> Any:
    return (x - rounded,)


MASTER = Keeping(_copied, (State("copy"),), "master")
"""A weight in full precision, and a rounded copy in another storage: never read, written on the
way (MXNet's ``multi_precision``)."""
KAHAN = Keeping(_left, (State("remainder"),), "kahan", _joined)
"""A rounded weight, and what rounding has cut off, rounded too (Kahan's compensated sum)."""
