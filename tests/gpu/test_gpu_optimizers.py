"""Optimizers on a CUDA device: steps, states, copies, groups.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn
from fusestep.kernels.storage import STORAGES
from fusestep.kernels.tables import HOT

import gpu_arrays
from device_rules import OF_ROWS, OF_TENSORS, Own
from gpu_arrays import Maker, adopted, copies
from gpu_checks import (
    F16,
    F32,
    F64,
    TENSORS,
    held,
    near_run,
    parameters,
    problem,
    refusal_is_a_skip,
    row_tensor,
)
from helpers import BF16, EPSILON, STORAGE_DTYPES, assert_same_bits
from optimizers import BY_NAME, FORMS, ON_DEVICES, arguments_of, decayed_and_scaled, is_row_wise
from optimizers import make as new_optimizer

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


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


def tensors_for(form: str) -> dict[str, tuple[int, ...]]:
    """A number has no rows."""
    return {**TENSORS, "scalar": (1,)} if is_row_wise(form) else TENSORS


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(F32, None), (F64, None), (BF16, F32), (F16, None)], ids=str
)
@pytest.mark.parametrize("form", ON_DEVICES)
def test_optimizers(maker: Maker, form: str, dtype: Any, state_dtype: Any) -> None:
    """Three steps with decay and loss scale; a parameter without a gradient in one of them."""
    start, steps = problem(tensors_for(form), dtype)
    options = decayed_and_scaled(form)
    if state_dtype and "state_dtype" in arguments_of(form):
        options["state_dtype"] = state_dtype
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


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("form", TAKING_ROWS)
def test_rows_of_optimizers(maker: Maker, form: str, how: str) -> None:
    """Beside dense gradients."""
    if (form, how) == ("Adam-lazy", "dense_equivalent"):
        pytest.skip("it has no such setting")
    start, steps = problem(tensors_for(form), F32)
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


# Rows of one element, of a part of a tile and of many tiles, more of them than a block has threads;
# vectors, of one row.
MEASURED = {
    "narrow": (1_003, 1), "odd": (70, 3), "tiles": (400, 64), "wide": (9, 5_003),
    "filters": (8, 3, 5), "vector": (40_001,),
}  # fmt: skip


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("of", [*OF_ROWS, *OF_TENSORS], ids=lambda of: of[0].update.__name__)
def test_measured_rows_and_tensors(maker: Maker, of: Any, dtype: Any) -> None:
    """Rules with states of rows and tensors: near the CPU, and the same bits in every run."""
    start, steps = problem(MEASURED, dtype)
    host = Own(parameters(None, start), of)
    opts = [Own(parameters(maker, start), of) for _ in range(2)]
    for gs in steps:
        host(list(gs))
        for opt in opts:
            opt(copies(maker, gs))
    assert_runs_are_near(opts[0], host)
    again = opts[1].state_dict()
    for name, array in opts[0].state_dict().items():
        assert_same_bits(array, again[name], name)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("of", OF_ROWS, ids=lambda of: of[0].update.__name__)
def test_measured_rows_of_tables(maker: Maker, of: Any, dtype: Any, how: str) -> None:
    """Duplicates, hot rows among them, and the bits of a row whatever else is in its launch."""
    shapes = {name: shape for name, shape in MEASURED.items() if len(shape) > 1}
    start, _ = problem(shapes, dtype)
    host = Own(parameters(None, start), of, sparse_update=how)
    opt = Own(parameters(maker, start), of, sparse_update=how)
    alone = Own(parameters(maker, {"tiles": start["tiles"]}), of, sparse_update=how)
    rng = np.random.default_rng(6)
    for _ in range(2):
        given = []
        for shape in shapes.values():
            indices = rng.integers(0, shape[0], HOT + 300)
            indices[: HOT + 50] = 3
            values = rng.standard_normal((len(indices), *shape[1:])).astype(dtype)
            given.append(nn.RowTensor(indices, values, shape))
        host(given)
        opt([row_tensor(maker, rows) for rows in given])
        alone([row_tensor(maker, given[2])])
    fusestep.synchronize()
    assert_runs_are_near(opt, host)
    assert_same_bits(alone.parameters[0].asnumpy(), opt.parameters[2].asnumpy())


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
