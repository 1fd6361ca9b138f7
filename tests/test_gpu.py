"""On a CUDA device: against the references, the CPU and recorded runs; streams, errors, bits.

``pytest -m gpu`` runs these tests alone. ``FUSESTEP_GPU_LARGE_TESTS=1`` adds those that need
tens of gigabytes.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import test_recorded_nn
import test_recorded_ops
import test_rules
from test_ops_reference import CALLS, known_scalars

import fusestep
from fusestep import nn, ops
from fusestep.bench.operators import DENSE_OPERATORS, ROW_OPERATORS, Operator
from fusestep.kernels.cpu.layout import HOT, range_length
from fusestep.kernels.rules import adam as adam_rules
from fusestep.kernels.rules.rule import Prologue, Rule
from fusestep.kernels.storage import STORAGES
from fusestep.ops.device import DeviceArray
from fusestep.ops.device_step import launch_on
from fusestep.ops.step import Variables, dense_step

import gpu_arrays
import recorded_nn
import recorded_quirks
import reference
from gpu_arrays import FRAMEWORKS, Maker, adopted, copies
from helpers import BF16, EPSILON, STORAGE_DTYPES, assert_same_bits, assert_within_ulps
from optimizers import BY_NAME, FORMS, decayed_and_scaled
from optimizers import make as new_optimizer
from recorded import Case, assert_close_recorded
from rule_cases import CASES, OPTIMIZER, condition, hp_row, real_of, run_dense

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))

# Units in the last place of the largest term that a result is a sum of, as in the tests of the
# CPU; twice as many for float64, where the reference itself is off by as much.
REFERENCE_ULPS = 4.0
# Between the device and the CPU: both round each operation alike, but either compiler chooses
# for itself which products and sums become one FMA. Each choice is worth at most half a unit, and
# no rule has more than about eight.
CPU_ULPS = 4.0
# CUDA documents an error of 4 units for its float32 ``pow``, of which FTRL with another power
# takes two; the C library's is below 1.
POW_ULPS = 16.0
# Of the largest value of an array after three steps of an optimizer, each of which passes on, at
# most doubled, by how much the one before was off. In 16 bit (True) one rounding hides the others.
RUN_ULPS = {False: 32.0, True: 4.0}

# Recorded runs: an element that cancelled holds roundings of what it was, which no order of float32
# operations shares with the original's in every element. Each is worth two units of that size.
RECORDED_ROUNDINGS = 2.0

ELEMENTS = 10_007  # several blocks, and an end that is no whole tile
MANY = (1, 200, 2_000)  # tensors; the table of the last is more than 64 KiB
BUSY = 400  # milliseconds that a stream is kept busy: far more than a call takes
SORTED = (0, 1, 2, 255, 2_047, 2_048, 2_049, 100_003, 1_000_000)

_GRADIENTS = (((40, 3), np.float32), ((1_003,), np.float64), ((), np.float32), ((77,), BF16))

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(params=FRAMEWORKS)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Makes arrays of each framework; what a failed test has left pending is dropped."""
    yield gpu_arrays.maker(request.param)
    gpu_arrays.wait()
    try:
        fusestep.synchronize()
    except IndexError:
        warnings.warn("a test has left an index error pending", stacklevel=1)


@pytest.fixture
def numba_maker() -> Maker:
    """Where the framework does not matter."""
    return gpu_arrays.maker("numba")


def near_run(found: np.ndarray, expected: np.ndarray, narrowest: Any, label: str) -> None:
    """After several steps, in which rounding to the narrowest of the types has gone on."""
    __tracebackhide__ = True
    assert found.dtype == expected.dtype, label
    assert found.shape == expected.shape, label
    epsilon = max(EPSILON[found.dtype], EPSILON[np.dtype(narrowest)])
    wide = expected.astype(np.float64)
    error = np.abs(found.astype(np.float64) - wide).max(initial=0.0)
    allowed = RUN_ULPS[epsilon > 1e-4] * epsilon * np.abs(wide).max(initial=0.0)
    assert error <= allowed, f"{label}: off by {error:.3g}, allowed {allowed:.3g}"


# ----------------------------------------------------------------------------------------- Rules


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
    with launch_on([*variables, gradient], None) as launch:
        dense_step(
            rule,
            prologue,
            Variables.of([tuple(variables)]),
            np.array([gradient.address]),
            STORAGES[g.dtype],
            hp,
            np.zeros(1, np.int64),
            launch,
        )
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
        pow_in_float32 = name == "ftrl_power" and real is np.float32
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
    dense_step(
        rule, (), Variables.of([tuple(arrays)]), np.array([g.ctypes.data]), STORAGES[g.dtype],
        np.array([given], real), np.zeros(1, np.int64),
    )  # fmt: skip
    assert_step(found, arrays, exact, scales, (REFERENCE_ULPS, CPU_ULPS), "mixed")


# ---------------------------------------------------------------------------- Sizes and alignment

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


# ------------------------------------------------------------------------------------- Operators


def on_device(make: Maker, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments of a call, on the device."""
    return {
        name: make.put(value) if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in inputs.items()
    }


def both(
    make: Maker, operator: Operator, inputs: dict[str, Any], **made: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The variables after a call on the device, and after one on the CPU."""
    given = on_device(make, inputs)
    returned = operator.call(given, **made)
    returned = returned if isinstance(returned, tuple) else (returned,)
    if operator.returned:
        for name, array in zip(operator.returned, returned, strict=True):
            assert array is given[name]
    operator.call(inputs, **made)
    names = operator.variables
    return [make.get(given[name]) for name in names], [inputs[name] for name in names]


def assert_operator(
    operator: Operator, found: list[np.ndarray], expected: list[np.ndarray]
) -> None:
    """All numbers are of size 1, but FTRL adds terms of ten times that."""
    __tracebackhide__ = True
    size = 10.0 if "Ftrl" in operator.name else 1.0
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_within_ulps(a, b, size + np.abs(b.astype(np.float64)), CPU_ULPS, f"array {k}")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", DENSE_OPERATORS)
def test_dense_operators(maker: Maker, name: str, dtype: Any) -> None:
    operator = DENSE_OPERATORS[name]
    assert_operator(operator, *both(maker, operator, operator.inputs((9, 37), dtype)))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_row_operators(maker: Maker, name: str, index_dtype: Any) -> None:
    """Duplicates, and rows of 1, 2 and more dimensions."""
    operator = ROW_OPERATORS[name]
    for shape in ((9,), (9, 37), (9, 2, 5)):
        inputs = operator.inputs(shape)
        inputs["indices"] = inputs["indices"].astype(index_dtype)
        assert_operator(operator, *both(maker, operator, inputs))
    inputs = operator.inputs((9, 3))
    inputs["indices"], inputs[operator.gradient] = np.zeros(0, index_dtype), np.zeros((0, 3), F32)
    assert_operator(operator, *both(maker, operator, inputs))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "made", "step"), CALLS, ids=lambda x: None if callable(x) else str(x)
)
def test_operators_meet_the_reference(
    maker: Maker, name: str, made: dict[str, Any], step: Any, dtype: Any
) -> None:
    operator = {**DENSE_OPERATORS, **ROW_OPERATORS}[name]
    inputs = operator.inputs((40, 3), np.float32 if operator.only_float32 else dtype)
    if operator.takes_rows:
        inputs["indices"] = np.array([7, 39, 7, 0])
    before = [inputs[variable].copy() for variable in operator.variables]
    step = partial(step, **known_scalars(operator, inputs, made))
    g = reference.wide(inputs[operator.gradient])
    if operator.takes_rows:
        expected = reference.lazy_step(step, before[0], inputs["indices"], g, *before[1:])
    else:
        expected = step(before[0], g, *before[1:])
    found, _ = both(maker, operator, inputs, **made)
    for array, exact in zip(found, expected, strict=True):
        unit = 1e-13 if array.dtype == np.float64 else 4e-6 if "lr_power" in made else 2e-6
        np.testing.assert_allclose(array, exact, rtol=unit, atol=unit)


def test_global_norm_and_clipping(maker: Maker) -> None:
    """Dense gradients of several storage types, and rows with duplicates, some of them hot."""
    rng = np.random.default_rng(17)
    dense = [rng.standard_normal(shape).astype(dtype) for shape, dtype in _GRADIENTS]
    indices = np.concatenate([np.full(HOT + 9, 2), rng.integers(0, 50, 300)])
    values = rng.standard_normal((len(indices), 12)).astype(F32)
    host = [*dense, None, nn.RowTensor(indices, values, (50, 12))]
    rows = nn.RowTensor(maker.put(indices), maker.put(values), (50, 12))
    ours = [*copies(maker, dense), None, rows]
    np.testing.assert_allclose(ops.global_norm(ours), ops.global_norm(host), rtol=1e-12)
    clipped = ops.clip_by_global_norm(ours, 1.0), ops.clip_by_global_norm(host, 1.0)
    for found, expected in zip(*clipped, strict=True):
        if isinstance(expected, nn.RowTensor):
            found, expected = found.values, expected.values
        if expected is not None:
            array = found.numpy() if isinstance(found, DeviceArray) else maker.get(found)
            assert_within_ulps(array, expected, np.abs(expected.astype(np.float64)), 1.0, "clipped")
    fusestep.synchronize()


def test_gather_and_what_comes_back(maker: Maker) -> None:
    table, index = np.arange(60, dtype=np.float32).reshape(5, 12), np.array([[4, 0], [4, 2]])
    gather, expected = ops.SparseGatherV2(), table[index]
    found = gather(maker.put(table), maker.put(index), 0)
    assert_same_bits(maker.get(found), expected)
    back = gather.backward(found)
    assert_same_bits(back.values.numpy(), expected.reshape(4, 12))
    assert_same_bits(back.indices.numpy(), index.reshape(4))


# ------------------------------------------------------------------------------------ Optimizers

TENSORS = {"table": (60, 9), "vector": (1_003,), "scalar": ()}


