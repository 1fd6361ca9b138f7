"""Medians, percentiles, ratios and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# A step is called slower or faster than before when the middle three fifths of the rounds agree
# on it and the median moved by more than so much.
NOISE = 0.03
Change = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Summary:
    """Percentiles of the samples of one contestant: seconds, or ratios."""

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
class Ratio:
    """A time by another time."""

    value: float  # of the medians
    # Its spread: 20th by 80th percentile, and the other way round.
    low: float
    high: float


def ratio(of: Summary, by: Summary) -> Ratio:
    """How much longer ``of`` takes than ``by``: above 1, the second is faster."""
    return Ratio(of.median / by.median, of.p20 / by.p80, of.p80 / by.p20)


def paired(new: Sequence[float], old: Sequence[float]) -> Summary:
    """Ratios of times that were measured in the same rounds, round by round."""
    return Summary.of([a / b for a, b in zip(new, old, strict=True)])


def change(ratios: Summary) -> Change:
    """The verdict on ratios of new by old times."""
    if ratios.median > 1 + NOISE and ratios.p20 > 1:
        return "slower"
    if ratios.median < 1 - NOISE and ratios.p80 < 1:
        return "faster"
    return "same"
