"""One process of ``fusestep bench --processes``: iterations on a table that P processes own.

``torch.distributed.run`` starts it: ``worker ROWS DIM BATCH SECONDS``, or ``worker pooled DIM BATCH
LENGTH`` for the pooled tables of a recommender. Rank 0 prints a line of JSON with what all have
measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from ... import nn, set_num_threads
from ...nn.distributed import Communicator, RowShard, alone, over_torch, together
from ...nn.distributed.agreement import agree, gather_texts
from ...nn.distributed.communicator import Transfer, row_bytes
from ..cases.indices import DEFAULT, draw
from ..cases.model_shapes import click_log_tables

_MOST, _ROUNDS, _LARGE = 200, 200, 1 << 22  # iterations, agreements, bytes of a large exchange
_LARGE_ONES, _BATCHES = 20, 3
_Counts = Sequence[int]


class Counted:
    """A communicator that adds up what is sent to others, and the seconds within its calls."""

    moves_device_arrays = False

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent, self.seconds, self.calls = 0, 0.0, 0

    def all_to_all(
        self, sent: np.ndarray, counts: _Counts, received: np.ndarray, received_counts: _Counts
    ) -> Transfer:
        begin = partial(self._comm.all_to_all, sent, counts, received, received_counts)
        return self._begun((sum(counts) - counts[self.rank]) * row_bytes(sent), begin)

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> Transfer:
        begin = partial(self._comm.all_gather, sent, received)
        return self._begun((self.size - 1) * sent.nbytes, begin)

    def broadcast(self, array: np.ndarray, root: int) -> Transfer:
        return self._begun(0, partial(self._comm.broadcast, array, root))

    def _begun(self, n_bytes: int, begin: Callable[[], Transfer]) -> Transfer:
        self.sent += n_bytes
        self.calls += 1
        return SimpleNamespace(wait=partial(self._timed, self._timed(begin).wait))

    def _timed(self, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - begin
        return result


class Training:
    """A table of this process, its optimizer, and its part of some batches."""

    def __init__(self, comm: Counted, rows: int, dim: int, batch: int) -> None:
        self.comm, self.shard = comm, RowShard(rows, comm, order="hash")
        self.table = np.zeros((len(self.shard), dim), np.float32)
        self.optimizer = nn.LazyAdam([self.table], learning_rate=1e-3)
        together(self.optimizer, comm)
        low, high = (batch * r // comm.size for r in (comm.rank, comm.rank + 1))
        self.batches = [draw(DEFAULT, rows, batch, seed)[low:high] for seed in range(4)]
        self.gradient = np.ones((high - low, dim), np.float32)

    def iteration(self, k: int) -> None:
        """Forward, backward and step of one batch."""
        route = self.shard.route(self.batches[k % len(self.batches)])
        route.gather(self.table)
        self.optimizer((route.scatter(self.gradient),))

    def least_bytes(self) -> float:
        """Bytes that must be sent in an iteration: ids, different rows, and all their gradients."""
        found = []
        for ids in self.batches:
            places = self.shard.places(ids) // self.shard.height
            others = ids[places != self.comm.rank]
            row = self.gradient[0].nbytes
            found.append(len(np.unique(others)) * (4 + row) + len(others) * row)
        return float(np.mean(found))


def measured(training: Training, seconds: float) -> dict[str, Any]:
    """Medians over the iterations of this process."""
    comm, whole, outside = training.comm, [], []
    warm = timeit.repeat(lambda: training.iteration(0), number=1, repeat=4)
    fitting = max(1, min(_MOST, int(seconds / min(warm))))
    n = int(agree(comm, "bench", {}, numbers=(fitting, 0))[:, 0].min())
    comm.sent = comm.calls = 0
    for k in range(n):
        before, begin = comm.seconds, time.perf_counter()
        training.iteration(k)
        whole.append(time.perf_counter() - begin)
        outside.append(whole[-1] - (comm.seconds - before))
    sent, calls = comm.sent / n, comm.calls / n
    states = [a for name, a in training.optimizer.state_dict().items() if "moment" in name]
    return {
        "iterations": n,
        "iteration": np.percentile(whole, [20, 50, 80]).tolist(),
        "outside": float(np.median(outside)),
        "sent": sent,
        "exchanges": calls,
        "least": training.least_bytes(),
        "ids": len(training.gradient),
        "table_and_states": training.table.nbytes + sum(array.nbytes for array in states),
        "agreement": _median(lambda: agree(comm, "bench", {}), _ROUNDS),
        "second_per_byte": _seconds_per_byte(comm),
    }


def pooled(comm: Counted, dim: int, batch: int, length: int) -> dict[str, Any]:
    """What an iteration of bags of growing tables sends: those of a click log."""
    torch, fused = import_module("torch"), import_module("fusestep.nn.torch")
    torch.set_num_threads(1)
    sizes = [rows for rows, _ in click_log_tables()]
    bags = fused.EmbeddingBags([fused.GrowingEmbedding(n + 1, dim, comm=comm) for n in sizes])
    bags.update_in_backward(fused.RowWiseAdagrad(bags.parameters()))
    low, high = (batch * r // comm.size for r in (comm.rank, comm.rank + 1))
    drawn = [[draw(DEFAULT, n, batch * length, seed) for n in sizes] for seed in range(_BATCHES)]
    batches = [
        [torch.from_numpy(ids.reshape(batch, length)[low:high].copy()) for ids in every]
        for every in drawn
    ]
    gradient, times = torch.ones(high - low, dim * len(sizes)), []
    for k in range(3 * _BATCHES):
        if k == _BATCHES:
            comm.sent = comm.calls = 0
        begin = time.perf_counter()
        bags(batches[k % _BATCHES]).backward(gradient)
        times.append(time.perf_counter() - begin)
    n = 2 * _BATCHES
    return {
        "sent": comm.sent / n,
        "exchanges": comm.calls / n,
        "iteration": float(np.median(times[_BATCHES:])),
    }


def _seconds_per_byte(comm: Counted) -> float:
    """Seconds of a byte that a process sends, in large exchanges."""
    if comm.size == 1:
        return 0.0
    sent, received = np.ones((2, comm.size, _LARGE // comm.size), np.uint8)
    ones = [1] * comm.size
    seconds = _median(lambda: comm.all_to_all(sent, ones, received, ones).wait(), _LARGE_ONES)
    return seconds / (sent.nbytes * (comm.size - 1) / comm.size)


def _median(work: Callable[[], object], times: int) -> float:
    return float(np.median(timeit.repeat(work, number=1, repeat=times)))


def main() -> None:
    """Measure; rank 0 prints."""
    dist.init_process_group("gloo")
    set_num_threads(1)  # as many processes as there are may share the cores
    # One process sends nothing: gloo would only copy more slowly.
    comm = Counted(over_torch() if dist.get_world_size() > 1 else alone())
    what, *numbers = sys.argv[1:]
    if what == "pooled":
        own = pooled(comm, *map(int, numbers))
    else:
        rows, dim, batch = int(what), *map(int, numbers[:2])
        own = measured(Training(comm, rows, dim, batch), float(numbers[2]))
    every = gather_texts(comm, json.dumps(own))
    if comm.rank == 0:
        print(json.dumps([json.loads(text) for text in every]), flush=True)
    dist.barrier()  # who ends first may keep the store that others still ask
    os._exit(0)  # threads of gloo may abort a process that ends


if __name__ == "__main__":
    main()
