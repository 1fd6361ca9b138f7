"""Operators on device arrays."""

from __future__ import annotations

from simulator import run_check  # isort: split

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numba import cuda

import fusestep
from fusestep import ops
from fusestep.ops.primitive import Primitive

from device_arrays import (
    BETAS,
    BF16,
    F16,
    F32,
    F64,
    assert_close,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    unchanged,
)

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


def clipping() -> None:
    """New gradients and in place, as on the host; a bad index or a small norm writes nothing."""
    index = np.array([1, 4, 1])
    host: list[Any] = [
        *(gradient(shape, dtype) for shape, dtype in (((70, 3), F32), ((9,), F64), ((), F16))),
        None, ops.RowTensor(index, gradient((3, 2)), (5, 2)), gradient((33,), BF16),
    ]  # fmt: skip
    ours, other = (on_device(host) for _ in range(2))
    norm = ops.global_norm(host)
    for known in (None, norm):
        expected = ops.clip_by_global_norm(host, 0.5 * norm, known)
        with unchanged(*_values(ours)):
            found = ops.clip_by_global_norm(ours, 0.5 * norm, known)
        for array, their in zip(_values(found), _values(expected), strict=True):
            assert_close(on_host(array), their, "clipped")
    for known in (None, norm):
        with unchanged(*_values(ours)):
            for limit in (norm * 1.001, 2.0 * norm):
                found = ops.clip_by_global_norm(ours, limit, known, in_place=True)
    for known, of in ((None, ours), (norm, other)):
        found = ops.clip_by_global_norm(of, 0.5 * norm, known, in_place=True)
        assert all(a is b for a, b in zip(found, of, strict=True))
        for array, their in zip(_values(of), _values(expected), strict=True):
            assert_close(on_host(array), their, "clipped in place")
    bad = on_device(ops.RowTensor(np.array([0, 5]), gradient((2, 2)), (5, 2)))
    with unchanged(*_values([*ours, bad])):
        ops.clip_by_global_norm([*ours, bad], 1e-3, in_place=True)
    with refused(IndexError, "clip_by_global_norm: x[6]: indices[1] is out of range"):
        fusestep.synchronize()
    with refused(ValueError, "x[6] shares memory with x[0]", *_values(ours)):
        ops.clip_by_global_norm([*ours, ours[0]], 1e-3, in_place=True)
    with refused(ValueError, "x[6] is not contiguous", *_values(ours)):
        ops.clip_by_global_norm([*ours, ours[0].T], 1e-3, in_place=True)
    not_a_number = cuda.to_device(np.array([np.nan, 1.0], F32))
    ops.clip_by_global_norm([not_a_number], in_place=True)
    assert np.isnan(on_host(not_a_number)).all()


def _values(gradients: Sequence[Any]) -> list[Any]:
    return [g.values if isinstance(g, ops.RowTensor) else g for g in gradients if g is not None]


if __name__ == "__main__":
    run_check(
        operators=(dense_operators, row_operators, gathers, operator_errors, clipping),
    )
