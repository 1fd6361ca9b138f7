"""Schedulers of MXNet: values, warm-up, purity, base_lr, their place in an optimizer, errors."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusestep.nn import mxnet as mx

from helpers import assert_same_bits, refused, unchanged

S = mx.lr_scheduler
CLASSES = (S.FactorScheduler, S.MultiFactorScheduler, S.PolyScheduler, S.CosineScheduler)
# What each class needs.
NEEDED: dict[type, dict[str, Any]] = {
    S.LRScheduler: {},
    S.FactorScheduler: {"step": 3},
    S.MultiFactorScheduler: {"step": [2, 5]},
    S.PolyScheduler: {"max_update": 8},
    S.CosineScheduler: {"max_update": 8},
}
EACH_CLASS = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
WITH_BASE = pytest.mark.parametrize("cls", [S.LRScheduler, *CLASSES], ids=lambda c: c.__name__)

# Rates of updates 1 to 12, asked for in this order, by MXNet 1.9.1.
Case = tuple[Callable[[], Any], list[float]]
RECORDED: dict[str, Case] = {
    "factor": (
        lambda: S.FactorScheduler(3, 0.5, base_lr=0.8),
        [0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1],
    ),
    "factor with an end": (
        lambda: S.FactorScheduler(2, 0.1, 0.003, 0.2),
        [0.2, 0.2, 0.02, 0.02, *[0.003] * 8],
    ),
    "factor that begins below its end": (
        lambda: S.FactorScheduler(2, 0.5, 0.3, 0.2),
        [0.2, 0.2, *[0.3] * 10],
    ),
    "factor, warm-up": (
        lambda: S.FactorScheduler(2, 0.5, base_lr=0.8, warmup_steps=5, warmup_begin_lr=0.2),
        [0.32, 0.44, 0.56, 0.68, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025],
    ),
    "multi": (
        lambda: S.MultiFactorScheduler([2, 3, 7], 0.1, 0.5),
        [0.5, 0.5, 0.05, *[0.005] * 4, *[0.0005] * 5],
    ),
    "multi, constant warm-up": (
        lambda: S.MultiFactorScheduler([2, 8], 0.5, 0.4, 4, 0.1, "constant"),
        [0.1, 0.1, 0.1, *[0.2] * 5, *[0.1] * 4],
    ),
    "poly": (
        lambda: S.PolyScheduler(8, 0.5),
        [0.3828125, 0.28125, 0.1953125, 0.125, 0.0703125, 0.03125, 0.0078125, *[0.0] * 5],
    ),
    "poly, warm-up": (
        lambda: S.PolyScheduler(9, 0.5, 1, 0.05, 3, 0.2, "linear"),
        [0.3, 0.4, 0.5, 0.425, 0.35, 0.275, 0.2, 0.125, *[0.05] * 4],
    ),
    "cosine": (
        lambda: S.CosineScheduler(8, 0.5),
        [0.480969883, 0.426776695, 0.345670858, 0.25, 0.154329142, 0.0732233047, 0.0190301169]
        + [0.0] * 5,
    ),
    "cosine, warm-up": (
        lambda: S.CosineScheduler(9, 0.5, 0.05, 3, 0.2),
        [0.3, 0.4, 0.5, 0.469855716, 0.3875, 0.275, 0.1625, 0.0801442841, *[0.05] * 4],
    ),
}
EACH_RECORDED = pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
UPDATES = range(1, 13)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# Values


@EACH_RECORDED
def test_rates_of_mxnet(case: Case) -> None:
    make, expected = case
    scheduler = make()
    assert [scheduler(n) for n in UPDATES] == pytest.approx(expected, rel=1e-8, abs=1e-15)


@EACH_RECORDED
def test_rates_are_functions_of_the_update(case: Case) -> None:
    """In any order, asked twice, far ahead and back: MXNet's change with every call."""
    make, _ = case
    scheduler = make()
    expected = [make()(n) for n in UPDATES]
    before = dict(vars(scheduler))
    scheduler(10**9)
    for n in np.random.default_rng(1).permutation(np.repeat(UPDATES, 3)).tolist():
        assert scheduler(n) == expected[n - 1]
    assert vars(scheduler) == before


