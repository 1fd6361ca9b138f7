"""Steps on arrays of CUDA devices, enqueued on the stream of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ...kernels.element import Kernel
from ...kernels.storage import Piece, Storage
from ...kernels.tables import RowTable
from . import locks, pending
from .device import DeviceArray, cannot_be_captured, is_captured, launching
from .stream_order import in_order


class Check(NamedTuple):
    """The guard of a call; addresses on the device.

    Attributes:
        guard: of the guard, or 0 for a call that cannot fail.
        base: added to a bad position.
    """

    guard: int
    base: int = 0


class Launch(NamedTuple):
    """Where and under which condition a call runs.

    Attributes:
        stream: of Numba.
        sorter: of the framework whose stream that is, or None.
        check: the guard of the call.
        is_captured: whether it becomes part of a CUDA graph.
    """

    stream: Any
    sorter: Any
    check: Check = Check(0)
    is_captured: bool = False

    @property
    def call(self) -> Any:
        """The same for a part of a step (`kernels.cuda.device.part`)."""
        from ...kernels.cuda.device.part import Call

        return Call(self.stream, self.check.guard, self.sorter)

    def after(self, positions: int) -> Launch:
        """The launch of a part of the call whose positions come after so many others."""
        return self._replace(check=self.check._replace(base=positions))


@contextmanager
def launch_on(
    arrays: Sequence[DeviceArray],
    lock_spans: list[locks.Span] | None,
    *,
    can_be_captured: bool = False,
) -> Iterator[Launch]:
    """A launch on the stream of the first array; with ``lock_spans`` in order with others.

    Args:
        arrays: all that the call reads or writes.
        lock_spans: the memory that no other such call uses at the same time, or None.
        can_be_captured: whether the call may become part of a CUDA graph.

    Raises:
        RuntimeError: it would become part of one, and cannot.
    """
    from ...kernels.cuda.device.backend import is_capturing

    with launching(arrays) as stream:
        capturing = is_capturing(stream)
        if capturing and not (can_be_captured and lock_spans is None):
            raise cannot_be_captured()
        order = nullcontext() if lock_spans is None else in_order(lock_spans, stream)
        with order:
            sorter = arrays[0].framework.sorter(arrays[0].device)
            yield Launch(stream, sorter, is_captured=capturing)


def refuse_capture(variable: DeviceArray) -> None:
    """For a call that waits before it launches anything.

    Raises:
        RuntimeError: it would become part of a CUDA graph.
    """
    if is_captured(variable):
        raise cannot_be_captured()


def dense_update(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    hp_of: np.ndarray,
    launch: Launch,
) -> None:
    """Enqueue a dense step, in place.

    Args:
        kernel: the rule and its storage types.
        addresses: as `kernels.cuda.dense.chunks.Chunks`.
        gradients: likewise.
        sizes: likewise.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host. Those of a two-stage
            rule are completed on the device.
        hp_of: int64 ``[T]``: which row of ``hp`` a tensor uses; of a two-stage rule each its own.
        launch: where.
    """
    from ...kernels.cuda.dense.step import DenseStep
    from ...kernels.cuda.device.part import run

    run(DenseStep(kernel, addresses, gradients, sizes), hp, hp_of, launch.call)


def row_update(
    kernel: Kernel,
    tables: Sequence[RowTable],
    hp: np.ndarray,
    hp_of: Sequence[int],
    launch: Launch,
    *,
    touched_only: bool,
    drop: bool,
) -> None:
    """Enqueue a row-sparse step, in place.

    Args:
        kernel: the rule and its storage types.
        tables: at least one; their ``hp`` is not used.
        hp: ``[R, F]`` scalars in the type of the arithmetic, on the host.
        hp_of: which row of ``hp`` each table uses.
        launch: where.
        touched_only: as `kernels.cuda.rows.step.RowStep`.
        drop: likewise.
    """
    from ...kernels.cuda.device.part import run
    from ...kernels.cuda.rows.step import RowStep

    sorts, base = launch.sorter is None, launch.check.base
    step = RowStep(kernel, tables, touched_only=touched_only, drop=drop, sorts=sorts, base=base)
    run(step, hp, hp_of, launch.call)


def gather(
    table: DeviceArray,
    index: DeviceArray,
    n: int,
    out: DeviceArray,
    kept: DeviceArray,
    launch: Launch,
) -> None:
    """Enqueue the rows of ``table`` at ``n`` indices; see `kernels.cuda.gather.gather`."""
    from ...kernels.cuda.rows.gather import gather as enqueue

    n_rows = len(table)
    enqueue(
        table.address,
        n_rows,
        table.nbytes // max(1, n_rows),
        index.address,
        index.itemsize,
        n,
        out.address,
        kept.address,
        launch.check.guard,
        stream=launch.stream,
    )


def check_indices(tables: Sequence[RowTable], launch: Launch) -> None:
    """Enqueue the check of the indices of some tables."""
    from ...kernels.cuda.rows import step as row_step

    row_step.check_indices(tables, *launch.check, stream=launch.stream)


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, launch: Launch) -> bool:
    """Whether arrays are finite; arguments as `kernels.cuda.finite.all_finite`."""
    from ...kernels.cuda.dense import finite

    return finite.all_finite(storage, addresses, sizes, stream=launch.stream)


def bring_to_host(
    chunks: Sequence[Sequence[Piece]],
    work: Callable[[int, list[np.ndarray]], None],
    stream: Any,
) -> None:
    """Work on device arrays on the host; arguments as `kernels.cuda.staging.Staging.run`."""
    from ...kernels.cuda.device.staging import staging

    staging().run(chunks, work, stream)


@contextmanager
def checked(device: int, launch: Launch, error: pending.Error | None) -> Iterator[Launch]:
    """``launch`` with a guard of its own, whose answer is waited for later.

    Args:
        device: where.
        launch: of the call.
        error: as `pending.add`; None for a call that cannot fail.
    """
    if error is None:
        yield launch
        return
    with pending.guarded(device) as guard:
        yield launch._replace(check=Check(guard.address))
        pending.add(guard, error)
