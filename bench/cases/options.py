"""The options of ``fusestep bench``: what they may be, and what they mean."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ... import get_num_threads
from ..errors import BenchError
from ..peer import PEERS, find_python, interpreter_option
from ..report import document
from ..report.result import SECONDS
from ..workers.worker_protocol import SCENARIOS
from . import indices
from . import steps as cases
from .steps import Case, Point, SpecialCase
from .subject import DTYPES

_QUICK = 0.2
_MOST_PROCESSES = 64  # on one machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``parser``."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases such as nn.Adam, 'rows/*' or first-step")
    add("--list", action="store_true", help="name the cases, all or those given, and end")
    add(
        "--size",
        metavar="SIZES",
        help="elements of dense cases (64K, 16M, 1K..64M), N x D x B of row cases "
        "(500000x64x65536), or all; several with commas",
    )
    add("--indices", metavar="NAMES", help="of row cases: uniform, zipf1.2, equal, or all")
    add(
        "--dtype",
        type=_names(DTYPES),
        metavar="NAMES",
        help="float32 (default), bfloat16, float16, or all",
    )
    add(
        "--scenario",
        type=_names(SCENARIOS),
        metavar="NAMES",
        help=f"what is between two steps, or beside them: {', '.join(SCENARIOS)} (default: "
        f"{cases.LOOP}: nothing), or all",
    )
    add(
        "--threads",
        type=_whole_numbers(get_num_threads),
        metavar="N",
        help="threads of everything; several with commas (default: all)",
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help=f"time for each point (default: {SECONDS})",
    )
    time.add_argument(
        "--quick", action="store_true", help=f"the same as --seconds {_QUICK}: rough figures"
    )
    add(
        "--peers",
        type=_names(PEERS, or_none=True),
        metavar="NAMES",
        help=f"libraries to compare with: {', '.join(PEERS)}; all, none (default: all but "
        f"{', '.join(peer for peer in PEERS if not PEERS[peer].is_default)}, which compile for "
        "every point)",
    )
    for peer in (peer for peer, kind in PEERS.items() if kind.interpreter is None):
        add(
            interpreter_option(peer),
            metavar="PATH",
            help=f"an interpreter that has {' and '.join(PEERS[peer].modules)} (default: this)",
        )
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--plot", type=Path, metavar="FILE", help="draw them there: .png, .svg or .pdf")
    add(
        "--against",
        metavar="FILE|GIT-REF",
        help="compare with an earlier --json file, or, in a checkout, with another commit",
    )
    add(
        "--from",
        dest="earlier",
        metavar="FILE",
        help="measure nothing: show, and --plot, an earlier --json file, or CASE of it",
    )
    add(
        "--processes",
        type=_whole_numbers(lambda: _MOST_PROCESSES),
        metavar="N",
        help="instead of the cases: a table that so many processes own; several with commas",
    )
    add("--check", action="store_true", help="check the tables of the documents, in a checkout")


# -- types of values ------------------------------------------------------------------------------


def _names(known: Collection[str], *, or_none: bool = False) -> Callable[[str], list[str]]:
    """Names with commas, each once; ``all``, and ``none`` where it may be."""

    def parse(text: str) -> list[str]:
        if or_none and text.strip() == "none":
            return []
        names = [*known] if text.strip() == "all" else _parts(text)
        for name in names:
            if name not in known:
                others = "all or none" if or_none else "all"
                expected = f"names out of {', '.join(known)}, or {others}"
                raise ArgumentTypeError(f"expected {expected}, got {name!r}")
        return names

    return parse


def _whole_numbers(most: Callable[[], int]) -> Callable[[str], list[int]]:
    """Different numbers from 1 with commas."""

    def parse(text: str) -> list[int]:
        counts = [int(part) if part.isdecimal() else 0 for part in _parts(text)]
        if not all(1 <= count <= most() for count in counts):
            raise ArgumentTypeError(f"expected whole numbers from 1 to {most()}, got {text!r}")
        return list(dict.fromkeys(counts))

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return seconds


def _parts(text: str) -> list[str]:
    """The words between the commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


# -- what is to be done ---------------------------------------------------------------------------


class Request(NamedTuple):
    """Points and cases to be measured, and with whom."""

    points: list[Point]
    special: list[SpecialCase]
    # The interpreter of each peer that was asked for; None where there is none.
    pythons: dict[str, str | None]
    seconds: float  # that the measurement of a point may take
    left_out: list[str]  # cases for which no size or dtype that was asked for fits


def request(args: argparse.Namespace) -> Request:
    """The points and cases that the options ask for.

    Raises:
        BenchError: they do not fit each other, or this machine.
    """
    chosen = cases.select(args.cases)
    steps = [case for case in chosen if isinstance(case, Case)]
    drawn = indices.DEFAULT if args.indices is None else args.indices
    if drawn.strip() == "all":
        drawn = ",".join(indices.PUBLISHED)
    scenarios = args.scenario or [cases.LOOP]
    for library in {name.partition("-")[0] for name in scenarios} & {"torch", "jax"}:
        if find_spec(library) is None:
            raise BenchError(f"--scenario {library}: needs {library} in this environment")
    distributions = [indices.check_distribution(name) for name in _parts(drawn)]
    dtypes, threads = args.dtype or ["float32"], args.threads or [get_num_threads()]
    points = cases.points(steps, args.size, dtypes, threads, distributions, scenarios)
    found = {}
    for peer in PEERS:
        option = interpreter_option(peer).removeprefix("--").replace("-", "_")
        found[peer] = find_python(peer, getattr(args, option))
    usual = [peer for peer, kind in PEERS.items() if kind.is_default]
    pythons = {peer: found[peer] for peer in (usual if args.peers is None else args.peers)}
    check_files(args)
    _check_against(args)
    left_out = [case.name for case in steps if not any(p.case is case for p in points)]
    special = [case for case in chosen if isinstance(case, SpecialCase)]
    return Request(points, special, pythons, seconds_of(args, SECONDS, _QUICK), left_out)


def seconds_of(args: argparse.Namespace, usual: float, quick: float) -> float:
    """The seconds that were asked for, or one of two defaults."""
    given: float | None = args.seconds
    return given or (quick if args.quick else usual)


def check_files(args: argparse.Namespace) -> None:
    """Find out before the measurement whether the files can be written.

    Raises:
        BenchError: they cannot.
    """
    if args.json is not None:
        document.check_writable(args.json)
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise BenchError(f"--plot: expected a file .png, .svg or .pdf, got {str(args.plot)!r}")
        document.check_writable(args.plot, "--plot")


def _check_against(args: argparse.Namespace) -> None:
    """To compare with a commit takes no other options of the report."""
    if args.against is None or Path(args.against).is_file():
        return
    others = ("json", "plot", "peers")
    if given := [f"--{name}" for name in others if getattr(args, name) is not None]:
        raise BenchError(
            f"--against {args.against}: no such file, and to compare with a commit takes no "
            f"{' and no '.join(given)}"
        )


def other_option(args: argparse.Namespace, *taken: str) -> str | None:
    """One that was given beside those that are taken, if any."""
    for name, value in sorted(vars(args).items()):
        is_given = bool(value) if name == "cases" else value not in (None, False)
        if is_given and name not in taken:
            names = {"cases": "cases", "earlier": "--from"}
            return names.get(name, f"--{name.replace('_', '-')}")
    return None
