"""Arrays under Numba's simulator, and what checks of operators and optimizers on them share.

A program of checks imports `simulator` before it imports this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from fusestep import nn
from fusestep.ops.runtime.device import DeviceArray

F32, F64, F16 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(11)
# The simulator computes some roots in double precision.
UNITS = {2: 2.0**-7, 4: 1e-5, 8: 1e-13}
BETAS = (0.9, 0.99, 0.1, 0.9, 0.99, 1e-8)  # of a call of Adam: powers, rate, betas, epsilon


def positive(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return RNG.uniform(0.1, 1.0, shape).astype(dtype)


def rows(indices: Sequence[int], shape: tuple[int, ...], dtype: Any = F32) -> nn.RowTensor:
    values = gradient((len(indices), *shape[1:]), dtype)
    return nn.RowTensor(np.array(indices, np.int64), values, shape)


def gradient(shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return RNG.uniform(-1.0, 1.0, shape).astype(dtype)


def on_device(value: Any) -> Any:
    """The same on the device: an array, a `RowTensor`, None, or a list of these."""
    if isinstance(value, list | tuple):
        return [on_device(x) for x in value]
    if isinstance(value, nn.RowTensor):
        indices, values = on_device([value.indices, value.values])
        of_batch = {"positions": value.positions, "batch_length": value.batch_length}
        return nn.RowTensor(indices, values, value.dense_shape, **of_batch)
    return None if value is None else cuda.to_device(value)


def on_host(array: Any) -> np.ndarray:
    on_device = isinstance(array, DeviceArray)
    copied: np.ndarray = array.numpy() if on_device else array.copy_to_host()
    return copied


def assert_close(found: np.ndarray, expected: np.ndarray, label: str = "") -> None:
    assert found.dtype == expected.dtype, label
    assert found.shape == expected.shape, label
    a, b = (array.astype(float) for array in (found, expected))
    unit = 0.0 if found.dtype.kind == "i" else UNITS[found.itemsize]
    np.testing.assert_allclose(a, b, unit, unit, err_msg=label)


@contextmanager
def unchanged(*arrays: Any) -> Iterator[None]:
    """Every byte of some device arrays is the same afterwards."""
    before = [on_host(array).tobytes() for array in arrays]
    yield
    assert [on_host(array).tobytes() for array in arrays] == before


@contextmanager
def refused(error: type[BaseException], text: str, *arrays: Any) -> Iterator[None]:
    """The block raises ``error``, with ``text`` in its message, and changes no array."""
    with unchanged(*arrays), pytest.raises(error, match=re.escape(text)):
        yield


class Run:
    """LazyAdam on a table and a vector, with the arrays and states of its good steps."""

    def __init__(self, **options: Any) -> None:
        self.w = on_device([positive((5, 4)), positive((7,))])
        self.opt = nn.LazyAdam(self.w, 0.1, **options)
        self.step([1, 3])
        self.before = self.opt.state_dict()

    def step(self, indices: Sequence[int] | None, *, dense: bool = True) -> None:
        sparse = None if indices is None else on_device(rows(indices, (5, 4)))
        self.opt((sparse, on_device(gradient((7,))) if dense else None))

    def assert_as_before(self) -> None:
        state = self.opt.state_dict()
        for name, array in self.before.items():
            np.testing.assert_array_equal(state[name], array, name)
