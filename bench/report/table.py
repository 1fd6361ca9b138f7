"""The results on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..against import Changed
from ..cases.steps import LOOP, NO_CLIFF
from .document import same
from .result import OF_BOUND, OURS
from .result import Progress as Report

# On a quiet machine the slow fifth is this close to the fast one, and no step beats its bound.
_SPREAD, _BEYOND, _BUSY = 1.25, 1.05, 0.5
# Characters: where output is no terminal; of the names of a line at least; between columns.
_WIDTH, _NAMES, _BETWEEN = 200, 36, 3


IN_WORDS = {
    "loop": "in a loop",
    "pause20": "after 20 ms of sleep",
    "pause50": "after 50 ms of sleep",
    "flush": "after other work on memory",
    "busy": "beside a busy process",
    "torch": "after a product of PyTorch",
    "torch-pause": "after one, and after 20 ms of sleep, in turns",
    "blas": "after a product of NumPy",
    "jax": "after a product of JAX",
}


def console() -> Console:
    """Standard output; wide enough for all columns where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the figures, then what is lost, in doubt, or missing."""
    _show_head(document, console)
    points = [point for point in document["points"] if OURS in point["times"]]
    for part in _points(points, console.width) if points else ():
        console.print(part)
    if len({point["threads"] for point in points}) > 1:
        console.print(_scaling(points))
    if len({point["scenario"] for point in points}) > 1:
        for part in _scenarios(points, console.width):
            console.print(part)
    for special in document["special"]:
        console.print((_series if special["name"] == NO_CLIFF.name else _limits)(special))
    _show_losses(points, console)
    _show_doubts(document, console)
    _show_missing(document, console)


def _show_head(document: dict[str, Any], console: Console) -> None:
    machine, software, ours = document["machine"], document["software"], document["fusestep"]
    commit = f" at {ours['commit'][:10]}" if ours["commit"] else ""
    changed = " with changes" if ours["changed"] else ""
    libraries = [f"{name} {version}" for name, version in software.items() if version]
    peers = ", ".join(f"{name} {version}" for name, version in document["peers"].items())
    layer = f", {document['threading_layer']}" if document["threading_layer"] else ""
    console.print(f"fusestep {ours['version']}{commit}{changed}; {', '.join(libraries)}")
    console.print(f"{machine['cpu']}, {machine['cores']} cores{layer}; peers: {peers or 'none'}")


def _points(points: list[dict[str, Any]], width: int) -> list[Table]:
    """One line for each point; under a peer how many times faster than it we are.

    In several tables where there are more columns than fit.
    """
    keys = "dtype", "threads", "scenario"
    varied = {key: len({point[key] for point in points}) > 1 for key in keys}
    common = [_of(points[0], key) for key, differs in varied.items() if not differs]
    title = f"Steps, {', '.join([*common, 'times faster than the fastest form of each peer'])}"
    peers, shown = peers_of(points), [key for key, differs in varied.items() if differs]
    head = (*shown, "time", "p20", "p80", "GB/s", "bound", *peers, "memory")
    rows = []
    for point in points:
        time = point["times"][OURS]
        row = (
            *(str(point[key]) for key in shown),
            *(seconds(time[name]) for name in ("median", "p20", "p80")),
            bandwidth(point),
            _marked(share(point), loses_to_bound(point)),
            *(_marked(speedup(point, peer), loses_to(point, peer)) for peer in peers),
            memory(point["memory"][OURS]),
        )
        rows.append(row)
    columns = [[name, *cells] for name, *cells in zip(head, *rows, strict=True)]
    names = [["case", *(p["case"] for p in points)], ["size", *map(size, points)]]
    return _parted(title, names, columns[: len(shown)], columns[len(shown) :], width)


def _parted(
    title: str,
    names: list[list[str]],
    repeated: list[list[str]],
    others: list[list[str]],
    width: int,
) -> list[Table]:
    """Tables with as many of the others as fit; each has the names and what is repeated."""
    tables: list[Table] = []
    left = width - _NAMES - sum(map(_width, (*names[2:], *repeated)))  # of case and size: _NAMES
    for group in _fitting(others, left):
        table = _table("" if tables else title)
        for name, *_ in names:
            table.add_column(name, overflow="fold")
        for name, *_ in (*repeated, *group):
            table.add_column(name, justify="right", no_wrap=True)
        for cells in zip(*(column[1:] for column in (*names, *repeated, *group)), strict=True):
            table.add_row(*cells)
        tables.append(table)
    return tables


def _fitting(columns: list[list[str]], width: int) -> list[list[list[str]]]:
    """The columns in groups of at most this width, or of one column."""
    groups: list[list[list[str]]] = []
    left = 0
    for column in columns:
        left -= _width(column)
        if left < 0 or not groups:
            groups.append([])
            left = width - _width(column)
        groups[-1].append(column)
    return groups


def _width(column: list[str]) -> int:
    return _BETWEEN + max(Text.from_markup(cell).cell_len for cell in column)


def _of(point: dict[str, Any], key: str) -> str:
    return f"{point[key]} threads" if key == "threads" else str(point[key])


def _marked(text: str, lost: bool) -> str:
    return f"[bold red]{text}[/]" if lost else text


def loses_to_bound(point: dict[str, Any]) -> bool:
    """Whether a step from memory falls short of the bound."""
    bound = point["bound"]
    return bool(point["from_memory"] and bound and bound["value"] < OF_BOUND)


def loses_to(point: dict[str, Any], peer: str) -> bool:
    """Whether a peer is faster."""
    return peer in point["peers"] and point["peers"][peer]["value"] < 1


def peers_of(points: list[dict[str, Any]]) -> list[str]:
    """The peers that any of the points was compared with."""
    return list(dict.fromkeys(peer for point in points for peer in point["peers"]))


def size(point: dict[str, Any]) -> str:
    """The size, with the distribution of rows."""
    return f"{point['size']} {point['indices']}" if point["indices"] else str(point["size"])


def bandwidth(point: dict[str, Any]) -> str:
    """Of our step, in GB/s by the model of its traffic."""
    return f"{point['bytes'] / point['times'][OURS]['median'] / 1e9:.1f}"


def share(point: dict[str, Any]) -> str:
    """Of the bound's speed; in brackets where the arrays were in the cache."""
    if point["bound"] is None:
        return "n/a"
    text = f"{point['bound']['value']:.0%}"
    return text if point["from_memory"] else f"({text})"


