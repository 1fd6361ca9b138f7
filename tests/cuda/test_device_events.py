"""Whatever can happen between steps of a device: changes, errors that are told later, refusals."""

import copy
import gc
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing.pool import ThreadPool
from typing import Any
from unittest import mock

import numpy as np
import pytest
import fusestep

from devices import (  # isort: skip
    BETAS, COMPUTES, GPU, MARKS, STUB, Run, assert_alike, assert_equal_runs, assert_same, capture,
    computed, data_of, gradient, on_device, on_host, only, positive, put, refused, rows, shifted,
    told, unchanged)  # fmt: skip
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory
from fusestep.ops.runtime import launch, pending
from fusestep.ops.runtime.device import DeviceArray
from helpers import STORAGE_DTYPES
from own_functions import PLAIN, Own

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES

SHAPES = ((5, 4), (7,), (), (0, 3))


def test_numbers_of_a_group() -> None:
    """A rate on the device is that of one group alone; on the host it is read, and waited for."""
    variables = [positive(shape) for shape in SHAPES]
    for target in ("GPU", "CPU"):
        lr, w = on_device(np.array(0.125)), [v.copy() for v in variables]
        theirs = on_device(variables)
        ours, other = (
            nn.AdamWeightDecay(
                [{"params": p[:1], "lr": rate, "weight_decay": 0.2}, {"params": p[1:]}], 0.05)
            for p, rate in ((theirs, lr), (w, 0.125)))  # fmt: skip
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
    # Steps that were skipped are counted when the state is made anew.
    opt = nn.AdaFactor(on_device([positive((3,))]), 0.1, relative_step=False)
    opt.found_inf = flag
    opt((on_device(gradient((3,))),))
    opt.init_ada_factor_state(0.9)
    assert opt.skipped_steps == 1 and opt.global_step == 0
    with told(IndexError, "got 8", *run.w):
        run.step([1])
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
        (ValueError, "found_inf lives elsewhere", lambda: setattr(nn.Adam(host), "found_inf", one)),
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
    optimizers = [
        (nn.Adam(w), g), (nn.Adam(w, use_locking=True), g), (nn.AdamOffload(w, lr), g), (host, g),
        (nn.SGD(centralized, 0.1), g), (nn.LARS(nn.SGD(w, 0.1)), g), (nn.AdaFactor(w), g),
        (nn.LazyAdam(w), part), (nn.LazyAdam(w), [part, part]), (nn.RowWiseAdagrad(w), part),
        (nn.SGD(w, 0.1, skip_nonfinite=True), g),
    ]  # fmt: skip
    table = on_device([positive((5, 3)) for _ in range(3)])
    offsets = on_device(np.array([0, 2]))
    calls: list[Callable[[], Any]] = [
        *(partial(opt, (given,)) for opt, given in optimizers),
        lambda: ops.Adam()(*table, *BETAS, g),
        lambda: ops.FusedSparseLazyAdam()(*table, *BETAS, part.values, part.indices),
        lambda: ops.clip_by_global_norm([g], 1.0),
        lambda: ops.clip_by_global_norm([g], 1.0, in_place=True), lambda: ops.global_norm([g]),
        lambda: ops.EmbeddingBags()(w, [part.indices], [offsets]), part.to_dense, part.coalesce,
    ]  # fmt: skip
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


# States


