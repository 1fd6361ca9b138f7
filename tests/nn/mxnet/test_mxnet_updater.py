"""MXNet's Updater: states, registered and custom optimizers, training loops, saved states."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from fusestep import nn
from fusestep.nn import mxnet as mx
from fusestep.ops import RowTensor

from helpers import BF16, arrays_of, assert_same_bits, assign, refused, unchanged
from subprocesses import output_of

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
KINDS: dict[str, Callable[..., Any]] = {
    "Adam": mx.Adam,
    "Adam 1.9": partial(mx.Adam, compat="1.9"),
    "Adam unfused": partial(mx.Adam, use_fused_step=False),
    "AdamW": mx.AdamW,
}
EACH_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def random(*shape: int, seed: int = 1, dtype: Any = F32) -> np.ndarray:
    return np.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rows(indices: Any, shape: tuple[int, ...] = (4, 3), dtype: Any = F32) -> RowTensor:
    values = random(len(indices), *shape[1:], seed=7, dtype=dtype)
    return RowTensor(np.array(indices, np.int64), values, shape)


def counts_of(opt: mx.Optimizer) -> tuple[int, dict[Any, int]]:
    return opt.num_update, dict(opt._index_update_count)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.Optimizer, "opt_registry", dict(mx.Optimizer.opt_registry))


# Indices and states


def test_states_are_made_when_an_index_is_seen() -> None:
    class Asked(mx.Adam):
        def create_state(self, index: Any, weight: Any) -> Any:
            asked.append(index)
            return super().create_state(index, weight)

    asked: list[Any] = []
    updater = mx.get_updater(Asked())
    weights = {i: ones(2) for i in (3, "fc_weight", 7)}
    for index, key in ((3, 3), (np.int64(3), 3), ("fc_weight",) * 2, (b"fc_weight", "fc_weight")):
        updater(index, ones(2), weights[key])
    updater([3, b"fc_weight"], [ones(2)] * 2, [weights[3], weights["fc_weight"]])
    updater((7,), (ones(2),), (weights[7],))
    updater([7, 3], [ones(2)] * 2, [weights[7], weights[3]])
    assert asked == list(updater.states) == [3, "fc_weight", 7]
    assert updater.optimizer._index_update_count == {3: 4, "fc_weight": 3, 7: 2}


def test_errors_leave_no_state_behind() -> None:
    updater, w = mx.get_updater(mx.Adam()), [ones(2), ones(2)]
    for args, error, text in (
        ((0, ones(3), w[0]), ValueError, "gradient of '0' has a wrong shape"),
        (([0, 1], [ones(2), ones(3)], w), ValueError, "gradient of '1' has a wrong shape"),
        (([0, 1], [ones(2)], w), ValueError, "^Updater: grads has a wrong length: expected 2, one"),
        (([0, 0], [ones(2)] * 2, w), ValueError, r"^Updater: indices repeat: .*got \[0, 0\]"),
        ((["a", b"a"], [ones(2)] * 2, w), ValueError, "^Updater: indices repeat"),
        (([0], ones(1, 2), w[:1]), TypeError, "^Updater: grads has a wrong type: .*got ndarray"),
        ((0, [ones(2)], w[0]), TypeError, "gradient of '0' .* got "),
        ((0, ones(2), w), TypeError, "weight is no array: expected an array, got list"),
    ):
        with refused(error, text, w):
            updater(*args)
        assert (updater.states, counts_of(updater.optimizer)) == ({}, (0, {}))
    updater([], [], [])
    with pytest.raises(TypeError, match=r"^Updater: optimizer has a .*an Optimizer, got type"):
        mx.get_updater(mx.Adam)


def test_another_weight_under_an_index() -> None:
    updater = mx.get_updater(mx.Adam())
    updater(0, ones(2), ones(2))
    other = ones(3)
    with refused(ValueError, r"state of '0' has a wrong shape: .*\(3,\), got \(2,\)", other):
        updater(0, ones(3), other)


@EACH_KIND
def test_other_arrays_under_an_index(make: Any) -> None:
    """Each step on new arrays: copies and views, some of them where freed ones were."""
    moved, plain = mx.get_updater(make()), mx.get_updater(make())
    w, expected = random(40), random(40)
    for k in range(15):
        plain(0, random(40, seed=k), expected)
        if k % 3 == 1:  # the old arrays are freed, and may be what is allocated next
            w, moved.states = w.copy(), copy.deepcopy(moved.states)
        elif k % 3 == 2:
            w, moved.states = w[:], {0: tuple(x[...] for x in moved.states[0])}
        moved(0, random(40, seed=k), w)
        assert_same_bits(w, expected, f"step {k}")


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


@EACH_KIND
def test_gradients_of_changing_kinds(make: Any) -> None:
    together, apart = mx.get_updater(make(wd=0.1)), [mx.get_updater(make(wd=0.1)) for _ in "ab"]
    weights = [random(4, 3), random(4, 3, seed=2)]
    expected = copy.deepcopy(weights)
    forms = [lambda k: random(4, 3, seed=k), lambda k: rows([k % 4, 2]), lambda _: None]
    for k in range(18):
        grads = [forms[k % 3](k), forms[k // 3 % 3](k + 1)]
        together([0, 1], grads, weights)
        for i in (0, 1):
            apart[i](i, grads[i], expected[i])
            assert_same_bits(weights[i], expected[i], f"step {k}, weight {i}")
    assert counts_of(together.optimizer) == (12, {0: 12, 1: 12})


class Sequence:
    """Weights under an updater that lives on, or under a new one for each call."""

    def __init__(self, make: Any, options: dict[str, Any], *, kept: bool) -> None:
        self._make, self._options, self._kept = make, options, kept
        self.updater = mx.get_updater(make(**options))
        self.assigned: dict[str, Any] = {}
        forms = [((5, 3), F32), ((5, 3), F16), ((2,), np.dtype(np.float64)), ((), F32)]
        self.weights = [random(*forms[k][0], seed=k, dtype=forms[k][1]) for k in range(4)]

    def call(self, index: Any, gradient: Any, weight: Any) -> str:
        """What was raised, or nothing."""
        if not self._kept:
            old, opt = self.updater, self._make(**self._options)
            for name, value in self.assigned.items():
                setattr(opt, name, value)
            opt.num_update = old.optimizer.num_update
            opt._index_update_count = old.optimizer._index_update_count
            self.updater = mx.get_updater(opt)
            self.updater.states = old.states
        try:
            self.updater(index, gradient, weight)
        except (TypeError, ValueError, IndexError) as error:
            return f"{type(error).__name__} {error}"
        return ""

    def assign(self, name: str, value: Any) -> None:
        self.assigned[name] = value
        setattr(self.updater.optimizer, name, value)

    def change(self, kind: int, i: int, number: float) -> None:
        """Something between two calls."""
        opt, states = self.updater.optimizer, self.updater.states
        if kind < 5:
            names = "lr", "wd", "rescale_grad", "clip_gradient", "lr_mult"
            self.assign(names[kind], {i: number} if kind == 4 else number)
        elif kind == 5:  # in place
            self.assigned["wd_mult"] = opt.wd_mult
            opt.wd_mult[i] = number
        elif kind == 6:
            self.weights[i] = self.weights[i].copy()
        elif kind == 7:
            made = opt.create_state_multi_precision(i, self.weights[i])
            states[i] = copy.deepcopy(states.get(i, made)) if number < 0.2 else made
        elif kind == 8:  # other memory, and other elements, under the same array
            self.weights[2].flags.writeable = True
            self.weights[2].resize(2 + i, refcheck=False)
            self.weights[2].fill(number)
        elif kind == 9:
            self.weights[i].flags.writeable = not self.weights[i].flags.writeable
        elif kind == 10:
            assign(self.weights[0], shape=self.weights[0].shape[::-1])
        elif kind == 11:
            self.assign("lr_scheduler", (lambda t: number / t) if i % 2 else None)
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
    dtype = F16 if kind == 3 else w.dtype
    found = np.array(rng.standard_normal(w.shape)).astype(dtype)
    return w if kind == 4 else found.T if kind == 5 else found


@EACH_KIND
@pytest.mark.parametrize("masters", [False, True])
def test_random_sequences_of_single_calls(make: Any, masters: bool) -> None:
    """What is kept between calls does not show: as with an updater that is new for each call."""
    options = {"multi_precision": masters, "learning_rate": 0.1}
    both = [Sequence(make, options, kept=kept) for kept in (True, False)]
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
        kept, fresh = both
        assert counts_of(kept.updater.optimizer) == counts_of(fresh.updater.optimizer), k
        assert kept.updater.states.keys() == fresh.updater.states.keys()
        for j in range(4):
            assert_same_bits(kept.weights[j], fresh.weights[j], f"call {k}, weight {j}")
            for a, b in zip(*(arrays_of([s.updater.states.get(j)]) for s in both), strict=True):
                assert_same_bits(a, b, f"call {k}, state {j}")
    assert 20 < n_errors < 300


def test_states_that_were_read_are_as_before_after_an_error() -> None:
    updater, w = mx.get_updater(mx.Adam()), ones(2)
    updater(0, ones(2), w)
    updater.set_states(updater.get_states())
    before = updater.states[0]
    with refused(ValueError, "gradient of '0' has a wrong shape", w):
        updater([0, 1], [ones(3), ones(2)], [w, ones(2)])
    assert updater.states == {0: before}
    assert updater._were_read == {0}


# Registry


@pytest.mark.parametrize("name", ["adam", "Adam", "ADAM", "adamW"])
def test_create(name: str) -> None:
    for make in (mx.create, mx.Optimizer.create_optimizer):
        opt = make(name, learning_rate=0.25)
        assert type(opt).__name__.lower() == name.lower()
        assert opt.learning_rate == 0.25


def test_create_what_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"^create: name is unknown: .*adam, adamw.*, got 'sgd'"):
        mx.create("sgd")
    with pytest.raises(TypeError, match=r"^create: name has a wrong type: .* a str, got type"):
        mx.create(mx.Adam)


def test_register() -> None:
    class MyRule(mx.Optimizer):
        pass

    assert mx.register(MyRule) is MyRule
    assert type(mx.create("myrule", wd=0.5)) is MyRule
    other = type("MYRULE", (mx.Optimizer,), {})
    with pytest.warns(UserWarning, match=r"^register: .*MYRULE takes the place of .*\.MyRule"):
        mx.Optimizer.register(other)
    assert type(mx.create("myrule")) is other


@pytest.mark.parametrize("klass", [int, lambda: 0, "adam", None, mx.Adam()])
def test_register_what_is_no_optimizer(klass: Any) -> None:
    before = dict(mx.Optimizer.opt_registry)
    with pytest.raises(TypeError, match=r"^register: klass .* expected a subclass of Optimizer"):
        mx.register(klass)
    assert mx.Optimizer.opt_registry == before


# Optimizers of users


class Momentum(mx.Optimizer):
    """As written for MXNet 1.9: one weight, a scalar index."""

    def __init__(self, momentum: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def create_state(self, index: Any, weight: Any) -> Any:  # noqa: ARG002
        return [np.zeros_like(weight), 0]

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        lr, wd = self._get_lr(index), self._get_wd(index)
        state[0] *= self.momentum
        state[0] -= weight.dtype.type(lr) * (grad * self.rescale_grad + wd * weight)
        state[1] += 1
        weight[:] += state[0]


class Steps(Momentum):
    """As written for MXNet 2.0: lists, in one of two ways."""

    update = mx.Optimizer.update
    calls = 0

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:
        self.calls += 1
        for each in zip(indices, weights, grads, states, strict=True):
            Momentum.update(self, *each)

    def fused_step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:
        self.calls += 1000
        for each in zip(indices, weights, grads, states, strict=True):
            Momentum.update(self, *each)


CUSTOM: dict[str, tuple[Callable[..., Any], int]] = {
    "1.9": (partial(Momentum, compat="1.9"), 0),
    "2.0": (Steps, 6),
    "2.0 fused": (partial(Steps, use_fused_step=True), 6000),
    "2.0 aggregated": (partial(Steps, aggregate_num=np.inf), 3),
    "2.0 by two": (partial(Steps, use_fused_step=True, aggregate_num=2), 3000),
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("form", CUSTOM.values(), ids=CUSTOM)
def test_custom_optimizers(form: tuple[Callable[..., Any], int], dtype: np.dtype) -> None:
    """16-bit weights have a float32 master copy, and the class sees nothing of it."""
    make, calls = form
    opt = make(learning_rate=0.1, wd=0.5, rescale_grad=0.25, multi_precision=True)
    opt.set_lr_mult({"b": 2.0})
    updater, weights = mx.get_updater(opt), [random(5, dtype=dtype), random(3, dtype=dtype)]
    expected = [w.astype(np.float32) for w in weights]
    moments = [np.zeros_like(x) for x in expected]
    for k in range(3):
        grads = [random(w.size, seed=k, dtype=dtype) for w in weights]
        with unchanged(grads):
            updater([0, "b"], grads, weights)
        for x, m, g, lr in zip(expected, moments, grads, (0.1, 0.2), strict=True):
            m *= 0.5
            m -= np.float32(lr) * (g.astype(np.float32) * 0.25 + 0.5 * x)
            x += m
    for w, x, index in zip(weights, expected, (0, "b"), strict=True):
        assert_same_bits(w, x.astype(dtype))
        state = updater.states[index]
        assert (state[1][1] if dtype.itemsize == 2 else state[1]) == 3
    assert counts_of(opt) == (3, {0: 3, "b": 3})
    assert getattr(opt, "calls", 0) == calls


def test_subclass_of_adam() -> None:
    """Its own update, by the pass of Adam, with a master copy too."""

    class Clipped(mx.Adam):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            norm = np.sqrt(sum(float(np.vdot(g, g)) for g in grad))
            super().update(index, weight, [g / max(1.0, norm) for g in grad], state)

    for dtype in (F32, F16):
        options = {"multi_precision": True, "aggregate_num": np.inf}  # all weights in one call
        updater, plain = (mx.get_updater(c(0.1, **options)) for c in (Clipped, mx.Adam))
        weights, expected = ([random(4, dtype=dtype), random(3, dtype=dtype)] for _ in "ab")
        for k in range(3):
            grads = [random(w.size, seed=k, dtype=dtype) for w in weights]
            wide = [g.astype(np.float32) for g in grads]
            norm = np.sqrt(sum(float(np.vdot(g, g)) for g in wide))
            updater([0, 1], grads, weights)
            plain([0, 1], [g / max(1.0, norm) for g in wide], expected)
        for a, b in zip(weights, expected, strict=True):
            assert_same_bits(a, b)


def test_what_a_call_passes_on() -> None:
    class Recorder(mx.Optimizer):
        def update(self, index: Any, *_: Any) -> None:
            seen.append(index)

    seen: list[Any] = []
    weights = [ones(1) for _ in range(5)]
    for options, expected in (
        ({}, [[0], [1], [2], [3], [4]]),
        ({"aggregate_num": 2}, [[0, 1], [2, 3], [4]]),
        ({"aggregate_num": np.inf}, [[0, 1, 2, 3, 4]]),
        ({"compat": "1.9"}, [0, 1, 2, 3, 4]),
        ({"compat": "1.9", "aggregate_num": 3}, [[0, 1, 2], [3, 4]]),
    ):
        seen.clear()
        mx.get_updater(Recorder(**options))(list(range(5)), [ones(1)] * 5, weights)
        assert [i if isinstance(i, int) else list(i) for i in seen] == expected


# Training loops


@pytest.mark.parametrize("multi_precision", [False, True])
@EACH_KIND
def test_module_style_loop(make: Any, multi_precision: bool) -> None:
    """One call for each weight, in the order of the layers, as MXNet's Module does."""
    rng = np.random.default_rng(3)
    x, true = rng.standard_normal((64, 3)), np.array([1.0, -2.0, 0.5])
    dtype = F16 if multi_precision else F32
    weights = {"fc_weight": np.zeros(3, dtype), "fc_bias": np.zeros((), dtype)}
    names = dict(enumerate(weights))
    schedule = mx.lr_scheduler.FactorScheduler(50, 0.7, base_lr=0.2)
    opt = make(lr_scheduler=schedule, rescale_grad=1 / 64, param_idx2name=names,
               multi_precision=multi_precision)  # fmt: skip
    updater = mx.get_updater(opt)
    for _ in range(300):
        error = x @ weights["fc_weight"].astype(float) + float(weights["fc_bias"]) - x @ true - 0.25
        grads = {"fc_weight": error @ x, "fc_bias": error.sum()}
        for index, (name, w) in enumerate(weights.items()):
            updater(index, np.asarray(grads[name]).astype(dtype), w)
    assert np.abs(weights["fc_weight"].astype(float) - true).max() < 0.02
    assert abs(float(weights["fc_bias"]) - 0.25) < 0.02
    assert counts_of(opt) == (300, {0: 300, 1: 300})


