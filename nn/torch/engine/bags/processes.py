"""Bags of tables whose rows several processes own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....kernels.tables import MEAN
from .....ops.runtime.bags.given import Ids
from .....ops.runtime.bags.ids import check_features
from .....ops.runtime.bags.pooled import pool
from .....ops.runtime.bags.pooling import Pooling
from .....ops.runtime.bags.tensor import BagTensor
from .....ops.runtime.errors import reject
from ....base.ids.id_arrays import Admissions
from ....distributed.agreement import attempted
from ....distributed.bag_route import BagRoute, Bags
from ..memory import array_of
from ..sleep import prepare_rows
from .arguments import WHERE, arrays_of


class RoutedBags:
    """Bags whose ids have gone to the owners of their rows; `pool` gets these.

    Args:
        pooling: of the tables of this process.
        tables: the modules, all with the same ``comm``.
        parts: the ids of each feature, int64 arrays.
        call: ids, offsets and weights, as `EmbeddingBags` was called.
        steps: of each table, in which ids are admitted; None: they are not.
        begin: as that of `BagRoute`.
        error: what this process has found wrong.
    """

    def __init__(
        self, pooling: Pooling, tables: Sequence[Any], parts: Sequence[np.ndarray],
        call: tuple[Any, Any, Any], steps: Sequence[int | None],
        begin: Callable[[Sequence[tuple[int, Admissions]]], Any], error: Exception | None,
    ) -> None:  # fmt: skip
        self._pooling, self._tables = pooling, tables
        modules = [tables[t] for t in pooling.of]
        bags, found = (None, error) if error else attempted(self._read, call, modules, parts)
        shapes = [(table.embedding_dim, str(table.weight.dtype)) for table in tables]
        subject = {
            "mode": pooling.name, "shapes": shapes, "weighted": call[2] is not None,
            "average": [table.average for table in tables],
        }  # fmt: skip
        padding = [table.padding_idx for table in tables]
        shards = [table.shard for table in tables]
        of = pooling.of, bags, padding, steps, begin
        self._route = BagRoute(WHERE, shards, *of, subject, found)

    def _read(
        self, call: tuple[Any, Any, Any], modules: Sequence[Any], parts: Sequence[np.ndarray]
    ) -> list[Bags]:
        pooling, (ids, offsets, _) = self._pooling, call
        if len({table.average for table in self._tables}) > 1:
            reject(ValueError, WHERE, "average", "differs", "one for all tables", "both")
        if pooling.name == "max":
            wrong, expected = "is not supported", "'sum' or 'mean' for tables with comm"
            reject(ValueError, WHERE, "mode", wrong, expected, "max")
        # Offsets are checked beside ids that fit any table: these are numbers of any size.
        zeros = _map(lambda x: torch.zeros_like(x, dtype=torch.int64), ids)
        self._arrays = arrays_of((zeros, offsets, call[2]), modules)
        features = check_features(pooling, *self._arrays[:2])
        bag_of = [_bag_of(feature) for feature in features]
        self._factors = self._factors_of(bag_of)
        return [Bags(x.reshape(-1), of) for x, of in zip(parts, bag_of, strict=True)]

    def _factors_of(self, bag_of: Sequence[np.ndarray]) -> np.ndarray | None:
        """The weights of the occurrences in the sums, feature by feature; None: all are 1."""
        pooling, given = self._pooling, self._arrays[2]
        if pooling.kind == MEAN:
            one = pooling.real.type(1)
            return np.concatenate([one / np.bincount(x)[x].astype(pooling.real) for x in bag_of])
        if given is None:
            return None
        lists = given if isinstance(given, list) else [given]
        return np.concatenate([x.reshape(-1) for x in lists]).astype(pooling.real)

    def pool(self, weights: Sequence[Tensor]) -> RoutedBags:
        """Have the rows, and pool them: ``out`` is the result."""
        pooling, route = self._pooling, self._route
        for weight, needed in zip(weights, route.needed, strict=True):
            prepare_rows(weight, needed, WHERE)
        rows = route.rows([array_of(weight.detach()) for weight in weights])
        own = Pooling(
            WHERE, rows, pooling.of, pooling.name, None, "raise", open_ended=pooling.open_ended,
            memory=pooling.memory,
        )  # fmt: skip
        ids, offsets, factors = self._arrays
        if isinstance(ids, list):
            ids = [x.reshape(y.shape) for x, y in zip(route.places, ids, strict=True)]
        else:
            ids = np.concatenate(route.places).reshape(ids.shape)
        pooled = pool(own, ids, offsets, factors)
        self.out, self.weight_gradients = pooled.out, pooled.weight_gradients
        return self

    def gradients(self, grad: np.ndarray) -> list[BagTensor]:
        """The gradient of each table's rows of this process, of the bags of all processes."""
        pooling = self._pooling
        return self._route.gradients(
            grad, pooling.columns, self._factors, pooling.shapes,
            average=self._tables[0].average,
        )  # fmt: skip


def _map(function: Callable[[Any], Any], ids: Any) -> Any:
    return [*map(function, ids)] if isinstance(ids, list | tuple) else function(ids)


def _bag_of(feature: Ids) -> np.ndarray:
    """The number of the bag of each id of a feature."""
    if feature.offsets is None:
        return np.repeat(np.arange(feature.bags), feature.length)
    bounds = np.append(feature.offsets, feature.end)[: feature.bags + 1].astype(np.int64)
    return np.repeat(np.arange(feature.bags), np.diff(bounds))
