"""The tables of the documents that say what there is: made from the registry, not from results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ...nn.registry import ROWS, Row
from ...nn.registry.record import MINDSPORE, Form
from ..cases.steps import STEPS
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


def row_sparse() -> Table:
    """The meaning of row-sparse gradients there and here."""
    found = _of_forms(lambda row, form: (form.rows_there, _default(row, form)))
    return Table(["optimizer", MINDSPORE, "default here"], _grouped(found), left=3)


def row_defaults() -> Table:
    """The meaning of row-sparse gradients here alone."""
    found = _of_forms(lambda row, form: (_default(row, form),))
    return Table(["optimizer", "default for row-sparse gradients"], _grouped(found), left=2)


def _default(row: Row, form: Form) -> str:
    return f"`ValueError`: expected {row.needs}" if row.needs else _DEFAULTS[form.rows]


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
        use, name = case.use, f"`{case.name}`"
        moved = use.traffic
        passes = " + ".join(map(str, moved.passes)) or "-"
        counts = [str(n) for n in (moved.updated, moved.read, moved.written)]
        # Of pooled rows there are S in the place of B, with an offset, and B ids beside them.
        B, ids = ("S", " + 8 B") if case.kind == "pooled" else ("B", "")
        parts = []
        if case.kind == "dense":
            parts.append(f"{4 * moved.arrays} n")
        if use.looks_up:
            parts.append(f"4 (U + {B}) D + 8 {B}{ids}")
        if case.kind != "dense" and moved.updated:
            touched = "N" if use.every_row else "U"
            of_rows = f" + {8 * moved.of_rows} {touched}" * bool(moved.of_rows)
            parts.append(f"{8 * moved.updated} {touched} D{of_rows} + (4 D + 8) {B}{ids}")
        formula = " + ".join(parts)
        rows.append([name, *counts, passes, formula])
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
    "row-defaults": row_defaults,
    "large-gradients": large_gradients,
}
