"""Changes between steps: numbers on the device, options, states, memory, targets."""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.ops.runtime.device import DeviceArray

from devices import (
    BETAS,
    BF16,
    COMPUTES,
    F16,
    F32,
    F64,
    GPU,
    MARKS,
    STUB,
    Run,
    assert_alike,
    assert_equal_runs,
    assert_same,
    capture,
    computed,
    gradient,
    on_device,
    on_host,
    only,
    positive,
    put,
    refused,
    rows,
    told,
    unchanged,
)
from helpers import STORAGE_DTYPES

pytestmark = MARKS

SHAPES = ((5, 4), (7,), (), (0, 3))


def test_numbers_of_a_group() -> None:
    """A rate on the device is that of one group alone; on the host it is read, and waited for."""
    variables = [positive(shape) for shape in SHAPES]
    for target in ("GPU", "CPU"):
        lr, w = on_device(np.array(0.125)), [v.copy() for v in variables]
        theirs = on_device(variables)
        ours, other = (
            nn.AdamWeightDecay(
                [{"params": p[:1], "lr": rate, "weight_decay": 0.2}, {"params": p[1:]}], 0.05
            )
            for p, rate in ((theirs, lr), (w, 0.125))
        )
        ours.target = target
        step = [gradient(shape) for shape in SHAPES]
        ours(tuple(on_device(step)))
        other(tuple(step))
        assert ours.get_lr() == other.get_lr()
        assert_equal_runs(ours, other)


def test_rates_in_states() -> None:
    """A rate on the device is part of the state, copied to the host and taken back."""
    lr = on_device(np.array(0.125, F32))
    opt = nn.Adam(on_device([positive((3,))]), lr)
    state = opt.state_dict()
    assert state["learning_rate"] == np.float32(0.125)
    put(lr, 0.5)
    assert opt.get_lr() == 0.5
    opt.load_state_dict(state)
    assert opt.get_lr() == 0.125 and on_host(lr) == np.float32(0.125)


def test_overflows() -> None:
    """Steps in which `found_inf` is not 0 change nothing and are counted as skipped."""
    for dtype, target in ((F32, "GPU"), (F64, "GPU"), (np.dtype(bool), "GPU"), (F32, "CPU")):
        run, flag = Run(), on_device(np.zeros(1, dtype))
        run.opt.target = target
        run.opt.found_inf = flag
        assert run.opt.found_inf is flag
        run.step([1, 2])
        run.before = run.opt.state_dict()
        put(flag, [1])
        run.step([0, 2])
        run.step(None)
        run.assert_as_before()
        assert run.opt.skipped_steps == 2 and run.opt.global_step == 2
        put(flag, [0])
        run.step([0, 2])
        run.opt.found_inf = None
        run.step(None)
        fusestep.synchronize()
        assert run.opt.skipped_steps == 2 and run.opt.global_step == 4
    # A skipped step finds nothing.
    run.opt.target = "GPU"
    run.opt.found_inf = flag
    put(flag, [1])
    run.step([9])
    fusestep.synchronize()
    put(flag, [0])
    run.step([8], dense=False)
    put(flag, [1])
    run.step([1])
    with told(IndexError, "got 8", *run.w):
        fusestep.synchronize()
    assert run.opt.skipped_steps == 4


def test_schedules_and_skips() -> None:
    """A schedule of the host follows the steps that were taken."""
    for options in ({}, {"skip_nonfinite": True}):
        asked: list[int] = []
        opt = nn.SGD(on_device([positive((3,))]), lambda k, a=asked: a.append(k) or 0.1, **options)
        flag = on_device(np.zeros(1, F32))
        if not options:
            opt.found_inf = flag
        for bad in (False, True, True, False, False):
            put(flag, [bad])
            is_bad = bad and bool(options)
            opt((on_device(np.full(3, np.inf if is_bad else 1.0, F32)),))
        if options:
            computed()
        assert asked == [0, 1, 1, 1, 2] and opt.skipped_steps == 2


