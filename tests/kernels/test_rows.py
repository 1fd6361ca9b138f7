"""Row-sparse updates: properties of any indices, against the reference and against each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusestep import nn, ops

import reference
from helpers import BF16, EPSILON, assert_same_bits, assert_within_ulps, unchanged

HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
POWERS = {"beta1_power": 0.9, "beta2_power": 0.99}
SCALARS = (0.9, 0.99, 0.01, 0.9, 0.99, 1e-3)  # in the operators' order
HP = reference.adam_scalars(**HYPER, **POWERS)

# Rows with more occurrences are summed in ranges of this many positions (of a short list).
HOT, RANGE = 512, 4_096

# The same cases in every run; nothing is kept between runs.
quick = settings(
    max_examples=80, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A table with its moments and a row-sparse gradient of it."""

    w: np.ndarray
    m: np.ndarray
    v: np.ndarray
    indices: np.ndarray
    values: np.ndarray

    @classmethod
    def make(
        cls, n: int, tail: tuple[int, ...], indices: np.ndarray, *, exact: bool, seed: int
    ) -> Problem:
        """With `exact`, every sum of gradient rows is exact in float32, in any order."""
        rng = np.random.default_rng(seed)
        w, m = rng.standard_normal((2, n, *tail)).astype(np.float32)
        v = rng.uniform(0.5, 2.0, (n, *tail)).astype(np.float32)
        shape = (len(indices), *tail)
        values = rng.integers(-64, 65, shape) / 32 if exact else rng.standard_normal(shape)
        return cls(w, m, v, indices, values.astype(np.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    @property
    def rows(self) -> ops.RowTensor:
        return ops.RowTensor(self.indices, self.values, self.shape)

    def variables(self) -> tuple[np.ndarray, ...]:
        return self.w.copy(), self.m.copy(), self.v.copy()

    def run(self, op: Any) -> tuple[np.ndarray, ...]:
        """The variables after a fused sparse operator, which leaves the gradient alone."""
        variables = self.variables()
        with unchanged(self.indices, self.values):
            op(*variables, *SCALARS, self.values, self.indices)
        return variables

    def run_dense(self, op: Any, gradient: np.ndarray) -> tuple[np.ndarray, ...]:
        variables = self.variables()
        op(*variables, *SCALARS, gradient)
        return variables


@st.composite
def problems(draw: st.DrawFn, *, exact: bool) -> Problem:
    """Any number of rows, widths and indices: few rows repeat often, many rows hardly."""
    n = draw(st.integers(1, 60))
    tail = draw(st.sampled_from([(), (1,), (3,), (8,), (17,), (64,), (2, 5), (2, 3, 2), (0,)]))
    some = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
    indices = draw(st.lists(st.sampled_from(some), max_size=120))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    seed = draw(st.integers(0, 2**32 - 1))
    return Problem.make(n, tail, np.array(indices, dtype), exact=exact, seed=seed)


def fixed(n: int, tail: tuple[int, ...], indices: list[int], *, exact: bool = True) -> Problem:
    return Problem.make(n, tail, np.array(indices, np.int64), exact=exact, seed=0)


OPERATORS = pytest.mark.parametrize("lazy", [False, True], ids=["dense_equivalent", "lazy"])
NESTEROV = pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])


def operator(lazy: bool, nesterov: bool = False) -> Any:
    cls = ops.FusedSparseLazyAdam if lazy else ops.FusedSparseAdam
    return cls(use_nesterov=nesterov)


def assert_near_reference(
    problem: Problem, found: tuple[np.ndarray, ...], lazy: bool, nesterov: bool
) -> None:
    """Within 4 ulps of the largest term, and one more for every term of the longest sum."""
    __tracebackhide__ = True
    apply = reference.lazy_step if lazy else reference.dense_equivalent_step
    step = partial(reference.adam, hp=HP, nesterov=nesterov)
    expected = apply(step, problem.w, problem.indices, problem.values, problem.m, problem.v)
    # The same with every term positive, which is what rounding errors are relative to.
    size = np.abs(problem.values)
    terms = apply(
        partial(reference.adam, hp=HP, nesterov=nesterov),
        np.zeros(problem.shape), problem.indices, size, np.abs(problem.m), problem.v,
    )  # fmt: skip
    longest = np.bincount(problem.indices, minlength=1).max()
    # An error of the sum reaches w through m, and through v where v is smallest.
    step_size = 2 * np.abs(terms[0]) * np.sqrt(terms[2] / np.maximum(expected[2], 1e-30))
    scales = (np.abs(problem.w) + step_size, terms[1], terms[2])
    for name, actual, exact, scale in zip(("w", "m", "v"), found, expected, scales, strict=True):
        assert_within_ulps(actual, exact, scale, 4.0 + 2.0 * longest, name)


