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
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

from .. import machine
from ..cases import indices
from ..cases.steps import LOOP
from ..cases.torch import SAME_PROCESS
from ..cases.workloads import DEFAULTS, PUBLISHED_DENSE, number
from ..errors import BenchError
from ..scale_out import runs
from ..special import dlrm_training, far_rows, in_mindspore, training
from ..special.fresh_states import LATER_STEP
from . import catalogue, document, table
from .catalogue import markdown
from .result import BOUND, OURS
from .table import IN_WORDS, Point, seconds, size, size_in_words

DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("performance", "bytes", "parity", "numbers")),
    *(f"docs/guides/{name}.md" for name in ("embedding-tables", "gpu", "threads")),
    "docs/moving/mindspore.md",
    "docs/moving/torch.md",
    "docs/scale_out.md",
)
_REGION = re.compile(r"(<!-- bench: (\S+)(?: (\S+))? -->\n).*?(<!-- end of bench -->)", re.DOTALL)
_SHOWN = ("rows/nn.LazyAdam", "rows/nn.SGD", "rows/nn.Adam", "dense/nn.Adam", "many-small/nn.Adam")
_SUMMARISED = ("loop", "busy", "pause20")
_WITHOUT_SCHEMA = ("gpu", "recommender", "scale-out", "scale-out-model")
_LOST = "**{}**"
_COLUMNS = 8  # more are cut off on a screen


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


def check() -> int:
    """Print what differs in the documents; returns 1 when something does, else 0."""
    differing = []
    for path, expected in documents().items():
        found = path.read_text(encoding="utf-8")
        if found != expected:
            differing.append(path.name)
            lines = found.splitlines(), expected.splitlines()
            changes = unified_diff(*lines, path.name, "from the results", n=0)
            print("\n".join(line.rstrip("\n") for line in changes))
    if differing:
        print(f"{', '.join(differing)}: write anew with python -m fusestep.bench.report.markdown")
        return 1
    print("all tables are those of the committed results")
    return 0


# -- the tables -----------------------------------------------------------------------------------


def _summary(data: dict[str, Any]) -> str:
    """Times of some cases and how much faster they are than PyTorch, in some scenarios."""
    words, rows = [IN_WORDS[scenario] for scenario in _SUMMARISED], []
    for case in _SHOWN:
        for one, group in table.by_scenario([p for p in _all(data) if p["case"] == case]):
            points = [group.get(scenario) for scenario in _SUMMARISED]
            ratios = (table.speedup(point, "torch", _LOST) for point in points)
            step = f"`{case.partition('/')[2]}`: {size_in_words(one)}"
            rows.append([step, *map(_time, points), *ratios])
    head = ["step", *words, *(f"x torch, {word}" for word in words)]
    return f"{markdown(head, rows)}\n\n{_setting(data)}"


def _scenarios(data: dict[str, Any]) -> str:
    """Of each case the times of all in all scenarios; without peers, ours and of the bound."""
    if not data["peers"]:
        return _across(data, lambda point: f"{point['bound']['value']:.0%}")
    parts = []
    for point, group in table.by_scenario(_all(data)):
        names = list(dict.fromkeys(name for p in group.values() for name in table.contestants(p)))
        rows = [
            [IN_WORDS[scenario], *(_time(found, name) for name in names)]
            for scenario, found in group.items()
        ]
        parts += [f"`{point['case']}`, {size_in_words(point)}:", markdown(["", *names], rows)]
    return "\n\n".join([*parts, _setting(data)])


def _beside_torch(data: dict[str, Any]) -> str:
    """Times in all scenarios, and how much faster than PyTorch's, in its own process or in ours."""
    torch = "torch" if "torch" in data["peers"] else SAME_PROCESS
    return _across(data, lambda point: table.speedup(point, torch, _LOST))


def _across(data: dict[str, Any], ratio: Callable[[Point], str]) -> str:
    """A column for each scenario: our time, and a ratio in brackets."""
    points = _all(data)
    names = table.scenarios_of(points)
    rows = []
    for point, group in table.by_scenario(points):
        dtype = "" if point["dtype"] == "float32" else f", {point['dtype']}"
        found = map(group.get, names)
        cells = (f"{_time(p)} ({ratio(p)})" if p else "n/a" for p in found)
        rows.append([f"`{point['case']}`", f"{size(point)}{dtype}", *cells])
    head = ["case", "size", *(IN_WORDS[name] for name in names)]
    return f"{markdown(head, rows, left=2)}\n\n{_setting(data)}"


