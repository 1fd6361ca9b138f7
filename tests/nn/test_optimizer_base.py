"""nn: groups, rates, decay, scaling, counters, state, rebinding; and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusestep import nn, ops
from fusestep.ops.runtime.row_step import RowUpdate
from fusestep.ops.runtime.step import DenseUpdate

import reference
from helpers import (
    BF16,
    PAIRWISE,
    STORAGE_DTYPES,
    arrays_of,
    assert_same_bits,
    more,
    refused,
    unchanged,
)

ADAM = {
    "Adam": nn.Adam,
    "Adam-nesterov": partial(nn.Adam, use_nesterov=True),
    "Adam-amsgrad": partial(nn.Adam, use_amsgrad=True),
    "Adam-lazy": partial(nn.Adam, use_lazy=True),
    "Adam-offload": partial(nn.Adam, use_offload=True),
    "LazyAdam": nn.LazyAdam,
    "AdamOffload": nn.AdamOffload,
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {**ADAM, "AdamWeightDecay": nn.AdamWeightDecay}
EACH = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
CLASSES = (nn.Adam, nn.LazyAdam, nn.AdamOffload, nn.AdamWeightDecay)
EACH_CLASS = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def parameters(*names: str, dtype: Any = np.float32) -> list[nn.Parameter]:
    """Parameters ``[4, 3]`` with different values."""
    rng = np.random.default_rng(1)
    return [nn.Parameter(rng.standard_normal((4, 3)).astype(dtype), name) for name in names]


def gradients_of(opt: nn.Optimizer, seed: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(p.shape).astype(dtype) for p in opt.parameters]


def rows(indices: Any, shape: tuple[int, ...] = (4, 3), value: float = 1.0) -> nn.RowTensor:
    values = np.full((len(indices), *shape[1:]), value, np.float32)
    return nn.RowTensor(np.array(indices, np.int64), values, shape)


class Descent(nn.Optimizer):
    """A custom optimizer that uses every separate step of the base class."""

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        gradients = self.decay_weight(gradients)
        gradients = self.gradients_centralization(gradients)
        gradients = self.scale_grad(gradients)
        rates = self.get_lr() if self.is_group_lr else (self.get_lr(),) * len(self.parameters)
        for p, g, rate in zip(self.parameters, gradients, rates, strict=True):
            p.data -= p.dtype.type(rate) * g
        return self.broadcast_params((True,) * len(self.parameters))


# Groups


def test_groups_give_each_parameter_its_options() -> None:
    a, b, c = parameters("a", "b", "c")
    opt = nn.Adam(
        [{"params": [a], "lr": 0.5, "weight_decay": 0.1}, {"params": [b, c]}],
        0.25,
        weight_decay=0.2,
    )
    assert opt.parameters == (a, b, c)
    assert opt.is_group
    assert opt.is_group_lr
    assert opt.get_lr() == (0.5, 0.25, 0.25)
    assert opt.get_weight_decay() == (0.1, 0.2, 0.2)


@EACH
def test_groups_are_separate_optimizers_in_one(make: Callable[..., Any]) -> None:
    together, apart = parameters("a", "b"), parameters("a", "b")
    opt = make(
        [
            {"params": together[:1], "lr": 0.1, "weight_decay": 0.3},
            {"params": together[1:], "lr": 0.02},
        ]
    )
    single = [
        make([{"params": apart[:1]}], 0.1, weight_decay=0.3),
        make([{"params": apart[1:]}], 0.02),
    ]
    for seed in range(3):
        gradients = gradients_of(opt, seed)
        opt(gradients)
        for one, gradient in zip(single, gradients, strict=True):
            one([gradient])
    for p, q in zip(together, apart, strict=True):
        assert_same_bits(p.data, q.data, str(p.name))


def test_groups_without_rates_share_one() -> None:
    opt = nn.Adam([{"params": parameters("a")}, {"params": parameters("b")}], 0.5)
    assert not opt.is_group_lr
    assert opt.get_lr() == 0.5


def test_group_params_may_be_a_generator() -> None:
    # MindSpore's check uses a generator up and then optimizes nothing.
    a, b = parameters("a", "b")
    opt = nn.Adam(iter([{"params": (p for p in (a, b))}]))
    assert opt.parameters == (a, b)


def test_order_params() -> None:
    a, b, c = parameters("a", "b", "c")
    groups = [{"params": [a, b], "lr": 0.5}, {"params": [c]}, {"order_params": (c, a, b)}]
    opt = nn.Adam(groups, 0.25)
    assert opt.parameters == (c, a, b)
    assert opt.get_lr() == (0.25, 0.5, 0.5)
    before = [p.data.copy() for p in (c, a, b)]
    opt([None, None, ones(4, 3)])
    assert_same_bits(c.data, before[0])
    assert_same_bits(a.data, before[1])
    assert (b.data != before[2]).all()


def test_unnamed_parameters_are_named_by_position() -> None:
    opt = nn.Adam([ones(2), nn.Parameter(ones(3), "mine"), ones(4)])
    assert [p.name for p in opt.parameters] == ["parameter_0", "mine", "parameter_2"]


def test_position_names_give_way_to_given_ones() -> None:
    opt = nn.Adam([ones(2), nn.Parameter(ones(3), "parameter_0")])
    assert len({p.name for p in opt.parameters}) == 2


def test_unnamed_parameter_in_two_optimizers() -> None:
    # Named parameter_0 by the first, it must not forbid the name to a stranger in the second.
    a, b = nn.Parameter(ones(2)), nn.Parameter(ones(3))
    nn.Adam([a])
    opt = nn.Adam([b, a])
    assert len({p.name for p in opt.parameters}) == 2


_A, _B = parameters("a", "b")
_M = ones(5)
BAD_PARAMETERS: dict[str, tuple[Any, Any, str]] = {
    "None": (None, ValueError, "parameters is missing: expected a list"),
    "empty": ([], ValueError, "parameters is empty: expected at least one parameter"),
    "empty group": ([{"params": []}], ValueError, "parameters is empty"),
    "only order": ([{"order_params": []}], ValueError, "parameters is empty"),
    "int": (3, TypeError, "parameters has a wrong type: expected a list of parameters or of group"),
    "str": ("w", TypeError, "parameters has a wrong type"),
    "dict": ({"params": [_A]}, TypeError, "parameters has a wrong type: .* got dict"),
    "one": (_A, TypeError, "parameters has a wrong type: .* got Parameter"),
    # Its rows would become the parameters, one by one.
    "array": (ones(4, 3), TypeError, "parameters has a wrong type: .* got ndarray"),
    "mixed": ([_A, {"params": [_B]}], TypeError, "parameters mixes kinds"),
    "element": ([_A, "b"], TypeError, "parameters holds a wrong type: .* got str"),
    "element int": ([_A, 3], TypeError, "data is no array: expected an array, got int"),
    "int array": ([np.ones(3, int)], TypeError, "data has a wrong dtype: .*got int64"),
    "read-only": ([np.broadcast_to(ones(1), (3,))], ValueError, "data is read-only"),
    "strided": ([ones(6)[::2]], ValueError, "data is not contiguous"),
    "twice": ([_A, _A], RuntimeError, "parameters holds a parameter twice"),
    "twice in groups": (
        [{"params": [_A]}, {"params": [_A]}],
        RuntimeError,
        "holds a parameter twice",
    ),
    "same name": ([_A, parameters("a")[0]], ValueError, "parameter name 'a' repeats"),
    "same memory": ([_M, _M], ValueError, "shares memory with parameter"),
    "part of memory": ([_M[:3], _M[2:]], ValueError, "shares memory with parameter"),
    "no gradient": (
        [nn.Parameter(ones(2), "frozen", requires_grad=False)],
        ValueError,
        "parameter 'frozen' does not require a gradient: .*leave it out",
    ),
    "unknown key": (
        [{"params": [_A], "learning_rate": 1.0}],
        KeyError,
        "'learning_rate' is unknown",
    ),
    "near key": ([{"params": [_A], "weight_deca": 1.0}], KeyError, "did you mean 'weight_decay'"),
    "no params": ([{"lr": 0.1}], KeyError, "group 0 has no 'params'"),
    "params is one": ([{"params": _A}], TypeError, "group 0: params has a wrong type"),
    "params is array": ([{"params": ones(4, 3)}], TypeError, "group 0: params has a wrong type"),
    "params is str": ([{"params": "a"}], TypeError, "group 0: params has a wrong type"),
    "group lr": ([{"params": [_A], "lr": -1.0}], ValueError, "learning_rate is out of range"),
    "group decay": (
        [{"params": [_A], "weight_decay": "x"}],
        TypeError,
        "weight_decay has a wrong type",
    ),
    "centralization": (
        [{"params": [_A], "grad_centralization": 1}],
        TypeError,
        "grad_centralization has a wrong type: expected a bool, got int",
    ),
    "lengths": (
        [{"params": [_A], "lr": [0.1]}, {"params": [_B], "lr": [0.1, 0.2]}],
        ValueError,
        r"lr lists differ in length: .*\[1, 2\]",
    ),
    "order with more": (
        [{"params": [_A]}, {"order_params": [_A], "lr": 0.1}],
        ValueError,
        "group 1 has other keys beside order_params",
    ),
    "order kind": (
        [{"params": [_A]}, {"order_params": 3}],
        TypeError,
        "expected a list of parameters",
    ),
    "order length": (
        [{"params": [_A, _B]}, {"order_params": [_A]}],
        ValueError,
        "order_params has a wrong length: expected 2, got 1",
    ),
    "order foreign": (
        [{"params": [_A, _B]}, {"order_params": [_A, parameters("c")[0]]}],
        ValueError,
        "order_params lacks parameter 'b'",
    ),
}


@EACH_CLASS
@pytest.mark.parametrize("case", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
def test_bad_parameters(cls: type, case: tuple[Any, Any, str]) -> None:
    given, error, text = case
    with refused(error, text, given):
        cls(given)


def test_order_params_of_plain_arrays_says_what_to_do() -> None:
    """Arrays are wrapped by the group, so the order cannot name them: it needs Parameters."""
    a, b = ones(2), ones(3)
    with pytest.raises((TypeError, ValueError), match=r"order_params .*Parameter"):
        nn.Adam([{"params": [a, b]}, {"order_params": [b, a]}])


# Constructor arguments


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


def test_a_refused_constructor_leaves_names_alone() -> None:
    a, b = nn.Parameter(ones(2)), nn.Parameter(ones(2))
    with pytest.raises(ValueError, match="loss_scale"):
        nn.Adam([a, b], loss_scale=-1.0)
    assert (a.name, b.name) == (None, None)


# Learning rate


class Halving(nn.LearningRateSchedule):
    def construct(self, global_step: int) -> float:
        return 0.5 * 0.5**global_step


def numbers() -> Iterator[float]:
    yield from (0.5, 0.25, 0.125)


RATES: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "float": (lambda: 0.5, [0.5] * 3),
    "int": (lambda: 2, [2.0] * 3),
    "bool": (lambda: True, [1.0] * 3),
    "zero": (lambda: 0.0, [0.0] * 3),
    "float32": (lambda: np.float32(0.5), [0.5] * 3),
    "0-d": (lambda: np.array(0.5), [0.5] * 3),
    "0-d int": (lambda: np.array(2), [2.0] * 3),
    "0-d bfloat16": (lambda: np.array(0.5, BF16), [0.5] * 3),
    "Parameter": (lambda: nn.Parameter(np.array(0.5)), [0.5] * 3),
    "1-d": (lambda: np.array([0.5, 0.25, 0.125], np.float32), [0.5, 0.25, 0.125]),
    "list": (lambda: [0.5, 0.25, 0.125], [0.5, 0.25, 0.125]),
    "tuple of ints": (lambda: (2, 1, 0), [2.0, 1.0, 0.0]),
    "generator": (numbers, [0.5, 0.25, 0.125]),
    "schedule": (Halving, [0.5, 0.25, 0.125]),
    "callable": (lambda: lambda step: 0.5 / (1 + step), [0.5, 0.25, 0.5 / 3]),
    "callable of arrays": (lambda: lambda step: np.full((1,), 0.5**step), [1.0, 0.5, 0.25]),
}
LISTS = ("1-d", "list", "tuple of ints", "generator")
EACH_RATE = pytest.mark.parametrize("form", RATES)


@EACH_RATE
@EACH_CLASS
def test_learning_rate_forms(cls: type, form: str) -> None:
    """Each gives the steps of optimizers that are handed the number itself."""
    make, values = RATES[form]
    w, expected = ones(3), ones(3)
    opt, plain = cls([w], make()), cls([expected], 1.0)
    for step, value in enumerate(values):
        assert opt.get_lr() == value
        assert type(opt.get_lr()) is float
        plain.get_lr_parameter(plain.parameters[0]).data[...] = value
        gradient = np.array([1.0, -2.0, 0.5], np.float32) / (1 + step)
        opt([gradient])
        plain([gradient])
        assert_same_bits(w, expected, f"after step {step}")
    assert opt.global_step.tolist() == [3]


@EACH_RATE
def test_learning_rate_forms_in_groups(form: str) -> None:
    make, values = RATES[form]
    a, b = parameters("a", "b")
    opt = nn.Adam([{"params": [a], "lr": make()}, {"params": [b]}], 0.001)
    for value in values:
        assert opt.get_lr() == (value, 0.001)
        opt(gradients_of(opt, 1))


@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("in_group", [False, True])
def test_exhausted_list_of_rates(form: str, in_group: bool) -> None:
    """RuntimeError, before anything changes; get_lr says the same."""
    (p,) = parameters("w")
    make = RATES[form][0]
    opt = nn.Adam([{"params": [p], "lr": make()}]) if in_group else nn.Adam([p], make())
    for _ in range(3):
        opt([ones(4, 3)])
    for call in (partial(opt, [ones(4, 3)]), opt.get_lr):
        with refused(
            RuntimeError, "has no value for step 3: expected 4 values, got 3; give a", opt
        ):
            call()


BAD_RATES: dict[str, tuple[Any, Any]] = {
    "negative": (-0.1, ValueError),
    "nan": (np.nan, ValueError),
    "inf": (np.inf, ValueError),
    "negative int": (-1, ValueError),
    "negative 0-d": (np.array(-0.1), ValueError),
    "nan in list": ([0.1, np.nan], ValueError),
    "negative in list": ([0.1, -0.1], ValueError),
    "empty": ([], ValueError),
    "empty array": (np.zeros(0), ValueError),
    "2-d": (np.ones((2, 2)), ValueError),
    "nested": ([[0.1]], TypeError),
    "str": ("0.1", TypeError),
    "bytes": (b"0.1", TypeError),
    "None": (None, TypeError),
    "int scalar": (np.int64(1), TypeError),
    "complex": (1j, TypeError),
    "complex array": (np.array(1j), TypeError),
    "str list": (["a"], TypeError),
    "object": (object(), TypeError),
}


@EACH_CLASS
@pytest.mark.parametrize("case", BAD_RATES.values(), ids=BAD_RATES)
def test_bad_learning_rate(cls: type, case: tuple[Any, Any]) -> None:
    value, error = case
    with pytest.raises(
        error, match=f"^{cls.__name__}: learning_rate (is out of range|has a wrong )"
    ):
        cls([ones(2)], value)


@EACH_CLASS
def test_schedule_class_instead_of_an_instance(cls: type) -> None:
    text = f"^{cls.__name__}: learning_rate .*Halving.* a class: expected an instance"
    with pytest.raises(TypeError, match=text):
        cls([ones(2)], Halving)


def test_learning_rate_that_float32_cannot_hold() -> None:
    with pytest.raises(ValueError, match="learning_rate is out of range"):
        nn.Adam([ones(2)], 1e39)


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, TypeError, "learning_rate has a schedule that returned no number: .*None"),
        ("x", TypeError, "returned no number"),
        (np.ones(2), TypeError, "returned no number"),
        (np.nan, ValueError, "learning_rate is not finite"),
        (np.inf, ValueError, "learning_rate is not finite"),
    ],
)
def test_schedule_that_returns_nonsense(returned: Any, error: Any, text: str) -> None:
    opt = nn.Adam([ones(2)], lambda step: 0.1 if step == 0 else returned)
    opt([ones(2)])
    with refused(error, text, opt):
        opt([ones(2)])


def test_schedule_that_raises() -> None:
    opt = nn.Adam([ones(2)], lambda step: 1 / (1 - step))
    opt([ones(2)])
    with refused(ZeroDivisionError, "division", opt):
        opt([ones(2)])


def test_schedule_without_construct() -> None:
    opt = nn.Adam([ones(2)], nn.LearningRateSchedule())
    with refused(NotImplementedError, "define construct", opt):
        opt([ones(2)])


def test_schedule_is_called_once_a_step_with_an_int() -> None:
    seen: list[Any] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.1

    opt = nn.Adam([ones(2), ones(3), ones(4)], schedule)
    for _ in range(3):
        opt([ones(2), ones(3), ones(4)])
    assert seen == [0, 1, 2]
    assert all(type(step) is int for step in seen)


def test_get_lr_parameter() -> None:
    a, b, c = parameters("a", "b", "c")
    schedule = Halving()
    opt = nn.Adam(
        [{"params": [a], "lr": 0.5}, {"params": [b], "lr": schedule}, {"params": [c]}], 0.25
    )
    rate = opt.get_lr_parameter(a)
    assert (rate.name, float(rate)) == ("learning_rate_group_0", 0.5)
    assert opt.get_lr_parameter(b) is schedule
    assert [
        r is opt.get_lr_parameter(p)
        for r, p in zip(opt.get_lr_parameter([c, a]), (c, a), strict=True)
    ] == [True, True]
    assert opt.get_lr_parameter(c).name == "learning_rate"
    for error, given in ((TypeError, (a,)), (TypeError, a.data), (ValueError, parameters("a")[0])):
        with pytest.raises(error, match=r"^Adam: param"):
            opt.get_lr_parameter(given)


@pytest.mark.parametrize("rebind", [False, True])
@EACH_CLASS
def test_assigning_to_the_rate_acts(cls: type, rebind: bool) -> None:
    w, expected = ones(3), ones(3)
    opt, other = cls([w], 0.5), cls([expected], [0.5, 0.125])
    for rate in (0.5, 0.125):
        parameter = opt.get_lr_parameter(opt.parameters[0])
        if rebind:
            parameter.data = np.array(rate)
        else:
            parameter.data[...] = rate
        assert opt.get_lr() == rate
        opt([ones(3)])
        other([ones(3)])
    assert_same_bits(w, expected)


def test_assigning_nan_to_the_rate_is_refused_at_the_step() -> None:
    opt = nn.Adam([ones(3)])
    opt.get_lr_parameter(opt.parameters[0]).data[...] = np.nan
    with refused(ValueError, "learning_rate is not finite", opt):
        opt([ones(3)])


# Weight decay


@pytest.mark.parametrize("name", ["beta", "my_beta_x", "gamma", "bn.gamma", "alphabeta"])
@EACH_CLASS
def test_beta_and_gamma_do_not_decay(cls: type, name: str) -> None:
    """A substring in lower case, without groups."""
    w = nn.Parameter(ones(2), name)
    cls([w], weight_decay=0.5)([0 * ones(2)])
    assert w.data.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["weight", "BETA", "Gamma", "alphabet", "bet"])
@EACH_CLASS
def test_other_names_decay(cls: type, name: str) -> None:
    w = nn.Parameter(ones(2), name)
    cls([w], weight_decay=0.5)([0 * ones(2)])
    assert (w.data < 1.0).all()


@EACH_CLASS
def test_groups_have_no_name_filter(cls: type) -> None:
    w = nn.Parameter(ones(2), "beta")
    cls([{"params": [w]}], weight_decay=0.5)([0 * ones(2)])
    assert (w.data < 1.0).all()


@EACH_CLASS
def test_weight_decay_schedule(cls: type) -> None:
    """Evaluated with the step before it is counted, like a learning rate."""
    w, expected = ones(3), ones(3)
    opt = cls([w], 0.1, weight_decay=lambda step: 0.5 * step)
    others = [cls([expected], 0.1, weight_decay=0.5 * step) for step in range(3)]
    state = None
    for step, other in enumerate(others):
        assert opt.get_weight_decay() == 0.5 * step
        opt([ones(3)])
        if state is not None:
            other.load_state_dict(state)
        other([ones(3)])
        state = other.state_dict()
        assert_same_bits(w, expected, f"after step {step}")


@EACH_CLASS
def test_negative_decay_of_a_schedule_is_refused(cls: type) -> None:
    """As a negative number is: it must not be ignored, nor grow the weights."""
    opt = cls([ones(3)], weight_decay=lambda step: 0.1 - step)
    opt([ones(3)])
    with refused(ValueError, "weight_decay", opt):
        opt([ones(3)])


@pytest.mark.parametrize("centralize", [False, True])
def test_weight_decay_schedule_is_called_once_a_step(centralize: bool) -> None:
    """Whatever the gradients are, as a learning rate's: it may be a generator's ``next``."""
    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.1

    groups = [{"params": parameters("a", "b"), "grad_centralization": centralize}]
    opt = nn.Adam(groups, weight_decay=schedule)
    for gradients in ([ones(4, 3)] * 2, [ones(4, 3)] * 2, [rows([1]), None]):
        opt(gradients)
    assert seen == [0, 1, 2]


def test_get_weight_decay() -> None:
    a, b = parameters("a", "b.gamma")
    assert nn.Adam([a, b], weight_decay=0.5).get_weight_decay() == 0.5
    assert nn.Adam([b]).get_weight_decay() == 0.0
    groups = [{"params": [a], "weight_decay": lambda step: 0.1 + step}, {"params": [b]}]
    assert nn.Adam(groups, weight_decay=0.5).get_weight_decay() == (0.1, 0.5)


def test_no_decay_keeps_infinities_out() -> None:
    """0 * inf is NaN: a parameter that is exempt beside decayed ones must not see it."""
    w = np.array([np.inf, 1.0], np.float32)
    exempt, other = nn.Parameter(w, "gamma"), nn.Parameter(ones(2), "w")
    nn.Adam([exempt, other], weight_decay=0.5)([0 * ones(2), ones(2)])
    assert w.tolist() == [np.inf, 1.0]


@EACH
def test_decay_and_scale_against_the_reference(make: Callable[..., Any]) -> None:
    """Three steps with everything on, in float64 arithmetic."""
    decay, scale = 0.3, 1.0 if make is nn.AdamWeightDecay else 8.0
    (p,) = parameters("w", dtype=np.float64)
    options = {} if make is nn.AdamWeightDecay else {"loss_scale": scale}
    opt = make([p], 0.05, 0.8, 0.95, 1e-3, weight_decay=decay, **options)
    w, m, v = p.data.copy(), np.zeros((4, 3)), np.zeros((4, 3))
    vhat = np.zeros((4, 3))
    kind = make.keywords if isinstance(make, partial) else {}
    for t in range(1, 4):
        (g,) = gradients_of(opt, t, np.float64)
        opt([g * scale])
        hp = reference.adam_scalars(0.05, 0.8, 0.95, 1e-3, 0.8**t, 0.95**t, decay, real=np.float64)
        if make is nn.AdamWeightDecay:
            w, m, v = reference.adam_weight_decay(w, g, m, v, hp)
        elif "use_amsgrad" in kind:
            w, m, v, vhat = reference.adam_amsgrad(w, g + decay * w, m, v, vhat, hp)
        else:
            nesterov = "use_nesterov" in kind
            w, m, v = reference.adam(w, g + decay * w, m, v, hp, nesterov=nesterov)
        np.testing.assert_allclose(p.data, w, rtol=1e-12)
    for state, expected in zip(opt._states.values(), (m, v, vhat), strict=False):
        np.testing.assert_allclose(state[0], expected, rtol=1e-12)


# Gradients as separate steps


def test_decay_weight() -> None:
    a, b, c = parameters("a", "b.beta", "c")
    opt = nn.Optimizer(0.1, [a, b, c], weight_decay=0.5, loss_scale=4.0)
    given = [ones(4, 3), ones(4, 3), rows([2, 0, 2])]
    with unchanged(given, opt):
        dense, exempt, sparse = opt.decay_weight(given)
    np.testing.assert_array_equal(dense, 1 + 2 * a.data)
    assert exempt is given[1]
    # Once for each row that occurs, not once for each occurrence.
    assert sparse.indices.tolist() == [0, 2]
    np.testing.assert_allclose(sparse.values, [1 + 2 * c.data[0], 2 + 2 * c.data[2]], rtol=1e-6)
    assert opt.decay_weight([None, None, None]) == (None, None, None)


def test_scale_grad() -> None:
    opt = nn.Optimizer(0.1, parameters("a", "b"), loss_scale=3.0)
    given = [ones(4, 3), rows([2, 0, 2])]
    with unchanged(given):
        dense, sparse = opt.scale_grad(given)
    np.testing.assert_array_equal(dense, np.float32(1) / np.float32(3))
    np.testing.assert_array_equal(sparse.values, np.float32(1) / np.float32(3))
    assert sparse.indices.tolist() == [2, 0, 2]
    assert nn.Optimizer(0.1, parameters("a")).scale_grad(given[:1])[0] is given[0]
    assert opt.scale_grad([None, None]) == (None, None)


@pytest.mark.parametrize("method", ["decay_weight", "scale_grad", "gradients_centralization"])
def test_separate_steps_check_their_gradients(method: str) -> None:
    opt = nn.Optimizer(
        0.1, [{"params": parameters("a", "b"), "grad_centralization": True}], 0.5, 2.0
    )
    act = getattr(opt, method)
    for given, error, text in (
        ([ones(4, 3)], ValueError, "gradients has a wrong length: expected 2, one for each"),
        (ones(2, 4, 3), TypeError, "gradients has a wrong type: expected a tuple or list"),
        ([ones(4, 3), "x"], TypeError, "no array"),
    ):
        with refused(error, text, opt):
            act(given)


def test_decay_weight_does_not_broadcast() -> None:
    opt = nn.Optimizer(0.1, parameters("a"), 0.5)
    with refused(ValueError, "has a wrong shape", opt):
        opt.decay_weight([ones(3)])


@pytest.mark.parametrize("method", ["decay_weight", "scale_grad", "gradients_centralization"])
def test_separate_steps_take_lists_of_row_tensors(method: str) -> None:
    opt = nn.Optimizer(0.1, [{"params": parameters("a"), "grad_centralization": True}], 0.5, 2.0)
    parts = [rows([2]), rows([0, 2])]
    whole = rows([2, 0, 2])
    (listed,), (single,) = (getattr(opt, method)([given]) for given in (parts, whole))
    np.testing.assert_allclose(listed.to_dense(), single.to_dense(), rtol=1e-6)


def test_broadcast_params_with_one_process() -> None:
    assert nn.Optimizer(0.1, [ones(2)]).broadcast_params((True,)) is True


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


# Gradient centralization


def central(g: np.ndarray) -> np.ndarray:
    if g.ndim < 2:
        return g
    return g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (3, 2, 4, 2), (1, 7), (6, 1), (7,), ()])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_centralization(shape: tuple[int, ...], decay: float, scale: float) -> None:
    """Of the decayed gradient, for any parameter of two or more dimensions.

    Others have nothing to centralize, but decay like any parameter.
    """
    rng = np.random.default_rng(2)
    w, g = (np.array(rng.standard_normal(shape)) for _ in range(2))
    p = nn.Parameter(w.copy(), "w")
    groups = [{"params": [p], "grad_centralization": True}]
    opt = nn.Adam(groups, 0.1, 0.8, 0.9, 1e-3, weight_decay=decay, loss_scale=scale)
    given = np.array(g * scale)
    with unchanged(given):
        opt([given])
    hp = reference.adam_scalars(0.1, 0.8, 0.9, 1e-3, 0.8, 0.9, real=np.float64)
    expected, m, _ = reference.adam(w, central(g + decay * w), 0 * w, 0 * w, hp)
    np.testing.assert_allclose(opt.moment1[0], m, rtol=1e-10, atol=1e-14)
    # Where the gradient is nothing but rounding errors, the step still has epsilon.
    np.testing.assert_allclose(p.data, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("tail", [(3,), (2, 4), ()])
def test_centralization_of_row_sparse_gradients(
    tail: tuple[int, ...], decay: float, how: str
) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, *tail))
    values, indices = rng.standard_normal((4, *tail)), np.array([3, 1, 3, 0])
    g = reference.densify(indices, values, w.shape)
    present = np.isin(np.arange(5), indices)
    g += decay * w * (present.reshape(-1, *[1] * len(tail)) if how == "lazy" else 1)
    g = central(g)
    p = nn.Parameter(w.copy(), "w")
    opt = nn.Adam(
        [{"params": [p], "grad_centralization": True}],
        0.1, 0.8, 0.9, 1e-3, weight_decay=decay, loss_scale=4.0, sparse_update=how,
    )  # fmt: skip
    opt([nn.RowTensor(indices, 4 * values, w.shape)])
    hp = reference.adam_scalars(0.1, 0.8, 0.9, 1e-3, 0.8, 0.9, real=np.float64)
    expected, m, _ = reference.adam(w, g, 0 * w, 0 * w, hp)
    select = present if how == "lazy" else np.full(5, True)
    np.testing.assert_allclose(p.data[select], expected[select], rtol=1e-9)
    np.testing.assert_allclose(opt.moment1[0][select], m[select], rtol=1e-10, atol=1e-15)
    assert_same_bits(p.data[~select], w[~select])


def test_decoupled_decay_is_not_centralized() -> None:
    (p,) = parameters("w", dtype=np.float64)
    w, g = p.data.copy(), np.random.default_rng(4).standard_normal((4, 3))
    groups = [{"params": [p], "grad_centralization": True, "weight_decay": 0.3}]
    nn.AdamWeightDecay(groups, 0.1, 0.8, 0.9, 1e-3)([g])
    hp = reference.adam_scalars(0.1, 0.8, 0.9, 1e-3, decay=0.3, real=np.float64)
    expected, *_ = reference.adam_weight_decay(w, central(g), 0 * w, 0 * w, hp)
    np.testing.assert_allclose(p.data, expected, rtol=1e-10)


def test_centralization_acts_on_its_group_alone() -> None:
    a, b = parameters("a", "b")
    opt = nn.Adam([{"params": [a], "grad_centralization": True}, {"params": [b]}])
    before = b.data.copy(), a.data.copy()
    opt([ones(4, 3), ones(4, 3)])
    assert_same_bits(a.data, before[1])  # the mean of ones is one
    assert (b.data != before[0]).all()
    g = ones(4, 3)
    centralized, same = opt.gradients_centralization([g, g])
    assert centralized.tolist() == np.zeros((4, 3)).tolist()
    assert same is g


def test_centralized_16_bit_gradients_do_not_overflow() -> None:
    """weight_decay * loss_scale * w is beyond float16, but not beyond the arithmetic."""
    plain, centralized = (np.array([[8, 24], [16, 32]], np.float16) for _ in range(2))
    options = {"weight_decay": 0.125, "loss_scale": 2.0**16, "eps": 1e-3}
    gradient = [np.array([[1, 2], [3, 4]], np.float16)]
    nn.Adam([{"params": [plain]}], 0.5, **options)(gradient)
    groups = [{"params": [centralized], "grad_centralization": True}]
    nn.Adam(groups, 0.5, **options)(gradient)
    assert np.isfinite(plain).all()
    assert np.isfinite(centralized).all()
    # The decayed gradient is about w / 8: above and below its mean in each row.
    assert (np.sign(centralized - [[8, 24], [16, 32]]) == [[1, -1], [1, -1]]).all()


# Gradients


@EACH
def test_none_skips_a_parameter_and_its_count(make: Callable[..., Any]) -> None:
    """Each parameter is as if it had an optimizer of its own that was called less often."""
    together, apart = parameters("a", "b", "c"), parameters("a", "b", "c")
    opt = make(together, 0.1)
    single = [make([p], 0.1) for p in apart]
    for step, pattern in enumerate([(1, 1, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0), (1, 1, 1)]):
        gradients = [
            g if on else None for g, on in zip(gradients_of(opt, step), pattern, strict=True)
        ]
        assert opt(gradients) == (True, True, True)
        for one, gradient in zip(single, gradients, strict=True):
            if gradient is not None:
                one([gradient])
    for p, q in zip(together, apart, strict=True):
        assert_same_bits(p.data, q.data, str(p.name))
    state = opt.state_dict()
    assert [state[f"step.{name}"].tolist() for name in "abc"] == [[3], [3], [2]]
    assert state["global_step"].tolist() == [5]


def test_list_of_row_tensors_and_mixed_index_dtypes() -> None:
    w, expected = ones(4, 3), ones(4, 3)
    parts = [
        nn.RowTensor(np.array([1], np.int32), ones(1, 3), (4, 3)),
        nn.RowTensor(np.array([3, 1], np.int64), 2 * ones(2, 3), (4, 3)),
    ]
    nn.LazyAdam([w])([parts])
    values = np.concatenate([ones(1, 3), 2 * ones(2, 3)])
    nn.LazyAdam([expected])([nn.RowTensor(np.array([1, 3, 1]), values, (4, 3))])
    assert_same_bits(w, expected)


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
    "parts that differ": (
        [rows([1]), rows([1], (5, 3))],
        ValueError,
        "gradient of 'b' has parts that differ",
    ),
    "negative index": (
        rows([0, -1]),
        IndexError,
        r"gradient of '.*': indices\[1\] is out of range: .*< 4, got -1",
    ),
    "large index": (
        rows([4, 0]),
        IndexError,
        r"gradient of '.*': indices\[0\] is out of range: .*got 4",
    ),
    "index in a large batch": (
        rows([0] * 9000 + [4]),
        IndexError,
        r"gradient of '.*': indices\[9000\] is out of range",
    ),
    "index in the second part": (
        [rows([0, 1]), rows([9])],
        IndexError,
        r"gradient of '.*': indices\[2\] is out of range",
    ),
}


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
    for make in (nn.LazyAdam, nn.Adam, partial(nn.Adam, weight_decay=0.1)):
        opt = make(parameters("a", "b"), use_locking=use_locking)
        opt([ones(4, 3), ones(4, 3)])
        with refused(error, f"^{type(opt).__name__}: {text}", opt, bad, first):
            opt([first, bad])


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_bad_index_in_one_of_several_dtypes(how: str) -> None:
    """Tables of two dtypes are two kernel calls: both are checked before the first runs."""
    dtypes = (np.float32, np.float64)
    for bad in range(2):
        opt = nn.Adam([ones(4, 3, dtype=d) for d in dtypes], sparse_update=how)
        gradients = [rows([1, 2]), rows([1, 2])]
        gradients[bad] = rows([1, 4])
        with refused(IndexError, "out of range", opt):
            opt(gradients)


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_bad_index_with_centralization(how: str, decay: float) -> None:
    groups = [{"params": parameters("a", "b"), "grad_centralization": True}]
    opt = nn.Adam(groups, weight_decay=decay, sparse_update=how)
    with refused(IndexError, r"indices\[1\] is out of range", opt):
        opt([ones(4, 3), rows([1, 4])])


@pytest.mark.parametrize(
    "make", [nn.AdamOffload, nn.AdamWeightDecay, ADAM["Adam-amsgrad"], ADAM["Adam-offload"]]
)
def test_row_sparse_gradient_without_a_default(make: Callable[..., Any]) -> None:
    opt = make(parameters("a", "b"))
    text = (
        "gradient of 'b' is row-sparse: .*sparse_update='lazy' or sparse_update='dense_equivalent'"
    )
    with refused(ValueError, text, opt):
        opt([ones(4, 3), rows([1])])
    for how in ("lazy", "dense_equivalent"):
        assert make(parameters("a"), sparse_update=how)([rows([1])]) == (True,)


def test_row_sparse_gradient_of_a_0d_parameter() -> None:
    opt = nn.Adam([np.array(1.0, np.float32)])
    with refused(ValueError, "gradient of 'parameter_0' is row-sparse: .*0-d parameter", opt):
        opt([rows([0])])


@EACH
@pytest.mark.parametrize(
    "given", [ones(4, 3), None, 1.0, iter([ones(4, 3)]), {"a": ones(4, 3)}, rows([1])]
)
def test_gradients_that_are_no_list(make: Callable[..., Any], given: Any) -> None:
    opt = make(parameters("a"))
    # MindSpore raises RuntimeError, Python's users expect TypeError: it is both.
    for error in (TypeError, RuntimeError):
        with refused(error, "gradients has a wrong type: expected a tuple or list", opt):
            opt(given)


@EACH
@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_gradients(make: Callable[..., Any], count: int) -> None:
    opt = make(parameters("a", "b"))
    for error in (ValueError, RuntimeError):
        with refused(error, f"gradients has a wrong length: expected 2, .*got {count}", opt):
            opt([ones(4, 3)] * count)


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("shared", ["parameter", "other parameter", "state", "part", "row values"])
def test_gradient_in_the_memory_of_a_variable(shared: str, warm: bool) -> None:
    """Also when the step recognises its gradients and takes the short way."""
    pool = np.ones((3, 4, 3), np.float32)
    opt = nn.LazyAdam([pool[0], pool[1]])
    if warm:
        for seed in range(2):
            opt(gradients_of(opt, seed))
    gradient = {
        "parameter": pool[1],
        "other parameter": pool[0],
        "state": opt.moment2[0],
        "part": pool.reshape(-1)[23:35].reshape(4, 3),
        "row values": nn.RowTensor(np.arange(4), pool[0], (4, 3)),
    }[shared]
    with refused(ValueError, "a gradient shares memory with a parameter or state", opt):
        opt([ones(4, 3), gradient])


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
        np.asfortranarray(g),
        np.repeat(g, 2, axis=1)[:, ::2],
        frozen,
        Like(g),
        nn.Parameter(g.copy()),
    ):
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
        [ones(70_001, dtype=dtype), ones(5, dtype=dtype)],
        skip_nonfinite=True,
        use_locking=use_locking,
    )
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
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_skip_nonfinite_in_row_values(bad: float, options: dict[str, Any]) -> None:
    opt = nn.LazyAdam(
        [ones(3, 2), ones(4, 3), ones(4, 3, dtype=np.float64)], skip_nonfinite=True, **options
    )
    spoiled = rows([1, 3, 1])
    spoiled.values[2, 2] = bad
    for gradients in (
        [ones(3, 2), rows([1]), spoiled],
        [None, spoiled, None],
        [ones(3, 2), [rows([0]), spoiled], None],
    ):
        with unchanged(opt):
            opt(gradients)
    assert opt.skipped_steps == 3


def test_skip_nonfinite_with_centralization() -> None:
    groups = [{"params": parameters("a", "b"), "grad_centralization": True}]
    opt = nn.Adam(groups, skip_nonfinite=True)
    gradient = ones(4, 3)
    gradient[0, 0] = np.nan
    with unchanged(opt):
        opt([ones(4, 3), gradient])
    gradient[0, 0] = np.inf
    with unchanged(opt):
        opt([ones(4, 3), gradient])
    assert opt.skipped_steps == 2


def test_finite_gradients_are_not_skipped() -> None:
    """The largest numbers of each type, subnormals and zeros."""
    for dtype in STORAGE_DTYPES:
        info = ml_dtypes.finfo(dtype)
        g = np.array([info.max, info.min, info.smallest_subnormal, 0, -0.0], dtype)
        opt = nn.Adam([ones(5, dtype=dtype)], skip_nonfinite=True)
        opt([g])
        assert (opt.skipped_steps, opt.global_step.tolist()) == (0, [1])


def test_without_skip_nonfinite_a_nan_is_written() -> None:
    opt = nn.Adam([ones(3)])
    opt([np.array([1, np.nan, 1], np.float32)])
    assert np.isnan(opt.parameters[0].data).tolist() == [False, True, False]
    assert opt.skipped_steps == 0


def test_skipping_does_not_hide_errors() -> None:
    opt = nn.Adam(parameters("a", "b"), skip_nonfinite=True)
    with refused(ValueError, "gradient of 'b' has a wrong shape", opt):
        opt([np.full((4, 3), np.nan, np.float32), ones(3)])
    assert opt.skipped_steps == 0
    opt = nn.LazyAdam(parameters("a"), skip_nonfinite=True)
    with refused(IndexError, r"indices\[1\] is out of range", opt):
        opt([rows([0, 4], value=np.nan)])
    assert opt.skipped_steps == 0


# Parameters and rebinding


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((np.ones(3, int),), TypeError, "data has a wrong dtype"),
        (([1.0],), TypeError, "data is no array"),
        ((None,), TypeError, "data is no array"),
        ((ones(6)[::2],), ValueError, "data is not contiguous"),
        ((np.broadcast_to(ones(1), (3,)),), ValueError, "data is read-only"),
        ((ones(2), 3), TypeError, "name has a wrong type: expected a str, got int"),
        ((ones(2), "w", 1), TypeError, "requires_grad has a wrong type: expected a bool"),
    ],
)
def test_bad_parameter(arguments: tuple[Any, ...], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^Parameter: {text}"):
        nn.Parameter(*arguments)


def test_parameter_is_its_array() -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    p = nn.Parameter(w, "w")
    assert p.data is w
    assert np.asarray(p) is w
    assert p.asnumpy() is w
    assert nn.Parameter(p).data is w
    assert (p.shape, p.dtype, p.ndim, p.size, len(p)) == ((2, 3), np.float32, 2, 6, 2)
    assert np.array(p) is not w
    assert np.asarray(p, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.array(p, np.float64, copy=False)
    assert repr(p) == "Parameter(name='w', shape=(2, 3), dtype=float32)"


@EACH
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "rows"])
def test_updates_follow_a_rebinding(make: Callable[..., Any], sparse: bool) -> None:
    """They reach the new array and never the old one, states going on."""
    (p,), (q,) = parameters("w"), parameters("w")
    options = {"sparse_update": "lazy"} if sparse else {}
    opt, straight = make([p], 0.1, **options), make([q], 0.1, **options)
    for step in range(6):
        gradient = rows([1, step % 4]) if sparse else gradients_of(opt, step)[0]
        straight([gradient])
        if step in (0, 3):
            old, p.data = p.data, p.data.copy()
        with unchanged(old):
            opt([gradient])
        assert_same_bits(p.data, q.data, f"step {step}")


def test_rebinding_reaches_every_optimizer() -> None:
    (p,) = parameters("w")
    one, two = nn.Adam([p]), nn.LazyAdam([p])
    for opt in (one, two):
        opt([ones(4, 3)])
    old, p.data = p.data, p.data.copy()
    with unchanged(old):
        one([ones(4, 3)])
        two([ones(4, 3)])


def test_rebinding_that_is_refused() -> None:
    pool = np.ones((3, 4, 3), np.float32)
    a, b = nn.Parameter(pool[0], "a"), nn.Parameter(pool[1], "b")
    opt = nn.Adam([a, b])
    opt([ones(4, 3), ones(4, 3)])
    for value, error, text in (
        (
            ones(3, 4),
            ValueError,
            r"Parameter: data has a wrong shape: expected \(4, 3\), got \(3, 4\)",
        ),
        (np.ones((4, 3), int), TypeError, "Parameter: data has a wrong dtype"),
        (ones(3, 4).T, ValueError, "Parameter: data is not contiguous"),
        (np.broadcast_to(ones(3), (4, 3)), ValueError, "Parameter: data is read-only"),
        (b.data, ValueError, "Adam: parameter '.' shares memory with parameter '.'"),
        (pool.reshape(-1)[20:32].reshape(4, 3), ValueError, "Adam: parameter '.' shares memory"),
        ("w", TypeError, "Parameter: data is no array"),
    ):
        with refused(error, text, opt, pool):
            a.data = value
        assert a.data is pool[0] or np.shares_memory(a.data, pool[0])
    a.data = pool[0]  # its own memory is no overlap
    opt([ones(4, 3), ones(4, 3)])


@pytest.mark.parametrize("state", ["moment1", "moment2"])
def test_rebinding_to_a_state_is_refused(state: str) -> None:
    """The step would read and write both at once."""
    opt = nn.Adam(parameters("a", "b"))
    with refused(ValueError, "shares memory", opt):
        opt.parameters[1].data = getattr(opt, state)[0]


# Custom optimizers


def test_custom_optimizer() -> None:
    """decay, centralization, scaling, group rates, counting."""
    a, b = parameters("a", "b", dtype=np.float64)
    before = a.data.copy(), b.data.copy()
    opt = Descent(
        lambda step: 0.5**step,
        [
            {"params": [a], "grad_centralization": True, "lr": 0.25},
            {"params": [b], "weight_decay": 0.0},
        ],
        weight_decay=0.5,
        loss_scale=2.0,
    )
    g, h = gradients_of(opt, 1, np.float64)
    assert opt([2 * g, 2 * h]) is True
    np.testing.assert_allclose(a.data, before[0] - 0.25 * central(g + 0.5 * before[0]), rtol=1e-12)
    np.testing.assert_allclose(b.data, before[1] - h, rtol=1e-12)
    assert opt.global_step.tolist() == [1]
    assert opt.get_lr() == (0.25, 0.5)


def test_custom_optimizer_that_raises_is_not_counted() -> None:
    class Broken(nn.Optimizer):
        def construct(self, gradients: tuple[Any, ...]) -> Any:
            raise ArithmeticError(f"broken by {len(gradients)}")

    opt = Broken(0.1, [ones(2)])
    with refused(ArithmeticError, "broken", opt):
        opt([ones(2)])


def test_base_class_has_no_step() -> None:
    opt = nn.Optimizer(0.1, [ones(2)])
    with refused(NotImplementedError, "define construct", opt):
        opt([ones(2)])


def test_custom_optimizer_state() -> None:
    opt = Descent([0.5, 0.25], parameters("a"))
    opt([ones(4, 3)])
    state = opt.state_dict()
    assert set(state) == {"global_step", "learning_rate"}
    other = Descent([0.0, 0.0], parameters("a"))
    other.load_state_dict(state)
    assert other.get_lr() == 0.25
    for again in (copy.deepcopy(opt), copy.copy(opt)):
        assert again.get_lr() == 0.25


# State


def trained(make: Callable[..., Any], dtype: Any = np.float32, **options: Any) -> Any:
    """An optimizer of two parameters after steps of which one skipped a parameter."""
    groups = [
        {"params": parameters("a", dtype=dtype), "lr": [0.5, 0.25, 0.125, 0.1, 0.05, 0.01]},
        {"params": [nn.Parameter(np.array([0.5, 2.0], dtype), "b")], "weight_decay": 0.3},
    ]
    opt = make(groups, **options)
    for step in range(3):
        g, h = gradients_of(opt, step, dtype)
        opt([g, None if step == 1 else h])
    return opt


def follow(opt: Any) -> None:
    for step in range(3, 6):
        opt(gradients_of(opt, step, opt.parameters[0].dtype))


def by_state(opt: Any, make: Callable[..., Any], *_: Any) -> Any:
    """A new optimizer over copies of the parameters, with the state of `opt`."""
    groups = [
        {"params": [nn.Parameter(opt.parameters[0].data.copy(), "a")], "lr": [0.0] * 6},
        {"params": [nn.Parameter(opt.parameters[1].data.copy(), "b")], "weight_decay": 0.3},
    ]
    other = make(groups)
    other.load_state_dict(opt.state_dict())
    return other


def by_checkpoint(opt: Any, make: Callable[..., Any], path: Any) -> Any:
    nn.save_checkpoint(opt, path / "optimizer")
    nn.save_checkpoint(opt.parameters, path / "parameters")
    loaded = nn.load_checkpoint(path / "parameters")
    groups = [
        {"params": [nn.Parameter(loaded["a"], "a")], "lr": [0.0] * 6},
        {"params": [nn.Parameter(loaded["b"], "b")], "weight_decay": 0.3},
    ]
    other = make(groups)
    other.load_state_dict(nn.load_checkpoint(path / "optimizer"))
    return other


WAYS: dict[str, Callable[..., Any]] = {
    "state_dict": by_state,
    "checkpoint": by_checkpoint,
    "pickle": lambda opt, *_: pickle.loads(pickle.dumps(opt)),
    "deepcopy": lambda opt, *_: copy.deepcopy(opt),
}
RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    name: (make, {} if name == "AdamWeightDecay" else {"loss_scale": 3.0, "weight_decay": 0.1})
    for name, make in OPTIMIZERS.items()
}
RESUMED |= {
    "Adam-plain": (nn.Adam, {}),
    "Adam-locking": (nn.Adam, {"use_locking": True}),
    "Adam-skip": (nn.Adam, {"skip_nonfinite": True}),
    "Adam-float16-state": (nn.Adam, {"state_dtype": np.float16}),
    "Adam-bfloat16-state": (nn.Adam, {"state_dtype": BF16, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
def test_resumes_bit_for_bit(case: Any, dtype: Any, way: Callable[..., Any], tmp_path: Any) -> None:
    make, options = case
    opt = trained(make, dtype, **options)
    with unchanged(opt):
        again = way(opt, partial(make, **options), tmp_path)
    assert not any(
        np.shares_memory(x, y) for x, y in zip(arrays_of(opt), arrays_of(again), strict=True)
    )
    follow(opt)
    follow(again)
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data, str(p.name))
    for (name, x), (other, y) in zip(
        opt.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert_same_bits(x, y, name)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_know_their_schedules_and_rebinding(way: str) -> None:
    opt = nn.LazyAdam(parameters("a"), Halving(), weight_decay=0.1, loss_scale=2.0)
    opt([rows([1, 1])])
    again = WAYS[way](opt)
    assert again.get_lr() == opt.get_lr() == 0.25
    old, again.parameters[0].data = again.parameters[0].data, again.parameters[0].data.copy()
    with unchanged(old):
        again([rows([1, 2])])
    opt([rows([1, 2])])
    assert_same_bits(again.parameters[0].data, opt.parameters[0].data)


def test_row_tensor_and_parameter_pickle() -> None:
    gradient = pickle.loads(pickle.dumps(rows([1, 2])))
    assert_same_bits(gradient.to_dense(), rows([1, 2]).to_dense())
    (p,) = parameters("w")
    again = pickle.loads(pickle.dumps(p))
    assert (again.name, again.requires_grad) == ("w", True)
    assert_same_bits(again.data, p.data)
    assert not np.shares_memory(again.data, p.data)


STATE_NAMES = {
    "Adam": (("moment1", "moment2"), ()),
    "Adam-amsgrad": (("moment1", "moment2", "vhat"), ()),
    "LazyAdam": (("moment1", "moment2"), (1,)),
    "AdamOffload": (("moment1", "moment2"), (1,)),
    "AdamWeightDecay": (("adam_m", "adam_v"), None),
}


@pytest.mark.parametrize("name", STATE_NAMES)
def test_state_names_are_published_ones(name: str) -> None:
    roles, power_shape = STATE_NAMES[name]
    opt = OPTIMIZERS[name](parameters("a", "b"))
    expected = {f"{role}.{p}" for role in (*roles, "step") for p in "ab"}
    expected |= {"global_step", "learning_rate"}
    powers = {"beta1_power", "beta2_power"} if power_shape is not None else set()
    state = opt.state_dict()
    assert set(state) == expected | powers
    assert (state["global_step"].dtype, state["global_step"].shape) == (np.int32, (1,))
    opt([ones(4, 3), ones(4, 3)])
    after = opt.state_dict()
    for power, beta in zip(sorted(powers), (0.9, 0.999), strict=False):
        assert_same_bits(state[power], np.ones(power_shape, np.float32))
        assert_same_bits(after[power], np.full(power_shape, beta, np.float32))


def test_vhat_is_there_with_amsgrad_alone() -> None:
    # A KeyError would break hasattr, getattr with a default and every inspection.
    assert not hasattr(nn.Adam([ones(2)]), "vhat")
    opt = nn.Adam([ones(2)], use_amsgrad=True)
    opt([ones(2)])
    assert (opt.vhat[0] > 0).all()


def test_state_dict_is_a_copy() -> None:
    opt = nn.Adam(parameters("a"))
    state = opt.state_dict()
    with unchanged(opt):
        for array in state.values():
            array[...] = 7
    opt.load_state_dict(opt.state_dict())
    source = opt.state_dict()
    opt.load_state_dict(source)
    with unchanged(opt):
        for array in source.values():
            array[...] = 7


def test_state_keeps_dtypes() -> None:
    opt = nn.Adam([ones(2, dtype=d) for d in STORAGE_DTYPES])
    state = opt.state_dict()
    for k, dtype in enumerate(STORAGE_DTYPES):
        assert state[f"moment1.parameter_{k}"].dtype == dtype


def mindspore_state(opt: Any) -> dict[str, np.ndarray]:
    """What MindSpore would have written: no counts for each parameter, rates in float32."""
    state = {
        name: array for name, array in opt.state_dict().items() if not name.startswith("step.")
    }
    rates = {
        name: array.astype(np.float32)
        for name, array in state.items()
        if name.startswith("learning_rate")
    }
    return {**state, **rates}


@pytest.mark.parametrize("name", STATE_NAMES)
@pytest.mark.parametrize("rates", [True, False], ids=["float32 rates", "our rates"])
def test_state_as_mindspore_writes_it(name: str, rates: bool) -> None:
    """Every parameter has been updated global_step times."""
    make = OPTIMIZERS[name]
    opt = make(parameters("a", "b"), 0.5)
    for seed in range(3):
        opt(gradients_of(opt, seed))
    state = mindspore_state(opt)
    if not rates:
        state |= {n: a for n, a in opt.state_dict().items() if n.startswith("learning_rate")}
    again = make([nn.Parameter(p.data.copy(), p.name) for p in opt.parameters], 0.5)
    again.load_state_dict(state)
    for one in (opt, again):
        one(gradients_of(one, 9))
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data)
    assert again.state_dict()["step.a"].tolist() == [4]


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, name: value}


MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, str]] = {
    "missing": (
        lambda s: {k: v for k, v in s.items() if k != "moment2.b"},
        KeyError,
        r"state does not fit this optimizer: .*missing \['moment2.b'\]",
    ),
    "one count missing": (
        lambda s: {k: v for k, v in s.items() if k != "step.b"},
        KeyError,
        "missing .'step.b'",
    ),
    "unknown": (changed("vhat.a", ones(4, 3)), KeyError, r"unknown \['vhat.a'\]"),
    "empty": (lambda _: {}, KeyError, "does not fit this optimizer"),
    "dtype": (
        changed("moment2.b", ones(4, 3, dtype=np.float64)),
        TypeError,
        "'moment2.b' has a wrong dtype",
    ),
    "shape": (changed("moment2.b", ones(3, 4)), ValueError, "'moment2.b' has a wrong shape"),
    "flat": (changed("moment2.b", ones(12)), ValueError, "'moment2.b' has a wrong shape"),
    "kind": (changed("moment2.b", None), TypeError, "'moment2.b' is no array"),
    "other beta1": (
        changed("beta1_power", np.float32(0.5)),
        ValueError,
        "'beta1_power' is of other options",
    ),
    "other beta2": (
        changed("beta2_power", np.float32(0.5)),
        ValueError,
        "'beta2_power' is of other options",
    ),
    "step dtype": (
        changed("global_step", np.array([1], np.int64)),
        TypeError,
        "'global_step' has a wrong dtype",
    ),
    "step empty": (
        changed("global_step", np.array([], np.int32)),
        ValueError,
        "'global_step' has a wrong shape",
    ),
    "step kind": (changed("global_step", "two"), TypeError, "'global_step'"),
    "step negative": (
        changed("global_step", np.array([-2], np.int32)),
        ValueError,
        "'global_step'",
    ),
    "rate lengths": (
        changed("learning_rate", np.array([0.1, 0.1])),
        ValueError,
        "'learning_rate' has a wrong shape",
    ),
    "no mapping": (lambda s: list(s), TypeError, "state"),
}


@pytest.mark.parametrize("case", MISMATCHES.values(), ids=MISMATCHES)
def test_state_that_does_not_fit(case: tuple[Any, Any, str]) -> None:
    change, error, text = case
    opt, other = nn.Adam(parameters("a", "b")), nn.Adam(parameters("a", "b"))
    other(gradients_of(other, 1))
    with refused(error, text, opt):
        opt.load_state_dict(change(other.state_dict()))


@pytest.mark.parametrize("value", [np.nan, -0.5, np.inf, 1e39])
def test_a_loaded_rate_is_checked(value: float) -> None:
    opt = nn.Adam(parameters("a"))
    state = changed("learning_rate", np.array(value))(opt.state_dict())
    with refused(ValueError, "'learning_rate' is out of range", opt):
        opt.load_state_dict(state)


@pytest.mark.parametrize("value", [-1, 2**31, 2**63 - 1])
def test_a_loaded_count_is_checked(value: int) -> None:
    """Beyond the steps that there can be it would overflow."""
    opt = nn.Adam(parameters("a"))
    state = changed("step.a", np.array([value]))(opt.state_dict())
    expected = f"at least 0, at most 2147483647, got {value}"
    with refused(ValueError, f"'step.a' is out of range: expected {expected}", opt):
        opt.load_state_dict(state)


def test_a_loaded_step_of_an_own_optimizer_is_checked() -> None:
    class Own(nn.Optimizer):
        def construct(self, gradients: Any) -> bool:
            return bool(gradients)

    opt = Own(0.1, parameters("a"))
    state = changed("global_step", np.array([-5], np.int32))(opt.state_dict())
    with refused(ValueError, "'global_step' is out of range: expected at least 0", opt):
        opt.load_state_dict(state)


def test_a_name_is_fixed_by_an_optimizer() -> None:
    """The state is saved by name: renaming would lose it."""
    a = nn.Parameter(ones(2))
    a.name = "free"
    nn_opt = nn.Adam([a])
    with pytest.raises(ValueError, match="name is fixed by an optimizer"):
        a.name = "other"
    assert "moment1.free" in nn_opt.state_dict()


def test_unpickled_from_read_only_buffers() -> None:
    """Protocol 5 hands over arrays in foreign memory, which must not be written."""
    opt = trained(nn.Adam, np.float32)
    buffers: list[Any] = []
    data = pickle.dumps(opt, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    kept = [bytes(bytearray(b)) for b in frozen]
    again = pickle.loads(data, buffers=frozen)
    follow(opt)
    follow(again)
    assert frozen == kept
    for p, q in zip(opt.parameters, again.parameters, strict=True):
        assert_same_bits(p.data, q.data)


def test_a_parameter_made_read_only_is_refused() -> None:
    w = ones(3)
    opt = nn.Adam([w])
    w.flags.writeable = False
    with pytest.raises(ValueError, match="is read-only"):
        opt([ones(3)])
    assert opt.global_step[0] == 0


# Checkpoints


@pytest.mark.parametrize(
    "dtype", [*STORAGE_DTYPES, np.dtype(np.int32), np.dtype(np.int64)], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 2), (2, 3, 4)])
def test_checkpoint_keeps_every_bit(dtype: Any, shape: tuple[int, ...], tmp_path: Any) -> None:
    bits = np.random.default_rng(6).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    array = bits.view(dtype).reshape(shape)
    path = tmp_path / "file.safetensors"
    nn.save_checkpoint({"a.b": array, "strided": np.repeat(ones(3), 2)[::2]}, str(path))
    loaded = nn.load_checkpoint(path)
    assert_same_bits(loaded["a.b"], array)
    assert_same_bits(loaded["strided"], ones(3))


def test_checkpoint_of_parameters(tmp_path: Any) -> None:
    nn.save_checkpoint(iter(parameters("a", "b")), tmp_path / "x")
    loaded = nn.load_checkpoint(tmp_path / "x")
    for p in parameters("a", "b"):
        assert_same_bits(loaded[p.name], p.data)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (3, TypeError, "save_obj has a wrong type: expected an optimizer, a mapping or parameters"),
        (parameters("a")[0], TypeError, "save_obj has a wrong type"),
        ([ones(2)], TypeError, "save_obj holds a wrong type: expected Parameters, got ndarray"),
        ([nn.Parameter(ones(2))], ValueError, "parameter name is missing or repeats"),
        (parameters("a", "a"), ValueError, "parameter name is missing or repeats: .*got a"),
        ({"a": "text"}, TypeError, "a is no array"),
    ],
)
def test_what_cannot_be_saved(given: Any, error: Any, text: str, tmp_path: Any) -> None:
    with pytest.raises(error, match=f"^save_checkpoint: {text}"):
        nn.save_checkpoint(given, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_failing_write_leaves_the_old_file(broken: str, tmp_path: Any, monkeypatch: Any) -> None:
    path = tmp_path / "state"
    nn.save_checkpoint({"a": ones(3)}, path)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        nn.save_checkpoint({"a": 2 * ones(3)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_and_broken_file(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError):
        nn.save_checkpoint({"a": ones(3)}, tmp_path / "nowhere" / "x")
    with pytest.raises(FileNotFoundError):
        nn.load_checkpoint(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"no tensors")
    with pytest.raises(Exception, match=r"(?i)header|deserializ"):
        nn.load_checkpoint(tmp_path / "x")


def test_checkpoint_has_the_permissions_of_any_new_file(tmp_path: Any) -> None:
    """A temporary file is private; the checkpoint that it becomes is for those who share it."""
    (tmp_path / "plain").write_bytes(b"")
    nn.save_checkpoint({"a": ones(3)}, tmp_path / "state")
    modes = [(tmp_path / name).stat().st_mode for name in ("plain", "state")]
    assert modes[0] == modes[1]


# Kernel calls and mixed dtypes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel calls of every step, by kind."""
    made: list[str] = []
    for kind in (DenseUpdate, RowUpdate):

        def count(update: Any, _original: Any = kind.prepared, **options: Any) -> Any:
            made.append(type(update).__name__)
            return _original(update, **options)

        monkeypatch.setattr(kind, "prepared", count)
    return made


