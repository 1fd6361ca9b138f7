"""Steps of optimizers on device arrays, and states."""

from __future__ import annotations

import copy
import pickle
import tempfile
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn
from fusestep.kernels.tables import HOT
from fusestep.ops.runtime.device import DeviceArray

from devices import (
    BF16,
    COMPUTES,
    F16,
    F32,
    F64,
    GPU,
    KIND,
    MARKS,
    RNG,
    SIMULATOR,
    STUB,
    Run,
    assert_equal_runs,
    assert_same,
    computed,
    gradient,
    on_device,
    on_host,
    only,
    positive,
    refused,
    rows,
    sized,
    told,
    unchanged,
)
from helpers import STORAGE_DTYPES, in_turn
from optimizers import (
    BY_NAME,
    FORMS,
    ON_DEVICES,
    arguments_of,
    decayed_and_scaled,
    is_row_wise,
    parameters,
)  # fmt: skip
from optimizers import make as new_optimizer

pytestmark = MARKS

SHAPES: tuple[tuple[int, ...], ...] = (
    *sized(((5, 4), (7,)), ((60, 9), (1_003,))), (), (0, 3),
)  # fmt: skip
TABLE, VECTOR, SMALL = SHAPES[0], SHAPES[1], (3, 2)
Make = Callable[[Any], Any]
Step = list[Any]


def dense_steps(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtypes: Sequence[Any] = (F32,) * len(SHAPES)
) -> list[Step]:
    steps = [[gradient(s, d) for s, d in zip(shapes, dtypes, strict=True)] for _ in range(3)]
    steps[1][0] = steps[1][2] = None
    return [*steps, [None] * len(shapes)]


def row_steps() -> list[Step]:
    """Steps of two tables and a vector: duplicates, no rows, no gradient, dense ones."""
    many = RNG.integers(0, TABLE[0], sized(3, 200))
    return [
        [rows([1, 3, 1], TABLE), gradient(VECTOR), rows([2, 2], SMALL)],
        [rows([], TABLE), None, None],
        [rows(many, TABLE), None, rows([0], SMALL)],
        [gradient(TABLE), gradient(VECTOR), rows([], SMALL)],
    ]


def compare(make: Make, steps: Sequence[Step], variables: Sequence[np.ndarray]) -> None:
    """Device and host do the same to every parameter and state."""
    on_cpu, on_gpu = make([w.copy() for w in variables]), make(on_device(variables))
    assert on_cpu.target == "CPU"
    for step in steps:
        taken = on_gpu(tuple(on_device(step)))
        if COMPUTES:
            assert on_cpu(tuple(step)) == taken
    fusestep.synchronize()
    if COMPUTES:
        assert_equal_runs(on_gpu, on_cpu)
    else:
        assert list(on_gpu.state_dict()) == list(on_cpu.state_dict())


# On the simulator one for each rule, in float32; those of rows are in test_device_row_wise.py.
OF_RULES = {
    new_optimizer(form, parameters())._rule: form
    for form in ON_DEVICES
    if FORMS[form][0] != "LARS" and not is_row_wise(form)
}
STATES = {F32: None, F64: None, BF16: F32, F16: None}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, F32) for form in OF_RULES.values()]
    if KIND == SIMULATOR
    else sized(in_turn(ON_DEVICES), [*product(ON_DEVICES, STORAGE_DTYPES)]),
    ids=str,
)
def test_optimizers(form: str, dtype: Any) -> None:
    """With decay and loss scale; a number has no rows."""
    shapes = [shape or (1,) for shape in SHAPES] if is_row_wise(form) else SHAPES
    options = decayed_and_scaled(form)
    if STATES[dtype] and "state_dtype" in arguments_of(form):
        options["state_dtype"] = STATES[dtype]
    variables = [positive(shape, dtype) for shape in shapes]
    steps = dense_steps(shapes, (dtype,) * len(shapes))
    try:
        compare(lambda p: new_optimizer(form, p, **options), steps, variables)
    except RuntimeError as error:  # what has no kernels may say so; it may not be wrong
        if "CUDA" not in str(error):
            raise
        pytest.skip(str(error))


