"""States: what a rule keeps from one step to the next, and for what."""

from __future__ import annotations

from typing import Any, NamedTuple

PER = ("element", "row", "column", "tensor")
PARAMETER = "parameter"
"""In place of the number with which a state begins: a copy of the parameter. In place of a dtype:
that of the parameter."""


class State(NamedTuple):
    """An array, or a number, that a rule keeps from one step to the next.

    Attributes:
        name: its role in checkpoints.
        per: of what there is one number: an ``"element"``, a ``"row"`` (what the first axis
            numbers; with a state per column, a row of each matrix of the last two axes), a
            ``"column"`` of such a matrix, or a ``"tensor"``. A vector is one row.
        initial: the number with which it begins, or `PARAMETER`.
        is_read: it is only read, so no function returns it.
        dtype: its dtype: ``np.int32`` of a count; or `PARAMETER`, that of the parameter. None: of
            an element the parameter's or what the user asks for, else the type of the arithmetic.
    """

    name: str
    per: str = "element"
    initial: float | str = 0.0
    is_read: bool = False
    dtype: Any = None
