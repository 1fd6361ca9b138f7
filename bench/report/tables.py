"""The tables of results documents, by name: what documents and the terminal show of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from ...examples.rounding import compared
from ..cases import indices
from ..cases.steps import LOOP
from ..cases.torch import SAME_PROCESS
from ..cases.workloads import DEFAULTS, PUBLISHED_DENSE, number
from ..scale_out import runs
from ..special import dlrm_training, far_rows, training
from . import catalogue, document, table
from .result import BOUND, OURS
from .table import (
    IN_WORDS,
    Column,
    Point,
    Table,
    bold,
    of_points,
    seconds,
    share,
    size,
    speedup,
    time,
)

Data = dict[str, Any]
Blocks = Iterable[Table | str]
_SHOWN = ("rows/nn.LazyAdam", "rows/nn.SGD", "rows/nn.Adam", "dense/nn.Adam", "many-small/nn.Adam")
_SUMMARISED = ("loop", "busy", "pause20")
_COLUMNS = 8  # more are cut off on a screen


# -- which points ---------------------------------------------------------------------------------


def all_of(data: Data) -> list[Point]:
    """The points that were measured."""
    return [point for point in data["points"] if OURS in point["times"]]


def _in_loop(data: Data) -> list[Point]:
    """Without anything between two steps."""
    return [point for point in all_of(data) if point["scenario"] == LOOP]


def _plain(data: Data, *kinds: str) -> list[Point]:
    """In a loop, in float32, with all threads; of cases that begin so, or all."""
    points = _in_loop(data)
    threads = max(point["threads"] for point in points)
    return [
        point
        for point in points
        if point["threads"] == threads and point["dtype"] == "float32"
        and (not kinds or point["case"].partition("/")[0] in kinds)
    ]  # fmt: skip


def _usual(data: Data) -> list[Point]:
    """Plain points, at the published size and the default distribution of each case."""
    sizes = PUBLISHED_DENSE, DEFAULTS["rows"]
    return [
        point
        for point in _plain(data)
        if point["size"] in (*sizes, point["case"].partition("/")[0])
        and point["indices"] in (None, indices.DEFAULT)
    ]


# -- steps ----------------------------------------------------------------------------------------


def setting(data: Data) -> str:
    """On what and with what a run was made."""
    machine, software = data["machine"], data["software"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Numba {software['numba']}, "
        f"NumPy {software['numpy']}; peers: {peers_in(data)}; medians of one run, "
        f"{data['date'][:10]}."
    )


def peers_in(data: Data) -> str:
    """The peers of a run with their versions."""
    return ", ".join(f"{name} {of}" for name, of in data["peers"].items()) or "none"


def steps(
    points: Sequence[Point], names: dict[str, Column], more: dict[str, Column] | None = None
) -> list[Table]:
    """Figures of points, and how many times faster than the fastest form of each peer.

    Peers get a table of their own where one would be too wide.

    Args:
        points: which.
        names: columns of text by their heads, beside the case.
        more: columns of figures.
    """
    left, columns = 1 + len(names), names
    ours: dict[str, Column] = {
        "time": time, **(more or {}), "GB/s": table.speed, "of bound": share,
    }  # fmt: skip
    theirs = _faster_than(table.peers_of(points))
    if left + len(ours) + len(theirs) <= _COLUMNS:
        return [of_points(points, left, **columns, **ours, **theirs)]
    compared = [point for point in points if point["peers"]]
    own = of_points(points, left, **columns, **ours)
    return [own, of_points(compared, left, **columns, **theirs)]


def _faster_than(peers: Iterable[str]) -> dict[str, Column]:
    """By head, how many times faster than each peer."""
    return {f"x {peer}": partial(speedup, peer=peer) for peer in peers}


def _summary(data: Data) -> Blocks:
    """Times of some cases and how much faster they are than PyTorch, in some scenarios."""
    rows = []
    for case in _SHOWN:
        for one, group in table.by_scenario([p for p in all_of(data) if p["case"] == case]):
            points = [group.get(scenario) for scenario in _SUMMARISED]
            step = f"`{case.partition('/')[2]}`: {table.size_in_words(one)}"
            rows.append([step, *map(time, points), *(speedup(p, "torch") for p in points)])
    words = [IN_WORDS[scenario] for scenario in _SUMMARISED]
    head = ["step", *words, *(f"x torch, {word}" for word in words)]
    return [Table(head, rows), setting(data)]


def scenarios(points: Sequence[Point]) -> list[Table]:
    """The times of all contestants in each case, a row for each scenario."""
    found = []
    for point, group in table.by_scenario(points):
        names = list(dict.fromkeys(name for p in group.values() for name in table.contestants(p)))
        rows = [
            [IN_WORDS[scenario], *(time(one, name) for name in names)]
            for scenario, one in group.items()
        ]
        title = f"`{point['case']}`, {table.size_in_words(point)}:"
        found.append(Table(["", *names], rows, title=title))
    return found


def _scenarios(data: Data) -> Blocks:
    """A table for each case; without peers, one of our times and shares of the bound's speed."""
    if not data["peers"]:
        return _across(data, lambda point: f"{point['bound']['value']:.0%}")
    found = scenarios(all_of(data))
    return [*(block for one in found for block in (one.title, one)), setting(data)]


