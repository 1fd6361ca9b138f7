"""Checks of operators and optimizers on device arrays: ``python device_simulation.py <check>``.

They run under Numba's simulator, where device arrays lie on the host. It has to be switched on
before Numba is imported, hence a process of its own.
"""

from __future__ import annotations

import os
import sys

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import copy
import gc
import pickle
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import fusestep
from fusestep import nn, ops
from fusestep.kernels.cuda import dense, row_step
from fusestep.nn.on_device import Launcher
from fusestep.ops import pending
from fusestep.ops.device import DeviceArray
from fusestep.ops.primitive import Primitive

from simulator import prepare_simulator

prepare_simulator()
F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(11)
# The simulator computes some roots in double precision.
UNITS = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}


def positive(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return RNG.uniform(0.1, 1.0, shape).astype(dtype)


def rows(indices: Sequence[int], shape: tuple[int, ...], dtype: Any = F32) -> nn.RowTensor:
    values = gradient((len(indices), *shape[1:]), dtype)
    return nn.RowTensor(np.array(indices, np.int64), values, shape)


def gradient(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return RNG.uniform(-1.0, 1.0, shape).astype(dtype)


def on_device(value: Any) -> Any:
    """The same on the device: an array, a `RowTensor`, None, or a list of these."""
    if isinstance(value, list | tuple):
        return [on_device(x) for x in value]
    if isinstance(value, nn.RowTensor):
        indices, values = on_device([value.indices, value.values])
        return nn.RowTensor(indices, values, value.dense_shape)
    return None if value is None else cuda.to_device(value)


def on_host(array: Any) -> np.ndarray:
    on_device = isinstance(array, DeviceArray)
    copied: np.ndarray = array.numpy() if on_device else array.copy_to_host()
    return copied


def assert_close(found: np.ndarray, expected: np.ndarray, label: str = "") -> None:
    assert found.dtype == expected.dtype, label
    assert found.shape == expected.shape, label
    a, b = (array.astype(float) for array in (found, expected))
    unit = 0.0 if found.dtype.kind == "i" else UNITS[found.itemsize]
    np.testing.assert_allclose(a, b, unit, unit, err_msg=label)


@contextmanager
def unchanged(*arrays: Any) -> Iterator[None]:
    """Every byte of some device arrays is the same afterwards."""
    before = [on_host(array).tobytes() for array in arrays]
    yield
    assert [on_host(array).tobytes() for array in arrays] == before


@contextmanager
def refused(error: type[BaseException], text: str, *arrays: Any) -> Iterator[None]:
    """The block raises ``error``, with ``text`` in its message, and changes no array."""
    with unchanged(*arrays), pytest.raises(error, match=re.escape(text)):
        yield


# Operators

BETAS = (0.9, 0.99, 0.1, 0.9, 0.99, 1e-8)
Case = tuple[Primitive, int, Callable[..., Any]]
DENSE: tuple[Case, ...] = (
    (ops.Adam(), 3, lambda op, v, g: op(*v, *BETAS, g)),
    (ops.Adam(use_locking=True, use_nesterov=True), 3, lambda op, v, g: op(*v, *BETAS, g)),
    (ops.AdamNoUpdateParam(), 2, lambda op, v, g: op(*v, *BETAS, g)),
    (ops.LARSUpdate(use_clip=True), 1, lambda op, v, g: op(*v, g, 4.0, 1.0, 0.1, 0.01)),
    (ops.AdamWeightDecay(), 3, lambda op, v, g: op(*v, 0.1, 0.9, 0.99, 1e-8, 0.3, g)),
    (ops.ApplyAdamWithAmsgrad(), 4, lambda op, v, g: op(*v, 0.9, 0.99, 0.1, g)),
    (ops.ApplyAdamWithAmsgradV2(), 4, lambda op, v, g: op(*v, *BETAS, g)),
    (ops.ApplyMomentum(gradient_scale=2.0), 2, lambda op, v, g: op(*v, 0.1, g, 0.9)),
    (ops.SGD(0.1, 0.2), 3, lambda op, v, g: op(v[0], g, 0.1, v[1], 0.9, v[2])),
    (ops.ApplyRMSProp(), 3, lambda op, v, g: op(*v, 0.1, g, 0.9, 0.1, 1e-8)),
    (ops.ApplyCenteredRMSProp(), 4, lambda op, v, g: op(*v, g, 0.1, 0.9, 0.1, 5.0)),
    (ops.ApplyAdagrad(), 2, lambda op, v, g: op(*v, 0.1, g)),
    (ops.ApplyProximalAdagrad(), 2, lambda op, v, g: op(*v, 0.1, 0.01, 0.1, g)),
    (ops.ApplyFtrl(), 3, lambda op, v, g: op(*v, g, 0.1, 0.01, 0.1, -0.5)),
)  # fmt: skip
FTRL = {"lr": 0.1, "l1": 0.01, "l2": 0.1, "lr_power": -0.5}
ROWS: tuple[Case, ...] = (
    (ops.FusedSparseAdam(), 3, lambda op, v, *g: op(*v, *BETAS, *g)),
    (ops.FusedSparseLazyAdam(use_locking=True), 3, lambda op, v, *g: op(*v, *BETAS, *g)),
    (ops.FusedSparseFtrl(**FTRL), 3, lambda op, v, *g: op(*v, *g)),
    (ops.SparseApplyFtrl(**FTRL), 3, lambda op, v, *g: op(*v, *g)),
    (ops.FusedSparseProximalAdagrad(), 2, lambda op, v, *g: op(*v, 0.1, 0.01, 0.1, *g)),
    (ops.SparseApplyProximalAdagrad(), 2, lambda op, v, *g: op(*v, 0.1, 0.01, 0.1, *g)),
)
NEW_ARRAYS = (ops.AdamNoUpdateParam, ops.LARSUpdate)


def compare_operator(
    case: Case, shape: tuple[int, ...], dtype: Any, *gradients: np.ndarray
) -> None:
    """Device and host do the same; what is returned are the variables."""
    op, n, call = case
    variables = [positive(shape, dtype) for _ in range(n)]
    theirs = on_device(variables)
    expected, found = call(op, variables, *gradients), call(op, theirs, *on_device(gradients))
    for ours, their in zip(theirs, variables, strict=True):
        assert_close(on_host(ours), their, op.name)
    if isinstance(op, NEW_ARRAYS):
        assert_close(on_host(found), expected, op.name)
    else:
        assert (found if isinstance(found, tuple) else (found,))[0] is theirs[0]
    fusestep.synchronize()


def dense_operators() -> None:
    """Every operator with a dense gradient, every storage type; 0-d and empty variables."""
    for case in DENSE:
        compare_operator(case, (3, 5), F32, gradient((3, 5)))
    for dtype, of_gradient in ((F64, F32), (F16, F16), (BF16, BF16)):
        compare_operator(DENSE[0], (7,), dtype, gradient((7,), of_gradient))
    for shape in ((), (0, 3)):
        compare_operator(DENSE[0], shape, F32, gradient(shape))
    covered = {type(op).__name__ for op, _, _ in DENSE + ROWS}
    kinds = [getattr(ops, name) for name in ops.__all__]
    named = {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, Primitive)}
    assert named == covered


def row_operators() -> None:
    """Every operator with a row-sparse gradient: duplicates, no indices, int32, out of range."""
    for case in ROWS:
        compare_operator(case, (5, 3), F32, gradient((4, 3)), np.array([1, 4, 1, 0]))
    for case in ROWS[:2]:
        compare_operator(case, (5, 3), F32, gradient((0, 3)), np.array([], np.int64))
        compare_operator(case, (5, 3), F32, gradient((2, 3)), np.array([4, 4], np.int32))
        compare_operator(case, (5,), F32, gradient((2,)), np.array([3, 0]))
        compare_operator(case, (5, 0), F32, gradient((2, 0)), np.array([3, 0]))
        compare_operator(case, (0, 3), F32, gradient((0, 3)), np.array([], np.int64))


def gathers() -> None:
    """The rows of a table, and the gradient that comes back; a bad index is heard of later."""
    for dtype, width in ((F32, 4), (F32, 3), (BF16, 1), (F64, 1), (F16, 600)):
        table = positive((5, width), dtype)
        for index in (np.array([[1, 4], [1, 0]]), np.array([3], np.int32), np.array([], np.int64)):
            ours, theirs = ops.SparseGatherV2(), ops.SparseGatherV2()
            found = ours(*on_device([table, index]), 0)
            assert_close(on_host(found), theirs(table, index, 0), "rows")
            g = gradient((*index.shape, width), dtype)
            (of_table,) = on_device([g])
            back, expected = ours.backward(of_table), theirs.backward(g)
            assert_close(back.values.numpy(), expected.values, "values")
            np.testing.assert_array_equal(back.indices.numpy(), expected.indices)
            fusestep.synchronize()
    table, index = on_device([positive((5, 3)), np.array([1, 5, -2])])
    found = on_host(ops.SparseGatherV2()(table, index, 0))
    assert found[0].all() and not found[1:].any()
    with refused(IndexError, "SparseGatherV2: indices[1] is out of range"):
        fusestep.synchronize()
    with refused(ValueError, "lives elsewhere than"):
        ops.SparseGatherV2()(table, np.array([1]), 0)


def operator_errors() -> None:
    """What an operator refuses, it refuses before it writes; a bad index is heard of later."""
    w, m, v = theirs = on_device([positive((5, 3)) for _ in range(3)])
    g, index = gradient((2, 3)), np.array([1, 5])
    lazy, full = ops.FusedSparseLazyAdam(), ops.FusedSparseAdam(use_locking=True)
    for op in (lazy, full):
        with unchanged(w, m, v):
            op(w, m, v, *BETAS, cuda.to_device(g), cuda.to_device(index))
            op(w, m, v, *BETAS, cuda.to_device(g), cuda.to_device(np.array([-1, 2], np.int32)))
        text = "indices[1] is out of range: expected 0 <= index < 5, got 5"
        with pytest.raises(IndexError, match=re.escape(text)) as found:
            fusestep.synchronize()
        (note,) = found.value.__notes__
        assert "indices[0]" in note and "got -1" in note
        fusestep.synchronize()
    for n, d in ((0, 3), (4, 0)):
        empty = on_device([positive((n, d)) for _ in range(3)])
        for op in (lazy, full):
            op(*empty, *BETAS, cuda.to_device(gradient((1, d))), cuda.to_device(np.array([7])))
            with refused(IndexError, f"expected 0 <= index < {n}, got 7"):
                fusestep.synchronize()
    one, other = cuda.to_device(g), cuda.to_device(index)
    for call in (
        lambda: lazy(w, m, v, *BETAS, g, other),
        lambda: lazy(w, m, v, *BETAS, one, index),
        lambda: lazy(w, m, on_host(v), *BETAS, one, other),
        lambda: ops.Adam()(w, m, v, *BETAS, gradient((5, 3))),
        lambda: ops.Adam()(on_host(w), on_host(m), on_host(v), *BETAS, w),
        lambda: ops.AdamNoUpdateParam()(m, on_host(v), *BETAS, w),
    ):
        with refused(ValueError, "lives elsewhere than", *theirs):
            call()
    for call in (
        lambda: ops.Adam()(w, m, v, *BETAS, w),
        lambda: ops.Adam()(w, w, v, *BETAS, m),
        lambda: ops.Adam()(w[:4], w[1:], v[:4], *BETAS, m[:4]),
    ):
        with refused(ValueError, "shares memory", *theirs):
            call()
    with refused(ValueError, "is not contiguous", *theirs):
        ops.Adam()(w, m, v, *BETAS, cuda.to_device(gradient((5, 6)))[:, ::2])
    with refused(ValueError, "is not contiguous", *theirs):
        ops.Adam()(w.T, m.T, v.T, *BETAS, cuda.to_device(gradient((3, 5))))
    locked = cuda.to_device(positive((5, 3)))
    locked._ary.flags.writeable = False
    with refused(ValueError, "is read-only", *theirs):
        ops.Adam()(locked, m, v, *BETAS, cuda.to_device(gradient((5, 3))))
    ops.Adam()(w, m, v, *BETAS, locked)
    with refused(TypeError, "higher dtype", *theirs):
        ops.Adam()(w, m, v, *BETAS, cuda.to_device(gradient((5, 3), F64)))
    for shift in (1, 2):
        between = np.zeros(64, np.uint8)[shift : shift + 60].view(F32).reshape(5, 3)
        with refused(ValueError, "is not aligned", *theirs):
            ops.Adam()(w, m, v, *BETAS, type(w)(between))


# Optimizers

SHAPES = ((5, 4), (7,), (), (0, 3))
Step = list[Any]


def dense_steps(dtypes: Sequence[Any] = (F32,) * len(SHAPES)) -> list[Step]:
    steps = [[gradient(s, d) for s, d in zip(SHAPES, dtypes, strict=True)] for _ in range(3)]
    steps[1][0] = steps[1][2] = None
    return [*steps, [None] * len(SHAPES)]


def row_steps() -> list[Step]:
    """Steps of two tables and a vector: duplicates, no rows, no gradient, dense ones."""
    return [
        [rows([1, 3, 1], (5, 4)), gradient((7,)), rows([2, 2], (3, 2))],
        [rows([], (5, 4)), None, None],
        [rows([4, 0], (5, 4)), None, rows([0], (3, 2))],
        [gradient((5, 4)), gradient((7,)), rows([], (3, 2))],
    ]


def compare_optimizer(
    make: Callable[[Any], Any], steps: Sequence[Step], variables: Sequence[np.ndarray]
) -> tuple[Any, Any]:
    """Device and host do the same to every parameter and state."""
    ours, theirs = [w.copy() for w in variables], on_device(variables)
    on_cpu, on_gpu = make(ours), make(theirs)
    assert on_cpu.target == "CPU"
    for step in steps:
        assert on_cpu(tuple(step)) == on_gpu(tuple(on_device(step)))
    for a, b in zip(theirs, ours, strict=True):
        assert_close(on_host(a), b, repr(on_gpu))
    expected, found = on_cpu.state_dict(), on_gpu.state_dict()
    assert list(found) == list(expected)
    for name in found:
        assert type(found[name]) is np.ndarray
        assert_close(found[name], expected[name], name)
    return on_gpu, theirs


DENSE_OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.Adam(p, 0.1, use_amsgrad=True),
    lambda p: nn.Adam(p, 0.1, use_nesterov=True),
    lambda p: nn.Adam(
        [{"params": p[:1], "lr": 0.3, "weight_decay": 0.2}, {"params": p[1:]}],
        [0.1, 0.05, 0.01, 0.1],
    ),
    lambda p: nn.FTRL(p, learning_rate=0.1, l1=0.01, l2=0.1, weight_decay=0.1),
    lambda p: nn.FTRL(p, learning_rate=0.1, lr_power=-0.3),
    lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, l1=0.01, l2=0.1),
    lambda p: nn.Adagrad(p, learning_rate=0.1, update_slots=False),
    lambda p: nn.Momentum(p, 0.1, 0.9, use_nesterov=True),
    lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    lambda p: nn.RMSProp(p, 0.1, momentum=0.5),
    lambda p: nn.RMSProp(p, 0.1, centered=True, epsilon=1.0),
    lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1),
    lambda p: nn.Lamb(p, 0.1, weight_decay=0.1),
    lambda p: nn.Lamb(p, 0.1, clip_ratio=True),
    lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9, weight_decay=0.1, loss_scale=2.0), coefficient=0.1),
    lambda p: nn.LARS(nn.Lamb(p, 0.1), use_clip=True, lars_filter=lambda q: q.ndim > 0),
    lambda p: nn.AdamOffload(p, 0.1),
)


