"""CUDA kernels under Numba's simulator, with blocks so small that it takes little time.

The simulator runs a Python thread for each of the device's, so arrays are short and blocks small.
It has to be switched on, by ``NUMBA_ENABLE_CUDASIM``, before Numba is imported.
"""

from __future__ import annotations

import sys

from fusestep.kernels.cuda import dense, fill, finite, norm, row_step, sort


def shrink_blocks() -> None:
    """Few threads a block and one tile a thread, so that short tensors have several blocks."""
    # The simulator polls its threads, and would else let each wait for its turn.
    sys.setswitchinterval(1e-4)
    dense.THREADS, dense._TILES_PER_THREAD = 4, 1
    finite.THREADS, finite.TILES_PER_THREAD = 4, 1
    row_step.THREADS = fill.THREADS = 8
    norm.THREADS = 4
    # Tiles of 16 keys, digits of 3 bits and 1, rounds of 4 counters.
    sort.DIGIT_BITS, sort._SPLIT_BITS, sort._HALF = 4, 3, 4
    sort.THREADS, sort.GROUP, sort.LINE_BITS = 4, 2, 2
    sort.KEYS_PER_THREAD, sort._COUNTS_PER_THREAD = 4, 1