@pytest.mark.parametrize("seed", range(5))
def test_drops_against_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step, factor, end = int(rng.integers(1, 6)), float(rng.uniform(0.2, 1.0)), 1e-3
    steps = sorted(set(rng.integers(1, 40, 6).tolist()))
    regular = S.FactorScheduler(step, factor, end, 0.5)
    listed = S.MultiFactorScheduler(steps, factor, 0.5)
    a = b = 0.5
    for n in range(1, 50):
        a = max(a * factor, end) if n > 1 and (n - 1) % step == 0 else a
        b = b * factor if n - 1 in steps else b
        assert (regular(n), listed(n)) == pytest.approx((a, b), rel=1e-12)


@pytest.mark.parametrize("cls", [S.PolyScheduler, S.CosineScheduler])
def test_the_end_is_exact_and_stays(cls: type) -> None:
    scheduler = cls(max_update=7, base_lr=0.3, final_lr=0.1, warmup_steps=2)
    assert [scheduler(n) for n in (7, 8, 10**12)] == [0.1] * 3
    # Asked for the first time beyond the end, MXNet's give the rate of the beginning.
    assert cls(7, 0.3, final_lr=0.1)(1000) == 0.1


@EACH_CLASS
def test_integer_kinds(cls: type) -> None:
    needed = {k: [np.int64(x) for x in v] if isinstance(v, list) else np.int32(v)
              for k, v in NEEDED[cls].items()}  # fmt: skip
    given = cls(**needed, warmup_steps=np.int64(2))
    plain = cls(**NEEDED[cls], warmup_steps=2)
    assert [given(np.int64(n)) for n in UPDATES] == [plain(n) for n in UPDATES]


# Attributes


@EACH_CLASS
def test_base_lr_can_be_assigned(cls: type) -> None:
    """At any time, and all later rates follow; MXNet's Poly and Cosine keep the first one."""
    scheduler = cls(**NEEDED[cls], base_lr=0.4, warmup_steps=2, warmup_begin_lr=0.1)
    scheduler(5)
    scheduler.base_lr = 0.2
    other = cls(**NEEDED[cls], base_lr=0.2, warmup_steps=2, warmup_begin_lr=0.1)
    assert [scheduler(n) for n in UPDATES] == [other(n) for n in UPDATES]
    assert scheduler.warmup_final_lr == 0.2


@EACH_CLASS
def test_starting_from_is_a_copy(cls: type) -> None:
    scheduler = cls(**NEEDED[cls], base_lr=0.4, warmup_steps=2, warmup_begin_lr=0.1)
    other = scheduler.starting_from(0.2)
    assert type(other) is cls
    assert (other.base_lr, scheduler.base_lr) == (0.2, 0.4)
    with pytest.raises(ValueError, match="warmup_begin_lr is too large: expected at most base_lr"):
        scheduler.starting_from(0.05)


def test_the_list_of_steps_is_copied() -> None:
    steps = [2, 4]
    scheduler = S.MultiFactorScheduler(steps, 0.5)
    steps.append(5)
    assert scheduler.step == [2, 4]
    assert scheduler(9) == 0.01 * 0.25


@EACH_CLASS
def test_copies(cls: type) -> None:
    scheduler = cls(**NEEDED[cls], base_lr=0.4, warmup_steps=2)
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert [other(n) for n in UPDATES] == [scheduler(n) for n in UPDATES]
        other.base_lr = 0.1
        assert scheduler.base_lr == 0.4


# Arguments


WARM_UP = ["base_lr", "warmup_steps", "warmup_begin_lr", "warmup_mode"]
PUBLISHED = {
    S.LRScheduler: WARM_UP,
    S.FactorScheduler: ["step", "factor", "stop_factor_lr", *WARM_UP],
    S.MultiFactorScheduler: ["step", "factor", *WARM_UP],
    S.PolyScheduler: ["max_update", "base_lr", "pwr", "final_lr", *WARM_UP[1:]],
    S.CosineScheduler: ["max_update", "base_lr", "final_lr", *WARM_UP[1:]],
}
DEFAULTS = {
    "factor": 1, "stop_factor_lr": 1e-8, "pwr": 2, "final_lr": 0,
    "base_lr": 0.01, "warmup_steps": 0, "warmup_begin_lr": 0, "warmup_mode": "linear",
}  # fmt: skip


