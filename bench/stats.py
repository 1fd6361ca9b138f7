"""Medians, percentiles and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["reached", "reached, p80 not", "MISSED", "n/a"]


@dataclass(frozen=True)
class Summary:
    """What is kept of the samples of one contestant, in seconds."""

    median: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Percentiles with linear interpolation."""
        p20, median, p80 = (float(x) for x in np.percentile(samples, (20, 50, 80)))
        return cls(median, p20, p80, len(samples))


@dataclass(frozen=True)
class Target:
    """A figure, what it should be, and the verdict.

    Args:
        what: names the figure.
        value: of the medians; None when it could not be measured.
        at_p80: the same figure with our 80th percentile in place of our median.
        target: what the figure should reach.
        lower_is_better: for times.
        unit: "x", "%" or "s", for the table.
    """

    what: str
    value: float | None
    at_p80: float | None
    target: float
    lower_is_better: bool = False
    unit: str = "x"

    @property
    def verdict(self) -> Verdict:
        """The median decides; a slow side that falls short is said, but is no miss."""
        if self.value is None or self.at_p80 is None:
            return "n/a"
        if not self._meets(self.value):
            return "MISSED"
        return "reached" if self._meets(self.at_p80) else "reached, p80 not"

    def _meets(self, value: float) -> bool:
        return value <= self.target if self.lower_is_better else value >= self.target


def speed_target(
    what: str, ours: Summary, theirs: Summary | None, target: float, unit: str = "x"
) -> Target:
    """How many times faster than a reference we are: its median by ours."""
    if theirs is None:
        return Target(what, None, None, target, unit=unit)
    value, at_p80 = theirs.median / ours.median, theirs.median / ours.p80
    return Target(what, value, at_p80, target, unit=unit)


def time_target(what: str, ours: Summary, limit: float) -> Target:
    """Seconds that should not exceed ``limit``."""
    return Target(what, ours.median, ours.p80, limit, lower_is_better=True, unit="s")
