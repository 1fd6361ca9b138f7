"""Steps on the host whose scalars follow from sums over tensors, which are measured first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_char
from typing import Any

import numpy as np

from ...kernels.cpu.matrices.step import MatrixStep
from ...kernels.cpu.rows.write import NumberWrite
from ...kernels.cpu.threads.parallel import Joined, Prepared
from ...kernels.quiet import quiet
from ...kernels.rule import Rule, columns, factors
from ...kernels.state import State
from .arrays import address_of
from .step import DenseUpdate, squares_at

Constants = Mapping[str, float]
"""Numbers that `Rule.factor` takes beside sums, states and scalars, by name."""


@quiet
def measured_step(update: DenseUpdate, constants: Sequence[Constants]) -> Prepared:
    """A measured step on the host, ready for `commit`, of a rule that measures its tensors.

    ``constants`` are those of each tensor.
    """
    on_matrices, sums = _measured(update, constants[0])
    rule, column, hp = update.rule, columns(update.rule, update.prologue), update.hp
    states, every = _states_of_tensors(update), []
    if rule.takes:
        sizes = np.maximum(1, np.diff(update.variables.table.first)).tolist()
        for t, size in enumerate(sizes):
            stateful = {state.name: arrays[t].item() for state, arrays in states}
            scalars = {name: hp[t, column[name]].item() for name in rule.takes if name in column}
            every.append({**scalars, **stateful, "size": size, **constants[t]})
    results = _factors(rule, sums, every)
    for k, name in enumerate(rule.scaled_fields):
        hp[:, column[name]] *= results[:, k]
    step: Prepared = on_matrices or update.prepared()
    written = [arrays for state, arrays in states if not state.is_read]
    if not written:
        return step
    new = results[:, len(rule.scaled_fields) :].T
    numbers = [
        (address_of(array), np.array([x]).astype(array.dtype))
        for arrays, values in zip(written, new, strict=True)
        for array, x in zip(arrays, values, strict=True)
    ]
    return Joined((step, NumberWrite(numbers)))


@quiet
def measured_together(
    updates: Sequence[DenseUpdate], places: Sequence[Any], constants: Constants
) -> tuple[np.ndarray, list[Prepared]] | None:
    """Steps whose scalars follow from sums over all tensors of a step.

    ``places`` numbers the tensors of each update among all: sums are added up in this order.

    Returns:
        The new numbers of the optimizer, and the steps; None where the rule takes none.
    """
    rule = updates[0].rule
    sums = np.zeros((1 + max(max(indices) for indices in places), rule.n_measured))
    for update, indices in zip(updates, places, strict=True):
        sums[indices] = update.sums()
    total = sums.sum(axis=0, keepdims=True)
    if rule.rests is not None and rule.rests(*total[0].tolist()):
        return None
    (scales,) = _factors(rule, total, [constants])
    fields = rule.scaled_fields
    for update in updates:
        column = columns(rule, update.prologue)
        for name, factor in zip(fields, scales, strict=False):
            update.hp[:, column[name]] *= factor
    return scales[len(fields) :], [update.prepared() for update in updates]


def _measured(update: DenseUpdate, constants: Constants) -> tuple[MatrixStep | None, np.ndarray]:
    """The sums that a rule measures for an update, and the step for a rule on matrices.

    A rule on matrices needs constants, and its step has run two of its passes; its scalars are
    still to be completed. For other rules the step is None.
    """
    kernel, variables, gradients = update.kernel, update.variables, update.gradients
    table, lines = variables.table, kernel.rule.lines
    if lines is None:
        return None, update.sums()
    sums = np.zeros((len(gradients), kernel.rule.n_measured))
    if constants[lines.measures_parameter]:
        sums[:, 0] = squares_at(variables.w, table.addresses[:, 0], np.diff(table.first))
    step = MatrixStep(kernel, variables.matrices, gradients, update.hp)
    sums[:, 1] = step.measured_squares()
    return step, sums


def _states_of_tensors(update: DenseUpdate) -> list[tuple[State, list[np.ndarray]]]:
    """The states that have one number for each tensor, with those of all tensors."""
    by_state, variables = [], update.variables
    for k, (state, values) in enumerate(zip(update.rule.states, variables.s, strict=True), 1):
        if state.per == "tensor":
            places = variables.table.addresses[:, k].tolist()
            by_state.append((state, [number_at(place, values.dtype) for place in places]))
    return by_state


def number_at(address: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The number at an address, as an array that keeps no memory alive."""
    memory: Any = (c_char * dtype.itemsize).from_address(address)
    return np.ndarray((), dtype, memory)


def _factors(rule: Rule, sums: np.ndarray, named: Sequence[Mapping[str, float]]) -> np.ndarray:
    """The results of `factors`; an exception says from which function it comes."""
    try:
        return factors(rule, sums, named)
    except Exception as error:
        name = rule.factor.__name__  # type: ignore[union-attr]
        error.add_note(f"factor {name!r} raised it; nothing has changed")
        raise