def dense_optimizers() -> None:
    """Every optimizer that is a rule, LARS around some; parameters of any shape."""
    variables = [positive(shape) for shape in SHAPES]
    for make in DENSE_OPTIMIZERS:
        compare_optimizer(make, dense_steps(), variables)


ROW_OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.Adam(p, 0.1, use_lazy=True, use_locking=True),
    lambda p: nn.LazyAdam(
        [{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.2}], 0.1
    ),
    lambda p: nn.FTRL(p, learning_rate=0.1),
    lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, sparse_update="dense_equivalent"),
    lambda p: nn.Momentum(p, 0.1, 0.9, sparse_update="lazy"),
    lambda p: nn.AdamOffload(p, 0.1, sparse_update="lazy"),
    lambda p: with_target(nn.LazyAdam(p, 0.1), "CPU"),
)


def with_target(optimizer: Any, target: str) -> Any:
    optimizer.target = target
    return optimizer


def row_optimizers() -> None:
    """Lazy and dense-equivalent steps on several tables, with duplicates and without rows."""
    variables = [positive(shape) for shape in ((5, 4), (7,), (3, 2))]
    for make in ROW_OPTIMIZERS:
        compare_optimizer(make, row_steps(), variables)


def several_dtypes() -> None:
    """Parameters of every storage type in one optimizer, states of another one."""
    dtypes = (F16, BF16, F64, F32)
    variables = [positive(shape, d) for shape, d in zip(SHAPES, dtypes, strict=True)]
    for options in ({}, {"state_dtype": np.float32, "loss_scale": 2.0}):
        compare_optimizer(lambda p, o=options: nn.Adam(p, 0.1, **o), dense_steps(dtypes), variables)
    tables = [positive((5, 4), BF16), positive((3, 2), F64)]
    steps = [
        [rows([1, 3, 1], (5, 4), BF16), rows([2, 2], (3, 2), F32)],
        [rows([4], (5, 4), BF16), rows([], (3, 2), F64)],
    ]
    for make in (nn.LazyAdam, nn.Adam):
        compare_optimizer(lambda p, m=make: m(p, 0.1), steps, tables)


