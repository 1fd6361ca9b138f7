"""Float64 NumPy reference of Adam and AdamW of MXNet 1.9.1 and 2.0, and of its schedulers.

It shares nothing with the library. Weights and moments of any dtype go in, float64 arrays come
out, nothing is changed in place. What MXNet rounds before it computes is rounded here too:

* The kernels take every hyper-parameter as float32, also for float64 weights, and the rate only
  after its bias correction, which is made in double. ``1 - beta`` is the difference of numbers
  of the weight's type, of which beta is the rounded one.
* The unfused steps of 2.0 are composed of operations on arrays, whose scalars are doubles that
  are rounded to the type of the array, ``1 - beta`` like any other.

Two things are not MXNet's but were decided: 16-bit weights are computed in float32, also
without a master copy, and rows of equal ids are summed first, the ids in any order. MXNet wants
ids that are sorted and unique.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
import reference
from reference import Array, wide

# A dense gradient, or (ids, rows).
Gradient = np.ndarray | tuple[np.ndarray, np.ndarray]
# Multipliers by index or name.
Table = Mapping[int | str, float]
# The rate of update n = 1, 2, ...
Schedule = Callable[[int], float]


# -------------------------------------------------------------------------------------- One step


@dataclass(frozen=True)
class Hyper:
    """The arguments of an optimizer that its steps depend on. `decoupled` means AdamW, `lazy` that
    rows which a row-sparse gradient does not name stay as they are. A `clip_gradient` that is not
    positive is none."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    compat: str = "2.0"
    fused: bool = True
    lazy: bool = False
    decoupled: bool = False
    correct_bias: bool = True


@dataclass(frozen=True)
class Scalars:
    """The numbers that a step computes with; `lr` holds the bias correction."""

    lr: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    epsilon: float
    wd: float
    rescale_grad: float
    clip: float


def scalars(h: Hyper, lr: float, wd: float, real: Any) -> Scalars:
    """As a step rounds them that computes in `real`, ``np.float32`` or ``np.float64``."""
    rounded = np.float32 if h.fused else real
    beta1, beta2 = rounded(h.beta1), rounded(h.beta2)
    if h.fused:
        rest1, rest2 = real(1) - real(beta1), real(1) - real(beta2)
    else:
        rest1, rest2 = real(1 - h.beta1), real(1 - h.beta2)
    clip = h.clip_gradient if h.clip_gradient and h.clip_gradient > 0 else math.inf
    return Scalars(
        lr=float(rounded(lr)),
        beta1=float(beta1),
        one_minus_beta1=float(rest1),
        beta2=float(beta2),
        one_minus_beta2=float(rest2),
        epsilon=float(rounded(h.epsilon)),
        wd=float(rounded(wd)),
        rescale_grad=float(rounded(h.rescale_grad)),
        clip=float(np.float32(clip)),  # a float32 field in the operator that clips, too
    )


def corrected(h: Hyper, lr: float, t: int) -> float:
    """The rate of the t-th step with its bias correction, in double and of unrounded betas."""
    if not h.correct_bias:
        return lr
    return lr * (math.sqrt(1 - h.beta2**t) / (1 - h.beta1**t))


