"""Adafactor's scalars on a device, once the root mean squares are known."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ...element import Kernel
from ...rules import adafactor as rules
from ..dense.measure import totals_kernel
from ..device.functions import device_function
from ..device.numbers import multiplier


class Options(NamedTuple):
    """What all tensors have in common; see `nn.AdaFactor`."""

    epsilon2: float
    clip_threshold: float
    scale_parameter: bool


@cache
def rms_kernel(kernel: Kernel, record: Any, options: Options) -> Any:
    """A `totals_kernel` of tensors in rows of ``record``.

    From the squares of the parameter and of the direction follow ``step`` and ``decay`` of the
    scalars, which it multiplies.
    """
    epsilon2, clip_threshold, scale_parameter = options
    size_factors, multiply = device_function(rules.size_factors), multiplier(kernel.real)
    of_step, of_decay = (kernel.column[name] * kernel.real.itemsize for name in ("step", "decay"))

    @cuda.jit(device=True)
    def follow(shared, row):
        step, decay = size_factors(
            shared[0, 0], shared[1, 0], np.float64(row.size),
            epsilon2, clip_threshold, scale_parameter,
        )  # fmt: skip
        multiply(row.hp + of_step, step)
        multiply(row.hp + of_decay, decay)

    return totals_kernel(record, 1 + len(kernel.s), 2, follow)