@EACH
def test_one_call_for_all_dense_tensors(make: Callable[..., Any], calls: list[str]) -> None:
    """Whatever the groups, decays and counts of updates are."""
    groups = [
        {"params": [ones(k + 1) for k in range(5)], "lr": 0.1},
        {"params": [ones(2, 3)], "weight_decay": 0.3},
        {"params": [ones(7)], "grad_centralization": True},
    ]
    opt = make(groups)
    for step in range(3):
        opt([None if step == 1 and k == 2 else g for k, g in enumerate(gradients_of(opt, step))])
    assert calls == ["DenseUpdate"] * 3


def test_one_call_for_all_tables(calls: list[str]) -> None:
    opt = nn.LazyAdam([ones(4, k + 1) for k in range(6)], weight_decay=0.1)
    for _ in range(3):
        opt([rows([1, 2, 1], p.shape) for p in opt.parameters])
    assert calls == ["RowUpdate"] * 3
    calls.clear()
    opt(
        [
            rows([1], p.shape) if k % 2 else np.ones(p.shape, np.float32)
            for k, p in enumerate(opt.parameters)
        ]
    )
    assert sorted(calls) == ["DenseUpdate", "RowUpdate"]
    calls.clear()
    opt([None] * 6)
    assert calls == []


def test_one_call_for_each_dtype(calls: list[str]) -> None:
    dtypes = [d for d in STORAGE_DTYPES for _ in range(3)]
    opt = nn.Adam([np.ones(3, d) for d in dtypes])
    opt([np.ones(3, d) for d in dtypes])
    assert calls == ["DenseUpdate"] * 4
    calls.clear()
    opt([np.ones(3, np.float32)] * 12)
    assert calls == ["DenseUpdate"] * 4
    calls.clear()
    opt([np.ones(3, np.float16) if k % 2 else np.ones(3, np.float32) for k in range(12)])
    assert calls == ["DenseUpdate"] * 8


