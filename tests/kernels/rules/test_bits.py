"""One rule gives equal bits in every loop: dense, rows and sweeps, of every storage and place."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import BF16, assert_same_arrays, sampled
from many_states import FIVE, FOUR, SCALARS
from rule_cases import CASES as OTHERS
from rule_cases import LARS, NEUTRAL, OPTIMIZER, real_of, run_dense, run_rows
from test_rules import RULES, samples, scalars


def of_adam(name: str) -> Any:
    """A rule of Adam's family in the form of the others."""
    rule, *_ = RULES[name]
    return SimpleNamespace(
        rule=rule, hp=lambda real: scalars(name, real)[0],
        samples=lambda n, seed: samples(n, len(rule.states), seed))  # fmt: skip


def of_many_states(rule: Any) -> Any:
    """A rule of more states than any of the package."""
    return SimpleNamespace(
        rule=rule, hp=lambda real: tuple(map(real, SCALARS)),
        samples=lambda n, seed: samples(n, len(rule.states), seed))  # fmt: skip


CASES: dict[str, Any] = {**OTHERS, **{n: of_adam(n) for n in RULES}}
CASES |= {"four states": of_many_states(FOUR), "five states": of_many_states(FIVE)}
EACH = pytest.mark.parametrize("name", CASES)
F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))
# Storage of parameter and states, storage of the gradient, prologue. Summed rows are float32 or
# float64, whatever the gradient is: they go through machine code of their own.
BUILDS = {
    "float32": (F32, F32, ()), "float32, prologue": (F32, F32, OPTIMIZER),
    "float32, bfloat16 gradient": (F32, BF16, ()),
    "float32, bfloat16 gradient, prologue": (F32, BF16, LARS), "float16": (F16, F16, ()),
    "float64, float32 gradient": (F64, F32, ()),
}  # fmt: skip


def problem(
    case: Any, shape: tuple[int, ...], dtype: Any = F32, g_dtype: Any = F32, seed: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Parameter and states, and a gradient."""
    w, g, *states = case.samples(int(np.prod(shape)), seed)
    arrays = [a.reshape(shape).astype(dtype) for a in (w, *states)]
    return arrays, g.reshape(shape).astype(g_dtype)


# Every rule in float32, where sweeps are compared, and in one of the other builds: not in the same
# one with all variants of a rule.
MIXED = [build for build in BUILDS if build != "float32"]
BUILT = [
    (name, build)
    for k, name in enumerate(CASES)
    for build in BUILDS
    if build not in MIXED or MIXED.index(build) == k % len(MIXED)
]


@pytest.mark.parametrize(("name", "build"), sampled(product(CASES, BUILDS), BUILT))
def test_dense_rows_and_sweep_agree(name: str, build: str) -> None:
    """Rows of every width; half of them absent from a sweep, where their gradient is 0."""
    dtype, g_dtype, prologue = BUILDS[build]
    case, real = CASES[name], real_of(dtype)
    hp = case.hp(real)
    for d in (1, 2, 3, 7, 8, 16, 31, 33, 64, 100, 2_000):
        n = max(4, 2_000 // d)
        start, gradient = problem(case, (n, d), dtype, g_dtype)
        dense, lazy, sweep = ([a.copy() for a in start] for _ in range(3))
        run_dense(case.rule, dense, gradient, hp, prologue)
        order = np.random.default_rng(2).permutation(n)
        run_rows(case.rule, lazy, order, gradient[order], hp, prologue)
        assert_same_arrays(lazy, dense, f"lazy rows of {d}")
        if (dtype, g_dtype) != (F32, F32):
            continue
        half = order[: n // 2]
        run_rows(case.rule, sweep, half, gradient[half], hp, prologue, lazy=False)
        dense, gradient = [a.copy() for a in start], gradient.copy()
        gradient[order[n // 2 :]] = 0.0
        run_dense(case.rule, dense, gradient, hp, prologue)
        assert_same_arrays(sweep, dense, f"sweep over rows of {d}")


PROLOGUES = {"optimizer": OPTIMIZER, "lars": LARS}
IN_FRONT = [(name, list(PROLOGUES)[k % 2]) for k, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "prologue"), sampled(product(CASES, PROLOGUES), IN_FRONT))
def test_a_neutral_prologue_is_none(name: str, prologue: str) -> None:
    """A parameter steps the same whether or not others of its call are decayed or scaled."""
    case = CASES[name]
    start, gradient = problem(case, (1_003,))
    plain, neutral = ([a.copy() for a in start] for _ in range(2))
    run_dense(case.rule, plain, gradient, case.hp(np.float32))
    run_dense(case.rule, neutral, gradient, case.hp(np.float32), PROLOGUES[prologue], NEUTRAL)
    assert_same_arrays(neutral, plain, "neutral")


@EACH
def test_alignment_and_place_do_not_matter(name: str) -> None:
    """Vector bodies, scalar tails and unaligned beginnings; each element alone."""
    case = CASES[name]
    hp = case.hp(np.float32)
    for n in (1, 7, 33, 1_003, 40_000):
        start, gradient = problem(case, (n,))
        whole, single = ([a.copy() for a in start] for _ in range(2))
        run_dense(case.rule, whole, gradient, hp)
        for i in range(0, n, max(1, n // 20)):
            one = [a[i : i + 1] for a in single]
            run_dense(case.rule, one, gradient[i : i + 1], hp)
            assert_same_arrays(one, [a[i : i + 1] for a in whole], f"element {i} of {n}")
        for offset in (1, 3, 5):
            rooms = [np.empty(n + 8, np.float32) for _ in start]
            shifted = [room[offset : offset + n] for room in rooms]
            for array, old in zip(shifted, start, strict=True):
                array[:] = old
            run_dense(case.rule, shifted, gradient, hp)
            assert_same_arrays(shifted, whole, f"{n} from {offset}")
