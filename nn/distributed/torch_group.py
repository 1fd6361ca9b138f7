"""Communication over torch.distributed."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...kernels.private import find
from ...ops.runtime import check, cuda
from ...ops.runtime.device import DeviceArray, launching
from ...ops.runtime.errors import reject
from .communicator import LostProcessError, as_bytes, row_bytes

_WHERE = "over_torch"
_LOOK = timedelta(seconds=0.5)  # how often somebody who waits asks whether another has failed
_ANSWER = 10.0  # seconds in which a process that lives says so
_FAILED = "fusestep/failed"


class TorchCommunicator:
    """The processes of a group of torch.distributed, made by `over_torch`."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        # Weak: ``destroy_process_group`` then ends the threads of the group. One that still lets go
        # of an array while the interpreter ends would abort the process.
        self._group, self._timeout = weakref.ref(group), timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.moves_device_arrays = "cuda" in dist.get_backend_config(group)
        store_of = find("store")
        self._store: Any = store_of and store_of(group)
        self._lost: LostProcessError | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            LostProcessError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise LostProcessError(f"{_WHERE}: the process group has been destroyed")
        return group

    def __deepcopy__(self, memo: Any) -> TorchCommunicator:
        """Return this communicator: a copy of a model talks to the same processes."""
        return self

    def __reduce__(self) -> Any:
        wrong, expected = "is of these processes alone", "a state dict, or a copy"
        return reject(TypeError, _WHERE, "the communicator", wrong, expected, "a pickle")

    def all_to_all(
        self, sent: Any, counts: Sequence[int], received: Any, received_counts: Sequence[int]
    ) -> TorchTransfer:
        size = row_bytes(sent)
        there, here = ([int(n) * size for n in of] for of in (received_counts, counts))
        tensors = _tensor(received), _tensor(sent)
        return self._started((received, sent), dist.all_to_all_single, *tensors, there, here)

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> TorchTransfer:
        # As an exchange, which gloo does in a third of the time.
        repeated = np.tile(as_bytes(sent), self.size)
        tensors = _tensor(received), _tensor(repeated)
        return self._started((received, repeated), dist.all_to_all_single, *tensors)

    def broadcast(self, array: np.ndarray, root: int) -> TorchTransfer:
        return self._started((array,), dist.broadcast, _tensor(array), group_src=root)

    def _started(
        self, arrays: Sequence[Any], collective: Any, *arguments: Any, **options: Any
    ) -> TorchTransfer:
        if self._lost is not None:
            raise self._lost
        options["group"] = self.group
        try:
            with _stream_of(arrays):
                work = collective(*arguments, **options, async_op=True)
        except RuntimeError as error:
            raise self._failed(error) from error
        return TorchTransfer(self, work, arrays)

    def finish(self, work: Any, arrays: Sequence[Any]) -> None:
        """Wait for a collective until it is done, somebody has failed or it is too late.

        For device arrays their stream waits, as long as the backend says.
        """
        end = time.monotonic() + self._timeout
        on_host = not isinstance(arrays[0], DeviceArray)
        while True:
            is_done = not on_host or work.is_completed()  # an error is not for want of time then
            try:
                with _stream_of(arrays):
                    work.wait(*[_LOOK] * on_host)
                return
            except RuntimeError as error:
                if is_done or time.monotonic() > end or self._is_failing():
                    raise self._failed(error) from error

    # Who is lost: engines name an address at best. Each process that finds a failure leaves a
    # mark in the store of the group; who leaves none does not live any more.

    def _failed(self, error: RuntimeError) -> LostProcessError:
        lost = [] if self._store is None else self._missing()
        cause = str(error).partition("\n")[0].partition(". ")[0]
        which = " and ".join(f"rank {rank}" for rank in lost)
        wrong = (
            f"{which} of {self.size} processes does not answer" if lost else "an exchange failed"
        )
        message = f"{_WHERE}: {wrong} ({cause})"
        self._lost = LostProcessError(message, lost)
        return self._lost

    def _missing(self) -> list[int]:
        try:
            self._store.set(_FAILED, "")
            living = self._marked("alive", range(self.size))
        except RuntimeError:  # of the store itself
            return [] if _is_of_agent() else [dist.get_group_rank(self.group, 0)]
        # The store is gone with the process that has it, which may be the first to learn it.
        with suppress(RuntimeError):
            self._marked("told", living)
        return [rank for rank in range(self.size) if rank not in living]

    def _marked(self, name: str, ranks: Sequence[int]) -> list[int]:
        """Leave a mark; the ranks that have left theirs when all have, or the time is over."""
        self._store.set(f"fusestep/{name}/{self.rank}", "")
        end = time.monotonic() + min(_ANSWER, self._timeout)
        while True:
            present = [rank for rank in ranks if self._store.check([f"fusestep/{name}/{rank}"])]
            if len(present) == len(ranks) or time.monotonic() > end:
                return present
            time.sleep(0.02)

    def _is_failing(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check([_FAILED]))
        except RuntimeError:  # of the store itself
            return True


