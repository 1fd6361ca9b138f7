"""States that the processes of a data-parallel job divide among them (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base.arguments import check_kind
from ..base.optimizer import Optimizer
from ..fused import FusedOptimizer
from .agreement import agree, attempted
from .communicator import Communicator, as_bytes
from .joint_step import check_on_host, join

_WHERE = "ShardedStates"
_SMALL = 1 << 20  # bytes: smaller parameters travel in one piece


class ShardedStates:
    """An optimizer of which each process keeps the states of some parameters and updates those.

    Every parameter has an owner: the largest first, each goes to the process that has least.
    After a step each owner sends its parameters to the others. The numbers are those of one
    process with all states.

    Args:
        optimizer: one whose parameters are the same on all processes, on the host. The states of
            parameters of others are given up. A subclass of `Optimizer` that is no
            `FusedOptimizer` keeps all its states; the gradients of parameters of others are None.
        comm: the processes; all of them call this.

    Attributes:
        optimizer: the optimizer.
        owners: the rank of the owner of each parameter, in optimizer order.

    Raises:
        TypeError: on a rank, it is no optimizer.
        ValueError: on a rank, a parameter is on a device; or the optimizers differ. The error
            names the rank.

    Source: Rajbhandari, Rasley, Ruwase, He, ZeRO: Memory optimizations toward training trillion
    parameter models, SC 2020.

    >>> import numpy as np
    >>> from fusestep import nn
    >>> from fusestep.nn.distributed import ShardedStates, all_reduce, alone
    >>> opt = ShardedStates(nn.Adam([np.ones(3, np.float32)]), alone())
    >>> opt(all_reduce((np.ones(3, np.float32),), opt.comm))
    (True,)
    """

    def __init__(self, optimizer: Optimizer, comm: Communicator) -> None:
        _, error = attempted(_check, optimizer)
        params = [] if error else optimizer.parameters
        subject = {
            "parameters": [str(p.name) for p in params],
            "dtypes": [str(p.dtype) for p in params],
            "shapes": [list(p.shape) for p in params],
        }
        agree(comm, _WHERE, subject, error)
        if isinstance(optimizer, FusedOptimizer):
            join(optimizer, comm, share_batches=False)
        self.optimizer, self.comm = optimizer, comm
        self.owners = _dealt([p.size for p in params], comm.size)
        self._error_of_all: Exception | None = None
        self._own = [owner == comm.rank for owner in self.owners]
        if isinstance(optimizer, FusedOptimizer):
            optimizer.keep_states(self._own)
        optimizer.sends_parameters = self.send

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """One step with gradients that are the same on all processes, such as `all_reduce` gives.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError, OverflowError: as the optimizer's;
                with a `FusedOptimizer` nothing has changed then, on any process.
            LostProcessError: a process has ended.
            Other errors of one that is no `FusedOptimizer` are raised by all, and the processes
            that had none have updated their parameters then.
        """
        if isinstance(gradients, list | tuple):  # what else it is, the optimizer says
            others = {k for k, is_own in enumerate(self._own) if not is_own}
            gradients = tuple(None if k in others else g for k, g in enumerate(gradients))
        if isinstance(self.optimizer, FusedOptimizer):  # they have agreed
            result, error = self.optimizer(gradients), None
        else:
            result, error = attempted(self.optimizer, gradients)
            if error is not None and error is self._error_of_all:  # of its `broadcast_params`
                raise error
        self._send(error)
        return result

    def send(self) -> None:
        """Each owner sends its parameters to all others: `Optimizer.broadcast_params`."""
        self._send(None)

    def _send(self, error: Exception | None) -> None:
        # A process with an error sends nothing, and the others would wait for it: so all hear of it
        # before the first broadcast.
        _, self._error_of_all = attempted(agree, self.comm, _WHERE, {}, error)
        if self._error_of_all is not None:
            raise self._error_of_all
        transfers = []
        small: dict[int, list[np.ndarray]] = {}
        for parameter, owner in zip(self.optimizer.parameters, self.owners, strict=True):
            array = parameter.array
            if array.nbytes < _SMALL:
                small.setdefault(owner, []).append(as_bytes(array))
            else:
                transfers.append(self.comm.broadcast(array, owner))
        for owner, arrays in small.items():
            packed = np.concatenate(arrays)
            self.comm.broadcast(packed, owner).wait()
            first = 0
            # An owner has its parameters: another thread may be in its next step with them.
            for array in arrays if owner != self.comm.rank else ():
                array[:] = packed[first : first + len(array)]
                first += len(array)
        for transfer in transfers:
            transfer.wait()


def _check(optimizer: Any) -> None:
    check_kind(_WHERE, "optimizer", optimizer, Optimizer, "an Optimizer")
    check_on_host(_WHERE, optimizer)


def _dealt(sizes: Sequence[int], n_processes: int) -> list[int]:
    """The owner of each parameter."""
    owners, loads = [0] * len(sizes), [0] * n_processes
    # Equal sizes stay in order and equal loads go to the lowest rank: all processes find the same
    # owners without asking each other.
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners
