"""Any number of dense tensors in one call: updated, measured, or checked to be finite.

For the first stage of a two-stage rule a tensor is summed in parts of `PART` elements, each in the
order of the machine code, and NumPy adds the sums of the parts in an order that depends on their
number. So a sum depends on the tensor alone, not on the number of threads or on other tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray

from ..element import Kernel
from ..inner import njit
from ..storage import Storage
from ..tables import TensorTable
from .blocks import blocks
from .compiler.compile import NativeFunction, part
from .compiler.intrinsics import as_pointer, call_address
from .compiler.records import int64s, last_at_most, records
from .headers.arrays import address_of
from .threads.parallel import Arguments, Loop, get_num_threads, run, run_all

# Elements of a part: few enough to balance the threads, and more in long tensors.
CHUNK = 65_536
_LONG_CHUNK = 262_144
_PARTS_PER_THREAD = 16
PART = 65_536  # of a tensor that is measured; fixes the last bits of a sum
# Below this many elements one thread is about as fast as several when steps follow each other, and
# faster by a quarter after other work or a pause.
SERIAL_BELOW = 131_072
# Parts begin at multiples of this many elements, so that vectors of different parts
# never share a cache line when the tensors are aligned.
_ALIGN = 32


class DenseCall(NamedTuple):
    """Arguments of the dense loop, all ``int64``."""

    block: int
    n_tensors: int
    addresses: np.ndarray  # [T, 1 + number of states]
    addresses_bytes: int  # of a row of them
    gradients: np.ndarray  # [T]
    first: np.ndarray  # [T + 1]: flat index of each tensor's first element
    widths: np.ndarray | None  # [T]: elements of a row, if the block measures rows
    hp: np.ndarray  # [R, F] of the arithmetic type
    hp_row_bytes: int
    hp_of: np.ndarray  # [T]: row of hp
    g_bytes: int
    chunk: int

    @classmethod
    def of(
        cls, block: NativeFunction, g: Storage, table: TensorTable, gradients: np.ndarray,
        hp: np.ndarray, hp_of: np.ndarray, chunk: int, *, by_rows: bool = False,
    ) -> DenseCall:  # fmt: skip
        """A call of ``block`` on tensors, ``chunk`` elements at a time or so."""
        widths = table.widths if by_rows else None
        tensors = table.addresses, table.addresses.strides[0], gradients, table.first, widths
        scalars = hp, hp.strides[0], hp_of
        return cls(block.address, len(gradients), *tensors, *scalars, g.itemsize, chunk)


_N_TENSORS, _ADDRESSES, _FIRST, _WIDTHS, _CHUNK = map(
    DenseCall._fields.index, ("n_tensors", "addresses", "first", "widths", "chunk")
)

_call_at = records(DenseCall)


@njit(inline="always")
def _block_arguments(c, t, row, rows, width):
    """Arguments of the block for ``rows`` rows of tensor ``t``, from number ``row`` on."""
    gradients, hp_of = int64s(c.gradients, c.n_tensors), int64s(c.hp_of, c.n_tensors)
    g, hp = gradients[t] + row * width * c.g_bytes, c.hp + hp_of[t] * c.hp_row_bytes
    return c.addresses + t * c.addresses_bytes, row, rows, width, g, hp


@njit(inline="always")
def _run_rows(c, t, begin, end):
    """Call the block on the rows of a tensor that begin in a span of its elements."""
    if c.widths == 0:
        call_address(c.block, *_block_arguments(c, t, begin, end - begin, 1))
        return
    width = int64s(c.widths, c.n_tensors)[t]
    # A chunk may end within a row: the row is run with the chunk in which it begins, by one thread,
    # which measures all of it.
    first, last = -(-begin // width), -(-end // width)
    if last > first:
        call_address(c.block, *_block_arguments(c, t, first, last - first, width))


@part(DenseCall)
def _run_chunk(index, slot, c):
    """Call the block on the elements of one chunk, tensor after tensor."""
    first = int64s(c.first, c.n_tensors + 1)
    flat = index * c.chunk
    end = min(flat + c.chunk, first[c.n_tensors])
    t = last_at_most(first, c.n_tensors, flat)
    while flat < end:
        n = min(end, first[t + 1]) - flat
        # Tensors without elements may lie between.
        if n > 0:
            _run_rows(c, t, flat - first[t], flat - first[t] + n)
            flat += n
        t += 1


class DenseStep:
    """The arguments of a step of a kernel on a table, and its loop.

    Asking for the addresses of arrays and writing the loop's arguments takes longer than a step on
    a small tensor. So both are done once, and the object is used for many steps, one at a time;
    ``give`` hands it on to a later step. The caller writes ``gradients`` and ``hp``, of each tensor
    or of the first ones; ``scalars`` is the memory of ``hp``.
    """

    def __init__(
        self, kernel: Kernel, table: TensorTable, give: Callable[[DenseStep], None]
    ) -> None:
        n_tensors = len(table.addresses)
        self.table, self._give = table, give
        self.gradients = np.zeros(n_tensors, np.int64)  # addresses
        n_scalars, real = kernel.n_scalars, kernel.real
        self.scalars = array(real.dtype.char, bytes(n_tensors * n_scalars * real.itemsize))
        self.hp = np.asarray(self.scalars).reshape(n_tensors, n_scalars)
        self.hp_of = np.zeros(n_tensors, np.int64)  # the row of ``hp`` that a tensor uses
        tensors = table, self.gradients, self.hp, self.hp_of
        self._cut_for = 0, 0  # elements and threads
        block, self._by_rows = blocks(kernel).update, kernel.rule.is_row_wise
        call = DenseCall.of(block, kernel.g, *tensors, chunk=0, by_rows=self._by_rows)
        self._call = Arguments(call)
        self.loops = (Loop(_run_chunk.address, 1, self._call.address, 1),)

    def attach(self, table: TensorTable) -> bool:
        """Take the tensors of another table; whether there are not more than it was made for."""
        if len(table.addresses) > len(self.gradients):
            return False
        self.table, self._cut_for, words = table, (0, 0), self._call.words
        # In place: the loop keeps the address of these words.
        words[_N_TENSORS] = len(table.addresses)
        words[_ADDRESSES] = address_of(table.addresses)
        words[_FIRST] = address_of(table.first)
        if self._by_rows and table.widths is not None:
            words[_WIDTHS] = address_of(table.widths)
        return True

    def prepare(self) -> None:
        """Cut the tensors into parts for this step; then `loops` can be run."""
        total = self.table.total
        threads = 1 if total < SERIAL_BELOW else get_num_threads()
        if self._cut_for == (total, threads):  # the table can get another size (`TensorTable.move`)
            return
        chunk = _chunk(total, threads)
        self._call.words[_CHUNK] = chunk
        n = -(-total // chunk)
        self.loops[0].cut(n, min(threads, n))
        self._cut_for = total, threads

    def run(self) -> None:
        """Run `loops`."""
        run_all(self.loops)

    def release(self) -> None:
        """Hand the object on to later steps."""
        self._give(self)


def _chunk(total: int, threads: int) -> int:
    """The number of elements of a part."""
    if threads == 1:
        return max(1, total)
    share = -(-total // threads)
    # Several parts for each thread, so that one that is late has less to finish alone.
    longest = min(_LONG_CHUNK, max(CHUNK, share // _PARTS_PER_THREAD))
    return -(-min(longest, share) // _ALIGN) * _ALIGN


class ReduceCall(NamedTuple):
    """Arguments of the reducing loop, all ``int64``."""

    dense: int  # address of the `DenseCall`; its chunks are the parts
    first_part: np.ndarray  # [T]: number of each tensor's first part
    sums: np.ndarray  # [parts, n_measured] float64
    sums_bytes: int  # of a row of them


@part(ReduceCall)
def _reduce_part(index, slot, c):
    # Parts have a fixed size and lie in one tensor: its size alone decides the order of a sum.
    d = _call_at(c.dense, 1)[0]
    first, first_part = int64s(d.first, d.n_tensors + 1), int64s(c.first_part, d.n_tensors)
    t = last_at_most(first_part, d.n_tensors, index)
    offset = (index - first_part[t]) * d.chunk
    n = min(d.chunk, first[t + 1] - first[t] - offset)
    arguments = _block_arguments(d, t, offset, n, 1)
    call_address(d.block, *arguments, c.sums + index * c.sums_bytes)


def reduce_dense(
    kernel: Kernel, table: TensorTable, gradients: np.ndarray, hp: np.ndarray, hp_of: np.ndarray
) -> np.ndarray:
    """float64 ``[T, n_measured]`` sums that a rule measures; arguments as in `DenseStep`."""
    block = blocks(kernel).reduce
    assert block is not None
    # An empty tensor has a part too, with sums of 0: for a tensor without parts NumPy's reduceat
    # would return the first sum of the next tensor.
    parts = np.maximum(1, -(-np.diff(table.first) // PART))
    first_part = np.concatenate(([0], np.cumsum(parts)[:-1]))
    sums = np.empty((int(parts.sum()), kernel.rule.n_measured))
    dense = Arguments(DenseCall.of(block, kernel.g, table, gradients, hp, hp_of, PART))
    call = Arguments(ReduceCall(dense.address, first_part, sums, sums.strides[0]))
    threads = get_num_threads() if table.total >= SERIAL_BELOW else 1
    run(_reduce_part, len(sums), call.address, threads)
    return np.add.reduceat(sums, first_part)


@cache
def finite_check(storage: Storage) -> NativeFunction:
    """A block that reads the gradient alone; a NaN or an infinity sets the int64 at ``hp`` to 1."""
    carrier = np.dtype(f"u{storage.itemsize}").type
    exponent = carrier(storage.exponent)

    def check_finite(arrays, row, rows, width, g, flag):
        # All elements are counted: a loop that can end early is not vectorised. Threads that find a
        # NaN or an infinity write the same 1, so they need no atomic.
        values, count = carray(as_pointer(g), rows * width, carrier), 0
        for i in range(values.size):
            count += (values[i] & exponent) == exponent
        if count > 0:
            carray(as_pointer(flag), 1, np.int64)[0] = 1

    return NativeFunction(check_finite, f"finite {storage.name}")


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether contiguous arrays hold no NaN and no infinity; addresses and sizes are int64."""
    table = TensorTable(addresses[:, None], np.concatenate(([0], np.cumsum(sizes))))
    flag, every = np.zeros((1, 1), np.int64), np.zeros_like(addresses)
    loop = DenseCall.of(finite_check(storage), storage, table, addresses, flag, every, CHUNK)
    call = Arguments(loop)
    threads = get_num_threads() if table.total >= SERIAL_BELOW else 1
    run(_run_chunk, -(-table.total // CHUNK), call.address, threads)
    return not flag.any()
