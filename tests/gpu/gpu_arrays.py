"""Arrays and streams of a CUDA device by each framework, and work that keeps a stream busy.

Importing this needs neither numba-cuda nor any framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest

from fusestep.ops.runtime.device import DeviceArray

from helpers import BF16

FRAMEWORKS = ("numba", "torch", "cupy")


def missing() -> str:
    """What a test on a device lacks; "" for nothing."""
    if find_spec("numba_cuda") is None:
        return 'needs a CUDA device and numba-cuda: pip install ".[cuda13,test]" (or cuda12)'
    from numba import config, cuda

    if config.ENABLE_CUDASIM:
        return "needs a CUDA device: this is Numba's simulator"
    return "" if cuda.is_available() else "needs a CUDA device: Numba finds none"


class Stream(NamedTuple):
    """A stream that does not wait for the default stream by itself, nor the other way round."""

    handle: int
    owner: Any


class Maker:
    """Makes device arrays of one framework; here of Numba."""

    def put(self, array: np.ndarray) -> Any:
        """A copy on the device."""
        from fusestep.bench.gpu.checks import Device

        return Device().put(array)

    def get(self, array: Any) -> np.ndarray:
        """A copy on the host, of what the array holds when all work on the device is done."""
        wait()
        copied = self._get(array)
        wait()
        return copied

    def _get(self, array: Any) -> np.ndarray:
        copied: np.ndarray = array.copy_to_host()
        return copied

    def shifted(self, array: np.ndarray, shift: int) -> Any:
        """A copy that begins ``shift`` elements past the start of its memory; 1-d."""
        room = np.concatenate([np.zeros(shift, array.dtype), array, np.zeros(1, array.dtype)])
        return self.put(room)[shift : shift + array.size]

    def stream(self) -> Stream:
        """A new stream."""
        from cuda.bindings import driver
        from numba import cuda

        cuda.current_context()
        error, made = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        assert error == driver.CUresult.CUDA_SUCCESS
        return Stream(int(made), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """The framework's current stream, where it has one."""
        del stream
        return nullcontext()

    def bound(self, array: Any, stream: Stream) -> Any:
        """The array, as one that belongs to the stream, where arrays do."""
        return array.bind(numba_stream(stream.handle))


class TorchMaker(Maker):
    """Of torch; bfloat16 as torch has it."""

    def __init__(self) -> None:
        self._torch = pytest.importorskip("torch", reason="torch is not installed")
        if not self._torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def put(self, array: np.ndarray) -> Any:
        if array.dtype == BF16:
            bits = self._torch.from_numpy(array.view(np.int16).copy())
            return bits.cuda().view(self._torch.bfloat16)
        return self._torch.from_numpy(array.copy()).cuda()

    def _get(self, array: Any) -> np.ndarray:
        if array.dtype == self._torch.bfloat16:
            bits: np.ndarray = array.detach().view(self._torch.int16).cpu().numpy()
            return bits.view(BF16)
        copied: np.ndarray = array.detach().cpu().numpy()
        return copied

    def stream(self) -> Stream:
        made = self._torch.cuda.Stream()
        return Stream(int(made.cuda_stream), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._torch.cuda.stream(stream.owner)
        return found

    def bound(self, array: Any, stream: Stream) -> Any:
        del stream
        return array


class CupyMaker(Maker):
    """Of CuPy; bfloat16 where it has it."""

    def __init__(self) -> None:
        self._cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def put(self, array: np.ndarray) -> Any:
        try:
            return self._cupy.array(array)
        except (TypeError, ValueError) as error:
            if array.dtype == BF16:
                pytest.skip(f"this CuPy has no bfloat16: {error}")
            raise

    def _get(self, array: Any) -> np.ndarray:
        copied: np.ndarray = self._cupy.asnumpy(array)
        return copied

    def stream(self) -> Stream:
        made = self._cupy.cuda.Stream(non_blocking=True)
        return Stream(int(made.ptr), made)

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        owner: AbstractContextManager[Any] = stream.owner
        return owner

    def bound(self, array: Any, stream: Stream) -> Any:
        del stream
        return array


_MAKERS = {"numba": Maker, "torch": TorchMaker, "cupy": CupyMaker}


def maker(name: str) -> Maker:
    """That of a framework; the test is skipped where it is not installed."""
    return _MAKERS[name]()


def wait() -> None:
    """Until all work on the device is done; nothing is told of bad indices."""
    from numba import cuda

    cuda.synchronize()


def adopted(array: Any) -> DeviceArray:
    """As the library sees it."""
    found = DeviceArray.adopt("test", "array", array)
    assert found is not None
    return found


def copies(make: Maker, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Each on the device."""
    return [make.put(array) for array in arrays]


def numba_stream(handle: int) -> Any:
    """The stream of Numba with this handle."""
    from numba import cuda

    return cuda.external_stream(handle) if handle else cuda.default_stream()


def keep_busy(handle: int, milliseconds: int) -> Any:
    """Enqueue work of about so long; the event that comes after it.

    One thread sleeps, so other streams can work meanwhile. It may sleep up to twice as long.
    """
    from fusestep.bench.gpu import clock as gpu_clock

    return gpu_clock.keep_busy(milliseconds / 1e3, numba_stream(handle))


def fill_later(handle: int, array: Any, value: float) -> None:
    """Enqueue filling an array, of a size divisible by 8, with one value."""
    from fusestep.kernels.cuda.device.arrays import fill

    found = adopted(array)
    assert found.size % 8 == 0
    fill(found.address, found.size, value, found.dtype, numba_stream(handle))
