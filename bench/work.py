"""A point set up: arrays, our step on them, its bound, and what peers need to do the same.

Parameters (but those of LARS) and states start at zero: moments that start elsewhere and decay
untouched end as subnormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from .. import ops
from . import machine
from .bounds import Bound, Gather, Rows, Stream
from .cases import traffic, workloads
from .cases.steps import Point
from .cases.subject import DTYPES, Prepared, Subject, Use, written_zeros
from .cases.workloads import Gradient, Tensor
from .errors import BenchError
from .workers.worker_protocol import Job, Turns

# Buffers that are used in turn come to so many times the last cache. Below an eighth of one, a
# step is so short that a training loop would find its arrays in the cache, too.
_ROTATE_TO, _CACHED_BELOW = 3.0, 0.125


@dataclass(frozen=True)
class Inputs:
    """What ours and every peer start from.

    Args:
        tensors: the parameters.
        gradients: of each of them.
        start: what every element of the parameters starts from.
        bytes: what a step must move, by the model of `traffic`.
        needed: bytes of one set of buffers, about.
        copies: how many sets of buffers take turns.
        from_memory: a step finds nothing of the one before in the cache.
    """

    tensors: tuple[Tensor, ...]
    gradients: list[Gradient]
    start: float
    bytes: int
    needed: int
    copies: int
    from_memory: bool

    @property
    def fresh(self) -> bool:
        """Each step gets new gradient arrays, as in a training loop; large ones take turns."""
        return not self.from_memory

    @property
    def sizes(self) -> dict[str, int]:
        """For the report."""
        sizes = {"parameters": len(self.tensors), "elements": sum(t.size for t in self.tensors)}
        rows = [gradient.indices for gradient in self.gradients if gradient.indices is not None]
        if rows:
            sizes["occurrences"] = sum(index.size for index in rows)
            sizes["different rows"] = sum(np.unique(index).size for index in rows)
        return sizes


def enough_memory(needed: int) -> str | None:
    """None, or what is missing for so many bytes.

    A part has to stay free: arrays are drawn and copied on the way.
    """
    available = psutil.virtual_memory().available
    if needed <= 0.7 * available:
        return None
    return f"needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB of memory are free"


def inputs(point: Point) -> Inputs:
    """What a point works on.

    Raises:
        BenchError: the machine has not enough memory for it.
    """
    workload = point.workload()
    needed = workload.elements * DTYPES[point.dtype].itemsize * (1 + point.case.use.traffic.updated)
    if missing := enough_memory(needed):
        raise BenchError(missing)
    gradients = workloads.gradients(workload)
    moved = bytes_moved(point, workload.tensors, gradients)
    cache = machine.last_cache_bytes()
    from_memory = moved >= _CACHED_BELOW * cache
    wanted = -(-int(_ROTATE_TO * cache) // moved) if from_memory else 1
    fitting = int(psutil.virtual_memory().available / 4 / needed)  # peers need memory, too
    copies = max(1, min(wanted, fitting))
    return Inputs(
        tensors=workload.tensors,
        gradients=gradients,
        start=point.case.use.start,
        bytes=moved,
        needed=needed,
        copies=copies,
        from_memory=from_memory,
    )


@dataclass(frozen=True)
class Work:
    """A point, set up.

    Args:
        turns: in which the steps and the bounds use the sets of buffers.
        job: our steps.
        bounds: what the bound loops move, one for each set of buffers.
    """

    turns: Turns
    job: Job
    bounds: list[Bound]


def build(point: Point, given: Inputs) -> Work:
    """Set a point up."""
    case, dtype = point.case, DTYPES[point.dtype]
    sets = [
        Buffers(case.subject, case.use, dtype, given.tensors, given.gradients)
        for _ in range(given.copies)
    ]
    turns = Turns()
    return Work(
        turns=turns,
        job=turns.job([s.job(fresh=given.fresh) for s in sets]),
        bounds=[s.bound() for s in sets],
    )


def bytes_moved(point: Point, tensors: Sequence[Tensor], gradients: Sequence[Gradient]) -> int:
    """What a step of the point must move."""
    use, itemsize = point.case.use, DTYPES[point.dtype].itemsize
    total = 0
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient.indices is None:
            total += use.traffic.dense(tensor.size, itemsize)
            continue
        (N, D), B = tensor.shape, gradient.indices.size
        unique = np.unique(gradient.indices).size
        if use.algorithm == "gather":
            total += traffic.gathered(unique, D, B, itemsize)
        elif use.every_row:
            total += use.traffic.every_row(N, D, B, itemsize)
        else:
            total += use.traffic.touched_rows(unique, D, B, itemsize)
    return total


class Buffers:
    """One set of buffers with our step on them.

    Args:
        subject: takes the steps.
        use: what it does with such gradients.
        dtype: of parameters and gradients.
        tensors: the parameters.
        gradients: of each of them.

    Attributes:
        parameters: the parameters.
        prepared: the subject on them.
    """

    def __init__(
        self,
        subject: Subject,
        use: Use,
        dtype: np.dtype[Any],
        tensors: Sequence[Tensor],
        gradients: Sequence[Gradient],
    ) -> None:
        self._use = use
        self._values = [gradient.values.astype(dtype) for gradient in gradients]
        self._indices = [_copied(gradient.indices) for gradient in gradients]
        self._shapes = [tensor.shape for tensor in tensors]
        self.parameters = [np.full(shape, use.start, dtype) for shape in self._shapes]
        self.prepared: Prepared = subject.prepare(self.parameters)

    def job(self, *, fresh: bool) -> Job:
        """Our step."""
        step, gradients = self.prepared.step, self._gradients(self._values)

        def load() -> None:
            nonlocal gradients
            gradients = self._gradients([values.copy() for values in self._values])

        return Job(lambda: step(gradients), load) if fresh else Job(lambda: step(gradients))

    def _gradients(self, values: Sequence[np.ndarray]) -> tuple[Any, ...]:
        return tuple(
            array if index is None else ops.RowTensor(index, array, shape)
            for array, index, shape in zip(values, self._indices, self._shapes, strict=True)
        )

    def bound(self) -> Bound:
        """What the loops of a bound move, on the same arrays where there is one tensor."""
        if self._use.algorithm == "gather":
            (table,), (index,), (out,) = self.parameters, self._indices, self._values
            assert index is not None
            return Bound((Gather(index, table, np.empty_like(out)),))
        kinds = [index is not None for index in self._indices]
        return Bound((*self._row_passes(kinds), *self._dense_passes(kinds)))

    def _row_passes(self, is_sparse: list[bool]) -> list[Stream | Rows]:
        """The gradient in order, then the tables: whole, or the rows that occur."""
        passes: list[Stream | Rows] = []
        values = [v for v, sparse in zip(self._values, is_sparse, strict=True) if sparse]
        indices = [index for index in self._indices if index is not None]
        if values:
            passes += [Stream(read=(_joined(values),)), Stream(read=(_joined(indices),))]
        for index, arrays in zip(self._indices, self.prepared.updated, strict=True):
            if index is None:
                continue
            if self._use.every_row:
                passes.append(Stream(arrays))
            else:
                passes.append(Rows(np.unique(index), arrays))
        return passes

    def _dense_passes(self, is_sparse: list[bool]) -> list[Stream]:
        places = [k for k, sparse in enumerate(is_sparse) if not sparse]
        if not places:
            return []
        moved = self._use.traffic
        updated = tuple(
            _joined([self.prepared.updated[k][j] for k in places]) for j in range(moved.updated)
        )
        gradient = _joined([self._values[k] for k in places])
        only_read = tuple(_joined([a]) for a in self.prepared.reads)
        reads = (gradient, *updated, *only_read)
        written = (np.empty_like(gradient),) * moved.written
        return [
            *(Stream(read=reads[:count]) for count in moved.passes),
            Stream(updated, (gradient, *only_read)[: moved.read], written),
        ]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """An array itself; in place of several, one as large as all of them."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return written_zeros(np.empty(sum(a.size for a in arrays), arrays[0].dtype))


def _copied(index: np.ndarray | None) -> np.ndarray | None:
    return None if index is None else index.copy()
