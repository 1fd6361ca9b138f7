"""Steps of optimizers on device arrays, and states."""

from __future__ import annotations

from simulator import run_check  # isort: split

import copy
import pickle
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

import fusestep
from fusestep import nn
from fusestep.ops.runtime.device import DeviceArray

from device_arrays import (
    BF16,
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
    unchanged,
)
from optimizers import FORMS, ON_DEVICES, decayed_and_scaled, is_row_wise, parameters
from optimizers import make as new_optimizer

SHAPES = ((5, 4), (7,), (), (0, 3))
Step = list[Any]


def dense_steps(dtypes: Sequence[Any] = (F32,) * len(SHAPES)) -> list[Step]:
    steps = [[gradient(s, d) for s, d in zip(SHAPES, dtypes, strict=True)] for _ in range(3)]
    steps[1][0] = steps[1][2] = None
    return [*steps, [None] * len(SHAPES)]


def row_steps() -> list[Step]:
    """Steps of two tables and a vector: duplicates, no rows, no gradient, dense ones."""
    return [
        [rows([1, 3, 1], (5, 4)), gradient((7,)), rows([2, 2], (3, 2))],
        [rows([], (5, 4)), None, None],
        [rows([4, 0], (5, 4)), None, rows([0], (3, 2))],
        [gradient((5, 4)), gradient((7,)), rows([], (3, 2))],
    ]


def compare_optimizer(
    make: Callable[[Any], Any], steps: Sequence[Step], variables: Sequence[np.ndarray]
) -> tuple[Any, Any]:
    """Device and host do the same to every parameter and state."""
    ours, theirs = [w.copy() for w in variables], on_device(variables)
    on_cpu, on_gpu = make(ours), make(theirs)
    assert on_cpu.target == "CPU"
    for step in steps:
        assert on_cpu(tuple(step)) == on_gpu(tuple(on_device(step)))
    for a, b in zip(theirs, ours, strict=True):
        assert_close(on_host(a), b, repr(on_gpu))
    expected, found = on_cpu.state_dict(), on_gpu.state_dict()
    assert list(found) == list(expected)
    for name in found:
        assert type(found[name]) is np.ndarray
        assert_close(found[name], expected[name], name)
    return on_gpu, theirs


# One for each rule; those of rows are in device_row_wise.py.
OF_RULES = {
    new_optimizer(form, parameters())._rule: partial(
        new_optimizer, form, **decayed_and_scaled(form)
    )
    for form in ON_DEVICES
    if FORMS[form][0] != "LARS" and not is_row_wise(form)
}
DENSE_OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    *OF_RULES.values(),
    lambda p: nn.Adam(
        [{"params": p[:1], "lr": 0.3, "weight_decay": 0.2}, {"params": p[1:]}],
        [0.1, 0.05, 0.01, 0.1],
    ),
    lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9, weight_decay=0.1, loss_scale=2.0), coefficient=0.1),
    lambda p: nn.LARS(nn.Lamb(p, 0.1), use_clip=True, lars_filter=lambda q: q.ndim > 0),
    lambda p: nn.AdamOffload(p, 0.1),
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipvalue=0.25),
    lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1, clipvalue=0.25),
    lambda p: nn.AdamOffload(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipnorm=1.0),
)


def dense_optimizers() -> None:
    """Every optimizer that is a rule, LARS around some; parameters of any shape."""
    variables = [positive(shape) for shape in SHAPES]
    for make in DENSE_OPTIMIZERS:
        compare_optimizer(make, dense_steps(), variables)


ROW_OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0),
    lambda p: nn.Adam(p, 0.1, use_lazy=True, use_locking=True),
    lambda p: nn.LazyAdam(
        [{"params": p[:1], "lr": 0.3}, {"params": p[1:], "weight_decay": 0.2}], 0.1
    ),
    lambda p: nn.FTRL(p, learning_rate=0.1),
    lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, sparse_update="dense_equivalent"),
    lambda p: nn.Momentum(p, 0.1, 0.9, sparse_update="lazy"),
    lambda p: nn.AdamOffload(p, 0.1, sparse_update="lazy"),
    lambda p: nn.AdamOffload(p, 0.1, weight_decay=0.1, sparse_update="lazy", clipnorm=1.0),
    lambda p: nn.Adam(p, 0.1, weight_decay=0.1, loss_scale=2.0, clipvalue=0.25),
    lambda p: with_target(nn.LazyAdam(p, 0.1), "CPU"),
)


def with_target(optimizer: Any, target: str) -> Any:
    optimizer.target = target
    return optimizer


def row_optimizers() -> None:
    """Lazy and dense-equivalent steps on several tables, with duplicates and without rows."""
    variables = [positive(shape) for shape in ((5, 4), (7,), (3, 2))]
    for make in ROW_OPTIMIZERS:
        compare_optimizer(make, row_steps(), variables)


