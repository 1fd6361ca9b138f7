"""RoundedOptimizer: weights of 16 bits, and what lies beside them so that no update is lost."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from ...kernels.keeping import (
    COPY,
    KAHAN,
    KEEPINGS,
    MASTER,
    MOST_OF_REMAINDER,
    STOCHASTIC,
    whole_weight,
)  # fmt: skip
from ...kernels.quiet import quiet
from ...kernels.rule import Keeping, Rule
from ...kernels.state import State
from ...ops.runtime import check
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ..base.arguments import Fixed, seed
from ..base.checkpoint import as_state
from ..base.groups import Groups, ParameterOptions
from ..base.parameter import Parameter, assign
from ..base.stateful import StatefulOptimizer, States


def _way_of_rounding(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in KEEPINGS:
        reject(ValueError, where, name, "is unknown", tuple(KEEPINGS), value)
    return value


class RoundedOptimizer(StatefulOptimizer):
    """The part of `FusedOptimizer` that knows how each parameter is kept."""

    rounding = Fixed(_way_of_rounding)
    keepings: tuple[Keeping | None, ...]  # how each parameter is kept
    _rule: Rule
    _seed: np.ndarray  # int64 (1,): of random bits
    _stays_on_host: bool
    _may_differ: bool  # whether masters and remainders may make other weights than there are

    @abstractmethod
    def _derive(self) -> None:
        """Make anew all that is no part of the state."""

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
        # States are memory of their own: parameters and copies are what users give.
        if COPY in self.keepings:
            arrays = [o.parameter.array for o in groups.options]
            names = [f"parameter {o.parameter.name or i!r}" for i, o in enumerate(groups.options)]
            copies = [o.copy for o in groups.options if o.copy is not None]
            names += ["an array of copies"] * len(copies)
            check.no_overlap(self._name, names, [*arrays, *copies])

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
        self._seed[0] = seed(where, name, value)

    @property
    def copies(self) -> tuple[Any, ...]:
        """The arrays of 16 bits that a step writes beside the parameters; None where there is none.

        Those of the groups; a copy of the optimizer has copies of them. No part of the state.
        """
        copies = self._states.get(COPY.name, (None,) * len(self.parameters))
        return tuple(x.native() if isinstance(x, DeviceArray) else x for x in copies)

    # State

    def _states_beside(self, i: int) -> tuple[State, ...]:
        return (*super()._states_beside(i), *self._kept[i])

    def _new_state(self, state: State, i: int) -> Any:
        is_copy = state in COPY.beside
        return self._groups.options[i].copy if is_copy else super()._new_state(state, i)

    def _state_dtype_of(self, i: int) -> np.dtype[Any] | None:
        # Moments of 16 bits would forget what the master has learnt to keep.
        is_wide = self._state_dtype is None and self.keepings[i] is MASTER
        return np.dtype(np.float32) if is_wide else self._state_dtype

    def _saved_states(self) -> States:
        return {role: arrays for role, arrays in self._states.items() if role != COPY.name}

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
        given, masters = as_state(self._name, state), self._beside(MASTER)
        missing = [name for name in self._beside_by_name() if name not in given]
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
        for name, array in self._beside_by_name().items():
            if name not in state:
                state[name] = np.zeros(array.shape, array.dtype)
        if STOCHASTIC in self.keepings:  # of an optimizer that rounded in another way
            state.setdefault("rounding_seed", self._seed)
        return super()._completed(state)

    def _beside_by_name(self) -> dict[str, Any]:
        """What lies beside the weights, by its names in states; copies are in none."""
        return {
            self._state_name(state.name, str(p.name)): self._states[state.name][i]
            for i, p in enumerate(self.parameters)
            for state in self._kept[i]
            if state.name != COPY.name and self._states[state.name][i] is not None
        }

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
        self._states = {role: own for role, own in self._states.items() if role not in kept}
        self.keepings = (None,) * len(self.parameters)
        self._derive()
        return wholes

    @quiet
    def _begin_at_weights(self, *, warns: bool = True) -> None:
        """Let masters and remainders that make other weights than there are begin at these."""
        self._may_differ = False
        for keeping in (MASTER, KAHAN):
            name = keeping.beside[0].name
            for p, beside in self._beside(keeping):
                weight, found = _on_host(p.array), _on_host(beside)
                made, anew = found, weight
                if keeping is KAHAN:
                    anew, part = np.zeros_like(weight), np.float32(MOST_OF_REMAINDER)
                    made = weight.astype(np.float32) + part * found.astype(np.float32)
                rounded = made.astype(weight.dtype)
                differs = (rounded != weight) & ~(np.isnan(rounded) & np.isnan(weight))
                if not differs.any():
                    continue
                assign(beside, np.where(differs, anew.astype(found.dtype), found))
                if warns:
                    label, warns = self._state_name(name, str(p.name)), False
                    what = "begins at the weight, which is not the one that it was made for"
                    warnings.warn(f"{self._name}: {label} {what}", stacklevel=5)

    def _beside(self, keeping: Keeping) -> list[tuple[Parameter, Any]]:
        """The parameters that are kept in a way, and what lies beside each."""
        states = self._states.get(keeping.beside[0].name, ())
        each = zip(self.parameters, self.keepings, states, strict=False)
        return [(p, x) for p, own, x in each if own is keeping and x is not None]


def _on_host(array: Any) -> np.ndarray:
    found: np.ndarray = array.numpy() if isinstance(array, DeviceArray) else array
    return found
