"""Operators on device arrays, as on the host and as published."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from faults import FAULTS

import fusestep
from fusestep import ops
from fusestep.kernels.tables import HOT

from devices import (
    BETAS,
    COMPUTES,
    MARKS,
    SIMULATOR,
    assert_calls_alike,
    assert_close,
    assert_same,
    gradient,
    on_device,
    on_host,
    only,
    positive,
    refused,
    sized,
    told,
    unchanged,
)
from helpers import STORAGE_DTYPES, assert_within_ulps, in_turn
from operators import ADAM_UPDATE, EVERY_OPERATOR, LARS_UPDATE, Operator
from test_ops_reference import CALLS

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES
# Between the device and the CPU: both round each operation alike, but either compiler chooses for
# itself which products and sums become one FMA. Each choice is worth at most half a unit, and no
# rule has more than about eight.
CPU_ULPS = 4.0


def both(
    operator: Operator, inputs: dict[str, Any], **made: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The variables after a call on the device, and after one on the CPU, with what is new."""
    given = {name: on_device(v) if isinstance(v, np.ndarray) else v for name, v in inputs.items()}
    found, expected = operator.call(given, **made), operator.call(inputs, **made)
    names = operator.variables
    here, there = [inputs[name] for name in names], [given[name] for name in names]
    if operator.returned:
        made = found if isinstance(found, tuple) else (found,)
        assert [*map(id, made)] == [id(given[name]) for name in operator.returned]
    elif not isinstance(expected, tuple):
        here, there = [*here, expected], [*there, found]
    fusestep.synchronize()
    return [on_host(array) for array in there], here


def assert_operator(operator: Operator, inputs: dict[str, Any], **made: Any) -> None:
    """All numbers are of size 1, but FTRL adds terms of ten times that."""
    __tracebackhide__ = True
    size = 10.0 if "Ftrl" in operator.name else 1.0
    for k, (a, b) in enumerate(zip(*both(operator, inputs, **made), strict=True)):
        if COMPUTES:
            assert_within_ulps(a, b, size + np.abs(b.astype(float)), CPU_ULPS, f"array {k}")


# Each with the options of its constructor that change the step.
MADE = [(EVERY_OPERATOR[name], made) for name, made, _ in CALLS] + [(LARS_UPDATE, {})]
MADE += [(ADAM_UPDATE, made) for made in ({}, {"compat": "1.9"}, {"use_locking": True})]
DENSE = [one for one in MADE if not one[0].takes_rows]
ROWS = [one for one in MADE if one[0].takes_rows]
ROWS += [(op, {"use_locking": True}) for op, made in ROWS if not made]


@pytest.mark.parametrize(
    ("call", "dtype"),
    sized(in_turn(DENSE, beside_float32=False), [*product(DENSE, STORAGE_DTYPES)]),
    ids=str,
)
def test_dense_operators(call: tuple[Operator, dict[str, Any]], dtype: Any) -> None:
    operator, made = call
    for shape in ((9, sized(2, 37)), (), (0, 3)):
        assert_operator(operator, operator.inputs(shape, dtype), **made)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("operator", "made"), ROWS, ids=str)
def test_row_operators(operator: Operator, made: dict[str, Any], index_dtype: Any) -> None:
    """Duplicates, rows of 1, 2 and more dimensions, no rows, no columns, out of range."""
    for shape in ((9,), (9, sized(5, 37)), (9, 2, sized(3, 5)), (5, 0)):
        inputs = operator.inputs(shape)
        inputs["indices"] = inputs["indices"].astype(index_dtype)
        assert_operator(operator, inputs, **made)
    for n in (0, 9):
        inputs = operator.inputs((9, 3))
        inputs = {k: v[:n] if k in operator.variables else v for k, v in inputs.items()}
        nothing = np.zeros((0, 3), F32)
        inputs["indices"], inputs[operator.gradient] = np.zeros(0, index_dtype), nothing
        assert_operator(operator, inputs, **made)
    inputs, kept = operator.inputs((9, 3)), operator.inputs((9, 3))
    inputs["indices"] = np.array([-1, 0, 2**40, 5])
    kept["indices"], kept[operator.gradient] = np.array([0, 5]), kept[operator.gradient][[1, 3]]
    dropped, _ = both(operator, inputs, **made, out_of_range="drop")
    assert_same(dropped, both(operator, kept, **made)[0])


