"""MXNet's interface in the hands of others: stale arrays, damaged states, own hooks, odd orders."""

from __future__ import annotations

import json
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from fusestep import nn
from fusestep.nn import RowTensor
from fusestep.nn import mxnet as mx
from fusestep.nn.mxnet.bindings import _KEPT_WEIGHTS
from fusestep.ops import adam_update
from fusestep.ops.runtime import locks

from helpers import assign, refused

F16, F32 = np.float16, np.float32


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def after_a_step() -> tuple[mx.Adam, np.ndarray, Any]:
    """An optimizer that knows a weight and its state."""
    opt, w = mx.Adam(), ones(6)
    state = opt.create_state(0, w)
    opt.update(0, w, ones(6), state)
    return opt, w, state


# Orders and counts


@pytest.mark.parametrize("aggregate_num", [0, 1, 2])
def test_results_do_not_depend_on_aggregation(aggregate_num: int) -> None:
    """A scheduler sees the largest count so far, so the order of the indices matters."""
    found = []
    for number in (np.inf, aggregate_num):
        updater = mx.get_updater(mx.Adam(lr_scheduler=lambda n: 0.1 / n, aggregate_num=number))
        a, b, c = ones(2), ones(2, dtype=F16), ones(2)
        for _ in range(5):
            updater(1, ones(2, dtype=F16), b)
        updater([0, 1, 2], [ones(2), ones(2, dtype=F16), ones(2)], [a, b, c])
        found.append(c)
    np.testing.assert_array_equal(*found)


def test_two_row_batches_of_which_one_has_too_long_keys() -> None:
    """Tables of no columns: as many rows as one likes. Nothing is written, not the other either."""
    opt, small, huge = mx.Adam(), ones(10, 4), np.ones((2**59 + 2**58 + 2**57, 0), np.float64)
    weights, indices = [small, huge], np.arange(9)
    grads = [
        RowTensor(indices, ones(9, 4), small.shape),
        RowTensor(indices, ones(9, 0, dtype=np.float64), huge.shape),
    ]
    states = [opt.create_state(0, w) for w in weights]
    with pytest.raises(ValueError, match="need too long sort keys"):
        opt.update([0, 1], weights, grads, states)
    assert (small == 1).all()
    assert opt._index_update_count == {}


# Arrays


def test_a_weight_that_became_read_only() -> None:
    opt, w, state = after_a_step()
    w.flags.writeable = False
    before = w.copy()
    with pytest.raises(ValueError, match="is read-only"):
        opt.update(0, w, ones(6), state)
    np.testing.assert_array_equal(w, before)


def test_a_weight_that_was_resized_in_place() -> None:
    opt, w, state = after_a_step()
    w.resize((500_000,), refcheck=False)
    with pytest.raises(ValueError, match="state of '0' has a wrong shape"):
        opt.update(0, w, ones(500_000), state)


def test_a_weight_of_another_shape_takes_gradients_of_that() -> None:
    opt, w, state = after_a_step()
    for array in (w, *state):
        assign(array, shape=(2, 3))
    opt.update(0, w, ones(2, 3), state)
    with pytest.raises(ValueError, match="has a wrong shape"):
        opt.update(0, w, ones(6), state)


def test_arrays_of_old_calls_are_not_kept() -> None:
    """Those of the last calls are, up to a number of weights."""
    opt = mx.Adam()
    for first in range(0, 3 * _KEPT_WEIGHTS, 500):
        indices = list(range(first, first + 500))
        weights = [ones(1) for _ in indices]
        states = [opt.create_state(i, w) for i, w in zip(indices, weights, strict=True)]
        opt.update(indices, weights, [ones(1) for _ in indices], states)
    assert sum(map(len, opt._bindings._known)) <= _KEPT_WEIGHTS
    opt.forget_arrays()
    assert not opt._bindings._known