def _time(point: Point | None, of: str = OURS) -> str:
    """The median of a contestant."""
    label = table.contestants(point).get(of) if point else None
    return seconds(point["times"][label]["median"]) if point and label else "n/a"


def _recommender(data: dict[str, Any]) -> str:
    """A whole iteration of a training, with PyTorch's optimizers and with ours."""
    rows = []
    for name, run in data["runs"].items():
        ms, auc = run["median_ms"], list(run["auc"].values())[-1]
        whole = sum(ms.values())
        times = (ms["forward"] + ms["backward"], ms["optimizer"], whole)
        share = f"{ms['optimizer'] / whole:.0%}"
        rows.append([name, *(f"{x:.1f} ms" for x in times), share, f"{auc:.4f}"])
    head = ["optimizers of", "forward, backward", "optimizer", "iteration", "share", "AUC"]
    return markdown(head, rows)


def _setting(data: dict[str, Any]) -> str:
    machine, software = data["machine"], data["software"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Numba {software['numba']}, "
        f"NumPy {software['numpy']}; peers: {table.peers_in(data)}; medians of one run, "
        f"{data['date'][:10]}."
    )


def _all(data: dict[str, Any]) -> list[Point]:
    return [point for point in data["points"] if OURS in point["times"]]


def _measured(data: dict[str, Any]) -> list[Point]:
    """Without anything between two steps."""
    return [point for point in _all(data) if point["scenario"] == LOOP]


def _plain(data: dict[str, Any]) -> list[Point]:
    """In float32, with all threads."""
    points = _measured(data)
    threads = max(point["threads"] for point in points)
    return [p for p in points if p["threads"] == threads and p["dtype"] == "float32"]


def _usual(data: dict[str, Any]) -> list[Point]:
    """Plain points, at the published size and the default distribution of each case."""
    return [
        point
        for point in _plain(data)
        if point["size"] in (PUBLISHED_DENSE, DEFAULTS["rows"], point["case"].partition("/")[0])
        and point["indices"] in (None, indices.DEFAULT)
    ]


def _of_points(points: list[Point], **columns: Callable[[Point], str]) -> str:
    """Figures of points; ``columns`` by their heads, beside the case.

    Peers get a table of their own where one would be too wide.
    """
    peers, left = table.peers_of(points), 1 + len(columns)
    ours, theirs = ["time", "GB/s", "of bound"], [f"x {peer}" for peer in peers]

    def own(point: Point) -> list[str]:
        return [_time(point), *table.figures(point, (), _LOST)]

    def other(point: Point) -> list[str]:
        return [table.speedup(point, peer, _LOST) for peer in peers]

    def shown(head: list[str], points: list[Point], cells: Callable[[Point], list[str]]) -> str:
        rows = [
            [f"`{p['case']}`", *(column(p) for column in columns.values()), *cells(p)]
            for p in points
        ]
        return markdown(["case", *columns, *head], rows, left)

    if left + len(ours) + len(theirs) <= _COLUMNS:
        return shown([*ours, *theirs], points, lambda point: own(point) + other(point))
    compared = [point for point in points if point["peers"]]
    return f"{shown(ours, points, own)}\n\n{shown(theirs, compared, other)}"


def _sizes(data: dict[str, Any]) -> str:
    """Time and share of the bound of the dense float32 cases, a column for each size.

    Then, for each peer, how many times faster.
    """
    points = [point for point in _plain(data) if point["case"].startswith("dense/")]
    cases: dict[str, dict[str, Point]] = {}
    for point in points:
        cases.setdefault(point["case"], {})[point["size"]] = point
    columns = sorted(dict.fromkeys(point["size"] for point in points), key=number)

    def of_each(cell: Callable[[Point], str], head: str) -> str:
        rows = (
            [f"`{name}`", *(cell(found[size]) if size in found else "" for size in columns)]
            for name, found in cases.items()
            if len(found) > 1
        )
        return markdown([head, *columns], rows)

    faster = (
        of_each(partial(table.speedup, peer=peer, lost=_LOST), f"x {peer}")
        for peer in table.peers_of(points)
    )
    own = of_each(lambda point: f"{_time(point)}, {table.share(point)}", "case")
    return "\n\n".join([own, *faster])


