"""What the tests on a CUDA device share: problems, and how near results have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from gpu_arrays import Maker, adopted
from helpers import EPSILON

F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))
# Between the device and the CPU: both round each operation alike, but either compiler chooses
# for itself which products and sums become one FMA. Each choice is worth at most half a unit, and
# no rule has more than about eight.
CPU_ULPS = 4.0
# Of the largest value of an array after three steps of an optimizer, each of which passes on, at
# most doubled, by how much the one before was off. In 16 bit (True) one rounding hides the others.
RUN_ULPS = {False: 32.0, True: 4.0}
ELEMENTS = 10_007  # several blocks, and an end that is no whole tile


def near_run(found: np.ndarray, expected: np.ndarray, narrowest: Any, label: str) -> None:
    """After several steps, in which rounding to the narrowest of the types has gone on."""
    __tracebackhide__ = True
    assert found.dtype == expected.dtype, label
    assert found.shape == expected.shape, label
    epsilon = max(EPSILON[found.dtype], EPSILON[np.dtype(narrowest)])
    wide = expected.astype(np.float64)
    error = np.abs(found.astype(np.float64) - wide).max(initial=0.0)
    allowed = RUN_ULPS[epsilon > 1e-4] * epsilon * np.abs(wide).max(initial=0.0)
    assert error <= allowed, f"{label}: off by {error:.3g}, allowed {allowed:.3g}"


def on_device(make: Maker, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments of a call, on the device."""
    return {
        name: make.put(value) if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in inputs.items()
    }


TENSORS = {"table": (60, 9), "vector": (1_003,), "scalar": ()}


def problem(
    shapes: Mapping[str, tuple[int, ...]], dtype: Any, steps: int = 3
) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    """Parameters by name, and dense gradients of some steps."""
    rng = np.random.default_rng(11)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return np.array(rng.standard_normal(shape)).astype(dtype)

    start = {name: numbers(shape) for name, shape in shapes.items()}
    return start, [[numbers(shape) for shape in shapes.values()] for _ in range(steps)]


def parameters(make: Maker | None, start: Mapping[str, np.ndarray]) -> list[nn.Parameter]:
    """On the device of a maker, or on the host."""
    return [nn.Parameter(make.put(w) if make else w.copy(), name=name) for name, w in start.items()]


def refusal_is_a_skip(error: RuntimeError) -> None:
    """What has no kernels may say so; it may not be wrong."""
    if "CUDA" not in str(error):
        raise error
    pytest.skip(str(error))


def row_tensor(make: Maker | None, rows: nn.RowTensor) -> nn.RowTensor:
    """A row-sparse gradient, on the device."""
    if make is None:
        return rows
    return nn.RowTensor(make.put(rows.indices), make.put(rows.values), rows.dense_shape)


def held(array: Any) -> np.ndarray:
    """What an array of the device holds; of bfloat16 Numba has no own."""
    return adopted(array).numpy()


ADAM_HP = (0.9, 0.999, 0.01, 0.9, 0.999, 1e-8)


def moments(shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    var, m, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    return [var, m, np.abs(v)]
