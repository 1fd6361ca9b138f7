"""Lists of ids and their offsets, read from arrays in one call."""

from __future__ import annotations

from array import array
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import index_at, records
from . import arrays
from .arrays import C_CONTIGUOUS_ALIGNED, ITEMS, header_at, item_of, read_array

FIXED, LISTED, OPEN, JOINED, SINGLE = range(5)
"""Forms of the objects. `FIXED`: ids ``[bags, length]`` of each feature. `LISTED`: ids, then
offsets of each. `OPEN`: as `LISTED`, without the last offset: the last bag ends with the ids.
`JOINED`: one array with the ids of all features, and one with their offsets. `SINGLE`: ids of each
feature, and every id is a bag."""
_REAL = 1  # the kind of weights; the kind of int32 and int64 is the size of an element, 4 or 8


class IdList(NamedTuple):
    """The ids of one feature in the caller's arrays, all ``int64``; addresses."""

    ids: int
    id_bytes: int
    n: int  # ids
    offsets: int  # [n_offsets]; 0: all bags have ``length`` ids
    n_offsets: int  # bags + 1, or bags: the last bag ends where the ids do
    offset_bytes: int
    begin: int  # the first offset, and the last one
    end: int
    bags: int
    length: int
    weights: int  # [n], in the type of the arithmetic, or 0


class _Kinds(NamedTuple):
    """Types and dtypes that objects may have, all ``int64``."""

    type: int
    real_bytes: int
    int32: int  # identities of dtypes
    int64: int
    real: int


class _Question(NamedTuple):
    """Question about a tuple of objects, all ``int64``."""

    form: int
    n: int  # features
    is_weighted: int  # whether weights follow the other objects
    kinds: int


_kinds_at, _questions_at, _lists_at = map(records, (_Kinds, _Question, IdList))
_NONE = (0, 0, 0, 0)


@njit
def _kind(c, dtype):
    return 4 if dtype == c.int32 else 8 if dtype == c.int64 else _REAL if dtype == c.real else 0


@njit
def _look_at_array(c, thing, dim):
    """Kind, address, and the first two sizes of a contiguous array; all 0 for anything else."""
    (dtype, flags, own), sizes, data = read_array(thing, c.type, C_CONTIGUOUS_ALIGNED)
    if own != dim or flags != C_CONTIGUOUS_ALIGNED:
        return _NONE
    return _kind(c, dtype), data, load_int64(sizes), load_int64(sizes + 8) if dim > 1 else 1


@njit
def _look(c, objects, k, dim):
    """Kind, address and sizes of element ``k`` of a tuple."""
    return _look_at_array(c, item_of(objects, k), dim)


@njit
def _read_weights(kinds, objects, k, n):
    """The address of ``n`` weights, and whether they are as expected."""
    kind, data, size, _ = _look(kinds, objects, k, 1)
    return data, kind == _REAL and size == n


@njit
def _read_joined(c, kinds, objects, found):
    id_bytes, ids, n, _ = _look(kinds, objects, 0, 1)
    offset_bytes, offsets, n_offsets, _ = _look(kinds, objects, 1, 1)
    bags = (n_offsets - 1) // c.n
    if id_bytes < 4 or offset_bytes < 4 or bags < 1 or bags * c.n != n_offsets - 1:
        return 0
    weights = 0
    if c.is_weighted:
        weights, fits = _read_weights(kinds, objects, 2, n)
        if not fits:
            return 0
    begin = index_at(offsets, offset_bytes, 0)
    if begin != 0:
        return 0
    for f in range(c.n):
        end = index_at(offsets, offset_bytes, (f + 1) * bags)
        if end < begin:  # so no end is beyond the last one, which has to be n
            return 0
        own = found[f]
        own.ids, own.id_bytes, own.n = ids, id_bytes, end - begin
        own.bags, own.length, own.n_offsets = bags, 0, bags + 1
        own.offsets, own.offset_bytes = offsets + f * bags * offset_bytes, offset_bytes
        own.begin, own.end = begin, end
        own.weights = weights + begin * kinds.real_bytes if c.is_weighted else 0
        begin = end
    return begin == n


def _read_lists(question, objects, lists):
    """Whether all objects are plain and fit each other; their elements are not looked at."""
    c = _questions_at(question, 1)[0]
    kinds, found = _kinds_at(c.kinds, 1)[0], _lists_at(header_at(lists).data, c.n)
    if c.form == JOINED:
        return _read_joined(c, kinds, objects, found)
    for f in range(c.n):
        own, dim = found[f], 2 if c.form == FIXED else 1
        own.id_bytes, own.ids, bags, length = _look(kinds, objects, f, dim)
        if own.id_bytes < 4:
            return 0
        own.begin, own.offsets, own.n_offsets, own.offset_bytes, own.weights = 0, 0, 0, 4, 0
        own.bags, own.length, own.n, behind = bags, length, bags * length, c.n
        own.end = own.n
        if c.form == LISTED or c.form == OPEN:
            own.offset_bytes, own.offsets, own.n_offsets, _ = _look(kinds, objects, c.n + f, 1)
            if own.offset_bytes < 4:
                return 0
            own.bags, own.length, behind = own.n_offsets - (c.form == LISTED), 0, 2 * c.n
        if c.form != SINGLE and (own.bags < 1 or own.bags != found[0].bags):
            return 0
        if c.is_weighted:
            own.weights, fits = _read_weights(kinds, objects, behind + f, own.n)
            if not fits:
                return 0
    return 1


_read = NativeFunction(
    _read_lists, f"lists of ids {ITEMS}", PythonEntry(returns=True, holds_gil=True)
)
READERS = (_read,)
_LENGTHS = {FIXED: 1, LISTED: 2, OPEN: 2, SINGLE: 1}  # objects of a feature, without weights


@cache
def _kinds(real: np.dtype[Any]) -> tuple[array[int], Any]:
    """The `_Kinds` of arrays, and the dtypes that these point to."""
    known = np.dtype(np.int32), np.dtype(np.int64), real
    return array("q", _Kinds(arrays.ARRAY_TYPE, real.itemsize, *map(id, known))), known


def read(
    objects: tuple[Any, ...], form: int, n: int, real: np.dtype[Any], *, is_weighted: bool
) -> np.ndarray | None:
    """int64 ``[n, fields of IdList]``; None where Python has to look at the objects.

    Objects are read if they are plain, contiguous arrays of int32 or int64 (weights: of ``real``),
    and if their lengths fit each other.
    """
    if not arrays.usable or len(objects) != n_objects(form, n, is_weighted=is_weighted):
        return None
    found = np.empty((n, len(IdList._fields)), np.int64)
    question = array("q", _Question(form, n, is_weighted, _kinds(real)[0].buffer_info()[0]))
    fits = _read.call(question.buffer_info()[0], id(objects), id(found))
    return found if fits else None


def n_objects(form: int, n: int, *, is_weighted: bool) -> int:
    """The number of objects that ``n`` features have in a form."""
    return 2 + is_weighted if form == JOINED else n * (_LENGTHS[form] + is_weighted)
