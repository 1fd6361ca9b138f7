"""Any number of dense tensors in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..element import Kernel
from ..inner import njit
from ..storage import Storage
from ..tables import TensorTable
from .blocks import blocks
from .compile import Arguments, NativeFunction, part
from .intrinsics import call_address
from .parallel import Loop, get_num_threads, run
from .records import call_reader, int64s
from .rows.search import last_at_most

# Elements per part: short enough to balance the threads, and longer where there is much to do.
CHUNK = 65_536
_LONG_CHUNK = 262_144
_PARTS_PER_THREAD = 16
# Below this many elements one thread is as fast as several.
SERIAL_BELOW = 32_768
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
    hp: np.ndarray  # [R, F] of the arithmetic type
    hp_row_bytes: int
    hp_of: np.ndarray  # [T]: row of hp
    g_bytes: int
    chunk: int

    @classmethod
    def of(
        cls,
        block: NativeFunction,
        g: Storage,
        table: TensorTable,
        gradients: np.ndarray,
        hp: np.ndarray,
        hp_of: np.ndarray,
        chunk: int,
    ) -> DenseCall:
        """``block`` on the tensors of a table, ``chunk`` elements at a time."""
        tensors = table.addresses, table.addresses.strides[0], gradients, table.first
        scalars = hp, hp.strides[0], hp_of
        return cls(block.address, len(gradients), *tensors, *scalars, g.itemsize, chunk)


_CHUNK = DenseCall._fields.index("chunk")

read_call = call_reader(DenseCall)


@njit(inline="always")
def block_arguments(c, t, offset, n):
    """For ``n`` elements of tensor ``t``, from number ``offset`` on."""
    gradients, hp_of = int64s(c.gradients, c.n_tensors), int64s(c.hp_of, c.n_tensors)
    g, hp = gradients[t] + offset * c.g_bytes, c.hp + hp_of[t] * c.hp_row_bytes
    return c.addresses + t * c.addresses_bytes, offset, g, n, hp


@part
def update_chunk(index, slot, call):
    """The block on the elements of one chunk, tensor after tensor."""
    c = read_call(call)
    first = int64s(c.first, c.n_tensors + 1)
    flat = index * c.chunk
    end = min(flat + c.chunk, first[c.n_tensors])
    t = last_at_most(first, c.n_tensors, flat)
    while flat < end:
        n = min(end, first[t + 1]) - flat
        if n > 0:
            call_address(c.block, *block_arguments(c, t, flat - first[t], n))
            flat += n
        t += 1


class DenseStep:
    """One step of a kernel on a table: what changes from step to step, and the call itself.

    To ask for the addresses of arrays and to write the loop's arguments takes longer than a step
    on a small tensor, so both is done once, and the object is used for many steps; but for one
    at a time. ``give`` leaves it to later ones.

    Attributes:
        loops: what updates the tensors in place, each array read once.
        gradients: int64 ``[T]``: addresses of the gradients; to be written.
        hp: ``[T, F]`` scalars in the type of the arithmetic, fields as `hp_type`; to be written.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses; at first 0.
    """

    def __init__(
        self, kernel: Kernel, table: TensorTable, give: Callable[[DenseStep], None]
    ) -> None:
        n_tensors = len(table.addresses)
        self.table = table
        self._give = give
        self.gradients = np.zeros(n_tensors, np.int64)
        self.hp = np.zeros((n_tensors, kernel.n_scalars), kernel.real.dtype)
        self.hp_of = np.zeros(n_tensors, np.int64)
        of_table = table, self.gradients, self.hp, self.hp_of
        # Each step decides the chunk.
        self._call = Arguments(DenseCall.of(blocks(kernel).update, kernel.g, *of_table, chunk=0))
        self.loops = (Loop(update_chunk.address, 1, self._call.address, 1),)

    def prepare(self) -> None:
        """Cut the tensors into parts, for this step: after it, `loops` can be run."""
        total = self.table.total
        threads = 1 if total < SERIAL_BELOW else get_num_threads()
        chunk = _chunk(total, threads)
        # In every step: the object may have been used for a table of another size.
        self._call.words[_CHUNK] = chunk
        n = -(-total // chunk)
        threads = min(threads, n)
        loop = self.loops[0]
        if n != loop[1] or threads != loop[3]:
            self.loops = (loop._replace(n=n, threads=threads),)

    def run(self) -> None:
        """Run `loops`."""
        _, n, call, threads = self.loops[0]
        run(update_chunk, n, call, threads)

    def release(self) -> None:
        """Leave the object to later steps."""
        self._give(self)


def _chunk(total: int, threads: int) -> int:
    """How many elements make a part."""
    if threads == 1:
        return max(1, total)
    share = -(-total // threads)
    longest = min(_LONG_CHUNK, max(CHUNK, share // _PARTS_PER_THREAD))
    return -(-min(longest, share) // _ALIGN) * _ALIGN
