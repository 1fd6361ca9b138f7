"""Lists of ids and their offsets, read from arrays in one call."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from ...inner import njit
from ...tables import IdList, Source, record_type
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
REAL = 1
"""The kind of weights; the kind of int32 and int64 is the size of an element, 4 or 8."""


class Header(NamedTuple):
    """The header of a contiguous object, all ``int64``."""

    kind: int  # 0: of an object that is none
    address: int
    dims: int
    size: int  # of the first dimension
    last: int  # of the last one


class _Question(NamedTuple):
    """Question about a tuple of objects, all ``int64``."""

    form: int
    n: int  # features
    n_objects: int
    is_weighted: int  # whether weights follow the other objects
    real_bytes: int
    # Types and dtypes that objects may have.
    type: int
    int32: int  # identities of dtypes
    int64: int
    real: int


LISTS, HEADERS = record_type(Source, IdList), record_type(Header)
lists_at = records(Source, IdList)
"""Records of `IdList`, each behind the `Source` of its rows."""
_questions_at, _headers_at = map(records, (_Question, Header))


@njit
def _read_header(c, thing, header):
    header.kind = 0
    (dtype, flags, dims), sizes, data = read_array(thing, c.type, C_CONTIGUOUS_ALIGNED)
    if flags == C_CONTIGUOUS_ALIGNED and 1 <= dims <= 2:
        header.address, header.dims, header.size = data, dims, load_int64(sizes)
        header.last = load_int64(sizes + 8 * (dims - 1))
        is_int, n_bytes = dtype == c.int32 or dtype == c.int64, 4 if dtype == c.int32 else 8
        header.kind = n_bytes if is_int else REAL if dtype == c.real else 0


@njit(inline="always")
def _are_integers(header, dims):
    return header.kind >= 4 and header.dims == dims


@njit(inline="always")
def _are_weights(header, n):
    return header.kind == REAL and header.dims == 1 and header.size == n


@njit
def _read_joined(c, headers, lists):
    ids, offsets = headers[0], headers[1]
    bags = (offsets.size - 1) // c.n
    if not (_are_integers(ids, 1) and _are_integers(offsets, 1)):
        return 0
    if bags < 1 or bags * c.n != offsets.size - 1:
        return 0
    if c.is_weighted and not _are_weights(headers[2], ids.size):
        return 0
    begin = index_at(offsets.address, offsets.kind, 0)
    if begin != 0:
        return 0
    for f in range(c.n):
        end = index_at(offsets.address, offsets.kind, (f + 1) * bags)
        if end < begin:  # so no end is beyond the last one, which has to be n
            return 0
        feature = lists[f]
        feature.ids, feature.id_bytes, feature.n = ids.address, ids.kind, end - begin
        feature.bags, feature.length, feature.n_offsets = bags, 0, bags + 1
        feature.offset_bytes = offsets.kind
        feature.offsets = offsets.address + f * bags * offsets.kind
        feature.begin, feature.end, feature.id_weights = begin, end, 0
        if c.is_weighted:
            feature.id_weights = headers[2].address + begin * c.real_bytes
        begin = end
    return begin == ids.size


def _read_lists(question, objects, headers_address, lists_address):
    """Whether all objects are plain and fit each other; their elements are not looked at.

    Without ``objects`` their headers are there already.
    """
    c = _questions_at(question, 1)[0]
    headers = _headers_at(header_at(headers_address).data, c.n_objects)
    lists = lists_at(header_at(lists_address).data, c.n)
    if objects != 0:
        for k in range(c.n_objects):
            _read_header(c, item_of(objects, k), headers[k])
    if c.form == JOINED:
        return _read_joined(c, headers, lists)
    has_offsets = c.form == LISTED or c.form == OPEN
    for f in range(c.n):
        ids, feature = headers[f], lists[f]
        if not _are_integers(ids, 2 if c.form == FIXED else 1):
            return 0
        feature.ids, feature.id_bytes = ids.address, ids.kind
        feature.bags, feature.length = ids.size, ids.last if c.form == FIXED else 1
        feature.n = feature.end = feature.bags * feature.length
        feature.begin = feature.offsets = feature.n_offsets = feature.id_weights = 0
        if has_offsets:
            offsets = headers[c.n + f]
            if not _are_integers(offsets, 1):
                return 0
            feature.offsets, feature.n_offsets = offsets.address, offsets.size
            feature.bags, feature.length = offsets.size - (c.form == LISTED), 0
            feature.offset_bytes = offsets.kind
        if c.form != SINGLE and (feature.bags < 1 or feature.bags != lists[0].bags):
            return 0
        if c.is_weighted:
            weights = headers[(1 + has_offsets) * c.n + f]
            if not _are_weights(weights, feature.n):
                return 0
            feature.id_weights = weights.address
    return 1


_read = NativeFunction(
    _read_lists, f"lists of ids {ITEMS}", PythonEntry(returns=True, holds_gil=True)
)
READERS = (_read,)
_LENGTHS = {FIXED: 1, LISTED: 2, OPEN: 2, SINGLE: 1}  # objects of a feature, without weights
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def read(
    objects: tuple[Any, ...], form: int, n: int, real: np.dtype[Any], *, is_weighted: bool,
    headers: np.ndarray | None = None,
) -> np.ndarray | None:  # fmt: skip
    """`LISTS` of ``n`` features; None where Python has to look at the objects.

    Objects are read if they are plain, contiguous arrays of int32 or int64 (weights: of ``real``),
    and if their lengths fit each other. Objects that are no arrays come with their `HEADERS`.
    """
    expected = 2 + is_weighted if form == JOINED else n * (_LENGTHS[form] + is_weighted)
    if len(objects) != expected or (headers is None and not arrays.usable):
        return None
    lists, things = np.empty(n, LISTS), 0
    if headers is None:
        headers, things = np.empty(expected, HEADERS), id(objects)
    kinds = arrays.ARRAY_TYPE, id(_INT32), id(_INT64), id(real)
    question = array("q", (form, n, expected, is_weighted, real.itemsize, *kinds))
    fits = _read.call(question.buffer_info()[0], things, id(headers), id(lists))
    return lists if fits else None