def several_dtypes() -> None:
    """Parameters of every storage type in one optimizer, states of another one."""
    dtypes = (F16, BF16, F64, F32)
    variables = [positive(shape, d) for shape, d in zip(SHAPES, dtypes, strict=True)]
    for options in ({}, {"state_dtype": np.float32, "loss_scale": 2.0}):
        compare_optimizer(lambda p, o=options: nn.Adam(p, 0.1, **o), dense_steps(dtypes), variables)
    tables = [positive((5, 4), BF16), positive((3, 2), F64)]
    steps = [
        [rows([1, 3, 1], (5, 4), BF16), rows([2, 2], (3, 2), F32)],
        [rows([4], (5, 4), BF16), rows([], (3, 2), F64)],
    ]
    for make in (nn.LazyAdam, nn.Adam):
        compare_optimizer(lambda p, m=make: m(p, 0.1), steps, tables)


def states() -> None:
    """A state is copied to the host, and taken over by an optimizer on either side."""
    run, ours = Run(), [positive((5, 4)), positive((7,))]
    state = run.opt.state_dict()
    for other in (nn.LazyAdam(ours, 0.1), nn.LazyAdam(on_device(ours), 0.1)):
        other.load_state_dict(state)
        found = other.state_dict()
        for name, array in state.items():
            np.testing.assert_array_equal(found[name], array, name)
    run.step([1, 5])
    with refused(IndexError, "got 5"):
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
        np.testing.assert_array_equal(saved[p.name], on_host(w))


def copies() -> None:
    """Pickles and deep copies live on the device, apart, and go on as the original does."""
    dtypes = (F32, F16, F64)
    w = on_device([positive((5, 4), d) for d in dtypes])
    opt = nn.LazyAdam(w, 0.1, use_locking=True)
    opt(tuple(on_device([rows([1, 3], (5, 4), d) for d in dtypes])))
    others = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)), pickle.loads(pickle.dumps(opt))]
    step = tuple(on_device([rows([1, 2], (5, 4), d) for d in dtypes]))
    for other in others:
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            assert type(q.data) is type(p.data)
            assert (q.data.shape, q.data.dtype) == (p.data.shape, p.data.dtype)
            assert q.array.address != p.array.address
            np.testing.assert_array_equal(on_host(q.data), on_host(p.data))
    for one in (opt, *others):
        one(step)
    for other in others:
        expected, found = opt.state_dict(), other.state_dict()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            np.testing.assert_array_equal(p.asnumpy(), q.asnumpy())
    # A copy of what waits for an answer would keep counts that are to be taken back.
    for make in (copy.deepcopy, pickle.dumps):
        opt(tuple(on_device([rows([9], (5, 4)), None, None])))
        with refused(IndexError, "got 9"):
            make(opt)
        assert make(opt)
        assert opt.global_step == 2
    tensor = pickle.loads(pickle.dumps(on_device(rows([1, 3], (5, 4)))))
    np.testing.assert_array_equal(tensor.indices.numpy(), [1, 3])
    parameter = copy.deepcopy(nn.Parameter(cuda.to_device(positive((), BF16)), "w"))
    assert (parameter.shape, parameter.dtype, parameter.name) == ((), BF16, "w")


def rebinding() -> None:
    """A parameter can be rebound between steps, to memory on the device that is apart."""
    run = Run()
    p = run.opt.parameters[0]
    other = cuda.to_device(positive((5, 4)))
    p.data = other
    assert p.data is other
    with unchanged(run.w[0]):
        run.step([2])
    fusestep.synchronize()
    assert not (on_host(other)[2] == on_host(run.w[0])[2]).any()
    with refused(ValueError, "lives elsewhere than", other):
        p.data = positive((5, 4))
    with refused(ValueError, "shares memory with", other):
        p.data = type(other)(run.opt.moment1[0].owner._ary)
    with refused(ValueError, "has a wrong shape", other):
        p.data = cuda.to_device(positive((4, 5)))
    assert p.data is other
    # A bad step and a rebinding before the host hears of it.
    run.step([7])
    p.data = run.w[0]
    with refused(IndexError, "got 7", *run.w):
        fusestep.synchronize()
    run.step([1])
    assert run.opt.global_step == 3


def targets() -> None:
    """States move from the device to the host and back, all of them or none."""
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
    for target in ("CPU", "GPU"):
        run.assert_as_before()
        run.opt.target = target
        with refused(IndexError, "got 5", *run.w):
            run.step([5])
            fusestep.synchronize()
        run.step([1, 2])
        run.before = run.opt.state_dict()
    assert run.opt.global_step == 3
    run.step([6])
    with refused(IndexError, "got 6", *run.w):
        run.opt.target = "CPU"
    assert run.opt.target == "GPU"


if __name__ == "__main__":
    run_check(
        dense_optimizers=(dense_optimizers,),
        row_optimizers=(row_optimizers, several_dtypes),
        copies=(states, copies, rebinding, targets),
    )
