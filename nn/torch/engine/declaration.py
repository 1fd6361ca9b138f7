"""The declaration of an optimizer: its method, its scalars, and what its parameters have to be."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.formula import Numbers
from ....kernels.idle_table import SLEEP
from ....kernels.keeping import COPY, STOCHASTIC
from ....kernels.state import State
from ....ops.runtime.errors import reject
from ...base.file_set import StateMaker, made_by
from ...base.own_rules import check_compiled, check_rule
from ...engine.catch_up import SCALARS, check_idle
from ...engine.reader import is_row_sparse
from ...engine.tables import LAST
from .binding import check_parameter
from .files import ParameterFiles
from .memory import DTYPES, NUMBERS, tensor_of
from .options import check_group, check_rounding, check_rows
from .part import Group, Method, RuleChoice, state_dtype_of
from .record import CheckedParameter
from .state import Making, beside_of, element_state, filled, name_of, numbers_here, single
from .tensors import check_cuts, is_part, is_part_of_table, local, wide_dtype


class Declaration(ABC):
    """The part of an optimizer that a step reads: methods, scalars, states, and their checks.

    Attributes:
        param_groups: as in ``torch.optim``.
        state: as in ``torch.optim``.
        skip_nonfinite: whether a step with a gradient that is not finite changes nothing.
        skipped_steps: how many did.
    """

    param_groups: Any  # typed by `Fused`: PyTorch's class, which stands behind, has its own types
    state: Any
    skip_nonfinite: bool
    skipped_steps: int
    _clipping: Any = None
    _counts_updates = True  # whether there is a state "step", however weights are rounded
    _takes_sparse = True
    _copies: Mapping[Tensor, Tensor] = {}  # of 16 bits, by parameter; they are the caller's
    _maker: StateMaker | None = None  # of states
    _files: ParameterFiles | None = None  # where that is files of its own
    _has_warned = False  # that a state beside a weight begins anew
    _looks_at_scalars = False  # whether `scalars` is a user's
    _chooses_anew = False  # whether `method` is a user's, or follows from the rate too

    # What a subclass defines

    @abstractmethod
    def method(self, group: Group) -> Method:
        """The method by which parameters of a group are updated."""

    @abstractmethod
    def scalars(self, group: Group, step: float) -> Numbers:
        """The scalars of the rule, in its order, at update ``step`` = 1, 2, ...

        The group has the `numbers` of the parameter too, and numbers where options are tensors.
        """

    def numbers(self, group: Group) -> dict[str, float]:  # noqa: ARG002
        """The states of a parameter that are single numbers, and how they begin."""
        return {}

    def next_numbers(self, group: Group, step: float) -> dict[str, Any]:  # noqa: ARG002
        """The new values of `numbers`, which the group has too, after an update."""
        return {}

    def shapes(self, choice: RuleChoice, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the states of a parameter, in the order of its rule."""
        rule, shape = choice.rule, tuple(parameter.shape)
        pairs = zip(choice.states, rule.states, strict=True)
        return {name: rule.shape_of(state, shape) for name, state in pairs}

    def constants(self, group: Group) -> dict[str, float]:  # noqa: ARG002
        """The numbers that `Rule.factor` takes beside sums, states and scalars, by name."""
        return {}

    def initial(self, role: str, group: Group) -> float:  # noqa: ARG002
        """The value with which the elements of a state begin."""
        return 0.0

    def constants_of_step(self) -> dict[str, float]:
        """Numbers and constants of the optimizer, for rules that measure all tensors of a step."""
        return {}

    def take_over(self, numbers: np.ndarray) -> None:  # noqa: B027
        """Take over the numbers that such a rule has made anew; the step is done."""

    # Parameters and their states

    def _counts(self, group: Group) -> bool:
        """Whether the updates of each parameter of a group are counted, in a state ``step``."""
        is_counted = group["rounding"] == STOCHASTIC.name or self._maker is not None
        return self._counts_updates or is_counted or group["sparse"] == "catch_up"

    def _choice(self, group: Group) -> RuleChoice:
        check_group(type(self).__name__, group, takes_sparse=self._takes_sparse)
        choice = self.method(group).choice(group)
        if choice.sleeps:
            couples = choice.couples and bool(group.get("weight_decay"))
            check_idle(type(self).__name__, "sparse='catch_up'", choice.rule, couples=couples)
        return choice

    def _entry(
        self, parameter: Tensor, gradient: Any, k: int, name: str, asked: RuleChoice,
        new: dict[Tensor, Any], like: CheckedParameter | None,
    ) -> CheckedParameter | None:  # fmt: skip
        """The checked parameter of group ``k``, whose choice is ``asked``; None if its class leaves
        it out.

        A state that it lacks is made, and put into ``new``. ``like`` is one of the group that was
        found right, and has the same form and a gradient of the same kind.
        """
        where, group, choice = type(self).__name__, self.param_groups[k], asked.of(parameter)
        copied = self._copies.get(parameter)
        if like is not None and not self._copies:
            self._check_sleep(group, choice, name, parameter)
            is_active, shapes, numbers = True, like.shapes, like.numbers
        else:
            is_active = self._check(group, choice, name, parameter, gradient)
            if copied is not None:
                choice = choice.with_copy()
            shapes = self.shapes(choice, parameter)
            numbers = ("step",) * self._counts(group) + tuple(self.numbers(group))
        known, roles = self.state.get(parameter, {}), (*shapes, *numbers)
        if not isinstance(known, dict):
            expected, got = "a dict", type(known).__name__
            reject(RuntimeError, where, f"state of {name}", "has a wrong type", expected, got)
        state = dict(known)  # a copy, since another thread may change the dict
        if state and any(getattr(state.get(name), "is_cuda", False) for name in numbers):
            found = numbers_here({"state": {parameter: state}, "param_groups": ()}, numbers)
            state = new[parameter] = found["state"][parameter]
        # A rule that rests has no roles, and may still begin a state.
        if copied is not None and state.get(COPY.name) is not copied:
            state = new[parameter] = {**state, COPY.name: copied}
        is_new = not state or all(
            state.get(role) is None for role in (roles or state) if role != COPY.name
        )
        if is_new and self._files is not None and self._files.begin(self, parameter, name):
            state, is_new = {**state, **self.state[parameter]}, False
            new[parameter] = state
        if is_new and (made := self._new_state(group, parameter, choice, shapes)):
            state = new[parameter] = {**state, **made}  # beside what a user may have there
        elif made := beside_of(parameter, choice.rule.beside, state):
            self._make_loaded(parameter, made)
            state = new[parameter] = {**state, **made}
            if not self._has_warned and float(state.get("step", 1.0)) > 0.0:
                self._has_warned = True
                what = "begins at the weight, which is not the one that it was made for"
                warnings.warn(f"{where}: {' and '.join(made)} of {name} {what}", stacklevel=2)
        elif "step" in numbers and not self._counts_updates and state.get("step") is None:
            # It has been updated, who knows how often.
            state = new[parameter] = {**state, "step": single(1.0)}
        if choice.sleeps and state.get(LAST.name) is None:
            last = self._new_last(parameter, int(state["step"]))
            # Whoever saves states by the names of those that are there asks for both.
            scalars = torch.zeros(SLEEP, len(choice.rule.hp) + 1)
            state = new[parameter] = {**state, LAST.name: last, SCALARS: scalars}
        self._check_complete(name, state, roles)
        if self._files is not None:
            self._files.note(parameter, name, group, choice)
        own = parameter, name, state, is_new, k, asked, choice, shapes, numbers
        return CheckedParameter(*own) if is_active else None

    def _check_complete(self, name: str, state: Mapping[str, Any], roles: Sequence[str]) -> None:
        """Raise if a state lacks some of its tensors: they would begin anew beside old ones."""
        missing = [role for role in roles if state.get(role) is None]
        if missing:
            fix = "; the state is of another optimizer or other options"
            where, expected = type(self).__name__, ", ".join(roles)
            wrong = f"lacks {', '.join(map(repr, missing))}"
            reject(RuntimeError, where, f"state of {name}", wrong, expected, [*state], fix)

    def _check_shapes(
        self, group: Group, keys: Iterable[tuple[Tensor, Any]], saved: Mapping[Any, Any]
    ) -> None:
        """Refuse states of elements in the place of those of rows, the other way round, and those
        of another shape of tables whose rows sleep.
        """
        choice = self._choice(group)
        for parameter, key in keys:
            if choice.rule.is_elementwise and LAST.name not in saved.get(key, {}):
                continue  # PyTorch lets shapes be, and so does a step that finds them right
            for role, shape in self.shapes(choice, parameter).items():
                state = saved.get(key, {}).get(role)
                if isinstance(state, Tensor) and tuple(state.shape) != shape:
                    label = f"state {role!r} of parameter {key}"
                    found = tuple(state.shape)
                    reject(
                        ValueError, type(self).__name__, label, "has a wrong shape", shape, found
                    )

    def _check(
        self, group: Group, choice: RuleChoice, name: str, parameter: Tensor, gradient: Any
    ) -> bool:
        """Raise if the parameter cannot be stepped; returns whether this step updates it."""
        where = type(self).__name__
        check_parameter(where, name, local(parameter))
        rule, states = choice.rule, dict.fromkeys(choice.states, 0.0)
        check_rule(where, rule, states, group["sparse"], couples=choice.couples)
        check_compiled(where, rule, (DTYPES[parameter.dtype],))
        check_rounding(where, group, rule, name, parameter)
        if self.skip_nonfinite and is_part_of_table(parameter):
            why = "the other processes would not skip the step"
            raise RuntimeError(f"{where}: skip_nonfinite takes no part of a table: {why}")
        if is_row_sparse(gradient):
            if not self._takes_sparse:
                raise RuntimeError(f"{where} does not support sparse gradients")
            if choice.touched_only is None:
                fix = "sparse='touched' (the rows that occur) or sparse='all' (every row)"
                raise RuntimeError(f"{where} does not support sparse gradients without {fix}")
            if group["sparse"] == "catch_up" and not choice.sleeps:
                wrong, expected = "does not fit sparse='catch_up'", "a contiguous table on the host"
                reject(RuntimeError, where, name, wrong, expected, "another")
        self._check_sleep(group, choice, name, parameter)
        if parameter.is_cuda and choice.rule.is_two_stage and choice.rule.takes:
            fix = "fusestep.nn has one that runs there"
            raise RuntimeError(f"{where} does not support parameters on CUDA devices: {fix}")
        if local(parameter) is not parameter:
            check_cuts(where, name, parameter, rule.on(tuple(parameter.shape)))
        if choice.rule.is_row_wise:
            check_rows(where, name, parameter)
        return True

    def _check_sleep(  # noqa: B027
        self, group: Group, choice: RuleChoice, name: str, parameter: Tensor
    ) -> None:
        """Refuse what rows that sleep cannot have."""

    @abstractmethod
    def _new_last(self, parameter: Tensor, step: int) -> Tensor:
        """The last step of each row of a table that begins to sleep."""

    def _new_step(self) -> Any:
        return single(0.0)

    def _new_state(
        self, group: Group, parameter: Tensor, choice: RuleChoice,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The state of a parameter that has none; ``shapes`` are those of it, if they are known."""
        made = {"step": self._new_step()} if self._counts(group) else {}
        made.update({name: single(x) for name, x in self.numbers(group).items()})
        dtype, shapes = state_dtype_of(group), shapes or self.shapes(choice, parameter)
        if self._maker is not None:
            for role, value in made.items():
                made[role] = self._made(parameter, role, torch.as_tensor(value))
        rule = choice.rule.on(tuple(parameter.shape))
        for (role, shape), state in zip(shapes.items(), rule.states, strict=True):
            make = self._making(parameter, role)
            if state.per != "element":
                own = self._dtype_of(state, parameter, dtype)
                value = self.initial(role, group)
                if make is not None:
                    made[role] = tensor_of(make(shape, NUMBERS[own or parameter.dtype], value))
                else:
                    made[role] = filled(parameter, shape, value, own or parameter.dtype)
            elif role != COPY.name:
                initial = self.initial(role, group)
                made[role] = element_state(parameter, state, initial, dtype, make)
        return made

    def _check_maker(self, group: Group) -> None:
        """Refuse `states_in` for a class whose states it cannot make."""
        has_states = any(self.state.get(p) for p in group["params"])
        if has_states or self.method(group).rule.scope == "step":
            where, wrong = type(self).__name__, "cannot make its states"
            reject(ValueError, where, "states_in", wrong, "another class", where)

    def _made(self, parameter: Tensor, role: str, like: Tensor) -> Tensor:
        """A state where `states_in` says, of a shape; a single number begins so."""
        initial, dtype = 0.0, like.dtype
        if like.dim() == 0:
            initial = like.item()
            if parameter.dim() or role == "step":
                dtype = torch.float32
        make = self._making(parameter, role)
        assert make is not None
        return tensor_of(make(tuple(like.shape), NUMBERS[dtype], initial))

    def _make_loaded(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Move states that were loaded to where `states_in` says, if it does."""
        for role, x in [*state.items()] if self._maker is not None else ():
            loaded = torch.as_tensor(x)
            state[role] = self._made(parameter, role, loaded).copy_(loaded)

    def _making(self, parameter: Tensor, role: str) -> Making | None:
        """The function that makes a state of a parameter; None where no `states_in` says it."""
        if self._maker is None:
            return None
        name = name_of(self.param_groups, parameter)
        if self._files is not None:
            name = self._files.owner_of(parameter, name)
        where = type(self).__name__
        if is_part(parameter) or parameter.is_cuda:
            expected = "whole parameters on the host, as states_in needs them"
            reject(RuntimeError, where, name, "is elsewhere", expected, "a device or processes")
        return partial(made_by, self._maker, where, f"{role}.{name}")

    def _dtype_of(self, state: State, parameter: Tensor, asked: Any) -> Any:  # noqa: ARG002
        """The dtype of a new state that is not one of elements."""
        return wide_dtype(state, parameter.dtype)