def _beside_torch(data: Data) -> Blocks:
    """Times in all scenarios, and how much faster than PyTorch's, in its own process or in ours."""
    torch = "torch" if "torch" in data["peers"] else SAME_PROCESS
    return _across(data, partial(speedup, peer=torch))


def _across(data: Data, ratio: Column) -> Blocks:
    """A column for each scenario: our time, and a ratio in brackets."""
    points = all_of(data)
    names = table.scenarios_of(points)
    rows = []
    for point, group in table.by_scenario(points):
        dtype = "" if point["dtype"] == "float32" else f", {point['dtype']}"
        cells = (f"{time(p)} ({ratio(p)})" if p else "n/a" for p in map(group.get, names))
        rows.append([f"`{point['case']}`", f"{size(point)}{dtype}", *cells])
    head = ["case", "size", *(IN_WORDS[name] for name in names)]
    return [Table(head, rows, left=2), setting(data)]


def _sizes(data: Data) -> Blocks:
    """Time and share of the bound of the dense float32 cases, a column for each size.

    Then, for each peer, how many times faster.
    """
    cases: dict[str, dict[str, Point]] = {}
    for point in _plain(data, "dense"):
        cases.setdefault(point["case"], {})[point["size"]] = point
    columns = sorted({size for found in cases.values() for size in found}, key=number)

    def of_each(cell: Column, head: str) -> Table:
        rows = [
            [f"`{name}`", *(cell(found[size]) if size in found else "" for size in columns)]
            for name, found in cases.items()
            if len(found) > 1
        ]
        return Table([head, *columns], rows)

    peers = table.peers_of(point for found in cases.values() for point in found.values())
    faster = (of_each(cell, head) for head, cell in _faster_than(peers).items())
    return [of_each(lambda point: f"{time(point)}, {share(point)}", "case"), *faster]


def _growth(data: Data) -> Blocks:
    """Pooled tables with more and more ids, and of more and more tables: the time of an id."""

    def ids(point: Point) -> int:
        return int(point["sizes"]["occurrences"])

    def beside(point: Point) -> str:
        needed = point["memory"][OURS]
        return "n/a" if needed is None else f"{needed / ids(point):.0f}"

    columns: dict[str, Column] = {
        "size": size,
        "tables": lambda point: f"{point['sizes']['parameters']:,}",
        "ids": lambda point: f"{ids(point):,}",
        "time": time,
        "of an id": lambda p: f"{1e9 * p['times'][OURS]['median'] / ids(p):.1f} ns",
        "memory": lambda point: table.memory(point["memory"][OURS]),
        "bytes of an id": beside,
    }
    return [of_points(_plain(data, "pooled"), 2, **columns)]


def _dtypes(data: Data) -> Blocks:
    """Points in 16 bit."""
    points = [point for point in _in_loop(data) if point["dtype"] != "float32"]
    return steps(points, {"size": size, "dtype": lambda point: str(point["dtype"])})


def scaling(points: Sequence[Point]) -> Table:
    """Times faster than with one thread."""
    alone = {document.same(point)[:-1]: point for point in points if point["threads"] == 1}

    def one(point: Point) -> Point:
        return alone[document.same(point)[:-1]]

    def faster(point: Point) -> str:
        times = (p["times"][OURS]["median"] for p in (one(point), point))
        return f"{next(times) / next(times):.2f}"

    several = [p for p in points if p["threads"] > 1 and document.same(p)[:-1] in alone]
    columns: dict[str, Column] = {
        "size": size,
        "threads": lambda point: str(point["threads"]),
        "1 thread": lambda point: time(one(point)),
        "time": time,
        "faster": faster,
        "of bound, 1 thread": lambda point: share(one(point)),
        "of bound": share,
    }
    return of_points(several, 2, **columns)