def test_states() -> None:
    """A state is copied to the host, and taken over by an optimizer on either side."""
    run, ours = Run(), [positive((5, 4)), positive((7,))]
    state = run.opt.state_dict()
    for params in (ours, on_device(ours)):
        other = nn.LazyAdam(params, 0.1)
        other.load_state_dict(state)
        assert_same([*other.state_dict().values()], [*state.values()])
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
    assert_same([saved[p.name] for p in run.opt.parameters], run.w)


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
        assert_equal_runs(other, opt, assert_same)
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
    for text, array in (
        ("lives elsewhere than", positive((5, 4))),
        ("shares memory with", run.opt.moment1[0].owner),
        ("has a wrong shape", on_device(positive((4, 5)))),
    ):
        with refused(ValueError, text, other):
            p.data = array
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
    copies = iter((copy_out, mock.Mock(side_effect=RuntimeError("no room"))))
    numpy = mock.patch.object(DeviceArray, "numpy", lambda array: next(copies)(array))
    with refused(RuntimeError, "no room", *run.w), numpy:
        run.opt.target = "CPU"
    assert run.opt.target == "GPU"
    for target in ("CPU", "GPU", "CPU", "GPU"):
        run.assert_as_before()
        run.opt.target = target
        with told(IndexError, "got 5", *run.w):
            run.step([5])
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
    """A step with a NaN or an infinity anywhere, in memory that begins anywhere, changes nothing.
    Counts stay, too. The largest number of 16 bits is finite."""
    start = [positive(shape, dtype) for shape in ((70,), (3,), (), (0, 3))]
    opt = nn.Adam(on_device(start), 0.05, skip_nonfinite=True)
    twin = nn.Adam(on_device(start), 0.05)
    for at, place, shift in ((0, 69, 0), (0, 3, 1), (1, 2, 1), (2, 0, 0)):
        gs = [gradient(w.shape, dtype) for w in start]
        spoiled = [g.copy() for g in gs]
        spoiled[at].reshape(-1)[place] = bad
        with unchanged(*data_of(opt)):
            opt([shifted(g, shift) for g in spoiled])
        opt([shifted(g, shift) for g in gs])
        twin(on_device(gs))
    largest = nn.SGD(on_device(start[:1]), 0.01, skip_nonfinite=True)
    largest(on_device([np.full(70, np.finfo(np.float16).max, dtype)]))
    table = nn.LazyAdam(on_device(start[:1]), skip_nonfinite=True)
    sparse = rows([1, 1], (70,), dtype)
    sparse.values[1] = bad
    with unchanged(*data_of(table)):
        table((on_device(sparse),))
    computed()
    assert opt.skipped_steps == opt.global_step[0] == 4
    assert (largest.skipped_steps, table.skipped_steps) == (0, 1)
    assert_same(data_of(opt), data_of(twin))


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


# Errors that are told later, and refusals

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
    assert_equal_runs(run.opt, other, assert_same)
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
CENTRALIZED: list[Callable[[Any], Any]] = [
    lambda p, make=make, own=own: make([{"params": p, **own}], 0.1)
    for make, own in product((nn.LazyAdam, nn.Adam), (GROUP, DECAYED))
]
BAD_STEPS: tuple[Callable[[Any], Any], ...] = (
    *(partial(make, learning_rate=0.1) for make in (nn.LazyAdam, nn.Adam, nn.RowWiseAdagrad)),
    lambda p: nn.RowWiseAdam(p, 0.1, sparse_update="dense_equivalent"),
    lambda p: nn.AdamOffload(p, 0.1, sparse_update="lazy"), *CENTRALIZED)  # fmt: skip

TABLES = (((5, 4), F32), ((3, 6), F32), ((0, 3), F32), ((3, 2), F64), ((5, 3), BF16))
"""Several kernel calls: a bad index of one keeps the others from writing."""
WRONG: tuple[tuple[dict[int, Any], int, str], ...] = (
    ({0: [1, 5]}, 0, "indices[1] is out of range: expected 0 <= index < 5, got 5"),
    ({0: [-1]}, 0, "indices[0] is out of range: expected 0 <= index < 5, got -1"),
    ({2: [2]}, 2, "indices[0] is out of range: expected 0 <= index < 0, got 2"),
    ({3: [7, 0]}, 3, "indices[0] is out of range"),
    ({0: [1], 3: [0, 7]}, 3, "indices[1] is out of range"),
    ({0: [7], 3: [9]}, 0, "indices[0] is out of range"),
    ({4: [[1], [2, 5]]}, 4, "indices[2] is out of range"),  # by its place in the whole list
)
"""Indices by parameter, and the error of one of them."""