# Bad indices of optimizers

BAD = "LazyAdam: gradient of 'parameter_0': indices[1] is out of range: expected 0 <= index < 5"


class Run:
    """LazyAdam on a table and a vector, with the arrays and states of its good steps."""

    def __init__(self, **options: Any) -> None:
        self.w = on_device([positive((5, 4)), positive((7,))])
        self.opt = nn.LazyAdam(self.w, 0.1, **options)
        self.step([1, 3])
        self.before = self.opt.state_dict()

    def step(self, indices: Sequence[int] | None, *, dense: bool = True) -> None:
        sparse = None if indices is None else on_device(rows(indices, (5, 4)))
        self.opt((sparse, on_device(gradient((7,))) if dense else None))

    def assert_as_before(self) -> None:
        state = self.opt.state_dict()
        for name, array in self.before.items():
            np.testing.assert_array_equal(state[name], array, name)


def index_errors() -> None:
    """The call writes nothing, nor do later ones; counts are taken back, and steps go on."""
    run = Run()
    with unchanged(*run.w):
        run.step([1, 5])
        run.step([0, 2])
        run.step(None)
        run.step([], dense=False)
        run.step(None, dense=False)
        run.step([-3], dense=False)
        assert run.opt.global_step == 7
        with refused(IndexError, f"{BAD}, got 5"):
            run.opt.state_dict()
        assert run.opt.global_step == 1
        fusestep.synchronize()
        run.assert_as_before()
    # It goes on as one that never had a bad step.
    other, arrays = copy.deepcopy(run.opt), []
    step = (on_device(rows([1, 2], (5, 4))), on_device(gradient((7,))))
    for opt in (run.opt, other):
        opt(step)
        arrays.append([p.asnumpy() for p in opt.parameters])
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    assert run.opt.global_step == 2


