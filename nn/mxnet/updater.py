"""MXNet's Updater: an optimizer with the states of all weights that it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ...ops.runtime import check, pending
from ...ops.runtime.arrays import adopt_anywhere
from ..base.arguments import check_kind
from . import serialization
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
        given = [k for k, gradient in enumerate(grads) if gradient is not None]
        takes_all = given and self.optimizer.aggregate_num >= len(given)
        for chunk in [given] if takes_all else self._chunks(given, weights):
            if len(chunk) == len(indices):
                self._update(list(indices), list(weights), list(grads))
            else:
                self._update(*([values[k] for k in chunk] for values in (indices, weights, grads)))

    def _update(self, indices: list[Any], weights: list[Any], grads: list[Any]) -> None:
        """One call of the optimizer. If it fails, the states are as before."""
        kept = self.states  # those of this update, though another thread drop or replace some
        own = {i: kept.get(i, _NONE) for i in indices}
        made = {
            i: self._state(i, w, own[i])
            for i, w in zip(indices, weights, strict=True)
            if own[i] is _NONE or i in self._were_read
        }
        before = made and {i: own[i] for i in made if own[i] is not _NONE}  # those were read
        count_of = self.optimizer._index_update_count.get
        counts = list(map(count_of, made))
        try:
            if made:
                own.update(made)
                kept.update(made)
                self._were_read.difference_update(made)
            call: list[Any] = [indices, weights, grads, list(map(own.__getitem__, indices))]
            # 1.9 passes single weights as they are unless it aggregates, 2.0 always lists.
            if self.optimizer.aggregate_num == 0 and self.optimizer.compat == "1.9":
                call = [values[0] for values in call]
            self.optimizer.update_multi_precision(*call)
        except BaseException:
            # But for what has happened: an interrupt can come when it is done.
            if list(map(count_of, made)) == counts:
                for i in made.keys() - before.keys():
                    kept.pop(i, None)
                kept.update(before)
                self._were_read.update(before)
            raise

    def _state(self, index: Any, weight: Any, known: Any) -> Any:
        """The state of an index: a new one, or one that was read, where the weight lives."""
        if known is not _NONE:
            return serialization.moved(known, weight)
        return self.optimizer.create_state_multi_precision(index, weight)

    def _chunks(self, places: Sequence[int], weights: Sequence[Any]) -> Iterator[Sequence[int]]:
        """Places of the weights of each call of the optimizer, in the given order, where one call
        does not take everything: neighbours of one dtype.
        """
        size = max(1, int(min(self.optimizer.aggregate_num, len(places))))
        dtypes = groupby(places, lambda k: adopt_anywhere("Updater", "weight", weights[k]).dtype)
        for _, neighbours in dtypes:
            alike = list(neighbours)
            for first in range(0, len(alike), size):
                yield alike[first : first + size]

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """All states and counts as bytes in the safetensors format.

        States on a device are waited for, and copied to the host.

        Args:
            dump_optimizer: put in the optimizer's hyper-parameters, multipliers and scheduler, so
                that `set_states` makes it anew. It must be registered, with an attribute for each
                argument, and its scheduler one of ``lr_scheduler``.

        Raises:
            TypeError: something cannot be written.
            IndexError: on a device, an index of an earlier call was out of range.
        """
        pending.settle()
        with_optimizer = check.flag("get_states", "dump_optimizer", dump_optimizer)
        return serialization.dump(self.states, self.optimizer, with_optimizer=with_optimizer)

    def set_states(self, states: bytes) -> None:
        """Take over what `get_states` gave; reading it can execute nothing.

        Unlike in MXNet the counts come back too, so the bias correction goes on where it was. The
        states of a weight on a device are moved there when it is next updated.

        Raises:
            TypeError: ``states`` are no bytes, or a state in them is of another form than those of
                the optimizer.
            ValueError: they are not of this format (MXNet's are pickles, which are not read: they
                can execute anything), hold an optimizer that is not registered, or the arrays of
                a state do not fit together.
        """
        self.states, self.optimizer = serialization.load(states, self.optimizer)
        self._were_read = set(self.states)
        self.optimizer.forget_arrays()


def get_updater(optimizer: Optimizer) -> Updater:
    """An `Updater` of ``optimizer``."""
    return Updater(optimizer)


def _decoded(index: Any) -> Any:
    return index.decode() if isinstance(index, bytes) else index
