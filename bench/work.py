"""A point set up: arrays, our step on them, its bound, and what peers need to do the same.

Parameters (but those of LARS) and states start at zero: moments that start elsewhere and decay
untouched end as subnormal numbers, which are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from . import bounds, machine
from .bounds import Gather, Pass, Rows, Stream
from .buffers import Buffers
from .cases import torch, traffic, workloads
from .cases.steps import Point
from .cases.subject import DTYPES, Prepare, written_zeros
from .cases.workloads import Tensors
from .errors import BenchError
from .report.result import BOUND, OURS
from .workers.worker_protocol import Case, Job, Parameter, Turns

# Buffers that are used in turn come to so many times the last cache. Below an eighth of one, a
# step is so short that a training loop would find its arrays in the cache, too.
_ROTATE_TO, _CACHED_BELOW = 3.0, 0.125


@dataclass(frozen=True)
class Inputs:
    """The arrays that ours and every peer start from."""

    parameters: list[Parameter]  # with their gradients
    bytes: int  # what a step must move, by the model of `traffic`
    needed: int  # bytes of one set of buffers, about
    copies: int  # how many sets of buffers take turns
    from_memory: bool  # a step finds nothing of the one before in the cache

    @property
    def fresh(self) -> bool:
        """Each step gets new gradient arrays, as in a training loop; large ones take turns."""
        return not self.from_memory

    @property
    def sizes(self) -> dict[str, int]:
        """For the report."""
        sizes = {
            "parameters": len(self.parameters),
            "elements": sum(given.start.size for given in self.parameters),
        }
        rows = [given.indices for given in self.parameters if given.indices is not None]
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
    largest = max(_elements(workloads.rows(size, "uniform")) for size in sizes)
    if missing := enough_memory(3 * DTYPES["float32"].itemsize * largest):
        raise BenchError(f"{name}: {missing}")


def inputs(point: Point) -> Inputs:
    """The inputs of a point.

    Raises:
        BenchError: the machine has not enough memory for it.
    """
    tensors, use = point.tensors(), point.case.use
    needed = _elements(tensors) * DTYPES[point.dtype].itemsize * (1 + use.traffic.updated)
    if missing := enough_memory(needed):
        raise BenchError(missing)
    parameters = workloads.parameters(tensors, use.start)
    moved = bytes_moved(point, parameters)
    cache = machine.last_cache_bytes()
    from_memory = moved >= _CACHED_BELOW * cache
    wanted = -(-int(_ROTATE_TO * cache) // moved) if from_memory else 1
    fitting = int(psutil.virtual_memory().available / 4 / needed)  # peers need memory, too
    copies = max(1, min(wanted, fitting))
    return Inputs(parameters, moved, needed, copies, from_memory)


def _elements(tensors: Tensors) -> int:
    return sum(tensor.size for tensor in tensors)


def build(point: Point, given: Inputs) -> dict[str, Job]:
    """By label our steps, the same of other libraries in this process, and the loops of the bound.

    All of them take turns on the sets of buffers.
    """
    case, dtype, turns = point.case, DTYPES[point.dtype], Turns()

    def sets_of(prepare: Prepare) -> list[Buffers]:
        return [Buffers(prepare, case.use, dtype, given.parameters) for _ in range(given.copies)]

    def job(sets: list[Buffers]) -> Job:
        return turns.job([s.job(fresh=given.fresh) for s in sets])

    ours = sets_of(case.subject.prepare)
    others = jobs_of_torch(point, given) if case.use.in_process else {}
    loops = [bounds.jobs(bound_of(s), point.threads) for s in ours]
    return {
        OURS: job(ours),
        **{label: turns.job(jobs) for label, jobs in others.items()},
        **{f"{BOUND}{shape}": turns.job([jobs[shape] for jobs in loops]) for shape in loops[0]},
    }


def jobs_of_torch(point: Point, given: Inputs) -> dict[str, list[Job]]:
    """By label PyTorch's steps in this process, on sets of buffers of their own."""
    algorithm = str(point.case.use.algorithm)
    forms = torch.forms_here(algorithm, point.case.kind, point.dtype, point.threads)
    found = {}
    for form, make in forms.items():
        case = Case(algorithm, form, point.dtype, given.parameters, point.case.kind, given.fresh)
        found[f"{torch.SAME_PROCESS} {form}"] = [make(case).job for _ in range(given.copies)]
    return found


def bytes_moved(point: Point, parameters: Sequence[Parameter]) -> int:
    """Bytes that a step of the point must move."""
    use, itemsize = point.case.use, DTYPES[point.dtype].itemsize
    total = 0
    for given in parameters:
        if given.indices is None:
            total += use.traffic.dense(given.start.size, itemsize)
            continue
        (N, D), B = given.shape, len(given.gradient)
        unique = np.unique(given.indices).size
        # What was counted for each row is an offset if that is one of a bag.
        ids = 0 if given.bag is None else traffic.INDEX * given.indices.size
        if use.looks_up:
            total += traffic.gathered(unique, D, B, itemsize) + ids
        if use.traffic.updated and use.every_row:
            total += use.traffic.every_row(N, D, B, itemsize) + ids
        elif use.traffic.updated:
            total += use.traffic.touched_rows(unique, D, B, itemsize) + ids
    return total


def bound_of(buffers: Buffers) -> list[Pass]:
    """Passes that move what a step must, on the same arrays where there is one tensor."""
    passes: list[Pass] = []
    if buffers.use.looks_up:
        passes += _look_ups(buffers)
    if buffers.use.traffic.updated or not buffers.use.looks_up:
        kinds = [index is not None for index in buffers.indices]
        passes += [*_row_passes(buffers, kinds), *_dense_passes(buffers, kinds)]
    return passes


def _look_ups(buffers: Buffers) -> list[Pass]:
    """The rows of each table, side by side or pooled."""
    passes: list[Pass] = []
    samples = len(buffers.values[0])
    for index, table in zip(buffers.indices, buffers.parameters, strict=True):
        assert index is not None
        passes.append(Gather(index, table, np.empty((samples, table.shape[1]), table.dtype)))
    return passes + [Stream(read=(of.offsets[1:],)) for of in buffers.bags]


def _row_passes(buffers: Buffers, is_sparse: list[bool]) -> list[Pass]:
    """The gradient in order, then the tables: whole, or the rows that occur."""
    passes: list[Pass] = [Stream(read=(of.offsets[1:],)) for of in buffers.bags]
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
    joined: np.ndarray = written_zeros(np.empty(sum(a.size for a in arrays), arrays[0].dtype))
    return joined