def test_gathers() -> None:
    """The rows of a table, and the gradient that comes back; a bad index is heard of later."""
    for dtype, width in ((F32, 4), (F32, 3), (BF16, 1), (F64, 1), (F16, 600)):
        table = positive((5, width), dtype)
        for index in (np.array([[1, 4], [1, 0]]), np.array([3], np.int32), np.array([], np.int64)):

            def gather(table: Any, index: Any, g: Any) -> Any:
                op = ops.SparseGatherV2()
                return op(table, index, 0), op.backward(g)

            assert_calls_alike(gather, table, index, gradient((*index.shape, width), dtype))
    with refused(ValueError, "lives elsewhere than"):
        ops.SparseGatherV2()(on_device(table), np.array([1]), 0)
    table, index = on_device([positive((5, 3)), np.array([1, 5, -2])])
    found = on_host(ops.SparseGatherV2()(table, index, 0))
    with told(IndexError, "SparseGatherV2: indices[1] is out of range"):
        fusestep.synchronize()
    assert found[0].all() and not found[1:].any()


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("op", [ops.FusedSparseLazyAdam(), ops.FusedSparseAdam(use_locking=True)])
def test_bad_indices_are_told_later(op: Any, index_dtype: Any) -> None:
    """In the words of the host, once; nothing is written, and the next call is a good one."""
    arrays, values = [positive((6, 5)) for _ in range(3)], gradient((4, 5))
    for bad in (-1, 6, 2**31 - 1):
        w, m, v = on_device(arrays)
        index = np.array([1, 0, bad, 5], index_dtype)
        with pytest.raises(IndexError) as expected:
            op(*(a.copy() for a in arrays), *BETAS, values, index)
        with told(IndexError, str(expected.value), w, m, v) as found:
            op(w, m, v, *BETAS, *on_device([values, index]))
            op(w, m, v, *BETAS, *on_device([values[:2], np.array([-7, 2], index_dtype)]))
        (note,) = found.value.__notes__
        assert "indices[0]" in note and "got -7" in note
        fusestep.synchronize()
        twins = on_device(arrays)
        for own in ([w, m, v], twins):
            op(*own, *BETAS, *on_device([values, np.array([1, 0, 2, 5])]))
        assert_same([w, m, v], twins)
    for n, d in ((0, 3), (4, 0)):
        empty = on_device([positive((n, d)) for _ in range(3)])
        with told(IndexError, f"expected 0 <= index < {n}, got 7"):
            op(*empty, *BETAS, on_device(gradient((1, d))), on_device(np.array([7])))


@pytest.mark.parametrize("operator", [*EVERY_OPERATOR.values(), ADAM_UPDATE], ids=str)
def test_what_each_argument_refuses(operator: Operator) -> None:
    """Arguments are refused as on the host, or if they live elsewhere; nothing is written."""
    host = operator.inputs()
    there = {name: on_device(v) if isinstance(v, np.ndarray) else v for name, v in host.items()}
    arrays = {name: value for name, value in there.items() if value is not host[name]}
    for name in arrays:
        for make, error, text in FAULTS[operator.known(name).takes]:
            bad = make(operator.inputs()[name])
            if type(bad) is not np.ndarray or not bad.flags.carray or not bad.dtype.isnative:
                continue  # it is no array that a device has
            for each in error if isinstance(error, tuple) else (error,):
                if bad.dtype.kind not in "cO":
                    with unchanged(*arrays.values()), pytest.raises(each, match=f"{name} {text}"):
                        operator.call({**there, name: on_device(bad)})
    for name in arrays:
        for given in ({**there, name: host[name]}, {**host, name: there[name]}):
            with refused(ValueError, "lives elsewhere than", *arrays.values()):
                operator.call(given)
    first, *others = operator.variables
    shared = [*others, *([] if operator.takes_rows else [operator.gradient])]
    for name in shared if operator.written else ():
        with refused(ValueError, "shares memory with", *arrays.values()):
            operator.call({**there, name: there[first]})
    with refused(ValueError, "is not contiguous", *arrays.values()):
        strided = on_device(positive((5, 6)))[:, ::2]
        operator.call({**there, first: strided})