def test_wrong_numbers() -> None:
    """Numbers of another kind, or that live elsewhere."""
    w, host = on_device([positive((7,))]), [positive((7,))]
    opt = nn.Adam(w)
    two, whole, one = on_device([np.ones(2, F32), np.ones((), np.int32), np.ones((), F32)])
    for error, text, call in (
        (ValueError, "learning_rate has a wrong shape", lambda: nn.Adam(w, two)),
        (TypeError, "learning_rate has a wrong dtype", lambda: nn.Adam(w, whole)),
        (ValueError, "learning_rate lives elsewhere", lambda: nn.Adam(host, one)),
        (ValueError, "learning_rate lives elsewhere",
         lambda: nn.Adam([{"params": host, "lr": one}])),
        (ValueError, "loss_scale lives elsewhere", lambda: nn.Adam(host, loss_scale=one)),
        (ValueError, "loss_scale has a wrong shape", lambda: nn.Adam(w, loss_scale=two)),
        (TypeError, "loss_scale has a wrong dtype", lambda: setattr(opt, "loss_scale", whole)),
        (TypeError, "found_inf has a wrong dtype", lambda: setattr(opt, "found_inf", whole)),
        (ValueError, "found_inf has a wrong shape", lambda: setattr(opt, "found_inf", two)),
        (TypeError, "found_inf has a wrong type", lambda: setattr(opt, "found_inf", True)),
        (ValueError, "found_inf lives elsewhere",
         lambda: setattr(nn.Adam(host), "found_inf", one)),
    ):  # fmt: skip
        with refused(error, text):
            call()
    assert opt.loss_scale == 1.0 and opt.found_inf is None
    # A rate that is assigned later is looked at by the step.
    opt.learning_rate.data = on_device(np.array(-0.1, F32))
    with refused(ValueError, "learning_rate is out of range", *w):
        opt((on_device(gradient((7,))),))
    opt.learning_rate.data = on_device(np.array(0.1, F32))
    opt((on_device(gradient((7,))),))
    assert opt.global_step == 1


DENSE, ROWS, INFINITE = gradient((6, 3)), rows([1, 4, 1], (6, 3)), np.full((6, 3), np.inf, F32)
CHANGES: tuple[tuple[Callable[[Any], Any], Any, dict[str, Any]], ...] = (
    (nn.Adam, DENSE, {"beta1": 0.5, "beta2": 0.8, "eps": 1e-3}),
    (nn.Adam, DENSE, {"loss_scale": 4.0}),
    (lambda p: nn.Adam(p, loss_scale=2.0), DENSE, {"loss_scale": 1.0}),
    (nn.LazyAdam, ROWS, {"sparse_update": "dense_equivalent"}),
    (lambda p: nn.SGD(p, 0.1), INFINITE, {"skip_nonfinite": True}),
    (lambda p: nn.FTRL(p, learning_rate=0.1, lr_power=-0.3), DENSE, {"lr_power": -0.4, "l1": 0.1}),
    (nn.AdaFactor, DENSE, {"clip_threshold": 0.1, "scale_parameter": False}),
)


@pytest.mark.parametrize(("make", "g", "changes"), CHANGES)
def test_options(make: Callable[[Any], Any], g: Any, changes: dict[str, Any]) -> None:
    """Options that are assigned to count in the next step, also for the same gradients."""
    assert_alike(make, [positive((6, 3))], [[g], [g], changes, [g], [g]])


def test_nothing_is_kept() -> None:
    """Gradients of earlier steps are let go of."""
    for make in (nn.LARS, lambda opt: opt):
        w = on_device([positive((3, 2))])
        opt = make(nn.SGD([{"params": w, "grad_centralization": make is nn.LARS}], 0.1))
        seen = []
        for _ in range(3):
            g = on_device(gradient((3, 2)))
            seen.append(weakref.ref(g))
            opt((g,))
        del g
        gc.collect()
        assert not any(ref() is not None for ref in seen)


