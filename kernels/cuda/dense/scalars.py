"""The scalars of the steps of an optimizer, computed where they are used.

A step of an optimizer begins with two small kernels: one decides whether the step may write, one
counts the update of each tensor and computes its scalars, so that learning rate, loss scale and
the flag of an overflow can live on the device, and a step that is captured in a CUDA graph goes
on counting. The memory of an optimizer (`OptimizerMemory`) begins with the guard of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from ...rule import Prologue
from ...storage import F64, Storage, numba_type
from ..device.backend import (
    GEOMETRY,
    load_float64,
    load_int64,
    on_device,
    reader,
    store_float64,
    store_int64,
    storer,
)
from ..device.functions import device_function
from ..device.guard import NOTHING, is_closed
from ..device.records import Real, Word, load_number, offsets_of, row_reader, size_of

THREADS = GEOMETRY.scalars

SKIPPED, FAILED = -1, -2
"""What a guard has found where a step is skipped, which opens it again in the next one; and in
the steps after one with a bad index."""


class OptimizerMemory(NamedTuple):
    """The memory of an optimizer. There follow the counts of the parameters, then their powers."""

    found: Word  # the guard of its steps (`guard.FOUND`)
    bad_index: Word = 0  # of the guard, too (`guard.INDEX`)
    origin: Word = 0  # which step has closed the guard
    failed_at: Word = 0  # at which position
    is_nonfinite: Word = 0  # whether a gradient is not finite
    n_skipped: Word = 0  # steps that were skipped
    global_step: Word = 0  # steps that were not


class SettingsRow(NamedTuple):
    """Settings that the tensors of a step share; the constants and bases of the formula follow."""

    scale_at: Word  # address of the loss scale
    scale_kind: Word  # how it lies there
    scale: Real  # itself, where it is the host's
    bound: Real  # of the elements of gradients, where they are clipped


class ClassRow(NamedTuple):
    """A class of parameters that share their options."""

    rate_at: Word  # address of the learning rate
    rate_kind: Word  # how it lies there
    rate: Real  # itself, where it is the host's
    rule_decay: Real  # the weight decay that the rule applies
    decay: Real  # the coupled one, of the gradient transforms


class ScalarRow(NamedTuple):
    """A tensor; addresses."""

    updates: Word  # their number
    powers: Word  # running ones
    hp: Word  # the scalars; right before them lie its `ScalarInputs`
    options: Word  # its `ClassRow`
    acts: Word  # no address: whether the coupled weight decay is its own


class ScalarInputs(NamedTuple):
    """Numbers from which the scalars of a tensor were computed."""

    rate: Real
    decay: Real
    scale: Real


AT, USED = offsets_of(OptimizerMemory), offsets_of(ScalarInputs)


@cuda.jit(device=True)
def _increment(address):
    store_int64(address, load_int64(address) + 1)


@cuda.jit
def begin_kernel(state, found_inf, kind, origin):
    """``loop[1, 1]``: open the guard, unless the step has to be skipped or an earlier one failed.

    ``found_inf`` is the address of a number of some ``kind`` that is not 0 where the step has to be
    skipped, or 0; ``origin`` the number of the step for what it may find.
    """
    is_skipped = load_int64(state + AT.is_nonfinite) != 0
    store_int64(state + AT.is_nonfinite, 0)
    found = load_int64(state + AT.found)
    if found == FAILED:
        return
    if 0 <= found < NOTHING:  # what later steps may find does not take its place
        store_int64(state + AT.failed_at, found)
        store_int64(state + AT.found, FAILED)
        return
    if found_inf != 0 and load_number(found_inf, kind) != 0.0:
        is_skipped = True
    if is_skipped:
        store_int64(state + AT.found, SKIPPED)
        _increment(state + AT.n_skipped)
    else:
        store_int64(state + AT.found, NOTHING)
        store_int64(state + AT.origin, origin)


@cuda.jit
def count_kernel(state):
    """``loop[1, 1]``: count a step that has no tensors."""
    if not is_closed(state):
        _increment(state + AT.global_step)


@cache
def _conditioning(prologue: Prologue) -> Any:
    """``scalars(decay, loss_scale, bound)`` of all transforms, one after the other."""
    if not prologue:
        return on_device(lambda decay, loss_scale, bound: ())  # noqa: ARG005
    first, others = device_function(prologue[0].scalars), _conditioning(prologue[1:])

    @cuda.jit(device=True)
    def scalars(decay, loss_scale, bound):
        return first(decay, loss_scale, bound) + others(decay, loss_scale, bound)

    return scalars


@cache
def scalars_kernel(
    function: Callable[..., Any],
    n_constants: int,
    n_bases: int,
    n_scalars: int,
    prologue: Prologue,
    scales_decay: bool,
    real: Storage,
) -> Any:
    """``loop[blocks, THREADS](table, n_tensors, settings, state, counts_step)``.

    ``function`` is that of a `Formula`, with so many constants and running powers. The scalars of
    gradient transforms come after the ``n_scalars`` of the rule. ``scales_decay`` says whether a
    coupled weight decay is multiplied by the loss scale.
    """
    scalars, store = device_function(function), storer(numba_type(real))
    sizes = n_constants, n_bases
    read_constants, read_powers = (reader(types.UniTuple(types.float64, n)) for n in sizes)
    row_at, settings_at, class_at = map(row_reader, (ScalarRow, SettingsRow, ClassRow))
    real_type = np.float64 if real is F64 else np.float32
    n_bytes, condition = n_scalars * real.itemsize, _conditioning(prologue)
    size_of_numbers, at_constants = size_of(ScalarInputs), size_of(SettingsRow)
    at_bases = at_constants + 8 * n_constants

    @cuda.jit
    def loop(table, n_tensors, settings, state, counts_step):
        if is_closed(state):
            return
        t = cuda.grid(1)
        if t == 0 and counts_step:
            _increment(state + AT.global_step)
        if t >= n_tensors:
            return
        row = row_at(table, t)
        step = load_int64(row.updates) + 1
        store_int64(row.updates, step)
        for k in range(n_bases):
            # Rounded after every update, as `formula.running_power` on the host.
            base = real_type(load_float64(settings + at_bases + 8 * k))
            power = real_type(load_float64(row.powers + 8 * k)) * base
            store_float64(row.powers + 8 * k, np.float64(power))
        options, common = class_at(row.options, 0), settings_at(settings, 0)
        rate = load_number(options.rate_at, options.rate_kind)
        scale = load_number(common.scale_at, common.scale_kind)
        # Kept beside the scalars: a trust ratio that follows on the device needs the learning rate,
        # the decay and the loss scale of this very step.
        numbers = row.hp - size_of_numbers
        store_float64(numbers + USED.rate, rate)
        store_float64(numbers + USED.decay, options.decay)
        store_float64(numbers + USED.scale, scale)
        constants, powers = read_constants(settings + at_constants), read_powers(row.powers)
        store(row.hp, scalars(real_type, rate, options.rule_decay, step, constants, powers))
        decay = options.decay * row.acts
        if scales_decay:
            decay *= scale
        store(row.hp + n_bytes, condition(decay, scale, common.bound))

    return loop