@EACH_KIND
def test_trainer_style_loop(make: Any) -> None:
    """``rescale_grad`` is one over the batch size of each step; a stale weight is left out."""
    updater, plain = mx.get_updater(make(wd=0.1)), mx.get_updater(make(wd=0.1))
    weights, expected = ([random(6), random(4, 3)] for _ in "ab")
    for k, batch in enumerate((32, 7, 32, 1, 50)):
        fresh = [0, 1] if k != 2 else [1]
        grads = [random(6, seed=k) * 9, random(4, 3, seed=k) * 9]
        updater.optimizer.rescale_grad = 1 / batch
        updater(fresh, [grads[i] for i in fresh], [weights[i] for i in fresh])
        scaled = [g * np.float32(1 / batch) if i in fresh else None for i, g in enumerate(grads)]
        plain([0, 1], scaled, expected)
        for a, b in zip(weights, expected, strict=True):
            assert_same_bits(a, b)
    assert counts_of(updater.optimizer) == counts_of(plain.optimizer) == (5, {0: 4, 1: 5})


# Saved states


def trained(make: Callable[..., Any], **options: Any) -> tuple[mx.Updater, list[np.ndarray]]:
    """An Updater in the middle of a training with everything, and the weights."""
    schedule = mx.lr_scheduler.MultiFactorScheduler([2, 4, 5], 0.5, 0.1, 2, 0.01)
    opt = make(lr_scheduler=schedule, wd=0.1, clip_gradient=0.5, multi_precision=True,
               param_idx2name={0: "a", 2: "c"}, begin_num_update=1, **options)  # fmt: skip
    opt.set_lr_mult({"a": 0.5, 1: 2.0})
    opt.set_wd_mult({"c": 0.0})
    opt.rescale_grad = 0.3
    updater = mx.get_updater(opt)
    weights = [random(4, 3), random(5, dtype=F16), random(3, dtype=np.float64)]
    train(updater, weights, 0)
    return updater, weights


