"""StatefulOptimizer: states and a count of updates for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.quiet import quiet
from ...kernels.state import PARAMETER, State
from ...kernels.storage import STORAGES, state_storage
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import reject
from .arguments import MOST_STEPS
from .checkpoint import as_state, steps_done
from .file_set import maker_of_states
from .optimizer import Optimizer
from .parameter import Parameter, at_line, writable

States = dict[str, tuple[Any, ...]]
"""By role, one array for each parameter, or None for a parameter without this role."""


class StateOfEach(property):
    """An attribute with a state of each parameter that has it."""

    def __init__(self, role: str, doc: str) -> None:
        super().__init__(lambda optimizer: optimizer._state(role))
        self.__doc__ = doc

    if TYPE_CHECKING:

        def __get__(self, _: Any, owner: Any = None, /) -> tuple[np.ndarray, ...]: ...  # type: ignore[override]


class StatefulOptimizer(Optimizer):
    """An optimizer that keeps arrays for each parameter and counts its updates.

    ``states`` declares each role; a ``state_dtype`` of None takes each parameter's. ``base`` are
    the arguments of `Optimizer`.
    """

    _makes_states = True
    _keeps: tuple[bool, ...] | None = None  # for each parameter, whether its states were kept
    _counts: tuple[str, ...] = ("step.",)  # prefixes of the names of counts in a state

    def __init__(self, *base: Any, states: Sequence[State], state_dtype: Any) -> None:
        self._state_dtype = _state_dtype(self._name, state_dtype)
        self._declared: dict[str, State] = {}
        super().__init__(*base)
        self._states = self._new_states(states)
        self._steps = self._made("step", (len(self.parameters),), np.int64, 0)
        if maker_of_states() is not None and self._works_on_host:
            self._check_no_alias([p.array for p in self.parameters], self._states)
            for step in self._steps.tolist():
                expected = f"from 0 to global_step, {self._step}"
                check.in_range(self._name, "state 'step'", step, 0 <= step <= self._step, expected)

    @quiet
    def _new_states(self, states: Sequence[State]) -> States:
        """Initial arrays of each role, for each parameter that has it."""
        return {
            state.name: tuple(self._new_state(state, i) for i in range(len(self.parameters)))
            for state in states
        }

    def _new_state(self, state: State, i: int) -> Any:
        p, self._declared[state.name] = self.parameters[i], state
        shape, dtype = self._shape_of(state, p.shape), self._dtype_of(state, i)
        if shape is None:
            return None
        initial: Any = state.initial
        if initial == PARAMETER:
            initial = p.array if self._device is None else p.array.numpy()
        if self._works_on_host:
            return self._made(self._state_name(state.name, str(p.name)), shape, dtype, initial)
        if isinstance(initial, np.ndarray):
            return p.array.holding(initial.astype(dtype))
        return p.array.filled_like(initial, dtype, shape)

    def _shape_of(self, state: State, shape: tuple[int, ...]) -> tuple[int, ...] | None:  # noqa: ARG002
        """The shape of a state of a parameter; None where it has none."""
        return shape

    def _dtype_of(self, state: State, i: int) -> np.dtype[Any]:
        """The dtype of a state of parameter ``i``."""
        asked = self._state_dtype_of(i)
        own = STORAGES[self.parameters[i].dtype]
        return state_storage(state, own, asked and STORAGES[asked]).dtype

    def _state_dtype_of(self, i: int) -> np.dtype[Any] | None:  # noqa: ARG002
        """The dtype that was asked for, of the states of parameter ``i``."""
        return self._state_dtype

    def keep_states(self, of: Sequence[bool]) -> None:
        """Give up the states of all parameters but those that are True in ``of``.

        The others must not be given gradients any more.
        """
        # Recorded apart from the states, since an optimizer may have none (plain SGD).
        self._keeps = tuple(of)
        self._states = {
            role: tuple(a if keeps else None for a, keeps in zip(arrays, of, strict=True))
            for role, arrays in self._states.items()
        }

    def check_kept(self, gradients: Sequence[Any]) -> None:
        """Refuse gradients of parameters whose states were given up.

        Raises:
            ValueError: there is one.
        """
        if self._keeps is None:
            return
        for parameter, gradient, keeps in zip(self.parameters, gradients, self._keeps, strict=True):
            if gradient is not None and not keeps:
                what, expected = f"the gradient of {parameter.name!r}", "None"
                wrong, fix = "is for another process", "; call the ShardedStates of the optimizer"
                reject(ValueError, self._name, what, wrong, expected, "a gradient", fix)

    def _check_no_alias(self, parameters: Sequence[Any], states: States) -> None:
        """Refuse arrays of parameters and states that share memory."""
        names = [f"parameter {p.name!r}" for p in self.parameters]
        arrays = [*parameters]
        for role, own in states.items():
            names += [f"state {role!r} of {p.name!r}" for p in self.parameters]
            arrays += own
        pairs = [(n, a) for n, a in zip(names, arrays, strict=True) if a is not None]
        check.no_overlap(self._name, [n for n, _ in pairs], [a for _, a in pairs])

    def _states_of_each(self) -> list[tuple[Any, ...]]:
        """The states of each parameter, in the order of the roles."""
        return [self._states_at(i) for i in range(len(self.parameters))]

    def _states_at(self, i: int) -> tuple[Any, ...]:
        """The states of parameter ``i`` that a step reads and writes."""
        return tuple(a for a in (arrays[i] for arrays in self._states.values()) if a is not None)

    def _state(self, role: str) -> tuple[Any, ...]:
        """One role of every parameter that has it."""
        return tuple(array for array in self._states[role] if array is not None)

    def _saved_states(self) -> States:
        """The arrays that are part of the state, by role."""
        return self._states

    def _state_name(self, role: str, parameter: str) -> str:
        return f"{role}.{parameter}"

    def states_by_name(self, i: int) -> dict[str, Any]:
        """The states of parameter ``i`` themselves, by their names in checkpoints."""
        name, states = str(self.parameters[i].name), self._saved_states().items()
        named = ((self._state_name(role, name), arrays[i]) for role, arrays in states)
        return {label: state for label, state in named if state is not None}

    def state_arrays(self) -> dict[str, Any]:
        """The arrays of `Optimizer.state_arrays`, with the states and counts of each parameter."""
        arrays = super().state_arrays()
        for role, states in self._saved_states().items():
            for parameter, state in zip(self.parameters, states, strict=True):
                if state is not None:
                    arrays[self._state_name(role, str(parameter.name))] = state
        for i, parameter in enumerate(self.parameters):
            arrays[f"step.{parameter.name}"] = self._steps[i : i + 1]
        return arrays

    def _derived_state(self, step: int) -> dict[str, np.ndarray]:  # noqa: ARG002
        """MindSpore's arrays that follow from options and steps: written, and checked when read."""
        return {}

    def _empty_states(self) -> set[str]:
        """Names of arrays that MindSpore keeps and that hold nothing to resume from."""
        return set()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all that a resumed run needs beside the parameters, by MindSpore's names.

        ``step.<parameter>`` is the number of updates of a parameter: those whose gradient was
        None have had fewer than ``global_step``.
        """
        return {**super().state_dict(), **self._derived_state(self._step)}

    @quiet
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, after checking all of it.

        A state without any ``step.<parameter>`` (as MindSpore writes it) is taken to have
        updated every parameter ``global_step`` times.

        Raises:
            KeyError: a name is missing or unknown.
            TypeError: a dtype differs.
            ValueError: a shape differs, or the state was made with other options.
        """
        state = as_state(self._name, state)
        for name in self._empty_states() & state.keys():
            del state[name]
        given = {name: state.pop(name, None) for name in self._derived_state(0)}
        if "global_step" in state:
            step = steps_done(self._name, state["global_step"])
            self._check_derived(given, step)
            # MindSpore cannot leave a parameter out of a step: its checkpoints have one count for
            # all of them.
            if not any(name.startswith("step.") for name in state):
                state.update({f"step.{p.name}": np.array([step]) for p in self.parameters})
        super().load_state_dict(state)

    def _check_derived(self, given: Mapping[str, Any], step: int) -> None:
        for name, expected in self._derived_state(step).items():
            where, label, value = self._name, f"state {name!r}", given[name]
            if value is None:
                continue
            array = adopt(where, label, value)
            if array.dtype.kind not in "iuf":
                reject(TypeError, where, label, "has a wrong dtype", "numbers", array.dtype)
            if array.size != expected.size:
                reject(ValueError, where, label, "has a wrong shape", expected.shape, array.shape)
            if not np.allclose(array, expected, rtol=1e-5, atol=1e-30):
                reject(ValueError, where, label, "is of other options", expected, value)

    def _check_values(self, arrays: Mapping[str, np.ndarray]) -> None:
        super()._check_values(arrays)
        for name in (n for n in arrays if n.startswith(self._counts)):
            expected = f"at least 0, at most {MOST_STEPS}"
            for count in arrays[name].reshape(-1).tolist():
                is_count = 0 <= count <= MOST_STEPS
                check.in_range(self._name, f"state {name!r}", count, is_count, expected)

    def check_rebinding(self, parameter: Parameter, array: Any) -> None:
        """Check a new array of a parameter: it overlaps no state either."""
        super().check_rebinding(parameter, array)
        states = [state for states in self._states_of_each() for state in states]
        names = [f"a state of {self._name}"] * len(states)
        check.no_overlap(self._name, [*names, f"parameter {parameter.name!r}"], [*states, array])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays that arrive in foreign buffers may be read-only.
        state["_steps"] = writable(state["_steps"])
        state["_states"] = {
            role: tuple(None if array is None else at_line(array) for array in arrays)
            for role, arrays in state["_states"].items()
        }
        super().__setstate__(state)


def _state_dtype(where: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    with suppress(TypeError):
        dtype: np.dtype[Any] = np.dtype(value)
        if dtype in STORAGES:
            return dtype
    wrong = "has a wrong dtype"
    return reject(TypeError, where, "state_dtype", wrong, check.FLOAT_NAMES, repr(value))
