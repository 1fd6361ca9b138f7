"""``fusestep bench``: this package against the memory's speed and against other libraries."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from .errors import BenchError

_NEEDED = ("jsonschema", "matplotlib", "psutil", "rich")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark to ``parser``."""
    if not _missing():
        from .cases import options

        options.add_arguments(parser)
    else:  # main says so in one line, whatever was asked for: nothing is an option here
        parser.prefix_chars = "\0"
        parser.add_argument("anything", nargs="*")


def main(args: argparse.Namespace) -> int:
    """Measure and report.

    Returns:
        0; 1 when something is slower than what it was compared with, or a document is not what
        the results say; 2 for a mistake of the user.
    """
    try:
        return _run(args)
    except BenchError as error:
        print(f"fusestep bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fusestep bench: interrupted", file=sys.stderr)
        return 130


def _missing() -> list[str]:
    return [name for name in _NEEDED if find_spec(name) is None]


def _run(args: argparse.Namespace) -> int:
    if missing := _missing():
        raise BenchError(f'the benchmark needs {", ".join(missing)}: pip install "fusestep[bench]"')
    from . import run
    from .cases import options
    from .cases.steps import CASES, select
    from .report import markdown
    from .scale_out import runs

    if args.processes is not None:
        return runs.main(args)
    if args.list:
        for case in select(args.cases) if args.cases else CASES:
            print(f"{case.name}{'' if case.is_default else '  (when named)'}")
        return 0
    if args.check:
        return markdown.check()
    if args.earlier is not None:
        return run.show(args)
    return run.run(args, options.request(args))
