"""The first stage of two-stage rules: sums over each of any number of tensors, in one call.

A tensor is summed in parts of `PART` elements, each in the order of the machine code, and
NumPy adds the sums of the parts in an order that their number fixes. So a sum depends on the
tensor alone, not on the number of threads or on the other tensors of the call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ..element import Kernel
from ..tables import TensorTable
from .blocks import blocks
from .compile import call_reader, part
from .dense import SERIAL_BELOW
from .headers import address_of
from .intrinsics import as_pointer, call_address
from .parallel import get_num_threads, run
from .rows.search import last_at_most

PART = 65_536  # elements; fixes the last bits of a sum


class MeasureCall(NamedTuple):
    """Arguments of the measuring loop, all ``int64``."""

    measure: int
    n_tensors: int
    addresses: int  # [T, 1 + number of states]
    addresses_bytes: int  # of a row of them
    gradients: int  # [T]
    first: int  # [T + 1]: flat index of each tensor's first element
    first_part: int  # [T]: number of each tensor's first part
    hp: int  # [R, F] of the arithmetic type
    hp_row_bytes: int
    hp_of: int  # [T]: row of hp
    g_bytes: int
    part: int
    sums: int  # [parts, n_measured] float64
    sums_bytes: int  # of a row of them


_read_call = call_reader(MeasureCall)


@part
def _measure_part(index, slot, call):
    c = _read_call(call)
    first = carray(as_pointer(c.first), c.n_tensors + 1, np.int64)
    first_part = carray(as_pointer(c.first_part), c.n_tensors, np.int64)
    gradients = carray(as_pointer(c.gradients), c.n_tensors, np.int64)
    hp_of = carray(as_pointer(c.hp_of), c.n_tensors, np.int64)
    t = last_at_most(first_part, c.n_tensors, index)
    offset = (index - first_part[t]) * c.part
    call_address(
        c.measure,
        c.addresses + t * c.addresses_bytes,
        offset,
        gradients[t] + offset * c.g_bytes,
        min(c.part, first[t + 1] - first[t] - offset),
        c.hp + hp_of[t] * c.hp_row_bytes,
        c.sums + index * c.sums_bytes,
    )


def measure(
    kernel: Kernel, table: TensorTable, gradients: np.ndarray, hp: np.ndarray, hp_of: np.ndarray
) -> np.ndarray:
    """The sums of squares of what ``kernel.rule`` measures; nothing is written to the tensors.

    Args:
        kernel: the compiled rule and its storage types.
        table: the tensors.
        gradients: int64 ``[T]``: addresses of the gradients.
        hp: ``[R, F]`` scalars in the type of the arithmetic, fields as `hp_type`.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses.

    Returns:
        float64 ``[T, n_measured]``.
    """
    block = blocks(kernel).measure
    assert block is not None
    parts = np.maximum(1, -(-np.diff(table.first) // PART))
    first_part = np.concatenate(([0], np.cumsum(parts)[:-1]))
    sums = np.zeros((int(parts.sum()), kernel.rule.n_measured))
    call = MeasureCall(
        block.address,
        len(gradients),
        address_of(table.addresses),
        table.addresses.strides[0],
        address_of(gradients),
        address_of(table.first),
        address_of(first_part),
        address_of(hp),
        hp.strides[0],
        address_of(hp_of),
        kernel.g.itemsize,
        PART,
        address_of(sums),
        sums.strides[0],
    )
    arguments = np.array(call, np.int64)
    threads = get_num_threads() if table.total >= SERIAL_BELOW else 1
    run(_measure_part, len(sums), address_of(arguments), threads)
    return np.add.reduceat(sums, first_part)
