"""A point set up: arrays, our step on them, its bound, and what peers need to do the same.

Parameters (but those of LARS) and states start at zero: moments that start elsewhere and decay
untouched end as subnormal numbers, which are slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from . import bounds, machine
from .bounds import Gather, Pass, Rows, Stream
from .buffers import Buffers
from .cases import torch, workloads
from .cases.steps import Point
from .cases.subject import DTYPES, Prepare, written_zeros
from .cases.workloads import Kind, Tensors
from .errors import BenchError
from .report.result import BOUND, OURS
from .workers.worker_protocol import Case, Job, Parameter, in_turn

# Buffers that are used in turn come to so many times the last cache. Below an eighth of one, a
# step is so short that a training loop would find its arrays in the cache, too.
_ROTATE_TO, _CACHED_BELOW = 3.0, 0.125


@dataclass(frozen=True)
class Inputs:
    """The arrays that ours and every peer start from."""

    parameters: list[Parameter]  # with their gradients
    bytes: int  # what a step must move, by the formula of the `Use`
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
    case, dtype, turns = point.case, DTYPES[point.dtype], itertools.count()

    def sets_of(prepare: Prepare) -> list[Buffers]:
        return [Buffers(prepare, case.use, dtype, given.parameters) for _ in range(given.copies)]

    def job(sets: list[Buffers]) -> Job:
        return in_turn([s.job(fresh=given.fresh) for s in sets], turns)

    ours = sets_of(case.subject.prepare)
    others = jobs_of_torch(point, given) if case.use.in_process else {}
    loops = [bounds.jobs(bound_of(s), point.threads) for s in ours]
    return {
        OURS: job(ours),
        **{label: in_turn(jobs, turns) for label, jobs in others.items()},
        **{
            f"{BOUND}{shape}": in_turn([jobs[shape] for jobs in loops], turns) for shape in loops[0]
        },
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
            total += use.bytes_moved("dense", itemsize, n=given.start.size)
            continue
        N, D = given.shape
        sizes = {"N": N, "D": D, "B": given.indices.size, "S": len(given.gradient)}
        kind: Kind = "rows" if given.bag is None else "pooled"
        total += use.bytes_moved(kind, itemsize, U=np.unique(given.indices).size, **sizes)
    return total


def bound_of(buffers: Buffers) -> list[Pass]:
    """Passes that move what a step must, on the same arrays where there is one tensor."""
    use, values, updated = buffers.use, buffers.values, buffers.prepared.updated
    indices = {k: index for k, index in enumerate(buffers.indices) if index is not None}
    dense = [k for k in range(len(buffers.indices)) if k not in indices]
    passes: list[Pass] = []
    offsets = [Stream(read=(of.offsets[1:],)) for of in buffers.bags]
    if use.looks_up:  # the rows of each table, side by side or pooled
        for k, index in indices.items():
            table = buffers.parameters[k]
            out = np.empty((len(values[0]), table.shape[1]), table.dtype)
            passes.append(Gather(index, table, out))
        passes += offsets
    if indices and (use.traffic.updated or not use.looks_up):
        # The gradient in order, of pooled rows one for all tables, then the tables.
        gradients = values if buffers.bags else [values[k] for k in indices]
        together = _joined(gradients), _joined([*indices.values()])
        passes += [*offsets, *(Stream(read=(array,)) for array in together)]
        for k, index in indices.items():
            if use.every_row:
                passes.append(Stream(updated[k]))
                continue
            rows, dtypes = np.unique(index), dict.fromkeys(a.dtype for a in updated[k])
            passes += [Rows(rows, tuple(a for a in updated[k] if a.dtype == d)) for d in dtypes]
    return passes + (_dense_passes(buffers, dense) if dense else [])


def _dense_passes(buffers: Buffers, places: list[int]) -> list[Stream]:
    """The passes before the update, then the update."""
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
