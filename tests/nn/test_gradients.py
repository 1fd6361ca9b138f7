"""Gradients of a step: of every form, without some, refused, not finite."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adam_family import ones, parameters, rows
from fusestep import nn
from helpers import STORAGE_DTYPES, assert_same_bits, refused, unchanged
from optimizers import FORMS, make
from optimizers import parameters as table_and_vector


class NoCount:
    """Objects that are no gradient."""


BAD_GRADIENTS: dict[str, tuple[Any, Any, str]] = {
    "int": (np.ones((4, 3), int), TypeError, "gradient of 'b' has a wrong dtype: .*got int64"),
    "complex": (np.ones((4, 3), complex), TypeError, "gradient of 'b' has a wrong dtype"),
    "bool": (np.ones((4, 3), bool), TypeError, "gradient of 'b' has a wrong dtype"),
    "big-endian": (np.ones((4, 3), ">f4"), TypeError, "gradient of 'b' has a wrong dtype"),
    "shape": (ones(3, 4), ValueError, r"gradient of 'b' has a wrong shape: expected \(4, 3\)"),
    "flat": (ones(12), ValueError, "gradient of 'b' has a wrong shape"),
    "0-d": (np.float32(1), ValueError, "gradient of 'b' has a wrong shape"),
    "float": (1.0, TypeError, "gradient of 'b' is no array"),
    "str": ("g", TypeError, "gradient of 'b' is no array"),
    "object": (NoCount(), TypeError, "gradient of 'b' is no array: .*NoCount"),
    "list of arrays": ([ones(4, 3)], TypeError, "gradient of 'b' is no gradient: .*ndarray"),
    "empty list": ([], TypeError, "gradient of 'b' is no gradient"),
    "list with None": ([rows([1]), None], TypeError, "gradient of 'b' is no gradient"),
    "dense_shape": (rows([1], (5, 3)), ValueError, "gradient of 'b' has a wrong dense_shape"),
    "dense_shape width": (rows([1], (4, 2)), ValueError, "gradient of 'b' has a wrong dense_shape"),
    "parts that differ": ([rows([1]), rows([1], (5, 3))], ValueError,
     "gradient of 'b' has parts that differ"),
    "negative index": (rows([0, -1]), IndexError,
     r"gradient of '.*': indices\[1\] is out of range: .*< 4, got -1"),
    "large index": (rows([4, 0]), IndexError,
     r"gradient of '.*': indices\[0\] is out of range: .*got 4"),
    "index in a large batch": (rows([0] * 9000 + [4]), IndexError,
     r"gradient of '.*': indices\[9000\] is out of range"),
    "index in the second part": ([rows([0, 1]), rows([9])], IndexError,
     r"gradient of '.*': indices\[2\] is out of range"),
}  # fmt: skip


BAD_DENSE = ("int", "complex", "bool", "big-endian", "shape", "flat", "float", "str", "object")


@pytest.mark.parametrize(
    "first", [ones(4, 3), rows([1, 1]), rows([2] * 9000)], ids=["dense", "rows", "many"]
)
@pytest.mark.parametrize("case", BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
@pytest.mark.parametrize("use_locking", [False, True])
def test_bad_gradient_of_the_last_parameter(
    case: tuple[Any, Any, str], first: Any, use_locking: bool
) -> None:
    """Nothing changes, neither the parameters before it nor a counter."""
    bad, error, text = case
    for new in (nn.LazyAdam, nn.Adam, partial(nn.Adam, weight_decay=0.1)):
        opt = new(parameters("a", "b"), use_locking=use_locking)
        opt([ones(4, 3), ones(4, 3)])
        with refused(error, f"^{type(opt).__name__}: {text}", opt, bad, first):
            opt([first, bad])


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.1}, {"clipvalue": 0.1}], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("centralizes", [False, True])
def test_bad_index_in_one_of_several_dtypes(
    centralizes: bool, decay: float, options: dict[str, Any], how: str
) -> None:
    """Tables of two dtypes are two kernel calls: both are checked before the first runs."""
    for bad in range(2):
        params = [*parameters("a"), *parameters("b", dtype=np.float64)]
        groups = [{"params": params, "grad_centralization": centralizes}]
        opt = nn.Adam(groups, weight_decay=decay, sparse_update=how, **options)
        gradients = [rows([1, 2]), rows([1, 2])]
        gradients[bad] = rows([1, 4])
        text = rf"^Adam: gradient of '{'ab'[bad]}': indices\[1\] is out of range.*got 4"
        for first in (gradients[0], ones(4, 3)) if bad else gradients[:1]:
            with refused(IndexError, text, opt):
                opt([first, gradients[1]])


def test_row_sparse_gradient_of_a_0d_parameter() -> None:
    opt = nn.Adam([np.array(1.0, np.float32)])
    with refused(ValueError, "gradient of 'parameter_0' is row-sparse: .*0-d parameter", opt):
        opt([rows([0])])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_no_list_or_too_many(form: str) -> None:
    """MindSpore raises RuntimeError, Python's users expect others: each error is both."""
    opt, g = make(form, table_and_vector()), ones(6, 4)
    for given in (g, None, 1.0, iter([g, g]), {"a": g}, rows([1])):
        for error in (TypeError, RuntimeError):
            with refused(error, "gradients has a wrong type: expected a tuple or list", opt):
                opt(given)
    for count in (0, 1, 3):
        for error in (ValueError, RuntimeError):
            with refused(error, f"gradients has a wrong length: expected 2, .*got {count}", opt):
                opt([g] * count)
    for bad in BAD_DENSE:
        value, error, text = BAD_GRADIENTS[bad]
        with refused(error, text.replace("'b'", "'vector'").split(": expected")[0], opt):
            opt([g, value])


