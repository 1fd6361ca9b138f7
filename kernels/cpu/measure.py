"""The first stage of two-stage rules: sums over each of any number of tensors, in one call.

A tensor is summed in parts of `PART` elements, each in the order of the machine code, and
NumPy adds the sums of the parts in an order that their number fixes. So a sum depends on the
tensor alone, not on the number of threads or on the other tensors of the call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..element import Kernel
from ..tables import TensorTable
from .blocks import blocks
from .compile import Arguments, part
from .dense import SERIAL_BELOW, DenseCall, block_arguments, read_call
from .intrinsics import call_address
from .parallel import get_num_threads, run
from .records import call_reader, int64s
from .rows.search import last_at_most

PART = 65_536  # elements; fixes the last bits of a sum


class MeasureCall(NamedTuple):
    """Arguments of the measuring loop, all ``int64``."""

    dense: int  # address of those of the dense loop: a chunk is a part
    first_part: np.ndarray  # [T]: number of each tensor's first part
    sums: np.ndarray  # [parts, n_measured] float64
    sums_bytes: int  # of a row of them


_read_call = call_reader(MeasureCall)


@part
def _measure_part(index, slot, call):
    c = _read_call(call)
    d = read_call(c.dense)
    first, first_part = int64s(d.first, d.n_tensors + 1), int64s(c.first_part, d.n_tensors)
    t = last_at_most(first_part, d.n_tensors, index)
    offset = (index - first_part[t]) * d.chunk
    n = min(d.chunk, first[t + 1] - first[t] - offset)
    arguments = block_arguments(d, t, offset, n)
    call_address(d.block, *arguments, c.sums + index * c.sums_bytes)


def measure(
    kernel: Kernel, table: TensorTable, gradients: np.ndarray, hp: np.ndarray, hp_of: np.ndarray
) -> np.ndarray:
    """float64 ``[T, n_measured]``, the sums of squares of what a rule measures.

    Arguments as those of `dense.DenseStep`; nothing is written to the tensors.
    """
    block = blocks(kernel).measure
    assert block is not None
    parts = np.maximum(1, -(-np.diff(table.first) // PART))
    first_part = np.concatenate(([0], np.cumsum(parts)[:-1]))
    sums = np.empty((int(parts.sum()), kernel.rule.n_measured))
    dense = Arguments(DenseCall.of(block, kernel.g, table, gradients, hp, hp_of, PART))
    call = Arguments(MeasureCall(dense.address, first_part, sums, sums.strides[0]))
    threads = get_num_threads() if table.total >= SERIAL_BELOW else 1
    run(_measure_part, len(sums), call.address, threads)
    return np.add.reduceat(sums, first_part)
