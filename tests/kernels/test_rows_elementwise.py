"""FTRL and proximal Adagrad on row-sparse gradients: duplicates merged, then one step a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusestep import ops

import reference
import reference_elementwise as elementwise
from helpers import BF16, assert_same_bits, assert_within_ulps, unchanged
from rule_cases import ftrl_terms, proximal_terms

FTRL = {"lr": 0.6, "l1": 0.7, "l2": 0.2, "lr_power": -0.5}
PROXIMAL = {"lr": 0.3, "l1": 0.6, "l2": 0.2}
HOT = 512  # a row with more occurrences is summed in ranges

quick = settings(
    max_examples=80, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One of the two rules: its operators on rows and dense, its reference, its states."""

    rows: Any
    dense: Any
    step: Any
    terms: Any
    scalars: dict[str, float]
    n_states: int

    def known(self) -> dict[str, float]:
        return {name: float(np.float32(x)) for name, x in self.scalars.items()}


def ftrl_rows(cls: Any = ops.FusedSparseFtrl, **options: Any) -> Any:
    """Scalars are attributes of the operator."""
    return lambda *variables, g, i: cls(**FTRL, **options)(*variables, g, i)


def proximal_rows(cls: Any = ops.FusedSparseProximalAdagrad, **options: Any) -> Any:
    """Scalars are arguments of the call."""
    return lambda *variables, g, i: cls(**options)(*variables, *PROXIMAL.values(), g, i)


FAMILIES = {
    "ftrl": Family(
        ftrl_rows(),
        lambda *variables, g: ops.ApplyFtrl()(*variables, g, *FTRL.values()),
        elementwise.ftrl,
        ftrl_terms,
        FTRL,
        2,
    ),
    "proximal": Family(
        proximal_rows(),
        lambda *variables, g: ops.ApplyProximalAdagrad()(*variables, *PROXIMAL.values(), g),
        elementwise.proximal_adagrad,
        proximal_terms,
        PROXIMAL,
        1,
    ),
}
EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@dataclass(frozen=True)
class Problem:
    """A table, two states, and a row-sparse gradient whose sums are exact in any order."""

    arrays: tuple[np.ndarray, ...]
    indices: np.ndarray
    values: np.ndarray

    @classmethod
    def make(cls, n: int, tail: tuple[int, ...], indices: Any, dtype: Any = np.float32) -> Problem:
        rng = np.random.default_rng(len(indices))
        w, linear = rng.standard_normal((2, n, *tail)).astype(dtype)
        accum = rng.uniform(0.1, 2.0, (n, *tail)).astype(dtype)
        values = rng.integers(-64, 65, (len(indices), *tail)) / 32
        return cls((w, accum, linear), np.asarray(indices, np.int64), values.astype(dtype))

    def variables(self, family: Family) -> list[np.ndarray]:
        return [a.copy() for a in self.arrays[: 1 + family.n_states]]

    def present(self) -> np.ndarray:
        return np.isin(np.arange(len(self.arrays[0])), self.indices)