def test_captures() -> None:
    """Calls that would become part of a CUDA graph are refused; they enqueue and count nothing."""
    w, g = on_device([positive((5, 3))]), on_device(gradient((5, 3)))
    part, lr = on_device(rows([1, 2], (5, 3))), on_device(np.array(0.125, F32))
    host = nn.Adam(w, lr)
    host.target = "CPU"
    centralized = [{"params": w, "grad_centralization": True, "weight_decay": 0.1}]
    calls: list[Callable[[], Any]] = []
    optimizers = [
        (nn.Adam(w), g), (nn.Adam(w, use_locking=True), g), (nn.AdamOffload(w, lr), g), (host, g),
        (nn.SGD(centralized, 0.1), g), (nn.LARS(nn.SGD(w, 0.1)), g), (nn.AdaFactor(w), g),
        (nn.LazyAdam(w), part), (nn.LazyAdam(w), [part, part]), (nn.RowWiseAdagrad(w), part),
        (nn.SGD(w, 0.1, skip_nonfinite=True), g),
    ]  # fmt: skip
    for opt, given in optimizers:
        calls.append(lambda o=opt, x=given: o((x,)))
    table = on_device([positive((5, 3)) for _ in range(3)])
    offsets = on_device(np.array([0, 2]))
    calls += [
        lambda: ops.Adam()(*table, *BETAS, g),
        lambda: ops.FusedSparseLazyAdam()(*table, *BETAS, part.values, part.indices),
        lambda: ops.clip_by_global_norm([g], 1.0),
        lambda: ops.clip_by_global_norm([g], 1.0, in_place=True),
        lambda: ops.global_norm([g]),
        lambda: ops.EmbeddingBags()(w, [part.indices], [offsets]),
        part.to_dense,
        part.coalesce,
    ]
    for call in calls:
        call()
        fusestep.synchronize()
        text = "a CUDA graph is being captured"
        with refused(RuntimeError, text, *w, *table, g), capture() as enqueued:
            call()
        assert not enqueued
    for opt, _ in optimizers:
        # A driver without a device does not compute whether gradients are finite.
        assert opt.global_step + opt.skipped_steps == 1, repr(opt)


def test_shared_numbers() -> None:
    """A number on the device that two groups share is shared by the groups of a copy."""
    lr = on_device(np.array(0.125, F32))
    w = on_device([positive((3,)), positive((2,))])
    groups = [{"params": [p], "lr": lr} for p in w]
    copied = copy.deepcopy(nn.SGD(groups, 0.1))
    first, second = (rate.data for rate in copied.learning_rate)
    assert first is second and first is not lr
    put(first, 0.5)
    assert copied.get_lr() == (0.5, 0.5) and on_host(lr) == 0.125


def test_new_states() -> None:
    """Steps that were skipped are counted when the state is made anew."""
    opt = nn.AdaFactor(on_device([positive((3,))]), 0.1, relative_step=False)
    opt.found_inf = on_device(np.ones(1, F32))
    opt((on_device(gradient((3,))),))
    opt.init_ada_factor_state(0.9)
    assert opt.skipped_steps == 1 and opt.global_step == 0


# States


def test_states() -> None:
    """A state is copied to the host, and taken over by an optimizer on either side."""
    run, ours = Run(), [positive((5, 4)), positive((7,))]
    state = run.opt.state_dict()
    for params in (ours, on_device(ours)):
        other = nn.LazyAdam(params, 0.1)
        other.load_state_dict(state)
        for name, array in other.state_dict().items():
            assert_same(array, state[name], name)
    run.step([1, 5])
    with told(IndexError, "got 5"):
        run.opt.load_state_dict(state)
    run.opt.load_state_dict(state)
    run.assert_as_before()
    run.step([1, 2])
    run.opt.load_state_dict(state)
    fusestep.synchronize()
    run.assert_as_before()
    state["moment1.parameter_0"] = on_device(state["moment1.parameter_0"])
    with refused(RuntimeError, "lives on a CUDA device"):
        run.opt.load_state_dict(state)
    with tempfile.TemporaryDirectory() as folder:
        nn.save_checkpoint(run.opt.parameters, f"{folder}/parameters")
        saved = nn.load_checkpoint(f"{folder}/parameters")
    for p, w in zip(run.opt.parameters, run.w, strict=True):
        assert_same(saved[p.name], on_host(w))


def test_copies() -> None:
    """Pickles and deep copies live on the device, apart, and go on as the original does."""
    dtypes = (F32, F16, F64)
    w = on_device([positive((5, 4), d) for d in dtypes])
    opt = nn.LazyAdam(w, 0.1, use_locking=True)
    opt(tuple(on_device([rows([1, 3], (5, 4), d) for d in dtypes])))
    others = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)), pickle.loads(pickle.dumps(opt))]
    step = tuple(on_device([rows([1, 2], (5, 4), d) for d in dtypes]))
    for other in others:
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            assert other is not others[0] or type(q.data) is type(p.data)  # pickles are Numba's
            assert (q.shape, q.dtype) == (p.shape, p.dtype)
            assert q.array.address != p.array.address
            assert_same(q.data, on_host(p.data))
    for one in (opt, *others):
        one(step)
    for other in others:
        assert_equal_runs(other, opt, bits=True)
    # A copy of what waits for an answer would keep counts that are to be taken back.
    for make in (copy.deepcopy, pickle.dumps):
        opt(tuple(on_device([rows([9], (5, 4)), None, None])))
        with told(IndexError, "got 9"):
            make(opt)
        assert make(opt)
        assert opt.global_step == 2
    tensor = pickle.loads(pickle.dumps(on_device(rows([1, 3], (5, 4)))))
    assert_same(tensor.indices.numpy(), np.array([1, 3]))
    parameter = copy.deepcopy(nn.Parameter(on_device(positive((), BF16)), "w"))
    assert (parameter.shape, parameter.dtype, parameter.name) == ((), BF16, "w")


