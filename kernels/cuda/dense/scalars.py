"""The scalars of the steps of an optimizer, computed where they are used.

A step of an optimizer begins with two small kernels: one decides whether the step may write, one
counts the update of each tensor and computes its scalars, so that learning rate, loss scale and
the flag of an overflow can live on the device, and a step that is captured in a CUDA graph goes
on counting. The memory of an optimizer (`STATE`) begins with the guard of its steps.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from ...rules.rule import Prologue
from ...storage import F64, Storage, numba_type
from ..device.backend import (
    load_float64,
    load_int64,
    store_float64,
    store_int64,
    tuple_reader,
    tuple_storer,
)
from ..device.functions import device_function
from ..device.guard import FOUND, NOTHING, WORDS, is_closed
from ..device.numbers import load_number

THREADS = 64

SKIPPED, FAILED = -1, -2
"""What a guard has found where a step is skipped, which opens it again in the next one; and in
the steps after one with a bad index."""

# The memory of an optimizer, int64: its guard, then these.
ORIGIN, FAILED_AT, IS_NONFINITE, N_SKIPPED, GLOBAL_STEP, STATE = range(WORDS, WORDS + 6)
"""Which step has closed the guard, at which position, whether a gradient is not finite, steps that
were skipped, steps that were not; then there are the counts of the parameters, and their running
powers."""

# The settings of a step: the loss scale, then constants and bases of the formula, then classes.
SCALE_AT, SCALE_KIND, SCALE, SETTINGS = range(4)

# A class of parameters that share their options: where its rate lies, the rate itself where it is
# the host's, and the weight decays of the rule and of the prologue.
RATE_AT, RATE_KIND, RATE, RULE_DECAY, DECAY, CLASS = range(6)

# Columns of the table of tensors, int64 [T, COLUMNS].
COUNT, POWERS, HP, NUMBERS, CLASS_AT, ACTS, COLUMNS = range(7)
ROW_BYTES = 8 * COLUMNS

# What is written to NUMBERS of a tensor, float64.
USED_RATE, USED_DECAY, USED_SCALE, USED = range(4)


@cuda.jit
def begin_kernel(state, found_inf, kind, origin):
    """``loop[1, 1]``: open the guard, unless the step has to be skipped or an earlier one failed.

    Args:
        state: address of the memory of the optimizer.
        found_inf: address of a number that is not 0 where the step has to be skipped, or 0.
        kind: how it lies there.
        origin: the number of the step for what it may find.
    """
    is_skipped = load_int64(state + 8 * IS_NONFINITE) != 0
    store_int64(state + 8 * IS_NONFINITE, 0)
    found = load_int64(state + 8 * FOUND)
    if found == FAILED:
        return
    if 0 <= found < NOTHING:  # what later steps may find does not take its place
        store_int64(state + 8 * FAILED_AT, found)
        store_int64(state + 8 * FOUND, FAILED)
        return
    if found_inf != 0 and load_number(found_inf, kind) != 0.0:
        is_skipped = True
    if is_skipped:
        store_int64(state + 8 * FOUND, SKIPPED)
        store_int64(state + 8 * N_SKIPPED, load_int64(state + 8 * N_SKIPPED) + 1)
    else:
        store_int64(state + 8 * FOUND, NOTHING)
        store_int64(state + 8 * ORIGIN, origin)


@cuda.jit
def count_kernel(state):
    """``loop[1, 1]``: count a step that has no tensors."""
    if not is_closed(state):
        store_int64(state + 8 * GLOBAL_STEP, load_int64(state + 8 * GLOBAL_STEP) + 1)


@cache
def _reader(count: int) -> Callable[[Any], Any]:
    """``read(address)``: a tuple of float64."""
    if count == 0:

        @cuda.jit(device=True)
        def nothing(address):
            return ()

        return nothing  # type: ignore[no-any-return]
    fields = namedtuple(f"of_{count}", [f"x{k}" for k in range(count)])  # type: ignore[misc]
    return tuple_reader(fields, types.float64)  # type: ignore[no-any-return]


@cache
def _conditioning(prologue: Prologue) -> Callable[[Any, Any], Any]:
    """``scalars(decay, loss_scale)`` of all parts, one after the other."""
    last = device_function(prologue[-1].scalars)
    if len(prologue) == 1:
        return last  # type: ignore[no-any-return]
    others = _conditioning(prologue[:-1])

    @cuda.jit(device=True)
    def scalars(decay, loss_scale):
        return others(decay, loss_scale) + last(decay, loss_scale)

    return scalars  # type: ignore[no-any-return]


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

    Args:
        function: of the `Formula`.
        n_constants: how many it takes.
        n_bases: how many running powers it takes.
        n_scalars: of the rule.
        prologue: whose scalars come after those of the rule.
        scales_decay: whether a coupled weight decay is multiplied by the loss scale.
        real: type of the arithmetic.
    """
    scalars = device_function(function)
    read_constants, read_powers = _reader(n_constants), _reader(n_bases)
    real_type = np.float64 if real is F64 else np.float32
    store = tuple_storer(numba_type(real))
    itemsize, has_prologue = real.itemsize, bool(prologue)
    condition = _conditioning(prologue) if prologue else None
    at_constants, at_bases = 8 * SETTINGS, 8 * (SETTINGS + n_constants)

    @cuda.jit
    def loop(table, n_tensors, settings, state, counts_step):
        if is_closed(state):
            return
        t = cuda.grid(1)
        if t == 0 and counts_step:
            store_int64(state + 8 * GLOBAL_STEP, load_int64(state + 8 * GLOBAL_STEP) + 1)
        if t >= n_tensors:
            return
        row = table + t * ROW_BYTES
        step = load_int64(load_int64(row + 8 * COUNT)) + 1
        store_int64(load_int64(row + 8 * COUNT), step)
        powers = load_int64(row + 8 * POWERS)
        for k in range(n_bases):
            base = real_type(load_float64(settings + at_bases + 8 * k))
            power = real_type(load_float64(powers + 8 * k)) * base
            store_float64(powers + 8 * k, np.float64(power))
        options = load_int64(row + 8 * CLASS_AT)
        rate = load_number(load_int64(options + 8 * RATE_AT), load_int64(options + 8 * RATE_KIND))
        scale = load_number(
            load_int64(settings + 8 * SCALE_AT), load_int64(settings + 8 * SCALE_KIND)
        )
        decay = load_float64(options + 8 * DECAY)
        numbers = load_int64(row + 8 * NUMBERS)
        store_float64(numbers + 8 * USED_RATE, rate)
        store_float64(numbers + 8 * USED_DECAY, decay)
        store_float64(numbers + 8 * USED_SCALE, scale)
        hp = load_int64(row + 8 * HP)
        store(
            hp,
            scalars(
                real_type,
                rate,
                load_float64(options + 8 * RULE_DECAY),
                step,
                read_constants(settings + at_constants),
                read_powers(powers),
            ),
        )
        if has_prologue:
            own = decay * load_int64(row + 8 * ACTS)
            store(
                hp + n_scalars * itemsize,
                condition(own * scale if scales_decay else own, scale),
            )

    return loop
