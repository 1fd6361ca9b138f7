"""Threads that stand for processes: as many as a test wants, at no cost."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import Barrier
from typing import Any

import numpy as np

TIMEOUT = 240  # seconds in which one may compile what others have


class _Arrived:
    def wait(self) -> None:
        """It has been copied."""


class ThreadCommunicator:
    """See `fusestep.nn.distributed.Communicator`."""

    moves_device_arrays = False

    def __init__(self, rank: int, barrier: Barrier, slots: list[Any]) -> None:
        self.rank, self.size = rank, len(slots)
        self._barrier, self._slots = barrier, slots

    def _of_all(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(TIMEOUT)
        found = list(self._slots)
        self._barrier.wait(TIMEOUT)
        return found

    def all_to_all(
        self, sent: np.ndarray, counts: Sequence[int], received: np.ndarray,
        received_counts: Sequence[int],
    ) -> _Arrived:  # fmt: skip
        ends = [0, *accumulate(counts)]
        assert ends[-1] == len(sent) and sum(received_counts) == len(received)
        parts = [sent[a:b].copy() for a, b in pairwise(ends)]
        here = [of_rank[self.rank] for of_rank in self._of_all(parts)]
        assert [len(part) for part in here] == list(received_counts)
        received[...] = np.concatenate(here)
        return _Arrived()

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> _Arrived:
        received[...] = np.stack(self._of_all(sent.copy())).reshape(received.shape)
        return _Arrived()

    def broadcast(self, array: np.ndarray, root: int) -> _Arrived:
        array[...] = self._of_all(array.copy())[root]
        return _Arrived()


def in_threads(size: int, program: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What each of them returns; an error of one ends all."""
    barrier, slots = Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            return program(ThreadCommunicator(rank, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
