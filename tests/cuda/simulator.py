"""CUDA kernels under Numba's simulator, which runs a Python thread for each of the device's.

Blocks are small there (`simulated`, in the place of `kernels.cuda.device.backend`), arrays lie on
the host and are short. The simulator has to be switched on before Numba is imported: import this
first.

The simulator's own threads of a block all run at once, are polled, and put their ``cuda`` into a
module whenever they call a function of it. Here they take turns, each up to the next barrier. What
lacks a barrier is wrong in every run: of two blocks the first thread begins in one, the last in the
other.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from numba.cuda.simulator import kernel
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernelapi import FakeCUDAShared, swapped_cuda_module
import simulated
from fusestep.kernels.cuda import device
from fusestep.ops.runtime import frameworks

sys.modules[f"{device.__name__}.backend"] = simulated
device.backend = simulated  # type: ignore[attr-defined]


class _Simulator(frameworks.Framework):
    """Arrays of the simulator."""

    tells_device = True

    def place(self, where: str, name: str, value: Any) -> frameworks.Place:  # noqa: ARG002
        array = value._ary
        strides = None if array.flags.c_contiguous else array.strides
        form = array.ctypes.data, array.shape, strides, array.dtype, 0, array.flags.writeable
        return frameworks.Place(*form)

    signature: Any = attrgetter("_ary.shape", "_ary.strides", "_ary.dtype", "_ary.flags.writeable")
    address: Any = attrgetter("_ary.ctypes.data")


frameworks._of_types[FakeCUDAArray] = _Simulator()


@contextmanager
def captured() -> Iterator[list[str]]:
    """A context in which every stream is being captured, with what is enqueued meanwhile."""
    enqueued: list[str] = []
    simulated.captures.append(enqueued)
    try:
        yield enqueued
    finally:
        simulated.captures.pop()


def give_out_tensors(patch: Any, stream_of: Callable[[int], int] = lambda _: 0) -> None:
    """Tensors of the CPU say that they lie on the device; those that have ``is_host`` do not."""
    import torch

    empty, there = torch.empty, torch.device("cuda:0")
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: not hasattr(tensor, "is_host")))
    patch.setattr(torch.Tensor, "device", property(lambda _: there))
    patch.setattr(torch.Tensor, "get_device", lambda _: 0)
    patch.setattr(
        torch, "empty", lambda *shape, **given: empty(*shape, **given | {"device": "cpu"})
    )
    patch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream_of(device))
    )


def _closed() -> threading.Lock:
    """A lock that another thread opens."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread of a block, which runs while it is its turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turn, self._turn_is_over = _closed(), _closed()
        self.is_done = False

    def take_turn(self) -> None:
        """Run to the next barrier, or to the end."""
        if self.ident is None:
            self.start()
        else:
            self._turn.release()
        self._turn_is_over.acquire()

    def run(self) -> None:
        super().run()
        self.is_done = True
        self._turn_is_over.release()

    def syncthreads(self) -> None:
        self._turn_is_over.release()
        self._turn.acquire()
        if self.abort:
            raise RuntimeError("another thread has failed")


_orders = cycle((1, -1))


def _run_block(block: Any, place: Any, *arguments: Any) -> None:
    threads = [
        _Thread(partial(block._f, *arguments), block, place, number, False)
        for number in np.ndindex(*block._block_dim)
    ][:: next(_orders)]
    while threads:
        for thread in threads:
            thread.take_turn()
        failed = [thread.exception for thread in threads if thread.exception]
        threads = [thread for thread in threads if not thread.is_done]
        if failed:
            for thread in threads:
                thread.abort = True
                thread.take_turn()
            raise failed[0][0].with_traceback(failed[0][1])


_launch = kernel.FakeCUDAKernel.__call__
_modules, _left = set[int](), ExitStack()


def _call(function: Any, *arguments: Any) -> Any:
    context = kernel._get_kernel_context()
    if context is None:
        with _left:
            _modules.clear()
            return _launch(function, *arguments)
    names = function.fn.__globals__
    if id(names) not in _modules:
        _left.enter_context(swapped_cuda_module(function.fn, context))
        _modules.add(id(names))
    return function.fn(*arguments)


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:  # noqa: ARG001
    """``cuda.shared.array``, known by its line, which the simulator's own reads out of the file."""
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    if place not in self._allocations:
        self._allocations[place] = np.empty(shape, str(dtype))
    found: np.ndarray = self._allocations[place]
    return found


kernel.BlockManager.run = _run_block
kernel.FakeCUDAKernel.__call__ = _call
FakeCUDAShared.array = _shared_array
