"""The results on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..against import Changed
from ..cases.model_shapes import many_small
from ..cases.steps import LOOP
from ..cases.workloads import CLICK_LOG, number
from .document import same
from .result import OF_BOUND, OURS
from .result import Progress as Report

# On a quiet machine the slow fifth is this close to the fast one, and no step beats its bound.
_SPREAD, _BEYOND, _BUSY = 1.25, 1.05, 0.5
# Characters: where output is no terminal; of the names of a line at least; between columns.
_WIDTH, _NAMES, _BETWEEN = 200, 36, 3
_LOST = "[bold red]{}[/]"
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
Point = dict[str, Any]


def console() -> Console:
    """Standard output; wide enough for all columns where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the figures, then what is lost, in doubt, or missing."""
    console.print(made_with(document))
    machine, layer = document["machine"], document["threading_layer"]
    layer = f", {layer}" if layer else ""
    console.print(f"{machine['cpu']}, {machine['cores']} cores{layer}; peers: {peers_in(document)}")
    points = [point for point in document["points"] if OURS in point["times"]]
    for part in (*_tables(points, console.width), *map(_special, document["special"])):
        console.print(part)
    lost = [point for point in points if point["losses"]]
    console.print(f"{len(lost)} of {len(points)} points lose:" if lost else "No losses.")
    for point in lost:
        console.print(f"  {_name(point)}: {'; '.join(point['losses'])}", style="red", markup=False)
    for text in _doubts(document):
        console.print(text, style="yellow", markup=False)
    missing = document["missing_peers"]
    for peer, reason in missing.items():
        console.print(f"{peer}: n/a: {reason}", style="dim", markup=False)
    for point in document["points"]:
        for label, reason in point["unavailable"].items():
            if label not in missing:
                text = f"{_name(point)}, {label}: n/a: {reason}"
                console.print(text, style="dim", markup=False)


def made_with(document: dict[str, Any]) -> str:
    """The version of this package, and those of what it rests on."""
    ours = document["fusestep"]
    commit = f" at {ours['commit'][:10]}" if ours["commit"] else ""
    changed = " with changes" if ours["changed"] else ""
    libraries = [f"{name} {version}" for name, version in document["software"].items() if version]
    return f"fusestep {ours['version']}{commit}{changed}; {', '.join(libraries)}"


def peers_in(document: dict[str, Any]) -> str:
    """The peers of a run with their versions."""
    return ", ".join(f"{name} {of}" for name, of in document["peers"].items()) or "none"


def table(title: str, head: Iterable[str], rows: Iterable[Iterable[Any]], left: int = 1) -> Table:
    """One whose first columns are text, which folds, and the others figures."""
    found = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, name in enumerate(head):
        if place < left:
            found.add_column(name, overflow="fold")
        else:
            found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def _tables(points: list[Point], width: int) -> Iterator[Table]:
    if points:
        yield from _points(points, width)
    if len({point["threads"] for point in points}) > 1:
        yield _scaling(points)
    if len(scenarios_of(points)) > 1:
        yield from _scenarios(points, width)


def _points(points: list[Point], width: int) -> Iterator[Table]:
    """One line for each point; under a peer how many times faster than it we are."""
    keys = "dtype", "threads", "scenario"
    varied = [key for key in keys if len({point[key] for point in points}) > 1]
    common = [
        f"{points[0][key]}{' threads' * (key == 'threads')}" for key in keys if key not in varied
    ]
    peers = peers_of(points)
    lines = [["case", "size", *varied, "time", "p20", "p80", "GB/s", "bound", *peers, "memory"]]
    for point in points:
        time = point["times"][OURS]
        lines.append([
            *(point["case"], size(point), *(str(point[key]) for key in varied)),
            *(seconds(time[name]) for name in ("median", "p20", "p80")),
            *(*figures(point, peers, _LOST), memory(point["memory"][OURS])),
        ])  # fmt: skip
    title = f"Steps, {', '.join([*common, 'times faster than the fastest form of each peer'])}"
    return _parted(title, lines, 2, 2 + len(varied), width)


def _parted(
    title: str, lines: list[list[str]], left: int, repeated: int, width: int
) -> Iterator[Table]:
    """Tables with as many columns as fit; the first ones are in each.

    Args:
        title: of the first.
        lines: the head, and the cells.
        left: how many columns are text: the case, its size and more.
        repeated: how many columns are in each of the tables.
        width: of the terminal.
    """
    widths = [
        _BETWEEN + max(Text.from_markup(cell).cell_len for cell in column)
        for column in zip(*lines, strict=True)
    ]
    room = width - _NAMES - sum(widths[2:repeated])  # of case and size: _NAMES
    groups: list[list[int]] = []
    for place in range(repeated, len(widths)):
        if not groups or sum(widths[k] for k in (*groups[-1], place)) > room:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        head, *rows = ([*line[:repeated], *(line[k] for k in group)] for line in lines)
        yield table(title if group is groups[0] else "", head, rows, left)


def _scaling(points: list[Point]) -> Table:
    """Times faster than with the first number of threads."""
    threads = list(dict.fromkeys(point["threads"] for point in points))
    found: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        key = point["case"], f"{size(point)} {_short(point)}"
        found.setdefault(key, {})[point["threads"]] = point["times"][OURS]["median"]
    rows = []
    for key, times in found.items():
        first = times.get(threads[0])
        faster = [f"{first / times[n]:.2f}" if first and n in times else "n/a" for n in threads]
        rows.append([*key, *faster])
    title = f"Scaling: times faster than with {threads[0]} thread(s)"
    return table(title, ["case", "size", *map(str, threads)], rows, left=2)


def _scenarios(points: list[Point], width: int) -> Iterator[Table]:
    """Median and percentiles of ours, the bound and each peer, a column for each scenario."""
    scenarios = scenarios_of(points)
    lines = [["case", "size", "of", *scenarios]]
    for point, group in by_scenario(points):
        variant = f"{size(point)} {_short(point)} x{point['threads']}"
        for name in contestants(point):
            cells = (_spread(group.get(scenario), name) for scenario in scenarios)
            lines.append([point["case"], variant, name, *cells])
    return _parted("Scenarios: median time of a step (p20, p80)", lines, 3, 3, width)


def _special(special: dict[str, Any]) -> Table:
    title = f"{special['name']}: {special['summary']}"
    if special["name"] == "no-cliff":
        return _series(title, special)
    keys = "median", "p20", "p80"
    return table(title, ["", *keys, "limit"], beside_limits(special, *keys, lost=_LOST))


def beside_limits(special: dict[str, Any], *keys: str, lost: str = "{}") -> Iterator[list[str]]:
    """Of each label some figures and the limit; a median beyond it is written as ``lost`` says."""
    for label, time in special["times"].items():
        limit = special["limits"].get(label)
        median, *others = (seconds(time[key]) for key in keys)
        if limit is not None and time["median"] > limit:
            median = lost.format(median)
        yield [label, median, *others, seconds(limit) if limit else ""]


def _series(title: str, special: dict[str, Any]) -> Table:
    """One line for each batch, one column for each width: the time, and its share of what is
    allowed.
    """
    points = {(point["B"], point["D"]): point for point in special["points"]}
    widths = sorted({D for _, D in points})
    rows = []
    for B in sorted({B for B, _ in points}):
        times = [special["times"].get(f"D={D} B={B}") for D in widths]
        rows.append([f"{B:,}", *(
            f"{seconds(time['median'])} {points[B, D]['of_allowed']:4.0%}" if time else ""
            for D, time in zip(widths, times, strict=True)
        )])  # fmt: skip
    found = table(title, ["B", *(f"D={D}" for D in widths)], rows, left=0)
    found.caption = "time of a step, and its share of 30 us + 3 x cache lines / bandwidth"
    return found


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
        if point["from_memory"] and bound and bound["value"] > _BEYOND:
            yield f"{_name(point)}: faster than its bound: was the machine busy?"


def show_changes(changes: Sequence[Changed], console: Console) -> int:
    """Print ratios of times; returns 1 when a step has become slower, else 0."""
    title = "Time now by time before: above 1, it has become slower"
    found = table(title, ["case", "median", "p20", "p80"], ())
    found.add_column("verdict", overflow="fold")
    styles = {"slower": "bold red", "faster": "green", "same": ""}
    for changed in changes:
        if changed.ratio is None:
            found.add_row(changed.title, "n/a", "", "", Text(changed.reason), style="dim")
            continue
        ratios = changed.ratio.median, changed.ratio.p20, changed.ratio.p80
        cells = [*(f"{ratio:.3f}" for ratio in ratios), changed.verdict]
        found.add_row(changed.title, *cells, style=styles[changed.verdict])
    console.print(found)
    return int(any(c.ratio is not None and c.verdict == "slower" for c in changes))


# -- points and their figures in words ------------------------------------------------------------


def _name(point: Point) -> str:
    name = f"{point['case']} {size(point)} {_short(point)} x{point['threads']}"
    return name if point["scenario"] == LOOP else f"{name} {point['scenario']}"


def _short(point: Point) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[point["dtype"]]


def size(point: Point) -> str:
    """The size, with the distribution of rows."""
    return f"{point['size']} {point['indices']}" if point["indices"] else str(point["size"])


_MODELS = {
    "many-small": f"{len(many_small())} small tensors",
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2 small",
    "dlrm": "the tables and layers of a DLRM",
    "bags": "the tables and layers of a click log",
}


def size_in_words(point: Point) -> str:
    """The size for readers who do not know how sizes are written here."""
    match str(point["size"]).split("x"):
        case [rows, width, length]:
            found = f"{number(rows):,} rows of {width}, {number(length):,} looked up"
        case [model] if model in _MODELS:
            found = _MODELS[model]
        case [*tables, rows, width, samples, bag]:
            alike = f"{number(tables[0]):,} tables of " if tables else ""
            of = (
                "the tables of a click log"
                if rows == CLICK_LOG
                else f"{alike}{number(rows):,} rows"
            )
            found = f"{of}, {width} wide, {number(samples):,} bags of {number(bag):,} ids"
        case [elements] if elements[0].isdigit():
            found = f"{number(elements):,} numbers"
        case _:
            found = size(point)
    return found


def peers_of(points: list[Point]) -> list[str]:
    """The peers that any of the points was compared with."""
    return list(dict.fromkeys(peer for point in points for peer in point["peers"]))


def scenarios_of(points: list[Point]) -> list[str]:
    """Those of the points, in their order."""
    return list(dict.fromkeys(point["scenario"] for point in points))


def by_scenario(points: list[Point]) -> list[tuple[Point, dict[str, Point]]]:
    """Points that differ in their scenario only, together; and the first of them."""
    groups: dict[tuple[Any, ...], tuple[Point, dict[str, Point]]] = {}
    for point in points:
        groups.setdefault(same(point), (point, {}))[1][point["scenario"]] = point
    return list(groups.values())


def contestants(point: Point) -> dict[str, str]:
    """By name, the label of ours, of the bound's fastest loop and of each peer's fastest form."""
    bound = {"bound": point["bound"]["label"]} if point["bound"] else {}
    peers = {peer: against["label"] for peer, against in point["peers"].items()}
    return {OURS: OURS, **bound, **peers}


def _spread(point: Point | None, name: str) -> str:
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


def figures(point: Point, peers: Iterable[str], lost: str) -> list[str]:
    """GB/s by the model of the traffic, the share of the bound, times faster than peers.

    What is lost is written as ``lost`` says.
    """
    speed = point["bytes"] / point["times"][OURS]["median"] / 1e9
    return [f"{speed:.1f}", share(point, lost), *(speedup(point, peer, lost) for peer in peers)]


def share(point: Point, lost: str = "{}") -> str:
    """Of the bound's speed; in brackets where the arrays were in the cache."""
    if point["bound"] is None:
        return "n/a"
    value = point["bound"]["value"]
    if not point["from_memory"]:
        return f"({value:.0%})"
    return (lost if value < OF_BOUND else "{}").format(f"{value:.0%}")


def speedup(point: Point | None, peer: str, lost: str = "{}") -> str:
    """Times faster than a peer."""
    if point is None or peer not in point["peers"]:
        return "n/a"
    value = point["peers"][peer]["value"]
    return (lost if value < 1 else "{}").format(f"{value:.2f}")


def memory(count: int | None) -> str:
    """A number of bytes."""
    if count is None:
        return "n/a"
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


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
    words = TextColumn("{task.description}", markup=False)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words
    errors = Console(stderr=True)
    with Progress(
        *columns, console=errors, auto_refresh=False, disable=not errors.is_terminal
    ) as bars:
        task = bars.add_task("", total=None)

        def of(name: str, done: int, total: int) -> Report:
            if not errors.is_terminal:
                errors.print(f"{done + 1} of {total}: {name}", markup=False, highlight=False)
            bars.update(task, description=name, completed=done, total=total, refresh=True)

            def report(share: float) -> None:
                text = f"{name} {share:4.0%}"
                bars.update(task, completed=int(done + share), description=text, refresh=True)

            return report

        yield of
