"""global_norm and clip_by_global_norm: dense and row-sparse gradients taken together."""

import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
import reference_layerwise as layerwise
from faults import FAULTS
from fusestep import nn, ops

from helpers import (  # isort: skip
    BF16, EPSILON, STORAGE_DTYPES, assert_same_arrays, assert_same_bits, refused, unchanged,
)  # fmt: skip
from reference import wide

EACH_DTYPE = pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
HOT = 512  # a row with more occurrences is summed in ranges


def dense(shape: Any, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rows(
    indices: Any, tail: tuple[int, ...] = (3,), n: int = 10, dtype: Any = np.float32, seed: int = 0
) -> ops.RowTensor:
    """A RowTensor whose values are multiples of 1/32, so that sums of them are exact."""
    indices = np.asarray(indices, np.int64)
    values = np.random.default_rng(seed).integers(-64, 65, (len(indices), *tail)) / 32
    return ops.RowTensor(indices, values.astype(dtype), (n, *tail))


def plain(gradients: Any) -> list[Any]:
    """The same for the reference, which knows arrays and pairs."""
    return [
        (g.indices, wide(g.values)) if isinstance(g, ops.RowTensor) else wide(g)
        for g in gradients
        if g is not None
    ]


def assert_norm(gradients: Any, rel: float = 1e-12) -> float:
    """The norm is that of the reference, and no gradient has changed."""
    __tracebackhide__ = True
    with unchanged([g for g in gradients if g is not None]):
        found = ops.global_norm(gradients)
    assert type(found) is float
    assert found == pytest.approx(layerwise.global_norm(plain(gradients)), rel=rel)
    return found


@EACH_DTYPE
def test_rows_of_equal_indices_are_summed_first(dtype: np.dtype) -> None:
    """1 and -1 in the same row make no norm; 3 and 1 make 4."""
    values = np.array([[1.0], [3.0], [-1.0], [1.0]]).astype(dtype)
    assert ops.global_norm([ops.RowTensor(np.array([2, 5, 2, 5]), values, (9, 1))]) == 4.0


class Sparse:
    """What is asked of a sparse COO tensor of torch."""

    is_sparse = True

    def __init__(self, g: ops.RowTensor) -> None:
        self.shape, self._parts = g.shape, (g.indices[None], g.values)

    def _indices(self) -> np.ndarray:
        return self._parts[0]

    def _values(self) -> Any:
        return self

    def detach(self) -> np.ndarray:
        return self._parts[1]


def test_forms_of_rows() -> None:
    """Those that optimizers take: a list for one tensor, and a sparse tensor of torch."""
    first, second = rows([2, 5, 2]), rows([5, 0], seed=1)
    joined = ops.RowTensor(
        np.concatenate([first.indices, second.indices]),
        np.concatenate([first.values, second.values]), first.shape)  # fmt: skip
    for form, same in (([first, second], joined), (Sparse(first), first)):
        gradients = [dense(3), form, None]
        assert ops.global_norm(gradients) == ops.global_norm([dense(3), same, None])
        _, clipped, nothing = ops.clip_by_global_norm(gradients, 0.5)
        _, expected, _ = ops.clip_by_global_norm([dense(3), same, None], 0.5)
        assert nothing is None
        assert_same_bits(clipped.indices, expected.indices)
        assert_same_bits(clipped.values, expected.values)
        assert clipped.shape == expected.shape


@EACH_DTYPE
@pytest.mark.parametrize("count", [HOT, HOT + 1, 5_000, 20_000])
@pytest.mark.parametrize("width", [1, 3, 200])
def test_norm_with_a_hot_row(count: int, width: int, dtype: np.dtype) -> None:
    """16-bit values are added up in float32: 20,000 of them do not get lost."""
    indices = np.random.default_rng(1).permutation(np.repeat([4, 1, 7], [count, 3, HOT]))
    assert_norm([rows(indices, (width,), dtype=dtype)])


def mixture(scale: float = 1.0) -> list[Any]:
    """Dense and row-sparse gradients of all storage types, empty ones and None among them."""
    hot = np.random.default_rng(2).integers(0, 4, 3_000)
    gradients: list[Any] = [
        dense((50, 7)), None, rows([3, 3, 0]), dense(140_000, seed=1), rows(hot, (8,), 5),
        rows([]), dense((0,)), dense(()), rows([1, 1], (), 4), dense(9, np.float64),
        rows([0, 9, 0], (2, 2), 10, np.float64), dense((3, 3), np.float16),
        rows([2, 2], (5,), 3, np.float16), dense(33, BF16), rows([1, 0, 1], (4,), 2, BF16),
    ]  # fmt: skip
    for g in gradients:
        if g is not None:
            array = g.values if isinstance(g, ops.RowTensor) else g
            array[...] = (wide(array) * scale).astype(array.dtype)
    return gradients


def test_index_dtypes_and_layouts_agree() -> None:
    expected = ops.global_norm(mixture())
    narrow, strided = [], []
    for g in mixture():
        if isinstance(g, ops.RowTensor):
            narrow.append(ops.RowTensor(g.indices.astype(np.int32), g.values, g.dense_shape))
            g.indices, g.values = np.repeat(g.indices, 2)[::2], np.repeat(g.values, 2, axis=0)[::2]
            strided.append(g)
        else:
            narrow.append(nn.Parameter(g) if g is not None else None)
            strided.append(np.asarray(g.T, order="F") if g is not None else None)
    assert ops.global_norm(narrow) == expected
    assert ops.global_norm(strided) == pytest.approx(expected, rel=1e-12)


def test_norms_beyond_float32() -> None:
    """Squares, and sums of rows, that float32 arithmetic would lose."""
    assert_norm([np.full(9, 3e38, np.float32)])
    assert_norm([np.full(9, 1e-30, np.float32)], rel=1e-6)
    assert_norm([rows([1, 2], (1,)), np.full((2, 2), 3e38, np.float32)])
    assert_norm([np.full(3, 65504.0, np.float16)])


@pytest.mark.parametrize("n_rows", [2**40, 2**58, 2**59, 2**62])
def test_rows_of_a_table_beyond_all_memory(n_rows: int) -> None:
    """A gradient needs no table. Row and position must fit into 63 bits, or it is refused."""
    indices = np.array([0, n_rows // 2, *range(1, 8)])
    gradient = ops.RowTensor(indices, np.ones((9, 1), np.float32), (n_rows, 1))
    if n_rows < 2**59:
        assert ops.global_norm([gradient]) == 3.0
    else:
        with refused(ValueError, "need too long sort keys: expected at most 63 bits", gradient):
            ops.global_norm([gradient])


# Clipping


def assert_clipped(gradients: Any, found: Any, factor: float) -> None:
    """Kinds, shapes and dtypes as they were; values times `factor`, rounded once."""
    __tracebackhide__ = True
    assert type(found) is tuple and len(found) == len(gradients)
    for old, new in zip(gradients, found, strict=True):
        if old is None:
            assert new is None
            continue
        assert type(new) is type(old)
        if isinstance(old, ops.RowTensor):
            assert new.dense_shape == old.dense_shape
            assert_same_bits(new.indices, old.indices)
            assert not np.shares_memory(new.indices, old.indices)
            old, new = old.values, new.values
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert not np.shares_memory(new, old)
        expected = wide(old) * factor
        # The factor is rounded to the type of the arithmetic, the product to that of storage.
        allowed = np.abs(expected) * (EPSILON[new.dtype] + EPSILON[np.dtype(np.float32)])
        if new.dtype == np.float64:
            allowed = np.abs(expected) * 4e-16
        assert (np.abs(wide(new) - expected) <= np.maximum(allowed, 6e-8)).all()


def values_of(gradients: Any) -> list[np.ndarray]:
    return [g.values if isinstance(g, ops.RowTensor) else g for g in gradients if g is not None]


def check(
    gradients: list[Any], limit: float, known: float | None = None, *, exact: bool = True
) -> None:
    """Gradients that are clipped anew, and in place, by their own norm or by a known one. Where
    sums of rows are not exact, their own norm is taken from `ops.global_norm`."""
    __tracebackhide__ = True
    norm = known
    if known is None:
        norm = assert_norm(gradients) if exact else ops.global_norm(gradients)
    with unchanged([g for g in gradients if g is not None]):
        found = ops.clip_by_global_norm(gradients, limit, known)
    assert_clipped(gradients, found, limit / max(norm, limit))
    if norm <= limit:
        for new, old in zip(values_of(found), values_of(gradients), strict=True):
            assert_same_bits(new, old)
    with unchanged([g.indices for g in gradients if isinstance(g, ops.RowTensor)]):
        same = ops.clip_by_global_norm(gradients, limit, known, in_place=True)
    assert type(same) is tuple and all(a is b for a, b in zip(same, gradients, strict=True))
    for ours, other in zip(values_of(same), values_of(found), strict=True):
        assert_same_bits(ours, other)


@st.composite
def lists(draw: st.DrawFn) -> list[Any]:
    """Of any kinds, dtypes and widths; rows in any order, with any number of duplicates."""
    found: list[Any] = []
    for seed in range(draw(st.integers(0, 6))):
        dtype, kind = draw(st.sampled_from(STORAGE_DTYPES)), draw(st.integers(0, 4))
        if kind == 0:
            found.append(None)
        elif kind <= 2:
            shape = draw(st.sampled_from([(), (0,), (1,), (17,), (300,), (1_003,), (3, 4, 5)]))
            found.append(dense(shape, dtype, seed))
        else:
            n = draw(st.integers(1, 40))
            tail = draw(st.sampled_from([(), (1,), (3,), (17,), (2, 5), (0,)]))
            indices = draw(st.lists(st.integers(0, n - 1), max_size=60))
            found.append(rows(indices, tail, n, dtype, seed))
    return found


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    gradients=lists(), limits=st.lists(st.floats(1e-3, 30.0), min_size=1, max_size=3),
    known=st.none() | st.sampled_from([0.0, 0.5, 8.0, 900.0]))  # fmt: skip
def test_any_gradients(gradients: list[Any], limits: list[float], known: float | None) -> None:
    """Clipped again and again."""
    for k, limit in enumerate(limits):
        check(gradients, limit, known, exact=k == 0)


@pytest.mark.parametrize("clip_norm", [0.5, 1.0, 3, 250.0])
@pytest.mark.parametrize("use_norm", [None, 0.0, 0.5, 2.0, 8.0, 900.0])
def test_a_mixture(clip_norm: float, use_norm: float | None) -> None:
    """Above the limit, or of a norm that counts, whatever their own is."""
    check(mixture(10.0), clip_norm, use_norm)
    if use_norm is None:
        found = ops.clip_by_global_norm(mixture(10.0), clip_norm)
        assert ops.global_norm(list(found)) == pytest.approx(clip_norm, rel=1e-3)


@pytest.mark.parametrize("value", [np.float64(8.0), np.array([8.0])], ids=type)
def test_forms_of_a_known_norm(value: Any) -> None:
    (found,) = ops.clip_by_global_norm([np.ones(3, np.float32)], 2.0, value)
    assert found.tolist() == [0.25] * 3


def test_default_limit_is_one() -> None:
    (found,) = ops.clip_by_global_norm([np.array([3.0, 4.0])])
    np.testing.assert_allclose(found, [0.6, 0.8], rtol=1e-15)


@pytest.mark.parametrize("excess", [0.0, 1.0])
def test_clipping_below_the_limit_copies(excess: float) -> None:
    """On the limit too: every bit stays, negative zeros and subnormal numbers included."""
    gradients = mixture()
    gradients[0].flat[:3] = -0.0, 1e-42, -1e-42
    check(gradients, ops.global_norm(gradients) + excess)


def test_the_norm_that_was_measured_can_be_handed_over() -> None:
    """Whatever its size: float32 gradients have norms that are no float32 numbers."""
    for x in (1.0, 3e38):
        gradients = [np.full(100, x, np.float32)]
        (expected,) = ops.clip_by_global_norm(gradients, 1.0)
        (found,) = ops.clip_by_global_norm(gradients, 1.0, use_norm=ops.global_norm(gradients))
        assert_same_bits(found, expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norm_that_is_not_finite_makes_nan(bad: float, in_place: bool) -> None:
    """Zeros too: no gradient passes for a clipped one."""
    gradients = [np.array([0.0, bad, 1.0], np.float32), rows([1, 1]), None, dense((2,), BF16)]
    found = ops.clip_by_global_norm(gradients, 1.0, in_place=in_place)
    assert found[2] is None
    assert all(np.isnan(wide(values)).all() for values in values_of(found))
    assert found[1].indices.tolist() == [1, 1]


# In place


@pytest.mark.parametrize("excess", [0.0, 1.0])
def test_in_place_within_the_limit_nothing_is_written(excess: float) -> None:
    """Nor read again: what cannot be written to any more is not."""
    pages = mmap.mmap(-1, mmap.PAGESIZE)
    held = np.frombuffer(pages, np.float32)
    held[:] = 2.0
    gradients = [held, *mixture()]
    limit = ops.global_norm(gradients) + excess
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    address = ctypes.c_void_p(held.ctypes.data)
    assert protect(address, mmap.PAGESIZE, mmap.PROT_READ) == 0
    try:
        with unchanged([g for g in gradients if g is not None]):
            found = ops.clip_by_global_norm(gradients, limit, in_place=True)
        assert all(a is b for a, b in zip(found, gradients, strict=True))
        assert protect(address, mmap.PAGESIZE, 0) == 0  # a known norm: not even read
        ops.clip_by_global_norm(gradients, limit, limit, in_place=True)
    finally:
        protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


def test_in_place_of_parameters_and_nothing() -> None:
    assert ops.clip_by_global_norm([], in_place=True) == ()
    assert ops.clip_by_global_norm([None], in_place=True) == (None,)
    parameter = nn.Parameter(np.array([3.0, 4.0]))
    assert ops.clip_by_global_norm([parameter], 1.0, in_place=True)[0] is parameter
    np.testing.assert_allclose(parameter.data, [0.6, 0.8], rtol=1e-15)
    # Two row-sparse gradients may have their indices in common, and empty arrays their place.
    first, second, empty = rows([1, 2, 2]), rows([0, 0, 0], seed=1), dense((0, 3))
    second.indices = first.indices
    gradients = [first, second, empty, empty]
    expected = ops.clip_by_global_norm(gradients, 0.1)
    ops.clip_by_global_norm(gradients, 0.1, in_place=True)
    assert_same_arrays(values_of(gradients), values_of(expected))


def test_results_are_freed_when_nobody_has_them() -> None:
    """Not by the collector of cycles, which comes when it comes."""
    gc.collect()
    gc.disable()
    try:
        gradients = [dense(50), dense(50)]
        (first, _), watched = ops.clip_by_global_norm(gradients, 0.1), weakref.ref(gradients[1])
        result = weakref.ref(first)
        ops.clip_by_global_norm(gradients, 0.05, in_place=True)
        del gradients, first
        assert watched() is None and result() is None
    finally:
        gc.enable()


def read_only() -> np.ndarray:
    array = dense(4)
    array.flags.writeable = False
    return array


class Converted:
    """Reading it makes a new array each time."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return dense(4)


def refused_in_place() -> dict[str, tuple[list[Any], type[Exception], str]]:
    one, table = dense(9), rows([1, 2, 2])
    locked, strided = rows([1]), rows([1, 2])
    locked.values = read_only().reshape(1, 4)[:, :3]
    strided.values = np.repeat(strided.values, 2, axis=0)[::2]
    own = rows([1, 2])
    own.indices = own.values.reshape(-1)[:2].view(np.int32)
    theirs = ops.RowTensor(one[:2].view(np.int32), np.ones((2, 3), np.float32), (2**31 - 1, 3))
    whole = np.arange(12.0).reshape(2, 6)
    placed = ops.RowTensor(
        np.arange(2), whole[:, :3].copy(), (4, 3), positions=np.arange(2), batch_length=2**62
    )
    placed.positions = whole.reshape(-1)[:2].view(np.int64)
    apart = r"share memory with values to be scaled: expected separate arrays"
    return {
        "own indices": ([own], ValueError, rf"indices of x\[1\] {apart}"),
        "indices of another": ([one, theirs], ValueError, rf"indices of x\[2\] {apart}"),
        "positions": ([placed, whole], ValueError, rf"positions of x\[1\] {apart}"),
        "read-only": ([read_only()], ValueError, r"x\[1\] is read-only"),
        "read-only rows": ([locked], ValueError, r"x\[1\] is read-only"),
        "strided": ([dense(9)[::2]], ValueError, r"x\[1\] is not contiguous"),
        "transposed": ([dense((3, 2)).T], ValueError, r"x\[1\] is not contiguous"),
        "strided rows": ([strided], ValueError, r"x\[1\] is not contiguous"),
        "converted": ([Converted()], TypeError, r"x\[1\] cannot be updated in place"),
        "list": ([[table, table]], TypeError, r"x\[1\] cannot be scaled in place: .* got list"),
        "sparse": ([Sparse(table)], TypeError, r"x\[1\] cannot be scaled in place: .* got Sparse"),
        "twice": ([one, one], ValueError, r"x\[2\] shares memory with x\[1\]"),
        "rows twice": ([table, table], ValueError, r"x\[2\] shares memory with x\[1\]"),
        "overlap": ([one[:5], one[4:]], ValueError, r"x\[2\] shares memory with x\[1\]"),
        "list of numbers": ([[1.0, 2.0]], TypeError, r"x\[1\] is no gradient"),
        "integers": ([np.ones(3, int)], TypeError, r"x\[1\] has a wrong dtype"),
        "bad index": ([rows([0, 10])], IndexError, r"x\[1\].*indices\[1\] is out of range"),
    }


@pytest.mark.parametrize("fault", refused_in_place())
def test_in_place_refuses_before_anything_is_written(fault: str) -> None:
    bad, error, text = refused_in_place()[fault]
    first = dense(5)
    arrays = [v for v in values_of(bad) if isinstance(v, np.ndarray)]
    for use_norm in (None, 7.0) if fault != "bad index" else (None,):
        with refused(error, f"^clip_by_global_norm: {text}", first, arrays):
            ops.clip_by_global_norm([first, *bad], 0.1, use_norm, in_place=True)


# What is refused: TypeError for kinds, ValueError for values, IndexError for indices

GOOD = np.ones(3, np.float32)


@pytest.mark.parametrize("function", [ops.global_norm, ops.clip_by_global_norm])
@pytest.mark.parametrize(
    ("x", "text"),
    [
        (GOOD, "x has a wrong type: expected a list or tuple, got ndarray"),
        (None, "x has a wrong type: expected a list or tuple, got NoneType"),
        (rows([1]), "x has a wrong type: expected a list or tuple, got RowTensor"),
        ({"g": GOOD}, "x has a wrong type: expected a list or tuple, got dict"),
        ([GOOD, 1.0], r"x\[1\] is no array: expected an array, got float"),
        (
            [None, [rows([1]), GOOD]],
            r"x\[1\] is no gradient: expected an array or RowTensors, got RowTensor, ndarray"),
        ([[]], r"x\[0\] is no gradient: expected an array or RowTensors, got nothing"),
        ([GOOD.astype(int)], r"x\[0\] has a wrong dtype: expected float32, .* got int64"),
        ([GOOD.astype(complex)], r"x\[0\] has a wrong dtype")])  # fmt: skip
def test_norm_refuses(function: Any, x: Any, text: str) -> None:
    with refused(TypeError, f"^{function.__name__}: {text}"):
        function(x)


@pytest.mark.parametrize("function", [ops.global_norm, ops.clip_by_global_norm])
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_norm_refuses_indices(function: Any, bad: int) -> None:
    """The text names the function that was called, the gradient and the place in it."""
    gradients = [GOOD, rows([1, 2]), rows([0, bad, 3])]
    text = r"indices\[1\] is out of range: expected 0 <= index < 10"
    with refused(IndexError, f"^{function.__name__}: .*{text}, got {bad}$", gradients):
        function(gradients)


@pytest.mark.parametrize("function", [ops.global_norm, ops.clip_by_global_norm])
def test_norm_checks_a_row_tensor_that_was_changed(function: Any) -> None:
    gradient = rows([1, 2])
    gradient.values = gradient.values[:1]
    with refused(ValueError, rf"^{function.__name__}: x\[0\] has a wrong length", gradient):
        function([gradient])
    gradient.indices = np.array([0.5])
    with refused(TypeError, f"^{function.__name__}: indices has a wrong dtype", gradient):
        function([gradient])


@pytest.mark.parametrize(
    ("name", "takes"),
    [("clip_norm", "positive"), ("use_norm", "not negative"), ("in_place", "flag")],
)
def test_clip_refuses(name: str, takes: str) -> None:
    """A norm may be larger than float32 numbers, and is measured where none is given."""
    gradients = [GOOD, rows([1, 1])]
    for make, error, text in FAULTS[takes]:
        value = make(None)
        if name != "use_norm" or not (value is None or "too large" in text):
            with refused(error, f"^clip_by_global_norm: {name} {text}", gradients):
                ops.clip_by_global_norm(gradients, **{name: value})
    with refused(TypeError, "takes from 1 to 3 positional arguments"):
        ops.clip_by_global_norm(gradients, 1.0, None, True)  # type: ignore[misc]