def train(updater: mx.Updater, weights: list[np.ndarray], seed: int) -> None:
    for k in range(seed, seed + 3):
        grads: list[Any] = [random(*w.shape, seed=k, dtype=w.dtype) for w in weights]
        grads[0] = rows([k % 4, 2])
        updater([0, 1, "c"], grads, weights)
        updater(1, grads[1], weights[1])


@EACH_KIND
def test_a_fresh_process_goes_on(make: Any, tmp_path: Path) -> None:
    updater, weights = trained(make)
    (tmp_path / "states").write_bytes(updater.get_states(dump_optimizer=True))
    np.savez(tmp_path / "weights.npz", *weights)
    program = f"""
        import sys
        import numpy as np
        from fusestep.nn import mxnet as mx
        from test_mxnet_updater import train
        updater = mx.get_updater(mx.create("adamw"))
        updater.set_states(open({str(tmp_path / "states")!r}, "rb").read())
        weights = list(np.load({str(tmp_path / "weights.npz")!r}).values())
        train(updater, weights, 3)
        print(updater.optimizer.learning_rate, *(w.tobytes().hex() for w in weights))
    """
    found = output_of(program).split()
    train(updater, weights, 3)
    assert found == [
        str(updater.optimizer.learning_rate),
        *(w.tobytes().hex() for w in weights),
    ]


