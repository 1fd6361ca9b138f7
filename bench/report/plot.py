"""The results as a picture: the times of each case, beside those of its peers."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from .document import same
from .result import OURS
from .table import IN_WORDS, contestants, seconds, size_in_words

_NARROW = 5.6  # inches: about the width of a phone
_NAMES = {
    "numpy": "NumPy", "torch": "PyTorch", "mindspore": "MindSpore", "mxnet": "MXNet",
    "deepspeed": "DeepSpeed", "fbgemm": "FBGEMM",
}  # fmt: skip
Points = list[dict[str, Any]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the points of a results document; the ending of ``path`` says in which format.

    Panels lie one below the other, as wide as a phone: of each case in each scenario our time, and
    that of each peer's fastest form, as bars.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    points = [point for point in document["points"] if OURS in point["times"]]
    groups = []
    for _, found in groupby(points, same):
        alike = list(found)
        groups += [(point, _names(alike)) for point in alike]
    heights = [0.3 * len(names) + 0.9 for _, names in groups]
    figure = Figure(figsize=(_NARROW, sum(heights) + 0.9), layout="constrained")
    version, machine = document["fusestep"]["version"], document["machine"]
    setting = f"fusestep {version} on {machine['cpu']}, {document['date'][:10]}"
    figure.supxlabel(setting, fontsize="small")
    if groups:
        is_one = len({same(point) for point in points}) == 1
        panels = figure.subplots(
            len(groups), 1, sharex=is_one, squeeze=False, height_ratios=heights
        )
        axes = panels[:, 0]
        for axis, (point, names) in zip(axes, groups, strict=True):
            _bars(axis, point, names)
        axes[-1].set_xlabel("milliseconds for one step")
    # In an SVG words stay words, and nothing in it says when it was drawn.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusestep"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _names(group: Points) -> list[str]:
    """Ours and the peers, the fastest of the first point first."""
    first = {name: label for name, label in contestants(group[0]).items() if name != "bound"}
    return sorted(first, key=lambda name: float(group[0]["times"][first[name]]["median"]))


def _bars(axis: Any, point: dict[str, Any], names: list[str]) -> None:
    """The times of the point, below what it is."""
    labels = contestants(point)
    times = [point["times"][labels[n]]["median"] if n in labels else 0.0 for n in names]
    words = [_plain(n, labels.get(n, n)) for n in names]
    colours = ["C0" if name == OURS else "0.75" for name in names]
    bars = axis.barh(words, [1e3 * t for t in times], color=colours)
    axis.bar_label(bars, [seconds(t) if t else "n/a" for t in times], padding=4)
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    title = f"{point['case'].partition('/')[2]}: {size_in_words(point)}"
    kind = f"{point['dtype']}, {point['threads']} thread{'s' * (point['threads'] > 1)}"
    words_of = f"{title}\n{kind}, {IN_WORDS[point['scenario']]}"
    axis.set_title(words_of, fontsize="medium", loc="left")


def _plain(peer: str, label: str) -> str:
    """The name of a contestant, with its form where that is a class."""
    form, name = label.partition(" ")[2], _NAMES.get(peer, peer)
    if not (form.isidentifier() and form[0].isupper()):
        return name
    return form if form.startswith(name) else f"{name} {form}"
