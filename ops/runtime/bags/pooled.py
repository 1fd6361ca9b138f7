"""Bags of ids as they are given: read and checked, pooled, and turned into gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....kernels.cpu import bags as kernels
from ....kernels.cpu.threads import allocation
from ....kernels.storage import STORAGES
from .. import check
from ..arrays import address_of, adopt, real_type
from .tensor import BagTensor
from ..errors import reject
from ..row_step import RowGradient

POOLINGS = "sum", "mean", "none"


class Options(NamedTuple):
    """How bags are pooled."""

    where: str  # how errors name who pools
    pooling: str
    padding: Sequence[int | None]  # of each feature
    drops: bool  # whether ids out of range count for nothing

    @classmethod
    def of(
        cls, where: str, pooling: Any, padding: Any, out_of_range: Any, tables: Tables
    ) -> Options:
        """Checked options for the features of some tables."""
        if not isinstance(pooling, str) or pooling not in POOLINGS:
            reject(ValueError, where, "pooling", "is unknown", POOLINGS, pooling)
        drops = check.out_of_range_rule(where, out_of_range) == "drop"
        given = padding if isinstance(padding, list | tuple) else [padding] * len(tables.of)
        if len(given) != len(tables.of):
            wrong, expected = "has a wrong length", f"{len(tables.of)}, one for each feature"
            reject(ValueError, where, "padding_idx", wrong, expected, len(given))
        for f, own in enumerate(given):
            rows = len(tables.arrays[tables.of[f]])
            if own is None:
                continue
            if isinstance(own, bool) or not isinstance(own, int | np.integer):
                got = type(own).__name__
                reject(TypeError, where, "padding_idx", "has a wrong type", "an int or None", got)
            if not 0 <= own < rows:
                name = f"padding_idx of feature {f}"
                reject(ValueError, where, name, "is out of range", f"0 <= id < {rows}", own)
        return cls(where, pooling, [None if own is None else int(own) for own in given], drops)


class _Ids(NamedTuple):
    """The ids of one feature."""

    name: str  # how errors name them
    array: np.ndarray  # contiguous
    bags: int
    offsets: np.ndarray | None  # contiguous, [bags + 1]; None: all bags have ``length`` ids
    offsets_name: str
    begin: int  # of the array
    end: int
    length: int


class Tables:
    """Tables with the features that look up rows of them.

    Outputs of features lie beside each other in their own order; within, they are in that of their
    tables, whose ids then lie together.
    """

    def __init__(
        self, where: str, tables: Sequence[np.ndarray], features: Sequence[int] | None
    ) -> None:
        self.arrays, n = list(tables), len(tables)
        self.of = list(range(n)) if features is None else _features(where, features, n)
        if not self.of:
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
        check.no_overlap(where, [f"tables[{t}]" for t in range(n)], tables)
        self.shapes: list[Any] = [table.shape for table in tables]
        self.real: np.dtype[Any] = np.dtype(real_type(tables[0].dtype))
        self.widths = [tables[t].shape[1] for t in self.of]
        self.columns = [0]
        for width in self.widths:
            self.columns.append(self.columns[-1] + width)
        self.unit = math.gcd(*self.columns)
        self.order = sorted(range(len(self.of)), key=lambda f: self.of[f])

    @property
    def width(self) -> int:
        """Columns of the pooled output."""
        return self.columns[-1]


class Pooled:
    """Bags that were checked and pooled; ``out`` has the result."""

    def __init__(
        self,
        options: Options,
        tables: Tables,
        ids: Any,
        offsets: Any,
        weights: Any = None,
        out: Any = None,
        *,
        sums: bool = True,
    ) -> None:
        self._options, self._tables = options, tables
        where, pools = options.where, options.pooling != "none"
        lists = _read_ids(where, len(tables.of), ids, offsets, pools=pools)
        self._lists, n = lists, sum(own.end - own.begin for own in lists)
        if n > kernels.MOST:
            reject(ValueError, where, "ids", "are too many", f"at most {kernels.MOST}", n)
        factors = _read_weights(options, tables, lists, weights)
        self.out: Any = None
        if pools:
            self.batch = lists[0].bags
            if self.batch * tables.width // tables.unit > kernels.MOST:
                wrong, expected = "is too large", f"at most {kernels.MOST} parts of rows"
                reject(ValueError, where, "the output", wrong, expected,
                       (self.batch, tables.width))  # fmt: skip
            shape = (self.batch, tables.width)
            if sums:
                read = [
                    *tables.arrays,
                    *(o.array for o in lists),
                    *(o.offsets for o in lists if o.offsets is not None),
                    *(factors or ()),
                ]
                self.out = _output(where, out, shape, tables.real, read)
        else:
            if out is not None:
                wrong, expected = "is given without pooling", "None: an array for each feature"
                reject(ValueError, where, "out", wrong, expected, type(out).__name__)
            if sums:
                self.out = [
                    allocation.empty((own.bags, width), tables.real)
                    for own, width in zip(lists, tables.widths, strict=True)
                ]
        # These live as long as what has their addresses.
        self._keep = tables.arrays, factors
        self._bags = kernels.Bags(
            [self._feature(f, factors) for f in tables.order],
            drops=options.drops, means=options.pooling == "mean", weighted=factors is not None,
        )  # fmt: skip
        if self._bags.is_bad:
            self._reject()

    def _feature(self, f: int, factors: Sequence[np.ndarray] | None) -> kernels.Feature:
        own, tables, options = self._lists[f], self._tables, self._options
        table, real = tables.arrays[tables.of[f]], tables.real.itemsize
        column, row, out, stride = 0, 1, 0, tables.widths[f] * real
        if options.pooling != "none":
            column, row = tables.columns[f] // tables.unit, tables.width // tables.unit
            stride = tables.width * real
            if self.out is not None:
                out = address_of(self.out) + tables.columns[f] * real
        else:  # gradients of the features of a table are joined, in order
            earlier = [e for e in range(f) if tables.of[e] == tables.of[f]]
            column = sum(self._lists[e].bags for e in earlier)
            if self.out is not None:
                out = address_of(self.out[f])
        padding, index = options.padding[f], own.array.itemsize
        at = (0, 4) if own.offsets is None else (address_of(own.offsets), own.offsets.itemsize)
        rows, width = tables.shapes[tables.of[f]]
        return kernels.Feature(
            address_of(table), STORAGES[table.dtype], rows, width, own.bags,
            address_of(own.array), index, own.end - own.begin, *at, own.begin, own.end, own.length,
            -1 if padding is None else padding, 0 if factors is None else address_of(factors[f]),
            out, stride, column, row,
        )  # fmt: skip

    def _reject(self) -> None:
        """Say what does not fit, of the first feature in which something does not."""
        where, tables, options = self._options.where, self._tables, self._options
        for f, own in enumerate(self._lists):
            _check_offsets(where, own)
            ids, rows = own.array[own.begin : own.end], len(tables.arrays[tables.of[f]])
            if not options.drops and len(ids):
                is_bad = (ids < 0) | (ids >= rows)
                if is_bad.any():
                    k = int(np.argmax(is_bad))
                    name, expected = f"{own.name}[{own.begin + k}]", f"0 <= id < {rows}"
                    reject(IndexError, where, name, "is out of range", expected, int(ids[k]))
        raise AssertionError("the bags are bad and fit")

    def gradients(self, grad: Any) -> list[Any]:
        """The gradient of each table for that of the output: a `BagTensor`.

        Raises:
            TypeError, ValueError: it does not fit the output.
        """
        options, tables = self._options, self._tables
        where = options.where
        if options.pooling == "none":
            arrays, unit = self._joined(grad), None
        else:
            if isinstance(grad, list | tuple):
                shapes = [(self.batch, width) for width in tables.widths]
                parts = _gradients(where, grad, shapes)
                array = np.concatenate(parts, axis=1)
            else:
                array = _gradient(where, "grad", grad, (self.batch, tables.width))
            arrays, unit = [array] * len(tables.arrays), tables.unit
        rows, weights = self._bags.rows_of_gradient()
        ends = np.zeros(len(tables.arrays) + 1, np.int64)
        bags = 0
        for f in tables.order:
            bags += self._lists[f].bags
            ends[tables.of[f] + 1 :] = self._bags.bounds[bags]
        found, ids = [], self._bags.ids
        at_ids, at_values = address_of(ids), [address_of(array) for array in arrays]
        for t, shape in enumerate(tables.shapes):
            begin, end = int(ends[t]), int(ends[t + 1])
            own, step = slice(begin, end), unit or shape[1]
            source = RowGradient(
                ids[own], arrays[t], at_ids + begin * ids.itemsize, at_values[t], None, 0,
                rows[own], step * arrays[t].itemsize, None if weights is None else weights[own],
            )  # fmt: skip
            found.append(BagTensor(source, step, shape))
        return found

    def _joined(self, grad: Any) -> list[np.ndarray]:
        """The gradients of the features of each table, one below the other."""
        tables = self._tables
        shapes = [(own.bags, w) for own, w in zip(self._lists, tables.widths, strict=True)]
        parts = _gradients(self._options.where, grad, shapes)
        found = []
        for t, table in enumerate(tables.arrays):
            own = [part for part, of in zip(parts, tables.of, strict=True) if of == t]
            nothing = np.empty((0, table.shape[1]), parts[0].dtype)
            found.append(own[0] if len(own) == 1 else np.concatenate([*own, nothing]))
        return found


def _features(where: str, features: Any, n: int) -> list[int]:
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


def _read_ids(where: str, n: int, ids: Any, offsets: Any, *, pools: bool) -> list[_Ids]:
    """The ids of each of ``n`` features; of pooled ones with as many bags each."""
    if not pools and offsets is not None:
        wrong, expected = "are given without pooling", "None: each id has a row of the output"
        reject(ValueError, where, "offsets", wrong, expected, type(offsets).__name__)
    if not isinstance(ids, list | tuple):
        return _read_joined(where, n, ids, offsets, pools=pools)
    if len(ids) != n:
        reject(ValueError, where, "ids", "have a wrong length", f"{n} arrays", len(ids))
    if offsets is not None and (not isinstance(offsets, list | tuple) or len(offsets) != n):
        expected = f"a list of {n} arrays, as the ids are"
        reject(ValueError, where, "offsets", "do not fit the ids", expected, _kind_of(offsets))
    lists = []
    for f, given in enumerate(ids):
        own = None if offsets is None else offsets[f]
        lists.append(_read_list(where, f"ids[{f}]", given, f"offsets[{f}]", own, pools=pools))
    for read in lists if pools else ():
        if read.bags != lists[0].bags:
            wrong = "have another number of bags than ids[0]"
            reject(ValueError, where, read.name, wrong, lists[0].bags, read.bags)
    return lists


def _read_list(
    where: str, name: str, ids: Any, offsets_name: str, offsets: Any, *, pools: bool
) -> _Ids:
    array = _integers(where, name, ids)
    if pools and offsets is None:
        if array.ndim != 2:
            wrong, expected = "has a wrong shape", "(bags, length), as there are no offsets"
            reject(ValueError, where, name, wrong, expected, array.shape)
        bags, length = array.shape
        return _Ids(name, array.reshape(-1), bags, None, offsets_name, 0, array.size, length)
    if array.ndim != 1:
        reject(ValueError, where, name, "has a wrong shape", "1 dimension", array.shape)
    n = len(array)
    if not pools:
        return _Ids(name, array, n, None, offsets_name, 0, n, 1)
    bounds = _integers(where, offsets_name, offsets)
    if bounds.ndim != 1 or len(bounds) == 0:
        wrong, expected = "has a wrong shape", "(bags + 1,)"
        reject(ValueError, where, offsets_name, wrong, expected, bounds.shape)
    own = _Ids(name, array, len(bounds) - 1, bounds, offsets_name, 0, n, 0)
    if own.bags == 0:
        _check_offsets(where, own)
    return own


def _read_joined(where: str, n: int, ids: Any, offsets: Any, *, pools: bool) -> list[_Ids]:
    """One array of the ids of all features, with offsets of all their bags."""
    array = _integers(where, "ids", ids)
    if n == 1 and (offsets is None or not pools):
        return [_read_list(where, "ids", array, "offsets", offsets, pools=pools)]
    if not pools or array.ndim != 1:
        expected = f"a list of {n} arrays" + (", or all ids in 1 dimension" if pools else "")
        reject(ValueError, where, "ids", "have a wrong shape", expected, array.shape)
    if isinstance(offsets, list | tuple) or offsets is None:
        expected, got = "one array, as the ids are", type(offsets).__name__
        reject(TypeError, where, "offsets", "do not fit the ids", expected, got)
    bounds = _integers(where, "offsets", offsets)
    if bounds.ndim != 1 or len(bounds) % n != 1 % n or len(bounds) == 0:
        wrong, expected = "have a wrong shape", f"({n} * bags + 1,)"
        reject(ValueError, where, "offsets", wrong, expected, bounds.shape)
    every = _Ids("ids", array, len(bounds) - 1, bounds, "offsets", 0, len(array), 0)
    _check_ends(where, every)
    bags = every.bags // n
    firsts = bounds[::bags].tolist() if bags else [0] * (n + 1)
    if bags == 0 or firsts != sorted(firsts):  # the ids of a feature lie in between
        _check_offsets(where, every)
    return [
        every._replace(
            bags=bags, offsets=bounds[f * bags : (f + 1) * bags + 1],
            begin=firsts[f], end=firsts[f + 1],
        )
        for f in range(n)
    ]  # fmt: skip


def _integers(where: str, name: str, given: Any) -> np.ndarray:
    array = adopt(where, name, given)
    if array.dtype not in check.INDEX_DTYPES:
        reject(TypeError, where, name, "has a wrong dtype", "int32 or int64", array.dtype)
    contiguous: np.ndarray = check.contiguous(array)
    return contiguous


def _check_ends(where: str, own: _Ids) -> None:
    assert own.offsets is not None
    first, last = int(own.offsets[0]), int(own.offsets[-1])
    if first != own.begin:
        reject(ValueError, where, own.offsets_name, "do not begin at 0", own.begin, first)
    if last != own.end:
        wrong, expected = "do not end at the number of ids", own.end
        reject(ValueError, where, own.offsets_name, wrong, expected, last)


def _check_offsets(where: str, own: _Ids) -> None:
    """Refuse offsets that fall, or do not lead from the first id to the last."""
    if own.offsets is None:
        return
    falls = own.offsets[1:] < own.offsets[:-1]
    if falls.any():
        k = int(np.argmax(falls)) + 1
        expected, got = f"at least {own.offsets[k - 1]}", int(own.offsets[k])
        reject(ValueError, where, f"{own.offsets_name}[{k}]", "falls", expected, got)
    _check_ends(where, own)


def _read_weights(
    options: Options, tables: Tables, lists: Sequence[_Ids], weights: Any
) -> list[np.ndarray] | None:
    """The weights of the ids of each feature, in the type of the arithmetic."""
    where, name = options.where, "per_sample_weights"
    if weights is None:
        return None
    if options.pooling != "sum":
        wrong, expected = "need sums", "None, or pooling 'sum'"
        reject(ValueError, where, name, wrong, expected, f"pooling {options.pooling!r}")
    if not isinstance(weights, list | tuple):
        is_joined = all(own.array is lists[0].array for own in lists)
        n = lists[-1].end if is_joined else None
        joined = _weights(where, name, weights, tables.real, n)
        return [joined[own.begin : own.end] for own in lists]
    if len(weights) != len(lists):
        reject(ValueError, where, name, "have a wrong length", f"{len(lists)} arrays", len(weights))
    each = zip(weights, lists, strict=True)
    return [
        _weights(where, f"{name}[{f}]", given, tables.real, own.end - own.begin)
        for f, (given, own) in enumerate(each)
    ]


def _weights(where: str, name: str, given: Any, real: np.dtype[Any], n: int | None) -> np.ndarray:
    array = adopt(where, name, given)
    check.float_dtype(where, name, array)
    if array.dtype.itemsize > real.itemsize:
        wrong = "has a higher dtype than the arithmetic"
        reject(TypeError, where, name, wrong, real, array.dtype)
    if n is None:
        expected, got = "a list of arrays, as the ids are", "an array"
        reject(ValueError, where, name, "do not fit the ids", expected, got)
    if array.size != n:
        reject(ValueError, where, name, "has a wrong shape", f"{n} numbers", array.shape)
    flat: np.ndarray = check.contiguous(array.astype(real, copy=False)).reshape(-1)
    return flat


def _output(
    where: str, out: Any, shape: tuple[int, int], real: np.dtype[Any], read: Sequence[np.ndarray]
) -> np.ndarray:
    """The array of the output: a new one, or what was given for it."""
    if out is None:
        return allocation.empty(shape, real)
    array: np.ndarray = check.variable(where, "out", out)
    if array.dtype != real:
        reject(TypeError, where, "out", "has a wrong dtype", real, array.dtype)
    if array.shape != shape:
        reject(ValueError, where, "out", "has a wrong shape", shape, array.shape)
    begin, end = address_of(array), address_of(array) + array.nbytes
    for other in read:
        at = address_of(other)
        if other.nbytes and array.nbytes and at < end and begin < at + other.nbytes:
            wrong, expected = "shares memory with what is read", "its own memory"
            reject(ValueError, where, "out", wrong, expected, "an overlap")
    return array


def _kind_of(given: Any) -> str:
    is_list = isinstance(given, list | tuple)
    return f"{len(given)} of them" if is_list else type(given).__name__


def _gradients(where: str, grad: Any, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """The checked gradients of several outputs."""
    if not isinstance(grad, list | tuple) or len(grad) != len(shapes):
        expected = f"a list of {len(shapes)} arrays"
        reject(ValueError, where, "grad", "does not fit the outputs", expected, _kind_of(grad))
    each = zip(grad, shapes, strict=True)
    found = [_gradient(where, f"grad[{f}]", own, shape) for f, (own, shape) in enumerate(each)]
    for f, own in enumerate(found):
        if own.dtype != found[0].dtype:
            wrong = "has another dtype than grad[0]"
            reject(TypeError, where, f"grad[{f}]", wrong, found[0].dtype, own.dtype)
    return found


def _gradient(where: str, name: str, grad: Any, shape: tuple[int, int]) -> np.ndarray:
    array = adopt(where, name, grad)
    check.float_dtype(where, name, array)
    if array.shape != shape:
        reject(ValueError, where, name, "has a wrong shape", shape, array.shape)
    contiguous: np.ndarray = check.contiguous(array)
    return contiguous
