"""Arguments and attributes of optimizers: what is taken, and what is refused."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from adam_family import CLASSES, EACH_CLASS, ones

FLAGS = ("use_locking", "use_nesterov", "use_amsgrad", "use_lazy", "use_offload", "skip_nonfinite")
LACKS = {
    nn.Adam: (),
    nn.LazyAdam: ("use_amsgrad", "use_lazy", "use_offload"),
    nn.AdamOffload: ("use_amsgrad", "use_lazy", "use_offload"),
    nn.AdamWeightDecay: ("use_nesterov", "use_amsgrad", "use_lazy", "use_offload", "loss_scale"),
}
FLAG_CASES = [(cls, flag) for cls in CLASSES for flag in FLAGS if flag not in LACKS[cls]]


@pytest.mark.parametrize(("cls", "flag"), FLAG_CASES)
@pytest.mark.parametrize("value", [1, None, "yes", np.bool_(True)], ids=repr)
def test_flag_that_is_no_bool(cls: type, flag: str, value: Any) -> None:
    text = f"^{cls.__name__}: {flag} has a wrong type: expected a bool, got {type(value).__name__}"
    with pytest.raises(TypeError, match=text):
        cls([ones(2)], **{flag: value})


@EACH_CLASS
@pytest.mark.parametrize("name", ["beta1", "beta2", "eps"])
@pytest.mark.parametrize("value", [1, 0, True, "0.9", None, np.array(0.5), np.int64(1)], ids=repr)
def test_float_that_is_none(cls: type, name: str, value: Any) -> None:
    with pytest.raises(
        TypeError, match=f"^{cls.__name__}: {name} has a wrong type: expected a float"
    ):
        cls([ones(2)], **{name: value})


@EACH_CLASS
@pytest.mark.parametrize(
    ("name", "value"),
    [(beta, x) for beta in ("beta1", "beta2") for x in (0.0, 1.0, -0.5, 1.5, np.nan, np.inf)]
    + [("eps", x) for x in (0.0, -1e-8, np.nan, np.inf)],
)
def test_float_out_of_range(cls: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{cls.__name__}: {name} is out of range: expected "):
        cls([ones(2)], **{name: value})


@EACH_CLASS
@pytest.mark.parametrize(("name", "value"), [("beta1", 1 - 1e-9), ("eps", 1e-50)])
def test_float_that_float32_rounds_out_of_range(cls: type, name: str, value: float) -> None:
    """In range as given, 1 and 0 in the arithmetic: the step would be infinite or 0/0."""
    with pytest.raises(ValueError, match=f"^{cls.__name__}: {name} is "):
        cls([ones(2)], **{name: value})
    cls([ones(2, dtype=np.float64)], **{name: value})


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.float16(0.5)], ids=repr)
def test_numpy_floats_are_floats(value: Any) -> None:
    opt = nn.Adam([ones(2)], value, value, value, value, weight_decay=value, loss_scale=value)
    assert (opt.get_lr(), opt.beta1, opt.beta2, opt.eps, opt.loss_scale) == (0.5,) * 5


@EACH_CLASS
def test_unknown_keyword(cls: type) -> None:
    for error in (TypeError, KeyError):
        with pytest.raises(
            error, match=f"^{cls.__name__}: .*'epsilon' is unknown.*did you mean 'eps'"
        ):
            cls([ones(2)], epsilon=1e-8)
    for name in LACKS[cls]:
        with pytest.raises(TypeError, match=f"^{cls.__name__}: argument '{name}' is unknown"):
            cls([ones(2)], **{name: True})


@EACH_CLASS
@pytest.mark.parametrize("value", ["eager", True, 3, ["lazy"], ""], ids=repr)
def test_unknown_sparse_update(cls: type, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^{cls.__name__}: sparse_update is unknown: .*lazy.*dense_equi"
    ):
        cls([ones(2)], sparse_update=value)


@EACH_CLASS
@pytest.mark.parametrize("value", [int, np.complex64, "banana", 3, np.int8], ids=repr)
def test_unknown_state_dtype(cls: type, value: Any) -> None:
    names = "float32, float64, float16, bfloat16"
    text = f"^{cls.__name__}: state_dtype has a wrong dtype: expected {names}"
    with pytest.raises(TypeError, match=text):
        cls([ones(2)], state_dtype=value)


@EACH_CLASS
@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.1, ValueError, "is out of range: expected finite and at least 0, got -0.1"),
        (np.nan, ValueError, "is out of range"),
        (np.inf, ValueError, "is out of range"),
        ("0.1", TypeError, "has a wrong type: expected a float, an int or a schedule, got str"),
        (None, TypeError, "has a wrong type: .*got NoneType"),
        (np.array(0.1), TypeError, "has a wrong type: .*got ndarray"),
        ([0.1], TypeError, "has a wrong type: .*got list"),
    ],
)
def test_bad_weight_decay(cls: type, value: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{cls.__name__}: weight_decay {text}"):
        cls([ones(2)], weight_decay=value)


@pytest.mark.parametrize("value", [0, 1, True])
def test_lazy_adam_wants_a_float_as_decay(value: Any) -> None:
    # As published, for this class alone.
    with pytest.raises(
        TypeError, match=r"^LazyAdam: weight_decay has a wrong type: expected a float"
    ):
        nn.LazyAdam([ones(2)], weight_decay=value)
    assert nn.Adam([ones(2)], weight_decay=value).get_weight_decay() == float(value)


@pytest.mark.parametrize("cls", [nn.Adam, nn.LazyAdam, nn.AdamOffload, nn.Optimizer])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (-1.0, ValueError), (np.nan, ValueError), (np.inf, ValueError)]
    + [(value, TypeError) for value in ("1", None, [1.0], np.array(1.0))],
)
def test_bad_loss_scale(cls: type, value: Any, error: Any) -> None:
    make = partial(cls, 0.1, [ones(2)]) if cls is nn.Optimizer else partial(cls, [ones(2)])
    with pytest.raises(error, match=f"^{cls.__name__}: loss_scale "):
        make(loss_scale=value)


@pytest.mark.parametrize(
    "pair",
    [
        ("use_lazy", "use_offload"), ("use_amsgrad", "use_lazy"), ("use_amsgrad", "use_offload"),
        ("use_amsgrad", "use_nesterov"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"^Adam: {pair[0]} excludes {pair[1]}"):
        nn.Adam([ones(2)], **dict.fromkeys(pair, True))


def test_use_lazy_with_dense_equivalent() -> None:
    with pytest.raises(
        ValueError, match=r"sparse_update contradicts use_lazy: expected 'lazy', got '?dense"
    ):
        nn.Adam([ones(2)], use_lazy=True, sparse_update="dense_equivalent")


def test_target() -> None:
    opt = nn.Adam([ones(2)])
    assert opt.target == "CPU"
    opt.target = "CPU"
    for value, error in (
        ("GPU", ValueError),
        ("Ascend", ValueError),
        ("cpu", ValueError),
        (1, TypeError),
    ):
        with pytest.raises(error, match=r"^Adam: target "):
            opt.target = value
    assert opt.target == "CPU"


def test_unique() -> None:
    opt = nn.Adam([ones(2)])
    assert opt.unique is True
    opt.unique = True
    for value, error in ((False, ValueError), (1, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"^Adam: unique "):
            opt.unique = value
    assert opt.unique is True


@pytest.mark.parametrize("name", ["moment1", "moment2"])
@pytest.mark.parametrize("cls", [nn.Adam, nn.LazyAdam, nn.AdamOffload])
def test_states_are_described_and_only_read(cls: Any, name: str) -> None:
    opt = cls([ones(2, 3), ones(4)])
    assert [array.shape for array in getattr(opt, name)] == [(2, 3), (4,)]
    assert "moment" in (inspect.getdoc(getattr(cls, name)) or "").partition(" of ")[0]
    with pytest.raises(AttributeError, match="has no setter"):
        setattr(opt, name, ())