class TorchTransfer:
    """A transfer that torch.distributed has begun."""

    def __init__(self, communicator: TorchCommunicator, work: Any, arrays: Sequence[Any]) -> None:
        self._communicator, self._work, self._arrays = communicator, work, arrays

    def wait(self) -> None:
        if self._work is not None:
            self._communicator.finish(self._work, self._arrays)
            self._work, self._arrays = None, ()


def over_torch(group: Any = None, *, timeout: float = 300.0) -> TorchCommunicator:
    """The processes of a torch.distributed process group.

    An exchange that fails, because a process has ended, raises `LostProcessError` on all others;
    it names every rank that does not say within 10 seconds that it lives.

    Args:
        group: a process group that exchanges host arrays (gloo, mpi), and those of devices if it
            is to (``"cpu:gloo,cuda:nccl"``); None: the default one.
        timeout: seconds in which an exchange must be done, > 0; that of the group itself holds,
            too.

    Raises:
        RuntimeError: there is no default process group.
        TypeError: ``group`` is no process group.
        ValueError: this process does not belong to it, ``timeout`` is out of range, or it
            cannot exchange host arrays.

    >>> import torch.distributed as dist
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> comm = over_torch()
    >>> comm.rank, comm.size
    (0, 1)
    >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        fix = "; call torch.distributed.init_process_group first"
        reject(RuntimeError, _WHERE, "group", "is missing", "a process group", "none", fix)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        got = type(group).__name__
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            reject(ValueError, _WHERE, "group", "is foreign", "one of this process", "another")
        reject(TypeError, _WHERE, "group", "has a wrong type", "a process group", got)
    if "cpu" not in dist.get_backend_config(group):
        expected, got = "a backend for host arrays, such as gloo", dist.get_backend(group)
        reject(ValueError, _WHERE, "group", "is for devices", expected, got)
    seconds = check.number(_WHERE, "timeout", timeout)
    check.in_range(_WHERE, "timeout", seconds, seconds > 0, "above 0")
    return TorchCommunicator(group, seconds)


def _tensor(array: Any) -> torch.Tensor:
    """The bytes of a contiguous array, without a copy."""
    if isinstance(array, DeviceArray):
        return torch.as_tensor(array.memory(), device=f"cuda:{array.device}")
    return torch.from_numpy(as_bytes(array))


@contextmanager
def _stream_of(arrays: Sequence[Any]) -> Iterator[None]:
    """The stream of device arrays, for PyTorch's work on them: after what was enqueued before."""
    if not isinstance(arrays[0], DeviceArray):
        yield
        return
    with launching(arrays) as launch:
        handle = cuda.device.backend.handle_of(launch.stream)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, f"cuda:{arrays[0].device}")):
            yield


def _is_of_agent() -> bool:
    """Whether the store is kept by torchrun, not by the process of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
