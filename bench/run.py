"""Measures what was asked for and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from . import against, machine, point
from .cases.options import Request
from .cases.steps import (
    FAR_ROWS,
    FIRST_STEP,
    FRESH_STATES,
    NO_CLIFF,
    THOR,
    TRAINING,
    Point,
    SpecialCase,
)
from .errors import BenchError
from .peer import Peers, peers_of
from .report import document, plot, table
from .report.result import Progress, Settings, SpecialResult
from .special import far_rows, first_step, fresh_states, no_cliff, thor, training

_SPECIAL: dict[SpecialCase, Any] = {
    NO_CLIFF: no_cliff,
    FAR_ROWS: far_rows,
    FIRST_STEP: first_step,
    FRESH_STATES: fresh_states,
    THOR: thor,
    TRAINING: training,
}


def run(request: Request) -> int:
    """Measure, print the tables, write the files; returns the exit status."""
    console = table.console()
    if request.left_out:
        console.print(
            f"left out, no size or dtype fits: {', '.join(request.left_out)}", style="yellow"
        )
    if request.against is None:
        return _measured(request, console)[1]
    path = Path(request.against)
    if path.is_file():
        before = document.read(path, "--against")
        now, status = _measured(request, console)
        return table.show_changes(against.changes(before, now), console) or status
    if request.special:
        names = ", ".join(case.name for case in request.special)
        raise BenchError(f"--against {request.against}: compares steps, not {names}")
    with against.versions(request.against) as folders, table.progress() as progress:
        found = against.measure(folders, request.points, request.settings, progress)
    return table.show_changes(found, console)


def _measured(request: Request, console: Console) -> tuple[dict[str, Any], int]:
    """The document of a run, printed and written, and the exit status."""
    load = machine.load()
    with peers_of(request.pythons) as peers:
        results, trouble = _results(request, peers)
        data = document.document(results, request.settings, peers, load)
    document.check_schema(data)
    if request.json is not None:
        document.write(request.json, data)
    table.show(data, console)
    if request.plot is not None:
        plot.draw(data, request.plot)
    if trouble:
        console.print(f"not all was measured: {trouble}", style="bold red")
    return data, 130 if trouble else 0


def _results(request: Request, peers: Peers) -> tuple[list[document.Result], str]:
    """What could be measured, and what ended the run before its end.

    What has been measured by then is not lost.
    """
    results: list[document.Result] = []
    wanted: list[Point | SpecialCase] = [*request.points, *request.special]
    try:
        with table.progress() as reports:
            for one in wanted:
                name = one.title if isinstance(one, Point) else one.name
                report = reports(name, len(results), len(wanted))
                results.append(measure(one, request.settings, request.threads, peers, report))
    except (KeyboardInterrupt, BenchError) as error:
        if not results:
            raise
        return results, str(error) or "interrupted"
    return results, ""


def measure(
    one: Point | SpecialCase,
    settings: Settings,
    threads: int,
    peers: Peers,
    progress: Progress,
) -> document.Result:
    """Measure one point or special case."""
    if isinstance(one, Point):
        return point.run(one, settings, peers, progress)
    with point.using_threads(threads):
        result: SpecialResult = _SPECIAL[one].run(threads, progress)
    return result
