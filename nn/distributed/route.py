"""Rows and their gradients, on their way between those who use them and those who own them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ...kernels.cpu.gather import gather
from ...kernels.storage import STORAGES
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere, empty_like, native
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.device_gradient import gathered
from ...ops.runtime.errors import reject
from ...ops.runtime.row_tensor import RowTensor
from .agreement import agree, attempted
from .communicator import Communicator, Transfer

T = TypeVar("T")


class Shard(Protocol):
    """The part of a table that this process owns, by keys that follow from ids.

    Attributes:
        name: in errors.
        comm: the processes.
        signature: what all of them have alike.
        first_keys: the first key of each process but the first; keys ascend by owner.
        has_nobodys_row: whether row 0 of each part is nobody's, and has no gradient.
    """

    name: str
    comm: Communicator
    signature: dict[str, Any]
    first_keys: np.ndarray
    has_nobodys_row: bool

    def __len__(self) -> int:
        """The number of rows of this process."""

    def checked_ids(self, where: str, ids: Any) -> np.ndarray:
        """Ids of any shape as an array, if they are such."""

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """The keys of ids."""

    def request(self, keys: np.ndarray, owner: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """Tell the owners which rows are needed; ``inverse`` has the key of each id."""

    def rows_of(self, requests: np.ndarray) -> np.ndarray:
        """The rows of this process that others ask for: int64."""

    def check_rows(self) -> None:
        """Refuse a gradient if the rows are not those of before."""


class Arrival(Generic[T]):
    """A result on its way, begun on all processes; other results may be begun meanwhile."""

    def __init__(self, transfers: Sequence[Transfer], unpack: Callable[[], T]) -> None:
        self._transfers, self._unpack = transfers, unpack

    def wait(self) -> T:
        """The value that was on its way, when it has arrived.

        Raises:
            LostProcessError: a process has ended.
        """
        for transfer in self._transfers:
            transfer.wait()
        return self._unpack()


class Route:
    """The way of a batch of ids to the owners of their rows; made by `route` of a shard.

    Ids and rows travel once for each process that uses them, however often they occur there.

    Attributes:
        needed: int64: the rows of this process's part that `gather` reads, for
            `FusedOptimizer.prepare`.
    """

    _occurrences: tuple[list[int], np.ndarray, np.ndarray] | None = None

    def __init__(self, shard: Shard, ids: Any) -> None:
        self._shard, self._comm, where = shard, shard.comm, f"{shard.name}.route"
        checked, error = attempted(shard.checked_ids, where, ids)
        keys = shard.keys(np.empty(0, np.int64) if error else checked.reshape(-1))
        self._rows = len(shard)
        self._distinct, inverse = np.unique(keys, return_inverse=True)
        inner = np.searchsorted(self._distinct, shard.first_keys)
        self._first = np.array([0, *inner, len(self._distinct)])  # of each owner
        numbers = np.diff(self._first), np.full(self._comm.size, len(keys))
        received = agree(self._comm, where, shard.signature, error, np.stack(numbers, axis=1))
        self._shape = checked.shape
        self._inverse = inverse.reshape(self._shape)
        self._sent, self._needed_counts = np.diff(self._first).tolist(), received[:, 0].tolist()
        self._lengths = received[:, 1]
        owner = np.repeat(np.arange(self._comm.size), self._sent)
        sent = shard.request(self._distinct, owner, inverse)
        requests: np.ndarray = np.empty((sum(self._needed_counts), *sent.shape[1:]), sent.dtype)
        self._comm.all_to_all(sent, self._sent, requests, self._needed_counts).wait()
        # The rows of this process that others need, by rank.
        self.needed, error = attempted(shard.rows_of, requests)
        if shard.has_nobodys_row:  # maps may refuse ids
            agree(self._comm, where, {}, error)

    def gather(self, table: Any) -> Any:
        """The rows of the ids: ``[*ids.shape, ...]``; all processes call this.

        Args:
            table: the part of this process, ``[shard.end - shard.begin, ...]``, contiguous; on
                the host, or on a device if the processes move device arrays (nccl).

        Raises:
            TypeError, ValueError: on a rank, the table does not fit; or dtype or width differ.
            LostProcessError: a process has ended.
        """
        return self.start_gather(table).wait()

    def start_gather(self, table: Any) -> Arrival[Any]:
        """Send the rows: `gather` in two parts. The table may change meanwhile."""
        array, error = attempted(self._checked_table, "Route.gather", table)
        agree(self._comm, "Route.gather", _signature(array), error)
        sent = rows_at(array, self.needed)
        received = empty_like(array, (len(self._distinct), *array.shape[1:]))
        transfer = self._comm.all_to_all(sent, self._needed_counts, received, self._sent)
        return Arrival([transfer], lambda: native(rows_at(received, self._inverse)))

    def _checked_table(self, where: str, table: Any) -> Any:
        array = self._checked(where, "table", table)
        if array.ndim == 0 or len(array) != self._rows:
            expected = f"{self._rows} rows, those of this process"
            reject(ValueError, where, "table", "has a wrong shape", expected, array.shape)
        if not array.flags.c_contiguous:
            expected = "a C-contiguous array"
            reject(ValueError, where, "table", "is not contiguous", expected, array.strides)
        return array

    def _checked(self, where: str, name: str, value: Any) -> Any:
        array = value if type(value) is np.ndarray else adopt_anywhere(where, name, value)
        if isinstance(array, DeviceArray) and not self._comm.moves_device_arrays:
            expected = "an array on the host, which these processes can send"
            reject(ValueError, where, name, "is on a device", expected, "CUDA")
        if array.dtype not in STORAGES:
            reject(TypeError, where, name, "has a wrong dtype", "a floating dtype", array.dtype)
        return array

    def scatter(self, gradient: Any) -> RowTensor:
        """The gradient of this process's part of the table; all processes call this.

        Its occurrences are in the order of the whole batch, and it knows their places there: a
        step with it has the bits of one process that has the whole table and the whole batch.

        Args:
            gradient: ``[*ids.shape, ...]``, floating: of the rows, in the order of the ids;
                where the table is.

        Raises:
            TypeError, ValueError: on a rank, the gradient does not fit; or dtype or width differ.
            LostProcessError: a process has ended.
        """
        return self.start_scatter(gradient).wait()

    def start_scatter(self, gradient: Any) -> Arrival[RowTensor]:
        """Send the gradients: `scatter` in two parts. The gradient may change meanwhile."""
        sent = self.send_back(gradient)

        def rows() -> RowTensor:
            *arrays, positions, length = sent.wait()
            return RowTensor(*arrays, positions=positions, batch_length=length)

        return Arrival((), rows)

    def send_back(self, gradient: Any) -> Arrival[tuple[Any, ...]]:
        """Begin to send the gradients of rows to their owners, as `start_scatter`.

        The checked arguments of the `RowTensor` arrive, not the tensor.
        """
        array, error = attempted(self._checked_gradient, "Route.scatter", gradient)
        self._occurrences = self._occurrences or self._found_occurrences()
        counts, order, pairs = self._occurrences
        numbers = [(n, 0) for n in counts]
        received = agree(self._comm, "Route.scatter", _signature(array), error, numbers)
        own_counts = received[:, 0].tolist()
        n = sum(own_counts)
        sent, values = rows_at(array, order), empty_like(array, (n, *array.shape[1:]))
        places: np.ndarray = np.empty((n, 2), pairs.dtype)
        transfers = [
            self._comm.all_to_all(pairs, counts, places, own_counts),
            self._comm.all_to_all(sent, counts, values, own_counts),
        ]

        def unpack() -> tuple[Any, ...]:
            rank = np.repeat(np.arange(self._comm.size), own_counts)
            first_needed = np.cumsum([0, *self._needed_counts])
            first_position = np.cumsum([0, *self._lengths.tolist()])
            rows = self.needed[first_needed[rank] + places[:, 0]]
            positions, arrived = first_position[rank] + places[:, 1], values
            if self._shard.has_nobodys_row:
                has_row = rows > 0
                rows, positions, arrived = rows[has_row], positions[has_row], values[has_row]
            indices = arrived.holding(rows) if isinstance(arrived, DeviceArray) else rows
            shape = self._rows, *arrived.shape[1:]
            return indices, arrived, shape, positions, int(self._lengths.sum())

        return Arrival(transfers, unpack)

    def _checked_gradient(self, where: str, gradient: Any) -> Any:
        self._shard.check_rows()
        array, shape = self._checked(where, "gradient", gradient), self._shape
        if array.shape[: len(shape)] != shape:
            expected = f"{shape}, then that of a row"
            reject(ValueError, where, "gradient", "has a wrong shape", expected, array.shape)
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = check.contiguous(array, where, "gradient")
        return array.reshape(
            (math.prod(shape), *array.shape[len(shape) :])
        )  # also without elements

    def _found_occurrences(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The number of occurrences for each owner, their order by owner, and a pair for each.

        A pair, in this order, is the place among the different rows of the owner and the one in
        this process's part of the batch.
        """
        inverse = self._inverse.reshape(-1)
        owner = np.searchsorted(self._first[1:], inverse, side="right")
        # Stable: the owner adds up the gradients of a row in the order of the batch.
        order = np.argsort(owner, kind="stable")
        # Of one type on all processes.
        index = np.int32 if self._lengths.max() < 2**31 else np.int64
        pairs: np.ndarray = np.empty((len(order), 2), index)
        pairs[:, 0] = (inverse - self._first[owner])[order]
        pairs[:, 1] = order
        return np.bincount(owner, minlength=self._comm.size).tolist(), order, pairs


def rows_at(array: Any, indices: np.ndarray) -> Any:
    """The rows at valid indices: ``[*indices.shape, ...]``, where the array is."""
    if isinstance(array, DeviceArray):
        return gathered("RowShard", array, array.holding(indices))[0]
    rows: np.ndarray = np.empty((*indices.shape, *array.shape[1:]), array.dtype)
    if rows.size:
        gather(array, indices.reshape(-1), rows.reshape(indices.size, -1))
    return rows


def _signature(array: Any) -> dict[str, Any]:
    """The signature of an array of rows, which must be the same on all processes."""
    if array is None:
        return {}
    place = "a device" if isinstance(array, DeviceArray) else "the host"
    return {"dtype": str(array.dtype), "shape of a row": list(array.shape[1:]), "place": place}
