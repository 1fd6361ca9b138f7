"""Steps without a gradient, many at once: every idle form, against float64 step by step."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numba
import numpy as np
import pytest
from fusestep.kernels.cpu.rows.catch_up import CatchUp, SleepingTable
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.element import kernel
from fusestep.kernels.idle_table import SLEEP, IdleTable
from fusestep.kernels.rule import Rule, hp_type
from fusestep.kernels.rules import adam, lion, rmsprop, row_wise, sgd
from fusestep.kernels.rules.torch import adagrad as torch_adagrad
from fusestep.kernels.rules.torch import adam as torch_adam
from fusestep.kernels.storage import STORAGES, real_of
from helpers import BF16, EPSILON, TINY, more

F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))
N, D = 120, 9
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.95, 0.999), (0.99, 0.999), (0.5, 0.9), (0.0, 0.99)]
RATES: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 0.01, "cosine": lambda t: 0.005 * (1.0 + math.cos(t / 50.0)),
    "stairs": lambda t: 0.01 * 0.3 ** (t // 40),
    "now and then": lambda t: 0.01 if t % 7 == 0 else 0.0, "warm up": lambda t: min(0.01, 1e-4 * t),
    "rising": lambda t: 1e-6 * 1.01**t, "late": lambda t: 0.0 if t < 1_200 else 0.01,
}  # fmt: skip
Scalars = Callable[[float, int], tuple[float, ...]]


def mindspore(beta1: float, beta2: float, epsilon: float = 1e-8) -> Scalars:
    """Adam's scalars, of which the step size holds the corrections."""

    def scalars(lr: float, t: int) -> tuple[float, ...]:
        size = lr * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t)
        return 1.0 - beta1, 1.0 - beta2, size, epsilon

    return scalars


def decoupled(beta1: float, beta2: float, epsilon: float = 1e-6) -> Scalars:
    """Those of Adam with a decoupled decay."""
    return lambda lr, _: (1.0 - beta1, 1.0 - beta2, lr, epsilon, 0.3)


def corrected(beta1: float, beta2: float, epsilon: float = 1e-8) -> Scalars:
    """Those of PyTorch's AdamW: epsilon stands beside the corrected root."""

    def scalars(lr: float, t: int) -> tuple[float, ...]:
        root = 1.0 / math.sqrt(1.0 - beta2**t)
        moments = torch_adam.share_of(1.0 - beta1), 0.0, beta2, 1.0 - beta2
        return *moments, lr / (1.0 - beta1**t), root, epsilon, 1.0 - lr * 0.3

    return scalars


# By name: a rule, its scalars, and a coupled weight decay.
LINEAR: dict[str, tuple[Rule, Scalars, float]] = {
    "sgd": (sgd.SGD, lambda lr, _: (lr,), 0.3),
    "momentum": (sgd.MOMENTUM, lambda lr, _: (lr, 0.9, 1.0), 0.0),
    "decayed momentum": (sgd.MOMENTUM, lambda lr, _: (lr, 0.9, 0.8), 0.3),
    "nesterov": (sgd.MOMENTUM_NESTEROV, lambda lr, _: (lr, 0.9, 1.0), 0.3),
    "rmsprop": (rmsprop.RMSPROP, lambda lr, _: (lr, 0.1, 1e-8, 0.0), 0.0),
    "rmsprop momentum": (rmsprop.RMSPROP_MOMENTUM, lambda lr, _: (lr, 0.1, 1e-8, 0.0, 0.9), 0.0),
    "rmsprop centered": (rmsprop.RMSPROP_CENTERED, lambda lr, _: (lr, 0.1, 1e-8, 0.0), 0.0),
    "torch rmsprop": (torch_adagrad.TORCH_RMSPROP, lambda lr, _: (lr, 0.9, 0.1, 1e-8), 0.0),
    "torch rmsprop momentum": (
        torch_adagrad.TORCH_RMSPROP_MOMENTUM, lambda lr, _: (lr, 0.9, 0.1, 1e-8, 0.8), 0.0),
    "torch rmsprop centered": (
        torch_adagrad.TORCH_RMSPROP_CENTERED,
        lambda lr, _: (lr, 0.9, 0.1, 1e-8, torch_adam.share_of(0.1), 0.0), 0.0),
    "lion": (lion.LION, lambda lr, _: (0.9, 0.1, 0.99, 0.01, lr, 0.3, 0.0, 1.0), 0.0),
}  # fmt: skip
ROOTED: dict[str, tuple[Rule, Callable[..., Scalars]]] = {
    "adam": (adam.ADAM, mindspore), "adam nesterov": (adam.ADAM_NESTEROV, mindspore),
    "amsgrad": (adam.ADAM_AMSGRAD, mindspore), "weight decay": (adam.ADAM_WEIGHT_DECAY, decoupled),
    "torch adamw": (torch_adam.TORCH_ADAM, corrected),
    "torch amsgrad": (torch_adam.TORCH_AMSGRAD, corrected),
}  # fmt: skip


