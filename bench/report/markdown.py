"""The tables of the documents, made from the committed results.

A region of a document between ``<!-- bench: NAME FILE -->`` and ``<!-- end of bench -->`` holds
the table NAME of the results file FILE in ``bench/results`` (or, without FILE, one that needs no
measurement). ``python -m fusestep.bench.report.markdown`` writes all regions anew;
``fusestep bench --check`` finds out whether they are what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import machine
from ..cases import indices
from ..cases.steps import FAR_ROWS, FRESH_STATES, LOOP, TRAINING
from ..cases.torch import SAME_PROCESS
from ..cases.workloads import DEFAULT_ROWS, PUBLISHED_DENSE, number
from ..errors import BenchError
from ..scale_out import model
from ..special import far_rows, fresh_states, training
from . import catalogue, document
from .catalogue import markdown
from .result import OURS
from .table import (
    IN_WORDS,
    bandwidth,
    by_scenario,
    contestants,
    loses_to,
    loses_to_bound,
    memory,
    peers_of,
    seconds,
    share,
    size,
    speedup,
    spread,
)

DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("performance", "bytes", "parity", "numbers")),
    *(f"docs/guides/{name}.md" for name in ("embedding-tables", "threads")),
    "docs/moving/torch.md",
    "docs/scale_out.md",
)
_REGION = re.compile(r"(<!-- bench: (\S+)(?: (\S+))? -->\n).*?(<!-- end of bench -->)", re.DOTALL)
_SHOWN = (
    "rows/nn.LazyAdam",
    "rows/nn.SGD",
    "rows/nn.Adam",
    "dense/nn.Adam",
    "many-small/nn.Adam",
)
_SUMMARISED = ("loop", "busy", "pause20")
_WITHOUT_SCHEMA = ("recommender", "scale-out", "scale-out-model")
Points = list[dict[str, Any]]


def rewritten(text: str, results: Path) -> str:
    """A document with all of its regions made anew.

    Raises:
        BenchError: a region names no table, or no readable results.
    """

    def region(found: re.Match[str]) -> str:
        begin, name, file, end = found.groups()
        if name not in _TABLES:
            raise BenchError(f"no table {name!r}: there are {', '.join(_TABLES)}")
        has_schema = name not in _WITHOUT_SCHEMA
        data = document.read(results / file, "--check", has_schema=has_schema) if file else {}
        return f"{begin}{_TABLES[name](data)}\n{end}"

    return _REGION.sub(region, text)


def documents() -> dict[Path, str]:
    """The documents of the checkout as they should be.

    Raises:
        BenchError: this is no checkout.
    """
    root = machine.checkout_at_hand()
    if root is None:
        raise BenchError("--check: the documents are in a Git checkout only, and this is none")
    try:
        texts = {root / name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    except OSError as error:
        raise BenchError(f"--check: cannot read {error.filename}: {error.strerror}") from error
    return {path: rewritten(text, root / "bench" / "results") for path, text in texts.items()}


# -- the tables -----------------------------------------------------------------------------------


def _summary(data: dict[str, Any]) -> str:
    """Times of some cases and how much faster they are than PyTorch, in some scenarios."""
    words = [IN_WORDS[scenario] for scenario in _SUMMARISED]
    head = ["case", "size", *words, *(f"x torch, {word}" for word in words)]
    rows = []
    for group in by_scenario([p for p in _all(data) if p["case"] in _SHOWN]):
        points = [group.get(scenario) for scenario in _SUMMARISED]
        times = [seconds(p["times"][OURS]["median"]) if p else "n/a" for p in points]
        ratios = [_bold(speedup(p, "torch"), loses_to(p, "torch")) if p else "n/a" for p in points]
        point = next(iter(group.values()))
        rows.append([f"`{point['case']}`", size(point), *times, *ratios])
    rows.sort(key=lambda row: _SHOWN.index(row[0].strip("`")))
    return f"{markdown(head, rows, left=2)}\n\n{_setting(data)}"


def _scenarios(data: dict[str, Any]) -> str:
    """Median and percentiles of ours, the bound and each peer in all scenarios."""
    names = list(dict.fromkeys(point["scenario"] for point in _all(data)))
    rows = [
        [f"`{point['case']}`", size(point), name, *(spread(group.get(s), name) for s in names)]
        for group in by_scenario(_all(data))
        for point in (next(iter(group.values())),)
        for name in contestants(point)
    ]
    head = ["case", "size", "of", *(IN_WORDS[name] for name in names)]
    return f"{markdown(head, rows, left=3)}\n\n{_setting(data)}"


def _beside_torch(data: dict[str, Any]) -> str:
    """Times in all scenarios, and how much faster than PyTorch's, in its own process or in ours."""
    names = list(dict.fromkeys(point["scenario"] for point in _all(data)))
    torch = "torch" if "torch" in data["peers"] else SAME_PROCESS
    head = ["case", "size", "dtype"]
    for name in names:
        head += [IN_WORDS[name], "x torch"]
    rows = []
    for group in by_scenario(_all(data)):
        point = next(iter(group.values()))
        row = [f"`{point['case']}`", size(point), point["dtype"]]
        for p in (group.get(name) for name in names):
            ratio = _bold(speedup(p, torch), loses_to(p, torch)) if p else "n/a"
            row += [seconds(p["times"][OURS]["median"]) if p else "n/a", ratio]
        rows.append(row)
    return f"{markdown(head, rows, left=3)}\n\n{_setting(data)}"


