"""Sums of gradients over processes, in an order that is written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt, real_type
from ...ops.runtime.bags.tensor import BagTensor, joined
from ...ops.runtime.errors import reject
from ...ops.runtime.row_forms import as_rows
from ...ops.runtime.row_tensor import RowTensor
from .agreement import agree, attempted
from .communicator import Communicator

_WHERE = "all_reduce"


def all_reduce(
    gradients: Sequence[Any], comm: Communicator, *, average: bool = False
) -> tuple[Any, ...]:
    """The sums of each gradient over all processes, as new arrays; all processes call this.

    Dense ones are added element by element in the order of the ranks, in float32 (float64 for
    float64), and rounded once: the bits are the same on all processes, whatever the engine, and
    depend on the number of processes. Row-sparse ones are put one behind the other in the order
    of the ranks, and never become dense: a step with them is one with the whole batch. Positions,
    if all have them, become those in the batches of all, one behind the other.

    Args:
        gradients: arrays on the host, `RowTensor`, lists of them, or None.
        comm: the processes. A gradient is None on all of them or on none.
        average: divide by their number.

    Returns:
        A tuple: arrays, `RowTensor` or None, of the dtypes of the gradients.

    Raises:
        TypeError, ValueError: on a rank, a gradient is none, or they differ between processes in
            kind, dtype or shape.
        LostProcessError: a process has ended.

    >>> import numpy as np
    >>> from fusestep.nn.distributed import all_reduce, alone
    >>> all_reduce((np.ones(2, np.float32), None), alone())
    (array([1., 1.], dtype=float32), None)
    """
    read, error = attempted(_read, _WHERE, gradients, average)
    agree(comm, _WHERE, {"average": bool(average), "gradients": _signatures(read or [])}, error)
    sums: list[Any] = [None] * len(read)
    by_dtype: dict[np.dtype[Any], list[int]] = {}
    for i, gradient in enumerate(read):
        if isinstance(gradient, RowTensor):
            sums[i] = _rows_of_all(gradient, comm, average=average)
        elif gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(i)
    for places in by_dtype.values():
        arrays = [read[i] for i in places]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        total = _summed(flat, comm, average=average)
        cuts = np.cumsum([array.size for array in arrays])[:-1]
        for i, part in zip(places, np.split(total, cuts), strict=True):
            sums[i] = part.reshape(read[i].shape)
    return tuple(sums)


def average_bags(
    where: str, gradients: Sequence[BagTensor], comm: Communicator, error: Exception | None = None
) -> list[BagTensor]:
    """The means over all processes of the gradients of pooled tables; all processes call this.

    Those of outputs are divided, and put one behind the other in the order of the ranks: a step
    with them is one with the whole batch. They never become rows of ids.

    Args:
        where: how errors name the caller.
        gradients: of each table one, on the host.
        comm: the processes.
        error: what this process has found wrong.

    Raises:
        TypeError, ValueError, RuntimeError: a process has found an error, or tables differ.
        LostProcessError: a process has ended.
    """
    signatures = [[*g.dense_shape, g.unit, str(g.dtype)] for g in gradients]
    agree(comm, where, {"tables": signatures}, error)
    bags = joined([[gradient] for gradient in gradients])
    n, is_weighted = [len(g.indices) for g in bags], any(g.weights is not None for g in bags)
    gathered = np.empty((comm.size, len(bags) + 2), np.int64)
    comm.all_gather(np.array([bags[0].values.size, is_weighted, *n]), gathered).wait()
    ids = gathered[:, 2:].sum(1).tolist()

    def of_all(arrays: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
        return np.split(_of_all(np.concatenate(arrays), counts, comm), np.cumsum(counts)[:-1])

    values = of_all([bags[0].values], gathered[:, 0].tolist())
    indices = of_all([g.indices for g in bags], ids)
    rows = of_all([g.rows for g in bags], ids)
    weights = of_all([g.factors for g in bags], ids) if gathered[:, 1].any() else None
    calls = []
    for r, counts in enumerate(gathered[:, 2:]):
        cuts = np.cumsum(counts)[:-1]
        factors = [None] * len(bags) if weights is None else np.split(weights[r], cuts)
        of_tables = bags, np.split(indices[r], cuts), np.split(rows[r], cuts), factors
        calls.append([
            g.with_arrays(i, values[r], places, w)
            for g, i, places, w in zip(*of_tables, strict=True)
        ])  # fmt: skip
    return joined([*zip(*calls, strict=True)], comm.size)


def _read(where: str, gradients: Any, average: Any) -> list[Any]:
    check.flag(where, "average", average)
    if not isinstance(gradients, list | tuple):
        got = type(gradients).__name__
        reject(TypeError, where, "gradients", "have a wrong type", "a tuple or list", got)
    read = []
    for i, gradient in enumerate(gradients):
        name = f"gradient {i}"
        checked: Any = None if gradient is None else as_rows(where, name, gradient)
        if isinstance(checked, RowTensor):
            adopt(where, name, checked.values)  # refuses those on a device
        elif gradient is not None:
            checked = adopt(where, name, gradient)
        if gradient is not None:
            check.float_dtype(where, name, checked, "a floating dtype")
        if isinstance(checked, RowTensor):
            checked.check_positions(f"{where}: {name}")
        read.append(checked)
    return read


def _signatures(read: Sequence[Any]) -> list[Any]:
    """The signatures of gradients, which must be the same on all processes."""
    signatures: list[Any] = []
    for g in read:
        is_row_sparse = isinstance(g, RowTensor)
        kind = [str(g.indices.dtype), g.positions is not None] if is_row_sparse else []
        signatures.append(None if g is None else [*kind, str(g.dtype), *g.shape])
    return signatures


@quiet
def _summed(flat: np.ndarray, comm: Communicator, *, average: bool) -> np.ndarray:
    """The sum over all processes: each adds up a span, then all gather the spans."""
    height = -(-len(flat) // comm.size)
    sent = np.zeros((comm.size, height), flat.dtype)
    sent.reshape(-1)[: len(flat)] = flat
    received, ones = np.empty_like(sent), [1] * comm.size
    comm.all_to_all(sent, ones, received, ones).wait()
    real = real_type(flat.dtype)
    total = received[0].astype(real)
    # One rank after the other: the order of a sum of floats decides its last bits.
    for part in received[1:]:
        total += part.astype(real, copy=False)
    if average:
        total /= real(comm.size)
    comm.all_gather(total.astype(flat.dtype, copy=False), received).wait()
    return received.reshape(-1)[: len(flat)]


def _of_all(array: np.ndarray, counts: Sequence[int], comm: Communicator) -> np.ndarray:
    """The rows of all processes one behind the other: so many of each rank."""
    received = np.empty((sum(counts), *array.shape[1:]), array.dtype)
    parts = np.split(received, np.cumsum(counts)[:-1])
    parts[comm.rank][...] = array
    transfers = [comm.broadcast(part, r) for r, part in enumerate(parts) if part.size]
    for transfer in transfers:
        transfer.wait()
    return received


@quiet
def _rows_of_all(gradient: RowTensor, comm: Communicator, *, average: bool) -> RowTensor:
    lengths = np.empty((comm.size, 2), np.int64)
    comm.all_gather(np.array([len(gradient.indices), gradient.batch_length]), lengths).wait()
    counts = lengths[:, 0].tolist()
    places = [] if gradient.positions is None else [np.asarray(gradient.positions)]
    every = gradient.indices, gradient.values, *places
    arrays = [_of_all(array, counts, comm) for array in every]
    indices, values, *places = arrays
    if average:
        real = real_type(values.dtype)
        values = (values.astype(real, copy=False) / real(comm.size)).astype(values.dtype)
    if not places:
        return RowTensor(indices, values, gradient.dense_shape)
    first = np.cumsum([0, *lengths[:, 1]])  # the batch of all is one batch behind the other
    positions, length = places[0] + np.repeat(first[:-1], counts), sum(lengths[:, 1].tolist())
    shape = gradient.dense_shape
    return RowTensor(indices, values, shape, positions=positions, batch_length=length)
