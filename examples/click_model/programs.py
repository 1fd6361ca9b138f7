"""Programs that train a `DLRM` on ids of 64 bits: with PyTorch's tables, FBGEMM's, and ours.

Hashed tables look up the remainders of ids, and growing ones give rows to ids as they occur. All
look up a list of ids ``[samples, length]``, one for each table, and give sums of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ...nn import UniformRows
from ...nn import torch as fused
from .clicks import ClickLog, Clicks, FloatArray, hashed, quarter, table_sizes
from .dlrm import DLRM
from .runs import Settings

TORCH, FBGEMM, HASHED, GROWING = "torch", "fbgemm", "hashed bags", "growing bags"
HASHED_LIST, GROWING_LIST = "hashed list", "growing list"
KINDS = TORCH, FBGEMM, HASHED, GROWING, HASHED_LIST, GROWING_LIST
LAYERS, HIDDEN = "layers alone", "hidden model"
AFTER = 2  # the occurrence at which a table that grows admits an id
SHORT = Settings(steps=400, batch=256, rows=10_000, held_out=16_384)

Batch = tuple[Tensor, Tensor, Tensor]  # dense, ids [tables, samples, length], labels


class Program:
    """A model with one kind of tables; all kinds have the same layers at first.

    Args:
        kind: of its tables; `LAYERS` for constants in the place of tables.
        sizes: rows of each table.
        dim: length of a row.
        seed: of all weights.
        rate: of Adagrad.

    Attributes:
        model: the `DLRM`.
        optimizers: those that are called after backward.
    """

    def __init__(
        self, kind: str, sizes: Sequence[int], dim: int, seed: int = 0, rate: float = 0.02
    ) -> None:
        torch.manual_seed(seed)
        self.model = DLRM(sizes, dim, nn.Identity)
        self.model.tables, self.optimizers = tables_of(kind, sizes, dim, seed, rate)
        make: Callable[..., Any] = fused.Adagrad
        if kind in (TORCH, FBGEMM):
            make = partial(torch.optim.Adagrad, fused=True)
        self.optimizers.append(make(self.model.dense_parameters, lr=rate))

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the clicks of a batch."""
        dense, ids, labels = batch
        return binary_cross_entropy_with_logits(self.model(dense, ids), labels)

    def step(self, batch: Batch) -> None:
        """Learn from a batch."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(batch).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def kinds_here(*kinds: str) -> list[str]:
    """Without FBGEMM's, where it is not installed."""
    return [kind for kind in kinds if kind != FBGEMM or find_spec("fbgemm_gpu")]


