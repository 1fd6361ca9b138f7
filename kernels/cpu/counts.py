"""Counts of updates, compiled: for one parameter NumPy takes longer than an SGD step."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..cache import KernelCache


@njit
def are_equal(counts):
    """Whether all of at least one int64 count are equal."""
    n_others = 0
    for i in range(counts.size):
        n_others += counts[i] != counts[0]
    return n_others == 0


@njit
def count_up(counts):
    """Add 1 to every count."""
    for i in range(counts.size):
        counts[i] += 1


are_equal._cache = KernelCache("counts are equal")
count_up._cache = KernelCache("count up")


def compile_counts() -> None:
    """Compile all of this module, or read it from the cache."""
    zero = np.zeros(1, np.int64)
    are_equal(zero)
    count_up(zero)
