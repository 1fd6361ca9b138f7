"""The loops of dense steps: rules, sizes, storage types, alignment; and finite values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusestep import nn, ops
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.cuda.dense import norm
from fusestep.kernels.element import kernel
from fusestep.kernels.keeping import MASTER
from fusestep.kernels.rule import Prologue, Rule
from fusestep.kernels.rules import adam, mxnet
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from fusestep.kernels.storage import BF16, F16, F32, F64, STORAGES, Storage
from fusestep.ops.runtime.launch import launch_on
from fusestep.ops.runtime.measured_step import measured_step
from fusestep.ops.runtime.step import DenseUpdate, Variables

import reference
import test_rules
from devices import (
    BETAS,
    COMPUTES,
    KIND,
    MARKS,
    SIMULATOR,
    adopted,
    assert_close,
    assert_same,
    computed,
    numba_stream,
    on_device,
    on_host,
    shifted,
    sized,
)
from helpers import STORAGE_DTYPES, assert_same_bits, assert_within_ulps, in_turn
from rule_cases import CASES, OPTIMIZER, condition, hp_row, real_of, run_dense

pytestmark = MARKS
ELEMENTS = sized(37, 10_007)  # several blocks, and an end that is no whole tile
# Units in the last place of the largest term that a result is a sum of, as in the tests of the
# CPU; twice as many for float64, where the reference itself is off by as much. Of the CPU the
# device differs by products and sums that become one FMA.
CPU_ULPS = 4.0
# CUDA documents an error of 4 units for its float32 ``pow``, of which FTRL with another power
# takes two; the C library's is below 1.
POW_ULPS = 16.0
# What the rules of the package take beside sums.
KNOWN = {
    "epsilon2": 1e-3, "clip_threshold": 1.0, "scale_parameter": True, "weight_decay": 0.1,
    "trust_coefficient": 0.1, "epsilon": 1e-3,
}  # fmt: skip

Tensors = list[list[np.ndarray]]


def step_on_device(
    rule: Rule,
    tensors: Tensors,
    hp: np.ndarray,
    hp_of: Any = (0,),
    prologue: Prologue = (),
    shift: int = 0,
) -> Tensors:
    """One dense step of parameters with states and a gradient each; what they hold after it."""
    there = [[shifted(a, shift) if a.ndim else on_device(a) for a in arrays] for arrays in tensors]
    bound = [[adopted(a) for a in arrays] for arrays in there]
    places = np.array([arrays[-1].address for arrays in bound])
    variables = Variables.of([tuple(arrays[:-1]) for arrays in bound])
    g = STORAGES[tensors[0][-1].dtype]
    update = DenseUpdate(rule, prologue, variables, places, g, hp, np.asarray(hp_of, np.int64))
    with launch_on(bound[0]) as launch:
        update._replace(constants=tuple(KNOWN.items())).enqueue(launch)
    return [[on_host(a) for a in arrays] for arrays in there]


def step_on_host(
    rule: Rule, tensors: Tensors, hp: np.ndarray, hp_of: Any = (0,), prologue: Prologue = ()
) -> None:
    """The same step by the loop of the CPU, in place."""
    places = np.array([arrays[-1].ctypes.data for arrays in tensors])
    variables = Variables.of([tuple(arrays[:-1]) for arrays in tensors])
    g = STORAGES[tensors[0][-1].dtype]
    update = DenseUpdate(rule, prologue, variables, places, g, hp, np.asarray(hp_of, np.int64))
    known = [KNOWN] * len(tensors)
    commit([measured_step(update, known) if rule.factor else update.prepared()])


def compare(
    rule: Rule,
    sizes: Sequence[int],
    prologue: Prologue = (),
    w: Storage = F32,
    g: Storage = F32,
    s: tuple[Storage, ...] | None = None,
    shift: int = 0,
) -> None:
    """Device and host do the same to every element."""
    compiled = kernel(rule, prologue, w, g, (F32,) * len(rule.states) if s is None else s)
    rng = np.random.default_rng(3)
    storages = (compiled.w, *compiled.s, compiled.g)
    tensors = [[rng.uniform(0.1, 1.0, n).astype(x.dtype) for x in storages] for n in sizes]
    n_rows = len(sizes) if rule.factor else min(3, len(sizes))
    hp = rng.uniform(0.1, 0.9, (n_rows, compiled.n_scalars)).astype(compiled.real.carrier)
    hp_of = np.arange(len(sizes)) % n_rows
    found = step_on_device(rule, tensors, hp, hp_of, prologue, shift)
    step_on_host(rule, tensors, hp, hp_of, prologue)
    narrow = max((x.dtype for x in storages), key=lambda d: -d.itemsize)
    for ours, theirs in zip(found, tensors, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, rule.update.__name__, narrow)


SIZES = sized((37, 0, 16, 1, 5, 64, 3), (37, 0, 16, 1, 5, 64, 3, 20_011))


OTHERS = {
    name: rule
    for name, rule in all_rules().items()
    # The variance of made-up states may be negative, of which Python takes no root.
    if rule.scope == "tensor" and not rule.lines and "rmsprop_centered" not in name
    if rule
    not in {case.rule for case in CASES.values()} | {r for r, *_ in test_rules.RULES.values()}
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rules(name: str) -> None:
    """Those that have no reference below, of elements and tensors."""
    compare(OTHERS[name], (19, 2))


def test_sizes_and_prologues() -> None:
    """Tails, empty tensors, several blocks, scalars of each tensor."""
    compare(adam.ADAM, SIZES)
    compare(adam.ADAM, SIZES, (SCALE, CLIP, COUPLED_DECAY))
    compare(adam.ADAM, (0, 0))


def test_mixed_storage_types() -> None:
    """Tiles of 2 to 8 elements, loads of 16 bytes or two of them; aligned or not."""
    compare(adam.ADAM, SIZES, w=F64, g=F64, s=(F64, F64))
    compare(adam.ADAM, SIZES, w=F64, g=F32, s=(F64, F32))
    compare(adam.ADAM, SIZES, w=F16, g=F16, s=(F32, F32))
    compare(adam.ADAM, SIZES, w=BF16, g=BF16, s=(BF16, BF16))
    compare(mxnet.MXNET_ADAM.kept(MASTER), SIZES, w=F16, g=F16, s=(F32, F32, F32))
    compare(adam.ADAM, SIZES, shift=1)
    compare(adam.ADAM, SIZES, w=BF16, g=F32, s=(F32, F32), shift=3)


def assert_step(
    found: Sequence[np.ndarray],
    on_cpu: Sequence[np.ndarray],
    exact: Sequence[Any],
    scales: Sequence[Any],
    ulps: float,
    label: str,
) -> None:
    """Near the reference, and near the CPU."""
    __tracebackhide__ = True
    computed()
    for k, (a, cpu, value, scale) in enumerate(zip(found, on_cpu, exact, scales, strict=True)):
        own = 2.0 * ulps if a.dtype == np.float64 else ulps
        assert_within_ulps(a, value, scale, own, f"array {k} {label}, reference")
        assert_within_ulps(a, cpu, scale, own, f"array {k} {label}, CPU")


def each_build(names: Any) -> Any:
    """Rules in all storage types; on the simulator, in turn, in some."""
    every = [(name, dtype) for name in names for dtype in STORAGE_DTYPES]
    return pytest.mark.parametrize(
        ("name", "dtype"), sized(in_turn(names, beside_float32=False), every), ids=str
    )


@each_build(CASES)
def test_rule_cases(name: str, dtype: Any) -> None:
    """Three steps, each from where the CPU has arrived; with and without what comes before."""
    if KIND == SIMULATOR and name == "rmsprop_centered_momentum":
        compare(CASES[name].rule, (19, 2))  # of a variance below 0 Python takes no root
        return
    case, real = CASES[name], real_of(dtype)
    for prologue in ((), OPTIMIZER) if dtype == np.float32 else ((),):
        w, _, *states = case.samples(ELEMENTS, seed=2)
        arrays = [a.astype(dtype) for a in (w, *states)]
        known, hp = case.known(real), hp_row(case.rule, prologue, case.hp(real), real)
        for step in range(3):
            g = case.samples(ELEMENTS, seed=3 + step)[1].astype(dtype)
            before = [reference.wide(a) for a in arrays]
            conditioned, size = condition(g, arrays[0], prologue, real)
            exact = case.step(before[0], conditioned, *before[1:], **known)
            scales = case.terms(before[0], size, before[1:], known, exact)
            (found,) = step_on_device(case.rule, [[*arrays, g]], hp, prologue=prologue)
            run_dense(case.rule, arrays, g, case.hp(real), prologue)
            ulps = POW_ULPS if name.startswith("ftrl_power") and real is np.float32 else CPU_ULPS
            assert_step(found[:-1], arrays, exact, scales, ulps, f"after step {step + 1}")


@each_build(test_rules.RULES)
def test_rules_of_adam(name: str, dtype: Any) -> None:
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
        (found,) = step_on_device(rule, [[*arrays, g]], np.array([given], real))
        test_rules.run_compiled(name, arrays, g, ())
        assert_step(found[:-1], arrays, exact, scales, CPU_ULPS, f"after step {step + 1}")


SHAPES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (7,), (), (3, 0), (3, 5), (2, 3, 4), (2, 3, 4, 5), *sized((), ((1_003,), (20_011,)))
)  # fmt: skip


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_many_tensors_of_all_shapes_in_one_step(dtype: Any) -> None:
    """0-d to 4-d, empty ones among them; each near the reference and the CPU."""
    rng, real = np.random.default_rng(0), real_of(dtype)
    start, gs = ([np.array(rng.standard_normal(s)).astype(dtype) for s in SHAPES] for _ in "wg")
    on_cpu = [nn.Parameter(w.copy()) for w in start]
    nn.Adam(on_cpu, 0.01, eps=1e-3)(gs)
    parameters = [nn.Parameter(w) for w in on_device(start)]
    nn.Adam(parameters, 0.01, eps=1e-3)(on_device(gs))
    hp = reference.adam_scalars(0.01, 0.9, 0.999, 1e-3, 0.9, 0.999, real=real)
    for w, g, cpu, p in zip(start, gs, on_cpu, parameters, strict=True):
        found = p.asnumpy()
        assert found.shape == w.shape
        assert_same_bits(on_host(p.data), found)
        exact, *_ = reference.adam(w, g, np.zeros(w.shape), np.zeros(w.shape), hp)
        scale = np.abs(reference.wide(w)) + 0.01
        if COMPUTES:
            assert_step([found], [cpu.data], [exact], [scale], CPU_ULPS, f"of shape {w.shape}")


# Wide loads and stores: the simulator raises at an address that a device does not take.

EXAMPLES = settings(
    max_examples=sized(8, 60), deadline=None, derandomize=True, database=None,
)  # fmt: skip
DTYPE = st.sampled_from(STORAGE_DTYPES)
SHIFT = st.integers(0, 9)


def test_where_arrays_begin_does_not_matter() -> None:
    """Of any of the arrays, in any storage types: the same bits as from aligned ones."""

    @EXAMPLES
    @given(st.tuples(DTYPE, DTYPE), st.integers(1, 40), st.tuples(SHIFT, SHIFT, SHIFT, SHIFT))
    def steps(dtypes: Any, n: int, shifts: tuple[int, ...]) -> None:
        rng = np.random.default_rng(n)
        w, g = max(dtypes, key=lambda d: d.itemsize), min(dtypes, key=lambda d: d.itemsize)
        arrays = [rng.uniform(0.1, 1.0, n).astype(d) for d in (w, w, w, g)]
        found = []
        for chosen in ((0, 0, 0, 0), shifts):
            var, m, v, of_g = (shifted(a, s) for a, s in zip(arrays, chosen, strict=True))
            ops.Adam()(var, m, v, *BETAS, of_g)
            found.append([on_host(a) for a in (var, m, v)])
        for a, b in zip(*found, strict=True):
            assert_same(a, b)

    steps()


def test_where_tables_begin_does_not_matter() -> None:
    """Widths, storage types and places of tables, gradients, indices and pooled outputs."""

    @EXAMPLES
    @given(DTYPE, st.integers(1, 18), st.tuples(SHIFT, SHIFT), st.sampled_from(("sum", "max")))
    def steps(dtype: Any, width: int, shifts: tuple[int, int], pooling: str) -> None:
        rng = np.random.default_rng(width)
        table, values = (rng.uniform(0.1, 1.0, (n, width)).astype(dtype) for n in (5, 6))
        index, offsets = np.array([1, 4, 1, 0, 1, 2]), np.array([0, 1, 4, 6])
        found = []
        for at, of_values in ((0, 0), shifts):
            (w, g), ids = (shifted(table, at), shifted(values, of_values)), shifted(index, at)
            pooled = ops.EmbeddingBags(pooling)
            real = np.float64 if dtype == np.float64 else np.float32
            out = shifted(np.zeros((3, width), real), of_values)
            pooled([w], [ids], [on_device(offsets)], out=out)
            pairs = pooled.gradients([w], [ids], [on_device(offsets)], shifted(values[:3], at))
            opt = nn.LazyAdam([w], 0.1)
            opt((nn.RowTensor(ids, g, table.shape),))
            opt(tuple(pairs))
            dense = nn.RowTensor(ids, g, table.shape).to_dense()
            found.append([on_host(a) for a in (w, out, dense)])
        for a, b in zip(*found, strict=True):
            assert_same(a, b)

    steps()


@pytest.mark.skipif(KIND != SIMULATOR, reason="a device would end the work of the whole process")
def test_the_simulator_refuses_what_is_not_aligned() -> None:
    from fusestep.kernels.cuda.device import backend

    room = np.zeros(64, np.float32)
    aligned = room.ctypes.data + -room.ctypes.data % 16
    for count, itemsize in ((4, 4), (2, 4), (8, 2), (2, 8), (8, 8), (1, 4)):
        tile = np.zeros(count, {2: np.uint16, 4: np.float32, 8: np.float64}[itemsize])
        for move in (backend.tile_loader, backend.tile_storer):
            run = move(count, itemsize)
            run(tile, aligned, 0)
            run(tile, aligned, 16 // itemsize)
            for off in (itemsize, 8):
                if off % min(16, count * itemsize):
                    with pytest.raises(ValueError, match="is not aligned"):
                        run(tile, aligned + off, 0)
    for call in (backend.load_int64, lambda at: backend.store_float64(at, 1.0)):
        with pytest.raises(ValueError, match="is not aligned"):
            call(aligned + 4)


def test_finite_values() -> None:
    """NaN and infinities anywhere, in every storage type, aligned or not."""
    computed()
    for storage in (F32, F64, F16, BF16):
        for shift in (0, 1):
            arrays = [np.zeros(n, storage.dtype) for n in (70, 3, 0)]
            arrays[0][:] = np.finfo(np.float16).max  # finite in all of them
            sizes = np.array([a.size for a in arrays])

            def is_finite(arrays: Any, sizes: Any, shift: int, storage: Storage) -> bool:
                there = [shifted(a, shift) for a in arrays]
                places = np.array([adopted(a).address for a in there])
                return norm.all_finite(storage, places, sizes, stream=numba_stream(0))

            assert is_finite(arrays, sizes, shift, storage)
            for array, place, value in ((0, 69, np.nan), (0, 3, np.inf), (1, 2, -np.inf)):
                before = arrays[array][place]
                arrays[array][place] = value
                assert not is_finite(arrays, sizes, shift, storage)
                arrays[array][place] = before
    assert is_finite(arrays[2:], sizes[2:], 0, F32)


def test_the_rules_of_adam_are_tested() -> None:
    assert adam.ADAM in {rule for rule, _, _ in test_rules.RULES.values()}
