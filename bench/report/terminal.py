"""The results on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..against import Changed
from ..cases.steps import LOOP
from . import table, tables
from .result import OURS
from .result import Progress as Report
from .table import Column, Point, Table

# On a quiet machine the slow fifth is this close to the fast one, and no step beats its bound.
_SPREAD, _BEYOND, _BUSY = 1.25, 1.05, 0.5
_WIDTH = 200  # characters, where output is no terminal


def console() -> Console:
    """Standard output; wide enough for all columns where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the figures, then what is lost, in doubt, or missing."""
    ours, machine, gpu = document["fusestep"], document["machine"], document.get("gpu")
    commit = f" at {ours['commit'][:10]}" if ours["commit"] else ""
    changed = " with changes" if ours["changed"] else ""
    libraries = [f"{name} {version}" for name, version in document["software"].items() if version]
    console.print(f"fusestep {ours['version']}{commit}{changed}; {', '.join(libraries)}")
    layer = f", {document['threading_layer']}" if document["threading_layer"] else ""
    place = f"{machine['cpu']}, {machine['cores']} cores{layer}"
    if gpu:
        place = f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.1f} GB, CUDA {gpu['cuda_of_driver']}"
    console.print(f"{place}; peers: {tables.peers_in(document)}")
    points = tables.all_of(document)
    found = _steps(points) if points else []
    scaling = tables.scaling(points)
    if scaling.rows:
        found.append(scaling)
    if len(table.scenarios_of(points)) > 1:
        found += tables.scenarios(points)
    found += [tables.with_limits(one, "median", "p20", "p80") for one in document["special"]]
    found += [one for special in document["special"] if special.get("scores")
              for one in tables.programs(special)]  # fmt: skip
    for one in found:
        _print(one, console)
    lost = [point for point in points if point["losses"]]
    console.print(f"{len(lost)} of {len(points)} points lose:" if lost else "No losses.")
    for point in lost:
        console.print(f"  {_name(point)}: {'; '.join(point['losses'])}", style="red", markup=False)
    for text in _doubts(document):
        console.print(text, style="yellow", markup=False)
    for text in _missing(document):
        console.print(text, style="dim", markup=False)


def _print(one: Table, console: Console) -> None:
    if one.title:
        console.print(one.title.replace("`", ""), style="bold", markup=False, highlight=False)
    console.print(table.on_terminal(one))


def _steps(points: Sequence[Point]) -> list[Table]:
    """A line for each point."""
    keys = "dtype", "threads", "scenario"
    varied = [key for key in keys if len({point[key] for point in points}) > 1]
    common = [
        f"{points[0][key]}{' threads' * (key == 'threads')}" for key in keys if key not in varied
    ]

    def figure(name: str) -> Column:
        return lambda point: table.seconds(point["times"][OURS][name])

    def value(name: str) -> Column:
        return lambda point: str(point[name])

    names = {"size": table.size, **{key: value(key) for key in varied}}
    more: dict[str, Column] = {"p20": figure("p20"), "p80": figure("p80")}
    if any(point.get("host") for point in points):
        more["enqueued in"] = lambda point: table.seconds(point["host"][OURS]["median"])
    else:
        more["memory"] = lambda point: table.memory(point["memory"][OURS])
    first, *others = tables.steps(points, names, more)
    title = f"Steps, {', '.join([*common, 'times faster than the fastest form of each peer'])}"
    return [replace(first, title=title), *others]


def _doubts(document: dict[str, Any]) -> Iterator[str]:
    """Which figures a busy machine has spoilt."""
    load = document["load_before"]
    if load is not None and load > _BUSY:
        yield f"the machine was busy before the run: load {load:.1f}"
    for point in document["points"]:
        time, bound = point["times"].get(OURS), point["bound"]
        if point["scenario"] != LOOP:  # times vary, and that is what they are measured for
            continue
        if time is not None and time["p80"] > _SPREAD * time["p20"]:
            wide = f"p80 is {time['p80'] / time['p20']:.1f} x p20"
            yield f"{_name(point)}: {wide}: was the machine busy?"
        if waited := ", ".join(point.get("waited", ())):
            yield f"{_name(point)}: the device waited for the host: {waited}"
        if point["from_memory"] and bound and bound["value"] > _BEYOND:
            yield f"{_name(point)}: faster than its bound: was the machine busy?"


def _missing(document: dict[str, Any]) -> Iterator[str]:
    """Which peers, and which forms of them, have no figures, and why."""
    missing = document["missing_peers"]
    for peer, reason in missing.items():
        yield f"{peer}: n/a: {reason}"
    for point in document["points"]:
        for label, reason in point["unavailable"].items():
            if label not in missing:
                yield f"{_name(point)}, {label}: n/a: {reason}"


def _name(point: Point) -> str:
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[point["dtype"]]
    name = f"{point['case']} {table.size(point)} {short} x{point['threads']}"
    return name if point["scenario"] == LOOP else f"{name} {point['scenario']}"


def show_changes(changes: Sequence[Changed], console: Console) -> int:
    """Print ratios of times; returns 1 when a step has become slower, else 0."""
    rows = []
    for changed in changes:
        ratio = changed.ratio
        if ratio is None:
            rows.append([changed.title, changed.reason, "n/a", "", ""])
            continue
        verdict = table.bold(changed.verdict, when=changed.verdict == "slower")
        figures = (f"{one:.3f}" for one in (ratio.median, ratio.p20, ratio.p80))
        rows.append([changed.title, verdict, *figures])
    title = "Time now by time before: above 1, it has become slower"
    _print(Table(["case", "verdict", "median", "p20", "p80"], rows, 2, title), console)
    return int(any(c.ratio is not None and c.verdict == "slower" for c in changes))


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], Report]]:
    """A bar that is drawn between rounds only: a thread that draws would disturb the times.

    Where standard error is no terminal, a line for each measurement.

    Yields what gives, for the name of a measurement and its place among so many, the function
    that is told its progress.
    """
    errors, words = Console(stderr=True), TextColumn("{task.description}", markup=False)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words
    options: Any = {"auto_refresh": False, "disable": not errors.is_terminal}
    with Progress(*columns, console=errors, **options) as bars:
        task = bars.add_task("", total=None)

        def of(name: str, done: int, total: int) -> Report:
            def report(share: float) -> None:
                text, steps = f"{name} {share:4.0%}", int(done + share)
                bars.update(task, total=total, completed=steps, description=text, refresh=True)

            if bars.disable:
                errors.print(f"{done + 1} of {total}: {name}", markup=False, highlight=False)
            report(0.0)
            return report

        yield of
