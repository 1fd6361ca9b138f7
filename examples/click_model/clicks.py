"""A click log that is made while it is read: ids by Zipf's law, and a hidden model that clicks.

The hidden model is a factorization machine (Rendle, 2010): every id has an effect of its own and a
vector, whose products with the vectors of the other ids count too. So does a vector that follows
from the dense features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...kernels.keeping import mixed

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]

N_DENSE, N_TABLES = 13, 26  # as in Criteo's logs, which the field measures with
SMALLEST = 10  # rows of the smallest table
EXPONENT = 1.05  # of Zipf's law
CLICK_RATE = 0.25
RANK = 4  # length of a vector of the hidden model
# Standard deviations of what dense features, effects of ids and products add to the log-odds.
OF_DENSE, OF_IDS, OF_PRODUCTS = 0.6, 1.2, 0.8
SAMPLE = 8192  # clicks from which the rate is set
_WHOLE = 1_000  # rows up to which a table is not made smaller


class Clicks(NamedTuple):
    """A batch of B impressions.

    Attributes:
        dense: float32 ``[B, N_DENSE]``.
        ids: int64 ``[N_TABLES, B]``, the row of each table.
        labels: float32 ``[B]``, 1 for a click.
        log_odds: float32 ``[B]``, what the hidden model knew: nobody can predict better.
    """

    dense: FloatArray
    ids: IntArray
    labels: FloatArray
    log_odds: FloatArray


def table_sizes(largest: int) -> list[int]:
    """Rows of the tables: as many small ones as large ones, by their logarithms."""
    sizes = np.geomspace(min(SMALLEST, largest), largest, N_TABLES)
    return [int(size) for size in np.rint(sizes)]


def quarter(rows: int) -> int:
    """The rows of a table that is to be smaller."""
    return max(rows // 4, min(rows, _WHOLE))


def hashed(ids: IntArray, table: int) -> IntArray:
    """Ids of 64 bits of the ids of a table, as a hash of a string would give them."""
    found: IntArray = mixed(ids.astype(np.uint64) + np.uint64(table << 40)).view(np.int64)
    return found


class ClickLog:
    """Batches by their numbers; the same seed and number give the same clicks.

    Args:
        sizes: rows of each table.
        seed: of the hidden model and of the batches.
        late_from: the number of the first batch in which all ids occur; before, every second one.

    Attributes:
        sizes: as given.
    """

    def __init__(self, sizes: Sequence[int], seed: int, late_from: int = 0) -> None:
        self.sizes, self._seed, self._late_from = list(sizes), seed, late_from
        self._sizes = np.array(sizes, np.int64)[:, None]
        self._first = np.cumsum(self._sizes, axis=0) - self._sizes
        # Frequent ids lie anywhere in a table: multiples of a number without a common factor.
        self._stride = np.array([_spread(size) for size in sizes], np.int64)[:, None]
        rng = np.random.default_rng([seed, 0])
        n_products = (N_TABLES + 1) * N_TABLES / 2
        spread = (OF_PRODUCTS**2 / (n_products * RANK)) ** 0.25
        self._hidden = rng.standard_normal((int(self._sizes.sum()), 1 + RANK), np.float32)
        self._hidden *= np.array([OF_IDS / math.sqrt(N_TABLES)] + [spread] * RANK, np.float32)
        self._of_dense = rng.standard_normal((N_DENSE, 1 + RANK), np.float32)
        self._of_dense *= np.array([OF_DENSE] + [spread] * RANK, np.float32)
        self._of_dense /= np.float32(math.sqrt(N_DENSE))
        self._bias = np.float32(0)
        self._bias = _bias(self._draw(SAMPLE, 1, 0).log_odds)

    def batch(self, number: int, size: int) -> Clicks:
        """Clicks to learn from."""
        return self._draw(size, 2, number, is_early=number < self._late_from)

    def held_out(self, size: int) -> Clicks:
        """Clicks to measure on."""
        return self._draw(size, 3, 0)

    def _draw(self, size: int, purpose: int, number: int, *, is_early: bool = False) -> Clicks:
        rng = np.random.default_rng([self._seed, purpose, number])
        dense = rng.standard_normal((size, N_DENSE), np.float32)
        ids = self._ids(rng.random((N_TABLES, size)))
        if is_early:
            ids -= ids % 2
        log_odds = self._log_odds(dense, ids)
        labels = (rng.logistic(size=size) < log_odds).astype(np.float32)
        return Clicks(dense, ids, labels, log_odds)

    def _ids(self, uniform: np.ndarray[Any, np.dtype[np.float64]]) -> IntArray:
        """The density ``rank**-EXPONENT`` from 1 to the size, rounded down, from its inverse."""
        power = 1 - EXPONENT
        last = (self._sizes + 1.0) ** power
        ranks = (1 - uniform * (1 - last)) ** (1 / power)
        rows = np.minimum(ranks.astype(np.int64), self._sizes) - 1
        ids: IntArray = rows * self._stride % self._sizes
        return ids

    def _log_odds(self, dense: FloatArray, ids: IntArray) -> FloatArray:
        known = self._hidden[self._first + ids]
        of_dense = dense @ self._of_dense
        total = known.sum(axis=0) + of_dense
        squares = np.square(known).sum(axis=0) + np.square(of_dense)
        # The sum of all products of two different vectors.
        products = (np.square(total[:, 1:]) - squares[:, 1:]).sum(axis=1) / 2
        log_odds: FloatArray = self._bias + total[:, 0] + products
        return log_odds


def _bias(log_odds: FloatArray) -> np.float32:
    """What has to be added so that `CLICK_RATE` of these impressions are clicked."""
    wanted, bias = math.log(CLICK_RATE / (1 - CLICK_RATE)), 0.0
    for _ in range(30):  # each brings it nearer
        rate = float(np.mean(1 / (1 + np.exp(-bias - log_odds.astype(np.float64)))))
        bias += wanted - math.log(rate / (1 - rate))
    return np.float32(bias)


def _spread(size: int) -> int:
    """About the golden section of a size, without a common factor."""
    stride = max(1, round(0.618 * size))
    while math.gcd(stride, size) != 1:
        stride += 1
    return stride
