"""Checkpoints of small optimizers whose numbers follow from their names alone."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from fusestep import nn

from fusestep.nn.distributed import (  # isort: skip
    Communicator, RowShard, ShardedStates, load_checkpoint, save_checkpoint)  # fmt: skip
from helpers import assert_same_bits
from thread_processes import ThreadCommunicator, in_threads

RECORDED = Path(__file__).parents[2] / "recorded" / "data" / "distributed"
ORDERS = ("range", "hash")
Orders = tuple[str, str] | None
FORMS: dict[str, Orders] = {
    "range": ("range", "range"), "hash": ("hash", "hash"), "states": None,
}  # fmt: skip
PARAMETERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "words": ((10, 4), np.float32), "tones": ((7,), ml_dtypes.bfloat16), "bias": ((3,), np.float32),
}  # fmt: skip
"""Two tables that are divided by rows, and what all processes have alike."""


def numbers_of(name: str, like: np.ndarray) -> np.ndarray:
    """Numbers from 1 to 80, which every dtype holds; others for each name."""
    first = 1 + zlib.crc32(name.encode()) % 40
    return (first + np.arange(like.size)).reshape(like.shape).astype(like.dtype)


class Job:
    """One process of several with an optimizer of the `PARAMETERS`; zeros at first. ``orders`` are
    those of "words" and "tones"; without, nothing is divided by rows, and the states of the
    parameters are with their owners."""

    def __init__(self, comm: Communicator, orders: Orders = None) -> None:
        self.comm, self.shards = comm, {}
        if orders is not None:
            of_each = zip(("words", "tones"), orders, strict=True)
            self.shards = {n: RowShard(PARAMETERS[n][0][0], comm, order=o) for n, o in of_each}
        params = [
            nn.Parameter(np.zeros((self._rows(name, shape), *shape[1:]), dtype), name)
            for name, (shape, dtype) in PARAMETERS.items()
        ]
        self.base = nn.LazyAdam(params)
        self.optimizer = self.base if orders is not None else ShardedStates(self.base, comm)

    def _rows(self, name: str, shape: tuple[int, ...]) -> int:
        return len(self.shards[name]) if name in self.shards else shape[0]

    def by_name(self) -> Mapping[str, np.ndarray]:
        return {str(p.name): p.data for p in self.base.parameters} | self.base.state_arrays()

    def expected(self) -> Mapping[str, np.ndarray]:
        """The rows of this process of what `fill` gives all of them."""
        found = {}
        for name, array in self.by_name().items():
            shard = self.shards.get(name.rpartition(".")[2])
            if shard is None or array.shape[:1] != (len(shard),) or name.startswith("step."):
                found[name] = numbers_of(name, array)
            else:
                whole = np.empty((shard.rows, *array.shape[1:]), array.dtype)
                found[name] = numbers_of(name, whole)[shard.indices]
        return found

    def fill(self) -> None:
        for name, array in self.expected().items():
            self.by_name()[name][...] = array

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, self.optimizer, self.comm, self.shards)

    def load(self, folder: Path) -> None:
        load_checkpoint(folder, self.optimizer, self.comm, self.shards)

    def assert_filled(self, label: str = "") -> None:
        for name, array in self.expected().items():
            assert_same_bits(self.by_name()[name], array, f"{label}: {name}")


def parts_of(path: Path) -> list[Path]:
    return sorted(path.glob("part-*"))


def saved(path: Path, size: int, orders: Orders) -> Path:
    def program(comm: ThreadCommunicator) -> None:
        job = Job(comm, orders)
        job.fill()
        job.save(path)

    in_threads(size, program)
    return path


def outcome(job: Job, call: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of the error, which has changed no array; empty without one."""
    for k, array in enumerate(job.by_name().values()):
        array[...] = 100 + k
    before, said = {name: array.tobytes() for name, array in job.by_name().items()}, ("", "")
    try:
        call()
    except Exception as error:
        said = type(error).__name__, str(error)
    changed = [n for n, array in job.by_name().items() if array.tobytes() != before[n]]
    assert not (said[0] and changed), (said, changed)
    return said


def loaded(path: Path, size: int, orders: Orders, *, is_right: bool = True) -> tuple[str, str]:
    """What all ranks say when they load a folder; without an error all have what was saved."""

    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        job = Job(comm, orders)
        said = outcome(job, lambda: job.load(path))
        if is_right and not said[0]:
            job.assert_filled(path.name)
        return said

    (said,) = set(in_threads(size, program))
    return said
