"""LARS on the device: the trust ratio of each tensor, from norms that stay there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ..rules import lars
from ..storage import Storage, numba_type
from .backend import copy_in, load_float64, load_int64, scale_real
from .functions import device_function
from .launch import on_grid
from .measure import SUMS_BYTES, add_tree
from .memory import SUMS, Places, room_of
from .norm import DenseGradients, add_squares, n_blocks

THREADS = 256
# Columns of the table, [T, COLUMNS]; the last ones are float64.
FIRST_W, END_W, FIRST_G, END_G, PLACE, DECAY, RATE, COLUMNS = range(8)
_ROW_BYTES = 8 * COLUMNS


class Options(NamedTuple):
    """What all tensors have in common; see `nn.LARS`."""

    coefficient: float
    epsilon: float
    loss_scale: float
    use_clip: bool


@cache
def trust_kernel(real: Storage, options: Options, threads: int) -> Any:
    """``loop[n_tensors, threads](table, sums)``: multiply the scalar at ``PLACE`` by the ratio."""
    coefficient, epsilon, loss_scale, use_clip = options
    ratio, clipped = device_function(lars.ratio), device_function(lars.clipped)
    scale = scale_real(numba_type(real))

    @cuda.jit
    def loop(table, sums):
        thread, row = cuda.threadIdx.x, table + np.int64(cuda.blockIdx.x) * _ROW_BYTES
        shared = cuda.shared.array((2, threads), float64)
        for k in range(2):
            own, i = 0.0, load_int64(row + 16 * k) + thread
            end = load_int64(row + 16 * k + 8)
            while i < end:
                own += load_float64(sums + i * SUMS_BYTES)
                i += threads
            shared[k, thread] = own
        add_tree(shared, thread, threads, 2)
        if thread == 0:
            of_w, of_g = math.sqrt(shared[0, 0]), math.sqrt(shared[1, 0]) / loss_scale
            found = ratio(of_w, of_g, load_float64(row + 8 * DECAY), coefficient, epsilon)
            if use_clip:
                found = clipped(found, load_float64(row + 8 * RATE))
            scale(load_int64(row + 8 * PLACE), found)

    return loop


@contextmanager
def trust_ratios(
    parameters: DenseGradients,
    gradients: DenseGradients,
    decays: np.ndarray,
    rates: np.ndarray,
    options: Options,
    real: Storage,
    stream: Any,
) -> Iterator[Any]:
    """Enqueue the norms of tensors; gives what enqueues the rest.

    Args:
        parameters: T of them.
        gradients: of the same sizes.
        decays: float64 ``[T]``: weight decays.
        rates: float64 ``[T]``: learning rates.
        options: what all have in common.
        real: the type of the arithmetic.
        stream: of Numba.

    Yields:
        ``complete(places)``: multiplies the scalars at int64 addresses ``[T]`` by the ratios; the
        address 0 stands for a tensor that has none.
    """
    of_w, of_g = n_blocks(parameters), n_blocks(gradients)
    places = Places()
    at_table = places.add(len(of_w) * _ROW_BYTES)
    at_sums = places.add(int(of_w.sum() + of_g.sum()) * SUMS_BYTES)
    table = np.zeros((len(of_w), COLUMNS), np.int64)
    table[:, END_W], table[:, END_G] = np.cumsum(of_w), of_w.sum() + np.cumsum(of_g)
    table[:, FIRST_W], table[:, FIRST_G] = table[:, END_W] - of_w, table[:, END_G] - of_g
    table[:, DECAY], table[:, RATE] = (x.astype(float).view(np.int64) for x in (decays, rates))
    with room_of(stream, SUMS) as room:
        base = room.take(places.size)
        sums = base + at_sums
        add_squares(parameters, sums, stream)
        add_squares(gradients, sums + int(of_w.sum()) * SUMS_BYTES, stream)

        def complete(hp_places: np.ndarray) -> None:
            known = hp_places != 0
            if not known.any():
                return
            table[:, PLACE] = hp_places
            copy_in(base + at_table, np.ascontiguousarray(table[known]), stream)
            loop = trust_kernel(real, options, THREADS)
            on_grid(loop, int(known.sum()), THREADS, stream)(base + at_table, sums)

        yield complete
