"""Learning rates and weight decays: numbers, lists, schedules; of all parameters or of groups."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from adam_family import EACH_CLASS, Halving, ones, parameters, rows
from fusestep import nn
from fusestep.bench.registry import Row
from helpers import BF16, assert_same_bits, refused
from optimizers import FAMILIES

# Learning rate


def numbers() -> Iterator[float]:
    yield from (0.5, 0.25, 0.125)


RATES: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "float": (lambda: 0.5, [0.5] * 3), "int": (lambda: 2, [2.0] * 3),
    "bool": (lambda: True, [1.0] * 3), "zero": (lambda: 0.0, [0.0] * 3),
    "float32": (lambda: np.float32(0.5), [0.5] * 3), "0-d": (lambda: np.array(0.5), [0.5] * 3),
    "0-d int": (lambda: np.array(2), [2.0] * 3),
    "0-d bfloat16": (lambda: np.array(0.5, BF16), [0.5] * 3),
    "Parameter": (lambda: nn.Parameter(np.array(0.5)), [0.5] * 3),
    "1-d": (lambda: np.array([0.5, 0.25, 0.125], np.float32), [0.5, 0.25, 0.125]),
    "list": (lambda: [0.5, 0.25, 0.125], [0.5, 0.25, 0.125]),
    "tuple of ints": (lambda: (2, 1, 0), [2.0, 1.0, 0.0]),
    "generator": (numbers, [0.5, 0.25, 0.125]), "schedule": (Halving, [0.5, 0.25, 0.125]),
    "callable": (lambda: lambda step: 0.5 / (1 + step), [0.5, 0.25, 0.5 / 3]),
    "callable of arrays": (lambda: lambda step: np.full((1,), 0.5**step), [1.0, 0.5, 0.25]),
}  # fmt: skip
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


@EACH_CLASS
def test_schedule_class_instead_of_an_instance(cls: type) -> None:
    text = f"^{cls.__name__}: learning_rate .*Halving.* a class: expected an instance"
    with pytest.raises(TypeError, match=text):
        cls([ones(2)], Halving)


def later(value: Any) -> Any:
    """A schedule that is right in the first step alone."""
    return lambda step: 0.1 if step == 0 else value() if callable(value) else value


@pytest.mark.parametrize(("schedule", "error", "text"), [
    (later(None), TypeError, "learning_rate has a schedule that returned no number: .*None"),
    (later("x"), TypeError, "returned no number"),
    (later(np.ones(2)), TypeError, "returned no number"),
    (later(np.nan), ValueError, "learning_rate is not finite"),
    (later(np.inf), ValueError, "learning_rate is not finite"),
    (later(lambda: 1 / 0), ZeroDivisionError, "division"),
    (nn.LearningRateSchedule(), NotImplementedError, "define construct"),
])  # fmt: skip
def test_schedules_that_do_not_work(schedule: Any, error: Any, text: str) -> None:
    opt = nn.Adam([ones(2)], schedule)
    if error is not NotImplementedError:
        opt([ones(2)])
    with refused(error, text, opt):
        opt([ones(2)])


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


WHATEVER_THE_NAME = ("AdaFactor", "Adan", "FTRL", "Lion")


@pytest.mark.parametrize(
    ("name", "decays"),
    [*((name, False) for name in ("beta", "my_beta_x", "gamma", "bn.gamma", "alphabeta")),
     *((name, True) for name in ("weight", "BETA", "Gamma", "alphabet", "bet"))])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_beta_and_gamma_do_not_decay(family: Row, name: str, decays: bool) -> None:
    """A substring in lower case; in groups names do not count."""
    for in_group in (False, True):
        with_decay, without = nn.Parameter(ones(2), name), nn.Parameter(ones(2), name)
        for w, options in ((with_decay, {"weight_decay": 0.5}), (without, {})):
            opt = family.make([{"params": [w]}] if in_group else [w], **options)
            opt([np.float32([0.1, -0.2])])
        expected = decays or in_group or family.name in WHATEVER_THE_NAME
        assert (with_decay.data != without.data).any() == expected


@EACH_CLASS
def test_negative_decay_of_a_schedule_is_refused(cls: type) -> None:
    """As a negative number is: it must not be ignored, nor grow the weights."""
    opt = cls([ones(3)], weight_decay=lambda step: 0.1 - step)
    opt([ones(3)])
    with refused(ValueError, "weight_decay", opt):
        opt([ones(3)])


@pytest.mark.parametrize("centralize", [False, True])
@pytest.mark.parametrize("option", ["learning_rate", "weight_decay"])
def test_a_schedule_is_called_once_a_step_with_an_int(option: str, centralize: bool) -> None:
    """Whatever the gradients are: it may be a generator's ``next``."""
    seen: list[Any] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.1

    groups = [{"params": parameters("a", "b", "c"), "grad_centralization": centralize}]
    opt = nn.Adam(groups, **{option: schedule})
    for gradients in ([ones(4, 3)] * 3, [ones(4, 3)] * 3, [rows([1]), None, None]):
        opt(gradients)
    assert seen == [0, 1, 2]
    assert all(type(step) is int for step in seen)


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
