"""Arrays of our own begin at a cache line, and steps do not mind where those of users begin."""

import copy
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import fusestep
from fusestep import nn, ops
from fusestep.kernels.cpu.threads import allocation, workspace
from helpers import BF16, assert_same_arrays

LINE = 64
DTYPES = [np.float32, np.float64, np.float16, BF16]


def offset(array: np.ndarray) -> int:
    return int(array.ctypes.data) % LINE


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (1023,), (2**21 + 3,), (3, 700_001)])
def test_full(shape: tuple[int, ...], dtype: Any, value: float) -> None:
    """Also those that all threads fill, whose last word or page is not whole."""
    array = allocation.full(shape, value, dtype)
    assert array.shape == shape and array.dtype == dtype and array.flags.writeable
    assert array.size == 0 or offset(array) == 0
    assert np.all(array == np.dtype(dtype).type(value))


def test_at_line_copies_what_lies_elsewhere() -> None:
    memory = allocation.full((100,), 0.0, np.float32)
    assert allocation.at_line(memory) is memory
    memory[:] = np.arange(100)
    for other in (memory[1:], memory.reshape(10, 10).T, memory[::2]):
        moved = allocation.at_line(other)
        assert offset(moved) == 0 and moved.flags.c_contiguous and np.array_equal(moved, other)
    memory.flags.writeable = False
    assert allocation.at_line(memory).flags.writeable


def test_states_stay_at_lines() -> None:
    """When they are made, copied, unpickled or given up in part, and gathered rows."""
    shapes = (1000, 33), (7,)
    optimizer = nn.LazyAdam([np.zeros(shape, np.float32) for shape in shapes])
    optimizer.keep_states([True, False])
    for made in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        states = [a for arrays in made._states.values() for a in arrays if a is not None]
        assert len(states) == 2 and not any(map(offset, states))
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert offset(made.parameters[0].data) == 0
    rows = ops.SparseGatherV2()(np.ones((50, 3), np.float32), np.arange(20))
    assert offset(rows) == 0 and np.all(rows == 1.0)
    for array in nn.mxnet.Adam().create_state(0, np.ones(1000, np.float32)):
        assert offset(array) == 0


def test_workspace_of_many_calls_at_once_is_not_kept() -> None:
    """Calls give back what they borrow; the memory of a few is kept for the next."""
    blocks = [workspace.borrow(1000) for _ in range(9)]
    assert len({block.address for block in blocks}) == 9
    alive = [weakref.ref(block.words) for block in blocks]
    while blocks:
        workspace.give_back(blocks.pop())
    assert 0 < sum(words() is not None for words in alive) < 9
    pool, objects = workspace.Pool(object), [object() for _ in range(9)]
    for each in objects:
        pool.give(each)
    assert 0 < sum(pool.take() in objects for _ in range(9)) < 9


def placed(array: np.ndarray, place: int) -> np.ndarray:
    """A copy that begins so many bytes after a line."""
    memory = allocation.empty((array.nbytes + LINE,), np.uint8)
    made: np.ndarray = np.ndarray(array.shape, array.dtype, memory, place)
    made[...] = array
    return made


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("width", [1, 3, 16, 33, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_begin_anywhere(dtype: Any, width: int, locked: bool) -> None:
    """Tables, states and gradients after each multiple of an element: the same bits."""
    rng = np.random.default_rng(width)
    n, batch = 60, 90  # rows that occur once, some times, and never
    table = rng.standard_normal((n, width)).astype(dtype)
    values = rng.standard_normal((batch, width)).astype(dtype)
    indices = rng.integers(0, n, batch)
    results = []
    for place in range(0, LINE, np.dtype(dtype).itemsize):
        at = {"moment1": place * 3 % LINE, "moment2": place * 5 % LINE}

        def make(name: str, shape: Any, dtype: Any, initial: Any, at: Any = at) -> np.ndarray:
            return placed(np.full(shape, initial, dtype), at.get(name.split(".")[0], 0))

        parameter = placed(table, place)
        with fusestep.states_in(make):
            optimizer = nn.LazyAdam([parameter], use_locking=locked)
        rows = ops.RowTensor(indices, placed(values, place * 7 % LINE), table.shape)
        for _ in range(2):
            optimizer([rows])
        results.append((parameter, *optimizer.state_arrays().values()))
        assert not np.array_equal(parameter, table)
    for found in results[1:]:
        assert_same_arrays(found, results[0])
