"""Learning-rate schedules and lists: recorded runs, formulas, refusals; one after the other."""

import bisect
import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from argument_kinds import KINDS
from fusestep import nn
from helpers import assert_same_bits
from recorded import all_cases

CASES = all_cases("lr_schedules")


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str) -> None:
    case = CASES[name]
    api = getattr(nn, case.api.removeprefix("nn."))
    expected = case.steps[0].outputs["lr"]
    if "step" in case.initial:
        found, relative = api(**case.hyper)(case.initial["step"]), 3e-6
        assert expected.dtype == np.float32
    else:
        found, relative = api(**case.hyper), 1e-15
        assert isinstance(found, list)
        assert expected.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=relative, atol=0)
    assert len(found) == len(expected) >= 10


# The formulas in plain Python, of a time t that is a step or an epoch.


def exponential(t: int, lr: float, rate: float, n: int, stair: bool = False) -> float:
    return lr * math.pow(rate, math.floor(t / n) if stair else t / n)


def natural(t: int, lr: float, rate: float, n: int, stair: bool = False) -> float:
    return lr / math.exp(rate * (math.floor(t / n) * n if stair else t))


def inverse(t: int, lr: float, rate: float, n: int, stair: bool = False) -> float:
    return lr / (1 + rate * (math.floor(t / n) if stair else t / n))


def cosine(t: int, low: float, high: float, n: int) -> float:
    if t >= n:
        return low
    return (high + low) / 2 + (high - low) / 2 * math.cos(math.pi * t / n)


def polynomial(t: int, lr: float, end: float, n: int, power: float, update: bool = False) -> float:
    if update:
        total = n * max(math.ceil(t / n), 1)
        return (lr - end) * (1 - t / total) ** power + end
    return end if t >= n else (lr - end) * (1 - t / n) ** power + end


def warmup(t: int, lr: float, n: int) -> float:
    return lr if t >= n else lr * t / n


FORMULAS: dict[str, tuple[Callable[..., float], Any, Callable[..., Any]]] = {
    "exponential": (exponential, nn.ExponentialDecayLR, nn.exponential_decay_lr),
    "natural_exp": (natural, nn.NaturalExpDecayLR, nn.natural_exp_decay_lr),
    "inverse": (inverse, nn.InverseDecayLR, nn.inverse_decay_lr),
    "cosine": (cosine, nn.CosineDecayLR, nn.cosine_decay_lr),
    "polynomial": (polynomial, nn.PolynomialDecayLR, nn.polynomial_decay_lr),
    "warmup": (warmup, nn.WarmUpLR, nn.warmup_lr),
}
# Arguments in the order of the classes; the int among them is the number of steps or epochs.
ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    *(
        (name, (*arguments, *stair))
        for name in ("exponential", "natural_exp", "inverse")
        for arguments in ((0.1, 0.9, 4), (0.5, 0.3, 7), (0.1, 1.5, 1))
        for stair in ((), (False,), (True,))),
    *(("cosine", arguments) for arguments in ((0.01, 0.1, 10), (0.0, 0.5, 7), (0.2, 0.3, 1))),
    *(
        ("polynomial", (*arguments, *update))
        for arguments in ((0.1, 0.01, 7, 0.5), (0.5, 0.0, 10, 2.0), (0.1, 0.3, 1, 1.0))
        for update in ((), (False,), (True,))),
    *(("warmup", arguments) for arguments in ((0.1, 5), (0.3, 1), (0.0, 4))),
]  # fmt: skip
EACH_FORMULA = pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)


def close(value: float) -> Any:
    # The absolute part is for values that cancel to zero.
    return pytest.approx(value, rel=1e-13, abs=1e-16)


@EACH_FORMULA
def test_schedule_is_its_formula(name: str, arguments: tuple[Any, ...]) -> None:
    formula, make, _ = FORMULAS[name]
    schedule = make(*arguments)
    for step in range(41):
        found = schedule(step)
        assert type(found) is float
        assert found == close(formula(step, *arguments)), step


