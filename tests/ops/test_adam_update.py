"""`ops.adam_update`: where the result goes, what is written, layouts, rows, locks, errors."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusestep import ConversionError, nn, ops
from fusestep.ops import RowTensor, adam_update

from helpers import BF16, STORAGE_DTYPES, assert_same_bits, refused, unchanged

F32 = np.dtype(np.float32)
EACH_DTYPE = pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
SCALARS = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "wd": 0.25}
SCALARS |= {"rescale_grad": 0.5, "clip_gradient": 0.4}
NAMES = ("weight", "grad", "mean", "var")


def inputs(dtype: Any = F32, shape: tuple[int, ...] = (4, 3), seed: int = 1) -> dict[str, Any]:
    """Different values everywhere; the variance is positive."""
    rng = np.random.default_rng(seed)
    values = {name: np.array(rng.standard_normal(shape)) for name in NAMES}
    values["var"] = np.array(np.abs(values["var"]))
    return {name: value.astype(dtype) for name, value in values.items()}


def rows(
    indices: Any, dtype: Any = F32, shape: tuple[int, ...] = (4, 3), index_dtype: Any = np.int64
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


def test_each_scalar_acts() -> None:
    plain = in_place(inputs())
    moved = {"lr": 0.2, "beta1": 0.5, "beta2": 0.5, "epsilon": 0.1, "wd": 0.5}
    moved |= {"rescale_grad": 0.4, "clip_gradient": 0.1}
    for name, value in moved.items():
        other = in_place(inputs(), **{name: value})
        assert np.abs(other["weight"] - plain["weight"]).max() > 1e-3, name


@pytest.mark.parametrize("bound", [0, -0.5, -1e30])
def test_bounds_of_0_and_below_do_not_clip(bound: float) -> None:
    assert_same_bits(
        in_place(inputs(), clip_gradient=bound)["weight"],
        in_place(inputs(), clip_gradient=1e30)["weight"],
    )


@pytest.mark.parametrize("form", [np.float64, np.array, lambda x: np.array([x]), nn.Parameter])
def test_forms_of_scalars(form: Any) -> None:
    def formed(value: float) -> Any:
        return form(np.array(value)) if form is nn.Parameter else form(value)

    found = in_place(inputs(), **{k: formed(v) for k, v in SCALARS.items()})
    for name, expected in in_place(inputs()).items():
        assert_same_bits(found[name], expected, name)


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
    given, expected = inputs(), inputs()
    result = in_place(expected)["weight"]
    wide = np.zeros((4, 6), np.float32)
    wide[:, ::2] = given["weight"]
    frozen = given["weight"].copy()
    frozen.setflags(write=False)
    for weight in (wide[:, ::2], np.asfortranarray(given["weight"]), frozen):
        assert_same_bits(call({**inputs(), "weight": weight}), result)
        assert_same_bits(call({**inputs(), "weight": weight}, out=np.zeros_like(frozen)), result)
    same = inputs()
    same["grad"] = same["weight"]
    apart = inputs()
    apart["grad"] = apart["weight"].copy()
    assert_same_bits(call(same), in_place(apart)["weight"])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (7,), (2, 3, 4)], ids=str)
@EACH_DTYPE
def test_shapes(shape: tuple[int, ...], dtype: np.dtype) -> None:
    given, flat = inputs(dtype, shape), {k: v.reshape(-1) for k, v in inputs(dtype, shape).items()}
    result = call(given)
    assert result.shape == shape
    assert_same_bits(result.reshape(-1), call(flat))


LAYOUTS = {
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "Fortran": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "read-only": lambda a: (a.setflags(write=False), a)[1],
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype)
    .reshape(a.shape),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_any_layout(layout: Any) -> None:
    given = inputs()
    given["grad"] = layout(given["grad"])
    with unchanged(given["grad"]):
        in_place(given)
    assert_same_bits(given["weight"], in_place(inputs())["weight"])


@pytest.mark.parametrize("low", [np.float16, BF16], ids=str)
def test_gradients_of_lower_precision(low: Any) -> None:
    given, wide = inputs(), inputs()
    given["grad"] = given["grad"].astype(low)
    wide["grad"] = given["grad"].astype(np.float32)
    assert_same_bits(in_place(given)["weight"], in_place(wide)["weight"])


# Rows


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@EACH_DTYPE
def test_lazy_rows_are_the_dense_update_of_these_rows(dtype: np.dtype, index_dtype: Any) -> None:
    given, part = inputs(dtype), inputs(dtype)
    given["grad"] = rows([3, 1], dtype, index_dtype=index_dtype)
    with unchanged(given["grad"], *(given[n][[0, 2]] for n in ("weight", "mean", "var"))):
        in_place(given)
    part = {name: part[name][[3, 1]] for name in NAMES} | {"grad": given["grad"].values}
    in_place(part)
    for name in ("weight", "mean", "var"):
        assert_same_bits(given[name][[3, 1]], part[name], name)
        assert_same_bits(given[name][[0, 2]], inputs(dtype)[name][[0, 2]], name)


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
    w, mean, var = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)

    def work() -> None:
        g = np.ones(n, np.float32)
        for _ in range(times):
            options: dict[str, Any] = {"beta1": 1.0, "beta2": 0.0, "wd": 0.0, "lr": 1.0}
            adam_update(w, g, mean, var, out=w, epsilon=1.0, use_locking=True, **options)

    mean[:] = 1.0  # the first moment stays, the weight counts the updates: 1 / (1 + 1) each
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert np.unique(w).tolist() == [-0.5 * threads * times]


# Errors


BUFFER = np.zeros(20, np.float32)
BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "weight list": ({"weight": [1.0]}, TypeError, "weight is no array: expected an array, got l"),
    "weight int": ({"weight": np.ones((4, 3), int)}, TypeError, "weight has a wrong dtype: .*int"),
    "weight masked": ({"weight": np.ma.ones((4, 3), F32)}, TypeError, "weight is masked"),
    "weight read-only": ({"weight": np.broadcast_to(F32.type(1), (4, 3))}, ValueError, "read-only"),
    "weight strided": ({"weight": np.ones((4, 6), F32)[:, ::2]}, ValueError, "not contiguous"),
    "mean None": ({"mean": None}, TypeError, "mean is no array"),
    "mean dtype": ({"mean": np.ones((4, 3))}, ConversionError, "mean differs in dtype from weight"),
    "mean shape": ({"mean": np.ones(12, F32)}, ValueError, "mean differs in shape from weight"),
    "var read-only": ({"var": np.broadcast_to(F32.type(1), (4, 3))}, ValueError, "var is read-on"),
    "var strided": ({"var": np.ones((4, 6), F32)[:, ::2]}, ValueError, "var is not contiguous"),
    "grad None": ({"grad": None}, TypeError, "grad is no array"),
    "grad list": ({"grad": [[1.0] * 3] * 4}, TypeError, "grad is no array"),
    "grad int": ({"grad": np.ones((4, 3), int)}, TypeError, "grad has a wrong dtype"),
    "grad shape": ({"grad": np.ones((3, 4), F32)}, ValueError, "grad has a wrong shape: .*4, 3"),
    "grad higher": ({"grad": np.ones((4, 3))}, ConversionError, "grad has a higher dtype"),
    "rows too high": ({"grad": rows([0, 4])}, IndexError, r"indices\[1\] is out of range: .*got 4"),
    "rows negative": ({"grad": rows([-1])}, IndexError, r"indices\[0\] is out of range"),
    "rows shape": ({"grad": rows([0], shape=(5, 3))}, ValueError, "grad has a wrong dense_shape"),
    "rows higher": ({"grad": rows([0], np.float64)}, ConversionError, "grad has a higher dtype"),
    "lr None": ({"lr": None}, TypeError, "lr has a wrong type: expected a number, got NoneType"),
    "lr bool": ({"lr": True}, TypeError, "lr has a wrong type"),
    "lr negative": ({"lr": -0.1}, ValueError, "lr is out of range: expected at least 0, got -0.1"),
    "lr nan": ({"lr": np.nan}, ValueError, "lr is not finite"),
    "lr shape": ({"lr": np.ones(2)}, ValueError, "lr has a wrong shape"),
    "beta1": ({"beta1": 1.1}, ValueError, "beta1 is out of range: expected between 0 and 1, got 1"),
    "beta2": ({"beta2": -0.1}, ValueError, "beta2 is out of range"),
    "epsilon": ({"epsilon": -1e-8}, ValueError, "epsilon is out of range: expected at least 0"),
    "tiny": ({"epsilon": 1e-46}, ValueError, "epsilon is 0 in float32: expected .*, got 1e-46"),
    "wd": ({"wd": -0.1}, ValueError, "wd is out of range: expected at least 0"),
    "rescale_grad": ({"rescale_grad": np.inf}, ValueError, "rescale_grad is not finite"),
    "clip_gradient": ({"clip_gradient": None}, TypeError, "clip_gradient has a wrong type"),
    "lazy_update": ({"lazy_update": 1}, TypeError, "lazy_update has a wrong type: expected a bool"),
    "compat": ({"compat": "1.8"}, ValueError, "compat is unknown: expected '2.0' or '1.9', got"),
    "unknown": ({"beta_1": 0.9}, KeyError, "argument 'beta_1' is unknown: .*did you mean 'beta1'"),
    "unknown eps": ({"eps": 0.9}, TypeError, "argument 'eps' is unknown: .*did you mean 'epsilon'"),
}


# Where the result goes elsewhere the weight is only read.
BAD_PLACES = [
    (name, place)
    for name in BAD
    for place in ("None", "weight", "other")
    if place == "weight" or name not in ("weight read-only", "weight strided")
]


@pytest.mark.parametrize(("name", "place"), BAD_PLACES)
def test_errors_write_nothing(name: str, place: str) -> None:
    changed, error, text = BAD[name]
    given = inputs()
    given |= {name: value for name, value in changed.items() if name in NAMES}
    scalars = {name: value for name, value in changed.items() if name not in NAMES}
    out = {"None": None, "weight": given["weight"], "other": np.zeros((4, 3), np.float32)}[place]
    with refused(error, f"^adam_update: .*{text}", given, out):
        call(given, out=out, **scalars)


BAD_OUT: dict[str, tuple[Any, Any, str]] = {
    "rate": (0.1, TypeError, "out is no array"),  # the fifth argument of MXNet is lr
    "list": ([[1.0] * 3] * 4, TypeError, "out is no array"),
    "int": (np.ones((4, 3), int), TypeError, "out has a wrong dtype"),
    "dtype": (np.ones((4, 3)), ConversionError, "out differs in dtype from weight"),
    "shape": (np.ones((3, 4), F32), ValueError, "out differs in shape from weight"),
    "read-only": (np.broadcast_to(F32.type(1), (4, 3)), ValueError, "out is read-only"),
    "strided": (np.ones((4, 6), F32)[:, ::2], ValueError, "out is not contiguous"),
}


@pytest.mark.parametrize("case", BAD_OUT.values(), ids=BAD_OUT)
def test_out_that_cannot_be_written(case: tuple[Any, Any, str]) -> None:
    out, error, text = case
    given = inputs()
    with refused(error, f"^adam_update: {text}", given, out):
        adam_update(*(given[name] for name in NAMES), out, **SCALARS)


OVERLAPS = {
    "out with weight": ("weight", 0, "out", 8, "None"),
    "out with grad": ("grad", 0, "out", 8, "None"),
    "mean with weight": ("weight", 0, "mean", 8, "None"),
    "mean with grad": ("grad", 0, "mean", 8, "None"),
    "var with mean": ("mean", 0, "var", 8, "None"),
    "var with grad": ("grad", 0, "var", 0, "weight"),
    "weight with grad": ("weight", 0, "grad", 0, "weight"),
    "weight with part of mean": ("weight", 0, "mean", 11, "weight"),
}


@pytest.mark.parametrize("case", OVERLAPS.values(), ids=OVERLAPS)
def test_overlaps(case: tuple[str, int, str, int, str]) -> None:
    one, begin, other, second, place = case
    buffer = np.ones(24, np.float32)
    given = {**inputs(), one: buffer[begin : begin + 12].reshape(4, 3)}
    given[other] = buffer[second : second + 12].reshape(4, 3)
    out = given.pop("out", given["weight"] if place == "weight" else None)
    with refused(ValueError, "^adam_update: .*shares memory with", given, buffer):
        call(given, out=out)


def test_rows_in_the_memory_of_a_state() -> None:
    given = inputs()
    given["grad"] = RowTensor(np.array([1]), given["mean"][:1], (4, 3))
    for out in (None, given["weight"], np.zeros((4, 3), np.float32)):
        with refused(ValueError, "shares memory with", given):
            call(given, out=out)


def test_it_is_an_operator() -> None:
    assert ops.adam_update is adam_update
    assert "adam_update" in ops.__all__
