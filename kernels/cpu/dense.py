"""Any number of dense tensors in one call."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import carray

from ..blocks import Kernel
from ..compile import call_reader, part
from .intrinsics import as_pointer, call7
from .parallel import get_num_threads, run
from .search import last_at_most

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
    addresses: int  # [T, 4]: w, s0, s1, s2
    gradients: int  # [T]
    first: int  # [T + 1]: flat index of each tensor's first element
    hp: int  # [R, F] of the arithmetic type
    hp_row_bytes: int
    hp_of: int  # [T]: row of hp
    w_bytes: int
    g_bytes: int
    s0_bytes: int
    s1_bytes: int
    s2_bytes: int
    chunk: int


_read_call = call_reader(DenseCall)


@part
def _update_chunk(index, slot, call):
    c = _read_call(call)
    first = carray(as_pointer(c.first), c.n_tensors + 1, np.int64)
    table = carray(as_pointer(c.addresses), (c.n_tensors, 4), np.int64)
    gradients = carray(as_pointer(c.gradients), c.n_tensors, np.int64)
    hp_of = carray(as_pointer(c.hp_of), c.n_tensors, np.int64)
    flat = index * c.chunk
    end = min(flat + c.chunk, first[c.n_tensors])
    t = last_at_most(first, c.n_tensors, flat)
    while flat < end:
        offset = flat - first[t]
        n = min(end, first[t + 1]) - flat
        if n > 0:
            call7(
                c.block,
                table[t, 0] + offset * c.w_bytes,
                gradients[t] + offset * c.g_bytes,
                table[t, 1] + offset * c.s0_bytes,
                table[t, 2] + offset * c.s1_bytes,
                table[t, 3] + offset * c.s2_bytes,
                n,
                c.hp + hp_of[t] * c.hp_row_bytes,
            )
            flat += n
        t += 1


class TensorTable:
    """Where T tensors and their states lie; what stays the same from step to step.

    Args:
        addresses: int64 ``[T, 4]``: w and up to three states (unused columns are ignored).
        first: int64 ``[T + 1]``: prefix sums of the tensors' sizes.
    """

    def __init__(self, addresses: np.ndarray, first: np.ndarray) -> None:
        self.addresses = addresses
        self.first = first

    @cached_property
    def total(self) -> int:
        """The number of elements of all tensors."""
        return int(self.first[-1])

    @cached_property
    def pointers(self) -> tuple[int, int]:
        """The addresses of both arrays."""
        return self.addresses.ctypes.data, self.first.ctypes.data


def dense_update(
    kernel: Kernel, table: TensorTable, gradients: np.ndarray, hp: np.ndarray, hp_of: np.ndarray
) -> None:
    """One step of ``kernel`` on T contiguous tensors, in place, each array read once.

    Args:
        kernel: the compiled rule and its storage types.
        table: the tensors.
        gradients: int64 ``[T]``: addresses of the gradients.
        hp: ``[R, F]`` scalars in the type of the arithmetic, fields as `hp_type`.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses.
    """
    total = table.total
    if total == 0:
        return
    threads = get_num_threads() if total >= SERIAL_BELOW else 1
    share = -(-total // threads)
    longest = min(_LONG_CHUNK, max(CHUNK, share // _PARTS_PER_THREAD))
    chunk = total if threads == 1 else -(-min(longest, share) // _ALIGN) * _ALIGN
    call = DenseCall(
        kernel.block.address,
        len(gradients),
        table.pointers[0],
        gradients.ctypes.data,
        table.pointers[1],
        hp.ctypes.data,
        hp.strides[0],
        hp_of.ctypes.data,
        kernel.w.itemsize,
        kernel.g.itemsize,
        *kernel.state_bytes,
        chunk,
    )
    arguments = np.array(call, np.int64)
    run(_update_chunk, -(-total // chunk), arguments.ctypes.data, threads)
