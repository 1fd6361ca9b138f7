"""Tables whose rows several processes own: which rows each has."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ..base.arguments import count
from .agreement import agree, attempted
from .communicator import Communicator
from .route import Route

ORDERS = ("range", "hash")
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, lie evenly in [0, 1)
_MOST_HASHED = 3_037_000_499  # rows: the square of more is no int64


class RowShard:
    """The part of a table of ``rows`` rows that this process owns.

    The rows, in an order, are cut into P spans of ``ceil(rows / P)``, the last ones shorter
    or empty: of P processes rank r has those at ``[begin, end)``.

    Args:
        rows: how many rows the table has, of all processes.
        comm: the processes; all of them call this.
        order: ``"range"``: by number. ``"hash"``: row i is at ``i * a mod rows`` for a number
            a near ``0.618 rows``, so that neighbours, such as the most frequent rows of a table
            sorted by frequency, are spread evenly over the processes.

    Attributes:
        begin, end: the places of the rows of this process, in that order.

    Raises:
        TypeError: a kind does not fit.
        ValueError: a value is out of range, or differs between processes; the error names the
            rank.

    >>> import numpy as np
    >>> from fusestep import nn
    >>> from fusestep.nn.distributed import RowShard, alone
    >>> whole = np.ones((10, 2), np.float32)
    >>> shard = RowShard(len(whole), alone())
    >>> table = whole[shard.begin : shard.end].copy()
    >>> route = shard.route(np.array([3, 5, 3]))
    >>> route.gather(table).shape
    (3, 2)
    >>> gradient = route.scatter(np.ones((3, 2), np.float32))
    >>> nn.LazyAdam([table], learning_rate=1e-2)((gradient,))
    (True,)
    """

    def __init__(self, rows: int, comm: Communicator, *, order: str = "range") -> None:
        _, error = attempted(_check, "RowShard", rows, order)
        agree(comm, "RowShard", {"rows": str(rows), "order": str(order)}, error)
        self.rows, self.comm, self.order = int(rows), comm, order
        self.height = span_height(self.rows, comm.size)
        self.signature = {"rows": self.rows, "order": order}
        self.first_keys = np.arange(1, comm.size) * self.height
        self.begin, self.end = (
            min(rank * self.height, self.rows) for rank in (comm.rank, comm.rank + 1)
        )

    name, has_nobodys_row = "RowShard", False

    def __len__(self) -> int:
        """The number of rows of this process."""
        return self.end - self.begin

    def __repr__(self) -> str:
        span = f"{self.begin}:{self.end}, rank {self.comm.rank} of {self.comm.size}"
        return f"RowShard({self.rows} rows, {span}, order={self.order!r})"

    @property
    def indices(self) -> np.ndarray:
        """The numbers of the rows of this process, int64: ``whole[shard.indices]`` is its part."""
        places = np.arange(self.begin, self.end)
        if self.order == "range":
            return places
        # The factor has no divisor in common with the number of rows: its inverse modulo that leads
        # from places back to numbers.
        rows = max(1, self.rows)  # there is nothing to divide then
        return places * pow(_factor(self.rows), -1, rows) % rows

    def places(self, ids: np.ndarray) -> np.ndarray:
        """The places of rows in the order of the shards, by their numbers: int64."""
        return places(ids, self.rows, self.order)

    def route(self, ids: Any) -> Route:
        """The way to the rows ``ids`` and back; all processes call this.

        Args:
            ids: int32 or int64 of any shape, each in ``[0, rows)``: this process's part of the
                batch. The whole batch is that of rank 0, then that of rank 1, and so on.

        Raises:
            TypeError: on a rank, ``ids`` are no int32 or int64.
            IndexError: on a rank, an id is out of range.
        """
        return Route(self, ids)

    # For `Route`

    def checked_ids(self, where: str, ids: Any) -> np.ndarray:
        """A copy of the ids on the host, which nobody changes after the check."""
        adopted = adopt_anywhere(where, "ids", ids)
        array: np.ndarray = adopted.numpy() if isinstance(adopted, DeviceArray) else adopted.copy()
        check.index_dtype(where, array)
        check.indices_in_range(where, array.reshape(-1), self.rows)
        return array

    keys = places

    def request(self, keys: np.ndarray, owner: np.ndarray, inverse: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """The numbers of rows among those of their owner."""
        index = np.int32 if self.height < 2**31 else np.int64
        found: np.ndarray = (keys - owner * self.height).astype(index)
        return found

    def rows_of(self, requests: np.ndarray) -> np.ndarray:
        """The rows of this process that others ask for: int64."""
        return requests.astype(np.int64)

    def check_rows(self) -> None:
        """Do nothing: a row is never another one's."""


def span_height(rows: int, size: int) -> int:
    """The number of rows of each of ``size`` processes; the last ones may have fewer."""
    return max(1, -(-rows // size))


def places(ids: np.ndarray, rows: int, order: str) -> np.ndarray:
    """The places of ids in a table of ``rows`` rows, as `RowShard.places` has them."""
    ids = ids.astype(np.int64, copy=False)
    return ids if order == "range" else ids * _factor(rows) % rows


def _check(where: str, rows: Any, order: Any) -> None:
    count(where, "rows", rows)
    if order not in ORDERS:
        reject(ValueError, where, "order", "is unknown", ORDERS, order)
    if order == "hash" and rows > _MOST_HASHED:
        expected = f"at most {_MOST_HASHED}, with order='hash'"
        reject(ValueError, where, "rows", "is out of range", expected, rows)


@cache
def _factor(rows: int) -> int:
    """A number near ``0.618 rows`` that has no divisor in common with ``rows``."""
    factor = max(1, round(_GOLDEN * rows))
    while math.gcd(factor, rows) > 1:
        factor += 1
    return factor
