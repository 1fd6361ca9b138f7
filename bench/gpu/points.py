"""What is measured on a CUDA device: the points of ``python -m fusestep.bench.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from ... import nn, ops
from ...kernels.cuda.dense.step import Chunks, chunk_of, dense_kernel
from ...kernels.cuda.device.backend import address_of, copy_in
from ...kernels.cuda.device.part import LaunchContext
from ...kernels.cuda.rows.sort import scratch_words, sort_keys
from ...kernels.cuda.rows.step import RowStep
from ...kernels.element import kernel
from ...kernels.rules import adam
from ...kernels.storage import F32
from ...kernels.tables import RowSource, RowTable
from ..cases import indices, model_shapes
from ..cases.traffic import Traffic
from ..report.result import OURS
from .clock import BFLOAT16, copy_on_device, new_array, normal_array
from .point import NN_TORCH, SMALL, SPARSE_ADAM, TORCH, Bench, Point

LEAST_ELEMENTS, LEAST_ROWS = 1 << 16, 1 << 10
MATRIX_WIDTH = 4_096
ROWS, WIDTH, BATCH = 10**7, 128, 10**6
# Learning rate, decay, step, betas and epsilon, and powers of the betas.
_ADAM = (1e-3, 0.0, 1, (0.9, 0.999, 1e-8), (0.9, 0.999))
_SCALARS = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8)  # in the order of a call
Jobs = dict[str, Callable[[], object]]


# -- dense steps ----------------------------------------------------------------------------------


def _step(make: Callable[..., Any], parameters: Sequence[Any]) -> Callable[[], object]:
    """A step of an optimizer with normal gradients."""
    optimizer = make([nn.Parameter(array, f"p{i}") for i, array in enumerate(parameters)])
    gradients = tuple(normal_array(array.shape, array.dtype) for array in parameters)
    return lambda: optimizer(gradients)


def _of_torch(torch: Any, make: Callable[..., Any], tensors: Sequence[Any]) -> Callable[[], object]:
    """A step of an optimizer of PyTorch's kind with dense gradients."""
    parameters = [tensor.detach().requires_grad_() for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step: Callable[[], object] = make(parameters).step
    return step


def _beside_torch(bench: Bench, name: str, shapes: Sequence[Any], dtype: str) -> Jobs:
    """A class of ``nn.torch`` and PyTorch's fused one, on tensors of PyTorch."""
    torch = bench.torch
    if torch is None:
        return {}
    from ...nn import torch as fused

    def tensors() -> list[Any]:
        return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]

    ours, theirs = getattr(fused, name), partial(getattr(torch.optim, name), fused=True)
    return {
        NN_TORCH: _of_torch(torch, partial(ours, lr=1e-3), tensors()),
        TORCH: _of_torch(torch, partial(theirs, lr=1e-3), tensors()),
    }


# Of PyTorch's class: that of `nn`, and the states.
_KINDS: dict[str, tuple[str, Callable[..., Any], int]] = {
    "sgd": ("SGD", partial(nn.SGD, learning_rate=1e-3), 0),
    "adam": ("Adam", partial(nn.Adam, learning_rate=1e-3, state_dtype=np.float32), 2),
    "adamw": (
        "AdamW",
        partial(nn.AdamWeightDecay, learning_rate=1e-3, weight_decay=0.01, state_dtype=np.float32),
        2,
    ),
}


def dense(bench: Bench, kind: str, wanted: int, dtype: str) -> Point:
    """An optimizer on one large tensor; those of `nn` have float32 moments, torch's the tensor's.

    The moments of ``nn.torch`` are those of torch.
    """
    name, make, n_states = _KINDS[kind]
    storage = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    of_nn, of_torch = (2 * storage.itemsize + n_states * s for s in (4, storage.itemsize))
    n = bench.fits(wanted, of_nn + (2 * of_torch if bench.torch else 0), LEAST_ELEMENTS)
    jobs: Jobs = {
        OURS: _step(make, [new_array(n, dtype=storage)]),
        **_beside_torch(bench, name, [n], dtype),
    }
    moved = {
        label: n
        * (3 * storage.itemsize + 2 * n_states * (4 if label == OURS else storage.itemsize))
        for label in jobs
    }
    case = f"dense/{name} {dtype}"
    point = bench.measure(case, {"elements": n}, jobs, moved, ("elements", wanted))
    point.aim_at_copy(OURS, 0.93)
    if NN_TORCH in jobs:
        point.aim_at_copy(NN_TORCH, 0.93)
        point.aim_at_torch(NN_TORCH)
    return point


