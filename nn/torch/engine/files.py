"""The files of PyTorch's states: which belong to which parameter, now and in the next process."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from torch import Tensor

from ....ops.runtime.errors import reject
from ...base.file_set import LOADED, FileSet, files_of
from ...engine.catch_up import SCALARS, check_missed
from ...engine.tables import LAST
from .memory import DTYPES, array_of
from .part import RuleChoice, number
from .state import names_of

_RENUMBERED = "parameters whose numbers have changed"
_MOST_STEPS = 1 << 24  # that float32 counts


class ParameterFiles:
    """The files of an optimizer's states, by the owner of each.

    That is the name of a parameter, or its number when it gets its first state. The next process
    finds files by names and numbers: once a number is that of another parameter, they are no set.

    Attributes:
        is_stale: whether the manifest has to be written.
    """

    def __init__(self, files: FileSet) -> None:
        self.files, self.is_stale = files, False
        self._notes: dict[str, Any] = files.parameters.get("notes", {})
        self._owners: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # by identity

    @classmethod
    def open(cls, optimizer: Any) -> None:
        """Let an optimizer take over its files and make more, if states are to lie in files.

        Raises:
            OSError, ValueError, RuntimeError: as `FileSet`, or as `take_over`.
        """
        where = type(optimizer).__name__
        files = files_of(where, lambda: {"class": f"nn.torch.{where}"}, grows=True)
        if files is not None:
            optimizer._maker, optimizer._files = files, cls(files)
            optimizer._files.take_over(optimizer)
            files.complete()

    def begin_anew(self, missed: Any) -> None:
        """Let all states, which were loaded, move to new files."""
        self.files.write(LOADED)
        self.files.made, missed.mapped = {}, {}

    def owner_of(self, parameter: Tensor, label: str) -> str:
        """The owner of a parameter's files; ``label`` is its name or number of now."""
        holder, owner = self._owners.get(id(parameter), (None, ""))
        if holder is None or holder() is not parameter:
            taken = {name for _, name in self._owners.values()}
            others = chain([label], (f"parameter {n}" for n in count()))
            owner = next(name for name in others if name not in taken)
            self._owners[id(parameter)] = weakref.ref(parameter), owner
            if owner != label:
                self.files.write(_RENUMBERED, for_good=True)
        return owner

    def begin(self, optimizer: Any, parameter: Tensor, label: str) -> bool:
        """Whether states of a parameter were there; else let them begin anew."""
        if any(name.partition(".")[2] == label for name in self.files.left):
            self.take_over(optimizer)
            return True
        if f"step.{self.owner_of(parameter, label)}" in self.files.made:
            self.files.write("states that were to begin anew")
        self.is_stale = True
        return False

    def note(self, parameter: Tensor, label: str, group: Any, choice: RuleChoice) -> None:
        """Note what the next process has to find of a parameter."""
        owner, noted = self.owner_of(parameter, label), note_of(group, choice, parameter)
        self.is_stale = self.is_stale or self._notes.get(owner) != noted
        self._notes[owner] = noted

    def check_numbers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note it if the next process would take files for those of another parameter."""
        every = chain.from_iterable(group["params"] for group in groups)
        for parameter, name in zip(every, names_of(groups), strict=True):
            holder, owner = self._owners.get(id(parameter), (None, ""))
            if holder is not None and holder() is parameter and owner != name:
                self.files.write(_RENUMBERED, for_good=True)

    def write(self, groups: Any, states: Mapping[Tensor, Any]) -> None:
        """Write the manifest, with the number of all parameters; of those with states alone."""
        files, n = self.files, sum(len(group["params"]) for group in groups)
        alive = {id(parameter) for parameter, state in states.items() if state}
        gone = {owner for key, (_, owner) in self._owners.items() if key not in alive}
        made = files.made.items()
        files.made = {x: record for x, record in made if x.partition(".")[2] not in gone}
        names = files.left.keys() | files.made
        notes = {owner: x for owner, x in self._notes.items() if f"step.{owner}" in names}
        files.parameters = {**files.parameters, "n": n, "notes": notes}
        files.write()
        self.is_stale = False

    def take_over(self, optimizer: Any) -> None:
        """Go on with the files of all parameters of an optimizer that have some, or with none.

        Raises:
            OSError, ValueError: they do not fit, or are not all. Nothing has changed then.
        """
        files, groups, states = self.files, optimizer.param_groups, {}
        if not files.left:
            return
        waiting = {name.partition(".")[2] for name in files.left}
        parameters = [(p, group) for group in groups for p in group["params"]]
        for (parameter, group), label in zip(parameters, names_of(groups), strict=True):
            if label in waiting and not optimizer.state.get(parameter):
                waiting.discard(label)
                states[parameter] = self._state(optimizer, group, label, parameter)
        if waiting and len(parameters) >= files.parameters.get("n", 0):
            expected, got = "files of the optimizer's parameters", f"those of {min(waiting)!r}"
            reject(ValueError, files.where, "the folder", "is another one's", expected, got)
        left = files.left.items()
        files.left = {name: x for name, x in left if name.partition(".")[2] in waiting}
        optimizer.state.update(states)
        steps = {p: int(number(x["step"])) for p, x in states.items() if LAST.name in x}
        if steps:
            optimizer._missed.resume(steps)
        optimizer._look_after_all()

    def _state(
        self, optimizer: Any, group: Mapping[str, Any], label: str, parameter: Tensor
    ) -> dict[str, Any]:
        """The states of a parameter, checked."""
        where, choice = self.files.where, optimizer._choice(group).of(parameter)
        note = note_of(group, choice, parameter)
        if (noted := self._notes.get(label, note)) != note:
            reject(ValueError, where, f"files of {label!r}", "are another one's", note, noted)
        self._notes[label] = note
        state: dict[str, Any] = optimizer._new_state(group, parameter, choice)
        for role, x in state.items():
            value, is_step = number(x) if not x.shape else 0.0, role == "step"
            is_count = value.is_integer() and 0 <= value <= _MOST_STEPS
            if not (is_count if is_step else math.isfinite(value)):
                expected = f"a count up to {_MOST_STEPS}" if is_step else "a finite number"
                named = f"state '{role}.{label}'"
                reject(ValueError, where, named, "is out of range", expected, value)
        if choice.sleeps:
            step = int(number(state["step"]))
            state[LAST.name] = optimizer._new_last(parameter, step)
            last, named = array_of(state[LAST.name]), f"state '{LAST.name}.{label}'"
            if not self.files.has_manifest:
                check_missed(where, named, last, step, None)
            optimizer._missed.add(parameter, choice.rule, DTYPES[parameter.dtype], step)
            map_scalars(optimizer, parameter)
            check_missed(where, named, last, step, optimizer._missed.mapped[parameter])
        return state


def note_of(group: Mapping[str, Any], choice: RuleChoice, parameter: Tensor) -> dict[str, Any]:
    """Form and options of a parameter, which its files are for, in types of JSON."""
    rule = (choice.rule.plain or choice.rule).update.__name__
    options = {name: str(group[name]) for name in ("sparse", "rounding", "state_dtype")}
    return {"shape": [*parameter.shape], "dtype": str(parameter.dtype), "rule": rule, **options}


def map_scalars(optimizer: Any, parameter: Tensor) -> None:
    """Keep the scalars of missed steps where the other states of a parameter are."""
    missed, make = optimizer._missed, optimizer._making(parameter, SCALARS)
    if make is not None and parameter not in missed.mapped:
        like = missed.tables[parameter].given
        missed.mapped[parameter] = make(like.shape, like.dtype, like)
