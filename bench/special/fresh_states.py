"""States that nobody has touched: what a large table costs until it trains.

In a fresh process with a table that has been written: `nn.LazyAdam` is made and takes steps with
65,536 indices each, drawn from a law of the process; in another, `numpy.full` makes arrays like its
two moments. Seconds of the construction with the first step, and of a later one (the median of
four); the resident memory counts from before the construction.
"""

from __future__ import annotations

import tempfile

from ..cases.steps import FRESH_STATES
from ..cases.workloads import rows
from ..errors import BenchError
from ..report.result import Progress, SpecialResult
from ..report.stats import Summary
from ..work import enough_memory
from .first_step import figures_of

SIZES = ("10000000x32x65536", "30000000x32x65536")
LAWS = {
    "zipf, frequent rows first": "(rng.zipf(1.2, B) - 1) % N",
    "zipf, scattered": "(rng.zipf(1.2, B) - 1) % N * 2_654_435_761 % N",
    "uniform": "rng.integers(0, N, B)",
}
FULL = "np.full"
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


def run(threads: int, progress: Progress) -> SpecialResult:
    """Measure each in turn.

    Raises:
        BenchError: the machine has not enough memory for the largest, or a process failed.
    """
    workloads = {size: rows(size, "uniform") for size in SIZES}
    if missing := enough_memory(3 * 4 * max(w.elements for w in workloads.values())):
        raise BenchError(f"{FRESH_STATES.name}: {missing}")
    kinds = {FULL: (_PLAIN, "np.arange(B)"), **{name: (_OURS, law) for name, law in LAWS.items()}}
    result = SpecialResult(FRESH_STATES.name, FRESH_STATES.summary, times={})
    samples: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as folder:
        todo = [(size, kind) for size in SIZES for _ in range(RUNS) for kind in kinds]
        for done, (size, kind) in enumerate(todo):
            progress(done / len(todo))
            (tensor,), (what, law) = workloads[size].tensors, kinds[kind]
            given = {"shape": tensor.shape, "B": tensor.B, "law": law, "later": _LATER, **what}
            script = _SCRIPT.format(**given)
            label = f"{size} {kind}"
            found = figures_of(FRESH_STATES.name, script, folder, threads)
            samples.setdefault(label, []).append(found)
    for size, kind in dict.fromkeys(todo):
        first, later, resident = zip(*samples[label := f"{size} {kind}"], strict=True)
        result.times[label] = Summary.of(first)
        (tensor,) = workloads[size].tensors
        point = {"N": tensor.shape[0], "D": tensor.shape[1], "GB": max(resident) / 1e9}
        if kind != FULL:
            result.times[f"{label}{LATER_STEP}"] = Summary.of(later)
            result.limits[label] = OF_FULL * result.times[f"{size} {FULL}"].median
        result.points.append(point)
    progress(1.0)
    return result
