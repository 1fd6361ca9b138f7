"""Updates: by an Updater, by lists, by classes of users; calls that fail change nothing."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.nn import mxnet as mx
from fusestep.nn.mxnet.bindings import _KEPT_WEIGHTS
from fusestep.ops import RowTensor

from helpers import (  # isort: skip
    BF16, STORAGE_DTYPES, arrays_of, assert_same_arrays, assert_same_bits, assign, refused,
    unchanged)  # fmt: skip
from mxnet_options import F16, F32, F64, KINDS, S, counts_of, ones, random, rows

EACH_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
INF = np.inf


# Indices, states, counts


def test_states_are_made_when_an_index_is_seen() -> None:
    """With a gradient: what is made without one would keep an old copy of its weight."""

    class Asked(mx.Adam):
        def create_state(self, index: Any, weight: Any) -> Any:
            asked.append(index)
            return super().create_state(index, weight)

    asked: list[Any] = []
    updater = mx.get_updater(Asked(multi_precision=True))
    weights = {i: ones(2, dtype=F16) for i in (3, "fc_weight", 7)}
    updater(3, None, weights[3])
    assert updater.states == {}
    weights[3][...] = 5
    for index, key in ((3, 3), (np.int64(3), 3), ("fc_weight",) * 2, (b"fc_weight", "fc_weight")):
        updater(index, ones(2, dtype=F16), weights[key])
    updater([3, b"fc_weight"], [ones(2)] * 2, [weights[3], weights["fc_weight"]])
    updater((7,), (ones(2),), (weights[7],))
    updater([7, 3], [ones(2), None], [weights[7], weights[3]])
    updater([], [], [])
    assert asked == list(updater.states) == [3, "fc_weight", 7]
    assert counts_of(updater.optimizer) == (3, {3: 3, "fc_weight": 3, 7: 2})
    assert (weights[3] > 4).all()
    with pytest.raises(TypeError, match=r"^Updater: optimizer has a .*an Optimizer, got type"):
        mx.get_updater(mx.Adam)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scale", [0.0, INF, -INF, np.nan])
def test_adamw_without_a_scale_does_nothing(scale: float, fused: bool) -> None:
    """A loss scale that overflowed. MXNet's kernel skips and counts; here nothing has happened."""
    updater, w = mx.get_updater(mx.AdamW(0.1, wd=0.1, use_fused_step=fused)), random(6)
    updater(0, random(6), w)
    updater.optimizer.rescale_grad = scale
    with unchanged(w, updater.states):
        updater(0, random(6), w)
    assert counts_of(updater.optimizer) == (1, {0: 1})


def test_what_a_call_passes_on() -> None:
    """Lists of as many as may be aggregated, of one dtype; single weights in 1.9."""
    seen: list[Any] = []

    class Recorder(mx.Optimizer):
        def update(self, index: Any, *_: Any) -> None:
            seen.append(index)

    class Own(mx.Adam):
        def update(self, index: Any, *others: Any) -> None:
            seen.append(index)
            super().update(index, *others)

    weights = [ones(1, dtype=F16 if i == 2 else F32) for i in range(5)]
    for make, options, expected in (
        (Recorder, {}, [[0], [1], [2], [3], [4]]),
        (Recorder, {"aggregate_num": 2}, [[0, 1], [2], [3, 4]]),
        (Recorder, {"aggregate_num": 4}, [[0, 1], [2], [3, 4]]),
        (Recorder, {"aggregate_num": INF}, [[0, 1, 2, 3, 4]]),
        (Recorder, {"aggregate_num": 0}, [[0], [1], [2], [3], [4]]),
        (Recorder, {"compat": "1.9"}, [0, 1, 2, 3, 4]),
        (Recorder, {"compat": "1.9", "aggregate_num": 3}, [[0, 1], [2], [3, 4]]),
        (Own, {"compat": "1.9"}, [0, 1, 2, 3, 4]), (Own, {}, [[0], [1], [2], [3], [4]]),
    ):  # fmt: skip
        seen.clear()
        mx.get_updater(make(**options))(list(range(5)), [ones(1)] * 5, weights)
        assert [i if isinstance(i, int) else list(i) for i in seen] == expected


