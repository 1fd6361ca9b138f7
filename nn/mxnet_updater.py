"""MXNet's Updater: an optimizer with the states of all weights that it has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..ops.arrays import adopt
from ..ops.errors import message
from . import mxnet_states
from .mxnet_arguments import as_lists, is_list
from .mxnet_optimizer import Optimizer


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
        if not isinstance(optimizer, Optimizer):
            got = type(optimizer).__name__
            raise TypeError(
                message("Updater", "optimizer", "has a wrong type", "an Optimizer", got)
            )
        self.optimizer = optimizer
        self.states: dict[Any, Any] = {}

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
        several = is_list(index)
        indices = [_decoded(i) for i in (index if several else [index])]
        weights, grads = (weight, grad) if several else ([weight], [grad])
        as_lists("Updater", indices, weights, grads, indices)
        states = [
            self.states[i]
            if i in self.states
            else self.optimizer.create_state_multi_precision(i, w)
            for i, w in zip(indices, weights, strict=True)
        ]
        for chunk in self._chunks(weights):
            self._update(
                [[values[k] for k in chunk] for values in (indices, weights, grads, states)]
            )
            # A state that was never used would keep an old copy of its weight.
            self.states.update((indices[k], states[k]) for k in chunk)

    def _chunks(self, weights: Sequence[Any]) -> Iterator[Sequence[int]]:
        """Places of the weights of each call of the optimizer: of one dtype, unless one call
        takes everything.
        """
        largest = self.optimizer.aggregate_num
        if largest >= len(weights):
            yield range(len(weights))
            return
        by_dtype: dict[Any, list[int]] = {}
        for k, weight in enumerate(weights):
            by_dtype.setdefault(adopt("Updater", "weight", weight).dtype, []).append(k)
        size = max(1, int(largest))
        for places in by_dtype.values():
            for first in range(0, len(places), size):
                yield places[first : first + size]

    def _update(self, lists: list[list[Any]]) -> None:
        # 1.9 passes single weights as they are unless it aggregates, 2.0 always lists.
        if self.optimizer.compat == "1.9" and self.optimizer.aggregate_num == 0:
            lists = [values[0] for values in lists]
        self.optimizer.update_multi_precision(*lists)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """All states and counts as bytes in the safetensors format.

        Args:
            dump_optimizer: put in the optimizer's hyper-parameters, multipliers and scheduler, so
                that `set_states` makes it anew. It must be registered, with an attribute for each
                argument, and its scheduler one of ``lr_scheduler``.

        Raises:
            TypeError: something cannot be written.
        """
        return mxnet_states.dump(self.states, self.optimizer, with_optimizer=dump_optimizer)

    def set_states(self, states: bytes) -> None:
        """Take over what `get_states` gave; reading it can execute nothing.

        Unlike in MXNet the counts come back too, so the bias correction goes on where it was.

        Raises:
            TypeError: ``states`` are no bytes.
            ValueError: they are not of this format (MXNet's are pickles, which are not read: they
                can execute anything), or hold an optimizer that is not registered.
        """
        self.states, self.optimizer = mxnet_states.load(states, self.optimizer)


def get_updater(optimizer: Optimizer) -> Updater:
    """An `Updater` of ``optimizer``."""
    return Updater(optimizer)


def _decoded(index: Any) -> Any:
    return index.decode() if isinstance(index, bytes) else index
