"""Sums of squares: exact to float64, in an order that nothing but the tensor decides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fusestep.kernels.cpu.dense import PART
from fusestep.kernels.rules.lamb import LAMB, lamb_scalars
from fusestep.kernels.storage import STORAGES
from fusestep.ops.norm import squares
from fusestep.ops.runtime.step import DenseUpdate, Variables

from helpers import BF16, STORAGE_DTYPES, assert_same_bits, unchanged
from reference import wide

# Nothing, a scalar tail, one part, one element more, several parts; a 0-d array.
SHAPES = [(0,), (1,), (7,), (PART,), (PART + 1,), (300_001,), (), (3, 0), (70, 31, 40)]
EACH_DTYPE = pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)


def array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Values over ten binary orders of magnitude, so that the order of a sum shows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-5, 5, shape))
    return np.asarray(values).astype(dtype)


def exact(values: np.ndarray) -> float:
    """The correctly rounded sum of the squares, which are float64."""
    return math.fsum(np.square(wide(values)).ravel())


@EACH_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_of_squares(shape: tuple[int, ...], dtype: np.dtype) -> None:
    x = array(shape, dtype)
    with unchanged(x):
        (found,) = squares(STORAGES[dtype], [x])
    assert found == pytest.approx(exact(x), rel=1e-12)
    assert found.dtype == np.float64


@EACH_DTYPE
def test_a_tensor_alone_and_among_others(dtype: np.dtype) -> None:
    """To the last bit, at any place in the list; neither size nor neighbours matter."""
    arrays = [array(shape, dtype, seed=k) for k, shape in enumerate(SHAPES)]
    alone = np.array([squares(STORAGES[dtype], [x])[0] for x in arrays])
    for order in (list(range(len(arrays))), [5, 0, 8, 6, 1, 7, 2, 4, 3], [5, 5, 4, 0, 4]):
        found = squares(STORAGES[dtype], [arrays[k] for k in order])
        assert_same_bits(found, alone[order])


@EACH_DTYPE
@pytest.mark.parametrize("offset", [1, 3, 5])
def test_alignment_does_not_matter(dtype: np.dtype, offset: int) -> None:
    for n in (7, 1_003, PART + 5):
        room = np.zeros(n + 8, dtype)
        room[offset : offset + n] = array((n,), dtype)
        storage = STORAGES[dtype]
        found = squares(storage, [room[offset : offset + n]])
        assert_same_bits(found, squares(storage, [array((n,), dtype)]))


@EACH_DTYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(dtype: np.dtype, bad: float) -> None:
    """In a vector body, in a scalar tail and in a later part."""
    for n, place in ((37, 3), (37, 36), (PART + 9, PART + 8), (1, 0)):
        x = array((n,), dtype)
        x[place] = bad
        (found,) = squares(STORAGES[dtype], [x])
        assert np.isnan(found) if np.isnan(bad) else found == np.inf


def measured(
    rule: Any, prologue: Any, tensors: list[tuple[np.ndarray, ...]], gradients: Any, rows: Any
) -> np.ndarray:
    """`DenseUpdate.sums` of fresh tensors, each with a row of scalars of its own."""
    hp = np.array(rows, np.float64 if tensors[0][0].dtype == np.float64 else np.float32)
    with unchanged(tensors, gradients):
        places = np.array([g.ctypes.data for g in gradients])
        given = places, STORAGES[gradients[0].dtype], hp, np.arange(len(tensors))
        return DenseUpdate(rule, prologue, Variables.of(tensors), *given).sums()


def test_storage_types_that_all_differ() -> None:
    """Several parts of a tensor whose parameter, gradient and states lie in different strides."""
    n = 2 * PART + 3
    types = (np.float32, BF16, np.float16, np.float64)
    w, g, m, v = (array((n,), t, seed=k) for k, t in enumerate(types))
    v = v * v
    hp = lamb_scalars(np.float32, 0.1, 0.25, 1, (0.5, 0.5, 1e-3), ())
    mean, square = wide(m) + wide(g), v + wide(g) ** 2  # with betas of 1/2 at the first update
    direction = mean / (np.sqrt(square) + 1e-3) + 0.25 * wide(w)
    found = measured(LAMB, (), [(w, m, v)], [g], [hp])
    np.testing.assert_allclose(found[0], [exact(w), exact(direction)], rtol=1e-6)
