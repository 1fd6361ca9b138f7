"""Operators on a CUDA device.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.kernels.tables import HOT
from fusestep.ops.runtime.device import DeviceArray

import gpu_arrays
import reference
from gpu_arrays import Maker, copies
from gpu_checks import CPU_ULPS, F32, on_device
from helpers import BF16, STORAGE_DTYPES, assert_same_bits, assert_within_ulps
from operators import DENSE_OPERATORS, ROW_OPERATORS, Operator
from test_ops_reference import CALLS, known_scalars

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


_GRADIENTS = (((40, 3), np.float32), ((1_003,), np.float64), ((), np.float32), ((77,), BF16))


def both(
    make: Maker, operator: Operator, inputs: dict[str, Any], **made: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The variables after a call on the device, and after one on the CPU."""
    given = on_device(make, inputs)
    returned = operator.call(given, **made)
    returned = returned if isinstance(returned, tuple) else (returned,)
    if operator.returned:
        for name, array in zip(operator.returned, returned, strict=True):
            assert array is given[name]
    operator.call(inputs, **made)
    names = operator.variables
    return [make.get(given[name]) for name in names], [inputs[name] for name in names]


def assert_operator(
    operator: Operator, found: list[np.ndarray], expected: list[np.ndarray]
) -> None:
    """All numbers are of size 1, but FTRL adds terms of ten times that."""
    __tracebackhide__ = True
    size = 10.0 if "Ftrl" in operator.name else 1.0
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_within_ulps(a, b, size + np.abs(b.astype(np.float64)), CPU_ULPS, f"array {k}")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("name", DENSE_OPERATORS)
def test_dense_operators(maker: Maker, name: str, dtype: Any) -> None:
    operator = DENSE_OPERATORS[name]
    assert_operator(operator, *both(maker, operator, operator.inputs((9, 37), dtype)))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_row_operators(maker: Maker, name: str, index_dtype: Any) -> None:
    """Duplicates, and rows of 1, 2 and more dimensions."""
    operator = ROW_OPERATORS[name]
    for shape in ((9,), (9, 37), (9, 2, 5)):
        inputs = operator.inputs(shape)
        inputs["indices"] = inputs["indices"].astype(index_dtype)
        assert_operator(operator, *both(maker, operator, inputs))
    inputs = operator.inputs((9, 3))
    inputs["indices"], inputs[operator.gradient] = np.zeros(0, index_dtype), np.zeros((0, 3), F32)
    assert_operator(operator, *both(maker, operator, inputs))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "made", "step"), CALLS, ids=lambda x: None if callable(x) else str(x)
)
def test_operators_meet_the_reference(
    maker: Maker, name: str, made: dict[str, Any], step: Any, dtype: Any
) -> None:
    operator = {**DENSE_OPERATORS, **ROW_OPERATORS}[name]
    inputs = operator.inputs((40, 3), np.float32 if operator.only_float32 else dtype)
    if operator.takes_rows:
        inputs["indices"] = np.array([7, 39, 7, 0])
    before = [inputs[variable].copy() for variable in operator.variables]
    step = partial(step, **known_scalars(operator, inputs, made))
    g = reference.wide(inputs[operator.gradient])
    if operator.takes_rows:
        expected = reference.lazy_step(step, before[0], inputs["indices"], g, *before[1:])
    else:
        expected = step(before[0], g, *before[1:])
    found, _ = both(maker, operator, inputs, **made)
    for array, exact in zip(found, expected, strict=True):
        unit = 1e-13 if array.dtype == np.float64 else 4e-6 if "lr_power" in made else 2e-6
        np.testing.assert_allclose(array, exact, rtol=unit, atol=unit)


def test_global_norm_and_clipping(maker: Maker) -> None:
    """Dense gradients of several storage types, and rows with duplicates, some of them hot."""
    rng = np.random.default_rng(17)
    dense = [rng.standard_normal(shape).astype(dtype) for shape, dtype in _GRADIENTS]
    indices = np.concatenate([np.full(HOT + 9, 2), rng.integers(0, 50, 300)])
    values = rng.standard_normal((len(indices), 12)).astype(F32)
    host = [*dense, None, nn.RowTensor(indices, values, (50, 12))]
    rows = nn.RowTensor(maker.put(indices), maker.put(values), (50, 12))
    ours = [*copies(maker, dense), None, rows]
    np.testing.assert_allclose(ops.global_norm(ours), ops.global_norm(host), rtol=1e-12)
    clipped = ops.clip_by_global_norm(ours, 1.0), ops.clip_by_global_norm(host, 1.0)
    for found, expected in zip(*clipped, strict=True):
        if isinstance(expected, nn.RowTensor):
            found, expected = found.values, expected.values
        if expected is not None:
            array = found.numpy() if isinstance(found, DeviceArray) else maker.get(found)
            assert_within_ulps(array, expected, np.abs(expected.astype(np.float64)), 1.0, "clipped")
    fusestep.synchronize()


def test_gather_and_what_comes_back(maker: Maker) -> None:
    table, index = np.arange(60, dtype=np.float32).reshape(5, 12), np.array([[4, 0], [4, 2]])
    gather, expected = ops.SparseGatherV2(), table[index]
    found = gather(maker.put(table), maker.put(index), 0)
    assert_same_bits(maker.get(found), expected)
    back = gather.backward(found)
    assert_same_bits(back.values.numpy(), expected.reshape(4, 12))
    assert_same_bits(back.indices.numpy(), index.reshape(4))
