"""Steps on arrays of CUDA devices, enqueued on the stream of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..kernels.blocks import Kernel
from ..kernels.cpu.factored_layout import FactoredTensor
from ..kernels.cpu.row_step import RowTable
from ..kernels.factored_blocks import FactoredKernel
from ..kernels.storage import Piece, Storage
from . import locks, pending
from .device import DeviceArray, launching
from .stream_order import in_order


class Check(NamedTuple):
    """The guard of a call; addresses on the device.

    Attributes:
        guard: of the guard, or 0 for a call that cannot fail.
        base: added to a bad position.
        previous: of the guard of the call on which this one depends, or 0.
    """

    guard: int
    base: int = 0
    previous: int = 0


class Launch(NamedTuple):
    """Where and under which condition a call runs.

    Attributes:
        stream: of Numba.
        sorter: of the framework whose stream that is, or None.
        check: the guard of the call.
        complete: what changes the scalars of a dense step on the device, or None.
    """

    stream: Any
    sorter: Any
    check: Check = Check(0)
    complete: Callable[[np.ndarray], None] | None = None

    def after(self, positions: int) -> Launch:
        """The launch of a part of the call whose positions come after so many others."""
        return self._replace(check=self.check._replace(base=positions))


@contextmanager
def launch_on(
    arrays: Sequence[DeviceArray], lock_spans: list[locks.Span] | None
) -> Iterator[Launch]:
    """A launch on the stream of the first array; with ``lock_spans`` in order with others.

    Args:
        arrays: all that the call reads or writes.
        lock_spans: the memory that no other such call uses at the same time, or None.
    """
    with launching(arrays) as stream:
        order = nullcontext() if lock_spans is None else in_order(lock_spans, stream)
        with order:
            yield Launch(stream, arrays[0].framework.sorter(arrays[0].device))


def dense_update(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    hp_of: np.ndarray,
    launch: Launch,
) -> None:
    """Enqueue a dense step; arguments as `kernels.cuda.dense.dense_update`."""
    from ..kernels.cuda import dense

    dense.dense_update(
        kernel,
        addresses,
        gradients,
        sizes,
        hp,
        hp_of,
        guard=launch.check.guard,
        complete=launch.complete,
        stream=launch.stream,
    )


def adafactor_vectors(
    kernel: Kernel,
    addresses: np.ndarray,
    gradients: np.ndarray,
    sizes: np.ndarray,
    hp: np.ndarray,
    options: tuple[float, float, bool],
    launch: Launch,
) -> None:
    """Enqueue a step of Adafactor; arguments as `kernels.cuda.factored.vectors_update`."""
    from ..kernels.cuda import factored
    from ..kernels.cuda.sizes import Options

    factored.vectors_update(
        kernel,
        addresses,
        gradients,
        sizes,
        hp,
        Options(*options),
        guard=launch.check.guard,
        complete=launch.complete,
        stream=launch.stream,
    )


def adafactor_tables(kernel: FactoredKernel, tensors: Sequence[FactoredTensor]) -> Any:
    """The tables of matrices for `adafactor_matrices`."""
    from ..kernels.cuda.factored import length_of
    from ..kernels.cuda.factored_layout import FactoredTables

    return FactoredTables(tensors, length_of(kernel), kernel.real.itemsize)


def adafactor_matrices(
    kernel: FactoredKernel,
    tables: Any,
    gradients: np.ndarray,
    hp: np.ndarray,
    options: tuple[float, float, bool],
    launch: Launch,
) -> None:
    """Enqueue a step of Adafactor; arguments as `kernels.cuda.factored.matrices_update`."""
    from ..kernels.cuda import factored
    from ..kernels.cuda.sizes import Options

    factored.matrices_update(
        kernel,
        tables,
        gradients,
        hp,
        Options(*options),
        guard=launch.check.guard,
        complete=launch.complete,
        stream=launch.stream,
    )


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
    """Enqueue a row-sparse step; arguments as `kernels.cuda.row_step.row_update`."""
    from ..kernels.cuda import row_step

    row_step.row_update(
        kernel,
        tables,
        hp,
        hp_of,
        touched_only=touched_only,
        drop=drop,
        guard=launch.check.guard,
        base=launch.check.base,
        previous=launch.check.previous,
        sorter=launch.sorter,
        stream=launch.stream,
    )


@contextmanager
def trust_ratios(
    arrays: tuple[Storage, np.ndarray, Storage, np.ndarray, np.ndarray],
    decays: np.ndarray,
    rates: np.ndarray,
    options: tuple[float, float, float, bool],
    real: Storage,
    launch: Launch,
) -> Iterator[Callable[[np.ndarray], None]]:
    """The trust ratios of LARS; further arguments as `kernels.cuda.trust.trust_ratios`.

    Args:
        arrays: storage and addresses of the parameters, those of the gradients, and the sizes.
        decays: float64 ``[T]``: weight decays.
        rates: float64 ``[T]``: learning rates.
        options: coefficient, epsilon, loss scale, and whether ratios are clipped.
        real: the type of the arithmetic.
        launch: of the step.
    """
    from ..kernels.cuda.norm import DenseGradients
    from ..kernels.cuda.trust import Options, trust_ratios

    w, of_w, g, of_g, sizes = arrays
    parameters, gradients = DenseGradients(w, of_w, sizes), DenseGradients(g, of_g, sizes)
    with trust_ratios(
        parameters, gradients, decays, rates, Options(*options), real, launch.stream
    ) as complete:
        yield complete


def gather(
    table: DeviceArray,
    index: DeviceArray,
    n: int,
    out: DeviceArray,
    kept: DeviceArray,
    launch: Launch,
) -> None:
    """Enqueue the rows of ``table`` at ``n`` indices; see `kernels.cuda.gather.gather`."""
    from ..kernels.cuda.gather import gather as enqueue

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
    from ..kernels.cuda import row_step

    row_step.check_indices(tables, *launch.check, stream=launch.stream)


def all_finite(storage: Storage, addresses: np.ndarray, sizes: np.ndarray, launch: Launch) -> bool:
    """Whether arrays are finite; arguments as `kernels.cuda.finite.all_finite`."""
    from ..kernels.cuda import finite

    return finite.all_finite(storage, addresses, sizes, stream=launch.stream)


def bring_to_host(
    chunks: Sequence[Sequence[Piece]],
    work: Callable[[int, list[np.ndarray]], None],
    stream: Any,
) -> None:
    """Work on device arrays on the host; arguments as `kernels.cuda.staging.Staging.run`."""
    from ..kernels.cuda.staging import staging

    staging().run(chunks, work, stream)


@contextmanager
def checked(
    device: int, launch: Launch, error: Callable[[int, int], Exception] | None
) -> Iterator[Launch]:
    """``launch`` with a guard of its own, whose answer is waited for later.

    Args:
        device: where.
        launch: of the call.
        error: as `pending.Pending`; None for a call that cannot fail.
    """
    if error is None:
        yield launch
        return
    with pending.guarded(device) as guard:
        yield launch._replace(check=Check(guard.address))
        pending.add(guard, error)
