"""What one kernel call of a step updates, and the tensors that a step is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...kernels.cpu.adafactor.step import FactoredTable
from ...kernels.rules.rule import Rule
from ...ops.runtime.row_step import RowGradient
from ..engine.factored import matrices_of
from ..engine.layout import Batch, Layout


class Choice(NamedTuple):
    """What the options of a group decide about the kernels of its parameters."""

    rule: Rule
    states: tuple[str, ...]  # the names of those of the rule, in its order
    touched_only: bool | None  # what sparse gradients update; None: they are refused
    couples: bool  # a weight decay is added to the gradient


class Entry(NamedTuple):
    """A parameter that has a gradient, with its state, while it is bound."""

    parameter: Tensor
    group: int
    name: str
    state: dict[str, Any]
    choice: Choice
    shapes: Mapping[str, tuple[int, ...]]  # of its states
    numbers: tuple[str, ...]  # its states that are single numbers
    is_new: bool  # it had no state


class Given(NamedTuple):
    """The tensors of one step: the gradients, and the states that it goes on from."""

    addresses: np.ndarray  # int64 [P]: of the dense gradients
    rows: Mapping[int, RowGradient]  # the sparse ones, by the place of the parameter
    states: Sequence[dict[str, Any]]  # of each parameter that has a gradient
    are_new: Sequence[bool] = ()  # whether these had none; empty: all had
    keep: Any = ()  # what must stay alive until the step is done


@dataclass(eq=False)
class Part:
    """The parameters that one kernel call updates."""

    choice: Choice
    layout: Layout
    batch: Batch
    places: list[int]  # [T]: of each tensor among all that have a gradient
    groups: list[int]  # those that have parameters here
    group_of: np.ndarray  # int64 [T]: the place in ``groups`` of each tensor
    is_on_device: bool
    is_factored: bool  # its states are those of rows and columns
    matrices: FactoredTable | None = None

    @classmethod
    def of(cls, layout: Layout, batch: Batch, entries: Sequence[Any], place: Any) -> Part:
        """A batch of a layout of some ``entries``; ``place`` as `places`, by their positions."""
        positions = batch.positions.tolist()
        own: list[Entry] = [entries[i] for i in positions]
        groups, group_of = np.unique([e.group for e in own], return_inverse=True)
        first = own[0]
        is_factored = bool(first.choice.rule.factored) and len(first.shapes) == 2
        part = cls(
            first.choice, layout, batch, [place[i] for i in positions], groups.tolist(), group_of,
            bool(first.parameter.is_cuda), is_factored,
        )  # fmt: skip
        part.settle()
        return part

    def settle(self) -> None:
        """Take over where the tensors lie."""
        self.matrices = FactoredTable(matrices_of(self.batch)) if self.is_factored else None

    def gradients(self, given: Given) -> Any:
        """The gradients of its parameters: addresses, or rows."""
        if self.batch.row_sparse:
            return [given.rows[i] for i in self.batch.positions.tolist()]
        return given.addresses if self.batch.is_all else given.addresses[self.batch.positions]

    def of_groups(self, groups: Sequence[Any]) -> list[Any]:
        """The group of each tensor, of all groups."""
        return [groups[self.groups[k]] for k in self.group_of.tolist()]
