"""Rows of device arrays on their way between processes."""

from __future__ import annotations

import numpy as np

from fusestep import nn
from fusestep.kernels.tables import HOT
from fusestep.nn.distributed import Route, RowShard, all_reduce, alone, save_checkpoint

from devices import (
    BF16,
    F16,
    F32,
    F64,
    MARKS,
    assert_close,
    assert_same,
    gradient,
    on_device,
    on_host,
    refused,
)
from thread_processes import ThreadCommunicator, in_threads

pytestmark = MARKS

N = 7


def test_routes() -> None:
    """All storage types, shapes of ids and of rows; ids of the host and of the device."""
    for dtype, tail in ((F32, (4,)), (F64, ()), (F16, (3, 2)), (BF16, (5,))):
        table = gradient((N, *tail), dtype)
        shard = RowShard(N, alone(), order="hash")
        for ids in (np.array([[1, 6], [1, 0]]), np.array([4], np.int32), np.empty((0, 2), int)):
            values = gradient((*ids.shape, *tail), dtype)
            theirs: Route = shard.route(on_device(ids))
            ours = shard.route(ids)
            found, expected = theirs.gather(on_device(table)), ours.gather(table)
            assert_same(found, expected)
            rows, known = theirs.scatter(on_device(values)), ours.scatter(values)
            assert_same(rows.values, known.values)
            assert_same(rows.indices, known.indices)
            assert rows.positions.tobytes() == known.positions.tobytes()
            assert (rows.batch_length, rows.dense_shape) == (known.batch_length, table.shape)


def test_parts() -> None:
    """Three parts of a batch on devices: as the whole batch on the host.

    Their steps have the same arrays, and positions that are cut into ranges in another way.
    """
    n, rng = 2 * HOT, np.random.default_rng(0)
    ids = np.where(rng.random(n) < 0.8, 3, rng.integers(0, N, n))
    values = np.ones((n, 2), np.float32)
    # 2**24 + 1 is 2**24: of the ones those are left that are not in the first range.
    ids[[0, -1]], values[0], values[-1] = 3, 2.0**24, -(2.0**24)
    firsts, length = (0, 2_000, 3_500), 9 * n

    def moved(rows: nn.RowTensor, first: int) -> nn.RowTensor:
        places = first + 5 * rows.positions
        shape = rows.dense_shape
        return nn.RowTensor(rows.indices, rows.values, shape, positions=places, batch_length=length)

    table, tables = np.zeros((N, 2), np.float32), np.zeros((len(firsts), N, 2), np.float32)
    gradient = nn.RowTensor(ids, values, table.shape, positions=np.arange(n), batch_length=n)
    opt = nn.SGD([table], 1.0)
    for k, first in enumerate(firsts):
        opt((moved(gradient, first),))
        tables[k] = table

    def program(comm: ThreadCommunicator) -> tuple[RowShard, nn.RowTensor]:
        shard = RowShard(N, comm)
        own = slice(n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size)
        return shard, shard.route(ids[own]).scatter(values[own])

    for shard, rows in in_threads(3, program):
        part, theirs = on_device(np.zeros((len(shard), 2), np.float32)), on_device(rows)
        own = nn.SGD([part], 1.0)
        for k, first in enumerate(firsts):
            own((moved(theirs, first),))
            assert_close(on_host(part), tables[k][shard.indices], f"{shard}, step {k}")


def test_refusals() -> None:
    """Processes that cannot send arrays of devices."""
    table = on_device(np.zeros((N, 2), np.float32))

    def program(comm: ThreadCommunicator) -> None:
        route = RowShard(N, comm).route(np.array([1]))
        with refused(ValueError, "Route.gather: rank 0: table is on a device"):
            route.gather(table)
        with refused(ValueError, "Route.scatter: rank 0: gradient is on a device"):
            route.scatter(on_device(np.ones((1, 2), np.float32)))

    in_threads(2, program)
    gradient = on_device(np.ones((N, 2), np.float32))
    sparse = nn.RowTensor(on_device(np.array([1])), on_device(np.ones((1, 2), np.float32)), (N, 2))
    for given in (gradient, sparse):
        with refused(RuntimeError, "all_reduce: gradient 0 lives on a CUDA device"):
            all_reduce((given,), alone())
    shards = {"table": RowShard(N, alone())}
    with refused(ValueError, "save_checkpoint: optimizer is on a device", table):
        save_checkpoint("nowhere", nn.SGD([nn.Parameter(table, "table")]), alone(), shards)
    route = RowShard(N, alone()).route(np.array([1, 2]))
    with refused(ValueError, "table has a wrong shape", table):
        route.gather(on_device(np.zeros((N + 1, 2), np.float32)))
