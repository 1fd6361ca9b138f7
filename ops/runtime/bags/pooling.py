"""Pooling: the tables and features of bags, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....kernels.cpu import bags as kernels
from ....kernels.cpu.threads.allocation import Recycled
from ....kernels.storage import STORAGES
from ....kernels.tables import LARGEST, MEAN, SUM, Feature
from .. import check
from ..arrays import address_of, addresses_of, real_type
from ..device import device_of, is_on_device
from ..errors import reject

POOLINGS = {"sum": SUM, "mean": MEAN, "max": LARGEST, "none": SUM}


class Pooling:
    """Checked tables, the features that look up their rows, and how the rows are pooled.

    The outputs of features lie beside each other in the order of the features. Internally features
    are in the order of their tables, so that the ids of a table lie together.

    Args:
        where: the name of the caller in errors.
        tables: floating ``[N, D]`` arrays, all on the host or on one device.
        features: the table of each feature; None: one for each table.
        pooling: a key of `POOLINGS`.
        padding: the id of each feature that is ignored, or one for all features, or None.
        out_of_range: ``"raise"`` or ``"drop"``.
        open_ended: whether lists of offsets lack the end of the last bag.
        memory: that of outputs and of lists of ids of calls before; None: there were none.

    Attributes:
        pools: whether rows are pooled at all: several become one.
        is_on_device: whether the tables lie on a CUDA device.
        width: columns of the pooled output.
    """

    def __init__(
        self, where: str, tables: Sequence[Any], features: Sequence[int] | None,
        pooling: Any, padding: Any, out_of_range: Any, *, open_ended: bool = False,
        memory: Recycled | None = None,
    ) -> None:  # fmt: skip
        self.where, self.arrays, self.open_ended = where, list(tables), open_ended
        n = len(self.arrays)
        self.of = list(range(n)) if features is None else tables_of_features(where, features, n)
        _check_tables(where, tables, self.of)
        if not isinstance(pooling, str) or pooling not in POOLINGS:
            reject(ValueError, where, "pooling", "is unknown", tuple(POOLINGS), pooling)
        self.name, self.kind, self.pools = pooling, POOLINGS[pooling], pooling != "none"
        self.is_on_device = is_on_device(tables[0])
        self.drops = check.out_of_range_rule(where, out_of_range) == "drop"
        self.padding = self._padding(padding)
        self.leaves_out = self.drops or any(row is not None for row in self.padding)
        self.shapes: list[Any] = [table.shape for table in tables]
        self.addresses = addresses_of(tables)
        self.real: np.dtype[Any] = np.dtype(real_type(tables[0].dtype))
        self.widths = [tables[t].shape[1] for t in self.of]
        self.columns = [0]
        for width in self.widths:
            self.columns.append(self.columns[-1] + width)
        self.unit, self.width = math.gcd(*self.columns), self.columns[-1]
        self.order = sorted(range(len(self.of)), key=lambda f: self.of[f])
        # With one feature for each table, in their order, nothing has to be reordered.
        self.is_ordered = self.order == list(range(len(self.of)))
        counts = np.bincount(self.of, minlength=n)
        self.features_before = np.concatenate(([0], np.cumsum(counts)))  # each table; then in all
        self._records: dict[tuple[bool, bool], np.ndarray] = {}
        self.memory = Recycled() if memory is None else memory

    def output_shapes(self, bags: Sequence[int]) -> list[tuple[int, int]]:
        """The shape of the output of each feature, for its bags in the order of the tables.

        Raises:
            ValueError: rows of gradients cannot be numbered in int32.
        """
        if self.pools and bags[0] * self.width // self.unit > kernels.MOST:
            wrong, expected = "is too large", f"at most {kernels.MOST} parts of rows"
            reject(ValueError, self.where, "the output", wrong, expected, (bags[0], self.width))
        by_feature = dict(zip(self.order, bags, strict=True))
        return [(by_feature[f], width) for f, width in enumerate(self.widths)]

    def ordered(self, by_feature: Sequence[Any]) -> list[Any]:
        """One value for each feature, in the order of the tables."""
        return [by_feature[f] for f in self.order]

    def records(self, *, sums: bool = False, weighted: bool = False) -> np.ndarray:
        """The `Feature` records of the loops, in the order of the tables."""
        records = self._records.get((sums, weighted))
        if records is None:
            made = [self._record(f, sums, weighted) for f in self.order]
            records = self._records[sums, weighted] = np.array(made, kernels.FEATURES)
        return records

    def columns_below(self, bags: Any) -> np.ndarray:
        """`Feature.column` of features that are not pooled, for their bags.

        The gradients of a table's features are joined, one below the other.
        """
        before, tables = np.cumsum([0, *bags]), np.array(self.ordered(self.of))
        columns: np.ndarray = before[:-1] - before[self.features_before][tables]
        return columns

    def _record(self, f: int, sums: bool, weighted: bool) -> Feature:
        table, padding, item = self.arrays[self.of[f]], self.padding[f], self.real.itemsize
        w = STORAGES[table.dtype]
        pool = kernels.pool_of(w, self.kind, weighted=weighted) if sums else 0
        column, row, unit = 0, self.widths[f], self.widths[f]
        if self.pools:
            column, row, unit = self.columns[f], self.width, self.unit
        return Feature(
            table=address_of(table), row_bytes=table.shape[1] * w.itemsize, rows=table.shape[0],
            width=table.shape[1], pool=pool, padding=-1 if padding is None else padding,
            out=column * item, stride=row * item, column=column // unit, row=row // unit,
        )  # fmt: skip

    def _padding(self, padding: Any) -> list[int | None]:
        each = padding_of_features(self.where, padding, len(self.of))
        for f, row in enumerate(each):
            rows = len(self.arrays[self.of[f]])
            if row is not None and not 0 <= row < rows:
                name = f"padding_idx of feature {f}"
                reject(ValueError, self.where, name, "is out of range", f"0 <= id < {rows}", row)
        return each


def padding_of_features(where: str, padding: Any, n: int) -> list[int | None]:
    """The id of each of ``n`` features that is ignored, from one for all or a list; None: none."""
    each = padding if isinstance(padding, list | tuple) else [padding] * n
    if len(each) != n:
        wrong, expected = "has a wrong length", f"{n}, one for each feature"
        reject(ValueError, where, "padding_idx", wrong, expected, len(each))
    for row in each:
        if isinstance(row, bool) or not isinstance(row, int | np.integer | None):
            got = type(row).__name__
            reject(TypeError, where, "padding_idx", "has a wrong type", "an int or None", got)
    return [None if row is None else int(row) for row in each]


def tables_of_features(where: str, features: Any, n: int) -> list[int]:
    """The table of each feature."""
    if not isinstance(features, list | tuple):
        got = type(features).__name__
        reject(TypeError, where, "features", "have a wrong type", "a list of int", got)
    for f, table in enumerate(features):
        if isinstance(table, bool) or not isinstance(table, int | np.integer):
            got = type(table).__name__
            reject(TypeError, where, f"features[{f}]", "has a wrong type", "an int", got)
        if not 0 <= table < n:
            wrong, expected = "is no table", f"0 <= table < {n}"
            reject(ValueError, where, f"features[{f}]", wrong, expected, table)
    return [int(table) for table in features]


def _check_tables(where: str, tables: Sequence[Any], of: Sequence[int]) -> None:
    if not of:
        reject(ValueError, where, "tables", "are missing", "at least one", "none")
    for t, table in enumerate(tables):
        name = f"tables[{t}]"
        check.float_dtype(where, name, table)
        if table.ndim != 2 or table.shape[1] == 0:
            wrong, expected = "has a wrong shape", "(N, D) with at least 1 column"
            reject(ValueError, where, name, wrong, expected, table.shape)
        if not (table.flags.c_contiguous and table.flags.aligned):
            wrong, expected = "is not contiguous", "a C-contiguous array"
            reject(ValueError, where, name, wrong, expected, f"strides {table.strides}")
        if table.shape[0] > kernels.MOST:
            wrong, expected = "has too many rows", f"at most {kernels.MOST}"
            reject(ValueError, where, name, wrong, expected, table.shape[0])
    if len({real_type(table.dtype) for table in tables}) > 1:
        wrong, expected = "differ in the type of the arithmetic", "float64 in all or in none"
        reject(TypeError, where, "tables", wrong, expected, [str(t.dtype) for t in tables])
    device_of(where, {f"tables[{t}]": table for t, table in enumerate(tables)})
    check.no_overlap(where, [f"tables[{t}]" for t in range(len(tables))], tables)


def check_multiplies(pooling: Pooling, *, is_kept: bool) -> None:
    """Check that weights of ids have gradients.

    Args:
        pooling: how the rows were pooled.
        is_kept: whether the forward pass has kept the rows that they need.

    Raises:
        ValueError: there are no such gradients.
    """
    if pooling.name != "sum" or not is_kept:
        wrong, expected = "have no gradient", "pooling 'sum', and weights in the forward"
        got = f"pooling {pooling.name!r}" if is_kept else "none"
        reject(ValueError, pooling.where, "per_sample_weights", wrong, expected, got)


def kind_of(argument: Any) -> str:
    """A word for an argument that should have been arrays: its type, or its length."""
    is_list = isinstance(argument, list | tuple)
    return f"{len(argument)} of them" if is_list else type(argument).__name__
