"""Row-sparse steps and sorts on a CUDA device, for ``python -m fusestep.bench.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cases import indices, traffic
from ..report.result import OURS
from .point import ADAM, Bench, Point

ROWS, WIDTH, BATCH = 10**7, 128, 10**6
LEAST_ROWS = 1 << 10
SCALARS = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8)  # in the order of a call


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
    from ... import ops

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
    from ... import ops

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

    from ...kernels.cuda.device.backend import address_of
    from ...kernels.cuda.device.part import LaunchContext
    from ...kernels.cuda.rows.step import RowStep
    from ...kernels.element import kernel
    from ...kernels.rules import adam
    from ...kernels.storage import F32
    from ...kernels.tables import RowTable

    n, d = tables.arrays[0].shape
    w, m, v, values, rows = (
        int(address_of(a)) for a in (*tables.arrays, tables.values, tables.indices)
    )
    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    hp = np.array([adam.adam_scalars(np.float32, *ADAM)], np.float32)
    one = [RowTable((w, m, v), 0, n, d, rows, 8, tables.drawn.size, values)]
    step = RowStep(compiled, one, touched_only=True, sorts=True)
    scalars, scratch = cuda.to_device(hp), cuda.device_array(step.scratch_bytes, np.uint8)
    table, hp_at = cuda.device_array(step.n_words, np.int64), np.array([address_of(scalars)])
    table.copy_to_device(step.words(int(address_of(table)), hp_at))
    call = LaunchContext(cuda.default_stream(), scratch=int(address_of(scratch)))

    def group(keep: Any = (scalars, scratch, table)) -> None:
        del keep
        step.sort(call)

    def update() -> None:
        step.update(call)

    group()
    return {"grouping alone": group, "update alone": update}


def sorts(bench: Bench, n: int) -> Point:
    """The sort of keys by their rows, the positions being in order; peers sort whole keys."""
    from numba import cuda

    from ...kernels.cuda.device.backend import address_of
    from ...kernels.cuda.rows.sort import scratch_words, sort_keys

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
