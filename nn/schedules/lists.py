"""Lists of learning rates, one for each step, that change from epoch to epoch.

They carry MindSpore's names. A list is a schedule of `decay` whose time is counted in epochs,
written out; give it as ``learning_rate`` to an optimizer, which raises `RuntimeError` when it is
called more often than the list is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ops.docstrings import entries
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ..base.arguments import list_or_tuple, positive_int
from . import decay

_SHARED = decay.SHARED._replace(
    arguments=entries("""\
    learning_rate: float > 0, in the first epoch.
    decay_rate: float > 0.
    total_step: int > 0, the length of the list.
    step_per_epoch: int > 0.
    decay_epoch: int > 0.
    is_stair: hold the learning rate for ``decay_epoch`` epochs, then change it at once.
    warmup_epoch: int > 0.
""")
)


@_SHARED.complete
def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """One learning rate up to each milestone.

    Step i has ``learning_rates[k]`` for ``milestone[k - 1] <= i < milestone[k]``, where
    ``milestone[-1]`` stands for 0. The list is ``milestone``'s last element long.

    Args:
        milestone: list or tuple of ints > 0 that never decrease.
        learning_rates: list or tuple of as many finite floats.

    Raises:
        ValueError: a value is out of range, or the lengths differ.

    Source: ``mindspore.nn.piecewise_constant_lr``.

    >>> piecewise_constant_lr([2, 5], [0.1, 0.05])
    [0.1, 0.1, 0.05, 0.05, 0.05]
    """
    where = "piecewise_constant_lr"
    ends = list_or_tuple(where, "milestone", milestone)
    rates = list_or_tuple(where, "learning_rates", learning_rates)
    if len(ends) != len(rates):
        wrong, expected = "has a wrong length", f"{len(ends)} rates, one for each milestone"
        reject(ValueError, where, "learning_rates", wrong, expected, len(rates))
    values: list[float] = []
    for k, (end, rate) in enumerate(zip(ends, rates, strict=True)):
        end = positive_int(where, f"milestone[{k}]", end)
        rate = check.float_attribute(where, f"learning_rates[{k}]", rate)
        if end < len(values):
            expected = f"at least {len(values)}, the one before"
            reject(ValueError, where, f"milestone[{k}]", "is out of order", expected, end)
        values += [rate] * (end - len(values))
    return values


@_SHARED.complete
def exponential_decay_lr(
    learning_rate: float, decay_rate: float, total_step: int, step_per_epoch: int, decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:  # fmt: skip
    """`ExponentialDecayLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        learning_rate * decay_rate**p
        p = e / decay_epoch,  or with is_stair  floor(e / decay_epoch)

    Source: ``mindspore.nn.exponential_decay_lr``.

    >>> exponential_decay_lr(0.1, 0.5, total_step=6, step_per_epoch=2, decay_epoch=1)
    [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    """
    return _by_epoch("exponential_decay_lr", decay.ExponentialDecayLR, **locals())


@_SHARED.complete
def natural_exp_decay_lr(
    learning_rate: float, decay_rate: float, total_step: int, step_per_epoch: int, decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:  # fmt: skip
    """`NaturalExpDecayLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        learning_rate * exp(-decay_rate * e)
        with is_stair  learning_rate * exp(-decay_rate * floor(e / decay_epoch) * decay_epoch)

    Args:
        decay_epoch: int > 0; it matters with ``is_stair`` only.

    Source: ``mindspore.nn.natural_exp_decay_lr``.

    >>> rates = natural_exp_decay_lr(0.1, 0.5, total_step=6, step_per_epoch=2, decay_epoch=1)
    >>> [round(rate, 6) for rate in rates]
    [0.1, 0.1, 0.060653, 0.060653, 0.036788, 0.036788]
    """
    return _by_epoch("natural_exp_decay_lr", decay.NaturalExpDecayLR, **locals())


@_SHARED.complete
def inverse_decay_lr(
    learning_rate: float, decay_rate: float, total_step: int, step_per_epoch: int, decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:  # fmt: skip
    """`InverseDecayLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        learning_rate / (1 + decay_rate * p)
        p = e / decay_epoch,  or with is_stair  floor(e / decay_epoch)

    Source: ``mindspore.nn.inverse_decay_lr``.

    >>> inverse_decay_lr(0.5, 1.0, total_step=6, step_per_epoch=3, decay_epoch=1)
    [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    """
    return _by_epoch("inverse_decay_lr", decay.InverseDecayLR, **locals())


@_SHARED.complete
def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    """`CosineDecayLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        min_lr + (max_lr - min_lr) / 2 * (1 + cos(pi * min(e, decay_epoch) / decay_epoch))

    Args:
        min_lr: float >= 0, from epoch ``decay_epoch`` on.
        max_lr: float > ``min_lr``, in the first epoch.

    Source: ``mindspore.nn.cosine_decay_lr``.

    >>> rates = cosine_decay_lr(0.0, 0.1, total_step=6, step_per_epoch=2, decay_epoch=2)
    >>> [round(rate, 6) for rate in rates]
    [0.1, 0.1, 0.05, 0.05, 0.0, 0.0]
    """
    return _by_epoch("cosine_decay_lr", decay.CosineDecayLR, **locals())


@_SHARED.complete
def polynomial_decay_lr(
    learning_rate: float, end_learning_rate: float, total_step: int, step_per_epoch: int,
    decay_epoch: int, power: float, update_decay_epoch: bool = False,
) -> list[float]:  # fmt: skip
    """`PolynomialDecayLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        (learning_rate - end_learning_rate) * (1 - t / D)**power + end_learning_rate
        t = min(e, decay_epoch),  D = decay_epoch

    With ``update_decay_epoch`` t = e, and D is the smallest multiple of ``decay_epoch`` that is
    at least e (and not 0).

    Args:
        end_learning_rate: float >= 0; it may be more than ``learning_rate``.
        power: float > 0; 1.0 is a straight line.
        update_decay_epoch: see above.

    Source: ``mindspore.nn.polynomial_decay_lr``.

    >>> polynomial_decay_lr(0.5, 0.0, total_step=6, step_per_epoch=2, decay_epoch=2, power=1.0)
    [0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    """
    return _by_epoch("polynomial_decay_lr", decay.PolynomialDecayLR, **locals())


@_SHARED.complete
def warmup_lr(
    learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int
) -> list[float]:
    """`WarmUpLR` by epochs.

    At step i, with the epoch e = floor(i / step_per_epoch)::

        learning_rate * min(e, warmup_epoch) / warmup_epoch

    The learning rate of the whole first epoch is 0: it moves no parameter.

    Args:
        learning_rate: float >= 0, from epoch ``warmup_epoch`` on.

    Source: ``mindspore.nn.warmup_lr``.

    >>> warmup_lr(0.5, total_step=7, step_per_epoch=2, warmup_epoch=2)
    [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.5]
    """
    return _by_epoch("warmup_lr", decay.WarmUpLR, **locals())


def _by_epoch(
    where: str, kind: type, total_step: int, step_per_epoch: int, **arguments: Any
) -> list[float]:
    """The values of steps 0 to ``total_step - 1`` of a schedule that counts epochs."""
    # Its errors name the function and what that calls the arguments.
    named = type(where, (kind,), {"_unit": "epoch"})
    schedule = named(**{n.replace("_epoch", "_steps"): value for n, value in arguments.items()})
    total_step = positive_int(where, "total_step", total_step)
    step_per_epoch = positive_int(where, "step_per_epoch", step_per_epoch)
    return [schedule(step // step_per_epoch) for step in range(total_step)]