def fixed(n: int, tail: tuple[int, ...], indices: list[int]) -> Problem:
    return Problem.make(n, tail, indices)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any number of rows, widths and indices: few rows repeat often, many rows hardly."""
    n = draw(st.integers(1, 40))
    tail = draw(st.sampled_from([(), (1,), (3,), (8,), (17,), (2, 5), (0,)]))
    some = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
    return Problem.make(n, tail, draw(st.lists(st.sampled_from(some), max_size=90)))


def assert_near_reference(family: Family, problem: Problem, found: Any, ulps: float = 4.0) -> None:
    """Every row, by the rule on the sum of its gradient rows; absent rows keep their bits."""
    __tracebackhide__ = True
    before, known = problem.variables(family), family.known()
    step = partial(family.step, **known)
    expected = reference.lazy_step(step, before[0], problem.indices, problem.values, *before[1:])
    g = reference.densify(problem.indices, np.abs(problem.values), before[0].shape)
    old = [reference.wide(a) for a in before]
    scales = family.terms(old[0], g, old[1:], known, expected)
    present = problem.present()
    for k, (array, exact, scale) in enumerate(zip(found, expected, scales, strict=True)):
        assert_within_ulps(array[present], exact[present], scale[present], ulps, f"array {k}")
        assert_same_bits(array[~present], before[k][~present], f"absent rows of array {k}")


@EACH
@given(problem=problems())
@example(problem=fixed(1, (1,), []))
@example(problem=fixed(5, (3,), []))
@example(problem=fixed(5, (3,), [4, 4, 4, 0]))
@quick
def test_rows_meet_the_reference(family: Family, problem: Problem) -> None:
    variables = problem.variables(family)
    with unchanged(problem.indices, problem.values):
        family.rows(*variables, g=problem.values, i=problem.indices)
    assert_near_reference(family, problem, variables)


@EACH
@given(problem=problems(), data=st.data())
@quick
def test_order_does_not_matter(family: Family, problem: Problem, data: st.DataObject) -> None:
    """To the last bit: the sums are exact, and int32 indices are as good as int64."""
    order = np.array(data.draw(st.permutations(range(len(problem.indices)))), np.intp)
    one, other = problem.variables(family), problem.variables(family)
    family.rows(*one, g=problem.values, i=problem.indices)
    family.rows(*other, g=problem.values[order], i=problem.indices[order].astype(np.int32))
    for a, b in zip(one, other, strict=True):
        assert_same_bits(a, b)


@EACH
@given(problem=problems())
@quick
def test_rows_take_the_dense_step(family: Family, problem: Problem) -> None:
    """The rows that occur, to the last bit, with the merged gradient."""
    rows, dense = problem.variables(family), problem.variables(family)
    family.rows(*rows, g=problem.values, i=problem.indices)
    merged = reference.densify(problem.indices, problem.values, rows[0].shape)
    family.dense(*dense, g=merged.astype(np.float32))
    present = problem.present()
    for a, b in zip(rows, dense, strict=True):
        assert_same_bits(a[present], b[present])


@EACH
def test_several_steps(family: Family) -> None:
    """Rows come and go; each step begins with the bits that the last one left."""
    problem = Problem.make(30, (4,), [])
    variables = problem.variables(family)
    states = [np.empty(0)] * (2 - family.n_states)
    for step in range(5):
        indices = np.random.default_rng(step).integers(0, 30, 20)
        values = Problem.make(30, (4,), indices).values
        problem = Problem((*(a.copy() for a in variables), *states), indices, values)
        family.rows(*variables, g=values, i=indices)
        assert_near_reference(family, problem, variables)


@EACH
@pytest.mark.parametrize("count", [HOT, HOT + 1, 9_000])
@pytest.mark.parametrize("tail", [(), (3,), (200,)])
def test_hot_rows(family: Family, count: int, tail: tuple[int, ...]) -> None:
    """A row that takes most of the batch, next to rows that occur once or twice."""
    indices = np.random.default_rng(1).permutation(np.repeat([3, 7, 0, 4], [count, 2, 1, 600]))
    problem = Problem.make(9, tail, indices)
    variables = problem.variables(family)
    family.rows(*variables, g=problem.values, i=problem.indices)
    assert_near_reference(family, problem, variables)


@EACH
def test_duplicates_are_not_applied_one_after_the_other(family: Family) -> None:
    """MindSpore's SparseApplyFtrl does so on the CPU; its square of a sum is another number."""
    problem = fixed(3, (2,), [1, 1])
    merged, apart = problem.variables(family), problem.variables(family)
    family.rows(*merged, g=problem.values, i=problem.indices)
    for k in range(2):
        family.rows(*apart, g=problem.values[k : k + 1], i=problem.indices[k : k + 1])
    assert np.abs(merged[1][1] - apart[1][1]).min() > 1e-3


@EACH
def test_large_batches(family: Family) -> None:
    """Enough positions that several threads sort."""
    problem = Problem.make(20_000, (4,), np.random.default_rng(2).integers(0, 20_000, 30_000))
    variables = problem.variables(family)
    family.rows(*variables, g=problem.values, i=problem.indices)
    assert_near_reference(family, problem, variables)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64, np.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ftrl", ftrl_rows(ops.SparseApplyFtrl)),
        ("proximal", proximal_rows(ops.SparseApplyProximalAdagrad)),
    ],
)
def test_other_storage_types(name: str, rows: Any, dtype: Any) -> None:
    """Sums in the type of the arithmetic, one rounding at the store: the bits of a dense step."""
    family = FAMILIES[name]
    problem = Problem.make(20, (5,), np.random.default_rng(3).integers(0, 20, 60), dtype)
    variables, dense = problem.variables(family), problem.variables(family)
    rows(*variables, g=problem.values, i=problem.indices)
    merged = reference.densify(problem.indices, problem.values, (20, 5))
    assert np.array_equal(merged, merged.astype(dtype).astype(float))
    family.dense(*dense, g=merged.astype(dtype))
    present = problem.present()
    for a, b, old in zip(variables, dense, problem.arrays, strict=False):
        assert_same_bits(a[present], b[present])
        assert_same_bits(a[~present], old[~present])
    if dtype == np.float32:
        assert_near_reference(family, problem, variables)


@pytest.mark.parametrize("lr_power", [-0.3, 0.0])
def test_other_powers(lr_power: float) -> None:
    """Those that call pow."""
    problem = Problem.make(20, (5,), np.random.default_rng(4).integers(0, 20, 60))
    family = FAMILIES["ftrl"]
    changed = {**FTRL, "lr_power": lr_power}
    variables = problem.variables(family)
    ops.FusedSparseFtrl(**changed)(*variables, problem.values, problem.indices)
    other = Family(family.rows, family.dense, family.step, family.terms, changed, 2)
    assert_near_reference(other, problem, variables)


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_element(family: Family, bad: float) -> None:
    """One occurrence of a row is enough; other elements do not see it."""
    problem = fixed(6, (3,), [4, 1, 4, 2])
    clean, spoiled = problem.variables(family), problem.variables(family)
    family.rows(*clean, g=problem.values, i=problem.indices)
    values = problem.values.copy()
    values[2, 1] = bad
    family.rows(*spoiled, g=values, i=problem.indices)
    assert not np.isfinite(spoiled[0][4, 1]) and not np.isfinite(spoiled[1][4, 1])
    for a, b in zip(spoiled, clean, strict=True):
        a[4, 1] = b[4, 1] = 0.0
        assert_same_bits(a, b)