def sparse(indices: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A gradient of rows, or a list of them."""
    if isinstance(indices[0], list):
        return [rows(own, shape, dtype) for own in indices]
    return rows(indices, shape, dtype)


@pytest.mark.parametrize("make", BAD_STEPS)
def test_bad_steps(make: Callable[[Any], Any]) -> None:
    """Nothing is written and counted; the error comes when that of the step comes, or earlier."""
    w = on_device([positive(*own) for own in TABLES])
    opt, dense = make(w), on_device(gradient((3, 6)))
    good = (on_device(rows([1, 3], (5, 4))), dense, None, None, None)
    opt(good)
    before = opt.state_dict()
    for k, (wrong, of, text) in enumerate(WRONG):
        given = {at: on_device(sparse(own, *TABLES[at])) for at, own in wrong.items()}
        step = [given.get(at, dense if at == 1 else None) for at in range(len(w))]
        by = fusestep.synchronize if k else opt.state_dict
        name = "" if make in CENTRALIZED else f"gradient of 'parameter_{of}': "
        with told(IndexError, name + text, *w, by=by):
            opt(tuple(step))
        assert_same([*opt.state_dict().values()], [*before.values()])
    opt.skip_nonfinite = True
    opt((good[0], on_device(np.full((3, 6), np.nan, F32)), None, None, None))
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
        with told(IndexError, f"{BAD}, got 9"):
            run.step([])
    assert run.opt.global_step == 3


def test_refused_rows() -> None:
    """Parts that differ, what was assigned, and keys that are too long: refused before a write."""
    w = on_device([positive((5, 3)), np.zeros((2**61, 0), F16)])
    opt, part = nn.LazyAdam(w, 0.1), rows([1], (5, 3))
    assigned = on_device(part)
    assigned.values = on_device(gradient((2, 3)))
    for text, step in (
        ("has parts that differ", [on_device([part, rows([1], (5, 3), F64)]), None]),
        ("has a wrong length", [[on_device(part), assigned], None]),
        ("need too long sort keys", on_device([part, rows([1, 2, 1], (2**61, 0), F16)])),
    ):
        with refused(ValueError, text, w[0]):
            opt(tuple(step))
    assert opt.global_step == 0


def test_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many calls wait for an answer, the host asks; the one that asks is not taken."""
    monkeypatch.setattr(pending, "MOST_PENDING", 4)
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
        with told(IndexError, f"{BAD}, got 8"):
            run.step([1, 8])
        run.assert_as_before()
    run.step([1])
    assert run.opt.global_step == 3


def test_failing_steps() -> None:
    """An error in the middle of a call leaves no lock held and counts nothing."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))

    with mock.patch.object(memory.Room, "copy", side_effect=RuntimeError("it is not copied")):
        for call in (
            lambda: run.step([1, 2]), lambda: run.step(None),
            lambda: op(w, m, v, *BETAS, on_device(gradient((2, 3))), index),
            lambda: ops.Adam(use_locking=True)(w, m, v, *BETAS, on_device(gradient((5, 3)))),
        ):  # fmt: skip
            with refused(RuntimeError, "not copied", *run.w, w, m, v):
                call()
    run.assert_as_before()

    def go_on() -> None:
        run.step([1, 2])
        op(w, m, v, *BETAS, on_device(gradient((2, 3))), index)
        fusestep.synchronize()

    in_threads(go_on)
    assert run.opt.global_step == 2


def in_threads(*works: Callable[[], Any]) -> None:
    """Run each in a thread of its own, all of which end without an error, and soon."""
    pool = ThreadPool(len(works))
    pool.map_async(lambda work: work(), works, chunksize=1).get(30)
    pool.terminate()


def test_threads() -> None:
    """Operators and optimizers under use_locking at once: every step counts, nothing waits."""
    run, (w, m, v) = Run(use_locking=True), on_device([positive((5, 3)) for _ in range(3)])
    op, index = ops.FusedSparseLazyAdam(use_locking=True), on_device(np.array([1, 2]))
    values = on_device(np.zeros((2, 3), F32))

    def step() -> None:
        for k in range(8):
            run.step([1, 2] if k % 2 else None)

    def operate() -> None:
        for _ in range(8):
            op(w, m, v, *BETAS, values, index)

    def listen() -> None:
        for _ in range(8):
            fusestep.synchronize()

    in_threads(step, operate, listen, step)
    fusestep.synchronize()
    assert run.opt.global_step == 17
    assert run.opt.state_dict()["step.parameter_0"] == 9


def test_lock_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes the locks of guards and streams in the same order."""
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

    of_guards = [(pending, name, "guards") for name in ("guarded", "held")]
    for module, name, lock in ((launch, "in_order", "streams"), *of_guards):
        monkeypatch.setattr(module, name, noting(lock, getattr(module, name)))
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
        (opt, gradient((5, 4))), (opt, rows([1], (5, 4))), (opt, mixed),
        (opt, [rows([1], (5, 4)), theirs]), (on_cpu, on_device(gradient((5, 4)))), (on_cpu, theirs),
        (on_cpu, mixed),
    ):  # fmt: skip
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


@pytest.mark.parametrize(("function", "error", "text"), [
    (lambda _real, lr, *_: (lr, lr), ValueError, "returns another number of scalars"),
    (lambda _real, lr, *_: lr, TypeError, "formula '<lambda>' returns"),
    (lambda *_: (None,), TypeError, "lr of formula '<lambda>'"),
    (lambda *_: (1 // 0,), ZeroDivisionError, ""),
])  # fmt: skip
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