@WITH_BASE
def test_published_order_and_defaults(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in named] == PUBLISHED[cls]
    found = {p.name: p.default for p in named if p.default is not p.empty}
    assert found == {name: DEFAULTS[name] for name in found}
    scheduler = cls(**NEEDED[cls])
    for name, value in found.items():
        assert getattr(scheduler, name) == value


BAD: list[tuple[type, dict[str, Any], Any, str]] = [
    (S.FactorScheduler, {"step": 0}, ValueError, "step is out of range: expected at least 1"),
    (S.FactorScheduler, {"step": 2.0}, TypeError, "step has a wrong type: expected an int, got f"),
    (S.FactorScheduler, {"step": True}, TypeError, "step has a wrong type: .* got bool"),
    (S.FactorScheduler, {"factor": 1.1}, ValueError, "factor is out of range: .* at most 1"),
    (S.FactorScheduler, {"factor": -0.1}, ValueError, "factor is out of range: .* at least 0"),
    (S.FactorScheduler, {"factor": "x"}, TypeError, "factor has a wrong type"),
    (S.FactorScheduler, {"stop_factor_lr": -1}, ValueError, "stop_factor_lr is out of range"),
    (S.MultiFactorScheduler, {"step": []}, TypeError, "step has a .* got an empty list"),
    (S.MultiFactorScheduler, {"step": 3}, TypeError, "step has a wrong type: .* list .*got int"),
    (S.MultiFactorScheduler, {"step": [2, 2]}, ValueError, "step is not increasing"),
    (S.MultiFactorScheduler, {"step": [3, 2]}, ValueError, r"not increasing: .* got \[3, 2\]"),
    (S.MultiFactorScheduler, {"step": [0, 2]}, ValueError, "step is out of range"),
    (S.MultiFactorScheduler, {"step": [1.5]}, TypeError, "step has a wrong type"),
    (S.MultiFactorScheduler, {"factor": 2}, ValueError, "factor is out of range"),
    (S.PolyScheduler, {"max_update": 0}, ValueError, "max_update is out of range"),
    (S.PolyScheduler, {"max_update": 8.0}, TypeError, "max_update has a wrong type"),
    (S.PolyScheduler, {"pwr": 0}, ValueError, "pwr is out of range: expected above 0"),
    (S.PolyScheduler, {"pwr": None}, TypeError, "pwr has a wrong type"),
    (S.PolyScheduler, {"final_lr": -0.1}, ValueError, "final_lr is out of range"),
    # MXNet divides by zero.
    (S.PolyScheduler, {"warmup_steps": 8}, ValueError, "warmup_steps is too large: .* = 8, got 8"),
    (S.CosineScheduler, {"warmup_steps": 9}, ValueError, "warmup_steps is too large"),
    (S.CosineScheduler, {"max_update": None}, TypeError, "max_update has a wrong type"),
    (S.CosineScheduler, {"final_lr": "0"}, TypeError, "final_lr has a wrong type"),
]
for _cls in (S.LRScheduler, *CLASSES):
    BAD += [
        (_cls, {"base_lr": -0.1}, ValueError, "base_lr is out of range: expected at least 0"),
        (_cls, {"base_lr": np.nan}, ValueError, "base_lr is not finite"),
        (_cls, {"base_lr": None}, TypeError, "base_lr has a wrong type: .* got NoneType"),
        (_cls, {"warmup_steps": -1}, ValueError, "warmup_steps is out of range"),
        (_cls, {"warmup_steps": 1.0}, TypeError, "warmup_steps has a wrong type: expected an int"),
        (_cls, {"warmup_begin_lr": 0.5}, ValueError, "warmup_begin_lr is too large: .*base_lr = 0"),
        (_cls, {"warmup_begin_lr": -0.5}, ValueError, "warmup_begin_lr is out of range"),
        (_cls, {"warmup_mode": "cubic"}, ValueError, "warmup_mode is unknown: .* got 'cubic'"),
        (_cls, {"warmup_mode": 1}, ValueError, "warmup_mode is unknown"),
        (_cls, {"warmup_step": 1}, KeyError, "'warmup_step' is unknown: .*did you mean 'warmup_st"),
        (_cls, {"warmup_step": 1}, TypeError, "'warmup_step' is unknown"),
    ]


