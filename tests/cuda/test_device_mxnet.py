"""MXNet's operator and optimizers on device arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.nn import mxnet as mx

from devices import (
    KIND,
    MARKS,
    SIMULATOR,
    assert_calls_alike,
    assert_close,
    assert_same,
    gradient,
    on_device,
    on_host,
    only,
    positive,
    refused,
    rows,
    told,
    unchanged,
)
from helpers import STORAGE_DTYPES

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES

SHAPE = (5, 3)
SCALARS: dict[str, Any] = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2.0": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4},
    "1.9": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4, "compat": "1.9"},
    "standard": {"wd": 0.3, "lazy_update": False},
    "locked": {"wd": 0.3, "use_locking": True},
}


DENSE, EMPTY = ((5, 3), None), ((0, 3), None)
SPARSE, ONE, NO_ROWS = ((5, 3), [1, 4, 1, 0]), ((4,), [3]), ((5, 3), [])
# Options, where the result goes, shape and rows of the gradient, dtypes of weight and gradient.
UPDATES = [
    *product(OPTIONS, ["weight"], (DENSE, SPARSE), [(F32, F32)]),
    *product(["1.9"], ["None"], (DENSE, SPARSE), [(F32, F32)]),
    *product(["standard", "locked"], ["other"], (DENSE, SPARSE), [(F32, F32)]),
    *product(
        ["standard"], ["None", "other"], (DENSE, SPARSE), [(F64, F32), (F16, F16), (BF16, BF16)]
    ),
    *product(
        ["plain"], ["weight", "None", "other"], (((), None), EMPTY, NO_ROWS, ONE), [(F32, F32)]
    ),
]


@pytest.mark.parametrize(("options", "place", "form", "dtypes"), UPDATES, ids=str)
def test_updates(options: str, place: str, form: Any, dtypes: Any) -> None:
    """Every option, dense and row-sparse, wherever the result goes."""

    def update(w: Any, mean: Any, var: Any, other: Any, g: Any) -> Any:
        out = {"weight": w, "None": None, "other": other}[place]
        for _ in range(2):
            found = ops.adam_update(w, g, mean, var, out, **SCALARS, **OPTIONS[options])
            assert out is None or found is out
        assert type(found) is type(w) or found.dtype == BF16
        return found

    (shape, indices), (dtype, of_gradient) = form, dtypes
    arrays = [positive(shape, dtype) for _ in range(4)]
    make = gradient if indices is None else partial(rows, indices)
    assert_calls_alike(update, *arrays, make(shape, of_gradient), compare=assert_close)


@only(SIMULATOR, reason="there arrays can be read-only, and have views")
def test_update_reads_only_the_weight() -> None:
    """A view of the weight is the weight; where it is not ``out``, it may be read-only."""
    w, mean, var, out, g = on_device([positive(SHAPE) for _ in range(4)] + [gradient(SHAPE)])
    view = type(w)(w._ary)
    assert ops.adam_update(w, g, mean, var, view, **SCALARS) is view
    w._ary.flags.writeable = False
    with unchanged(w, g):
        ops.adam_update(w, g, mean, var, out, **SCALARS)


@pytest.mark.parametrize("lazy", [True, False])
def test_bad_rows_of_an_update(lazy: bool) -> None:
    """A bad index writes nothing, not even to ``out``; what is new is the weight."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    bad = on_device(rows([1, 5], SHAPE))
    text = "adam_update: indices[1] is out of range: expected 0 <="
    for place in (w, out, None):
        with told(IndexError, text, *theirs):
            new = ops.adam_update(w, bad, mean, var, place, lazy_update=lazy, **SCALARS)
    assert_same(new, on_host(w))


