"""The steps of an optimizer whose parameters live on a CUDA device: when they may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from ..kernels.storage import Storage
from ..ops import pending
from ..ops.device_step import Check, Launch, all_finite, launch_on
from ..ops.locks import Span
from ..ops.row_step import bad_index_error, check_keys
from .layout import Batch
from .reader import Gradients


class Launcher:
    """Launches the steps of one optimizer, each of which depends on the one before.

    The host does not wait for the answer whether the indices of a step are in range. A step with
    a bad one writes nothing, and neither do the later ones, so that none of them uses a number of
    updates that is too high; when the host hears of it, their counts are taken back.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._last: pending.Guard | None = None
        self._generation = -1

    @contextmanager
    def launch(
        self, given: Gradients, *, use_locking: bool, take_back: Callable[[], None]
    ) -> Iterator[Launch]:
        """A launch of one step.

        Args:
            given: its gradients.
            use_locking: in order with other calls on the same memory.
            take_back: takes back what the step has counted.
        """
        layout = given.layout
        spans = layout.lock_spans if use_locking else None
        with _launch_for(given, spans) as launch, pending.held():
            if layout.n_row_batches:
                with pending.guarded(self._device) as guard:
                    previous = self._unsettled()
                    check = Check(guard.address, 0, previous.address if previous else 0)
                    yield launch._replace(check=check)
                    pending.add(guard, _error(given), take_back)
                    self._last, self._generation = guard, pending.generation()
                return
            pending.make_room(self._device)
            previous = self._unsettled()
            if previous is None:
                yield launch
                return
            yield launch._replace(check=Check(previous.address))
            pending.add(previous, None, take_back)

    def _unsettled(self) -> pending.Guard | None:
        """The guard of the last step with indices, if its answer is not known yet."""
        return self._last if self._generation == pending.generation() else None


def _launch_for(given: Gradients, spans: list[Span] | None) -> AbstractContextManager[Launch]:
    """As `launch_on`; of a step without any gradient nothing is launched."""
    arrays = _arrays(given)
    return launch_on(arrays, spans) if arrays else nullcontext(Launch(None, None))


def _arrays(given: Gradients) -> list[Any]:
    """All arrays of a step; a parameter first, which decides the stream."""
    arrays = [arrays[0] for batch in given.layout.batches for arrays in batch.variables.tensors]
    for gradient in given.keep:
        rows = hasattr(gradient, "indices")
        arrays += [gradient.indices, gradient.values] if rows else [gradient]
    return arrays


@contextmanager
def launching_for(given: Gradients, *, use_locking: bool) -> Iterator[Any]:
    """The stream of a step that itself waits for the host."""
    spans = given.layout.lock_spans if use_locking else None
    with _launch_for(given, spans) as launch:
        yield launch.stream


def are_finite(
    given: Gradients, by_storage: Sequence[tuple[Storage, np.ndarray, np.ndarray]]
) -> bool:
    """Whether all gradients are finite; the host waits for the answer."""
    with _launch_for(given, None) as launch:
        return all(all_finite(*arrays, launch) for arrays in by_storage)


def row_batches(given: Gradients) -> list[tuple[Batch, int]]:
    """The row-sparse batches of a step, and the number of positions before each.

    Raises:
        ValueError: the tables of a batch have too many rows for its sort keys.
    """
    found, first = [], 0
    for batch in given.layout.batches:
        if batch.row_sparse:
            lengths = [len(gradient.indices) for gradient in given.rows_of(batch)]
            rows = [len(arrays[0]) for arrays in batch.variables.tensors]
            check_keys(batch.labels[0], list(zip(rows, lengths, strict=True)))
            found.append((batch, first))
            first += sum(lengths)
    return found


def _error(given: Gradients) -> Callable[[int, int], IndexError]:
    """What makes the error for a bad position of a step."""
    return bad_index_error(
        [
            (label, len(gradient.indices), len(arrays[0]))
            for batch, _ in row_batches(given)
            for label, gradient, arrays in zip(
                batch.labels, given.rows_of(batch), batch.variables.tensors, strict=True
            )
        ]
    )
