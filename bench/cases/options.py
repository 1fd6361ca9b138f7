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
_ON_DEVICES = (
    "cases", "device", "size", "indices", "dtype", "seconds", "quick", "json", "append", "plot",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``parser``."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases such as nn.Adam, 'rows/*' or first-step")
    add("--list", action="store_true", help="name the cases, all or those given, and end")
    text = "elements of dense cases (64K, 16M, 1K..64M), N x D x B of row cases, or all"
    add("--size", metavar="SIZES", help=f"{text}; several with commas")
    add("--indices", metavar="NAMES", help="of row cases: uniform, zipf1.2, equal, or all")
    text = "float32 (default), bfloat16, float16, or all"
    add("--dtype", type=_names(DTYPES), metavar="NAMES", help=text)
    text = f"what is between two steps, or beside them: {', '.join(SCENARIOS)}, or all"
    add("--scenario", type=_names(SCENARIOS), metavar="NAMES", help=f"{text} (default: loop)")
    text = "threads of everything; several with commas (default: all)"
    add("--threads", type=_whole_numbers(get_num_threads), metavar="N", help=text)
    add("--device", choices=["cuda"], help="measure steps on a CUDA device, beside a copy there")
    time, text = parser.add_mutually_exclusive_group(), f"time for each point (default: {SECONDS})"
    time.add_argument("--seconds", type=_seconds, metavar="S", help=text)
    text = f"the same as --seconds {_QUICK}: rough figures"
    time.add_argument("--quick", action="store_true", help=text)
    usual = ", ".join(peer for peer, kind in PEERS.items() if kind.is_default)
    text = f"libraries to compare with: {', '.join(PEERS)}; all, none (default: {usual})"
    add("--peers", type=_names(PEERS, or_none=True), metavar="NAMES", help=text)
    for peer, kind in PEERS.items():
        if kind.interpreter is None:
            text = f"an interpreter that has {' and '.join(kind.modules)} (default: this)"
            add(interpreter_option(peer), metavar="PATH", help=text)
    add("--json", type=_writable("--json"), metavar="FILE", help="write the results there")
    add("--append", action="store_true", help="to those of other points that --json FILE holds")
    pictures = _writable("--plot", ".png", ".svg", ".pdf")
    add("--plot", type=pictures, metavar="FILE", help="draw them there: .png, .svg or .pdf")
    text = "compare with an earlier --json file, or, in a checkout, with another commit"
    add("--against", metavar="FILE|GIT-REF", help=text)
    text = "measure nothing: show, and --plot, an earlier --json file, or CASE of it"
    add("--from", dest="earlier", metavar="FILE", help=text)
    text = "instead of the cases: a table that so many processes own; several with commas"
    add("--processes", type=_whole_numbers(lambda: _MOST_PROCESSES), metavar="N", help=text)
    add("--check", action="store_true", help="check the tables of the documents, in a checkout")


# -- types of values ------------------------------------------------------------------------------


def _parts(text: str) -> list[str]:
    """The words between the commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


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


def _writable(option: str, *endings: str) -> Callable[[str], Path]:
    """A file that can be written, which is found out before the measurement."""

    def parse(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix not in endings:
            raise ArgumentTypeError(f"expected a file {', '.join(endings)}, got {text!r}")
        try:
            document.check_writable(path, option)
        except BenchError as error:
            raise ArgumentTypeError(str(error)) from error
        return path

    return parse


# -- what is to be done ---------------------------------------------------------------------------


class Request(NamedTuple):
    """Points and cases to be measured, and with whom."""

    points: list[Point]
    special: list[SpecialCase]
    # The interpreter of each peer that was asked for; None where there is none.
    pythons: dict[str, str | None]
    seconds: float  # that the measurement of a point may take
    left_out: list[str]  # cases for which no size or dtype that was asked for fits
    device: str | None = None  # where steps are taken, if not on the host


def request(args: argparse.Namespace) -> Request:
    """The points and cases that the options ask for.

    Raises:
        BenchError: they do not fit each other, or this machine.
    """
    chosen = cases.select(args.cases)
    steps = [case for case in chosen if isinstance(case, Case)]
    drawn = indices.DEFAULT if args.indices is None else args.indices
    distributions = indices.PUBLISHED if drawn.strip() == "all" else _parts(drawn)
    scenarios, threads = args.scenario or [cases.LOOP], args.threads or [get_num_threads()]
    for library in {name.partition("-")[0] for name in scenarios} & {"torch", "jax"}:
        if find_spec(library) is None:
            raise BenchError(f"--scenario {library}: needs {library} in this environment")
    names = [indices.check_distribution(name) for name in distributions]
    asked = [peer for peer, kind in PEERS.items() if kind.is_default]
    if args.device:
        _check_device(args)
        asked, threads = [], [1]
    points = cases.points(steps, args.size, args.dtype or ["float32"], threads, names, scenarios)
    if args.peers is not None:
        asked = args.peers
    names_of = {peer: interpreter_option(peer)[2:].replace("-", "_") for peer in PEERS}
    pythons = {peer: find_python(peer, getattr(args, name)) for peer, name in names_of.items()}
    if args.append and args.json is None:
        raise BenchError("--append: needs --json FILE, which it adds to")
    _check_against(args)
    left_out = [case.name for case in steps if not any(p.case is case for p in points)]
    special = [case for case in chosen if isinstance(case, SpecialCase)]
    for case in special:
        if case.device != args.device:
            where = "the host" if case.device is None else f"--device {case.device}"
            raise BenchError(f"{case.name}: is measured on {where} only")
    seconds = seconds_of(args, SECONDS, _QUICK)
    chosen_pythons = {peer: pythons[peer] for peer in asked}
    return Request(points, special, chosen_pythons, seconds, left_out, args.device)


def seconds_of(args: argparse.Namespace, usual: float, quick: float) -> float:
    """The seconds that were asked for, or one of two defaults."""
    given: float | None = args.seconds
    return given or (quick if args.quick else usual)


def _check_device(args: argparse.Namespace) -> None:
    """There is a device, and no option of the host."""
    if option := other_option(args, *_ON_DEVICES):
        raise BenchError(f"--device {args.device}: takes no {option}")
    if find_spec("numba_cuda") is None:
        raise BenchError("--device: needs numba-cuda: pip install 'fusestep[cuda13]' (or cuda12)")
    from numba import cuda

    if not cuda.is_available():
        raise BenchError("--device: Numba finds no CUDA device")


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
