"""Rows that sleep: the cost of dense Adam's numbers, beside lazy and dense-equivalent steps.

`nn.LazyAdam` on one table, the three ways in turn. Ids are drawn anew for each step by one law, so
that gaps are those of real batches; ``catch-up`` is `prepare` for the rows that a lookup reads, and
the step. Limits: twice the lazy step, and a part of the dense-equivalent one. A flush of a
table, all of whose rows sleep, may take one and a half dense-equivalent steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ... import nn
from ..report.result import Progress, SpecialResult, tracked

LAZY, CATCH_UP, DENSE = "lazy", "catch-up", "dense-equivalent"
SPARSE_UPDATES = {LAZY: "lazy", CATCH_UP: "catch_up", DENSE: "dense_equivalent"}
BATCH, ROUNDS, WARM, FLUSHES = 65_536, 40, 60, 8
OF_LAZY, FLUSH_OF_DENSE = 2.0, 1.5


class Law(NamedTuple):
    """A table, how its ids are drawn, and how much faster than every row it should be."""

    rows: int
    dim: int
    exponent: float
    of_dense: float


LAWS = {
    "500Kx64, zipf1.05": Law(500_000, 64, 1.05, 2.5),
    "500Kx64, zipf1.5": Law(500_000, 64, 1.5, 6.0),
    "10Mx16, zipf1.05": Law(10_000_000, 16, 1.05, 20.0),
}


def batches(law: Law, n: int) -> Iterator[np.ndarray]:
    """Ids of steps: the frequent rows are the same in all of them, scattered over the table."""
    rng = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, law.rows + 1, dtype=np.float64) ** -law.exponent)
    places = rng.permutation(law.rows)
    for _ in range(n):
        ranks = np.searchsorted(weights, rng.random(n_ids(law)) * weights[-1], side="right")
        yield places[np.minimum(ranks, law.rows - 1)]


def n_ids(law: Law) -> int:
    """Ids of a batch."""
    return min(BATCH, law.rows)


def run(result: SpecialResult, threads: int, progress: Progress) -> None:  # noqa: ARG001
    """Measure all laws."""
    for name, law in tracked(list(LAWS.items()), progress):
        lists = list(batches(law, WARM + ROUNDS))
        gradient = np.full((n_ids(law), law.dim), 0.01, np.float32)
        distinct = np.mean([len(np.unique(ids)) for ids in lists[WARM:]])
        label = f"{name}, {distinct:,.0f} different rows"
        optimizers = {way: _optimizer(law, way) for way in SPARSE_UPDATES}
        samples: dict[str, list[float]] = {way: [] for way in SPARSE_UPDATES}
        for k, ids in enumerate(lists):
            given = (nn.RowTensor(ids, gradient, (law.rows, law.dim)),)
            # In turn: who comes after the dense-equivalent step finds the caches full of it.
            ways = [*optimizers.items()]
            for way, optimizer in ways[k % 3 :] + ways[: k % 3]:
                if way == DENSE and k < WARM - 2:
                    continue  # takes long, and no other step depends on it
                samples[way].append(_seconds(partial(_step, optimizer, ids, given)))
        result.add({f"{label}: {way}": times[-ROUNDS:] for way, times in samples.items()})
        lazy, dense = (result.times[f"{label}: {way}"].median for way in (LAZY, DENSE))
        result.limits[f"{label}: {CATCH_UP}"] = min(OF_LAZY * lazy, dense / law.of_dense)
        own, flushes = optimizers[CATCH_UP], []
        for _ in range(FLUSHES):
            _step(own, lists[0], given)
            flushes.append(_seconds(own.flush))
        result.add({f"{label}: flush": flushes[1:]})
        result.limits[f"{label}: flush"] = FLUSH_OF_DENSE * dense


def _optimizer(law: Law, way: str) -> Any:
    table = np.zeros((law.rows, law.dim), np.float32)
    return nn.LazyAdam([table], sparse_update=SPARSE_UPDATES[way])


def _step(optimizer: Any, ids: np.ndarray, gradients: Any) -> None:
    if optimizer.sparse_update == SPARSE_UPDATES[CATCH_UP]:
        optimizer.prepare(optimizer.parameters[0], ids)
    optimizer(gradients)


def _seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
