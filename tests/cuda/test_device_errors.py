"""Errors that a device finds out later, and refusals."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory
from fusestep.ops.runtime import pending

from devices import (
    BETAS,
    F16,
    F32,
    F64,
    MARKS,
    Run,
    assert_equal_runs,
    assert_same,
    computed,
    gradient,
    on_device,
    positive,
    refused,
    rows,
    told,
    unchanged,
)
from own_functions import PLAIN, Own

pytestmark = MARKS

BAD = "LazyAdam: gradient of 'parameter_0': indices[1] is out of range: expected 0 <= index < 5"


def test_index_errors() -> None:
    """Errors of several steps are told together; what comes before the host hears is taken."""
    run = Run()
    with unchanged(*run.w):
        run.step([1, 5])
        run.step([-3], dense=False)
        assert run.opt.global_step == 3
        with told(IndexError, f"{BAD}, got 5") as found:
            run.opt.state_dict()
        assert "indices[0]" in found.value.__notes__[0]
        assert run.opt.global_step == 1
    # It goes on as one that never had a bad step.
    other = copy.deepcopy(run.opt)
    step = (on_device(rows([1, 2], (5, 4))), on_device(gradient((7,))))
    for opt in (run.opt, other):
        opt(step)
    assert_equal_runs(run.opt, other, bits=True)
    # Steps before the host hears of a bad one are taken, and have counted it.
    run.opt((on_device(rows([9], (5, 4))), step[1]))
    for opt in (run.opt, other):
        opt((None, step[1]))
    with told(IndexError, "got 9"):
        fusestep.synchronize()
    state, expected = run.opt.state_dict(), other.state_dict()
    for name in ("global_step", "step.parameter_0", "step.parameter_1"):
        assert state[name] == expected[name], name


GROUP = {"grad_centralization": True}
DECAYED = {**GROUP, "weight_decay": 0.3}
BAD_STEPS: tuple[Callable[[Any], Any], ...] = (
    *(partial(make, learning_rate=0.1) for make in (nn.LazyAdam, nn.Adam, nn.RowWiseAdagrad)),
    lambda p: nn.RowWiseAdam(p, 0.1, sparse_update="dense_equivalent"),
    lambda p: nn.AdamOffload(p, 0.1, sparse_update="lazy"),
    *(
        lambda p, make=make, own=own: make([{"params": p, **own}], 0.1)
        for make, own in product((nn.LazyAdam, nn.Adam), (GROUP, DECAYED))
    ),
)


@pytest.mark.parametrize("make", BAD_STEPS)
def test_bad_steps(make: Callable[[Any], Any]) -> None:
    """Nothing is written and counted; the error comes when that of the step comes, or earlier."""
    w = on_device([positive((5, 4)), positive((3, 6)), positive((0, 3))])
    opt, dense = make(w), on_device(gradient((3, 6)))
    good = (on_device(rows([1, 3], (5, 4))), dense, None)
    opt(good)
    before = opt.state_dict()
    for bad in ([1, 5], [-1]):
        with told(IndexError, f"expected 0 <= index < 5, got {bad[-1]}", *w):
            opt((on_device(rows(bad, (5, 4))), dense, None))
            opt.state_dict()
        for name, array in opt.state_dict().items():
            assert_same(array, before[name], name)
    with told(IndexError, "expected 0 <= index < 0, got 2", *w):
        opt((None, dense, on_device(rows([2], (0, 3)))))
        fusestep.synchronize()
    opt.skip_nonfinite = True
    opt((good[0], on_device(np.full((3, 6), np.nan, F32)), None))
    opt(good)
    assert opt.global_step == 2 and opt.skipped_steps == 1


def test_rows_without_indices() -> None:
    """A lazy step without any index finds none that is bad; a vector is one row to some rules."""
    run = Run()
    run.step([])
    opt = nn.RowWiseAdagrad(on_device([positive((7,))]))
    with refused(ValueError, "a vector is one row"):
        opt((on_device(rows([2], (7,))),))
    with unchanged(run.w[0]):
        run.step([1, 9], dense=False)
        run.step([])
        with told(IndexError, f"{BAD}, got 9"):
            fusestep.synchronize()
    assert run.opt.global_step == 3


def test_several_tables() -> None:
    """Tables of several kernel calls: none of them writes; the error names the table."""
    w = on_device([positive((5, 4)), positive((3, 2), F64), positive((4,))])
    for make in (nn.LazyAdam, nn.Adam):
        opt = make(w, 0.1)
        for bad, first in product(([7, 0], [0, 7]), (None, rows([1], (5, 4)))):
            with unchanged(*w):
                step = [first, rows(bad, (3, 2), F64), gradient((4,))]
                opt(on_device(step))
                with told(IndexError, f"'parameter_1': indices[{bad.index(7)}] is out of"):
                    fusestep.synchronize()
                with told(IndexError, "got 7"):
                    opt((on_device(rows([7], (5, 4))), on_device(rows([9], (3, 2), F64)), None))
                    fusestep.synchronize()
        state = opt.state_dict()
        assert not any(state[f"step.{p.name}"] for p in opt.parameters) and opt.global_step == 0
    # Keys that are too long are refused before anything is written.
    huge = on_device(np.zeros((2**61, 0), F16))
    opt = nn.LazyAdam([w[0], huge], 0.1)
    step = on_device([rows([1], (5, 4)), rows([1, 2, 1], (2**61, 0), F16)])
    with refused(ValueError, "need too long sort keys", w[0]):
        opt(tuple(step))
    assert opt.global_step == 0


def test_many_calls() -> None:
    """When too many calls wait for an answer, the host asks; the one that asks is not taken."""
    pending.MOST_PENDING = 4
    try:
        fusestep.synchronize()
        run = Run()
        run.step([9, 1])
        for _ in range(3):
            run.step(None)
            run.step([1], dense=False)
        with told(IndexError, "got 9", *run.w):
            run.step([1])
        assert run.opt.global_step == 7
        run.step([1])
        assert run.opt.global_step == 8
    finally:
        pending.MOST_PENDING = 1_024


def test_several_optimizers() -> None:
    """One bad step does not keep other optimizers from writing; all errors are told."""
    first, second, third = Run(), Run(), Run()
    for run, index in ((first, 5), (second, 2), (third, 6)):
        run.step([index])
    with told(IndexError, "got 5") as found:
        fusestep.synchronize()
    (note,) = found.value.__notes__
    assert "got 6" in note
    steps = [run.opt.global_step[0] for run in (first, second, third)]
    assert steps == [1, 2, 1]
    first.assert_as_before()
    third.assert_as_before()
    # What waits for an answer keeps no optimizer alive.
    gone = weakref.ref(second.opt)
    second.step([1])
    second.step([9])
    del second, run
    gc.collect()
    assert gone() is None
    with told(IndexError, "got 9"):
        fusestep.synchronize()


def test_nonfinite_steps() -> None:
    """A step with a bad index and one that is to be skipped do not disturb each other."""
    run = Run(skip_nonfinite=True)
    bad = rows([1], (5, 4))
    bad.values[0, 2] = np.inf
    with unchanged(*run.w):
        run.opt((on_device(bad), on_device(gradient((7,)))))
        run.opt((None, on_device(np.full(7, np.nan, F32))))
        run.step(None, dense=False)
        computed()
        assert run.opt.skipped_steps == run.opt.global_step == 2
        run.before = run.opt.state_dict()
        run.step([1, 8])
        with told(IndexError, f"{BAD}, got 8"):
            fusestep.synchronize()
        run.assert_as_before()
    run.step([1])
    assert run.opt.global_step == 3


def test_failing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a call leaves no lock held and counts nothing."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))

    def fail(*_: Any) -> Any:
        raise RuntimeError("it is not copied")

    with monkeypatch.context() as changed:
        changed.setattr(memory.Room, "copy", fail)
        with refused(RuntimeError, "not copied", *run.w, w, m, v):
            run.step([1, 2])
        with refused(RuntimeError, "not copied", *run.w):
            run.step(None)
        with refused(RuntimeError, "not copied", w, m, v):
            op(w, m, v, *BETAS, on_device(gradient((2, 3))), index)
        with refused(RuntimeError, "not copied", w, m, v):
            ops.Adam(use_locking=True)(w, m, v, *BETAS, on_device(gradient((5, 3))))
    run.assert_as_before()

    def go_on() -> None:
        run.step([1, 2])
        op(w, m, v, *BETAS, on_device(gradient((2, 3))), index)
        fusestep.synchronize()

    in_threads(go_on)
    assert run.opt.global_step == 2


def in_threads(*works: Callable[[], Any]) -> None:
    """Run each in a thread of its own, all of which end without an error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[w], daemon=True) for w in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    assert not errors, errors