class Missed:
    """Rows that have missed steps of a rule, and the same in float64, step by step."""

    def __init__(
        self, rule: Rule, scalars: Scalars, rate: Callable[[int], float], now: int,
        decay: float = 0.0, dtype: np.dtype = F32, seed: int = 0,
    ) -> None:  # fmt: skip
        rng, self.rule, self.now, self.dtype = np.random.default_rng(seed), rule, now, dtype
        self.real = real_of(STORAGES[dtype])
        self.w = rng.standard_normal((N, D)).astype(dtype)
        self.states = [(0.1 * rng.standard_normal((N, D))).astype(dtype) for _ in rule.states]
        if rule.idle is not None and rule.idle.root is None:  # means of squares are above squares
            self.states = [rng.uniform(0.5, 0.6, (N, D)).astype(dtype) for _ in rule.states]
        for k in range(1, len(rule.states)):
            self.states[k] = np.abs(self.states[k])
        if len(rule.states) == 3 and rule.idle is not None and rule.idle.root == 2:
            self.states[2] = np.maximum(self.states[1], self.states[2])
        gaps = np.concatenate((np.arange(40), rng.integers(0, SLEEP - 8, N - 40)))
        self.last = np.maximum(0, now - gaps).astype(np.int32)
        self.table = IdleTable(rule, self.real.dtype)
        self.decay = decay
        self.hp = {}
        for t in range(max(1, now - SLEEP + 1), now + 1):
            row = np.array(scalars(rate(t), t)).astype(self.real.dtype)
            self.hp[t] = hp_type(rule, ())(*row.tolist())
            self.table.given[t % SLEEP] = (*row, decay)
        self.table.begin(now)

    def reference(
        self, plain: Callable[..., Any] | None = None
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Weights, states and the sum of all absolute changes of the weights. Each step is that of
        the rule, or ``plain(w, g, *states, hp)``."""
        w, *states = (x.astype(np.float64) for x in (self.w, *self.states))
        moved, step = np.zeros_like(w), stepper(plain or self.rule.update, len(states))
        for t, hp in self.hp.items():
            behind = self.last < t
            x, *own = (a[behind] for a in (w, *states))
            new = [np.empty_like(x) for _ in (w, *states)]
            step(x.reshape(-1), tuple(a.reshape(-1) for a in own), self.decay, hp,
                 tuple(a.reshape(-1) for a in new))  # fmt: skip
            with np.errstate(all="ignore"):
                moved[behind] += np.abs(new[0] - x)
            for a, found in zip((w, *states), new, strict=True):
                a[behind] = found
        return w, states, moved

    def catch_up(self, rows: tuple[int, int, int] | None = None) -> CatchUp:
        """All rows, or some, are brought up to date."""
        storages = STORAGES[self.dtype], self.real, (STORAGES[self.dtype],) * len(self.states)
        assert self.rule.asleep is not None
        many = kernel(self.rule.asleep, (), *storages)
        at = tuple(x.ctypes.data for x in (self.w, *self.states))
        places = SleepingTable(many, at, D, self.last.ctypes.data, N)
        found = CatchUp(places, self.table, self.now, self.now, rows or (0, 0, N))
        commit([found])
        return found


@cache
def stepper(update: Callable[..., Any], n_states: int) -> Callable[..., None]:
    """One step of a rule without a gradient, but for a decay, in float64: its own function."""
    own = numba.njit(error_model="numpy")(update)
    states = ", ".join(f"states[{k}][i]" for k in range(n_states))
    news = [f"new[{k}][i]" for k in range(1 + n_states)]
    text = f"""def step(w, states, decay, hp, new):
    for i in range(w.size):
        {", ".join(news)} = own(w[i], decay * w[i], {states + ", " if states else ""}hp)
"""
    scope: dict[str, Any] = {"own": own}
    exec(text, scope)
    found: Callable[..., None] = numba.njit(error_model="numpy")(scope["step"])
    return found


def check(missed: Missed) -> None:
    """Bring all rows up to date, and compare."""
    w, states, moved = missed.reference()
    before = [x.astype(np.float64) for x in missed.states]
    missed.catch_up()
    eps, tiny = EPSILON[missed.dtype], TINY[missed.dtype]
    assert (missed.last == missed.now).all()
    allowed = 2e-6 * moved + 2.0 * eps * np.abs(w) + tiny
    assert (np.abs(missed.w.astype(np.float64) - w) <= allowed).all()
    for begin, found, expected in zip(before, missed.states, states, strict=True):
        allowed = 2e-6 * np.abs(begin - expected) + 2.0 * eps * np.abs(expected) + tiny
        assert (np.abs(found.astype(np.float64) - expected) <= allowed).all()


@pytest.mark.parametrize("now", [30, 700, 5_000])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, now: int) -> None:
    """Rules without a root, whose missed steps are a linear function."""
    rule, scalars, decay = LINEAR[name]
    check(Missed(rule, scalars, RATES["cosine"], now, decay))


@pytest.mark.parametrize("betas", BETAS, ids=str)
@pytest.mark.parametrize("now", [30, 700, more(5_000)])
@pytest.mark.parametrize("name", ROOTED)
def test_rooted(name: str, now: int, betas: tuple[float, float]) -> None:
    """The family of Adam: in closed form where the betas allow it, else step by step."""
    rule, scalars = ROOTED[name]
    check(Missed(rule, scalars(*betas), RATES["cosine"], now))


# Every schedule, up to steps that move nothing; and rates that grow as moments fade, where the last
# of many missed steps may move the most.
SCHEDULED = [
    *(((0.9, 0.999), rate, 400) for rate in RATES),
    *product([(0.99, 0.999), (0.98, 0.98)], ["rising", "late", "stairs"], [1_500]),
]


@pytest.mark.parametrize(("betas", "rate", "now"), SCHEDULED, ids=str)
@pytest.mark.parametrize("name", ["adam", "torch adamw"])
def test_schedules(name: str, betas: tuple[float, float], rate: str, now: int) -> None:
    rule, scalars = ROOTED[name]
    check(Missed(rule, scalars(*betas), RATES[rate], now))


# The scalars of so many steps in turn. Steps without an epsilon are no part of steps with one.
CHANGING: dict[str, tuple[Rule, list[Scalars], int]] = {
    "betas and epsilon": (
        adam.ADAM, [mindspore(0.9, 0.999), mindspore(0.8, 0.99), mindspore(0.9, 0.999, 1e-3)], 70),
    **{
        f"epsilon beside {betas}": (
            torch_adam.TORCH_ADAM, [corrected(*betas, epsilon) for epsilon in (0.0, 1e-2)], 90)
        for betas in ((0.9, 0.999), (0.9, 0.95))},
}  # fmt: skip


@pytest.mark.parametrize("of", CHANGING)
def test_options_that_change_while_rows_sleep(of: str) -> None:
    rule, parts, n = CHANGING[of]
    for rate in ("cosine", "constant"):
        check(Missed(rule, lambda lr, t: parts[t // n % len(parts)](lr, t), RATES[rate], 700))


@pytest.mark.parametrize("epsilon", [1e-10, 1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["adam", "torch adamw"])
def test_epsilon_and_dtypes(name: str, dtype: np.dtype, epsilon: float) -> None:
    """Every storage type beside a small and a large epsilon."""
    rule, scalars = ROOTED[name]
    check(Missed(rule, scalars(0.9, 0.999, epsilon), RATES["constant"], 300, dtype=dtype))


def by_formula(w: Any, _: Any, m: Any, v: Any, hp: Any) -> Any:
    """A step of Adam without a gradient as it is published: an infinite moment stays infinite. The
    rules compute ``m + (1 - beta1)*(g - m)``, which makes it a NaN."""
    m, v = 0.9 * m, 0.999 * v
    return hp.shrink * w - hp.step_size * m / (math.sqrt(v) * hp.root + hp.epsilon), m, v


@pytest.mark.parametrize("v", [0.0, 1e-45, 1e-38, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("m", [0.0, 1e-42, 1.0, 1e15, np.inf, np.nan])
def test_special_states(m: float, v: float) -> None:
    """States of 0, denormal, huge, infinite and NaN."""
    rule, scalars = ROOTED["torch adamw"]
    missed = Missed(rule, scalars(0.9, 0.999), RATES["constant"], 120)
    missed.states[0][:], missed.states[1][:] = m, v
    w, _, moved = missed.reference(by_formula)
    missed.catch_up()
    with np.errstate(all="ignore"):
        w32 = w.astype(np.float32)
    is_finite = np.isfinite(w32)
    np.testing.assert_array_equal(missed.w[~is_finite], w32[~is_finite])
    allowed = 3e-6 * moved[is_finite] + 2.0 * EPSILON[F32] * np.abs(w[is_finite])
    # A denormal moment has few digits, and is 0 in some loops.
    allowed += 2e-2 * moved[is_finite] if m and abs(m) < 1e-38 else 0.0
    assert (np.abs(missed.w[is_finite] - w[is_finite]) <= allowed).all()


def test_rows_of_ids() -> None:
    """Ids of any order, of both dtypes, out of range or twice: each row once, all others stay."""
    rng = np.random.default_rng(3)
    for dtype in (np.int32, np.int64):
        every = Missed(adam.ADAM, mindspore(0.9, 0.999), RATES["cosine"], 300)
        some = Missed(adam.ADAM, mindspore(0.9, 0.999), RATES["cosine"], 300)
        ids = np.concatenate((rng.integers(0, N // 2, 5_000), [-1, N, 2**31 - 1])).astype(dtype)
        before = some.w.copy()
        every.catch_up()
        assert some.catch_up((ids.ctypes.data, ids.itemsize, len(ids))).found_any
        assert not some.catch_up((ids.ctypes.data, ids.itemsize, len(ids))).found_any
        named = np.zeros(N, bool)
        named[ids[(ids >= 0) & (ids < N)]] = True
        np.testing.assert_array_equal(some.w[named], every.w[named])
        np.testing.assert_array_equal(some.w[~named], before[~named])


def test_row_wise() -> None:
    """Row-wise Adagrad only decays; its accumulator, one for each row, stays."""
    rule, real = row_wise.ROW_WISE_ADAGRAD_DECOUPLED, STORAGES[F32]
    assert rule.asleep is not None
    w, accum = np.ones((N, D), np.float32), np.arange(N, dtype=np.float32)
    last, table = np.arange(N, dtype=np.int32), IdleTable(rule, np.float32)
    for t in range(1, N + 1):
        table.given[t] = 1e-8, 0.1, 0.01, 0.0
    many = kernel(rule.asleep, (), real, real, (real,))
    places = SleepingTable(many, (w.ctypes.data, accum.ctypes.data), D, last.ctypes.data, N)
    commit([CatchUp(places, table, N, N, (0, 0, N))])
    np.testing.assert_allclose(w[:, 0], 0.99 ** (N - np.arange(N)), rtol=3e-6)
    np.testing.assert_array_equal(accum, np.arange(N))
