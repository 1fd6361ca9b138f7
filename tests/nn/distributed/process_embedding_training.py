"""Trainings of a `ShardedEmbedding` beside those of one process with the whole table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fusestep.nn import torch as fused
from fusestep.nn.distributed import Communicator

N, DIM, BATCH = 101, 8, 6000
ORDERS = ("range", "hash")
MAKE: dict[str, Callable[[Any], Any]] = {
    "LazyAdam": lambda params: fused.LazyAdam(params, lr=0.01),
    "FTRL": lambda params: fused.FTRL(params, lr=0.01, l1=0.01),
    "SGD": lambda params: fused.SGD(params, lr=1e-4, momentum=0.9, sparse="all"),
}


class Net(torch.nn.Module):
    """A table of this process, and a loss whose gradient differs from row to row."""

    def __init__(self, comm: Communicator | None, **options: Any) -> None:
        super().__init__()
        self.words = fused.ShardedEmbedding(N, DIM, comm, **{"seed": 3, **options})

    def forward(self, ids: Any) -> Any:
        return self.words(ids).pow(2).sum()


class Whole(torch.nn.Module):
    """The same with PyTorch's table, of one process."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(*table.shape, sparse=True, _weight=table.clone())

    def forward(self, ids: Any) -> Any:
        return self.words(ids).pow(2).sum()


def whole_of(module: Any, tensor: Any = None) -> Any:
    """All rows of a table, by their numbers: `tensor` has those of this process."""
    own = (module.weight if tensor is None else tensor).detach()
    shard, found = module.shard, torch.empty(module.num_embeddings, *own.shape[1:], dtype=own.dtype)
    given = [(shard.indices, own)]
    if shard.comm.size > 1:
        given = [None] * shard.comm.size
        dist.all_gather_object(given, (shard.indices, own.clone()))
    for indices, rows in given:
        found[torch.from_numpy(indices)] = rows
    return found


def batch(step: int, rows: int = N) -> Any:
    """The ids of all processes; half of them are of few rows."""
    found = np.random.default_rng(step).zipf(1.3, BATCH + 100 * step)
    return torch.from_numpy(np.minimum(found - 1, rows - 1))


def part(ids: Any, step: int, comm: Communicator) -> Any:
    """Those of this process: as many as others have, then others, then one has none."""
    weights = np.ones(comm.size) if step % 3 == 0 else np.arange(1.0, comm.size + 1)
    if step % 3 == 2 and comm.size > 1:
        weights[step // 3 % comm.size] = 0
    ends = np.rint(np.cumsum([0, *weights]) / weights.sum() * len(ids)).astype(int)
    return ids[ends[comm.rank] : ends[comm.rank + 1]]


def assert_bits(found: Any, expected: Any, label: str = "") -> None:
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    if not torch.equal(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{label}: {m}")


def assert_part(module: Any, optimizer: Any, table: Any, states: Any, label: str = "") -> None:
    """Rows and states of this process are those of the whole table."""
    rows = torch.from_numpy(module.shard.indices)
    assert_bits(module.weight, table.detach()[rows], label)
    own = optimizer.state[module.weight]
    assert own.keys() == states.keys(), label
    for name, state in states.items():
        state = torch.as_tensor(state)
        assert_bits(own[name], state[rows] if state.dim() else state, f"{label} {name}")


class Pair:
    """A table that several processes own, and the same on one."""

    def __init__(self, comm: Communicator, name: str, **options: Any) -> None:
        self.comm, self.name, self.done, self.options = comm, name, 0, options
        self.own = Net(comm, **options)
        self.optimizer = MAKE[name](self.own.parameters())
        self.whole = Whole(whole_of(self.own.words))
        self.reference = MAKE[name](self.whole.parameters())

    @property
    def label(self) -> str:
        return f"{self.name} {self.options} after {self.done}"

    def steps(self, n: int) -> None:
        for _ in range(n):
            ids = batch(self.done)
            own = part(ids, self.done, self.comm)
            for net, optimizer, given in (
                (self.own, self.optimizer, own), (self.whole, self.reference, ids),
            ):  # fmt: skip
                optimizer.zero_grad()
                net(given).backward()
                optimizer.step()
            self.done += 1
            self.check()

    def check(self) -> None:
        table = self.whole.words.weight
        words, states = self.own.words, self.reference.state[table]
        assert_part(words, self.optimizer, table, states, self.label)
