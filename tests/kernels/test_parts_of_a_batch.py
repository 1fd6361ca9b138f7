"""A batch whose rows several processes own: each steps on its own, with the bits of one process."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fusestep.kernels.cpu.rows.step import RowStep
from fusestep.kernels.cpu.threads.parallel import run_all
from fusestep.kernels.element import kernel
from fusestep.kernels.rules.adam import ADAM
from fusestep.kernels.storage import F32
from fusestep.kernels.tables import HOT, RowSource, RowTable

N, D = 90, 7
KERNEL = kernel(ADAM, (), F32, F32, (F32, F32))
HP = np.linspace(0.1, 0.9, KERNEL.n_scalars, dtype=np.float32)


def step(
    arrays: list[np.ndarray],
    indices: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray | None = None,
    whole_length: int = 0,
    touched_only: bool = True,
) -> None:
    """A step on the rows of these arrays."""
    source = RowSource(
        *(indices.ctypes.data, indices.itemsize, len(indices), values.ctypes.data),
        *(0 if positions is None else positions.ctypes.data, whole_length),
    )
    places = tuple(a.ctypes.data for a in arrays)
    table = RowTable(places, HP.ctypes.data, len(arrays[0]), D, source)
    found = RowStep(KERNEL, [table], touched_only=touched_only)
    assert found.bad_position == -1
    run_all(found.loops)
    found.release()


@pytest.mark.parametrize("touched_only", [True, False])
@pytest.mark.parametrize("length", [300, 8_000, 30_000, 300_000])
@pytest.mark.parametrize("owners", [1, 2, 3])
def test_owners_of_rows_give_the_bits_of_one_process(
    owners: int, length: int, touched_only: bool
) -> None:
    """The ranges of hot rows are those of the whole batch, wherever their occurrences are."""
    rng = np.random.default_rng(owners)
    indices = np.minimum(rng.zipf(1.3, length) - 1, N - 1)
    indices[length // 3 : length // 2] = 40  # some ranges hold one row only
    values = rng.standard_normal((length, D)).astype(np.float32)
    start = [rng.uniform(0, 1, (N, D)).astype(np.float32) for _ in range(3)]
    whole, parted = ([a.copy() for a in start] for _ in range(2))
    step(whole, indices, values, touched_only=touched_only)
    for begin, end in pairwise(np.linspace(0, N, owners + 1).astype(int)):
        positions = np.flatnonzero((begin <= indices) & (indices < end))
        own, arrays = indices[positions] - begin, [a[begin:end] for a in parted]
        step(arrays, own, values[positions], positions, length, touched_only)
    touched = np.unique(indices) if touched_only else np.arange(N)
    for ours, theirs in zip(parted, whole, strict=True):
        np.testing.assert_array_equal(ours[touched], theirs[touched])


def test_without_positions_the_bits_are_others() -> None:
    """Counted in its own part of the batch, a hot row has other ranges: the test above can fail."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 2, 40_000)
    values = rng.standard_normal((len(indices), D)).astype(np.float32)
    positions = np.flatnonzero(indices == 0)
    assert len(positions) > HOT
    found = []
    for given in ((), (positions, len(indices))):
        arrays = [np.ones((1, D), np.float32) for _ in range(3)]
        step(arrays, np.zeros(len(positions), np.int64), values[positions], *given)
        found.append(arrays)
    assert any((a != b).any() for a, b in zip(*found, strict=True))