@EACH_FORMULA
@pytest.mark.parametrize("per_epoch", [1, 3])
def test_list_is_its_formula(name: str, arguments: tuple[Any, ...], per_epoch: int) -> None:
    formula, _, make = FORMULAS[name]
    # Everywhere but in warmup_lr two numbers precede the lengths.
    before = 1 if name == "warmup" else 2
    found = make(*arguments[:before], 41, per_epoch, *arguments[before:])
    assert isinstance(found, list)
    assert len(found) == 41
    for step, value in enumerate(found):
        assert type(value) is float
        assert value == close(formula(math.floor(step / per_epoch), *arguments)), step


def test_piecewise_constant() -> None:
    assert nn.piecewise_constant_lr((1, 3, 3, 4), (0.5, 0.25, 9.0, 0.0)) == [0.5, 0.25, 0.25, 0.0]
    assert nn.piecewise_constant_lr([], []) == []
    # As published; an optimizer refuses it.
    assert nn.piecewise_constant_lr([2], [-0.5]) == [-0.5, -0.5]


# Arguments: their names, order, defaults, kinds and ranges.

RATES = {"learning_rate": "positive 64", "decay_rate": "positive 64"}
CLOCK = {"total_step": "count", "step_per_epoch": "count"}
EPOCHS = {**CLOCK, "decay_epoch": "count"}
COSINE = {"min_lr": "not negative", "max_lr": "positive 64"}
ENDS = {"learning_rate": "positive 64", "end_learning_rate": "not negative"}
POWER = {"power": "positive 64"}
ARGUMENTS_OF: dict[Any, dict[str, str]] = {
    nn.ExponentialDecayLR: {**RATES, "decay_steps": "count", "is_stair": "flag"},
    nn.NaturalExpDecayLR: {**RATES, "decay_steps": "count", "is_stair": "flag"},
    nn.InverseDecayLR: {**RATES, "decay_steps": "count", "is_stair": "flag"},
    nn.CosineDecayLR: {**COSINE, "decay_steps": "count"},
    nn.PolynomialDecayLR: {**ENDS, "decay_steps": "count", **POWER, "update_decay_steps": "flag"},
    nn.WarmUpLR: {"learning_rate": "not negative", "warmup_steps": "count"},
    nn.exponential_decay_lr: {**RATES, **EPOCHS, "is_stair": "flag"},
    nn.natural_exp_decay_lr: {**RATES, **EPOCHS, "is_stair": "flag"},
    nn.inverse_decay_lr: {**RATES, **EPOCHS, "is_stair": "flag"},
    nn.cosine_decay_lr: {**COSINE, **EPOCHS},
    nn.polynomial_decay_lr: {**ENDS, **EPOCHS, **POWER, "update_decay_epoch": "flag"},
    nn.warmup_lr: {"learning_rate": "not negative", **CLOCK, "warmup_epoch": "count"},
}
EACH_API = pytest.mark.parametrize("api", ARGUMENTS_OF, ids=lambda api: api.__name__)
VALID = {"positive 64": 0.5, "not negative": 0.25, "count": 3, "flag": True}


@EACH_API
def test_published_signature(api: Any) -> None:
    parameters = inspect.signature(api).parameters
    assert list(parameters) == list(ARGUMENTS_OF[api])
    for name, kind in ARGUMENTS_OF[api].items():
        default = False if kind == "flag" else inspect.Parameter.empty
        assert parameters[name].default is default
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@EACH_API
def test_every_argument_is_checked(api: Any) -> None:
    valid = {name: VALID[kind] for name, kind in ARGUMENTS_OF[api].items()}
    api(**valid)
    for name, kind in ARGUMENTS_OF[api].items():
        for value, error, text in KINDS[kind].refused(name):
            with pytest.raises(error, match=f"^{api.__name__}: {text}"):
                api(**{**valid, name: value})


