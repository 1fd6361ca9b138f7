"""Interleaved measurement: every contestant once, then every contestant again, ...

So a change of the machine's mood meets all of them alike. How many rounds there are follows
from the time that they may take; a contestant that is much slower than the first one sits out
most of the rounds, so that it does not use up the time of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .report.result import Summary
from .workers.worker_protocol import Job, before_step, samples, turn_in

_SLOW = 4.0  # times the turns of the first contestant
# Our own threads spin for a few milliseconds after a parallel loop, in the hope of another one;
# the worker processes are stopped while they are not asked.
_SETTLE = 0.01
_MOST, _FEWEST_OF_SLOW = 101, 3  # rounds, and turns


class ContestantLostError(Exception):
    """A contestant cannot go on; the others can."""


@dataclass(frozen=True)
class Contestant:
    """A source of times, in seconds."""

    label: str  # its name
    sample: Callable[[], Sequence[float]]  # takes a turn
    is_elsewhere: bool = False  # in another process


def in_process(
    jobs: Mapping[str, Job], scenario: str = "loop", threads: int = 1
) -> list[Contestant]:
    """Contestants that run in this process; ``threads`` are those of a scenario's other work."""
    before = before_step(scenario, threads)

    def contestant(label: str, job: Job) -> Contestant:
        return Contestant(label, lambda: samples(job, scenario, before))

    return [contestant(label, job) for label, job in jobs.items()]


@dataclass(frozen=True)
class Times:
    """Samples by label, and why the others have none."""

    samples: dict[str, list[float]]
    lost: dict[str, str]

    @property
    def summaries(self) -> dict[str, Summary]:
        """By label."""
        return {label: Summary.of(found) for label, found in self.samples.items()}


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    rounds: int  # of all contestants
    # By label, how many rounds there are from one turn of a contestant to its next, if it
    # does not take part in each.
    every: Mapping[str, int] = field(default_factory=dict)


def plan(warm: Mapping[str, float], budget: float, scenario: str = "loop") -> Plan:
    """A plan for contestants with these times of one step, the first of them being ours.

    Args:
        warm: seconds by label.
        budget: seconds that the measurement may take, lead-ins included.
        scenario: which.
    """
    turn = turn_in(scenario)
    lasting = {label: turn.seconds(seconds) for label, seconds in warm.items()}
    ours = next(iter(lasting.values()))
    slow = {label: seconds for label, seconds in lasting.items() if seconds > _SLOW * ours}
    quick = sum(lasting.values()) - sum(slow.values())
    rounds = int(budget / 2 / quick) if slow else int(budget / quick)
    rounds = max(turn.rounds, min(_MOST, rounds))
    turns = {label: int(budget / 2 / len(slow) / seconds) for label, seconds in slow.items()}
    every = {n: -(-rounds // max(_FEWEST_OF_SLOW, min(rounds, k))) for n, k in turns.items()}
    return Plan(rounds, every)


def warm_up(contestants: Sequence[Contestant]) -> Times:
    """A turn of each, which also finds out how long a step takes about."""
    return interleave(contestants, Plan(1))


def interleave(
    contestants: Sequence[Contestant],
    plan: Plan,
    lost: Mapping[str, str] | None = None,
    on_round: Callable[[int], None] = lambda _: None,
) -> Times:
    """Ask each contestant in turn, round by round.

    Args:
        contestants: in the order of their turns.
        plan: how often.
        lost: those that are out already.
        on_round: told the number of rounds that are done.
    """
    samples: dict[str, list[float]] = {}
    out = dict(lost or {})
    for index in range(plan.rounds):
        elsewhere = False
        for contestant in contestants:
            label = contestant.label
            if label in out or index % plan.every.get(label, 1) != 0:
                continue
            if contestant.is_elsewhere and not elsewhere:
                time.sleep(_SETTLE)
            elsewhere = contestant.is_elsewhere
            try:
                found = contestant.sample()
            except ContestantLostError as error:
                out[label] = str(error)
            else:
                samples.setdefault(label, []).extend(found)
        on_round(index + 1)
    return Times({label: s for label, s in samples.items() if label not in out}, out)


def measured(
    contestants: Sequence[Contestant],
    scenario: str,
    seconds: float,
    progress: Callable[[float], None],
    *,
    alike: bool = False,
) -> Times:
    """Interleaved times of contestants in a scenario, in so many seconds.

    What is compiled at its first call is compiled in the warm-up, so that is done twice. With
    ``alike`` nobody sits out, however slow: the times can be compared round by round.
    """
    warm_up(contestants)
    warm = warm_up(contestants)
    steps = {label: samples[0] for label, samples in warm.samples.items()}
    if alike:
        steps = dict.fromkeys(steps, max(steps.values(), default=0.0))
    if not steps or (alike and warm.lost):
        return warm
    chosen = plan(steps, seconds, scenario)
    return interleave(contestants, chosen, warm.lost, lambda n: progress(n / chosen.rounds))


def one_by_one(jobs: Mapping[str, Job], rounds: int, warm: int) -> dict[str, list[float]]:
    """Seconds of single steps, each job taking one in a round, without the first ``warm`` rounds.

    In each round another job is the first: who comes after a large step finds the caches full of
    its arrays.
    """
    taken: dict[str, list[float]] = {label: [] for label in jobs}
    for k in range(warm + rounds):
        labels, first = [*jobs], k % len(jobs)
        for label in labels[first:] + labels[:first]:
            jobs[label].load()
            taken[label].append(seconds_of(jobs[label].step))
    return {label: found[warm:] for label, found in taken.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """The time that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_rounds(jobs: Mapping[str, Job], rounds: int) -> dict[str, Summary]:
    """The times of jobs in this process, each of which takes part in every round."""
    contestants = in_process(jobs)
    warm_up(contestants)
    return interleave(contestants, Plan(rounds)).summaries