@pytest.mark.parametrize("how", ["states", "all", "deepcopy", "pickle"])
@EACH_KIND
def test_copies_go_on(make: Any, how: str) -> None:
    updater, weights = trained(make)
    if how in ("states", "all"):
        other = mx.get_updater(make() if how == "all" else copy.deepcopy(updater.optimizer))
        if how == "states":
            other.optimizer._index_update_count, other.optimizer.num_update = {}, 0
        other.set_states(updater.get_states(dump_optimizer=how == "all"))
    else:
        other = copy.deepcopy(updater) if how == "deepcopy" else pickle.loads(pickle.dumps(updater))
    assert counts_of(other.optimizer) == counts_of(updater.optimizer) == (7, {0: 4, 1: 7, "c": 4})
    copies = copy.deepcopy(weights)
    train(updater, weights, 3)
    with unchanged(weights, updater.states):
        train(other, copies, 3)
    for a, b in zip(copies, weights, strict=True):
        assert_same_bits(a, b)
    other.optimizer.set_lr_mult({})
    other.optimizer.lr_scheduler.base_lr = 9.0
    assert updater.optimizer.lr_mult == {"a": 0.5, 1: 2.0}
    assert updater.optimizer.lr_scheduler.base_lr == 0.1


def test_saved_states_are_apart_from_the_present_ones() -> None:
    updater, _ = trained(mx.Adam)
    kept = updater.get_states()
    assert kept == updater.get_states()
    other = mx.get_updater(mx.Adam())
    for _ in range(2):
        other.set_states(kept)
        for array in (*other.states[0], *other.states["c"]):
            array += 1  # writable, and of its own
    assert mx.get_updater(mx.Adam()).get_states() != kept == updater.get_states()


