"""MXNet's operator and optimizers on device arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fusestep
from fusestep import nn, ops
from fusestep.nn import mxnet as mx

from devices import (
    BF16,
    COMPUTES,
    F16,
    F32,
    F64,
    KIND,
    MARKS,
    SIMULATOR,
    assert_close,
    assert_same,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
    told,
    unchanged,
)

pytestmark = MARKS

SHAPE = (5, 3)
SCALARS: dict[str, Any] = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "2.0": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4},
    "1.9": {"wd": 0.3, "rescale_grad": 0.7, "clip_gradient": 0.4, "compat": "1.9"},
    "standard": {"wd": 0.3, "lazy_update": False},
    "locked": {"wd": 0.3, "use_locking": True},
}


def compare_update(grad: Any, dtype: Any, place: str, **options: Any) -> None:
    """Two steps on device and host: the same in every array; the result is returned."""
    shape = grad.shape
    variables = [positive(shape, dtype) for _ in range(3)]
    theirs = on_device(variables)
    made = []
    for arrays, g in ((variables, grad), (theirs, on_device(grad))):
        w, mean, var = arrays
        other = np.full(shape, 7, dtype)
        places = {
            "weight": w,
            "None": None,
            "other": other if w is variables[0] else on_device(other),
        }
        out = places[place]
        for _ in range(2):
            found = ops.adam_update(w, g, mean, var, out, **SCALARS, **options)
            assert out is None or found is out
        made.append(found)
    for ours, expected in zip([*theirs, made[1]], [*variables, made[0]], strict=True):
        assert_close(on_host(ours), expected, f"{dtype} {place} {options}")
    assert type(made[1]) is type(theirs[0]) or dtype == BF16
    fusestep.synchronize()


def test_updates() -> None:
    """Every option, dense and row-sparse, wherever the result goes."""
    sparse = rows([1, 4, 1, 0], SHAPE)
    for place, names in (("weight", OPTIONS), ("None", ["1.9"]), ("other", ["standard", "locked"])):
        for name in names:
            for grad in (gradient(SHAPE), sparse):
                compare_update(grad, F32, place, **OPTIONS[name])
    for dtype, of_gradient in ((F64, F32), (F16, F16), (BF16, BF16)):
        for grad in (gradient(SHAPE, of_gradient), rows([2, 2], SHAPE, of_gradient)):
            compare_update(grad, dtype, "other", wd=0.3)
        compare_update(gradient(SHAPE, of_gradient), dtype, "None")
    for place in ("weight", "None", "other"):
        for grad in (gradient(()), gradient((0, 3)), rows([], SHAPE), rows([3], (4,))):
            compare_update(grad, F32, place)


def test_update_reads_only_the_weight() -> None:
    """The weight changes only where it is ``out``; the gradient never does."""
    w, mean, var, out, g = on_device([positive(SHAPE) for _ in range(4)] + [gradient(SHAPE)])
    with unchanged(w, g):
        ops.adam_update(w, g, mean, var, out, **SCALARS)
        new = ops.adam_update(w, g, mean, var, **SCALARS)
    if COMPUTES:
        assert not (on_host(out) == on_host(w)).any()
        assert not (on_host(new) == on_host(w)).any()
    if KIND != SIMULATOR:
        return
    # Another view of the weight is the weight.
    view = type(w)(w._ary)
    assert ops.adam_update(w, g, mean, var, view, **SCALARS) is view
    before = on_host(w)
    w._ary.flags.writeable = False
    ops.adam_update(w, g, mean, var, out, **SCALARS)
    np.testing.assert_array_equal(on_host(w), before)


def test_update_errors() -> None:
    """A bad index writes nothing, not even to ``out``; what is wrong at once is refused."""
    w, mean, var, out = theirs = on_device([positive(SHAPE) for _ in range(4)])
    bad = on_device(rows([1, 5], SHAPE))
    for lazy in (True, False):
        for place in (w, out):
            with unchanged(*theirs):
                ops.adam_update(w, bad, mean, var, place, lazy_update=lazy, **SCALARS)
                with told(IndexError, "adam_update: indices[1] is out of range: expected 0 <="):
                    fusestep.synchronize()
        with unchanged(*theirs):
            new = ops.adam_update(w, bad, mean, var, lazy_update=lazy, **SCALARS)
            with told(IndexError, "got 5"):
                fusestep.synchronize()
        np.testing.assert_array_equal(on_host(new), on_host(w))
    g, host = on_device(gradient(SHAPE)), positive(SHAPE)
    for arrays in (
        (w, gradient(SHAPE), mean, var),
        (w, rows([1], SHAPE), mean, var),
        (w, g, host, var),
        (w, g, mean, var, host),
        (host, gradient(SHAPE), mean, var),
        (host, g, host + 1, host + 2, host),
        (host, on_device(rows([1], SHAPE)), host + 1, host + 2, host),
    ):
        with refused(ValueError, "lives elsewhere than", *theirs):
            ops.adam_update(*arrays, **SCALARS)
    room = on_device(positive((9, 3)))
    for arrays in (
        (w, g, mean, var, mean),
        (w, w, mean, var, w),
        (room[:5], g, mean, var, room[1:6]),
        (w, room[:5], room[4:], var),
        (w, room[4:], mean, var, room[:5]),
    ):
        with refused(ValueError, "shares memory with", *theirs, room):
            ops.adam_update(*arrays, **SCALARS)
    with refused(ValueError, "shares memory with", *theirs):
        shared = on_device(rows([1], SHAPE))
        shared.values = out[:1]
        ops.adam_update(w, shared, mean, var, out, **SCALARS)
    # Only the lower half is read, so the upper one may be written.
    ops.adam_update(room[:4], room[4:8], *on_device([positive((4, 3))] * 2), **SCALARS)
    with refused(ValueError, "has a wrong shape", *theirs):
        ops.adam_update(w, on_device(gradient((3, 5))), mean, var, out, **SCALARS)
    with refused(TypeError, "higher dtype", *theirs):
        ops.adam_update(w, on_device(gradient(SHAPE, F64)), mean, var, out, **SCALARS)
    with refused(ValueError, "is not contiguous", *theirs):
        ops.adam_update(on_device(positive((5, 6)))[:, ::2], g, mean, var, out, **SCALARS)
    huge = on_device([np.zeros((2**61, 0), F16) for _ in range(4)])
    with refused(ValueError, "too long sort keys"):
        ops.adam_update(huge[0], on_device(rows([1, 2], (2**61, 0), F16)), *huge[1:], **SCALARS)
    with refused(RuntimeError, "lives on a CUDA device", *theirs):
        ops.adam_update(w, g, mean, var, out, lr=on_device(np.array(0.1)))


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


def on_either(value: Any, device: bool) -> Any:
    return on_device(value) if device else value


def compare_updaters(make: Callable[[], Any], weights: Weights = WEIGHTS) -> tuple[Any, list[Any]]:
    """Three steps on device and host: the same weights, states, counts."""
    arrays, steps = [positive(*weight) for weight in weights], steps_of(weights)
    made = []
    for device in (False, True):
        updater = mx.get_updater(make())
        own = [on_either(a.copy(), device) for a in arrays]
        for step in steps:
            updater(list(range(len(own))), on_either(step, device), own)
        made.append((updater, own))
    (host, expected), (found, ours) = made
    for index, (weight, w) in enumerate(zip(ours, expected, strict=True)):
        assert_close(on_host(weight), w, f"weight {index}")
        states = flat(found.states[index]), flat(host.states[index])
        for ours_state, state in zip(*states, strict=True):
            assert type(ours_state) is type(ours[index]) or ours_state.dtype == BF16
            assert_close(on_host(ours_state), state, f"state of {index}")
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


def test_optimizers() -> None:
    """Each optimizer, form and version; the scheduler is asked as on the host."""
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5)
    for make in (
        lambda: mx.Adam(0.1, **CONDITIONS),
        lambda: mx.Adam(0.1, lazy_update=True, lr_scheduler=scheduler, **CONDITIONS),
        lambda: mx.Adam(0.1, compat="1.9", **CONDITIONS),
        lambda: mx.Adam(0.1, compat="1.9", aggregate_num=0),
        lambda: mx.Adam(0.1, use_fused_step=False, **CONDITIONS),
        lambda: mx.AdamW(0.1, aggregate_num=2, **CONDITIONS),
        lambda: mx.AdamW(0.1, use_fused_step=False, correct_bias=False, wd=0.2),
    ):
        compare_updaters(make)


def test_master_copies() -> None:
    """Master copies on the device, written in the pass of their weights or by themselves."""
    for make in (
        lambda: mx.Adam(0.1),
        lambda: mx.Adam(0.1, multi_precision=True, **CONDITIONS),
        lambda: mx.Adam(0.1, multi_precision=True, lazy_update=True),
        lambda: mx.AdamW(0.1, multi_precision=True, wd=0.3),
        lambda: Half(0.1, multi_precision=True, use_fused_step=False, aggregate_num=np.inf),
    ):
        compare_updaters(make, MIXED)


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
    make = lambda: mx.Adam(0.1, multi_precision=True, lazy_update=True)  # noqa: E731
    first, weights = compare_updaters(make, MIXED)
    data = first.get_states()
    step, indices = [*steps_of(MIXED)[1][:3], gradient((3,))], list(range(len(MIXED)))
    arrays = [on_host(w) for w in weights]
    found = []
    for device in (False, True):
        updater = mx.get_updater(make())
        updater.set_states(data)
        own = [on_either(a.copy(), device) for a in arrays]
        for _ in range(2):
            updater(indices, on_either(step, device), own)
        assert updater.get_states()  # those of host and device can be written
        found.append((updater, own))
    for _ in range(2):
        first(indices, on_device(step), weights)
    (host, expected), (device, ours) = found
    for index in indices:
        assert_close(on_host(ours[index]), expected[index])
        assert_same(ours[index], on_host(weights[index]))
        states = (flat(u.states[index]) for u in (first, device, host))
        for a, b, c in zip(*states, strict=True):
            assert_same(a, on_host(b))
            assert_close(on_host(a), c)


def test_updater_errors() -> None:
    """A bad index writes nothing, of no weight of the call; its counts stay, and steps go on."""
    shapes = (((5, 3), F32), ((4, 2), F64), ((7,), F32))
    weights = on_device([positive(*weight) for weight in shapes])
    for lazy in (True, False):
        updater = mx.get_updater(mx.Adam(0.1, lazy_update=lazy, param_idx2name={1: "table"}))
        updater([0, 1, 2], on_device([gradient(*weight) for weight in shapes]), weights)
        arrays = [a for index in range(3) for a in (weights[index], *updater.states[index])]
        good, bad = rows([1, 2], (5, 3)), rows([0, 4], (4, 2), F64)
        with unchanged(*arrays):
            updater([0, 1, 2], on_device([good, bad, gradient((7,))]), weights)
            with told(IndexError, "Adam: gradient of 'table': indices[1] is out of range"):
                updater.get_states()
        assert updater.optimizer._index_update_count == {0: 2, 1: 2, 2: 2}
        with unchanged(*arrays):
            updater(0, on_device(rows([-1], (5, 3))), weights[0])
            with told(IndexError, "Adam: gradient of '0': indices[0] is out of range"):
                fusestep.synchronize()
        updater(0, on_device(good), weights[0])
        fusestep.synchronize()
        assert updater.optimizer.num_update == 4
    host, g = positive((5, 3)), on_device(gradient((5, 3)))
    opt, on_cpu = mx.Adam(), mx.Adam()
    state, of_host = opt.create_state(0, weights[0]), on_cpu.create_state(0, host)
    arrays = [weights[0], weights[2], g, *state]
    for call in (
        lambda: opt.update(0, weights[0], on_host(g), state),
        lambda: opt.update(0, weights[0], rows([1], (5, 3)), state),
        lambda: opt.update(0, weights[0], g, of_host),
        lambda: opt.update(0, host, g, of_host),
        lambda: opt.update(0, host, on_host(g), state),
        lambda: opt.update([0, 1], [weights[0], host], [g, on_host(g)], [state, of_host]),
    ):
        with refused(ValueError, "lives elsewhere than", *arrays):
            call()
    with refused(ValueError, "shares memory with", *arrays):
        opt.update(0, weights[0], weights[0], state)
    with refused(ValueError, "shares memory with", *arrays):
        opt.update([0, 1], [weights[0]] * 2, [g, g], [state, opt.create_state(1, g)])
    with refused(ValueError, "has a wrong shape", *arrays):
        opt.update(0, weights[0], on_device(gradient((3, 5))), state)
    assert opt.num_update == 0 and not opt._index_update_count
    opt.update([0], [weights[0]], [None], [state])
    assert opt.num_update == 0