def rows_without_indices() -> None:
    """A lazy step without any index passes on what an earlier one has found."""
    run = Run()
    with unchanged(*run.w):
        run.step([1, 9], dense=False)
        run.step([])
        run.step([2])
        with refused(IndexError, f"{BAD}, got 9"):
            fusestep.synchronize()
        run.assert_as_before()


def several_tables() -> None:
    """Tables of several kernel calls: none of them writes; the error names the table."""
    w = on_device([positive((5, 4)), positive((3, 2), F64), positive((4,))])
    for make in (nn.LazyAdam, nn.Adam):
        opt = make(w, 0.1)
        for bad in ([7, 0], [0, 7]):
            good = on_device(rows([1], (5, 4)))
            with unchanged(*w):
                opt((good, on_device(rows(bad, (3, 2), F64)), on_device(gradient((4,)))))
                with refused(IndexError, f"'parameter_1': indices[{bad.index(7)}] is out of"):
                    fusestep.synchronize()
                with refused(IndexError, "got 7"):
                    opt((on_device(rows([7], (5, 4))), on_device(rows([9], (3, 2), F64)), None))
                    fusestep.synchronize()
        state = opt.state_dict()
        assert not any(state[f"step.{p.name}"] for p in opt.parameters) and opt.global_step == 0
    # Keys that are too long are refused before anything is written.
    huge = on_device(np.zeros((2**61, 0), F16))
    opt = nn.LazyAdam([w[0], huge], 0.1)
    step = on_device([rows([1], (5, 4)), rows([1, 2, 1], (2**61, 0), F16)])
    with refused(ValueError, "need too long sort keys", w[0]):
        opt(tuple(step))
    assert opt.global_step == 0