def test_what_an_update_refuses() -> None:
    """Beside what is refused of each array: see test_device_operators.py."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    g, host, room = on_device(gradient(SHAPE)), positive(SHAPE), on_device(positive((9, 3)))
    shared = on_device(rows([1], SHAPE))
    shared.values = out[:1]
    huge = on_device([np.zeros((2**61, 0), F16) for _ in range(4)])
    elsewhere, overlap = "lives elsewhere than", "shares memory with"
    for error, text, arrays in (
        (ValueError, elsewhere, (w, rows([1], SHAPE), mean, var)),
        (ValueError, elsewhere, (w, g, mean, var, host)),
        (ValueError, elsewhere, (host, shared, host + 1, host + 2, host)),
        (ValueError, overlap, (w, g, mean, var, mean)),
        (ValueError, overlap, (w, w, mean, var, w)),
        (ValueError, overlap, (room[:5], g, mean, var, room[1:6])),
        (ValueError, overlap, (w, room[:5], room[4:], var)),
        (ValueError, overlap, (w, room[4:], mean, var, room[:5])),
        (ValueError, overlap, (w, shared, mean, var, out)),
        (ValueError, "too long sort keys",
         (huge[0], on_device(rows([1, 2], (2**61, 0), F16)), *huge[1:])),
    ):  # fmt: skip
        with refused(error, text, *theirs, room):
            ops.adam_update(*arrays, **SCALARS)
    with refused(RuntimeError, "lives on a CUDA device", *theirs):
        ops.adam_update(w, g, mean, var, out, lr=on_device(np.array(0.1)))
    # Only the lower half is read, so the upper one may be written.
    ops.adam_update(room[:4], room[4:8], *on_device([positive((4, 3))] * 2), **SCALARS)


# nn.mxnet

Weights = tuple[tuple[tuple[int, ...], Any], ...]
WEIGHTS: Weights = (((5, 3), F32), ((7,), F32), ((4, 2), F32), ((), F32), ((0, 3), F32))
MIXED: Weights = (((5, 3), BF16), ((7,), F16), ((4, 2), F64), ((3,), F32))


def steps_of(weights: Weights) -> list[list[Any]]:
    """Dense and row-sparse gradients: duplicates, no rows, parts, None."""
    (first, d0), (_, d1), (third, d2) = weights[:3]
    parts = [rows([1, 3], first, d0), rows([1], first, d0)]
    rest = [None] * (len(weights) - 3)
    return [
        [gradient(shape, dtype) for shape, dtype in weights],
        [rows([4, 1, 4], first, d0), gradient((7,), d1), rows([], third, d2), *rest],
        [parts, None, rows([3, 3], third, d2), *rest],
    ]


def flat(state: Any) -> list[Any]:
    """The arrays of a state."""
    return [a for part in state for a in flat(part)] if isinstance(state, tuple) else [state]


def compare_updaters(
    make: Callable[[], Any], arrays: list[np.ndarray], steps: list[list[Any]], data: Any = None
) -> tuple[Any, list[Any]]:
    """Some steps on device and host, from saved states on: the same weights, states, counts."""
    made = []
    for there in (copy.deepcopy, on_device):
        updater = mx.get_updater(make())
        if data:
            updater.set_states(data)
        own = there(arrays)
        for step in steps:
            updater(list(range(len(own))), there(step), own)
        assert updater.get_states()  # those of host and device can be written
        made.append((updater, own))
    (host, expected), (found, ours) = made
    assert_close(ours, expected)
    for index, weight in enumerate(ours):
        assert_close(found.states[index], host.states[index], f"state of {index}")
        for state in flat(found.states[index]):
            assert data or type(state) is type(weight) or state.dtype == BF16
    assert found.optimizer._index_update_count == host.optimizer._index_update_count
    assert found.optimizer.num_update == host.optimizer.num_update
    fusestep.synchronize()
    return found, ours


CONDITIONS = {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4}


class Half(mx.Adam):
    """An optimizer with a step of its own, which does not know of master copies."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:
        """The rate is halved."""
        self.lr *= 0.5
        super().step(indices, weights, grads, states)


UPDATERS: tuple[Callable[[], Any], ...] = (
    lambda: mx.Adam(0.1, **CONDITIONS),
    lambda: mx.Adam(
        0.1, lazy_update=True, lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5), **CONDITIONS
    ),
    lambda: mx.Adam(0.1, compat="1.9", **CONDITIONS),
    lambda: mx.Adam(0.1, compat="1.9", aggregate_num=0),
    lambda: mx.Adam(0.1, use_fused_step=False, **CONDITIONS),
    lambda: mx.AdamW(0.1, aggregate_num=2, **CONDITIONS),
    lambda: mx.AdamW(0.1, use_fused_step=False, correct_bias=False, wd=0.2),
)
# Master copies on the device, written in the pass of their weights or by themselves.
OF_MASTERS: tuple[Callable[[], Any], ...] = (
    lambda: mx.Adam(0.1),
    lambda: mx.Adam(0.1, multi_precision=True, **CONDITIONS),
    lambda: mx.Adam(0.1, multi_precision=True, lazy_update=True),
    lambda: mx.AdamW(0.1, multi_precision=True, wd=0.3),
    lambda: Half(0.1, multi_precision=True, use_fused_step=False, aggregate_num=np.inf),
)


