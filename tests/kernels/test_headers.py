"""The compiled reading of array headers: what it takes, what it leaves to the checks in Python."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from numba import carray
from fusestep import nn, ops
from fusestep.kernels.cpu.compiler.compile import NativeFunction
from fusestep.kernels.cpu.compiler.intrinsics import as_pointer
from fusestep.kernels.cpu.compiler.machine import PythonEntry
from fusestep.kernels.cpu.counts import Count, are_equal
from fusestep.kernels.cpu.headers import arrays as headers
from fusestep.kernels.cpu.headers.arrays import OPEN, address_of, alike, expected_arrays, overlaps
from fusestep.kernels.cpu.threads.parallel import commit
from helpers import at_once

NOWHERE = np.zeros((2, 0), np.int64)
SCALARS = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


class Subclass(np.ndarray):
    pass


def three(shape=(6,), dtype=np.float32):
    return tuple(np.ones(shape, dtype) for _ in range(3))


def read_only():
    array = np.ones(6, np.float32)
    array.flags.writeable = False
    return array


def test_the_layout_of_headers_is_known_here():
    assert headers.usable


@pytest.mark.parametrize("usable", [True, False])
def test_address(monkeypatch, usable):
    monkeypatch.setattr(headers, "usable", usable)
    base = np.arange(24, dtype=np.float64).reshape(4, 6)
    for array in (base, base[1:], base[:, 2:], base.T, base[:0], np.array(1.0), base[::-1]):
        assert address_of(array) == array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 1, 4), (), (0,), (3, 0)])
def test_alike_arrays(dtype, shape):
    arrays = three(shape, dtype)
    assert alike(arrays, 2) == [address_of(a) for a in arrays]


def test_alike_arrays_that_touch():
    memory = np.zeros(18, np.float32)
    assert alike((memory[6:12], memory[:6], memory[12:]), 3) is not None


def with_rows(shape=(6, 2), n=4, index=np.int64, dtype=np.float32):
    return [*three(shape, dtype), np.zeros(n, index), np.ones((n, *shape[1:]), dtype)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("shape", "n"), [((6, 2), 4), ((6,), 9), ((2, 3, 0), 5), ((3, 2), 0)])
def test_alike_arrays_with_rows(dtype, index, shape, n):
    arrays = tuple(with_rows(shape, n, index, dtype))
    assert alike(arrays, 3, has_rows=True) == [address_of(a) for a in arrays]
    assert alike((*arrays[:3], read_only().view(np.int64), np.ones((3, *shape[1:]), dtype)), 3,
                 has_rows=True) is not None  # fmt: skip


def row_forms():
    """A dense gradient, and a row-sparse one of two columns."""
    return [(F32, (2, 3)), (np.dtype(np.int64), (OPEN,)), (F64, (OPEN, 2))]


@pytest.mark.parametrize("n", [0, 1, 7])
def test_expected_rows(n):
    arrays = (np.ones((2, 3), np.float32), np.zeros(n, np.int64), np.ones((n, 2)))
    found = expected_arrays(row_forms(), NOWHERE).addresses(arrays)
    assert found.tolist() == [address_of(a) for a in arrays]


@pytest.mark.parametrize(("k", "wrong"), [
    (0, np.ones((3, 2), np.float32)), (0, np.ones((2, 3))), (0, np.ones((2, 3, 1), np.float32)),
    (0, np.ones((3, 2), np.float32).T),
    (0, np.zeros(25, np.uint8)[1:].view(np.float32).reshape(2, 3)),
    (0, np.ones((2, 3), np.float32).view(Subclass)), (0, None), (1, np.zeros(3, np.int64)),
    (1, np.zeros(4, np.int32)), (1, np.zeros((4, 1), np.int64)),
    (1, np.zeros(8, np.int64)[::2]), (2, np.ones((5, 2))), (2, np.ones((4, 3))),
    (2, np.ones((4, 2), np.float32)),
])  # fmt: skip
def test_arrays_that_are_not_as_expected(k, wrong):
    arrays = [np.ones((2, 3), np.float32), np.zeros(4, np.int64), np.ones((4, 2))]
    expected = expected_arrays(row_forms(), NOWHERE)
    assert expected.addresses(tuple(arrays)) is not None
    arrays[k] = wrong
    assert expected.addresses(tuple(arrays)) is None


@pytest.mark.parametrize("k", range(3))
def test_expected_arrays_in_memory_that_is_written(k):
    """The number of rows tells how far the arrays of a row-sparse gradient reach."""
    memory = np.zeros(128)
    arrays = [np.ones((2, 3), np.float32), np.zeros(4, np.int64), np.ones((4, 2))]
    begin = address_of(memory) + 512
    expected = expected_arrays(row_forms(), np.array([[begin], [begin + 512]]))
    assert expected.addresses(tuple(arrays)) is not None
    size = arrays[k].nbytes
    for first, fits in ((512 - size, True), (512 - size + 8, False), (1016 - size, False)):
        own = memory.view(np.uint8)[first : first + size]
        arrays[k] = own.view(arrays[k].dtype).reshape(arrays[k].shape)
        assert (expected.addresses(tuple(arrays)) is not None) == fits


def test_no_arrays_are_alike():
    assert alike((), 0) == []


def test_expected_of_what_is_written():
    arrays, written = three()[:1], three((2,))
    expected = expected_arrays([(F32, (6,))], NOWHERE, written=written)
    places = {id(array): address_of(array) for array in written}
    for array in written:
        assert expected.addresses(arrays) is not None
        array.flags.writeable = False
        assert expected.addresses(arrays) is None
        array.flags.writeable = True
        array.resize((1, 2), refcheck=False)
        assert expected.addresses(arrays) is None
        array.resize((2,), refcheck=False)
        array.resize((4_000,), refcheck=False)  # which moves it
        array.resize((2,), refcheck=False)
        assert (expected.addresses(arrays) is None) == (address_of(array) != places[id(array)])
        expected = expected_arrays([(F32, (6,))], NOWHERE, written=written)
    assert expected.addresses((read_only(),)) is not None
    for n in (0, 2):
        assert expected.addresses(three()[:n]) is None


def test_overlaps():
    spans = np.array([[10, 30], [20, 40]])

    def find_at(address, n, begin, end):
        return overlaps(carray(as_pointer(address), (2, n), np.int64), begin, end)

    compiled = NativeFunction(find_at, "a test of overlaps", PythonEntry(returns=True)).call

    def find(spans, begin, end):
        return compiled(address_of(spans), spans.shape[1], begin, end)

    touching = [(0, 10), (20, 30), (40, 50), (15, 15), (25, 25)]
    assert not any(find(spans, begin, end) for begin, end in touching)
    sharing = [(0, 11), (19, 21), (12, 13), (0, 50), (29, 31), (39, 45), (20, 31)]
    assert all(find(spans, begin, end) for begin, end in sharing)
    assert not find(NOWHERE, 0, 100)


def test_counts():
    counts = np.array([3, 3, 3])
    assert are_equal(counts)
    assert are_equal(counts[:1])
    commit([], Count(counts))
    assert counts.tolist() == [4, 4, 4]
    counts[2] = 5
    assert not are_equal(counts)
    total = np.array([7], np.int32)
    commit([], Count(counts, np.array([0, 2]), total))
    assert counts.tolist() == [5, 4, 6]
    assert total.tolist() == [8]
    commit([], Count(counts, np.empty(0, np.int64), total))
    assert counts.tolist() == [5, 4, 6]
    assert total.tolist() == [9]


# The same results and errors whichever way the headers are read


def operator_step(gradient):
    variables = three((4, 3))
    ops.Adam()(*variables, *SCALARS, gradient)
    return variables


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_operators_read_slowly(monkeypatch, dtype):
    gradient = np.linspace(-1, 1, 12).reshape(4, 3).astype(dtype)
    fast = operator_step(gradient)
    for other in (gradient, np.asfortranarray(gradient), gradient.view(Subclass)):
        assert all(np.array_equal(a, b) for a, b in zip(operator_step(other), fast, strict=True))
    monkeypatch.setattr(headers, "usable", False)
    slow = operator_step(gradient)
    assert all(np.array_equal(a, b) for a, b in zip(slow, fast, strict=True))


def row_gradient(rng, n, index_dtype=np.int64, dtype=np.float32):
    indices = rng.integers(0, 5, n).astype(index_dtype)
    return ops.RowTensor(indices, rng.standard_normal((n, 3)).astype(dtype), (5, 3))


def mixed_steps():
    """Steps whose gradients change in kind, dtype and length."""
    rng = np.random.default_rng(0)
    parameters = [np.ones((5, 3), np.float32), np.ones(4, np.float32)]
    optimizer = nn.LazyAdam(parameters, 0.1)
    for k in range(12):
        n, index_dtype = (4, 4, 0, 9)[k % 4], (np.int64, np.int64, np.int32)[k % 3]
        rows = row_gradient(rng, n, index_dtype, np.float64 if k == 7 else np.float32)
        dense = rng.standard_normal(8).astype(np.float32)[:: 2 if k == 5 else 1][:4]
        optimizer(([rows, rows] if k == 9 else rows, None if k == 10 else dense))
    return [*parameters, *optimizer.moment1, *optimizer.moment2]


def test_optimizers_read_slowly(monkeypatch):
    fast = mixed_steps()
    monkeypatch.setattr(headers, "usable", False)
    assert all(np.array_equal(a, b) for a, b in zip(fast, mixed_steps(), strict=True))


def broken(rows, attribute, value):
    setattr(rows, attribute, value)
    return rows


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize(("attribute", "value", "error", "text"), [
    ("dense_shape", (4, 3), ValueError, "has a wrong dense_shape"),
    ("values", np.ones((4, 2), np.float32), ValueError, "has a wrong shape"),
    ("values", np.ones((3, 3), np.float32), ValueError, "has a wrong length"),
    ("values", np.ones((4, 3), np.int32), TypeError, "has a wrong dtype"),
    ("indices", np.zeros(4, np.int16), TypeError, "has a wrong dtype"),
    ("indices", np.zeros((4, 1), np.int64), ValueError, "has a wrong shape"),
    ("indices", np.full(4, 5), IndexError, "is out of range"),
])  # fmt: skip
def test_row_tensor_that_was_assigned_to(monkeypatch, usable, attribute, value, error, text):
    monkeypatch.setattr(headers, "usable", usable)
    rng = np.random.default_rng(1)
    table = np.ones((5, 3), np.float32)
    optimizer = nn.LazyAdam([table], 0.1)
    optimizer((row_gradient(rng, 4),))
    before = table.copy()
    with pytest.raises(error, match=text):
        optimizer((broken(row_gradient(rng, 4), attribute, value),))
    assert np.array_equal(table, before)
    assert optimizer.global_step[0] == 1


def test_a_step_with_too_few_or_many_gradients():
    opt = nn.Adam(list(three()))
    opt(three())
    before = [p.data.copy() for p in opt.parameters]
    for gradients in (three()[:2], (*three(), *three())):
        with pytest.raises(ValueError, match="argument"):
            opt.construct(gradients)
    for parameter, old in zip(opt.parameters, before, strict=True):
        np.testing.assert_array_equal(parameter.data, old)


def test_prepared_steps_belong_to_one_call_at_a_time():
    """Threads that share a kernel, an operator and the prepared calls do not mix their arrays."""
    gradients = [np.full(3000, k + 1, np.float32) for k in range(4)]
    operator = ops.ApplyMomentum()
    found = [np.zeros((2, 3000), np.float32) for _ in gradients]

    def work(k):
        w, a = found[k]
        for _ in range(300):
            operator(w, a, 0.5, gradients[k], 0.0)

    at_once([partial(work, k) for k in range(4)])
    for k, (w, a) in enumerate(found):
        assert (w == -150.0 * (k + 1)).all()
        assert (a == k + 1).all()
