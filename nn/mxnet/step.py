"""Steps on lists of weights whose states come with them, as MXNet's optimizers are called."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from ...kernels.cpu import headers
from ...kernels.cpu.counts import Count
from ...kernels.rules.rule import Prologue, Rule
from ...ops.runtime import check, cuda
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray, device_of
from ...ops.runtime.errors import message
from ...ops.runtime.launch import Launch, checked_launch
from ...ops.runtime.row_step import (
    RowUpdate,
    Update,
    enqueue,
    prepared,
    row_tables,
)
from ...ops.runtime.step import DenseUpdate, commit
from ..base.parameter import Parameter
from ..engine.layout import Batch
from ..engine.on_device import error_of, row_batches
from ..engine.reader import GradientReader, Gradients

_KEPT_WEIGHTS = 4096

Scalars = Callable[[Any, Any], tuple[float, ...]]
"""``scalars(real, numbers)``: those of rule and prologue for what belongs to a weight."""


class Bound:
    """Weights with their states, checked, and what is remembered for later steps on them.

    Args:
        where: the optimizer's name, for errors.
        names: one for each weight.
        variables: for each weight the array, then its states.
        sparse_update: ``"lazy"`` or ``"dense_equivalent"``.

    Attributes:
        device: where the weights live; None for the host.

    Raises:
        TypeError: an array is none, or no floating one.
        ValueError: an array cannot be updated in place, shapes or places differ, or arrays overlap.
    """

    def __init__(
        self,
        where: str,
        names: Sequence[str],
        variables: Sequence[tuple[Any, ...]],
        sparse_update: str,
    ) -> None:
        self._given = tuple(chain.from_iterable(variables))
        self._sparse_update = sparse_update
        checked = [
            _checked(where, name, arrays) for name, arrays in zip(names, variables, strict=True)
        ]
        self.device = _device_of_all(where, names, checked)
        labels = [f"an array of {n!r}" for n, a in zip(names, checked, strict=True) for _ in a]
        flat = [array for arrays in checked for array in arrays]
        self._addresses = check.no_overlap(where, labels, flat)
        parameters = [
            Parameter(arrays[0], name) for arrays, name in zip(checked, names, strict=True)
        ]
        self.reader = GradientReader(
            where, parameters, [arrays[1:] for arrays in checked], sparse_update
        )
        if self.device is not None:
            self.can_be_kept = True  # and looked at again: memory can be exchanged under a tensor
            self._places = [_place(array) for array in flat]
            return
        # Of any other object the array may be another one the next time.
        self.can_be_kept = headers.usable and all(type(a) is np.ndarray for a in self._given)
        forms = [(a.dtype, a.shape) for a in flat]
        self._expected = headers.Expected(forms, headers.NOWHERE, writable=True)

    def is_of(self, variables: Sequence[tuple[Any, ...]], sparse_update: str) -> bool:
        """Whether these are the very same arrays, where and as they were."""
        given = tuple(chain.from_iterable(variables))
        if sparse_update != self._sparse_update or len(given) != len(self._given):
            return False
        if not all(map(operator.is_, given, self._given)):
            return False
        if self.device is not None:
            return all(map(_lies_at, given, self._places))
        addresses = self._expected.addresses(given)
        return addresses is not None and addresses.tolist() == self._addresses

    def read(self, gradients: Sequence[Any]) -> Gradients:
        """The checked gradients; as `GradientReader.read`."""
        given = tuple(gradients)
        return self.reader.read_like_last(given) or self.reader.read(given, lambda _: 0.0)


class Bindings:
    """What `Bound` remembers, by the indices of a call; the arrays of the last calls."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.forget()

    def forget(self) -> None:
        """Hold no array any more."""
        self._known: OrderedDict[tuple[Any, ...], Bound] = OrderedDict()
        self._n_weights = 0

    def bound(
        self,
        indices: Sequence[Any],
        names: Callable[[Any], str],
        variables: Sequence[tuple[Any, ...]],
        sparse_update: str,
    ) -> Bound:
        """The checked weights of a call; the same ones again where the arrays are the same."""
        key = tuple(indices)
        known = self._known.get(key)
        if known is not None and known.is_of(variables, sparse_update):
            self._known.move_to_end(key)
            return known
        found = Bound(self._where, [names(index) for index in indices], variables, sparse_update)
        self._drop(key)
        if found.can_be_kept:
            self._known[key] = found
            self._n_weights += len(key)
            # The last one stays, however long it is.
            while self._n_weights > _KEPT_WEIGHTS and len(self._known) > 1:
                self._drop(next(iter(self._known)))
        return found

    def _drop(self, key: tuple[Any, ...]) -> None:
        if self._known.pop(key, None) is not None:
            self._n_weights -= len(key)

    def __reduce__(self) -> Any:
        return Bindings, (self._where,)  # a copy has other arrays