@pytest.mark.parametrize(
    ("make", "weights"), [*product(UPDATERS, [WEIGHTS]), *product(OF_MASTERS, [MIXED])]
)
def test_optimizers(make: Callable[[], Any], weights: Weights) -> None:
    """Each optimizer, form and version; the scheduler is asked as on the host."""
    compare_updaters(make, [positive(*weight) for weight in weights], steps_of(weights))


def test_parameters() -> None:
    """A `Parameter` is its array, wherever that was bound to."""
    p, g = nn.Parameter(on_device(positive((5, 3))), "w"), on_device(gradient((5, 3)))
    opt, w = mx.Adam(0.1), p.asnumpy()
    state, expected = opt.create_state(0, p), mx.Adam(0.1)
    of_host = expected.create_state(0, w)
    for _ in range(2):
        opt.update(0, p, g, state)
        expected.update(0, w, on_host(g), of_host)
        p.data = on_device(on_host(p.data))
        g = on_device(gradient((5, 3)))
    assert_close(p.asnumpy(), w)
    if KIND != SIMULATOR:
        return
    # The memory under an array can be exchanged too.
    array = p.data
    opt.update(0, array, g, state)
    before, array._ary = array._ary, on_host(array)
    opt.update(0, array, g, state)
    for _ in range(2):
        expected.update(0, w, on_host(g), of_host)
    assert_close(on_host(array), w)
    assert not (before == w).any()


def test_saved_states() -> None:
    """States are copied to the host, and taken over on either side; steps go on alike."""
    make, steps = partial(mx.Adam, 0.1, multi_precision=True, lazy_update=True), steps_of(MIXED)
    first, weights = compare_updaters(make, [positive(*weight) for weight in MIXED], steps)
    step = [*steps[1][:3], gradient((3,))]
    arrays, data = [on_host(w) for w in weights], first.get_states()
    second, others = compare_updaters(make, arrays, [step, step], data)
    for _ in range(2):
        first(list(range(len(MIXED))), on_device(step), weights)
    assert_same(others, weights)
    assert_same([*second.states.values()], [*first.states.values()])


def test_updater_errors() -> None:
    """A bad index writes nothing, of no weight of the call; its counts stay, and steps go on."""
    shapes = (((5, 3), F32), ((4, 2), F64), ((7,), F32))
    weights = on_device([positive(*weight) for weight in shapes])
    for lazy in (True, False):
        updater = mx.get_updater(mx.Adam(0.1, lazy_update=lazy, param_idx2name={1: "table"}))
        updater([0, 1, 2], on_device([gradient(*weight) for weight in shapes]), weights)
        arrays = [a for index in range(3) for a in (weights[index], *updater.states[index])]
        good, bad = rows([1, 2], (5, 3)), rows([0, 4], (4, 2), F64)
        text = "Adam: gradient of 'table': indices[1] is out of range"
        with told(IndexError, text, *arrays, by=updater.get_states):
            updater([0, 1, 2], on_device([good, bad, gradient((7,))]), weights)
        assert updater.optimizer._index_update_count == {0: 2, 1: 2, 2: 2}
        with told(IndexError, "Adam: gradient of '0': indices[0] is out of range", *arrays):
            updater(0, on_device(rows([-1], (5, 3))), weights[0])
        updater(0, on_device(good), weights[0])
        fusestep.synchronize()
        assert updater.optimizer.num_update == 4
    host, g = positive((5, 3)), on_device(gradient((5, 3)))
    opt, on_cpu = mx.Adam(), mx.Adam()
    state, of_host = opt.create_state(0, weights[0]), on_cpu.create_state(0, host)
    arrays = [weights[0], weights[2], g, *state]
    elsewhere, shared, w = "lives elsewhere than", "shares memory with", weights[0]
    for text, arguments in (
        (elsewhere, (0, w, on_host(g), state)),
        (elsewhere, (0, w, rows([1], (5, 3)), state)),
        (elsewhere, (0, w, g, of_host)),
        (elsewhere, (0, host, g, of_host)),
        (elsewhere, (0, host, on_host(g), state)),
        (elsewhere, ([0, 1], [w, host], [g, on_host(g)], [state, of_host])),
        (shared, (0, w, w, state)),
        (shared, ([0, 1], [w, w], [g, g], [state, opt.create_state(1, g)])),
        ("has a wrong shape", (0, w, on_device(gradient((3, 5))), state)),
    ):
        with refused(ValueError, text, *arrays):
            opt.update(*arguments)
    assert opt.num_update == 0 and not opt._index_update_count
    opt.update([0], [weights[0]], [None], [state])
    assert opt.num_update == 0