@pytest.mark.parametrize(("cls", "changed", "error", "text"), BAD)
def test_bad_arguments(cls: type, changed: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{cls.__name__}: .*{text}"):
        cls(**{**NEEDED[cls], **changed})


# In an optimizer


def rates_of(opt: mx.Optimizer, n: int) -> list[float]:
    """The rates that a plain Adam with them would have taken, step by step, read off the weight."""
    w, found = ones(1), []
    state = opt.create_state(0, w)
    for _ in range(n):
        twin = mx.Adam(learning_rate=1.0, begin_num_update=opt.num_update)
        before, moments = w.copy(), copy.deepcopy(state)
        opt.update(0, w, ones(1), state)
        plain = before.copy()
        twin.update(0, plain, ones(1), moments)
        found.append(float((before - w)[0] / (before - plain)[0]))
    return found


@EACH_RECORDED
def test_an_update_takes_the_rate_of_its_number(case: Case) -> None:
    make, expected = case
    opt = mx.Adam(lr_scheduler=make())
    assert rates_of(opt, 6) == pytest.approx(expected[:6], abs=1e-5)
    assert opt.learning_rate == pytest.approx(expected[5])


def test_begin_num_update_shifts_the_schedule() -> None:
    scheduler = S.FactorScheduler(2, 0.5, base_lr=0.8)
    assert rates_of(mx.Adam(lr_scheduler=scheduler, begin_num_update=3), 4) == pytest.approx(
        [scheduler(n) for n in (4, 5, 6, 7)], abs=1e-5
    )


def test_one_scheduler_in_two_optimizers() -> None:
    scheduler = S.PolyScheduler(20, base_lr=0.5)
    first, second = mx.Adam(lr_scheduler=scheduler), mx.Adam(lr_scheduler=scheduler)
    a, b = ones(2), ones(2)
    states = [o.create_state(0, x) for o, x in ((first, a), (second, b))]
    for _ in range(10):
        first.update(0, a, ones(2), states[0])
    for _ in range(10):
        second.update(0, b, ones(2), states[1])
    assert_same_bits(a, b)
    assert first.lr_scheduler is second.lr_scheduler is scheduler


@EACH_CLASS
def test_the_default_rate_does_not_overwrite_the_schedule(cls: type) -> None:
    """MXNet's Adam writes its 0.001 into the scheduler."""
    scheduler = cls(**NEEDED[cls], base_lr=0.5)
    for opt in (mx.Adam(lr_scheduler=scheduler), mx.Optimizer(lr_scheduler=scheduler)):
        assert opt.learning_rate == 0.5
        assert opt.lr_scheduler is scheduler
    assert scheduler.base_lr == 0.5


@EACH_CLASS
def test_a_rate_beside_a_scheduler_starts_a_copy(cls: type) -> None:
    scheduler = cls(**NEEDED[cls], base_lr=0.5)
    opt = mx.Adam(0.25, lr_scheduler=scheduler)
    expected = cls(**NEEDED[cls], base_lr=0.25)
    assert [opt.lr_scheduler(n) for n in UPDATES] == [expected(n) for n in UPDATES]
    assert scheduler.base_lr == 0.5


def test_a_rate_beside_a_scheduler_that_cannot_start_from_it() -> None:
    scheduler = S.FactorScheduler(2, base_lr=0.5, warmup_steps=3, warmup_begin_lr=0.3)
    with pytest.raises(
        ValueError, match=r"warmup_begin_lr is too large: .*base_lr = 0\.1, got 0\.3"
    ):
        mx.Adam(0.1, lr_scheduler=scheduler)
    assert scheduler.base_lr == 0.5
    with pytest.raises(
        ValueError, match=r"^Adam: learning_rate is given beside a callable: .*0\.1"
    ):
        mx.Adam(0.1, lr_scheduler=lambda n: 0.5 / n)


@pytest.mark.parametrize("cls", [mx.Adam, mx.AdamW, mx.Optimizer])
def test_setting_the_rate_of_a_scheduler(cls: type) -> None:
    opt = cls(lr_scheduler=S.FactorScheduler(2, base_lr=0.5))
    for error in (RuntimeError, UserWarning, mx.ScheduledRateError):
        with pytest.raises(error, match=r"learning_rate is computed by a scheduler: .*base_lr"):
            opt.set_learning_rate(0.1)
    assert opt.learning_rate == 0.5
    opt.lr_scheduler.base_lr = 0.1
    assert opt.learning_rate == 0.1
    opt.lr_scheduler = None
    opt.set_learning_rate(0.2)
    assert opt.learning_rate == 0.2


def test_reading_the_rate_changes_nothing() -> None:
    read, other = (mx.Adam(lr_scheduler=S.FactorScheduler(1, 0.5, base_lr=0.5)) for _ in range(2))
    a, b = ones(2), ones(2)
    states = [o.create_state(0, x) for o, x in ((read, a), (other, b))]
    for _ in range(4):
        assert [read.learning_rate for _ in range(5)] == [other.learning_rate] * 5
        read.update(0, a, ones(2), states[0])
        other.update(0, b, ones(2), states[1])
    assert_same_bits(a, b)


# Schedules of users


class Halving(S.LRScheduler):
    """As written for MXNet: with base_lr, and the warm-up of the base class."""

    def __call__(self, num_update: int) -> float:
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.base_lr * 0.5**num_update


def test_custom_scheduler() -> None:
    scheduler = Halving(base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    assert rates_of(mx.Adam(lr_scheduler=scheduler), 3) == pytest.approx(
        [0.3, 0.125, 0.0625], abs=1e-5
    )
    assert mx.Adam(0.25, lr_scheduler=scheduler).lr_scheduler(2) == 0.0625


def test_the_base_class_has_no_schedule() -> None:
    opt, w = mx.Adam(lr_scheduler=S.LRScheduler()), ones(2)
    with refused(NotImplementedError, r"LRScheduler: define __call__\(self, num_update\)", w):
        opt.update(0, w, ones(2), opt.create_state(0, w))
    assert opt.num_update == 0


@pytest.mark.parametrize("several", [1, 4])
def test_a_callable_is_asked_for_1_2_3(several: int) -> None:
    seen: list[Any] = []

    def schedule(n: int) -> float:
        seen.append(n)
        return 0.1

    opt = mx.Adam(lr_scheduler=schedule)
    weights = [ones(2) for _ in range(several)]
    states = [opt.create_state(i, w) for i, w in enumerate(weights)]
    for _ in range(3):
        opt.update(list(range(several)), weights, [ones(2)] * several, states)
    assert seen == [1, 2, 3]
    assert all(type(n) is int for n in seen)


NONSENSE = [
    (lambda _: None, TypeError, "Adam: lr_scheduler's rate has a wrong type: .* got NoneType"),
    (lambda _: "0.1", TypeError, "lr_scheduler's rate has a wrong type"),
    (lambda _: np.ones(2), ValueError, "lr_scheduler's rate has a wrong shape"),
    (lambda _: np.nan, ValueError, "lr_scheduler's rate is not finite"),
    (lambda _: -0.1, ValueError, "lr_scheduler's rate is out of range: expected at least 0"),
    (lambda n: 1 / (n - 3), ZeroDivisionError, "division"),
]


@pytest.mark.parametrize(("schedule", "error", "text"), NONSENSE)
def test_a_schedule_that_fails_changes_nothing(schedule: Any, error: Any, text: str) -> None:
    opt = mx.Adam(lr_scheduler=lambda n: 0.1 if n < 3 else schedule(n))
    weights = [ones(2), ones(3)]
    states = [opt.create_state(i, w) for i, w in enumerate(weights)]
    update = (weights, [ones(2), ones(3)], states)
    for _ in range(2):
        opt.update([0, 1], *update)
    with refused(error, text, weights, states):
        opt.update([0, 1], *update)
    assert (opt.num_update, opt._index_update_count) == (2, {0: 2, 1: 2})
    opt.lr_scheduler = None
    opt.update([0, 1], *update)
    assert opt.num_update == 3


@pytest.mark.parametrize("value", [0.1, "factor", S.FactorScheduler, [0.1, 0.2]])
def test_what_is_no_scheduler(value: Any) -> None:
    text = "lr_scheduler has a wrong type: expected an LRScheduler or a callable"
    with pytest.raises(TypeError, match=f"^Adam: {text}"):
        mx.Adam(lr_scheduler=value)
    opt = mx.Adam()
    with unchanged(), pytest.raises(TypeError, match=text):
        opt.lr_scheduler = value
    assert opt.lr_scheduler is None