@EACH_KIND
def test_one_index_lists_and_tuples(make: Any) -> None:
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
        found.append([weights, states])
        assert counts_of(opt) == (3, {0: 3, "b": 3})
    for other in found[1:]:
        assert_same_arrays(other, found[0])


@EACH_KIND
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("masters", [False, True])
def test_gradients_of_any_layout(make: Any, dtype: np.dtype, masters: bool) -> None:
    """Gradients are only read, where MXNet's composed operations scale them in place. Shapes do not
    count, and a step of a 16-bit weight is that of the float32 one, rounded once."""

    def updated(w: Any, gradients: Any) -> Any:
        updater = mx.get_updater(make(0.1, wd=0.1, rescale_grad=0.5, multi_precision=masters))
        for g in gradients:
            updater(0, g, w)
        return w, updater.states[0]

    g = random(4, 3, seed=2, dtype=dtype)
    frozen, gradient = g.copy(), rows([3, 0, 3], dtype=dtype)
    frozen.setflags(write=False)
    forms = [np.repeat(g, 2, axis=1)[:, ::2], np.asfortranarray(g), g[::-1].copy()[::-1], frozen]
    expected = updated(random(4, 3, dtype=dtype), [g] * 4)
    with unchanged(forms, g, gradient):
        assert_same_arrays(updated(random(4, 3, dtype=dtype), forms), expected)
        updated(random(4, 3, dtype=dtype), [gradient])
    flat = updated(random(12, dtype=dtype), [g.reshape(-1)] * 4)
    assert_same_arrays([x.reshape(4, 3) for x in arrays_of([flat])], expected)
    if dtype.itemsize == 2:
        (once, *_, m, v), (wide, *moments) = (
            arrays_of([updated(random(4, 3, dtype=dtype).astype(d), [g.astype(d)])])
            for d in (dtype, F32)
        )
        assert_same_arrays([once, m, v], [wide.astype(dtype), *moments])


# What happens between two calls does not show but for what it changes


class Sequence:
    """Weights under an updater that lives on, or under a new one for each call."""

    def __init__(self, make: Any, *, kept: bool) -> None:
        self._make, self._kept, self.assigned = make, kept, {}
        self.updater = mx.get_updater(make())
        forms = [((5, 3), F32), ((5, 3), F16), ((2,), F64), ((), F32)]
        self.weights = [random(*shape, seed=k, dtype=d) for k, (shape, d) in enumerate(forms)]

    def call(self, index: Any, gradient: Any, weight: Any) -> str:
        """The error that was raised as text, or nothing."""
        if not self._kept:
            old, self.updater = self.updater, mx.get_updater(self._make())
            counted = ("num_update", "_index_update_count")
            same = {name: getattr(old.optimizer, name) for name in counted}
            for name, value in {**self.assigned, **same}.items():
                setattr(self.updater.optimizer, name, value)
            self.updater.states = old.states
        try:
            self.updater(index, gradient, weight)
        except (TypeError, ValueError, IndexError) as error:
            return f"{type(error).__name__} {error}"
        return ""

    def assign(self, name: str, value: Any) -> None:
        self.assigned[name] = value
        setattr(self.updater.optimizer, name, value)

    def change(self, kind: int, i: int, x: float) -> None:
        """Change a thing between two calls."""
        opt, states, w = self.updater.optimizer, self.updater.states, self.weights
        if kind < 6:
            self.assign(*{
                0: ("lr", x), 1: ("wd", x), 2: ("rescale_grad", x), 3: ("clip_gradient", x),
                4: ("lr_mult", {i: x}), 5: ("lr_scheduler", (lambda t: x / t) if i % 2 else None),
            }[kind])  # fmt: skip
        elif kind == 6:
            opt.wd_mult[i] = x  # in place
            self.assigned["wd_mult"] = dict(opt.wd_mult)
        elif kind == 7:  # the old array is freed, and may be what is allocated next; or a view
            w[i] = w[i].copy() if i == 2 or x < 0.3 else w[i][...]
        elif kind == 8:
            made = opt.create_state_multi_precision(i, w[i])
            states[i] = copy.deepcopy(states.get(i, made)) if x < 0.2 else made
        elif kind == 9:  # other memory, and other elements, under the same array
            w[2].flags.writeable = True
            w[2].resize(200_000, refcheck=False)
            w[2].resize(2 + i, refcheck=False)
            w[2].fill(x)
        elif kind == 10:
            w[i].flags.writeable = not w[i].flags.writeable
        elif kind == 11:
            assign(w[0], shape=w[0].shape[::-1])
        else:
            self.updater.set_states(self.updater.get_states())


