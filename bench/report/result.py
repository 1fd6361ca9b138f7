"""The results of measurements, as the report takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from ..cases.steps import LOOP, Point
from .stats import Ratio, Summary, ratio

OURS = "fusestep"
BOUND = "bound: "
# What is called a loss: less than this share of the bound where a step works from memory, and
# more time than a peer anywhere.
OF_BOUND = 0.9
SECONDS = 0.5  # that the measurement of a point may take, by default


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
class Against(Ratio):
    """The time of the fastest bound loop, or of a peer's fastest form, by ours."""

    label: str  # of that time


@dataclass(frozen=True)
class PointResult:
    """The figures of one point."""

    point: Point  # what was measured
    bytes: int  # what a step must move
    sizes: dict[str, int]  # for the report
    from_memory: bool  # whether a step had to fetch its arrays from memory
    copies: int  # how many sets of buffers took turns
    times: dict[str, Summary]  # by label: ours, bounds, peers
    # By label, bytes that a step needs beside its arrays; None where unknown.
    memory: dict[str, int | None] = field(default_factory=dict)
    # Why a label, or a peer, has no times.
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def bound(self) -> Against | None:
        """The fastest loop with the same traffic; by it, the share of its speed that we reach."""
        return self._against([label for label in self.times if label.startswith(BOUND)])

    @property
    def peers(self) -> dict[str, Against]:
        """The fastest form of each peer."""
        labels: dict[str, list[str]] = {}
        for label in self.times:
            if label != OURS and not label.startswith(BOUND):
                labels.setdefault(label.split()[0], []).append(label)
        found = {peer: self._against(forms) for peer, forms in labels.items()}
        return {peer: against for peer, against in found.items() if against is not None}

    def _against(self, labels: list[str]) -> Against | None:
        best = fastest(self.times, labels)
        if best is None or OURS not in self.times:
            return None
        return Against(**asdict(ratio(self.times[best], self.times[OURS])), label=best)

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

    def add(self, samples: Mapping[str, Sequence[float]]) -> None:
        """Summaries of samples by label."""
        self.times.update({label: Summary.of(values) for label, values in samples.items()})


def fastest(times: dict[str, Summary], labels: list[str]) -> str | None:
    """The label with the smallest median, of those that have one."""
    measured = [label for label in labels if label in times]
    return min(measured, key=lambda label: times[label].median, default=None)
