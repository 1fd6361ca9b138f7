"""``fusestep bench``: this package against the memory's speed and against other libraries."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import BenchError

_MISSING = 'the benchmark needs {name}: install it with pip install "fusestep[bench]"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark to ``parser``.

    Values are checked by `main`, so that a wrong one costs one line.
    """
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases to run, such as rows-lazy or 'dense-*'")
    add("--list", action="store_true", help="name the cases and end")
    add("--threads", metavar="N", help="threads of everything (default: all)")
    add(
        "--peers",
        default="torch,mindspore",
        metavar="NAMES",
        help="libraries to compare with, or none (default: torch,mindspore)",
    )
    add("--torch-python", metavar="PATH", help="an interpreter that has PyTorch (default: this)")
    add(
        "--mindspore-python",
        metavar="PATH",
        help="an interpreter that has MindSpore (default: this)",
    )
    add("--json", metavar="FILE", help="write the results there")
    add("--quick", action="store_true", help="fewer repeats, rough figures")


def main(args: argparse.Namespace) -> int:
    """Measure and report; returns the exit status (2 for a mistake of the user)."""
    try:
        _run(args)
    except BenchError as error:
        print(f"fusestep bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fusestep bench: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    from .cases import CASES
    from .peer import find_python

    names = select(args.cases, [case.name for case in CASES])
    if args.list:
        for case in CASES:
            print(f"{case.name:14} {case.summary}")
        return
    _require("rich")
    threads = parse_threads(args.threads)
    options = {"torch": args.torch_python, "mindspore": args.mindspore_python}
    found = {peer: find_python(peer, option) for peer, option in options.items()}
    pythons = {peer: found[peer] for peer in parse_peers(args.peers)}
    path = Path(args.json) if args.json is not None else None

    from . import run

    run.measure_and_report(names, threads, args.quick, pythons, path)


def select(wanted: list[str], names: list[str]) -> list[str]:
    """The names that were asked for, by pattern, in the order of the table; all by default.

    Raises:
        BenchError: nothing has such a name.
    """
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise BenchError(f"no case {pattern!r}: {hint}")
    return [n for n in names if not wanted or any(fnmatchcase(n, p) for p in wanted)]


def parse_threads(text: str | None) -> int:
    """A number of threads that this machine and Numba can give.

    Raises:
        BenchError: anything else.
    """
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    if text is None:
        return int(numba.get_num_threads())
    try:
        threads = int(text)
    except ValueError:
        threads = 0
    if not 1 <= threads <= most:
        raise BenchError(f"--threads: expected a whole number from 1 to {most}, got {text!r}")
    return threads


def parse_peers(text: str) -> list[str]:
    """Names of peers, separated by commas; none for none of them.

    Raises:
        BenchError: an unknown name.
    """
    from .peer import PEERS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS and name != "none":
            known = ", ".join([*PEERS, "none"])
            raise BenchError(f"--peers: expected names out of {known}, got {name!r}")
    if "none" in names and len(names) > 1:
        raise BenchError(f"--peers: 'none' excludes other names, got {text!r}")
    return [name for name in names if name != "none"]


def _require(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise BenchError(_MISSING.format(name=name)) from error