def speedup(point: dict[str, Any], peer: str) -> str:
    """Times faster than a peer."""
    return f"{point['peers'][peer]['value']:.2f}" if peer in point["peers"] else "n/a"


def memory(count: int | None) -> str:
    """A number of bytes."""
    if count is None:
        return "n/a"
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


def _short(dtype: str) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]


def _scaling(points: list[dict[str, Any]]) -> Table:
    """Times faster than with the first number of threads."""
    threads = list(dict.fromkeys(point["threads"] for point in points))
    table = _table(f"Scaling: times faster than with {threads[0]} thread(s)")
    table.add_column("case", overflow="fold")
    table.add_column("size", overflow="fold")
    for count in threads:
        table.add_column(str(count), justify="right", no_wrap=True)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        key = (str(point["case"]), f"{size(point)} {_short(point['dtype'])}")
        found.setdefault(key, {})[point["threads"]] = point["times"][OURS]["median"]
    for key, times in found.items():
        first = times.get(threads[0])
        row = [f"{first / times[n]:.2f}" if first and n in times else "n/a" for n in threads]
        table.add_row(*key, *row)
    return table


def _scenarios(points: list[dict[str, Any]], width: int) -> list[Table]:
    """Median and percentiles of ours, the bound and each peer, a column for each scenario."""
    scenarios = list(dict.fromkeys(point["scenario"] for point in points))
    lines = [["case", "size", "of", *scenarios]]
    for group in by_scenario(points):
        point = next(iter(group.values()))
        variant = f"{size(point)} {_short(point['dtype'])} x{point['threads']}"
        for name in contestants(point):
            cells = (spread(group.get(scenario), name) for scenario in scenarios)
            lines.append([point["case"], variant, name, *cells])
    columns = [list(column) for column in zip(*lines, strict=True)]
    title = "Scenarios: median time of a step (p20, p80)"
    return _parted(title, columns[:3], [], columns[3:], width)


