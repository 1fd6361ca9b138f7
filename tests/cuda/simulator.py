"""CUDA kernels under Numba's simulator, which runs a Python thread for each of the device's.

Blocks are small there (`kernels.cuda.device.simulated`), device arrays lie on the host, and have to
be short. The simulator has to be switched on before Numba is imported. So a file of checks, which
imports this first, is a program, ``python device_graphs.py graphs``, and a process of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from numba.cuda.simulator.kernelapi import FakeCUDAShared

import fusestep
from fusestep.kernels.cuda.device import simulated

# It polls its threads, and would else let each wait for its turn.
sys.setswitchinterval(1e-4)


def run_check(**checks: Sequence[Callable[[], Any]]) -> None:
    """Run the check that ``sys.argv`` names, and print "right" when all of it is."""
    for part in checks[sys.argv[1]]:
        part()
    fusestep.synchronize()  # which raises what nobody has asked for
    print("right")


class Graph:
    """What was enqueued in ``with graph:``, to be run as often as `replay` is called."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def __enter__(self) -> Graph:
        simulated.recording.append(self.calls)
        return self

    def __exit__(self, *_: object) -> None:
        simulated.recording.clear()

    def replay(self) -> None:
        """Run everything, in order."""
        for call in self.calls:
            call()


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


FakeCUDAShared.array = _shared_array
