"""MXNet's optimizers: construction, registry, multipliers, counts, weights and states, errors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusestep.nn import mxnet as mx
from fusestep.ops import RowTensor

from helpers import BF16, STORAGE_DTYPES, assert_same_bits, refused, unchanged

F32 = np.dtype(np.float32)
CLASSES = (mx.Adam, mx.AdamW)
KINDS: dict[str, Callable[..., Any]] = {
    "Adam": mx.Adam,
    "Adam 1.9": partial(mx.Adam, compat="1.9"),
    "Adam unfused": partial(mx.Adam, use_fused_step=False),
    "AdamW": mx.AdamW,
}
EACH_CLASS = pytest.mark.parametrize("cls", [*CLASSES, mx.Optimizer], ids=lambda c: c.__name__)
EACH_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def rows(indices: Any, shape: tuple[int, ...] = (4, 3), dtype: Any = F32) -> RowTensor:
    values = np.random.default_rng(7).standard_normal((len(indices), *shape[1:])).astype(dtype)
    return RowTensor(np.array(indices, np.int64), values, shape)


def random(*shape: int, seed: int = 1, dtype: Any = F32) -> np.ndarray:
    return np.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def step(opt: mx.Optimizer, w: Any, grads: Any, index: Any = 0) -> Any:
    """Updates of one weight; its state."""
    state = opt.create_state_multi_precision(index, w)
    for g in grads:
        opt.update_multi_precision(index, w, g, state)
    return state


def counts_of(opt: mx.Optimizer) -> tuple[int, dict[Any, int]]:
    return opt.num_update, dict(opt._index_update_count)


# Construction


BASE = [
    "rescale_grad", "param_idx2name", "wd", "clip_gradient", "learning_rate", "lr_scheduler",
    "sym", "begin_num_update", "multi_precision", "param_dict", "aggregate_num", "use_fused_step",
]  # fmt: skip
PUBLISHED = {
    mx.Optimizer: BASE,
    mx.Adam: ["learning_rate", "beta1", "beta2", "epsilon", "lazy_update", "use_fused_step"],
    mx.AdamW: ["learning_rate", "beta1", "beta2", "epsilon", "correct_bias", "use_fused_step"],
}


@EACH_CLASS
def test_published_order(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == PUBLISHED[cls]


def test_defaults() -> None:
    base = {
        "rescale_grad": 1.0, "wd": 0.0, "clip_gradient": None, "learning_rate": 0.01,
        "lr_scheduler": None, "begin_num_update": 0, "num_update": 0, "multi_precision": False,
        "use_fused_step": False, "aggregate_num": 1, "lr_mult": {}, "wd_mult": {}, "idx2name": {},
    }  # fmt: skip
    adam = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "use_fused_step": True}
    adam |= {"aggregate_num": np.inf}
    expected: list[tuple[mx.Optimizer, dict[str, Any]]] = [
        (mx.Optimizer(), base),
        (mx.Adam(), {**base, **adam, "epsilon": 1e-8, "lazy_update": False}),
        (mx.Adam(compat="1.9"), {**base, **adam, "epsilon": 1e-8, "lazy_update": True}),
        (mx.AdamW(), {**base, **adam, "epsilon": 1e-6, "correct_bias": True}),
        (mx.Optimizer(compat="1.9"), {**base, "aggregate_num": 0}),
    ]
    for opt, values in expected:
        assert {name: getattr(opt, name) for name in values} == values


BAD: list[tuple[dict[str, Any], Any, str]] = [
    ({"rescale_grad": "1"}, TypeError, "rescale_grad has a wrong type: expected a number, got str"),
    ({"wd": -0.1}, ValueError, "wd is out of range: expected at least 0, got -0.1"),
    ({"wd": np.nan}, ValueError, "wd is not finite"),
    ({"wd": True}, TypeError, "wd has a wrong type: expected a number, got bool"),
    ({"clip_gradient": np.inf}, ValueError, "clip_gradient is not finite"),
    ({"clip_gradient": np.ones(2)}, ValueError, "clip_gradient has a wrong shape"),
    ({"lr_scheduler": 0.1}, TypeError, "lr_scheduler has a wrong type: .*callable, got 0.1"),
    ({"sym": object()}, TypeError, "sym is not supported: expected None, got object; .*_mult"),
    ({"begin_num_update": -1}, ValueError, "begin_num_update is out of range"),
    ({"begin_num_update": 1.0}, TypeError, "begin_num_update has a wrong type: expected an int"),
    ({"multi_precision": 1}, TypeError, "multi_precision has a wrong type: expected a bool, got i"),
    ({"param_idx2name": ["w"]}, TypeError, "param_idx2name has a wrong type: .*a dict of names"),
    ({"param_idx2name": {0: 1}}, TypeError, "param_idx2name has a wrong type"),
    ({"aggregate_num": -1}, ValueError, "aggregate_num is out of range: expected at least 0"),
    ({"aggregate_num": 2.5}, TypeError, "aggregate_num has a wrong type"),
    ({"use_fused_step": 1}, TypeError, "use_fused_step has a wrong type: expected a bool"),
    ({"compat": "1.8"}, ValueError, "compat is unknown: expected '2.0' or '1.9', got '1.8'"),
    ({"compat": 2.0}, ValueError, "compat is unknown"),
    ({"clip_grad": 1}, KeyError, "argument 'clip_grad' is unknown: .*did you mean 'clip_gradient'"),
    ({"lr": 0.1}, TypeError, "argument 'lr' is unknown: .*did you mean 'learning_rate'"),
    ({"momentum": 0.9}, TypeError, "argument 'momentum' is unknown: expected one of .*rescale_gr"),
]  # fmt: skip
BAD_OF_ADAM: list[tuple[dict[str, Any], Any, str]] = [
    ({"beta1": 1.0}, ValueError, "beta1 is out of range: .*below 1 in float32, got 1.0"),
    ({"beta2": 1 - 1e-9}, ValueError, "beta2 is out of range"),
    ({"beta1": -0.1}, ValueError, "beta1 is out of range"),
    ({"beta2": "0.9"}, TypeError, "beta2 has a wrong type"),
    ({"epsilon": -1e-8}, ValueError, "epsilon is out of range: expected at least 0"),
    ({"epsilon": 1e-46}, ValueError, "epsilon is 0 in float32: expected .*or 0 itself, got 1e-46"),
    ({"eps": 1e-8}, TypeError, "argument 'eps' is unknown: .*did you mean 'epsilon'"),
    ({"betas": (0.9, 0.99)}, TypeError, "argument 'betas' is unknown: .*did you mean 'beta1'"),
]


@EACH_CLASS
@pytest.mark.parametrize(("given", "error", "text"), BAD)
def test_bad_arguments(cls: type, given: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{cls.__name__}: {text}"):
        cls(**given)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(("given", "error", "text"), BAD_OF_ADAM)
def test_bad_arguments_of_adam(cls: type, given: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{cls.__name__}: .*{text}"):
        cls(**given)
    with pytest.raises(error, match=text):
        mx.create(cls.__name__, **given)


def test_combinations_that_do_not_exist() -> None:
    for bad, error, text in (
        ({"lazy_update": True, "use_fused_step": False}, AssertionError, "needs use_fused_step"),
        ({"compat": "1.9", "use_fused_step": False}, ValueError, "is not in MXNet 1.9"),
        ({"lazy_update": 1}, TypeError, "lazy_update has a wrong type"),
    ):
        with pytest.raises(error, match=f"^Adam: .*{text}"):
            mx.Adam(**bad)
    with pytest.raises(
        ValueError, match=r"^AdamW: compat has no AdamW: expected '2\.0', got '1\.9"
    ):
        mx.AdamW(compat="1.9")
    with pytest.raises(TypeError, match="argument 'lazy_update' is unknown"):
        mx.AdamW(lazy_update=True)


ASSIGNED = {
    "rescale_grad": "x", "wd": -1.0, "clip_gradient": np.nan, "lr": -1.0, "beta1": 1.0,
    "epsilon": None, "multi_precision": 1, "aggregate_num": 0.5, "lr_scheduler": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", ASSIGNED)
def test_assigned_attributes_are_checked(name: str) -> None:
    opt = mx.Adam(learning_rate=0.5, wd=0.1)
    before = getattr(opt, name)
    with pytest.raises((TypeError, ValueError), match=f"^Adam: {name} "):
        setattr(opt, name, ASSIGNED[name])
    assert getattr(opt, name) == before


def test_the_callers_dicts_are_left_alone() -> None:
    names, parameters, factors = (
        {0: "a_bias"},
        {1: SimpleNamespace(lr_mult=2.0, wd_mult=1.0)},
        {0: 3},
    )
    opt = mx.Adam(param_idx2name=names, param_dict=parameters, compat="1.9")
    opt.set_lr_mult(factors)
    opt.set_wd_mult(factors)
    assert (names, list(parameters), factors) == ({0: "a_bias"}, [1], {0: 3})
    names[1] = "b"
    factors[0] = 7
    assert (opt.idx2name, opt.lr_mult) == ({0: "a_bias"}, {0: 3.0})


# Rates, multipliers, counts


def test_multipliers() -> None:
    """param_dict, else the index, else the name, else 1; a table is replaced as a whole."""
    held = {3: SimpleNamespace(lr_mult=7.0, wd_mult=0.0)}
    opt = mx.Adam(0.5, wd=0.1, param_idx2name={0: "a", 1: "b", 3: "d"}, param_dict=held)
    opt.set_lr_mult({0: 2, "a": 3.0, "b": np.float32(5), 3: 9.0})
    assert [opt._get_lr(i) for i in (0, 1, 2, 3, "b")] == [1.0, 2.5, 0.5, 3.5, 2.5]
    opt.set_wd_mult({"b": 0})
    assert [opt._get_wd(i) for i in (0, 1, 2, 3)] == [0.1, 0.0, 0.1, 0.0]
    opt.set_lr_mult({1: 2})
    assert opt._get_lrs([0, np.int64(1), 2]) == [0.5, 1.0, 0.5]
    held[3].lr_mult = 0.5
    assert opt._get_lr(3) == 0.25


def test_names_without_decay_are_of_19() -> None:
    names = dict(enumerate(("fc_weight", "fc_bias", "bn_gamma", "bn_beta", "w")))
    found = {}
    for compat in ("1.9", "2.0"):
        opt = mx.Optimizer(wd=0.5, param_idx2name=names, compat=compat)
        found[compat] = [opt._get_wd(i) for i in range(6)]
    assert found == {"1.9": [0.5, 0.0, 0.5, 0.0, 0.0, 0.5], "2.0": [0.5] * 6}
    opt = mx.Optimizer(wd=0.5, param_idx2name=names, compat="1.9")
    opt.set_wd_mult({"fc_bias": 2, "fc_weight": 3})
    opt.set_wd_mult({"bn_beta": 1})  # a new table: fc_bias is exempt again
    assert [opt._get_wd(i) for i in range(5)] == [0.5, 0.0, 0.5, 0.5, 0.0]


NAMES = {0: "fc1_weight", 1: "fc1_bias"}


@pytest.mark.parametrize("aggregate_num", [1, 4])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("setter", ["set_lr_mult", "set_wd_mult"])
@pytest.mark.parametrize(
    ("key", "names", "hint"),
    [
        ("fc1_wieght", NAMES, "; did you mean 'fc1_weight'[?]"),
        ("other", NAMES, ""),
        ("fc1_weight", None, ""),
        ("fc1_weight", {}, ""),
        ("0", NAMES, ""),
    ],
)
def test_factors_for_no_weight(
    key: str, names: Any, hint: str, setter: str, name: str, aggregate_num: int
) -> None:
    opt = getattr(mx, name)(param_idx2name=names, wd=0.5, aggregate_num=aggregate_num)
    updater, g = mx.Updater(opt), [np.ones(3, np.float32)] * 2
    w = [np.ones(3, np.float32), np.ones(3, np.float32)]
    getattr(opt, setter)({key: 2.0})
    text = rf"^{name}: {setter[4:]}\['{key}'\] is a factor for no weight: expected .*{key}{hint}$"
    for call in (lambda: updater([0, 1], g, w), lambda: updater(0, g[0], w[0])):
        with pytest.raises(ValueError, match=text):
            call()
        assert (w[0] == 1).all() and (w[1] == 1).all()
        assert (updater.states, opt.num_update, opt._index_update_count) == ({}, 0, {})
    # Names may become known later, and factors may be taken back.
    opt.idx2name = {0: key, 1: "another"}
    updater([0, 1], g, w)
    rates = [(opt._get_lr(i), opt._get_wd(i)) for i in (0, 1)]
    assert rates[0] != rates[1]
    opt.idx2name = {}
    getattr(opt, setter)({})
    updater([0, 1], g, w)


@pytest.mark.parametrize("setter", ["set_lr_mult", "set_wd_mult"])
def test_factors_for_what_may_come_later(setter: str) -> None:
    """Indices that have not been updated, strs among them where strs are indices."""
    held = SimpleNamespace(lr_mult=2.0, wd_mult=2.0)
    for index, key, options in (
        (0, 7, {}), ("a", "b", {}), (0, 7, {"param_idx2name": NAMES}), ("a", "b", {"wd": 1.0}),
        (0, "b", {"param_dict": {"b": held}}), (0, "b", {"param_idx2name": {"b": "x"}}),
        ([0, "a"], "b", {}),
    ):  # fmt: skip
        opt, many = mx.Adam(**options), 2 if isinstance(index, list) else 1
        getattr(opt, setter)({key: 0.0})
        g, w = ([np.ones(3, np.float32) for _ in range(many)] for _ in "gw")
        mx.Updater(opt)(index, *(x if many > 1 else x[0] for x in (g, w)))
        assert opt.num_update == 1


def test_names_without_decay_may_change() -> None:
    """In 1.9 the table of factors has names of weights that do not decay by default."""
    opt = mx.Adam(param_idx2name=NAMES, compat="1.9", wd=0.5)
    assert opt.wd_mult == {"fc1_bias": 0.0}
    opt.idx2name = {0: "fc2_weight"}
    updater = mx.Updater(opt)
    updater(0, np.ones(3), np.ones(3))
    opt.set_wd_mult({"fc1_weight": 0.0})
    with pytest.raises(ValueError, match="fc1_weight"):
        updater(0, np.ones(3), np.ones(3))


def test_factors_of_a_users_optimizer() -> None:
    class Descent(mx.Optimizer):
        def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
            self._update_count(indices)
            for index, weight, grad in zip(indices, weights, grads, strict=True):
                weight -= self._get_lr(index) * grad

    opt, w = Descent(param_idx2name=NAMES), np.ones(3)
    opt.set_lr_mult({"fc2_weight": 0.0})
    with pytest.raises(ValueError, match=r"Descent: lr_mult\['fc2_weight'\] is a factor for no w"):
        mx.Updater(opt)(0, np.ones(3), w)
    assert (w == 1).all() and opt.num_update == 0


@pytest.mark.parametrize("setter", ["set_lr_mult", "set_wd_mult"])
@pytest.mark.parametrize(
    "bad", [{0: -1.0}, {0: "2"}, {0: np.nan}, {0: None}, None, [(0, 1.0)], 2.0]
)
def test_bad_multipliers(setter: str, bad: Any) -> None:
    opt = mx.Adam()
    getattr(opt, setter)({0: 2.0})
    name = setter.removeprefix("set_")
    with pytest.raises((TypeError, ValueError), match=rf"^Adam: {name}(\[0\])? "):
        getattr(opt, setter)(bad)
    assert getattr(opt, name) == {0: 2.0}


def test_counts() -> None:
    """One for each index; num_update is the largest."""
    opt = mx.Adam(begin_num_update=5)
    assert counts_of(opt) == (5, {})
    a, b = ones(2), ones(2)
    step(opt, a, [ones(2)] * 3, "a")
    step(opt, b, [ones(2), None], "b")
    assert counts_of(opt) == (8, {"a": 8, "b": 6})
    opt._update_count(["a", "c"])
    opt._update_count("c")
    assert counts_of(opt) == (9, {"a": 9, "b": 6, "c": 7})


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_adamw_without_a_scale_counts_nothing(scale: float) -> None:
    opt, w = mx.AdamW(), ones(2)
    opt.rescale_grad = scale
    with unchanged(w):
        step(opt, w, [ones(2)])
    assert counts_of(opt) == (0, {})


def test_set_learning_rate() -> None:
    opt, w, expected = mx.Adam(0.5), ones(2), ones(2)
    state = step(opt, w, [ones(2)])
    opt.set_learning_rate(0.25)
    opt.update(0, w, ones(2), state)
    assert (opt.learning_rate, opt.lr) == (0.25, 0.25)
    step(mx.Adam(lr_scheduler=lambda n: 0.5 / n), expected, [ones(2)] * 2)
    assert_same_bits(w, expected)
    for bad in (-0.1, "x", None, np.nan):
        with pytest.raises((TypeError, ValueError)):
            opt.set_learning_rate(bad)
    assert opt.learning_rate == 0.25


# What an update takes


@EACH_KIND
def test_one_index_lists_and_tuples(make: Callable[..., Any]) -> None:
    found = []
    for form in (None, list, tuple):
        opt, weights = make(wd=0.1), [random(3), random(4, 3)]
        states = [opt.create_state(i, w) for i, w in enumerate(weights)]
        for seed in range(3):
            lists = ([0, "b"], weights, [random(3, seed=seed), random(4, 3, seed=seed)], states)
            given = copy.copy(lists)
            for one in [lists] if form else zip(*lists, strict=True):
                opt.update(*(form(values) for values in one) if form else one)
            assert all(a is b for a, b in zip(lists, given, strict=True))
        found.append([*weights, *states[0], *states[1]])
        assert counts_of(opt) == (3, {0: 3, "b": 3})
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_same_bits(a, b)


@EACH_KIND
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (2, 3, 4)], ids=str)
def test_shapes_and_dtypes(make: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    w, flat = random(*shape, dtype=dtype), random(*shape, dtype=dtype).reshape(-1)
    grads = [random(*shape, seed=s, dtype=dtype) for s in (2, 3)]
    for multi_precision in (False, True):
        state = step(make(multi_precision=multi_precision), w, grads)
        step(make(multi_precision=multi_precision), flat, [g.reshape(-1) for g in grads])
        assert_same_bits(w.reshape(-1), flat)
        if multi_precision and dtype.itemsize == 2:
            assert_same_bits(w, state[0].astype(dtype))
            state = state[1]
        assert {x.dtype for x in state} == {np.dtype(np.float64) if dtype.itemsize == 8 else F32}


@EACH_KIND
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_16_bit_weights_are_computed_in_float32(make: Any, dtype: Any) -> None:
    """One step is that of the float32 weight, rounded once; MXNet's epsilon becomes 0."""
    w, wide = random(50, dtype=dtype), random(50, dtype=dtype).astype(np.float32)
    g = random(50, seed=2, dtype=dtype) * np.array(1e-3, dtype)
    g[:10] = 0
    opt, other = make(0.1, wd=0.01), make(0.1, wd=0.01)
    for a, b in zip(step(opt, w, [g]), step(other, wide, [g.astype(np.float32)]), strict=True):
        assert_same_bits(a, b)
    assert_same_bits(w, wide.astype(dtype))
    assert np.isfinite(w.astype(np.float32)).all()


