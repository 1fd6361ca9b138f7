"""The tables of the documents, made from the committed results.

A region of a document between ``<!-- bench: NAME FILE -->`` and ``<!-- end of bench -->`` holds
the table NAME of the results file FILE in ``bench/results`` (or, without FILE, one that needs no
measurement). ``python -m fusestep.bench.report.markdown`` writes all regions anew;
``fusestep bench --check`` finds out whether they are what it would write.
"""

from __future__ import annotations

import re
import sys
from difflib import unified_diff
from pathlib import Path

from .. import machine
from ..errors import BenchError
from . import document, table, tables

_REGION = re.compile(r"(<!-- bench: (\S+)(?: (\S+))? -->\n).*?(<!-- end of bench -->)", re.DOTALL)


def rewritten(text: str, results: Path) -> str:
    """A document with all of its regions made anew.

    Raises:
        BenchError: a region names no table, or no readable results.
    """
    known = {**tables.OF_RUNS, **tables.OTHERS}

    def region(found: re.Match[str]) -> str:
        begin, name, file, end = found.groups()
        if name not in known:
            raise BenchError(f"no table {name!r}: there are {', '.join(known)}")
        has_schema = name in tables.OF_RUNS
        data = document.read(results / file, "--check", has_schema=has_schema) if file else {}
        blocks = (one if isinstance(one, str) else table.markdown(one) for one in known[name](data))
        return "{}{}\n{}".format(begin, "\n\n".join(blocks), end)

    return _REGION.sub(region, text)


def documents() -> dict[Path, str]:
    """The documents of the checkout as they should be.

    Raises:
        BenchError: this is no checkout.
    """
    root = machine.checkout_at_hand()
    if root is None:
        raise BenchError("--check: the documents are in a Git checkout only, and this is none")
    try:
        paths = root / "README.md", *sorted((root / "docs").rglob("*.md"))
        texts = {path: path.read_text(encoding="utf-8") for path in paths}
    except OSError as error:
        raise BenchError(f"--check: cannot read {error.filename}: {error.strerror}") from error
    return {path: rewritten(text, root / "bench" / "results") for path, text in texts.items()}


def check() -> int:
    """Print what differs in the documents; returns 1 when something does, else 0."""
    differing = []
    for path, expected in documents().items():
        found = path.read_text(encoding="utf-8")
        if found != expected:
            differing.append(path.name)
            lines = found.splitlines(), expected.splitlines()
            changes = unified_diff(*lines, path.name, "from the results", n=0)
            print("\n".join(line.rstrip("\n") for line in changes))
    if differing:
        print(f"{', '.join(differing)}: write anew with python -m fusestep.bench.report.markdown")
        return 1
    print("all tables are those of the committed results")
    return 0


def main() -> int:
    """Write all regions of all documents anew."""
    try:
        for path, text in documents().items():
            path.write_text(text, encoding="utf-8")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
