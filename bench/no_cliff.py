"""No size at which a row step suddenly costs more than the memory that it touches.

Uniform indices, where duplicates do not help. Each point may take 30 us and three times as
long as it takes to move the cache lines that it touches (`traffic.lazy_lines`) at the rate of
the fastest bound loop, measured in the same rounds. Every step gets other indices than the
one before, so its rows are not in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import ops
from . import bounds, traffic
from .cases import NO_CLIFF
from .measure import in_process, interleave
from .result import CaseResult, Progress, Settings, fastest
from .stats import Summary, Target
from .work import DENSE, SCALARS
from .workers.worker_protocol import Job

WIDTHS = (1, 16, 128, 1024)
BATCHES = tuple(10**k for k in range(7))
MAX_TABLE, MAX_GRADIENT, MIN_ROWS = 2**26, 2**27, 1000
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


def run(settings: Settings, progress: Progress) -> CaseResult:
    """Measure all points."""
    # Room for the bound loops, too, whatever the widths.
    memory = [_aligned(MAX_TABLE, 0.0) for _ in range(VARIABLES)]
    gradient = _aligned(MAX_GRADIENT, 1.0)
    rounds = settings.rounds(ROUNDS)
    done, total = 0, len(WIDTHS) * (rounds + 1)
    progress(done, total)

    def on_round() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    result = CaseResult(NO_CLIFF.name, NO_CLIFF.summary, ours="", times={}, targets=[])
    sweep = bounds.Bound(tuple(array[:DENSE] for array in memory), gradient[:DENSE])
    for D, N, batches in sizes():
        points = {B: Point(memory, gradient, N, D, B) for B in batches}
        loops = bounds.jobs(sweep, settings.threads)
        contestants = in_process(loops, lead_in=1, steps=1)
        for B, point in points.items():
            contestants += in_process({_label(D, B): point.job}, 1, 3 if B < 100_000 else 1)
        times = interleave(contestants, rounds, on_round).summaries
        _add(result, D, points, times, fastest(times, list(loops)))
    return result


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
        operator = ops.FusedSparseLazyAdam()
        current = 0

        def load() -> None:
            nonlocal current
            current = (current + 1) % SETS

        self.job = Job(lambda: operator(w, m, v, *SCALARS, g, sets[current]), load)


def _aligned(size: int, value: float) -> np.ndarray:
    """Float32 numbers that have been written and start on a cache line."""
    raw = np.empty(size * traffic.FLOAT + traffic.LINE, np.uint8)
    start = -raw.ctypes.data % traffic.LINE
    array = raw[start : start + size * traffic.FLOAT].view(np.float32)
    array.fill(value)
    return array


def _label(D: int, B: int) -> str:
    return f"D={D} B={B}"


def _add(
    result: CaseResult,
    D: int,
    points: dict[int, Point],
    times: dict[str, Summary],
    bound: str | None,
) -> None:
    """The points of one width, and its target: the worst of them."""
    assert bound is not None
    moved = traffic.dense(DENSE, VARIABLES)
    rate = moved / times[bound].median
    result.times[f"D={D} bound: {bound}"] = times[bound]
    result.bytes_moved[f"D={D} bound: {bound}"] = moved
    found: list[dict[str, Any]] = []
    for B, point in points.items():
        summary, limit = times[_label(D, B)], allowed(point.lines, rate)
        result.times[_label(D, B)] = summary
        found.append(
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
    result.points.extend(found)
    worst = max(found, key=lambda point: float(point["of_allowed"]))
    result.targets.append(
        Target(
            what=f"D={D}: time / allowed, worst at B={worst['B']:,}",
            value=worst["of_allowed"],
            at_p80=max(point["of_allowed_p80"] for point in found),
            target=1.0,
            lower_is_better=True,
        )
    )
