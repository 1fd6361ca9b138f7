"""Row-sparse updates: properties of any indices, against the reference and against each other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import reference
import reference_elementwise as elementwise
from fusestep import nn, ops
from fusestep.kernels.cpu.rows import step
from fusestep.kernels.cpu.rows.arguments import lay_out
from helpers import BF16, assert_same_arrays, assert_same_bits, unchanged
from operators import DENSE_OPERATORS, ROW_OPERATORS, Operator
from roundings import Rounded, assert_rounded

# With these scalars every term of a rule counts, and thresholds lie among the numbers.
SCALARS: dict[str, dict[str, float]] = {
    "Adam": {"beta1_power": 0.9, "beta2_power": 0.99, "lr": 0.01, "beta1": 0.9, "beta2": 0.99,
             "epsilon": 1e-3},
    "Ftrl": {"lr": 0.6, "l1": 0.7, "l2": 0.2, "lr_power": -0.5},
    "ProximalAdagrad": {"lr": 0.3, "l1": 0.6, "l2": 0.2},
}  # fmt: skip
STEPS = {"Ftrl": elementwise.ftrl, "ProximalAdagrad": elementwise.proximal_adagrad}

# Rows with more occurrences are summed in ranges of this many positions (of a short list).
HOT, RANGE = 512, 4_096

# The same cases in every run; nothing is kept between runs.
quick = settings(
    max_examples=80, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


class Family:
    """An operator on rows with some options, and what it is compared with.

    Attributes:
        operator: by the table of operators.
        step: the float64 reference.
        kinds: what each state holds: "signed" numbers or a sum of "squares".
        lazy: rows that do not occur stay; else they take the step of a zero gradient.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.operator, self._options = ROW_OPERATORS[name], options
        kind = next(kind for kind in SCALARS if name.endswith(kind))
        self._scalars = {**SCALARS[kind], **options}
        self._dense = DENSE_OPERATORS["Adam" if kind == "Adam" else f"Apply{kind}"]
        scalars = {n: self._scalars[n] for n in SCALARS[kind]}
        if kind == "Adam":
            hp = reference.adam_scalars(**scalars)
            self.step: Any = partial(reference.adam, hp=hp, nesterov=bool(options))
        else:
            rounded = {n: float(np.float32(x)) for n, x in scalars.items()}
            self.step = partial(STEPS[kind], **rounded)
        states = self.operator.variables[1:]
        self.kinds = tuple("signed" if n in ("m", "linear") else "squares" for n in states)
        self.lazy = not self.operator.every_row

    def __str__(self) -> str:
        return f"{self.operator} {self._options}"

    def rows(self, *arrays: np.ndarray) -> None:
        """A step on rows: of variables, values and indices."""
        self._call(self.operator, arrays, [self.operator.gradient, "indices"])

    def dense(self, *arrays: np.ndarray) -> None:
        """A step of the dense operator: of variables and a gradient."""
        self._call(self._dense, arrays, [self._dense.gradient])

    def _call(self, operator: Operator, arrays: Any, given: list[str]) -> None:
        known = dict(zip((*operator.variables, *given), arrays, strict=True)) | self._scalars
        made = {name: known[name] for name in operator.constructor if name in known}
        operator.call({name: known[name] for name in operator.arguments}, **made)


POWERS = (-0.5, -0.3, 0.0)
FAMILIES = [
    *(Family(f"FusedSparse{name}", **options) for name in ("LazyAdam", "Adam")
      for options in ({}, {"use_nesterov": True})),
    *(Family("FusedSparseFtrl", lr_power=power) for power in POWERS),
    Family("FusedSparseProximalAdagrad"),
]  # fmt: skip
EACH = pytest.mark.parametrize("family", FAMILIES, ids=str)