@OPERATORS
@NESTEROV
@given(problem=problems(exact=False))
@example(problem=fixed(1, (1,), []))
@example(problem=fixed(5, (3,), [], exact=False))
@example(problem=fixed(5, (3,), [4, 4, 4, 0], exact=False))
@quick
def test_operators_meet_the_reference(lazy: bool, nesterov: bool, problem: Problem) -> None:
    found = problem.run(operator(lazy, nesterov))
    assert_near_reference(problem, found, lazy, nesterov)


@OPERATORS
@given(problem=problems(exact=True), data=st.data())
@quick
def test_order_of_the_list_does_not_matter(
    lazy: bool, problem: Problem, data: st.DataObject
) -> None:
    """To the last bit, where the sums are exact."""
    order = np.array(data.draw(st.permutations(range(len(problem.indices)))), np.intp)
    shuffled = Problem(
        problem.w, problem.m, problem.v, problem.indices[order], problem.values[order]
    )
    for a, b in zip(problem.run(operator(lazy)), shuffled.run(operator(lazy)), strict=True):
        assert_same_bits(a, b)


@NESTEROV
@given(problem=problems(exact=True))
@example(problem=fixed(7, (3,), []))
@quick
def test_dense_equivalent_is_the_dense_step(nesterov: bool, problem: Problem) -> None:
    found = problem.run(operator(lazy=False, nesterov=nesterov))
    dense = problem.run_dense(ops.Adam(use_nesterov=nesterov), problem.rows.to_dense())
    for name, a, b in zip(("w", "m", "v"), found, dense, strict=True):
        assert_same_bits(a, b, name)


@NESTEROV
@given(problem=problems(exact=True))
@quick
def test_lazy_is_the_dense_step_on_the_rows_that_occur(nesterov: bool, problem: Problem) -> None:
    """Those rows to the last bit; the others are not touched."""
    found = problem.run(operator(lazy=True, nesterov=nesterov))
    dense = problem.run_dense(ops.Adam(use_nesterov=nesterov), problem.rows.to_dense())
    present = np.isin(np.arange(problem.shape[0]), problem.indices)
    old = (problem.w, problem.m, problem.v)
    for name, a, b, before in zip(("w", "m", "v"), found, dense, old, strict=True):
        assert_same_bits(a[present], b[present], name)
        assert_same_bits(a[~present], before[~present], name)


@given(problem=problems(exact=True))
@quick
def test_row_tensor_to_dense(problem: Problem) -> None:
    expected = reference.densify(problem.indices, problem.values, problem.shape)
    assert_same_bits(problem.rows.to_dense(), expected.astype(np.float32))
    once = problem.rows.coalesce()
    assert once.indices.tolist() == sorted(set(problem.indices.tolist()))
    assert_same_bits(once.to_dense(), problem.rows.to_dense())


@given(problem=problems(exact=True), cut=st.floats(0, 1))
@quick
def test_a_list_of_row_tensors_is_their_concatenation(problem: Problem, cut: float) -> None:
    k = round(cut * len(problem.indices))
    parts = [
        ops.RowTensor(problem.indices[where], problem.values[where], problem.shape)
        for where in (slice(0, k), slice(k, None))
    ]
    whole, split = problem.w.copy(), problem.w.copy()
    nn.Adam([whole])([problem.rows])
    nn.Adam([split])([parts])
    assert_same_bits(whole, split)


# nn with row-sparse gradients


@OPERATORS
@NESTEROV
@given(problem=problems(exact=True))
@quick
def test_optimizers_take_the_operators_steps(lazy: bool, nesterov: bool, problem: Problem) -> None:
    w = problem.w.copy()
    cls = nn.LazyAdam if lazy else nn.Adam
    opt = cls([w], 0.01, 0.9, 0.99, 1e-3, use_nesterov=nesterov)
    expected = problem.w.copy(), np.zeros_like(w), np.zeros_like(w)
    op = operator(lazy, nesterov)
    powers = [reference.beta_powers(beta, 3) for beta in (0.9, 0.99)]
    for powers_now in zip(*powers, strict=True):
        assert opt((problem.rows,)) == (True,)
        op(*expected, *powers_now, *SCALARS[2:], problem.values, problem.indices)
    for name, a, b in zip("wmv", (w, *opt.moment1, *opt.moment2), expected, strict=True):
        assert_same_bits(a, b, name)


