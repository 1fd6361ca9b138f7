"""The command line: ``fusestep demo | bench | warmup | info``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import fusestep
from fusestep.examples.options import Parser

# Each command is a module with add_arguments(parser) and main(args); only the one that is
# called is imported.
_COMMANDS = {
    "demo": ("fusestep.examples.word2vec", "train word vectors on real text and look at them"),
    "bench": ("fusestep.bench.command", "measure the steps against bounds and peers"),
    "warmup": ("fusestep.kernels.cpu.warmup", "compile kernels ahead of their first use"),
    "info": ("fusestep.kernels.cpu.info", "print versions, threads and the cache of kernels"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("fusestep: interrupted", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    parser = Parser(prog="fusestep", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"fusestep {fusestep.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    chosen = parser.parse_args(arguments[:1]).command
    module, text = _COMMANDS[chosen]
    command = importlib.import_module(module)
    # A parser of its own: options may stand among its arguments, which a subparser does not take.
    own = Parser(prog=f"fusestep {chosen}", description=text)
    command.add_arguments(own)
    status: int = command.main(own.parse_intermixed_args(arguments[1:]))
    return status


if __name__ == "__main__":
    sys.exit(main())