def test_gradient_layouts_and_kinds() -> None:
    """Strided, read-only, array-likes: read as their values are, also after a fast step."""

    class Like:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return self.array

    g = np.random.default_rng(5).standard_normal((4, 3)).astype(np.float32)
    frozen = g.copy()
    frozen.flags.writeable = False
    for form in (
        np.asfortranarray(g), np.repeat(g, 2, axis=1)[:, ::2], frozen, Like(g),
        nn.Parameter(g.copy()),
    ):  # fmt: skip
        w, expected = ones(4, 3), ones(4, 3)
        opt, plain = nn.Adam([w]), nn.Adam([expected])
        for one, given in ((opt, form), (plain, g)):
            for gradient in (g, given, g):
                one([gradient])
        assert_same_bits(w, expected)


def test_empty_and_0d_parameters() -> None:
    shapes = [(), (0,), (0, 3), (3, 0), (2,)]
    opt = nn.Adam([np.ones(shape, np.float32) for shape in shapes], 0.5)
    for _ in range(2):
        assert opt([np.ones(shape, np.float32) for shape in shapes]) == (True,) * 5
    np.testing.assert_allclose(opt.parameters[0].data, 0.0, atol=1e-5)
    sparse = nn.LazyAdam([ones(0, 3), ones(2, 3)])
    assert sparse([rows([], (0, 3)), rows([], (2, 3))]) == (True, True)
    assert sparse.parameters[1].data.tolist() == ones(2, 3).tolist()


def test_an_empty_array_shares_no_memory() -> None:
    """Wherever it lies."""
    w = ones(5)
    inside = np.ndarray(0, w.dtype, w, 2 * w.itemsize)  # w[2:2] would be at its beginning
    nn.SGD([w, inside], 1.0)([ones(5), ones(0)])
    assert (w == 0).all()


# skip_nonfinite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("use_locking", [False, True])
def test_skip_nonfinite_in_the_last_tensor(dtype: Any, bad: float, use_locking: bool) -> None:
    opt = nn.Adam(
        [ones(70_001, dtype=dtype), ones(5, dtype=dtype)], skip_nonfinite=True,
        use_locking=use_locking)  # fmt: skip
    good = [ones(70_001, dtype=dtype), ones(5, dtype=dtype)]
    opt(good)
    for tensor, place in ((1, -1), (0, 0), (0, 69_999), (0, -1)):
        gradients = [g.copy() for g in good]
        gradients[tensor][place] = bad
        with unchanged(opt):
            assert opt(gradients) == (True, True)
    assert opt.skipped_steps == 4
    assert opt.global_step.tolist() == [1]
    opt(good)
    assert (opt.global_step.tolist(), opt.skipped_steps) == ([2], 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"grad_centralization": True}])
def test_skip_nonfinite_in_row_values(bad: float, options: dict[str, Any]) -> None:
    params = [ones(3, 2), ones(4, 3), ones(4, 3, dtype=np.float64)]
    opt = nn.LazyAdam([{"params": params, **options}], skip_nonfinite=True)
    spoiled, dense = rows([1, 3, 1]), ones(3, 2)
    spoiled.values[2, 2] = dense[0, 1] = bad
    for gradients in (
        [ones(3, 2), rows([1]), spoiled], [None, spoiled, None],
        [ones(3, 2), [rows([0]), spoiled], None], [dense, rows([1]), None],
    ):  # fmt: skip
        with unchanged(opt):
            opt(gradients)
    assert opt.skipped_steps == 4


def test_finite_gradients_are_not_skipped() -> None:
    """The largest numbers of each type, subnormals and zeros."""
    for dtype in STORAGE_DTYPES:
        info = ml_dtypes.finfo(dtype)
        g = np.array([info.max, info.min, info.smallest_subnormal, 0, -0.0], dtype)
        opt = nn.Adam([ones(5, dtype=dtype)], skip_nonfinite=True)
        opt([g])
        assert (opt.skipped_steps, opt.global_step.tolist()) == (0, [1])


def test_skipping_does_not_hide_errors() -> None:
    opt = nn.Adam(parameters("a", "b"), skip_nonfinite=True)
    with refused(ValueError, "gradient of 'b' has a wrong shape", opt):
        opt([np.full((4, 3), np.nan, np.float32), ones(3)])
    assert opt.skipped_steps == 0
    opt = nn.LazyAdam(parameters("a"), skip_nonfinite=True)
    with refused(IndexError, r"indices\[1\] is out of range", opt):
        opt([rows([0, 4], value=np.nan)])
    assert opt.skipped_steps == 0