def _recommender(data: dict[str, Any]) -> str:
    """A whole iteration of a training, with PyTorch's optimizers and with ours."""
    rows = []
    for name, run in data["runs"].items():
        ms, auc = run["median_ms"], list(run["auc"].values())[-1]
        whole = sum(ms.values())
        model = ms["forward"] + ms["backward"]
        times = [f"{x:.1f} ms" for x in (model, ms["optimizer"], whole)]
        rows.append([name, *times, f"{ms['optimizer'] / whole:.0%}", f"{auc:.4f}"])
    head = ["optimizers of", "forward, backward", "optimizer", "iteration", "share", "AUC"]
    return markdown(head, rows, left=1)


def _setting(data: dict[str, Any]) -> str:
    software = data["software"]
    peers = ", ".join(f"{name} {version}" for name, version in data["peers"].items())
    return (
        f"{data['machine']['cpu']}, {data['machine']['cores']} cores, Numba {software['numba']}, "
        f"NumPy {software['numpy']}; peers: {peers or 'none'}; medians of one run, "
        f"{data['date'][:10]}."
    )


def _all(data: dict[str, Any]) -> Points:
    return [point for point in data["points"] if OURS in point["times"]]


def _measured(data: dict[str, Any]) -> Points:
    """Without anything between two steps."""
    return [point for point in _all(data) if point["scenario"] == LOOP]


def _usual(data: dict[str, Any]) -> Points:
    """Plain points, at the published size and the default distribution of each case."""
    return [
        point
        for point in _plain(data)
        if point["size"] in (PUBLISHED_DENSE, DEFAULT_ROWS, point["case"].partition("/")[0])
        and point["indices"] in (None, indices.DEFAULT)
    ]


def _plain(data: dict[str, Any]) -> Points:
    """In float32, with all threads."""
    points = _measured(data)
    threads = max(point["threads"] for point in points)
    return [p for p in points if p["threads"] == threads and p["dtype"] == "float32"]


def _of_points(points: Points, *columns: str) -> str:
    """Figures of points; ``columns`` are keys of a point that are shown beside its case."""
    peers = peers_of(points)
    head = ["case", *columns, "time", "GB/s", "of bound", *(f"x {peer}" for peer in peers)]
    rows = [
        [
            f"`{point['case']}`",
            *(str(point[column]) for column in columns),
            seconds(point["times"][OURS]["median"]),
            bandwidth(point),
            _bold(share(point), loses_to_bound(point)),
            *(_bold(speedup(point, peer), loses_to(point, peer)) for peer in peers),
        ]
        for point in points
    ]
    return markdown(head, rows, left=1 + len(columns))


def _bold(text: str, lost: bool) -> str:
    return f"**{text}**" if lost else text


def _all_usual(data: dict[str, Any]) -> str:
    return _of_points(_usual(data))


def _models(data: dict[str, Any]) -> str:
    """Whole models."""
    return _of_points(_measured(data))


def _sizes(data: dict[str, Any]) -> str:
    """Time and share of the bound of the dense float32 cases, a column for each size."""
    points = [point for point in _plain(data) if point["case"].startswith("dense/")]
    sizes = [point["size"] for point in sorted(points, key=lambda point: point["bytes"])]
    columns = sorted(dict.fromkeys(sizes), key=number)
    cells: dict[str, dict[str, str]] = {}
    for point in points:
        time = seconds(point["times"][OURS]["median"])
        cells.setdefault(point["case"], {})[point["size"]] = f"{time}, {share(point)}"
    rows = [
        [f"`{name}`", *(found.get(column, "") for column in columns)]
        for name, found in cells.items()
        if len(found) > 1
    ]
    return markdown(["case", *columns], rows)


def _rows(data: dict[str, Any]) -> str:
    """Row cases at all sizes and distributions."""
    points = [point for point in _plain(data) if point["case"].startswith("rows/")]
    return _of_points(points, "size", "indices")


def _dtypes(data: dict[str, Any]) -> str:
    """Points in 16 bit."""
    return _of_points([p for p in _measured(data) if p["dtype"] != "float32"], "size", "dtype")


def _scaling(data: dict[str, Any]) -> str:
    """Times faster than with one thread."""
    alone = {_without_threads(p): p for p in _measured(data) if p["threads"] == 1}
    rows = []
    for point in _measured(data):
        one = alone.get(_without_threads(point))
        if one is None or point["threads"] == 1:
            continue
        times = [p["times"][OURS]["median"] for p in (one, point)]
        rows.append(
            [
                f"`{point['case']}`",
                size(point),
                *(seconds(time) for time in times),
                f"{times[0] / times[1]:.2f}",
                *(share(p) for p in (one, point)),
            ]
        )
    head = ["case", "size", "1 thread", "all", "faster", "of bound, 1 thread", "all"]
    return markdown(head, rows, left=2)


