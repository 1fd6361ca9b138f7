"""The ratios of LAMB and LARS that follow from norms, and the operator that applies LARS's.

What LAMB measures is in test_measure.py; its steps are those of its optimizer, in
test_family_reference.py and test_family_layerwise.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fusestep import ops
from fusestep.kernels.rule import Rule, factors
from fusestep.kernels.rules import lamb, lars

import reference_layerwise as layerwise
from helpers import STORAGE_DTYPES, assert_within_ulps, unchanged
from reference import wide

F64 = np.dtype(np.float64)


def ratios(rule: Rule, sums: np.ndarray) -> np.ndarray:
    """The only factor of each tensor."""
    return factors(rule, sums, [{}] * len(sums))[:, 0]


def norm(x: Any) -> float:
    return math.sqrt(math.fsum(np.square(wide(x)).ravel()))


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
    """coefficient*|w| / (|g| + decay*|w| + epsilon), in float64; 0 / 0 counts as 1."""
    norm_w, norm_g, decay = np.array(
        [[2.0, 0.0, 2.0, 0.0], [3.0, 3.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0]]
    )
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 0.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 4.0, 0.0, 0.2, 1.0])
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 1.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 5.0, 0.0, 0.1, 0.0])


def test_clipped_lars_ratio() -> None:
    """max(min(ratio / lr, 1), 0), also for a rate of 0."""
    ratio = np.array([0.2, 0.2, 0.2, 0.0])
    found = lars.clipped_ratio(ratio, np.array([0.4, 0.1, 0.0, 0.0]))
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
            found = op(w, g, norm(w) ** 2, norm(g) ** 2, 0.1, lr)
            known = {**given, "lr": lr if use_clip else None}
            assert found.dtype == dtype and found.shape == shape
            expected = layerwise.lars_gradient(w, g, **known)
            scale = layerwise.lars_gradient(np.abs(wide(w)), np.abs(wide(g)), **known)
            assert_within_ulps(found, expected, scale, 8.0 if dtype == F64 else 4.0)
