"""Sums of squares, exact to float64, in an order that the tensor decides; ratios of norms."""

import math
from typing import Any

import numpy as np
import pytest
import reference_layerwise as layerwise
from fusestep import ops
from fusestep.kernels.cpu.dense import PART
from fusestep.kernels.rule import Rule, factors
from fusestep.kernels.rules import lamb, lars
from fusestep.kernels.rules.lamb import LAMB, lamb_scalars
from fusestep.kernels.storage import STORAGES
from fusestep.ops.norm import squares
from fusestep.ops.runtime.step import DenseUpdate, Variables
from helpers import BF16, STORAGE_DTYPES, assert_same_bits, assert_within_ulps, unchanged
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
        assert_same_bits(squares(STORAGES[dtype], [arrays[k] for k in order]), alone[order])


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


def measured(rule, prologue, tensors: list[tuple[np.ndarray, ...]], gradients, rows) -> np.ndarray:
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


# The ratios of LAMB and LARS that follow from norms, and the operator that applies those of LARS.
# Steps of LAMB are those of its optimizer, in test_family_reference.py.


def ratios(rule: Rule, sums: np.ndarray) -> np.ndarray:
    """The only factor of each tensor."""
    return factors(rule, sums, [{}] * len(sums))[:, 0]


def test_lamb_ratio() -> None:
    """|w| / |u|; 1 where one of them is 0."""
    squares = np.array([[4.0, 1.0], [4.0, 16.0], [0.0, 1.0], [4.0, 0.0], [0.0, 0.0], [np.inf, 1.0]])
    np.testing.assert_array_equal(ratios(lamb.LAMB, squares), [2.0, 0.5, 1.0, 1.0, 1.0, np.inf])


def test_clipped_lamb_ratio() -> None:
    """Limited to 10; 1 where |w| or |g| is 0, also if |u| is not."""
    squares = np.array([[4.0, 1.0, 1.0], [400.0, 1.0, 1.0], [0.0, 1.0, 1.0], [4.0, 1.0, 0.0],
                        [4.0, 0.0, 1.0]])  # fmt: skip
    found = ratios(lamb.LAMB_CLIPPED, squares)
    np.testing.assert_array_equal(found, [2.0, 10.0, 1.0, 1.0, 10.0])


# LARS


def test_lars_ratio() -> None:
    """coefficient*|w| / (|g| + decay*|w| + epsilon), in float64 but finite; 0 / 0 counts as 1."""
    norm_w, norm_g, decay = np.array(
        [[2.0, 0.0, 2.0, 0.0], [3.0, 3.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0]]
    )
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 0.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 4.0, 0.0, 0.2, 1.0])
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 1.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 5.0, 0.0, 0.1, 0.0])
    huge = lars.lars_ratio(np.array([1e30]), np.array([1e-30]), np.zeros(1), 0.1, 0.0)
    assert huge == np.finfo(np.float32).max


def test_clipped_lars_ratio() -> None:
    """max(min(ratio / lr, 1), 0), also for a rate of 0."""
    found = lars.clipped_ratio(np.array([0.2, 0.2, 0.2, 0.0]), np.array([0.4, 0.1, 0.0, 0.0]))
    np.testing.assert_array_equal(found, [0.5, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("use_clip", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 5), (2, 3, 4, 5)])
def test_lars_update(dtype: np.dtype, use_clip: bool, shape: tuple[int, ...]) -> None:
    """Against the reference, for which the norms are those of the arrays."""
    rng = np.random.default_rng(9)
    w, g = (np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    op = ops.LARSUpdate(epsilon=1e-3, hyperpara=0.02, use_clip=use_clip)
    given = {"coefficient": 0.02, "epsilon": 1e-3, "decay": 0.1}
    with unchanged(w, g):
        for lr in (1e-3, 0.5):  # either side of the clip
            found = op(w, g, exact(w), exact(g), 0.1, lr)
            known = {**given, "lr": lr if use_clip else None}
            assert found.dtype == dtype and found.shape == shape
            expected = layerwise.lars_gradient(w, g, **known)
            scale = layerwise.lars_gradient(np.abs(wide(w)), np.abs(wide(g)), **known)
            assert_within_ulps(found, expected, scale, 8.0 if dtype == np.float64 else 4.0)