def problem(
    shapes: Mapping[str, tuple[int, ...]], dtype: Any, steps: int = 3
) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Parameters by name, and dense gradients of some steps."""
    rng = np.random.default_rng(11)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return np.array(rng.standard_normal(shape)).astype(dtype)

    start = {name: numbers(shape) for name, shape in shapes.items()}
    return start, [[numbers(shape) for shape in shapes.values()] for _ in range(steps)]


def parameters(make: Maker | None, start: Mapping[str, np.ndarray]) -> list[nn.Parameter]:
    """On the device of a maker, or on the host."""
    return [nn.Parameter(make.put(w) if make else w.copy(), name=name) for name, w in start.items()]


def assert_runs_are_near(ours: Any, theirs: Any) -> None:
    """Parameters and states of an optimizer on the device, and of one on the host."""
    __tracebackhide__ = True
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        near_run(p.asnumpy(), q.asnumpy(), p.dtype, str(p.name))
    narrowest = max((p.dtype for p in ours.parameters), key=EPSILON.__getitem__)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for name, array in found.items():
        if array.dtype in STORAGES:
            near_run(array, expected[name], narrowest, name)
        else:
            assert_same_bits(array, expected[name], name)


def refusal_is_a_skip(error: RuntimeError) -> None:
    """What has no kernels may say so; it may not be wrong."""
    if "CUDA" not in str(error):
        raise error
    pytest.skip(str(error))


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(F32, None), (F64, None), (BF16, F32), (F16, None)], ids=str
)
@pytest.mark.parametrize("form", FORMS)
def test_optimizers(maker: Maker, form: str, dtype: Any, state_dtype: Any) -> None:
    """Three steps with decay and loss scale; a parameter without a gradient in one of them."""
    start, steps = problem(TENSORS, dtype)
    options = decayed_and_scaled(form) | ({"state_dtype": state_dtype} if state_dtype else {})
    host = new_optimizer(form, parameters(None, start), **options)
    try:
        opt = new_optimizer(form, parameters(maker, start), **options)
        for t, gs in enumerate(steps):
            given, on_host = copies(maker, gs), list(gs)
            if t == 1:
                given[1] = on_host[1] = None
            opt(given)
            host(on_host)
    except RuntimeError as error:
        refusal_is_a_skip(error)
    assert_runs_are_near(opt, host)


# Many tiles, rows that are aligned and not, tall, wide and low matrices, batches of small ones.
MATRICES = {
    "square": (2_048, 1_024), "odd": (1_003, 777), "tall": (150_001, 12), "wide": (3, 70_001),
    "row": (1, 9_000), "column": (9_000, 1), "filters": (70, 30, 3, 3), "heads": (5, 130, 260),
}  # fmt: skip


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_matrices_of_adafactor(maker: Maker, dtype: Any, beta1: float | None) -> None:
    """Near the CPU, and the same bits in every run."""
    start, steps = problem(MATRICES, dtype)
    options = {"beta1": beta1, "weight_decay": 0.1, "clip_threshold": 0.7}
    host = nn.AdaFactor(parameters(None, start), **options)
    opts = [nn.AdaFactor(parameters(maker, start), **options) for _ in range(2)]
    for gs in steps:
        host(list(gs))
        for opt in opts:
            opt(copies(maker, gs))
    assert_runs_are_near(opts[0], host)
    for p, q in zip(opts[0].parameters, opts[1].parameters, strict=True):
        assert_same_bits(p.asnumpy(), q.asnumpy(), str(p.name))
    again = opts[1].state_dict()
    for name, array in opts[0].state_dict().items():
        assert_same_bits(array, again[name], name)


TAKING_ROWS = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]


def row_tensor(make: Maker | None, rows: nn.RowTensor) -> nn.RowTensor:
    """A row-sparse gradient, on the device."""
    if make is None:
        return rows
    return nn.RowTensor(make.put(rows.indices), make.put(rows.values), rows.dense_shape)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("form", TAKING_ROWS)
def test_rows_of_optimizers(maker: Maker, form: str, how: str) -> None:
    """Beside dense gradients."""
    if (form, how) == ("Adam-lazy", "dense_equivalent"):
        pytest.skip("it has no such setting")
    start, steps = problem(TENSORS, F32)
    options = {**decayed_and_scaled(form), "sparse_update": how}
    host = new_optimizer(form, parameters(None, start), **options)
    opt = new_optimizer(form, parameters(maker, start), **options)
    rng = np.random.default_rng(5)
    for _, *dense in steps:
        indices = rng.integers(0, 60, 33)
        rows = nn.RowTensor(indices, rng.standard_normal((33, 9)).astype(F32), (60, 9))
        opt([row_tensor(maker, rows), *copies(maker, dense)])
        host([rows, *dense])
    fusestep.synchronize()
    assert_runs_are_near(opt, host)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_many_tables_of_mixed_kinds(maker: Maker, dtype: Any, how: str) -> None:
    """Widths of no, one and several tiles; int32 and int64; an empty list; one row; hot rows."""
    shapes = {"a": (50, 1), "b": (7, 33), "c": (1, 8), "d": (40, 16), "e": (30,), "f": (9, 3, 5)}
    counts, many = (20, 40, 5, 0, 12, 30), HOT + 100
    start, _ = problem(shapes, dtype)
    host = nn.Adam(parameters(None, start), 0.05, eps=0.01, sparse_update=how)
    opt = nn.Adam(parameters(maker, start), 0.05, eps=0.01, sparse_update=how)
    rng = np.random.default_rng(6)
    for step in range(2):
        given = []
        for k, (shape, count) in enumerate(zip(shapes.values(), counts, strict=True)):
            n = many if k == 1 and step else count
            indices = rng.integers(0, shape[0], n).astype(np.int32 if k % 2 else np.int64)
            if n == many:
                indices[: HOT + 50] = 3
            values = rng.standard_normal((n, *shape[1:])).astype(dtype)
            given.append(nn.RowTensor(indices, values, shape))
        opt([row_tensor(maker, rows) for rows in given])
        host(given)
    fusestep.synchronize()
    assert_runs_are_near(opt, host)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_state_moves_between_cpu_and_device(maker: Maker, rows: bool) -> None:
    """A run goes on where another one has stopped, in both directions, and a copy of it too."""
    start, steps = problem(TENSORS, F32, steps=4)

    def given(make: Maker | None, t: int) -> list[Any]:
        table, *others = steps[t]
        if not rows:
            return copies(make, steps[t]) if make else steps[t]
        gradient = nn.RowTensor(np.arange(20) * 3 % 60, table[:20], (60, 9))
        return [row_tensor(make, gradient), *(copies(make, others) if make else others)]

    def new(make: Maker | None, arrays: Mapping[str, np.ndarray]) -> Any:
        return nn.Adam(parameters(make, arrays), 0.05, eps=0.01, weight_decay=0.1)

    def weights(opt: Any) -> dict[str, np.ndarray]:
        return {str(p.name): p.asnumpy().copy() for p in opt.parameters}

    first = new(maker, start)
    for t in (0, 1):
        first(given(maker, t))
    state, there = first.state_dict(), weights(first)
    on_host, again = new(None, there), new(maker, there)
    for opt in (on_host, again):
        opt.load_state_dict(state)
        for name, array in opt.state_dict().items():
            assert_same_bits(array, state[name], name)
    copied = copy.deepcopy(first)
    for opt, make in ((first, maker), (again, maker), (copied, maker), (on_host, None)):
        opt(given(make, 2))
    for other in (again, copied):
        for name, array in weights(other).items():
            assert_same_bits(array, weights(first)[name], name)
    assert_runs_are_near(first, on_host)
    back = new(maker, weights(on_host))
    back.load_state_dict(on_host.state_dict())
    back(given(maker, 3))
    on_host(given(None, 3))
    assert_runs_are_near(back, on_host)


def test_copies_hold_arrays_like_the_originals(maker: Maker) -> None:
    """Of the same shape and dtype, on the device, and apart from them."""
    start, (gs, *_) = problem(TENSORS, F32)
    opt = nn.Adam(parameters(maker, start), 0.05)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        copied(copies(maker, gs))
        for p, q in zip(copied.parameters, opt.parameters, strict=True):
            found = adopted(p.data)
            assert (found.shape, found.dtype) == (q.shape, q.dtype)
            assert_same_bits(q.asnumpy(), start[str(q.name)])


def test_lists_of_row_tensors(maker: Maker) -> None:
    start, _ = problem({"table": (60, 9)}, F32)
    opt, host = (nn.LazyAdam(parameters(m, start), 0.05, eps=0.01) for m in (maker, None))
    parts = [
        nn.RowTensor(np.array([k, 7]).astype(kind), np.full((2, 9), 0.5 + k, F32), (60, 9))
        for k, kind in ((3, np.int32), (7, np.int64), (9, np.int32))
    ]
    opt([[row_tensor(maker, part) for part in parts]])
    host([parts])
    assert_runs_are_near(opt, host)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_centralized_gradients(maker: Maker, dtype: Any, decay: float) -> None:
    """Rows of few elements and of many, which several blocks share; row-sparse ones beside."""
    start, steps = problem({"table": (60, 9), "long": (2, 100_003), "conv": (8, 3, 3, 3)}, dtype)
    rng = np.random.default_rng(4)

    def centralizing(make: Maker | None, how: str) -> nn.Momentum:
        options = {"grad_centralization": True, "weight_decay": decay}
        groups = [{"params": parameters(make, start), **options}]
        return nn.Momentum(groups, 0.5, 0.9, sparse_update=how)

    for how in ("lazy", "dense_equivalent"):
        host, opt = centralizing(None, how), centralizing(maker, how)
        for k, (table, *others) in enumerate(steps):
            indices = rng.integers(0, 60, 70)
            values = rng.standard_normal((70, 9)).astype(dtype)
            rows = nn.RowTensor(indices, values, (60, 9)) if k else table
            opt([row_tensor(maker, rows) if k else maker.put(table), *copies(maker, others)])
            host([rows, *others])
        fusestep.synchronize()
        assert_runs_are_near(opt, host)


def held(array: Any) -> np.ndarray:
    """What an array of the device holds; of bfloat16 Numba has no own."""
    return adopted(array).numpy()


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_sums_of_rows(maker: Maker, dtype: Any) -> None:
    """`to_dense` and `coalesce` have the bits of the host, of hot rows too."""
    rng = np.random.default_rng(12)
    for shape, n in (((50, 12), HOT + 500), ((2_000, 33), 3_000), ((9,), 40), ((7, 2, 5), 0)):
        for kind in (np.int32, np.int64):
            indices = rng.integers(0, shape[0], n).astype(kind)
            indices[: max(0, n - 400)] = 3
            host = nn.RowTensor(indices, rng.standard_normal((n, *shape[1:])).astype(dtype), shape)
            rows = row_tensor(maker, host)
            assert_same_bits(held(rows.to_dense()), host.to_dense())
            found, expected = rows.coalesce(), host.coalesce()
            assert_same_bits(held(found.indices), expected.indices)
            assert_same_bits(held(found.values), expected.values)
    fusestep.synchronize()
    bad = row_tensor(maker, nn.RowTensor(np.array([1, 9]), np.ones((2, 3), dtype), (9, 3)))
    with pytest.raises(IndexError, match="got 9"):
        bad.coalesce()
    assert not held(bad.to_dense()).any()
    with pytest.raises(IndexError, match="got 9"):
        fusestep.synchronize()


# ----------------------------------------------------------------------------------------- MXNet

MXNET_SHAPES = {0: (60, 9), 1: (1_003,), 2: (4, 5, 6)}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("place", ["weight", "new", "other"])
def test_adam_update(maker: Maker, place: str, dtype: Any) -> None:
    """Dense and row-sparse, wherever the result goes."""
    rng = np.random.default_rng(3)
    options = {"lr": 0.1, "epsilon": 0.01, "wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.4}
    values = rng.standard_normal((70, 9)).astype(dtype)
    rows = nn.RowTensor(rng.integers(0, 60, 70), values, (60, 9))
    for grad in (rng.standard_normal((60, 9)).astype(dtype), rows):
        arrays = [rng.uniform(0.1, 1.0, (60, 9)).astype(dtype) for _ in range(4)]
        ours, given = copies(maker, arrays), grad
        given = maker.put(grad) if isinstance(grad, np.ndarray) else row_tensor(maker, rows)
        outs = [{"weight": a[0], "new": None, "other": a[3]}[place] for a in (arrays, ours)]
        expected = ops.adam_update(arrays[0], grad, *arrays[1:3], outs[0], **options)
        found = ops.adam_update(ours[0], given, *ours[1:3], outs[1], **options)
        fusestep.synchronize()
        for a, b in zip([found, *ours], [expected, *arrays], strict=True):
            size = 1.0 + np.abs(b.astype(np.float64))
            assert_within_ulps(held(a), b, size, CPU_ULPS, place)


def mxnet_run(make: Maker | None, cls: Any, dtype: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Three steps of an Updater; the last one without a gradient of one weight."""
    rng = np.random.default_rng(8)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in MXNET_SHAPES.values()]
    weights = copies(make, arrays) if make else arrays
    updater = nn.mxnet.get_updater(cls(0.05, epsilon=0.01, wd=0.1, **options))
    for t in range(3):
        gs = [rng.standard_normal(shape).astype(dtype) for shape in MXNET_SHAPES.values()]
        rows = nn.RowTensor(rng.integers(0, 60, 33), gs[0][:33], (60, 9))
        given = [row_tensor(make, rows), *(copies(make, gs[1:]) if make else gs[1:])]
        if t == 2:
            given[1] = None
        updater(list(MXNET_SHAPES), given, weights)
    fusestep.synchronize()
    return updater, weights


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {}),
        ("Adam", {"lazy_update": True, "clip_gradient": 0.5}),
        ("Adam", {"multi_precision": True}),
        ("AdamW", {"multi_precision": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_mxnet(maker: Maker, name: str, options: dict[str, Any], dtype: Any) -> None:
    """Weights and states; these are taken over on either side."""
    cls = getattr(nn.mxnet, name)
    updater, weights = mxnet_run(maker, cls, dtype, **options)
    _, arrays = mxnet_run(None, cls, dtype, **options)
    for k, (w, expected) in enumerate(zip(weights, arrays, strict=True)):
        near_run(held(w), expected, dtype, f"weight {k}")
    data, kept = updater.get_states(), [held(w) for w in weights]
    again, there = (nn.mxnet.get_updater(cls(0.05, epsilon=0.01, **options)) for _ in range(2))
    gs, made = [np.full(w.shape, 0.5, dtype) for w in kept], []
    updater.optimizer.wd = 0.0
    for other, make in ((updater, maker), (again, maker), (there, None)):
        other.set_states(data)
        given, ws = ([make.put(a) if make else a.copy() for a in of_one] for of_one in (gs, kept))
        other(list(MXNET_SHAPES), given, ws)
        assert other.optimizer._index_update_count == {0: 4, 1: 3, 2: 4}
        made.append([held(w) if make else w for w in ws])
    for a, b, c in zip(*made, strict=True):
        assert_same_bits(a, b)
        near_run(b, c, dtype, "after set_states")


def test_parameters_can_be_rebound(maker: Maker) -> None:
    start, (gs, *_) = problem({"w": (33,)}, F32)
    (p,) = parameters(maker, start)
    opt = nn.SGD([p], 0.5)
    opt(copies(maker, gs))
    p.data = maker.put(start["w"])
    opt(copies(maker, gs))
    assert_same_bits(p.asnumpy(), start["w"] - np.float32(0.5) * gs[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_skip_nonfinite(maker: Maker, dtype: Any, bad: float) -> None:
    """A step with a NaN or an infinity in any gradient changes nothing, counts included."""
    start, steps = problem(TENSORS, dtype)
    opt = nn.Adam(parameters(maker, start), 0.05, skip_nonfinite=True)
    twin = nn.Adam(parameters(maker, start), 0.05)
    for t, gs in enumerate(steps):
        spoiled = [g.copy() for g in gs]
        spoiled[t % 2].reshape(-1)[-1 - t] = bad
        before = [p.asnumpy().copy() for p in opt.parameters]
        opt(copies(maker, spoiled))
        for p, old in zip(opt.parameters, before, strict=True):
            assert_same_bits(p.asnumpy(), old)
        opt(copies(maker, gs))
        twin(copies(maker, gs))
    assert opt.skipped_steps == len(steps)
    assert opt.global_step[0] == len(steps)
    for p, q in zip(opt.parameters, twin.parameters, strict=True):
        assert_same_bits(p.asnumpy(), q.asnumpy())
    values = np.ones((2, 9), dtype)
    values[1, 8] = bad
    table = nn.LazyAdam(parameters(maker, {"table": start["table"]}), skip_nonfinite=True)
    table([row_tensor(maker, nn.RowTensor(np.array([1, 1]), values, (60, 9)))])
    assert table.skipped_steps == 1
    assert_same_bits(table.parameters[0].asnumpy(), start["table"])


def test_a_step_warns_of_nothing(maker: Maker) -> None:
    """Numba has warnings for small grids, and for its own default stream."""
    start, (gs, *_) = problem(TENSORS, F32)
    opt = nn.Adam(parameters(maker, start), sparse_update="lazy")
    given = copies(maker, gs)
    rows = row_tensor(maker, nn.RowTensor(np.array([2, 2]), np.ones((2, 9), F32), (60, 9)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(given)
        opt([rows, *given[1:]])
        fusestep.synchronize()
        opt.state_dict()


# ----------------------------------------------------------------------------------- Rows in bulk

ADAM_HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)


def moments(shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    var, m, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    return [var, m, np.abs(v)]


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


# ------------------------------------------------------------------------------------------ Sorts


@pytest.mark.parametrize("n", SORTED)
def test_own_sort(numba_maker: Maker, n: int) -> None:
    """NumPy's stable sort, and nothing is written beyond the buffers."""
    from numba import cuda

    from fusestep.kernels.cuda.sort import scratch_words, sort_keys

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


@pytest.mark.parametrize("n", SORTED)
def test_sorts_of_frameworks(maker: Maker, n: int) -> None:
    from fusestep.kernels.cuda.backend import copy_in, copy_out

    array = adopted(maker.put(np.zeros(1, np.float32)))
    sorter = array.framework.sorter(array.device)
    if sorter is None:
        pytest.skip("it has none: this package's is used")
    keys = np.random.default_rng(n).integers(0, 1 << 62, n)
    with launch_on([array], None) as launch:
        copy_in(sorter.room(n), keys, launch.stream)
        found: np.ndarray = np.empty(n, np.int64)
        copy_out(found, sorter.sort(), launch.stream)
    np.testing.assert_array_equal(found, np.sort(keys))


# ----------------------------------------------------------------------------------------- Errors


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


# ---------------------------------------------------------------------------------------- Streams

N_LATE = 4_096


def expected_late(make: Maker) -> list[np.ndarray]:
    on = copies(make, moments((N_LATE,)))
    ops.Adam()(*on, *ADAM_HP, make.put(np.full(N_LATE, 0.5, np.float32)))
    return [make.get(a) for a in on]


def assert_in_order(make: Maker, *, apart: bool) -> None:
    """A step on a gradient of a new stream, written there later than the call is made.

    The variables belong to that stream too, or ``apart``, to the default stream.
    """
    expected, stream = expected_late(make), make.stream()

    def given() -> tuple[list[Any], Any]:
        on, g = copies(make, moments((N_LATE,))), make.put(np.zeros(N_LATE, np.float32))
        if not apart:
            on = [make.bound(a, stream) for a in on]
        return on, make.bound(g, stream)

    # What allocates or compiles does so before the stream is busy.
    (before, g_before), (on, g) = given(), given()
    with make.using(stream):
        gpu_arrays.fill_later(stream.handle, g_before, 0.0)
        ops.Adam()(*before, *ADAM_HP, g_before)
        gpu_arrays.wait()
        begin = gpu_arrays.keep_busy(stream.handle, BUSY)
        gpu_arrays.fill_later(stream.handle, g, 0.5)
        ops.Adam()(*on, *ADAM_HP, g)
        assert not begin.query()  # otherwise the order has not been tested
        gpu_arrays.fill_later(stream.handle, g, 9.0)
    for a, b in zip(on, expected, strict=True):
        assert_same_bits(make.get(a), b)


def test_a_step_comes_after_what_is_on_its_stream(maker: Maker) -> None:
    """On a stream of the framework: first the gradient is written, later it is overwritten."""
    assert_in_order(maker, apart=False)


def test_a_step_waits_for_arrays_of_another_stream(numba_maker: Maker) -> None:
    """The parameter decides where it runs; that stream and the gradient's wait for each other."""
    assert_in_order(numba_maker, apart=True)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_locked_steps_on_two_streams_have_some_order(maker: Maker, rows: bool) -> None:
    """The first one is late; the result is that of one after the other."""
    shape = (512, 8)
    start = moments(shape)
    gs = [np.random.default_rng(k).standard_normal(shape).astype(np.float32) for k in (1, 2)]
    operator = (ops.FusedSparseLazyAdam if rows else ops.Adam)(use_locking=True)
    extra = [np.arange(512)[::-1].copy()] if rows else []

    def serial(order: Sequence[int]) -> list[np.ndarray]:
        on = copies(maker, start)
        for k in order:
            operator(*on, *ADAM_HP, maker.put(gs[k]), *copies(maker, extra))
        return [maker.get(a) for a in on]

    orders = [serial((0, 1)), serial((1, 0))]
    streams = maker.stream(), maker.stream()
    for attempt in range(4):  # what allocates does so in the first one
        on = copies(maker, start)
        given = [copies(maker, [g, *extra]) for g in gs]
        gpu_arrays.wait()
        for k, stream in enumerate(streams):
            with maker.using(stream):
                if k == 0:
                    begin = gpu_arrays.keep_busy(stream.handle, BUSY // 4)
                bound = [[maker.bound(a, stream) for a in arrays] for arrays in (on, given[k])]
                operator(*bound[0], *ADAM_HP, *bound[1])
        assert attempt == 0 or not begin.query()
        found = [maker.get(a) for a in on]
        fusestep.synchronize()
        assert [a.tobytes() for a in found] in [[a.tobytes() for a in o] for o in orders]


def test_threads_with_streams_of_their_own_lose_no_update(maker: Maker) -> None:
    """Two threads on one optimizer: sums of powers of two are exact in any order."""
    p = nn.Parameter(maker.put(np.zeros((64, 8), np.float32)), "w")
    opt = nn.SGD([p], 1.0, use_locking=True)
    opt([maker.put(np.zeros((64, 8), np.float32))])
    gpu_arrays.wait()
    n, failures = 100, []

    def run(value: float) -> None:
        try:
            stream = maker.stream()
            g = maker.put(np.full((64, 8), value, np.float32))
            gpu_arrays.wait()
            with maker.using(stream):
                for _ in range(n):
                    opt([maker.bound(g, stream)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 0.0625)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert opt.global_step[0] == 2 * n + 1
    assert_same_bits(maker.get(p.data), np.full((64, 8), -1.0625 * n, np.float32))


def dense_steps(make: Maker, form: str, count: int) -> Callable[[], Any]:
    """A step of many small tensors."""
    start, (gs, *_) = problem({f"p{i}": (16,) for i in range(count)}, F32)
    opt = BY_NAME[form].make(parameters(make, start))
    given = copies(make, gs)
    return lambda: opt(given)


def row_steps(make: Maker, how: str, count: int) -> Callable[[], Any]:
    """A step on a table."""
    start, _ = problem({"table": (1_000, 16)}, F32)
    opt = nn.Adam(parameters(make, start), sparse_update=how)
    rng = np.random.default_rng(8)
    values = rng.standard_normal((count, 16)).astype(np.float32)
    rows = row_tensor(make, nn.RowTensor(rng.integers(0, 1_000, count), values, (1_000, 16)))
    return lambda: opt([rows])


STEPS: dict[str, Callable[[Maker], Callable[[], Any]]] = {
    **{f"{n} tensors": partial(dense_steps, form="Adam", count=n) for n in MANY},
    "LAMB": partial(dense_steps, form="Lamb", count=3),
    "lazy rows": partial(row_steps, how="lazy", count=3_000),
    "all rows": partial(row_steps, how="dense_equivalent", count=3_000),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_call_does_not_wait_for_the_device(maker: Maker, name: str) -> None:
    """It returns while work that was enqueued before it is still running."""
    step = STEPS[name](maker)
    for _ in range(3):
        step()
    gpu_arrays.wait()
    begin = gpu_arrays.keep_busy(0, BUSY)
    assert not begin.query()
    before = time.perf_counter()
    step()
    took, waited = time.perf_counter() - before, begin.query()
    gpu_arrays.wait()
    fusestep.synchronize()
    assert not waited, f"the call took {took * 1e3:.0f} ms"


# --------------------------------------------------------------------------------- Recorded runs

RECORDED_OPERATORS = [
    name
    for name in test_recorded_ops.COMPARED
    if "store_return" not in test_recorded_ops.CASES[name].meta  # operators without kernels
]


@pytest.mark.parametrize("name", RECORDED_OPERATORS)
def test_recorded_operators(maker: Maker, name: str) -> None:
    """As test_recorded_ops.py, on the device."""
    case = test_recorded_ops.CASES[name]
    call = test_recorded_ops.CALLS[case.api]
    dropping = {"out_of_range": "drop"} if name in test_recorded_ops.OUT_OF_RANGE else {}
    op = test_recorded_ops.build(case, **dropping)
    arrays = {entry: maker.put(array) for entry, array in case.initial.items()}
    after = dict(case.initial)
    reached = dict.fromkeys(arrays, 0.0)
    for t, step in enumerate(case.steps, 1):
        before = after
        known = {**case.hyper, **on_device(maker, step.inputs), **arrays}
        op(*(known[argument] for argument in call.arguments))
        fusestep.synchronize()
        after = {entry: maker.get(array) for entry, array in arrays.items()}
        new = recorded_quirks.terms(case, before, after)
        reached = {e: np.maximum(reached[e], RECORDED_ROUNDINGS * new[e]) for e in new}
        assert after.keys() == step.outputs.keys()
        for entry, expected in step.outputs.items():
            label, most = f"{entry} after step {t}", reached.get(entry, 0.0)
            assert_close_recorded(after[entry], expected, case.dtype, label, most)


def recorded_arrays(opt: Any) -> dict[str, np.ndarray]:
    """As `recorded_nn.arrays`, on the host."""
    found = {f"p{i}": p.asnumpy().copy() for i, p in enumerate(opt.parameters)}
    return found | {f"s:{name}": array for name, array in opt.state_dict().items()}


@pytest.mark.parametrize("name", test_recorded_nn.COMPARED)
def test_recorded_optimizers(maker: Maker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_recorded_nn.py, on the device."""
    case = test_recorded_nn.CASES[name]
    case = replace(case, meta={**case.meta, "target": None})  # it is where its parameters are
    own = nn.Parameter
    with monkeypatch.context() as patch:
        patch.setattr(nn, "Parameter", lambda data, name: own(maker.put(data), name=name))
        opt = recorded_nn.build(case)
    try:
        run_recorded(maker, case, opt)
    except RuntimeError as error:
        refusal_is_a_skip(error)


def recorded_sizes(
    case: Case, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What each array was before a step; FTRL's linear coefficient is a sum of more than that."""
    sizes: dict[str, np.ndarray] = {e: np.abs(a.astype(np.float64)) for e, a in before.items()}
    if case.api == "nn.FTRL":
        rate, power = case.hyper.get("learning_rate", 1e-3), case.hyper.get("lr_power", -0.5)
        for i, (name, _) in enumerate(case.meta["params"]):
            root = after[f"s:moments.{name}"].astype(np.float64) ** -power
            sizes[f"s:linear.{name}"] += sizes[f"p{i}"] * root / rate
    return sizes


def run_recorded(make: Maker, case: Case, opt: Any) -> None:
    """Every parameter after each step, and the states at the end."""
    found = recorded_arrays(opt)
    reached: dict[str, Any] = dict.fromkeys(found, 0.0)
    for t, step in enumerate(case.steps, 1):
        before = found
        given = [
            row_tensor(make, g) if isinstance(g, nn.RowTensor) else make.put(g)
            for g in recorded_nn.gradients(case, step)
        ]
        assert opt(given) == (True,) * len(opt.parameters)
        found = recorded_arrays(opt)
        size = recorded_sizes(case, before, found)
        roundings = max(RECORDED_ROUNDINGS, test_recorded_nn.ROUNDINGS.get(case.name, 0.0))
        reached = {e: np.maximum(reached[e], roundings * size[e]) for e in found}
        for entry in found.keys() & step.outputs.keys():
            expected, label = step.outputs[entry], f"{entry} after step {t}"
            assert_close_recorded(found[entry], expected, expected.dtype, label, reached[entry])


# ----------------------------------------------------------------------------------- Large arrays

needs_room = pytest.mark.skipif(
    os.environ.get("FUSESTEP_GPU_LARGE_TESTS") != "1",
    reason="needs FUSESTEP_GPU_LARGE_TESTS=1 and tens of gigabytes on the device",
)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Numba's, filled on the device."""
    from numba import cuda

    from fusestep.kernels.cuda.fill import fill

    free = cuda.current_context().get_memory_info().free
    needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if needed > 0.9 * free:
        pytest.skip(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    array = cuda.device_array(shape, dtype)
    fill(adopted(array).address, array.size, 0.0, np.dtype(dtype), cuda.default_stream())
    return array


@needs_room
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_more_elements_than_an_int32_counts(numba_maker: Maker, dtype: Any) -> None:
    from fusestep.kernels.cuda.fill import fill

    n = 2**31 + 4_099
    w, g = zeros((n,), dtype), zeros((n,), dtype)
    fill(adopted(g).address, n, 1.0, dtype, gpu_arrays.numba_stream(0))
    nn.SGD([nn.Parameter(w, "w")], 0.5)([g])
    for part in (w[:5_000], w[2**30 : 2**30 + 5_000], w[2**31 - 5_000 :]):
        found = numba_maker.get(part)
        assert_same_bits(found, np.full(found.shape, -0.5, dtype))


@needs_room
@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_a_table_of_more_elements_than_an_int32_counts(numba_maker: Maker, how: str) -> None:
    n, d = 2**24 + 9, 130
    w, indices = zeros((n, d), BF16), np.array([n - 1, 5, n - 1, 2**24 - 1])
    values = np.ones((4, d), BF16)
    opt = nn.SGD([nn.Parameter(w, "w")], 0.5, sparse_update=how)
    opt([row_tensor(numba_maker, nn.RowTensor(indices, values, (n, d)))])
    fusestep.synchronize()
    expected = np.zeros((10, d), BF16)
    expected[0], expected[9] = -0.5, -1.0
    assert_same_bits(numba_maker.get(w[2**24 - 1 :]), expected)
    assert_same_bits(numba_maker.get(w[5:6]), np.full((1, d), -0.5, BF16))


def test_the_rules_of_adam_are_tested() -> None:
    assert adam_rules.ADAM in {rule for rule, _, _ in test_rules.RULES.values()}
