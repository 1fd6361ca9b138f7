"""LARS on the device: the trust ratio of each tensor, from norms that stay there."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...rules import lars
from ...storage import Storage, numba_type
from ..device.backend import load_float64, load_int64, scale_real
from ..device.functions import device_function
from ..device.guard import is_closed
from ..device.launch import on_grid
from .measure import SUMS_BYTES, add_tree
from .norm import DenseGradients, enqueue_squares, n_blocks, squares_kernel, squares_table
from .scalars import USED_DECAY, USED_RATE, USED_SCALE

THREADS = 256
# Columns of the table, int64 [T, COLUMNS].
FIRST_W, END_W, FIRST_G, END_G, PLACE, NUMBERS, COLUMNS = range(7)
_ROW_BYTES = 8 * COLUMNS


class Options(NamedTuple):
    """What all tensors have in common; see `nn.LARS`."""

    coefficient: float
    epsilon: float
    use_clip: bool


@cache
def trust_kernel(real: Storage, options: Options, threads: int) -> Any:
    """``loop[n_tensors, threads](table, sums, guard)``: multiply the scalar at ``PLACE``."""
    coefficient, epsilon, use_clip = options
    ratio, clipped = device_function(lars.ratio), device_function(lars.clipped)
    scale = scale_real(numba_type(real))

    @cuda.jit
    def loop(table, sums, guard):
        if is_closed(guard):
            return
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
            numbers = load_int64(row + 8 * NUMBERS)
            of_w = math.sqrt(shared[0, 0])
            of_g = math.sqrt(shared[1, 0]) / load_float64(numbers + 8 * USED_SCALE)
            decay = load_float64(numbers + 8 * USED_DECAY)
            found = ratio(of_w, of_g, decay, coefficient, epsilon)
            if use_clip:
                found = clipped(found, load_float64(numbers + 8 * USED_RATE))
            scale(load_int64(row + 8 * PLACE), found)

    return loop


class TrustRatios:
    """The trust ratios of dense tensors.

    Args:
        parameters: T of them.
        gradients: of the same sizes.
        acts: bool ``[T]``: which tensors have one.
        options: what all have in common.
        real: the type of the arithmetic.
    """

    def __init__(
        self,
        parameters: DenseGradients,
        gradients: DenseGradients,
        acts: np.ndarray,
        options: Options,
        real: Storage,
    ) -> None:
        self._arrays = parameters, gradients
        self._acts = acts
        self._loop = trust_kernel(real, options, THREADS)
        self._counts = n_blocks(parameters), n_blocks(gradients)
        self._places = (0, 0, 0)

    def loops(self) -> list[Any]:
        """All loops that are launched."""
        return [*(squares_kernel(found.storage) for found in self._arrays), self._loop]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that `enqueue` needs."""
        return int(sum(counts.sum() for counts in self._counts)) * SUMS_BYTES

    def words(self, place: int, factors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The tables, to lie at the address ``place``.

        Args:
            place: where.
            factors: int64 ``[T]``: addresses of the scalars that are multiplied by the ratios.
            numbers: int64 ``[T]``: addresses of rate, decay and loss scale (`scalars.USED`).
        """
        of_w = self._counts[0].sum()
        table = np.zeros((len(factors), COLUMNS), np.int64)
        table[:, END_W] = np.cumsum(self._counts[0])
        table[:, END_G] = of_w + np.cumsum(self._counts[1])
        table[:, FIRST_W], table[:, FIRST_G] = (
            table[:, end] - counts for end, counts in zip((END_W, END_G), self._counts, strict=True)
        )
        table[:, PLACE], table[:, NUMBERS] = factors, numbers
        first = squares_table(self._arrays[0], place)
        second = squares_table(self._arrays[1], place + first.nbytes)
        self._places = (place, place + first.nbytes, place + first.nbytes + second.nbytes)
        return np.concatenate([first.ravel(), second.ravel(), table[self._acts].ravel()])

    def enqueue(self, scratch: int, guard: int, stream: Any) -> None:
        """Enqueue the norms and the change of the scalars."""
        n_acting = int(np.count_nonzero(self._acts))
        if n_acting == 0:
            return
        sums, (of_w, of_g, table) = scratch, self._places
        enqueue_squares(self._arrays[0], of_w, sums, stream)
        sums += int(self._counts[0].sum()) * SUMS_BYTES
        enqueue_squares(self._arrays[1], of_g, sums, stream)
        on_grid(self._loop, n_acting, THREADS, stream)(table, scratch, guard)
