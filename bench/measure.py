"""Interleaved measurement: every contestant once, then every contestant again, ...

So a change of the machine's mood meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .stats import Summary
from .workers.worker_protocol import Clock, Job, sample


class ContestantLostError(Exception):
    """A contestant cannot go on; the others can."""


@dataclass(frozen=True)
class Contestant:
    """Something that gives one time, in seconds, when asked."""

    label: str
    sample: Callable[[], float]


def in_process(
    jobs: Mapping[str, Job], lead_in: int, steps: int, clock: Clock = time.perf_counter
) -> list[Contestant]:
    """Contestants that run in this process."""

    def contestant(label: str, job: Job) -> Contestant:
        return Contestant(label, lambda: sample(job, lead_in, steps, clock))

    return [contestant(label, job) for label, job in jobs.items()]


@dataclass(frozen=True)
class Times:
    """Summaries by label, and why the others have none."""

    summaries: dict[str, Summary]
    lost: dict[str, str]


def interleave(
    contestants: Sequence[Contestant], rounds: int, on_round: Callable[[], None] = lambda: None
) -> Times:
    """Ask each contestant once a round; a first round, the warm-up, is thrown away."""
    samples: dict[str, list[float]] = {contestant.label: [] for contestant in contestants}
    lost: dict[str, str] = {}
    for _ in range(rounds + 1):
        for contestant in contestants:
            if contestant.label in lost:
                continue
            try:
                samples[contestant.label].append(contestant.sample())
            except ContestantLostError as error:
                lost[contestant.label] = str(error)
        on_round()
    kept = {label: Summary.of(all_[1:]) for label, all_ in samples.items() if label not in lost}
    return Times(kept, lost)
