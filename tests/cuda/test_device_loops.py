"""Loops: rules, sizes, storage types, alignment; finite values; the largest arrays."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices import (  # isort: skip
    BETAS, GPU, KIND, MARKS, SIMULATOR, adopted, assert_close, assert_same, computed, numba_stream,
    on_device, on_host, shifted, sized)  # fmt: skip
from fusestep import nn, ops, synchronize
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.element import kernel
from fusestep.kernels.keeping import KAHAN, MASTER
from fusestep.kernels.rule import Prologue, Rule
from fusestep.kernels.rules import adam, mxnet
from fusestep.kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from fusestep.kernels.storage import BF16, F16, F32, F64, STORAGES, Storage
from fusestep.ops.runtime.arrays import address_of
from fusestep.ops.runtime.launch import launch_on
from fusestep.ops.runtime.measured_step import measured_step
from fusestep.ops.runtime.step import DenseUpdate, Variables
from helpers import STORAGE_DTYPES, in_turn
from roundings import Rounded, assert_rounded
from rule_cases import CASES, real_of
from test_rules import RULES as OF_ADAM
from test_rules import samples as samples_of_adam
from test_rules import scalars

pytestmark = MARKS
ELEMENTS = sized(37, 10_007)  # several blocks, and an end that is no whole tile
# Of the bound. CUDA documents an error of 4 units for its float32 ``pow``, of which FTRL with
# another power takes two; the C library's is below 1.
POW_ERROR = 8.0
# What the rules of the package take beside sums.
KNOWN = {
    "epsilon2": 1e-3, "clip_threshold": 1.0, "scale_parameter": True, "weight_decay": 0.1,
    "trust_coefficient": 0.1, "epsilon": 1e-3,
}  # fmt: skip

Tensors = list[list[np.ndarray]]


def update_of(rule: Rule, tensors, hp: np.ndarray, hp_of, prologue: Prologue) -> DenseUpdate:
    """The step of parameters with states and a gradient each, on the host or on the device."""
    variables = Variables.of([tuple(arrays[:-1]) for arrays in tensors])
    places = np.array([address_of(arrays[-1]) for arrays in tensors])
    g = STORAGES[tensors[0][-1].dtype]
    return DenseUpdate(rule, prologue, variables, places, g, hp, np.asarray(hp_of, np.int64))


def step_on_device(
    rule: Rule, tensors: Tensors, hp: np.ndarray, hp_of: Any = (0,), prologue: Prologue = (),
    shift: int = 0,
) -> Tensors:  # fmt: skip
    """One dense step; what parameters, states and gradients hold after it."""
    there = [[shifted(a, shift) for a in arrays] for arrays in tensors]
    bound = [[adopted(a) for a in arrays] for arrays in there]
    update = update_of(rule, bound, hp, hp_of, prologue)
    with launch_on(bound[0]) as launch:
        update._replace(constants=tuple(KNOWN.items())).enqueue(launch)
    return [[on_host(a) for a in arrays] for arrays in there]


def compare(
    rule: Rule, sizes: Sequence[int], prologue: Prologue = (), w: Storage = F32, g: Storage = F32,
    s: tuple[Storage, ...] | None = None, shift: int = 0,
) -> None:  # fmt: skip
    """Device and host do the same to every element."""
    compiled = kernel(rule, prologue, w, g, (F32,) * len(rule.states) if s is None else s)
    rng = np.random.default_rng(3)
    storages = (compiled.w, *compiled.s, compiled.g)
    tensors = [[rng.uniform(0.1, 1.0, n).astype(x.dtype) for x in storages] for n in sizes]
    n_rows = len(sizes) if rule.factor else min(3, len(sizes))
    hp = rng.uniform(0.1, 0.9, (n_rows, compiled.n_scalars)).astype(compiled.real.carrier)
    hp_of = np.arange(len(sizes)) % n_rows
    found = step_on_device(rule, tensors, hp, hp_of, prologue, shift)
    update, known = update_of(rule, tensors, hp, hp_of, prologue), [KNOWN] * len(tensors)
    commit([measured_step(update, known) if rule.factor else update.prepared()])
    narrow = max((x.dtype for x in storages), key=lambda d: -d.itemsize)
    assert_close(found, tensors, rule.update.__name__, narrow)


SIZES = sized((37, 0, 16, 1, 5, 64, 3), (37, 0, 16, 1, 5, 64, 3, 20_011))
# The variance of some made-up states is negative, of which Python takes no root.
OF_A_VARIANCE = "rmsprop_centered_momentum"
RULES = {
    name: rule
    for name, rule in all_rules().items()
    if rule.scope == "tensor" and not rule.lines and not name.startswith("torch_rmsprop_centered")
}
REFERENCES = [name for name in (*CASES, *OF_ADAM) if KIND != SIMULATOR or name != OF_A_VARIANCE]


def each_build(names: Any) -> Any:
    """Rules in all storage types; where nothing is computed or slowly, each in one type in turn."""
    every, some = product(names, STORAGE_DTYPES), in_turn(names, beside_float32=False)
    return pytest.mark.parametrize(("name", "dtype"), sized(some, [*every]), ids=str)


@each_build(RULES)
def test_rules(name: str, dtype: Any) -> None:
    """Every rule of elements and tensors, beside the CPU."""
    rule, storage = RULES[name], STORAGES[dtype]
    states = (F64 if storage is F64 else F32,) * len(rule.states)
    compare(rule, (19, 2), w=storage, g=storage, s=states)


@each_build(REFERENCES)
def test_rules_meet_their_references(name: str, dtype: Any) -> None:
    """Three steps of numbers over four decades, each from where the one before has arrived."""
    real, case = real_of(dtype), CASES.get(name)
    if case:
        rule, given, samples = case.rule, case.hp(real), case.samples
        formula = partial(case.step, **case.known(real))
    else:
        rule, _, step_of = OF_ADAM[name]
        given, hp = scalars(name, real)
        samples = partial(samples_of_adam, n_states=len(rule.states))
        formula = lambda *arrays: step_of(*arrays, hp)  # noqa: E731
    w, _, *states = (a.astype(dtype) for a in samples(ELEMENTS, seed=2))
    for step in range(3):
        g = samples(ELEMENTS, seed=3 + step)[1].astype(dtype)
        exact = formula(*map(Rounded, (w, g, *states)))
        (found,) = step_on_device(rule, [[w, *states, g]], np.array([given], real))
        computed()
        w, *states = found[:-1]
        for k, (array, value) in enumerate(zip((w, *states), exact, strict=True)):
            most = POW_ERROR if name.startswith("ftrl_power") else 2.0
            assert_rounded(array, value, real, most, f"array {k} after step {step + 1}: ")


@pytest.mark.parametrize(("rule", "options"), [
    (adam.ADAM, {}), (adam.ADAM, {"prologue": (SCALE, CLIP, COUPLED_DECAY)}),
    (adam.ADAM, {"w": F64, "g": F64, "s": (F64, F64)}),
    (adam.ADAM, {"w": F64, "g": F32, "s": (F64, F32)}),
    (adam.ADAM, {"w": F16, "g": F16, "s": (F32, F32)}),
    (adam.ADAM, {"w": BF16, "g": BF16, "s": (BF16, BF16)}),
    (mxnet.MXNET_ADAM.kept(MASTER), {"w": F16, "g": F16, "s": (F32, F32, F32)}),
    (adam.ADAM.kept(KAHAN), {"w": BF16, "g": BF16, "s": (F32, F32, BF16)}),
    (adam.ADAM, {"shift": 1}), (adam.ADAM, {"w": BF16, "g": F32, "s": (F32, F32), "shift": 3}),
])  # fmt: skip
def test_sizes_and_types(rule: Rule, options: dict[str, Any]) -> None:
    """Tails, several blocks, scalars of each tensor; tiles of 2 to 8 elements, aligned or not."""
    for sizes in (SIZES, (0, 0)):
        compare(rule, sizes, **options)


# Wide loads and stores: the simulator raises at an address that a device does not take.

EXAMPLES = settings(
    max_examples=sized(8, 60), deadline=None, derandomize=True, database=None)  # fmt: skip
DTYPE = st.sampled_from(STORAGE_DTYPES)
SHIFT = st.integers(0, 9)


def test_where_arrays_begin_does_not_matter() -> None:
    """Arrays in any storage types give the same bits as aligned ones."""

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
            found.append([var, m, v])
        assert_same(*found)

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
            found.append([w, out, nn.RowTensor(ids, g, table.shape).to_dense()])
        assert_same(*found)

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


# More elements than an int32 counts

needs_room = pytest.mark.skipif(
    KIND != GPU or os.environ.get("FUSESTEP_GPU_LARGE_TESTS") != "1",
    reason="needs FUSESTEP_GPU_LARGE_TESTS=1 and tens of gigabytes on a GPU",
)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Numba's, filled on the device."""
    from numba import cuda
    from fusestep.kernels.cuda.device.arrays import fill

    free = cuda.current_context().get_memory_info().free
    needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if needed > 0.9 * free:
        pytest.skip(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    array = cuda.device_array(shape, dtype)
    fill(adopted(array).address, array.size, 0.0, np.dtype(dtype), cuda.default_stream())
    return array


@needs_room
@pytest.mark.parametrize("dtype", [F32.dtype, BF16.dtype], ids=str)
def test_more_elements_than_an_int32_counts(dtype: Any) -> None:
    from fusestep.kernels.cuda.device.arrays import fill

    n = 2**31 + 4_099
    w, g = zeros((n,), dtype), zeros((n,), dtype)
    fill(adopted(g).address, n, 1.0, dtype, numba_stream(0))
    nn.SGD([nn.Parameter(w, "w")], 0.5)([g])
    for part in (w[:5_000], w[2**30 : 2**30 + 5_000], w[2**31 - 5_000 :]):
        assert_same(part, np.full(part.shape, -0.5, dtype))


@needs_room
@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_a_table_of_more_elements_than_an_int32_counts(how: str) -> None:
    n, d = 2**24 + 9, 130
    w, indices = zeros((n, d), BF16.dtype), np.array([n - 1, 5, n - 1, 2**24 - 1])
    values = np.ones((4, d), BF16.dtype)
    opt = nn.SGD([nn.Parameter(w, "w")], 0.5, sparse_update=how)
    opt([on_device(nn.RowTensor(indices, values, (n, d)))])
    synchronize()
    expected = np.zeros((10, d), BF16.dtype)
    expected[0], expected[9] = -0.5, -1.0
    assert_same(w[2**24 - 1 :], expected)
    assert_same(w[5:6], np.full((1, d), -0.5, BF16.dtype))