def mixed_dtypes(state_dtype: Any) -> Any:
    """Dtypes of parameters and their gradients: a sample, and all."""
    some = [(w, g) for w, g, s in PAIRWISE if s == (state_dtype or w)]
    yield pytest.param(state_dtype, some, id=f"{state_dtype}")
    yield more(state_dtype, list(product(STORAGE_DTYPES, repeat=2)), id=f"{state_dtype}, all")


@pytest.mark.parametrize(
    ("state_dtype", "combinations"),
    [one for dtype in (None, *STORAGE_DTYPES) for one in mixed_dtypes(dtype)],
)
def test_mixed_dtypes_in_one_optimizer(state_dtype: Any, combinations: Any) -> None:
    """Every tensor as in an optimizer of its own; states as asked for.

    Without decay: the kernels are those of test_storage.py.
    """
    rng = np.random.default_rng(7)
    start = [rng.standard_normal(5).astype(w) for w, _ in combinations]
    together, apart = [a.copy() for a in start], [a.copy() for a in start]
    opt = nn.Adam(together, 0.1, state_dtype=state_dtype)
    single = [nn.Adam([a], 0.1, state_dtype=state_dtype) for a in apart]
    for _ in range(2):
        gradients = [rng.standard_normal(5).astype(g) for _, g in combinations]
        opt(gradients)
        for one, gradient in zip(single, gradients, strict=True):
            one([gradient])
    for k, (w, _) in enumerate(combinations):
        assert_same_bits(together[k], apart[k])
        assert (together[k] != start[k]).all()
        for state in (opt.moment1[k], opt.moment2[k]):
            assert state.dtype == (w if state_dtype is None else state_dtype)


