"""No size at which a row step suddenly costs more than the memory that it touches.

Uniform indices, where duplicates do not help. Each point may take 30 us and three times as
long as it takes to move the cache lines that it touches (`traffic.lazy_lines`) at the rate of
the fastest bound loop, measured in the same rounds. Every step gets other indices than the
one before, so its rows are not in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ... import ops
from ...kernels.cpu.threads import allocation
from .. import bounds
from ..cases import traffic
from ..cases.operators import SCALARS
from ..cases.steps import NO_CLIFF
from ..measure import Plan, in_process, interleave, warm_up
from ..report.result import BOUND, Progress, SpecialResult, fastest
from ..report.stats import Summary
from ..workers.worker_protocol import Job, in_turn

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


def run(threads: int, progress: Progress) -> SpecialResult:
    """Measure all points."""
    # Room for the bound loops, too, whatever the widths.
    memory = [allocation.full((MAX_TABLE,), 0.0, np.float32) for _ in range(VARIABLES)]
    gradient = allocation.full((MAX_GRADIENT,), 1.0, np.float32)
    result = SpecialResult(NO_CLIFF.name, NO_CLIFF.summary, times={})
    sweep = bounds.Stream(tuple(array[:SWEEP] for array in memory), (gradient[:SWEEP],))
    for done, (D, N, batches) in enumerate(sizes()):
        points = {B: Point(memory, gradient, N, D, B) for B in batches}
        loops = bounds.jobs(bounds.Bound((sweep,)), threads)
        jobs = {f"{BOUND}{shape}": job for shape, job in loops.items()}
        jobs |= {_label(D, B): point.job for B, point in points.items()}
        contestants = in_process(jobs)
        warm_up(contestants)
        plan = Plan(ROUNDS, 1, dict.fromkeys(jobs, 1))
        times = interleave(contestants, plan, on_round=_share_of(progress, done)).summaries
        bound = fastest(times, [label for label in times if label.startswith(BOUND)])
        assert bound is not None
        _add(result, D, points, times, bound, sweep.bytes)
    return result


def _share_of(progress: Progress, done: int) -> Callable[[int], None]:
    """Tells the progress within one of the widths."""
    return lambda rounds: progress((done + rounds / ROUNDS) / len(WIDTHS))


class Point:
    """A table, a batch size, and some sets of indices.

    Args:
        memory: of the variables; starts on a cache line.
        gradient: of the gradient; likewise.
        N, D, B: rows, width, batch.
    """

    def __init__(
        self, memory: list[np.ndarray], gradient: np.ndarray, N: int, D: int, B: int
    ) -> None:
        w, m, v = (array[: N * D].reshape(N, D) for array in memory)
        g = gradient[: B * D].reshape(B, D)
        rng = np.random.default_rng(B)
        sets = [rng.integers(0, N, B) for _ in range(SETS)]
        self.rows = N
        self.lines = traffic.lazy_lines(sets[0], D)  # of the others much the same
        operator: Any = ops.FusedSparseLazyAdam()
        scalars = tuple(SCALARS.values())
        self.job = in_turn([Job(partial(operator, w, m, v, *scalars, g, rows)) for rows in sets])


def _label(D: int, B: int) -> str:
    return f"D={D} B={B}"


def _add(
    result: SpecialResult,
    D: int,
    points: dict[int, Point],
    times: dict[str, Summary],
    bound: str,
    moved: int,
) -> None:
    """The points of one width, against the bound's bytes in a second."""
    rate = moved / times[bound].median
    result.times[f"D={D} {bound}"] = times[bound]
    for B, point in points.items():
        summary, limit = times[_label(D, B)], allowed(point.lines, rate)
        result.times[_label(D, B)] = summary
        result.points.append(
            {
                "D": D,
                "B": B,
                "N": point.rows,
                "lines": point.lines,
                "allowed": limit,
                "of_allowed": summary.median / limit,
                "of_allowed_p80": summary.p80 / limit,
            }
        )
