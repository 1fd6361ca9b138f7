"""Times one step against its bound and its peers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from . import bounds
from .cases import PeerForms, StepCase
from .measure import Contestant, ContestantLostError, Times, in_process, interleave
from .peer import Peers, Worker
from .result import CaseResult, Progress, Settings, fastest
from .stats import Target, speed_target
from .work import Work
from .workers.worker_protocol import Clock


def run(
    case: StepCase,
    settings: Settings,
    peers: Peers,
    progress: Progress,
    clock: Clock = time.perf_counter,
) -> CaseResult:
    """Measure the case."""
    work = case.setup()
    loops = bounds.jobs(work.bound, settings.threads) if work.bound else {}
    jobs = {**work.jobs, **{f"bound: {shape}": loop for shape, loop in loops.items()}}
    contestants = in_process(jobs, case.lead_in, case.steps, clock)
    rounds, done = settings.rounds(case.rounds), 0

    def on_round() -> None:
        nonlocal done
        done += 1
        progress(done, rounds + 1)

    progress(0, rounds + 1)
    others, missing = _peer_contestants(case, work, peers)
    times = interleave([*contestants, *others], rounds, on_round)
    _drop(case, peers)
    return _result(case, work, times, {**missing, **times.lost})


def label(peer: str, form: str) -> str:
    """How the times of a peer are named."""
    return f"{peer} {form}"


def _peer_contestants(
    case: StepCase, work: Work, peers: Peers
) -> tuple[list[Contestant], dict[str, str]]:
    """Contestants in the workers, set up and warm; and why the others are missing."""
    contestants, missing = [], {}
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as folder:
        files = _write(work, Path(folder), any(peers.worker(p.peer) for p in case.peers))
        for entry in case.peers:
            worker = peers.worker(entry.peer)
            for form in entry.forms:
                name = label(entry.peer, form)
                if worker is None:
                    missing[name] = peers.missing[entry.peer]
                    continue
                try:
                    worker.ask(_setup_request(entry, form, work, files))
                except ContestantLostError as error:
                    missing[name] = str(error)
                else:
                    contestants.append(_in_worker(name, worker, form, case))
    return contestants, missing


def _write(work: Work, folder: Path, wanted: bool) -> dict[str, list[str]]:
    """The inputs as files.

    Not as seeds: NumPy's Zipf numbers are not the same in every version of NumPy, and peers
    may need another one.
    """
    files: dict[str, list[str]] = {}
    for name, arrays in work.inputs.items() if wanted else ():
        files[name] = [str(folder / f"{name}{index}.npy") for index in range(len(arrays))]
        for path, array in zip(files[name], arrays, strict=True):
            np.save(path, array)
    return files


def _setup_request(
    entry: PeerForms, form: str, work: Work, files: dict[str, list[str]]
) -> dict[str, object]:
    return {
        "do": "setup",
        "form": form,
        "shapes": work.shapes,
        "inputs": files,
        "new_gradients": work.new_gradients,
        "warm_up": entry.warm_up,
    }


def _in_worker(name: str, worker: Worker, form: str, case: StepCase) -> Contestant:
    request = {"do": "sample", "form": form, "lead_in": case.lead_in, "steps": case.steps}
    return Contestant(name, lambda: float(worker.ask(request)["seconds"]))


def _drop(case: StepCase, peers: Peers) -> None:
    """Free the memory of the workers for the next case."""
    for name in {entry.peer for entry in case.peers}:
        worker = peers.worker(name)
        try:
            if worker is not None:
                worker.ask({"do": "drop"})
        except ContestantLostError:
            pass  # it has been said; the next case says it again


def _result(case: StepCase, work: Work, times: Times, missing: dict[str, str]) -> CaseResult:
    summaries = times.summaries
    ours = next(iter(work.jobs))
    bound = fastest(summaries, [name for name in summaries if name.startswith("bound: ")])
    moved = dict.fromkeys(work.jobs, work.bytes)
    if work.bound is not None:
        moved |= {name: work.bound.bytes for name in summaries if name.startswith("bound: ")}
    return CaseResult(
        name=case.name,
        summary=case.summary,
        ours=ours,
        times=summaries,
        targets=_targets(case, ours, bound, times),
        size=work.size,
        bytes_moved=moved,
        bound=bound,
        unavailable=missing,
    )


def _targets(case: StepCase, ours: str, bound: str | None, times: Times) -> list[Target]:
    """Of all our figures those to which a target belongs."""
    summaries = times.summaries
    targets = []
    if case.of_bound is not None and bound is not None:
        what, target = f"of {bound}", case.of_bound
        targets.append(speed_target(what, summaries[ours], summaries[bound], target, "%"))
    for entry in case.peers:
        if entry.target is None:
            continue
        labels = [label(entry.peer, form) for form in entry.forms]
        best = fastest(summaries, labels)
        theirs = summaries[best] if best is not None else None
        what = f"x {best or labels[0]}"
        targets.append(speed_target(what, summaries[ours], theirs, entry.target))
    return targets
