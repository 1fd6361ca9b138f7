"""Updates that rounding to 16 bits would lose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ops.runtime.errors import reject
from .fused import FusedOptimizer


def rounded_away(optimizer: FusedOptimizer, gradients: Sequence[Any]) -> dict[str, float]:
    """The share of each parameter that a step would move, and rounding would keep in place.

    Of an element whose weight is w, and would be x after a step without rounding, that is::

        x != w  and  round(x) == round(w)

    with ``round`` to the nearest number of the parameter's dtype; w is the whole weight, with what
    lies beside it. With ``rounding="nearest"`` these updates are lost in every step; other ways of
    rounding keep them. Nothing is written: the step is taken on copies of all parameters and
    states, in float32 (float64 for float64 parameters).

    Args:
        optimizer: with parameters on the host.
        gradients: those of the step, as the optimizer takes them.

    Returns:
        By the name of each parameter that has a gradient: a share from 0 to 1 of all its elements.

    Raises:
        TypeError: it is no `FusedOptimizer`.
        ValueError: its parameters are on a device, or its steps are agreed with other processes.
        TypeError, ValueError, IndexError, RuntimeError: as the step.

    >>> import ml_dtypes
    >>> import numpy as np
    >>> w = np.array([0.01, 1, 100, 5], ml_dtypes.bfloat16)
    >>> from fusestep import nn
    >>> optimizer = nn.SGD([w], 1e-3)
    >>> nn.rounded_away(optimizer, [np.array([1, 1, 1, 0], np.float32)])
    {'parameter_0': 0.5}
    """
    where = "rounded_away"
    if not isinstance(optimizer, FusedOptimizer):
        expected, got = "a FusedOptimizer", type(optimizer).__name__
        reject(TypeError, where, "optimizer", "has a wrong type", expected, got)
    if optimizer.together is not None or any(p.is_on_device for p in optimizer.parameters):
        expected = "one with whole parameters on the host"
        reject(ValueError, where, "optimizer", "is elsewhere", expected, "processes or a device")
    trial = copy.deepcopy(optimizer)
    wholes = trial.widen()
    trial(gradients)
    shares = {}
    for p, x, w, g in zip(optimizer.parameters, trial.parameters, wholes, gradients, strict=True):
        if g is not None and p.size:
            lost = (x.array != w) & (x.array.astype(p.dtype) == w.astype(p.dtype))
            shares[str(p.name)] = float(np.mean(lost))
    return shares