def _rows(data: dict[str, Any]) -> str:
    """Row cases, and pooled ones, at all sizes and distributions."""
    points = [point for point in _plain(data) if point["case"].startswith(("rows/", "pooled/"))]
    return _of_points(points, size=size)


def _growth(data: dict[str, Any]) -> str:
    """Pooled tables with more and more ids, and of more and more tables: the time of an id."""
    rows = []
    for point in (point for point in _plain(data) if point["case"].startswith("pooled/")):
        sizes, time = point["sizes"], point["times"][OURS]["median"]
        ids = sizes["occurrences"]
        cells = f"{sizes['parameters']:,}", f"{ids:,}", _time(point), f"{1e9 * time / ids:.1f} ns"
        needed = point["memory"][OURS]
        beside = "n/a" if needed is None else f"{needed / ids:.0f}"
        rows.append([f"`{point['case']}`", size(point), *cells, table.memory(needed), beside])
    head = ["case", "size", "tables", "ids", "time", "of an id", "memory", "bytes of an id"]
    return markdown(head, rows, left=2)


def _dtypes(data: dict[str, Any]) -> str:
    """Points in 16 bit."""
    points = [point for point in _measured(data) if point["dtype"] != "float32"]
    return _of_points(points, size=size, dtype=lambda point: str(point["dtype"]))


def _scaling(data: dict[str, Any]) -> str:
    """Times faster than with one thread."""
    points = _measured(data)
    alone = {document.same(point)[:-1]: point for point in points if point["threads"] == 1}
    rows = []
    for point in points:
        one = alone.get(document.same(point)[:-1])
        if one is None or point["threads"] == 1:
            continue
        faster = one["times"][OURS]["median"] / point["times"][OURS]["median"]
        cells = [_time(one), _time(point), f"{faster:.2f}", table.share(one), table.share(point)]
        rows.append([f"`{point['case']}`", size(point), *cells])
    head = ["case", "size", "1 thread", "all", "faster", "of bound, 1 thread", "all"]
    return markdown(head, rows, left=2)


def _memory(data: dict[str, Any]) -> str:
    """What a step needs beside its arrays: ours, and the fastest form of each known peer."""
    points = _usual(data)
    needed = [
        {name: p["memory"].get(label) for name, label in table.contestants(p).items()}
        for p in points
    ]
    known = {name for found in needed for name, count in found.items() if count is not None}
    names = [OURS, *(peer for peer in table.peers_of(points) if peer in known)]
    rows = [
        [f"`{point['case']}`", *(table.memory(found[n]) if n in found else "" for n in names)]
        for point, found in zip(points, needed, strict=True)
    ]
    return markdown(["case", *names], rows)


# -- cases that are no steps of one optimizer -----------------------------------------------------


