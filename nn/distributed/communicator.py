"""The calls by which engines move bytes between several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...ops.runtime.device import DeviceArray


class LostProcessError(RuntimeError):
    """A process of the group has ended or does not answer; ``ranks`` says which, if known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Transfer(Protocol):
    """Arrays on their way: those sent must not change, those received are not there yet."""

    def wait(self) -> None:
        """Return when all has arrived.

        Raises:
            LostProcessError: it will not.
        """


class Communicator(Protocol):
    """A group of processes that all make the same calls in the same order.

    Arrays are those of NumPy; where it says so also `DeviceArray`. There is no sum among the calls:
    engines add in orders of their own, `all_reduce` in one that is written down.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""

    @property
    def size(self) -> int:
        """The number of processes."""

    @property
    def moves_device_arrays(self) -> bool:
        """Whether `all_to_all` also moves arrays of CUDA devices."""

    def all_to_all(
        self, sent: Any, counts: Sequence[int], received: Any, received_counts: Sequence[int]
    ) -> Transfer:
        """Rows to each process, and from each: ``counts[r]`` rows of ``sent`` go to rank r.

        Both arrays are contiguous, in the order of the ranks; the rows have the same size
        everywhere.
        """

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> Transfer:
        """Equal arrays of every process: ``received[r]`` is ``sent`` of rank r."""

    def broadcast(self, array: np.ndarray, root: int) -> Transfer:
        """The array of rank ``root`` into those of all others."""


class _Alone:
    """A communicator of one process, whose transfers are over at once."""

    rank, size = 0, 1
    moves_device_arrays = True

    def all_to_all(
        self,
        sent: Any,
        counts: Sequence[int],  # noqa: ARG002  (one, that of all rows)
        received: Any,
        received_counts: Sequence[int],  # noqa: ARG002
    ) -> _Arrived:
        if isinstance(received, DeviceArray):
            received.assign(sent)
        else:
            received[...] = sent
        return _Arrived()

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> _Arrived:
        received[0] = sent
        return _Arrived()

    def broadcast(self, array: np.ndarray, root: int) -> _Arrived:  # noqa: ARG002
        return _Arrived()


class _Arrived:
    def wait(self) -> None: ...


def alone() -> Communicator:
    """One process by itself: a program for many runs with it without any engine.

    >>> alone().size
    1
    """
    return _Alone()


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def row_bytes(array: Any) -> int:
    """The size of a row, also of an array without rows."""
    size: int = array.itemsize
    for n in array.shape[1:]:
        size *= n
    return size
