"""FusedSparseLazyAdam at no size costs suddenly more than the memory that it touches.

Uniform indices, where duplicates do not help. Each point may take 30 us and three times as
long as it takes to move the cache lines that it touches (`traffic.lazy_lines`) at the rate of
the fastest bound loop, measured in the same rounds. Every step gets other indices than the
one before, so its rows are not in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ... import ops
from ...kernels.cpu.threads import allocation
from .. import bounds
from ..cases import traffic
from ..cases.operators import SCALARS
from ..measure import in_rounds
from ..report.result import BOUND, Progress, SpecialResult, fastest
from ..workers.worker_protocol import Job, Turns

WIDTHS = (1, 16, 128, 1024)
BATCHES = tuple(10**k for k in range(7))
MAX_TABLE, MAX_GRADIENT, MIN_ROWS = 2**26, 2**27, 1000
SWEEP = 2**24  # elements of the bound
FIXED, FACTOR = 30e-6, 3.0
ROUNDS = 9
SETS = 4  # of indices, for a point
VARIABLES = 3


def allowed(lines: float, bytes_per_second: float) -> float:
    """Seconds that a step may take."""
    return FIXED + FACTOR * lines * traffic.LINE / bytes_per_second


def sizes() -> Iterator[tuple[int, int, list[int]]]:
    """Of each width D the number of rows N of its table, and the batches that fit."""
    for D in WIDTHS:
        batches = [B for B in BATCHES if B <= MAX_GRADIENT // D]
        yield D, max(MIN_ROWS, MAX_TABLE // D), batches


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all points."""
    # Room for the bound loops, too, whatever the widths; all of it starts on cache lines.
    memory = [allocation.full((MAX_TABLE,), 0.0, np.float32) for _ in range(VARIABLES)]
    gradient = allocation.full((MAX_GRADIENT,), 1.0, np.float32)
    sweep = bounds.Stream(tuple(array[:SWEEP] for array in memory), (gradient[:SWEEP],))
    operator: Any = ops.FusedSparseLazyAdam()
    for done, (D, N, batches) in enumerate(sizes()):
        tables = [array[: N * D].reshape(N, D) for array in memory]
        loops = bounds.jobs((sweep,), threads)
        jobs = {f"{BOUND}{shape}": job for shape, job in loops.items()}
        lines = {}
        for B in batches:
            rng, g = np.random.default_rng(B), gradient[: B * D].reshape(B, D)
            sets = [rng.integers(0, N, B) for _ in range(SETS)]
            lines[B] = traffic.lazy_lines(sets[0], D)  # of the others much the same
            steps = (partial(operator, *tables, *SCALARS.values(), g, rows) for rows in sets)
            jobs[f"D={D} B={B}"] = Turns().job([Job(step) for step in steps])

        def tell(rounds: int, done: int = done) -> None:
            progress((done + rounds / ROUNDS) / len(WIDTHS))

        times = in_rounds(jobs, ROUNDS, on_round=tell)
        bound = fastest(times, [label for label in times if label.startswith(BOUND)])
        assert bound is not None
        result.times[f"D={D} {bound}"] = times[bound]
        for B in batches:
            label = f"D={D} B={B}"
            result.times[label] = time = times[label]
            limit = allowed(lines[B], sweep.bytes / times[bound].median)
            shares = {"of_allowed": time.median / limit, "of_allowed_p80": time.p80 / limit}
            point = {"D": D, "B": B, "N": N, "lines": lines[B], "allowed": limit, **shares}
            result.points.append(point)