def _memory(data: Data) -> Blocks:
    """Bytes that a step needs beside its arrays: ours, and the fastest form of each known peer."""

    def needed(point: Point) -> dict[str, Any]:
        return {name: point["memory"].get(of) for name, of in table.contestants(point).items()}

    def cell(name: str) -> Column:
        return lambda point: table.memory(needed(point)[name]) if name in needed(point) else ""

    points = _usual(data)
    known = {name for p in points for name, count in needed(p).items() if count is not None}
    names = [OURS, *(peer for peer in table.peers_of(points) if peer in known)]
    return [of_points(points, 1, **{name: cell(name) for name in names})]


# -- cases that are no steps of one optimizer -----------------------------------------------------


def _compared(
    data: Data, name: str, head: Sequence[str], columns: Sequence[str | tuple[str, str]]
) -> Table:
    """Medians of a special case: a row for the first words of labels.

    Args:
        data: the document.
        name: of the case.
        head: of those words and of the columns.
        columns: what follows the words in a label; a pair is the first by the second, and stands
            out where either is beyond its limit.
    """
    (special,) = (one for one in data["special"] if one["name"] == name)
    words = len(head) - len(columns)
    rows: dict[tuple[str, ...], dict[str, tuple[float, bool]]] = {}
    for label, times in special["times"].items():
        *key, rest = label.split(" ", words)
        is_lost = times["median"] > special["limits"].get(label, times["median"])
        row = tuple(IN_WORDS.get(word, word.removesuffix(":")) for word in key)
        rows.setdefault(row, {})[rest] = times["median"], is_lost

    def cell(found: dict[str, tuple[float, bool]], column: str | tuple[str, str]) -> str:
        if isinstance(column, str):
            return seconds(found[column][0])
        (one, is_lost), (other, is_other_lost) = map(found.__getitem__, column)
        return bold(f"{one / other:.2f}", when=is_lost or is_other_lost)

    lines = [[*row, *(cell(found, column) for column in columns)] for row, found in rows.items()]
    return Table(head, lines, words)


def with_limits(special: Data, *keys: str) -> Table:
    """Some figures of each label beside its limit; a median beyond it stands out."""
    rows = []
    for label, times in special["times"].items():
        limit = special["limits"].get(label)
        median, *others = (seconds(times[key]) for key in keys)
        is_lost = limit is not None and times["median"] > limit
        rows.append([label, bold(median, when=is_lost), *others, seconds(limit) if limit else ""])
    title = f"{special['name']}: {special['summary']}"
    return Table(["", *keys, "limit"], rows, title=title)


def _with_limits(data: Data, name: str) -> Blocks:
    """The median of each label beside its limit."""
    return [with_limits(one, "median") for one in data["special"] if one["name"] == name]


def _programs(data: Data, name: str, of: str, library: str) -> Blocks:
    """Step and iteration of each model, and how much faster than theirs.

    Args:
        data: the document.
        name: of the special case, whose labels are ``model other whose: part``.
        of: what the second column is.
        library: theirs; labels call it in lower case, without Py, and ours ``nn.`` and that.
    """
    them = library.lower().removeprefix("py")
    pairs = [(f"nn.{them}: {part}", f"{them}: {part}") for part in training.PARTS]
    columns = [column for ours, theirs in pairs for column in (ours, theirs, (theirs, ours))]
    head = [cell for part in training.PARTS for cell in (part, f"{library}'s", "x")]
    return [_compared(data, name, ["model", of, *head], columns), setting(data)]


def _dlrm_training(data: Data) -> Blocks:
    """In each scenario an iteration with either's tables, and what of it are the layers."""
    theirs, ours, layers = training.THEIRS, training.OURS, dlrm_training.LAYERS
    head = ["", "PyTorch's tables", "EmbeddingBags", "x torch", layers]
    columns = theirs, ours, (theirs, ours), layers
    return [_compared(data, "dlrm-training", head, columns), setting(data)]


def programs(special: Data) -> list[Table]:
    """Whole programs: an iteration, what of it the tables are, and what was learned."""
    times = {label: summary["median"] for label, summary in special["times"].items()}
    rows = []
    for label, whole in times.items():
        ids, kind, part = label.split(": ")
        if part == "iteration":
            of_tables = 1 - times[f"{ids}: {dlrm_training.LAYERS}: {part}"] / whole
            spent = seconds(times[f"{ids}: {kind}: processor"])
            rows.append([ids, kind, seconds(whole), spent, f"{of_tables:.0%}"])
    scores = special["scores"].items()
    areas = [[kind, f"{fmean(x):.4f}", f"{min(x):.4f} to {max(x):.4f}"] for kind, x in scores]
    head = ["", "tables", "iteration", "processor time", "of the tables"]
    return [Table(head, rows, 2), Table(["tables", "AUC, mean", "of the seeds"], areas)]


