"""What the tests of the benchmark share: small models, a clock of their own, made-up results."""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusestep import __main__ as main
from fusestep.bench import command
from fusestep.bench.cases import model_shapes, workloads
from fusestep.bench.cases import steps as cases
from fusestep.bench.cases.steps import Case, Point
from fusestep.bench.cases.torch import TORCH
from fusestep.bench.peer import Peers, Worker
from fusestep.bench.report import document
from fusestep.bench.report.result import OURS, SECONDS, PointResult, SpecialResult, Summary
from fusestep.bench.workers import worker_protocol
from fusestep.bench.workers.worker_protocol import Job
from helpers import in_turn

WORKERS = Path(worker_protocol.__file__).parent
EVERY_STEP = [
    (case, dtype)
    for case in cases.STEPS
    if find_spec("torch") or case.subject not in TORCH.values()
    for dtype in case.subject.dtypes
]
"""Cases with all types of their parameters; those of PyTorch where it is installed."""
_CHOSEN = in_turn(cases.SUBJECTS.values(), beside_float32=False)
SOME_STEPS = [
    one
    for one in EVERY_STEP
    if one[0].kind == "pooled" or (one[0].subject, np.dtype(one[1])) in _CHOSEN
]
"""With one."""
TINY = "900,100x8x50,3x20x8x10x5"


def refused_line(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """What the benchmark says, in one line, in the place of a measurement."""
    try:
        status = main.main(["bench", *given])
    except SystemExit as error:  # of argparse
        status = int(str(error.code))
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("fusestep bench: ")
    return line


def quiet(_: float) -> None:
    """A progress report that nobody reads."""


def use_small_models(
    put: Callable[[Any, str, Any], None], tables: int = 900, batch: int = 9000, width: int = 300
) -> None:
    """Give the models few, small tensors; ``put`` is `setattr` or a monkeypatch's."""
    shapes = [(9,), (width, 240), (3, 2, 2)]
    put(cases, "DENSE_MODELS", dict.fromkeys(cases.DENSE_MODELS, lambda: list(shapes)))
    for model in ("dlrm", "click_log"):
        put(model_shapes, f"{model}_tables", lambda: [(tables, 16), (7, 16)])
        put(model_shapes, f"{model}_dense", lambda: list(shapes))
    put(workloads, "_CLICKS", batch)
    put(workloads, "_BAG", 1)


def named(name: str) -> Case:
    """A case of the table."""
    (case,) = (case for case in cases.STEPS if case.name == name)
    return case


def point(
    name: str = "dense/nn.Adam", size: str = TINY, dtype: str = "float32", threads: int = 1,
    scenario: str = cases.LOOP,
) -> Point:  # fmt: skip
    """The only point of a case at this size."""
    (found,) = cases.points([named(name)], size, [dtype], [threads], ["zipf1.2"], [scenario])
    return found


def arguments(*options: str) -> argparse.Namespace:
    """Options as `command.main` takes them."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(options)


class FakeClock:
    """Time that passes only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    perf_counter = __call__
    """So that it can be the time of a module."""

    def job(self, seconds: float) -> Job:
        """Steps that take so long, after loads that must not be counted."""

        def step() -> None:
            self.now += seconds

        def load() -> None:
            self.now += 1000.0

        return Job(step, load)


def values_of(worker: Worker, form: str) -> list[np.ndarray]:
    """The parameters in a worker as they are now."""
    return list(worker.ask({"do": "values", "form": form})["arrays"])


# -- a made-up library ----------------------------------------------------------------------------

FAKE_WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(WORKERS)!r})
from worker_protocol import Job, Replica, serve

class Fake:
    version = "1.2.3"

    def __init__(self, threads):
        print("libraries print what they like, such as", threads)
        self.threads = threads

    def forms(self, algorithm, kind, dtype):
        if algorithm in ("small", "fails", "keeps"):
            return {{algorithm + " " + kind + " " + dtype: self.replica}}
        names = ["quick", "slow", "unknown", f"on {{self.threads}}"]
        return {{}} if algorithm == "adam-rows" else dict.fromkeys(names, self.replica)

    def replica(self, case):
        if case.form == "unknown":
            raise KeyError("no such form")
        if case.algorithm == "fails":
            raise MemoryError("too large")
        if case.form == "fatal":
            self.end()
        self.warm_up = 5 if case.algorithm == "small" else 0
        self.keeps_memory = case.algorithm == "keeps"
        values = [p.start - 2 * p.gradient * (case.form == "quick") for p in case.parameters]
        steps = {{"slow": lambda: time.sleep(0.05), "dies": self.end}}

        def step():
            for w, p in zip(values, case.parameters):
                w += p.gradient

        return Replica(Job(steps.get(case.form, step)), lambda: values)

    def end(self):
        sys.stderr.write("Segmentation fault\\n")
        sys.stderr.flush()
        os._exit(9)

serve(Fake)
"""
"""Its steps are very fast, very slow, or the end of it."""


# -- made-up results ------------------------------------------------------------------------------


def summary(median: float, spread: float = 0.1, samples: int = 9) -> Summary:
    """Percentiles that much below and above a median."""
    return Summary(median, median * (1 - spread), median * (1 + spread), samples)


def result(
    of: Point | None = None, from_memory: bool = True, memory: int | None = 4096, **times: float
) -> PointResult:
    """Times by label, underscores standing for spaces; by default 10 ms, in a point of its own."""
    found = {label.replace("_", " "): summary(value) for label, value in times.items()}
    found = {label.replace("bound ", "bound: "): value for label, value in found.items()}
    found.setdefault(OURS, summary(0.010))
    return PointResult(
        of or point(), bytes=450_000_000, sizes={"parameters": 1, "elements": 2**24},
        from_memory=from_memory, copies=1, times=found, memory=dict.fromkeys(found, memory),
        unavailable={})  # fmt: skip


def made_up(
    *results: PointResult | SpecialResult, load: float | None = 0.1,
    gpu: dict[str, Any] | None = None, **peers: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """A document of these results; ``versions`` and ``missing`` are those of its peers."""
    of_run = Peers({})
    of_run.versions = peers.get("versions", {})
    of_run.missing = peers.get("missing", {})
    data = document.document(results, SECONDS, of_run, load, gpu)
    document.check_schema(data)
    return data
