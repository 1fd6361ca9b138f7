"""What is measured on a CUDA device: the points of ``python -m fusestep.bench.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from . import indices, model_shapes, traffic
from .errors import BenchError
from .result import OURS
from .stats import Ratio, Summary, ratio

LARGE = (1 << 26, 1 << 28)  # elements of dense steps
ROWS, WIDTH, BATCH = 10**7, 128, 10**6
DISTRIBUTIONS = ("zipf1.05", "zipf1.2")
SORTED = (10**5, 10**6, 10**7)
SMALL = 200  # tensors
LEAST_ELEMENTS, LEAST_ROWS = 1 << 16, 1 << 10
COPY_BYTES = 1 << 31
_OF_FREE = 0.9  # what arrays may take of the memory that is free
_OF_COPIES = 0.125  # what either array of the copies may take of it

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
POWERS = {"beta1_power": 0.9, "beta2_power": 0.999}
SCALARS = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8)  # in the order of a call
TORCH = "torch fused"


@dataclass(frozen=True)
class Target:
    """What was aimed at.

    Args:
        text: in words.
        reached: what was measured, in the unit of ``limit``.
        limit: what it should be at least, or with ``at_most`` at most.
        at_most: which of both.
    """

    text: str
    reached: float
    limit: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached <= self.limit if self.at_most else self.reached >= self.limit


@dataclass
class Point:
    """What was measured of one case in one size.

    Args:
        case: its name.
        size: the sizes.
        bytes: by label, what a step must move; missing where that says nothing.
        device: by label, seconds of a step on the device.
        host: by label, seconds that it took to enqueue a step.
        ahead: by label, the share of samples in which the device did not wait for the host.
        copy: bytes a second of the fastest copy, read and written, in this measurement.
        targets: what was aimed at.
        notes: what a reader should know.
    """

    case: str
    size: dict[str, int]
    bytes: dict[str, int]
    device: dict[str, Summary]
    host: dict[str, Summary]
    ahead: dict[str, float]
    copy: float | None = None
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_copy(self, label: str) -> float:
        """Which share of the speed of a copy a contestant has reached."""
        assert self.copy is not None
        return self.bytes[label] / self.device[label].median / self.copy

    def against(self, label: str) -> Ratio | None:
        """The time of a contestant by ours."""
        return ratio(self.device[label], self.device[OURS]) if label in self.device else None

    def aim(self, text: str, reached: float, limit: float, *, at_most: bool = False) -> None:
        """Add a target."""
        self.targets.append(Target(text, reached, limit, at_most))

    def aim_at_copy(self, label: str, limit: float) -> None:
        """Add a target that is a share of the speed of a copy."""
        self.aim(f"{label}: of the speed of a copy", self.of_copy(label), limit)

    def aim_at_torch(self) -> None:
        """Not slower than torch, where it was measured."""
        if found := self.against(TORCH):
            self.aim(f"time of {TORCH} by ours", found.value, 1.0)


class Bench:
    """A run: the device, how long a point may take, what is said on the way."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        from . import gpu_clock

        self.clock, self.seconds, self._say = gpu_clock, seconds, say
        n_bytes = min(COPY_BYTES, int(_OF_COPIES * gpu_clock.free_bytes()))
        unit = gpu_clock.COPY_UNIT
        self.copies = gpu_clock.Copies(max(unit, n_bytes // unit * unit))
        self.torch = _torch()
        self.cupy = _cupy()

    def note(self, point: Point, text: str) -> None:
        """Say something, and keep it with the results."""
        point.notes.append(text)
        self._say(f"{point.case}: {text}")

    def fits(self, wanted: int, bytes_of_one: float, least: int, apart: int = 0) -> int:
        """How many of so many elements fit into memory beside ``apart`` bytes.

        Raises:
            BenchError: not even the least number.
        """
        if self.torch is not None:
            self.torch.cuda.empty_cache()
        free = self.clock.free_bytes()
        n = min(wanted, int((_OF_FREE * free - apart) / bytes_of_one))
        if n < least:
            raise BenchError(f"{free / 1e9:.2f} GB of device memory are free: too little")
        return n

    def measure(
        self,
        case: str,
        size: dict[str, int],
        jobs: Mapping[str, Callable[[], object]],
        moved: Mapping[str, int],
        *,
        with_copies: bool = True,
    ) -> Point:
        """The times of the contestants, in turn with the copies."""
        all_jobs = {**jobs, **(self.copies.jobs if with_copies else {})}
        times = self.clock.interleave(all_jobs, self.seconds)
        point = Point(
            case,
            size,
            dict(moved),
            {label: timed.device for label, timed in times.items()},
            {label: timed.host for label, timed in times.items()},
            {label: timed.ahead for label, timed in times.items()},
        )
        if with_copies:
            point.copy = self.copies.bandwidth(times)
        return point


def _torch() -> Any:
    """PyTorch with CUDA, or None."""
    if find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def _cupy() -> Any:
    """CuPy, or None."""
    if find_spec("cupy") is None:
        return None
    import cupy

    return cupy


# ------------------------------------------------------------------------------------------ Dense


def _torch_adam(torch: Any, shapes: Sequence[Any], dtype: Any) -> Callable[[], object]:
    """A step of torch's fused Adam."""
    parameters = []
    for shape in shapes:
        parameter = torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_()
        parameter.grad = torch.randn(shape, dtype=dtype, device="cuda")
        parameters.append(parameter)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-8, fused=True)
    step: Callable[[], object] = optimizer.step
    return step


def dense_adam(bench: Bench, wanted: int, dtype: str) -> Point:
    """``nn.Adam`` on one large tensor; 16-bit parameters have float32 moments."""
    from .. import nn

    storage = np.dtype(np.float32) if dtype == "float32" else bench.clock.BFLOAT16
    n_bytes = 2 * storage.itemsize + 8
    # Torch keeps its moments in the type of the parameter, which is another task in 16 bit.
    torch = bench.torch if dtype == "float32" else None
    n = bench.fits(wanted, n_bytes * (2 if torch else 1), LEAST_ELEMENTS)
    parameter = nn.Parameter(bench.clock.new_array(n, dtype=storage), "w")
    optimizer = nn.Adam([parameter], 1e-3, state_dtype=np.float32)
    gradients = (bench.clock.normal_array(n, storage),)
    jobs: dict[str, Callable[[], object]] = {OURS: lambda: optimizer(gradients)}
    moved = {OURS: n * (2 * storage.itemsize + 16 + storage.itemsize)}
    if dtype == "float32":
        assert moved[OURS] == traffic.Traffic(updated=3).dense(n, 4)
    if torch:
        jobs[TORCH] = _torch_adam(torch, [n], torch.float32)
        moved[TORCH] = moved[OURS]
    point = bench.measure(f"dense/nn.Adam {dtype}", {"elements": n}, jobs, moved)
    if n < wanted:
        bench.note(point, f"{n} elements instead of {wanted}, for want of device memory")
    point.aim_at_copy(OURS, 0.93)
    point.aim_at_torch()
    return point


def dense_lamb(bench: Bench, wanted: int) -> Point:
    """``nn.Lamb``: one pass for the norms, one for the step."""
    from .. import nn

    n = bench.fits(wanted, 16, LEAST_ELEMENTS)
    parameter = nn.Parameter(bench.clock.normal_array(n), "w")
    optimizer = nn.Lamb([parameter], 1e-3)
    gradients = (bench.clock.normal_array(n),)
    moved = {OURS: traffic.Traffic(updated=3, passes=(4,)).dense(n, 4)}
    jobs = {OURS: lambda: optimizer(gradients)}
    return bench.measure("dense/nn.Lamb float32", {"elements": n}, jobs, moved)


def small_adam(bench: Bench, count: int) -> Point:
    """``nn.Adam`` on small tensors in one launch, and that kernel beside one that does nothing."""
    from .. import nn

    shapes = model_shapes.many_small(SMALL)[:count]
    parameters = [nn.Parameter(bench.clock.new_array(s), f"p{i}") for i, s in enumerate(shapes)]
    optimizer = nn.Adam(parameters, 1e-3)
    gradients = tuple(bench.clock.normal_array(shape) for shape in shapes)
    jobs: dict[str, Callable[[], object]] = {OURS: lambda: optimizer(gradients)}
    jobs |= _launches(bench, shapes)
    if bench.torch is not None:
        jobs[TORCH] = _torch_adam(bench.torch, shapes, bench.torch.float32)
    n = sum(shape[0] for shape in shapes)
    size = {"tensors": count, "elements": n}
    point = bench.measure(f"{count} small/nn.Adam float32", size, jobs, {}, with_copies=False)
    share = ratio(point.device["kernel alone"], point.device["empty kernel"])
    if count == SMALL:
        point.aim("kernel alone: time by that of an empty one", share.value, 2.0, at_most=True)
        point.aim_at_torch()
    return point


def _launches(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """The launch of a dense step alone, its table being there already; and an empty kernel's."""
    from numba import cuda

    from ..kernels.blocks import kernel
    from ..kernels.cuda import dense
    from ..kernels.cuda.memory import address_of, copy_in
    from ..kernels.rules import adam
    from ..kernels.storage import F32

    @cuda.jit
    def empty(table, n_tensors, guard):  # type: ignore[no-untyped-def]
        pass

    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    arrays = [[bench.clock.new_array(shape) for _ in range(4)] for shape in shapes]
    addresses = np.zeros((len(shapes), 4), np.int64)
    addresses[:, :3] = [[int(address_of(a)) for a in tensor[:3]] for tensor in arrays]
    gradients = np.array([int(address_of(tensor[3])) for tensor in arrays])
    sizes = np.array([shape[0] for shape in shapes])
    hp = np.array([adam.adam_hp(np.float32, **ADAM, **POWERS)], np.float32)
    on_device, stream = cuda.device_array(hp.nbytes, np.uint8), cuda.default_stream()
    hp_address = int(address_of(on_device))
    hp_addresses = np.full(len(shapes), hp_address)
    rows, n_blocks = dense.table_of(compiled, addresses, gradients, sizes, hp_addresses)
    room = cuda.device_array(rows.nbytes, np.uint8)
    place = int(address_of(room))
    copy_in(hp_address, hp, stream)
    copy_in(place, rows, stream)
    keep = (arrays, on_device, room)
    loop = dense.dense_kernel(compiled)

    def launch(function: Any, keep: Any = keep) -> None:
        del keep  # its memory is used as long as this can be called
        function[n_blocks, dense.THREADS, stream](place, len(rows), 0)

    return {"kernel alone": partial(launch, loop), "empty kernel": partial(launch, empty)}


# ------------------------------------------------------------------------------------------- Rows


@dataclass(frozen=True)
class Tables:
    """A table with its moments and a row-sparse gradient.

    Args:
        arrays: parameter and moments.
        values: of the gradient.
        drawn: its indices, on the host.
        indices: on the device.
    """

    arrays: tuple[Any, Any, Any]
    values: Any
    drawn: np.ndarray
    indices: Any

    @property
    def size(self) -> dict[str, int]:
        """For the report."""
        n, d = self.arrays[0].shape
        unique = int(np.unique(self.drawn).size)
        return {"rows": n, "width": d, "occurrences": self.drawn.size, "different rows": unique}


def _tables(bench: Bench, distribution: str) -> Tables:
    """As large as they should be, or as memory allows."""
    from numba import cuda

    of_row = 3 * 4 * WIDTH + 16  # and what the sweep keeps of it
    of_batch = BATCH * (4 * WIDTH + 8)
    rest = of_batch + (1 << 29)  # the room of a step
    n = bench.fits(ROWS, of_row, LEAST_ROWS, rest)
    arrays = tuple(bench.clock.new_array((n, WIDTH)) for _ in range(3))
    drawn = indices.draw(distribution, n, BATCH)
    values = bench.clock.normal_array((BATCH, WIDTH))
    return Tables((arrays[0], arrays[1], arrays[2]), values, drawn, cuda.to_device(drawn))


def _row_point(
    bench: Bench,
    name: str,
    distribution: str,
    tables: Tables,
    jobs: Mapping[str, Callable[[], object]],
    moved: Mapping[str, int],
) -> Point:
    point = bench.measure(f"rows/ops.{name} {distribution}", tables.size, jobs, moved)
    n = tables.size["rows"]
    if n < ROWS:
        bench.note(point, f"{n} rows instead of {ROWS}, for want of device memory")
    return point


def all_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseAdam``, by the 24 bytes of each element alone."""
    from .. import ops

    tables, operator = _tables(bench, distribution), ops.FusedSparseAdam()

    def step() -> object:
        return operator(*tables.arrays, *SCALARS, tables.values, tables.indices)

    n, d = tables.arrays[0].shape
    name, moved = operator.name, {OURS: 24 * n * d}
    point = _row_point(bench, name, distribution, tables, {OURS: step}, moved)
    point.aim_at_copy(OURS, 0.85)
    return point


def lazy_rows(bench: Bench, distribution: str) -> Point:
    """``FusedSparseLazyAdam``, its grouping of rows and its update also alone.

    Its bytes: the gradient and the indices read once, 24 for each element of a row that occurs.
    """
    from .. import ops

    tables, operator = _tables(bench, distribution), ops.FusedSparseLazyAdam()

    def step() -> object:
        return operator(*tables.arrays, *SCALARS, tables.values, tables.indices)

    _, d = tables.arrays[0].shape
    unique = tables.size["different rows"]
    moved = {OURS: traffic.Traffic(updated=3).touched_rows(unique, d, BATCH, 4)}
    moved["update alone"] = moved[OURS]
    jobs: dict[str, Callable[[], object]] = {OURS: step, **_parts(tables)}
    if (torch := bench.torch) is not None:  # the same memory, but the keys are sorted by torch
        var, m, v, values, rows = (
            torch.as_tensor(a, device="cuda")
            for a in (*tables.arrays, tables.values, tables.indices)
        )
        jobs[f"{OURS}, sort of torch"] = lambda: operator(var, m, v, *SCALARS, values, rows)
    point = _row_point(bench, operator.name, distribution, tables, jobs, moved)
    point.aim_at_copy("update alone", 0.6)
    point.aim_at_copy(OURS, 0.4)
    return point


def _parts(tables: Tables) -> dict[str, Callable[[], object]]:
    """Of a lazy step: finding and sorting the keys, and the update by sorted ones."""
    from numba import cuda

    from ..kernels.blocks import kernel
    from ..kernels.cpu.row_step import RowTable
    from ..kernels.cuda import row_step
    from ..kernels.cuda.memory import address_of
    from ..kernels.cuda.row_table import sizes_of
    from ..kernels.rules import adam
    from ..kernels.storage import F32

    n, d = tables.arrays[0].shape
    w, m, v, values, rows = (
        int(address_of(a)) for a in (*tables.arrays, tables.values, tables.indices)
    )
    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    hp = np.array([adam.adam_hp(np.float32, **ADAM, **POWERS)], np.float32)
    one = [RowTable(w, m, v, 0, 0, n, d, rows, 8, tables.drawn.size, values)]
    sizes, stream = sizes_of(one, drop=False), cuda.default_stream()
    step = row_step.Step(compiled, one, sizes, touched_only=True, sorts=True)
    room = cuda.device_array(step.size, np.uint8)
    step.place(int(address_of(room)))
    step.write_tables(hp, [0], stream)

    def group(keep: Any = room) -> int:
        del keep
        return step.sorted_keys(-1, (0, 0, 0), None, stream)

    keys = group()

    def update() -> None:
        step.sum_hot(keys, 0, stream)
        step.update_touched(keys, 0, 0, stream)

    return {"grouping alone": group, "update alone": update}


def sorts(bench: Bench, n: int) -> Point:
    """The sort of keys by their rows, the positions being in order; peers sort whole keys."""
    from numba import cuda

    from ..kernels.cuda.memory import address_of
    from ..kernels.cuda.sort import scratch_words, sort_keys

    n_rows = min(ROWS, 1 << 30)
    rows = indices.draw("zipf1.2", n_rows, n)
    bits, row_bits = max(1, (n - 1).bit_length()), max(1, (n_rows - 1).bit_length())
    keys = rows << bits | np.arange(n)
    given, stream = cuda.to_device(keys), cuda.default_stream()
    room = [cuda.device_array(words, np.int64) for words in (n, n, scratch_words(n))]
    source, ours, spare, scratch = (int(address_of(array)) for array in (given, *room))

    def own(keep: Any = room) -> None:
        del keep
        bench.clock.copy_on_device(ours, source, keys.nbytes)
        sort_keys(ours, spare, scratch, n, bits, row_bits, stream)

    jobs: dict[str, Callable[[], object]] = {OURS: own}
    if (torch := bench.torch) is not None:
        of_torch = torch.from_numpy(keys).cuda()
        jobs["torch.sort"] = lambda: torch.sort(of_torch)
    if (cupy := bench.cupy) is not None:
        of_cupy = cupy.asarray(keys)
        jobs["cupy.sort"] = lambda: cupy.sort(of_cupy)
    size = {"keys": n, "bits": row_bits}
    return bench.measure("sort of keys", size, jobs, {}, with_copies=False)


# ------------------------------------------------------------------------------------------ A run


def points() -> dict[str, Callable[[Bench], Point]]:
    """Every point by its name."""
    found: dict[str, Callable[[Bench], Point]] = {}
    for n in LARGE:
        for dtype in ("float32", "bfloat16"):
            found[f"dense/adam/{dtype}/{n}"] = partial(dense_adam, wanted=n, dtype=dtype)
    found[f"dense/lamb/{LARGE[0]}"] = partial(dense_lamb, wanted=LARGE[0])
    for count in (1, SMALL):
        found[f"small/adam/{count}"] = partial(small_adam, count=count)
    for name, run in (("all", all_rows), ("lazy", lazy_rows)):
        for distribution in DISTRIBUTIONS:
            found[f"rows/{name}/{distribution}"] = partial(run, distribution=distribution)
    for n in SORTED:
        found[f"sort/{n}"] = partial(sorts, n=n)
    return found
