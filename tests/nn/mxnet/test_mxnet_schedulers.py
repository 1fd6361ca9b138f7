"""Schedulers of MXNet: recorded rates, rates by the reference, and their place in an optimizer."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
import reference_mxnet
from fusestep.nn import mxnet as mx
from mxnet_options import NEEDED, SCHEDULERS, S, ones

EACH_CLASS = pytest.mark.parametrize("cls", SCHEDULERS, ids=lambda c: c.__name__)
# Schedulers, and their rates of updates 1 to 12, asked for in this order, in MXNet 1.9.1.
RECORDED: list[tuple[Any, list[float]]] = [
    (S.FactorScheduler(3, 0.5, base_lr=0.8), [*[0.8] * 3, *[0.4] * 3, *[0.2] * 3, *[0.1] * 3]),
    (S.FactorScheduler(2, 0.1, 0.003, 0.2), [0.2, 0.2, 0.02, 0.02, *[0.003] * 8]),
    (S.FactorScheduler(2, 0.5, 0.3, 0.2), [0.2, 0.2, *[0.3] * 10]),
    (S.FactorScheduler(2, 0.5, base_lr=0.8, warmup_steps=5, warmup_begin_lr=0.2),
     [0.32, 0.44, 0.56, 0.68, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
    (S.MultiFactorScheduler([2, 3, 7], 0.1, 0.5), [0.5, 0.5, 0.05, *[0.005] * 4, *[0.0005] * 5]),
    (S.MultiFactorScheduler([2, 8], 0.5, 0.4, 4, 0.1, "constant"),
     [*[0.1] * 3, *[0.2] * 5, *[0.1] * 4]),
    (S.PolyScheduler(8, 0.5),
     [0.3828125, 0.28125, 0.1953125, 0.125, 0.0703125, 0.03125, 0.0078125, *[0.0] * 5]),
    (S.PolyScheduler(9, 0.5, 1, 0.05, 3, 0.2, "linear"),
     [0.3, 0.4, 0.5, 0.425, 0.35, 0.275, 0.2, 0.125, *[0.05] * 4]),
    (S.CosineScheduler(8, 0.5),
     [0.480969883, 0.426776695, 0.345670858, 0.25, 0.154329142, 0.0732233047, 0.0190301169,
      *[0.0] * 5]),
    (S.CosineScheduler(9, 0.5, 0.05, 3, 0.2),
     [0.3, 0.4, 0.5, 0.469855716, 0.3875, 0.275, 0.1625, 0.0801442841, *[0.05] * 4]),
]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "rates"), RECORDED)
def test_recorded_rates(scheduler: Any, rates: list[float]) -> None:
    assert [scheduler(n) for n in range(1, 13)] == pytest.approx(rates, rel=1e-8, abs=1e-15)


@st.composite
def arguments(draw: Any, cls: type) -> dict[str, Any]:
    """Arguments of a scheduler whose rates fall within some forty updates."""
    rate, few = st.floats(0.0, 1.0), st.integers(1, 30)
    base_lr, warmup_steps = draw(st.floats(1e-3, 1.0)), draw(st.integers(0, 10))
    warm = {"base_lr": base_lr, "warmup_steps": warmup_steps,
            "warmup_begin_lr": draw(st.floats(0.0, base_lr)),
            "warmup_mode": draw(st.sampled_from(["linear", "constant"]))}  # fmt: skip
    if cls is S.FactorScheduler:
        return {"step": draw(few), "factor": draw(rate), "stop_factor_lr": draw(rate), **warm}
    if cls is S.MultiFactorScheduler:
        return {"step": sorted(draw(st.sets(few, min_size=1))), "factor": draw(rate), **warm}
    own = {"max_update": warmup_steps + draw(few), "final_lr": draw(rate)}
    return {**own, **warm, **({"pwr": draw(st.floats(0.1, 4.0))} if cls is S.PolyScheduler else {})}


@EACH_CLASS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_schedules_are_functions_of_the_update(cls: Any, data: Any) -> None:
    """In any order, asked twice, far ahead and back: MXNet's change with every call. All follow
    from the attributes of now, of which MXNet's Poly and Cosine keep the first base."""
    options = data.draw(arguments(cls))
    updates = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    expected = reference_mxnet.schedule(cls.__name__, **options)
    scheduler = cls(**{**options, "base_lr": 1.0})
    others = [scheduler.starting_from(options["base_lr"]), scheduler]
    scheduler(7)
    scheduler.base_lr = options["base_lr"]
    others += [cls(**options), copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))]
    assert scheduler.warmup_final_lr == options["base_lr"]
    for other in others:
        assert type(other) is cls
        before = dict(vars(other))
        for n in (*updates, 10**12, *updates):
            assert other(n) == pytest.approx(expected(n), rel=1e-12, abs=1e-18)
            assert other(np.int64(n)) == other(n)
        assert vars(other) == before


# In an optimizer


@EACH_CLASS
@pytest.mark.parametrize("make", [mx.Adam, mx.AdamW, mx.Optimizer])
def test_a_rate_beside_a_scheduler(make: type, cls: type) -> None:
    """The default changes nothing, where MXNet's Adam writes its 0.001; another starts a copy."""
    scheduler = cls(**NEEDED[cls], base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.3)
    before = dict(vars(scheduler))
    opt = make(lr_scheduler=scheduler)
    assert opt.lr_scheduler is scheduler
    assert opt.learning_rate == scheduler(0)
    other = cls(**NEEDED[cls], base_lr=0.4, warmup_steps=2, warmup_begin_lr=0.3)
    own = make(learning_rate=0.4, lr_scheduler=scheduler).lr_scheduler
    assert [own(n) for n in range(1, 13)] == [other(n) for n in range(1, 13)]
    with pytest.raises(ValueError, match="warmup_begin_lr is too large: expected at most base_lr"):
        scheduler.starting_from(0.05)
    assert vars(scheduler) == before


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
    opt.set_learning_rate(0.25)
    assert (opt.learning_rate, opt.lr) == (0.25, 0.25)
    for bad in (-0.1, "x", None, np.nan):
        with pytest.raises((TypeError, ValueError), match=f"^{cls.__name__}: learning_rate "):
            opt.set_learning_rate(bad)
    assert opt.learning_rate == 0.25


@pytest.mark.parametrize("several", [1, 4])
def test_a_callable_is_asked_for_1_2_3(several: int) -> None:
    seen: list[Any] = []

    def schedule(n: int) -> float:
        seen.append(n)
        return 0.1

    updater, weights = mx.Updater(mx.Adam(lr_scheduler=schedule)), [ones(2) for _ in range(several)]
    for _ in range(3):
        updater(list(range(several)), [ones(2)] * several, weights)
    assert seen == [1, 2, 3]
    assert all(type(n) is int for n in seen)


def test_a_scheduler_of_a_user() -> None:
    """One as written for MXNet: with base_lr, and the warm-up of the base class."""

    class Halving(S.LRScheduler):
        def __call__(self, num_update: int) -> float:
            if num_update < self.warmup_steps:
                return self.get_warmup_lr(num_update)
            return self.base_lr * 0.5**num_update

    scheduler = Halving(base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.1)
    opt = mx.Adam(0.25, lr_scheduler=scheduler, beta1=0.0, beta2=0.0)
    w, state = ones(1), opt.create_state(0, ones(1))
    for n, rate in ((1, 0.175), (2, 0.0625), (3, 0.03125)):
        before = w.copy()
        opt.update(0, w, ones(1), state)
        assert (opt.num_update, opt.learning_rate) == (n, rate)
        np.testing.assert_allclose(before - w, rate, rtol=1e-5)
