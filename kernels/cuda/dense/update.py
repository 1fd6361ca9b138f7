"""Any number of dense tensors in one launch.

Each block takes a chunk of one tensor. A table tells where the tensors lie and at which block
each begins; a block finds its tensor by bisection. What differs from step to step, gradients and
scalars, is in the table too, so a step is one copy to the device and one launch.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...element import Kernel
from ..device.backend import load_int64
from ..device.guard import is_closed
from ..device.launch import on_grid
from ..device.memory import Places, copy_scalars_and_table, room_of
from ..rows.search import last_at_most
from . import measure
from .tensor_table import COLUMNS, FIRST_BLOCK, HP, IS_ALIGNED, ROW_BYTES, S0, S1, S2, SIZE, G, W
from .tiles import tiles

THREADS = 256
_TILES_PER_THREAD = 4  # of a chunk
_ALIGN = 16  # bytes


@cache
def dense_kernel(kernel: Kernel) -> Any:
    """The compiled loop of a rule, ``loop[blocks, THREADS](table, n_tensors, guard)``."""
    length, vector, single, read_hp = tiles(
        kernel.rule, kernel.prologue, kernel.w, kernel.g, kernel.s
    )
    chunk, stride = chunk_of(kernel), THREADS * length

    @cuda.jit
    def loop(table, n_tensors, guard):
        if is_closed(guard):
            return
        block = cuda.blockIdx.x
        row = table + last_at_most(table + 8 * FIRST_BLOCK, ROW_BYTES, n_tensors, block) * ROW_BYTES
        w, g = load_int64(row + 8 * W), load_int64(row + 8 * G)
        s0, s1 = load_int64(row + 8 * S0), load_int64(row + 8 * S1)
        s2, hp = load_int64(row + 8 * S2), read_hp(load_int64(row + 8 * HP))
        # Unsigned: with signed bounds the compiler unrolls the loops and divides for their
        # number of rounds.
        begin = np.uint64(block - load_int64(row + 8 * FIRST_BLOCK)) * np.uint64(chunk)
        end = min(np.uint64(load_int64(row + 8 * SIZE)), begin + np.uint64(chunk))
        thread = np.uint64(cuda.threadIdx.x)
        whole = begin
        if load_int64(row + 8 * IS_ALIGNED):
            whole = end - end % np.uint64(length)
            i = begin + thread * np.uint64(length)
            while i < whole:
                vector(w, g, s0, s1, s2, np.int64(i), hp)
                i += np.uint64(stride)
        i = whole + thread
        while i < end:
            single(w, g, s0, s1, s2, np.int64(i), hp)
            i += np.uint64(THREADS)

    return loop


def chunk_of(kernel: Kernel) -> int:
    """Elements of a chunk: a multiple of the length of a tile, so that only ends are single."""
    length = tiles(kernel.rule, kernel.prologue, kernel.w, kernel.g, kernel.s).length
    return THREADS * length * _TILES_PER_THREAD


def table_of(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp_addresses: np.ndarray,
) -> tuple[np.ndarray, int]:
    """The table of a launch, and its number of blocks; tensors of no elements are left out.

    Args:
        kernel: the rule and its storage types.
        addresses: int64 ``[T, 1 + number of states]``, on the device.
        gradients: int64 ``[T]``, on the device.
        sizes: int64 ``[T]``: elements of each tensor.
        hp_addresses: int64 ``[T]``: where the scalars of each tensor will lie on the device.
    """
    known = np.flatnonzero(sizes)
    table = np.zeros((len(known), COLUMNS), np.int64)
    table[:, W], table[:, G] = addresses[known, 0], gradients[known]
    table[:, S0 : S0 + addresses.shape[1] - 1] = addresses[known, 1:]
    table[:, SIZE], table[:, HP] = sizes[known], hp_addresses[known]
    blocks = -(-sizes[known] // chunk_of(kernel))
    table[:, FIRST_BLOCK] = np.cumsum(blocks) - blocks
    table[:, IS_ALIGNED] = (table[:, [W, G, S0, S1, S2]] % _ALIGN == 0).all(1)
    return table, int(blocks.sum())


def dense_update(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    hp_of: np.ndarray,
    *,
    guard: int = 0,
    stream: Any,
) -> None:
    """Enqueue one step of ``kernel`` on tensors of the device, in place.

    Args:
        kernel: the rule and its storage types.
        addresses: as in `table_of`.
        gradients: as in `table_of`.
        sizes: as in `table_of`.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host. Those of a two-stage
            rule are completed on the device.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses; of a two-stage rule each its own.
        guard: address of the guard of the call (`guard`), or 0.
        stream: of Numba.
    """
    if not sizes.any():
        return
    scalars, places = np.ascontiguousarray(hp), Places()
    places.add(scalars.nbytes)
    offset = places.add(len(sizes) * ROW_BYTES)
    at_sums = places.add(sums_bytes(kernel, sizes))
    with room_of(stream) as room:
        base = room.take(places.size)
        hp_addresses = base + hp_of * scalars.strides[0]
        table, n_blocks = table_of(kernel, addresses, gradients, sizes, hp_addresses)
        copy_scalars_and_table(base, scalars, offset, table, stream)
        enqueue(
            loops_of(kernel), base + offset, len(table), n_blocks, base + at_sums, guard, stream
        )


class Loops(NamedTuple):
    """The loops of a step.

    Attributes:
        measure: the first stage of a two-stage rule, else None.
        follow: what then changes the scalars, with the arguments of `measure.factor_kernel`.
        update: the rule.
    """

    measure: Any
    follow: Any
    update: Any


def loops_of(kernel: Kernel, follow: Any = None) -> Loops:
    """The loops for a rule; ``follow`` is that of one whose ``factor`` does not say all."""
    if kernel.rule.factor:
        follow = measure.factor_kernel(kernel, THREADS)
    first = measure.chunk_sums_kernel(kernel, THREADS, chunk_of(kernel)) if follow else None
    return Loops(first, follow, dense_kernel(kernel))


def sums_bytes(kernel: Kernel, sizes: np.ndarray) -> int:
    """Bytes of scratch memory that `enqueue` needs for a two-stage rule."""
    if not kernel.rule.measure:
        return 0
    return int((-(-sizes // chunk_of(kernel))).sum()) * measure.SUMS_BYTES


def enqueue(
    loops: Loops,
    table: int,
    n_tensors: int,
    n_blocks: int,
    sums: int,
    guard: int,
    stream: Any,
) -> None:
    """Enqueue the loops of a step.

    Args:
        loops: these.
        table: address of the table on the device, from `table_of`.
        n_tensors: its rows.
        n_blocks: from `table_of`.
        sums: address of scratch memory.
        guard: as in `dense_update`.
        stream: of Numba.
    """
    if n_tensors == 0:
        return
    if loops.measure:
        on_grid(loops.measure, n_blocks, THREADS, stream)(table, n_tensors, sums, guard)
        on_grid(loops.follow, n_tensors, THREADS, stream)(table, n_tensors, n_blocks, sums, guard)
    on_grid(loops.update, n_blocks, THREADS, stream)(table, n_tensors, guard)