@EACH_KIND
def test_the_gradient_is_only_read(make: Any) -> None:
    """Of any layout; MXNet's composed operations scale it in place."""
    update = partial(make, wd=0.1, rescale_grad=0.5, clip_gradient=0.3)
    w, expected, g = random(4, 3), random(4, 3), random(4, 3, seed=2)
    step(update(), expected, [g] * 5)
    frozen, gradient = g.copy(), rows([3, 0, 3])
    frozen.setflags(write=False)
    forms = [np.repeat(g, 2, axis=1)[:, ::2], np.asfortranarray(g), g[::-1].copy()[::-1], frozen]
    with unchanged(forms, g, gradient):
        step(update(), w, [*forms, g.astype(np.float64)])
        step(update(), random(4, 3), [gradient])
    assert_same_bits(w, expected)


# Errors


SHARED = ones(30)
BAD_UPDATES: dict[str, tuple[str, Any, Any, str]] = {
    "weight list": ("w", [1.0], TypeError, "weight 'b' is no array: expected an array, got list"),
    "weight int": ("w", ones(4, 3, dtype=int), TypeError, "weight 'b' has a wrong dtype"),
    "weight masked": ("w", np.ma.ones((4, 3), F32), TypeError, "weight 'b' is masked"),
    "weight strided": ("w", ones(4, 6)[:, ::2], ValueError, "weight 'b' is not contiguous"),
    "weight frozen": ("w", np.broadcast_to(F32.type(1), (4, 3)), ValueError, "'b' is read-only"),
    "weight shape": ("w", ones(3, 4), ValueError, "state of 'b' has a wrong shape: .*got .4, 3"),
    "state None": ("s", None, TypeError, r"state of .* has a wrong type: expected \(mean, var\)"),
    "state one": ("s", ones(4, 3), TypeError, "state of .* has a wrong type"),
    "state three": ("s", [ones(4, 3)] * 3, TypeError, "state of .* has a wrong type"),
    "state numbers": ("s", (0, 0), TypeError, "state of 'b' is no array: .*got int"),
    "state int": ("s", (ones(4, 3, dtype=int),) * 2, TypeError, "state of 'b' has a wrong dtype"),
    "state shape": ("s", (ones(4, 3), ones(12)), ValueError, "state of 'b' has a wrong shape"),
    "state twice": ("s", (SHARED[:12].reshape(4, 3),) * 2, ValueError, "shares memory"),
    "state overlaps": (
        "s", (SHARED[:12].reshape(4, 3), SHARED[11:23].reshape(4, 3)), ValueError, "shares memory",
    ),
    "grad list": ("g", [1.0], TypeError, "gradient of 'b' .*got "),
    "grad int": ("g", ones(4, 3, dtype=int), TypeError, "gradient of 'b' has a wrong dtype"),
    "grad shape": ("g", ones(12), ValueError, r"'b' has a wrong shape: .*\(4, 3\), got"),
    "rows high": ("g", rows([1, 4]), IndexError, r"'b': indices\[1\] is out of range: .*got 4"),
    "rows low": ("g", rows([-1]), IndexError, r"'b': indices\[0\] is out of range"),
    "rows shape": ("g", rows([1], (5, 3)), ValueError, "gradient of 'b' has a wrong dense_shape"),
}  # fmt: skip


