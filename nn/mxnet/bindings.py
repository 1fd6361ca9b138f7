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
        sparse_update: str,
    ) -> None:  # fmt: skip
        self.device: int | None = None  # the host
        self._given = tuple(chain.from_iterable(variables))  # alive, so their identities are theirs
        self.identity = rule, sparse_update, *map(id, self._given)
        checked = [_checked(where, *each) for each in zip(names, variables, strict=True)]
        for name, (weight, *_) in zip(names, checked, strict=True):
            together = {"the first weight": checked[0][0], f"weight {name!r}": weight}
            self.device = device_of(where, together)
        labels = [f"an array of {n!r}" for n, a in zip(names, checked, strict=True) for _ in a]
        flat = [array for arrays in checked for array in arrays]
        check.no_overlap(where, labels, flat)
        parameters = [Parameter(a[0], name) for a, name in zip(checked, names, strict=True)]
        rules = [rule.kept(MASTER) if len(a) > 1 + len(rule.states) else rule for a in checked]
        each = np.arange(len(rules))
        states = [a[1:] for a in checked]
        self.reader = GradientReader(where, parameters, states, rules, each, sparse_update)
        if self.device is not None:
            self.can_be_kept = True  # and looked at again: memory can be exchanged under a tensor
            self._places = [_place(array) for array in flat]
            return
        # Of any other object the array may be another one the next time.
        self.can_be_kept = headers.usable and all(type(a) is np.ndarray for a in self._given)
        self._expected = headers.expected_arrays((), headers.NOWHERE, flat)

    @property
    def is_in_place(self) -> bool:
        """Whether the arrays are where and as they were."""
        if self.device is not None:
            return all(map(_lies_at, self._given, self._places))
        return self._expected.addresses(()) is not None


class Bindings:
    """The `BoundWeights` of the last calls, by their indices."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.forget()

    def forget(self) -> None:
        """Hold no array any more."""
        self._known: OrderedDict[tuple[Any, ...], BoundWeights] = OrderedDict()
        self._n_weights = 0

    def read(
        self, indices: Sequence[Any], names: Callable[[Any], str], variables: Variables,
        rule: Rule, sparse_update: str, gradients: Sequence[Any],
    ) -> tuple[BoundWeights, Gradients]:  # fmt: skip
        """The checked weights of a call, known where they are as they were; and its gradients."""
        key, grads = tuple(indices), tuple(gradients)
        known = self._known.get(key)
        identity = rule, sparse_update, *map(id, chain.from_iterable(variables))
        if known is not None and known.identity == identity:
            self._known.move_to_end(key)
            # Where all is as in the last step, one look at gradients and weights tells it.
            given = None
            if known.device is None or known.is_in_place:
                given = known.reader.read_like_last(grads)
            if given is None and known.is_in_place:
                given = known.reader.read(grads, lambda _: 0.0)
            if given is not None:
                return known, given
        labels = [names(index) for index in indices]
        found = BoundWeights(self._where, labels, variables, rule, sparse_update)
        self._drop(key)
        if found.can_be_kept:
            self._known[key] = found
            self._n_weights += len(key)
            # The last one stays, however long it is.
            while self._n_weights > _KEPT_WEIGHTS and len(self._known) > 1:
                self._drop(next(iter(self._known)))
        return found, found.reader.read(grads, lambda _: 0.0)

    def _drop(self, key: tuple[Any, ...]) -> None:
        if self._known.pop(key, None) is not None:
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


def _lies_at(given: Any, place: tuple[Any, ...]) -> bool:
    """Whether an object is an array on a device where it was."""
    array = adopt_anywhere("a weight", "or a state", given)
    return isinstance(array, DeviceArray) and _place(array) == place
