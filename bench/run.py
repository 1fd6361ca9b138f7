"""Runs the chosen cases and reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
from rich.console import Console

from .. import set_num_threads
from . import document, first_step, machine, no_cliff, step_case, table
from .cases import CASES, NO_CLIFF, StepCase
from .peer import Peers, peers_of
from .result import CaseResult, Progress, Settings


def measure_and_report(
    names: list[str],
    threads: int,
    quick: bool,
    pythons: dict[str, str | None],
    path: Path | None,
) -> None:
    """Measure the named cases, print the tables, write the JSON file."""
    if path is not None:
        document.check_writable(path)
    settings, load = Settings(threads, quick), machine.load()
    with _threads(threads), peers_of(pythons, threads) as peers:
        with table.progress(Console(stderr=True)) as reports:
            results = [measure(name, settings, peers, reports[name]) for name in names]
        data = document.document(results, settings, peers, load)
    document.check_schema(data)
    table.show(data, Console())
    if path is not None:
        document.write(path, data)


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """The bound loops are Numba's own, so Numba has to know the number, too."""
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    set_num_threads(threads)
    try:
        yield
    finally:
        set_num_threads(None)
        numba.set_num_threads(before)


def measure(name: str, settings: Settings, peers: Peers, progress: Progress) -> CaseResult:
    """Measure one case."""
    (case,) = (case for case in CASES if case.name == name)
    if isinstance(case, StepCase):
        return step_case.run(case, settings, peers, progress)
    if case is NO_CLIFF:
        return no_cliff.run(settings, progress)
    return first_step.run(settings, progress)
