"""Steps: bind the parameters of an optimizer, work out their scalars, then write and count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from torch import Tensor

from ....kernels.cpu.rows.write import NumberWrite
from ....kernels.cpu.tensor_counts import TensorCount
from ....kernels.cpu.threads.parallel import Prepared, commit
from ....kernels.formula import Numbers
from ....kernels.rule import Rule
from ....ops.runtime.device import refuse_captures
from ....ops.runtime.errors import reject
from ....ops.runtime.measured_step import measured_step, measured_together
from ....ops.runtime.row_step import Update, run_updates
from ...base.own_rules import checked_scalars
from .binding import Binding, Layout, finish, has_finite, on_devices
from .part import GradientPrologue, Group, GroupOptions, ParameterBatch, StepInputs
from .state import Number, place_of, single_of
from .table_rows import TableOptimizer
from .threads import as_torch

_KEPT_BINDINGS = 4
# As code of C: that of Python has left the caches when a step begins.
_params_of, _grad_of = itemgetter("params"), attrgetter("grad")
Options = tuple[Sequence[Group], GradientPrologue]
"""The groups, with numbers for tensors, and the transform of their gradients."""


class Steps:
    """The steps of an optimizer, and what is known of its parameters from the last ones.

    Attributes:
        bindings: by the identity of the only parameter of a step, or under None of all.
    """

    def __init__(self) -> None:
        self.bindings: dict[int | None, list[Binding]] = {}
        self._devices: Sequence[Any] = ()  # of CUDA, of all parameters
        self._options: GroupOptions | None = None  # of the last step

    def take(
        self, optimizer: TableOptimizer, param: Tensor | None, factor: float,
        gradients: tuple[Any, ...] | None,
    ) -> None:  # fmt: skip
        """Take a step of all parameters, or of one; with None the gradients are those in ``.grad``.

        Gradients are multiplied by ``factor``. Errors as `Fused.step`.
        """
        groups, key = optimizer.param_groups, None if param is None else id(param)
        known = self.bindings.get(key)
        if known is None:
            known = self.bindings.setdefault(key, [])
        # Taken out while it is used: a step of another thread takes another one.
        binding = known.pop() if known else None
        if binding is not None and binding.is_large:
            binding.fetch()
        lists = [*map(_params_of, groups)]
        is_only = len(lists) == 1
        parameters: tuple[Tensor, ...] = (param,) if param is not None else ()
        if param is None:
            parameters = tuple(lists[0] if is_only else chain.from_iterable(lists))
        if binding is None:
            self._devices = [*{p.device for p in parameters if p.is_cuda}]
        if self._devices:
            refuse_captures(self._devices)
        if gradients is None:
            gradients = tuple(map(_grad_of, parameters))
        clipping, factors = optimizer._clipping, None  # another thread may exchange the first
        if clipping is not None:
            factors = [factor * own for own in clipping.factors(parameters, gradients)]
        elif factor != 1.0:
            factors = [factor]
        options = self._options
        if options is None or optimizer._chooses_anew or not options.are_still(groups):
            options = self._options = GroupOptions(groups, optimizer._choice)
        plain, choices, before = options.plain or groups, options.choices, options.before
        if factors is not None:
            before = GradientPrologue.of(plain, choices, factors)
        # A look finds the length of a single list.
        layout = choices, () if is_only else (*map(len, lists),)
        if binding is not None and binding.layout != layout:
            binding = _exchanged(binding, known, layout)
        states, given = optimizer.state, None
        if param is not None:
            states = {param: states.get(param, {})}
        if binding is not None and (param is None or binding.is_of(param, groups)):
            given = binding.read(parameters, gradients, states, choices, optimizer._entry)
        if given is None:
            known.clear()
            self._forget_others(groups)
            if optimizer._files is not None:
                optimizer._files.check_numbers(groups)
            if param is not None and place_of(groups, param) is None:
                where = type(optimizer).__name__
                reject(ValueError, where, "param", "is foreign", "one of the groups", "another")
            binding = Binding(type(optimizer).__name__, len(parameters), layout)
            given = binding.read(parameters, gradients, states, choices, optimizer._entry)
        if given is None or binding is None:
            why = "another thread changes them meanwhile"
            raise RuntimeError(f"{type(optimizer).__name__}: the states cannot be read: {why}")
        if _run(optimizer, given, binding.count, (plain, before)):
            known.append(binding)
            if len(known) > _KEPT_BINDINGS:
                del known[0]
        if clipping is not None and optimizer._clipping is clipping:
            optimizer._clipping = clipping.without(param)

    def _forget_others(self, groups: Sequence[Group]) -> None:
        """Drop the bindings of single parameters that are no longer in any group."""
        if len(self.bindings) > 1:
            own = {None, *(id(p) for group in groups for p in group["params"])}
            for key in self.bindings.keys() - own:
                self.bindings.pop(key, None)


def _exchanged(binding: Binding, known: list[Binding], layout: Layout) -> Binding | None:
    """The binding among those that are known, in place of another one, for another layout."""
    others = [binding]
    while known:
        if (found := known.pop()).layout == layout:
            known[:0] = reversed(others)
            return found
        others.append(found)
    known[:0] = reversed(others)
    return None


@as_torch
def _run(
    optimizer: TableOptimizer, given: StepInputs, count: TensorCount, options: Options
) -> bool:
    """Prepare all that can fail; then write and count. Whether it was not skipped."""
    if optimizer.skip_nonfinite and not has_finite(given):
        optimizer.skipped_steps += 1
        return False
    groups, before = options
    steps, numbers = _steps(given, count), []
    updates: list[Update] = []  # alive until they are done: rows are found by addresses
    ready: list[Prepared] = []
    launched: dict[ParameterBatch, Update] = {}
    sleeping: list[tuple[ParameterBatch, Update]] = []
    together: list[Any] = []  # whose scalars follow from sums over all of them
    places: list[Sequence[int]] = []
    for part in given.chosen.parts:
        hp, hp_of, after = _rows(optimizer, part, given, steps, options)
        if part.draws is not None:
            hp, hp_of = part.drawn(groups, steps, hp, hp_of)
        numbers += after
        updates.append(update := part.update(given, before, hp, hp_of))
        if part.choice.sleeps:
            sleeping.append((part, update))
        if part.device is not None:
            launched[part] = update
        elif not part.is_measured:
            ready.append(update.prepared())
        elif part.rule.scope == "step":
            together.append(update)
            places.append(part.places)
        else:
            measured: Any = update  # dense
            known = [optimizer.constants(groups[k]) for k in part.group_of.tolist()]
            ready.append(measured_step(measured, known))
    if together:
        found = measured_together(together, places, optimizer.known_of_step())
        if found is None:
            return False
        values, steps_together = found
        ready += steps_together
    behind = optimizer.behind(given, sleeping, steps) if sleeping else []
    ready = [*[own for _, own in behind], *ready]
    counted = [] if count.n else _counted(given, numbers)
    if numbers:
        written = [(number.tensor.data_ptr(), number.value) for number in numbers]
        ready.append(NumberWrite(written))
    if optimizer._files is not None and (given.new or optimizer._files.is_stale):
        optimizer._files.write(optimizer.param_groups, {**optimizer.state, **given.new})
    # After all that can fail: a parameter whose first step raises still has no state.
    if given.new:
        for parameter, state in given.new.items():
            if own := optimizer.state.get(parameter):
                own.update(state)
            else:
                optimizer.state[parameter] = state
    if launched:
        for parts, _, arrays in on_devices(given):
            run_updates([launched[part] for part in parts], arrays)
    commit(ready, count)
    for parameter, step in counted:
        if isinstance(step, Tensor):
            step.add_(1)
        elif own := optimizer.state.get(parameter):
            own["step"] = step + 1
    if together:
        optimizer.take_over(values)
    if given.copies or given.unseen:
        finish(given)
    if behind:
        optimizer.warn_of_stale(behind)
    return True


def _counted(given: StepInputs, numbers: list[Number]) -> list[tuple[Tensor, Any]]:
    """The counts that are no tensors of the host, by parameter; others join ``numbers``."""
    others = []
    for i in given.chosen.counted:
        step = given.step(i)
        if isinstance(step, Tensor) and not step.is_cuda:
            numbers.append(single_of(step, float(step) + 1.0))
        else:
            others.append((given.parameters[i], step))
    return others


def _steps(given: StepInputs, count: TensorCount) -> float | list[float]:
    """The number of this update: one for all parameters with a gradient, or one for each."""
    if count.n:
        if count.read():
            return count.values[0] + 1.0
        return [value + 1.0 for value in count.values[: count.n]]
    counted, active, new = given.chosen.counted, given.chosen.active, given.are_new
    if not (counted or any(new)):
        return 2.0
    # Where they are not counted, what matters is whether there was one before.
    every = [1.0 if new and new[k] else 2.0 for k in range(len(active))]
    for k in range(len(active)) if len(counted) == len(active) else map(active.index, counted):
        every[k] = float(given.step(active[k])) + 1.0
    return every[0] if every and len(set(every)) == 1 else every


def _rows(
    optimizer: TableOptimizer, part: ParameterBatch, given: StepInputs, steps: float | list[float],
    options: Options,
) -> tuple[Any, Any, list[Number]]:  # fmt: skip
    """Rows of scalars of a kernel call, the row of each tensor, and numbers afterwards."""
    groups, before = options
    scalars, names, choice = optimizer.scalars, part.numbers, part.choice
    if optimizer._looks_at_scalars:
        scalars = partial(_checked_scalars, optimizer, choice.rule)
    is_one = len(before.factors) == 1
    if isinstance(steps, float) and not names and is_one:
        rows = [scalars(groups[k], steps) for k in part.groups]
        if before.prologue:
            more = [before.scalars(groups[k], choice) for k in part.groups]
            rows = [own + others for own, others in zip(rows, more, strict=True)]
        return part.rounded(rows), part.row_of, []
    counts = [steps if isinstance(steps, float) else steps[k] for k in part.places]
    each = [*zip(part.group_of.tolist(), counts, strict=True)]
    if not names and is_one:  # those of one group and as many updates have a row in common
        row_of = {key: k for k, key in enumerate(dict.fromkeys(each))}
        rows = [scalars(groups[k], step) + before.scalars(groups[k], choice) for k, step in row_of]
        return part.rounded(rows), [row_of[key] for key in each], []
    rows, after = [], []
    for i, (k, step) in zip(part.batch.positions.tolist(), each, strict=True):
        own = given.states(i)
        group = {**groups[k], **{name: own[name] for name in names}}
        scaled = before.scalars(group, choice, 0 if is_one else i)
        rows.append(scalars(group, step) + scaled)
        new = optimizer.next_numbers(group, step)
        after += [single_of(own[name], x) for name, x in new.items()]
    return part.rounded(rows), np.arange(len(rows)), after


def _checked_scalars(optimizer: TableOptimizer, rule: Rule, group: Group, step: float) -> Numbers:
    found = optimizer.scalars(group, step)
    return checked_scalars(type(optimizer).__name__, "scalars", found, rule.hp)
