"""One rule gives equal bits in every loop: dense, rows, sweeps, spans, serial and parallel."""

import numpy as np
import pytest

from fusestep import nn, ops, set_num_threads

HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)


def state(shape, seed=0):
    rng = np.random.default_rng(seed)
    var, m, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    return var, m, np.abs(v)


@pytest.mark.parametrize("use_nesterov", [False, True])
@pytest.mark.parametrize("d", [1, 2, 3, 7, 8, 16, 31, 64, 100, 2_000])
def test_dense_lazy_and_sweep_agree(d, use_nesterov):
    n = max(3, 4_000 // d)
    gradient = np.random.default_rng(1).standard_normal((n, d)).astype(np.float32)
    dense, lazy, sweep = state((n, d)), state((n, d)), state((n, d))
    ops.Adam(use_nesterov=use_nesterov)(*dense, *HP, gradient)
    order = np.random.default_rng(2).permutation(n)
    ops.FusedSparseLazyAdam(use_nesterov=use_nesterov)(*lazy, *HP, gradient[order], order)
    ops.FusedSparseAdam(use_nesterov=use_nesterov)(*sweep, *HP, gradient[order], order)
    for a, b, c in zip(dense, lazy, sweep, strict=True):
        assert a.tobytes() == b.tobytes()
        assert a.tobytes() == c.tobytes()


@pytest.mark.parametrize("use_nesterov", [False, True])
def test_absent_rows_take_the_step_of_a_zero_gradient(use_nesterov):
    """The block that reads no gradient against the block that reads zeros."""
    n, d = 1_500, 33
    rows = np.array([3, 700, 701, 1_499])
    values = np.random.default_rng(1).standard_normal((4, d)).astype(np.float32)
    sweep, dense = state((n, d)), state((n, d))
    ops.FusedSparseAdam(use_nesterov=use_nesterov)(*sweep, *HP, values, rows)
    gradient = np.zeros((n, d), np.float32)
    gradient[rows] = values
    ops.Adam(use_nesterov=use_nesterov)(*dense, *HP, gradient)
    for a, b in zip(sweep, dense, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("offset", [0, 1, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 33, 1_003, 40_000])
def test_alignment_and_place_do_not_matter(offset, n):
    """Vector bodies, scalar tails and unaligned beginnings."""
    whole = state((n,))
    gradient = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    shifted = []
    for array in whole:
        room = np.empty(n + 8, np.float32)
        room[offset : offset + n] = array
        shifted.append(room[offset : offset + n])
    single = [a.copy() for a in whole]
    ops.Adam()(*whole, *HP, gradient)
    ops.Adam()(*shifted, *HP, gradient)
    for i in range(0, n, max(1, n // 50)):
        ops.Adam()(*(a[i : i + 1] for a in single), *HP, gradient[i : i + 1])
        for a, b in zip(whole, single, strict=True):
            assert a[i : i + 1].tobytes() == b[i : i + 1].tobytes()
    for a, b in zip(whole, shifted, strict=True):
        assert a.tobytes() == b.tobytes()


def test_serial_and_parallel_agree():
    arrays, again = state((300_000,)), state((300_000,))
    gradient = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    ops.Adam()(*arrays, *HP, gradient)
    set_num_threads(1)
    try:
        ops.Adam()(*again, *HP, gradient)
    finally:
        set_num_threads(None)
    for a, b in zip(arrays, again, strict=True):
        assert a.tobytes() == b.tobytes()


def test_one_call_equals_separate_calls():
    shapes = [(5,), (140_000,), (3, 4), (1,), (0,), (2, 3, 4, 5), ()]
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    gradients = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    together = [nn.Parameter(v.copy()) for v in values]
    nn.Adam(together, 0.1, weight_decay=0.1)(gradients)
    for value, gradient, parameter in zip(values, gradients, together, strict=True):
        alone = nn.Parameter(value.copy())
        nn.Adam([alone], 0.1, weight_decay=0.1)((gradient,))
        assert alone.data.tobytes() == parameter.data.tobytes()


def test_rows_are_summed_in_order_of_occurrence():
    """Up to 512 occurrences: bit for bit the left fold in the order of the list."""
    n, d, b = 40, 24, 6_000
    rng = np.random.default_rng(0)
    indices = rng.integers(0, n, b)
    assert np.bincount(indices).max() <= 512
    values = (rng.standard_normal((b, d)) * 10.0 ** rng.integers(-4, 5, (b, 1))).astype(np.float32)
    folded = np.zeros((n, d), np.float32)
    for i, value in zip(indices, values, strict=True):
        folded[i] += value
    rows, once = state((n, d)), state((n, d))
    ops.FusedSparseLazyAdam()(*rows, *HP, values, indices)
    ops.FusedSparseLazyAdam()(*once, *HP, folded, np.arange(n))
    for a, c in zip(rows, once, strict=True):
        assert a.tobytes() == c.tobytes()


@pytest.mark.parametrize("b", [5_000, 300_000])
def test_hot_rows_are_summed_range_by_range(b):
    """Ranges of 4,096 positions, or a 64th of the list; one has none of the row."""
    d, length = 8, max(4_096, -(-b // 64))
    rng = np.random.default_rng(0)
    values = rng.standard_normal((b, d)).astype(np.float32)
    indices = np.where(rng.random(b) < 0.5, 1, 2)
    indices[length : 2 * length] = 2
    totals = []
    for row in (1, 2):
        total = None
        for begin in range(0, b, length):
            block = np.zeros(d, np.float32)
            mine = values[begin : begin + length][indices[begin : begin + length] == row]
            for k, value in enumerate(mine):
                block = value.copy() if k == 0 else block + value
            total = block if total is None else total + block
        totals.append(total)
    rows, once = state((4, d)), state((4, d))
    ops.FusedSparseLazyAdam()(*rows, *HP, values, indices)
    ops.FusedSparseLazyAdam()(*once, *HP, np.stack(totals), np.array([1, 2]))
    for a, c in zip(rows, once, strict=True):
        assert a.tobytes() == c.tobytes()
