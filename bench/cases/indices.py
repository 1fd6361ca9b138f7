"""Which rows a batch names: the distributions of the row cases."""

from __future__ import annotations

import re

import numpy as np

from ..errors import BenchError

PUBLISHED = ("uniform", "zipf1.05", "zipf1.2", "zipf1.5", "equal")
DEFAULT = "zipf1.2"
_ZIPF = re.compile(r"zipf(\d+(?:\.\d+)?)")


def check_distribution(name: str) -> str:
    """The name of a distribution: ``uniform``, ``equal`` or ``zipf`` with an exponent above 1.

    Raises:
        BenchError: it is none.
    """
    found = _ZIPF.fullmatch(name)
    if name not in ("uniform", "equal") and not (found and float(found[1]) > 1.0):
        known = "uniform, equal or zipf with an exponent above 1, such as zipf1.2"
        raise BenchError(f"expected {known}, got {name!r}")
    return name


def draw(name: str, N: int, B: int, seed: int = 0) -> np.ndarray:
    """``[B]`` int64 row numbers below ``N``.

    Zipf: row number ``k`` of a random order of the rows with a probability proportional to
    ``1 / k**exponent``, so the frequent rows are scattered over the table. The law is cut off at
    ``N``; `numpy.random.Generator.zipf` is not, and near 1 almost all that it draws lies beyond.
    """
    rng = np.random.default_rng(seed)
    if name == "uniform":
        return rng.integers(0, N, B)
    if name == "equal":
        return np.full(B, N // 2, np.int64)
    weights = np.cumsum(np.arange(1, N + 1, dtype=np.float64) ** -float(name.removeprefix("zipf")))
    ranks = np.searchsorted(weights, rng.random(B) * weights[-1], side="right")
    rows: np.ndarray = rng.permutation(N)[np.minimum(ranks, N - 1)]
    return rows