def test_threads() -> None:
    """Operators and optimizers under use_locking at once: every step counts, nothing waits."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))
    values = on_device(np.zeros((2, 3), F32))
    heard = []

    def step() -> None:
        for k in range(8):
            run.step([1, 2] if k % 2 else None)

    def operate() -> None:
        for _ in range(8):
            op(w, m, v, *BETAS, values, index)

    def listen() -> None:
        for _ in range(8):
            try:
                fusestep.synchronize()
            except IndexError as error:
                heard.append(error)

    in_threads(step, operate, listen, step)
    fusestep.synchronize()
    assert not heard and run.opt.global_step == 17
    assert run.opt.state_dict()["step.parameter_0"] == 9


def test_lock_order() -> None:
    """Every call takes the locks of guards and streams in the same order."""
    from fusestep.ops.runtime import launch

    held: list[str] = []
    orders = set()

    def noting(name: str, context: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def note(*arguments: Any) -> Iterator[Any]:
            with context(*arguments) as value:
                if name not in held:  # it can be taken again by who has it
                    orders.update((other, name) for other in held)
                held.append(name)
                yield value
                held.remove(name)

        return note

    launch.in_order = noting("streams", launch.in_order)
    pending.guarded = noting("guards", pending.guarded)
    pending.held = noting("guards", pending.held)
    run, table = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    run.step([1])
    index = on_device(np.array([1, 2]))
    ops.FusedSparseLazyAdam(use_locking=True)(*table, *BETAS, on_device(gradient((2, 3))), index)
    assert orders == {("guards", "streams")}


def test_mixtures() -> None:
    """Parameters, gradients and indices of a step are all on the host, or all on the device."""
    w, host = on_device(positive((5, 4))), positive((5, 4))
    for named in ([w, host], [nn.Parameter(w, "1"), host], [nn.Parameter(host, "1"), w]):
        with refused(ValueError, "lives elsewhere than", w):
            nn.Adam(named)
    opt, on_cpu, before = nn.LazyAdam([w]), nn.LazyAdam([host]), host.copy()
    index, values = np.array([1]), gradient((1, 4))
    theirs = on_device(rows([1], (5, 4)))
    mixed = on_device(rows([1], (5, 4)))
    mixed.indices = index
    for one, bad in (
        (opt, gradient((5, 4))),
        (opt, rows([1], (5, 4))),
        (opt, mixed),
        (opt, [rows([1], (5, 4)), theirs]),
        (on_cpu, on_device(gradient((5, 4)))),
        (on_cpu, theirs),
        (on_cpu, mixed),
    ):
        with refused(ValueError, "lives elsewhere than", w):
            one((bad,))
    with refused(ValueError, "lives elsewhere than"):
        nn.RowTensor(index, on_device(values), (5, 4))
    np.testing.assert_array_equal(host, before)
    assert opt.global_step == on_cpu.global_step == 0
    shared = on_device(rows([1], (5, 4)))
    shared.values = w[:1]
    for bad in (w, shared):
        with refused(ValueError, "shares memory with", w):
            opt((bad,))


def test_not_taken() -> None:
    """Operators without kernels for the device say so, and compute nothing."""
    w, m = theirs = on_device([positive((5, 4)) for _ in range(2)])
    g = on_device(gradient((5, 4)))
    with refused(RuntimeError, "device", *theirs):
        ops.ApplyMomentum()(w, m, on_device(np.array(0.1)), g, 0.9)
    with refused(TypeError, "lives on a CUDA device"):
        np.asarray(nn.Parameter(w))
    with refused(ValueError, "Adam: clipnorm is measured on the host", *theirs):
        nn.Adam(theirs, clipnorm=1.0)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda _real, lr, *_: (lr, lr), ValueError, "returns another number of scalars"),
        (lambda _real, lr, *_: lr, TypeError, "formula '<lambda>' returns"),
        (lambda *_: (None,), TypeError, "lr of formula '<lambda>'"),
        (lambda *_: (1 // 0,), ZeroDivisionError, ""),
    ],
)
def test_own_formulas(function: Any, error: type[Exception], text: str) -> None:
    """Scalars of a user's formula are looked at before the step on the device has them."""
    (w,) = on_device([np.ones(3, F32)])
    opt, g = Own(0.5, [w], rule=PLAIN), on_device(np.ones(3, F32))
    opt.function = function
    with refused(error, text, w):
        opt((g,))
    assert opt.global_step == 0
    opt.function, opt.others = (lambda _real, _lr, _decay, _step, given, _: given), ((0.25,),)
    opt((g,))
    assert_same(w, np.full(3, 0.75, F32))
    opt.function = lambda *_: (1,)
    opt((g,))
    assert opt.global_step == 2