DENSE_OPTIMIZERS: tuple[Callable[[Any], Any], ...] = (
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


@pytest.mark.parametrize("make", DENSE_OPTIMIZERS)
def test_options_of_dense_steps(make: Make) -> None:
    """LARS, groups, schedules, clipping, states on the host; parameters of any shape."""
    compare(make, dense_steps(), [positive(shape) for shape in SHAPES])


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


@pytest.mark.parametrize("make", ROW_OPTIMIZERS)
def test_options_of_row_steps(make: Make) -> None:
    """Lazy and dense-equivalent steps on several tables, with duplicates and without rows."""
    compare(make, row_steps(), [positive(shape) for shape in (TABLE, VECTOR, SMALL)])


TAKING_ROWS = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("form", sized(TAKING_ROWS[::5], TAKING_ROWS) if COMPUTES else TAKING_ROWS)
def test_row_optimizers(form: str, how: str) -> None:
    if (form, how) == ("Adam-lazy", "dense_equivalent"):
        pytest.skip("it has no such setting")
    options = {**decayed_and_scaled(form), "sparse_update": how}
    variables = [positive(shape) for shape in (TABLE, VECTOR, SMALL)]
    compare(lambda p: new_optimizer(form, p, **options), row_steps(), variables)


# Widths of no, one and several tiles; an empty list; one row; hot rows; rows that are not aligned.
TABLES = (5, 1), (7, 33), (1, 8), (6, 16), (9,), (4, 3, 5)
COUNTS = sized((7, 12, 5, 0, 5, 12), (20, 40, 5, 0, 12, 30))
ROW_TYPES = [(F32, F32), (F32, F16), (F64, F32), (F16, F16), (BF16, BF16)]


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize(("dtype", "of_gradient"), ROW_TYPES, ids=str)
def test_many_tables_of_mixed_kinds(dtype: Any, of_gradient: Any, how: str) -> None:
    """Storage types of gradients and of tables; duplicates; both sizes of indices."""
    steps = []
    for step in range(2):
        given = []
        for k, (shape, count) in enumerate(zip(TABLES, COUNTS, strict=True)):
            is_hot = k == 5 and step and of_gradient == F32
            indices = RNG.integers(0, shape[0], HOT + 90 if is_hot else count)
            indices[: HOT + 40 if is_hot else 0] = 3
            found = rows(indices, shape, of_gradient)
            narrow = found.indices.astype(np.int32 if k % 2 else np.int64)
            given.append(nn.RowTensor(narrow, found.values, shape))
        steps.append(given)
    tables = [positive(shape, dtype) for shape in TABLES]
    compare(lambda p: nn.Adam(p, 0.05, eps=0.01, sparse_update=how), steps, tables)


def test_several_dtypes() -> None:
    """Parameters of every storage type in one optimizer, states of another one."""
    dtypes = (F16, BF16, F64, F32)
    variables = [positive(shape, d) for shape, d in zip(SHAPES, dtypes, strict=True)]
    for options in ({}, {"state_dtype": np.float32, "loss_scale": 2.0}):
        compare(lambda p, o=options: nn.Adam(p, 0.1, **o), dense_steps(SHAPES, dtypes), variables)
    tables = [positive(TABLE, BF16), positive(SMALL, F64)]
    steps = [
        [rows([1, 3, 1], TABLE, BF16), rows([2, 2], SMALL, F32)],
        [rows([4], TABLE, BF16), rows([], SMALL, F64)],
    ]
    for make in (nn.LazyAdam, nn.Adam):
        compare(lambda p, m=make: m(p, 0.1), steps, tables)


def test_states() -> None:
    """A state is copied to the host, and taken over by an optimizer on either side."""
    run, ours = Run(), [positive((5, 4)), positive((7,))]
    state = run.opt.state_dict()
    for other in (nn.LazyAdam(ours, 0.1), nn.LazyAdam(on_device(ours), 0.1)):
        other.load_state_dict(state)
        found = other.state_dict()
        for name, array in state.items():
            assert_same(found[name], array, name)
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
        expected, found = opt.state_dict(), other.state_dict()
        for name, array in expected.items():
            assert_same(found[name], array, name)
        for p, q in zip(opt.parameters, other.parameters, strict=True):
            assert_same(p.asnumpy(), q.asnumpy())
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
        with told(IndexError, "got 5", *run.w):
            run.step([5])
            fusestep.synchronize()
        run.step([1, 2])
        run.before = run.opt.state_dict()
    assert run.opt.global_step == 3
    run.step([6])
    with told(IndexError, "got 6", *run.w):
        run.opt.target = "CPU"
    assert run.opt.target == "GPU"


# Many tiles, rows that are aligned and not, tall, wide and low matrices, batches of small ones.
MATRICES = (
    (2_048, 1_024), (1_003, 777), (150_001, 12), (3, 70_001), (1, 9_000), (9_000, 1),
    (70, 30, 3, 3), (5, 130, 260),
)  # fmt: skip


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@only(GPU, reason="of small matrices there are other tests")
def test_matrices_of_adafactor(dtype: Any, beta1: float | None) -> None:
    """Near the CPU, and the same bits in every run."""
    options = {"beta1": beta1, "weight_decay": 0.1, "clip_threshold": 0.7}
    variables = [positive(shape, dtype) for shape in MATRICES]
    host = nn.AdaFactor([w.copy() for w in variables], **options)
    opts = [nn.AdaFactor(on_device(variables), **options) for _ in range(2)]
    for _ in range(3):
        step = [gradient(shape, dtype) for shape in MATRICES]
        host(list(step))
        for opt in opts:
            opt(on_device(step))
    assert_equal_runs(opts[0], host)
    assert_equal_runs(opts[0], opts[1], bits=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_skip_nonfinite(dtype: Any, bad: float) -> None:
    """A step with a NaN or an infinity in any gradient changes nothing, counts included."""
    start, steps = [positive(shape, dtype) for shape in SHAPES], dense_steps(SHAPES, (dtype,) * 4)
    opt = nn.Adam(on_device(start), 0.05, skip_nonfinite=True)
    twin = nn.Adam(on_device(start), 0.05)
    for t in (0, 2):
        gs = steps[t]
        spoiled = [g.copy() for g in gs]
        spoiled[t % 3].reshape(-1)[-1] = bad
        with unchanged(*(p.data for p in opt.parameters)):
            opt(on_device(spoiled))
        opt(on_device(gs))
        twin(on_device(gs))
    table = nn.LazyAdam(on_device([start[0]]), skip_nonfinite=True)
    sparse = rows([1, 1], TABLE, dtype)
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
    given = on_device(dense_steps()[0])
    sparse = on_device(rows([2, 2], TABLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(given)
        opt([sparse, *given[1:]])
        fusestep.synchronize()
        opt.state_dict()