def test_states_of_any_nesting() -> None:
    arrays = [random(2, 3), random(2, dtype=F16), np.array(2.0), np.zeros((0, 3), np.int64)]
    first, second = (mx.get_updater(mx.Optimizer()) for _ in "ab")
    first.states = {0: [(arrays[0], None), [3, 0.5, "x", True], ()], "b": None, -5: arrays[1:]}
    first.states["F"] = np.asfortranarray(random(2, 3))
    second.set_states(first.get_states())
    (found, nothing), values, empty = second.states[0]
    assert (nothing, values, empty) == (None, [3, 0.5, "x", True], ())
    assert list(second.states) == [0, "b", -5, "F"]
    assert second.states["b"] is None
    arrays.append(first.states["F"])
    for a, b in zip([found, *second.states[-5], second.states["F"]], arrays, strict=True):
        assert_same_bits(a, b)


BAD_STATES: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (
        None,
        TypeError,
        r"has a wrong type: expected \(mean, var\) of create_state, got None",
    ),
    "nones": ((None, None), TypeError, "is no array: expected an array, got NoneType"),
    "one": ((ones(3),), TypeError, "has a wrong type: .*got tuple of 1"),
    "three": ([ones(3)] * 3, TypeError, "has a wrong type: .*got list of 3"),
    "array": (ones(2), TypeError, "has a wrong type: .*got ndarray of 2"),
    "numbers": ((0.5, 1), TypeError, "is no array: .*got float"),
    "integers": ((ones(3), ones(3, dtype=int)), TypeError, "has a wrong dtype"),
    "shapes": ((ones(3), ones(2)), ValueError, r"has arrays that differ in shape: .*got \(2,\)"),
    "no moments": ((ones(3), ()), TypeError, "has a wrong type: .*got tuple of 0"),
    "one moment": ((ones(3), (ones(3), None)), TypeError, "is no array: .*got NoneType"),
    "master": ((ones(2), (ones(3), ones(3))), ValueError, "has arrays that differ in shape"),
}


