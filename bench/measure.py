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
from .workers.worker_protocol import FEWEST, LEAD_IN, TURN, Job, before_step, samples

_SLOW = 4.0  # times the first contestant
_SHORTEST = 1e-3  # seconds of a sample at least, since short times vary most
# Our own threads spin for a few milliseconds after a parallel loop, in the hope of another one;
# the worker processes are stopped while they are not asked.
_SETTLE = 0.01
_FEWEST, _MOST, _FEWEST_OF_SLOW, _FEWEST_TURNS, _MOST_STEPS = 7, 101, 3, 3, 200


class ContestantLostError(Exception):
    """A contestant cannot go on; the others can."""


@dataclass(frozen=True)
class Contestant:
    """A source of times, in seconds, that is asked for samples of so many steps."""

    label: str  # its name
    sample: Callable[[int], Sequence[float]]  # takes the steps
    is_elsewhere: bool = False  # in another process


def in_process(
    jobs: Mapping[str, Job], scenario: str = "loop", threads: int = 1
) -> list[Contestant]:
    """Contestants that run in this process; ``threads`` are those of a scenario's other work."""
    before = before_step(scenario, threads)

    def contestant(label: str, job: Job) -> Contestant:
        return Contestant(label, lambda steps: samples(job, scenario, steps, before))

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
    steps: int  # of one sample
    # By label, how many rounds there are from one turn of a contestant to its next, if it
    # does not take part in each.
    every: Mapping[str, int] = field(default_factory=dict)
    # By label, of one sample of a contestant that sits out.
    steps_of_slow: Mapping[str, int] = field(default_factory=dict)

    def steps_of(self, label: str) -> int:
        """Steps of one sample of a contestant."""
        return self.steps_of_slow.get(label, self.steps)


def lasting(seconds: float, steps: int) -> float:
    """Seconds that a sample of so many steps takes, with its lead-in."""
    return seconds * steps + max(seconds, LEAD_IN)


def plan_of_turns(warm: Mapping[str, float], budget: float) -> Plan:
    """A plan for contestants that take turns of several steps; arguments as `plan`."""
    of_round = sum(2 * max(TURN, FEWEST * seconds) for seconds in warm.values())
    rounds = max(_FEWEST_TURNS, min(_MOST, int(budget / of_round)))
    return Plan(rounds, 1)


def plan(warm: Mapping[str, float], budget: float) -> Plan:
    """A plan for contestants with these times of one step, the first of them being ours.

    Args:
        warm: seconds by label.
        budget: seconds that the measurement may take, lead-ins included.
    """
    warm = {label: max(seconds, 1e-9) for label, seconds in warm.items()}
    ours = next(iter(warm.values()))
    steps = max(1, min(_MOST_STEPS, round(_SHORTEST / ours)))
    quick = sum(lasting(seconds, steps) for seconds in warm.values() if seconds <= _SLOW * ours)
    steps_of_slow = {
        label: max(1, min(steps, round(_SHORTEST / seconds)))
        for label, seconds in warm.items()
        if seconds > _SLOW * ours
    }
    slow = {label: lasting(warm[label], count) for label, count in steps_of_slow.items()}
    rounds = int(budget / 2 / quick) if slow else int(budget / quick)
    rounds = max(_FEWEST, min(_MOST, rounds))
    every = {}
    for label, seconds in slow.items():
        turns = int(budget / 2 / len(slow) / seconds)
        every[label] = -(-rounds // max(_FEWEST_OF_SLOW, min(rounds, turns)))
    return Plan(rounds, steps, every, steps_of_slow)


def warm_up(contestants: Sequence[Contestant]) -> Times:
    """One step of each, which also finds out how long it takes about."""
    return interleave(contestants, Plan(1, 1))


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
                found = contestant.sample(plan.steps_of(label))
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
    chosen = (plan if scenario == "loop" else plan_of_turns)(steps, seconds)
    return interleave(contestants, chosen, warm.lost, lambda n: progress(n / chosen.rounds))


def in_rounds(
    jobs: Mapping[str, Job],
    rounds: int,
    steps: int = 1,
    on_round: Callable[[int], None] = lambda _: None,
) -> dict[str, Summary]:
    """The times of jobs in this process, each of which takes part in every round."""
    contestants = in_process(jobs)
    warm_up(contestants)
    return interleave(contestants, Plan(rounds, steps), on_round=on_round).summaries