def _special(name: str, data: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The medians of one by label, and all of it."""
    (special,) = (special for special in data["special"] if special["name"] == name)
    return {label: time["median"] for label, time in special["times"].items()}, special


def _with_limits(data: dict[str, Any], name: str) -> str:
    """The median of each label beside its limit."""
    _, special = _special(name, data)
    return markdown(["", "median", "limit"], table.beside_limits(special, "median"))


def _far_rows(data: dict[str, Any]) -> str:
    """The parts of a step on large tables, and how the update compares with the plain loop."""
    times, _ = _special("far-rows", data)
    rows = []
    for of in dict.fromkeys(label.partition(": ")[0] for label in times):
        medians = [times[f"{of}: {part}"] for part in far_rows.PARTS]
        _, _, update, plain = medians
        lost = _LOST if update > far_rows.OF_PLAIN * plain else "{}"
        rows.append([of, *map(seconds, medians), lost.format(f"{update / plain:.2f}")])
    return markdown(["size", *far_rows.PARTS, "update / plain loop"], rows)


def _fresh_states(data: dict[str, Any]) -> str:
    """The cost of large states until they train."""
    times, special = _special("fresh-states", data)
    limits = special["limits"]
    labels = [label for label in times if not label.endswith(LATER_STEP)]
    rows = []
    for label, point in zip(labels, special["points"], strict=True):
        lost = _LOST if label in limits and times[label] > limits[label] else "{}"
        later = times.get(f"{label}{LATER_STEP}")
        made = lost.format(seconds(times[label]))
        rows.append([label, made, seconds(later) if later else "", f"{point['GB']:.1f} GB"])
    return markdown(["size", "made, and first step", "later step", "resident"], rows)


def _training(data: dict[str, Any]) -> str:
    """Of each model and scenario the step and the iteration, and how much faster than PyTorch's."""
    times, special = _special("training", data)
    limits, rows = special["limits"], []
    for name, scenario in dict.fromkeys(tuple(label.split()[:2]) for label in times):
        cells = []
        for part in training.PARTS:
            ours, theirs = (
                f"{name} {scenario} {of}: {part}" for of in (training.OURS, training.THEIRS)
            )
            lost = _LOST if times[ours] > limits[ours] else "{}"
            cells += [seconds(times[ours]), lost.format(f"{times[theirs] / times[ours]:.2f}")]
        rows.append([name, IN_WORDS[scenario], *cells])
    return markdown(["model", "scenario", "step", "x torch", "iteration", "x torch"], rows, left=2)


def _dlrm_training(data: dict[str, Any]) -> str:
    """In each scenario an iteration with either's tables, and what of it are the layers."""
    times, special = _special("dlrm-training", data)
    rows = []
    for scenario in dict.fromkeys(label.split()[0] for label in times):
        theirs, ours, layers = (
            times[f"{scenario} {name}"]
            for name in (training.THEIRS, training.OURS, dlrm_training.LAYERS)
        )
        lost = _LOST if ours > special["limits"][f"{scenario} {training.OURS}"] else "{}"
        faster = lost.format(f"{theirs / ours:.2f}")
        rows.append([IN_WORDS[scenario], *map(seconds, (theirs, ours)), faster, seconds(layers)])
    head = ["", "PyTorch's tables", "EmbeddingBags", "x torch", dlrm_training.LAYERS]
    return f"{markdown(head, rows)}\n\n{_setting(data)}"


def _gpu(data: dict[str, Any]) -> str:
    """The points of a CUDA device; the copies themselves are left out."""
    rows = []
    for point in data["points"]:
        ours = point["device"][OURS]["median"]
        for label, times in point["device"].items():
            if label.startswith(BOUND):
                continue
            share = point["of_copy"].get(label)
            rows.append([
                point["case"] if label == OURS else "",
                label,
                seconds(times["median"]),
                f"{share:.0%}" if share else "",
                f"{times['median'] / ours:.2f}",
                seconds(point["host"][label]["median"]),
            ])  # fmt: skip
    head = ("step", "", "on the device", "of a copy's speed", "x ours", "enqueued by the host in")
    return markdown(head, rows, 2)


def _in_mindspore(data: dict[str, Any]) -> str:
    """Of each model and optimizer the step and the iteration, and how much faster than theirs."""
    times, _ = _special("in-mindspore", data)
    rows = []
    for name, of in dict.fromkeys(tuple(label.split()[:2]) for label in times):
        cells = []
        for part in training.PARTS:
            ours, theirs = (
                times[f"{name} {of} {whose}: {part}"]
                for whose in (in_mindspore.OURS, in_mindspore.THEIRS)
            )
            lost = _LOST if ours > theirs else "{}"
            cells += [seconds(ours), seconds(theirs), lost.format(f"{theirs / ours:.2f}")]
        rows.append([name, f"`{of}`", *cells])
    head = [cell for part in training.PARTS for cell in (part, "MindSpore's", "x")]
    return f"{markdown(['model', 'optimizer', *head], rows, left=2)}\n\n{_setting(data)}"


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": _summary,
    "setting": _setting,
    "scenarios": _scenarios,
    "beside-torch": _beside_torch,
    "recommender": _recommender,
    "scale-out": runs.measured,
    "scale-out-model": runs.modelled,
    "usual": lambda data: _of_points(_usual(data)),
    "models": lambda data: _of_points(_measured(data)),
    "sizes": _sizes,
    "rows": _rows,
    "growth": _growth,
    "dtypes": _dtypes,
    "scaling": _scaling,
    "memory": _memory,
    "far-rows": _far_rows,
    "first-step": partial(_with_limits, name="first-step"),
    "fresh-states": _fresh_states,
    "thor": partial(_with_limits, name="thor"),
    "changing-steps": partial(_with_limits, name="changing-steps"),
    "training": _training,
    "dlrm-training": _dlrm_training,
    "in-mindspore": _in_mindspore,
    "gpu": _gpu,
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