def _without_threads(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(point[key] for key in ("case", "size", "indices", "dtype"))


def _losses(data: dict[str, Any]) -> str:
    """Everything that falls short."""
    rows = [
        [f"`{p['case']}`", size(p), p["dtype"], str(p["threads"]), "; ".join(p["losses"])]
        for p in _measured(data)
        if p["losses"]
    ]
    head = ["case", "size", "dtype", "threads", "measured"]
    found = f"{len(rows)} of the {len(_measured(data))} points of this run fall short:"
    return f"{found}\n\n{markdown(head, rows, left=len(head))}"


def _memory(data: dict[str, Any]) -> str:
    """What a step needs beside its arrays: ours, and the fastest form of each peer."""
    points = _usual(data)
    peers = peers_of(points)
    rows = [
        [
            f"`{point['case']}`",
            memory(point["memory"][OURS]),
            *(_memory_of(point, p) for p in peers),
        ]
        for point in points
    ]
    return markdown(["case", "fusestep", *peers], rows)


def _memory_of(point: dict[str, Any], peer: str) -> str:
    found = point["peers"].get(peer)
    return memory(point["memory"].get(found["label"])) if found else ""


def _far_rows(data: dict[str, Any]) -> str:
    """The parts of a step on large tables, and how the update compares with the plain loop."""
    times = _special_case(data, FAR_ROWS.name)["times"]
    rows = []
    for table in dict.fromkeys(label.partition(": ")[0] for label in times):
        medians = [times[f"{table}: {part}"]["median"] for part in far_rows.PARTS]
        _, _, update, plain = medians
        missed = update > far_rows.OF_PLAIN * plain
        rows.append([table, *map(seconds, medians), _bold(f"{update / plain:.2f}", missed)])
    return markdown(["size", *far_rows.PARTS, "update / plain loop"], rows)


def _fresh_states(data: dict[str, Any]) -> str:
    """The cost of large states until they train."""
    special = _special_case(data, FRESH_STATES.name)
    times, limits, later = special["times"], special["limits"], fresh_states.LATER_STEP
    labels = [label for label in times if not label.endswith(later)]
    rows = []
    for label, point in zip(labels, special["points"], strict=True):
        first = times[label]["median"]
        made = _bold(seconds(first), label in limits and first > limits[label])
        step = times.get(f"{label}{later}")
        step_time = seconds(step["median"]) if step else ""
        rows.append([label, made, step_time, f"{point['GB']:.1f} GB"])
    return markdown(["size", "made, and first step", "later step", "resident"], rows)


def _training(data: dict[str, Any]) -> str:
    """Of each model and scenario the step and the iteration, and how much faster than PyTorch's."""
    special = _special_case(data, TRAINING.name)
    times, limits, rows = special["times"], special["limits"], []
    for name in dict.fromkeys(tuple(label.split()[:2]) for label in times):
        cells = []
        for part in training.PARTS:
            ours, theirs = (
                f"{' '.join(name)} {of}: {part}" for of in (training.OURS, training.THEIRS)
            )
            mine, other = times[ours]["median"], times[theirs]["median"]
            cells += [seconds(mine), _bold(f"{other / mine:.2f}", mine > limits[ours])]
        rows.append([name[0], IN_WORDS[name[1]], *cells])
    return markdown(["model", "scenario", "step", "x torch", "iteration", "x torch"], rows)


def _special_case(data: dict[str, Any], name: str) -> dict[str, Any]:
    (special,) = (s for s in data["special"] if s["name"] == name)
    found: dict[str, Any] = special
    return found


def _special(name: str) -> Callable[[dict[str, Any]], str]:
    """The table of a case that is no step of one optimizer."""

    def table(data: dict[str, Any]) -> str:
        special = _special_case(data, name)
        limits = special["limits"]
        rows = [
            [label, seconds(time["median"]), seconds(limits[label]) if label in limits else ""]
            for label, time in special["times"].items()
        ]
        return markdown(["", "median", "limit"], rows)

    return table


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": _summary,
    "setting": _setting,
    "scenarios": _scenarios,
    "beside-torch": _beside_torch,
    "recommender": _recommender,
    "scale-out": model.measured,
    "scale-out-model": model.modelled,
    "usual": _all_usual,
    "models": _models,
    "sizes": _sizes,
    "rows": _rows,
    "dtypes": _dtypes,
    "scaling": _scaling,
    "losses": _losses,
    "memory": _memory,
    "far-rows": _far_rows,
    "first-step": _special("first-step"),
    "fresh-states": _fresh_states,
    "thor": _special("thor"),
    "training": _training,
    "bytes": catalogue.traffic,
    "lines": catalogue.line_counts,
    "optimizers": catalogue.optimizers,
    "states": catalogue.states,
    "row-sparse": catalogue.row_sparse,
    "row-defaults": catalogue.row_defaults,
    "large-gradients": catalogue.large_gradients,
}


def main() -> int:
    """Write all regions of all documents anew."""
    try:
        for path, text in documents().items():
            path.write_text(text, encoding="utf-8")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
