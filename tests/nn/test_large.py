"""More than 2**31 elements: indexing is 64-bit everywhere."""

import mmap

import numpy as np
import pytest
from fusestep import ops

HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)


def sparse_memory(n_elements, dtype):
    """Zeroed memory of which only the touched pages exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    n_bytes = n_elements * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, n_bytes, flags=flags), dtype)


def available_gib():
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) / 2**20
    return 0.0


@pytest.mark.parametrize("d", [1, 64])
def test_lazy_rows_beyond_2_31_elements(d):
    n = 2**31 // d + 10
    var, m, v = (sparse_memory(n * d, np.float32).reshape(n, d) for _ in range(3))
    rows = np.array([0, n - 1, 2**31 // d, n - 1, 2**31 // d - 1])
    values = np.arange(1, 6, dtype=np.float32)[:, None] * np.ones((5, d), np.float32)
    ops.FusedSparseLazyAdam()(var, m, v, *HP, values, rows)
    small = [np.zeros((4, d), np.float32) for _ in range(3)]
    ops.FusedSparseLazyAdam()(*small, *HP, values, np.array([0, 3, 2, 3, 1]))
    for large, expected in zip((var, m, v), small, strict=True):
        np.testing.assert_array_equal(large[[0, 2**31 // d - 1, 2**31 // d, n - 1]], expected)
        assert not large[1 : 1_000 // d + 2].any()


def test_gather_beyond_2_31_elements():
    n = 2**31 + 10
    table = sparse_memory(n, np.float32)
    table[[5, n - 1]] = 1.0, 2.0
    assert ops.SparseGatherV2()(table, np.array([n - 1, 0, 5]), 0).tolist() == [2.0, 0.0, 1.0]


@pytest.mark.exhaustive  # takes 9 GiB of memory and half a minute
def test_dense_fp16_beyond_2_31_elements():
    """With one state: each takes 4 GiB, and most of the time goes into getting memory at all."""
    if available_gib() < 11:
        pytest.skip(f"needs 9 GiB for var and accum; {available_gib():.0f} GiB are available")
    n = 2**31 + 40
    var, accum, gradient = (sparse_memory(n, np.float16) for _ in range(3))
    places = np.array([0, 2**31 - 1, 2**31, n - 1])
    # Reading untouched pages of the gradient maps one page of zeros, so it takes no memory.
    gradient[places] = 1, 2, 3, 4
    ops.ApplyMomentum()(var, accum, 0.1, gradient, 0.9)
    small = [np.zeros(4, np.float16) for _ in range(2)]
    ops.ApplyMomentum()(*small, 0.1, gradient[places], 0.9)
    assert all(array.all() for array in small)
    for large, expected in zip((var, accum), small, strict=True):
        np.testing.assert_array_equal(large[places], expected)
        assert not large[1:1_000].any()
        assert not large[2**31 + 1 : n - 1].any()
