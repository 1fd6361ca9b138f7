"""LARS on the device: the trust ratio of each tensor, from norms that stay there."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...rules import lars
from ...storage import Storage
from ..device.backend import GEOMETRY, launcher
from ..device.functions import device_function
from ..device.guard import is_closed
from ..device.part import LaunchContext
from ..device.records import Word, multiplier, row_reader, size_of, table_of
from ..device.sums import add_tree, share_of_parts
from .norm import DenseGradients, DenseSquares
from .scalars import ScalarInputs

THREADS = GEOMETRY.totals


class RatioRow(NamedTuple):
    """A tensor that has a trust ratio."""

    first_w: Word  # part of the squares of the parameter
    end_w: Word
    first_g: Word  # part of the squares of the gradient
    end_g: Word
    factor: Word  # address of the scalar that is multiplied by the ratio
    numbers: Word  # address of the `ScalarInputs` of the tensor


class TrustOptions(NamedTuple):
    """Options that all tensors share; see `nn.LARS`."""

    coefficient: float
    epsilon: float
    use_clip: bool


@cache
def trust_kernel(real: Storage, options: TrustOptions) -> Any:
    """``loop[n_tensors, THREADS](table, parts, guard)``: multiply the scalars by the ratios."""
    coefficient, epsilon, use_clip = options
    ratio, clipped = device_function(lars.ratio), device_function(lars.clipped)
    multiply, row_at, numbers_at = multiplier(real), row_reader(RatioRow), row_reader(ScalarInputs)

    @cuda.jit
    def loop(table, parts, guard):
        if is_closed(guard):
            return
        thread, row = cuda.threadIdx.x, row_at(table, np.int64(cuda.blockIdx.x))
        shared = cuda.shared.array((2, THREADS), float64)
        shared[0, thread] = share_of_parts(parts, row.first_w, row.end_w, 0, 1, thread, THREADS)
        shared[1, thread] = share_of_parts(parts, row.first_g, row.end_g, 0, 1, thread, THREADS)
        add_tree(shared, thread, THREADS, 2)
        if thread == 0:
            used = numbers_at(row.numbers, 0)
            norm_w, norm_g = math.sqrt(shared[0, 0]), math.sqrt(shared[1, 0]) / used.scale
            found = ratio(norm_w, norm_g, used.decay, coefficient, epsilon)
            if use_clip:
                found = clipped(found, used.rate)
            multiply(row.factor, found)

    return loop


class TrustRatios:
    """A `DevicePart`: scalar ``column`` of each tensor that ``acts`` times its trust ratio."""

    def __init__(
        self,
        parameters: DenseGradients,
        gradients: DenseGradients,
        acts: np.ndarray,
        options: TrustOptions,
        real: Storage,
        column: int,
    ) -> None:
        self._offset = column * real.itemsize
        self._squares = DenseSquares(parameters), DenseSquares(gradients)
        self._acts, self._loop = acts, trust_kernel(real, options)
        self.loops = [*(found.loop for found in self._squares), self._loop]
        self.scratch_bytes = sum(found.n_parts for found in self._squares) * 8
        self._table = 0

    def words(self, place: int, hp: np.ndarray) -> np.ndarray:
        """See `DevicePart`."""
        squares_w, squares_g = self._squares
        end_w, end_g = np.cumsum(squares_w.counts), squares_w.n_parts + np.cumsum(squares_g.counts)
        places = hp + self._offset, hp - size_of(ScalarInputs)
        rows = RatioRow(end_w - squares_w.counts, end_w, end_g - squares_g.counts, end_g, *places)
        first = squares_w.words(place)
        second = squares_g.words(place + first.nbytes)
        self._table = place + first.nbytes + second.nbytes
        own = table_of(rows, len(hp)).reshape(len(hp), -1)[self._acts]
        return np.concatenate([first, second, own.ravel()])

    def enqueue(self, call: LaunchContext) -> None:
        """See `DevicePart`."""
        n_acting = int(np.count_nonzero(self._acts))
        if n_acting == 0:
            return
        squares_w, squares_g = self._squares
        squares_w.launch(call.scratch, call.stream)
        squares_g.launch(call.scratch + squares_w.n_parts * 8, call.stream)
        launcher(self._loop, n_acting, THREADS, call.stream)(self._table, call.scratch, call.guard)
