"""Whole iterations of a DLRM in PyTorch with bags of ids: its own tables, and `nn.torch`'s.

Both train with Adagrad in one process, some iterations in turn: 26 tables of a click log, 64 wide,
in which each of 2,048 samples looks up 20 rows, and the layers of the example. Beside them is an
iteration of the layers alone, with numbers in the place of what tables would give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np

from ..cases import indices, model_shapes
from ..report.result import Progress, SpecialResult, tracked
from .training import OURS, SCENARIOS, THEIRS, Program, measured, torch_for

LAYERS = "layers alone"
FASTER = 2.5  # than PyTorch's iteration
BATCH, BAG, SETS = 2048, 20, 4  # samples, ids of each in a table, and batches that take turns


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure an iteration in all scenarios.

    Raises:
        BenchError: there is no PyTorch.
    """
    programs = programs_of(torch_for(result.name, threads))
    for scenario in tracked(SCENARIOS, progress):
        samples = measured(programs, scenario, threads)
        labels = {name: f"{scenario} {name}" for name in programs}
        result.add({label: samples[name, "iteration"] for name, label in labels.items()})
        result.limits[labels[OURS]] = result.times[labels[THEIRS]].median / FASTER


def programs_of(torch: Any) -> dict[str, Program]:
    """By name; all begin with the same weights, and see the same batches."""
    fused = import_module("fusestep.nn.torch")
    model_of = import_module("fusestep.examples.click_model.dlrm").DLRM
    sizes, (dim, *_) = zip(*model_shapes.click_log_tables(), strict=True)
    bags = partial(torch.nn.EmbeddingBag, mode="sum", sparse=True)
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(model_of(sizes, dim, bags))
        for weight in models[-1].tables.parameters():
            torch.nn.init.uniform_(weight, -0.01, 0.01)
    theirs, ours, layers = models
    adagrad = torch.optim.Adagrad
    of_tables = adagrad(theirs.tables.parameters())
    ours.tables = fused.EmbeddingBags(ours.tables)
    ours.tables.update_in_backward(fused.Adagrad(ours.tables.parameters()))
    pooled = torch.randn(BATCH, dim * len(sizes), requires_grad=True)
    del layers.tables
    layers.tables = lambda _: pooled.detach().requires_grad_()
    batches = [batch_of(torch, sizes, seed, BAG) for seed in range(SETS)]

    def loss_of(model: Any) -> Callable[[], Any]:
        turns = cycle(batches)

        def loss() -> Any:
            dense, ids, labels = next(turns)
            found = model(dense, ids)
            return torch.nn.functional.binary_cross_entropy_with_logits(found, labels)

        return loss

    return {
        THEIRS: ([of_tables, adagrad(theirs.dense_parameters, fused=True)], loss_of(theirs)),
        OURS: ([fused.Adagrad(ours.dense_parameters)], loss_of(ours)),
        LAYERS: ([fused.Adagrad(layers.dense_parameters)], loss_of(layers)),
    }


def batch_of(torch: Any, sizes: tuple[int, ...], seed: int, bag: int) -> tuple[Any, Any, Any]:
    """Dense features, ids ``[tables, BATCH, bag]`` and clicks."""
    rng = np.random.default_rng(seed)
    drawn = [indices.draw(indices.DEFAULT, n, BATCH * bag, seed * len(sizes) + t)
             for t, n in enumerate(sizes)]  # fmt: skip
    dense, labels = rng.standard_normal((BATCH, 13), np.float32), rng.integers(0, 2, BATCH)
    ids = np.reshape(drawn, (len(sizes), BATCH, bag))
    return *map(torch.from_numpy, (dense, ids)), torch.from_numpy(labels).float()
