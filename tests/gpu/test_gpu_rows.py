"""Row-sparse steps on a CUDA device in bulk: sums, sorts, and errors that are told later.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.kernels.tables import HOT, range_length

import gpu_arrays
from gpu_arrays import Maker, adopted, copies
from gpu_checks import (
    ADAM_HP,
    CPU_ULPS,
    ELEMENTS,
    F32,
    TENSORS,
    moments,
    parameters,
    problem,
    row_tensor,
)
from helpers import assert_same_bits, assert_within_ulps
from optimizers import make as new_optimizer

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


SORTED = (0, 1, 2, 255, 2_047, 2_048, 2_049, 100_003, 1_000_000)


def row_step(
    make: Maker, operator: Any, arrays: Sequence[np.ndarray], values: np.ndarray, indices: Any
) -> list[np.ndarray]:
    """What Adam's arrays hold after a step on copies of them."""
    on = copies(make, arrays)
    operator(*on, *ADAM_HP, make.put(values), make.put(np.asarray(indices)))
    fusestep.synchronize()
    return [make.get(a) for a in on]


# A row of up to 512 occurrences; of more, in one range and in several of them.
OCCURRENCES = {
    **{f"cold-{d}": (400, 900, d) for d in (1, 8, 33, 300)},
    **{f"hot-{d}": (600, 900, d) for d in (1, 8, 33, 300)},
    **{f"ranges-{d}": (9_000, 20_000, d) for d in (1, 8, 33, 300)},
    "longer ranges-8": (150_000, 300_000, 8),
}
BOTH = pytest.mark.parametrize(
    "operator", [ops.FusedSparseLazyAdam(), ops.FusedSparseAdam()], ids=["lazy", "all"]
)


