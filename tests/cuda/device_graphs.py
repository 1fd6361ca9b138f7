"""Steps in CUDA graphs, and numbers that live on the device."""

from __future__ import annotations

from simulator import Graph, run_check  # isort: split

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

import fusestep
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory

from device_arrays import (
    BETAS,
    F16,
    F32,
    F64,
    Run,
    assert_close,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
)

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


def put(there: Any, value: Any) -> None:
    """Change what lies on the device."""
    there = getattr(there, "owner", there)
    cuda.to_device(np.asarray(value, there.dtype), to=there)


def assert_same(one: Any, other: Any) -> None:
    """Parameters and states of two optimizers, to the last bit."""
    expected, found = other.state_dict(), one.state_dict()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)
    for p, q in zip(one.parameters, other.parameters, strict=True):
        np.testing.assert_array_equal(p.asnumpy(), q.asnumpy())


def numbers() -> None:
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


def rates_in_states() -> None:
    """A rate on the device is part of the state, copied to the host and taken back."""
    lr = on_device(np.array(0.125, F32))
    opt = nn.Adam(on_device([positive((3,))]), lr)
    state = opt.state_dict()
    assert state["learning_rate"] == np.float32(0.125)
    put(lr, 0.5)
    assert opt.get_lr() == 0.5
    opt.load_state_dict(state)
    assert opt.get_lr() == 0.125 and on_host(lr) == np.float32(0.125)


def overflows() -> None:
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
    # A skipped step finds nothing; one that failed stays found.
    run.opt.target = "GPU"
    run.opt.found_inf = flag
    put(flag, [1])
    run.step([9])
    fusestep.synchronize()
    put(flag, [0])
    run.step([8])
    put(flag, [1])
    run.step([1])
    with refused(IndexError, "got 8", *run.w):
        fusestep.synchronize()
    assert run.opt.skipped_steps == 3


def schedules_and_skips() -> None:
    """A schedule of the host follows the steps that were taken."""
    for options in ({"skip_nonfinite": True}, {}):
        asked: list[int] = []
        opt = nn.SGD(on_device([positive((3,))]), lambda k, a=asked: a.append(k) or 0.1, **options)
        flag = on_device(np.zeros(1, F32))
        if not options:
            opt.found_inf = flag
        for bad in (False, True, True, False, False):
            put(flag, [bad])
            is_bad = bad and bool(options)
            opt((on_device(np.full(3, np.inf if is_bad else 1.0, F32)),))
        assert asked == [0, 1, 1, 1, 2] and opt.skipped_steps == 2


def changed_options() -> None:
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


def captured(step: Callable[[], Any]) -> Graph:
    """A graph of what ``step`` does."""
    with Graph() as graph:
        step()
    return graph


def graphs() -> None:
    """A graph does what the steps do, with whatever the gradients and numbers are then."""
    variables = [positive(shape) for shape in SHAPES]
    for make in OPTIMIZERS:
        lr, scale = on_device([np.array(0.125, F32), np.array([8.0], F32)])
        one, other = (make(on_device(variables), lr, scale) for _ in range(2))
        steps = steps_of(5)
        arrays = [on_device(steps[0]) for _ in range(2)]
        one(tuple(arrays[0]))
        other(tuple(arrays[0]))
        # Arrays that no step has seen: those of a framework are new in a graph.
        graph = captured(lambda o=one, a=arrays[1]: o(tuple(a)))
        for k, step in enumerate(steps[1:]):
            for array, values in zip(arrays[1], step, strict=True):
                put(array, values)
            if k == 2:
                put(lr, 0.25)
            graph.replay()
            other(tuple(on_device(step)))
            if k == 1:  # a step between, with other tables
                one(tuple(arrays[0]))
                other(tuple(arrays[0]))
        fusestep.synchronize()
        inner = getattr(one, "opt", one)
        assert inner.global_step == 6
        assert_same(one, other)
        # A state that is taken over between two runs counts in the next.
        state = one.state_dict()
        graph.replay()
        one.load_state_dict(state)
        other.load_state_dict(state)
        for p, q in zip(one.parameters, other.parameters, strict=True):
            put(p.data, q.asnumpy())
        graph.replay()
        other(tuple(on_device(steps[-1])))
        assert_same(one, other)


def graphs_of_rows() -> None:
    """Graphs of row-sparse steps, lazy and dense-equivalent, of one call and of several."""
    variables = [positive((5, 4)), positive((7,)), positive((3, 2), F64)]
    for make in (nn.LazyAdam, nn.Adam):
        one, other = (make(on_device(variables), 0.1) for _ in range(2))
        step = [rows([1, 3, 1], (5, 4)), gradient((7,)), rows([2, 2], (3, 2), F64)]
        for few in ((0,), (0, 1), (0, 1, 2)):
            gradients = [on_device(g) if k in few else None for k, g in enumerate(step)]
            one(tuple(gradients))
            other(tuple(gradients))
            graph = captured(lambda o=one, g=gradients: o(tuple(g)))
            for indices in ([0, 3, 0], [4, 4, 4]):
                put(gradients[0].indices, indices)
                graph.replay()
                other(tuple(gradients))
            one((None, on_device(step[1]), None))
            other((None, on_device(step[1]), None))
            graph.replay()
            other(tuple(gradients))
            fusestep.synchronize()
            assert_same(one, other)
        # An index out of range: nothing is written, here or later, until the host knows.
        before = one.state_dict()
        put(gradients[2].indices, [1, 3])
        graph.replay()
        put(gradients[2].indices, [1, 2])
        graph.replay()
        one((None, on_device(step[1]), None))
        with refused(IndexError, "gradient of 'parameter_2': indices[1] is out of range"):
            fusestep.synchronize()
        for name, array in one.state_dict().items():
            np.testing.assert_array_equal(array, before[name], name)
        graph.replay()
        other(tuple(gradients))
        put(gradients[0].indices, [0, 1, -7])
        graph.replay()
        with refused(IndexError, "'parameter_0': indices[2] is out of range", *one_arrays(one)):
            one.state_dict()
        assert_same(one, other)