def many_calls() -> None:
    """When too many calls wait for an answer, the host asks; so it does for steps after them."""
    pending.MOST_PENDING = 4
    try:
        for most in (4, 5):
            run = Run()
            run.step([9, 1])
            for _ in range(3):
                run.step([1], dense=False)
            with refused(IndexError, "got 9", *run.w):
                for _ in range(most - 3):
                    run.step([1])
            run.assert_as_before()
        run = Run()
        run.step([1])
        for _ in range(10):
            run.step(None)
        (guards,) = pending._guards.values()
        assert len(guards.calls) <= 4
        assert run.opt.global_step == 12
        run.step([8])
        with refused(IndexError, "got 8", *run.w):
            for _ in range(10):
                run.step(None)
        assert run.opt.global_step == 12
    finally:
        pending.MOST_PENDING = 1_024
        pending._guards.clear()


def several_optimizers() -> None:
    """One bad step does not keep other optimizers from writing; all errors are told."""
    first, second, third = Run(), Run(), Run()
    for run, index in ((first, 5), (second, 2), (third, 6)):
        run.step([index])
    with pytest.raises(IndexError, match="got 5") as found:
        fusestep.synchronize()
    (note,) = found.value.__notes__
    assert "got 6" in note
    steps = [run.opt.global_step[0] for run in (first, second, third)]
    assert steps == [1, 2, 1]
    first.assert_as_before()
    third.assert_as_before()
    # What waits for an answer keeps no optimizer alive.
    gone = weakref.ref(second.opt)
    second.step([1])
    second.step([9])
    del second, run
    gc.collect()
    assert gone() is None
    with refused(IndexError, "got 9"):
        fusestep.synchronize()


