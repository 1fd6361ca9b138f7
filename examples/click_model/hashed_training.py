"""Trainings on ids of 64 bits: rows as ids occur, a known vocabulary, and hashing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from ...nn import UniformRows
from ...nn import torch as fused
from .clicks import N_TABLES, Clicks, IntArray, hashed, quarter, table_sizes
from .runs import Run, Settings
from .training import BagTraining

AFTER = 2  # occurrences


class HashedTraining(BagTraining):
    """A training whose tables are made from their numbers, sizes and dims.

    Args:
        run: is filled, with the rows in use, too.
        settings: what is trained.
        table: ``table(number, rows, dim)`` makes a table.
        look: ``look(ids, number)`` gives what is looked up in it for ids of the log.
    """

    def __init__(
        self, run: Run, settings: Settings, table: Callable[[int, int, int], nn.Module],
        look: Callable[[IntArray, int], IntArray],
    ) -> None:  # fmt: skip
        numbers = count()
        self._look = look
        super().__init__(run, settings, lambda rows, dim: table(next(numbers), rows, dim))

    def _tensors(self, clicks: Clicks) -> tuple[Any, Any, Any]:
        dense, _, labels = super()._tensors(clicks)
        ids = [self._look(own, t) for t, own in enumerate(clicks.ids)]
        return dense, torch.from_numpy(np.stack(ids)), labels

    def measure(self, clicks: Clicks) -> None:
        """The AUC of held-out clicks, and the rows that are in use; nothing is admitted."""
        self._model.eval()
        super().measure(clicks)
        self._model.train()
        rows = sum(
            len(table.ids) if isinstance(table, fused.GrowingEmbedding) else len(table.weight)
            for table in self._model.tables.children()
        )
        self.run.rows[len(self.run.losses)] = rows


def trainings_of(settings: Settings) -> list[HashedTraining]:
    """A known vocabulary; rows as ids occur; fewer of them, with admission; hashing into these."""
    name = "SparseAdam in backward, and Adam"
    sizes = table_sizes(settings.rows)
    draws = [UniformRows(1 / np.sqrt(rows), settings.seed) for rows in sizes]

    def known(table: int, rows: int, dim: int) -> nn.Module:
        weight = torch.from_numpy(draws[table](hashed(np.arange(rows), table), (rows, dim)))
        return nn.Embedding(rows, dim, sparse=True, _weight=weight)

    def trick(table: int, rows: int, dim: int) -> nn.Module:
        return known(table, quarter(rows), dim)

    def growing(fewer: bool, table: int, rows: int, dim: int) -> nn.Module:
        options: Any = {"initial": draws[table], "seed": settings.seed}
        if fewer:
            options |= {"after": AFTER, "full": "evict"}
        return fused.GrowingEmbedding((quarter(rows) if fewer else rows) + 1, dim, **options)

    def remainder(ids: IntArray, table: int) -> IntArray:
        own = hashed(ids, table).view(np.uint64) % np.uint64(quarter(sizes[table]))
        return own.astype(np.int64)

    assert len(sizes) == N_TABLES
    make = HashedTraining
    return [
        make(Run("a known vocabulary", name), settings, known, lambda ids, _: ids),
        make(Run("IdMap", name), settings, partial(growing, False), hashed),
        make(Run("IdMap, fewer rows", name), settings, partial(growing, True), hashed),
        make(Run("hashing, fewer rows", name), settings, trick, remainder),
    ]