class Step:
    """One step on bound weights: first everything that can fail, then `run`.

    Args:
        bound: the weights.
        given: their gradients.
        rules: the rule for weights without and with a master copy.
        prologue: what happens to the gradients.
        touched_only: row-sparse gradients update only the rows that occur.
        numbers: for each weight what its scalars are made of; hashable.
        scalars: makes them.
    """

    def __init__(
        self,
        bound: Bound,
        given: Gradients,
        rules: tuple[Rule, Rule],
        prologue: Prologue,
        *,
        touched_only: bool,
        numbers: Sequence[Any],
        scalars: Scalars,
    ) -> None:
        self._given, self._rules, self._prologue = given, rules, prologue
        self._touched_only, self._device = touched_only, bound.device
        self._calls = [
            (batch, *_scalars_of(batch, numbers, scalars)) for batch in given.layout.batches
        ]
        self._done = np.zeros(1, np.int64)

    def _rule(self, batch: Batch) -> Rule:
        plain, with_master = self._rules
        return with_master if len(batch.variables.s) > len(plain.states) else plain

    @property
    def is_done(self) -> bool:
        """Whether it has been written; on a device it is never known."""
        return bool(self._done[0])

    def run(self) -> None:
        """Write; on a device it is enqueued.

        Raises:
            IndexError: an index of a row-sparse gradient is out of range.
        """
        if self._device is None:
            commit([prepared(self._update(*call)) for call in self._calls], Count(self._done))
        elif self._calls:
            with _launched(self._given) as launch:
                self._enqueue(launch)

    def _update(self, batch: Batch, hp: np.ndarray, hp_of: list[int]) -> Update:
        arguments = self._rule(batch), self._prologue, batch.variables
        if batch.row_sparse:
            rows = self._given.rows_of(batch)
            return RowUpdate.of(batch.labels, *arguments, rows, hp, hp_of, self._touched_only)
        places = self._given.addresses_of(batch)
        return DenseUpdate(*arguments, places, batch.g, hp, np.array(hp_of))

    def _enqueue(self, launch: Launch) -> None:
        first = 0  # of the positions of a batch among those of all batches
        for update in [self._update(*call) for call in self._calls]:
            enqueue(update, launch.after(first))
            if isinstance(update, RowUpdate):
                first += sum(len(gradient.indices) for gradient in update.gradients)


@contextmanager
def _launched(given: Gradients) -> Iterator[Launch]:
    """A launch of a step that writes nothing if an index turns out to be out of range."""
    batches = row_batches(given)
    error = error_of(given) if batches else None
    with checked_launch(given.arrays, error) as launch:
        if len(batches) > 1:  # one checks its indices before it writes
            for batch, first in batches:
                rows = given.rows_of(batch)
                tables = row_tables(batch.variables, rows, [0] * len(rows))
                cuda.rows.step.check_indices(tables, launch.guard, first, stream=launch.stream)
        yield launch


def _scalars_of(
    batch: Batch, numbers: Sequence[Any], scalars: Scalars
) -> tuple[np.ndarray, list[int]]:
    """Rows of scalars, and the row of each tensor of a batch."""
    real = batch.variables.real.carrier
    rows: dict[Any, int] = {}
    hp_of = [rows.setdefault(numbers[i], len(rows)) for i in batch.positions.tolist()]
    return np.array([scalars(real, numbers) for numbers in rows], real), hp_of


def _checked(where: str, name: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A weight and its states: arrays that can be updated in place, of one shape and place."""
    weight = check.variable(where, f"weight {name!r}", arrays[0])
    states = tuple(check.variable(where, f"state of {name!r}", a) for a in arrays[1:])
    for state in states:
        device_of(where, {f"weight {name!r}": weight, f"state of {name!r}": state})
        if state.shape != weight.shape:
            wrong = "has a wrong shape"
            raise ValueError(message(where, f"state of {name!r}", wrong, weight.shape, state.shape))
    return weight, *states


def _device_of_all(
    where: str, names: Sequence[str], variables: Sequence[tuple[Any, ...]]
) -> int | None:
    """The device on which all weights lie; None for the host."""
    device = None
    for name, (weight, *_) in zip(names, variables, strict=True):
        device = device_of(where, {"the first weight": variables[0][0], f"weight {name!r}": weight})
    return device


def _place(array: DeviceArray) -> tuple[Any, ...]:
    return array.address, array.shape, array.strides, array.dtype, array.flags, array.stream


def _lies_at(given: Any, place: tuple[Any, ...]) -> bool:
    """Whether an object is an array on a device where it was."""
    array = adopt_anywhere("a weight", "or a state", given)
    return isinstance(array, DeviceArray) and _place(array) == place
