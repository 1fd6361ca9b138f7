"""Lists of ids and their offsets, read from the headers of their arrays in one call."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from ...inner import njit
from ..compiler.compile import NativeFunction
from ..compiler.intrinsics import load_int64
from ..compiler.machine import PythonEntry
from ..compiler.records import index_at, records
from .arrays import ARRAY_TYPE, C_CONTIGUOUS_ALIGNED, ITEMS, header_at, header_of, usable

FIXED, LISTED, JOINED, SINGLE = range(4)
"""What the objects are: ids ``[bags, length]``; ids, then offsets, of each feature; the ids and
the offsets of all features, one array each; ids, of which each is a bag."""


class IdList(NamedTuple):
    """The ids of one feature as they were given, all ``int64``; addresses."""

    ids: int
    id_bytes: int
    n: int  # ids
    offsets: int  # [bags + 1]; 0: all bags have ``length`` ids
    offset_bytes: int
    begin: int  # the first offset, and the last one
    end: int
    bags: int
    length: int
    weights: int  # [n], in the type of the arithmetic, or 0


class _Question(NamedTuple):
    """What is asked about a tuple of arrays, all ``int64``."""

    form: int
    n: int  # features
    is_weighted: int  # whether there are weights behind the others
    array_type: int
    int32: int  # identities of dtypes
    int64: int
    real: int
    real_bytes: int


_questions_at, _lists_at = records(_Question), records(IdList)


@njit
def _is_array(c, header, ndim):
    # Of anything else nothing but the type is looked at.
    return (
        header.type == c.array_type
        and (header.flags & C_CONTIGUOUS_ALIGNED) == C_CONTIGUOUS_ALIGNED
        and header.ndim == ndim
    )


@njit
def _index_bytes(c, header, ndim):
    """Of a contiguous array of indices the size of one; 0 where it is none."""
    if not _is_array(c, header, ndim):
        return 0
    return 4 if header.dtype == c.int32 else 8 if header.dtype == c.int64 else 0


@njit
def _read_weights(c, objects, k, n):
    """The address of ``n`` weights; 0 where they are not as expected."""
    header = header_of(objects, k)
    if not _is_array(c, header, 1) or header.dtype != c.real or load_int64(header.shape) != n:
        return 0
    return header.data


@njit
def _read_joined(c, objects, found):
    ids, offsets = header_of(objects, 0), header_of(objects, 1)
    id_bytes, offset_bytes = _index_bytes(c, ids, 1), _index_bytes(c, offsets, 1)
    if id_bytes == 0 or offset_bytes == 0:
        return 0
    n, n_offsets = load_int64(ids.shape), load_int64(offsets.shape)
    bags = (n_offsets - 1) // c.n
    if bags < 1 or bags * c.n != n_offsets - 1:
        return 0
    weights = 0
    if c.is_weighted:
        weights = _read_weights(c, objects, 2, n)
        if weights == 0:
            return 0
    begin = index_at(offsets.data, offset_bytes, 0)
    if begin != 0:
        return 0
    for f in range(c.n):
        end = index_at(offsets.data, offset_bytes, (f + 1) * bags)
        if end < begin or end > n:
            return 0
        own = found[f]
        own.ids, own.id_bytes, own.n, own.bags, own.length = (
            ids.data,
            id_bytes,
            end - begin,
            bags,
            0,
        )
        own.offsets, own.offset_bytes = offsets.data + f * bags * offset_bytes, offset_bytes
        own.begin, own.end = begin, end
        own.weights = weights + begin * c.real_bytes if weights != 0 else 0
        begin = end
    return begin == n


def _read_lists(question, objects, lists):
    """Whether all arrays are plain, and fit each other; their contents are not looked at."""
    c = _questions_at(question, 1)[0]
    found = _lists_at(header_at(lists).data, c.n)
    if c.form == JOINED:
        return _read_joined(c, objects, found)
    for f in range(c.n):
        own, ids = found[f], header_of(objects, f)
        own.ids, own.id_bytes = ids.data, _index_bytes(c, ids, 2 if c.form == FIXED else 1)
        if own.id_bytes == 0:
            return 0
        own.begin, own.offsets, own.offset_bytes, own.weights = 0, 0, 4, 0
        n = load_int64(ids.shape)
        own.bags, own.length, behind = n, 1, c.n
        if c.form == FIXED:
            own.length = load_int64(ids.shape + 8)
            n *= own.length
        elif c.form == LISTED:
            offsets = header_of(objects, c.n + f)
            own.offset_bytes = _index_bytes(c, offsets, 1)
            if own.offset_bytes == 0:
                return 0
            own.offsets, own.bags, own.length = offsets.data, load_int64(offsets.shape) - 1, 0
            behind += c.n
        own.n, own.end = n, n
        if c.form != SINGLE and (own.bags < 1 or own.bags != found[0].bags):
            return 0
        if c.is_weighted:
            own.weights = _read_weights(c, objects, behind + f, n)
            if own.weights == 0:
                return 0
    return 1


_read = NativeFunction(
    _read_lists, f"lists of ids {ITEMS}", PythonEntry(returns=True, holds_gil=True)
)
READERS = (_read,)
_LENGTHS = {FIXED: 1, LISTED: 2, SINGLE: 1}  # arrays of a feature, without weights


def read(
    objects: tuple[Any, ...], form: int, n: int, real: np.dtype[Any], *, is_weighted: bool
) -> np.ndarray | None:
    """int64 ``[n, fields of IdList]``; None where Python has to look at the objects.

    What is read are plain, contiguous arrays of one dtype each and of lengths that fit each other.
    """
    own = 2 + is_weighted if form == JOINED else n * (_LENGTHS[form] + is_weighted)
    if not usable or len(objects) != own:
        return None
    found = np.empty((n, len(IdList._fields)), np.int64)
    question = _Question(form, n, is_weighted, ARRAY_TYPE, *_INDICES, id(real), real.itemsize)
    words = array("q", question)
    return found if _read.call(words.buffer_info()[0], id(objects), id(found)) else None


_INDICES = id(np.dtype(np.int32)), id(np.dtype(np.int64))