def three(dtype: Any = F32) -> tuple[list[Any], ...]:
    """Weights, gradients (the last of rows) and states of three indices."""
    weights = [random(4, 3, seed=k, dtype=dtype) for k in range(3)]
    grads: list[Any] = [random(4, 3, seed=9, dtype=dtype) for _ in range(3)]
    grads[2] = rows([2, 0, 2], dtype=dtype)
    return weights, grads, [mx.Adam().create_state(k, w) for k, w in enumerate(weights)]


@EACH_KIND
@pytest.mark.parametrize("case", BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_an_error_in_the_middle_changes_nothing(make: Any, case: tuple[str, Any, Any, str]) -> None:
    place, bad, error, text = case
    opt = make(param_idx2name={1: "b"})
    good = dict(zip("wgs", three(), strict=True))
    opt.update([0, 1, 2], good["w"], good["g"], good["s"])
    before = counts_of(opt)
    given = {**good, place: [good[place][0], bad, good[place][2]]}
    for call in (opt.update, opt.update_multi_precision):
        with refused(error, f"^{opt._name}: .*{text}", good, given):
            call([0, 1, 2], given["w"], given["g"], given["s"])
        assert counts_of(opt) == before
    expected, other = three(), make()
    for _ in range(2):
        other.update([0, 1, 2], expected[0], expected[1], expected[2])
    opt.update([0, 1, 2], good["w"], good["g"], good["s"])
    for a, b in zip(good["w"], expected[0], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_rows_in_the_memory_of_a_weight_or_state(lazy: bool, earlier: bool) -> None:
    weight, state = ones(9, 4), (ones(9, 4), ones(9, 4))
    opt, good = mx.Adam(lazy_update=lazy), rows([1, 2], (9, 4))
    if earlier:
        opt.update(0, weight, good, state)
    before = counts_of(opt)
    for array in (weight, *state):
        found = array.reshape(-1)
        for bad in (
            RowTensor(np.arange(9), array, (9, 4)),
            RowTensor(found[:2].view(np.int32), ones(2, 4), (9, 4)),
            RowTensor(found[:4].view(np.int64), ones(2, 4), (9, 4)),
        ):
            with refused(ValueError, "^Adam: .* shares memory", weight, state):
                opt.update(0, weight, bad, state)
    assert counts_of(opt) == before
    opt.update(0, weight, good, state)


@pytest.mark.parametrize("index", [1, 2])
def test_memory_of_another_weight(index: int) -> None:
    weights, grads, states = three()
    for place in ("weight", "state", "gradient", "its own gradient"):
        w, g, s = list(weights), list(grads), list(states)
        if place == "weight":
            w[index] = weights[0]
        elif place == "state":
            s[index] = (weights[0], states[index][1])
        else:
            g[index] = weights[0 if place == "gradient" else index]
        opt = mx.Adam()
        with refused(ValueError, "^Adam: .* shares memory", weights, states):
            opt.update([0, 1, 2], w, g, s)
        assert counts_of(opt) == (0, {})


@EACH_KIND
def test_lists_that_do_not_fit(make: Any) -> None:
    weights, grads, states = three()
    opt, indices = make(), [0, 1, 2]
    for given, error, text in (
        ((indices, weights[:2], grads, states), ValueError, "weights has a wrong length: .*3, one"),
        ((indices, weights, grads[:2], states), ValueError, "grads has a wrong length: .*got 2"),
        (([0, 1], weights, grads, states), ValueError, "weights has a wrong length"),
        ((indices, weights, grads, states[:1]), ValueError, "states has a wrong length"),
        (([0, 1, 0], weights, grads, states), ValueError, r"indices repeat: .*got \[0, 1, 0\]"),
        ((indices, weights[0], grads, states), TypeError, "weights has a wrong type: .*got ndarr"),
        ((indices, weights, iter(grads), states), TypeError, "grads has a wrong type"),
    ):
        for call in (opt.update, opt.update_multi_precision):
            with refused(error, text, weights, states):
                call(*given)
    assert counts_of(opt) == (0, {})
    opt.update([], [], [], [])
    opt.update(indices, weights, [None] * 3, states)
    assert counts_of(opt) == (0, {})


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_states_of_another_precision(dtype: Any) -> None:
    """A state without a master copy for a weight that has one, and the other way round."""
    w, g = ones(4, dtype=dtype), ones(4, dtype=dtype)
    with_master, without = mx.Adam(multi_precision=True), mx.Adam()
    pairs = [(with_master, without.create_state(0, w))]
    pairs += [(without, with_master.create_state_multi_precision(0, w))]
    for opt, state in pairs:
        with refused(TypeError, "^Adam: state .*: expected", w, state):
            opt.update_multi_precision(0, w, g, state)
        assert counts_of(opt) == (0, {})