@EACH_API
def test_numpy_scalars(api: Any) -> None:
    valid = {name: VALID[kind] for name, kind in ARGUMENTS_OF[api].items()}
    to_numpy = {
        "count": np.int32, "flag": bool, "positive 64": np.float32, "not negative": np.float16,
    }  # fmt: skip
    given = {name: to_numpy[kind](valid[name]) for name, kind in ARGUMENTS_OF[api].items()}
    # Equal texts: everything is a number of Python's afterwards.
    assert repr(api(**given)) == repr(api(**valid))


def test_range_of_a_cosine() -> None:
    text = "max_lr is out of range: expected above min_lr"
    with pytest.raises(ValueError, match=f"^CosineDecayLR: {text} = 0.1, got 0.1$"):
        nn.CosineDecayLR(0.1, 0.1, 4)
    with pytest.raises(ValueError, match=f"^cosine_decay_lr: {text} = 0.2, got 0.1$"):
        nn.cosine_decay_lr(0.2, 0.1, 9, 1, 4)


WRONG = "has a wrong type: expected"
RANGE = "is out of range: expected at least 1"
ORDER = "is out of order: expected"
FINITE = "is not finite: expected a finite number"
LENGTH = "has a wrong length: expected 1 rates, one for each milestone"
PIECES: list[tuple[Any, Any, type[Exception], str]] = [
    (5, [0.1], TypeError, f"milestone {WRONG} a list or a tuple, got int"),
    (np.array([5]), [0.1], TypeError, f"milestone {WRONG} a list or a tuple, got ndarray"),
    ([0, 2], [0.1, 0.2], ValueError, f"milestone[0] {RANGE}, got 0"),
    ([1, -2], [0.1, 0.2], ValueError, f"milestone[1] {RANGE}, got -2"),
    ([1, 2.0], [0.1, 0.2], TypeError, f"milestone[1] {WRONG} an int, got float"),
    ([True], [0.1], TypeError, f"milestone[0] {WRONG} an int, got bool"),
    ([5, 2], [0.1, 0.2], ValueError, f"milestone[1] {ORDER} at least 5, the one before, got 2"),
    ([5], 0.1, TypeError, f"learning_rates {WRONG} a list or a tuple, got float"),
    ([1, 2], [0.1, 1], TypeError, f"learning_rates[1] {WRONG} a float, got int"),
    ([1], [math.nan], ValueError, f"learning_rates[0] {FINITE}, got nan"),
    ([1], [-math.inf], ValueError, f"learning_rates[0] {FINITE}, got -inf"),
    ([2], [0.1, 0.2], ValueError, f"learning_rates {LENGTH}, got 2"),
]


@pytest.mark.parametrize(("milestone", "rates", "error", "text"), PIECES)
def test_piecewise_constant_refuses(milestone, rates, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'piecewise_constant_lr: {text}')}$"):
        nn.piecewise_constant_lr(milestone, rates)


# Steps.

SCHEDULES = {
    make.__name__: make(**{name: VALID[kind] for name, kind in ARGUMENTS_OF[make].items()})
    for make in ARGUMENTS_OF
    if inspect.isclass(make)
}
SCHEDULES["SequentialLR"] = nn.SequentialLR(
    [nn.WarmUpLR(0.1, 5), lambda step: np.float32([0.5 / (1 + step)]), 0.25], [5, 9]
)
EACH_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@EACH_SCHEDULE
def test_arrays_of_steps(schedule: Any) -> None:
    single = np.array([schedule(step) for step in range(12)])
    assert single.dtype == np.float64
    assert len(set(single.tolist())) > 2
    for dtype in (np.uint8, np.int32, np.int64):
        steps = np.arange(12, dtype=dtype)
        assert_same_bits(schedule(steps), single)
        assert_same_bits(schedule(steps.reshape(3, 4)), single.reshape(3, 4))
        assert_same_bits(schedule(steps[::-2]), single[::-2])
        assert_same_bits(schedule(steps[4:5]), single[4:5])
        for one in (steps[4], np.array(steps[4])):
            assert type(schedule(one)) is float
            assert schedule(one) == single[4]
    assert_same_bits(schedule(np.zeros((0, 2), int)), np.zeros((0, 2)))
    assert schedule.construct(4) == single[4]


