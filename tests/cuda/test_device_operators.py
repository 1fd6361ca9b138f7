"""Operators on device arrays, as on the host and as published; `ops.adam_update` of MXNet."""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import fusestep

from devices import (  # isort: skip
    BETAS, COMPUTES, MARKS, SIMULATOR, assert_calls_alike, assert_close, assert_same, gradient,
    on_device, on_host, only, pairs, positive, refused, rows, sized, told, unchanged)  # fmt: skip
from faults import FAULTS
from fusestep import ops
from fusestep.kernels.tables import HOT
from helpers import STORAGE_DTYPES, assert_within_ulps, in_turn
from operators import ADAM_UPDATE, EVERY_OPERATOR, LARS_UPDATE, Operator
from test_ops_reference import CALLS

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES
# Between the device and the CPU: both round each operation alike, but either compiler chooses for
# itself which products and sums become one FMA. Each choice is worth at most half a unit, and no
# rule has more than about eight.
CPU_ULPS = 4.0


def called(operator: Operator, inputs: dict[str, Any], there: Any, **made: Any) -> Any:
    """The variables after a call where ``there`` puts arrays, and what it returns."""
    given = {name: there(v) if isinstance(v, np.ndarray) else v for name, v in inputs.items()}
    found = operator.call(given, **made)
    if operator.returned:
        returned = found if isinstance(found, tuple) else (found,)
        assert [*map(id, returned)] == [id(given[name]) for name in operator.returned]
    fusestep.synchronize()
    return [given[name] for name in operator.variables], found


def assert_operator(operator: Operator, inputs: dict[str, Any], **made: Any) -> None:
    """All numbers are of size 1, but FTRL adds terms of ten times that."""
    __tracebackhide__ = True
    size = 10.0 if "Ftrl" in operator.name else 1.0
    both = (called(operator, inputs, there, **made) for there in (on_device, np.copy))
    for a, b in pairs(*both):
        if COMPUTES:
            assert_within_ulps(a, b, size + np.abs(b.astype(float)), CPU_ULPS)


# Each with the options of its constructor that change the step.
MADE = [(EVERY_OPERATOR[name], made) for name, made, _ in CALLS] + [(LARS_UPDATE, {})]
MADE += [(ADAM_UPDATE, made) for made in ({}, {"compat": "1.9"}, {"use_locking": True})]
DENSE = [one for one in MADE if not one[0].takes_rows]
ROWS = [one for one in MADE if one[0].takes_rows]
ROWS += [(op, {"use_locking": True}) for op, made in ROWS if not made]


@pytest.mark.parametrize(
    ("call", "dtype"),
    sized(in_turn(DENSE, beside_float32=False), [*product(DENSE, STORAGE_DTYPES)]), ids=str,
)  # fmt: skip
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
    dropped = called(operator, inputs, on_device, **made, out_of_range="drop")
    assert_same(dropped, called(operator, kept, on_device, **made))


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
    """A view of the weight is the weight for MXNet; what is only read may be read-only."""
    w, m, v, other, g = theirs = on_device([positive((5, 3)) for _ in range(5)])
    view = type(w)(w._ary)
    assert ops.adam_update(w, g, m, v, view, **SCALARS) is view
    g._ary.flags.writeable = False
    with refused(ValueError, "is read-only", *theirs):
        ops.Adam()(g, m, v, *BETAS, w)
    ops.Adam()(w, m, v, *BETAS, g)
    w._ary.flags.writeable = False
    with unchanged(w, g):
        ops.adam_update(w, g, m, v, other, **SCALARS)
    for shift in (1, 2):
        between = np.zeros(64, np.uint8)[shift : shift + 60].view(F32).reshape(5, 3)
        with refused(ValueError, "is not aligned", *theirs):
            ops.Adam()(other, m, v, *BETAS, type(w)(between))


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


# ops.adam_update

SHAPE = (5, 3)
SCALARS: dict[str, Any] = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "2.0": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4},
    "1.9": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4, "compat": "1.9"},
    "standard": {"wd": 0.3, "lazy_update": False}, "locked": {"wd": 0.3, "use_locking": True},
}  # fmt: skip