@only(SIMULATOR, reason="its arrays can be read-only, and begin between two elements")
def test_memory_that_cannot_be_written() -> None:
    w, m, v = theirs = on_device([positive((5, 3)) for _ in range(3)])
    with refused(ValueError, "is not contiguous", *theirs):
        ops.Adam()(w, m, v, *BETAS, on_device(gradient((5, 6)))[:, ::2])
    locked = on_device(positive((5, 3)))
    locked._ary.flags.writeable = False
    with refused(ValueError, "is read-only", *theirs):
        ops.Adam()(locked, m, v, *BETAS, on_device(gradient((5, 3))))
    ops.Adam()(w, m, v, *BETAS, locked)
    for shift in (1, 2):
        between = np.zeros(64, np.uint8)[shift : shift + 60].view(F32).reshape(5, 3)
        with refused(ValueError, "is not aligned", *theirs):
            ops.Adam()(w, m, v, *BETAS, type(w)(between))


def test_clipping() -> None:
    """New gradients and in place, as on the host; a bad index or a small norm writes nothing."""
    shapes = (((sized(70, 700), 3), F32), ((9,), F64), ((), F16))
    index = np.concatenate([[1, 4, 1], *sized([], [np.full(HOT + 9, 2)])]).astype(np.int64)
    host: list[Any] = [
        *(gradient(shape, dtype) for shape, dtype in shapes),
        None, ops.RowTensor(index, gradient((len(index), 2)), (5, 2)), gradient((33,), BF16),
    ]  # fmt: skip
    ours, other = (on_device(host) for _ in range(2))
    norm = ops.global_norm(host)
    if COMPUTES:
        np.testing.assert_allclose(ops.global_norm(ours), norm, rtol=1e-12)
    for known in (None, norm):
        expected = ops.clip_by_global_norm(host, 0.5 * norm, known)
        with unchanged(ours):
            found = ops.clip_by_global_norm(ours, 0.5 * norm, known)
        assert_close(found, expected, "clipped")
    with refused(ValueError, "x[6] shares memory with x[0]", ours):
        ops.clip_by_global_norm([*ours, ours[0]], 1e-3, in_place=True)
    with refused(ValueError, "x[6] is not contiguous", ours):
        strided = on_device(gradient((5, 6)))[:, ::2]
        ops.clip_by_global_norm([*ours, strided], 1e-3, in_place=True)
    for known in (None, norm):
        with unchanged(ours):
            for limit in (norm * 1.001, 2.0 * norm):
                found = ops.clip_by_global_norm(ours, limit, known, in_place=True)
    for known, of in ((None, ours), (norm, other)):
        found = ops.clip_by_global_norm(of, 0.5 * norm, known, in_place=True)
        assert all(a is b for a, b in zip(found, of, strict=True))
        assert_close(of, expected, "clipped in place")
    bad = on_device(ops.RowTensor(np.array([0, 5]), gradient((2, 2)), (5, 2)))
    with told(IndexError, "clip_by_global_norm: x[6]: indices[1] is out of range", ours, bad):
        ops.clip_by_global_norm([*ours, bad], 1e-3, in_place=True)
    not_a_number = on_device(np.array([np.nan, 1.0], F32))
    ops.clip_by_global_norm([not_a_number], in_place=True)
    assert np.isnan(on_host(not_a_number)).all()
