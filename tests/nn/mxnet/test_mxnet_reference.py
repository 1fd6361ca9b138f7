"""The library's MXNet optimizers against the float64 reference, beyond what was recorded.

Every step of the reference starts from what the library had before it, so each is held to its
own rounding, and both count for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusestep import ops
from fusestep.nn import RowTensor
from fusestep.nn import mxnet as mx

import reference
import reference_mxnet
from helpers import BF16, EPSILON, FAR, TINY, assert_same_bits, distance, unchanged
from reference import wide
from reference_mxnet import Hyper, Schedule
from subprocesses import output_of

F16, F32, F64 = (np.dtype(f"f{size}") for size in (2, 4, 8))
# Of the larger of |expected| and 1e-3 of the largest; one rounding of the 16-bit types.
TOLERANCE = {F32: 3e-6, F64: 1e-12, F16: EPSILON[F16], BF16: EPSILON[BF16]}
# Types of weights, and whether there are master copies of them.
STORAGE = {
    "float32": (F32, False),
    "float64": (F64, False),
    "float16": (F16, False),
    "float16-master": (F16, True),
    "bfloat16": (BF16, False),
    "bfloat16-master": (BF16, True),
}
SHAPES = [(), (0,), (1,), (7,), (1003,), (17, 9), (3, 0, 2)]
TABLES = [(50, 5), (1003, 3), (11, 2, 3), (13,), (7, 1), (9, 0)]

KINDS = {
    "Adam-1.9": Hyper(compat="1.9"),
    "Adam-2.0": Hyper(),
    "Adam-unfused": Hyper(fused=False),
    "AdamW": Hyper(decoupled=True, epsilon=1e-6),
    "AdamW-unfused": Hyper(decoupled=True, fused=False, epsilon=1e-6),
    "AdamW-nobias": Hyper(decoupled=True, correct_bias=False, epsilon=1e-6),
    "AdamW-unfused-nobias": Hyper(decoupled=True, fused=False, correct_bias=False, epsilon=1e-6),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wd": {"wd": 0.3},
    "clip": {"clip_gradient": 0.7},
    "rescale": {"rescale_grad": 0.3},
    "all": {"wd": 0.3, "clip_gradient": 0.6, "rescale_grad": 0.7},
    "no-clip-0": {"wd": 0.3, "clip_gradient": 0.0},
    "no-clip-negative": {"wd": 0.3, "clip_gradient": -0.5},
    "betas": {"beta1": 0.3, "beta2": 0.95, "epsilon": 1e-2},
    "forgetful": {"beta1": 0.0, "beta2": 0.5},
}
# Every option in float32; of other types, whose kernels take long to compile, all in one.
SOME = [(o, s) for s in STORAGE for o in OPTIONS if s == "float32" or o == "all"]
ROWS = {
    "Adam-1.9-lazy": Hyper(compat="1.9", lazy=True),
    "Adam-1.9-standard": Hyper(compat="1.9"),
    "Adam-2.0-lazy": Hyper(lazy=True),
    "Adam-2.0-standard": Hyper(),
    "Adam-unfused": Hyper(fused=False),
}
RATE = 0.01


# ------------------------------------------------------------------------------------ Comparison


def close(found: np.ndarray, expected: Any, label: str, reached: Any = 0.0) -> None:
    """Every element; `reached` is the size whose rounding it may hold, as far as computed."""
    __tracebackhide__ = True
    expected = wide(expected)
    size = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    allowed = TOLERANCE[found.dtype] * np.maximum(size, 1e-3 * np.max(size, initial=0.0))
    unit = EPSILON[F64 if found.dtype == F64 else F32]
    allowed = allowed + 2 * unit * np.nan_to_num(reached, posinf=0.0) + TINY[found.dtype]
    found = wide(found)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(found - expected))
    off = ~(error <= allowed)
    if off.any():
        times = np.where(off, error / allowed, 0.0)
        worst = np.unravel_index(np.argmax(times), times.shape)
        raise AssertionError(
            f"{label}: {off.sum()} of {off.size} off, worst {tuple(map(int, worst))}: "
            f"{found[worst]!r} for {expected[worst]!r}, {times[worst]:.3g} times what is allowed"
        )


def roundings(
    h: Hyper, g: Any, before: dict[str, np.ndarray], after: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The sizes whose rounding is left in each array of a step with the gradient `g`.

    What the moments are sums of may cancel, and so may the gradient, equal rows and decay. Of
    the moments it goes into the way of the weight.
    """
    old, new = ({name: wide(x) for name, x in arrays.items()} for arrays in (before, after))
    size = old["weight"].shape
    terms = reference.densify(g.indices, np.abs(wide(g.values)), size) if rows(g) else abs(wide(g))
    terms = h.rescale_grad * terms + (0.0 if h.decoupled else h.wd) * np.abs(old["weight"])
    kept1, kept2 = 1 - h.beta1, 1 - h.beta2
    with np.errstate(all="ignore"):
        x = np.abs(new["mean"] - h.beta1 * old["mean"]) / kept1
        mean = np.abs(old["mean"]) + kept1 * terms
        var = h.beta2 * old["var"] + kept2 * x * terms
        precise = "master" if "master" in new else "weight"
        way = np.abs(new[precise] - old[precise])
        lost = way * (mean / np.abs(new["mean"]) + 0.5 * var / new["var"])
    weight = np.abs(old["weight"]) + np.nan_to_num(lost, posinf=0.0)
    return {"mean": mean, "var": var, "weight": weight, "master": weight}


