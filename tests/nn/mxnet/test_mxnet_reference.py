"""MXNet's optimizers and operator against the float64 reference, beyond what was recorded.

Every step of the reference starts from what the library had before it, and carries the bounds of
float32's or float64's errors. Both count for themselves.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import reference_mxnet
from fusestep import ops
from fusestep.nn import RowTensor
from fusestep.nn import mxnet as mx
from helpers import BF16, arrays_of, assert_same_arrays, assert_same_bits, unchanged
from mxnet_options import F16, F32, F64, S
from reference_mxnet import Hyper, Schedule
from roundings import Rounded, assert_rounded

# Of the bound: the reference itself is as far off in float64, and sums of rows have any order.
ALLOWED = 2.0
# Types of weights, and whether there are master copies of them.
STORAGE = {
    "float32": (F32, False), "float64": (F64, False), "float16": (F16, False),
    "float16-master": (F16, True), "bfloat16": (BF16, False), "bfloat16-master": (BF16, True),
}  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (1003,), (17, 9), (3, 0, 2)]
TABLES = [(50, 5), (1003, 3), (11, 2, 3), (13,), (7, 1), (9, 0)]
ADAMW = Hyper(decoupled=True, epsilon=1e-6)
KINDS = {
    "Adam-1.9": Hyper(compat="1.9"), "Adam-2.0": Hyper(), "Adam-unfused": Hyper(fused=False),
    "AdamW": ADAMW, "AdamW-unfused": replace(ADAMW, fused=False),
    "AdamW-nobias": replace(ADAMW, correct_bias=False),
    "AdamW-unfused-nobias": replace(ADAMW, fused=False, correct_bias=False),
}  # fmt: skip
LAZY = {"Adam-1.9-lazy": Hyper(compat="1.9", lazy=True), "Adam-2.0-lazy": Hyper(lazy=True)}
ALL = {"wd": 0.3, "clip_gradient": 0.6, "rescale_grad": 0.7}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wd": {"wd": 0.3},
    "clip": {"clip_gradient": 0.7},
    "rescale": {"rescale_grad": 0.3},
    "all": ALL,
    "no-clip-0": {"wd": 0.3, "clip_gradient": 0.0},
    "no-clip-negative": {"wd": 0.3, "clip_gradient": -0.5},
    "no-gradient": {"wd": 0.3, "rescale_grad": 0.0},  # Adam decays, AdamW skips the step
    "betas": {"beta1": 0.3, "beta2": 0.95, "epsilon": 1e-2},
    "forgetful": {"beta1": 0.0, "beta2": 0.0},
}
# Every option in float32; of other types, whose kernels take long to compile, all in one.
SOME = [(o, s) for s in STORAGE for o in OPTIONS if s == "float32" or o == "all"]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
RATE = 0.01


def close(found: np.ndarray, exact: Rounded, real: Any, label: str) -> None:
    """Every element is within the bounds of its errors; what is not finite is the same."""
    __tracebackhide__ = True
    finite = np.isfinite(exact.value)
    np.testing.assert_array_equal(reference.wide(found)[~finite], exact.value[~finite], label)
    if finite.any():
        value, error = exact.value[finite], exact.error[finite]
        error = np.where(np.isfinite(error), error, np.abs(value))  # what infinity has stopped
        assert_rounded(found[finite], Rounded(value, error), real, ALLOWED, label)


def gradient_of(g: Any) -> Rounded:
    """A gradient as a dense one; sums of rows have the errors of their terms."""
    if not isinstance(g, RowTensor):
        return Rounded(g)
    dense = reference.densify(g.indices, g.values, g.dense_shape)
    times = reference.densify(g.indices, np.ones_like(g.values), g.dense_shape)
    terms = reference.densify(g.indices, np.abs(reference.wide(g.values)), g.dense_shape)
    return Rounded(dense, np.maximum(times - 1, 0) * terms)


def make(h: Hyper, rate: Any = RATE, **others: Any) -> mx.Optimizer:
    """The library's optimizer that has the settings of a reference."""
    names = ("beta1", "beta2", "epsilon", "wd", "rescale_grad", "clip_gradient", "compat")
    options = {name: getattr(h, name) for name in names} | {"use_fused_step": h.fused} | others
    rated = {"lr_scheduler": rate} if callable(rate) else {"learning_rate": rate}
    if h.decoupled:
        return mx.AdamW(**rated, **options, correct_bias=h.correct_bias)
    return mx.Adam(**rated, **options, lazy_update=h.lazy)


