"""``fusestep bench --from FILE``: the report and the picture of an earlier run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cases.options import check_plot, names_of_scenarios
from ..cases.steps import select
from ..errors import BenchError
from . import document, plot, table

_TAKEN = ("cases", "earlier", "plot", "scenario")


def main(args: argparse.Namespace) -> int:
    """Print the results of the file, of the cases that were named or all, and draw them.

    Raises:
        BenchError: the file holds none of them, or an option belongs to a measurement.
    """
    others = [name for name, value in vars(args).items() if value and name not in _TAKEN]
    if others:
        option = f"--{others[0].replace('_', '-')}"
        raise BenchError(f"--from {args.earlier}: measures nothing, so it takes no {option}")
    data = document.read(Path(args.earlier), "--from")
    if args.cases:
        names = {case.name for case in select(args.cases)}
        data["points"] = [point for point in data["points"] if point["case"] in names]
        data["special"] = [special for special in data["special"] if special["name"] in names]
    if args.scenario:
        scenarios = names_of_scenarios(args.scenario)
        data["points"] = [point for point in data["points"] if point["scenario"] in scenarios]
    if not data["points"] and not data["special"]:
        asked = ", ".join([*args.cases, *([args.scenario] if args.scenario else [])])
        raise BenchError(f"--from {args.earlier}: holds no results of {asked}")
    if args.plot is not None:
        check_plot(Path(args.plot))
    table.show(data, table.console())
    if args.plot is not None:
        plot.draw(data, Path(args.plot))
    return 0