def test_a_master_copy_is_made_with_the_first_gradient() -> None:
    updater, w = mx.get_updater(mx.Adam(multi_precision=True)), ones(2, dtype=F16)
    updater(0, None, w)
    assert updater.states == {}
    w[...] = 5
    updater(0, ones(2, dtype=F16), w)
    assert (w > 4).all()


def test_a_parameter_and_its_array_are_the_same_memory() -> None:
    p = nn.Parameter(ones(2))
    assert adam_update(p, ones(2), ones(2), ones(2), out=p.data, lr=0.1) is p.data
    assert (p.data < 1).all()


@pytest.mark.parametrize("name", ["mean", "var"])
def test_the_result_does_not_go_to_a_moment(name: str) -> None:
    arrays = {name: ones(3) for name in ("weight", "grad", "mean", "var")}
    with pytest.raises(ValueError, match=r"adam_update: out shares memory|shares memory with out"):
        adam_update(**arrays, out=arrays[name], lr=0.1)
    assert all((array == 1).all() for array in arrays.values())


def test_copy_and_step_are_made_under_the_lock() -> None:
    out, weight, gradient, done = ones(1000), ones(1000), ones(1000), []

    def call() -> None:
        moments = np.zeros((2, 1000), F32)
        adam_update(weight, gradient, *moments, out=out, lr=0.1, use_locking=True)
        done.append(True)

    with locks.turn():
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.5)
        assert not done
    thread.join()
    assert done


# Hooks of users


def test_rates_and_decays_of_a_subclass_act() -> None:
    class Own(mx.Adam):
        def _get_lr(self, index: int) -> float:
            return 0.5 * super()._get_lr(index) * (1 + index)

        def _get_wd(self, index: int) -> float:
            return 2.0 + 0 * index

    w, expected = [ones(1), ones(1)], [ones(1), ones(1)]
    own, plain = Own(0.2, epsilon=1.0), mx.Adam(0.1, epsilon=1.0, wd=2.0)
    plain.set_lr_mult({1: 2.0})
    for opt, weights in ((own, w), (plain, expected)):
        states = [opt.create_state(i, x) for i, x in enumerate(weights)]
        opt.update([0, 1], weights, [ones(1), ones(1)], states)
    np.testing.assert_array_equal(w, expected)


@pytest.mark.parametrize("composed", [True, False])
def test_rates_and_decays_of_a_subclass_are_numbers(composed: bool) -> None:
    class Own(mx.Adam):
        rate: Any = 0.5
        decay: Any = 0.0

        def _get_lr(self, _: Any) -> Any:
            return self.rate

        def _get_wd(self, _: Any) -> Any:
            return self.decay

    opt, w = Own(use_fused_step=not composed), ones(2)
    state = opt.create_state(0, w)
    for name, label in (("rate", "the learning rate of _get_lr"), ("decay", "wd of _get_wd")):
        for wrong in (True, None, "0.5", [0.5]):
            setattr(opt, name, wrong)
            match = f"^Own: {label} has a wrong type: expected a number, got "
            with refused(TypeError, match, w, state):
                opt.update(0, w, ones(2), state)
            assert opt.num_update == 0
        delattr(opt, name)
    opt.rate, opt.decay = np.array([0.5]), np.float16(0.25)  # what can be no key of a dict, too
    opt.update(0, w, ones(2), state)


def test_a_subclass_in_the_style_of_19_gets_single_weights() -> None:
    class Own(mx.Adam):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            seen.append(index)
            super().update(index, weight, grad, state)

    for compat, expected in (("1.9", [0, 1]), ("2.0", [[0], [1]])):
        seen: list[Any] = []
        mx.get_updater(Own(compat=compat))([0, 1], [ones(2), ones(2)], [ones(2), ones(2)])
        assert seen == expected


