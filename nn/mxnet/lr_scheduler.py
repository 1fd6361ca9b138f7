"""The schedulers of ``mxnet.lr_scheduler``: learning rates by the number of updates.

In MXNet a scheduler changes itself when it is asked, so asking for an earlier number, or asking
twice, or sharing one between optimizers gives other learning rates. Here they are a function of
the number of updates and of the attributes, which can be assigned to at any time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ...ops.runtime import check
from ...ops.runtime.errors import reject, reject_unknown
from ..base.arguments import count, positive_int
from .arguments import arguments_of

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
]

_MODES = "linear", "constant"


class LRScheduler:
    """The base class of schedulers: subclass it and define ``__call__(num_update)``.

    Args:
        base_lr: the learning rate to start from, at least 0.
        warmup_steps: updates before the warm-up ends, an int of at least 0.
        warmup_begin_lr: the learning rate at the start of the warm-up, at most ``base_lr``.
        warmup_mode: ``"linear"``: from ``warmup_begin_lr`` to ``base_lr``; ``"constant"``:
            ``warmup_begin_lr`` until the end.

    Raises:
        TypeError: a kind does not fit.
        ValueError: a value does not fit.
        KeyError: an unknown keyword (also `TypeError`).

    Source: ``mxnet.lr_scheduler.LRScheduler``.

    >>> class Halving(LRScheduler):
    ...     def __call__(self, num_update):
    ...         return self.base_lr * 0.5**num_update
    >>> Halving(base_lr=0.8)(3)
    0.1
    """

    def __init__(
        self, base_lr: float = 0.01, warmup_steps: int = 0, warmup_begin_lr: float = 0,
        warmup_mode: str = "linear", **unknown: Any,
    ) -> None:  # fmt: skip
        reject_unknown(self._name, unknown, arguments_of(type(self)))
        self.base_lr = check.scalar_at_least_0(self._name, "base_lr", base_lr)
        self.warmup_steps = count(self._name, "warmup_steps", warmup_steps)
        name = "warmup_begin_lr"
        self.warmup_begin_lr = check.scalar_at_least_0(self._name, name, warmup_begin_lr)
        if not (isinstance(warmup_mode, str) and warmup_mode in _MODES):
            reject(ValueError, self._name, "warmup_mode", "is unknown", _MODES, repr(warmup_mode))
        self.warmup_mode = warmup_mode
        self._check_warm_up()

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def warmup_final_lr(self) -> float:
        """The learning rate at which the warm-up ends: ``base_lr``."""
        return self.base_lr

    def _check_warm_up(self) -> None:
        begin, expected = self.warmup_begin_lr, f"at most base_lr = {self.base_lr}"
        if begin > self.base_lr:
            reject(ValueError, self._name, "warmup_begin_lr", "is too large", expected, begin)

    def get_warmup_lr(self, num_update: int) -> float:
        """The learning rate before update ``warmup_steps``."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        rise = self.base_lr - self.warmup_begin_lr
        return self.warmup_begin_lr + rise * num_update / self.warmup_steps

    def starting_from(self, base_lr: float) -> LRScheduler:
        """A copy with another ``base_lr``.

        Raises:
            TypeError: it is no number.
            ValueError: it is negative, not finite, or below ``warmup_begin_lr``.
        """
        other = copy.copy(self)
        other.base_lr = check.scalar_at_least_0(self._name, "base_lr", base_lr)
        other._check_warm_up()
        return other

    def __call__(self, num_update: int) -> float:
        """The learning rate of update ``num_update`` = 1, 2, ...

        Raises:
            NotImplementedError: in the base class.
        """
        raise NotImplementedError(f"{self._name}: define __call__(self, num_update)")


class _WarmedUp(LRScheduler):
    """The base class of the schedulers below: a warm-up, then learning rates of their own."""

    _rate: Callable[[int], float]  # after the warm-up

    def __call__(self, num_update: int) -> float:
        """The learning rate of update ``num_update`` = 1, 2, ..."""
        is_early = num_update < self.warmup_steps
        return self.get_warmup_lr(num_update) if is_early else self._rate(num_update)

    def _read_factor(self, value: Any) -> float:
        factor = check.scalar_at_least_0(self._name, "factor", value)
        check.in_range(self._name, "factor", factor, factor <= 1.0, "at most 1")
        return factor


