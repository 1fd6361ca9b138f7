"""Steps: bind the parameters of an optimizer, work out their scalars, then write and count."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.rows.write import NumberWrite
from ....kernels.cpu.threads.parallel import commit
from ....kernels.formula import TYPECODES, Numbers
from ....kernels.private import counting_changes
from ....kernels.rule import Rule
from ....ops.runtime.device import refuse_captures
from ....ops.runtime.errors import reject
from ....ops.runtime.measured_step import Constants
from ....ops.runtime.row_step import run_updates
from ...base.own_rules import checked_scalars
from ...engine.batch import NOTHING, KernelCall
from ...engine.host import ready
from ...engine.plan import scalar_rows
from .binding import Binding, has_finite, on_devices
from .chosen import StepInputs
from .part import GradientPrologue, Group, GroupOptions, ParameterBatch
from .state import Number, single_of
from .table_rows import TableOptimizer
from .threads import as_torch

# As code of C: that of Python has left the caches when a step begins.
_params_of, _grad_of = itemgetter("params"), attrgetter("grad")
_count_changes = counting_changes()
_NONE: Sequence[Constants] = ()
Options = tuple[Sequence[Group], GradientPrologue]
"""The groups, with numbers for tensors, and the transform of their gradients."""


class Steps:
    """The steps of an optimizer.

    Attributes:
        known: what is known of its parameters from the last step; nothing while a step uses it.
    """

    def __init__(self) -> None:
        self.known: list[Binding] = []
        self._devices: Sequence[Any] = ()  # of CUDA, of all parameters
        self._options: GroupOptions | None = None  # of the last step

    def forget(self) -> None:
        """Let go of all tensors: others were loaded in their place."""
        for binding in [*self.known]:
            binding.forget()

    def take(
        self, optimizer: TableOptimizer, param: Tensor | None, factor: float,
        gradients: tuple[Any, ...] | None,
    ) -> None:  # fmt: skip
        """Take a step of all parameters, or of one; with None the gradients are those in ``.grad``.

        Gradients are multiplied by ``factor``. Errors as `Fused.step`.
        """
        groups, where = optimizer.param_groups, type(optimizer).__name__
        try:  # a step of another thread takes another one
            binding = self.known.pop()
        except IndexError:
            binding = Binding(where)
        lists = [*map(_params_of, groups)]
        parameters = tuple(lists[0] if len(lists) == 1 else chain.from_iterable(lists))
        options = self._options
        if options is None or optimizer._chooses_anew or not options.are_still(groups):
            options = self._options = GroupOptions(groups, optimizer._choice)
        plain, choices = options.plain or groups, options.choices
        if binding.arrange(parameters, [*map(len, lists)], choices, groups, optimizer.state):
            self._devices = [*{p.device for p in parameters if p.is_cuda}]
            if optimizer._files is not None:
                optimizer._files.check_numbers(groups)
        if self._devices:
            refuse_captures(self._devices)
        active = parameters
        if param is not None:
            active = (param,)
            if not any(map(is_, parameters, repeat(param))):
                reject(ValueError, where, "param", "is foreign", "one of the groups", "another")
        if gradients is None:
            gradients = tuple(map(_grad_of, active))
        are_there = [*map(is_not, gradients, repeat(None))]
        if not all(are_there):
            active, gradients = (tuple(compress(own, are_there)) for own in (active, gradients))
        given = binding.read(active, gradients, optimizer.state, optimizer._entry)
        if given is None:
            why = "another thread changes them meanwhile"
            raise RuntimeError(f"{where}: the states cannot be read: {why}")
        clipping, before = optimizer._clipping, options.before  # another thread may exchange it
        if clipping is not None:
            own = clipping.factors(given.chosen.parameters, given.gradients)
            before = GradientPrologue.of(plain, choices, [factor * x for x in own])
        elif factor != 1.0:
            before = GradientPrologue.of(plain, choices, [factor])
        _run(optimizer, given, (plain, before))
        if not self.known:
            self.known.append(binding)
        if clipping is not None and optimizer._clipping is clipping:
            optimizer._clipping = clipping.without(param)


@as_torch
def _run(optimizer: TableOptimizer, given: StepInputs, options: Options) -> None:
    """Prepare all that can fail; then write and count."""
    if optimizer.skip_nonfinite and not has_finite(given):
        optimizer.skipped_steps += 1
        return
    (groups, before), (parts, count) = options, (given.chosen.parts, given.chosen.count)
    numbers: list[Number] = []
    calls: list[KernelCall] = []
    behind: list[Any] = []
    steps = _steps(given)
    for part in parts:
        batch, constants = part.batch, _NONE
        counts = steps if isinstance(steps, float) else [steps[i] for i in part.places]
        rows, hp_of, after = _rows(optimizer, part, given, counts, options)
        numbers += after
        # In the type of the arithmetic, or infinite.
        hp: Any = array(TYPECODES[batch.real], chain.from_iterable(rows))
        if not part.takes_array:
            hp = np.asarray(hp).reshape(len(rows), -1)
        if batch.draws is not None:
            seeds = [groups[k]["rounding_seed"] for k in batch.class_of.tolist()]
            hp, hp_of = batch.draws.joined(seeds, counts, hp, hp_of)
        if part.is_measured:  # each tensor has a row of scalars of its own
            hp, hp_of = hp[hp_of], np.arange(len(hp_of))
            constants = [optimizer.constants(groups[k]) for k in batch.class_of.tolist()]
        own = before.prologue, given.of(part), hp, hp_of
        update = batch.update(*own, touched_only=bool(part.choice.touched_only))
        calls.append(tuple.__new__(KernelCall, (batch, update, NOTHING, NOTHING, constants)))
    here = calls
    if given.chosen.has_devices:
        here = [call for part, call in zip(parts, calls, strict=True) if part.device is None]
    found = ready(here, optimizer.constants_of_step)
    if found is None:
        return
    updates, new = found
    if given.chosen.has_deferred:
        each = zip(parts, calls, strict=True)
        deferred = [(part, call.update) for part, call in each if part.choice.sleeps]
        behind = optimizer.behind(given, deferred, steps)
        updates = [*[own for _, own in behind], *updates]
    counted = [] if count.n else _counted(given, numbers)
    if numbers:
        written = [(number.tensor.data_ptr(), number.value) for number in numbers]
        updates.append(NumberWrite(written))
    if optimizer._files is not None and (given.new or optimizer._files.is_stale):
        optimizer._files.write(optimizer.param_groups, {**optimizer.state, **given.new})
    # After all that can fail: a parameter whose first step raises still has no state.
    if given.new:
        for parameter, state in given.new.items():
            if own := optimizer.state.get(parameter):
                own.update(state)
            else:
                optimizer.state[parameter] = state
    if here is not calls:
        update_of = {part: call.update for part, call in zip(parts, calls, strict=True)}
        for launched, _, arrays in on_devices(given):
            run_updates([*map(update_of.__getitem__, launched)], arrays)
    commit(updates, count)
    for parameter, step in counted:
        if own := optimizer.state.get(parameter):
            own["step"] = step + 1
    if new is not None:
        optimizer.take_over(new)
    if given.copies:
        with torch.inference_mode():  # which may write to every tensor
            for tensor, copy in given.copies:
                tensor.copy_(copy)
    _count_changes(given.chosen.written)
    if behind:
        optimizer.warn_of_stale(behind)


def _counted(given: StepInputs, numbers: list[Number]) -> list[tuple[Tensor, Any]]:
    """The counts that are no tensors, by parameter; others join ``numbers``."""
    others = []
    for i in given.chosen.counted:
        step = given.step(i)
        if isinstance(step, Tensor):
            numbers.append(single_of(step, float(step) + 1.0))
        else:
            others.append((given.chosen.parameters[i], step))
    return others


def _steps(given: StepInputs) -> float | list[float]:
    """The number of this update: one for all parameters with a gradient, or one for each."""
    count = given.chosen.count
    if count.n:
        return count.values[0] + 1.0 if count.read() else [value + 1.0 for value in count.values]
    counted, new = given.chosen.counted, given.are_new
    if not (counted or any(new)):
        return 2.0
    # Where they are not counted, what matters is whether there was one before.
    every = [1.0 if is_new else 2.0 for is_new in new or repeat(False, len(given.gradients))]
    for i in counted:
        every[i] = float(given.step(i)) + 1.0
    return every[0] if every and len(set(every)) == 1 else every


def _rows(
    optimizer: TableOptimizer, part: ParameterBatch, given: StepInputs,
    counts: float | list[float], options: Options,
) -> tuple[Sequence[Numbers], Any, list[Number]]:  # fmt: skip
    """Rows of scalars of a kernel call, the row of each tensor, and numbers afterwards."""
    groups, before = options
    scalars, names, choice = optimizer.scalars, part.numbers, part.choice
    if optimizer._looks_at_scalars:
        scalars = partial(_checked_scalars, optimizer, choice.rule)
    is_one = len(before.factors) == 1
    if not names and is_one:
        keys, steps, row_of = scalar_rows(part.batch, counts)
        rows = [*map(scalars, map(groups.__getitem__, keys), steps)]
        if before.prologue:
            more = [before.scalars(groups[k], choice) for k in keys]
            rows = [own + others for own, others in zip(rows, more, strict=True)]
        return rows, row_of, []
    steps = repeat(counts) if isinstance(counts, float) else counts
    each = zip(part.places, part.batch.class_of.tolist(), steps, strict=False)
    rows, after = [], []
    for i, k, step in each:
        own = given.states(i)
        group = {**groups[k], **{name: own[name] for name in names}}
        scaled = before.scalars(group, choice, 0 if is_one else i)
        rows.append(scalars(group, step) + scaled)
        new = optimizer.next_numbers(group, step)
        after += [single_of(own[name], x) for name, x in new.items()]
    return rows, np.arange(len(rows)), after


def _checked_scalars(optimizer: TableOptimizer, rule: Rule, group: Group, step: float) -> Numbers:
    found = optimizer.scalars(group, step)
    return checked_scalars(type(optimizer).__name__, "scalars", found, rule.hp)
