"""The results on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .result import Progress as Report

# Of a quiet machine the slow fifth is this close to the fast one, and no step beats its bound.
_SPREAD, _BEYOND, _BUSY = 1.25, 1.03, 0.5
_STYLES = {"reached": "green", "reached, p80 not": "yellow", "MISSED": "bold red", "n/a": "dim"}


def show(document: dict[str, Any], console: Console) -> None:
    """Print times, then targets with their verdicts, then what is missing."""
    _show_head(document, console)
    for case in document["cases"]:
        if case["ours"]:
            console.print(_times(case))
        elif case["points"]:
            console.print(_points(case))
    console.print(_targets(document["cases"]))
    _show_doubts(document, console)
    _show_missing(document, console)


def _show_head(document: dict[str, Any], console: Console) -> None:
    machine, software, ours = document["machine"], document["software"], document["fusestep"]
    commit = f" at {ours['commit'][:10]}" if ours["commit"] else ""
    changed = " with changes" if ours["changed"] else ""
    libraries = [f"{name} {version}" for name, version in software.items() if version]
    libraries += [f"{name} {version}" for name, version in document["peers"].items()]
    layer = f", {document['threading_layer']}" if document["threading_layer"] else ""
    console.print(f"fusestep {ours['version']}{commit}{changed}; {', '.join(libraries)}")
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {document['threads']} threads{layer}"
    )
    if document["quick"]:
        console.print("quick run: few repeats, figures are rough", style="yellow")


def _times(case: dict[str, Any]) -> Table:
    table = _table(f"{case['name']}: {case['summary']}")
    table.add_column("", overflow="fold")
    for name in ("median", "p20", "p80", "GB/s", "x ours"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, time in case["times"].items():
        moved = case["bytes_moved"].get(label)
        table.add_row(
            label,
            *(seconds(time[name]) for name in ("median", "p20", "p80")),
            f"{moved / time['median'] / 1e9:.1f}" if moved else "",
            f"{case['ratios'][label]:.2f}",
            style="bold" if label in (case["ours"], case["bound"]) else "",
        )
    for label in case["unavailable"]:
        table.add_row(label, *["n/a"] * 3, "", "n/a", style="dim")
    return table


def _points(case: dict[str, Any]) -> Table:
    """One line per batch, one column per width: the time, and its share of what is allowed."""
    widths = sorted({point["D"] for point in case["points"]})
    cells = {(point["B"], point["D"]): point for point in case["points"]}
    table = _table(f"{case['name']}: {case['summary']}")
    table.add_column("B", justify="right", no_wrap=True)
    for D in widths:
        table.add_column(f"D={D}", justify="right", no_wrap=True)
    for B in sorted({point["B"] for point in case["points"]}):
        row = []
        for D in widths:
            point = cells.get((B, D))
            time = case["times"].get(f"D={D} B={B}")
            row.append(f"{seconds(time['median'])} {point['of_allowed']:4.0%}" if point else "")
        table.add_row(f"{B:,}", *row)
    table.caption = "time of a step, and its share of 30 us + 3 x cache lines / bandwidth"
    return table


def _targets(cases: list[dict[str, Any]]) -> Table:
    table = _table("Targets")
    table.add_column("case", no_wrap=True)
    table.add_column("figure", overflow="fold")
    for name in ("value", "at p80", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for case in cases:
        for index, target in enumerate(case["targets"]):
            values = (target[name] for name in ("value", "at_p80", "target"))
            table.add_row(
                case["name"] if index == 0 else "",
                target["what"],
                *(_figure(value, target["unit"]) for value in values),
                target["verdict"],
                style=_STYLES[target["verdict"]],
            )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _show_doubts(document: dict[str, Any], console: Console) -> None:
    """Say which figures a busy machine has spoilt."""
    load = document["load_before"]
    if load is not None and load > _BUSY:
        console.print(f"the machine was busy before the run: load {load:.1f}", style="yellow")
    for case in document["cases"]:
        name, time = case["name"], case["times"].get(case["ours"])
        if time is not None and time["p80"] > _SPREAD * time["p20"]:
            spread = time["p80"] / time["p20"]
            console.print(
                f"{name}: p80 is {spread:.1f} x p20: was the machine busy?", style="yellow"
            )
        if any(t["unit"] == "%" and (t["value"] or 0) > _BEYOND for t in case["targets"]):
            console.print(f"{name}: faster than its bound: was the machine busy?", style="yellow")


def _show_missing(document: dict[str, Any], console: Console) -> None:
    for peer, reason in document["missing_peers"].items():
        console.print(f"{peer}: n/a: {reason}", style="dim", markup=False)
    for case in document["cases"]:
        for label, reason in case["unavailable"].items():
            if label.split()[0] not in document["missing_peers"]:
                console.print(f"{case['name']}, {label}: n/a: {reason}", style="dim", markup=False)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "s":
        return seconds(value)
    return f"{value:.1%}" if unit == "%" else f"{value:.2f}"


def seconds(value: float) -> str:
    """A time with three digits or so."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.{2 if value < 0.1 else 0}f} ms"
    return f"{value * 1e6:.{0 if value >= 1e-4 else 1}f} us"


@contextmanager
def progress(console: Console) -> Iterator[dict[str, Report]]:
    """Bars that are drawn between rounds only: a thread that draws would disturb the times."""
    columns = TextColumn("{task.description:14}"), BarColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, auto_refresh=False)
    with bars:
        yield _Reports(bars)


class _Reports(dict[str, Report]):
    """By name of a case, what tells its progress."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars

    def __missing__(self, name: str) -> Report:
        task = self._bars.add_task(name, total=None)

        def report(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total)
            self._bars.refresh()

        self[name] = report
        return report
