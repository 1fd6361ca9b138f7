"""Every optimizer of the registry as it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ... import nn
from ..registry import ROWS, Measured, Row
from .subject import DTYPES, Prepared, Use
from .traffic import Traffic
from .workloads import Kind

_LR = 1e-3


@dataclass(frozen=True)
class Optimizer:
    """A class of `fusestep.nn` with options that decide what it moves."""

    row: Row
    measured: Measured

    def make(self, parameters: list[np.ndarray]) -> Any:
        """The optimizer of these parameters."""
        return self.row.new(parameters, **{"learning_rate": _LR, **self.measured.options})

    @cached_property
    def uses(self) -> Mapping[Kind, Use]:
        """What it does with each kind of gradients."""
        optimizer, known = self.make([np.zeros((3, 2), np.float32)]), self.measured
        (moved,) = _of_elements(optimizer)
        rule = getattr(optimizer, "_rule", None)  # versions to compare with know elements only
        declared = [s for s in rule.states if hasattr(s, "per")] if rule else []
        of_rows = sum(state.per == "row" for state in declared)
        n_read = sum(state.per == "element" and state.is_read for state in declared)
        traffic = Traffic(len(moved) - n_read, 1 + n_read, passes=known.passes, of_rows=of_rows)
        dense = Use(known.dense, traffic, is_matrix=known.is_matrix, start=known.start)
        if known.rows is None:
            return {"dense": dense}
        rows = Use(known.rows, traffic, optimizer.sparse_update == "dense_equivalent")
        return {"dense": dense, "rows": rows, "mixed": rows}

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All."""
        return tuple(DTYPES)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """Make it for these parameters."""
        optimizer = self.make(parameters)
        return Prepared(lambda gradients: optimizer(gradients), _of_elements(optimizer), [])


def _of_elements(optimizer: Any) -> list[tuple[np.ndarray, ...]]:
    """Of each parameter: itself, and its states of that size."""
    shapes = {parameter.name: parameter.shape for parameter in optimizer.parameters}
    states: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
    for name, state in optimizer.state_arrays().items():
        parameter = name.partition(".")[2]
        if shapes.get(parameter) == state.shape:
            states[parameter].append(state)
    return [(parameter.data, *states[parameter.name]) for parameter in optimizer.parameters]


def _optimizers() -> Iterator[tuple[str, Optimizer]]:
    """By name, such as ``SGD(momentum)``."""
    for row in ROWS.values():
        if hasattr(nn, row.name):  # versions to compare with may not have it
            for label, measured in row.measured.items():
                yield row.name + f"({label})" * bool(label), Optimizer(row, measured)


OPTIMIZERS = dict(_optimizers())
