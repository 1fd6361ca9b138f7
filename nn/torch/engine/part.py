"""Parts of a step: the options of groups, and the parameters of one kernel call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.formula import Numbers
from ....kernels.keeping import COPY, KEEPINGS
from ....kernels.rule import Prologue, Rule
from ....kernels.rules.gradient import COUPLED_DECAY, SCALE
from ...engine.batch import Batch
from ...engine.conditioning import transform_scalars
from .tensors import local

Group = Mapping[str, Any]


def number(value: Any) -> float:
    """A hyper-parameter: a number or a tensor of one element, which may require a gradient."""
    return float(value.item() if isinstance(value, Tensor) else value)


def state_dtype_of(group: Group) -> torch.dtype | None:
    """The dtype of the states of elements; None: the parameter's."""
    asked: torch.dtype | None = group["state_dtype"]
    return torch.float32 if asked is None and group["rounding"] == "master" else asked


def shrink_of(group: Group) -> float:
    """The factor by which a decoupled weight decay shrinks a parameter."""
    return float(1.0 - group["lr"] * group["weight_decay"])


class RuleChoice(NamedTuple):
    """The choice of kernels that the options of a group make for its parameters."""

    rule: Rule
    states: tuple[str, ...]  # the names of those of the rule, in its order
    touched_only: bool | None  # what sparse gradients update; None: they are refused
    couples: bool  # a weight decay is added to the gradient
    sleeps: bool = False  # rows that do not occur take their steps when they are next touched

    def with_copy(self) -> RuleChoice:
        """The choice for a parameter with a copy that is written with it."""
        return self._replace(rule=self.rule.kept(COPY), states=(*self.states, COPY.name))

    def of(self, parameter: Tensor) -> RuleChoice:
        """The choice for a parameter: rows sleep in contiguous tables of one process alone."""
        is_table = parameter.dim() > 0 and local(parameter) is parameter
        if not self.sleeps or (is_table and parameter.is_contiguous() and not parameter.is_cuda):
            return self
        return self._replace(sleeps=False, touched_only=False)


class Method(NamedTuple):
    """The method by which an optimizer updates the parameters of a group."""

    rule: Rule
    couples: bool = True  # a weight decay is added to the gradient
    touches: bool = False  # a sparse gradient updates the rows that occur, unless told
    states: tuple[str, ...] = ()  # the names of those of the rule; default its own

    def choice(self, group: Group) -> RuleChoice:
        """The choice of kernels that this method makes for a group."""
        told, touched_only = group["sparse"], True if self.touches else None
        if told is not None:
            touched_only = told != "all"
        rule, states = self.rule, self.states or self.rule.names
        if keeping := KEEPINGS[group["rounding"]]:
            rule = rule.kept(keeping)
            states = (*states, *(state.name for state in keeping.beside))
        return RuleChoice(rule, states, touched_only, self.couples, told == "catch_up")


class GradientPrologue(NamedTuple):
    """The gradient transforms before the rule of a step, and the factors of its gradients."""

    prologue: Prologue
    factors: Sequence[float]  # of gradients: one for all, or of each parameter of the step

    @classmethod
    def of(
        cls, groups: Sequence[Group], choices: Sequence[RuleChoice], factors: Sequence[float]
    ) -> GradientPrologue:
        """The transform for all groups; to the gradients of some a part of it does nothing."""
        is_scaled, decays = any(factor != 1.0 for factor in factors), False
        for group, choice in zip(groups, choices, strict=True):
            is_scaled = is_scaled or bool(group.get("maximize"))
            decays = decays or bool(choice.couples and group.get("weight_decay"))
        parts = (SCALE,) * is_scaled + (COUPLED_DECAY,) * decays
        return cls(parts, factors)

    def scalars(self, group: Group, choice: RuleChoice, place: int = 0) -> Numbers:
        """The scalars of the gradient transform, for a group and the place of a factor."""
        factor, decay = self.factors[place], group.get("weight_decay") or 0.0
        if group.get("maximize"):
            factor = -factor
        return transform_scalars(self.prologue, decay if choice.couples else 0.0, factor)


_FIXED = frozenset((int, float, bool, str, NoneType, torch.dtype))
# Of a group: its other values are options. A rate changes in each step where there is a scheduler,
# and is read in each.
_NO_OPTIONS = "params", "param_names", "lr"
_rate_of = itemgetter("lr")


class GroupOptions:
    """The options of all groups in a step, and what follows from them alone.

    ``plain`` are copies of the groups with numbers for tensors; None where no value can change in
    place, as a tensor or a list can: then all of this holds until an option but the rate is another
    object.
    """

    def __init__(self, groups: Sequence[Group], choose: Callable[[Group], RuleChoice]) -> None:
        first = groups[0] if groups else {"sparse": None}
        self._values_of = itemgetter(*[name for name in first if name not in _NO_OPTIONS])
        self._sizes, self._found = [*map(len, groups)], []
        rates = [group.get("lr") for group in groups]
        self._types_of_rates = {*map(type, rates)}
        is_fixed = all(group.keys() == first.keys() for group in groups)
        if is_fixed:
            self._found = [*chain.from_iterable(map(self._values_of, groups))]
            is_fixed = _are_fixed([*self._found, *rates])
        self.plain = None if is_fixed else [_plain(group) for group in groups]
        known = groups if self.plain is None else self.plain
        self.choices = [choose(group) for group in known]
        self.before = GradientPrologue.of(known, self.choices, (1.0,))

    def are_still(self, groups: Sequence[Group]) -> bool:
        """Whether the options of these groups are the same objects, none of which has changed."""
        if self.plain is not None or [*map(len, groups)] != self._sizes:
            return False
        try:
            if {*map(type, map(_rate_of, groups))} != self._types_of_rates:
                return False
            return all(map(is_, self._found, chain.from_iterable(map(self._values_of, groups))))
        except KeyError:  # in the place of an option there is another one
            return False


def _are_fixed(values: Sequence[Any]) -> bool:
    parts = chain.from_iterable(x for x in values if type(x) is tuple)
    return {*map(type, values)} - {tuple} <= _FIXED and {*map(type, parts)} <= _FIXED


def _plain(group: Group) -> dict[str, Any]:
    return {name: x if name == "params" else _as_number(x) for name, x in group.items()}


def _as_number(value: Any) -> Any:
    if type(value) in _FIXED:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_as_number, value))
    is_number = hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1
    return number(value) if is_number else value


@dataclass(eq=False)
class ParameterBatch:
    """The parameters that one kernel call updates, each in the class of its group."""

    choice: RuleChoice
    batch: Batch  # whose positions are those among the parameters with a gradient
    numbers: tuple[str, ...]  # the states that are single numbers, but for the count
    device: int | None  # the number of the CUDA device; None for the host

    def __post_init__(self) -> None:
        rule = self.batch.rule
        self.places: list[int] = self.batch.positions.tolist()
        self.is_measured = rule.is_two_stage and self.device is None
        # Dense, on the host, measures nothing: scalars go to the loop as they are.
        is_fixed = self.device is not None or rule.is_two_stage or self.batch.draws is not None
        self.takes_array = not (self.batch.row_sparse or is_fixed)
