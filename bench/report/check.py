"""``fusestep bench --check``: whether the documents say what the committed results say."""

from __future__ import annotations

from difflib import unified_diff

from . import markdown


def main() -> int:
    """Print what differs; returns 1 when something does, else 0."""
    differing = []
    for path, expected in markdown.documents().items():
        found = path.read_text(encoding="utf-8")
        if found != expected:
            differing.append(path.name)
            lines = unified_diff(
                found.splitlines(), expected.splitlines(), path.name, "from the results", n=0
            )
            print("\n".join(line.rstrip("\n") for line in lines))
    if differing:
        print(f"{', '.join(differing)}: write anew with python -m fusestep.bench.report.markdown")
        return 1
    print("all tables are those of the committed results")
    return 0