@pytest.mark.parametrize(("hottest", "b", "d"), OCCURRENCES.values(), ids=OCCURRENCES)
@BOTH
def test_rows_are_summed_as_on_the_cpu(
    maker: Maker, operator: Any, hottest: int, b: int, d: int
) -> None:
    """In the same order: with the folded gradient, once for each row, the bits are the same.

    Sums have no products that could become an FMA, so the order alone decides.
    """
    n, rng, length = 500, np.random.default_rng(3), range_length(b)
    indices = rng.integers(0, n, b)
    indices[rng.permutation(b)[:hottest]] = 7
    values = rng.standard_normal((b, d)).astype(np.float32)
    rows = np.unique(indices)
    folded = np.zeros((len(rows), d), np.float32)
    for k, row in enumerate(rows):
        places = np.flatnonzero(indices == row)
        parts = [places]
        if len(places) > HOT:
            parts = [places[places // length == r] for r in range(-(-b // length))]
        totals = []
        for part in parts:
            total = np.zeros(d, np.float32) if len(part) == 0 else values[part[0]]
            for place in part[1:]:
                total = total + values[place]
            totals.append(total)
        for total in totals[1:]:
            totals[0] = totals[0] + total
        folded[k] = totals[0]
    start = moments((n, d))
    found = row_step(maker, operator, start, values, indices)
    once = row_step(maker, operator, start, folded, rows)
    cpu = [a.copy() for a in start]
    operator(*cpu, *ADAM_HP, values, indices)
    for a, b_, c in zip(found, once, cpu, strict=True):
        assert_same_bits(a, b_)
        assert_within_ulps(a, c, 1 + np.abs(c), CPU_ULPS)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("hottest", [3, HOT + 9])
@BOTH
def test_alignment_of_tables_does_not_matter(
    maker: Maker, operator: Any, hottest: int, shift: int
) -> None:
    """Of parameter, moments and gradient: the same bits as from aligned ones."""
    n, d, b = 9, 12, hottest + 20
    rng = np.random.default_rng(9)
    indices = np.concatenate([np.full(hottest, 4), rng.integers(0, n, 20)])
    values, start = rng.standard_normal((b, d)).astype(np.float32), moments((n, d))
    expected = row_step(maker, operator, start, values, indices)
    *on, g = (maker.shifted(a.reshape(-1), shift).reshape(a.shape) for a in (*start, values))
    operator(*on, *ADAM_HP, g, maker.shifted(indices, 1))
    fusestep.synchronize()
    for a, b_ in zip(on, expected, strict=True):
        assert_same_bits(maker.get(a), b_)


@BOTH
def test_every_step_has_the_same_bits(maker: Maker, operator: Any) -> None:
    """In every run, and whoever sorts the keys."""
    rng = np.random.default_rng(4)
    b, n, d = (100_000, 3_000, 24) if ELEMENTS > 1_000 else (80, 9, 3)
    indices = np.where(rng.random(b) < 0.3, 5, rng.zipf(1.2, b) % n)
    values, start = rng.standard_normal((b, d)).astype(np.float32), moments((n, d))
    found = [row_step(maker, operator, start, values, indices) for _ in range(3)]
    found.append(row_step(gpu_arrays.maker("numba"), operator, start, values, indices))
    for other in found[1:]:
        for a, b_ in zip(other, found[0], strict=True):
            assert_same_bits(a, b_)


@pytest.mark.parametrize("form", ["Adam", "Lamb", "Lamb-clipped"])
def test_every_dense_step_has_the_same_bits(maker: Maker, form: str) -> None:
    """The sums of LAMB's norms among them."""
    start, steps = problem({"a": (ELEMENTS * 20,), "b": (7,), "c": (ELEMENTS,)}, F32, 2)
    runs = []
    for _ in range(3):
        opt = new_optimizer(form, parameters(maker, start))
        for gs in steps:
            opt(copies(maker, gs))
        runs.append([p.asnumpy() for p in opt.parameters])
    for other in runs[1:]:
        for a, b in zip(other, runs[0], strict=True):
            assert_same_bits(a, b)


def test_a_thousand_pending_steps(maker: Maker) -> None:
    """More than there are guards; sums of powers of two are exact."""
    p = nn.Parameter(maker.put(np.zeros((8, 4), np.float32)), "w")
    opt = nn.SGD([p], 0.5)
    values, indices = np.full((3, 4), 0.25, np.float32), np.array([1, 6, 1])
    rows = row_tensor(maker, nn.RowTensor(indices, values, (8, 4)))
    for _ in range(2_100):
        opt([rows])
    fusestep.synchronize()
    expected = np.zeros((8, 4), np.float32)
    expected[1], expected[6] = -0.25 * 2_100, -0.125 * 2_100
    assert_same_bits(p.asnumpy(), expected)
    assert opt.global_step[0] == 2_100


@pytest.mark.parametrize("n", SORTED)
def test_own_sort(numba_maker: Maker, n: int) -> None:
    """NumPy's stable sort, and nothing is written beyond the buffers."""
    from numba import cuda

    from fusestep.kernels.cuda.rows.sort import scratch_words, sort_keys

    rng = np.random.default_rng(n)
    for first_bit, n_bits in ((0, 62), (20, 24), (31, 1)):
        keys = rng.integers(0, 1 << 62, n)
        if n_bits == 24:  # as in a step: the positions are in order, rows are few
            rows = np.minimum(rng.zipf(1.2, n), (1 << 24) - 1)
            keys = rows.astype(np.int64) << 20 | np.arange(n) & (1 << 20) - 1
        buffers = [np.full(size + 1, -7) for size in (n, n, scratch_words(n))]
        buffers[0][:n] = keys
        on = copies(numba_maker, buffers)
        addresses = [adopted(a).address for a in on]
        place = sort_keys(*addresses, n, first_bit, n_bits, cuda.default_stream())
        found = [numba_maker.get(a) for a in on]
        order = np.argsort(keys >> first_bit & (1 << n_bits) - 1, kind="stable")
        np.testing.assert_array_equal(found[addresses.index(place)][:n], keys[order])
        assert all(buffer[-1] == -7 for buffer in found)


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@BOTH
def test_a_bad_index_is_told_later(maker: Maker, operator: Any, index_dtype: Any, bad: int) -> None:
    """As on the CPU, and nothing has been written; the next call is as good as ever."""
    start, values = moments((6, 5)), np.ones((4, 5), np.float32)
    on = copies(maker, start)
    indices = np.array([1, 0, bad, 5], index_dtype)
    operator(*on, *ADAM_HP, maker.put(values), maker.put(indices))
    with pytest.raises(IndexError) as found:
        fusestep.synchronize()
    with pytest.raises(IndexError) as expected:
        operator(*(a.copy() for a in start), *ADAM_HP, values, indices)
    assert str(found.value) == str(expected.value)
    for a, b in zip(on, start, strict=True):
        assert_same_bits(maker.get(a), b)
    fusestep.synchronize()  # it is told once
    good = row_step(maker, operator, start, values, [1, 0, 2, 5])
    operator(*on, *ADAM_HP, maker.put(values), maker.put(np.array([1, 0, 2, 5])))
    for a, b in zip(on, good, strict=True):
        assert_same_bits(maker.get(a), b)


def test_out_of_range_can_be_dropped(maker: Maker) -> None:
    start, values = moments((6, 5)), np.ones((4, 5), np.float32)
    operator = ops.FusedSparseLazyAdam(out_of_range="drop")
    found = row_step(maker, operator, start, values, [-1, 0, 2**40, 5])
    expected = row_step(maker, operator, start, values[:2], [0, 5])
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_steps_after_a_bad_one_are_taken_back(maker: Maker) -> None:
    """What depends on it has not happened either, and the counts say so."""
    start, (gs, *_) = problem(TENSORS, F32)
    opt, twin = (nn.LazyAdam(parameters(maker, start), 0.05, eps=0.01) for _ in range(2))

    def given(*indices: int) -> list[Any]:
        values = np.ones((len(indices), 9), np.float32)
        rows = nn.RowTensor(np.array(indices), values, (60, 9))
        return [row_tensor(maker, rows), *copies(maker, gs[1:])]

    other = nn.SGD(parameters(maker, {"w": gs[1]}), 0.5)
    opt(given(3, 3))
    twin(given(3, 3))
    opt(given(1, 60))
    opt(given(1, 2))
    opt(copies(maker, gs))
    other([row_tensor(maker, nn.RowTensor(np.array([5]), np.ones(1, np.float32), gs[1].shape))])
    with pytest.raises(IndexError, match=r"LazyAdam: gradient of 'table'.*got 60"):
        fusestep.synchronize()
    assert opt.global_step[0] == 1
    assert other.global_step[0] == 1  # another optimizer does not depend on it
    assert other.parameters[0].asnumpy()[5] == gs[1][5] - np.float32(0.5)
    for t in range(2):
        for p, q in zip(opt.parameters, twin.parameters, strict=True):
            assert_same_bits(p.asnumpy(), q.asnumpy(), f"{p.name} {t}")
        for name, array in opt.state_dict().items():
            assert_same_bits(array, twin.state_dict()[name], name)
        opt(given(4, 7))
        twin(given(4, 7))


def test_a_bad_index_of_one_of_several_batches(maker: Maker) -> None:
    """All of them are checked before any writes."""
    shapes = {"a": (5, 3), "b": (4, 2)}
    start, _ = problem(shapes, F32)
    opt = nn.LazyAdam(parameters(maker, start))
    a = nn.RowTensor(np.array([1]), np.ones((1, 3), np.float32), (5, 3))
    b = nn.RowTensor(np.array([1, 4], np.int32), np.ones((2, 2), np.float16), (4, 2))
    opt([row_tensor(maker, a), row_tensor(maker, b)])
    with pytest.raises(IndexError, match=r"gradient of 'b': indices\[1\].*got 4"):
        opt.state_dict()
    for p in opt.parameters:
        assert_same_bits(p.asnumpy(), start[str(p.name)])
