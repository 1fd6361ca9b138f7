"""Communication over mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from ...ops.runtime.errors import reject
from ..base.arguments import check_kind
from .communicator import LostProcessError, as_bytes, row_bytes

_WHERE = "over_mpi"
_DUPLICATE = MPI.Comm.Create_keyval()  # of a communicator; their number is small


class MpiCommunicator:
    """The processes of an MPI communicator, made by `over_mpi`."""

    moves_device_arrays = False

    def __init__(self, communicator: MPI.Intracomm) -> None:
        # Of our own: messages of the caller cannot be taken for ours.
        duplicate: Any = communicator.Get_attr(_DUPLICATE)
        if duplicate is None:
            duplicate = communicator.Dup()
            communicator.Set_attr(_DUPLICATE, duplicate)
        self._communicator: MPI.Intracomm = duplicate
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._open: list[MpiTransfer] = []  # their arrays must stay, whether they are waited for

    def __deepcopy__(self, memo: Any) -> MpiCommunicator:
        """Return this communicator: a copy of a model talks to the same processes."""
        return self

    def all_to_all(
        self, sent: np.ndarray, counts: Sequence[int], received: np.ndarray,
        received_counts: Sequence[int],
    ) -> MpiTransfer:  # fmt: skip
        # In rows: counts of bytes may be too large for MPI.
        row = MPI.BYTE.Create_contiguous(row_bytes(sent)).Commit()
        parts = [
            [as_bytes(array), (list(of), [0, *accumulate(of)][:-1]), row]
            for array, of in ((sent, counts), (received, received_counts))
        ]
        return self._started(parts, self._communicator.Ialltoallv, row)

    def all_gather(self, sent: np.ndarray, received: np.ndarray) -> MpiTransfer:
        arrays = as_bytes(sent), as_bytes(received)
        return self._started(arrays, self._communicator.Iallgather)

    def broadcast(self, array: np.ndarray, root: int) -> MpiTransfer:
        row = MPI.BYTE.Create_contiguous(row_bytes(array)).Commit()
        content = [as_bytes(array), len(array) if array.ndim else 1, row]
        return self._started((content, root), self._communicator.Ibcast, row)

    def _started(
        self, arguments: Any, collective: Any, row: MPI.Datatype | None = None
    ) -> MpiTransfer:
        try:
            self._open = [transfer for transfer in self._open if not transfer.request.Test()]
            request = collective(*arguments)
        except MPI.Exception as error:
            raise LostProcessError(f"{_WHERE}: {error}") from error
        finally:
            if row is not None:
                row.Free()  # MPI keeps it until the exchange is done
        self._open.append(MpiTransfer(request, arguments))
        return self._open[-1]


class MpiTransfer:
    """A transfer that MPI has begun."""

    def __init__(self, request: MPI.Request, keep: Any) -> None:
        self.request, self._keep = request, keep

    def wait(self) -> None:
        try:
            self.request.Wait()
        except MPI.Exception as error:
            raise LostProcessError(f"{_WHERE}: {error}") from error
        self._keep = None


def over_mpi(communicator: Any = None) -> MpiCommunicator:
    """The processes of an MPI communicator.

    What happens when a process ends is the launcher's: ``mpiexec`` ends the others.

    Args:
        communicator: of mpi4py, within one group; None: ``MPI.COMM_WORLD``.

    Raises:
        TypeError: it is no such communicator.
        ValueError: it is the null communicator.

    >>> comm = over_mpi()
    >>> comm.rank < comm.size
    True
    """
    communicator = MPI.COMM_WORLD if communicator is None else communicator
    expected = "an intracommunicator of mpi4py"
    check_kind(_WHERE, "communicator", communicator, MPI.Intracomm, expected)
    if communicator == MPI.COMM_NULL:
        expected, got = "one that this process belongs to", "MPI.COMM_NULL"
        reject(ValueError, _WHERE, "communicator", "is foreign", expected, got)
    return MpiCommunicator(communicator)
