"""The parameters of one kernel call, and the tensors that a step is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....kernels.rule import Rule
from ....kernels.state import State
from ....ops.runtime.row_step import RowGradient
from ...engine.layout import Batch, Layout


class Choice(NamedTuple):
    """The choice of kernels that the options of a group make for its parameters."""

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
    shapes: Mapping[str, tuple[int, ...]]  # of its states, in the order of the rule
    numbers: tuple[str, ...]  # its states that are single numbers
    is_new: bool  # it had no state

    @property
    def rule(self) -> Rule:
        """The rule of a tensor of this shape."""
        return self.choice.rule.on(tuple(self.parameter.shape))

    @property
    def declared(self) -> dict[str, State]:
        """The states as the rule declares them, by their names here."""
        return dict(zip(self.shapes, self.rule.states, strict=True))


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
    rule: Rule  # that of tensors of these shapes
    layout: Layout
    batch: Batch
    places: list[int]  # [T]: of each tensor among all that have a gradient
    groups: list[int]  # those that have parameters here
    group_of: np.ndarray  # int64 [T]: the place in ``groups`` of each tensor
    is_on_device: bool

    @classmethod
    def of(cls, layout: Layout, batch: Batch, entries: Sequence[Any], place: Any) -> Part:
        """A batch of a layout of some ``entries``; ``place`` as `places`, by their positions."""
        positions = batch.positions.tolist()
        own: list[Entry] = [entries[i] for i in positions]
        groups, group_of = np.unique([e.group for e in own], return_inverse=True)
        first = own[0]
        return cls(
            first.choice, first.rule, layout, batch, [place[i] for i in positions],
            groups.tolist(), group_of, bool(first.parameter.is_cuda),
        )  # fmt: skip

    def gradients(self, given: Given) -> Any:
        """The gradients of its parameters: addresses, or rows."""
        if self.batch.row_sparse:
            return [given.rows[i] for i in self.batch.positions.tolist()]
        return given.addresses if self.batch.is_all else given.addresses[self.batch.positions]

    def of_groups(self, groups: Sequence[Any]) -> list[Any]:
        """The group of each tensor, of all groups."""
        return [groups[self.groups[k]] for k in self.group_of.tolist()]
