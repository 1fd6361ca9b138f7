"""AdaFactor on device arrays, as on the host."""

from __future__ import annotations

from simulator import run_check  # isort: split

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda

from fusestep import nn
from fusestep.kernels.cuda.device import memory
from fusestep.kernels.cuda.device.guard import NOTHING
from fusestep.kernels.cuda.device.part import LaunchContext
from fusestep.kernels.cuda.matrices.layout import CUT, MatrixTables
from fusestep.kernels.cuda.matrices.step import MatrixStep
from fusestep.kernels.element import kernel
from fusestep.kernels.rules import adafactor as rules
from fusestep.kernels.storage import F32 as STORED_F32
from fusestep.kernels.tables import MatrixTensor

from device_arrays import (
    BF16,
    F16,
    F32,
    F64,
    assert_close,
    gradient,
    on_device,
    on_host,
    positive,
    refused,
    rows,
)

# Vectors, and matrices whose rows are aligned or not, in several tiles, in one, or several to a
# block: batches of them too, single rows and columns, tensors of no elements.
SHAPES = (
    *((9, 20), (7,), (5, 3), (2, 3, 4), (6, 2, 3, 3), (1, 140), (13, 1), (), (0, 3), (3, 8)),
    *((1, 1), (140, 2), (2, 5, 9)),
)
FEW = ((5, 12), (7,), (3, 2, 3))
Options = dict[str, Any]


def steps_of(shapes: Sequence[tuple[int, ...]], dtype: Any, n: int = 2) -> list[list[Any]]:
    return [[gradient(shape, dtype) for shape in shapes] for _ in range(n)]


def assert_same(on_gpu: Any, on_cpu: Any, label: str) -> None:
    """Every parameter and every state, by name, type and value."""
    for p, q in zip(on_gpu.parameters, on_cpu.parameters, strict=True):
        assert_close(p.asnumpy(), q.asnumpy(), label)
    found, expected = on_gpu.state_dict(), on_cpu.state_dict()
    assert list(found) == list(expected), label
    for name in found:
        assert_close(found[name], expected[name], f"{label} {name}")


def compare(
    make: Callable[[Any], Any], variables: Sequence[np.ndarray], steps: Sequence[list[Any]]
) -> Any:
    """Device and host do the same; the optimizer on the device."""
    on_cpu, on_gpu = make([w.copy() for w in variables]), make(on_device(variables))
    assert (on_cpu.target, on_gpu.target) == ("CPU", "GPU")
    for step in steps:
        assert on_cpu(tuple(step)) == on_gpu(tuple(on_device(step)))
    assert_same(on_gpu, on_cpu, repr(on_gpu))
    return on_gpu


OPTIONS: tuple[Options, ...] = (
    {"beta1": None},
    {"beta1": 0.0, "relative_step": False, "learning_rate": 0.5},
    {"warmup_init": True, "decay_rate": 0.5},
    {"scale_parameter": False, "weight_decay": 0.3},
    {"eps": (0.1, 10.0), "weight_decay": 0.1},
    {"clip_threshold": 0.25, "beta1": None, "weight_decay": 0.2, "compression": True},
    {"clip_threshold": 50.0, "relative_step": False, "learning_rate": [0.1, 0.2]},
    {"use_locking": True, "skip_nonfinite": True},
)


def options() -> None:
    """All that changes the arithmetic; in float64, where nothing hides behind roundings."""
    variables, steps = ([positive(s, F64) for s in FEW], steps_of(FEW, F64))
    for chosen in OPTIONS:
        compare(lambda p, o=chosen: nn.AdaFactor(p, **o), variables, steps)
    groups = {"lr": 0.5, "weight_decay": 0.2}
    compare(
        lambda p: nn.AdaFactor([{"params": p[:1], **groups}, {"params": p[1:]}]), variables, steps
    )


def wrapped() -> None:
    """LARS completes the scalars first; weight decay is then part of the gradient."""

    def make(p: Any) -> Any:
        opt = nn.AdaFactor(p, weight_decay=0.1, loss_scale=2.0)
        return nn.LARS(opt, coefficient=0.1, lars_filter=lambda q: q.shape != FEW[0])

    compare(make, [positive(s, F64) for s in FEW], steps_of(FEW, F64))


def shapes() -> None:
    """Every shape, with and without gradients; in the types whose tiles are 2 and 4 elements."""
    for dtype in (F32, F64):
        steps = steps_of(SHAPES, dtype)
        steps[1][0] = steps[1][1] = steps[1][4] = None
        opt = compare(nn.AdaFactor, [positive(s, dtype) for s in SHAPES], steps)
        opt((None,) * len(SHAPES))
        assert opt.global_step == 3


