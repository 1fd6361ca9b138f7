"""Which rows a process has, routes, and steps of threads that stand for processes."""

from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.nn import distributed
from fusestep.nn.distributed import RowShard, alone, together
from helpers import assert_same_bits, unchanged
from process_training import SHAPES, Tables, Training, assert_part_of, batch
from thread_processes import ThreadCommunicator, in_threads

ORDERS = ("range", "hash")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 12, 97, 128, 1000])
def test_every_row_has_one_owner(rows: int, order: str) -> None:
    for size in (1, 2, 3, 4, 7):
        shards = in_threads(size, lambda comm: RowShard(rows, comm, order=order))
        found = np.concatenate([shard.indices for shard in shards])
        assert sorted(found.tolist()) == list(range(rows))
        assert [len(shard) for shard in shards] == [len(shard.indices) for shard in shards]
        for shard in shards:
            own = np.arange(shard.begin, shard.end)
            assert shard.places(shard.indices).tolist() == own.tolist()
            assert len(shard) <= -(-rows // size)
        if order == "range":
            assert found.tolist() == list(range(rows))


@pytest.mark.parametrize("rows", [1000, 1024, 99_991, 1_000_000])
def test_neighbours_are_spread(rows: int) -> None:
    """The most frequent rows are the first ones, often."""
    places = RowShard(rows, alone(), order="hash").places(np.arange(rows))
    assert np.array_equal(np.sort(places), np.arange(rows))
    for size in (2, 3, 4, 8):
        counts = np.bincount(places[:96] // -(-rows // size), minlength=size)
        assert np.abs(counts - 96 / size).max() <= 3, counts


def test_large_numbers_of_rows() -> None:
    most = 3_037_000_499
    shard = RowShard(most, alone(), order="hash")
    ids = np.array([0, 1, most // 2, most - 2, most - 1])
    factor = int(shard.places(np.array([1]))[0])
    assert shard.places(ids).tolist() == [int(i) * factor % most for i in ids]
    assert 0.6 < factor / most < 0.64
    with pytest.raises(ValueError, match=r"RowShard: rows .*at most 3037000499"):
        RowShard(most + 1, alone(), order="hash")
    assert len(RowShard(2**40, alone())) == 2**40


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (1.5, "range", TypeError, "rows has a wrong type"),
    (True, "range", TypeError, "rows has a wrong type"), (-1, "range", ValueError, "rows"),
    (3, "sorted", ValueError, "order is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "order", "kind", "match"), WRONG)
def test_shards_that_are_refused(rows: Any, order: str, kind: Any, match: str) -> None:
    with pytest.raises(kind, match=f"^RowShard: {match}"):
        RowShard(rows, alone(), order=order)


def test_names_of_the_package_stay_functions() -> None:
    """Modules are imported when they are asked for, and do not take the place of functions."""
    for name in distributed.__all__:
        for _ in range(2):
            try:
                assert callable(getattr(distributed, name)), name
            except ModuleNotFoundError:
                assert name in ("over_torch", "over_mpi")
    with pytest.raises(AttributeError, match="has no attribute 'over_nothing'"):
        distributed.over_nothing  # noqa: B018


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_threads_have_the_bits_of_one(size: int, order: str) -> None:
    whole = Training("LazyAdam", np.float32)
    whole.steps(3)

    def program(comm: ThreadCommunicator) -> None:
        own = Training("LazyAdam", np.float32, Tables(comm, order))
        own.steps(3)
        assert_part_of(own, whole, f"{comm.rank} of {size}")

    in_threads(size, program)


def test_ranges_that_grow_with_the_batch() -> None:
    """Beyond 64 * 4096 occurrences a hot row is summed in ranges of another length."""
    n, rows = 300_000, 5
    rng = np.random.default_rng(0)
    ids, values = rng.integers(0, rows, n), rng.standard_normal((n, 2)).astype(np.float32)
    whole = np.zeros((rows, 2), np.float32)
    nn.SGD([whole])((nn.RowTensor(ids, values, whole.shape),))

    def program(comm: ThreadCommunicator) -> np.ndarray:
        shard = RowShard(rows, comm)
        table = np.zeros((len(shard), 2), np.float32)
        own = slice(n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size)
        nn.SGD([table])((shard.route(ids[own]).scatter(values[own]),))
        return table

    assert_same_bits(np.concatenate(in_threads(3, program)), whole)


def test_gathered_rows() -> None:
    """Of all storage types and shapes of ids; the table is only read."""
    whole = np.random.default_rng(0).standard_normal((13, 3, 5))
    for dtype in (np.float16, np.float64):
        table = whole.astype(dtype)
        route = RowShard(13, alone()).route(np.array([[1, 12], [1, 0]], np.int32))
        with unchanged(table):
            rows = route.gather(table)
        assert_same_bits(rows, table[[[1, 12], [1, 0]]])
        assert not np.shares_memory(rows, table)


def test_a_batch_without_rows() -> None:
    shard = RowShard(4, alone())
    gradient = shard.route(np.empty((0, 3), np.int64)).scatter(np.empty((0, 3, 2), np.float32))
    assert gradient.indices.shape == (0,) and gradient.values.shape == (0, 2)
    nn.LazyAdam([np.ones((4, 2), np.float32)])((gradient,))


def test_positions_are_those_of_the_whole_batch() -> None:
    ids, _ = batch(0, "words", np.dtype(np.float32))

    def program(comm: ThreadCommunicator) -> nn.RowTensor:
        return Tables(comm, "range").gradients(0, np.dtype(np.float32))[0]

    parts, height = in_threads(3, program), -(-SHAPES["words"][0] // 3)
    found = np.empty_like(ids)
    for rank, part in enumerate(parts):
        assert part.batch_length == len(ids)
        found[part.positions] = part.indices + rank * height
    assert np.array_equal(found, ids)


def test_an_optimizer_alone_is_as_without_others() -> None:
    one, other = (np.ones((4, 2), np.float32) for _ in range(2))
    first, second = nn.LazyAdam([one]), nn.LazyAdam([other])
    together(first, alone())
    gradient = nn.RowTensor(np.array([1, 1]), np.ones((2, 2), np.float32), (4, 2))
    for opt in (first, second):
        opt((gradient,))
        with pytest.raises(IndexError, match=r"^LazyAdam: .*out of range"):
            opt((nn.RowTensor(np.array([9]), np.ones((1, 2), np.float32), (4, 2)),))
    assert_same_bits(one, other)
