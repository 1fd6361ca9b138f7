"""A training of a `DLRM` in several processes, each of which has a part of tables and batches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import binary_cross_entropy_with_logits

from ...nn.distributed import all_reduce, over_torch
from ...nn.torch import ShardedEmbedding
from .runs import Run, Settings
from .training import Training, fused_optimizers


@contextmanager
def process_group() -> Iterator[None]:
    """The processes that torchrun has started, or this one by itself."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_embedding(size: int, dim: int) -> ShardedEmbedding:
    """As `dlrm.embedding`, in rows of every process; frequent ones are spread evenly."""
    table = ShardedEmbedding(size, dim, order="hash")
    with torch.no_grad():
        table.weight.mul_(1 / math.sqrt(3 * size))  # the deviation of those uniform numbers
    return table


class ShardedTraining(Training):
    """What one process does: its part of each batch, and the steps of its rows of the tables.

    Tables send rows and gradients by themselves; the dense layers are the same everywhere, and
    their gradients are added. Settings, not the number of processes, give the initial weights,
    and losses are those of whole batches: but for roundings they are those of one process.

    Args:
        run: is filled, on all processes alike but for the seconds.
        settings: what is trained.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        super().__init__(run, fused_optimizers, settings, sharded_embedding)
        self._comm = over_torch()

    @property
    def bytes_of_tables(self) -> list[int]:
        """What the rows of each process, and the states of them, take."""
        tables = self._optimizers[0]
        own = [*self._model.tables.parameters()]
        own += [x for p in own for x in tables.state[p].values() if isinstance(x, Tensor)]
        found = [0] * self._comm.size
        dist.all_gather_object(found, sum(x.nbytes for x in own))
        return found

    def save(self, folder: Path) -> None:
        """Weights and states; each process writes its own."""
        weights, states = get_state_dict(self._model, self._optimizers)
        checkpoint.save({"model": weights, "optimizers": states}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """What any number of processes have saved; each reads its own."""
        weights, states = get_state_dict(self._model, self._optimizers)
        found = {"model": weights, "optimizers": states}
        checkpoint.load(found, checkpoint_id=folder)
        set_state_dict(
            self._model, self._optimizers,
            model_state_dict=found["model"], optim_state_dict=found["optimizers"],
        )  # fmt: skip

    def _loss(self, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """This process's part of the mean loss."""
        own = self._own(len(labels))
        log_odds = self._model(dense[own], ids[:, own])
        loss = binary_cross_entropy_with_logits(log_odds, labels[own], reduction="sum")
        return loss / len(labels)

    def _backward(self, loss: Tensor) -> float:
        loss.backward()
        parameters = self._model.dense_parameters
        total, *gradients = self._sums([loss.detach(), *(p.grad for p in parameters)])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        number: float = total.item()
        return number

    def _scores(self, dense: Tensor, ids: Tensor) -> Tensor:
        own, scores = self._own(len(dense)), dense.new_zeros(len(dense))
        scores[own] = self._model(dense[own], ids[:, own])
        return self._sums([scores])[0]

    def _own(self, n: int) -> slice:
        """The place of this process's part among ``n``."""
        rank, size = self._comm.rank, self._comm.size
        return slice(n * rank // size, n * (rank + 1) // size)

    def _sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of each tensor the sum over the processes, added in the order of their ranks."""
        return [torch.from_numpy(x) for x in all_reduce([t.numpy() for t in tensors], self._comm)]