def tiles() -> None:
    """The shapes above reach all that there is: bands, shared lines, several groups of lines."""
    tensors = [
        MatrixTensor((0, 0, 0, 0), math.prod(s[:-2]), *s[-2:])
        for s in SHAPES
        if len(s) > 1 and math.prod(s)
    ]
    tables = MatrixTables(tensors, 4, 4)
    found, lines, n = tables.tiles, tables.lines, tables.n_tensors
    for reached in (
        found.tile_height > CUT.rounds << found.log_down,
        found.tiles_down > 1,
        found.tiles_across > 1,
        1 << (found.log_across + found.log_down) < CUT.threads,
        found.width % 4 == 0,
        lines.log_parts > 0,
        lines.segments[:n] > 1,
        lines.chunks[:n] > 1,
        (lines.matrices[:n] > 1) & (lines.segments[:n] > 1),
    ):
        assert reached.any() and not reached.all()


BF16_OPTIONS: Options = {"state_dtype": np.float32, "loss_scale": 2.0, "weight_decay": 0.1}


def dtypes() -> None:
    """Parameters of every storage type, gradients and states of others."""
    for chosen, of_w, of_g in (
        ({}, (F16, F64), (F16, F32)),
        (BF16_OPTIONS, (BF16,), (BF16,)),
        ({"beta1": None, "compression": True}, (F32,), (BF16,)),
    ):
        variables = [positive(s, d) for d in of_w for s in ((5, 16), (2, 7, 3), (9,), ())]
        kinds = np.repeat(np.arange(len(of_g)), 4)
        steps = [
            [gradient(w.shape, of_g[k]) for w, k in zip(variables, kinds, strict=True)]
            for _ in range(2)
        ]
        compare(lambda p, o=chosen: nn.AdaFactor(p, **o), variables, steps)


def shifted(array: np.ndarray, n: int) -> Any:
    """``array`` on the device, ``n`` elements past an aligned address."""
    room = cuda.to_device(np.zeros(array.size + n + 16, array.dtype))
    first = -room._ary.ctypes.data % 16 // array.itemsize + n
    room._ary[first : first + array.size] = array.reshape(-1)
    return type(room)(room._ary[first : first + array.size].reshape(array.shape))


def unaligned() -> None:
    """Elements one by one where 16-byte loads are not possible."""
    start = [positive((5, 16), BF16), positive((6, 8), BF16)]
    given = [[gradient(w.shape, w.dtype) for w in start] for _ in range(2)]
    on_cpu = nn.AdaFactor([w.copy() for w in start], **BF16_OPTIONS)
    of_w, of_g = (nn.AdaFactor([shifted(w, n) for w in start], **BF16_OPTIONS) for n in (1, 0))
    for step in given:
        on_cpu(tuple(step))
        of_w(tuple(shifted(g, 0) for g in step))
        of_g(tuple(shifted(g, 3) for g in step))
    assert_same(of_w, on_cpu, "parameters")
    assert_same(of_g, on_cpu, "gradients")


def bits() -> None:
    """The same in every run; and NaN and infinity where the host has them."""
    start, steps = [positive(s) for s in FEW], steps_of(FEW, F32)
    runs = []
    for _ in range(2):
        w = on_device(start)
        opt = nn.AdaFactor(w, weight_decay=0.1)
        for step in steps:
            opt(tuple(on_device(step)))
        state = opt.state_dict()
        runs.append([a.tobytes() for a in (*map(on_host, w), *state.values())])
    assert runs[0] == runs[1]
    for bad in (np.nan, np.inf):
        broken = [g.copy() for g in steps[0]]
        broken[0][1, 2] = broken[1][3] = bad
        with without_warnings():
            compare(nn.AdaFactor, start, [steps[1], broken])
    opt = nn.AdaFactor(on_device(start), skip_nonfinite=True)
    with unchanged_states(opt):
        opt(tuple(on_device(broken)))
    assert (opt.skipped_steps, int(opt.global_step[0])) == (1, 0)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Of NumPy's, whose ``errstate`` the threads of the simulator do not see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@contextmanager
def unchanged_states(opt: Any) -> Iterator[None]:
    before = [p.asnumpy().tobytes() for p in opt.parameters]
    states = {name: array.tobytes() for name, array in opt.state_dict().items()}
    yield
    assert [p.asnumpy().tobytes() for p in opt.parameters] == before
    assert {name: array.tobytes() for name, array in opt.state_dict().items()} == states


def zeros() -> None:
    """Nothing is divided by 0: not in a matrix, a row, a column or a vector without gradients."""
    start, (given, *_) = [positive(s) for s in FEW], steps_of(FEW, F32)
    given[0][2], given[0][:, 3], given[1][:], given[2][1] = 0.0, 0.0, 0.0, 0.0
    with without_warnings():
        opt = compare(lambda p: nn.AdaFactor(p, eps=(0.0, 1e-3)), start, [given, given])
    smallest = np.float32(1e-30)
    for name, lowest in (
        ("exp_avg_sq_row_parameter_0", np.float32(0.0)),  # those of rows may be 0, not their mean
        ("exp_avg_sq_col_parameter_0", smallest),
        ("exp_avg_sq_col_parameter_2", smallest),
        ("exp_avg_sq_parameter_1", smallest),
    ):
        assert opt.state_dict()[name].min() == lowest, name
    assert all(np.isfinite(p.asnumpy()).all() for p in opt.parameters)