@EACH_SCHEDULE
@pytest.mark.parametrize(("step", "error", "text"), [
    (-1, ValueError, "is out of range: expected at least 0, got -1"),
    (np.array([3, -2]), ValueError, "is out of range: expected at least 0, got -2"),
    (1.0, TypeError, "has a wrong type: expected an int or an array of ints, got float"),
    (True, TypeError, "has a wrong type: expected an int or an array of ints, got bool"),
    (np.array([True]), TypeError, "has a wrong type: .*, got bool"),
    (np.float32(2), TypeError, "has a wrong type: .*, got float32"),
    (np.arange(2.0), TypeError, "has a wrong type: .*, got float64"),
    ([1, 2], TypeError, "has a wrong type: .*, got list"),
    ("1", TypeError, "has a wrong type: .*, got str"),
    (None, TypeError, "has a wrong type: .*, got NoneType"),
])  # fmt: skip
def test_bad_steps(schedule: Any, step: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{type(schedule).__name__}: global_step {text}$"):
        schedule(step)


@EACH_SCHEDULE
def test_schedules_are_values(schedule: Any) -> None:
    assert isinstance(schedule, nn.LearningRateSchedule)
    assert list(vars(schedule)) == list(inspect.signature(type(schedule)).parameters)
    steps = np.arange(12)
    copies = [copy.deepcopy(schedule)]
    if not isinstance(schedule, nn.SequentialLR):  # its lambda has no text and no pickle
        copies += [pickle.loads(pickle.dumps(schedule)), eval(repr(schedule), vars(nn).copy())]
    for other in copies:
        assert_same_bits(other(steps), schedule(steps))


def test_values_beyond_all_floats() -> None:
    growing = nn.ExponentialDecayLR(0.1, 1e300, 1)
    assert growing(5) == math.inf
    assert nn.NaturalExpDecayLR(0.1, 1e300, 1)(5) == 0.0
    assert nn.InverseDecayLR(0.1, 1e308, 1)(5) == 0.0
    opt = nn.Adam([np.ones(3, np.float32)], learning_rate=lambda step: growing(step + 5))
    with pytest.raises(ValueError, match="learning_rate is not finite"):
        opt.get_lr()


# One after the other.


ONES = [nn.WarmUpLR(0.1, 3), nn.CosineDecayLR(0.01, 0.1, 5), 0.25, lambda step: 0.5 / (1 + step)]
ONES += [nn.SequentialLR((nn.WarmUpLR(0.1, 4), 0.5), (3,))]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_each_schedule_counts_its_own_steps(data: st.DataObject) -> None:
    """Any schedules, one after the other, also of one alone and within one another."""
    parts = data.draw(st.lists(st.sampled_from(ONES), min_size=1, max_size=5))
    milestones = sorted(data.draw(st.sets(st.integers(1, 20), min_size=4, max_size=4)))
    begins = [0, *milestones[: len(parts) - 1]]
    schedule, expected = nn.SequentialLR(parts, begins[1:]), []
    for step in range(30):
        k = bisect.bisect_right(begins, step) - 1
        own = parts[k]
        expected.append(own(step - begins[k]) if callable(own) else own)
        assert schedule(step) == expected[step], step
    assert_same_bits(schedule(np.arange(30)), np.array(expected))


def test_later_changes_to_the_lists_do_nothing() -> None:
    schedules, milestones = [0.5, 0.25], [2]
    schedule = nn.SequentialLR(schedules, milestones)
    schedules[0], milestones[0] = 9.0, 1
    assert schedule(np.arange(3)).tolist() == [0.5, 0.5, 0.25]


FORMS = "a schedule, a callable of the step or a float"
AFTER = "is out of order: expected more than"
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ([], [], ValueError, "schedules is empty: expected at least one schedule, got none"),
    (0.5, [], TypeError, f"schedules {WRONG} a list or a tuple, got float"),
    ([0.5, 1], [3], TypeError, f"schedules[1] {WRONG} {FORMS}, got int"),
    ([0.5, [0.1]], [3], TypeError, f"schedules[1] {WRONG} {FORMS}, got list"),
    ([nn.WarmUpLR], [], TypeError, f"schedules[0] {WRONG} {FORMS}, got the class WarmUpLR"),
    ([-0.5], [], ValueError, "schedules[0] is out of range: expected at least 0, got -0.5"),
    ([math.inf], [], ValueError, "schedules[0] is not finite: expected a finite number, got inf"),
    ([0.5], 3, TypeError, f"milestones {WRONG} a list or a tuple, got int"),
    (
        [0.5, 0.5, 0.5], [3], ValueError,
        "milestones has a wrong length: expected 2, one fewer than the schedules, got 1"),
    (
        [0.5], [3], ValueError,
        "milestones has a wrong length: expected 0, one fewer than the schedules, got 1"),
    ([0.5, 0.5, 0.5], [3, 3], ValueError, f"milestones[1] {AFTER} 3, the one before, got 3"),
    ([0.5, 0.5, 0.5], [3, 2], ValueError, f"milestones[1] {AFTER} 3, the one before, got 2"),
    ([0.5, 0.5], [0], ValueError, "milestones[0] is out of range: expected at least 1, got 0"),
    ([0.5, 0.5], [1.0], TypeError, f"milestones[0] {WRONG} an int, got float"),
    ([0.5, 0.5], [True], TypeError, f"milestones[0] {WRONG} an int, got bool"),
]  # fmt: skip