def by_scenario(points: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Points that differ in their scenario only, together."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for point in points:
        groups.setdefault(same(point), {})[point["scenario"]] = point
    return list(groups.values())


def contestants(point: dict[str, Any]) -> dict[str, str]:
    """By name, the label of ours, of the bound's fastest loop and of each peer's fastest form."""
    bound = {"bound": point["bound"]["label"]} if point["bound"] else {}
    peers = {peer: against["label"] for peer, against in point["peers"].items()}
    return {OURS: OURS, **bound, **peers}


def spread(point: dict[str, Any] | None, name: str) -> str:
    """The median of a contestant with its percentiles."""
    label = None if point is None else contestants(point).get(name)
    if point is None or label is None:
        return "n/a"
    time = point["times"][label]
    median, unit = seconds(time["median"]).split()
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    digits = len(median.partition(".")[2])
    low, high = (f"{scale * time[name]:.{digits}f}" for name in ("p20", "p80"))
    return f"{median} {unit} ({low}, {high})"


def _series(special: dict[str, Any]) -> Table:
    """One line for each batch, one column for each width: the time, and its share of what is
    allowed.
    """
    widths = sorted({point["D"] for point in special["points"]})
    cells = {(point["B"], point["D"]): point for point in special["points"]}
    table = _table(f"{special['name']}: {special['summary']}")
    table.add_column("B", justify="right", no_wrap=True)
    for D in widths:
        table.add_column(f"D={D}", justify="right", no_wrap=True)
    for B in sorted({point["B"] for point in special["points"]}):
        row = []
        for D in widths:
            point = cells.get((B, D))
            time = special["times"].get(f"D={D} B={B}")
            row.append(f"{seconds(time['median'])} {point['of_allowed']:4.0%}" if point else "")
        table.add_row(f"{B:,}", *row)
    table.caption = "time of a step, and its share of 30 us + 3 x cache lines / bandwidth"
    return table


def _limits(special: dict[str, Any]) -> Table:
    table = _table(f"{special['name']}: {special['summary']}")
    table.add_column("")
    for name in ("median", "p20", "p80", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, time in special["times"].items():
        limit = special["limits"].get(label)
        missed = limit is not None and time["median"] > limit
        table.add_row(
            label,
            _marked(seconds(time["median"]), missed),
            seconds(time["p20"]),
            seconds(time["p80"]),
            seconds(limit) if limit else "",
        )
    return table


def _show_losses(points: list[dict[str, Any]], console: Console) -> None:
    lost = [point for point in points if point["losses"]]
    console.print(f"{len(lost)} of {len(points)} points lose:" if lost else "No losses.")
    for point in lost:
        console.print(f"  {_name(point)}: {'; '.join(point['losses'])}", style="red", markup=False)


def _name(point: dict[str, Any]) -> str:
    name = f"{point['case']} {size(point)} {_short(point['dtype'])} x{point['threads']}"
    return name if point["scenario"] == LOOP else f"{name} {point['scenario']}"


def _show_doubts(document: dict[str, Any], console: Console) -> None:
    """Say which figures a busy machine has spoilt."""
    load = document["load_before"]
    if load is not None and load > _BUSY:
        console.print(f"the machine was busy before the run: load {load:.1f}", style="yellow")
    for point in document["points"]:
        time = point["times"].get(OURS)
        name = _name(point)
        if point["scenario"] != LOOP:  # times vary, and that is what they are measured for
            continue
        if time is not None and time["p80"] > _SPREAD * time["p20"]:
            spread = f"p80 is {time['p80'] / time['p20']:.1f} x p20"
            text = f"{name}: {spread}: was the machine busy?"
            console.print(text, style="yellow", markup=False)
        bound = point["bound"]
        if point["from_memory"] and bound and bound["value"] > _BEYOND:
            text = f"{name}: faster than its bound: was the machine busy?"
            console.print(text, style="yellow", markup=False)


def _show_missing(document: dict[str, Any], console: Console) -> None:
    for peer, reason in document["missing_peers"].items():
        console.print(f"{peer}: n/a: {reason}", style="dim", markup=False)
    for point in document["points"]:
        for label, reason in point["unavailable"].items():
            if label not in document["missing_peers"]:
                text = f"{_name(point)}, {label}: n/a: {reason}"
                console.print(text, style="dim", markup=False)


def show_changes(changes: Sequence[Changed], console: Console) -> int:
    """Print ratios of times; returns 1 when a step has become slower, else 0."""
    table = _table("Time now by time before: above 1, it has become slower")
    table.add_column("case", overflow="fold")
    for name in ("median", "p20", "p80"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    styles = {"slower": "bold red", "faster": "green", "same": ""}
    for changed in changes:
        if changed.ratio is None:
            table.add_row(changed.title, "n/a", "", "", Text(changed.reason), style="dim")
            continue
        figures = (changed.ratio.median, changed.ratio.p20, changed.ratio.p80)
        verdict = changed.verdict
        row = [f"{figure:.3f}" for figure in figures]
        table.add_row(changed.title, *row, verdict, style=styles[verdict])
    console.print(table)
    return int(any(c.ratio is not None and c.verdict == "slower" for c in changes))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def seconds(value: float) -> str:
    """A time with three digits or so."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.{2 if value < 0.1 else 0}f} ms"
    return f"{value * 1e6:.{0 if value >= 1e-4 else 1}f} us"


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], Report]]:
    """A bar that is drawn between rounds only: a thread that draws would disturb the times.

    Where standard error is no terminal, a line for each measurement.

    Yields what gives, for the name of a measurement and its place among so many, the function
    that is told its progress.
    """
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    errors = Console(stderr=True)
    bars = Progress(*columns, console=errors, auto_refresh=False, disable=not errors.is_terminal)
    with bars:
        task = bars.add_task("", total=None)

        def of(name: str, done: int, total: int) -> Report:
            if not errors.is_terminal:
                errors.print(f"{done + 1} of {total}: {name}", markup=False, highlight=False)
            bars.update(task, description=name, completed=done, total=total)
            bars.refresh()

            def report(share: float) -> None:
                bars.update(task, completed=int(done + share), description=f"{name} {share:4.0%}")
                bars.refresh()

            return report

        yield of
