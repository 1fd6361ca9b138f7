"""The base class of schedules."""

from __future__ import annotations

from typing import Any


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
