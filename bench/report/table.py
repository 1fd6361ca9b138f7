"""Tables: one model, two writers, and how figures of points are written in cells.

A cell is text with its unit, in Markdown: what falls short of its limit is **bold**, names of cases
are in backticks. On the terminal the first is red, and the second plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box, table
from rich.markup import escape
from rich.text import Text

from ..cases.model_shapes import many_small
from ..cases.workloads import CLICK_LOG, number
from .document import same
from .result import OF_BOUND, OURS

Point = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of cells below the names of their columns."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1  # so many columns are text, and the others figures
    title: str = ""


def markdown(of: Table) -> str:
    """The table for a document, without its title."""
    n_figures = len(of.head) - of.left
    lines = [[*of.head], ["---"] * of.left + ["---:"] * n_figures, *map(list, of.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def on_terminal(of: Table) -> table.Table:
    """The table for a terminal, without its title; cells are folded where it is too wide."""
    found = table.Table(box=box.SIMPLE_HEAD)
    for place, name in enumerate(of.head):
        side: Literal["left", "right"] = "left" if place < of.left else "right"
        found.add_column(_coloured(name), justify=side, overflow="fold")
    for row in of.rows:
        found.add_row(*map(_coloured, row))
    return found


def _coloured(cell: str) -> Text:
    marked = re.sub(r"\*\*(.*?)\*\*", r"[bold red]\1[/]", escape(cell.replace("`", "")))
    return Text.from_markup(marked)


def bold(text: str, *, when: bool) -> str:
    """The text of a cell, which stands out in that case."""
    return f"**{text}**" if when else text


# -- units ----------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A time with three digits or so."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.{2 if value < 0.1 else 0}f} ms"
    return f"{value * 1e6:.{0 if value >= 1e-4 else 1}f} us"


def memory(count: int | None) -> str:
    """A number of bytes."""
    if count is None:
        return "n/a"
    return f"{count / 2**20:.1f} MB" if count >= 2**20 else f"{count / 2**10:.0f} KB"


# -- points and their figures in words ------------------------------------------------------------

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
_MODELS = {
    "many-small": f"{len(many_small())} small tensors",
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2 small",
    "dlrm": "the tables and layers of a DLRM",
    "bags": "the tables and layers of a click log",
}


def size(point: Point) -> str:
    """The size, with the distribution of rows."""
    return f"{point['size']} {point['indices']}" if point["indices"] else str(point["size"])


def size_in_words(point: Point) -> str:
    """The size for readers who do not know how sizes are written here."""
    match str(point["size"]).split("x"):
        case [rows, width, length]:
            found = f"{number(rows):,} rows of {width}, {number(length):,} looked up"
        case [model] if model in _MODELS:
            found = _MODELS[model]
        case [*tables, rows, width, samples, bag]:
            alike = f"{number(tables[0]):,} tables of " if tables else ""
            log = rows == CLICK_LOG
            of = "the tables of a click log" if log else f"{alike}{number(rows):,} rows"
            found = f"{of}, {width} wide, {number(samples):,} bags of {number(bag):,} ids"
        case [elements] if elements[0].isdigit():
            found = f"{number(elements):,} numbers"
        case _:
            found = size(point)
    return found


def peers_of(points: Iterable[Point]) -> list[str]:
    """The peers that any of the points was compared with."""
    return list(dict.fromkeys(peer for point in points for peer in point["peers"]))


def scenarios_of(points: Iterable[Point]) -> list[str]:
    """The scenarios of the points, in their order."""
    return list(dict.fromkeys(point["scenario"] for point in points))


def by_scenario(points: Iterable[Point]) -> list[tuple[Point, dict[str, Point]]]:
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


def time(point: Point | None, of: str = OURS) -> str:
    """The median of a contestant."""
    label = contestants(point).get(of) if point else None
    return seconds(point["times"][label]["median"]) if point and label else "n/a"


def speed(point: Point) -> str:
    """In GB/s, by the model of the traffic."""
    return f"{point['bytes'] / point['times'][OURS]['median'] / 1e9:.1f}"


def share(point: Point) -> str:
    """The share of the bound's speed; in brackets where the arrays were in the cache."""
    if point["bound"] is None:
        return "n/a"
    value = point["bound"]["value"]
    if not point["from_memory"]:
        return f"({value:.0%})"
    return bold(f"{value:.0%}", when=value < OF_BOUND)


def speedup(point: Point | None, peer: str) -> str:
    """Times faster than a peer."""
    if point is None or peer not in point["peers"]:
        return "n/a"
    value = point["peers"][peer]["value"]
    return bold(f"{value:.2f}", when=value < 1)


Column = Callable[[Point], str]


def of_points(points: Sequence[Point], left: int, **columns: Column) -> Table:
    """A row for each point; ``left`` columns are text, the case being one of them."""
    rows = [
        [f"`{point['case']}`", *(column(point) for column in columns.values())] for point in points
    ]
    return Table(["case", *columns], rows, left)