@EACH_KIND
@pytest.mark.parametrize("case", BAD_STATES.values(), ids=BAD_STATES)
@pytest.mark.parametrize("dump_optimizer", [False, True])
def test_states_that_the_optimizer_could_not_take(
    make: Any, case: Any, dump_optimizer: bool
) -> None:
    state, error, text = case
    updater, _ = trained(make)
    before, opt, counts = updater.states, updater.optimizer, counts_of(updater.optimizer)
    other = mx.get_updater(make(param_idx2name={2: "c"}))
    other.states = {1: (ones(1), ones(1)), 2: state}
    label = "'c'" if dump_optimizer else "'2'"
    opt.idx2name = {}
    with refused(error, f"^{opt._name}: state of {label} {text}", before):
        updater.set_states(other.get_states(dump_optimizer=dump_optimizer))
    assert updater.states is before
    assert updater.optimizer is opt
    assert counts_of(opt) == counts


def test_states_of_a_subclass_are_its_own() -> None:
    class Plain(mx.Adam):
        def create_state(self, index: Any, weight: Any) -> Any:  # noqa: ARG002
            return None

    updater = mx.get_updater(Plain())
    updater.states = {0: None}
    updater.set_states(updater.get_states())
    assert updater.states == {0: None}


@pytest.mark.parametrize("state", [None, (ones(3),), (ones(3), None, None), ones(2)])
def test_update_with_a_state_without_its_master_copy(state: Any) -> None:
    class Descent(mx.Optimizer):
        def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
            weights[0] -= grads[0]

    opt, w = Descent(multi_precision=True), ones(3, dtype=F16)
    text = (
        r"^Descent: state of '0' has a wrong type: expected \(master, its state\) of create_state_"
    )
    with refused(TypeError, text, w):
        opt.update_multi_precision(0, w, ones(3, dtype=F16), state)


