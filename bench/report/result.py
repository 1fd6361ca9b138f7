"""The results of measurements: percentiles, ratios and verdicts, as the report takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from ..cases.steps import LOOP, Point

OURS = "fusestep"
BOUND = "bound: "
# What is called a loss: less than this share of the bound where a step works from memory, and
# more time than a peer anywhere.
OF_BOUND = 0.9
SECONDS = 0.5  # that the measurement of a point may take, by default
# A step is called slower or faster than before when the middle three fifths of the rounds agree
# on it and the median moved by more than so much.
NOISE = 0.03
Change = Literal["slower", "faster", "same"]


# Told the share of the work that is done.
Progress = Callable[[float], None]
Item = TypeVar("Item")


def tracked(items: Sequence[Item], progress: Progress) -> Iterator[Item]:
    """Each of the items, before which ``progress`` is told what share of them is done."""
    for done, item in enumerate(items):
        progress(done / len(items))
        yield item
    progress(1.0)


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
    label: str = ""  # of the first time, where it is one of several


def ratio(of: Summary, by: Summary, label: str = "") -> Ratio:
    """How much longer ``of`` takes than ``by``: above 1, the second is faster."""
    return Ratio(of.median / by.median, of.p20 / by.p80, of.p80 / by.p20, label)


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


@dataclass(frozen=True)
class PointResult:
    """The figures of one point."""

    point: Point  # what was measured
    bytes: int = 0  # what a step must move
    sizes: dict[str, int] = field(default_factory=dict)  # for the report
    from_memory: bool = False  # whether a step had to fetch its arrays from memory
    copies: int = 0  # how many sets of buffers took turns
    times: dict[str, Summary] = field(default_factory=dict)  # by label: ours, bounds, peers
    # By label, bytes that a step needs beside its arrays; None where unknown.
    memory: dict[str, int | None] = field(default_factory=dict)
    # Why a label, or a peer, has no times.
    unavailable: dict[str, str] = field(default_factory=dict)
    # Of a CUDA device, by label: seconds that the host took to enqueue a step.
    host: dict[str, Summary] = field(default_factory=dict)
    # Labels whose steps the device may have waited for.
    waited: list[str] = field(default_factory=list)

    @property
    def bound(self) -> Ratio | None:
        """The fastest loop with the same traffic; by it, the share of its speed that we reach."""
        return self._against([label for label in self.times if label.startswith(BOUND)])

    @property
    def peers(self) -> dict[str, Ratio]:
        """The fastest form of each peer."""
        labels: dict[str, list[str]] = {}
        for label in self.times:
            if label != OURS and not label.startswith(BOUND):
                labels.setdefault(label.split()[0], []).append(label)
        found = {peer: self._against(forms) for peer, forms in labels.items()}
        return {peer: against for peer, against in found.items() if against is not None}

    def _against(self, labels: list[str]) -> Ratio | None:
        best = fastest(self.times, labels)
        if best is None or OURS not in self.times:
            return None
        return ratio(self.times[best], self.times[OURS], best)

    @property
    def losses(self) -> list[str]:
        """The figures that fall short, in words."""
        losses = []
        in_a_row = self.point.scenario == LOOP
        if in_a_row and self.from_memory and self.bound and self.bound.value < OF_BOUND:
            losses.append(f"{self.bound.value:.1%} of the bound")
        found = self.peers.values()
        return losses + [f"{peer.value:.2f} x {peer.label}" for peer in found if peer.value < 1]


@dataclass(frozen=True)
class SpecialResult:
    """The figures of a case with a method of its own."""

    name: str
    summary: str
    times: dict[str, Summary] = field(default_factory=dict)  # by label
    # What some of them should not exceed, in seconds.
    limits: dict[str, float] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)  # what models have learned

    def add(self, samples: Mapping[str, Sequence[float]]) -> None:
        """Summaries of samples by label."""
        self.times.update({label: Summary.of(values) for label, values in samples.items()})


def fastest(times: dict[str, Summary], labels: list[str]) -> str | None:
    """The label with the smallest median, of those that have one."""
    measured = [label for label in labels if label in times]
    return min(measured, key=lambda label: times[label].median, default=None)
