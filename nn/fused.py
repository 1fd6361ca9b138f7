"""Optimizers that are one elementwise rule: the step, its counters and its state."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..kernels.cpu.finite import all_finite
from ..kernels.rules.gradient import COUPLED_DECAY, SCALE
from ..kernels.rules.rule import Prologue, Rule
from ..kernels.storage import STORAGES, Storage
from ..ops import check
from ..ops.arrays import RowTensor, address_of, index_error
from ..ops.errors import message
from ..ops.step import RowGradient, dense_step, row_step
from . import gradients as whole
from .layout import Batch, Gradients, Kind, Layout, build_layout, read_gradient, shares_memory
from .optimizer import Optimizer
from .parameter import Parameter

SPARSE_UPDATES = ("lazy", "dense_equivalent")
_KEPT_LAYOUTS = 16


class FusedOptimizer(Optimizer):
    """An optimizer whose step is an update rule: one kernel call for all dense tensors of a
    dtype, and one for all tables with row-sparse gradients.

    A subclass gives the rule and defines `_scalars`.

    Args:
        rule: the update rule; its states become arrays named ``<role>.<parameter>``.
        use_locking: concurrent calls leave parameters, states and counters as some serial
            order of the calls would.
        sparse_update: ``"lazy"``, ``"dense_equivalent"`` or None (row-sparse gradients raise).
        skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing.
        state_dtype: dtype of the states; None takes each parameter's.
        learning_rate, parameters, weight_decay, loss_scale: as `Optimizer`.
    """

    _decay_is_coupled = True

    def __init__(
        self,
        learning_rate: Any,
        parameters: Any,
        weight_decay: Any,
        loss_scale: Any,
        *,
        rule: Rule,
        use_locking: bool,
        sparse_update: str | None,
        skip_nonfinite: bool,
        state_dtype: Any,
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, loss_scale)
        self.use_locking = check.flag(self._name, "use_locking", use_locking)
        self.skip_nonfinite = check.flag(self._name, "skip_nonfinite", skip_nonfinite)
        self.sparse_update = _sparse_update(self._name, sparse_update)
        self.skipped_steps = 0
        self._rule = rule
        dtype = _state_dtype(self._name, state_dtype)
        self._states = {
            role: tuple(np.zeros(p.shape, dtype or p.dtype) for p in self.parameters)
            for role in rule.states
        }
        self._steps = np.zeros(len(self.parameters), np.int64)
        self._class_of, self._classes = self._option_classes()
        self._prologue = self._build_prologue()
        self._forget()

    def _scalars(self, real: Any, lr: float, decay: float, step: int) -> tuple[Any, ...]:
        """The rule's scalars for update ``step`` = 1, 2, ... of a tensor."""
        raise NotImplementedError

    def _option_classes(self) -> tuple[np.ndarray, list[int]]:
        """Parameters that share all options share their scalars.

        Returns the class of each parameter, and a parameter of each class.
        """
        known: dict[Any, int] = {}
        examples: list[int] = []
        class_of = []
        for i, option in enumerate(self._groups.options):
            decay = option.decay if isinstance(option.decay, float) else id(option.decay)
            key = (id(option.rate), type(option.decay), decay, option.centralize)
            if key not in known:
                known[key] = len(known)
                examples.append(i)
            class_of.append(known[key])
        return np.array(class_of), examples

    def _build_prologue(self) -> Prologue:
        options = self._groups.options
        decays = self._decay_is_coupled and any(o.decay != 0.0 for o in options)
        parts = [COUPLED_DECAY] if decays else []
        return tuple(parts + ([SCALE] if self.loss_scale != 1.0 else []))

    def _forget(self) -> None:
        self._layouts: dict[tuple[Kind, ...], Layout] = {}
        self._last: Layout | None = None
        self._lock = threading.Lock()

    # The step

    def __call__(self, gradients: Sequence[Any]) -> tuple[bool, ...]:
        """One step; gradients in the order of `parameters`.

        Args:
            gradients: a tuple or list of arrays, `RowTensor`, lists of `RowTensor`, or None
                (that parameter is skipped, its own count of updates included).

        Returns:
            A True for each parameter.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: a gradient does not fit, or a list
                of learning rates is used up; then nothing has changed.
        """
        return self.construct(self._as_tuple(gradients))

    def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        """The step itself, for gradients of the right number."""
        done = (True,) * len(self.parameters)
        # With use_locking the counters advance before the kernels run, so everything that
        # can fail is checked before them.
        with self._lock if self.use_locking else nullcontext():
            given = self._read(gradients)
            if self.skip_nonfinite and not _finite(given):
                self.skipped_steps += 1
                return done
            calls = self._plan(given)
            if self.use_locking:
                self._advance(given.layout)
        for batch, hp, hp_of in calls:
            self._run(batch, given, hp, hp_of)
        if not self.use_locking:
            self._advance(given.layout)
        return done

    def _advance(self, layout: Layout) -> None:
        self._steps[layout.active] += 1
        self.global_step += 1

    def _run(self, batch: Batch, given: Gradients, hp: np.ndarray, hp_of: np.ndarray) -> None:
        if batch.row_sparse:
            row_step(
                self._name,
                self._rule,
                self._prologue,
                batch.variables,
                [given.rows[k] for k in batch.places],
                hp,
                hp_of.tolist(),
                touched_only=self.sparse_update == "lazy",
                use_locking=self.use_locking,
            )
        else:
            dense_step(
                self._rule,
                self._prologue,
                batch.variables,
                given.addresses[batch.places],
                batch.g,
                hp,
                hp_of,
                use_locking=self.use_locking,
            )

    def _plan(self, given: Gradients) -> list[tuple[Batch, np.ndarray, np.ndarray]]:
        """The kernel calls of the step with their scalars."""
        examples = [self._groups.options[i] for i in self._classes]
        rates = self._each("learning_rate", [o.rate for o in examples], self._step)
        decays = self._each("weight_decay", [o.decay for o in examples], self._step)
        calls = [(batch, *self._hp(batch, rates, decays)) for batch in given.layout.batches]
        # A row call checks its indices before it writes. It goes first, and several of them
        # are checked before the first runs.
        calls.sort(key=lambda call: not call[0].row_sparse)
        if self.use_locking or sum(batch.row_sparse for batch in given.layout.batches) > 1:
            self._check_indices(given)
        return calls

    def _hp(
        self, batch: Batch, rates: list[float], decays: list[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of scalars, and which row each tensor of the batch uses.

        There is a row for each class of options and number of updates that occurs. As long
        as no parameter was skipped, all have the same number of updates.
        """
        real, n_classes = batch.variables.real.dtype.type, len(self._classes)
        steps, class_of = self._steps[batch.positions], self._class_of[batch.positions]
        first_step = int(steps[0])
        if (steps == first_step).all():
            keys, hp_of = [(first_step, k) for k in range(n_classes)], class_of
        else:
            codes, hp_of = np.unique(steps * n_classes + class_of, return_inverse=True)
            keys = [divmod(code, n_classes) for code in codes.tolist()]
        rows = [
            (
                *self._scalars(real, rates[k], decays[k], step + 1),
                *self._prologue_scalars(self._classes[k], decays[k]),
            )
            for step, k in keys
        ]
        return np.array(rows, real), hp_of.astype(np.int64, copy=False)

    def _prologue_scalars(self, i: int, decay: float) -> tuple[float, ...]:
        """The scalars of the prologue of parameter ``i``, in the order of its parts."""
        scalars: tuple[float, ...] = ()
        if COUPLED_DECAY in self._prologue:
            # A centralized gradient already holds the decay: it is centralized with it.
            factor = 0.0 if self._groups.options[i].centralize else decay * self.loss_scale
            scalars += (factor, 0.0)
        if SCALE in self._prologue:
            scalars += (1.0 / self.loss_scale,)
        return scalars

    # Gradients

    def _read(self, gradients: tuple[Any, ...]) -> Gradients:
        """Check all gradients and find their layout; nothing is written."""
        last = self._last
        if last is not None and last.expected is not None:
            addresses = last.expected.addresses(gradients)
            if addresses is not None:
                return self._unshared(Gradients(last, addresses, [], gradients))
        return self._read_slowly(gradients)

    def _read_slowly(self, gradients: tuple[Any, ...]) -> Gradients:
        read: list[Any] = []
        kinds: list[Kind] = []
        decays = self._decays_at(self._step)
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None:
                kinds.append(None)
                continue
            found = read_gradient(self._name, parameter, gradient)
            if self._groups.options[i].centralize:
                found = self._centralize(parameter, found, decays[i])
            is_sparse = isinstance(found, RowGradient)
            if is_sparse:
                self._require_sparse_update(parameter)
            read.append(found)
            kinds.append((is_sparse, found.dtype))
        layout = self._layout(tuple(kinds))
        dense = [g for g in read if not isinstance(g, RowGradient)]
        rows = [g for g in read if isinstance(g, RowGradient)]
        addresses = np.array([address_of(g) for g in dense], np.int64)
        can_be_fast = layout.expected is not None and not any(
            o.centralize for o in self._groups.options
        )
        self._last = layout if can_be_fast else None
        return self._unshared(Gradients(layout, addresses, rows, read))

    def _layout(self, kinds: tuple[Kind, ...]) -> Layout:
        layout = self._layouts.get(kinds)
        if layout is None:
            if len(self._layouts) >= _KEPT_LAYOUTS:
                self._layouts.clear()
            states = zip(*self._states.values(), strict=True) if self._states else [()] * len(kinds)
            tensors = [(p.data, *s) for p, s in zip(self.parameters, states, strict=True)]
            layout = self._layouts[kinds] = build_layout(kinds, tensors)
        return layout

    def _require_sparse_update(self, parameter: Parameter) -> None:
        if self.sparse_update is None:
            raise ValueError(
                message(
                    self._name,
                    f"gradient of {parameter.name!r}",
                    "is row-sparse",
                    "sparse_update='lazy' or sparse_update='dense_equivalent' at construction",
                    None,
                )
            )

    def _centralize(self, parameter: Parameter, gradient: Any, decay: float) -> Any:
        """The centralized gradient; a coupled decay is centralized with it, as in MindSpore."""
        if parameter.ndim < 2:
            return gradient
        factor = decay * self.loss_scale if self._decay_is_coupled else 0.0
        if isinstance(gradient, RowGradient):
            rows = RowTensor(gradient.indices, gradient.values, parameter.shape)
            if factor == 0.0:
                central = whole.centralized(rows)
            elif self.sparse_update == "lazy":
                central = whole.centralized(whole.decayed(rows, parameter.data, factor))
            else:
                # Every row decays, so every row has a gradient to centralize.
                return whole.centralized(whole.decayed(rows.to_dense(), parameter.data, factor))
            return RowGradient.of(central.indices, np.ascontiguousarray(central.values))
        decayed = whole.decayed(gradient, parameter.data, factor) if factor else gradient
        return np.ascontiguousarray(whole.centralized(decayed))

    def _unshared(self, given: Gradients) -> Gradients:
        """Refuse gradients in the memory of parameters or states."""
        begins, sizes = [given.addresses], [given.layout.dense_bytes]
        for row in given.rows:
            begins.append(np.array([row.index_address, row.values_address]))
            sizes.append(np.array([row.indices.nbytes, row.values.nbytes]))
        begin = np.concatenate(begins)
        if shares_memory(given.layout, begin, begin + np.concatenate(sizes)).any():
            raise ValueError(
                message(
                    self._name,
                    "a gradient",
                    "shares memory with a parameter or state",
                    "its own memory",
                    "an overlap",
                )
            )
        return given

    def _check_indices(self, given: Gradients) -> None:
        for batch in given.layout.batches:
            if not batch.row_sparse:
                continue
            for place, arrays in zip(batch.places, batch.variables.tensors, strict=True):
                indices, n_rows = given.rows[place].indices, len(arrays[0])
                if len(indices) and (indices.min() < 0 or indices.max() >= n_rows):
                    bad = (indices < 0) | (indices >= n_rows)
                    raise index_error(self._name, indices, int(np.argmax(bad)), n_rows)

    # State

    def _state_arrays(self) -> dict[str, np.ndarray]:
        arrays = super()._state_arrays()
        for role, states in self._states.items():
            for parameter, state in zip(self.parameters, states, strict=True):
                arrays[f"{role}.{parameter.name}"] = state
        for i, parameter in enumerate(self.parameters):
            arrays[f"step.{parameter.name}"] = self._steps[i : i + 1]
        return arrays

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, after checking all of it.

        A state without any ``step.<parameter>`` (as MindSpore writes it) is taken to have
        updated every parameter ``global_step`` times.

        Raises:
            KeyError: a name is missing or unknown.
            TypeError: a dtype differs.
            ValueError: a shape differs.
        """
        state = dict(state)
        if "global_step" in state and not any(name.startswith("step.") for name in state):
            steps = np.asarray(state["global_step"]).astype(np.int64)
            state.update({f"step.{p.name}": steps for p in self.parameters})
        super().load_state_dict(state)

    def forget_addresses(self) -> None:
        """A parameter was rebound: nothing that was derived from its address stays."""
        self._layouts.clear()
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for derived in ("_layouts", "_last", "_lock"):
            del state[derived]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._class_of, self._classes = self._option_classes()


def _finite(given: Gradients) -> bool:
    """One read of all gradients."""
    arrays: dict[Storage, list[tuple[int, int]]] = {}
    for batch in given.layout.batches:
        found = arrays.setdefault(batch.g, [])
        if batch.row_sparse:
            gradients = [given.rows[place] for place in batch.places]
            found += [(g.values_address, g.values.size) for g in gradients]
        else:
            sizes = np.diff(batch.variables.first)
            found += zip(given.addresses[batch.places].tolist(), sizes.tolist(), strict=True)
    return all(
        all_finite(storage, *np.array(spans, np.int64).T.copy())
        for storage, spans in arrays.items()
    )


def _sparse_update(where: str, value: str | None) -> str | None:
    if value is not None and value not in SPARSE_UPDATES:
        raise ValueError(message(where, "sparse_update", "is unknown", SPARSE_UPDATES, value))
    return value


def _state_dtype(where: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    dtype: np.dtype[Any] = np.dtype(value)
    if dtype not in STORAGES:
        raise TypeError(message(where, "state_dtype", "has a wrong dtype", check.FLOATS, dtype))
    return dtype
