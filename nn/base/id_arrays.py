"""Arrays of ids, and those of the state of an `IdMap`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import reject
from .arguments import MOST_STEPS, check_kind

I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
STATE = {
    "ids": I64, "rows": I32, "counts": I32, "last_uses": I32,
    "pending": I64, "pending_counts": I32, "pending_last_uses": I32, "next_row": I64,
    "step": I64, "removed": I64, "removed_steps": I64, "forgotten": I64,
}  # fmt: skip
"""The arrays of a state of a map, all of one dimension."""
OPTIONAL = frozenset(("pending_last_uses",))
"""Those that states of before lack: ids without a row were seen in the step of the state then."""


def ids_of_64_bits(where: str, ids: Any, name: str = "ids") -> np.ndarray:
    """Ids as contiguous int64, the bits of unsigned ones as they are."""
    found = adopt(where, name, ids)
    if found.dtype not in (I64, np.dtype(np.uint64)):
        reject(TypeError, where, name, "have a wrong dtype", "int64 or uint64", found.dtype)
    made: np.ndarray = check.contiguous(found).view(np.int64)
    return made


def checked_state(where: str, state: Mapping[str, Any], capacity: int) -> dict[str, np.ndarray]:
    """Copies of the arrays of a state that a map with so many rows can have.

    Raises:
        KeyError, TypeError, ValueError: there is no such map.
    """
    check_kind(where, "state", state, Mapping, "a dict of arrays")
    if state.keys() | OPTIONAL != STATE.keys():
        reject(KeyError, where, "state", "has other names", [*STATE], [*state])
    # Copies: another thread may change what was checked.
    found = {name: np.array(adopt(where, name, state[name])) for name in STATE if name in state}
    for name, array in found.items():
        if array.dtype != STATE[name] or array.ndim != 1:
            got = f"{array.dtype}, {array.ndim} dimensions"
            reject(TypeError, where, name, "is another array", f"{STATE[name]} [n]", got)
    rows, pending = found["rows"], found["pending"]
    if "pending_last_uses" not in found:
        found["pending_last_uses"] = np.repeat(found["step"][:1], len(pending)).astype(np.int32)
    next_row, step = (sum(found[name][:1].tolist()) for name in ("next_row", "step"))
    ranges = {
        "rows": (1, next_row - 1), "counts": (1, MOST_STEPS), "last_uses": (0, step),
        "pending_counts": (1, MOST_STEPS), "next_row": (1, capacity), "step": (0, MOST_STEPS),
        "pending_last_uses": (0, step), "removed_steps": (0, step + 1), "forgotten": (-1, step + 1),
    }  # fmt: skip
    lengths = {
        "ids": len(rows), "counts": len(rows), "last_uses": len(rows), "next_row": 1, "step": 1,
        "pending_counts": len(pending), "removed_steps": len(found["removed"]), "forgotten": 1,
        "pending_last_uses": len(pending),
    }  # fmt: skip
    fits = (
        all(len(found[name]) == n for name, n in lengths.items())
        and all(((a <= found[k]) & (found[k] <= b)).all() for k, (a, b) in ranges.items())
        and (rows[:-1] < rows[1:]).all()  # differences may not fit int32
        and len(np.unique(np.concatenate((found["ids"], pending)))) == len(rows) + len(pending)
    )
    if not fits:
        expected = f"rows of a map of at most {capacity} rows, and different ids"
        reject(ValueError, where, "state", "does not fit", expected, "another")
    return found


def moments_of(steps: np.ndarray, now: int) -> tuple[np.ndarray, np.ndarray]:
    """At most 240 different steps, to which steps before now are rounded, and of each which it is.

    The last 14 are exact; others are the last of 2, 4, 8, ... steps, 7 times as many or more ago.
    It makes no difference whether they were rounded before.
    """
    steps = steps.astype(np.int64)
    for k in range(1, 29):
        steps = np.where(steps < ((now >> k) - 7) << k, steps | ((1 << k) - 1), steps)
    rounded, moments = np.unique(steps, return_inverse=True)
    return rounded, moments.astype(np.uint8)