def make(
    h: Hyper, rate: float | Schedule = RATE, *, lr_scheduler: Any = None, **others: Any
) -> mx.Optimizer:
    """The library's optimizer that has the settings of a reference."""
    arguments = {
        "beta1": h.beta1,
        "beta2": h.beta2,
        "epsilon": h.epsilon,
        "wd": h.wd,
        "rescale_grad": h.rescale_grad,
        "clip_gradient": h.clip_gradient,
        "use_fused_step": h.fused,
        "compat": h.compat,
    }
    rated = {"lr_scheduler": lr_scheduler} if lr_scheduler else {"learning_rate": rate}
    if h.decoupled:
        return mx.AdamW(**rated, **arguments, correct_bias=h.correct_bias, **others)
    return mx.Adam(**rated, **arguments, lazy_update=h.lazy, **others)


@dataclass
class Held:
    """A weight with its state, the library's and the reference's."""

    weight: np.ndarray
    state: Any
    reference: reference_mxnet.Variable

    def arrays(self) -> dict[str, np.ndarray]:
        """Those of the library, by name."""
        found, moments = {"weight": self.weight}, self.state
        if self.reference.master:
            found["master"], moments = self.state
        return found | {"mean": moments[0], "var": moments[1]}

    def expected(self) -> dict[str, np.ndarray]:
        """Those of the reference, by name."""
        x = self.reference
        found = {"weight": x.weight, "mean": x.m, "var": x.v}
        return found | {"master": x.w} if x.master else found


