"""The plan of a step whose gradients are read and checked: its kernel calls and their scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...kernels.cpu.counts import are_equal
from ...kernels.cpu.threads.parallel import Prepared
from ...kernels.formula import ROUNDING, Formula
from ...ops.runtime.check import LARGEST
from ..base.groups import ParameterOptions
from ..base.parameter import Parameter
from ..base.rates import PerOwnerRates
from .batch import NOTHING, Batch, KernelCall
from .conditioning import Conditioning
from .layout import Gradients


class StepMethod(NamedTuple):
    """The method by which an optimizer computes the scalars of its rule, and numbers beside."""

    formula: Formula  # from the learning rate and the number of the update
    constants: tuple[tuple[str, float], ...] = ()  # numbers that `Rule.factor` takes, by name
    numbers: Mapping[str, np.ndarray] = MappingProxyType({})  # the optimizer's, in its order

    def constants_of_step(self) -> dict[str, float]:
        """The numbers that a rule takes which measures all tensors of a step."""
        return {**dict(self.constants), **{name: x.item() for name, x in self.numbers.items()}}


class Classes:
    """The classes of parameters: parameters with equal options share their scalars."""

    def __init__(self, where: str, options: Sequence[ParameterOptions]) -> None:
        known: dict[Any, int] = {}
        self.examples: list[int] = []  # a parameter of each class
        of = []
        for i, option in enumerate(options):
            # Learning rates are compared by identity: a fixed rate is a parameter that can be
            # assigned to, so two equal rates may differ in the next step. A fixed decay does not
            # change.
            decay = option.decay if isinstance(option.decay, float) else id(option.decay)
            key = (id(option.rate), type(option.decay), decay, option.centralize)
            if key not in known:
                known[key] = len(known)
                self.examples.append(i)
            of.append(known[key])
        self.of = np.array(of, np.int64)  # the class of each parameter
        examples = [options[i] for i in self.examples]
        self._rates, decays = zip(*((o.rate, o.decay) for o in examples), strict=True)
        self.rates = PerOwnerRates(where, "learning_rate", self._rates)
        self.decays = PerOwnerRates(where, "weight_decay", decays)
        self._fixed_decays = list(decays) if all(type(d) is float for d in decays) else None

    def at(self, rate_step: int, step: int) -> tuple[list[float], list[float]]:
        """Learning rates and weight decays for a step on the host.

        Raises:
            RuntimeError, TypeError, ValueError: as `PerOwnerRates.at`.
        """
        rates = []
        for rate in self._rates:
            array = rate.array if type(rate) is Parameter else None
            # `PerOwnerRates` raises for a rate out of range, with its name.
            if type(array) is not np.ndarray or array.ndim or not 0 <= float(array) <= LARGEST:
                rates = self.rates.at(rate_step)
                break
            rates.append(float(array))
        return rates, self._fixed_decays or self.decays.at(step)


class Plan(NamedTuple):
    """A step that has been read and checked."""

    given: Gradients
    method: StepMethod
    conditioning: Conditioning  # the gradient transforms before the rule
    rates: Sequence[float]  # of each class of parameters
    decays: Sequence[float]  # of each class of parameters
    touched_only: bool  # whether row-sparse gradients update only the rows that occur
    skip_nonfinite: bool  # whether a gradient that is not finite skips the step
    use_locking: bool  # whether the step locks its memory
    calls: Sequence[KernelCall]
    behind: Sequence[Prepared] = ()  # what brings rows up to date first


def calls_of(
    given: Gradients, method: StepMethod, conditioning: Conditioning, classes: Classes,
    numbers: tuple[Sequence[Any], Sequence[float]], steps: np.ndarray, seed: np.ndarray, *,
    touched_only: bool,
) -> list[KernelCall]:  # fmt: skip
    """The kernel calls of a step, with their scalars.

    ``numbers`` are the learning rates and weight decays of the classes, ``steps`` (int64 ``[P]``)
    the numbers of updates of each parameter before this one, ``seed`` that of random bits.
    """
    rates, decays = numbers
    prologue, at = conditioning.prologue, method.formula.at
    left = decays if conditioning.leaves_decay else [0.0] * len(decays)
    calls = []
    for batch in given.layout.batches:
        counts, real = steps if batch.is_all else steps[batch.positions], batch.real
        # As long as no parameter was skipped, all have the same number of updates.
        are_same = len(counts) == 1 or are_equal(counts)
        # Updates are numbered from 1: bias corrections divide by ``1 - beta**t``.
        keys, updates, row_of = scalar_rows(
            batch, int(counts[0]) + 1 if are_same else (counts + 1).tolist()
        )
        of_each = map(rates.__getitem__, keys), map(left.__getitem__, keys), updates
        rows = [*map(at, repeat(real), *of_each)]  # no call of Python but ``at``
        if prologue:
            transforms = {
                k: tuple(map(ROUNDING[real], conditioning.scalars(classes.examples[k], decays[k])))
                for k in batch.classes
            }
            rows = [(*row, *transforms[k]) for k, row in zip(keys, rows, strict=True)]
        hp: np.ndarray = np.array(rows, real)
        measures: bool = conditioning.is_measured
        measured: tuple[Any, ...] = NOTHING, NOTHING, ()
        if batch.row_sparse:
            measures = conditioning.measures_rows
        if measures or batch.rule.is_two_stage:  # each tensor has a row of scalars of its own
            constants = [dict(method.constants)] * len(row_of)
            measured = np.array(rates)[batch.class_of], np.array(decays)[batch.class_of], constants
            hp, row_of = hp[row_of], np.arange(len(row_of))
        if batch.draws is not None:
            hp, row_of = batch.draws.joined(seed, counts + 1, hp, row_of)
        update = batch.update(prologue, given.of(batch), hp, row_of, touched_only=touched_only)
        calls.append(tuple.__new__(KernelCall, (batch, update, *measured)))  # no call of Python
    return calls


def scalar_rows(batch: Batch, counts: Any) -> tuple[Sequence[int], Iterable[Any], np.ndarray]:
    """The class and the number of updates of each row of scalars, and the row of each tensor.

    ``counts`` are a list of the numbers of each tensor, or one number of all.
    """
    if not isinstance(counts, list):
        return batch.classes, repeat(counts), batch.place_of
    each = [*zip(batch.class_of.tolist(), counts, strict=True)]
    row_of = {key: k for k, key in enumerate(dict.fromkeys(each))}
    classes, numbers = zip(*row_of, strict=True)
    return classes, numbers, np.array([*map(row_of.__getitem__, each)])


class StepAgreement(Protocol):
    """The agreement of several processes on a step: all of their optimizers take it, or none."""

    def agreed(self, planned: Callable[[], Plan | None], step: int) -> Plan | None:
        """The plan of a step, when all processes have theirs; None where one of them skips it."""


class Stepper(Protocol):
    """A runner of the steps of an optimizer: on the host, on a device, or on both."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """A context in which no other thread takes a step of the optimizer."""

    def run(self, plan: Plan) -> None:
        """Take a step, and count it."""