def step(
    h: Hyper, w: ArrayLike, g: Gradient, m: ArrayLike, v: ArrayLike, *, lr: float, wd: float,
    real: Any = np.float32,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One update with the rate `lr`, which holds the bias correction."""
    s = scalars(h, lr, wd, real)
    formula = partial(adamw if h.decoupled else adam, h=h, s=s, real=real)
    if not isinstance(g, tuple):
        return formula(w, g, m, v)
    driver = reference.lazy_step if h.lazy else reference.dense_equivalent_step
    new_w, new_m, new_v = driver(formula, w, *g, m, v)
    return new_w, new_m, new_v


def adam(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, *, h: Hyper, s: Scalars, real: Any
) -> tuple[Array, Array, Array]:
    """Decay is part of the gradient; 1.9.1 clips the sum, 2.0 clips before it adds."""
    w, x = wide(w), s.rescale_grad * wide(g)
    x = clipped(x + s.wd * w, s) if h.compat == "1.9" else clipped(x, s) + s.wd * w
    delta, m, v = direction(x, m, v, s, real)
    return w - delta, m, v


def adamw(
    w: ArrayLike, g: ArrayLike, m: ArrayLike, v: ArrayLike, *, h: Hyper, s: Scalars, real: Any
) -> tuple[Array, Array, Array]:
    """Decay is scaled by the corrected rate; the unfused form decays what the step has left."""
    w = wide(w)
    delta, m, v = direction(clipped(s.rescale_grad * wide(g), s), m, v, s, real)
    moved = w - delta
    return moved - s.lr * s.wd * (w if h.fused else moved), m, v


def clipped(x: Array, s: Scalars) -> Array:
    """Infinities become the bound, NaN stays."""
    return np.minimum(np.maximum(x, -s.clip), s.clip)


def direction(x: Array, m: ArrayLike, v: ArrayLike, s: Scalars, real) -> tuple[Array, Array, Array]:
    """What is subtracted from the weight, and the new moments. Numbers too large for `real`, in
    which the moments are kept, are infinite."""
    m = within(real, s.beta1 * wide(m) + s.one_minus_beta1 * x)
    v = within(real, s.beta2 * wide(v) + s.one_minus_beta2 * x * x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return s.lr * m / (np.sqrt(v) + s.epsilon), m, v


def within(real: Any, x: Array) -> Array:
    """Not rounded, but infinite beyond the range of `real`."""
    with np.errstate(invalid="ignore"):  # of what is not chosen
        return np.where(np.abs(x) > np.finfo(real).max, np.sign(x) * np.inf, x)


# ------------------------------------------------------------------------------------- Schedules


def factor_schedule(
    step: int, factor: float = 1.0, stop_factor_lr: float = 1e-8, base_lr: float = 0.01
) -> Schedule:
    """The first drop is at n = step + 1."""

    def rate(n: int) -> float:
        drops = (n - 1) // step
        return max(base_lr * factor**drops, stop_factor_lr) if drops > 0 else base_lr

    return rate


def multi_factor_schedule(
    step: Iterable[int], factor: float = 1.0, base_lr: float = 0.01
) -> Schedule:
    """A drop after each of the steps."""
    steps = list(step)
    return lambda n: base_lr * factor ** sum(n > s for s in steps)


def poly_schedule(
    max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0.0, start: int = 0
) -> Schedule:
    """From `base_lr` at `start`, the end of the warm-up, to `final_lr` at `max_update`."""

    def rate(n: int) -> float:
        part = (min(n, max_update) - start) / (max_update - start)
        return final_lr + (base_lr - final_lr) * (1 - part) ** pwr

    return rate


def cosine_schedule(
    max_update: int, base_lr: float = 0.01, final_lr: float = 0.0, start: int = 0
) -> Schedule:
    """From `base_lr` at `start`, the end of the warm-up, to `final_lr` at `max_update`."""

    def rate(n: int) -> float:
        part = (min(n, max_update) - start) / (max_update - start)
        return final_lr + (base_lr - final_lr) * (1 + math.cos(math.pi * part)) / 2

    return rate


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "FactorScheduler": factor_schedule, "MultiFactorScheduler": multi_factor_schedule,
    "PolyScheduler": poly_schedule, "CosineScheduler": cosine_schedule,
}  # fmt: skip


def schedule(
    name: str, *, warmup_steps: int = 0, warmup_begin_lr: float = 0.0, warmup_mode: str = "linear",
    base_lr: float = 0.01, **arguments: Any,
) -> Schedule:  # fmt: skip
    """A scheduler by MXNet's name and arguments as a pure function of the update n = 1, 2, ...
    MXNet's own remember the last rate, so they must be asked in order, every time. The factors
    count from the first update, not from the end of the warm-up."""
    if name in ("PolyScheduler", "CosineScheduler"):
        arguments["start"] = warmup_steps
    rate = SCHEDULES[name](base_lr=base_lr, **arguments)

    def warmed(n: int) -> float:
        if n >= warmup_steps:
            return rate(n)
        way = n / warmup_steps if warmup_mode == "linear" else 0.0
        return warmup_begin_lr + (base_lr - warmup_begin_lr) * way

    return warmed


# ------------------------------------------------------------------------------------- Optimizer


@dataclass
class Variable:
    """A weight with its moments, as float64. `w` is the master copy of a 16-bit weight if there is
    one, and else rounded to `dtype` after every step. `dtype` is that of the weight, `real` the one
    that it is computed in."""

    w: Array
    m: Array
    v: Array
    dtype: np.dtype
    master: bool = False

    @property
    def real(self) -> Any:
        """The type that steps compute in and that the moments have."""
        return np.float64 if self.dtype == np.float64 else np.float32

    @property
    def weight(self) -> np.ndarray:
        """As the caller has it; of the wider types not rounded."""
        return self.w.astype(self.dtype) if self.dtype.itemsize == 2 else self.w

    def assign(self, w: Array, m: Array, v: Array) -> None:
        """The result of a step."""
        stored = self.dtype.itemsize == 2 and not self.master
        self.w, self.m, self.v = wide(w.astype(self.dtype)) if stored else w, m, v


def variable(weight: ArrayLike, dtype: DTypeLike | None = None, master: bool = False) -> Variable:
    """A weight before the first step."""
    array = np.asarray(weight, dtype)
    zeros = np.zeros(array.shape)
    return Variable(wide(array), zeros, zeros, array.dtype, master)


class Optimizer:
    """Counters, multipliers and rates around the steps. The schedule sees the largest count of all
    indices, the bias correction the index's own."""

    def __init__(
        self, hyper: Hyper, rate: float | Schedule, names: Mapping[int, str] | None = None,
        lr_mult: Table | None = None, wd_mult: Table | None = None, begin: int = 0,
    ) -> None:  # fmt: skip
        self.hyper = hyper
        self.names = dict(names or {})
        self.lr_mult = dict(lr_mult or {})
        self.wd_mult = self._not_decayed() | dict(wd_mult or {})
        self.counts: dict[int, int] = {}
        self.begin = self.num_update = begin
        self._rate = rate

    def lr(self, index: int) -> float:
        """The rate at the current count, without bias correction."""
        rate = self._rate(self.num_update) if callable(self._rate) else self._rate
        return rate * self._multiplier(self.lr_mult, index)

    def wd(self, index: int) -> float:
        """The decay of an index."""
        return self.hyper.wd * self._multiplier(self.wd_mult, index)

    def advance(self, index: int) -> dict[str, float]:
        """Count an update of an index: the rate with its bias correction, and the decay."""
        t = self.counts.get(index, self.begin) + 1
        self.counts[index] = t
        self.num_update = max(self.num_update, t)
        return {"lr": corrected(self.hyper, self.lr(index), t), "wd": self.wd(index)}

    def update(self, index: int, x: Variable, g: Gradient) -> None:
        """One step of one weight."""
        x.assign(*step(self.hyper, x.w, g, x.m, x.v, **self.advance(index), real=x.real))

    def _multiplier(self, table: Table, index: int) -> float:
        """An index goes before its name."""
        return table.get(index, table.get(self.names.get(index, ""), 1.0))

    def _not_decayed(self) -> dict[int | str, float]:
        """1.9.1 decays only weights and gammas of those that have names."""
        if self.hyper.compat != "1.9":
            return {}
        return {n: 0.0 for n in self.names.values() if not n.endswith(("_weight", "_gamma"))}
