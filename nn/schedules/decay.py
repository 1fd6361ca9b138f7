"""Schedules that decay or warm up step by step, under MindSpore's names and defaults.

All arithmetic is that of Python's floats (float64); MindSpore's is float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ...ops.docstrings import Shared, entries
from ...ops.runtime import check
from ..base.arguments import non_negative_float, positive_float, positive_int, step_numbers

SHARED = Shared(
    arguments=entries("""\
    learning_rate: float > 0, at step 0.
    decay_rate: float > 0.
    decay_steps: int > 0.
    is_stair: hold the learning rate for ``decay_steps`` steps, then change it at once.
    warmup_steps: int > 0.
"""),
    errors={
        "": """\
    TypeError: a kind does not fit (an int where a float is published).
    ValueError: a value is out of range."""
    },
)
"""The descriptions that docstrings of schedules share."""


class LearningRateSchedule:
    """The base class of schedules: subclass it and define ``construct(global_step)``.

    ``construct`` receives the int 0, 1, 2, ... and returns a float or a 1-element array.

    >>> class Halving(LearningRateSchedule):
    ...     def construct(self, global_step):
    ...         return 0.1 * 0.5**global_step
    >>> Halving()(3)
    0.0125
    """

    def construct(self, global_step: int) -> Any:
        """The value at ``global_step`` = 0, 1, 2, ..."""
        raise NotImplementedError(
            f"{type(self).__name__}: define construct(self, global_step) in the subclass"
        )

    def __call__(self, global_step: int) -> Any:
        """The value at ``global_step``."""
        return self.construct(global_step)


class StepSchedule(LearningRateSchedule, ABC):
    """The base class of the schedules of this package.

    Its attributes are the arguments of the constructor and nothing else, as ``repr`` shows them.
    """

    _unit = "steps"  # in the names of arguments, in errors

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        SHARED.complete(cls)

    def __call__(self, global_step: Any) -> Any:
        """The value at a step: 0, 1, 2, ...

        Args:
            global_step: an int gives a float, an array of ints the array of their values. An
                array is computed one element at a time, so it holds the bits of single calls.

        Raises:
            TypeError: another kind.
            ValueError: a step is negative.
        """
        return self.construct(global_step)

    def construct(self, global_step: Any) -> Any:
        """The value at a step, or at each of an array of steps."""
        steps = step_numbers(type(self).__name__, global_step)
        if steps.ndim == 0:
            return self._at(int(steps))
        values = [self._at(step) for step in steps.ravel().tolist()]
        return np.array(values, np.float64).reshape(steps.shape)

    @abstractmethod
    def _at(self, step: int) -> float:
        """The value at one step."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class _Decay(StepSchedule):
    """A learning rate that shrinks by periods, of which ``is_stair`` takes whole ones only."""

    def __init__(
        self, learning_rate: float, decay_rate: float, decay_steps: int, is_stair: bool = False
    ) -> None:
        where = type(self).__name__
        self.learning_rate = positive_float(where, "learning_rate", learning_rate, np.float64)
        self.decay_rate = positive_float(where, "decay_rate", decay_rate, np.float64)
        self.decay_steps = positive_int(where, f"decay_{self._unit}", decay_steps)
        self.is_stair = check.flag(where, "is_stair", is_stair)

    def _periods(self, step: int) -> float:
        """The number of periods that have passed; an exact int where only whole ones count."""
        return step // self.decay_steps if self.is_stair else step / self.decay_steps


class ExponentialDecayLR(_Decay):
    """The learning rate shrinks by the factor ``decay_rate`` over every ``decay_steps`` steps.

    At step s = 0, 1, 2, ...::

        learning_rate * decay_rate**p
        p = s / decay_steps,  or with is_stair  floor(s / decay_steps)

    Args:
        decay_rate: float > 0. Above 1 the learning rate grows, in the end to infinity, which
            optimizers refuse.

    Source: ``mindspore.nn.ExponentialDecayLR``.

    >>> schedule = ExponentialDecayLR(0.1, 0.5, 2)
    >>> [round(schedule(step), 6) for step in range(5)]
    [0.1, 0.070711, 0.05, 0.035355, 0.025]
    >>> schedule
    ExponentialDecayLR(learning_rate=0.1, decay_rate=0.5, decay_steps=2, is_stair=False)
    """

    def _at(self, step: int) -> float:
        try:
            return float(self.learning_rate * self.decay_rate ** self._periods(step))
        except OverflowError:  # where Python refuses what is infinite
            return math.inf


class NaturalExpDecayLR(_Decay):
    """The learning rate shrinks by the factor ``exp(-decay_rate)`` at every step.

    At step s = 0, 1, 2, ...::

        learning_rate * exp(-decay_rate * s)
        with is_stair  learning_rate * exp(-decay_rate * floor(s / decay_steps) * decay_steps)

    MindSpore's documentation divides the exponent by ``decay_steps``; its code does not, and
    neither does this class. So ``decay_steps`` matters with ``is_stair`` only.

    Args:
        decay_steps: int > 0, the length of a stair.

    Source: ``mindspore.nn.NaturalExpDecayLR``, as it behaves.

    >>> schedule = NaturalExpDecayLR(0.1, 0.5, 2)
    >>> [round(schedule(step), 6) for step in range(4)]
    [0.1, 0.060653, 0.036788, 0.022313]
    >>> stairs = NaturalExpDecayLR(0.1, 0.5, 2, is_stair=True)
    >>> [round(stairs(step), 6) for step in range(4)]
    [0.1, 0.1, 0.036788, 0.036788]
    """

    def _at(self, step: int) -> float:
        if self.is_stair:
            step -= step % self.decay_steps
        return self.learning_rate * math.exp(-self.decay_rate * step)