def learned(settings: Settings) -> dict[str, float]:
    """The area below the curve (AUC) of held-out clicks, by kind, and of what made them.

    All learn from the same batches, in the second half of which the other half of the ids occurs,
    with rows for a quarter of the ids.
    """
    sizes = table_sizes(settings.rows)
    rows, log = [*map(quarter, sizes)], ClickLog(sizes, settings.seed, settings.steps // 2)
    kinds = kinds_here(TORCH, FBGEMM, HASHED, GROWING)
    programs = {kind: Program(kind, rows, settings.dim, settings.seed) for kind in kinds}
    for number in range(settings.steps):
        batch = _batch(log.batch(number, settings.batch))
        for program in programs.values():
            program.step(batch)
    held_out = log.held_out(settings.held_out)
    dense, ids, _ = _batch(held_out)
    areas = {HIDDEN: area(held_out.log_odds, held_out.labels)}
    with torch.no_grad():
        for kind, program in programs.items():
            areas[kind] = area(program.model.eval()(dense, ids).numpy(), held_out.labels)
    return areas


def _batch(clicks: Clicks) -> Batch:
    dense, rows, labels = map(torch.from_numpy, (clicks.dense, clicks.ids, clicks.labels))
    return hashed_batch((dense, rows[..., None], labels))


def area(scores: FloatArray, labels: FloatArray) -> float:
    """How often a click has a higher score than an impression without one."""
    n, ranks = int(labels.sum()), scores.argsort().argsort()
    return float((ranks[labels > 0].mean() - (n - 1) / 2) / (len(labels) - n))


# -- batches with ids of which all have rows, or some are new -------------------------------------


def hashed_batch(batch: Batch) -> Batch:
    """The batch with the ids of its row numbers."""
    dense, rows, labels = batch
    ids = np.stack([hashed(own, table) for table, own in enumerate(rows.numpy())])
    return dense, torch.from_numpy(ids), labels


def admit(model: nn.Module, sizes: Sequence[int]) -> None:
    """Give rows to the ids of all row numbers, where tables grow."""
    growing = (m for m in model.modules() if isinstance(m, fused.GrowingEmbedding))
    for table, (module, size) in enumerate(zip(growing, sizes, strict=False)):
        with torch.no_grad():
            module(torch.from_numpy(hashed(np.arange(size), table).repeat(AFTER)))


def with_new(batches: Sequence[Batch], sizes: Sequence[int], share: float) -> Iterator[Batch]:
    """Batches in turn, where such a share of the ids, and of a table's rows at most, is new.

    As many others were new in the batch before, so that tables that grow admit them.
    """
    for number in count():
        dense, known, labels = batches[number % len(batches)]
        ids = known.clone()
        for table, own in enumerate(ids.flatten(1)):
            if n := int(share * min(len(own), sizes[table])):
                new = hashed(sizes[table] + number * n + np.arange(2 * n), table)
                own[:: len(own) // (2 * n)][: 2 * n] = torch.from_numpy(new)
        yield dense, ids, labels


# -- tables ---------------------------------------------------------------------------------------


def tables_of(
    kind: str, sizes: Sequence[int], dim: int, seed: int, rate: float
) -> tuple[nn.Module, list[Any]]:
    """Tables of so many rows, and optimizers that are to be called after backward.

    PyTorch's have its Adagrad, all others row-wise Adagrad, and bags take its step in backward.
    """
    if kind == LAYERS:
        return Constants(len(sizes) * dim), []
    bounds = [1 / math.sqrt(rows) for rows in sizes]
    if kind == FBGEMM:
        return Batched(sizes, dim, bounds, rate), []
    pairs = list(zip(sizes, bounds, strict=True))
    if kind in (GROWING, GROWING_LIST):
        grown = partial(fused.GrowingEmbedding, after=AFTER, full="evict", seed=seed)
        made = [grown(rows + 1, dim, initial=UniformRows(bound, seed)) for rows, bound in pairs]
    else:
        make = nn.Embedding if kind == HASHED_LIST else partial(nn.EmbeddingBag, mode="sum")
        weights = [torch.empty(rows, dim).uniform_(-bound, bound) for rows, bound in pairs]
        made = [make(*weight.shape, sparse=True, _weight=weight) for weight in weights]
    bags = fused.EmbeddingBags(made) if kind in (HASHED, GROWING) else None
    tables = bags or SideBySide(made)
    make_optimizer: Callable[..., Any] = fused.RowWiseAdagrad
    if kind == TORCH:
        make_optimizer = torch.optim.Adagrad
    optimizer = make_optimizer(tables.parameters(), lr=rate)
    if bags is not None:
        bags.update_in_backward(optimizer)
    is_growing = kind in (GROWING, GROWING_LIST)
    return tables if is_growing else Hashed(tables, sizes), [] if bags else [optimizer]


def remainders(ids: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Rows of ids, ``[tables, samples, length]``."""
    rows = torch.empty((len(ids), *ids[0].shape), dtype=torch.int64)
    for own, size, out in zip(ids, sizes, rows, strict=True):
        torch.remainder(own, size, out=out)
    return rows


class Hashed(nn.Module):
    """Looks up remainders of ids.

    Args:
        tables: a module of row numbers.
        sizes: rows of each table.
    """

    def __init__(self, tables: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables, self._sizes = tables, sizes

    def forward(self, ids: list[Tensor]) -> Tensor:
        """Sums ``[samples, tables * dim]``."""
        found: Tensor = self.tables([*remainders(ids, self._sizes)])
        return found


class Constants(nn.Module):
    """So many numbers of each sample, which get a gradient as sums of rows would."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, ids: list[Tensor]) -> Tensor:
        """The same for all ids."""
        return torch.ones(len(ids[0]), self._width, requires_grad=True)


class SideBySide(nn.Module):
    """Tables that are called one after the other.

    Args:
        tables: embeddings and bags.
    """

    def __init__(self, tables: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: list[Tensor]) -> Tensor:
        """Sums ``[samples, tables * dim]``."""
        found = [table(own) for table, own in zip(self.tables, ids, strict=True)]
        if found[0].ndim > 2:  # of embeddings, a row for each id
            found = [rows.squeeze(1) if rows.shape[1] == 1 else rows.sum(1) for rows in found]
        return torch.cat(found, dim=1)


class Batched(nn.Module):
    """FBGEMM's module of all tables: looks up remainders, and takes its step in backward.

    Args:
        sizes: rows of each table.
        dim: length of a row.
        bounds: of the first weights of each table.
        rate: of row-wise Adagrad.
    """

    def __init__(
        self, sizes: Sequence[int], dim: int, bounds: Sequence[float], rate: float
    ) -> None:
        super().__init__()
        ops: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        self._sizes, place = sizes, (ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        self._module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place) for rows in sizes],
            optimizer=ops.OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=rate,
            eps=1e-10,
            pooling_mode=ops.PoolingMode.SUM,
        )
        for weight, bound in zip(self._module.split_embedding_weights(), bounds, strict=True):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, ids: list[Tensor]) -> Tensor:
        """Sums ``[samples, tables * dim]`` of the rows of remainders."""
        rows = remainders(ids, self._sizes)
        offsets = torch.arange(0, rows.numel() + 1, rows.shape[2])
        found: Tensor = self._module(rows.flatten(), offsets)
        return found
