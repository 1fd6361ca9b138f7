"""Measures what was asked for and reports; or reports what an earlier run has measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sized
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import get_num_threads
from . import against, machine, point
from .cases.options import Request, other_option
from .cases.steps import Point, SpecialCase, select
from .errors import BenchError
from .peer import Peers
from .report import document, plot, terminal
from .report.result import Progress, SpecialResult


def run(args: argparse.Namespace, request: Request) -> int:
    """Measure, print the tables, write the files; returns the exit status."""
    console = terminal.console()
    if request.left_out:
        names = ", ".join(request.left_out)
        console.print(f"left out, no size or dtype fits: {names}", style="yellow")
    if args.against is None:
        return _measured(args, request)[1]
    path = Path(args.against)
    if path.is_file():
        before = document.read(path, "--against")
        now, status = _measured(args, request)
        return terminal.show_changes(against.changes(before, now), console) or status
    if request.special:
        names = ", ".join(case.name for case in request.special)
        raise BenchError(f"--against {path}: compares steps, not {names}")
    found: list[against.Changed] = []
    with (
        _as_far_as_it_goes(found) as trouble,
        against.versions(args.against) as folders,
        terminal.progress() as progress,
    ):
        found.extend(against.measure(folders, request.points, request.seconds, progress))
    return _status(trouble, terminal.show_changes(found, console))


@contextmanager
def _as_far_as_it_goes(found: Sized) -> Iterator[list[str]]:
    """Ends the block at an interrupt or an error, which it gives, if something has been found."""
    trouble: list[str] = []
    try:
        yield trouble
    except (KeyboardInterrupt, BenchError) as error:
        if not found:
            raise
        trouble.append(str(error) or "interrupted")


def _status(trouble: list[str], status: int = 0) -> int:
    if trouble:
        terminal.console().print(f"not all was measured: {trouble[0]}", style="bold red")
    return 130 if trouble else status


def _measured(args: argparse.Namespace, request: Request) -> tuple[dict[str, Any], int]:
    """The document of a run, printed and written, and the exit status."""
    load, results = machine.load(), list[document.Result]()
    # Of the cases that are measured with one number only.
    threads = max((p.threads for p in request.points), default=get_num_threads())
    wanted: list[Point | SpecialCase] = [*request.points, *request.special]
    gpu = import_module(".gpu.clock", __package__).about() if request.device else None
    earlier = [document.read(args.json, "--append")] if args.append and args.json.exists() else []
    with closing(Peers(request.pythons)) as peers:
        with _as_far_as_it_goes(results) as trouble, terminal.progress() as reports:
            for one in wanted:
                name = one.title if isinstance(one, Point) else one.name
                report = reports(name, len(results), len(wanted))
                results.append(measure(one, request, threads, peers, report))
        data = document.document(results, request.seconds, peers, load, gpu)
    document.check_schema(data)
    if args.json is not None:
        document.write(args.json, document.joined(*earlier, data))
    _report(args, data)
    return data, _status(trouble)


def measure(
    one: Point | SpecialCase, request: Request, threads: int, peers: Peers, progress: Progress
) -> document.Result:
    """Measure one point or special case."""
    if isinstance(one, Point) and request.device:
        on_device: Any = import_module(".gpu.point", __package__)
        found: document.Result = on_device.run(one, request.seconds, progress)
        return found
    if isinstance(one, Point):
        return point.run(one, request.seconds, peers, progress)
    module: Any = import_module(f".special.{one.name.replace('-', '_')}", __package__)
    result = SpecialResult(one.name, module.__doc__.partition(".\n")[0])
    with point.using_threads(threads):
        module.run(result, threads, progress)
    return result


def show(args: argparse.Namespace) -> int:
    """Print the results of ``--from``, of the cases that were named or all, and draw them.

    Raises:
        BenchError: the file holds none of them, or an option belongs to a measurement.
    """
    if option := other_option(args, "cases", "earlier", "plot", "scenario"):
        raise BenchError(f"--from {args.earlier}: measures nothing, so it takes no {option}")
    data = document.read(Path(args.earlier), "--from")
    if args.cases:
        names = {case.name for case in select(args.cases)}
        data["points"] = [point for point in data["points"] if point["case"] in names]
        data["special"] = [special for special in data["special"] if special["name"] in names]
    if args.scenario:
        data["points"] = [p for p in data["points"] if p["scenario"] in args.scenario]
    if not data["points"] and not data["special"]:
        asked = ", ".join([*args.cases, *(args.scenario or ())])
        raise BenchError(f"--from {args.earlier}: holds no results of {asked}")
    _report(args, data)
    return 0


def _report(args: argparse.Namespace, data: dict[str, Any]) -> None:
    """Print the figures, and draw them where that was asked for."""
    terminal.show(data, terminal.console())
    if args.plot is not None:
        plot.draw(data, args.plot)