class Pair:
    """The library's optimizer and the reference side by side."""

    def __init__(
        self,
        h: Hyper,
        weights: Sequence[np.ndarray],
        rate: float | Schedule = RATE,
        *,
        master: bool = False,
        tables: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.h = h
        self.opt = make(h, rate, multi_precision=master, **arguments)
        names = arguments.get("param_idx2name")
        begin = arguments.get("begin_num_update", 0)
        self.reference = reference_mxnet.Optimizer(h, rate, names, **(tables or {}), begin=begin)
        self.held = [
            Held(
                weight,
                self.opt.create_state_multi_precision(i, weight),
                reference_mxnet.variable(weight, master=master and weight.dtype.itemsize == 2),
            )
            for i, weight in enumerate(weights)
        ]

    def step(self, gradients: dict[int, Any]) -> None:
        """One call with the gradients by index, whose order is that of the call."""
        before = [{name: x.copy() for name, x in held.arrays().items()} for held in self.held]
        for i, g in gradients.items():
            resume(self.held[i].reference, before[i])
            self.reference.update(i, self.held[i].reference, plain(g))
        with unchanged(list(gradients.values())):
            self.update(gradients)
        for i, held in enumerate(self.held):
            self.compare(i, held, before[i], gradients.get(i))
        assert self.opt.num_update == self.reference.num_update

    def update(self, gradients: dict[int, Any]) -> None:
        """The library's step."""
        held = [self.held[i] for i in gradients]
        self.opt.update_multi_precision(
            list(gradients),
            [x.weight for x in held],
            list(gradients.values()),
            [x.state for x in held],
        )

    def compare(self, i: int, held: Held, before: dict[str, np.ndarray], g: Any) -> None:
        """A weight after a call, in which it had the gradient `g` if it took part."""
        found = held.arrays()
        if g is None:
            for name, x in found.items():
                assert_same_bits(x, before[name], f"{name} of {i}, which took no part")
            return
        assert self.opt._index_update_count[i] == self.reference.counts[i]
        assert self.opt._get_lr(i) == pytest.approx(self.reference.lr(i), rel=1e-12)
        assert self.opt._get_wd(i) == pytest.approx(self.reference.wd(i), rel=1e-12)
        assert found.keys() == held.expected().keys()
        reached = roundings(self.h, g, before, held.expected())
        for name, expected in held.expected().items():
            label = f"{name} of {i}, {held.weight.dtype} {held.weight.shape}"
            assert found[name].shape == held.weight.shape, label
            assert found[name].dtype == (held.weight.dtype if name == "weight" else real(held))
            close(found[name], expected, label, reached[name])
        if self.h.lazy and isinstance(g, RowTensor):
            others = np.ones(len(held.weight), bool)
            others[g.indices] = False
            for name, x in found.items():
                assert_same_bits(x[others], before[name][others], f"rows not named of {name}")


def resume(x: reference_mxnet.Variable, arrays: dict[str, np.ndarray]) -> None:
    """Go on from what the library has."""
    weight = arrays["master"] if x.master else arrays["weight"]
    x.w, x.m, x.v = wide(weight), wide(arrays["mean"]), wide(arrays["var"])


def real(held: Held) -> np.dtype:
    """The type of moments and master copies."""
    return F64 if held.weight.dtype == F64 else F32


def rows(g: Any) -> bool:
    return isinstance(g, RowTensor)


def plain(g: Any) -> Any:
    """A gradient as the reference takes it."""
    return (g.indices, g.values) if rows(g) else g


def normal(rng: np.random.Generator, shape: Any, dtype: Any, scale: float = 1.0) -> np.ndarray:
    """An array, also of no axes."""
    return np.asarray(scale * rng.standard_normal(shape)).astype(dtype)


def some_rows(rng: np.random.Generator, shape: Any, dtype: Any, n: int | None = None) -> RowTensor:
    """Some rows, not sorted, some of them twice or more often."""
    n = 2 + len(range(shape[0])) // 2 if n is None else n
    indices = rng.integers(0, max(1, shape[0] * 2 // 3), n)
    return RowTensor(indices, normal(rng, (n, *shape[1:]), dtype), shape)


def merged(h: Hyper, changed: dict[str, Any]) -> Hyper:
    """Settings of a kind with those of an option."""
    return Hyper(**(vars(h) | changed))


# ----------------------------------------------------------------------------------------- Dense


@pytest.mark.parametrize(("option", "storage"), SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_dense(kind: str, option: str, storage: str) -> None:
    """Weights of many sizes in a call, four steps."""
    dtype, master = STORAGE[storage]
    rng = np.random.default_rng(1)
    h = merged(KINDS[kind], OPTIONS[option])
    pair = Pair(h, [normal(rng, shape, dtype) for shape in SHAPES], master=master)
    for _ in range(4):
        pair.step({i: normal(rng, shape, dtype) for i, shape in enumerate(SHAPES)})


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_alone(kind: str) -> None:
    """A call with an index, a weight, a gradient and a state, of both methods."""
    rng = np.random.default_rng(2)

    class Alone(Pair):
        def update(self, gradients: dict[int, Any]) -> None:
            ((i, g),) = gradients.items()
            methods = (self.opt.update, self.opt.update_multi_precision)
            methods[self.reference.counts[i] % 2](i, self.held[i].weight, g, self.held[i].state)

    pair = Alone(merged(KINDS[kind], OPTIONS["all"]), [normal(rng, (5, 3), F32)])
    for _ in range(4):
        pair.step({0: normal(rng, (5, 3), F32)})


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_all_types_in_a_call(kind: str) -> None:
    rng = np.random.default_rng(3)
    dtypes = [F16, F32, BF16, F64, F16, F32, F64, BF16]
    h = merged(KINDS[kind], OPTIONS["all"])
    pair = Pair(h, [normal(rng, (4, 6), dtype) for dtype in dtypes], master=True)
    for _ in range(3):
        pair.step({i: normal(rng, (4, 6), dtype) for i, dtype in enumerate(dtypes)})


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_finite(kind: str, storage: str) -> None:
    """They spoil their own elements; clipped, infinities are the bound."""
    dtype, master = STORAGE[storage]
    # Without options and with all: the kernels of other tests.
    for clip, options in ((None, {}), (1.0, {"wd": 0.1, "rescale_grad": 0.7})):
        rng = np.random.default_rng(4)
        h = merged(KINDS[kind], {"clip_gradient": clip, **options})
        pair = Pair(h, [normal(rng, (9,), dtype)], master=master)
        g = normal(rng, (9,), dtype)
        g[[1, 4, 6]] = np.inf, -np.inf, np.nan
        pair.step({0: g})
        spoilt = [6] if clip else [1, 4, 6]
        for _ in range(2):
            for x in pair.held[0].arrays().values():
                assert set(np.flatnonzero(~np.isfinite(wide(x)))) <= set(spoilt)
            assert np.flatnonzero(np.isnan(wide(pair.held[0].weight))).tolist() == spoilt
            pair.update({0: normal(rng, (9,), dtype)})


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_sizes(kind: str) -> None:
    """Each on its own scale, from those whose square is subnormal to those where it overflows."""
    h, sizes = KINDS[kind], 10.0 ** np.arange(-22, 19)
    pair = Pair(h, [np.ones(1, F32) for _ in sizes])
    for _ in range(2):
        pair.step({i: np.full(1, x, F32) for i, x in enumerate(sizes)})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].decoupled])
def test_squares_that_overflow(kind: str) -> None:
    """Infinite variance stops an element; ``(1 - beta2) * g * g`` may be finite with g * g not."""
    pair = Pair(KINDS[kind], [np.ones(1, F32) for _ in range(3)])
    for g in (1e20, 1e30, 1.0), (1.0, 1.0, 1e20), (1e-3, 1e20, 1e-3):
        pair.step({i: np.full(1, x, F32) for i, x in enumerate(g)})
    assert np.isfinite([held.weight for held in pair.held]).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [0.0, math.inf, -math.inf, math.nan])
def test_adamw_skips_a_step_without_a_scale(scale: float, fused: bool) -> None:
    """A loss scale that overflowed. MXNet's kernel skips and counts; here nothing has happened."""
    rng = np.random.default_rng(5)
    weight, g = normal(rng, 6, F32), normal(rng, 6, F32)
    opt = mx.AdamW(0.1, wd=0.1, use_fused_step=fused)
    state = opt.create_state(0, weight)
    opt.update(0, weight, g, state)
    opt.rescale_grad = scale
    with unchanged(weight, state, g):
        opt.update(0, weight, g, state)
    assert opt._index_update_count[0] == opt.num_update == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].decoupled])