def guards() -> None:
    """A step behind a closed guard writes nothing: neither states nor parameters."""
    compiled = kernel(rules.ADAFACTOR_MATRIX, (), STORED_F32, STORED_F32, (STORED_F32,) * 3)
    w, average, of_rows, of_columns, g = arrays = [
        positive(s) for s in ((9, 12), (9, 12), (9,), (12,), (9, 12))
    ]
    places = [a.ctypes.data for a in (w, average, of_rows, of_columns)]
    before = [a.copy() for a in arrays]
    hp = np.array(
        [rules.adafactor_scalars(np.float32, 0.1, 0.0, 3, (0.9, 0.8, 1e-30), ())], np.float32
    )
    gradients, scalars = np.array([g.ctypes.data]), np.array([hp.ctypes.data])
    tensors = [MatrixTensor.of((9, 12), places)]
    constants = ("epsilon2", 1e-3), ("clip_threshold", 1.0), ("scale_parameter", True)
    step = MatrixStep(compiled, tensors, gradients, constants)
    table, scratch = step.words(0, scalars), np.zeros(step.scratch_bytes // 8)
    step.words(table.ctypes.data, scalars)
    for found in (0, NOTHING):
        guard = np.array([found, 0])
        step.enqueue(LaunchContext(0, guard.ctypes.data, scratch.ctypes.data))
        same = [np.array_equal(a, b) for a, b in zip(arrays, before, strict=True)]
        assert same == [found == 0] * 4 + [True]


def copies_of_a_step() -> None:
    """One copy to the device for new arrays and one for another rate, none for the same again."""
    copied, copy_in = [], memory.copy_in
    opt = nn.AdaFactor(
        on_device([positive(s) for s in FEW]), 0.1, scale_parameter=False, relative_step=False
    )
    first, second = (tuple(on_device(step)) for step in steps_of(FEW, F32)[:2])

    def counting(*arguments: Any) -> None:
        copied.append(arguments)
        copy_in(*arguments)

    memory.copy_in = counting
    numbers = []
    try:
        for step in (first, first, second, second):
            opt(step)
            numbers.append(len(copied))
        opt.loss_scale = 2.0
        opt(second)
    finally:
        memory.copy_in = copy_in
    assert numbers == [2, 2, 3, 3]  # the settings, and the tables
    assert len(copied) == 5  # with the loss scale, rows of scalars are longer: the tables too


def states() -> None:
    """A state moves between host and device, and so does the work."""
    start, steps = [positive(s, F64) for s in FEW], steps_of(FEW, F64, 4)
    on_cpu, on_gpu = nn.AdaFactor([w.copy() for w in start]), nn.AdaFactor(on_device(start))
    for k, step in enumerate(steps):
        on_cpu(tuple(step))
        on_gpu(tuple(on_device(step)))
        assert_same(on_gpu, on_cpu, f"after step {k}")
        on_gpu.target = ("CPU", "GPU", "CPU", "GPU")[k]
        assert on_gpu.target == ("CPU", "GPU", "CPU", "GPU")[k]
    state = on_gpu.state_dict()
    others = [copy.deepcopy(on_gpu), pickle.loads(pickle.dumps(on_gpu))]
    others.append(nn.AdaFactor(on_device([p.asnumpy() for p in on_gpu.parameters])))
    others[-1].load_state_dict(state)
    for one in (on_gpu, *others):
        one(tuple(on_device(steps[0])))
    on_cpu(tuple(steps[0]))
    for one in (on_gpu, *others):
        assert_same(one, on_cpu, "resumed")
    for one in (on_gpu, on_cpu):
        one.init_ada_factor_state(None)
    on_cpu(tuple(steps[1]))
    on_gpu(tuple(on_device(steps[1])))
    assert_same(on_gpu, on_cpu, "made anew")


def centralized() -> None:
    """Gradients that are centralized before."""
    groups = lambda p: [{"params": p, "grad_centralization": True, "weight_decay": 0.1}]  # noqa: E731
    start, steps = [positive(s, F64) for s in FEW], steps_of(FEW, F64)
    compare(lambda p: nn.AdaFactor(groups(p), loss_scale=2.0), start, steps)


def refusals() -> None:
    """Row-sparse gradients, and gradients of the wrong shape or place, before anything changes."""
    w = on_device([positive((5, 4)), positive((3,))])
    opt = nn.AdaFactor(w)
    good = on_device(gradient((3,)))
    for error, text, bad in (
        (ValueError, "Adafactor needs means over all rows", on_device(rows([1], (5, 4)))),
        (ValueError, "has a wrong shape", on_device(gradient((4, 5)))),
        (ValueError, "lives elsewhere than", gradient((5, 4))),
        (ValueError, "shares memory with", w[0]),
    ):
        with unchanged_states(opt), refused(error, text, *w):
            opt((bad, good))
    assert opt.global_step == 0


if __name__ == "__main__":
    run_check(
        values=(options, wrapped, centralized),
        shapes=(shapes, tiles, unaligned),
        types=(dtypes, bits, zeros, guards),
        states=(copies_of_a_step, states, refusals),
    )