def _dlrm_programs(data: Data) -> Blocks:
    (special,) = (one for one in data["special"] if one["name"] == "dlrm-programs")
    return [*programs(special), setting(data)]


def _far_rows(data: Data) -> Blocks:
    """The parts of a step on large tables, and how the update compares with the plain loop."""
    parts = far_rows.PARTS
    columns = *parts, (far_rows.UPDATE, far_rows.PLAIN)
    return [_compared(data, "far-rows", ["size", *parts, "update / plain loop"], columns)]


def _recommender(data: Data) -> Blocks:
    """A whole iteration of a training, by optimizers, or by ways from ids to rows."""
    rows, is_hashed = [], any(run.get("rows") for run in data["runs"].values())
    for name, run in data["runs"].items():
        ms, auc = run["median_ms"], list(run["auc"].values())[-1]
        whole = sum(ms.values())
        times = (ms["forward"] + ms["backward"], ms["optimizer"], whole)
        part = f"{ms['optimizer'] / whole:.0%}"
        rows.append([name, *(f"{x:.1f} ms" for x in times), part, f"{auc:.4f}"])
        if is_hashed:
            rows[-1].append(f"{list(run['rows'].values())[-1]:,}")
    head = ["optimizers of", "forward, backward", "optimizer", "iteration", "share", "AUC"]
    return [Table(["tables", *head[1:], "rows in use"] if is_hashed else head, rows)]


def _learning(data: Data) -> Blocks:
    """Held-out losses of models, trained with each way of rounding weights."""
    rows = []
    for title, losses in data["losses"].items():
        found = compared(losses).values()
        rows.append([title, *(f"{loss:.4f} ({far:+.2f})" for loss, far in found)])
    return [Table(["", *next(iter(data["losses"].values()))], rows)]


def on_device(data: Data) -> Table:
    """The points of a CUDA device; the copies themselves are left out."""
    rows = []
    for point in data["points"]:
        ours = point["device"][OURS]["median"]
        for label, times in point["device"].items():
            if label.startswith(BOUND):
                continue
            part = point["of_copy"].get(label)
            rows.append([
                point["case"] if label == OURS else "",
                label,
                seconds(times["median"]),
                f"{part:.0%}" if part else "",
                f"{times['median'] / ours:.2f}",
                seconds(point["host"][label]["median"]),
            ])  # fmt: skip
    head = ("step", "", "on the device", "of a copy's speed", "x ours", "enqueued by the host in")
    return Table(head, rows, 2)


OF_RUNS: dict[str, Callable[[Data], Blocks]] = {
    "summary": _summary,
    "setting": lambda data: [setting(data)],
    "scenarios": _scenarios,
    "beside-torch": _beside_torch,
    "usual": lambda data: steps(_usual(data), {}),
    "models": lambda data: steps(_in_loop(data), {}),
    "sizes": _sizes,
    "rows": lambda data: steps(_plain(data, "rows", "pooled"), {"size": size}),
    "growth": _growth,
    "dtypes": _dtypes,
    "scaling": lambda data: [scaling(_in_loop(data))],
    "memory": _memory,
    "far-rows": _far_rows,
    **{
        name: partial(_with_limits, name=name)
        for name in ("first-step", "changing-steps", "rounding", "catch-up", "id-map")
    },
    "training": partial(_programs, name="training", of="scenario", library="PyTorch"),
    "dlrm-training": _dlrm_training,
    "dlrm-programs": _dlrm_programs,
    "in-mindspore": partial(_programs, name="in-mindspore", of="optimizer", library="MindSpore"),
}  # fmt: skip
"""Tables of results of ``fusestep bench``."""
OTHERS: dict[str, Callable[[Data], Blocks]] = {
    "gpu": lambda data: [on_device(data)],
    "recommender": _recommender,
    "learning": _learning,
    "scale-out": lambda data: [runs.measured(data)],
    "scale-out-model": lambda data: [runs.modelled(data)],
    "scale-out-pooled": lambda data: [runs.pooled(data)],
    **{
        name: lambda _, make=make: [make()]  # type: ignore[misc]
        for name, make in catalogue.TABLES.items()
    },
}
"""Tables of documents of another form, and tables that need no results."""
