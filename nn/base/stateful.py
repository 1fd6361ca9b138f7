"""StatefulOptimizer: states and a count of updates for each parameter, and how it is kept."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.keeping import (
    COPY,
    KEEPINGS,
    MASTER,
    STOCHASTIC,
    begun_anew,
    whole_weight,
)  # fmt: skip
from ...kernels.quiet import quiet
from ...kernels.rule import Keeping, Rule
from ...kernels.state import PARAMETER, State
from ...kernels.storage import STORAGES, state_storage
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from .arguments import MOST_STEPS, Fixed
from .arguments import seed as checked_seed
from .checkpoint import as_state, steps_done
from .file_set import maker_of_states
from .groups import Groups, ParameterOptions
from .optimizer import Optimizer
from .parameter import Parameter, assign, at_line, writable

LAST = State("last_step", "row", dtype=np.int32)
"""The step that each row has taken last: int32 ``[N]``."""
States = dict[str, tuple[Any, ...]]
"""By role, one array for each parameter, or None for a parameter without this role."""


def _way_of_rounding(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in KEEPINGS:
        reject(ValueError, where, name, "is unknown", tuple(KEEPINGS), value)
    return value


class StateOfEach(property):
    """An attribute with a state of each parameter that has it."""

    def __init__(self, role: str, doc: str) -> None:
        super().__init__(lambda optimizer: optimizer._state(role))
        self.__doc__ = doc

    if TYPE_CHECKING:

        def __get__(self, _: Any, owner: Any = None, /) -> tuple[np.ndarray, ...]: ...  # type: ignore[override]


class StatefulOptimizer(Optimizer):
    """An optimizer that keeps arrays for each parameter and counts its updates.

    What lies beside a weight of 16 bits, so that no update is lost, is a state of it. ``states``
    declares each role of the rule; a ``state_dtype`` of None takes each parameter's. ``base`` are
    the arguments of `Optimizer`.
    """

    rounding = Fixed(_way_of_rounding)
    keepings: tuple[Keeping | None, ...]  # how each parameter is kept
    sparse_update: str | None
    _rule: Rule
    _seed: np.ndarray  # int64 (1,): of random bits
    _stays_on_host: bool
    _may_differ: bool  # whether masters and remainders may make other weights than there are

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

    @abstractmethod
    def _derive(self) -> None:
        """Make anew all that is no part of the state."""

    # How parameters are kept

    def _check_groups(self, groups: Groups) -> None:
        """Find how each parameter is kept, and refuse ways that do not fit it or the rule."""
        self.keepings = tuple(map(self._keeping_of, groups.options))
        for i, (option, keeping) in enumerate(zip(groups.options, self.keepings, strict=True)):
            if keeping is None:
                continue
            way = "copies" if keeping is COPY else f"rounding={keeping.name!r}"
            p, wrong = option.parameter, f"does not fit {way}"
            label = f"parameter {p.name or i!r}"
            if self._rule.lines or self._rule.matrix:
                expected, got = "'nearest': it does not fit a rule on matrices", way
                reject(ValueError, self._name, "rounding", "is impossible", expected, got)
            if keeping is not COPY and p.dtype.itemsize != 2:
                reject(ValueError, self._name, label, wrong, "float16 or bfloat16", p.dtype)
            if keeping is STOCHASTIC and p.is_on_device and not self._stays_on_host:
                reject(ValueError, self._name, label, wrong, "the host", "a CUDA device")
        super()._check_groups(groups)

    def _keeping_of(self, option: ParameterOptions) -> Keeping | None:
        rounding: str = self.rounding
        if option.rounding is not None:
            rounding = _way_of_rounding(self._name, "rounding of a group", option.rounding)
        if option.copy is None:
            return KEEPINGS[rounding]
        if rounding != "nearest":
            wrong = "excludes copies"
            reject(ValueError, self._name, f"rounding={rounding!r}", wrong, "'nearest'", "both")
        return COPY

    @property
    def _kept(self) -> list[tuple[State, ...]]:
        """The states that lie beside each parameter."""
        return [keeping.beside if keeping else () for keeping in self.keepings]

    @property
    def rounding_seed(self) -> int:
        """The seed of ``rounding="stochastic"``, an int from 0 to 2**63 - 1; 0 in the beginning.

        A part of the state. The random bits of an element in an update follow from this seed, the
        name of its parameter, the number of the update, and its place in the parameter, whatever
        the number of threads.

        Raises:
            TypeError, ValueError: another value is assigned, or one with another ``rounding``.
        """
        return int(self._seed[0])

    @rounding_seed.setter
    def rounding_seed(self, value: int) -> None:
        where, name = self._name, "rounding_seed"
        if STOCHASTIC not in self.keepings:
            wrong, got = "is of no use", f"rounding={self.rounding!r}"
            reject(ValueError, where, name, wrong, f"rounding={STOCHASTIC.name!r}", got)
        self._seed[0] = checked_seed(where, name, value)

    @property
    def copies(self) -> tuple[Any, ...]:
        """The arrays of 16 bits that a step writes beside the parameters; None where there is none.

        Those of the groups; a copy of the optimizer has copies of them. No part of the state.
        """
        copies = self._states.get(COPY.name, (None,) * len(self.parameters))
        return tuple(x.native() if isinstance(x, DeviceArray) else x for x in copies)

    # States

    @quiet
    def _new_states(self, states: Sequence[State]) -> States:
        """Initial arrays of each role, for each parameter that has it: first those of the rule."""
        sleeping = (LAST,) if self.sparse_update == "catch_up" else ()
        beside = [(*sleeping, *kept) for kept in self._kept]
        names, more = {state.name for state in states}, dict.fromkeys(chain.from_iterable(beside))
        for name in (state.name for state in more if state.name in names):
            wrong, expected = f"has a state {name!r}", "another name beside this rounding"
            reject(ValueError, self._name, "rule", wrong, expected, name)
        return {
            state.name: tuple(
                self._new_state(state, i) if state in (*states, *states_beside) else None
                for i, states_beside in enumerate(beside)
            )
            for state in (*states, *more)
        }

    def _new_state(self, state: State, i: int) -> Any:
        if state in COPY.beside:
            return self._groups.options[i].copy
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
        asked = self._state_dtype and STORAGES[self._state_dtype]
        if asked is None and self.keepings[i] is MASTER:
            # Moments of 16 bits would forget what the master has learnt to keep.
            asked = STORAGES[np.dtype(np.float32)]
        return state_storage(state, STORAGES[self.parameters[i].dtype], asked).dtype

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
        for role, of_role in states.items():
            names += [f"state {role!r} of {p.name!r}" for p in self.parameters]
            arrays += of_role
        pairs = [(n, a) for n, a in zip(names, arrays, strict=True) if a is not None]
        check.no_overlap(self._name, [n for n, _ in pairs], [a for _, a in pairs])

    def _states_of_each(self) -> list[tuple[Any, ...]]:
        """The states of each parameter, in the order of the roles."""
        return [self._states_at(i) for i in range(len(self.parameters))]

    def _states_at(self, i: int) -> tuple[Any, ...]:
        """The states of parameter ``i`` that a step reads and writes: all but last steps."""
        each = ((role, arrays[i]) for role, arrays in self._states.items())
        return tuple(array for role, array in each if array is not None and role != LAST.name)

    def _state(self, role: str) -> tuple[Any, ...]:
        """One role of every parameter that has it."""
        return tuple(array for array in self._states[role] if array is not None)

    def _saved_states(self) -> States:
        """The arrays that are part of the state, by role."""
        return {role: arrays for role, arrays in self._states.items() if role != COPY.name}

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
        if STOCHASTIC in self.keepings:
            arrays["rounding_seed"] = self._seed
        return arrays

    def _derived_state(self, step: int) -> dict[str, np.ndarray]:  # noqa: ARG002
        """MindSpore's arrays that follow from options and steps: written, and checked when read."""
        return {}

    def _empty_states(self) -> set[str]:
        """Names of arrays that MindSpore keeps and that hold nothing to resume from."""
        return set()

    def load_state_dict(self, state: Mapping[str, Any], *, from_masters: bool = False) -> None:
        """Take over a `state_dict`, after checking all of it (`Optimizer.load_state_dict`).

        A state without any ``step.<parameter>`` (as MindSpore writes it) is taken to have updated
        every parameter ``global_step`` times. Without last steps of rows, none sleeps in it. What
        lies beside the weights may be missing, as in a state of an optimizer that rounds to the
        nearest: it begins anew, with one warning.

        Args:
            state: as `Optimizer.load_state_dict`; rows of it may sleep with
                ``sparse_update="catch_up"`` alone.
            from_masters: parameters become their masters, rounded. By default the weights stay, and
                a master that makes another one begins at it.

        Raises:
            KeyError, TypeError, ValueError: as `Optimizer.load_state_dict`, or there are no masters
                for ``from_masters``. Nothing has changed then.
        """
        check.flag(self._name, "from_masters", from_masters)
        given, beside = as_state(self._name, state), self._beside()
        missing = [name for name, *_ in beside if name not in given]
        masters = [(p, x) for _, keeping, p, x in beside if keeping is MASTER]
        if from_masters and (missing or not masters):
            wrong, expected = "is impossible", "a state with masters, of weights beside masters"
            reject(ValueError, self._name, "from_masters", wrong, expected, missing[:1] or "none")
        super().load_state_dict(given)
        self._may_differ = True
        for p, master in masters if from_masters else ():
            assign(p.array, _on_host(master).astype(p.dtype))
        if missing:
            self._begin_at_weights(warns=False)
            warnings.warn(f"{self._name}: {missing[0]} begins at the weight", stacklevel=2)

    def _completed(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, _, _, array in self._beside():
            if name not in state:
                state[name] = np.zeros(array.shape, array.dtype)
        if STOCHASTIC in self.keepings:  # of an optimizer that rounded in another way
            state.setdefault("rounding_seed", self._seed)
        for name in self._empty_states() & state.keys():
            del state[name]
        derived = {name: state.pop(name, None) for name in self._derived_state(0)}
        if "global_step" in state:
            step = steps_done(self._name, state["global_step"])
            self._check_derived(derived, step)
            # MindSpore cannot leave a parameter out of a step: its checkpoints have one count for
            # all of them.
            if not any(name.startswith("step.") for name in state):
                state.update({f"step.{p.name}": np.array([step]) for p in self.parameters})
        return state

    def _beside(self) -> list[tuple[str, Keeping, Parameter, Any]]:
        """Each master and remainder: its name in states, how the weight is kept, and itself."""
        return [
            (self._state_name(state.name, str(p.name)), keeping, p, self._states[state.name][i])
            for i, (p, keeping) in enumerate(zip(self.parameters, self.keepings, strict=True))
            if keeping is not None and keeping is not COPY
            for state in keeping.beside
            if self._states[state.name][i] is not None
        ]

    def widen(self) -> list[np.ndarray]:
        """Go on without rounding to 16 bits: with whole weights in new arrays, which are returned.

        The parameters are on the host, and no other optimizer's.
        """
        wholes = []
        for i, (p, keeping) in enumerate(zip(self.parameters, self.keepings, strict=True)):
            beside = [self._states[state.name][i] for state in self._kept[i]]
            whole = whole_weight(keeping, p.array, beside)
            p.rebind(whole.copy())
            wholes.append(whole)
        kept = {state.name for state in chain.from_iterable(self._kept)}
        self._states = {role: of_role for role, of_role in self._states.items() if role not in kept}
        self.keepings = (None,) * len(self.parameters)
        self._derive()
        return wholes

    @quiet
    def _begin_at_weights(self, *, warns: bool = True) -> None:
        """Let masters and remainders that make other weights than there are begin at these."""
        self._may_differ, differing = False, []
        for name, keeping, p, beside in self._beside():
            anew = begun_anew(keeping, _on_host(p.array), _on_host(beside))
            if anew is not None:
                assign(beside, anew)
                differing.append(name)
        if differing and warns:
            what = "begins at the weight, which is not the one that it was made for"
            warnings.warn(f"{self._name}: {differing[0]} {what}", stacklevel=5)

    def _check_derived(self, derived: Mapping[str, Any], step: int) -> None:
        for name, expected in self._derived_state(step).items():
            where, label, value = self._name, f"state {name!r}", derived[name]
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


def _on_host(array: Any) -> np.ndarray:
    here: np.ndarray = array.numpy() if isinstance(array, DeviceArray) else array
    return here


def _state_dtype(where: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    with suppress(TypeError):
        dtype: np.dtype[Any] = np.dtype(value)
        if dtype in STORAGES:
            return dtype
    wrong = "has a wrong dtype"
    return reject(TypeError, where, "state_dtype", wrong, check.FLOAT_NAMES, repr(value))
