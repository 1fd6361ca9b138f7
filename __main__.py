"""The command line: ``fusestep demo | bench | warmup | info``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each command is a module with add_arguments(parser) and main(args); only the one that is
# called is imported.
_COMMANDS = {
    "demo": ("fusestep.examples.word2vec", "train word vectors on real text and look at them"),
    "bench": ("fusestep.bench.command", "measure the steps against bounds and peers"),
    "warmup": ("fusestep.kernels.warmup", "compile kernels ahead of their first use"),
    "info": ("fusestep.kernels.info", "print versions, threads and the cache of kernels"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="fusestep", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(arguments)
    status: int = importlib.import_module(_COMMANDS[args.command][0]).main(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
