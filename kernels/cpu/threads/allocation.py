"""Allocation of arrays that begin at a cache line.

NumPy's large arrays begin 16 bytes after one, so that a row of 128 bytes lies on three lines
instead of two, and every second vector of 32 bytes on two.

The system maps memory page by page, at its first use, and clears it. So large arrays are written by
all threads when they are made; otherwise the first step would wait for the pages, row by row.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..compiler.compile import part
from ..compiler.lines import LINE
from ..compiler.records import int64s
from ..headers.arrays import address_of
from .parallel import Arguments, get_num_threads, run

_WORD = 8
_PAGE = 4_096 // _WORD
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_RECYCLED_FROM = 1 << 17  # bytes; glibc maps larger ones page by page
_MOST_RECYCLED = 64  # arrays: who holds many outputs at once does not leave them all behind
_PARALLEL_FROM = _LARGE_PAGES_FROM = 4 << 20  # bytes; the latter as in NumPy
_PART = (4 << 20) // _WORD  # two large pages, which the system clears as a whole


class FillCall(NamedTuple):
    """Arguments of the loop that fills memory, all ``int64``."""

    address: int
    n_words: int
    word: int  # the value that is written
    stride: int  # of the words that are written


@part(FillCall)
def fill_part(index, slot, c):
    """Write the words of one span of memory."""
    words = int64s(c.address, c.n_words)
    k, end = index * _PART, min((index + 1) * _PART, c.n_words)
    while k < end:  # a range with a step calls Numba's function that raises if it is 0
        words[k] = c.word
        k += c.stride


def _at_line(make: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    # Room to skip to a line, and behind the end for the last whole word that `full` writes.
    memory = make(math.prod(shape) * dtype.itemsize + LINE + _WORD, np.uint8)
    return np.ndarray(shape, dtype, memory, -address_of(memory) % LINE)


empty = partial(_at_line, np.empty)
"""``empty(shape, dtype)``: an array at the start of a line, uninitialised."""
zeros = partial(_at_line, np.zeros)
"""``zeros(shape, dtype)``: an array of zeros there, whose pages are made at their first use."""


class Recycled:
    """Memory of large arrays that calls make again and again, used anew when nobody holds it.

    What a system allocator gives back to the system costs a fault a page in the next call: as much
    time as pooling rows takes. All that nobody holds is let go when other sizes are asked for, and
    what is older than the last `_MOST_RECYCLED` arrays.
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self.empty = partial(_at_line, self._take)
        """``empty(shape, dtype)``: an array at the start of a line, with numbers of before."""

    def __reduce__(self) -> tuple[type[Recycled], tuple[()]]:
        return Recycled, ()  # a copy has memory of its own

    def _take(self, n: int, dtype: Any) -> np.ndarray:
        if n < _RECYCLED_FROM:
            return np.empty(n, dtype)
        found, others, kept = None, [], self._kept
        while kept:
            try:  # whoever takes one out is the only thread that has it
                taken = [kept.pop()]
            except IndexError:
                break
            # Two are the list and the argument: that of a variable Python 3.14 would not count.
            is_free = sys.getrefcount(taken[0]) <= 2
            if is_free and found is None and n <= len(taken[0]) <= 2 * n:
                found = taken[0]
            else:
                others.append((taken[0], is_free))
        # They were taken out from the last to the first.
        others = [x for x in reversed(others) if found is not None or not x[1]]
        kept += [memory for memory, _ in others[1 - _MOST_RECYCLED :]]
        memory = np.empty(n, dtype) if found is None else found
        kept.append(memory)
        return memory


def full(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """An array at the start of a line, filled with a value."""
    dtype = np.dtype(dtype)
    word = np.full(_WORD // dtype.itemsize, value, dtype).view(np.int64)[0]
    array = _at_line(np.empty if word else np.zeros, shape, dtype)
    if array.nbytes < _PARALLEL_FROM:
        if word:
            array.fill(value)
        return array
    n_words = -(-array.nbytes // _WORD)
    # Pages of zeros are cleared by the system: one word of each is enough.
    call = Arguments(FillCall(address_of(array), n_words, int(word), 1 if word else _PAGE))
    run(fill_part, -(-n_words // _PART), call.address, get_num_threads())
    return array


def at_line(array: np.ndarray) -> np.ndarray:
    """``array`` itself, or a copy that is writable, contiguous and begins at a cache line."""
    flags = array.flags
    if flags.writeable and flags.c_contiguous and address_of(array) % LINE == 0:
        return array
    made = empty(array.shape, array.dtype)
    made[...] = array
    return made


def on_large_pages(address: int, n_bytes: int) -> None:
    """Ask for pages of 2 MB for memory that is not used yet, as NumPy does for its arrays.

    Reading rows far apart then causes fewer TLB misses. The system may ignore the advice.
    """
    # Whole pages alone: those at both ends may belong to other arrays.
    begin, end = -(-address // mmap.PAGESIZE), (address + n_bytes) // mmap.PAGESIZE
    if n_bytes >= _LARGE_PAGES_FROM and _MADV_HUGEPAGE is not None:
        _advise(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE, _MADV_HUGEPAGE)


def read_at_random(array: np.ndarray) -> None:
    """Have the system read no pages around those in use, where an array lies in a mapped file."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        # The system refuses an address that is not the start of a page.
        before = address_of(array) % mmap.PAGESIZE
        _advise(address_of(array) - before, before + array.nbytes, mmap.MADV_RANDOM)


def _advise(page: int, n_bytes: int, advice: int) -> None:
    """Tell the system how memory from the start of a page on is used; it may ignore that."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(n_bytes), advice)
