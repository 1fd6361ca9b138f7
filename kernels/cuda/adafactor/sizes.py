"""Adafactor's scalars on a device, once the sizes of parameters and directions are known there."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float64

from ...rules import adafactor as rules
from ...storage import Storage, numba_type
from ..dense.measure import MOST_VALUES, add_tree
from ..dense.tensor_table import FIRST_BLOCK, HP, SIZE
from ..device.backend import load_float64, load_int64, scale_real
from ..device.functions import device_function
from ..device.guard import is_closed


class Options(NamedTuple):
    """What all tensors have in common; see `nn.AdaFactor`."""

    epsilon2: float
    clip_threshold: float
    scale_parameter: bool


@cache
def sizes_kernel(real: Storage, options: Options, threads: int, row_bytes: int) -> Any:
    """``loop[n_tensors, threads](table, n_tensors, n_blocks, sums, guard)``.

    It adds the sums of a tensor's blocks, squares of the parameter and of the direction, and
    multiplies ``step`` and ``decay`` of its scalars. The rows of the table have ``row_bytes`` bytes
    and begin as those of a dense launch.
    """
    epsilon2, clip_threshold, scale_parameter = options
    size_factors, scale = device_function(rules.size_factors), scale_real(numba_type(real))
    of_step, of_decay = (
        rules.ADAFACTOR.hp.index(name) * real.itemsize for name in ("step", "decay")
    )

    @cuda.jit
    def loop(table, n_tensors, n_blocks, sums, guard):
        if is_closed(guard):
            return
        t, thread = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        row = table + t * row_bytes
        first, end = load_int64(row + 8 * FIRST_BLOCK), n_blocks
        if t + 1 < n_tensors:
            end = load_int64(row + row_bytes + 8 * FIRST_BLOCK)
        shared = cuda.shared.array((2, threads), float64)
        for k in range(2):
            total, i = 0.0, first + thread
            while i < end:
                total += load_float64(sums + (i * MOST_VALUES + k) * 8)
                i += threads
            shared[k, thread] = total
        add_tree(shared, thread, threads, 2)
        if thread == 0:
            size, hp = np.float64(load_int64(row + 8 * SIZE)), load_int64(row + 8 * HP)
            step, decay = size_factors(
                shared[0, 0], shared[1, 0], size, epsilon2, clip_threshold, scale_parameter
            )
            scale(hp + of_step, step)
            scale(hp + of_decay, decay)

    return loop
