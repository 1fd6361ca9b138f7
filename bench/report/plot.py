"""The results as a picture: shares of the bound, ratios to peers, or the times of one point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..cases.steps import LOOP
from .document import same
from .result import OF_BOUND, OURS
from .table import IN_WORDS, contestants, seconds, size_in_words

_NARROW = 5.6  # inches: about the width of a phone
_PANEL, _LINE = 3.2, 0.24  # inches
_NAMES = {
    "numpy": "NumPy", "torch": "PyTorch", "mindspore": "MindSpore", "mxnet": "MXNet",
    "deepspeed": "DeepSpeed", "fbgemm": "FBGEMM",
}  # fmt: skip
Points = list[dict[str, Any]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the points of a results document; the ending of ``path`` says in which format.

    Panels lie one below the other, as wide as a phone. Cases that were measured at several sizes
    are lines over the bytes that a step moves, in a panel for the bound and in one for each peer;
    cases of one size are dots, a row for each. A single case with peers is drawn as bars: its time,
    and that of each peer's fastest form, a panel for each scenario.
    """
    from matplotlib import rc_context

    points = [point for point in document["points"] if OURS in point["times"]]
    is_one = len({same(point) for point in points}) == 1 and points[0]["peers"]
    version, machine = document["fusestep"]["version"], document["machine"]
    setting = f"fusestep {version} on {machine['cpu']}, {document['date'][:10]}"
    if is_one:
        figure, point = _bars(points), points[0]
        threads = f"{point['threads']} thread{'s' * (point['threads'] > 1)}"
        figure.suptitle(f"{point['case'].partition('/')[2]}: {size_in_words(point)}")
        figure.supxlabel(f"{setting}\n{point['dtype']}, {threads}", fontsize="small")
    else:
        figure = _panels([point for point in points if point["scenario"] == LOOP])
        figure.suptitle(setting)
    # In an SVG words stay words, and nothing in it says when it was drawn.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusestep"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_NARROW, height), layout="constrained")


def _bars(points: Points) -> Any:
    point = points[0]
    first = {name: label for name, label in contestants(point).items() if name != "bound"}
    names = sorted(first, key=lambda name: float(point["times"][first[name]]["median"]))
    figure = _figure(len(points) * (0.3 * len(names) + 0.5) + 0.9)
    axes = figure.subplots(len(points), 1, sharex=True, squeeze=False)[:, 0]
    colours = ["C0" if name == OURS else "0.75" for name in names]
    for shown, axis in zip(points, axes, strict=True):
        labels = contestants(shown)
        times = [shown["times"][labels[n]]["median"] if n in labels else 0.0 for n in names]
        words = [_plain(n, labels.get(n, n)) for n in names]
        bars = axis.barh(words, [1e3 * t for t in times], color=colours)
        axis.bar_label(bars, [seconds(t) if t else "n/a" for t in times], padding=4)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        if len(points) > 1:
            axis.set_title(IN_WORDS[shown["scenario"]], fontsize="medium", loc="left")
    axes[-1].set_xlabel("milliseconds for one step")
    return figure


def _plain(peer: str, label: str) -> str:
    """The name of a contestant, with its form where that is a class."""
    form, name = label.partition(" ")[2], _NAMES.get(peer, peer)
    if not (form.isidentifier() and form[0].isupper()):
        return name
    return form if form.startswith(name) else f"{name} {form}"


def _panels(points: Points) -> Any:
    series = _series(points)
    curves = {name: points for name, points in series.items() if len(points) > 1}
    single = {name: points[0] for name, points in series.items() if len(points) == 1}
    peers = list(dict.fromkeys(p for points in series.values() for x in points for p in x["peers"]))
    drawn = [peer for peer in peers if any(peer in x["peers"] for c in curves.values() for x in c)]
    heights = [_PANEL] * (1 + len(drawn)) * bool(curves)
    heights += [_LINE * len(single) + 1.0] * (1 + bool(peers)) * bool(single)
    figure = _figure(sum(heights) + 0.5)
    if not heights:
        return figure
    axes = iter(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if curves:
        for against in (None, *drawn):
            _curves(next(axes), curves, against)
    if single:
        axis = next(axes)
        _dots(axis, single, None)
        axis.set(xlim=(0, 125), xlabel="% of the bound")
        if peers:
            axis = next(axes)
            for peer in peers:
                _dots(axis, single, peer)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set(xscale="log", xlabel="times faster than the fastest form of")
            axis.legend(fontsize="small")
    return figure


def _series(points: Points) -> dict[str, Points]:
    """Points that differ in size only, in the order of what they move."""
    several = {key: len({p[key] for p in points}) > 1 for key in ("indices", "dtype", "threads")}
    series: dict[str, Points] = {}
    for point in sorted(points, key=lambda p: p["bytes"]):
        marks = [str(point[key]) for key, shown in several.items() if shown and point[key]]
        series.setdefault(" ".join([point["case"], *marks]), []).append(point)
    return series


def _against(point: dict[str, Any], peer: str | None) -> dict[str, float] | None:
    """Times faster than a peer with the spread; or the share of the bound, in per cent."""
    found: dict[str, Any] | None = point["bound"] if peer is None else point["peers"].get(peer)
    factor = 100 if peer is None else 1
    return found and {name: factor * found[name] for name in ("value", "low", "high")}


def _curves(axis: Any, curves: dict[str, Points], peer: str | None) -> None:
    for name, points in curves.items():
        known = [(p["bytes"], found["value"]) for p in points if (found := _against(p, peer))]
        (line,) = axis.plot(*(np.array(known).reshape(-1, 2).T), marker="o", markersize=3)
        line.set_label(name)  # the colours are those of the first panel
    axis.set(xscale="log", xlabel="bytes that a step moves")
    if peer is None:
        for share, style in ((100, "-"), (100 * OF_BOUND, ":")):
            axis.axhline(share, color="black", linewidth=0.8, linestyle=style)
        axis.set(ylim=(0, 125), ylabel="% of the bound")
        axis.legend(fontsize="small", ncols=2)
    else:
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(yscale="log", ylabel=f"times faster than {_NAMES.get(peer, peer)}")


def _dots(axis: Any, single: dict[str, dict[str, Any]], peer: str | None) -> None:
    known = {name: found for name, point in single.items() if (found := _against(point, peer))}
    values = [found["value"] for found in known.values()]
    spread = [
        [max(0.0, found["value"] - found["low"]) for found in known.values()],
        [max(0.0, found["high"] - found["value"]) for found in known.values()],
    ]
    look: dict[str, Any] = {"fmt": "o", "markersize": 4, "linewidth": 0.8, "label": peer}
    axis.errorbar(values, list(known), xerr=spread, **look)
    if peer is None:
        for share, style in ((100, "-"), (100 * OF_BOUND, ":")):
            axis.axvline(share, color="black", linewidth=0.8, linestyle=style)
