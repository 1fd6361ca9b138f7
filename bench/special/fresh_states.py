"""States that nobody has touched: what a large table costs until it trains.

In a fresh process with a table that has been written: `nn.LazyAdam` is made and takes steps with
65,536 indices each, drawn from a law of the process; in another, `numpy.full` makes arrays like its
two moments. Seconds of the construction with the first step, and of a later one (the median of
four); the resident memory counts from before the construction.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict

from ..cases.workloads import rows
from ..report.result import Progress, SpecialResult, tracked
from ..report.stats import Summary
from ..work import check_memory
from .first_step import figures_of

SIZES = ("10000000x32x65536", "30000000x32x65536")
FULL = "np.full"
LAWS = {
    "zipf, frequent rows first": "(rng.zipf(1.2, B) - 1) % N",
    "zipf, scattered": "(rng.zipf(1.2, B) - 1) % N * 2_654_435_761 % N",
    "uniform": "rng.integers(0, N, B)",
}
OF_FULL = 0.6  # what construction and first step may take in terms of it
LATER_STEP = ": a later step"
RUNS, _LATER = 3, 4
_SCRIPT = """
import json, time
import numpy as np
import psutil
from fusestep import nn
(N, D), B, rng = {shape}, {B}, np.random.default_rng(0)
memory = psutil.Process().memory_info
sets = [{law} for _ in range({later} + 1)]
table, values = np.ones((N, D), np.float32), np.ones((B, D), np.float32)
nn.LazyAdam([np.zeros((N, 1), np.float32)])([nn.RowTensor(sets[0], values[:, :1], (N, 1))])
before, times = memory().rss, [time.perf_counter()]
{make}
for indices in sets:
    {step}
    times.append(time.perf_counter())
first, *later = np.diff(times)
print(json.dumps([first, float(np.median(later)), memory().rss - before]))
"""
_OURS = {
    "make": "optimizer = nn.LazyAdam([table])",
    "step": "optimizer([nn.RowTensor(indices, values, (N, D))])",
}
_PLAIN = {"make": "arrays = [np.full((N, D), 0.0, np.float32) for _ in range(2)]", "step": "pass"}


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure each in turn.

    Raises:
        BenchError: the machine has not enough memory for the largest, or a process failed.
    """
    check_memory(result.name, SIZES)
    scripts = {FULL: {**_PLAIN, "law": "np.arange(B)"}}
    scripts |= {name: {**_OURS, "law": law} for name, law in LAWS.items()}
    samples: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as folder:
        todo = [(size, kind) for size in SIZES for _ in range(RUNS) for kind in scripts]
        for size, kind in tracked(todo, progress):
            (tensor,) = rows(size, "uniform")
            given = {"shape": tensor.shape, "B": tensor.B, "later": _LATER, **scripts[kind]}
            found = figures_of(result.name, _SCRIPT.format(**given), folder, threads)
            samples[size, kind].append(found)
    for (size, kind), figures in samples.items():
        first, later, resident = zip(*figures, strict=True)
        result.times[label := f"{size} {kind}"] = Summary.of(first)
        (tensor,) = rows(size, "uniform")
        N, D = tensor.shape
        result.points.append({"N": N, "D": D, "GB": max(resident) / 1e9})
        if kind != FULL:
            result.times[f"{label}{LATER_STEP}"] = Summary.of(later)
            result.limits[label] = OF_FULL * result.times[f"{size} {FULL}"].median
