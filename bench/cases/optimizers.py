"""Every optimizer of the registry as it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import nn
from ..registry import ROWS, Measured, Row
from ..workers.worker_protocol import LR
from .subject import Prepared, Subject, Traffic, Use


@dataclass(frozen=True)
class Optimizer:
    """A class of `fusestep.nn` with options that decide what it moves."""

    row: Row
    measured: Measured

    def make(self, parameters: list[np.ndarray], **options: Any) -> Any:
        """The optimizer of these parameters; with further options."""
        chosen = {"learning_rate": LR, **self.measured.options, **options}
        return self.row.new(parameters, **chosen)

    @property
    def subject(self) -> Subject:
        """The subject that is measured."""
        optimizer, known = self.make([np.zeros((3, 2), np.float32)]), self.measured
        (updated,), (read,) = moved(optimizer), _only_read(optimizer)
        of_rows = sum(array.shape[1:] == (1,) for array in updated)
        of_elements = len(updated) - of_rows
        traffic = Traffic(of_elements, 1 + len(read), passes=known.passes, of_rows=of_rows)
        dense = Use(known.dense, traffic, is_matrix=known.is_matrix, start=known.start)
        if known.rows is None:
            return Subject({"dense": dense}, self.prepare)
        rows = Use(known.rows, traffic, optimizer.sparse_update == "dense_equivalent")
        return Subject({"dense": dense, "rows": rows, "mixed": rows}, self.prepare)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """Make it for these parameters."""
        optimizer = self.make(parameters)
        reads = [np.concatenate([a.reshape(-1) for a in arrays])
                 for arrays in zip(*_only_read(optimizer), strict=True)]  # fmt: skip
        return Prepared(lambda gradients: optimizer(gradients), moved(optimizer), reads)


def moved(optimizer: Any) -> list[tuple[np.ndarray, ...]]:
    """Each parameter with the states of that size that are written, then those of rows."""
    found = []
    for i, parameter in enumerate(optimizer.parameters):
        w, states = parameter.data, _states(optimizer, i, is_read=False)
        same = [state for state in states if state.shape == w.shape]
        is_row_wise = w.ndim > 1 and getattr(_rule(optimizer), "is_row_wise", False)
        of_rows = [s[:, None] if isinstance(s, np.ndarray) else s
                   for s in states if is_row_wise and s.shape == w.shape[:1]]  # fmt: skip
        found.append((w, *same, *of_rows))
    return found


def _only_read(optimizer: Any) -> list[tuple[np.ndarray, ...]]:
    """The states of each parameter that are only read."""
    return [tuple(_states(optimizer, i, is_read=True)) for i in range(len(optimizer.parameters))]


def _states(optimizer: Any, i: int, *, is_read: bool) -> list[np.ndarray]:
    """The states of a parameter; of a version to compare with all are written."""
    inner, rule = getattr(optimizer, "opt", optimizer), _rule(optimizer)
    read = {s.name for s in rule.states if getattr(s, "is_read", False)} if rule else set()
    return [
        state
        for name, state in inner.states_by_name(i).items()
        if (name.partition(".")[0] in read) == is_read
    ]


def _rule(optimizer: Any) -> Any:
    """That of an optimizer, or of the one inside of LARS; None where there is none."""
    return getattr(getattr(optimizer, "opt", optimizer), "_rule", None)


def _optimizers() -> Iterator[tuple[str, Optimizer]]:
    """By name, such as ``SGD(momentum)``."""
    for row in ROWS.values():
        if hasattr(nn, row.name):  # versions to compare with may not have it
            for label, measured in row.measured.items():
                yield row.name + f"({label})" * bool(label), Optimizer(row, measured)


OPTIMIZERS = dict(_optimizers())
