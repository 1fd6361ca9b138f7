"""Schedules one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ops.runtime.errors import reject
from ..base.arguments import list_or_tuple, non_negative_float, positive_int
from ..base.rates import Schedule, value_at
from .decay import StepSchedule


class SequentialLR(StepSchedule):
    """Schedules one after the other, such as a warm-up and then a decay.

    Schedule k applies from step ``milestones[k - 1]`` (schedule 0: from 0) up to, but without,
    ``milestones[k]``. Each counts its own steps from 0: at its milestone it is asked for the
    value of step 0.

    Args:
        schedules: list or tuple of `LearningRateSchedule` objects, other callables of the step,
            or floats >= 0 for a fixed learning rate. At least one.
        milestones: list or tuple of strictly increasing ints > 0, one fewer than the schedules.

    Raises:
        TypeError: a kind does not fit. When called: a schedule returned no number.
        ValueError: a value is out of range, or the lengths do not fit. When called: a schedule
            returned a negative number or one that is not finite.

    Source: ``torch.optim.lr_scheduler.SequentialLR``.

    >>> from fusestep.nn import CosineDecayLR, WarmUpLR
    >>> schedule = SequentialLR([WarmUpLR(0.1, 2), CosineDecayLR(0.0, 0.1, 4)], milestones=[2])
    >>> [round(schedule(step), 6) for step in range(8)]
    [0.0, 0.05, 0.1, 0.085355, 0.05, 0.014645, 0.0, 0.0]
    """

    def __init__(self, schedules: Sequence[Schedule | float], milestones: Sequence[int]) -> None:
        where = type(self).__name__
        items = list_or_tuple(where, "schedules", schedules)
        if not items:
            reject(ValueError, where, "schedules", "is empty", "at least one schedule", "none")
        self.schedules = tuple(_schedule(where, f"schedules[{k}]", s) for k, s in enumerate(items))
        self.milestones = _milestones(where, milestones, len(items) - 1)

    def _at(self, step: int) -> float:
        k = bisect_right(self.milestones, step)
        step -= self.milestones[k - 1] if k > 0 else 0
        return value_at(type(self).__name__, f"schedules[{k}]", self.schedules[k], step)


def _schedule(where: str, name: str, value: Any) -> Schedule | float:
    if isinstance(value, float | np.floating):
        return non_negative_float(where, name, value)
    # A class is callable too, but calling it with a step would make a schedule, not a rate.
    if isinstance(value, type) or not callable(value):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        expected = "a schedule, a callable of the step or a float"
        reject(TypeError, where, name, "has a wrong type", expected, got)
    return value  # type: ignore[no-any-return]


def _milestones(where: str, milestones: Any, count: int) -> tuple[int, ...]:
    items = list_or_tuple(where, "milestones", milestones)
    if len(items) != count:
        expected = f"{count}, one fewer than the schedules"
        reject(ValueError, where, "milestones", "has a wrong length", expected, len(items))
    steps: list[int] = []
    for k, value in enumerate(items):
        milestone = positive_int(where, f"milestones[{k}]", value)
        if steps and milestone <= steps[-1]:
            expected = f"more than {steps[-1]}, the one before"
            reject(ValueError, where, f"milestones[{k}]", "is out of order", expected, milestone)
        steps.append(milestone)
    return tuple(steps)