def nonfinite_steps() -> None:
    """A step that is to be skipped is skipped; it hears of earlier bad indices first."""
    run = Run(skip_nonfinite=True)
    bad = rows([1], (5, 4))
    bad.values[0, 2] = np.inf
    with unchanged(*run.w):
        run.opt((on_device(bad), on_device(gradient((7,)))))
        run.opt((None, on_device(np.full(7, np.nan, F32))))
        run.step(None, dense=False)
        assert (run.opt.skipped_steps, run.opt.global_step) == (2, 2)
        run.before = run.opt.state_dict()
        run.step([1, 8])
        with refused(IndexError, f"{BAD}, got 8"):
            run.step([1])
        run.assert_as_before()
    run.step([1])
    assert run.opt.global_step == 3


def failing_steps() -> None:
    """An error in the middle of a call leaves no lock held and counts nothing."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))
    update, dense_update = row_step.rows.touched_kernel, dense.dense_kernel

    def fail(*_: Any) -> Any:
        raise RuntimeError("it does not compile")

    try:
        row_step.rows.touched_kernel = dense.dense_kernel = fail
        with refused(RuntimeError, "does not compile", *run.w, w, m, v):
            run.step([1, 2])
        with refused(RuntimeError, "does not compile", *run.w):
            run.step(None)
        with refused(RuntimeError, "does not compile", w, m, v):
            op(w, m, v, *BETAS, on_device(gradient((2, 3))), index)
        with refused(RuntimeError, "does not compile", w, m, v):
            ops.Adam(use_locking=True)(w, m, v, *BETAS, on_device(gradient((5, 3))))
    finally:
        row_step.rows.touched_kernel, dense.dense_kernel = update, dense_update
    run.assert_as_before()

    def go_on() -> None:
        run.step([1, 2])
        op(w, m, v, *BETAS, on_device(gradient((2, 3))), index)
        fusestep.synchronize()

    in_threads(go_on)
    assert run.opt.global_step == 2


def in_threads(*works: Callable[[], Any]) -> None:
    """Run each in a thread of its own, all of which end without an error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[w], daemon=True) for w in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    assert not errors, errors


