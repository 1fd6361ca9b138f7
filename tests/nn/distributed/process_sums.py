"""`all_reduce` on each rank."""

from typing import Any

import numpy as np
from fusestep import nn
from fusestep.nn.distributed import Communicator, all_reduce
from helpers import STORAGE_DTYPES, assert_same_bits
from process_checks import everywhere, refused_everywhere

SHAPES: list[tuple[int, ...]] = [(5, 3), (1001,), (), (0,), (2, 0), (1,)]


def real(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


def of_all(comm: Communicator, shape: tuple[int, ...], seed: int, dtype: Any) -> np.ndarray:
    """Of every process; of such sizes that the order of their sum shows."""
    rng = np.random.default_rng([seed, comm.size])
    values = rng.standard_normal((comm.size, *shape)) * 2.0 ** rng.integers(
        -5, 5, (comm.size, *shape)
    )
    return np.asarray(values).astype(dtype)


def summed(values: np.ndarray, n: float = 1) -> np.ndarray:
    """In the order of the ranks, rounded once."""
    wide = real(values.dtype)
    total = values[0].astype(wide)
    for one in values[1:]:
        total = total + one.astype(wide)
    return np.asarray(total / wide(n)).astype(values.dtype)


def sums(comm: Communicator, *_: Any) -> None:
    """Dense gradients of all types and shapes, beside None."""
    own_dtypes = [(shape, dtype) for dtype in STORAGE_DTYPES for shape in SHAPES]
    values = [of_all(comm, shape, k, dtype) for k, (shape, dtype) in enumerate(own_dtypes)]
    for average in (False, True):
        own = [None, *(value[comm.rank].copy() for value in values), None]
        before = [None if a is None else a.tobytes() for a in own]
        found = all_reduce(own, comm, average=average)
        assert [None if a is None else a.tobytes() for a in own] == before
        assert isinstance(found, tuple) and found[0] is None and found[-1] is None
        for value, total in zip(values, found[1:-1], strict=True):
            assert_same_bits(total, summed(value, comm.size if average else 1))
            assert total.flags.writeable and not any(a is total for a in own)
        assert len(set(everywhere(comm, [total.tobytes() for total in found[1:-1]]))) == 1
    if comm.size > 2:  # the order matters, or this would prove nothing
        for value in values:
            is_seen = value[0].size > 100 and value.dtype in (np.float32, np.float64)
            assert not is_seen or (summed(value) != summed(value[::-1])).any()


def row_sums(comm: Communicator, *_: Any) -> None:
    """Row-sparse ones, one behind the other, also in parts, also empty ones."""
    rng = np.random.default_rng(comm.size)
    for index, dtype in zip((np.int32, np.int64, np.int64, np.int32), STORAGE_DTYPES, strict=True):
        lengths = [3 * rank % 4 for rank in range(comm.size)]
        ids = [rng.integers(0, 9, n).astype(index) for n in lengths]
        values = [rng.standard_normal((n, 2)).astype(dtype) for n in lengths]
        mine = nn.RowTensor(ids[comm.rank], values[comm.rank], (9, 2))
        halves = [nn.RowTensor(mine.indices[a], mine.values[a], (9, 2)) for a in (
            slice(0, 1), slice(1, None))]  # fmt: skip
        for average in (False, True):
            one, parts, none = all_reduce([mine, halves, None], comm, average=average)
            expected = np.concatenate(values)
            if average:
                expected = (expected.astype(real(dtype)) / real(dtype)(comm.size)).astype(dtype)
            assert none is None
            for found in (one, parts):
                assert isinstance(found, nn.RowTensor) and found.dense_shape == (9, 2)
                assert_same_bits(found.indices, np.concatenate(ids))
                assert_same_bits(found.values, expected)


def sums_that_differ(comm: Communicator, *_: Any) -> None:
    """Gradients of one rank that are not those of the others."""
    dense = np.ones((4, 2), np.float32)
    rows = nn.RowTensor(np.array([1]), np.ones((1, 2), np.float32), (4, 2))
    of_int32 = nn.RowTensor(np.array([1], np.int32), np.ones((1, 2), np.float32), (4, 2))
    differs = "rank {}: gradients.* differs"
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        ([dense], [dense.astype(np.float16)], ValueError, differs),
        ([dense], [dense[:3]], ValueError, differs),
        ([dense], [dense.reshape(-1)], ValueError, differs), ([dense], [rows], ValueError, differs),
        ([dense], [None], ValueError, differs), ([None], [dense], ValueError, differs),
        ([rows], [of_int32], ValueError, differs),
        ([rows], [nn.RowTensor(rows.indices, rows.values, (5, 2))], ValueError, differs),
        ([dense], [dense, dense], ValueError, differs),
        ([dense], [np.ones(3, np.int32)], TypeError, "rank {}: gradient 0"),
        ([dense], [3.0], TypeError, "rank {}: gradient 0"),
        ([dense], dense, TypeError, "rank {}: gradients"),
    ]  # fmt: skip
    for bad in range(1, comm.size):
        for usual, other, kind, text in wrong:
            given = other if comm.rank == bad else usual
            text = text.format(bad)
            refused_everywhere(comm, kind, text, lambda g=given: all_reduce(g, comm), dense)
        refused_everywhere(
            comm, TypeError, f"rank {bad}: average has a wrong type",
            lambda bad=bad: all_reduce([dense], comm, average="no" if comm.rank == bad else False),
        )  # fmt: skip
        text = f"rank {bad}: average differs"
        refused_everywhere(
            comm, ValueError, text,
            lambda bad=bad: all_reduce([dense], comm, average=comm.rank == bad), dense)  # fmt: skip