def gradient_for(w: np.ndarray, rng: np.random.Generator) -> Any:
    kind = int(rng.integers(12))
    if kind == 0:
        return None
    if kind == 1 and w.ndim == 2:
        return RowTensor(rng.integers(0, len(w), 4), random(4, w.shape[1], dtype=w.dtype), w.shape)
    if kind == 2:
        return np.ones((*w.shape, 1), F32)
    found = np.array(rng.standard_normal(w.shape)).astype(F16 if kind == 3 else w.dtype)
    return w if kind == 4 else found.T if kind == 5 else found


@EACH_KIND
@pytest.mark.parametrize("masters", [False, True])
def test_sequences(make: Any, masters: bool) -> None:
    """An updater that is kept does as one that is new for each call."""
    new = partial(make, 0.1, multi_precision=masters)
    kept, fresh = both = [Sequence(new, kept=k) for k in (True, False)]
    rng = np.random.default_rng(5)
    n_errors = 0
    for k in range(400):
        if rng.random() < 0.3:
            change = int(rng.integers(13)), int(rng.integers(4)), float(rng.uniform(0.01, 0.5))
            for one in both:
                one.change(*change)
        i, seed = int(rng.integers(4)), int(rng.integers(1000))
        found = []
        for one in both:
            own = np.random.default_rng(seed)
            if k % 7:
                found.append(one.call(i, gradient_for(one.weights[i], own), one.weights[i]))
            else:
                gradients = [gradient_for(w, own) for w in one.weights]
                found.append(one.call([0, 1, 2, 3], gradients, one.weights))
        assert found[0] == found[1]
        n_errors += found[0] != ""
        assert counts_of(kept.updater.optimizer) == counts_of(fresh.updater.optimizer), k
        assert kept.updater.states.keys() == fresh.updater.states.keys()
        assert_same_arrays(kept.weights, fresh.weights, f"call {k}")
        a, b = ([s.updater.states.get(j) for j in range(4)] for s in both)
        assert_same_arrays(a, b, f"states after call {k}")
    assert 20 < n_errors < 300


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_parameters_as_weights(dtype: np.dtype) -> None:
    """Bound to another array between steps; the old one stays as it is."""
    p, expected = nn.Parameter(random(6, dtype=dtype)), random(6, dtype=dtype)
    updater, plain = (mx.get_updater(mx.Adam(multi_precision=True)) for _ in range(2))
    for k in range(4):
        old = p.data
        if k % 2:
            p.data = p.data.copy()
        with unchanged(*([old] if k % 2 else [])):
            updater(0, random(6, seed=k, dtype=dtype), p)
        plain(0, random(6, seed=k, dtype=dtype), expected)
        assert_same_bits(p.data, expected)


def test_arrays_of_old_calls_are_not_kept() -> None:
    """Arrays of the last calls are, up to a number of weights."""
    opt = mx.Adam()
    for first in range(0, 3 * _KEPT_WEIGHTS, 500):
        indices = list(range(first, first + 500))
        weights = [ones(1) for _ in indices]
        states = [opt.create_state(i, w) for i, w in zip(indices, weights, strict=True)]
        opt.update(indices, weights, [ones(1) for _ in indices], states)
    assert sum(map(len, opt._bindings._bound)) <= _KEPT_WEIGHTS
    opt.forget_arrays()
    assert not opt._bindings._bound


# Calls that fail

