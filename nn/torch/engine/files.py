"""The files of PyTorch's states: which belong to which parameter, now and in the next process."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

from torch import Tensor

from ....kernels.storage import STORAGES, real_of
from ....ops.runtime.errors import reject
from ...base.file_set import FileSet
from ...engine.catch_up import LAST, SCALARS, check_resumed, no_scalars
from .memory import DTYPES, array_of
from .part import RuleChoice, number
from .state import place_at

_MOST_STEPS = 1 << 24  # that float32 counts
Place = tuple[str | None, int, int]
"""The name of a parameter, or None, its group, and its number there."""


class ParameterFiles:
    """The files of an optimizer's states, and which of them belong to a parameter.

    The owner of files is a parameter's name, or a number: that of the parameter when it gets its
    first state, or a later one where that is another parameter's. The manifest has the place of
    each owner, by which the next process finds the files of parameters without names.

    Attributes:
        waiting: what the manifest notes of owners that the optimizer does not have yet.
        is_stale: whether the manifest has to be written.
    """

    def __init__(self, files: FileSet) -> None:
        self.files, self.is_stale = files, False
        self._owners: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by identity
        self._notes: dict[str, Any] = {}
        self.waiting: dict[str, Any] = dict(files.parameters)
        if not files.has_manifest:
            self.waiting = {name.partition(".")[2]: {} for name in files.left}

    def owner_of(self, parameter: Tensor, label: str) -> str:
        """The owner of a parameter's files; ``label`` is its name or number of now."""
        owner = self._known(parameter)
        if owner is None:
            taken = {*self.waiting, *(own for _, own in self._owners.values())}
            others = chain([label], (f"parameter {n}" for n in count()))
            owner = next(own for own in others if own not in taken)
            self._owners[id(parameter)] = weakref.ref(parameter), owner
        return owner

    def _known(self, parameter: Tensor) -> str | None:
        known, owner = self._owners.get(id(parameter), (None, None))
        return owner if known is not None and known() is parameter else None

    def begin(self, parameter: Tensor, label: str) -> None:
        """Let the states of a parameter begin anew: what there was must not come back."""
        files, owner = self.files, self.owner_of(parameter, label)
        left = {name: x for name, x in files.made.items() if name.partition(".")[2] != owner}
        if len(left) < len(files.made):
            files.made, self.is_stale = left, True
            files.parameters.pop(owner, None)
            if not files.cut:
                files.write()

    def found(self, optimizer: Any, parameter: Tensor, label: str) -> dict[str, Any]:
        """The states of a parameter from an earlier process; {}: they begin anew."""
        if self._known(parameter) is None:
            self.take_over(optimizer)
            if self._known(parameter) is not None:
                return dict(optimizer.state[parameter])
        self.begin(parameter, label)
        return {}

    def note(
        self, parameter: Tensor, groups: Sequence[Mapping[str, Any]], number: int,
        choice: RuleChoice,
    ) -> None:  # fmt: skip
        """Note what the next process has to find of a parameter, by its number of now."""
        label, place = _place_of(groups, number)
        owner, noted = self.owner_of(parameter, label), note_of(groups, choice, parameter, place)
        self.is_stale = self.is_stale or self._notes.get(owner) != noted
        self._notes[owner] = noted

    def drop(self, parameter: Tensor, *roles: str) -> None:
        """Leave out of the set what a parameter has no more."""
        owner = self._known(parameter)
        found = [self.files.made.pop(f"{role}.{owner}", None) for role in roles]
        self.is_stale = self.is_stale or any(found)

    def write(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest, with the parameters of some groups."""
        owners = map(self._known, chain.from_iterable(group["params"] for group in groups))
        noted = {own: self._notes[own] for own in owners if own in self._notes}
        self.files.parameters = {**self.waiting, **noted}
        self.files.write()
        self.is_stale = False

    @contextmanager
    def loading(self, optimizer: Any) -> Iterator[None]:
        """A context in which all states move to files that begin anew."""
        with self.files.changing("load_state_dict"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if self._known(parameter) is not None:
                        self.begin(parameter, "")
            yield
            self.write(optimizer.param_groups)

    def _take(self, parameter: Tensor, label: str, place: Place) -> Any:
        """What an earlier process has noted of a parameter whose files are there; or None."""
        named = {own: x for own, x in self.waiting.items() if x.get("name") == place[0]}
        if place[0] is None:
            named = {own: x for own, x in named.items() if x.get("place") == [*place[1:]]}
        owner = next(iter(named), "") if self.files.has_manifest else label
        if owner not in self.waiting or self._known(parameter) is not None:
            return None
        self._owners[id(parameter)] = weakref.ref(parameter), owner
        return self.waiting.pop(owner)

    def take_over(self, optimizer: Any) -> None:
        """Go on with the files of all parameters of an optimizer that have some, or with none.

        Raises:
            OSError, ValueError: they do not fit, or are not all. Nothing has changed then.
        """
        if not self.waiting:
            return
        files, states, groups = self.files, {}, optimizer.param_groups
        before = self.waiting.copy(), self._owners.copy(), files.left.copy(), files.made.copy()
        files.begins = False
        try:
            each = chain.from_iterable(group["params"] for group in groups)
            for parameter, (label, place) in ((p, _place_of(groups, n)) for n, p in enumerate(each)):
                if (noted := self._take(parameter, label, place)) is not None:
                    states[parameter] = self._state(optimizer, label, place, parameter, noted)
            for owner, noted in self.waiting.items():
                k, j = noted.get("place", (0, 0))
                if k < len(groups) and j < len(groups[k]["params"]):
                    expected, got = "a parameter of the optimizer", f"none named {owner!r}"
                    reject(ValueError, files.where, "a file", "has no owner", expected, got)
        except BaseException:
            self.waiting, self._owners, files.left, files.made = before
            raise
        finally:
            files.begins = True
        optimizer.state.update(states)
        optimizer._look_after_all()

    def _state(
        self, optimizer: Any, label: str, place: Place, parameter: Tensor, noted: dict[str, Any]
    ) -> dict[str, Any]:
        """The states of a parameter, checked."""
        where, groups = self.files.where, optimizer.param_groups
        group = groups[place[1]]
        choice, owner = optimizer._choice(group), self.owner_of(parameter, label)
        noted = {**noted, "name": place[0], "place": [*place[1:]]}
        for name, own in note_of(groups, choice, parameter, place).items():
            if noted.get(name, own) not in (own, None) and own is not None:
                what = f"{name} of the files of {owner!r}"
                reject(ValueError, where, what, "is another one", own, noted[name])
        state: dict[str, Any] = optimizer._new_state(group, parameter, choice)
        for role, x in state.items():
            value = number(x) if not x.shape else 0.0
            is_count = value.is_integer() and 0 <= value <= _MOST_STEPS
            if not (is_count if role == "step" else math.isfinite(value)):
                expected = f"a count up to {_MOST_STEPS}" if role == "step" else "a finite number"
                label = f"state '{role}.{owner}'"
                reject(ValueError, where, label, "is out of range", expected, value)
        if choice.sleeps:
            step, real = int(number(state["step"])), STORAGES[DTYPES[parameter.dtype]]
            state[LAST.name] = optimizer._new_last(parameter, step)
            own = owner, array_of(state[LAST.name]), step
            if not self.files.may_sleep:
                check_resumed(where, *own, None)
            optimizer._missed.add(parameter, choice.rule, real_of(real).dtype, step)
            map_scalars(optimizer, parameter, step)
            check_resumed(where, *own, optimizer._missed.mapped[parameter])
        return state


def _place_of(groups: Sequence[Mapping[str, Any]], number: int) -> tuple[str, Place]:
    """The name or number of a parameter, by its number, and its place."""
    k, label = place_at(groups, number)
    before = sum(len(group["params"]) for group in groups[:k])
    return label, (label if groups[k].get("param_names") else None, k, number - before)


def note_of(
    groups: Sequence[Mapping[str, Any]], choice: RuleChoice, parameter: Tensor, place: Place
) -> dict[str, Any]:
    """What the files of a parameter are for, in types of JSON."""
    group = groups[place[1]]
    rule = (choice.rule.plain or choice.rule).update.__name__
    options = {name: str(group[name]) for name in ("sparse", "rounding", "state_dtype")}
    return {
        "name": place[0], "place": [*place[1:]], "shape": [*parameter.shape],
        "dtype": str(parameter.dtype), **options,
        "rule": rule if number(group["lr"]) else None,  # FTRL has another one without a rate
    }  # fmt: skip


def map_scalars(optimizer: Any, parameter: Tensor, step: int) -> None:
    """Keep the scalars of missed steps where the other states of a parameter are."""
    missed, make = optimizer._missed, optimizer._making(parameter, SCALARS)
    if make is not None and parameter not in missed.mapped:
        like = missed.tables[parameter].given
        missed.map(parameter, make(like.shape, like.dtype, no_scalars(like)), step)