def threads() -> None:
    """Operators and optimizers under use_locking at once: every step counts, nothing waits."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))
    values = on_device(np.zeros((2, 3), F32))
    heard = []

    def step() -> None:
        for k in range(8):
            run.step([1, 2] if k % 2 else None)

    def operate() -> None:
        for _ in range(8):
            op(w, m, v, *BETAS, values, index)

    def listen() -> None:
        for _ in range(8):
            try:
                fusestep.synchronize()
            except IndexError as error:
                heard.append(error)

    in_threads(step, operate, listen, step)
    fusestep.synchronize()
    assert not heard and run.opt.global_step == 17
    assert run.opt.state_dict()["step.parameter_0"] == 9


def lock_order() -> None:
    """Every call takes the locks of guards and streams in the same order."""
    from fusestep.ops import device_step

    held: list[str] = []
    orders = set()

    def noting(name: str, context: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def note(*arguments: Any) -> Iterator[Any]:
            with context(*arguments) as value:
                if name not in held:  # it can be taken again by who has it
                    orders.update((other, name) for other in held)
                held.append(name)
                yield value
                held.remove(name)

        return note

    device_step.in_order = noting("streams", device_step.in_order)
    pending.guarded = noting("guards", pending.guarded)
    pending.held = noting("guards", pending.held)
    run, table = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    run.step([1])
    index = on_device(np.array([1, 2]))
    ops.FusedSparseLazyAdam(use_locking=True)(*table, *BETAS, on_device(gradient((2, 3))), index)
    assert orders == {("guards", "streams")}


# States and copies


def states() -> None:
    """A state is copied to the host, and taken over by an optimizer on either side."""
    run, ours = Run(), [positive((5, 4)), positive((7,))]
    state = run.opt.state_dict()
    for other in (nn.LazyAdam(ours, 0.1), nn.LazyAdam(on_device(ours), 0.1)):
        other.load_state_dict(state)
        found = other.state_dict()
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array, name)
    run.step([1, 5])
    with refused(IndexError, "got 5"):
        run.opt.load_state_dict(state)
    run.opt.load_state_dict(state)
    run.assert_as_before()
    run.step([1, 2])
    run.opt.load_state_dict(state)
    fusestep.synchronize()
    run.assert_as_before()
    state["moment1.parameter_0"] = on_device(state["moment1.parameter_0"])
    with refused(RuntimeError, "lives on a CUDA device"):
        run.opt.load_state_dict(state)
    with tempfile.TemporaryDirectory() as folder:
        nn.save_checkpoint(run.opt.parameters, f"{folder}/parameters")
        saved = nn.load_checkpoint(f"{folder}/parameters")
    for p, w in zip(run.opt.parameters, run.w, strict=True):
        np.testing.assert_array_equal(saved[p.name], on_host(w))


def copies() -> None:
    """Pickles and deep copies live on the device, apart, and go on as the original does."""
    dtypes = (F32, F16, F64)
    w = on_device([positive((5, 4), d) for d in dtypes])
    opt = nn.LazyAdam(w, 0.1, use_locking=True)
    opt(tuple(on_device([rows([1, 3], (5, 4), d) for d in dtypes])))
    others = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)), pickle.loads(pickle.dumps(opt))]
    step = tuple(on_device([rows([1, 2], (5, 4), d) for d in dtypes]))
    for other in others:
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            assert type(q.data) is type(p.data)
            assert (q.data.shape, q.data.dtype) == (p.data.shape, p.data.dtype)
            assert q.array.address != p.array.address
            np.testing.assert_array_equal(on_host(q.data), on_host(p.data))
    for one in (opt, *others):
        one(step)
    for other in others:
        expected, found = opt.state_dict(), other.state_dict()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            np.testing.assert_array_equal(p.asnumpy(), q.asnumpy())
    # A copy of what waits for an answer would keep counts that are to be taken back.
    for make in (copy.deepcopy, pickle.dumps):
        opt(tuple(on_device([rows([9], (5, 4)), None, None])))
        with refused(IndexError, "got 9"):
            make(opt)
        assert make(opt)
        assert opt.global_step == 2
    tensor = pickle.loads(pickle.dumps(on_device(rows([1, 3], (5, 4)))))
    np.testing.assert_array_equal(tensor.indices.numpy(), [1, 3])
    parameter = copy.deepcopy(nn.Parameter(cuda.to_device(positive((), BF16)), "w"))
    assert (parameter.shape, parameter.dtype, parameter.name) == ((), BF16, "w")


def rebinding() -> None:
    """A parameter can be rebound between steps, to memory on the device that is apart."""
    run = Run()
    p = run.opt.parameters[0]
    other = cuda.to_device(positive((5, 4)))
    p.data = other
    assert p.data is other
    with unchanged(run.w[0]):
        run.step([2])
    fusestep.synchronize()
    assert not (on_host(other)[2] == on_host(run.w[0])[2]).any()
    with refused(ValueError, "lives elsewhere than", other):
        p.data = positive((5, 4))
    with refused(ValueError, "shares memory with", other):
        p.data = type(other)(run.opt.moment1[0].owner._ary)
    with refused(ValueError, "has a wrong shape", other):
        p.data = cuda.to_device(positive((4, 5)))
    assert p.data is other
    # A bad step and a rebinding before the host hears of it.
    run.step([7])
    p.data = run.w[0]
    with refused(IndexError, "got 7", *run.w):
        fusestep.synchronize()
    run.step([1])
    assert run.opt.global_step == 3


# What is not taken


def mixtures() -> None:
    """Parameters, gradients and indices of a step are all on the host, or all on the device."""
    w, host = cuda.to_device(positive((5, 4))), positive((5, 4))
    for named in ([w, host], [nn.Parameter(w, "1"), host], [nn.Parameter(host, "1"), w]):
        with refused(ValueError, "lives elsewhere than", w):
            nn.Adam(named)
    opt, on_cpu, before = nn.LazyAdam([w]), nn.LazyAdam([host]), host.copy()
    index, values = np.array([1]), gradient((1, 4))
    theirs = on_device(rows([1], (5, 4)))
    mixed = on_device(rows([1], (5, 4)))
    mixed.indices = index
    for one, bad in (
        (opt, gradient((5, 4))),
        (opt, rows([1], (5, 4))),
        (opt, mixed),
        (on_cpu, cuda.to_device(gradient((5, 4)))),
        (on_cpu, theirs),
        (on_cpu, mixed),
    ):
        with refused(ValueError, "lives elsewhere than", w):
            one((bad,))
    with refused(ValueError, "lives elsewhere than"):
        nn.RowTensor(index, cuda.to_device(values), (5, 4))
    for bad in ([rows([1], (5, 4)), theirs], [theirs, theirs]):
        with refused(RuntimeError, "lives on a CUDA device", w):
            opt((bad,))
    np.testing.assert_array_equal(host, before)
    assert opt.global_step == on_cpu.global_step == 0
    shared = on_device(rows([1], (5, 4)))
    shared.values = w[:1]
    for bad in (w, shared):
        with refused(ValueError, "shares memory with", w):
            opt((bad,))


def not_taken() -> None:
    """What has no kernels for the device says so, and computes nothing."""
    w, m, v = theirs = on_device([positive((5, 4)) for _ in range(3)])
    host, g = positive((5, 4)), cuda.to_device(gradient((5, 4)))
    tensor = on_device(rows([1, 3], (5, 4)))
    centralized = [{"params": [w], "grad_centralization": True}]
    plain = nn.Adam([w], weight_decay=0.1, loss_scale=2.0)
    updater = nn.mxnet.get_updater(nn.mxnet.Adam())
    layer = nn.ThorDense(cuda.to_device(positive((2, 3))))
    for call in (
        lambda: nn.AdaFactor([w]),
        lambda: nn.thor(layer, 0.1, 0.1, 0.9),
        lambda: layer.capture(cuda.to_device(gradient((4, 3))), gradient((4, 2))),
        lambda: nn.Adam(centralized)((g,)),
        lambda: nn.LazyAdam(centralized)((tensor,)),
        lambda: updater(0, gradient((5, 4)), w),
        lambda: nn.mxnet.Adam().update([0], [w], [gradient((5, 4))], [(m, v)]),
        lambda: updater(0, g, host),
        lambda: ops.adam_update(w, g, m, v, lr=0.1),
        lambda: ops.adam_update(w, g, m, v, w, lr=0.1),
        lambda: ops.adam_update(host, gradient((5, 4)), m, v, lr=0.1),
        lambda: ops.adam_update(host, g, host + 1, host + 2, lr=0.1),
        lambda: ops.adam_update(host, tensor, host + 1, host + 2, host, lr=0.1),
        lambda: tensor.coalesce(),
        lambda: tensor.to_dense(),
        lambda: plain.decay_weight((g,)),
        lambda: plain.decay_weight((gradient((5, 4)),)),
        lambda: plain.decay_weight((tensor,)),
        lambda: plain.scale_grad((tensor,)),
        lambda: nn.Adam([w], cuda.to_device(np.array([0.1, 0.2]))),
        lambda: ops.ApplyMomentum()(w, m, cuda.to_device(np.array(0.1)), g, 0.9),
    ):
        with refused(RuntimeError, "device", *theirs):
            call()
    with refused(TypeError, "lives on a CUDA device"):
        np.asarray(nn.Parameter(w))


def targets() -> None:
    """States move from the device to the host and back, all of them or none."""
    run, copy_out = Run(), DeviceArray.numpy
    copied: list[Any] = []

    def fail(array: DeviceArray) -> Any:
        copied.append(array)
        if len(copied) == 2:
            raise RuntimeError("no room")
        return copy_out(array)

    DeviceArray.numpy = fail
    try:
        with refused(RuntimeError, "no room", *run.w):
            run.opt.target = "CPU"
    finally:
        DeviceArray.numpy = copy_out
    assert run.opt.target == "GPU"
    for target in ("CPU", "GPU"):
        run.assert_as_before()
        run.opt.target = target
        with refused(IndexError, "got 5", *run.w):
            run.step([5])
            fusestep.synchronize()
        run.step([1, 2])
        run.before = run.opt.state_dict()
    assert run.opt.global_step == 3
    run.step([6])
    with refused(IndexError, "got 6", *run.w):
        run.opt.target = "CPU"
    assert run.opt.target == "GPU"


def launchers() -> None:
    """A guard that is settled is not asked again."""
    run = Run()
    launcher: Launcher = run.opt._launcher
    run.step([1])
    assert launcher._unsettled() is not None
    fusestep.synchronize()
    assert launcher._unsettled() is None
    run.step([7])
    with refused(IndexError, "got 7"):
        fusestep.synchronize()
    run.step(None)
    assert run.opt.global_step == 3 and not any(g.calls for g in pending._guards.values())


CHECKS: dict[str, Sequence[Callable[[], Any]]] = {
    "operators": (dense_operators, row_operators, gathers, operator_errors),
    "dense_optimizers": (dense_optimizers,),
    "row_optimizers": (row_optimizers, several_dtypes),
    "index_errors": (
        index_errors,
        rows_without_indices,
        several_tables,
        many_calls,
        several_optimizers,
        nonfinite_steps,
    ),
    "locking": (failing_steps, threads, lock_order),
    "copies": (states, copies, rebinding, targets, launchers),
    "refusals": (mixtures, not_taken),
}

if __name__ == "__main__":
    for check in CHECKS[sys.argv[1]]:
        check()
    print("right")
