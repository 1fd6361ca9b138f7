"""Rows that sleep: the cost of dense Adam's numbers, beside lazy and dense-equivalent steps.

`nn.LazyAdam` on one table, the three ways in turn. Ids are drawn anew for each step by one law, so
that gaps are those of real batches; ``catch-up`` is `prepare` for the rows that a lookup reads, and
the step. Limits: twice the lazy step, and a part of the dense-equivalent one. A flush of a
table, all of whose rows sleep, may take one and a half dense-equivalent steps.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ... import nn
from ..cases import indices
from ..measure import one_by_one
from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import Job

LAZY, CATCH_UP, DENSE = "lazy", "catch-up", "dense-equivalent"
SPARSE_UPDATES = {LAZY: "lazy", CATCH_UP: "catch_up", DENSE: "dense_equivalent"}
BATCH, ROUNDS, WARM, FLUSHES = 65_536, 40, 60, 8
OF_LAZY, FLUSH_OF_DENSE = 2.0, 1.5


class Law(NamedTuple):
    """A table, how its ids are drawn, and how much faster than every row it should be."""

    rows: int
    dim: int
    ids: str
    of_dense: float


LAWS = {
    "500Kx64, zipf1.05": Law(500_000, 64, "zipf1.05", 2.5),
    "500Kx64, zipf1.5": Law(500_000, 64, "zipf1.5", 6.0),
    "10Mx16, zipf1.05": Law(10_000_000, 16, "zipf1.05", 20.0),
}


def batches(law: Law, n: int) -> list[np.ndarray]:
    """Ids of steps: the frequent rows are the same in all of them, scattered over the table."""
    return np.split(indices.draw(law.ids, law.rows, n * n_ids(law)), n)


def n_ids(law: Law) -> int:
    """Ids of a batch."""
    return min(BATCH, law.rows)


def run(result: SpecialResult, threads: int, progress: Progress) -> None:  # noqa: ARG001
    """Measure all laws."""
    for name, law in tracked(list(LAWS.items()), progress):
        lists = batches(law, WARM + ROUNDS)
        distinct = np.mean([len(np.unique(ids)) for ids in lists[WARM:]])
        label = f"{name}, {distinct:,.0f} different rows"
        trainings = {way: Training(law, way, lists) for way in SPARSE_UPDATES}
        jobs = {f"{label}: {way}": Job(training.step) for way, training in trainings.items()}
        result.add(one_by_one(jobs, ROUNDS, WARM))
        lazy, dense = (result.times[f"{label}: {way}"].median for way in (LAZY, DENSE))
        result.limits[f"{label}: {CATCH_UP}"] = min(OF_LAZY * lazy, dense / law.of_dense)
        own = trainings[CATCH_UP]
        flush = Job(own.optimizer.flush, partial(own.take, lists[0]))
        result.add(one_by_one({f"{label}: flush": flush}, FLUSHES - 1, 1))
        result.limits[f"{label}: flush"] = FLUSH_OF_DENSE * dense


class Training:
    """A table whose rows are stepped in one way, by one batch of ``lists`` after the other."""

    def __init__(self, law: Law, way: str, lists: list[np.ndarray]) -> None:
        table = np.zeros((law.rows, law.dim), np.float32)
        self.optimizer = nn.LazyAdam([table], sparse_update=SPARSE_UPDATES[way])
        self._way, self._batches = way, enumerate(lists)
        self._gradient = np.full((n_ids(law), law.dim), 0.01, np.float32)

    def step(self) -> None:
        """Take the step of the next batch."""
        k, ids = next(self._batches)
        if self._way != DENSE or k >= WARM - 2:  # it takes long, and no other step depends on it
            self.take(ids)

    def take(self, ids: np.ndarray) -> None:
        """Take the step of a batch."""
        (table,) = self.optimizer.parameters
        if self._way == CATCH_UP:
            self.optimizer.prepare(table, ids)
        self.optimizer([nn.RowTensor(ids, self._gradient, table.shape)])
