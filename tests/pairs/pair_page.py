"""The page of pairs of features: ``python tests/pairs/pair_page.py`` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pair_parts

PAGE = Path(__file__).parents[2] / "docs" / "together.md"
_TEXT = """# What goes with what

Each pair of features below was run as one short random program beside a reference in float64. The
tests do so again (`pytest -m exhaustive tests/pairs`), and this page is made from what they expect.
A dot is a pair whose numbers were right in every step. **R** is a pair that is refused, before
anything is written, by the error below the table. **N** was not tried, for the reason there.
"""


def table(title: str, names: Iterable[str], refused: Mapping[frozenset[str], str],
          others: Mapping[frozenset[str], str]) -> str:  # fmt: skip
    """A section of the page: the pairs of a front end."""
    rows, marks = [*names], dict[str, str]()
    for letter, texts in (("R", refused), ("N", others)):
        for n, text in enumerate(dict.fromkeys(texts.values()), 1):
            marks[text] = f"{letter}{n}"
    lines = [f"\n## {title}\n", "| | " + " | ".join(map(str, range(1, len(rows)))) + " |"]
    lines.append("| --- |" + " :-: |" * (len(rows) - 1))
    for k, name in enumerate(rows):
        pairs = [frozenset((name, other)) for other in rows[:k]]
        cells = [marks.get(refused.get(own, others.get(own, "")), "·") for own in pairs]
        lines.append(f"| {k + 1} {name} | " + " | ".join(cells + [""] * (len(rows) - 1 - k)) + " |")
    lines.append("")
    for text, mark in marks.items():
        lines.append(f"- {mark}: " + (f"`{text}`" if mark[0] == "R" else text))
    return "\n".join(lines) + "\n"


def page() -> str:
    """All of it."""
    torch = pair_parts.PARTS, pair_parts.REFUSED, pair_parts.NOT_APPLICABLE
    return _TEXT + table("fusestep.nn.torch", *torch)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
