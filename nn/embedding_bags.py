"""Embedding tables of a recommender: pooled together, and updated by an optimizer together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from ..kernels.cpu.threads.allocation import read_at_random
from ..ops.runtime.arrays import addresses_of
from ..ops.runtime.bags.device import DevicePooled
from ..ops.runtime.bags.ids import read
from ..ops.runtime.bags.pooled import Pooled, pool
from ..ops.runtime.bags.pooling import Pooling, tables_of_features
from ..ops.runtime.bags.tensor import BagTensor
from ..ops.runtime.errors import reject
from .base.arguments import check_kind
from .base.ids.id_arrays import Admissions
from .base.ids.id_map import IdMap
from .base.parameter import Parameter
from .engine.bag_maps import BagMaps, FoundRows
from .engine.catch_up import spans_of
from .fused import FusedOptimizer

_NAME = "EmbeddingBags"
_array_of, _shape_of = attrgetter("array"), attrgetter("shape")


class _Forward(NamedTuple):
    """The last forward."""

    pooled: Pooled | DevicePooled
    pooling: Pooling
    thread: int
    rows: Sequence[FoundRows]  # of ids in front of which there is a map


class EmbeddingBags:
    """Tables that are pooled in one call, whose optimizer reads the gradient of the output.

    `ops.EmbeddingBags` has the formula, and the arguments that are explained there. `backward`
    takes a step of the optimizer in which no gradient of a table is ever in memory: rows that
    occur are summed from the gradient of the pooled output, in the order of their occurrence, and
    updated at once. The result is that of the optimizer's step on the expanded gradients, to the
    last bit in float32 and float64, for every rule, option and number of threads; with
    ``sparse_update="lazy"`` rows that do not occur rest, with ``"dense_equivalent"`` they step
    with a gradient of 0.

    Args:
        parameters: the tables, ``[N, D]`` parameters of the optimizer, or the arrays that it was
            made with; all on the host or on one CUDA device.
        optimizer: an optimizer of `nn` that takes row-sparse gradients for them. It may have other
            parameters too, which `backward` leaves as they are (as a gradient None does).
        pooling: ``"sum"``, ``"mean"``, ``"max"`` or ``"none"``.
        features: the table of each feature; several may share one. Default: one for each table.
        padding_idx: an id that counts for nothing; int, or a list with one or None a feature.
        out_of_range: ids out of range ``"raise"`` an error, or count for nothing (``"drop"``).
        maps: an `IdMap` or None for each feature, whose ids are then int64 or uint64 of any value
            and get rows when they occur; features of one table have the same map. `padding_idx` is
            an id, too, and never admitted. Ids without a row read row 0, and have no gradient.
        new_rows: the weights with which rows of maps begin: a number, or a function such as
            `UniformRows`; see `FusedOptimizer.reset_rows`, which is called for them.

    Call arguments:
        ids, offsets, per_sample_weights, out: as `ops.EmbeddingBags`. Ids are copied: what
            becomes of the arrays afterwards does not matter to `backward`.
        step: with maps the number of the step, in which ids are admitted and counted; None: nothing
            is, as in an evaluation.

    Returns:
        ``[batch, sum of D]``, or with ``"none"`` a list of ``[n, D]``.

    On a CUDA device calls are enqueued, as `ops.EmbeddingBags` says. After a bad id or offset
    `backward` changes nothing either. A step with ``optimizer.target == "CPU"`` takes no gradients
    of bags there.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a value, shape or offset does not fit, or a table is none of the optimizer's.
        IndexError: an id is out of range.
        Nothing has been written when an error is raised, but ids may have been admitted when
        ``out`` does not fit.

    >>> import numpy as np
    >>> from fusestep import nn
    >>> tables = [np.ones((3, 2), np.float32), np.ones((4, 1), np.float32)]
    >>> bags = EmbeddingBags(tables, nn.SGD(tables, 0.5))
    >>> ids = [np.array([2, 0, 2]), np.array([3])]
    >>> offsets = [np.array([0, 2, 3]), np.array([0, 0, 1])]
    >>> bags(ids, offsets).tolist()
    [[2.0, 2.0, 0.0], [1.0, 1.0, 1.0]]
    >>> bags.backward(np.ones((2, 3), np.float32))
    >>> tables[0].tolist()
    [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self, parameters: Sequence[Any], optimizer: FusedOptimizer, pooling: str = "sum", *,
        features: Sequence[int] | None = None,
        padding_idx: int | Sequence[int | None] | None = None, out_of_range: str = "raise",
        maps: Sequence[IdMap | None] | None = None, new_rows: Any = 0.0,
    ) -> None:  # fmt: skip
        expected = "an optimizer of nn that is one rule"
        check_kind(_NAME, "optimizer", optimizer, FusedOptimizer, expected)
        if not isinstance(parameters, list | tuple):
            got = type(parameters).__name__
            reject(TypeError, _NAME, "parameters", "have a wrong type", "a list", got)
        self.optimizer = optimizer
        self._places = [_place(p, k, optimizer) for k, p in enumerate(parameters)]
        self._chosen: Any = pooling, padding_idx, out_of_range
        self._features, self._new_rows = features, new_rows
        self._maps: BagMaps | None = None
        if maps is not None:
            n = len(self._places)
            of = [*range(n)] if features is None else tables_of_features(_NAME, features, n)
            self._maps = BagMaps(_NAME, maps, of, padding_idx, out_of_range, self._begin)
            self._chosen = pooling, self._maps.padding, self._maps.out_of_range
        self._known: Pooling | None = None
        self._read()
        self._last: _Forward | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A forward of one object is none of its copy.
        return {**vars(self), "_last": None, "_known": None}

    @property
    def parameters(self) -> list[Parameter]:
        """The tables."""
        return [self.optimizer.parameters[i] for i in self._places]

    def _read(self) -> Pooling:
        """The tables as they are now, and what follows from them."""
        arrays = [p.array for p in self.parameters]
        if self._maps is not None:
            self._maps.check_tables(arrays)
        for array in arrays if self.optimizer.sparse_update != "dense_equivalent" else ():
            read_at_random(array)  # a forward reads rows before the first step
        pooling = self._known = Pooling(_NAME, arrays, self._features, *self._chosen)
        return pooling

    def _begin(self, new: Sequence[tuple[int, Admissions]]) -> None:
        """Let rows begin anew that maps have handed out."""
        tables = self.parameters
        self.optimizer.reset_rows_of([(tables[t], x.rows, self._new_rows, x.ids) for t, x in new])

    def __call__(
        self, ids: Any, offsets: Any = None, per_sample_weights: Any = None, *, out: Any = None,
        step: int | None = None,
    ) -> Any:  # fmt: skip
        """Pool rows of all tables; see the class."""
        pooling = self._known
        rows: list[FoundRows] = []
        if pooling is None or not self._are_bound(pooling):
            pooling = self._read()
        if self._maps is not None:
            ids, rows = self._maps.rows(pooling, ids, offsets, step)
        elif step is not None:
            reject(ValueError, _NAME, "step", "is of no use", "maps, or None", step)
        if self.optimizer.sparse_update == "catch_up":
            host_ids = read(pooling, ids, offsets, per_sample_weights)
            for k, spans in spans_of(pooling, host_ids).items():
                self.optimizer.prepare_spans(self._places[k], spans)
        pooled = pool(pooling, ids, offsets, per_sample_weights, out)
        self._last = _Forward(pooled, pooling, threading.get_ident(), rows)
        return pooled.out

    def _are_bound(self, pooling: Pooling) -> bool:
        """Whether the parameters still have these arrays, which nobody has resized in place."""
        arrays = map(_array_of, map(self.optimizer.parameters.__getitem__, self._places))
        return (
            all(map(is_, arrays, pooling.arrays))
            and [*map(_shape_of, pooling.arrays)] == pooling.shapes
            and addresses_of(pooling.arrays) == pooling.addresses
        )

    def gradients(self, grad_out: Any) -> tuple[BagTensor | None, ...]:
        """The gradients of the last forward, in the order of the optimizer, which takes them.

        Those of several forwards are accumulated as lists: ``[first, second]`` for each table.
        `ops.clip_by_global_norm` and whatever else takes a `RowTensor` expands them to a row for
        each id; an optimizer's own ``clipnorm`` does not. Gradients on a device cannot be expanded
        (lists of them neither): a `RuntimeError` says so.

        Args:
            grad_out: the floating gradient of the output of the last call, or a list with that of
                each feature (which is joined to one array first; on a device only with ``"none"``).
                It is read by the step.

        Returns:
            A `BagTensor` for each table, None for other parameters.

        Raises:
            RuntimeError: there was no forward, it was another thread's, or its tables were
                rebound since.
            TypeError, ValueError: ``grad_out`` does not fit the output.
        """
        by_parameter: list[BagTensor | None] = [None] * len(self.optimizer.parameters)
        gradients = self._pooled().gradients(grad_out)
        mapped = self._maps.of_tables if self._maps is not None else {}
        for t, (i, gradient) in enumerate(zip(self._places, gradients, strict=True)):
            by_parameter[i] = gradient.without(0) if t in mapped else gradient
        return tuple(by_parameter)

    def weight_gradients(self, grad_out: Any) -> list[np.ndarray]:
        """The gradients of the weights of the ids in the last forward; before `backward`.

        Args:
            grad_out: as `gradients`.

        Returns:
            As `ops.EmbeddingBags.weight_gradients`.

        Raises:
            RuntimeError, TypeError, ValueError: as `gradients`; there were no sums.
        """
        return self._pooled().weight_gradients(grad_out)

    def _pooled(self) -> Pooled | DevicePooled:
        """The last forward, if a gradient can follow it."""
        last = self._last
        wrong = ""
        if last is None:
            wrong = "needs a forward before each"
        elif last.thread != threading.get_ident():
            wrong = "has another thread's forward before it"
        elif not self._are_bound(last.pooling):
            wrong = "has tables that were rebound since the forward"
        elif last.rows and not all(rows.are_current() for rows in last.rows):
            wrong = "has rows that were given back since the forward"
        if last is None or wrong:
            raise RuntimeError(f"{_NAME}: backward {wrong}: call the bags first")
        return last.pooled

    def backward(self, grad_out: Any) -> None:
        """A step of the optimizer, with the gradients of the last forward.

        Args:
            grad_out: as `gradients`.

        Raises:
            RuntimeError, TypeError, ValueError, IndexError, OverflowError: as `gradients`, and as
                the optimizer. Nothing has changed then, and the forward can be used again.
        """
        self.optimizer(self.gradients(grad_out))
        self._last = None


def _place(parameter: Any, k: int, optimizer: FusedOptimizer) -> int:
    """The number of a parameter among those of the optimizer."""
    places = [i for i, p in enumerate(optimizer.parameters) if p.is_of(parameter)]
    if not places:
        wrong, expected = "is none of the optimizer's", "a parameter or an array that it has"
        reject(ValueError, _NAME, f"parameters[{k}]", wrong, expected, type(parameter).__name__)
    return places[0]
