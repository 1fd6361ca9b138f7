"""`ops.adam_update`: where the result goes, what is written, rows, locks, errors.

What it shares with the operators is tested with them: see `ADAM_UPDATE` in operators.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from faults import FAULTS, frozen, strided

from fusestep import nn
from fusestep.ops import RowTensor, adam_update

from helpers import STORAGE_DTYPES, assert_same_bits, at_once, refused, unchanged
from operators import ADAM_UPDATE

F32 = np.dtype(np.float32)
EACH_DTYPE = pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
SCALARS = ADAM_UPDATE.scalars
NAMES = ("weight", "grad", "mean", "var")


def inputs(dtype: Any = F32, shape: tuple[int, ...] = (5, 3)) -> dict[str, Any]:
    """Different values everywhere; the variance is positive."""
    return {name: ADAM_UPDATE.inputs(shape, dtype)[name] for name in NAMES}


def rows(
    indices: Any, dtype: Any = F32, shape: tuple[int, ...] = (5, 3), index_dtype: Any = np.int64
) -> RowTensor:
    values = np.random.default_rng(7).standard_normal((len(indices), *shape[1:])).astype(dtype)
    return RowTensor(np.array(indices, index_dtype), values, shape)


def call(given: dict[str, Any], **changed: Any) -> Any:
    return adam_update(*(given[name] for name in NAMES), **{**SCALARS, **changed})


def in_place(given: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """``given`` after an update of its weight in place."""
    call(given, out=given["weight"], **changed)
    return given


# Signature and values


def test_signature() -> None:
    parameters = inspect.signature(adam_update).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*NAMES, "out"]
    # The defaults of MXNet; lr has none.
    published = {
        "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "wd": 0.0, "rescale_grad": 1.0,
        "clip_gradient": -1.0, "lazy_update": True,
    }  # fmt: skip
    assert {n: parameters[n].default for n in published} == published
    assert parameters["lr"].default is inspect.Parameter.empty
    assert parameters["compat"].default == "2.0"


@pytest.mark.parametrize("compat", ["2.0", "1.9"])
@EACH_DTYPE
def test_formula(compat: str, dtype: np.dtype) -> None:
    given = inputs(dtype)
    w, g, m, v = (given[name].astype(np.float64) for name in NAMES)
    x = 0.5 * g
    x = np.clip(x, -0.4, 0.4) + 0.25 * w if compat == "2.0" else np.clip(x + 0.25 * w, -0.4, 0.4)
    m, v = 0.8 * m + 0.2 * x, 0.9 * v + 0.1 * x * x
    w = w - 0.1 * m / (np.sqrt(v) + 1e-3)
    in_place(given, compat=compat)
    tolerance = 3.0 * float(ml_dtypes.finfo(dtype).eps) if dtype.itemsize < 8 else 1e-6
    for name, expected in zip(("weight", "mean", "var"), (w, m, v), strict=True):
        found = given[name].astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("bound", [0, -0.5, -1e30])
def test_bounds_of_0_and_below_do_not_clip(bound: float) -> None:
    assert_same_bits(
        in_place(inputs(), clip_gradient=bound)["weight"],
        in_place(inputs(), clip_gradient=1e30)["weight"],
    )


# Where the result goes


@EACH_DTYPE
@pytest.mark.parametrize("grad", ["dense", "lazy", "standard"])
@pytest.mark.parametrize("place", ["None", "other"])
def test_result_elsewhere(place: str, grad: str, dtype: np.dtype) -> None:
    """The same bits as in place; the weight stays, mean and variance move."""
    given, expected = inputs(dtype), inputs(dtype)
    if grad != "dense":
        given["grad"], expected["grad"] = rows([3, 0, 3], dtype), rows([3, 0, 3], dtype)
    options = {"lazy_update": grad == "lazy"}
    in_place(expected, **options)
    out = np.full_like(given["weight"], np.nan) if place == "other" else None
    with unchanged(given["weight"], given["grad"]):
        result = call(given, out=out, **options)
    assert (result is out) == (place == "other")
    assert not np.shares_memory(result, given["weight"])
    assert_same_bits(result, expected["weight"])
    for name in ("mean", "var"):
        assert_same_bits(given[name], expected[name], name)


def test_out_is_the_weight() -> None:
    """As the same object, as another view of it, as a Parameter, as a subclass."""
    expected = in_place(inputs())

    class Named(np.ndarray):
        pass

    for wrap in (np.asarray, lambda a: a[...], nn.Parameter, lambda a: a.view(Named)):
        given = inputs()
        given["weight"] = wrap(given["weight"])
        out = given["weight"]
        assert call(given, out=out) is out
        assert_same_bits(np.asarray(out), expected["weight"])
    given = inputs()
    view = given["weight"][:]
    assert call(given, out=view) is view
    assert_same_bits(given["weight"], expected["weight"])


def test_a_weight_that_is_only_read() -> None:
    """Where the result goes elsewhere it can be strided, read-only, or the gradient itself."""
    given, result = inputs(), in_place(inputs())["weight"]
    for form in (strided, np.asfortranarray, frozen):
        weight = form(given["weight"].copy())
        for out in (None, np.zeros_like(given["weight"])):
            assert_same_bits(call({**inputs(), "weight": weight}, out=out), result)
    same, apart = inputs(), inputs()
    same["grad"], apart["grad"] = same["weight"], apart["weight"].copy()
    assert_same_bits(call(same), in_place(apart)["weight"])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (7,), (2, 3, 4)], ids=str)
@EACH_DTYPE
def test_shapes(shape: tuple[int, ...], dtype: np.dtype) -> None:
    given, flat = inputs(dtype, shape), {k: v.reshape(-1) for k, v in inputs(dtype, shape).items()}
    result = call(given)
    assert result.shape == shape
    assert_same_bits(result.reshape(-1), call(flat))


# Rows


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@EACH_DTYPE
def test_lazy_rows_are_the_dense_update_of_these_rows(dtype: np.dtype, index_dtype: Any) -> None:
    given, part = inputs(dtype), inputs(dtype)
    given["grad"] = rows([3, 1], dtype, index_dtype=index_dtype)
    in_place(given)
    part = {name: part[name][[3, 1]] for name in NAMES} | {"grad": given["grad"].values}
    in_place(part)
    for name in ("weight", "mean", "var"):
        assert_same_bits(given[name][[3, 1]], part[name], name)
        assert_same_bits(given[name][[0, 2, 4]], inputs(dtype)[name][[0, 2, 4]], name)


@pytest.mark.parametrize("indices", [[], [2], [3, 0, 3, 3, 0]], ids=str)
def test_standard_rows_are_the_dense_update(indices: list[int]) -> None:
    """Duplicates are summed, what is missing has a gradient of 0."""
    given, dense = inputs(), inputs()
    given["grad"] = rows(indices)
    dense["grad"] = given["grad"].to_dense()
    in_place(given, lazy_update=False)
    in_place(dense)
    for name in ("weight", "mean", "var"):
        np.testing.assert_allclose(given[name], dense[name], rtol=1e-6, err_msg=name)


def test_an_empty_lazy_gradient_changes_nothing() -> None:
    given = {**inputs(), "grad": rows([])}
    with unchanged(given):
        in_place(given)


# Locks


@pytest.mark.parametrize("grad", ["dense", "rows"])
def test_locking_gives_the_same_bits(grad: str) -> None:
    given, plain = inputs(), inputs()
    if grad == "rows":
        given["grad"] = plain["grad"] = rows([1, 1, 2])
    in_place(given, use_locking=True)
    in_place(plain)
    for name in ("weight", "mean", "var"):
        assert_same_bits(given[name], plain[name], name)


def test_locked_calls_are_serialised() -> None:
    """No update of a moment is lost: the sum of all gradients arrives in the mean."""
    n, threads, times = 50_000, 4, 40
    w, mean, var = np.zeros(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.float32)

    def work() -> None:
        g = np.ones(n, np.float32)
        for _ in range(times):
            options: dict[str, Any] = {"beta1": 1.0, "beta2": 0.0, "wd": 0.0, "lr": 1.0}
            adam_update(w, g, mean, var, out=w, epsilon=1.0, use_locking=True, **options)

    # The first moment stays, the weight counts the updates: 1 / (1 + 1) each.
    at_once([work] * threads)
    assert np.unique(w).tolist() == [-0.5 * threads * times]


# Errors

OUTS = {"None": lambda _: None, "weight": lambda w: w, "other": lambda _: np.zeros((5, 3), F32)}
EACH_PLACE = pytest.mark.parametrize("place", OUTS)


def reject(given: dict[str, Any], error: Any, text: str, **changed: Any) -> None:
    __tracebackhide__ = True
    with refused(error, f"^adam_update: {text}", given, changed):
        call(given, **changed)


@EACH_PLACE
def test_errors_write_nothing(place: str) -> None:
    """Wherever the result goes; where it goes elsewhere the weight is only read."""
    for name in (*NAMES, *ADAM_UPDATE.scalars):
        takes = ADAM_UPDATE.known(name).takes
        takes = "array" if name == "weight" and place != "weight" else takes
        for make, error, text in FAULTS[takes]:
            given = {**inputs(), **SCALARS}
            given[name] = make(given[name])
            out = OUTS[place](given["weight"])
            for each in error if isinstance(error, tuple) else (error,):
                reject(given, each, f"{name} {text}", out=out, **{n: given[n] for n in SCALARS})


@EACH_PLACE
def test_rows_that_are_refused(place: str) -> None:
    in_state = inputs()
    in_state["grad"] = RowTensor(np.array([1]), in_state["mean"][:1], (5, 3))
    reject(in_state, ValueError, ".*shares memory with", out=OUTS[place](in_state["weight"]))
    for grad, error, text in (
        (rows([0, 5]), IndexError, r"indices\[1\] is out of range: .*got 5"),
        (rows([-1]), IndexError, r"indices\[0\] is out of range"),
        (rows([0], shape=(6, 3)), ValueError, "grad has a wrong dense_shape"),
        (rows([0], np.float64), TypeError, "grad has a higher dtype"),
    ):
        given = {**inputs(), "grad": grad}
        reject(given, error, text, out=OUTS[place](given["weight"]))


def test_out_that_cannot_be_written() -> None:
    reject(inputs(), TypeError, "out is no array", out=0.1)  # the fifth argument of MXNet is lr
    for make, error, text in FAULTS["second variable"]:
        out = make(np.zeros((5, 3), F32))
        if out is not None:
            each = error if isinstance(error, type) else error[0]
            reject(inputs(), each, f"out {text}", out=out)


@pytest.mark.parametrize(
    ("one", "other", "shift", "place"),
    [
        *(("weight", "out", 8, ""), ("grad", "out", 8, ""), ("weight", "mean", 8, "None")),
        *(("grad", "mean", 8, "None"), ("mean", "var", 8, "None"), ("grad", "mean", 0, "other")),
    ],
)
def test_overlaps(one: str, other: str, shift: int, place: str) -> None:
    buffer = np.ones(23, np.float32)
    given = {**inputs(), one: buffer[:15].reshape(5, 3)}
    given[other] = buffer[shift : shift + 15].reshape(5, 3)
    out = given.pop("out") if other == "out" else OUTS[place](given["weight"])
    reject({**given, "buffer": buffer}, ValueError, ".*shares memory with", out=out)