@pytest.mark.parametrize(("schedules", "milestones", "error", "text"), REFUSED)
def test_sequential_refuses(schedules, milestones, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'SequentialLR: {text}')}$"):
        nn.SequentialLR(schedules, milestones)


@pytest.mark.parametrize(("value", "error", "text"), [
    (None, TypeError, "has a schedule that returned no number: expected a float, got None"),
    (math.nan, ValueError, "is not finite: expected a finite number, got nan"),
    (-0.5, ValueError, "is out of range: expected at least 0 and a float32 number, got -0.5"),
])  # fmt: skip
def test_sequential_names_the_schedule_that_failed(
    value: Any, error: type[Exception], text: str
) -> None:
    schedule = nn.SequentialLR([0.5, lambda _step: value], [2])
    assert schedule(1) == 0.5
    with pytest.raises(error, match=rf"^SequentialLR: schedules\[1\] {text}$"):
        schedule(2)


def test_repr() -> None:
    found = repr(nn.CosineDecayLR(0.0, np.float64(0.1), 4))
    assert found == "CosineDecayLR(min_lr=0.0, max_lr=0.1, decay_steps=4)"
    assert repr(nn.SequentialLR([nn.WarmUpLR(0.1, 2), 0.05], [2])) == (
        "SequentialLR(schedules=(WarmUpLR(learning_rate=0.1, warmup_steps=2), 0.05), "
        "milestones=(2,))"
    )


# In an optimizer.


def gradient(step: int) -> np.ndarray:
    return np.float32([1.0, -2.0, 0.5]) * (step + 1)


def rates_used(opt: Any, count: int) -> list[float]:
    """What ``get_lr`` says before each of `count` steps."""
    rates = []
    for step in range(count):
        rates.append(opt.get_lr())
        opt([gradient(step)])
    return rates


@EACH_SCHEDULE
def test_optimizer_follows_a_schedule(schedule: Any) -> None:
    opt = nn.Adam([np.ones(3, np.float32)], learning_rate=schedule, weight_decay=schedule)
    assert rates_used(opt, 3) == [schedule(step) for step in range(3)]
    assert opt.get_weight_decay() == schedule(3)
