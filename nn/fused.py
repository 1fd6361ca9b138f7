"""FusedOptimizer, the base of optimizers with one update rule: step, counters and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ..kernels.cpu.dense import all_finite
from ..kernels.formula import Formula
from ..kernels.keeping import STOCHASTIC
from ..kernels.rule import Rule
from ..kernels.rules.gradient import CLIP
from ..kernels.state import State
from ..kernels.tables import has_rows
from ..ops.runtime import check, pending
from ..ops.runtime.device import DeviceArray
from ..ops.runtime.errors import reject
from .base.arguments import Checked, Fixed, clip_limit, gradients_of, next_step
from .base.groups import FUSED_KEYS
from .base.numbers import FLOATS, check_place, item, on_device
from .base.own_rules import check_compiled, check_rule, check_scalars, checked_formula, is_own
from .base.parameter import Parameter
from .base.stateful import States
from .engine.batch import by_storage
from .engine.conditioning import Clipping, Conditioning
from .engine.device import Device, are_finite
from .engine.host import Host
from .engine.layout import Gradients
from .engine.offload import Offload
from .engine.plan import Classes, Plan, StepAgreement, StepMethod, Stepper, calls_of
from .engine.reader import GradientReader
from .engine.tables import LAST
from .table_rows import TableOptimizer

SPARSE_UPDATES = ("lazy", "dense_equivalent", "catch_up")
_FLAGS = (*FLOATS, np.dtype(np.bool_))


class SparseUpdate(Checked):
    """The option of what row-sparse gradients update; rows that sleep keep it fixed."""

    def accepted(self, instance: Any, value: Any) -> Any:
        """The checked value.

        Raises:
            ValueError: it is unknown, or becomes or was ``"catch_up"`` after construction.
        """
        before = vars(instance).get(self._name, value)
        if value != before and "catch_up" in (value, before):
            wrong, expected = "cannot change", f"{before!r}, as at construction: rows may sleep"
            reject(ValueError, instance._name, self._name, wrong, expected, repr(value))
        return super().accepted(instance, value)


def _sparse_update(where: str, name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value in SPARSE_UPDATES):
        reject(ValueError, where, name, "is unknown", SPARSE_UPDATES, value)
    return value


class FusedOptimizer(TableOptimizer, ABC):
    """The base class of optimizers whose step is an update rule, which a subclass gives.

    One kernel call updates all dense tensors of a dtype (two if the rule measures them first), and
    one call updates all tables with row-sparse gradients; on the host or on a CUDA device. A
    subclass defines `formula`.

    Args:
        parameters: as in `Optimizer`. A group may have ``rounding``, and ``copies``: an array of
            float16 or bfloat16, or None, for each of its float32 parameters, of the same shape and
            on the same device. A step writes it with the parameter, rounded to the nearest. Copies
            are not in `state_dict`.
        rule: the update rule, a constant of a module.
        states: the names of its states in checkpoints, in its order, and their initial values; by
            default as the rule declares them.

    Norms and decay are those of the whole weight with every ``rounding``, whose random bits follow
    from `rounding_seed`. After `load_state_dict` and a new ``Parameter.data``, a master that makes
    another weight begins at that weight, with one warning.

    ``clipvalue`` and ``clipnorm`` are Keras's, exclude each other, and are fixed at construction. A
    gradient is centralized, divided by the loss scale and clipped; then a coupled weight decay is
    added. Duplicate rows of a row-sparse gradient are summed first.

    Raises:
        TypeError: a kind does not fit, there is no `formula`, or the rule cannot be compiled or
            returns something else than floats.
        ValueError: a value does not fit, options exclude each other, or the rule returns too few or
            too many, or can raise.

    >>> import numpy as np
    >>> def update(w, g, hp):
    ...     return w - hp.lr * g
    >>> def scalars(real, lr, decay, step, constants, powers):
    ...     return (real(lr / step),)
    >>> DESCENT = Rule(update, (), ("lr",))
    >>> class Descent(FusedOptimizer):
    ...     def formula(self):
    ...         return Formula(scalars)
    >>> w = np.ones(2, np.float32)
    >>> Descent(0.5, [w], rule=DESCENT)((np.array([1, 2], np.float32),))
    (True,)
    >>> print(w)
    [0.5 0. ]
    """

    clipvalue = Fixed(clip_limit)
    clipnorm = Fixed(clip_limit)
    sparse_update = SparseUpdate(_sparse_update)
    together: StepAgreement | None = None  # with the optimizers of other processes
    numbers: Mapping[str, np.ndarray] = MappingProxyType({})  # states of the optimizer
    reader_type: type[GradientReader] = GradientReader  # a front end may have another
    _group_keys = FUSED_KEYS
    _rate_lag = 0  # a step uses the learning rate of so many steps before
    _looks_at_formula = False  # whether `formula` is a user's
    _known_formula: Formula | None = None  # the last one of a user, checked
    _stays_on_host = False  # whether `target` cannot be changed
    # What refuses learning rates out of the range of a subclass, before every step.
    _check_used_rates: Callable[[Sequence[float]], None] | None = None
    # What errors about row-sparse gradients say of expected and got.
    _rows_need: tuple[str, str | None] = (
        "sparse_update='lazy' or sparse_update='dense_equivalent' at construction",
        None,
    )

    def __init__(
        self, learning_rate: Any, parameters: Any, weight_decay: Any = 0.0, loss_scale: Any = 1.0,
        *, rule: Rule, states: Mapping[str, float] | None = None, use_locking: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
    ) -> None:  # fmt: skip
        self.clipvalue, self.clipnorm = clipvalue, clipnorm
        if self.clipvalue is not None and self.clipnorm is not None:
            wrong, expected = "excludes clipvalue", "at most one of them"
            reject(ValueError, self._name, "clipnorm", wrong, expected, "both")
        self.use_locking = check.flag(self._name, "use_locking", use_locking)
        self.skip_nonfinite = check.flag(self._name, "skip_nonfinite", skip_nonfinite)
        self.sparse_update = sparse_update
        check_rule(self._name, rule, states, self.sparse_update)
        if self.clipvalue is not None:
            check_scalars(self._name, rule, CLIP)
        self.rounding = rounding
        self._rule, self._moved_to_host, self._may_differ = rule, False, False
        super().__init__(
            learning_rate, parameters, weight_decay, loss_scale, states=declared(rule, states),
            state_dtype=state_dtype,
        )  # fmt: skip
        check_compiled(self._name, rule, (p.dtype for p in self.parameters))
        self._check_rows()
        if rule.is_two_stage and self._rows_need is FusedOptimizer._rows_need:
            self._rows_need = "a dense one: the rule measures whole tensors", "a RowTensor"
        self._found_inf: DeviceArray | None = None
        self._skipped, self._seed = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._let_sleep()
        if STOCHASTIC in self.keepings:
            self._seed = self._made("rounding_seed", (1,), np.int64, 0)
        self.numbers = {
            name: self._made(name, x.shape, x.dtype, x) for name, x in self.numbers.items()
        }
        for name, x in {"rounding_seed": self._seed, **self.numbers}.items():
            is_number = bool(np.isfinite(x).all()) and (name != "rounding_seed" or x[0] >= 0)
            check.in_range(self._name, f"state {name!r}", x[0], is_number, "finite, a seed above 0")
        self._derive()
        self._complete_files()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._looks_at_formula = is_own(cls.formula)

    def _meaning(self) -> dict[str, Any]:
        kept = sorted({keeping.name if keeping else "nearest" for keeping in self.keepings})
        own = {"rule": self._rule.update.__name__, "sparse_update": self.sparse_update}
        return super()._meaning() | own | {"rounding": kept, "state_dtype": str(self._state_dtype)}

    def _common_device(self) -> int | None:
        device = super()._common_device()
        if not (device is None or self.clipnorm is None or self._stays_on_host):
            wrong, expected = "is measured on the host", "parameters that live there"
            reject(ValueError, self._name, "clipnorm", wrong, expected, f"CUDA device {device}")
        return device

    def _check_rows(self) -> None:
        """Refuse parameters without rows, or with rows without elements, if rows are measured."""
        for p in self.parameters if self._rule.is_row_wise else ():
            if not has_rows(p.shape):
                label, expected = f"parameter {p.name!r}", "at least 1 axis, and rows with elements"
                reject(ValueError, self._name, label, "has no rows", expected, p.shape)

    @abstractmethod
    def formula(self) -> Formula:
        """The formula that gives scalars from the learning rate and the number of the update."""

    def _method(self) -> StepMethod:
        """The method of a step, with the options of now."""
        formula = self.formula()
        if self._looks_at_formula:
            formula = checked_formula(self._name, self._rule, formula, self._known_formula)
            self._known_formula = formula
        return tuple.__new__(StepMethod, (formula, (), {}))  # no call of Python

    # Objects that are not part of the state, and are made anew in a copy

    def _derive(self) -> None:
        self._host = Host(self._name, self._global_step, self._steps)
        self._classes = Classes(self._name, self._groups.options)
        self._condition()
        self._read_anew()

    def _read_anew(self) -> None:
        """Make anew all that depends on the states and their addresses, which have changed."""
        self._stepper: Stepper = self._host
        self._bound = {}
        if self._device is not None:
            self._stepper = (Offload if self._works_on_host else Device)(self._host)
        centralized = [i for i, option in enumerate(self._groups.options) if option.centralize]
        rules = [self._rule.on(p.shape) for p in self.parameters]
        rules = [
            rule.kept(keeping) if keeping else rule
            for rule, keeping in zip(rules, self.keepings, strict=True)
        ]
        self._reader = self.reader_type(
            self._name, self.parameters, self._states_of_each(), rules, self._classes.of,
            self.sparse_update, self._rows_need, centralized,
        )  # fmt: skip

    def _condition(self) -> None:
        make: Callable[..., Conditioning] = Conditioning
        if self.clipvalue is not None or self.clipnorm is not None:
            make = partial(Clipping, bound=self.clipvalue, limit=self.clipnorm)
        coupled = not self._rule.decays
        self._conditioning = make(self._groups.options, self._loss_scale, coupled=coupled)

    # The step

    def __call__(self, gradients: Sequence[Any]) -> tuple[bool, ...]:
        """One step; gradients in the order of `parameters`.

        Args:
            gradients: a tuple or list of arrays, `RowTensor`, lists of `RowTensor`, or None
                (that parameter is skipped, its own count of updates included).

        Returns:
            A True for each parameter.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: a gradient does not fit, a parameter
                or state has become read-only, a list of learning rates is used up, or a formula
                gives too few or too many scalars, or a NaN.
            OverflowError: ``global_step`` has reached the end of int32.
            Nothing has changed then.
        """
        n = len(self.parameters)
        if self.together is None and (type(gradients) is not tuple or len(gradients) != n):
            gradients = gradients_of(self._name, gradients, n)
        return self.construct(gradients)

    def construct(self, gradients: Any) -> tuple[bool, ...]:
        """The step itself; with several processes the number of gradients is checked here."""
        return self._step_with(gradients, self._conditioning)

    def _step_with(
        self, gradients: Any, conditioning: Conditioning, *, is_alone: bool = False
    ) -> tuple[bool, ...]:
        """Take the step that `_plan` gives, agreed with other processes if there are any."""
        if self.use_locking and not is_alone:
            with self._stepper.exclusive():
                return self._step_with(gradients, conditioning, is_alone=True)
        if self.together is None:
            plan = self._plan(gradients, conditioning)
        else:
            planned = partial(self._plan, gradients, conditioning)
            plan = self.together.agreed(planned, self._step)
        if plan is None:
            self._skipped[0] += 1
        else:
            self._stepper.run(plan)
        return (True,) * len(self.parameters)

    def _plan(self, gradients: Any, conditioning: Conditioning) -> Plan | None:
        """The plan of the step, read and checked; None for a step that is to be skipped.

        All errors come from here, before anything has been written.
        """
        method = self._method()
        if self.together is not None:
            gradients = gradients_of(self._name, gradients, len(self.parameters))
            self.check_kept(gradients)
        if self._files is not None:
            self._files.check_alone()
        if self._device is not None and self._reader.have_moved:
            self._follow_memory()
        if self._may_differ:
            self._begin_at_weights()
        classes = self._classes
        step = next_step(self._name, self._global_step)
        rate_step = max(0, step - self._rate_lag)
        if rate_step < step:
            classes.rates.at(step)  # raises if a list has no value for this step
        rates, decays = classes.at(rate_step, step)
        if self._check_used_rates is not None:
            self._check_used_rates(rates)
        given = self._reader.read_like_last(gradients) or self._reader.read(
            gradients, lambda i: conditioning.centralized_with(i, decays[classes.of[i]])
        )
        if self.together is not None:  # a bad index has to be found before processes agree
            self._reader.check_indices(given)
        # Decided after reading: a gradient that does not fit is an error in a skipped step too.
        if (self.skip_nonfinite or self._found_inf is not None) and self._is_skipped(given):
            return None
        touched_only = self.sparse_update != "dense_equivalent"
        calls = calls_of(
            given, method, conditioning, classes, (rates, decays), self._steps, self._seed,
            touched_only=touched_only,
        )  # fmt: skip
        behind = self._behind(calls) if self._missed is not None else ()
        options = touched_only, self.skip_nonfinite, self.use_locking
        found = given, method, conditioning, rates, decays, *options, calls, behind
        return tuple.__new__(Plan, found)  # no call of Python

    def _follow_memory(self) -> None:
        """Take over where parameters and states lie whose memory a framework has exchanged.

        Raises:
            TypeError, ValueError, RuntimeError: it has another form, or is shared, or gone.
        """
        arrays = [_followed("Parameter", "data", p.array) for p in self.parameters]
        names = [p.name for p in self.parameters]
        states = {
            role: tuple(
                _followed(self._name, f"state {role!r} of {name!r}", array)
                for name, array in zip(names, of_each, strict=True)
            )
            for role, of_each in self._states.items()
        }
        self._check_no_alias(arrays, states)
        for parameter, array in zip(self.parameters, arrays, strict=True):
            if array is not parameter.array:
                parameter.follow(array)
        self._states, self._may_differ = states, True
        self._read_anew()

    def _is_skipped(self, given: Gradients) -> bool:
        if self.skip_nonfinite and given.layout.n_row_batches and self._device is None:
            self._reader.check_indices(given)  # a bad index is an error in a skipped step too
        return self._has_overflown() or (self.skip_nonfinite and not self._all_finite(given))

    def _has_overflown(self) -> bool:
        """Whether `found_inf` is not 0; the host waits for it."""
        return self._found_inf is not None and item(self._found_inf) != 0.0

    def _all_finite(self, given: Gradients) -> bool:
        """Whether all gradients are finite; on a device the host waits for the answer."""
        if self._device is not None:  # the gradients are there
            return are_finite(given.by_batch, given.arrays)
        return all(all_finite(*arrays) for arrays in by_storage(given.by_batch))

    # Overflow that a loss scaler finds on a device

    @property
    def found_inf(self) -> Any:
        """An array of one element on the device of the parameters, or None.

        Steps in which it is not 0 change nothing and are counted in `skipped_steps`; each waits
        for it. float32, float64 or bool: what a loss scaler has.

        Raises:
            TypeError: what is assigned is no such array.
            ValueError: it has not one element, or lives elsewhere than the parameters.
        """
        return None if self._found_inf is None else self._found_inf.native()

    @found_inf.setter
    def found_inf(self, value: Any) -> None:
        found = None if value is None else on_device(self._name, "found_inf", value, _FLAGS)
        if value is not None and found is None:
            expected, got = "an array on the device of the parameters, or None", type(value)
            reject(TypeError, self._name, "found_inf", "has a wrong type", expected, got.__name__)
        check_place(self._name, "found_inf", found, self._device)
        self._found_inf = found

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped."""
        return int(self._skipped[0])

    # Where it runs

    @property
    def _works_on_host(self) -> bool:
        return self._device is None or self._stays_on_host or self._moved_to_host

    def _move_to(self, target: str) -> None:
        if self._device is None:
            super()._move_to(target)
        if self._stays_on_host or target == "Ascend":
            here = "'CPU': this optimizer works there"
            expected = here if self._stays_on_host else "'CPU' or 'GPU'"
            reject(ValueError, self._name, "target", "is impossible", expected, target)
        # Locks are taken in the order of a step on a device, that of the optimizer first: otherwise
        # two threads could wait for each other.
        with self._stepper.exclusive(), pending.held():
            pending.settle()
            to_host = target == "CPU"
            moved = {
                role: tuple(map(partial(_moved, to_host), self.parameters, states))
                for role, states in self._states.items()
            }
            # Assigned only when all states have been copied: there may be too little memory.
            self._states, self._moved_to_host = moved, to_host
            self._read_anew()

    # State

    def _shape_of(self, state: State, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if state is LAST:
            return shape[:1] or (1,)
        rule = self._rule.on(shape)
        # If matrices have a rule of their own, the optimizer has the states of both rules, and each
        # tensor has the states of the rule for its shape.
        if self._rule.matrix is not None and state not in rule.states:
            return None
        return rule.shape_of(state, shape)

    def take_arrays(
        self, parameters: Sequence[np.ndarray], states: States, global_step: np.ndarray
    ) -> None:
        """Work on these arrays from now on; shapes and dtypes are those of the arrays before.

        Raises:
            ValueError: some share memory. Nothing has changed then.
        """
        self._check_no_alias(parameters, states)
        for parameter, array in zip(self.parameters, parameters, strict=True):
            parameter.rebind(array)
        self._states, self._global_step = states, global_step
        self._derive()

    def forget_addresses(self) -> None:
        """Drop all that was derived from the addresses of parameters: one was rebound."""
        self._reader.forget()
        self._may_differ, self._bound = True, {}

    def __getstate__(self) -> dict[str, Any]:
        # The copied counts are those on the host, which calls on a device may still take back.
        if self._device is not None:
            pending.settle()
        return {name: value for name, value in vars(self).items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._derive()


# Attributes that a copy makes anew. `together` is left out for good: the other processes have no
# such copy, which would wait for them for ever.
_DERIVED = {
    "_bound", "_host", "_known_formula", "_stepper", "_reader", "_classes", "_conditioning",
    "sends_parameters", "together",
}  # fmt: skip


def declared(rule: Rule, states: Mapping[str, float] | None = None) -> tuple[State, ...]:
    """The states of a rule, and of its rule for matrices; with other names and values if given."""
    if states is None:
        matrix_states = rule.matrix.states if rule.matrix else ()
        return tuple(dict.fromkeys((*matrix_states, *rule.states)))
    renamed = zip(rule.states, states.items(), strict=True)
    return tuple(state._replace(name=name, initial=x) for state, (name, x) in renamed)


def _moved(to_host: bool, parameter: Parameter, state: Any) -> Any:
    """A copy of a state on the host or on the device of its parameter; None if there is none."""
    if state is None:
        return None
    return state.numpy() if to_host else parameter.array.holding(state)


def _followed(where: str, name: str, array: Any) -> Any:
    return array.followed(where, name) if isinstance(array, DeviceArray) else array