class InverseDecayLR(_Decay):
    """The learning rate shrinks like the inverse of time.

    At step s = 0, 1, 2, ...::

        learning_rate / (1 + decay_rate * p)
        p = s / decay_steps,  or with is_stair  floor(s / decay_steps)

    Source: ``mindspore.nn.InverseDecayLR``.

    >>> schedule = InverseDecayLR(0.1, 1.0, 2)
    >>> [round(schedule(step), 6) for step in range(5)]
    [0.1, 0.066667, 0.05, 0.04, 0.033333]
    """

    def _at(self, step: int) -> float:
        return self.learning_rate / (1.0 + self.decay_rate * self._periods(step))


class CosineDecayLR(StepSchedule):
    """The learning rate falls from ``max_lr`` to ``min_lr`` along half a cosine, and stays there.

    At step s = 0, 1, 2, ...::

        min_lr + (max_lr - min_lr) / 2 * (1 + cos(pi * min(s, decay_steps) / decay_steps))

    Args:
        min_lr: float >= 0, from step ``decay_steps`` on.
        max_lr: float > ``min_lr``, at step 0.

    Source: ``mindspore.nn.CosineDecayLR``; Loshchilov and Hutter (2017), arXiv:1608.03983.

    >>> schedule = CosineDecayLR(0.0, 0.1, 4)
    >>> [round(schedule(step), 6) for step in range(6)]
    [0.1, 0.085355, 0.05, 0.014645, 0.0, 0.0]
    """

    def __init__(self, min_lr: float, max_lr: float, decay_steps: int) -> None:
        where = type(self).__name__
        self.min_lr = low = non_negative_float(where, "min_lr", min_lr)
        self.max_lr = high = positive_float(where, "max_lr", max_lr, np.float64)
        check.in_range(where, "max_lr", high, low < high, f"above min_lr = {low}")
        self.decay_steps = positive_int(where, f"decay_{self._unit}", decay_steps)

    def _at(self, step: int) -> float:
        angle = math.pi * min(step, self.decay_steps) / self.decay_steps
        return self.min_lr + 0.5 * (self.max_lr - self.min_lr) * (1.0 + math.cos(angle))


class PolynomialDecayLR(StepSchedule):
    """A learning rate from ``learning_rate`` to ``end_learning_rate``, by a power of the time left.

    At step s = 0, 1, 2, ...::

        (learning_rate - end_learning_rate) * (1 - t / D)**power + end_learning_rate
        t = min(s, decay_steps),  D = decay_steps

    It reaches its end at step ``decay_steps`` and stays there. With ``update_decay_steps`` the
    end is put off each time that it has been reached: t = s, and D is the smallest multiple of
    ``decay_steps`` that is at least s (and not 0), so the learning rate jumps up again.

    Args:
        end_learning_rate: float >= 0; it may be more than ``learning_rate``.
        power: float > 0; 1.0 is a straight line.
        update_decay_steps: see above.

    Source: ``mindspore.nn.PolynomialDecayLR``.

    >>> schedule = PolynomialDecayLR(0.5, 0.1, 4, power=1.0)
    >>> [round(schedule(step), 6) for step in range(7)]
    [0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]
    >>> again = PolynomialDecayLR(0.5, 0.1, 4, power=1.0, update_decay_steps=True)
    >>> [round(again(step), 6) for step in range(7)]
    [0.5, 0.4, 0.3, 0.2, 0.1, 0.25, 0.2]
    """

    def __init__(
        self, learning_rate: float, end_learning_rate: float, decay_steps: int, power: float,
        update_decay_steps: bool = False,
    ) -> None:  # fmt: skip
        where = type(self).__name__
        self.learning_rate = positive_float(where, "learning_rate", learning_rate, np.float64)
        self.end_learning_rate = non_negative_float(where, "end_learning_rate", end_learning_rate)
        self.decay_steps = positive_int(where, f"decay_{self._unit}", decay_steps)
        self.power = positive_float(where, "power", power, np.float64)
        name = f"update_decay_{self._unit}"
        self.update_decay_steps = check.flag(where, name, update_decay_steps)

    def _at(self, step: int) -> float:
        end = self.decay_steps
        if self.update_decay_steps:
            # -(-a // b) is the ceiling of a / b, in exact integers.
            end *= max(-(-step // end), 1)
        left = 1.0 - min(step, end) / end
        drop = self.learning_rate - self.end_learning_rate
        return drop * float(left**self.power) + self.end_learning_rate


class WarmUpLR(StepSchedule):
    """The learning rate rises from 0 along a straight line and then stays.

    At step s = 0, 1, 2, ...::

        learning_rate * min(s, warmup_steps) / warmup_steps

    The learning rate of the first step is 0: it moves no parameter.

    Args:
        learning_rate: float >= 0, from step ``warmup_steps`` on.

    Source: ``mindspore.nn.WarmUpLR``. `SequentialLR` lets a decay follow.

    >>> schedule = WarmUpLR(0.1, 4)
    >>> [round(schedule(step), 6) for step in range(6)]
    [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    """

    def __init__(self, learning_rate: float, warmup_steps: int) -> None:
        where = type(self).__name__
        self.learning_rate = non_negative_float(where, "learning_rate", learning_rate)
        self.warmup_steps = positive_int(where, f"warmup_{self._unit}", warmup_steps)

    def _at(self, step: int) -> float:
        return self.learning_rate * min(step, self.warmup_steps) / self.warmup_steps
