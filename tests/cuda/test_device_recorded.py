"""Recorded runs on a device, and arrays of more elements than an int32 counts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn

import recorded_nn
import recorded_quirks
import test_recorded_nn
import test_recorded_ops
from devices import (
    F32,
    GPU,
    KIND,
    MARKS,
    SIMULATOR,
    adopted,
    computed,
    numba_stream,
    on_device,
    on_host,
    only,
)  # fmt: skip
from helpers import BF16, assert_same_bits
from recorded import Case, assert_close_recorded

pytestmark = MARKS
# Recorded runs: an element that cancelled holds roundings of what it was, which no order of float32
# operations shares with the original's in every element. Each is worth two units of that size.
RECORDED_ROUNDINGS = 2.0
RECORDED_OPERATORS = [
    name
    for name in test_recorded_ops.COMPARED
    if "store_return" not in test_recorded_ops.CASES[name].meta  # operators without kernels
]


SOME = slice(None, None, 12 if KIND == SIMULATOR else 1)


def there(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments of a call, on the device."""
    return {
        name: on_device(value) if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("name", RECORDED_OPERATORS[SOME])
def test_recorded_operators(name: str) -> None:
    """As test_recorded_ops.py, on the device."""
    case = test_recorded_ops.CASES[name]
    operator = test_recorded_ops.operator_of(case)
    dropping = {"out_of_range": "drop"} if name in test_recorded_ops.OUT_OF_RANGE else {}
    op = test_recorded_ops.build(case, **dropping)
    arrays = {entry: on_device(array) for entry, array in case.initial.items()}
    after = dict(case.initial)
    reached = dict.fromkeys(arrays, 0.0)
    for t, step in enumerate(case.steps, 1):
        before = after
        known = {**case.hyper, **there(step.inputs), **arrays}
        known[operator.gradient] = known["grad"]
        op(*(known[argument] for argument in operator.arguments))
        fusestep.synchronize()
        computed()
        after = {entry: on_host(array) for entry, array in arrays.items()}
        new = recorded_quirks.terms(case, before, after)
        reached = {e: np.maximum(reached[e], RECORDED_ROUNDINGS * new[e]) for e in new}
        assert after.keys() == step.outputs.keys()
        for entry, expected in step.outputs.items():
            label, most = f"{entry} after step {t}", reached.get(entry, 0.0)
            assert_close_recorded(after[entry], expected, case.dtype, label, most)


def recorded_arrays(opt: Any) -> dict[str, np.ndarray]:
    """As `recorded_nn.arrays`, on the host."""
    found = {f"p{i}": p.asnumpy().copy() for i, p in enumerate(opt.parameters)}
    return found | {f"s:{name}": array for name, array in opt.state_dict().items()}


@pytest.mark.parametrize("name", [*test_recorded_nn.COMPARED][SOME])
def test_recorded_optimizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As test_recorded_nn.py, on the device."""
    case = test_recorded_nn.CASES[name]
    case = replace(case, meta={**case.meta, "target": None})  # it is where its parameters are
    own = nn.Parameter
    with monkeypatch.context() as patch:
        patch.setattr(nn, "Parameter", lambda data, name: own(on_device(data), name=name))
        opt = recorded_nn.build(case)
    try:
        run_recorded(case, opt)
    except RuntimeError as error:  # what has no kernels may say so; it may not be wrong
        if "CUDA" not in str(error):
            raise
        pytest.skip(str(error))


def recorded_sizes(
    case: Case, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What each array was before a step; FTRL's linear coefficient is a sum of more than that."""
    sizes: dict[str, np.ndarray] = {e: np.abs(a.astype(np.float64)) for e, a in before.items()}
    if case.api == "nn.FTRL":
        rate, power = case.hyper.get("learning_rate", 1e-3), case.hyper.get("lr_power", -0.5)
        for i, (name, _) in enumerate(case.meta["params"]):
            root = after[f"s:moments.{name}"].astype(np.float64) ** -power
            sizes[f"s:linear.{name}"] += sizes[f"p{i}"] * root / rate
    return sizes


def run_recorded(case: Case, opt: Any) -> None:
    """Every parameter after each step, and the states at the end."""
    found = recorded_arrays(opt)
    reached: dict[str, Any] = dict.fromkeys(found, 0.0)
    for t, step in enumerate(case.steps, 1):
        before = found
        given = on_device(recorded_nn.gradients(case, step))
        assert opt(given) == (True,) * len(opt.parameters)
        computed()
        found = recorded_arrays(opt)
        size = recorded_sizes(case, before, found)
        roundings = max(RECORDED_ROUNDINGS, test_recorded_nn.ROUNDINGS.get(case.name, 0.0))
        reached = {e: np.maximum(reached[e], roundings * size[e]) for e in found}
        for entry in found.keys() & step.outputs.keys():
            expected, label = step.outputs[entry], f"{entry} after step {t}"
            assert_close_recorded(found[entry], expected, expected.dtype, label, reached[entry])


needs_room = pytest.mark.skipif(
    os.environ.get("FUSESTEP_GPU_LARGE_TESTS") != "1",
    reason="needs FUSESTEP_GPU_LARGE_TESTS=1 and tens of gigabytes on the device",
)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Numba's, filled on the device."""
    from numba import cuda

    from fusestep.kernels.cuda.device.arrays import fill

    free = cuda.current_context().get_memory_info().free
    needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if needed > 0.9 * free:
        pytest.skip(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    array = cuda.device_array(shape, dtype)
    fill(adopted(array).address, array.size, 0.0, np.dtype(dtype), cuda.default_stream())
    return array


@needs_room
@only(GPU, reason="tens of gigabytes")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_more_elements_than_an_int32_counts(dtype: Any) -> None:
    from fusestep.kernels.cuda.device.arrays import fill

    n = 2**31 + 4_099
    w, g = zeros((n,), dtype), zeros((n,), dtype)
    fill(adopted(g).address, n, 1.0, dtype, numba_stream(0))
    nn.SGD([nn.Parameter(w, "w")], 0.5)([g])
    for part in (w[:5_000], w[2**30 : 2**30 + 5_000], w[2**31 - 5_000 :]):
        found = on_host(part)
        assert_same_bits(found, np.full(found.shape, -0.5, dtype))


@needs_room
@only(GPU, reason="tens of gigabytes")
@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
def test_a_table_of_more_elements_than_an_int32_counts(how: str) -> None:
    n, d = 2**24 + 9, 130
    w, indices = zeros((n, d), BF16), np.array([n - 1, 5, n - 1, 2**24 - 1])
    values = np.ones((4, d), BF16)
    opt = nn.SGD([nn.Parameter(w, "w")], 0.5, sparse_update=how)
    opt([on_device(nn.RowTensor(indices, values, (n, d)))])
    fusestep.synchronize()
    expected = np.zeros((10, d), BF16)
    expected[0], expected[9] = -0.5, -1.0
    assert_same_bits(on_host(w[2**24 - 1 :]), expected)
    assert_same_bits(on_host(w[5:6]), np.full((1, d), -0.5, BF16))
