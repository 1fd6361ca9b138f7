"""The page of pairs of features: ``python tests/pairs/pair_page.py`` writes it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pair_nn
import pair_parts

PAGE = Path(__file__).parents[2] / "docs" / "together.md"
_TEXT = """# What goes with what

Every pair of the features below was run as a short random program beside a reference in float64.
The tests do so again (`pytest -m exhaustive tests/pairs`). This page is made from what they expect:
a pair is **right** in every step, or **refused** by an error (R), before anything is written, or it
was **not tried**, for a reason (N). Errors and reasons stand below each table.
"""


def table(
    title: str, names: Iterable[str], refused: Mapping[frozenset[str], str],
    others: Mapping[frozenset[str], str],
) -> str:  # fmt: skip
    """A section of the page: the pairs of a front end."""
    names, marks, cells = [*names], dict[str, str](), []
    for letter, texts in (("R", refused), ("N", others)):
        marks |= {text: f"{letter}{n}" for n, text in enumerate(dict.fromkeys(texts.values()), 1)}
    for name in names:
        each = [
            [(b, texts[pair]) for b in names if (pair := frozenset((name, b))) in texts]
            for texts in (refused, others)
        ]
        n = len(names) - 1 - sum(map(len, each))
        lists = [", ".join(f"{b} ({marks[text]})" for b, text in own) for own in each]
        cells.append((name, f"{n} of {len(names) - 1}", *lists))
    lines = [f"\n## {title}\n", "| | right with | refused with | not tried with |"]
    lines += ["| --- | --- | --- | --- |", *(f"| {' | '.join(own)} |" for own in cells), ""]
    lines += [f"- {m}: " + (f"`{text}`" if m[0] == "R" else text) for text, m in marks.items()]
    return "\n".join(lines) + "\n"


def page() -> str:
    """All of it."""
    sections = [
        table(name, own.PARTS, own.REFUSED, own.NOT_APPLICABLE)
        for name, own in (("fusestep.nn.torch", pair_parts), ("fusestep.nn", pair_nn))
    ]
    of_three = pair_parts.OF_THREE.items()
    three = [f"- {' + '.join(sorted(names))}: `{text}`" for names, text in of_three]
    head = "\nThree to five of them together are right too, in random programs, but for:\n\n"
    return _TEXT + sections[0] + head + "\n".join(three) + "\n" + sections[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
