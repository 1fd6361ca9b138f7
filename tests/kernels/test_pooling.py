"""Loops that pool rows: every tile of columns and storage type, beside sums one by one."""

import ctypes
import pickle
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from fusestep.kernels import storage
from fusestep.kernels.cpu.pooling import AHEAD, sum_rows
from fusestep.kernels.cpu.threads import allocation
from fusestep.kernels.storage import real_of
from helpers import at_once

ROWS, STRIDE_BEYOND = 50, 5
BAGS = 3, 0, 1, 60, 0, 7
WIDTHS = 1, 3, 4, 7, 16, 20, 31, 32, 40, 64, 65, 100, 128, 200
STORAGES = storage.F32, storage.F64, storage.F16, storage.BF16


@pytest.mark.parametrize("w", STORAGES, ids=lambda w: w.name)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_and_means_of_bags(w: storage.Storage, width: int, is_weighted: bool) -> None:
    """Sums have the order of the ids, to the last bit; nothing beside the columns is written."""
    rng, real = np.random.default_rng(width), np.dtype(real_of(w).carrier)
    table = rng.standard_normal((ROWS, width)).astype(w.dtype)
    ids = rng.integers(0, ROWS, sum(BAGS) + AHEAD).astype(np.int32)
    weights = rng.standard_normal(sum(BAGS)).astype(real)
    bounds = np.cumsum([0, *BAGS])
    loop = sum_rows(w, real_of(w), weighted=is_weighted).address
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(loop)
    for is_mean in (0, 1):
        out = np.full((len(BAGS), width + STRIDE_BEYOND), 99, real)
        at = [x.ctypes.data for x in (out, table, ids, weights, bounds)]
        call(at[0], out.strides[0], at[1], table.strides[0], width, *at[2:], len(BAGS), is_mean)
        for b, length in enumerate(BAGS):
            expected = np.zeros(width, real)
            for n, k in enumerate(range(bounds[b], bounds[b + 1])):
                row = table[ids[k]].astype(real) * (weights[k] if is_weighted else real.type(1))
                expected = expected + row if n else row
            expected /= real.type(length if is_mean and length else 1)
            np.testing.assert_array_equal(out[b, :width], expected)
            assert (out[b, width:] == 99).all()


def test_memory_that_nobody_holds_is_used_again() -> None:
    """An array, or a view of one, that somebody holds is never given to the next call."""
    memory, shape = allocation.Recycled(), (1 << 16,)
    held = [memory.empty(shape, np.float32) for _ in range(3)]
    places = {array.ctypes.data for array in held}
    assert len(places) == 3
    view, alone = memoryview(held[0])[5:], held[1].ctypes.data
    del held[:2]
    again = [memory.empty(shape, np.float32) for _ in range(2)]
    assert again[0].ctypes.data == alone
    assert again[1].ctypes.data not in places
    view.release()
    smaller = memory.empty((1 << 15,), np.float32)
    assert smaller.ctypes.data in places - {alone, held[0].ctypes.data}
    # Other sizes let all that is free go.
    del again, smaller, held
    big = memory.empty((1 << 20,), np.float32)
    assert [len(x) for x in memory._kept] == [big.base.nbytes]


def _in_torch(x: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(x).view(-1, 1)[3:].detach()


HELD: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda x: x,
    "part": lambda x: x[5:-7:3],
    "memoryview": lambda x: memoryview(x[1:]),
    "base": lambda x: x.base,
    "capsule": lambda x: x.__dlpack__(),
    "strided": lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
    "other dtype": lambda x: x.view(np.int32).reshape(-1, 1).T,
    "iterator": lambda x: x.flat,
    "tensor": _in_torch,
}


def test_memory_that_anything_holds_is_never_given_to_another() -> None:
    """A random sequence: in whatever form memory is held, its numbers stay as they were."""
    rng, memory = np.random.default_rng(3), allocation.Recycled()
    held: list[tuple[Any, Any, int]] = []
    places: set[int] = set()
    n_again = 0
    for number in range(2_000):
        while held and rng.random() < 0.5:
            held.pop(rng.integers(len(held)))
        n = int(rng.choice([10, 32_700, 40_000, 70_000])) + int(rng.integers(3))
        made = memory.empty((n,), np.float32)
        n_again += made.ctypes.data in places
        places.add(made.ctypes.data)
        made.fill(number)
        # What holds nothing itself shows the numbers.
        shown = (ctypes.c_float * n).from_address(made.ctypes.data)
        held.append((HELD[rng.choice([*HELD])](made), shown, number))
        del made
        if rng.random() < 0.02:
            memory = pickle.loads(pickle.dumps(memory)) if rng.random() < 0.5 else copy(memory)
        for _, numbers, expected in held:
            assert (np.frombuffer(numbers, np.float32) == expected).all()
    assert n_again > 200


def test_memory_of_several_threads() -> None:
    """Threads that share what is kept never get the memory of one another."""
    memory = allocation.Recycled()

    def work(thread: int) -> None:
        held: list[np.ndarray] = []
        for number in range(300):
            made = memory.empty((1 << 15,), np.float32)
            made.fill(1_000 * thread + number)
            held.append(made)
            for k, array in enumerate(held):
                assert (array == 1_000 * thread + number + 1 - len(held) + k).all()
            del made, array
            if len(held) > number % 4:
                held.clear()

    at_once([partial(work, thread) for thread in range(3)])


def test_memory_of_many_outputs_is_let_go() -> None:
    """Who has held many arrays at once leaves few of them behind, and those of later calls."""
    memory, shape = allocation.Recycled(), (1 << 15,)
    held = [memory.empty(shape, np.float32) for _ in range(200)]
    bases = [*map(id, (array.base for array in held))]
    assert [*map(id, memory._kept)] == bases[-len(memory._kept) :]
    assert len(memory._kept) <= 64
    del held
    memory.empty(shape, np.float32)
    assert len(memory._kept) <= 64
