"""MXNet's Updater: an optimizer with the states of all weights that it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import Any

import numpy as np

from ...ops.runtime import check, pending
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ..base.arguments import check_kind
from . import states as saved
from .arguments import LISTS, as_lists
from .optimizer import Optimizer

_NONE: Any = object()  # a state may be None


class Updater:
    """Calls an optimizer with the states that belong to the indices.

    A state is made when its index is seen for the first time.

    Args:
        optimizer: an `Optimizer`.

    Attributes:
        optimizer: the optimizer.
        states: dict from index to state.

    Raises:
        TypeError: ``optimizer`` is none.

    Source: ``mxnet.optimizer.Updater``.

    >>> import numpy as np
    >>> from fusestep.nn import mxnet as mx
    >>> updater = Updater(mx.Adam(learning_rate=0.1))
    >>> a, b = np.ones(1, np.float32), np.ones(2, np.float32)
    >>> updater([0, 1], [np.ones(1, np.float32), np.ones(2, np.float32)], [a, b])
    >>> kept = updater.get_states()
    >>> updater.set_states(kept)  # of this or of another process
    >>> updater.optimizer.num_update
    1
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_kind("Updater", "optimizer", optimizer, Optimizer, "an Optimizer")
        self.optimizer = optimizer
        self.states: dict[Any, Any] = {}
        # Those of which the states have been read, and go to where the weight lives.
        self._were_read: set[Any] = set()

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update one weight, or each of a list of weights, in place.

        Args:
            index: an int or str, or a list of different ones; bytes are decoded.
            grad: the gradient, or a list of as many; before the weight, as in MXNet.
            weight: the array, or a list of as many.

        Raises:
            TypeError, ValueError, IndexError: as the optimizer. Nothing has changed then, where
                everything goes to the optimizer in one call (``aggregate_num``).
        """
        index = [_decoded(i) for i in index] if isinstance(index, LISTS) else _decoded(index)
        indices, weights, grads, _ = as_lists("Updater", index, weight, grad, index)
        optimizer = self.optimizer
        if optimizer.lr_mult or optimizer.wd_mult:
            optimizer.check_factors(indices)
        # A state made for no gradient would keep an old copy of its weight.
        places = [k for k, gradient in enumerate(grads) if gradient is not None]
        takes_all = places and optimizer.aggregate_num >= len(places)
        for chunk in [places] if takes_all else self._chunks(places, weights):
            self._update(*[[*map(x.__getitem__, chunk)] for x in (indices, weights, grads)])

    def _update(self, indices: list[Any], weights: list[Any], grads: list[Any]) -> None:
        """One call of the optimizer. If it fails, the states are as before."""
        kept = self.states  # those of this update, though another thread drop or replace some
        states = dict(zip(indices, map(kept.get, indices, repeat(_NONE)), strict=True))
        create = self.optimizer.create_state_multi_precision
        made = {
            i: create(i, w) if states[i] is _NONE else _moved(states[i], w)
            for i, w in zip(indices, weights, strict=True)
            if states[i] is _NONE or i in self._were_read
        }
        count_of = self.optimizer._index_update_count.get
        counts = list(map(count_of, made))
        try:
            kept.update(made)
            self._were_read.difference_update(made)
            call: list[Any] = [indices, weights, grads, [*(states | made).values()]]
            # 1.9 passes single weights as they are unless it aggregates, 2.0 always lists.
            if self.optimizer.aggregate_num == 0 and self.optimizer.compat == "1.9":
                call = [values[0] for values in call]
            self.optimizer.update_multi_precision(*call)
        except BaseException:
            # But for what has happened: an interrupt can come when it is done.
            if list(map(count_of, made)) == counts:
                for i in made:
                    if states[i] is _NONE:
                        kept.pop(i, None)
                    else:
                        kept[i] = states[i]
                        self._were_read.add(i)
            raise

    def _chunks(self, places: Sequence[int], weights: Sequence[Any]) -> Iterator[Sequence[int]]:
        """The places of the weights of each call of the optimizer, where one does not take all.

        They are in the given order, and those of a call are neighbours of one dtype.
        """
        size = max(1, int(min(self.optimizer.aggregate_num, len(places))))
        dtypes = groupby(places, lambda k: adopt_anywhere("Updater", "weight", weights[k]).dtype)
        for _, neighbours in dtypes:
            alike = [*neighbours]
            for first in range(0, len(alike), size):
                yield alike[first : first + size]

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """All states and counts as bytes in the safetensors format.

        States on a device are waited for, and copied to the host. Either ``dump_optimizer``, which
        MXNet's programs pass, gives the same bytes: counts are among them, the optimizer is not.
        Hyper-parameters, factors and the scheduler are those of the program that reads them.

        Raises:
            TypeError: an index is no int or str, a state is made of something else than arrays of
                real numbers, numbers, strs, None, tuples and lists, or an argument is no bool.
            IndexError: on a device, an index of an earlier call was out of range.
        """
        check.flag("get_states", "dump_optimizer", dump_optimizer)
        pending.settle()
        optimizer = self.optimizer
        return saved.dump(self.states, optimizer._index_update_count, optimizer.num_update)

    def set_states(self, states: bytes) -> None:
        """Take over what `get_states` gave, or a ``.states`` file of MXNet 1.9.

        Reading them can execute nothing. The counts of updates come with the states, so the bias
        correction goes on where it was; hyper-parameters and the scheduler stay those of the
        optimizer. One that MXNet has pickled (``dump_optimizer=True``, and ``save_states`` of
        Gluon's ``Trainer``) is not rebuilt: its counts are read, and nothing else of it. For
        files without, ``begin_num_update`` of the optimizer says how many updates were done.

        The states of a weight on a device are moved there when it is next updated.

        Raises:
            TypeError: ``states`` are no bytes, or a state in them is of another form than those of
                the optimizer.
            ValueError: they are of neither format, the arrays of a state do not fit together, or
                there are no counts and ``begin_num_update`` is 0.
        """
        read, counts, num_update = saved.load(states)
        optimizer = self.optimizer
        for index, state in read.items():
            optimizer.check_state(index, state)
        if counts is None:
            counts, num_update = {}, optimizer.begin_num_update
            if num_update == 0:
                wrong, expected = "have no counts of updates", "an optimizer with begin_num_update"
                reject(ValueError, "set_states", "states", wrong, expected, "one that begins at 0")
        self.states, self._were_read = read, set(read)
        optimizer._index_update_count, optimizer.num_update = counts, num_update
        optimizer.forget_arrays()


def get_updater(optimizer: Optimizer) -> Updater:
    """An `Updater` of ``optimizer``."""
    return Updater(optimizer)


def _decoded(index: Any) -> Any:
    return index.decode() if isinstance(index, bytes) else index


def _moved(state: Any, weight: Any) -> Any:
    """A state that was read, with its arrays where the weight lives."""
    if type(state) in (tuple, list):
        return type(state)(_moved(part, weight) for part in state)
    array = adopt_anywhere("set_states", "weight", weight)
    if not (isinstance(array, DeviceArray) and isinstance(state, np.ndarray)):
        return state
    return array.holding(state).native()
