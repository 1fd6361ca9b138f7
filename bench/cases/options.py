"""The options of ``fusestep bench``: what they may be, and what they mean."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

from ... import get_num_threads
from ...examples.options import integer, positive
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
Value = TypeVar("Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to ``parser``."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases such as nn.Adam, 'rows/*' or first-step")
    add("--list", action="store_true", help="name the cases, all or those given, and end")
    text = "elements of dense cases (64K, 16M, 1K..64M), N x D x B of row cases, or all"
    add("--size", metavar="SIZES", help=f"{text}; several with commas")
    rows = _several(indices.check_distribution, indices.PUBLISHED)
    text = "of row cases: uniform, zipf1.2, equal, or all"
    add("--indices", type=rows, metavar="NAMES", help=text)
    text = "float32 (default), bfloat16, float16, or all"
    add("--dtype", type=_names(DTYPES), metavar="NAMES", help=text)
    text = f"what is between two steps, or beside them: {', '.join(SCENARIOS)}, or all"
    add("--scenario", type=_names(SCENARIOS), metavar="NAMES", help=f"{text} (default: loop)")
    threads = _several(lambda text: integer(1, get_num_threads())(text))
    text = "threads of everything; several with commas (default: all)"
    add("--threads", type=threads, metavar="N", help=text)
    add("--device", choices=["cuda"], help="measure steps on a CUDA device, beside a copy there")
    time, text = parser.add_mutually_exclusive_group(), f"time for each point (default: {SECONDS})"
    time.add_argument("--seconds", type=positive, metavar="S", help=text)
    text = f"the same as --seconds {_QUICK}: rough figures"
    time.add_argument("--quick", action="store_true", help=text)
    usual = ", ".join(peer for peer, kind in PEERS.items() if kind.is_default)
    text = f"libraries to compare with: {', '.join(PEERS)}; all, none (default: {usual})"
    peers = _names(PEERS)
    add("--peers", type=lambda text: [] if text == "none" else peers(text), metavar="NAMES",
        help=text)  # fmt: skip
    for peer, kind in PEERS.items():
        if kind.interpreter is None:
            text = f"an interpreter that has {' and '.join(kind.modules)} (default: this)"
            add(interpreter_option(peer), metavar="PATH", help=text)
    add("--json", type=_writable(), metavar="FILE", help="write the results there")
    add("--append", action="store_true", help="to those of other points that --json FILE holds")
    pictures = _writable(".png", ".svg", ".pdf")
    add("--plot", type=pictures, metavar="FILE", help="draw them there: .png, .svg or .pdf")
    text = "compare with an earlier --json file, or, in a checkout, with another commit"
    add("--against", metavar="FILE|GIT-REF", help=text)
    text = "measure nothing: show, and --plot, an earlier --json file, or CASE of it"
    add("--from", dest="earlier", metavar="FILE", help=text)
    text = "instead of the cases: a table that so many processes own; several with commas"
    add("--processes", type=_several(integer(1, _MOST_PROCESSES)), metavar="N", help=text)
    add("--check", action="store_true", help="check the tables of the documents, in a checkout")


# -- types of values ------------------------------------------------------------------------------


def _several(
    one: Callable[[str], Value], every: Collection[str] = ()
) -> Callable[[str], list[Value]]:
    """Different values with commas, each of the type ``one``; ``all`` stands for ``every``."""

    def parse(text: str) -> list[Value]:
        words = every if every and text.strip() == "all" else text.split(",")
        return list(dict.fromkeys(one(word.strip()) for word in words))

    return parse


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Known names with commas, or ``all`` of them."""

    def name(text: str) -> str:
        if text not in known:
            expected = f"names out of {', '.join(known)}, or all"
            raise ArgumentTypeError(f"expected {expected}, got {text!r}")
        return text

    return _several(name, known)


def _writable(*endings: str) -> Callable[[str], Path]:
    """A file that can be written, which is found out before the measurement."""

    def parse(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix not in endings:
            raise ArgumentTypeError(f"expected a file {', '.join(endings)}, got {text!r}")
        document.check_writable(path, "--plot" if endings else "--json")
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
    special = [case for case in chosen if isinstance(case, SpecialCase)]
    names, scenarios = args.indices or [indices.DEFAULT], args.scenario or [cases.LOOP]
    for library in {name.partition("-")[0] for name in scenarios} & {"torch", "jax"}:
        if find_spec(library) is None:
            raise BenchError(f"--scenario {library}: needs {library} in this environment")
    peers, threads = args.peers, args.threads or [get_num_threads()]
    if args.device:
        _check_device(args)
        peers, threads = [], [1]
    elif peers is None:
        peers = [peer for peer, kind in PEERS.items() if kind.is_default]
    points = cases.points(steps, args.size, args.dtype or ["float32"], threads, names, scenarios)
    if args.append and args.json is None:
        raise BenchError("--append: needs --json FILE, which it adds to")
    _check_against(args)
    for case in special:
        if case.device != args.device:
            where = "the host" if case.device is None else f"--device {case.device}"
            raise BenchError(f"{case.name}: is measured on {where} only")
        if case.peer in (args.peers or ()) and find_python(case.peer, None) is None:
            raise BenchError(f"{case.name}: needs {case.peer} in this environment: {case.install}")
    left_out = [case.name for case in steps if not any(p.case is case for p in points)]
    names_of = {peer: interpreter_option(peer)[2:].replace("-", "_") for peer in PEERS}
    pythons = {peer: find_python(peer, getattr(args, name)) for peer, name in names_of.items()}
    seconds = seconds_of(args, SECONDS, _QUICK)
    asked = {peer: pythons[peer] for peer in peers}
    return Request(points, special, asked, seconds, left_out, args.device)


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