@dataclass(frozen=True)
class Problem:
    """A table with its states and a row-sparse gradient of it."""

    w: np.ndarray
    signed: np.ndarray
    squares: np.ndarray
    indices: np.ndarray
    values: np.ndarray

    @classmethod
    def make(
        cls, n: int, tail: tuple[int, ...], indices: np.ndarray, *, exact: bool = True,
        seed: int = 0, dtype: Any = np.float32,
    ) -> Problem:  # fmt: skip
        """With `exact`, every sum of gradient rows is exact in float32, in any order."""
        rng = np.random.default_rng(seed)
        w, signed = rng.standard_normal((2, n, *tail)).astype(dtype)
        squares = rng.uniform(0.1, 2.0, (n, *tail)).astype(dtype)
        shape = (len(indices), *tail)
        values = rng.integers(-64, 65, shape) / 32 if exact else rng.standard_normal(shape)
        return cls(w, signed, squares, indices, values.astype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    @property
    def rows(self) -> ops.RowTensor:
        return ops.RowTensor(self.indices, self.values, self.shape)

    def variables(self, family: Family) -> list[np.ndarray]:
        return [self.w.copy(), *(getattr(self, kind).copy() for kind in family.kinds)]

    def stepped(self, family: Family) -> np.ndarray:
        """Which rows take a step."""
        return np.isin(np.arange(len(self.w)), self.indices) | (not family.lazy)

    def run(self, family: Family) -> list[np.ndarray]:
        """The variables after the step on rows, which leaves the gradient alone."""
        variables = self.variables(family)
        with unchanged(self.indices, self.values):
            family.rows(*variables, self.values, self.indices)
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
    return Problem.make(n, tail, np.array(indices, np.int64), exact=exact)


def assert_near_reference(family: Family, problem: Problem, found: list[np.ndarray]) -> None:
    """Within the bound of the rounding errors of sums and step. Rows that take no step keep their
    bits."""
    __tracebackhide__ = True
    before, rows = problem.variables(family), problem.stepped(family)
    g, size = (
        reference.densify(problem.indices, values, problem.shape)
        for values in (problem.values, np.abs(problem.values))
    )
    n_rounded = np.maximum(np.bincount(problem.indices, minlength=len(g)) - 1, 0)
    summed = Rounded(g, n_rounded.reshape(-1, *[1] * (g.ndim - 1)) * size)
    w, *states = map(Rounded, before)
    for k, (array, exact) in enumerate(zip(found, family.step(w, summed, *states), strict=True)):
        assert_same_bits(array[~rows], before[k][~rows], f"other rows of array {k}")
        if array[rows].size:
            of_rows = Rounded(exact.value[rows], exact.error[rows])
            assert_rounded(array[rows], of_rows, np.float32, 2.0, f"array {k} ")


def assert_dense_step(
    family: Family, problem: Problem, found: list[np.ndarray], gradient: np.ndarray
) -> None:
    """The rows that take a step have the bits of the dense one, the others those of before."""
    __tracebackhide__ = True
    before, dense = problem.variables(family), problem.variables(family)
    family.dense(*dense, gradient)
    rows = problem.stepped(family)
    for k, (a, b, old) in enumerate(zip(found, dense, before, strict=True)):
        assert_same_bits(a[rows], b[rows], f"array {k}")
        assert_same_bits(a[~rows], old[~rows], f"other rows of array {k}")


@EACH
@given(problem=problems(exact=False))
@example(problem=fixed(1, (1,), []))
@example(problem=fixed(5, (3,), [], exact=False))
@example(problem=fixed(5, (3,), [4, 4, 4, 0], exact=False))
@quick
def test_rows_meet_the_reference(family: Family, problem: Problem) -> None:
    assert_near_reference(family, problem, problem.run(family))


@EACH
@given(problem=problems(exact=True), data=st.data())
@quick
def test_order_of_the_list_does_not_matter(
    family: Family, problem: Problem, data: st.DataObject
) -> None:
    """To the last bit, where the sums are exact; nor does the type of the indices."""
    order = np.array(data.draw(st.permutations(range(len(problem.indices)))), np.intp)
    indices = problem.indices[order].astype(np.int32)
    shuffled = replace(problem, indices=indices, values=problem.values[order])
    assert_same_arrays(problem.run(family), shuffled.run(family))


@EACH
@given(problem=problems(exact=True))
@example(problem=fixed(7, (3,), []))
@quick
def test_rows_take_the_dense_step(family: Family, problem: Problem) -> None:
    """Those that occur or, where every row takes a step, all."""
    assert_dense_step(family, problem, problem.run(family), problem.rows.to_dense())


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


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_several_tables_are_each_by_itself(how: str) -> None:
    """Of several widths, one without indices and one with a hot row; each has a rate of its own."""
    sizes = ((300, (1,), 900), (70, (16,), 40), (5, (3,), 0), (41, (), 2_000), (1, (128,), 7))

    def drawn(seed: int) -> tuple[list[np.ndarray], list[Any], list[ops.RowTensor]]:
        rng, tables, rows = np.random.default_rng(seed), [], []
        for n, tail, length in sizes:
            tables.append(rng.standard_normal((n, *tail)).astype(np.float32))
            values = rng.standard_normal((length, *tail)).astype(np.float32)
            indices = np.minimum(rng.zipf(1.3, length) - 1, n - 1)
            rows.append(ops.RowTensor(indices, values, (n, *tail)))
        return tables, [{"params": [a], "lr": 0.1 * k} for k, a in enumerate(tables, 1)], rows

    together, groups, _ = drawn(1)
    apart, alone, _ = drawn(1)
    one = nn.Adam(groups, sparse_update=how)
    many = [nn.Adam([group], sparse_update=how) for group in alone]
    for seed in (2, 3):
        *_, gradients = drawn(seed)
        one(gradients)
        for opt, gradient in zip(many, gradients, strict=True):
            opt([gradient])
    assert_same_arrays(together, apart)
    for k, opt in enumerate(many):
        assert_same_arrays((one.moment1[k], one.moment2[k]), (opt.moment1[0], opt.moment2[0]))


def ordered_sums(problem: Problem, length: int = RANGE) -> np.ndarray:
    """The dense gradient, added in float32 in the documented order, row by row."""
    dense = np.zeros(problem.shape, np.float32)
    for row in np.unique(problem.indices):
        positions = np.flatnonzero(problem.indices == row)
        ranges = positions // length if len(positions) > HOT else np.zeros_like(positions)
        sums = [
            np.add.accumulate(problem.values[positions[ranges == k]], axis=0)[-1]
            for k in np.unique(ranges)
        ]
        dense[row] = np.add.accumulate(np.array(sums), axis=0)[-1]
    return dense


@EACH
@pytest.mark.parametrize("tail", [(), (3,), (32,), (200,)])
@pytest.mark.parametrize("counts", [(511, 512, 513, 1), (1024, 1025, 3, 1), (9000, 2, 600, 5)])
def test_hot_rows_are_summed_in_the_documented_order(
    family: Family, tail: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    """To the last bit, also for numbers whose sum depends on the order."""
    indices = np.random.default_rng(9).permutation(np.repeat([3, 7, 0, 4], counts))
    problem = Problem.make(9, tail, indices, exact=False, seed=10)
    sums = ordered_sums(problem)
    # The test would prove nothing if any order gave the same bits.
    turned = reference.densify(indices[::-1], problem.values[::-1], problem.shape)
    assert (sums != turned.astype(np.float32)).any()
    found = problem.run(family)
    assert_dense_step(family, problem, found, sums)
    assert_near_reference(family, problem, found)


@pytest.mark.parametrize("n", [5_000, 300_000])
def test_ranges_are_a_part_of_a_long_list(n: int) -> None:
    """A 64th of it; one has none of the row."""
    length = max(RANGE, -(-n // 64))
    indices = np.where(np.random.default_rng(0).random(n) < 0.5, 1, 2)
    indices[length : 2 * length] = 2
    problem, family = Problem.make(4, (8,), indices, exact=False), FAMILIES[0]
    assert_dense_step(family, problem, problem.run(family), ordered_sums(problem, length))


@EACH
@pytest.mark.parametrize("size", [8191, 8192, 30_000])
def test_large_batches_meet_the_reference(family: Family, size: int) -> None:
    """Either side of the size from which several threads sort."""
    indices = np.random.default_rng(11).integers(0, 20_000, size)
    problem = Problem.make(20_000, (4,), indices, exact=False, seed=12)
    assert_near_reference(family, problem, problem.run(family))


# Which rows change


@pytest.mark.parametrize("occurrences", [1, 2])
def test_row_whose_values_sum_to_zero_is_updated(occurrences: int) -> None:
    """DeepSpeed#8504: its moments decay and move it, as with an explicit zero gradient."""
    ones = np.ones((1, 2), np.float32)
    values = np.concatenate([ones, -ones]) if occurrences == 2 else 0 * ones
    problem, family = replace(fixed(4, (2,), [2] * occurrences), values=values), FAMILIES[0]
    for array, before in zip(problem.run(family), problem.variables(family), strict=True):
        assert (array[2] != before[2]).all()
        assert_same_bits(np.delete(array, 2, 0), np.delete(before, 2, 0))


# Storage types


OF_ALL_TYPES = [
    *(Family("SparseApplyFtrl", lr_power=power) for power in POWERS),
    Family("SparseApplyProximalAdagrad"),
]


def test_every_row_operator_is_tested() -> None:
    found = {family.operator.name for family in (*FAMILIES, *OF_ALL_TYPES)}
    assert found == ROW_OPERATORS.keys()


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64, np.float32], ids=str)
@pytest.mark.parametrize("family", OF_ALL_TYPES, ids=str)
def test_storage_types_of_operators(family: Family, dtype: Any) -> None:
    """Sums in the type of the arithmetic, one rounding at the store: the bits of a dense step."""
    indices = np.random.default_rng(3).integers(0, 20, 60)
    problem = Problem.make(20, (5,), indices, dtype=dtype)
    merged = reference.densify(indices, problem.values, (20, 5))
    assert np.array_equal(merged, merged.astype(dtype).astype(float))
    assert_dense_step(family, problem, problem.run(family), merged.astype(dtype))


def test_16_bit_rows_are_summed_in_float32() -> None:
    """pytorch#36786: 40000 + 40000 - 40000 is finite though float16 ends at 65504."""
    w = np.zeros((2, 1), np.float16)
    values = np.array([[40000], [40000], [-40000]], np.float16)
    opt = nn.LazyAdam([w], 0.5, state_dtype=np.float32)
    opt([ops.RowTensor(np.array([1, 1, 1]), values, (2, 1))])
    assert w.tolist() == [[0.0], [-0.5]]
    assert opt.moment1[0][1, 0] == pytest.approx(4000, rel=1e-6)


def test_functions_of_sums_live_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask for them at once may get a list each, of which one alone is kept."""
    made, alive, make = list[Any](), list[bool](), step._accumulators
    step._plan_of.cache_clear()

    def unkept(*form: Any) -> Any:
        found = make(*form)[:]
        made.append(weakref.ref(found))
        return found

    def read(at: int) -> None:
        alive.append(made[-1]() is not None)
        lay_out.call(at)

    monkeypatch.setattr(step, "_accumulators", unkept)
    monkeypatch.setattr(step, "lay_out", SimpleNamespace(call=read))
    w = np.ones((4, 2), np.float32)
    nn.SGD([w])([nn.RowTensor(np.array([1]), w[:1].copy(), w.shape)])
    assert alive == [True]
