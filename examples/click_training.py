"""The training of a `DLRM` on a `ClickLog`, with optimizers of PyTorch or of this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from ..nn import torch as fused
from .click_runs import Run, Settings
from .clicks import ClickLog, Clicks
from .dlrm import DLRM

TABLE_RATE, DENSE_RATE = 5e-3, 1e-3
STATES = 2  # arrays of a table's size that Adam keeps


def bytes_of(sizes: Sequence[int], settings: Settings) -> int:
    """Memory of the tables and their states."""
    return (1 + STATES) * sum(sizes) * settings.dim * (8 if settings.float64 else 4)


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
        {"params": list(model.tables.parameters()), "lr": TABLE_RATE},
        {"params": model.dense_parameters, "lr": DENSE_RATE},
    ]
    return [fused.Adam(groups, sparse="touched")]


def choices(single: bool) -> list[tuple[str, str, Callable[[DLRM], list[Any]]]]:
    """Names, descriptions and optimizers of the runs."""
    ours = (
        ('one Adam(sparse="touched")', single_optimizer)
        if single
        else ("SparseAdam and Adam", fused_optimizers)
    )
    return [
        ("torch.optim", "SparseAdam and Adam(fused=True)", torch_optimizers),
        ("fusestep", *ours),
    ]


class Training:
    """A model, its optimizers and what is measured of them.

    The same settings give the same initial weights and the same batches to each.

    Args:
        run: is filled.
        make: the optimizers of a model.
        settings: what is trained, and for how long.
        log: the clicks to learn from.
        held_out: those to measure on.
    """

    def __init__(
        self, run: Run, make: Callable[[DLRM], list[Any]], settings: Settings, log: ClickLog,
        held_out: Clicks,
    ) -> None:  # fmt: skip
        self.run, self._settings, self._log, self._held_out = run, settings, log, held_out
        torch.manual_seed(settings.seed)
        self._dtype = torch.float64 if settings.float64 else torch.float32
        self._model = DLRM(log.sizes, settings.dim).to(self._dtype)
        self._optimizers = make(self._model)

    def train(self, progress: Callable[[Run], None]) -> None:
        """Take all steps; ``progress`` is called after each."""
        steps = self._settings.steps
        measured = np.rint(np.linspace(0, steps, 1 + self._settings.measurements)).astype(int)
        for number in range(steps):
            if number in measured:
                self._measure(number)
            self._step(self._log.batch(number, self._settings.batch))
            progress(self.run)
        self._measure(steps)

    def _step(self, clicks: Clicks) -> None:
        dense, labels = (torch.from_numpy(x).to(self._dtype) for x in (clicks.dense, clicks.labels))
        ids = torch.from_numpy(clicks.ids)
        times = [time.perf_counter()]
        loss = binary_cross_entropy_with_logits(self._model(dense, ids), labels)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        for optimizer in self._optimizers:
            optimizer.step()
        times.append(time.perf_counter())
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.run.losses.append(loss.item())
        for seconds, taken in zip(self.run.seconds.values(), np.diff(times), strict=True):
            seconds.append(float(taken))

    @torch.no_grad()
    def _measure(self, steps: int) -> None:
        held_out, size = self._held_out, self._settings.batch
        scores = [
            self._model(
                torch.from_numpy(held_out.dense[start : start + size]).to(self._dtype),
                torch.from_numpy(held_out.ids[:, start : start + size]),
            )
            for start in range(0, len(held_out.labels), size)
        ]
        self.run.auc[steps] = float(roc_auc_score(held_out.labels, torch.cat(scores).numpy()))
