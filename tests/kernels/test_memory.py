"""A MemoryError at any allocation of a step: nothing has been written or counted."""

from __future__ import annotations

import sys

import pytest

from subprocesses import output_of

PROGRAM = """
import resource
import sys
import numpy as np
from fusestep import nn
from fusestep.kernels.cpu.threads import workspace

N, D, B = 20_000, 4, 60_000
rng = np.random.default_rng(0)
name, use_locking = sys.argv[1], sys.argv[2] == "True"


def rows(dtype):
    n = B * np.dtype(dtype).itemsize  # the second table needs more than the first leaves behind
    # A third of the occurrences are those of one row, which has sums of its own.
    indices = rng.integers(0, N, n) * (rng.random(n) < 0.7)
    return nn.RowTensor(indices, rng.standard_normal((n, D)).astype(dtype), (N, D))


def dense(dtype):
    return rng.standard_normal((N, D)).astype(dtype)


make = rows if name in ("Adam", "LazyAdam") else dense
gradients = tuple(make(dtype) for dtype in (np.float32, np.float64))


def made():
    tables = [np.ones((N, D), np.float32), np.ones((N, D))]
    opt = getattr(nn, name)(tables, use_locking=use_locking)
    return opt, [*tables, *opt.state_arrays().values()]


def bits(arrays):
    return [array.tobytes() for array in arrays]


def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


_, unlimited = resource.getrlimit(resource.RLIMIT_AS)
opt, arrays = made()
before = bits(arrays)
opt(gradients)
after = bits(arrays)
assert before != after
counts = {"failed": 0, "done": 0}
room = 0
while counts["done"] < 3:
    opt, arrays = made()
    workspace._blocks.free.clear()  # as in the first step of a process
    resource.setrlimit(resource.RLIMIT_AS, (used() + room, unlimited))
    try:
        opt(gradients)
    except MemoryError:
        outcome, expected = "failed", before
    else:
        outcome, expected = "done", after
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (unlimited, unlimited))
    counts[outcome] += 1
    assert bits(arrays) == expected, (outcome, room)
    room += 1 << 18
print(counts["failed"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit and /proc are Linux's")
@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "AdaFactor"])
def test_nothing_has_happened(name: str, use_locking: bool) -> None:
    environment = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    printed = output_of(PROGRAM, name, use_locking, NUMBA_NUM_THREADS="2", **environment)
    assert int(printed) > 0
