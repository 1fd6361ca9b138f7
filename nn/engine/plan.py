"""The plan of a step whose gradients are read and checked: its kernel calls and their scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...kernels.cpu.counts import are_equal
from ...kernels.cpu.threads.parallel import Prepared
from ...kernels.formula import ROUNDING, Formula
from ...kernels.rule import Rule
from ...ops.runtime.check import LARGEST
from ..base.groups import ParameterOptions
from ..base.parameter import Parameter
from ..base.rates import PerOwnerRates
from .conditioning import Conditioning
from .layout import NOTHING, Batch, Gradients, KernelCall


class StepMethod(NamedTuple):
    """The method by which an optimizer updates each tensor, and the numbers that it needs."""

    rule: Rule
    formula: Formula  # computes its scalars from the learning rate and the number of the update
    constants: tuple[tuple[str, float], ...] = ()  # numbers that `Rule.factor` takes, by name
    numbers: Mapping[str, np.ndarray] = MappingProxyType({})  # the optimizer's, in its order
    # draws(positions, steps): `random_scalars` of parameters in the updates of these numbers
    draws: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


class Counts(NamedTuple):
    """The counts of an optimizer, in arrays that its steppers share."""

    global_step: np.ndarray  # int32 (1,): steps that were not skipped
    skipped: np.ndarray  # int64 (1,): steps that were skipped
    steps: np.ndarray  # int64 [P]: updates of each parameter


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
    numbers: tuple[Sequence[Any], Sequence[float]], steps: np.ndarray, *, touched_only: bool,
) -> list[KernelCall]:  # fmt: skip
    """The kernel calls of a step, with their scalars.

    ``numbers`` are the learning rates and weight decays of the classes, ``steps`` (int64 ``[P]``)
    the numbers of updates of each parameter before this one.
    """
    rates, decays = numbers
    prologue, n_classes = conditioning.prologue, len(classes.examples)
    left = decays if conditioning.leaves_decay else [0.0] * n_classes
    calls = []
    for batch in given.layout.batches:
        keys, hp_of = _rows_of(batch, steps, classes.of, n_classes)
        real, at = batch.real, method.formula.at
        before: list[tuple[float, ...]] = [()] * n_classes
        if prologue:
            examples = zip(classes.examples, decays, strict=True)
            before = [
                tuple(map(ROUNDING[real], conditioning.scalars(i, decay))) for i, decay in examples
            ]
        # Updates are numbered from 1: bias corrections divide by ``1 - beta**t``.
        rows = [(*at(real, rates[k], left[k], step + 1), *before[k]) for step, k in keys]
        rule = method.rule if method.rule.matrix is None else method.rule.on(batch.shape)
        if batch.keeping is not None:
            rule = rule.kept(batch.keeping)
        hp: np.ndarray = np.array(rows, real)
        measures, measured = conditioning.is_measured, (NOTHING, NOTHING)
        if batch.row_sparse:
            measures = conditioning.measures_rows
        if measures or rule.is_two_stage:  # each tensor has a row of scalars of its own
            class_of = np.array([k for _, k in keys])[hp_of]
            measured = np.array(rates)[class_of], np.array(decays)[class_of]
            hp, hp_of = hp[hp_of], np.arange(len(hp_of))
        if method.draws is not None and batch.keeping is not None and batch.keeping.hp:
            drawn = method.draws(batch.positions, steps[batch.positions] + 1)
            hp, hp_of = np.concatenate((hp[hp_of], drawn), 1), np.arange(len(hp_of))
        update = batch.update(rule, prologue, given.of(batch), hp, hp_of, touched_only=touched_only)
        calls.append(tuple.__new__(KernelCall, (batch, update, *measured)))  # no call of Python
    return calls


def _rows_of(
    batch: Batch, steps: np.ndarray, class_of: np.ndarray, n_classes: int
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The number of updates and the class of each row of scalars, and the row of each tensor.

    As long as no parameter was skipped, all have the same number of updates.
    """
    if not batch.is_all:
        steps, class_of = steps[batch.positions], class_of[batch.positions]
    first_step = int(steps[0])
    if n_classes <= len(steps) and (len(steps) == 1 or are_equal(steps)):
        return [*zip(repeat(first_step, n_classes), range(n_classes), strict=True)], class_of
    codes, hp_of = np.unique(steps * n_classes + class_of, return_inverse=True)
    return [divmod(code, n_classes) for code in codes.tolist()], hp_of


class StepAgreement(Protocol):
    """The agreement of several processes on a step: all of their optimizers take it, or none."""

    def agreed(self, planned: Callable[[], Plan | None], step: int) -> Plan | None:
        """The plan of a step, when all processes have theirs; None where one of them skips it."""


class Stepper(Protocol):
    """A runner of the steps of an optimizer: on the host, on a device, or on both."""

    def turn(self) -> AbstractContextManager[Any]:
        """A context in which no other thread takes a step of the optimizer."""

    def run(self, plan: Plan) -> None:
        """Take a step, and count it."""
