"""A point set up: arrays, our step on them, its bound, and what peers need to do the same.

Parameters (but those of LARS) and states start at zero: moments that start elsewhere and decay
untouched end as subnormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from . import machine
from .bounds import Bound, Gather, Rows, Stream
from .buffers import Buffers
from .cases import traffic, workloads
from .cases.steps import Point
from .cases.subject import DTYPES, Prepared, written_zeros
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


def check_memory(name: str, sizes: Sequence[str]) -> None:
    """Check that there is enough for tables of these sizes with Adam's two moments.

    Raises:
        BenchError: there is not.
    """
    largest = max(workloads.rows(size, "uniform").elements for size in sizes)
    if missing := enough_memory(3 * DTYPES["float32"].itemsize * largest):
        raise BenchError(f"{name}: {missing}")


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
        beside: by label, the same steps of other libraries in this process.
    """

    turns: Turns
    job: Job
    bounds: list[Bound]
    beside: dict[str, Job] = field(default_factory=dict)


def build(point: Point, given: Inputs) -> Work:
    """Set a point up."""
    case, dtype = point.case, DTYPES[point.dtype]
    turns = Turns()

    def sets_of(prepare: Callable[[list[np.ndarray]], Prepared]) -> list[Buffers]:
        return [
            Buffers(prepare, case.use, dtype, given.tensors, given.gradients)
            for _ in range(given.copies)
        ]

    def job(sets: list[Buffers]) -> Job:
        return turns.job([s.job(fresh=given.fresh) for s in sets])

    ours = sets_of(case.subject.prepare)
    others = case.use.beside if point.dtype == "float32" else {}
    return Work(
        turns=turns,
        job=job(ours),
        bounds=[bound_of(s) for s in ours],
        beside={label: job(sets_of(prepare)) for label, prepare in others.items()},
    )


def bytes_moved(point: Point, tensors: Sequence[Tensor], gradients: Sequence[Gradient]) -> int:
    """What a step of the point must move."""
    use, itemsize = point.case.use, DTYPES[point.dtype].itemsize
    total = 0
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient.indices is None:
            total += use.traffic.dense(tensor.size, itemsize)
            continue
        (N, D), B = tensor.shape, len(gradient.values)
        unique = np.unique(gradient.indices).size
        # What was counted for each row is an offset if that is one of a bag.
        ids = 0 if tensor.bag is None else traffic.INDEX * gradient.indices.size
        if use.looks_up:
            total += traffic.gathered(unique, D, B, itemsize) + ids
        if use.traffic.updated and use.every_row:
            total += use.traffic.every_row(N, D, B, itemsize) + ids
        elif use.traffic.updated:
            total += use.traffic.touched_rows(unique, D, B, itemsize) + ids
    return total


def bound_of(buffers: Buffers) -> Bound:
    """What the loops of a bound move, on the same arrays where there is one tensor."""
    passes: list[Stream | Rows | Gather] = []
    if buffers.use.looks_up:
        passes += _look_ups(buffers)
    if buffers.use.traffic.updated or not buffers.use.looks_up:
        kinds = [index is not None for index in buffers.indices]
        passes += [*_row_passes(buffers, kinds), *_dense_passes(buffers, kinds)]
    return Bound(tuple(passes))


def _look_ups(buffers: Buffers) -> list[Stream | Gather]:
    """The rows of each table, side by side or pooled."""
    passes: list[Stream | Gather] = []
    samples = len(buffers.values[0])
    for index, table in zip(buffers.indices, buffers.parameters, strict=True):
        assert index is not None
        passes.append(Gather(index, table, np.empty((samples, table.shape[1]), table.dtype)))
    return passes + [Stream(read=(of.offsets[1:],)) for of in buffers.bags]


def _row_passes(buffers: Buffers, is_sparse: list[bool]) -> list[Stream | Rows]:
    """The gradient in order, then the tables: whole, or the rows that occur."""
    passes: list[Stream | Rows] = [Stream(read=(of.offsets[1:],)) for of in buffers.bags]
    # Of pooled rows there is one array for all tables.
    values = [v for v, sparse in zip(buffers.values, is_sparse, strict=False) if sparse]
    indices = [index for index in buffers.indices if index is not None]
    if values:
        passes += [Stream(read=(_joined(values),)), Stream(read=(_joined(indices),))]
    for index, arrays in zip(buffers.indices, buffers.prepared.updated, strict=True):
        if index is None:
            continue
        if buffers.use.every_row:
            passes.append(Stream(arrays))
        else:
            rows, dtypes = np.unique(index), dict.fromkeys(array.dtype for array in arrays)
            passes += [Rows(rows, tuple(a for a in arrays if a.dtype == own)) for own in dtypes]
    return passes


def _dense_passes(buffers: Buffers, is_sparse: list[bool]) -> list[Stream]:
    places = [k for k, sparse in enumerate(is_sparse) if not sparse]
    if not places:
        return []
    moved = buffers.use.traffic
    updated = tuple(
        _joined([buffers.prepared.updated[k][j] for k in places]) for j in range(moved.updated)
    )
    gradient = _joined([buffers.values[k] for k in places])
    only_read = tuple(_joined([a]) for a in buffers.prepared.reads)
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
