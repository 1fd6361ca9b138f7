"""What a case hands to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .stats import Summary, Target


@dataclass(frozen=True)
class Settings:
    """What the user chose for a run."""

    threads: int
    quick: bool = False

    def rounds(self, full: int) -> int:
        """How often to measure what a full run measures ``full`` times."""
        return max(3, full // 5) if self.quick else full


# Told the rounds that are done and all that there are to do.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CaseResult:
    """The figures of one case.

    Args:
        name, summary: of the case.
        ours: the label of our step; the empty string where there are several.
        times: by label.
        size: the sizes.
        bytes_moved: by label, for those whose traffic is known.
        bound: the label of the fastest bound loop.
        targets: figures and verdicts.
        unavailable: why a label has no times.
        points: further measurements of a case that is a series.
    """

    name: str
    summary: str
    ours: str
    times: dict[str, Summary]
    targets: list[Target]
    size: dict[str, int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    bound: str | None = None
    unavailable: dict[str, str] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)


def fastest(times: dict[str, Summary], labels: list[str]) -> str | None:
    """The label with the smallest median, of those that have one."""
    measured = [label for label in labels if label in times]
    return min(measured, key=lambda label: times[label].median, default=None)