def gpt2(bench: Bench) -> Point:
    """AdamW on the 148 tensors of GPT-2 small, in float32."""
    shapes = model_shapes.gpt2_small()
    make = partial(nn.AdamWeightDecay, learning_rate=1e-3, weight_decay=0.01)
    jobs: Jobs = {
        OURS: _step(make, [new_array(shape) for shape in shapes]),
        **_beside_torch(bench, "AdamW", shapes, "float32"),
    }
    n = sum(int(np.prod(shape)) for shape in shapes)
    size = {"tensors": len(shapes), "elements": n}
    point = bench.measure("model/AdamW GPT-2", size, jobs, dict.fromkeys(jobs, 28 * n))
    point.aim_at_copy(OURS, 0.9)
    if NN_TORCH in jobs:
        point.aim_at_torch(NN_TORCH)
    return point


def dense_lamb(bench: Bench, wanted: int) -> Point:
    """``nn.Lamb``: one pass for the norms, one for the step."""
    n = bench.fits(wanted, 16, LEAST_ELEMENTS)
    jobs: Jobs = {OURS: _step(partial(nn.Lamb, learning_rate=1e-3), [normal_array(n)])}
    moved = {OURS: Traffic(updated=3, passes=(4,)).dense(n, 4)}
    return bench.measure("dense/nn.Lamb float32", {"elements": n}, jobs, moved)


