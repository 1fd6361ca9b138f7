"""What changes between steps: numbers on the device, options, where the work is done."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import fusestep
from fusestep import nn, ops

from devices import (
    BETAS,
    COMPUTES,
    F32,
    F64,
    MARKS,
    Run,
    assert_close,
    capture,
    computed,
    gradient,
    on_device,
    on_host,
    positive,
    put,
    refused,
    rows,
    told,
)

pytestmark = MARKS

SHAPES = ((5, 4), (7,), (0, 3))
Make = Callable[[Any, Any, Any], Any]

# Of parameters, learning rate and loss scale.
OPTIMIZERS: tuple[Make, ...] = (
    lambda p, lr, scale: nn.Adam(p, lr, weight_decay=0.1, loss_scale=scale),
    lambda p, lr, _: nn.AdamWeightDecay(
        [{"params": p[:1], "lr": lr, "weight_decay": 0.2}, {"params": p[1:]}], 0.05
    ),
    lambda p, lr, scale: nn.Momentum(p, lr, 0.9, loss_scale=scale),
    lambda p, lr, scale: nn.SGD(p, lr, momentum=0.9, dampening=0.1, loss_scale=scale),
    lambda p, lr, scale: nn.RMSProp(p, lr, momentum=0.5, loss_scale=scale),
    lambda p, lr, scale: nn.Adagrad(p, learning_rate=lr, loss_scale=scale),
    lambda p, lr, scale: nn.ProximalAdagrad(p, learning_rate=lr, l1=0.01, loss_scale=scale),
    lambda p, lr, _: nn.Lamb(p, lr, weight_decay=0.1),
    lambda p, lr, scale: nn.AdaFactor(
        p, lr, scale_parameter=False, relative_step=False, beta1=0.9, loss_scale=scale
    ),
    lambda p, lr, scale: nn.LARS(
        nn.SGD(p, lr, weight_decay=0.1, loss_scale=scale), coefficient=0.1, use_clip=True
    ),
)


def steps_of(n: int) -> list[list[np.ndarray]]:
    return [[gradient(shape) for shape in SHAPES] for _ in range(n)]


def test_numbers() -> None:
    """A rate and a loss scale on the device are as those of the host, and may change there."""
    variables = [positive(shape) for shape in SHAPES]
    for dtype in (F32, F64):
        for make in OPTIMIZERS[:: 1 if dtype == F32 else 4]:
            lr, scale = on_device([np.array(0.125, dtype), np.array([8.0], dtype)])
            one, w = make(on_device(variables), lr, scale), [v.copy() for v in variables]
            theirs = make(w, 0.125, 8.0)
            for k, step in enumerate(steps_of(3)):
                if k == 2:
                    put(lr, 0.25)
                    put(scale, [2.0])
                    made = make(w, 0.25, 2.0)
                    made.load_state_dict(theirs.state_dict() | rates(made))
                    theirs = made
                one(tuple(on_device(step)))
                theirs(tuple(step))
            assert one.get_lr() == theirs.get_lr()
            for p, v in zip(one.parameters, w, strict=True):
                assert_close(p.asnumpy(), v, repr(one))
            expected = theirs.state_dict()
            for name, array in one.state_dict().items():
                if not name.startswith("learning_rate"):
                    assert_close(array, expected[name], name)
    # On the host: the array is read there, and waited for.
    lr, scale = on_device([np.array(0.125, F32), np.array(8.0, F32)])
    w = [v.copy() for v in variables]
    ours, theirs = nn.Adam(w, 0.125, loss_scale=8.0), nn.Adam(on_device(variables), lr)
    theirs.loss_scale, theirs.target = scale, "CPU"
    (step,) = steps_of(1)
    ours(tuple(step))
    theirs(tuple(on_device(step)))
    for p, v in zip(theirs.parameters, w, strict=True):
        assert_close(p.asnumpy(), v)


def rates(optimizer: Any) -> dict[str, np.ndarray]:
    state = optimizer.state_dict()
    return {name: array for name, array in state.items() if name.startswith("learning_rate")}


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


def test_changed_options() -> None:
    """What is assigned between two steps counts from the next one on, as on the host."""
    w = [positive(shape) for shape in SHAPES]
    ours, theirs = nn.Adam(on_device(w), 0.1), nn.Adam(w, 0.1)
    for k, step in enumerate(steps_of(8)):
        for opt in (ours, theirs):
            if k == 1:
                opt.beta1 = 0.5
            if k == 2:
                opt.loss_scale = 4.0
            if k == 3:
                opt.learning_rate.data = np.array(0.25)
            if k == 4:
                opt.eps, opt.beta2, opt.loss_scale = 1e-3, 0.9, 1.0
            if k in (5, 6) and opt is ours:
                opt.target = ("CPU", "GPU")[k - 5]
        ours(tuple(on_device(step)))
        theirs(tuple(step))
    for p, v in zip(ours.parameters, w, strict=True):
        assert_close(p.asnumpy(), v)
    expected = theirs.state_dict()
    for name, array in ours.state_dict().items():
        assert_close(array, expected[name], name)


def test_options() -> None:
    """Options that are assigned to count in the next step, also for the same gradients."""

    def run(make: Callable[[Any], Any], g: Any, changes: dict[str, Any], *, there: bool) -> Any:
        w = positive((6, 3)) * 0 + 0.5
        opt = make(on_device([w]) if there else [w])
        gradients = (on_device(g) if there else g,)
        for _ in range(2):
            opt(gradients)
        for name, value in changes.items():
            setattr(opt, name, value)
        for _ in range(2):
            opt(gradients)
        fusestep.synchronize()
        return opt

    dense, sparse = gradient((6, 3)), rows([1, 4, 1], (6, 3))
    infinite = dense.copy()
    infinite[2, 1] = np.inf
    cases: tuple[tuple[Callable[[Any], Any], Any, dict[str, Any]], ...] = (
        (nn.Adam, dense, {"beta1": 0.5, "beta2": 0.8, "eps": 1e-3}),
        (lambda p: nn.Adam(p, loss_scale=2.0), dense, {"loss_scale": 1.0}),
        (nn.LazyAdam, sparse, {"sparse_update": "dense_equivalent"}),
        (lambda p: nn.SGD(p, 0.1), infinite, {"skip_nonfinite": True}),
        (lambda p: nn.FTRL(p, lr_power=-0.3), dense, {"lr_power": -0.4, "l1": 0.1}),
        (nn.AdaFactor, dense, {"clip_threshold": 0.1, "scale_parameter": False}),
    )
    for make, g, changes in cases:
        here, there = (run(make, g, changes, there=there) for there in (False, True))
        if COMPUTES:
            assert here.skipped_steps == there.skipped_steps
            assert here.global_step == there.global_step
        assert_close(there.parameters[0].asnumpy(), here.parameters[0].data, str(changes))


def test_targets() -> None:
    """The work can go to the host and back; no step is lost."""
    g = on_device(gradient((7,)))
    opt = nn.Adam(on_device([positive((7,))]))
    for step, target in enumerate(("GPU", "CPU", "GPU", "GPU"), 1):
        opt.target = target
        opt((g,))
        assert opt.global_step == step and opt.state_dict()["step.parameter_0"] == step


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


def test_no_gradients() -> None:
    """A step without any gradient counts."""
    opt = nn.Adam(on_device([positive((3,)), positive((0,))]))
    opt((None, None))
    assert opt.global_step == 1 and opt.state_dict()["step.parameter_0"] == 0


def test_captures() -> None:
    """What would become part of a CUDA graph is refused; it enqueues and counts nothing."""
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


def test_copies() -> None:
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