def tables(seed: int) -> tuple[list[np.ndarray], list[ops.RowTensor]]:
    """Tables of different widths, one of them without indices and one with a hot row."""
    rng = np.random.default_rng(seed)
    arrays, gradients = [], []
    for n, tail, length in (
        (300, (1,), 900), (70, (16,), 40), (5, (3,), 0), (41, (), 2000), (20, (2, 9), 1300),
        (1, (128,), 7), (9, (0,), 4),
    ):  # fmt: skip
        arrays.append(rng.standard_normal((n, *tail)).astype(np.float32))
        indices = np.minimum(rng.zipf(1.3, length) - 1, n - 1)
        values = rng.standard_normal((length, *tail)).astype(np.float32)
        gradients.append(ops.RowTensor(indices, values, (n, *tail)))
    return arrays, gradients


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "loss_scale": 3.0}], ids=["plain", "scaled"]
)
def test_several_tables_are_each_by_itself(how: str, options: dict[str, Any]) -> None:
    together, _ = tables(1)
    apart, _ = tables(1)
    one = nn.Adam(together, sparse_update=how, **options)
    many = [nn.Adam([a], sparse_update=how, **options) for a in apart]
    for seed in (2, 3):
        _, gradients = tables(seed)
        one(gradients)
        for opt, gradient in zip(many, gradients, strict=True):
            opt([gradient])
    for k, opt in enumerate(many):
        assert_same_bits(together[k], apart[k], f"table {k}")
        assert_same_bits(one.moment1[k], opt.moment1[0], f"moment1 of table {k}")
        assert_same_bits(one.moment2[k], opt.moment2[0], f"moment2 of table {k}")


def ordered_sums(problem: Problem) -> np.ndarray:
    """The dense gradient, added in float32 in the documented order, row by row."""
    dense = np.zeros(problem.shape, np.float32)
    for row in np.unique(problem.indices):
        positions = np.flatnonzero(problem.indices == row)
        ranges = positions // RANGE if len(positions) > HOT else np.zeros_like(positions)
        sums = [
            np.add.accumulate(problem.values[positions[ranges == k]], axis=0)[-1]
            for k in np.unique(ranges)
        ]
        dense[row] = np.add.accumulate(np.array(sums), axis=0)[-1]
    return dense


