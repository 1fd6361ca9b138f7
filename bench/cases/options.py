"""The options of ``fusestep bench``: what they may be, and what they mean.

Values are parsed here and not by argparse, so that a wrong one costs one line.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

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
    add("--dtype", metavar="NAMES", help="float32 (default), bfloat16, float16, or all")
    add(
        "--scenario",
        metavar="NAMES",
        help=f"what is between two steps, or beside them: {', '.join(SCENARIOS)} (default: "
        f"{cases.LOOP}: nothing), or all",
    )
    add("--threads", metavar="N", help="threads of everything; several with commas (default: all)")
    add("--seconds", metavar="S", help=f"time for each point (default: {SECONDS})")
    add("--quick", action="store_true", help=f"the same as --seconds {_QUICK}: rough figures")
    add(
        "--peers",
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
    add("--json", metavar="FILE", help="write the results there")
    add("--plot", metavar="FILE", help="draw them there: .png, .svg or .pdf")
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
        metavar="N",
        help="instead of the cases: a table that so many processes own; several with commas",
    )
    add("--check", action="store_true", help="check the tables of the documents, in a checkout")


@dataclass(frozen=True)
class Request:
    """What is to be measured, and what becomes of it."""

    points: list[Point]
    special: list[SpecialCase]
    seconds: float  # that the measurement of a point may take
    # The interpreter of each peer that was asked for; None where there is none.
    pythons: dict[str, str | None]
    # Files to write.
    json: Path | None
    plot: Path | None
    against: str | None  # what to compare with: the text of the option
    left_out: list[str]  # cases for which no size or dtype that was asked for fits

    @property
    def threads(self) -> int:
        """Of the cases that are measured with one number only."""
        return max((p.threads for p in self.points), default=get_num_threads())


def parse(args: argparse.Namespace) -> Request:
    """Check all options.

    Raises:
        BenchError: one of them is wrong.
    """
    chosen, most = cases.select(args.cases), get_num_threads()
    steps = [case for case in chosen if isinstance(case, Case)]
    asked = indices.DEFAULT if args.indices is None else args.indices
    if asked.strip() == "all":
        asked = ",".join(indices.PUBLISHED)
    points = cases.points(
        steps,
        args.size,
        _names("--dtype", args.dtype, tuple(DTYPES), default=["float32"]),
        whole_numbers("--threads", str(most) if args.threads is None else args.threads, most),
        [indices.check_distribution(name) for name in _parts(asked)],
        parse_scenarios(args.scenario),
    )
    found = {}
    for peer in PEERS:
        option = interpreter_option(peer).removeprefix("--").replace("-", "_")
        found[peer] = find_python(peer, getattr(args, option))
    usual = [peer for peer, kind in PEERS.items() if kind.is_default]
    is_alone = args.peers is not None and args.peers.strip() == "none"
    peers = [] if is_alone else _names("--peers", args.peers, tuple(PEERS), usual, "all or none")
    json, plot = (None if path is None else Path(path) for path in (args.json, args.plot))
    if json is not None:
        document.check_writable(json)
    if plot is not None:
        check_plot(plot)
    return Request(
        points=points,
        special=[case for case in chosen if isinstance(case, SpecialCase)],
        seconds=parse_seconds(args.seconds, quick=args.quick),
        pythons={peer: found[peer] for peer in peers},
        json=json,
        plot=plot,
        against=_against(args),
        left_out=[case.name for case in steps if not any(p.case is case for p in points)],
    )


def _against(args: argparse.Namespace) -> str | None:
    """What to compare with; a commit takes no other options of the report."""
    against: str | None = args.against
    if against is None or Path(against).is_file():
        return against
    others = ("json", "plot", "peers")
    if given := [f"--{name}" for name in others if getattr(args, name) is not None]:
        raise BenchError(
            f"--against {against}: no such file, and to compare with a commit takes no "
            f"{' and no '.join(given)}"
        )
    return against


def other_option(args: argparse.Namespace, *taken: str) -> str | None:
    """One that was given beside those that are taken, if any."""
    for name, value in sorted(vars(args).items()):
        if name not in taken and value not in (None, False, []):
            names = {"cases": "cases", "earlier": "--from"}
            return names.get(name, f"--{name.replace('_', '-')}")
    return None


def whole_numbers(option: str, text: str, most: int) -> list[int]:
    """Different numbers from 1, separated by commas.

    Raises:
        BenchError: anything else.
    """
    counts = [int(part) if part.isdecimal() else 0 for part in _parts(text)]
    if not all(1 <= count <= most for count in counts):
        raise BenchError(f"{option}: expected whole numbers from 1 to {most}, got {text!r}")
    return list(dict.fromkeys(counts))


def parse_seconds(text: str | None, *, quick: bool) -> float:
    """Seconds for a point.

    Raises:
        BenchError: it is no number above 0, or contradicts ``--quick``.
    """
    if text is None:
        return _QUICK if quick else SECONDS
    if quick:
        raise BenchError("--quick: is --seconds of its own, give one of the two")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise BenchError(f"--seconds: expected a number above 0, got {text!r}")
    return seconds


def names_of_scenarios(text: str | None) -> list[str]:
    """Names of scenarios, separated by commas; None for the one without anything else.

    Raises:
        BenchError: an unknown name.
    """
    return _names("--scenario", text, SCENARIOS, default=[cases.LOOP])


def parse_scenarios(text: str | None) -> list[str]:
    """`names_of_scenarios` that are to be measured.

    Raises:
        BenchError: an unknown name, or one that needs what is not installed.
    """
    names = names_of_scenarios(text)
    for name in names:
        library = name.partition("-")[0]
        if library in ("torch", "jax") and find_spec(library) is None:
            raise BenchError(f"--scenario {name}: needs {library} in this environment")
    return names


def _names(
    option: str, text: str | None, known: tuple[str, ...], default: list[str], special: str = "all"
) -> list[str]:
    if text is None:
        return default
    names = list(known) if text.strip() == "all" else _parts(text)
    for name in names:
        if name not in known:
            expected = f"names out of {', '.join(known)}, or {special}"
            raise BenchError(f"{option}: expected {expected}, got {name!r}")
    return names


def _parts(text: str) -> list[str]:
    """What is between the commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def check_plot(path: Path) -> None:
    """Find out before the measurement whether the plot can be drawn.

    Raises:
        BenchError: it cannot.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BenchError(f"--plot: expected a file .png, .svg or .pdf, got {str(path)!r}")
    document.check_writable(path, "--plot")