def test_rebinding() -> None:
    """A parameter can be rebound between steps, to memory on the device that is apart."""
    run = Run()
    p = run.opt.parameters[0]
    other = on_device(positive((5, 4)))
    p.data = other
    assert p.data is other
    with unchanged(run.w[0]):
        run.step([2])
    fusestep.synchronize()
    if COMPUTES:
        assert not (on_host(other)[2] == on_host(run.w[0])[2]).any()
    with refused(ValueError, "lives elsewhere than", other):
        p.data = positive((5, 4))
    with refused(ValueError, "shares memory with", other):
        p.data = run.opt.moment1[0].owner
    with refused(ValueError, "has a wrong shape", other):
        p.data = on_device(positive((4, 5)))
    assert p.data is other
    # A bad step and a rebinding before the host hears of it.
    run.step([7])
    p.data = run.w[0]
    with told(IndexError, "got 7", *run.w):
        fusestep.synchronize()
    run.step([1])
    assert run.opt.global_step == 3
    # The step itself is that on the memory of then.
    p.data = on_device(np.zeros((5, 4), F32))
    run.step([3])
    computed()
    assert on_host(p.data)[3].all() and not on_host(p.data)[:3].any()


def test_targets() -> None:
    """The work, and states with it, can go to the host and back, all of them or none."""
    run, copy_out = Run(), DeviceArray.numpy
    copied: list[Any] = []

    def fail(array: DeviceArray) -> Any:
        copied.append(array)
        if len(copied) == 2:
            raise RuntimeError("no room")
        return copy_out(array)

    DeviceArray.numpy = fail
    try:
        with refused(RuntimeError, "no room", *run.w):
            run.opt.target = "CPU"
    finally:
        DeviceArray.numpy = copy_out
    assert run.opt.target == "GPU"
    for target in ("CPU", "GPU", "CPU", "GPU"):
        run.assert_as_before()
        run.opt.target = target
        with told(IndexError, "got 5", *run.w):
            run.step([5])
            fusestep.synchronize()
        run.step([1, 2])
        run.before = run.opt.state_dict()
    assert run.opt.global_step == 5
    run.step([6])
    with told(IndexError, "got 6", *run.w):
        run.opt.target = "CPU"
    assert run.opt.target == "GPU"


# Gradients that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_skip_nonfinite(dtype: Any, bad: float) -> None:
    """A step with a NaN or an infinity in any gradient changes nothing, counts included."""
    start = [positive(shape, dtype) for shape in SHAPES]
    opt = nn.Adam(on_device(start), 0.05, skip_nonfinite=True)
    twin = nn.Adam(on_device(start), 0.05)
    for t in (0, 2):
        gs = [gradient(shape, dtype) for shape in SHAPES]
        spoiled = [g.copy() for g in gs]
        spoiled[t % 3].reshape(-1)[-1] = bad
        with unchanged(*(p.data for p in opt.parameters)):
            opt(on_device(spoiled))
        opt(on_device(gs))
        twin(on_device(gs))
    table = nn.LazyAdam(on_device([start[0]]), skip_nonfinite=True)
    sparse = rows([1, 1], SHAPES[0], dtype)
    sparse.values[1, -1] = bad
    table((on_device(sparse),))
    computed()
    assert opt.skipped_steps == opt.global_step[0] == 2
    for p, q in zip(opt.parameters, twin.parameters, strict=True):
        assert_same(p.asnumpy(), q.asnumpy())
    assert table.skipped_steps == 1
    assert_same(table.parameters[0].asnumpy(), start[0])


@only(STUB, GPU, reason="the simulator has no warnings")
def test_a_step_warns_of_nothing() -> None:
    """Numba has warnings for small grids, and for its own default stream."""
    opt = nn.Adam(on_device([positive(shape) for shape in SHAPES]), sparse_update="lazy")
    given = on_device([gradient(shape) for shape in SHAPES])
    sparse = on_device(rows([2, 2], SHAPES[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(given)
        opt([sparse, *given[1:]])
        fusestep.synchronize()
        opt.state_dict()
