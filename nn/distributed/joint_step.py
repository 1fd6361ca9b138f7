"""Optimizers of several processes that take their steps together, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...kernels.keeping import STOCHASTIC
from ...ops.runtime.errors import message, reject
from ..base.arguments import check_kind
from ..base.numbers import item
from ..base.optimizer import Optimizer
from ..engine.plan import Plan
from ..fused import FusedOptimizer
from .agreement import agree, attempted
from .communicator import Communicator

_WHERE = "together"


class Agreement:
    """The steps of the optimizers of all processes: a `StepAgreement`."""

    def __init__(self, where: str, comm: Communicator, *, share_batches: bool) -> None:
        self._where, self.comm, self._share_batches = where, comm, share_batches

    def agreed(self, planned: Callable[[], Plan | None], step: int) -> Plan | None:
        """The step that this process has planned; None where any process skips it."""
        plan: Plan | None
        plan, error = attempted(planned)
        numbers = (plan is None, 0 if plan is None else self._digest(plan))
        subject = {"global_step": step}
        received = agree(self.comm, self._where, subject, error, numbers)
        # Before the hashes are compared: a process that skips has no plan to make one of.
        if received[:, 0].any():
            return None
        if (received[:, 1] != received[0, 1]).any():
            rank = int(np.argmax(received[:, 1] != received[0, 1]))
            what = f"rank {rank}: rates, decays, loss scale, options or batches"
            expected, got = "those of rank 0", "others"
            raise ValueError(message(self._where, what, "differ", expected, got))
        return plan

    def _digest(self, plan: Plan) -> int:
        """A hash of the numbers and options that all processes must have alike."""
        shared = (
            *(list(map(float, numbers)) for numbers in (plan.rates, plan.decays)),
            *(item(plan.conditioning.loss_scale), plan.skip_nonfinite, plan.touched_only),
            plan.conditioning.joins.tolist(),
            [rows.source.whole_length for rows in plan.given.rows] if self._share_batches else [],
        )
        return int.from_bytes(hashlib.sha256(repr(shared).encode()).digest()[:8], signed=True)


def together(optimizer: FusedOptimizer, comm: Communicator) -> None:
    """Let the optimizers of all processes step together; all processes call this.

    Each step, when it has been read and checked and before it is written, is agreed upon: an
    error on any process is raised by all of them, naming the rank, and a step that one skips
    (``skip_nonfinite``) is skipped by all; nothing has changed then. They all have to step as
    often, with the same learning rates, weight decays, loss scale and options. A copy of the
    optimizer steps by itself, until it is given to this.

    Args:
        optimizer: one of this package, with its parameters on the host. Its tables may be
            parts of larger ones (`RowShard`).
        comm: the processes.

    Raises:
        TypeError: on a rank, it is no such optimizer; `thor` and others that prepare their
            gradients by themselves are none.
        ValueError: on a rank, its parameters are on a device, or it has ``clipnorm`` or
            ``rounding="stochastic"`` (no process knows the norm of a table in parts, or which of
            its rows are here); or the optimizers differ in class, options, states, or in name,
            dtype or row shape of a parameter. The error names the rank.

    >>> import numpy as np
    >>> from fusestep import nn
    >>> from fusestep.nn.distributed import alone, together
    >>> opt = nn.LazyAdam([np.ones((4, 2), np.float32)])
    >>> together(opt, alone())
    """
    join(optimizer, comm, share_batches=True)


def join(optimizer: FusedOptimizer, comm: Communicator, *, share_batches: bool) -> None:
    """Let an optimizer take its steps with those of other processes, as `together` does.

    With ``share_batches`` a parameter has a gradient in all processes or in none.
    """
    _, error = attempted(partial(_check, has_parts=share_batches), _WHERE, optimizer)
    agree(comm, _WHERE, _described(optimizer) if error is None else {}, error)
    where = type(optimizer).__name__
    optimizer.together = Agreement(where, comm, share_batches=share_batches)


def _described(optimizer: FusedOptimizer) -> dict[str, Any]:
    """The description of an optimizer that must be the same on all processes."""
    formula = optimizer.formula()
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": [str(p.name) for p in optimizer.parameters],
        "dtypes": [str(p.dtype) for p in optimizer.parameters],
        "shapes of rows": [list(p.shape[1:]) for p in optimizer.parameters],
        "states": {name: str(a.dtype) for name, a in optimizer.state_arrays().items()},
        "options": [optimizer.sparse_update, *map(repr, (formula.constants, formula.bases))],
        "rounding": [keeping and keeping.name for keeping in optimizer.keepings],
        "clipping": [repr(optimizer.clipvalue), repr(optimizer.clipnorm)],
        "global_step": int(optimizer.global_step[0]),
    }


def _check(where: str, optimizer: Any, *, has_parts: bool) -> None:
    check_kind(where, "optimizer", optimizer, FusedOptimizer, "a FusedOptimizer")
    if type(optimizer).construct is not FusedOptimizer.construct:
        expected, got = "one whose step is an update rule", type(optimizer).__name__
        reject(TypeError, where, "optimizer", "has a step of its own", expected, got)
    check_on_host(where, optimizer)
    if has_parts and optimizer.clipnorm is not None:
        expected, got = "one that does not: its tables may be parts of larger ones", "clipnorm"
        reject(ValueError, where, "optimizer", "clips by norms", expected, got)
    if has_parts and STOCHASTIC in optimizer.keepings:
        expected = "one that does not: it cannot tell which rows of a table are here"
        reject(ValueError, where, "optimizer", "rounds at random", expected, "stochastic")


def check_on_host(where: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose parameters these processes cannot send."""
    if any(p.is_on_device for p in optimizer.parameters):
        reject(ValueError, where, "optimizer", "is on a device", "parameters on the host", "CUDA")
