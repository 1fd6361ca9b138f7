"""The tables of the documents that say what there is: made from the registry, not from results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ..cases.steps import STEPS
from ..registry import ROWS, Row
from ..registry.record import MINDSPORE, Form
from .table import Table

_DEFAULTS = {
    "lazy": "lazy",
    "dense_equivalent": "dense-equivalent",
    None: "none: say which, or the step raises an error that names both",
}


def optimizers() -> Table:
    """Each class in MindSpore and here."""
    rows = []
    for row in ROWS.values():
        source = row.source
        there = source.status if source.system == MINDSPORE else f"not there; {source.system}"
        rows.append([f"`{row.name}`", there, source.compared, source.differs])
    return Table(["class", MINDSPORE, "here", "what differs"], rows, left=4)


def states() -> Table:
    """The names of states in a checkpoint."""
    found = ((f"`{row.name}`", (_states(row), row.source.unkept)) for row in ROWS.values())
    head = ["optimizer", "states of `<parameter>`", "MindSpore's that are not kept"]
    return Table(head, _grouped(found), left=3)


def row_sparse(*, alone: bool = False) -> Table:
    """The meaning of row-sparse gradients there and here, or here ``alone``."""

    def text(row: Row, form: Form) -> tuple[str, ...]:
        here = f"`ValueError`: expected {row.needs}" if row.needs else _DEFAULTS[form.rows]
        return (here,) if alone else (form.rows_there, here)

    head = ["default for row-sparse gradients"] if alone else [MINDSPORE, "default here"]
    return Table(["optimizer", *head], _grouped(_of_forms(text)), left=1 + len(head))


def large_gradients() -> Table:
    """The step of an element whose square is infinite."""
    found = _of_forms(lambda row, form: () if row.build else form.large or ())
    return Table(["optimizer", "in that step", "later"], _grouped(found), left=3)


def traffic() -> Table:
    """The byte model of every operator and optimizer."""
    rows = []
    for case in STEPS:
        if case.model is not None:
            continue
        moved = case.use.traffic
        passes = " + ".join(map(str, moved.passes)) or "-"
        counts = [str(n) for n in (moved.updated, moved.read, moved.written)]
        rows.append([f"`{case.name}`", *counts, passes, case.use.formula(case.kind)])
    head = ["case", "updated", "read", "written", "passes before", "bytes in float32"]
    return Table(head, rows)


def _grouped(labelled: Iterable[tuple[str, tuple[str, ...]]]) -> list[list[str]]:
    """One line for all labels with the same text."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for label, text in labelled:
        lines.setdefault(text, []).append(label)
    return [[", ".join(labels), *text] for text, labels in lines.items()]


def _of_forms(
    text_of: Callable[[Row, Form], tuple[str, ...]],
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each class as it is, and with the options that make another text, if there is any."""
    for row in ROWS.values():
        usual = text_of(row, row.forms[""])
        if usual:
            yield f"`{row.name}`", usual
        for form in row.forms.values():
            text = text_of(row, form)
            if form.when and text and text != usual:
                yield f"`{row.name}` {form.when}", text


def _states(row: Row) -> str:
    """``roles, with an option further roles; counters``."""
    if row.states:
        return row.states
    known: set[str] = set()
    parts = []
    for form in row.forms.values():
        optimizer = row.make([np.zeros((2, 2), np.float32)], **form.options)
        new = [f"`{role}.`" for role in optimizer._states if role not in known]
        known |= optimizer._states.keys()
        if new:
            parts.append(f"{form.when} {', '.join(new)}".strip())
    counters = [f"`{name}`" for name in optimizer._derived_state(0)]
    return "; ".join(filter(None, [", ".join(parts), ", ".join(counters)]))


TABLES: dict[str, Callable[[], Table]] = {
    "bytes": traffic,
    "optimizers": optimizers,
    "states": states,
    "row-sparse": row_sparse,
    "row-defaults": partial(row_sparse, alone=True),
    "large-gradients": large_gradients,
}
