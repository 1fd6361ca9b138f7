"""The parts of a lazy Adam step on a CUDA device, and its sort of keys.

The step on a table of 10^7 rows of 128, of which a batch names 10^6, its grouping of rows and its
update alone; and the sort of keys by their rows, the positions being in order. PyTorch and CuPy,
where they are installed, sort whole keys.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import ops
from ...kernels.tables import RowSource, RowTable
from ..cases import indices
from ..cases.operators import SCALARS
from ..cases.subject import clock
from ..report.result import OURS, Progress, SpecialResult, tracked
from ..workers.worker_protocol import Job
from .far_rows import GROUPING, STEP, UPDATE, lazy_adam

ROWS, WIDTH, BATCH = 10**7, 128, 10**6
DISTRIBUTIONS = ("zipf1.05", "zipf1.2")
SORTED = (10**5, 10**6, 10**7)
_SECONDS = 1.0  # of a measurement


def run(result: SpecialResult, _threads: int, progress: Progress) -> None:
    """Measure all parts, then all sorts."""
    point = import_module("..gpu.point", __package__)
    todo: list[tuple[Any, str, Any]] = [(parts, f"{name}: ", name) for name in DISTRIBUTIONS]
    todo += [(sorts, f"sort of {n:,} keys: ", n) for n in SORTED]
    for make, label, argument in tracked(todo, progress):
        times, _ = point.in_turn(make(argument), _SECONDS, lambda _: None)
        result.times.update({f"{label}{name}": time for name, time in times.summaries.items()})


def parts(distribution: str) -> dict[str, Job]:
    """``FusedSparseLazyAdam``, finding and sorting its keys, and its update by sorted ones."""
    from numba import cuda

    from ...kernels.cuda.device.backend import address_of
    from ...kernels.cuda.device.part import LaunchContext
    from ...kernels.cuda.rows.step import RowStep

    operator: Any = ops.FusedSparseLazyAdam()
    put = clock().put
    variables = [clock().zeros((ROWS, WIDTH)) for _ in range(3)]
    values = put(np.random.default_rng(1).standard_normal((BATCH, WIDTH), np.float32))
    ids = put(indices.draw(distribution, ROWS, BATCH))
    compiled, numbers = lazy_adam()
    scalars = put(np.array([numbers], np.float32))
    *arrays, source, rows = (int(address_of(a)) for a in (*variables, values, ids))
    table = RowTable(
        tuple(arrays),
        ROWS,
        WIDTH,
        RowSource(indices=rows, index_bytes=8, length=BATCH, values=source),
    )
    step = RowStep(compiled, [table], touched_only=True)
    scratch = cuda.device_array(step.scratch_bytes, np.uint8)
    words = cuda.device_array(step.n_words, np.int64)
    words.copy_to_device(step.words(int(address_of(words)), [int(address_of(scalars))]))
    call = LaunchContext(cuda.default_stream(), scratch=int(address_of(scratch)))

    def group(keep: Any = (scalars, scratch, words)) -> None:
        del keep  # its memory is used as long as this can be called
        step.sort(call)

    group()
    return {
        STEP: Job(lambda: operator(*variables, *SCALARS.values(), values, ids)),
        GROUPING: Job(group),
        UPDATE: Job(lambda: step.update(call)),
    }


def sorts(n: int) -> dict[str, Job]:
    """The sort of so many keys, here and in other libraries."""
    from numba import cuda

    from ...kernels.cuda.device.backend import address_of
    from ...kernels.cuda.rows.sort import scratch_words, sort_keys

    bits, row_bits = max(1, (n - 1).bit_length()), max(1, (ROWS - 1).bit_length())
    keys = indices.draw("zipf1.2", ROWS, n) << bits | np.arange(n)
    room = [cuda.device_array(words, np.int64) for words in (n, n, scratch_words(n))]
    given, stream = clock().put(keys), cuda.default_stream()
    source, ours, spare, scratch = (int(address_of(array)) for array in (given, *room))

    def own(keep: Any = (given, room)) -> None:
        del keep
        clock().copy_on_device(ours, source, keys.nbytes)
        sort_keys(ours, spare, scratch, n, bits, row_bits, stream)

    jobs = {OURS: Job(own)}
    torch = import_module("..gpu.point", __package__).torch_of_device()
    if torch is not None:
        of_torch = torch.from_numpy(keys).cuda()
        jobs["torch.sort"] = Job(lambda: torch.sort(of_torch))
    if find_spec("cupy"):
        cupy: Any = import_module("cupy")
        of_cupy = cupy.asarray(keys)
        jobs["cupy.sort"] = Job(lambda: cupy.sort(of_cupy))
    return jobs
