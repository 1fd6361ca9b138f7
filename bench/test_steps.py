"""``pytest bench/``: the cases under pytest-benchmark, each in a group with its bound.

What pytest-benchmark adds: ``--benchmark-compare`` with earlier runs of the same machine,
``--benchmark-autosave``, histograms. Ratios to peers come from ``fusestep bench`` only, since
they need interleaving.
"""

from __future__ import annotations

from typing import Any

import pytest
from fusestep import get_num_threads
from fusestep.bench.cases import indices
from fusestep.bench.cases import steps as cases
from fusestep.bench.cases.steps import Case, Point
from fusestep.bench.errors import BenchError
from fusestep.bench.measure import in_rounds
from fusestep.bench.report.result import BOUND, OURS, fastest
from fusestep.bench.work import build, inputs

_ROUNDS = 11


def _point(case: Case) -> Point:
    """At the default size, in float32."""
    threads = get_num_threads()
    (point,) = cases.points([case], None, ["float32"], [threads], [indices.DEFAULT], [cases.LOOP])
    return point


@pytest.mark.parametrize("case", cases.STEPS, ids=[case.name for case in cases.STEPS])
@pytest.mark.parametrize("what", ["step", "bound"])
def test_step(benchmark: Any, case: Case, what: str) -> None:
    """Median time of one step, or of the fastest shape of loop with its traffic."""
    point = _point(case)
    try:
        given = inputs(point)
    except BenchError as error:
        pytest.skip(str(error))
    jobs = build(point, given)
    label: str | None = OURS
    if what == "bound":  # the shape that is fastest in a few rounds
        times = in_rounds({name: loop for name, loop in jobs.items() if name.startswith(BOUND)}, 3)
        label = fastest(times, list(times))
    job = jobs[str(label)]
    benchmark.group = case.name
    benchmark.extra_info |= {"bytes": given.bytes, "copies": given.copies, **given.sizes}
    benchmark.pedantic(job.step, setup=job.load, rounds=_ROUNDS, warmup_rounds=3)
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info["GB/s"] = given.bytes / benchmark.stats.stats.median / 1e9
