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
    """A table that is cut into stretches of ``height`` rows, one for each process."""

    rows: int  # of all processes
    height: int
    order: str
    comm: Communicator

    def __len__(self) -> int:
        """The number of rows of this process."""

    def places(self, ids: np.ndarray) -> np.ndarray:
        """The places of rows in the order of the stretches."""


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
    """The way of a batch of ids to the owners of their rows; made by `RowShard.route`.

    Ids and rows travel once for each process that uses them, however often they occur there.

    Attributes:
        needed: int64: the rows of this process's part that `gather` reads, for
            `FusedOptimizer.prepare`.
    """

    _occurrences: tuple[list[int], np.ndarray, np.ndarray] | None = None

    def __init__(self, shard: Shard, ids: Any) -> None:
        self._shard, self._comm = shard, shard.comm
        checked, error = attempted(_checked_ids, "RowShard.route", ids, shard.rows)
        places = shard.places(np.empty(0, np.int64) if error else checked.reshape(-1))
        self._rows = len(shard)
        self._distinct, inverse = np.unique(places, return_inverse=True)
        bounds = np.arange(self._comm.size + 1) * shard.height
        self._first = np.searchsorted(self._distinct, bounds)  # of each owner
        told = np.diff(self._first), np.full(self._comm.size, len(places))
        subject = {"rows": shard.rows, "order": shard.order}
        heard = agree(self._comm, "RowShard.route", subject, error, np.stack(told, axis=1))
        self._shape = checked.shape
        self._inverse = inverse.reshape(self._shape)
        self._sent, self._needed_counts = np.diff(self._first).tolist(), heard[:, 0].tolist()
        self._lengths = heard[:, 1]
        owner = np.repeat(np.arange(self._comm.size), self._sent)
        local: np.ndarray = (self._distinct - owner * shard.height).astype(self._index)
        # The rows of this process that others need, by rank: local numbers, ascending in each.
        needed: np.ndarray = np.empty(sum(self._needed_counts), self._index)
        exchange = self._comm.all_to_all(local, self._sent, needed, self._needed_counts)
        exchange.wait()
        self.needed = needed.astype(np.int64)

    @property
    def _index(self) -> type:
        """The type in which numbers of rows and of occurrences travel."""
        return np.int32 if max(self._shard.height, self._lengths.max()) < 2**31 else np.int64

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
        agree(self._comm, "Route.gather", _form(array), error)
        sent = _rows_at(array, self.needed)
        received = empty_like(array, (len(self._distinct), *array.shape[1:]))
        transfer = self._comm.all_to_all(sent, self._needed_counts, received, self._sent)
        return Arrival([transfer], lambda: native(_rows_at(received, self._inverse)))

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
        told = [(n, 0) for n in counts]
        heard = agree(self._comm, "Route.scatter", _form(array), error, told)
        own_counts = heard[:, 0].tolist()
        n = sum(own_counts)
        sent, values = _rows_at(array, order), empty_like(array, (n, *array.shape[1:]))
        places: np.ndarray = np.empty((n, 2), self._index)
        transfers = [
            self._comm.all_to_all(pairs, counts, places, own_counts),
            self._comm.all_to_all(sent, counts, values, own_counts),
        ]

        def unpack() -> tuple[Any, ...]:
            rank = np.repeat(np.arange(self._comm.size), own_counts)
            first_needed = np.cumsum([0, *self._needed_counts])
            first_position = np.cumsum([0, *self._lengths.tolist()])
            rows = self.needed[first_needed[rank] + places[:, 0]]
            positions = first_position[rank] + places[:, 1]
            indices = values.holding(rows) if isinstance(values, DeviceArray) else rows
            shape = self._rows, *values.shape[1:]
            return indices, values, shape, positions, int(self._lengths.sum())

        return Arrival(transfers, unpack)

    def _checked_gradient(self, where: str, gradient: Any) -> Any:
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
        pairs: np.ndarray = np.empty((len(order), 2), self._index)
        pairs[:, 0] = (inverse - self._first[owner])[order]
        pairs[:, 1] = order
        return np.bincount(owner, minlength=self._comm.size).tolist(), order, pairs


def _rows_at(array: Any, indices: np.ndarray) -> Any:
    """The rows at valid indices: ``[*indices.shape, ...]``, where the array is."""
    if isinstance(array, DeviceArray):
        return gathered("RowShard", array, array.holding(indices))[0]
    rows: np.ndarray = np.empty((*indices.shape, *array.shape[1:]), array.dtype)
    if rows.size:
        gather(array, indices.reshape(-1), rows.reshape(indices.size, -1))
    return rows


def _form(array: Any) -> dict[str, Any]:
    """The form of an array of rows, which must be the same on all processes."""
    if array is None:
        return {}
    place = "a device" if isinstance(array, DeviceArray) else "the host"
    return {"dtype": str(array.dtype), "shape of a row": list(array.shape[1:]), "place": place}


def _checked_ids(where: str, ids: Any, rows: int) -> np.ndarray:
    found = adopt_anywhere(where, "ids", ids)
    array: np.ndarray = found.numpy() if isinstance(found, DeviceArray) else found
    check.index_dtype(where, array)
    check.indices_in_range(where, array.reshape(-1), rows)
    return array