SHARED = ones(30)
BAD_UPDATES: dict[str, tuple[str, Any, Any, str]] = {
    "weight list": ("w", [1.0], TypeError, "weight 'b' is no array: expected an array, got list"),
    "weight int": ("w", ones(4, 3, dtype=int), TypeError, "weight 'b' has a wrong dtype"),
    "weight masked": ("w", np.ma.ones((4, 3), F32), TypeError, "weight 'b' is masked"),
    "weight strided": ("w", ones(4, 6)[:, ::2], ValueError, "weight 'b' is not contiguous"),
    "weight frozen": ("w", np.broadcast_to(F32.type(1), (4, 3)), ValueError, "'b' is read-only"),
    "weight shape": ("w", ones(3, 4), ValueError, "state of 'b' has a wrong shape: .*got .4, 3"),
    "state None": ("s", None, TypeError, r"state of .* has a wrong type: expected \(mean, var\)"),
    "state one": ("s", ones(400, 3), TypeError, "state of .* has a wrong type.{1,200}$"),
    "state three": ("s", [ones(4, 3)] * 3, TypeError, "state of .* has a wrong type"),
    "state numbers": ("s", (0, 0), TypeError, "state of 'b' is no array: .*got int"),
    "state int": ("s", (ones(4, 3, dtype=int),) * 2, TypeError, "state of 'b' has a wrong dtype"),
    "state shape": ("s", (ones(4, 3), ones(12)), ValueError, "state of 'b' has a wrong shape"),
    "state twice": ("s", (SHARED[:12].reshape(4, 3),) * 2, ValueError, "shares memory"),
    "state overlaps": (
        "s", (SHARED[:12].reshape(4, 3), SHARED[11:23].reshape(4, 3)), ValueError, "shares memory"),
    "grad list": ("g", [1.0], TypeError, "gradient of 'b' .*got "),
    "grad int": ("g", ones(4, 3, dtype=int), TypeError, "gradient of 'b' has a wrong dtype"),
    "grad shape": ("g", ones(12), ValueError, r"'b' has a wrong shape: .*\(4, 3\), got"),
    "rows high": ("g", rows([1, 4]), IndexError, r"'b': indices\[1\] is out of range: .*got 4"),
    "rows low": ("g", rows([-1]), IndexError, r"'b': indices\[0\] is out of range"),
    "rows shape": ("g", rows([1], (5, 3)), ValueError, "gradient of 'b' has a wrong dense_shape"),
}  # fmt: skip


def three() -> dict[str, list[Any]]:
    """Weights, gradients (the last of rows) and states of three indices."""
    weights = [random(4, 3, seed=k) for k in range(3)]
    states = [mx.Adam().create_state(k, w) for k, w in enumerate(weights)]
    return {"w": weights, "g": [random(4, 3, seed=9), random(4, 3, seed=9), rows([2, 0, 2])],
            "s": states}  # fmt: skip


def nothing_happens(call: Callable[[], Any], opt: Any, error: Any, text: str, *held: Any) -> None:
    before = counts_of(opt)
    with refused(error, text, *held):
        call()
    assert counts_of(opt) == before