def dense_adafactor(bench: Bench, wanted: int) -> Point:
    """``nn.AdaFactor`` on a matrix, without a first moment: three passes."""
    height = max(1, bench.fits(wanted, 8, LEAST_ELEMENTS) // MATRIX_WIDTH)
    n = height * MATRIX_WIDTH
    jobs: Jobs = {OURS: _step(nn.AdaFactor, [normal_array((height, MATRIX_WIDTH))])}
    moved = {OURS: Traffic(updated=1, passes=(1, 2)).dense(n, 4)}
    return bench.measure("dense/nn.AdaFactor float32", {"elements": n}, jobs, moved)


def small_adam(bench: Bench, count: int) -> Point:
    """``nn.Adam`` on small tensors; and the launch of its rule beside one that does nothing."""
    shapes = model_shapes.many_small(SMALL)[:count]
    make = partial(nn.Adam, learning_rate=1e-3)
    jobs: Jobs = {OURS: _step(make, [new_array(shape) for shape in shapes]), **_launches(shapes)}
    jobs |= _beside_torch(bench, "Adam", shapes, "float32")
    size = {"tensors": count, "elements": sum(shape[0] for shape in shapes)}
    point = bench.measure(f"{count} small/nn.Adam float32", size, jobs, {})
    if count == SMALL:
        empty = point.device["empty kernel"].median
        share = point.device["kernel alone"].median / empty
        point.aim("kernel alone: time by that of an empty one", share, 2.0, at_most=True)
        point.aim_at_torch()
    return point


def _launches(shapes: Sequence[tuple[int, ...]]) -> Jobs:
    """The launch of a dense step alone, its table being there already; and an empty kernel's."""

    @cuda.jit
    def empty(table, n_tensors, guard):  # type: ignore[no-untyped-def]
        pass

    compiled, hp = _compiled_adam()
    arrays = [[new_array(shape) for _ in range(4)] for shape in shapes]
    addresses = np.array([[int(address_of(a)) for a in tensor[:3]] for tensor in arrays])
    gradients = np.array([int(address_of(tensor[3])) for tensor in arrays])
    sizes = np.array([shape[0] for shape in shapes])
    on_device, stream = cuda.to_device(hp), cuda.default_stream()
    chunks = Chunks(chunk_of(compiled), np.column_stack([gradients, addresses]), sizes)
    words = chunks.words(np.full(len(shapes), int(address_of(on_device))))
    room = cuda.device_array(words.nbytes, np.uint8)
    place = int(address_of(room))
    copy_in(place, words, stream)
    loop = dense_kernel(compiled)

    def launch(function: Any, keep: Any = (arrays, on_device, room)) -> None:
        del keep  # its memory is used as long as this can be called
        chunks.launch(function, stream, place, chunks.n_tensors, 0)

    return {"kernel alone": partial(launch, loop), "empty kernel": partial(launch, empty)}


def _compiled_adam() -> tuple[Any, np.ndarray]:
    """The kernel of a float32 step, and its scalars."""
    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    return compiled, np.array([adam.adam_scalars(np.float32, *_ADAM)], np.float32)


# -- row-sparse steps, and sorts ------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """A table with its moments and a row-sparse gradient."""

    arrays: tuple[Any, Any, Any]  # parameter and moments
    values: Any  # of the gradient
    drawn: np.ndarray  # its indices, on the host
    indices: Any  # on the device

    @property
    def size(self) -> dict[str, int]:
        """For the report."""
        n, d = self.arrays[0].shape
        unique = int(np.unique(self.drawn).size)
        return {"rows": n, "width": d, "occurrences": self.drawn.size, "different rows": unique}

    def step(self, operator: Any) -> Callable[[], object]:
        """An operator on all of it."""
        return lambda: operator(*self.arrays, *_SCALARS, self.values, self.indices)

    def measure(self, bench: Bench, name: str, jobs: Jobs, moved: Mapping[str, int]) -> Point:
        """The times of jobs on it."""
        return bench.measure(f"rows/ops.{name}", self.size, jobs, moved, ("rows", ROWS))


def _tables(bench: Bench, distribution: str) -> Tables:
    """As large as they should be, or as memory allows."""
    of_row = 3 * 4 * WIDTH + 16  # and what the sweep keeps of it
    of_batch = BATCH * (4 * WIDTH + 8)
    rest = of_batch + (1 << 29)  # the room of a step
    n = bench.fits(ROWS, of_row, LEAST_ROWS, rest)
    w, m, v = (new_array((n, WIDTH)) for _ in range(3))
    drawn = indices.draw(distribution, n, BATCH)
    return Tables((w, m, v), normal_array((BATCH, WIDTH)), drawn, cuda.to_device(drawn))


def all_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseAdam``, by the 24 bytes of each element alone."""
    tables, operator = _tables(bench, distribution), ops.FusedSparseAdam()
    n, d = tables.arrays[0].shape
    jobs, moved = {OURS: tables.step(operator)}, {OURS: 24 * n * d}
    point = tables.measure(bench, f"{operator.name} {distribution}", jobs, moved)
    point.aim_at_copy(OURS, 0.85)
    return point


def lazy_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseLazyAdam``, its grouping of rows and its update also alone.

    Its bytes: the gradient and the indices read once, 24 for each element of a row that occurs.
    """
    tables, operator = _tables(bench, distribution), ops.FusedSparseLazyAdam()
    _, d = tables.arrays[0].shape
    bytes_ = Traffic(updated=3).touched_rows(tables.size["different rows"], d, BATCH, 4)
    moved = dict.fromkeys((OURS, "update alone"), bytes_)
    jobs: Jobs = {OURS: tables.step(operator), **_parts(tables)}
    point = tables.measure(bench, f"{operator.name} {distribution}", jobs, moved)
    point.aim_at_copy("update alone", 0.6)
    point.aim_at_copy(OURS, 0.4)
    return point


def table(bench: Bench, distribution: str, batch: int) -> Point:
    """``LazyAdam`` on a table of 10^6 x 64, beside torch's SparseAdam."""
    n, d = 10**6, 64
    drawn = indices.draw(distribution, n, batch)
    unique = int(np.unique(drawn).size)
    values, ids = normal_array((batch, d)), cuda.to_device(drawn)
    optimizer = nn.LazyAdam([nn.Parameter(new_array((n, d)), "table")], 1e-3)
    gradient = (nn.RowTensor(ids, values, (n, d)),)
    jobs: Jobs = {OURS: lambda: optimizer(gradient)}
    if (torch := bench.torch) is not None:
        from ...nn import torch as fused

        def of(make: Any) -> Callable[[], object]:
            parameter = torch.zeros(n, d, device="cuda", requires_grad=True)
            where = torch.from_numpy(drawn)[None].cuda()
            rows = torch.randn(batch, d, device="cuda")
            parameter.grad = torch.sparse_coo_tensor(where, rows, (n, d), check_invariants=False)
            step: Callable[[], object] = make([parameter], lr=1e-3).step
            return step

        jobs |= {NN_TORCH: of(fused.SparseAdam), SPARSE_ADAM: of(torch.optim.SparseAdam)}
    moved = dict.fromkeys((OURS,), Traffic(updated=3).touched_rows(unique, d, batch, 4))
    size = {"rows": n, "width": d, "occurrences": batch, "different rows": unique}
    return bench.measure(f"table/LazyAdam {distribution}", size, jobs, moved)


def bags(bench: Bench) -> Point:
    """26 tables of 10^5 x 64 with 20 ids in each of 2,048 bags: forward, and a step of LazyAdam."""
    n, d, batch, each, count = 10**5, 64, 2_048, 20, 26
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, n, batch * each) for _ in range(count)]
    tables = [nn.Parameter(new_array((n, d), 0.5), f"t{k}") for k in range(count)]
    pooled = nn.EmbeddingBags(tables, nn.LazyAdam(tables, 1e-3))
    ids = [cuda.to_device(own) for own in drawn]
    offsets = [cuda.to_device(np.arange(0, batch * each + 1, each))] * count
    out = normal_array((batch, count * d))

    def step() -> None:
        pooled(ids, offsets)
        pooled.backward(out)

    jobs: Jobs = {OURS: step, "forward alone": lambda: pooled(ids, offsets)}
    if (torch := bench.torch) is not None:
        functional, made = torch.nn.functional, torch.randn(batch, d, device="cuda")
        weights = [torch.zeros(n, d, device="cuda", requires_grad=True) for _ in range(count)]
        given = [torch.from_numpy(own).cuda().reshape(batch, each) for own in drawn]
        optimizer = torch.optim.SparseAdam(weights, lr=1e-3)

        def theirs() -> None:
            optimizer.zero_grad()
            for weight, own in zip(weights, given, strict=True):
                functional.embedding_bag(own, weight, mode="sum", sparse=True).backward(made)
            optimizer.step()

        jobs[SPARSE_ADAM] = theirs
    unique = sum(int(np.unique(own).size) for own in drawn)
    read = count * batch * (each * (4 * d + 8) + 4 * d)  # rows and ids, and the output is written
    step_bytes = count * batch * (4 * d + 8 * each) + 24 * d * unique
    moved = {OURS: read + step_bytes, "forward alone": read}
    size = {"tables": count, "rows": n, "width": d, "bags": batch, "ids of a bag": each}
    return bench.measure("bags/LazyAdam", size, jobs, moved)


