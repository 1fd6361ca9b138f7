"""The results as a picture: shares of the bound, ratios to peers, or the times of one point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cases.steps import LOOP
from .document import same
from .result import OF_BOUND, OURS
from .table import IN_WORDS, contestants, seconds, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _LINE, _MANY = 12.0, 0.24, 10  # inches; more lines than colours there are
Points = list[dict[str, Any]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the points of a results document; the ending of ``path`` says in which format.

    Cases that were measured at several sizes are lines over the bytes that a step moves, one
    panel for the bound and one for each peer; cases of one size are dots, a row for each. A single
    case with peers is drawn as bars: its time, and that of each peer's fastest form, a panel for
    each scenario.
    """
    from matplotlib import rc_context

    points = [point for point in document["points"] if OURS in point["times"]]
    is_one = len({same(point) for point in points}) == 1 and points[0]["peers"]
    figure = _bars(points) if is_one else _panels([p for p in points if p["scenario"] == LOOP])
    figure.suptitle(_title(document))
    # In an SVG words stay words, and nothing in it says when it was drawn.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusestep"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(points: Points) -> Figure:
    from matplotlib.figure import Figure

    first = {name: label for name, label in contestants(points[0]).items() if name != "bound"}
    names = sorted(first, key=lambda name: float(points[0]["times"][first[name]]["median"]))
    size_of_all = (0.7 * _WIDTH if len(points) == 1 else _WIDTH, 0.4 * len(names) + 1.5)
    figure = Figure(figsize=size_of_all, layout="constrained")
    axes = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
    for point, axis in zip(points, axes, strict=True):
        labels = contestants(point)
        times = [point["times"][labels[n]]["median"] if n in labels else 0.0 for n in names]
        colours = ["C0" if name == OURS else "0.75" for name in names]
        bars = axis.barh([first[n] for n in names], [1e3 * t for t in times], color=colours)
        axis.bar_label(bars, [seconds(t) if t else "n/a" for t in times], padding=4)
        axis.set_xlabel("milliseconds for one step")
        axis.margins(x=0.12 * len(points))
        axis.spines[["top", "right"]].set_visible(False)
        if len(points) > 1:
            axis.set_title(IN_WORDS[point["scenario"]], fontsize="medium", loc="left")
    axes[0].invert_yaxis()
    point = points[0]
    threads = f"{point['threads']} thread{'s' * (point['threads'] > 1)}"
    figure.supxlabel(
        f"{point['case']}, {size(point)}, {point['dtype']}, {threads}", fontsize="medium"
    )
    return figure


def _panels(points: Points) -> Figure:
    from matplotlib.figure import Figure

    series = _series(points)
    curves = {name: points for name, points in series.items() if len(points) > 1}
    single = {name: points[0] for name, points in series.items() if len(points) == 1}
    peers = list(dict.fromkeys(p for points in series.values() for x in points for p in x["peers"]))
    rows = (len(peers) + 2) // 2 if curves else 0
    height = 4.0 * rows + (_LINE * len(single) + 1.5 if single else 0.0)
    figure = Figure(figsize=(_WIDTH, max(height, 2.0)), layout="constrained")
    parts = [4.0 * rows] if curves else []
    parts += [_LINE * len(single) + 1.5] if single else []
    grids = list(
        figure.subfigures(len(parts) or 1, 1, height_ratios=parts or [1], squeeze=False).flat
    )
    if curves:
        axes = grids.pop(0).subplots(rows, 2, squeeze=False).flat
        _curves_of_bound(next(axes), curves)
        for peer, axis in zip(peers, axes, strict=False):
            _curves_of_peer(axis, curves, peer)
        for axis in axes:
            axis.set_axis_off()
    if single:
        left, right = grids.pop(0).subplots(1, 2, sharey=True)
        _dots_of_bound(left, single)
        _dots_of_peers(right, single, peers)
    return figure


def _title(document: dict[str, Any]) -> str:
    version, machine = document["fusestep"]["version"], document["machine"]
    return f"fusestep {version} on {machine['cpu']}, {document['date'][:10]}"


def _series(points: Points) -> dict[str, Points]:
    """Points that differ in size only, in the order of what they move."""
    several = {key: len({p[key] for p in points}) > 1 for key in ("indices", "dtype", "threads")}
    series: dict[str, Points] = {}
    for point in sorted(points, key=lambda p: p["bytes"]):
        marks = [str(point[key]) for key, shown in several.items() if shown and point[key]]
        series.setdefault(" ".join([point["case"], *marks]), []).append(point)
    return series


def _curves_of_bound(axis: Axes, curves: dict[str, Points]) -> None:
    for name, points in curves.items():
        known = [point for point in points if point["bound"]]
        axis.plot(
            [point["bytes"] for point in known],
            [100 * point["bound"]["value"] for point in known],
            marker="o",
            markersize=3,
            label=name,
        )
    axis.axhline(100, color="black", linewidth=0.8)
    axis.axhline(100 * OF_BOUND, color="black", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", ylim=(0, 125), xlabel="bytes that a step moves", ylabel="% of the bound")
    axis.legend(fontsize="xx-small", ncols=1 + len(curves) // _MANY)


def _curves_of_peer(axis: Axes, curves: dict[str, Points], peer: str) -> None:
    for name, points in curves.items():
        known = [point for point in points if peer in point["peers"]]
        line = axis.plot(
            [point["bytes"] for point in known],
            [point["peers"][peer]["value"] for point in known],
            marker="o",
            markersize=3,
        )
        line[0].set_label(name)  # the colours are those of the first panel
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="bytes that a step moves")
    axis.set_ylabel(f"times faster than {peer}")


def _dots_of_bound(axis: Axes, single: dict[str, dict[str, Any]]) -> None:
    known = {name: point["bound"] for name, point in single.items() if point["bound"]}
    axis.errorbar(
        [100 * bound["value"] for bound in known.values()],
        list(known),
        xerr=_spread(list(known.values()), 100),
        fmt="o",
        markersize=4,
        linewidth=0.8,
    )
    axis.axvline(100, color="black", linewidth=0.8)
    axis.axvline(100 * OF_BOUND, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlim=(0, 125), xlabel="% of the bound")
    axis.invert_yaxis()
    axis.grid(axis="y", linewidth=0.3)


def _dots_of_peers(axis: Axes, single: dict[str, dict[str, Any]], peers: list[str]) -> None:
    for peer in peers:
        known = {name: p["peers"][peer] for name, p in single.items() if peer in p["peers"]}
        axis.errorbar(
            [against["value"] for against in known.values()],
            list(known),
            xerr=_spread(list(known.values()), 1),
            fmt="o",
            markersize=4,
            linewidth=0.8,
            label=peer,
        )
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="times faster than the fastest form of")
    axis.grid(axis="y", linewidth=0.3)
    if peers:
        axis.legend(fontsize="small")


def _spread(found: Points, factor: float) -> list[list[float]]:
    """Distances to the low and the high end."""
    return [
        [factor * max(0.0, against["value"] - against["low"]) for against in found],
        [factor * max(0.0, against["high"] - against["value"]) for against in found],
    ]
