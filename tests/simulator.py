"""CUDA kernels under Numba's simulator, with blocks so small that it takes little time.

The simulator runs a Python thread for each of the device's, so arrays are short and blocks small.
It has to be switched on, by ``NUMBA_ENABLE_CUDASIM``, before Numba is imported.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numba.cuda.simulator.kernelapi import FakeCUDAShared

from fusestep.kernels.cuda.adafactor import layout as factored_layout
from fusestep.kernels.cuda.dense import (
    centralize,
    finite,
    norm,
    scalars,
    trust,
)
from fusestep.kernels.cuda.dense import update as dense
from fusestep.kernels.cuda.device import fill, widen
from fusestep.kernels.cuda.rows import equal_rows, gather, keys, sort
from fusestep.kernels.cuda.rows import step as row_step


def prepare_simulator() -> None:
    """Make blocks small and shared arrays one for all threads."""
    # The simulator polls its threads, and would else let each wait for its turn.
    sys.setswitchinterval(1e-4)
    FakeCUDAShared.array = _shared_array
    # Few threads a block and one tile a thread, so that short tensors have several blocks.
    dense.THREADS, dense._TILES_PER_THREAD = 4, 1
    finite.THREADS, finite.TILES_PER_THREAD = 4, 1
    row_step.THREADS = fill.THREADS = gather.THREADS = equal_rows.THREADS = widen.THREADS = 8
    keys.THREADS = 8
    centralize.THREADS, centralize.TILES_PER_THREAD, centralize.MOST_CHUNKS = 8, 1, 20
    norm.THREADS = trust.THREADS = scalars.THREADS = 4
    # Tiles of 2 threads by 2, rounds of 2 rows; lines that 2 threads share; chunks of 8 rows.
    factored_layout.THREADS, factored_layout.ROUNDS, factored_layout._LANES = 4, 2, 2
    factored_layout._ENOUGH_TILES, factored_layout._MOST_BANDS = 4, 2
    factored_layout._NEIGHBOURS, factored_layout._CHUNK = 2, 2
    # Tiles of 16 keys, digits of 3 bits and 1, rounds of 4 counters.
    sort.DIGIT_BITS, sort._SPLIT_BITS, sort._HALF = 4, 3, 4
    sort.THREADS, sort.GROUP, sort.LINE_BITS = 4, 2, 2
    sort.KEYS_PER_THREAD, sort._COUNTS_PER_THREAD = 4, 1


_one_at_a_time = threading.Lock()


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:  # noqa: ARG001
    """``cuda.shared.array``, known by its line; the simulator's own gives two threads that ask at
    once an array each, now and then, and addresses are computed from what is in them.
    """
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    with _one_at_a_time:
        if place not in self._allocations:
            self._allocations[place] = np.empty(shape, str(dtype))
        found: np.ndarray = self._allocations[place]
    return found