def _parts(tables: Tables) -> Jobs:
    """Of a lazy step: finding and sorting the keys, and the update by sorted ones."""
    n, d = tables.arrays[0].shape
    w, m, v, values, rows = (
        int(address_of(a)) for a in (*tables.arrays, tables.values, tables.indices)
    )
    compiled, hp = _compiled_adam()
    one = [RowTable((w, m, v), 0, n, d, RowSource(rows, 8, tables.drawn.size, values))]
    step = RowStep(compiled, one, touched_only=True)
    scalars, scratch = cuda.to_device(hp), cuda.device_array(step.scratch_bytes, np.uint8)
    table, hp_at = cuda.device_array(step.n_words, np.int64), np.array([address_of(scalars)])
    table.copy_to_device(step.words(int(address_of(table)), hp_at))
    call = LaunchContext(cuda.default_stream(), scratch=int(address_of(scratch)))

    def group(keep: Any = (scalars, scratch, table)) -> None:
        del keep
        step.sort(call)

    group()
    return {"grouping alone": group, "update alone": lambda: step.update(call)}


def sorts(bench: Bench, n: int) -> Point:
    """The sort of keys by their rows, the positions being in order; peers sort whole keys."""
    n_rows = min(ROWS, 1 << 30)
    rows = indices.draw("zipf1.2", n_rows, n)
    bits, row_bits = max(1, (n - 1).bit_length()), max(1, (n_rows - 1).bit_length())
    keys = rows << bits | np.arange(n)
    given, stream = cuda.to_device(keys), cuda.default_stream()
    room = [cuda.device_array(words, np.int64) for words in (n, n, scratch_words(n))]
    source, ours, spare, scratch = (int(address_of(array)) for array in (given, *room))

    def own(keep: Any = (given, room)) -> None:
        del keep
        copy_on_device(ours, source, keys.nbytes)
        sort_keys(ours, spare, scratch, n, bits, row_bits, stream)

    jobs: Jobs = {OURS: own}
    if (torch := bench.torch) is not None:
        of_torch = torch.from_numpy(keys).cuda()
        jobs["torch.sort"] = lambda: torch.sort(of_torch)
    if (cupy := bench.cupy) is not None:
        of_cupy = cupy.asarray(keys)
        jobs["cupy.sort"] = lambda: cupy.sort(of_cupy)
    return bench.measure("sort of keys", {"keys": n, "bits": row_bits}, jobs, {})
