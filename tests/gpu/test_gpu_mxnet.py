"""MXNet's optimizers on a CUDA device.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops

import gpu_arrays
from gpu_arrays import Maker, copies
from gpu_checks import CPU_ULPS, F32, TENSORS, held, near_run, parameters, problem, row_tensor
from helpers import STORAGE_DTYPES, assert_same_bits, assert_within_ulps

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


MXNET_SHAPES = {0: (60, 9), 1: (1_003,), 2: (4, 5, 6)}


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("place", ["weight", "new", "other"])
def test_adam_update(maker: Maker, place: str, dtype: Any) -> None:
    """Dense and row-sparse, wherever the result goes."""
    rng = np.random.default_rng(3)
    options = {"lr": 0.1, "epsilon": 0.01, "wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.4}
    values = rng.standard_normal((70, 9)).astype(dtype)
    rows = nn.RowTensor(rng.integers(0, 60, 70), values, (60, 9))
    for grad in (rng.standard_normal((60, 9)).astype(dtype), rows):
        arrays = [rng.uniform(0.1, 1.0, (60, 9)).astype(dtype) for _ in range(4)]
        ours, given = copies(maker, arrays), grad
        given = maker.put(grad) if isinstance(grad, np.ndarray) else row_tensor(maker, rows)
        outs = [{"weight": a[0], "new": None, "other": a[3]}[place] for a in (arrays, ours)]
        expected = ops.adam_update(arrays[0], grad, *arrays[1:3], outs[0], **options)
        found = ops.adam_update(ours[0], given, *ours[1:3], outs[1], **options)
        fusestep.synchronize()
        for a, b in zip([found, *ours], [expected, *arrays], strict=True):
            size = 1.0 + np.abs(b.astype(np.float64))
            assert_within_ulps(held(a), b, size, CPU_ULPS, place)


def mxnet_run(make: Maker | None, cls: Any, dtype: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Three steps of an Updater; the last one without a gradient of one weight."""
    rng = np.random.default_rng(8)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in MXNET_SHAPES.values()]
    weights = copies(make, arrays) if make else arrays
    updater = nn.mxnet.get_updater(cls(0.05, epsilon=0.01, wd=0.1, **options))
    for t in range(3):
        gs = [rng.standard_normal(shape).astype(dtype) for shape in MXNET_SHAPES.values()]
        rows = nn.RowTensor(rng.integers(0, 60, 33), gs[0][:33], (60, 9))
        given = [row_tensor(make, rows), *(copies(make, gs[1:]) if make else gs[1:])]
        if t == 2:
            given[1] = None
        updater(list(MXNET_SHAPES), given, weights)
    fusestep.synchronize()
    return updater, weights


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {}),
        ("Adam", {"lazy_update": True, "clip_gradient": 0.5}),
        ("Adam", {"multi_precision": True}),
        ("AdamW", {"multi_precision": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_mxnet(maker: Maker, name: str, options: dict[str, Any], dtype: Any) -> None:
    """Weights and states; these are taken over on either side."""
    cls = getattr(nn.mxnet, name)
    updater, weights = mxnet_run(maker, cls, dtype, **options)
    _, arrays = mxnet_run(None, cls, dtype, **options)
    for k, (w, expected) in enumerate(zip(weights, arrays, strict=True)):
        near_run(held(w), expected, dtype, f"weight {k}")
    data, kept = updater.get_states(), [held(w) for w in weights]
    again, there = (nn.mxnet.get_updater(cls(0.05, epsilon=0.01, **options)) for _ in range(2))
    gs, made = [np.full(w.shape, 0.5, dtype) for w in kept], []
    updater.optimizer.wd = 0.0
    for other, make in ((updater, maker), (again, maker), (there, None)):
        other.set_states(data)
        given, ws = ([make.put(a) if make else a.copy() for a in of_one] for of_one in (gs, kept))
        other(list(MXNET_SHAPES), given, ws)
        assert other.optimizer._index_update_count == {0: 4, 1: 3, 2: 4}
        made.append([held(w) if make else w for w in ws])
    for a, b, c in zip(*made, strict=True):
        assert_same_bits(a, b)
        near_run(b, c, dtype, "after set_states")


def test_parameters_can_be_rebound(maker: Maker) -> None:
    start, (gs, *_) = problem({"w": (33,)}, F32)
    (p,) = parameters(maker, start)
    opt = nn.SGD([p], 0.5)
    opt(copies(maker, gs))
    p.data = maker.put(start["w"])
    opt(copies(maker, gs))
    assert_same_bits(p.asnumpy(), start["w"] - np.float32(0.5) * gs[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_skip_nonfinite(maker: Maker, dtype: Any, bad: float) -> None:
    """A step with a NaN or an infinity in any gradient changes nothing, counts included."""
    start, steps = problem(TENSORS, dtype)
    opt = nn.Adam(parameters(maker, start), 0.05, skip_nonfinite=True)
    twin = nn.Adam(parameters(maker, start), 0.05)
    for t, gs in enumerate(steps):
        spoiled = [g.copy() for g in gs]
        spoiled[t % 2].reshape(-1)[-1 - t] = bad
        before = [p.asnumpy().copy() for p in opt.parameters]
        opt(copies(maker, spoiled))
        for p, old in zip(opt.parameters, before, strict=True):
            assert_same_bits(p.asnumpy(), old)
        opt(copies(maker, gs))
        twin(copies(maker, gs))
    assert opt.skipped_steps == len(steps)
    assert opt.global_step[0] == len(steps)
    for p, q in zip(opt.parameters, twin.parameters, strict=True):
        assert_same_bits(p.asnumpy(), q.asnumpy())
    values = np.ones((2, 9), dtype)
    values[1, 8] = bad
    table = nn.LazyAdam(parameters(maker, {"table": start["table"]}), skip_nonfinite=True)
    table([row_tensor(maker, nn.RowTensor(np.array([1, 1]), values, (60, 9)))])
    assert table.skipped_steps == 1
    assert_same_bits(table.parameters[0].asnumpy(), start["table"])


def test_a_step_warns_of_nothing(maker: Maker) -> None:
    """Numba has warnings for small grids, and for its own default stream."""
    start, (gs, *_) = problem(TENSORS, F32)
    opt = nn.Adam(parameters(maker, start), sparse_update="lazy")
    given = copies(maker, gs)
    rows = row_tensor(maker, nn.RowTensor(np.array([2, 2]), np.ones((2, 9), F32), (60, 9)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(given)
        opt([rows, *given[1:]])
        fusestep.synchronize()
        opt.state_dict()
