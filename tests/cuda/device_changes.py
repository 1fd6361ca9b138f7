"""What changes between steps, and around graphs."""

from __future__ import annotations

from simulator import Graph, run_check  # isort: split

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import fusestep
from fusestep import nn
from fusestep.nn.engine import resident

from device_arrays import F32, Run, gradient, on_device, on_host, positive, refused, rows
from device_graphs import assert_same, captured, put


def skips_after_a_capture() -> None:
    """A graph that was captured when no step could be skipped is not closed by one that was."""
    g, flag = on_device(gradient((7,))), on_device(np.ones(1, F32))
    one, other = (nn.Adam(on_device([np.ones(7, F32)])) for _ in range(2))
    for opt in (one, other):
        opt((g,))
    graph = captured(lambda: one((g,)))
    one.found_inf = flag
    one((g,))
    graph.replay()
    other((g,))
    assert one.skipped_steps == 1 and one.global_step == 2
    assert_same(one, other)


def options() -> None:
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
        assert here.skipped_steps == there.skipped_steps and here.global_step == there.global_step
        np.testing.assert_allclose(
            there.parameters[0].asnumpy(), here.parameters[0].data, 1e-5, 1e-6, err_msg=str(changes)
        )


def targets() -> None:
    """Counts of steps on the host are not those that the device had before."""
    g = on_device(gradient((7,)))
    opt = nn.Adam(on_device([positive((7,))]))
    opt((g,))
    graph = captured(lambda: opt((g,)))
    graph.replay()
    opt.target = "CPU"
    assert opt.global_step == 2
    opt((g,))
    fusestep.synchronize()
    assert opt.global_step == 3 and opt.state_dict()["step.parameter_0"] == 3
    opt.target = "GPU"
    opt((g,))
    fusestep.synchronize()
    assert opt.global_step == 4 and opt.state_dict()["step.parameter_0"] == 4


def nothing_is_kept() -> None:
    """Gradients of earlier steps are let go of, and so is what was known of their kinds."""
    w = on_device([positive((3, 2))])
    opt = nn.LARS(nn.SGD([{"params": w, "grad_centralization": True}], 0.1))
    seen = []
    for _ in range(3):
        g = on_device(gradient((3, 2)))
        seen.append(weakref.ref(g))
        opt((g,))
    del g
    gc.collect()
    assert not any(ref() is not None for ref in seen)
    many = nn.SGD(on_device([positive((2,)) for _ in range(8)]), 0.1)
    of_each = on_device([gradient((2,)) for _ in range(8)])
    for k in range(1, 120):
        many(tuple(g if k >> i & 1 else None for i, g in enumerate(of_each)))
    assert len(many._on_device._ran) <= 64


def no_gradients() -> None:
    """A step without any gradient counts, in a graph too."""
    opt = nn.Adam(on_device([positive((3,)), positive((0,))]))
    opt((None, None))
    graph = captured(lambda: opt((None, None)))
    assert all(call.args[0] for call in graph.calls)  # addresses  # type: ignore[attr-defined]
    graph.replay()
    fusestep.synchronize()
    assert opt.global_step == 2 and opt.state_dict()["step.parameter_0"] == 0


def early_refusals() -> None:
    """What cannot be captured says so before it takes memory or waits."""
    g, lr = on_device(gradient((5, 3))), on_device(np.array(0.125, F32))
    w, text = on_device([positive((5, 3))]), "CUDA graph is being captured"
    host = nn.Adam(w, lr)
    host.target = "CPU"
    centralized = [{"params": w, "grad_centralization": True}]
    decayed = [{"params": w, "grad_centralization": True, "weight_decay": 0.1}]
    part = on_device(rows([1, 2], (5, 3)))
    for opt, given, expected in (
        (nn.AdamOffload(w, lr), g, text),
        (host, g, text),
        (nn.SGD(centralized, 0.1), g, "centralizes gradients"),
        (nn.SGD(decayed, 0.1, loss_scale=lr), g, "centralizes gradients"),
        (nn.LazyAdam(w), [part, part], text),
    ):
        opt((given,))
        with refused(RuntimeError, expected, *w), Graph() as graph:
            opt((given,))
        assert not graph.calls, type(opt).__name__
        fusestep.synchronize()
        assert opt.global_step == 1


def events_of_the_device() -> None:
    """An event belongs to the device on which it will be recorded."""
    inside = [False]
    whole, new_event = resident.on_device, resident.new_event

    @contextmanager
    def tracked(device: int) -> Iterator[None]:
        inside[0] = True
        with whole(device):
            yield
        inside[0] = False

    def made() -> Any:
        assert inside[0]
        return new_event()

    resident.on_device, resident.new_event = tracked, made
    nn.SGD(on_device([positive((3,))]), 0.1)((on_device(gradient((3,))),))
    resident.on_device, resident.new_event = whole, new_event


def forks() -> None:
    """What a child inherits it does not ask the device about."""
    run = Run()
    run.step([1])
    child = os.fork()
    if child == 0:
        asked: list[Any] = []
        try:
            resident.Resident.settle = lambda self: asked.append(self) or (None, None)
            del run
            gc.collect()
            fusestep.synchronize()
        finally:
            os._exit(bool(asked))
    assert os.waitpid(child, 0)[1] == 0


def copies() -> None:
    """A number on the device that two groups share is shared by the groups of a copy."""
    lr = on_device(np.array(0.125, F32))
    w = on_device([positive((3,)), positive((2,))])
    groups = [{"params": [p], "lr": lr} for p in w]
    copied = copy.deepcopy(nn.SGD(groups, 0.1))
    first, second = (rate.data for rate in copied.learning_rate)
    assert first is second and first is not lr
    put(first, 0.5)
    assert copied.get_lr() == (0.5, 0.5) and on_host(lr) == 0.125


def new_states() -> None:
    """Steps that were skipped are counted when the state is made anew."""
    opt = nn.AdaFactor(on_device([positive((3,))]), 0.1, relative_step=False)
    opt.found_inf = on_device(np.ones(1, F32))
    opt((on_device(gradient((3,))),))
    opt.init_ada_factor_state(0.9)
    assert opt.skipped_steps == 1 and opt.global_step == 0


if __name__ == "__main__":
    run_check(
        options=(options, copies, targets, new_states, nothing_is_kept, forks),
        graphs=(skips_after_a_capture, no_gradients, early_refusals, events_of_the_device),
    )