def test_param_dict_stays_with_the_process() -> None:
    held = {0: type("Held", (), {"lr_mult": 2.0, "wd_mult": 1.0})()}
    updater = mx.get_updater(mx.Adam(0.25))
    data = updater.get_states(dump_optimizer=True)
    other = mx.get_updater(mx.Adam(param_dict=held))
    other.set_states(data)
    assert other.optimizer._get_lr(0) == 0.5
    assert other.optimizer is not updater.optimizer


class Trap:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused_unread(protocol: int, tmp_path: Path) -> None:
    updater, _ = trained(mx.Adam)
    before, counts, trap = updater.states, counts_of(updater.optimizer), tmp_path / "executed"
    for value in (Trap(trap), {0: (ones(2), ones(2))}, ({0: None}, None)):
        data = pickle.dumps(value, protocol)
        with refused(ValueError, "^set_states: states cannot be read: .*pickles of MXNet", before):
            updater.set_states(data)
    assert not trap.exists()
    assert (updater.states is before, counts_of(updater.optimizer)) == (True, counts)


def damaged(data: bytes) -> Iterator[bytes]:
    """Cut, with other tensors, or with another document."""
    yield from (data[:n] for n in range(0, len(data), 97))
    yield data + b"x"
    tensors = load(data)
    for name in tensors:
        yield save({k: v for k, v in tensors.items() if k != name})
    document = json.loads(tensors["document"].tobytes())
    documents = [{k: v for k, v in document.items() if k != key} for key in document]
    for key in ("format", "states", "counts", "num_update"):
        documents += [{**document, key: value} for value in (None, "x")]
    texts = [json.dumps(d).encode() for d in documents]
    for text in (*texts, b"", b"{", b"[]", b"\xff", b"null"):
        yield save({**tensors, "document": np.frombuffer(text, np.uint8)})


def test_damaged_bytes_are_refused() -> None:
    updater, _ = trained(mx.Adam)
    before, counts = updater.states, counts_of(updater.optimizer)
    for data in damaged(updater.get_states(dump_optimizer=True)):
        with refused(ValueError, "^set_states: states cannot be read", before):
            updater.set_states(data)
        assert (updater.states is before, counts_of(updater.optimizer)) == (True, counts)
    for value in (None, "text", {0: ones(2)}, 5):
        with refused(TypeError, "^set_states: states has a wrong type: expected bytes", before):
            updater.set_states(value)


def test_optimizers_that_cannot_be_made_again() -> None:
    class Unknown(mx.Adam):
        pass

    class Own(mx.lr_scheduler.FactorScheduler):
        pass

    for opt, text in (
        (Unknown(), "^get_states: optimizer cannot be written: expected a registered class"),
        (mx.Adam(lr_scheduler=lambda _: 0.1), "^get_states: lr_scheduler cannot be written: .*Fac"),
        (mx.Adam(lr_scheduler=Own(3)), "^get_states: lr_scheduler cannot be written"),
    ):
        updater = mx.get_updater(opt)
        with pytest.raises(TypeError, match=text):
            updater.get_states(dump_optimizer=True)
        updater.set_states(updater.get_states())
    mx.register(Unknown)
    data = mx.get_updater(Unknown()).get_states(dump_optimizer=True)
    other = mx.get_updater(mx.Adam())
    other.set_states(data)
    assert type(other.optimizer) is Unknown
    del mx.Optimizer.opt_registry["unknown"]
    with pytest.raises(ValueError, match=r"name is unknown: .*got 'unknown'"):
        other.set_states(data)


@pytest.mark.parametrize("state", [{"m": ones(2)}, np.float32(1), object(), [ones(2), {1}]])
def test_states_that_cannot_be_written(state: Any) -> None:
    updater = mx.get_updater(mx.Adam())
    updater.states[0] = state
    with pytest.raises(
        TypeError, match=r"^get_states: state\.0.* cannot be written: expected None"
    ):
        updater.get_states()
    updater.states = {0.5: None}
    with pytest.raises(TypeError, match=r"an index cannot be written: .*int or a str, got 0\.5"):
        updater.get_states()
