"""Steps on lists of weights whose states come with them, as MXNet's optimizers are called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ...kernels.cpu.headers import arrays as headers
from ...kernels.keeping import MASTER
from ...kernels.rule import Rule
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray, device_of
from ...ops.runtime.errors import reject
from ..base.parameter import Parameter
from ..engine.layout import Gradients
from ..engine.reader import GradientReader

_KEPT_WEIGHTS = 4096

Variables = Sequence[tuple[Any, ...]]


class BoundWeights:
    """Weights with their states, checked, and the reader of their gradients, for later steps too.

    ``variables`` has for each weight the array and then its states.
    """

    def __init__(
        self, where: str, names: Sequence[str], variables: Variables, rule: Rule,
        touched_only: bool,
    ) -> None:  # fmt: skip
        self.device: int | None = None  # the host
        self._arrays = tuple(chain.from_iterable(variables))  # alive: so nothing has their ids
        self.identity = rule, touched_only, *map(id, self._arrays)
        checked = [_checked(where, *each) for each in zip(names, variables, strict=True)]
        named = [*zip(names, checked, strict=True)]
        for name, (weight, *_) in named:
            together = {"the first weight": checked[0][0], f"weight {name!r}": weight}
            self.device = device_of(where, together)
        flat = [array for arrays in checked for array in arrays]
        check.no_overlap(where, [f"an array of {n!r}" for n, arrays in named for _ in arrays], flat)
        parameters = [Parameter(weight, name) for name, (weight, *_) in named]
        states = [arrays[1:] for arrays in checked]
        rules = [rule.kept(MASTER) if len(s) > len(rule.states) else rule for s in states]
        each, sparse_update = np.arange(len(rules)), "lazy" if touched_only else "dense_equivalent"
        self.reader = GradientReader(where, parameters, states, rules, each, sparse_update)
        if self.device is not None:
            self.can_be_kept = True  # and looked at again: memory can be exchanged under a tensor
            self._places = [_place(array) for array in flat]
            return
        # Of any other object the array may be another one the next time.
        self.can_be_kept = headers.usable and all(type(a) is np.ndarray for a in self._arrays)
        self._expected = headers.expected_arrays((), headers.NOWHERE, flat)

    @property
    def is_in_place(self) -> bool:
        """Whether the arrays are where and as they were."""
        if self.device is not None:
            return all(map(_lies_at, self._arrays, self._places))
        return self._expected.addresses(()) is not None


class Bindings:
    """The `BoundWeights` of the last calls, by their indices."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.forget()

    def forget(self) -> None:
        """Hold no array any more."""
        self._bound: OrderedDict[tuple[Any, ...], BoundWeights] = OrderedDict()
        self._n_weights = 0

    def read(
        self, indices: Sequence[Any], names: Callable[[Any], str], variables: Variables,
        rule: Rule, touched_only: bool, gradients: Sequence[Any],
    ) -> tuple[BoundWeights, Gradients]:  # fmt: skip
        """The checked weights of a call, known where they are as they were; and its gradients."""
        key, grads = tuple(indices), tuple(gradients)
        bound = self._bound.get(key)
        identity = rule, touched_only, *map(id, chain.from_iterable(variables))
        if bound is not None and bound.identity == identity:
            self._bound.move_to_end(key)
            read = None
            # Where all is as in the last step, one look at gradients and weights tells it.
            if bound.device is None or bound.is_in_place:
                read = bound.reader.read_like_last(grads)
            if read is None and bound.is_in_place:
                read = bound.reader.read(grads, lambda _: 0.0)
            if read is not None:
                return bound, read
        bound = BoundWeights(self._where, [*map(names, indices)], variables, rule, touched_only)
        self._drop(key)
        if bound.can_be_kept:
            self._bound[key] = bound
            self._n_weights += len(key)
            # The last one stays, however long it is.
            while self._n_weights > _KEPT_WEIGHTS and len(self._bound) > 1:
                self._drop(next(iter(self._bound)))
        return bound, bound.reader.read(grads, lambda _: 0.0)

    def _drop(self, key: tuple[Any, ...]) -> None:
        if self._bound.pop(key, None) is not None:
            self._n_weights -= len(key)

    def __reduce__(self) -> Any:
        return Bindings, (self._where,)  # a copy has other arrays


def _checked(where: str, name: str, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A weight and its states: arrays that can be updated in place, of one shape and place."""
    label, state_label = f"weight {name!r}", f"state of {name!r}"
    weight = check.variable(where, label, arrays[0])
    states = tuple(check.variable(where, state_label, a) for a in arrays[1:])
    for state in states:
        device_of(where, {label: weight, state_label: state})
        if state.shape != weight.shape:
            reject(ValueError, where, state_label, "has a wrong shape", weight.shape, state.shape)
    return weight, *states


def _place(array: DeviceArray) -> tuple[Any, ...]:
    return array.address, array.shape, array.strides, array.dtype, array.flags, array.stream


def _lies_at(variable: Any, place: tuple[Any, ...]) -> bool:
    """Whether an object is an array on a device where it was."""
    array = adopt_anywhere("a weight", "or a state", variable)
    return isinstance(array, DeviceArray) and _place(array) == place