@EACH_KIND
@pytest.mark.parametrize("case", BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_bad_updates(make: Any, case: tuple[str, Any, Any, str]) -> None:
    """In the middle of a list, in all ways of a call; and the next one is as without them."""
    place, bad, error, text = case
    good, opt = three(), make(param_idx2name={1: "b"})
    opt.update([0, 1, 2], good["w"], good["g"], good["s"])
    given = {**good, place: [good[place][0], bad, good[place][2]]}
    updater, lists = mx.Updater(opt), ([0, 1, 2], given["w"], given["g"], given["s"])
    updater.states = dict(enumerate(given["s"]))
    for call in (
        partial(opt.update, *lists), partial(opt.update_multi_precision, *lists),
        partial(updater, [0, 1, 2], given["g"], given["w"]),
    ):  # fmt: skip
        nothing_happens(call, opt, error, f"^{opt._name}: .*{text}", good, given)
    expected, other = three(), make()
    for _ in range(2):
        other.update([0, 1, 2], expected["w"], expected["g"], expected["s"])
    opt.update([0, 1, 2], good["w"], good["g"], good["s"])
    assert_same_arrays(good["w"], expected["w"])


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("lazy", [False, True])
def test_memory_of_another_array(lazy: bool, index: int) -> None:
    """Nothing may lie in another weight or state, whole or as ids or values of rows."""
    good, opt = three(), mx.Adam(lazy_update=lazy)
    w, (mean, var) = good["w"], good["s"][index]
    others = [("w", w[0]), ("s", (w[0], var)), ("g", w[0]), ("g", w[index])]
    for array in (w[index], mean, var):
        flat = array.reshape(-1)
        others += [("g", RowTensor(ids, values, (4, 3))) for ids, values in (
            (np.arange(4), array), (flat[:1].view(np.int32), ones(1, 3)),
            (flat[:2].view(np.int64), ones(1, 3)))]  # fmt: skip
    for _ in range(2):
        for place, bad in others:
            given = {k: list(x) for k, x in good.items()}
            given[place][index] = bad
            call = partial(opt.update, [0, 1, 2], given["w"], given["g"], given["s"])
            nothing_happens(call, opt, ValueError, "^Adam: .* shares memory", good)
        opt.update([0, 1, 2], good["w"], good["g"], good["s"])


@EACH_KIND
def test_lists_that_do_not_fit(make: Any) -> None:
    w, g, s = three().values()
    opt, indices = make(), [0, 1, 2]
    updater = mx.Updater(opt)
    for given, error, text in (
        ((indices, w[:2], g, s), ValueError, "weights has a wrong length: expected 3, one"),
        ((indices, w, g[:2], s), ValueError, "grads has a wrong length: .*got 2"),
        (([0, 1], w, g, s), ValueError, "weights has a wrong length"),
        ((indices, w, g, s[:1]), ValueError, "states has a wrong length"),
        (([0, 1, 0], w, g, s), ValueError, r"indices repeat: .*got \[0, 1, 0\]"),
        ((["a", b"a", 0], w, g, s), ValueError, "indices repeat"),
        ((indices, w[0], g, s), TypeError, "weights has a wrong type: expected a list, got ndarr"),
        ((indices, w, iter(g), s), TypeError, "grads has a wrong type"),
        ((np.array([0, 1]), w, g, s), TypeError, "index has a wrong type: expected ints and strs"),
    ):
        if b"a" not in given[0]:
            calls = (opt.update, opt.update_multi_precision, opt.fused_step, opt.step)
            for call in calls if isinstance(given[0], list) else calls[:2]:
                nothing_happens(partial(call, *given), opt, error, f"^{opt._name}: {text}", w, s)
        if given[3] is s:
            call = partial(updater, given[0], given[2], given[1])
            nothing_happens(call, opt, error, f"^Updater: {text}", w)
            assert updater.states == {}
    opt.update([], [], [], [])
    opt.update(indices, w, [None] * 3, s)
    assert counts_of(opt) == (0, {})


def test_an_error_leaves_no_state_and_drops_none() -> None:
    updater, w = mx.get_updater(mx.Adam()), ones(2)
    for given in ((0, ones(3), w), (0, [ones(2)], w), (0, ones(2), [w]), ([0], [ones(3)], [w])):
        with pytest.raises((TypeError, ValueError)):
            updater(*given)
        assert (updater.states, counts_of(updater.optimizer)) == ({}, (0, {}))
    updater(0, ones(2), w)
    updater.set_states(updater.get_states())
    before = updater.states[0]
    for index in (0, [0, 1]):
        with refused(ValueError, "gradient of '0' has a wrong shape", w):
            updater(index, *((ones(3), w) if index == 0 else ([ones(3), ones(2)], [w, ones(2)])))
        assert list(updater.states) == [0]
        assert updater.states[0] is before
        assert updater._were_read == {0}


class Rated(mx.Adam):
    """With hooks of a user."""

    rate: Any = 0.5
    decay: Any = 0.25

    def _get_lr(self, index: Any) -> Any:
        return self.rate if index == 1 else 0.5

    def _get_wd(self, index: Any) -> Any:
        return self.decay if index == 1 else 0.25


# The class, its options, what is assigned after two steps, the error, and its text.
FAILING: list[tuple[Any, dict[str, Any], dict[str, Any], Any, str]] = [
    *((mx.Adam, {}, {"lr_scheduler": schedule}, error, text) for schedule, error, text in (
        (lambda _: None, TypeError, "Adam: lr_scheduler's rate has a wrong type: .* got NoneType"),
        (lambda _: "0.1", TypeError, "lr_scheduler's rate has a wrong type"),
        (lambda _: np.ones(2), ValueError, "lr_scheduler's rate has a wrong shape"),
        (lambda _: np.nan, ValueError, "lr_scheduler's rate is not finite"),
        (lambda _: -0.1, ValueError, "lr_scheduler's rate is out of range: expected at least 0"),
        (lambda n: 1 / (n - n), ZeroDivisionError, "division"),
        (S.LRScheduler(), NotImplementedError, r"LRScheduler: define __call__\(self, num_update"))),
    *((cls, {"wd": 1e20}, {"wd_mult": {1: 1e20}}, ValueError, "wd with its factor is too large")
      for cls in (mx.Adam, mx.AdamW)),
    (mx.AdamW, {"lr_scheduler": lambda _: 1e20}, {"lr_mult": {1: 1e20}}, ValueError,
     "the learning rate with its factors is too large"),
    (mx.Adam, {"lazy_update": True}, {"use_fused_step": False}, AssertionError,
     "^Adam: lazy_update needs use_fused_step"),
    *((Rated, {"use_fused_step": fused}, {name: value}, TypeError,
       f"^Rated: {label} has a wrong type: expected a number, got ")
      for fused in (True, False) for value in (True, None, "0.5", [0.5])
      for name, label in (("rate", "the learning rate of _get_lr"), ("decay", "wd of _get_wd"))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "assigned", "error", "text"), FAILING)
def test_an_update_that_fails(make, options, assigned, error, text: str) -> None:
    """An error from what scalars follow from, in the middle; mended, the next update goes on."""
    opt, weights = make(**options), [ones(2), ones(3)]
    before = {name: getattr(opt, name) for name in assigned}
    states = [opt.create_state(i, w) for i, w in enumerate(weights)]
    update = partial(opt.update, [0, 1], weights, [ones(2), ones(3)], states)
    for call in (lambda: None, update, update):
        call()
        for values in (assigned, before):
            for name, value in values.items():
                setattr(opt, name, value)
            if values is assigned:
                nothing_happens(update, opt, error, text, weights, states)
    assert counts_of(opt) == (2, {0: 2, 1: 2})


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_states_of_another_precision(dtype: Any) -> None:
    """A state without a master copy for a weight that has one, and the other way round."""

    class Descent(mx.Optimizer):
        step = None

    w, g, plain = ones(4, dtype=dtype), ones(4, dtype=dtype), mx.Adam()
    master = mx.Adam(multi_precision=True)
    cases = [(master, plain.create_state(0, w)), (plain, master.create_state_multi_precision(0, w))]
    cases += [(Descent(multi_precision=True), state)
              for state in (None, (ones(4),), (ones(4), None, None), ones(2))]  # fmt: skip
    for opt, state in cases:
        call = partial(opt.update_multi_precision, 0, w, g, state)
        text = f"^{opt._name}: state of '0' .*: expected"
        nothing_happens(call, opt, TypeError, text, w, state)


# Classes of users


class Momentum(mx.Optimizer):
    """A class as written for MXNet 1.9: one weight, a scalar index."""

    def create_state(self, index: Any, weight: Any) -> Any:  # noqa: ARG002
        return [np.zeros_like(weight), 0]

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        lr, wd = self._get_lr(index), self._get_wd(index)
        state[0] *= 0.5
        state[0] -= weight.dtype.type(lr) * (grad * self.rescale_grad + wd * weight)
        state[1] += 1
        weight[:] += state[0]


class Steps(Momentum):
    """A class as written for MXNet 2.0: lists, in one of two ways."""

    update = mx.Optimizer.update
    calls = 0

    def step(self, *lists: Any) -> None:
        self.calls += 1
        for each in zip(*lists, strict=True):
            Momentum.update(self, *each)

    def fused_step(self, *lists: Any) -> None:
        self.calls += 999
        Steps.step(self, *lists)


CUSTOM: dict[str, tuple[Callable[..., Any], int]] = {
    "1.9": (partial(Momentum, compat="1.9"), 0), "2.0": (Steps, 6),
    "2.0 fused": (partial(Steps, use_fused_step=True), 6000),
    "2.0 aggregated": (partial(Steps, aggregate_num=INF), 3),
    "2.0 by two": (partial(Steps, use_fused_step=True, aggregate_num=2), 3000),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("form", CUSTOM.values(), ids=CUSTOM)
def test_custom_optimizers(form: tuple[Callable[..., Any], int], dtype: np.dtype) -> None:
    """16-bit weights have a float32 master copy, and the class sees nothing of it."""
    make, calls = form
    opt = make(learning_rate=0.1, wd=0.5, rescale_grad=0.25, multi_precision=True)
    opt.set_lr_mult({"b": 2.0})
    updater, weights = mx.get_updater(opt), [random(5, dtype=dtype), random(3, dtype=dtype)]
    expected = [w.astype(F32) for w in weights]
    moments = [np.zeros_like(x) for x in expected]
    for k in range(3):
        grads = [random(w.size, seed=k, dtype=dtype) for w in weights]
        with unchanged(grads):
            updater([0, "b"], grads, weights)
        for x, m, g, lr in zip(expected, moments, grads, (0.1, 0.2), strict=True):
            m *= 0.5
            m -= np.float32(lr) * (g.astype(F32) * 0.25 + 0.5 * x)
            x += m
    for w, x, index in zip(weights, expected, (0, "b"), strict=True):
        assert_same_bits(w, x.astype(dtype))
        state = updater.states[index]
        assert (state[1][1] if dtype.itemsize == 2 else state[1]) == 3
    assert counts_of(opt) == (3, {0: 3, "b": 3})
    assert getattr(opt, "calls", 0) == calls


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_subclass_of_adam(dtype: np.dtype) -> None:
    """Its own update, by the pass of Adam, with a master copy too, and every kind of gradient."""

    class Halved(mx.Adam):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            halves = [g / 2 if isinstance(g, np.ndarray) else g for g in grad]
            super().update(index, weight, halves, state)

    options = {"multi_precision": True, "aggregate_num": INF}  # all weights in one call
    updater, plain = (mx.get_updater(c(0.1, **options)) for c in (Halved, mx.Adam))
    weights, expected = ([random(4, dtype=dtype), random(4, 3, dtype=dtype)] for _ in "ab")
    parts = [rows([1], dtype=dtype)] * 2
    for k in range(3):
        g = random(4, seed=k, dtype=dtype)
        updater([0, 1], [g, parts], weights)
        plain([0, 1], [g.astype(F32) / 2, parts], expected)
    assert_same_arrays(weights, expected)
    opt = updater.optimizer
    states = [updater.states[i] for i in (0, 1)]
    with unchanged(weights[0]):  # a gradient None is one of no gradient
        opt.update_multi_precision([0, 1], weights, [None, parts], states)


def test_rates_and_decays_of_a_subclass() -> None:
    w, expected = ([random(3), random(3)] for _ in "ab")
    own, plain = Rated(rate := 0.5), mx.Adam(rate, wd=0.25)
    own.rate, own.decay = np.array([0.125]), np.float16(0.5)  # what can be no key of a dict, too
    plain.set_lr_mult({1: 0.25})
    plain.set_wd_mult({1: 2.0})
    for opt, weights in ((own, w), (plain, expected)):
        states = [opt.create_state(i, x) for i, x in enumerate(weights)]
        opt.update([0, 1], weights, [ones(3), ones(3)], states)
    assert_same_arrays(w, expected)
