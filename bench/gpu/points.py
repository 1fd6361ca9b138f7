"""The points of ``python -m fusestep.bench.gpu``: steps on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ... import nn, ops
from ...kernels.cuda.device.backend import address_of
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


class Kind(NamedTuple):
    """An optimizer of dense steps."""

    name: str  # of the class
    make: Callable[..., Any]  # the class of `nn`; its states are float32
    traffic: Traffic
    has_torch: bool = True  # `nn.torch` and PyTorch have it


_DECAYED = partial(nn.AdamWeightDecay, learning_rate=1e-3, weight_decay=0.01)
_KINDS = {
    "sgd": Kind("SGD", partial(nn.SGD, learning_rate=1e-3), Traffic(1)),
    "adam": Kind("Adam", partial(nn.Adam, learning_rate=1e-3, state_dtype=np.float32), Traffic(3)),
    "adamw": Kind("AdamW", partial(_DECAYED, state_dtype=np.float32), Traffic(3)),
    "lamb": Kind("nn.Lamb", partial(nn.Lamb, learning_rate=1e-3), Traffic(3, passes=(4,)), False),
    # Without a first moment; the others are of rows and columns.
    "adafactor": Kind("nn.AdaFactor", nn.AdaFactor, Traffic(1, passes=(1, 2)), False),
}


def large(bench: Bench, kind: str, wanted: int, dtype: str) -> Point:
    """An optimizer on one large tensor."""
    of, itemsize = _KINDS[kind], 4 if dtype == "float32" else 2
    states = of.traffic.updated - 1
    of_torch = 2 * (2 + states) * itemsize if bench.torch and of.has_torch else 0
    n = bench.fits(wanted, 2 * itemsize + 4 * states + of_torch, LEAST_ELEMENTS)
    height = n // MATRIX_WIDTH
    shape = (height, MATRIX_WIDTH) if kind == "adafactor" else (n,)
    return _dense(bench, f"dense/{of.name} {dtype}", of, [shape], dtype, ("elements", wanted))


def gpt2(bench: Bench) -> Point:
    """AdamW on the 148 tensors of GPT-2 small, in float32."""
    return _dense(bench, "model/AdamW GPT-2", _KINDS["adamw"], model_shapes.gpt2_small())


def small_adam(bench: Bench, count: int) -> Point:
    """Adam on small tensors."""
    shapes = model_shapes.many_small(SMALL)[:count]
    return _dense(bench, f"{count} small/nn.Adam float32", _KINDS["adam"], shapes)


def _dense(
    bench: Bench,
    case: str,
    kind: Kind,
    shapes: Sequence[tuple[int, ...]],
    dtype: str = "float32",
    wanted: tuple[str, int] | None = None,
) -> Point:
    """An optimizer of `nn`; those of ``nn.torch`` and PyTorch have states of ``dtype``."""
    storage = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    optimizer = kind.make([nn.Parameter(normal_array(s, storage), f"p{i}")
                           for i, s in enumerate(shapes)])  # fmt: skip
    gradients = tuple(normal_array(shape, storage) for shape in shapes)
    jobs: Jobs = {OURS: lambda: optimizer(gradients)}
    if bench.torch is not None and kind.has_torch:
        jobs |= _in_torch(bench.torch, kind.name, shapes, dtype)
    n = sum(int(np.prod(shape)) for shape in shapes)
    moved = dict.fromkeys(jobs, kind.traffic.dense(n, storage.itemsize))
    moved[OURS] += 2 * (kind.traffic.updated - 1) * (4 - storage.itemsize) * n
    return bench.measure(case, {"tensors": len(shapes), "elements": n}, jobs, moved, wanted)


def _in_torch(torch: Any, name: str, shapes: Sequence[tuple[int, ...]], dtype: str) -> Jobs:
    """A class of ``nn.torch`` and PyTorch's fused one, on tensors of PyTorch."""
    from ...nn import torch as fused

    def step(make: Any) -> Callable[[], object]:
        options = {"device": "cuda", "dtype": getattr(torch, dtype)}
        parameters = [torch.randn(shape, **options).requires_grad_() for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        found: Callable[[], object] = make(parameters, lr=1e-3).step
        return found

    ours, theirs = getattr(fused, name), partial(getattr(torch.optim, name), fused=True)
    return {NN_TORCH: step(ours), TORCH: step(theirs)}


# -- row-sparse steps, and sorts ------------------------------------------------------------------


def all_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseAdam``, by the 24 bytes of each element alone."""
    return _rows(bench, ops.FusedSparseAdam(), distribution, is_lazy=False)


def lazy_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseLazyAdam``, its grouping of rows and its update also alone.

    Its bytes: the gradient and the indices read once, 24 for each element of a row that occurs.
    """
    return _rows(bench, ops.FusedSparseLazyAdam(), distribution, is_lazy=True)


def _rows(bench: Bench, operator: Any, distribution: str, *, is_lazy: bool) -> Point:
    """An operator on a table as large as it should be, or as memory allows."""
    of_row = 3 * 4 * WIDTH + 16  # and what the sweep keeps of it
    of_batch = BATCH * (4 * WIDTH + 8)
    rest = of_batch + (1 << 29)  # the room of a step
    n = bench.fits(ROWS, of_row, LEAST_ROWS, rest)
    arrays = [new_array((n, WIDTH)) for _ in range(3)]
    drawn = indices.draw(distribution, n, BATCH)
    values, ids, unique = normal_array((BATCH, WIDTH)), cuda.to_device(drawn), np.unique(drawn).size
    jobs: Jobs = {OURS: lambda: operator(*arrays, *_SCALARS, values, ids)}
    moved = {OURS: 24 * n * WIDTH}
    if is_lazy:
        jobs |= _parts(arrays, values, ids)
        of_step = Traffic(updated=3).touched_rows(unique, WIDTH, BATCH, 4)
        moved = dict.fromkeys((OURS, "update alone"), of_step)
    size = {"rows": n, "width": WIDTH, "occurrences": BATCH, "different rows": int(unique)}
    case = f"rows/ops.{operator.name} {distribution}"
    return bench.measure(case, size, jobs, moved, ("rows", ROWS))


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


def _parts(arrays: Sequence[Any], gradient: Any, ids: Any) -> Jobs:
    """The parts of a lazy step: finding and sorting the keys, and the update by sorted ones."""
    n, d = arrays[0].shape
    w, m, v, values, rows = (int(address_of(a)) for a in (*arrays, gradient, ids))
    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    hp = np.array([adam.adam_scalars(np.float32, *_ADAM)], np.float32)
    one = [RowTable((w, m, v), 0, n, d, RowSource(rows, 8, ids.size, values))]
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
