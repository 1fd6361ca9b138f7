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
from ...kernels.tables import RowTable
from ..cases import indices, model_shapes
from ..cases.traffic import Traffic
from ..report.result import OURS
from .clock import BFLOAT16, copy_on_device, new_array, normal_array
from .point import SMALL, TORCH, Bench, Point

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


def _torch_adam(torch: Any, shapes: Sequence[Any]) -> Callable[[], object]:
    """A step of torch's fused Adam."""
    parameters = []
    for shape in shapes:
        parameter = torch.zeros(shape, device="cuda").requires_grad_()
        parameter.grad = torch.randn(shape, device="cuda")
        parameters.append(parameter)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-8, fused=True)
    step: Callable[[], object] = optimizer.step
    return step


def dense_adam(bench: Bench, wanted: int, dtype: str) -> Point:
    """``nn.Adam`` on one large tensor; 16-bit parameters have float32 moments."""
    storage = np.dtype(np.float32) if dtype == "float32" else BFLOAT16
    # Torch keeps its moments in the type of the parameter, which is another task in 16 bit.
    torch = bench.torch if dtype == "float32" else None
    n = bench.fits(wanted, (2 * storage.itemsize + 8) * (2 if torch else 1), LEAST_ELEMENTS)
    make = partial(nn.Adam, learning_rate=1e-3, state_dtype=np.float32)
    jobs: Jobs = {OURS: _step(make, [new_array(n, dtype=storage)])}
    moved = {OURS: n * (2 * storage.itemsize + 16 + storage.itemsize)}
    if torch:
        jobs[TORCH], moved[TORCH] = _torch_adam(torch, [n]), moved[OURS]
    size = {"elements": n}
    point = bench.measure(f"dense/nn.Adam {dtype}", size, jobs, moved, ("elements", wanted))
    point.aim_at_copy(OURS, 0.93)
    point.aim_at_torch()
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
    if bench.torch is not None:
        jobs[TORCH] = _torch_adam(bench.torch, shapes)
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
    if (torch := bench.torch) is not None:  # the same memory, but the keys are sorted by torch
        var, m, v, values, rows = (
            torch.as_tensor(a, device="cuda")
            for a in (*tables.arrays, tables.values, tables.indices)
        )
        jobs[f"{OURS}, sort of torch"] = lambda: operator(var, m, v, *_SCALARS, values, rows)
    point = tables.measure(bench, f"{operator.name} {distribution}", jobs, moved)
    point.aim_at_copy("update alone", 0.6)
    point.aim_at_copy(OURS, 0.4)
    return point


def _parts(tables: Tables) -> Jobs:
    """Of a lazy step: finding and sorting the keys, and the update by sorted ones."""
    n, d = tables.arrays[0].shape
    w, m, v, values, rows = (
        int(address_of(a)) for a in (*tables.arrays, tables.values, tables.indices)
    )
    compiled, hp = _compiled_adam()
    one = [RowTable((w, m, v), 0, n, d, rows, 8, tables.drawn.size, values)]
    step = RowStep(compiled, one, touched_only=True, sorts=True)
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