@OPERATORS
@pytest.mark.parametrize("tail", [(), (3,), (32,), (200,)])
@pytest.mark.parametrize("counts", [(511, 512, 513, 1), (1024, 1025, 3, 1), (9000, 2, 600, 5)])
def test_hot_rows_are_summed_in_the_documented_order(
    lazy: bool, tail: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    """To the last bit, also for numbers whose sum depends on the order."""
    rng = np.random.default_rng(9)
    indices = rng.permutation(np.repeat([3, 7, 0, 4], counts))
    problem = Problem.make(9, tail, indices, exact=False, seed=10)
    sums = ordered_sums(problem)
    # The test would prove nothing if any order gave the same bits.
    assert (
        sums
        != problem.values.dtype.type(0)
        + reference.densify(indices[::-1], problem.values[::-1], problem.shape).astype(np.float32)
    ).any()
    found = problem.run(operator(lazy))
    dense = problem.run_dense(ops.Adam(), sums)
    present = np.isin(np.arange(9), indices) | (not lazy)
    for name, a, b in zip(("w", "m", "v"), found, dense, strict=True):
        assert_same_bits(a[present], b[present], name)


@OPERATORS
@pytest.mark.parametrize("size", [8191, 8192, 30_000])
def test_large_batches_meet_the_reference(lazy: bool, size: int) -> None:
    """Either side of the size from which several threads sort."""
    indices = np.random.default_rng(11).integers(0, 20_000, size)
    problem = Problem.make(20_000, (4,), indices, exact=False, seed=12)
    assert_near_reference(problem, problem.run(operator(lazy)), lazy, nesterov=False)


@OPERATORS
@pytest.mark.parametrize("gap", range(1, 12))
@pytest.mark.parametrize("width", [1, 7, 64])
def test_gaps_between_rows(lazy: bool, gap: int, width: int) -> None:
    # pytorch#62135: a wrong result for one small gap only.
    indices = np.arange(0, 600, gap)
    problem = Problem.make(600, (width,), indices, exact=True, seed=13)
    found = problem.run(operator(lazy))
    dense = problem.run_dense(ops.Adam(), problem.rows.to_dense())
    present = np.isin(np.arange(600), indices) | (not lazy)
    for a, b in zip(found, dense, strict=True):
        assert_same_bits(a[present], b[present])


# Which rows change


@pytest.mark.parametrize("occurrences", [1, 2])
def test_row_whose_values_sum_to_zero_is_updated(occurrences: int) -> None:
    """DeepSpeed#8504: its moments decay and move it, as with an explicit zero gradient."""
    ones = np.ones((1, 2), np.float32)
    values = np.concatenate([ones, -ones]) if occurrences == 2 else 0 * ones
    problem = fixed(4, (2,), [2] * occurrences)
    found = Problem(problem.w, problem.m, problem.v, problem.indices, values).run(
        operator(lazy=True)
    )
    for array, before in zip(found, (problem.w, problem.m, problem.v), strict=True):
        assert (array[2] != before[2]).all()
        assert_same_bits(np.delete(array, 2, 0), np.delete(before, 2, 0))


@given(problem=problems(exact=True))
@quick
def test_absent_rows_move_in_dense_equivalent_mode(problem: Problem) -> None:
    absent = ~np.isin(np.arange(problem.shape[0]), problem.indices)
    w, m, v = problem.run(operator(lazy=False))
    assert (m[absent] != problem.m[absent]).all()
    assert (v[absent] < problem.v[absent]).all()
    moved = np.abs(problem.m[absent]) > 1e-3  # by more than the rounding of w
    assert (w[absent][moved] != problem.w[absent][moved]).all()


@pytest.mark.parametrize("cls", [nn.Adam, nn.LazyAdam, nn.AdamOffload])
@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@given(problem=problems(exact=True))
@quick
def test_coupled_decay_once_a_row(cls: type, how: str, problem: Problem) -> None:
    """Lazy: rows that occur, once each. Dense-equivalent: every row."""
    decay, scale = 0.25, 2.0  # exact, like the sums
    w = problem.w.copy()
    opt = cls([w], 0.01, 0.9, 0.99, 1e-3, weight_decay=decay, loss_scale=scale, sparse_update=how)
    opt((problem.rows,))
    dense = problem.w.copy()
    other = nn.Adam([dense], 0.01, 0.9, 0.99, 1e-3, weight_decay=decay, loss_scale=scale)
    other((problem.rows.to_dense(),))
    present = np.isin(np.arange(problem.shape[0]), problem.indices) | (how == "dense_equivalent")
    assert_same_bits(w[present], dense[present])
    assert_same_bits(opt.moment1[0][present], other.moment1[0][present])
    assert_same_bits(w[~present], problem.w[~present])


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@given(problem=problems(exact=True))
@quick
def test_decoupled_decay_once_a_row(how: str, problem: Problem) -> None:
    w, dense = problem.w.copy(), problem.w.copy()
    nn.AdamWeightDecay([w], 0.01, weight_decay=0.3, sparse_update=how)((problem.rows,))
    nn.AdamWeightDecay([dense], 0.01, weight_decay=0.3)((problem.rows.to_dense(),))
    present = np.isin(np.arange(problem.shape[0]), problem.indices) | (how == "dense_equivalent")
    assert_same_bits(w[present], dense[present])
    assert_same_bits(w[~present], problem.w[~present])


# Storage types


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize(
    "gradient", [np.float16, BF16, np.float32, np.float64], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize(
    "parameter", [np.float16, BF16, np.float64], ids=lambda d: np.dtype(d).name
)
def test_storage_types(parameter: Any, gradient: Any, how: str) -> None:
    """The bits of a dense step: sums in the arithmetic type, one rounding at the store."""
    indices = np.random.default_rng(14).integers(0, 30, 200)
    problem = Problem.make(40, (5,), indices, exact=True, seed=15)
    w, dense = problem.w.astype(parameter), problem.w.astype(parameter)
    opt, other = nn.Adam([w], 0.05, sparse_update=how), nn.Adam([dense], 0.05)
    values = problem.values.astype(gradient)  # exact: multiples of 1/32 up to 2
    present = np.unique(indices)
    for _ in range(2):
        opt((ops.RowTensor(indices, values, problem.shape),))
        other((problem.rows.to_dense(),))
    if how == "dense_equivalent":
        present = np.arange(40)
    assert_same_bits(w[present], dense[present])
    assert_same_bits(opt.moment1[0][present], other.moment1[0][present])
    assert_same_bits(opt.moment2[0][present], other.moment2[0][present])
    assert (w != problem.w.astype(parameter)).any()


def test_16_bit_rows_are_summed_in_float32() -> None:
    """pytorch#36786: 40000 + 40000 - 40000 is finite though float16 ends at 65504."""
    w = np.zeros((2, 1), np.float16)
    values = np.array([[40000], [40000], [-40000]], np.float16)
    opt = nn.LazyAdam([w], 0.5, state_dtype=np.float32)
    opt([ops.RowTensor(np.array([1, 1, 1]), values, (2, 1))])
    assert w.tolist() == [[0.0], [-0.5]]
    assert opt.moment1[0][1, 0] == pytest.approx(4000, rel=1e-6)


def test_16_bit_rows_add_up() -> None:
    """2048 + 1 is 2048 in float16: 600 small rows after a large one must still count."""
    values = np.array([[2048]] + [[1]] * 600, np.float16)
    w = np.zeros((1, 1), np.float32)
    opt = nn.LazyAdam([w], 0.5)
    opt([ops.RowTensor(np.zeros(601, np.int32), values, (1, 1))])
    assert opt.moment1[0][0, 0] == pytest.approx(264.8, rel=4 * EPSILON[np.dtype(np.float32)])
