"""On a CUDA device: rules, sizes and alignment, against references and the CPU.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fusestep import nn, ops
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rule import Prologue, Rule
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.launch import launch_on
from fusestep.ops.runtime.step import DenseUpdate, Variables

import gpu_arrays
import reference
import test_rules
from gpu_arrays import Maker, adopted, copies
from gpu_checks import CPU_ULPS, ELEMENTS, F16, F32, F64
from helpers import BF16, STORAGE_DTYPES, assert_same_bits, assert_within_ulps
from rule_cases import CASES, OPTIMIZER, condition, hp_row, real_of, run_dense

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


# Units in the last place of the largest term that a result is a sum of, as in the tests of the
# CPU; twice as many for float64, where the reference itself is off by as much.
REFERENCE_ULPS = 4.0
# CUDA documents an error of 4 units for its float32 ``pow``, of which FTRL with another power
# takes two; the C library's is below 1.
POW_ULPS = 16.0


def step_on_device(
    make: Maker,
    rule: Rule,
    arrays: Sequence[np.ndarray],
    g: np.ndarray,
    hp: np.ndarray,
    prologue: Prologue = (),
) -> list[np.ndarray]:
    """One dense step on copies of a parameter and its states; what they hold after it."""
    on_device = copies(make, arrays)
    variables, gradient = [adopted(a) for a in on_device], adopted(make.put(g))
    with launch_on([*variables, gradient]) as launch:
        bound, places = Variables.of([tuple(variables)]), np.array([gradient.address])
        given = bound, places, STORAGES[g.dtype], hp, np.zeros(1, np.int64)
        DenseUpdate(rule, prologue, *given).enqueue(launch)
    return [make.get(a) for a in on_device]


def assert_step(
    found: Sequence[np.ndarray],
    on_cpu: Sequence[np.ndarray],
    exact: Sequence[Any],
    scales: Sequence[Any],
    ulps: tuple[float, float],
    label: str,
) -> None:
    """Near the reference, and near the CPU."""
    __tracebackhide__ = True
    for k, (a, cpu, value, scale) in enumerate(zip(found, on_cpu, exact, scales, strict=True)):
        factor = 2.0 if a.dtype == np.float64 else 1.0
        name = f"array {k} {label}"
        assert_within_ulps(a, value, scale, factor * ulps[0], f"{name}, reference")
        assert_within_ulps(a, cpu, scale, factor * ulps[1], f"{name}, CPU")


# Storage types, and in float32 also what comes before the rule.
BUILDS = [*((dtype, ()) for dtype in STORAGE_DTYPES), (F32, OPTIMIZER)]
BUILD_NAMES = [*map(str, STORAGE_DTYPES), "float32, prologue"]
EACH_BUILD = pytest.mark.parametrize(("dtype", "prologue"), BUILDS, ids=BUILD_NAMES)


@EACH_BUILD
@pytest.mark.parametrize("name", CASES)
def test_rule_cases(maker: Maker, name: str, dtype: Any, prologue: Prologue) -> None:
    """Three steps, each from where the CPU has arrived."""
    case, real = CASES[name], real_of(dtype)
    w, _, *states = case.samples(ELEMENTS, seed=2)
    arrays = [a.astype(dtype) for a in (w, *states)]
    known, hp = case.known(real), hp_row(case.rule, prologue, case.hp(real), real)
    for step in range(3):
        g = case.samples(ELEMENTS, seed=3 + step)[1].astype(dtype)
        before = [reference.wide(a) for a in arrays]
        conditioned, size = condition(g, arrays[0], prologue, real)
        exact = case.step(before[0], conditioned, *before[1:], **known)
        scales = case.terms(before[0], size, before[1:], known, exact)
        found = step_on_device(maker, case.rule, arrays, g, hp, prologue)
        run_dense(case.rule, arrays, g, case.hp(real), prologue)
        pow_in_float32 = name.startswith("ftrl_power") and real is np.float32
        ulps = (POW_ULPS, POW_ULPS) if pow_in_float32 else (REFERENCE_ULPS, CPU_ULPS)
        assert_step(found, arrays, exact, scales, ulps, f"after step {step + 1}")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", test_rules.RULES)
def test_rules_of_adam(maker: Maker, name: str, dtype: Any) -> None:
    rule, _, formula = test_rules.RULES[name]
    real = real_of(dtype)
    given, hp = test_rules.scalars(name, real)
    w, _, *states = test_rules.samples(ELEMENTS, len(rule.states), seed=2)
    arrays = [a.astype(dtype) for a in (w, *states)]
    for step in range(3):
        g = test_rules.samples(ELEMENTS, len(rule.states), seed=3 + step)[1].astype(dtype)
        before = [reference.wide(a) for a in arrays]
        exact = formula(before[0], reference.wide(g), *before[1:], hp)
        size = np.abs(reference.wide(g))
        scales = test_rules.largest_terms(name, before[0], size, before[1:], hp, exact)
        found = step_on_device(maker, rule, arrays, g, np.array([given], real))
        test_rules.run_compiled(name, arrays, g, ())
        ulps = (REFERENCE_ULPS, CPU_ULPS)
        assert_step(found, arrays, exact, scales, ulps, f"after step {step + 1}")


@pytest.mark.parametrize(
    "types", [(F64, F32, F64, F32), (F16, BF16, F32, F32), (F32, BF16, BF16, F16)], ids=str
)
def test_mixed_storage_types(maker: Maker, types: tuple[Any, ...]) -> None:
    """Of the parameter, the gradient and the states: each is rounded to its own."""
    rule, _, formula = test_rules.RULES["adam"]
    real = real_of(types[0])
    given, hp = test_rules.scalars("adam", real)
    w, g, *states = test_rules.samples(ELEMENTS, 2, seed=2)
    g, arrays = g.astype(types[1]), [w.astype(types[0])]
    arrays += [s.astype(t) for s, t in zip(states, types[2:], strict=True)]
    before = [reference.wide(a) for a in arrays]
    exact = formula(before[0], reference.wide(g), *before[1:], hp)
    size = np.abs(reference.wide(g))
    scales = test_rules.largest_terms("adam", before[0], size, before[1:], hp, exact)
    found = step_on_device(maker, rule, arrays, g, np.array([given], real))
    update = DenseUpdate(
        rule, (), Variables.of([tuple(arrays)]), np.array([g.ctypes.data]), STORAGES[g.dtype],
        np.array([given], real), np.zeros(1, np.int64),
    )  # fmt: skip
    commit([update.prepared()])
    assert_step(found, arrays, exact, scales, (REFERENCE_ULPS, CPU_ULPS), "mixed")


SHAPES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (7,), (1_003,), (), (3, 0), (3, 5), (2, 3, 4), (2, 3, 4, 5), (20_011,)
)  # fmt: skip


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_many_tensors_of_all_shapes_in_one_step(maker: Maker, dtype: Any) -> None:
    """0-d to 4-d, empty ones among them; each near the reference and the CPU."""
    rng, real = np.random.default_rng(0), real_of(dtype)
    shapes = SHAPES if ELEMENTS > 1_000 else SHAPES[:3] + SHAPES[4:9]
    start, gs = ([np.array(rng.standard_normal(s)).astype(dtype) for s in shapes] for _ in "wg")
    on_cpu = [nn.Parameter(w.copy()) for w in start]
    nn.Adam(on_cpu, 0.01, eps=1e-3)(gs)
    on_device = [nn.Parameter(maker.put(w)) for w in start]
    nn.Adam(on_device, 0.01, eps=1e-3)(copies(maker, gs))
    hp = reference.adam_scalars(0.01, 0.9, 0.999, 1e-3, 0.9, 0.999, real=real)
    for w, g, cpu, p in zip(start, gs, on_cpu, on_device, strict=True):
        zero = np.zeros(w.shape)
        exact, *_ = reference.adam(w, g, zero, zero, hp)
        scale = np.abs(reference.wide(w)) + 0.01
        found = p.asnumpy()
        assert found.shape == w.shape
        assert_same_bits(maker.get(p.data), found)
        ulps = (REFERENCE_ULPS, CPU_ULPS)
        assert_step([found], [cpu.data], [exact], [scale], ulps, f"of shape {w.shape}")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 1_003])
def test_alignment_does_not_matter(maker: Maker, n: int, dtype: Any) -> None:
    """Of any of the arrays: the same bits as from aligned ones."""
    rng = np.random.default_rng(1)
    arrays = [rng.uniform(0.1, 1.0, n).astype(dtype) for _ in range(4)]
    scalars = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)

    def step(shifts: Sequence[int]) -> list[np.ndarray]:
        var, m, v, g = (maker.shifted(a, s) for a, s in zip(arrays, shifts, strict=True))
        ops.Adam()(var, m, v, *scalars, g)
        return [maker.get(a) for a in (var, m, v)]

    aligned = step((0, 0, 0, 0))
    for shifts in ((1, 1, 1, 1), (0, 0, 0, 3), (3, 0, 0, 0), (0, 5, 1, 0)):
        for a, b in zip(step(shifts), aligned, strict=True):
            assert_same_bits(a, b, str(shifts))


def test_strided_gradients(maker: Maker) -> None:
    """Frameworks that can copy them do; Numba's are refused."""
    w, g = np.ones((6, 4), np.float32), np.arange(48, dtype=np.float32).reshape(6, 8)
    p, strided = nn.Parameter(maker.put(w)), maker.put(g)[:, ::2]
    opt = nn.SGD([p], 0.5)
    if type(maker) is Maker:
        with pytest.raises(ValueError, match="is not contiguous"):
            opt((strided,))
        return
    opt((strided,))
    assert_same_bits(p.asnumpy(), w - np.float32(0.5) * g[:, ::2])