class FactorScheduler(_WarmedUp):
    """Multiply by ``factor`` every ``step`` updates::

        max(base_lr * factor**k, stop_factor_lr),   k = floor((num_update - 1) / step)

    but ``base_lr`` itself before the first drop, which is at update ``step + 1``, as MXNet
    computes it (its documentation has ``floor(num_update / step)``). Updates of the warm-up count.

    Args:
        step: updates between two drops, an int of at least 1.
        factor: at most 1.
        stop_factor_lr: where the drops end.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as `LRScheduler`.

    Source: ``mxnet.lr_scheduler.FactorScheduler``.

    >>> scheduler = FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    >>> [scheduler(n) for n in (1, 2, 3, 4, 5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    """

    def __init__(
        self, step: int, factor: float = 1, stop_factor_lr: float = 1e-8, base_lr: float = 0.01,
        warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear",
        **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode, **unknown)
        self.step = positive_int(self._name, "step", step)
        self.factor = self._read_factor(factor)
        self.stop_factor_lr = check.scalar_at_least_0(self._name, "stop_factor_lr", stop_factor_lr)

    def _rate(self, num_update: int) -> float:
        # An int of Python, whose power NumPy's ints differ from in the last bit.
        drops = int(max(num_update - 1, 0) // self.step)
        # The floor acts from the first drop on, as in MXNet, even where it is above ``base_lr``.
        rate = self.base_lr * self.factor**drops
        return max(rate, self.stop_factor_lr) if drops else self.base_lr


class MultiFactorScheduler(_WarmedUp):
    """Multiply by ``factor`` after each of the updates in ``step``::

        base_lr * factor**k,   k = how many elements of step are below num_update

    Updates of the warm-up count.

    Args:
        step: a list of increasing ints of at least 1.
        factor: at most 1.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: as `LRScheduler`.

    Source: ``mxnet.lr_scheduler.MultiFactorScheduler``.

    >>> scheduler = MultiFactorScheduler(step=[2, 4], factor=0.5, base_lr=0.1)
    >>> [scheduler(n) for n in (1, 2, 3, 4, 5)]
    [0.1, 0.1, 0.05, 0.05, 0.025]
    """

    def __init__(
        self, step: list[int], factor: float = 1, base_lr: float = 0.01, warmup_steps: int = 0,
        warmup_begin_lr: float = 0, warmup_mode: str = "linear", **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode, **unknown)
        self.step = _increasing(self._name, step)
        self.factor = self._read_factor(factor)

    def _rate(self, num_update: int) -> float:
        drops = sum(1 for step in self.step if num_update > step)
        return self.base_lr * self.factor**drops


class _Falling(_WarmedUp):
    """From ``base_lr`` at the end of the warm-up to ``final_lr`` at ``max_update``."""

    _share_left: Callable[[float], float]  # of the fall, after a share of the updates

    def __init__(
        self, max_update: int, base_lr: float = 0.01, final_lr: float = 0, warmup_steps: int = 0,
        warmup_begin_lr: float = 0, warmup_mode: str = "linear", **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode, **unknown)
        self.max_update = positive_int(self._name, "max_update", max_update)
        self.final_lr = check.scalar_at_least_0(self._name, "final_lr", final_lr)
        if self.warmup_steps >= self.max_update:
            wrong, expected = "is too large", f"below max_update = {self.max_update}"
            reject(ValueError, self._name, "warmup_steps", wrong, expected, self.warmup_steps)

    def _rate(self, num_update: int) -> float:
        done = (num_update - self.warmup_steps) / (self.max_update - self.warmup_steps)
        left = self._share_left(float(min(done, 1.0)))
        return self.final_lr + (self.base_lr - self.final_lr) * left


class PolyScheduler(_Falling):
    """Fall from ``base_lr`` to ``final_lr`` along a power::

        final_lr + (base_lr - final_lr) * (1 - (num_update - W) / (max_update - W))**pwr

    with ``W = warmup_steps``; after ``max_update`` it is ``final_lr``.

    Args:
        max_update: the update at which ``final_lr`` is reached, an int of at least 1.
        base_lr: as `LRScheduler`.
        pwr: the power, above 0.
        final_lr: at least 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as `LRScheduler`; ``warmup_steps`` is below
            ``max_update``.

    Source: ``mxnet.lr_scheduler.PolyScheduler``.

    >>> scheduler = PolyScheduler(max_update=4, base_lr=0.16)
    >>> [round(scheduler(n), 6) for n in (1, 2, 3, 4, 5)]
    [0.09, 0.04, 0.01, 0.0, 0.0]
    """

    def __init__(
        self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0,
        warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear",
        **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode, **unknown
        )
        self.power = check.scalar(self._name, "pwr", pwr)
        check.in_range(self._name, "pwr", self.power, self.power > 0.0, "above 0")

    def _share_left(self, done: float) -> float:
        return float((1.0 - done) ** self.power)


class CosineScheduler(_Falling):
    """Fall from ``base_lr`` to ``final_lr`` along half a cosine::

        final_lr + (base_lr - final_lr) * (1 + cos(pi * (num_update - W) / (max_update - W))) / 2

    with ``W = warmup_steps``; after ``max_update`` it is ``final_lr``.

    Args:
        max_update: the update at which ``final_lr`` is reached, an int of at least 1.
        base_lr: as `LRScheduler`.
        final_lr: at least 0.
        warmup_steps, warmup_begin_lr, warmup_mode: as `LRScheduler`; ``warmup_steps`` is below
            ``max_update``.

    Source: ``mxnet.lr_scheduler.CosineScheduler``.

    >>> scheduler = CosineScheduler(max_update=4, base_lr=0.1)
    >>> [round(scheduler(n), 6) for n in (1, 2, 3, 4, 5)]
    [0.085355, 0.05, 0.014645, 0.0, 0.0]
    """

    def _share_left(self, done: float) -> float:
        return (1.0 + math.cos(math.pi * done)) / 2.0


def _increasing(where: str, value: Any) -> list[int]:
    if not isinstance(value, list | tuple) or not value:
        got = "an empty list" if isinstance(value, list | tuple) else type(value).__name__
        reject(TypeError, where, "step", "has a wrong type", "a non-empty list of ints", got)
    steps = [positive_int(where, "step", step) for step in value]
    if any(a >= b for a, b in pairwise(steps)):
        reject(ValueError, where, "step", "is not increasing", "increasing ints", steps)
    return steps
