"""Two versions of this package, or two results files, compared step by step."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from . import machine
from .cases.steps import Point
from .errors import BenchError
from .measure import ContestantLostError, measured
from .peer import Worker
from .point import company, in_worker, setup_request
from .report.document import same
from .report.result import OURS, Change, Progress, Summary, change, paired, ratio
from .work import inputs

# -P: the folder in which the user happens to be is no place to import from.
_WORKER = ("-P", "-m", "fusestep.bench.version_worker")
_PACKAGE = "fusestep"
_SHARED = "bench"  # what both versions get from the working tree
_OLD, _NEW = "before", "now"
Report = Callable[[str, int, int], Progress]


@dataclass(frozen=True)
class Changed:
    """A step then and now."""

    title: str  # of the point
    ratio: Summary | None  # its time now by its time then; None where there are not both
    reason: str = ""  # why

    @property
    def verdict(self) -> Change:
        """The verdict on the ratio."""
        assert self.ratio is not None
        return change(self.ratio)


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Changed]:
    """Two documents, point by point; they were not interleaved, so spreads are wide."""

    def ours(data: dict[str, Any]) -> dict[tuple[Any, ...], Summary | None]:
        return {
            (*same(p), p["scenario"]): Summary(**p["times"][OURS]) if OURS in p["times"] else None
            for p in data["points"]
        }

    old, found = ours(before), []
    for key, new in ours(now).items():
        title = " ".join(str(part) for part in key if part is not None)
        was = old.get(key)
        if was is None or new is None:
            found.append(Changed(title, None, "not in both results"))
        else:
            by = ratio(new, was)
            samples = min(new.samples, was.samples)
            found.append(Changed(title, Summary(by.value, by.low, by.high, samples)))
    return found


@contextmanager
def versions(ref: str) -> Iterator[tuple[Path, Path]]:
    """Folders from which Python imports the commit ``ref``, and the working tree as it is now.

    The first is a worktree of Git, which is removed in the end. The second is a copy of the
    files that Git knows or would add. Both get the benchmark of the working tree, so both take
    the same steps.

    Raises:
        BenchError: this is no checkout, or has no such commit.
    """
    root = machine.checkout_at_hand()
    if root is None:
        raise BenchError(
            f"--against {ref}: no such file, and to compare with a commit fusestep has to run "
            "from, or in, a Git checkout of it"
        )
    try:
        machine.git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except BenchError:
        text = f"--against: expected a results file or a commit, got {ref!r}"
        raise BenchError(text) from None
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as folder:
        old, new = (Path(folder) / name for name in (_OLD, _NEW))
        _copy(root, new / _PACKAGE)
        tree = old / _PACKAGE
        machine.git(root, "worktree", "add", "--quiet", "--detach", str(tree), ref)
        try:
            shutil.rmtree(tree / _SHARED, ignore_errors=True)
            shutil.copytree(new / _PACKAGE / _SHARED, tree / _SHARED)
            yield old, new
        finally:
            machine.git(root, "worktree", "remove", "--force", str(tree))


def _copy(root: Path, target: Path) -> None:
    names = machine.git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in names.split("\0"):
        if name.endswith((".py", ".json")) and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def measure(
    folders: tuple[Path, Path], points: Sequence[Point], seconds: float, report: Report
) -> Iterator[Changed]:
    """Every point in both versions, interleaved: before, now, before, now, ...

    Each has a fresh process of both, so that no point meets the memory of another one.
    """
    for done, point in enumerate(points):
        progress = report(point.title, done, len(points))
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name, folder in zip((_OLD, _NEW), folders, strict=True):
                try:
                    worker = Worker(_WORKER, sys.executable, point.threads, folder)
                except ContestantLostError as error:
                    text = f"--against: the version {name} does not start: {error}"
                    raise BenchError(text) from error
                workers[name] = stack.enter_context(closing(worker))
            changed = _compare(workers, point, seconds, progress)
        yield changed


def _compare(
    workers: dict[str, Worker], point: Point, seconds: float, progress: Progress
) -> Changed:
    try:
        given = inputs(point)
        request = setup_request(point.case.name, point, given)
        for worker in workers.values():
            worker.ask({**request, "form": OURS})
    except (BenchError, ContestantLostError) as error:
        return Changed(point.title, None, str(error))
    contestants = [in_worker(name, w, OURS, point.scenario) for name, w in workers.items()]
    # A turn has as many steps as there is time for.
    contestants = [replace(each, sample=partial(_mean, each.sample)) for each in contestants]
    with company(point.scenario):
        times = measured(contestants, point.scenario, seconds, progress, alike=True)
    if times.lost:
        return Changed(point.title, None, next(iter(times.lost.values())))
    return Changed(point.title, paired(times.samples[_NEW], times.samples[_OLD]))


def _mean(sample: Callable[[], Sequence[float]]) -> list[float]:
    return [fmean(sample())]