WHOLE, EMPTY = ((5, 3), None), ((0, 3), None)
SPARSE, ONE, NO_ROWS = ((5, 3), [1, 4, 1, 0]), ((4,), [3]), ((5, 3), [])
# Options, where the result goes, shape and rows of the gradient, dtypes of weight and gradient.
UPDATES = [
    *product(OPTIONS, ["weight"], (WHOLE, SPARSE), [(F32, F32)]),
    *product(["1.9"], ["None"], (WHOLE, SPARSE), [(F32, F32)]),
    *product(["standard", "locked"], ["other"], (WHOLE, SPARSE), [(F32, F32)]),
    *product(
        ["standard"], ["None", "other"], (WHOLE, SPARSE), [(F64, F32), (F16, F16), (BF16, BF16)]),
    *product(
        ["plain"], ["weight", "None", "other"], (((), None), EMPTY, NO_ROWS, ONE), [(F32, F32)]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "place", "form", "dtypes"), UPDATES, ids=str)
def test_updates(options: str, place: str, form: Any, dtypes: Any) -> None:
    """Every option, dense and row-sparse, wherever the result goes."""

    def update(w: Any, mean: Any, var: Any, other: Any, g: Any) -> Any:
        out = {"weight": w, "None": None, "other": other}[place]
        for _ in range(2):
            found = ops.adam_update(w, g, mean, var, out, **SCALARS, **OPTIONS[options])
            assert out is None or found is out
        assert type(found) is type(w) or found.dtype == BF16
        return found

    (shape, indices), (dtype, of_gradient) = form, dtypes
    arrays = [positive(shape, dtype) for _ in range(4)]
    make = gradient if indices is None else partial(rows, indices)
    assert_calls_alike(update, *arrays, make(shape, of_gradient), compare=assert_close)


@pytest.mark.parametrize("lazy", [True, False])
def test_bad_rows_of_an_update(lazy: bool) -> None:
    """A bad index writes nothing, not even to ``out``; what is new is the weight."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    bad = on_device(rows([1, 5], SHAPE))
    text = "adam_update: indices[1] is out of range: expected 0 <="
    for place in (w, out, None):
        with told(IndexError, text, *theirs):
            new = ops.adam_update(w, bad, mean, var, place, lazy_update=lazy, **SCALARS)
    assert_same(new, on_host(w))


def test_what_an_update_refuses() -> None:
    """What `test_what_each_argument_refuses` does not know of."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    g, host, room = on_device(gradient(SHAPE)), positive(SHAPE), on_device(positive((9, 3)))
    shared = on_device(rows([1], SHAPE))
    shared.values = out[:1]
    huge = on_device([np.zeros((2**61, 0), F16) for _ in range(4)])
    elsewhere, overlap = "lives elsewhere than", "shares memory with"
    for error, text, arrays in (
        (ValueError, elsewhere, (w, rows([1], SHAPE), mean, var)),
        (ValueError, elsewhere, (w, g, mean, var, host)),
        (ValueError, elsewhere, (host, shared, host + 1, host + 2, host)),
        (ValueError, overlap, (w, g, mean, var, mean)),
        (ValueError, overlap, (w, w, mean, var, w)),
        (ValueError, overlap, (room[:5], g, mean, var, room[1:6])),
        (ValueError, overlap, (w, room[:5], room[4:], var)),
        (ValueError, overlap, (w, room[4:], mean, var, room[:5])),
        (ValueError, overlap, (w, shared, mean, var, out)),
        (ValueError, "too long sort keys",
         (huge[0], on_device(rows([1, 2], (2**61, 0), F16)), *huge[1:])),
    ):  # fmt: skip
        with refused(error, text, *theirs, room):
            ops.adam_update(*arrays, **SCALARS)
    with refused(RuntimeError, "lives on a CUDA device", *theirs):
        ops.adam_update(w, g, mean, var, out, lr=on_device(np.array(0.1)))
    # Only the lower half is read, so the upper one may be written.
    ops.adam_update(room[:4], room[4:8], *on_device([positive((4, 3))] * 2), **SCALARS)