def one_arrays(optimizer: Any) -> list[Any]:
    return [p.array for p in optimizer.parameters]


def graphs_that_skip() -> None:
    """In graphs, gradients are checked and `found_inf` is read."""
    run, flag = Run(skip_nonfinite=True), on_device(np.zeros(1, F32))
    run.opt.found_inf = flag
    g = on_device(gradient((7,)))
    run.opt((None, g))
    graph = captured(lambda: run.opt((None, g)))
    run.before = run.opt.state_dict()
    put(flag, [1])
    graph.replay()
    put(flag, [0])
    good = on_host(g).copy()
    put(g, np.where(np.arange(7) == 3, np.nan, good))
    graph.replay()
    run.assert_as_before()
    assert run.opt.skipped_steps == 2
    put(g, good)
    graph.replay()
    fusestep.synchronize()
    assert run.opt.global_step == 3 and run.opt.skipped_steps == 2


def graphs_and_targets() -> None:
    """After a capture the work can go to the host and back; no step is lost."""
    run, g = Run(), on_device(gradient((7,)))
    run.opt((None, g))
    captured(lambda: run.opt((None, g))).replay()
    run.opt.target = "CPU"
    assert run.opt.global_step == 3
    run.opt((None, g))
    assert run.opt.state_dict()["step.parameter_1"] == 4
    run.opt.target = "GPU"
    run.opt((None, g))
    assert run.opt.state_dict()["step.parameter_1"] == 5


def graphs_with_growth() -> None:
    """Memory that a graph uses stays when later steps need more."""
    memory._LEAST = 64
    w = on_device([positive((40, 4)), positive((30,))])
    one, other = nn.LazyAdam(w, 0.1), nn.LazyAdam([on_device(on_host(a)) for a in w], 0.1)
    small = (on_device(rows([1, 1], (40, 4))), None)
    one(small)
    other(small)
    graph = captured(lambda: one(small))
    held = one._on_device._resident.scratch
    before = held.address
    many = on_device(rows([k % 40 for k in range(150)], (40, 4)))
    one((many, on_device(gradient((30,)))))
    assert held.address != before and len(held._kept) == 1
    graph.replay()
    one(small)
    for step in ((many, None), small, small):
        other(step)
    assert one.state_dict()["step.parameter_0"] == other.state_dict()["step.parameter_0"] == 4
    np.testing.assert_array_equal(on_host(w[0]), other.parameters[0].asnumpy())


def refusals() -> None:
    """What cannot be in a graph says so, and counts nothing."""
    run = Run()
    g = on_device(gradient((7,)))

    def refuse(text: str, call: Callable[[], Any]) -> None:
        before = run.opt.global_step.copy()
        with refused(RuntimeError, text, *run.w):
            captured(call)
        assert run.opt.global_step == before

    refuse("is the first of its kind", lambda: run.opt((None, g)))
    new = nn.Adam(on_device([positive((7,))]))
    refuse("is the first of its kind", lambda: new((g,)))
    assert new._on_device._resident is None
    run.opt((None, g))
    captured(lambda: run.opt((None, g)))
    run.opt.found_inf = on_device(np.zeros((), F32))
    refuse("is the first of its kind", lambda: run.opt((None, g)))
    fusestep.synchronize()
    w = on_device([positive((7,))])
    for options, text in (
        ({"learning_rate": [0.1, 0.2]}, "follows the number of the step"),
        ({"learning_rate": lambda _: 0.1}, "follows the number of the step"),
        ({"weight_decay": lambda _: 0.1}, "follows the number of the step"),
        ({"use_locking": True}, "without use_locking"),
    ):
        opt = nn.Adam(w, **options)
        opt((g,))
        refuse(text, lambda o=opt: o((g,)))
        assert opt.global_step == 1
    offload = nn.AdamOffload(w)
    offload((g,))
    refuse("no other calls", lambda: offload((g,)))
    table = on_device([positive((5, 3)) for _ in range(3)])
    refuse("no other calls", lambda: ops.Adam()(*table, *BETAS, on_device(gradient((5, 3)))))
    with refused(RuntimeError, "no other calls"):
        captured(lambda: ops.clip_by_global_norm([g], 1.0))


def wrong_numbers() -> None:
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
    opt.learning_rate.data = on_device(np.array(0.1, F16))
    with refused(TypeError, "learning_rate has a wrong dtype", *w):
        opt((on_device(gradient((7,))),))
    opt.learning_rate.data = on_device(np.array(0.1, F32))
    opt((on_device(gradient((7,))),))
    assert opt.global_step == 1


if __name__ == "__main__":
    run_check(
        numbers=(
            numbers,
            rates_in_states,
            overflows,
            schedules_and_skips,
            changed_options,
            wrong_numbers,
        ),
        graphs=(
            graphs,
            graphs_of_rows,
            graphs_that_skip,
            graphs_and_targets,
            graphs_with_growth,
            refusals,
        ),
    )
