"""How a weight is kept: what lies beside it in memory, and how both make one number.

A weight of 16 bits forgets updates that are smaller than half a unit of its last place. What lies
beside it remembers them: a rule sees the number that both make, in the type of the arithmetic, and
its result is written to both in the same pass. `rule.Rule.kept` makes a rule of any elementwise or
row-wise one; its own function knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rule import Keeping
from .state import PARAMETER, State


def _master(w: Any, master: Any) -> Any:
    return master


def _all(x: Any, rounded: Any) -> Any:
    return (x,)


def _joined(w: Any, remainder: Any) -> Any:
    return w + remainder


def _left(x: Any, rounded: Any) -> Any:
    return (x - rounded,)


_STATE = State("master", initial=PARAMETER, dtype=np.float32)
MASTER = Keeping(_master, _all, (_STATE,), "master")
"""A rounded weight, never read but written on the way, and all of it in float32 (NVIDIA's mixed
precision, MXNet's ``multi_precision``)."""
KAHAN = Keeping(_joined, _left, (State("remainder", dtype=PARAMETER),), "kahan")
"""A rounded weight, and what rounding has cut off, rounded too (Kahan's compensated sum)."""
KEEPINGS: dict[str, Keeping | None] = {"nearest": None, "master": MASTER, "kahan": KAHAN}
"""By name; ``"nearest"`` is the weight alone, rounded to the nearest number that can be stored."""