def test_higher_precision_gradient_is_used_in_the_arithmetic_type() -> None:
    """A float64 gradient of a float32 parameter is rounded: nothing is written to it."""
    w, expected = ones(3), ones(3)
    g = np.array([0.1, 1e-3, 7.0])
    nn.Adam([w])([g])
    nn.Adam([expected])([g.astype(np.float32)])
    assert_same_bits(w, expected)


def test_result_is_true_for_each_parameter() -> None:
    for make in OPTIMIZERS.values():
        assert make(parameters("a", "b"))((ones(4, 3), None)) == (True, True)


@pytest.mark.parametrize("form", [list, tuple])
def test_row_tensor_of_ops_and_nn_are_one(form: Any) -> None:
    assert nn.RowTensor is ops.RowTensor
    opt = nn.LazyAdam(parameters("a"))
    assert opt(form([rows([1])])) == (True,)


def test_global_step_is_copied_when_it_is_assigned():
    opt = nn.Adam([np.ones(2, np.float32)])
    given = np.array([5], np.int32)
    opt.global_step = given
    opt((np.ones(2, np.float32),))
    assert given.tolist() == [5]
    assert opt.global_step.tolist() == [6]
    lars = nn.LARS(opt)
    lars.global_step = given
    assert opt.global_step.tolist() == [5]
    for bad, error in ((3, TypeError), (np.array([3]), TypeError), (-given, ValueError)):
        with pytest.raises(error, match="'global_step'"):
            opt.global_step = bad
    assert opt.global_step.tolist() == [5]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("cls", [nn.Adam, nn.SGD, "custom"])
