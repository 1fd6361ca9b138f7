"""SparseGatherV2 and RowTensor: what they give, what they refuse, what can be assigned."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from faults import ARRAY, INDICES, Fault, values
from fusestep import nn, ops
from helpers import STORAGE_DTYPES, assert_same_bits, refused, unchanged

TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)


def reject_faults(name: str, usual: Any, faults: Sequence[Fault], call: Any) -> None:
    """``call`` of each fault is refused, with a text that names the class and the argument."""
    __tracebackhide__ = True
    for make, error, text in faults:
        bad = make(usual.copy())
        with refused(error, f"{name} {text}", bad):
            call(bad)


def test_gather_refuses() -> None:
    gather, indices = ops.SparseGatherV2(), np.array([1, 0, 1, 3])
    reject_faults("^SparseGatherV2: params", TABLE, ARRAY, lambda bad: gather(bad, indices))
    of_any_shape = [fault for fault in INDICES if "shape" not in fault.text]
    reject_faults("^SparseGatherV2: indices", indices, of_any_shape, lambda bad: gather(TABLE, bad))
    for params, given, axis, error, text in (
        (np.array(1.0), np.array([0]), 0, ValueError, "params has no rows"),
        (TABLE, np.array([-1]), 0, IndexError, r"indices\[0\] is out of range: .*got -1"),
        (TABLE, np.array([[0, 1], [2, 5]]), 0, IndexError, r"indices\[3\] is out of .*got 5"),
        (TABLE[:0], np.array([0]), 0, IndexError, r"indices\[0\] is out of range: .*index < 0,"),
        (TABLE, np.array([0]), 1, ValueError, "axis is not supported: expected 0, got 1"),
        (TABLE, np.array([0]), -1, ValueError, "axis is not supported: expected 0, got -1"),
        (TABLE, np.array([0]), True, TypeError, "axis has a wrong type: expected an int"),
        (TABLE, np.array([0]), 0.0, TypeError, "axis has a wrong type"),
        (TABLE, np.array([0]), None, TypeError, "axis has a wrong type"),
    ):
        with refused(error, f"^SparseGatherV2: {text}", params, given):
            gather(params, given, axis)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
def test_gather_and_backward(dtype: Any, index_dtype: Any, shape: tuple[int, ...]) -> None:
    table = TABLE.astype(dtype)
    indices = np.random.default_rng(3).integers(0, 5, shape).astype(index_dtype)
    gather = ops.SparseGatherV2()
    with unchanged(table, indices):
        out = gather(table, indices, 0)
    assert_same_bits(out, table[indices])
    rows = gather.backward(np.full(out.shape, 0.5, dtype))
    counts = np.bincount(indices.reshape(-1), minlength=5)[:, None] * np.ones((1, 3)) * 0.5
    assert_same_bits(rows.to_dense(), counts.astype(dtype))
    assert rows.dense_shape == (5, 3)


def test_gather_of_a_strided_table() -> None:
    strided = np.repeat(TABLE, 2, axis=1)[:, ::2]
    assert_same_bits(ops.SparseGatherV2()(strided, np.array([4, 0])), TABLE[[4, 0]])


def test_backward_needs_a_call_and_sees_its_indices() -> None:
    """A refused call is none; indices are those of the call, whatever becomes of them."""
    gather, indices, grad = ops.SparseGatherV2(), np.array([7, 2]), np.ones((2, 3), np.float32)
    for refuses in (False, True):
        if refuses:
            with pytest.raises(IndexError):
                gather(TABLE, indices)
        with pytest.raises(RuntimeError, match="backward needs a call"):
            gather.backward(grad)
    indices[0] = 1
    gather(TABLE, indices)
    indices[:] = 4
    assert gather.backward(grad).indices.tolist() == [1, 2]


def test_backward_refuses() -> None:
    gather = ops.SparseGatherV2()
    out = gather(TABLE, np.array([0, 1]))
    reject_faults("^SparseGatherV2: grad", out, ARRAY, gather.backward)
    for grad in (np.ones((3, 3), np.float32), np.ones(6, np.float32)):
        with refused(ValueError, r"^SparseGatherV2: grad has a wrong shape: expected \(2, 3\)"):
            gather.backward(grad)


def test_gather_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match="SparseGatherV2: argument 'axis' is unknown"):
        ops.SparseGatherV2(axis=0)


def test_subclasses_are_taken_as_plain_arrays() -> None:
    """A matrix stays two-dimensional whatever is asked of it."""

    class Stubborn(np.ndarray):
        def reshape(self, *_: Any, **__: Any) -> Any:
            return self

    indices = np.array([[2, 2, 2]]).view(Stubborn)
    np.testing.assert_array_equal(ops.SparseGatherV2()(TABLE, indices, 0), TABLE[[[2, 2, 2]]])


# RowTensor

ROWS = np.ones((2, 3), np.float32)


NO_SHAPES = [*values((5, None, "53", "ab", (5.5, 3), np.array([5, 3])), TypeError, "is no shape")]
NO_SHAPES += values(((), (-5, 3)), ValueError, "has no rows or a negative size")


def test_row_tensor_refuses() -> None:
    """Where it is made; and where an attribute is assigned, which stays then."""
    indices, given = np.array([1, 0, 1, 3]), np.ones((4, 3), np.float32)
    usual = {"indices": indices, "values": given, "dense_shape": (5, 3)}
    for name, faults in {"indices": INDICES, "values": ARRAY, "dense_shape": NO_SHAPES}.items():
        of_name = np.asarray(usual[name])
        reject_faults(
            f"^RowTensor: {name}", of_name, faults,
            lambda bad, name=name: ops.RowTensor(**{**usual, name: bad}))  # fmt: skip
        rows = ops.RowTensor(**usual)
        kinds = [f for f in faults if "shape:" not in f.text and "dtype" not in f.text]
        kinds = [f for f in kinds if "masked" not in f.text]
        reject_faults(f"^RowTensor: {name}", of_name, kinds, partial(setattr, rows, name))
        assert rows.dense_shape == (5, 3) and rows.coalesce().values.shape == (3, 3)
    for found, shape, text in (
        (given, (5, 4), "values has a wrong shape"), (given, (5,), "values has a wrong shape"),
        (np.array(1.0), (), ".*dense_shape"),
        (given[:3], (5, 3), "values has a wrong length: expected 4"),
    ):  # fmt: skip
        with refused(ValueError, f"^RowTensor: {text}", indices, found):
            ops.RowTensor(indices, found, shape)


@pytest.mark.parametrize("method", ["to_dense", "coalesce"])
@pytest.mark.parametrize(("bad", "position"), [(-1, 0), (5, 1)])
def test_row_tensor_with_a_bad_index(method: str, bad: int, position: int) -> None:
    indices = np.zeros(2, np.int32)
    indices[position] = bad
    rows = ops.RowTensor(indices, ROWS, (5, 3))
    with refused(IndexError, rf"^RowTensor: indices\[{position}\] is out of range", rows):
        getattr(rows, method)()


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_row_tensor(dtype: Any) -> None:
    rows = ops.RowTensor(np.array([3, 0, 3], np.int32), np.ones((3, 2), dtype), [4, 2])
    assert (rows.shape, rows.dense_shape, rows.dtype) == ((4, 2), (4, 2), dtype)
    once = rows.coalesce()
    assert once.indices.tolist() == [0, 3]
    assert once.values.astype(float).tolist() == [[1, 1], [2, 2]]
    assert rows.to_dense().astype(float).tolist() == [[1, 1], [0, 0], [0, 0], [2, 2]]
    assert rows.to_dense().dtype == dtype
    assert "RowTensor(indices=(3,) int32" in repr(rows)
    assert nn.RowTensor is ops.RowTensor


@pytest.mark.parametrize("use", [ops.RowTensor.coalesce, ops.RowTensor.to_dense])
@pytest.mark.parametrize(("attribute", "value", "text"), [
    ("dense_shape", (5, 4), "values has a wrong shape"),
    ("values", np.ones((3, 3), np.float32), "values has a wrong length"),
    ("indices", np.zeros((2, 1), np.int64), "indices has a wrong shape"),
])  # fmt: skip
def test_attributes_of_row_tensor_that_do_not_fit_together(
    use: Any, attribute: str, value: Any, text: str
) -> None:
    rows = ops.RowTensor(np.array([3, 0]), np.ones((2, 3), np.float32), (5, 3))
    setattr(rows, attribute, value)
    with pytest.raises(ValueError, match=f"^RowTensor: {text}"):
        use(rows)


def test_a_list_that_is_assigned_as_dense_shape() -> None:
    rows = ops.RowTensor(np.array([3, 0]), np.ones((2, 3), np.float32), (5, 3))
    rows.dense_shape = [6, np.int64(3)]
    assert rows.dense_shape == (6, 3)
    nn.LazyAdam([np.ones((6, 3), np.float32)])([rows])


def test_row_tensor_adopts_arrays() -> None:
    indices = np.array([0, 1])
    rows = ops.RowTensor(indices, ROWS, (5, 3))
    assert rows.indices is indices
    assert rows.values is ROWS