def test_a_subclass_with_master_copies_takes_every_kind_of_gradient() -> None:
    class Own(mx.Adam):
        def update(self, *arguments: Any) -> None:
            super().update(*arguments)

    updater, w = (
        mx.get_updater(Own(multi_precision=True)),
        [ones(2, dtype=F16), ones(2, 1, dtype=F16)],
    )
    rows = [RowTensor(np.array([1]), ones(1, 1, dtype=F16), (2, 1))] * 2
    updater([0, 1], [None, rows], w)
    assert (w[0] == 1).all()
    assert w[1][1] < 1


# Attributes


def test_attributes_are_checked_when_they_are_assigned() -> None:
    opt = mx.Adam(lazy_update=True)
    for name, bad in {"compat": "3", "lr_mult": {0: -1.0}, "num_update": "x", "lr": -1.0}.items():
        with pytest.raises((TypeError, ValueError), match=f"^Adam: {name}"):
            setattr(opt, name, bad)
    opt.use_fused_step = False
    table = ones(4, 2)
    with pytest.raises(AssertionError, match=r"^Adam: lazy_update needs use_fused_step"):
        opt.update(0, table, ones(4, 2), opt.create_state(0, table))
    assert not hasattr(mx.Adam.__new__(mx.Adam), "lr")


@pytest.mark.parametrize("bad", [5, False, [(0, 3)], "x", {0: 3}])
def test_param_dict_is_checked(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^Adam: param_dict"):
        mx.Adam(param_dict=bad)


@pytest.mark.parametrize("make", [lambda: mx.Adam(-1), lambda: mx.Adam("x"),
                                  lambda: mx.Adam().set_learning_rate("x")])  # fmt: skip
def test_the_learning_rate_has_its_own_name_in_errors(make: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^Adam: learning_rate "):
        make()


@pytest.mark.parametrize("optimizer", [mx.Adam, mx.AdamW])
def test_a_decay_that_its_factor_makes_too_large(optimizer: Any) -> None:
    opt, w = optimizer(wd=1e20), ones(2)
    opt.set_wd_mult({0: 1e20})
    with pytest.raises(ValueError, match="wd with its factor is too large"):
        opt.update(0, w, ones(2), opt.create_state(0, w))
    assert (w == 1).all()
    assert opt.num_update == 0


def test_lists_given_to_fused_step() -> None:
    opt, w = mx.Adam(), ones(2)
    state = opt.create_state(0, w)
    with pytest.raises(ValueError, match=r"^Adam: weights has a wrong length"):
        opt.fused_step([0, 1], [w], [ones(2)], [state])
    with pytest.raises(ValueError, match=r"^Adam: indices repeat"):
        opt.fused_step([0, 0], [w, w], [ones(2)] * 2, [state] * 2)
    assert opt._index_update_count == {}


def test_a_wrong_state_is_not_printed_whole() -> None:
    opt, weights = mx.Adam(), [ones(30) for _ in range(50)]
    with pytest.raises(TypeError, match="state of '0' has a wrong type") as error:
        opt.update(list(range(50)), weights, weights, [ones(30)] * 50)
    assert len(str(error.value)) < 300


def test_an_array_is_no_list_of_indices() -> None:
    with pytest.raises(
        TypeError, match=r"^Updater: index has a wrong type: expected ints and strs"
    ):
        mx.get_updater(mx.Adam())(np.array([0, 1]), [ones(1)] * 2, [ones(1)] * 2)


# States


def kept_and_restored(updater: mx.Updater, **options: Any) -> mx.Updater:
    other = mx.get_updater(mx.Adam())
    other.set_states(updater.get_states(**options))
    return other


def test_bfloat16_states() -> None:
    updater = mx.get_updater(mx.Adam())
    updater.states[0] = (np.arange(3).astype(ml_dtypes.bfloat16),) * 2
    for found in kept_and_restored(updater).states[0]:
        assert found.dtype == ml_dtypes.bfloat16
        assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "state",
    [namedtuple("State", "m v")(1, 2), np.ones(2, complex), np.array(["x"]), object()],
)
def test_states_that_cannot_be_read_are_not_written(state: Any) -> None:
    updater = mx.get_updater(mx.Adam())
    updater.states[0] = state
    with pytest.raises(TypeError, match=r"^get_states: state\.0 cannot be written"):
        updater.get_states()


def test_a_base_rate_that_was_lowered_after_the_warm_up() -> None:
    rates = mx.lr_scheduler.FactorScheduler(10, base_lr=0.1, warmup_steps=5, warmup_begin_lr=0.05)
    updater = mx.get_updater(mx.Adam(lr_scheduler=rates))
    updater.optimizer.lr_scheduler.base_lr = 0.01
    found = kept_and_restored(updater, dump_optimizer=True).optimizer.lr_scheduler
    assert vars(found) == vars(rates)


def test_a_registered_class_with_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.Optimizer, "opt_registry", dict(mx.Optimizer.opt_registry))

    @mx.register
    class Plain(mx.Optimizer):
        def __init__(self, momentum: float = 0.9) -> None:
            super().__init__(learning_rate=0.1)
            self.momentum = momentum

    found = kept_and_restored(mx.get_updater(Plain(0.5)), dump_optimizer=True).optimizer
    assert isinstance(found, Plain)
    assert (found.momentum, found.learning_rate) == (0.5, 0.1)


DAMAGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda d: d.update(states=[[0, [1]]]),
    lambda d: d.update(states=[[0, "x"]]),
    lambda d: d.update(states=[[None, {"value": 1}]]),
    lambda d: d.update(counts=[[0, -1]]),
    lambda d: d.update(counts=[[0, 1.7]]),
    lambda d: d.update(counts=[[0, "7"]]),
    lambda d: d.update(counts=[[0, 1e999]]),
    lambda d: d.update(num_update=-3),
    lambda d: d.update(num_update=1e999),
    lambda d: d.update(optimizer=[1]),
    lambda d: d.update(optimizer={}),
    lambda d: d["states"].append(d["states"][0]),
    lambda d: d["counts"].append([0, 3]),
    lambda d: d["optimizer"].pop("idx2name"),
    lambda d: d["optimizer"]["lr_scheduler"].update(name="X"),
    lambda d: d["optimizer"]["lr_scheduler"]["arguments"].pop("step"),
    lambda d: d["optimizer"].update(lr_mult=[[0, -4.0]]),
    lambda d: d["optimizer"].update(lr_mult=5),
    lambda d: d["optimizer"]["arguments"].update(lr_scheduler=None),
    lambda d: d["optimizer"]["arguments"].update(beta1="x"),
    lambda d: d["optimizer"]["arguments"].update(nope=1),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_documents(damage: Callable[[dict[str, Any]], Any]) -> None:
    updater = mx.get_updater(mx.Adam(lr_scheduler=mx.lr_scheduler.FactorScheduler(5)))
    updater(0, ones(2), ones(2))
    tensors = load(updater.get_states(dump_optimizer=True))
    document = json.loads(tensors["document"].tobytes())
    damage(document)
    text = np.frombuffer(json.dumps(document).encode(), np.uint8)
    other = mx.get_updater(mx.Adam())
    with pytest.raises(ValueError, match=r"^set_states: states cannot be read"):
        other.set_states(save({**tensors, "document": text}))
    assert (other.states, other.optimizer.num_update) == ({}, 0)


def test_a_document_that_is_nested_too_deeply() -> None:
    tensors = load(mx.get_updater(mx.Adam()).get_states())
    tensors["document"] = np.frombuffer(b"[" * 200_000 + b"]" * 200_000, np.uint8)
    with pytest.raises(ValueError, match=r"^set_states: states cannot be read"):
        mx.get_updater(mx.Adam()).set_states(save(tensors))


def test_the_name_of_mxnets_module() -> None:
    assert mx.optimizer.create("adam", learning_rate=0.5).learning_rate == 0.5
