"""`ops.adam_update`: where the result goes, what is written, rows, locks, errors.

What it shares with the operators is tested with them: see `ADAM_UPDATE` in operators.py.
"""

import inspect
from typing import Any

import numpy as np
import pytest
from faults import FAULTS, frozen, strided
from fusestep import nn
from fusestep.ops import RowTensor, adam_update
from helpers import assert_same_bits, refused
from operators import ADAM_UPDATE
from optimizers import rows

F32 = np.dtype(np.float32)
SCALARS = ADAM_UPDATE.scalars
NAMES = ("weight", "grad", "mean", "var")


def inputs(dtype: Any = F32, shape: tuple[int, ...] = (5, 3)) -> dict[str, Any]:
    """Different values everywhere; the variance is positive."""
    return {name: ADAM_UPDATE.inputs(shape, dtype)[name] for name in NAMES}


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


# Where the result goes


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
        (rows((5, 3), [0, 5]), IndexError, r"indices\[1\] is out of range: .*got 5"),
        (rows((5, 3), [-1]), IndexError, r"indices\[0\] is out of range"),
        (rows((6, 3), [0]), ValueError, "grad has a wrong dense_shape"),
        (rows((5, 3), [0], dtype=np.float64), TypeError, "grad has a higher dtype"),
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


@pytest.mark.parametrize(("one", "other", "shift", "place"), [
    *(("weight", "out", 8, ""), ("grad", "out", 8, ""), ("weight", "mean", 8, "None")),
    *(("grad", "mean", 8, "None"), ("mean", "var", 8, "None"), ("grad", "mean", 0, "other")),
])  # fmt: skip
def test_overlaps(one: str, other: str, shift: int, place: str) -> None:
    buffer = np.ones(23, np.float32)
    given = {**inputs(), one: buffer[:15].reshape(5, 3)}
    given[other] = buffer[shift : shift + 15].reshape(5, 3)
    out = given.pop("out") if other == "out" else OUTS[place](given["weight"])
    reject({**given, "buffer": buffer}, ValueError, ".*shares memory with", out=out)
