"""Trainings of a `DLRM` on a `ClickLog`, with optimizers of PyTorch and of this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ...nn import torch as fused
from .clicks import ClickLog, Clicks, table_sizes
from .dlrm import DLRM, embedding
from .runs import Run, Settings

TABLE_RATE, DENSE_RATE = 5e-3, 1e-3
PIECE = 2048  # held-out clicks of one forward pass
STATES = 2  # arrays of a table's size that Adam keeps


def bytes_of(settings: Settings) -> int:
    """Memory of the tables and their states, of one training."""
    numbers = (1 + STATES) * sum(table_sizes(settings.rows)) * settings.dim
    return numbers * (8 if settings.float64 else 4)


def torch_optimizers(model: DLRM) -> list[Any]:
    """PyTorch's two, since one of them does not take what the other one needs."""
    return [
        torch.optim.SparseAdam(model.tables.parameters(), lr=TABLE_RATE),
        torch.optim.Adam(model.dense_parameters, lr=DENSE_RATE, fused=True),
    ]


def fused_optimizers(model: DLRM) -> list[Any]:
    """The same two of this package."""
    return [
        fused.SparseAdam(model.tables.parameters(), lr=TABLE_RATE),
        fused.Adam(model.dense_parameters, lr=DENSE_RATE),
    ]


def single_optimizer(model: DLRM) -> list[Any]:
    """One for tables and dense layers."""
    groups = [
        # With the place of epsilon that SparseAdam has.
        {"params": list(model.tables.parameters()), "lr": TABLE_RATE, "eps_hat": True},
        {"params": model.dense_parameters, "lr": DENSE_RATE},
    ]
    return [fused.Adam(groups, sparse="touched")]


class Training:
    """A model, its optimizers and what is measured of them.

    The same settings give the same initial weights.

    Args:
        run: is filled.
        make: the optimizers of a model.
        settings: what is trained.
        table: makes a table of the model.
    """

    def __init__(
        self, run: Run, make: Callable[[DLRM], list[Any]], settings: Settings,
        table: Callable[[int, int], torch.nn.Module] = embedding,
    ) -> None:  # fmt: skip
        self.run = run
        torch.manual_seed(settings.seed)
        self._dtype = torch.float64 if settings.float64 else torch.float32
        self._model = DLRM(table_sizes(settings.rows), settings.dim, table).to(self._dtype)
        self._optimizers = make(self._model)

    def step(self, clicks: Clicks) -> None:
        """One iteration, timed."""
        tensors = self._tensors(clicks)
        times = [time.perf_counter()]
        loss = self._loss(*tensors)
        times.append(time.perf_counter())
        number = self._backward(loss)
        times.append(time.perf_counter())
        for optimizer in self._optimizers:
            optimizer.step()
        times.append(time.perf_counter())
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.run.losses.append(number)
        for seconds, taken in zip(self.run.seconds.values(), self._parts(times), strict=True):
            seconds.append(taken)

    def _parts(self, times: list[float]) -> list[float]:
        """Seconds of forward, backward and optimizer."""
        return [float(taken) for taken in np.diff(times)]

    def measure(self, clicks: Clicks) -> None:
        """The AUC of held-out clicks."""
        dense, ids, _ = self._tensors(clicks)
        pieces = zip(dense.split(PIECE), ids.split(PIECE, dim=1), strict=True)
        with torch.no_grad():
            scores = [self._scores(*piece) for piece in pieces]
        auc = roc_auc_score(clicks.labels, torch.cat(scores).numpy())
        self.run.auc[len(self.run.losses)] = float(auc)

    def _loss(self, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(self._model(dense, ids), labels)

    def _backward(self, loss: Tensor) -> float:
        """Gradients, and the loss as a number."""
        loss.backward()
        number: float = loss.item()
        return number

    def _scores(self, dense: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = self._model(dense, ids)
        return found

    def _tensors(self, clicks: Clicks) -> tuple[Any, Any, Any]:
        dense, labels = (torch.from_numpy(x).to(self._dtype) for x in (clicks.dense, clicks.labels))
        return dense, torch.from_numpy(clicks.ids), labels


class BagTraining(Training):
    """One whose tables are looked up in one call, and take their step in backward.

    Args:
        run: is filled; what the step of the tables takes counts as the optimizer's.
        settings: what is trained.
        table: makes a table of the model.
    """

    def __init__(
        self, run: Run, settings: Settings,
        table: Callable[[int, int], torch.nn.Module] = embedding,
    ) -> None:  # fmt: skip
        super().__init__(run, self._make, settings, table)

    def _make(self, model: DLRM) -> list[Any]:
        """The optimizer of the dense layers; that of the tables is called by them."""
        model.tables = bags = fused.EmbeddingBags(model.tables)
        of_tables, of_dense = self._optimizers_of(model)
        bags.update_in_backward(of_tables)
        self._step = [0.0, 0.0]
        of_tables.register_step_pre_hook(partial(self._note, 0))
        of_tables.register_step_post_hook(partial(self._note, 1))
        return [of_dense]

    def _optimizers_of(self, model: DLRM) -> list[Any]:
        return fused_optimizers(model)

    def _note(self, end: int, *_: Any) -> None:
        """When the step of the tables begins, and when it ends."""
        self._step[end] = time.perf_counter()

    def _parts(self, times: list[float]) -> list[float]:
        forward, backward, optimizer = super()._parts(times)
        begin, end = self._step
        return [forward, backward - (end - begin), optimizer + (end - begin)]


def trainings_of(settings: Settings) -> list[Training]:
    """With PyTorch's optimizers, with those of this package, and with its tables, too."""
    ours = (
        ('one Adam(sparse="touched")', single_optimizer)
        if settings.single
        else ("SparseAdam and Adam", fused_optimizers)
    )
    theirs = "torch.optim", "SparseAdam and Adam(fused=True)"
    return [
        Training(Run(*theirs), torch_optimizers, settings),
        Training(Run("fusestep", ours[0]), ours[1], settings),
        BagTraining(Run("fusestep, EmbeddingBags", "SparseAdam in backward, and Adam"), settings),
    ]


def train(
    trainings: Sequence[Training], settings: Settings, log: ClickLog, held_out: Clicks,
    progress: Callable[[], None],
) -> None:  # fmt: skip
    """Take the steps that are left, each with all optimizers; ``progress`` is called after each.

    They take turns, so that what else the machine does meets them alike.
    """
    ends = np.linspace(0, settings.steps, 1 + settings.measurements)
    measured = np.rint(ends).astype(int).tolist()
    for number in range(len(trainings[0].run.losses), settings.steps + 1):
        turns = trainings if number % 2 else trainings[::-1]
        if number in measured:
            for training in turns:
                training.measure(held_out)
        if number < settings.steps:
            clicks = log.batch(number, settings.batch)
            for training in turns:
                training.step(clicks)
            progress()
