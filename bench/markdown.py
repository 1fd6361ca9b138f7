"""The table of a results file for the README: ``python -m fusestep.bench.markdown FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).resolve().parent / "results"


def newest_results() -> Path:
    """The results file that the README shows."""
    return _RESULTS / "epyc-2-cores.json"


def table(document: dict[str, Any]) -> str:
    """Every target of a results document, reached or missed, as Markdown."""
    machine, software = document["machine"], document["software"]
    peers = ", ".join(f"{name} {version}" for name, version in document["peers"].items())
    lines = [
        f"{machine['cpu']}, {document['threads']} threads, Numba {software['numba']}, NumPy "
        f"{software['numpy']}; {peers or 'no peers'}; medians of one run, "
        f"{document['date'][:10]}. A bound is the fastest of several plain loops with the same "
        "memory traffic.",
        "",
        "| case | figure | measured | target | |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for case in document["cases"]:
        for target in case["targets"]:
            value, goal = (_number(target[key], target) for key in ("value", "target"))
            lines.append(
                f"| {case['name']} | {target['what']} | {value} | {goal} | {target['verdict']} |"
            )
    return "\n".join(lines)


def _number(value: float, target: dict[str, Any]) -> str:
    unit = target["unit"]
    if unit == "%":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.2f} s"
    return f"{value:.2f}"


def main() -> int:
    """Print the table of the file that is named, or of the one that the README shows."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else newest_results()
    print(table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