def test_the_last_step_there_is(cls, wrapped):
    """The published count is an int32."""

    class Descent(nn.Optimizer):
        def construct(self, gradients):
            for p, g in zip(self.parameters, gradients, strict=True):
                p.data -= g
            return True

    w = np.zeros(2, np.float32)
    opt = Descent(0.1, [w]) if cls == "custom" else cls([w], 0.1)
    stepped = nn.LARS(opt) if wrapped else opt
    opt.global_step[0] = 2**31 - 2
    stepped((np.ones(2, np.float32),))
    assert opt.global_step[0] == 2**31 - 1
    with unchanged(opt), pytest.raises(OverflowError, match="global_step is at its end: expected"):
        stepped((np.ones(2, np.float32),))
    assert opt.state_dict()["global_step"] == 2**31 - 1


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda w: w.setflags(write=False), ValueError, "parameter 'w' is read-only"),
        (lambda w: w.resize((2, 4), refcheck=False), ValueError, r"'w' .*\(4, 2\), got \(2, 4\)"),
        (lambda w: w.resize((90_000, 2), refcheck=False), ValueError, "wrong (dense_)?shape"),
    ],
    ids=["read-only", "shape", "resized"],
)
def test_arrays_that_were_changed_between_steps(
    change: Any, error: Any, text: str, is_sparse: bool
) -> None:
    """In place, so that nobody is told: the step looks, and does not write where they were."""

    def gradient(shape: tuple[int, ...]) -> Any:
        rows = nn.RowTensor(np.array([1, 0]), np.ones((2, *shape[1:]), np.float32), shape)
        return rows if is_sparse else np.ones(shape, np.float32)

    w, other = np.ones((4, 2), np.float32), np.ones(3, np.float32)
    params = [nn.Parameter(w, "w"), nn.Parameter(other, "other")]
    opt = nn.Momentum(params, 0.1, 0.9, sparse_update="lazy")
    g = np.ones(3, np.float32)
    opt((gradient((4, 2)), g))
    change(w)
    shape = (4, 2) if w.size > 8 else w.shape
    for _ in range(2):
        with refused(error, text, w, other):
            opt((gradient(shape), g))
    assert opt.global_step == 1


def test_a_state_that_was_made_read_only() -> None:
    opt = nn.Momentum([np.ones(3, np.float32)], 0.1, 0.9)
    g = (np.ones(3, np.float32),)
    opt(g)
    opt.moments[0].flags.writeable = False
    with refused(ValueError, "a state of 'parameter_0' is read-only", opt):
        opt(g)
    opt.moments[0].flags.writeable = True
    opt(g)
    assert opt.global_step == 2


def test_no_state_can_be_cut_off_in_place():
    """The kernels would write beyond it."""
    opt = nn.Adam([np.ones(6, np.float32)])
    opt((np.ones(6, np.float32),))
    with pytest.raises(ValueError, match="does not own its data"):
        opt._states["moment1"][0].resize(2, refcheck=False)
    assert opt.global_step == 1


def test_a_parameter_that_was_cut_off_in_place_is_refused():
    """Likewise."""
    w = np.ones(6, np.float32)
    opt = nn.Adam([w])
    opt((np.ones(6, np.float32),))
    w.resize(2, refcheck=False)
    with pytest.raises(ValueError, match="has another shape than at construction"):
        opt((np.ones(2, np.float32),))
    assert opt.global_step == 1