def test_adam_steps_with_a_scale_of_0(kind: str) -> None:
    """It decays."""
    rng = np.random.default_rng(5)
    h = merged(KINDS[kind], {"wd": 0.3, "rescale_grad": 0.0})
    pair = Pair(h, [normal(rng, 6, F32)])
    for _ in range(2):
        pair.step({0: normal(rng, 6, F32)})
    assert pair.opt._index_update_count[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_remembered_with_betas_of_0(kind: str) -> None:
    """A gradient that is much smaller than the one before makes no step that is larger."""
    pair = Pair(merged(KINDS[kind], {"beta1": 0.0, "beta2": 0.0}), [np.ones(3, F32)])
    pair.step({0: np.array([1.0, -3.0, 1.0], F32)})
    pair.step({0: np.array([1e-5, 1e-4, 1e-8], F32)})


# ------------------------------------------------------------------------------------------ Rows


# Beyond float32 one version is lazy and the other is not.
SOME_ROWS = [
    (kind, option, storage)
    for kind in ROWS
    for option, storage in SOME
    if option in ("plain", "all", "betas")
    if storage == "float32" or kind not in ("Adam-1.9-standard", "Adam-2.0-lazy")
]


@pytest.mark.parametrize(("kind", "option", "storage"), SOME_ROWS)
def test_rows(kind: str, option: str, storage: str) -> None:
    """Unsorted and repeated ids, an empty gradient, a dense one beside and in between."""
    dtype, master = STORAGE[storage]
    rng = np.random.default_rng(6)
    shapes = [*TABLES, (4, 3)]
    h = merged(ROWS[kind], OPTIONS[option])
    pair = Pair(h, [normal(rng, shape, dtype) for shape in shapes], master=master)
    for n in (None, 1, 0, None):
        given: dict[int, Any] = {i: some_rows(rng, x, dtype, n) for i, x in enumerate(TABLES)}
        pair.step(given | {len(TABLES): normal(rng, (4, 3), dtype)})
    pair.step({0: normal(rng, TABLES[0], dtype)})
    pair.step({0: some_rows(rng, TABLES[0], dtype)})


@pytest.mark.parametrize("kind", ["AdamW", "AdamW-unfused"])
def test_rows_of_adamw_are_standard(kind: str) -> None:
    rng = np.random.default_rng(7)
    pair = Pair(merged(KINDS[kind], OPTIONS["all"]), [normal(rng, (20, 3), F32)])
    for n in (12, 0, 5):
        pair.step({0: some_rows(rng, (20, 3), F32, n)})


@pytest.mark.parametrize(
    ("kind", "storage"), [(kind, storage) for kind, option, storage in SOME_ROWS if option == "all"]
)
def test_an_empty_gradient_of_rows(kind: str, storage: str) -> None:
    """Lazy, it changes nothing and still counts; standard, it decays everything."""
    dtype, master = STORAGE[storage]
    rng = np.random.default_rng(8)
    h = merged(ROWS[kind], OPTIONS["all"])
    pair = Pair(h, [normal(rng, (6, 4), dtype)], rate=0.5, master=master)
    pair.step({0: normal(rng, (6, 4), dtype)})
    before = {name: x.copy() for name, x in pair.held[0].arrays().items()}
    pair.step({0: some_rows(rng, (6, 4), dtype, 0)})
    assert pair.opt._index_update_count[0] == 2
    for name, x in pair.held[0].arrays().items():
        if h.lazy:
            assert_same_bits(x, before[name], name)
        else:
            assert (x != before[name]).all(), name
    pair.step({0: some_rows(rng, (6, 4), dtype)})


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_order_of_rows_has_no_meaning(kind: str, dtype: Any) -> None:
    """And the sum of equal ones is what counts, not the steps that they would make."""
    rng = np.random.default_rng(9)
    weight, values = normal(rng, (8, 3), F32), normal(rng, (5, 3), F32)
    results = []
    for ids, rows_of_values in (
        ([5, 2, 7, 0, 3], values),
        ([0, 2, 3, 5, 7], values[[3, 1, 4, 0, 2]]),
        ([0, 2, 3, 5, 5, 7], np.insert(values[[3, 1, 4, 0, 2]], 4, 0, axis=0)),
    ):
        pair = Pair(ROWS[kind], [weight.copy()])
        pair.step({0: RowTensor(np.array(ids, dtype), rows_of_values, weight.shape)})
        results.append([x.copy() for x in pair.held[0].arrays().values()])
    for others in results[1:]:
        for x, y in zip(results[0], others, strict=True):
            assert_same_bits(x, y)


def test_lazy_is_the_default_of_19_alone() -> None:
    rng = np.random.default_rng(10)
    for compat, lazy in (("1.9", True), ("2.0", False)):
        weight = normal(rng, (6, 2), F32)
        opt = mx.Adam(0.1, compat=compat, wd=0.1)
        state = opt.create_state(0, weight)
        before = weight.copy()
        opt.update(0, weight, RowTensor(np.array([4]), normal(rng, (1, 2), F32), (6, 2)), state)
        assert (weight[4] != before[4]).all()
        assert (weight[:4] == before[:4]).all() == lazy


def test_lazy_updates_are_fused() -> None:
    with pytest.raises(AssertionError):
        mx.Adam(use_fused_step=False, lazy_update=True)


# --------------------------------------------------------------------- Counts, rates, multipliers

SCHEDULERS: dict[str, dict[str, Any]] = {
    "factor": {"name": "FactorScheduler", "step": 2, "factor": 0.5, "base_lr": 0.1},
    "factor-stopped": {
        "name": "FactorScheduler",
        "step": 1,
        "factor": 0.1,
        "base_lr": 0.2,
        "stop_factor_lr": 3e-3,
        "warmup_steps": 5,
        "warmup_begin_lr": 0.01,
    },
    "multi": {"name": "MultiFactorScheduler", "step": [2, 3, 9], "factor": 0.3, "base_lr": 0.1},
    "multi-warm": {
        "name": "MultiFactorScheduler",
        "step": [2, 9],
        "factor": 0.3,
        "base_lr": 0.1,
        "warmup_steps": 4,
        "warmup_begin_lr": 0.02,
        "warmup_mode": "constant",
    },
    "poly": {"name": "PolyScheduler", "max_update": 11, "base_lr": 0.1, "pwr": 3},
    "poly-warm": {
        "name": "PolyScheduler",
        "max_update": 12,
        "base_lr": 0.1,
        "final_lr": 0.03,
        "pwr": 1,
        "warmup_steps": 3,
    },
    "cosine": {"name": "CosineScheduler", "max_update": 13, "base_lr": 0.1},
    "cosine-warm": {
        "name": "CosineScheduler",
        "max_update": 12,
        "base_lr": 0.1,
        "final_lr": 0.01,
        "warmup_steps": 5,
        "warmup_begin_lr": 0.05,
    },
}


def scheduler(key: str) -> tuple[Any, Schedule]:
    """The library's and the reference's."""
    arguments = dict(SCHEDULERS[key])
    name = arguments.pop("name")
    return getattr(mx.lr_scheduler, name)(**arguments), reference_mxnet.schedule(name, **arguments)


@pytest.mark.parametrize("key", SCHEDULERS)
def test_schedules_are_functions_of_the_update(key: str) -> None:
    """Asked in order, at random, or first beyond the end."""
    updates = list(range(1, 31))
    orders = (updates, updates[::-1], np.random.default_rng(11).permutation(updates).tolist())
    for order in orders:
        found, expected = scheduler(key)
        for n in order:
            assert found(n) == pytest.approx(expected(n), rel=1e-12, abs=1e-18), n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", SCHEDULERS)
def test_uneven_counts(key: str, kind: str) -> None:
    """The schedule goes by the largest count, the bias correction by each weight's own."""
    rng = np.random.default_rng(12)
    theirs, ours = scheduler(key)
    pair = Pair(KINDS[kind], [normal(rng, 5, F32) for _ in range(3)], ours, lr_scheduler=theirs)
    for taking_part in ([0, 1, 2], [0], [0], [1, 0], [0, 1, 2], [2], [2, 0], [1]):
        pair.step({i: normal(rng, 5, F32) for i in taking_part})
    assert pair.reference.counts == {0: 6, 1: 4, 2: 4}


@pytest.mark.parametrize("kind", KINDS)
def test_counts_begin_where_they_are_told(kind: str) -> None:
    rng = np.random.default_rng(13)
    theirs, ours = scheduler("factor")
    weights = [normal(rng, 5, F32) for _ in range(2)]
    pair = Pair(KINDS[kind], weights, ours, lr_scheduler=theirs, begin_num_update=4)
    for taking_part in ([0], [0], [1, 0], [1]):
        pair.step({i: normal(rng, 5, F32) for i in taking_part})
    assert pair.opt.num_update == 7


@pytest.mark.parametrize("compat", ["1.9", "2.0"])
def test_multipliers(compat: str) -> None:
    """Indices go before names; of 1.9 only weights and gammas decay unless told otherwise."""
    rng = np.random.default_rng(14)
    names = dict(enumerate(["a_weight", "a_bias", "b_gamma", "b_beta", "c_weight"]))
    tables = {
        "lr_mult": {"a_weight": 3.0, "b_gamma": 0.0, 3: 2.0, "b_beta": 7.0},
        "wd_mult": {"a_weight": 0.5, 0: 4.0, "b_beta": 2.0},
    }
    pair = Pair(
        Hyper(compat=compat, wd=0.2),
        [normal(rng, 5, F32) for _ in range(6)],
        tables=tables,
        param_idx2name=names,
    )
    pair.opt.set_lr_mult({"a_bias": 9.0})  # replaced as a whole by the next call
    pair.opt.set_wd_mult({"c_weight": 9.0})
    pair.opt.set_lr_mult(tables["lr_mult"])
    pair.opt.set_wd_mult(tables["wd_mult"])
    for _ in range(3):
        pair.step({i: normal(rng, 5, F32) for i in range(6)})


def test_multipliers_of_parameters_go_before_tables() -> None:
    rng = np.random.default_rng(15)
    parameters = {0: SimpleNamespace(lr_mult=0.5, wd_mult=3.0)}
    tables = {"lr_mult": {0: 0.5, 1: 4.0}, "wd_mult": {0: 3.0, 1: 5.0}}
    pair = Pair(
        Hyper(wd=0.2),
        [normal(rng, 5, F32) for _ in range(2)],
        tables=tables,
        param_dict=parameters,
    )
    pair.opt.set_lr_mult({0: 11.0, 1: 4.0})
    pair.opt.set_wd_mult({0: 12.0, 1: 5.0})
    for _ in range(2):
        pair.step({i: normal(rng, 5, F32) for i in range(2)})


def test_the_rate_can_be_set() -> None:
    rng = np.random.default_rng(16)
    pair = Pair(Hyper(), [normal(rng, 5, F32)], 0.1)
    pair.step({0: normal(rng, 5, F32)})
    pair.opt.set_learning_rate(0.02)
    pair.reference._rate = 0.02
    assert pair.opt.learning_rate == 0.02
    pair.step({0: normal(rng, 5, F32)})


def test_default_rates() -> None:
    assert mx.Adam().learning_rate == 0.001
    assert mx.AdamW().learning_rate == 0.001


@pytest.mark.parametrize("made", [mx.Adam, mx.AdamW])
@pytest.mark.parametrize("key", SCHEDULERS)
def test_a_given_rate_replaces_that_of_a_schedule(key: str, made: Any) -> None:
    """For this optimizer, in warm-up and all; without one the schedule keeps its own."""
    arguments = SCHEDULERS[key] | {"base_lr": 0.2}
    expected = {None: scheduler(key)[1], 0.2: reference_mxnet.schedule(**arguments)}
    theirs, _ = scheduler(key)
    for rate, schedule in expected.items():
        opt = made(rate, lr_scheduler=theirs)
        weight, state = np.ones(2), [np.zeros(2), np.zeros(2)]
        for n in range(1, 16):
            opt.update(0, weight, np.ones(2), state)
            assert opt._get_lr(0) == opt.learning_rate == pytest.approx(schedule(n), rel=1e-12)
    assert theirs(1) == pytest.approx(expected[None](1), rel=1e-12)


# ------------------------------------------------------------------------------------ The operator

OPERATOR = {
    "plain": {},
    "wd": {"wd": 0.3},
    "all": {"wd": 0.3, "clip_gradient": 0.6, "rescale_grad": 0.7},
    "betas": {"beta1": 0.3, "beta2": 0.95, "epsilon": 1e-2},
}


def operate(
    h: Hyper, weight: np.ndarray, g: Any, mean: np.ndarray, var: np.ndarray, out: Any
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """What the operator returns, and what the reference makes of the same."""
    computed = np.float64 if weight.dtype == F64 else np.float32
    scalars = {"lr": RATE, "wd": h.wd}
    expected = reference_mxnet.step(h, weight, plain(g), mean, var, **scalars, real=computed)
    names = ("beta1", "beta2", "epsilon", "rescale_grad", "compat")
    given = {name: getattr(h, name) for name in names}
    if h.clip_gradient is not None:
        given["clip_gradient"] = h.clip_gradient
    with unchanged(g):
        result = ops.adam_update(
            *(weight, g, mean, var, out), **scalars, **given, lazy_update=h.lazy
        )
    return result, expected


def outs(weight: np.ndarray) -> Iterator[Any]:
    """None, the weight and another array."""
    yield from (None, weight, np.full_like(weight, 7.0))


@pytest.mark.parametrize(
    ("option", "dtype"),
    [(o, d) for d in (F32, F64, F16, BF16) for o in OPERATOR if d == F32 or o == "all"],
    ids=str,
)
@pytest.mark.parametrize("compat", ["1.9", "2.0"])
@pytest.mark.parametrize("grad", ["dense", "lazy", "standard"])
def test_adam_update(grad: str, compat: str, option: str, dtype: np.dtype) -> None:
    """No bias correction; the moments change in place, the weight only if it is `out`."""
    rng = np.random.default_rng(17)
    h = Hyper(compat=compat, lazy=grad != "standard", **OPERATOR[option])
    for shape in SHAPES if grad == "dense" else TABLES:
        weight = normal(rng, shape, dtype)
        for out in outs(weight):
            mean, var = normal(rng, shape, dtype, 0.1), normal(rng, shape, dtype, 0.1)
            var = np.abs(var, out=var)
            before = {"weight": weight.copy(), "mean": mean.copy(), "var": var.copy()}
            g = (normal if grad == "dense" else some_rows)(rng, shape, dtype)
            result, expected = operate(h, weight, g, mean, var, out)
            assert result.dtype == dtype
            assert result.shape == weight.shape
            assert result is out or out is None
            if out is not weight:
                assert_same_bits(weight, before["weight"])
                assert not np.shares_memory(result, weight)
            after = dict(zip(("weight", "mean", "var"), expected, strict=True))
            reached = roundings(h, g, before, after)
            for name, x in {"weight": result, "mean": mean, "var": var}.items():
                close(x, after[name], f"{name} {shape}", reached[name])


@pytest.mark.parametrize("clip", [0.0, -0.5])
def test_adam_update_clips_by_positive_bounds_only(clip: float) -> None:
    """MXNet's kernel takes 0 for a bound, which only its optimizer knows how to hide."""
    results = []
    for options in ({}, {"clip_gradient": clip}):
        weight, mean, var = np.zeros(3), np.zeros(3), np.zeros(3)
        ops.adam_update(weight, np.array([1.0, -2, 3]), mean, var, weight, lr=0.1, **options)
        results.append((weight, mean, var))
    for x, y in zip(*results, strict=True):
        assert_same_bits(x, y)
    assert results[0][1].all()


def test_adam_update_is_not_an_optimizer() -> None:
    """Its rate is the whole rate, whatever step it is."""
    weight, g = np.zeros(3, F64), np.full(3, 2.0)
    ops.adam_update(weight, g, np.zeros(3), np.zeros(3), weight, lr=0.5)
    np.testing.assert_allclose(weight, -0.5 * 0.1 / math.sqrt(1e-3), rtol=1e-4)


# ------------------------------------------------------------------------------------ Sensitivity

MOVED: dict[str, dict[str, Any]] = {
    "rate": {"rate": 0.02},
    "beta1": {"beta1": 0.8},
    "beta2": {"beta2": 0.99},
    "epsilon": {"epsilon": 0.1},
    "wd": {"wd": 0.3},
    "rescale_grad": {"rescale_grad": 0.5},
    "clip_gradient": {"clip_gradient": 0.3},
    "begin_num_update": {"begin_num_update": 3},
}


def outcome(h: Hyper, rate: float = RATE, rowwise: bool = False, **others: Any) -> list[np.ndarray]:
    """Weight and moments after three steps that are always the same."""
    rng = np.random.default_rng(18)
    weight = normal(rng, (6, 4), F32)
    opt = make(h, rate, **others)
    state = opt.create_state(0, weight)
    for _ in range(3):
        g = some_rows(rng, (6, 4), F32, 3) if rowwise else normal(rng, (6, 4), F32)
        opt.update(0, weight, g, state)
    return [weight, *state]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MOVED)
def test_every_hyper_parameter_acts(name: str, kind: str) -> None:
    changed = dict(MOVED[name])
    others = {k: changed.pop(k) for k in ("rate", "begin_num_update") if k in changed}
    moved = outcome(merged(KINDS[kind], changed), **others)
    if name == "begin_num_update" and not KINDS[kind].correct_bias:
        for x, y in zip(moved, outcome(KINDS[kind]), strict=True):
            assert_same_bits(x, y)
    else:
        assert distance(moved, outcome(KINDS[kind])) > FAR


def test_every_switch_acts() -> None:
    clipped = Hyper(wd=0.3, clip_gradient=0.5)
    decoupled = Hyper(wd=0.3, epsilon=1e-6, decoupled=True)
    pairs = {
        "compat": (clipped, merged(clipped, {"compat": "1.9"}), False),
        "lazy": (Hyper(), Hyper(lazy=True), True),
        "class": (Hyper(wd=0.3, epsilon=1e-6), decoupled, False),
        "correct_bias": (decoupled, merged(decoupled, {"correct_bias": False}), False),
    }
    for name, (a, b, rowwise) in pairs.items():
        assert distance(outcome(a, rowwise=rowwise), outcome(b, rowwise=rowwise)) > FAR, name


def test_unfused_steps_have_their_own_numbers() -> None:
    """``1 - beta2`` is rounded as a whole; AdamW decays the moved weight."""
    fused, unfused = outcome(Hyper()), outcome(Hyper(fused=False))
    np.testing.assert_allclose(unfused[2] / fused[2], 0.001 / (1 - float(F32.type(0.999))), 1e-6)
    decoupled = Hyper(decoupled=True, wd=1.0)
    apart = outcome(decoupled, 0.1), outcome(merged(decoupled, {"fused": False}), 0.1)
    assert distance(apart[0][:1], apart[1][:1]) > FAR


# ----------------------------------------------------------------------------------- Equal bits

BITS = """
    import hashlib
    import numpy as np
    from fusestep import ops
    from fusestep.nn import RowTensor, mxnet as mx

    def digest(make):
        rng = np.random.default_rng(19)
        tables = [(900, 40), (2_000, 7)]
        shapes = [(140_000,), (300, 257), (5,), (33, 3), *tables]
        dtypes = ["f4", "f4", "f8", "f2", "f4", "f4"]
        weights = [rng.standard_normal(s).astype(d) for s, d in zip(shapes, dtypes)]
        updater = mx.get_updater(make())
        for _ in range(2):
            gradients = [rng.standard_normal(s).astype(d) for s, d in zip(shapes[:4], dtypes)]
            for shape in tables:
                indices = rng.zipf(1.3, 20_000) % shape[0]
                indices[:7_000] = 5
                values = rng.standard_normal((20_000, shape[1])).astype("f4")
                gradients.append(RowTensor(indices, values, shape))
            updater(list(range(6)), gradients, weights)
        found = hashlib.sha256()
        for x in (*weights, *(x for s in updater.states.values() for x in flat(s))):
            found.update(x.tobytes())
        return found.hexdigest()

    def flat(state):
        return [state] if isinstance(state, np.ndarray) else [y for x in state for y in flat(x)]

    more = dict(wd=0.1, clip_gradient=0.5, multi_precision=True)
    digests = [
        digest(lambda: mx.Adam(0.1, compat="1.9", **more)),
        digest(lambda: mx.Adam(0.1, **more)),
        digest(lambda: mx.Adam(0.1, use_fused_step=False, **more)),
        digest(lambda: mx.AdamW(0.1, **more)),
        digest(lambda: mx.AdamW(0.1, use_fused_step=False, **more)),
    ]
    w, m, v = (np.ones(140_000, "f4") for _ in range(3))
    new = ops.adam_update(w, np.linspace(-1, 1, 140_000).astype("f4"), m, v, lr=0.1)
    print(*digests, *(hashlib.sha256(x.tobytes()).hexdigest() for x in (new, m, v)))
"""


def test_bits_do_not_depend_on_threads() -> None:
    """With one, two and three threads, and with a budget of two of them."""
    budget = "    from fusestep import set_num_threads\n    set_num_threads(2)\n" + BITS
    one, *others = [output_of(BITS, NUMBA_NUM_THREADS=str(n)).split() for n in (1, 2, 3)]
    assert len(set(one)) == 8
    assert others == [one, one]
    assert output_of(budget, NUMBA_NUM_THREADS="3").split() == one


def everything(
    h: Hyper, way: str, aggregate: Any, rng: np.random.Generator, lr_scheduler: Any = None
) -> list[np.ndarray]:
    """All arrays of a few steps of unequal weights, some calls without some of them."""
    shapes = [(3, 5), (1003,), (), (40, 3), (7,), (12, 2)]
    dtypes = [F32, F16, F64, F32, BF16, F32]
    opt = make(h, multi_precision=True, aggregate_num=aggregate, lr_scheduler=lr_scheduler)
    updater = mx.get_updater(opt)
    weights = [normal(rng, x, dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
    for part in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [0], [4, 0, 2, 3]):
        given = [
            some_rows(rng, shapes[i], dtypes[i])
            if shapes[i][1:] == (3,)
            else normal(rng, shapes[i], dtypes[i])
            for i in part
        ]
        if way == "lists":
            updater(part, given, [weights[i] for i in part])
        else:
            for i, g in zip(part, given, strict=True):
                updater(i, g, weights[i])
    return [*weights, *(x for i in range(6) for x in leaves(updater.states[i]))]


def leaves(state: Any) -> list[np.ndarray]:
    """The arrays of a state."""
    return [state] if isinstance(state, np.ndarray) else [y for x in state for y in leaves(x)]


@pytest.mark.parametrize("kind", [*KINDS, *(kind for kind in ROWS if "lazy" in kind)])
@pytest.mark.parametrize("aggregate", [None, 1, 2, 4, np.inf])
def test_bits_do_not_depend_on_aggregation(aggregate: Any, kind: str) -> None:
    h = merged((KINDS | ROWS)[kind], OPTIONS["all"])
    alone = everything(h, "alone", None, np.random.default_rng(20))
    for way in ("lists", "alone"):
        found = everything(h, way, aggregate, np.random.default_rng(20))
        for k, (x, y) in enumerate(zip(found, alone, strict=True)):
            assert_same_bits(x, y, f"{way}, array {k}")


@pytest.mark.parametrize("compat", ["1.9", "2.0"])
def test_bits_do_not_depend_on_aggregation_with_a_schedule(compat: str) -> None:
    """In a call too, every weight has the rate of the count that was reached with it."""
    h = Hyper(compat=compat)
    alone = everything(h, "alone", None, np.random.default_rng(21), scheduler("poly")[0])
    found = everything(h, "lists", np.inf, np.random.default_rng(21), scheduler("poly")[0])
    for k, (x, y) in enumerate(zip(found, alone, strict=True)):
        assert_same_bits(x, y, f"array {k}")


@pytest.mark.parametrize("dump_optimizer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_states_go_on_with_equal_bits(kind: str, dump_optimizer: bool) -> None:
    """Counters are part of the states, so the bias correction goes on where it was."""
    results = []
    for interrupted in (False, True):
        rng = np.random.default_rng(22)
        h = merged(KINDS[kind], OPTIONS["all"])
        weights = [normal(rng, (5, 3), F32), normal(rng, 8, F16)]
        updater = mx.get_updater(make(h, multi_precision=True))
        for k, part in enumerate(([0, 1], [0], [0], [1, 0])):
            if interrupted and k == 2:
                saved = updater.get_states(dump_optimizer)
                assert isinstance(saved, bytes)
                updater = mx.get_updater(make(h, multi_precision=True))
                updater.set_states(saved)
            g = [normal(rng, weights[i].shape, weights[i].dtype) for i in part]
            updater(part, g, [weights[i] for i in part])
        assert updater.optimizer._index_update_count == {0: 4, 1: 2}
        assert updater.optimizer.num_update == 4
        results.append([*weights, *leaves([updater.states[0], updater.states[1]])])
    for x, y in zip(*results, strict=True):
        assert_same_bits(x, y)