class Pair:
    """The library's optimizer beside the reference: ``rates`` are the scheduler of each."""

    def __init__(
        self, h: Hyper, weights: Sequence[np.ndarray], rates: tuple[Any, Any] = (RATE, RATE), *,
        master: bool = False, tables: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.h, self.weights = h, weights
        self.opt = make(h, rates[0], multi_precision=master, **options)
        names, begin = options.get("param_idx2name"), options.get("begin_num_update", 0)
        self.expected = reference_mxnet.Optimizer(h, rates[1], names, **(tables or {}), begin=begin)
        create = self.opt.create_state_multi_precision
        self.states = [create(i, w) for i, w in enumerate(weights)]

    def arrays(self, i: int) -> list[np.ndarray]:
        """The array in which a weight is computed (a master copy or itself), mean, variance."""
        master, *moments = arrays_of([self.states[i]])[-3:]
        return [master, *moments] if moments[1:] else [self.weights[i], master, *moments]

    def update(self, gradients: dict[int, Any]) -> None:
        """The library's step."""
        lists = [[x[i] for i in gradients] for x in (self.weights, self.states)]
        given = list(gradients.values())
        self.opt.update_multi_precision(list(gradients), lists[0], given, lists[1])

    def step(self, gradients: dict[int, Any]) -> None:
        """One call with the gradients by index, whose order is that of the call."""
        before = [[x.copy() for x in self.arrays(i)] for i in range(len(self.weights))]
        numbers = {i: self.expected.advance(i) for i in gradients}
        with unchanged(list(gradients.values())):
            self.update(gradients)
        for i, old in enumerate(before):
            if i in gradients:
                self.compare(i, old, gradients[i], numbers[i])
            else:
                assert_same_arrays(self.arrays(i), old, f"an array of {i}, which took no part")
        assert self.opt.num_update == self.expected.num_update

    def compare(self, i: int, old: list[np.ndarray], g: Any, numbers: dict[str, float]) -> None:
        """A weight after a call, in which it had the gradient `g`."""
        assert self.opt._index_update_count[i] == self.expected.counts[i]
        assert self.opt._get_lr(i) == pytest.approx(self.expected.lr(i), rel=1e-12)
        assert self.opt._get_wd(i) == pytest.approx(self.expected.wd(i), rel=1e-12)
        weight, found = self.weights[i], self.arrays(i)
        real = np.float64 if weight.dtype == F64 else np.float32
        assert [x.dtype for x in found[1:]] == [real, real]
        if found[0] is not weight:
            assert_same_bits(weight, found[0].astype(weight.dtype))
        dense, stepped = gradient_of(g), np.ones(weight.shape, bool)
        if self.h.lazy and isinstance(g, RowTensor):
            stepped[...] = False
            stepped[g.indices] = True
        w, m, v = (Rounded(x[stepped]) for x in old)
        chosen = Rounded(dense.value[stepped], dense.error[stepped])
        exact = reference_mxnet.step(self.h, w, chosen, m, v, **numbers, real=real)
        for x, before, expected in zip(found, old, exact, strict=True):
            assert_same_bits(x[~stepped], before[~stepped], f"rows of {i} that do not occur")
            close(x[stepped], expected, real, f"weight {i}, {weight.dtype} {weight.shape}: ")


def normal(rng: np.random.Generator, shape: Any, dtype: Any, scale: float = 1.0) -> np.ndarray:
    """An array, also of no axes."""
    return np.asarray(scale * rng.standard_normal(shape)).astype(dtype)


def some_rows(rng: np.random.Generator, shape: Any, dtype: Any, n: int | None = None) -> RowTensor:
    """Some rows, not sorted, some of them twice or more often."""
    n = 2 + shape[0] // 2 if n is None else n
    indices = rng.integers(0, max(1, shape[0] * 2 // 3), n)
    return RowTensor(indices, normal(rng, (n, *shape[1:]), dtype), shape)


@pytest.mark.parametrize(("option", "storage"), SOME)
@EACH_KIND
def test_dense(kind: str, option: str, storage: str) -> None:
    """Weights of many sizes in a call, four steps, some of them without some weights."""
    h = replace(KINDS[kind], **OPTIONS[option])
    if h.decoupled and option == "no-gradient":
        return
    dtype, master = STORAGE[storage]
    rng = np.random.default_rng(1)
    pair = Pair(h, [normal(rng, shape, dtype) for shape in SHAPES], master=master)
    for chosen in (range(7), range(7), (4, 0, 5), range(7)):
        pair.step({i: normal(rng, SHAPES[i], dtype) for i in chosen})


# Beyond float32 one version is lazy and the other is not.
SOME_ROWS = [
    (kind, option, storage)
    for kind in (*LAZY, *KINDS)
    for option, storage in SOME
    if option in ("plain", "all", "betas") and "nobias" not in kind
    if storage == "float32" or kind in ("Adam-1.9-lazy", "Adam-2.0", "Adam-unfused")
]


@pytest.mark.parametrize(("kind", "option", "storage"), SOME_ROWS)
def test_rows(kind: str, option: str, storage: str) -> None:
    """Unsorted and repeated ids, an empty gradient, a dense one beside and in between."""
    dtype, master = STORAGE[storage]
    rng = np.random.default_rng(6)
    shapes = [*TABLES, (4, 3)]
    h = replace((LAZY | KINDS)[kind], **OPTIONS[option])
    pair = Pair(h, [normal(rng, shape, dtype) for shape in shapes], master=master)
    for n in (None, 1, 0, None):
        given: dict[int, Any] = {i: some_rows(rng, x, dtype, n) for i, x in enumerate(TABLES)}
        pair.step(given | {len(TABLES): normal(rng, (4, 3), dtype)})
    pair.step({0: normal(rng, TABLES[0], dtype)})
    pair.step({0: some_rows(rng, TABLES[0], dtype)})


@pytest.mark.parametrize("storage", STORAGE)
@EACH_KIND
def test_gradients_that_are_not_finite(kind: str, storage: str) -> None:
    """Each spoils its own element; clipped, infinities are the bound."""
    dtype, master = STORAGE[storage]
    # Without options and with all: the kernels of other tests.
    for options, spoilt in (({}, [1, 4, 6]), (ALL, [6])):
        rng = np.random.default_rng(4)
        pair = Pair(replace(KINDS[kind], **options), [normal(rng, 9, dtype)], master=master)
        g = normal(rng, 9, dtype)
        g[[1, 4, 6]] = np.inf, -np.inf, np.nan
        pair.step({0: g})
        for _ in range(2):
            bad = [np.flatnonzero(~np.isfinite(reference.wide(x))) for x in pair.arrays(0)]
            assert set(np.concatenate(bad)) <= set(spoilt)
            assert np.flatnonzero(np.isnan(reference.wide(pair.weights[0]))).tolist() == spoilt
            pair.update({0: normal(rng, 9, dtype)})


SIZES = [*10.0 ** np.arange(-22, 19)]


@pytest.mark.parametrize("gradients", [
    [SIZES, SIZES],
    [(1e20, 1e30, 1.0), (1.0, 1.0, 1e20), (1e-3, 1e20, 1e-3)],  # infinite variance stops an element
])  # fmt: skip
@EACH_KIND
def test_gradients_of_all_sizes(kind: str, gradients: Any) -> None:
    """Squares that are subnormal or overflow; ``(1 - beta2)*g*g`` may be finite with g*g not."""
    pair = Pair(KINDS[kind], [np.ones(1, F32) for _ in gradients[0]])
    for given in gradients:
        pair.step({i: np.full(1, x, F32) for i, x in enumerate(given)})
    assert np.isfinite(pair.weights).all()


# Counts, rates, multipliers

WARM = {"warmup_steps": 4, "warmup_begin_lr": 0.02}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "factor": ("FactorScheduler", {"step": 2, "factor": 0.5, "base_lr": 0.1}),
    "stopped": ("FactorScheduler", {"step": 1, "factor": 0.1, "stop_factor_lr": 3e-3, **WARM,
                                    "base_lr": 0.2}),
    "multi": ("MultiFactorScheduler", {"step": [2, 9], "factor": 0.3, "base_lr": 0.1, **WARM,
                                       "warmup_mode": "constant"}),
    "poly": ("PolyScheduler", {"max_update": 11, "base_lr": 0.1, "pwr": 3}),
    "cosine": ("CosineScheduler", {"max_update": 12, "base_lr": 0.1, "final_lr": 0.01, **WARM}),
}  # fmt: skip


def schedules(key: str) -> tuple[Any, Schedule]:
    """The library's and the reference's."""
    name, arguments = SCHEDULES[key]
    return getattr(S, name)(**arguments), reference_mxnet.schedule(name, **arguments)


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("key", SCHEDULES)
@EACH_KIND
def test_uneven_counts(key: str, kind: str, begin: int) -> None:
    """The schedule goes by the largest count, the bias correction by each weight's own."""
    rng = np.random.default_rng(12)
    weights = [normal(rng, 5, F32) for _ in range(3)]
    pair = Pair(KINDS[kind], weights, schedules(key), begin_num_update=begin)
    for taking_part in ([0, 1, 2], [0], [0], [1, 0], [0, 1, 2], [2], [2, 0], [1]):
        pair.step({i: normal(rng, 5, F32) for i in taking_part})
    assert pair.expected.counts == {0: 6 + begin, 1: 4 + begin, 2: 4 + begin}


@pytest.mark.parametrize("compat", ["1.9", "2.0"])
def test_multipliers(compat: str) -> None:
    """A factor of a parameter goes before that of an index, and that before one of a name."""
    rng = np.random.default_rng(14)
    names = dict(enumerate(["a_weight", "a_bias", "b_gamma", "b_beta", "c_weight"]))
    held = {5: SimpleNamespace(lr_mult=0.5, wd_mult=3.0)}
    lr_mult = {"a_weight": 3.0, "b_gamma": 0.0, 3: 2.0, "b_beta": 7.0}
    wd_mult = {"a_weight": 0.5, 0: 4.0, "b_beta": 2.0}
    pair = Pair(
        Hyper(compat=compat, wd=0.2), [normal(rng, 5, F32) for _ in range(7)],
        tables={"lr_mult": {**lr_mult, 5: 0.5}, "wd_mult": {**wd_mult, 5: 3.0}},
        param_idx2name=names, param_dict=held)  # fmt: skip
    pair.opt.set_lr_mult({**lr_mult, 5: 11.0})
    pair.opt.set_wd_mult({**wd_mult, 5: 12.0})
    for rate in (RATE, 0.5, 0.02):
        pair.opt.set_learning_rate(rate)
        pair.expected._rate = rate
        pair.step({i: normal(rng, 5, F32) for i in range(7)})


# The operator


@pytest.mark.parametrize(
    ("option", "dtype"),
    [(o, d) for d in (F32, F64, F16, BF16)
     for o in ("plain", "wd", "all", "betas", "no-clip-0", "no-clip-negative")
     if d == F32 or o == "all"],
    ids=str)  # fmt: skip
@pytest.mark.parametrize("compat", ["1.9", "2.0"])
@pytest.mark.parametrize("grad", ["dense", "lazy", "standard"])
def test_adam_update(grad: str, compat: str, option: str, dtype: np.dtype) -> None:
    """No bias correction; the moments change in place, the weight only if it is `out`. Wherever the
    result goes, it has the same bits."""
    rng = np.random.default_rng(17)
    h = Hyper(compat=compat, lazy=grad == "lazy", **OPTIONS[option])
    names = ("wd", "beta1", "beta2", "epsilon", "rescale_grad", "compat", "clip_gradient")
    options = {name: getattr(h, name) for name in names if getattr(h, name) is not None}
    real = np.float64 if dtype == F64 else np.float32
    for k, shape in enumerate(SHAPES if grad == "dense" else TABLES):
        weight, mean = normal(rng, shape, dtype), normal(rng, shape, dtype, 0.1)
        var = np.abs(normal(rng, shape, dtype, 0.1), out=np.empty(shape, dtype))
        g = (normal if grad == "dense" else some_rows)(rng, shape, dtype)
        stepped = np.ones(shape, bool)
        if h.lazy:
            stepped[...] = False
            stepped[g.indices] = True
        dense = gradient_of(g)
        for out in (None, weight, np.full_like(weight, 7.0)):
            old = [x.copy() for x in (weight, mean, var)]
            chosen = Rounded(dense.value[stepped], dense.error[stepped])
            w, m, v = (Rounded(x[stepped]) for x in old)
            exact = reference_mxnet.step(h, w, chosen, m, v, lr=RATE, wd=h.wd, real=real)
            with unchanged(g, *([] if out is weight else [weight])):
                result = ops.adam_update(
                    weight, g, mean, var, out, lr=RATE, lazy_update=h.lazy, **options
                )
            assert (result.dtype, result.shape) == (dtype, shape)
            assert result is out or out is None
            assert (out is weight) or not np.shares_memory(result, weight)
            for x, before, expected in zip((result, mean, var), old, exact, strict=True):
                assert_same_bits(x[~stepped], before[~stepped])
                close(x[stepped], expected, real, f"shape {k}: ")
            w, m, v = old
            ops.adam_update(w, g, m, v, w, lr=RATE, lazy_update=h.lazy, **options)
            assert_same_arrays([result, mean, var], old, "in place")


# Equal bits; for any number of threads they are a case of kernels/thread_cases.py


def everything(h: Hyper, way: str, aggregate: Any, rate: Any) -> list[np.ndarray]:
    """All arrays of a few steps of unequal weights, some calls without some of them."""
    rng = np.random.default_rng(20)
    shapes = [(3, 5), (1003,), (), (40, 3), (7,), (12, 2)]
    dtypes = [F32, F16, F64, F32, BF16, F32]
    updater = mx.get_updater(make(h, rate, multi_precision=True, aggregate_num=aggregate))
    weights = [normal(rng, x, dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
    for part in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [0], [4, 0, 2, 3]):
        grads = [(some_rows if i == 3 else normal)(rng, shapes[i], dtypes[i]) for i in part]
        if way == "lists":
            updater(part, grads, [weights[i] for i in part])
        else:
            for i, g in zip(part, grads, strict=True):
                updater(i, g, weights[i])
    return arrays_of([weights, [updater.states[i] for i in range(6)]])


@pytest.mark.parametrize("kind", [*KINDS, *LAZY])
def test_bits_do_not_depend_on_aggregation(kind: str) -> None:
    """Every weight has the scheduled rate of the count that was reached with it."""
    h = replace((KINDS | LAZY)[kind], **ALL)
    for rate in (RATE, schedules("poly")[0]):
        alone = everything(h, "alone", 1, rate)
        for way, aggregate in (("lists", 0), ("lists", 1), ("lists", 2), ("lists", 4),
                               ("lists", np.inf), ("alone", np.inf)):  # fmt: skip
            assert_same_arrays(everything(h, way, aggregate, rate), alone, f"{way} {aggregate}")
