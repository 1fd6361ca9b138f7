"""Compile kernels of the current device ahead of their first use: ``fusestep warmup --cuda``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np

from ..element import Kernel
from ..storage import STORAGES
from ..tables import RowSource, RowTable
from .dense.norm import FINITE, scaling
from .dense.row_wise import RowWiseStep
from .dense.step import DenseStep, chunk_sums_kernel
from .device.arrays import fill_kernel
from .device.backend import prepare
from .rows.sort import TILE
from .rows.step import RowStep


def prepare_loops(kernels: Iterable[Kernel]) -> int:
    """Compile and load, or find in the cache, what steps of these kernels launch; how many loops.

    What only the host works out (`AdaFactor`, `Prodigy`, THOR) has none.
    """
    loops = dict.fromkeys(loop for kernel in kernels for loop in _loops_of(kernel))
    checks = [chunk_sums_kernel(scaling(storage, FINITE)) for storage in STORAGES.values()]
    loops |= dict.fromkeys([fill_kernel, *checks])
    for loop in loops:
        prepare(loop)
    return len(loops)


def _loops_of(kernel: Kernel) -> Iterator[Any]:
    rule, one = kernel.rule, np.ones(1, np.int64)
    if rule.lines or rule.scope == "step" or (rule.is_two_stage and rule.takes):
        return
    addresses = np.zeros((1, 1 + len(kernel.s)), np.int64)
    if rule.is_row_wise:
        yield from RowWiseStep(kernel, addresses, 0 * one, one, one).loops
    else:
        yield from DenseStep(kernel, addresses, 0 * one, one).loops
    if not rule.is_two_stage:
        # A list that one block sorts, and one that many do, of which some rows may be hot.
        for length, touched_only in product((1, TILE + 1), (True, False)):
            table = RowTable(
                tuple(addresses[0].tolist()), 1, 1, RowSource(index_bytes=8, length=length)
            )
            yield from RowStep(kernel, [table], touched_only=touched_only).loops
