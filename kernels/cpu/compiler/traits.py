"""Traits of functions of numbers once they are compiled: what they return, and if they can raise.

Rules and formulas of users are checked before anything is made of them. Compiled code that calls
a function which raises does not hear of it, and would go on with half of the elements written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite
import numba
from numba import types

from ... import cache as on_disk
from ...inner import njit
from ...rule import RULE_FLAGS, Rule, hp_type
from ...storage import Storage, numba_type
from . import machine
from .compile import NativeFunction, engine_works
from .intrinsics import value_reader

# What compiled code calls where it has an exception to tell of. Code that cannot come there is
# removed, with this call, so that whoever does not call it cannot raise.
_REPORT = "PyErr_WriteUnraisable"


class Traits(NamedTuple):
    """Properties of a function that its compilation shows."""

    returned: tuple[str, ...]  # Numba's names of the types of what it returns
    is_tuple: bool  # whether that is a tuple
    can_raise: bool


class CompilationError(Exception):
    """A function cannot be compiled, for the reason that is the text."""


def update_traits(rule: Rule, real: Storage) -> Traits:
    """Traits of the update of a rule in some type of the arithmetic."""
    return _traits(rule.update, _of_element(rule, real))


def measure_traits(rule: Rule, real: Storage) -> Traits:
    """Traits of the function that measures for a rule."""
    assert rule.measure is not None
    return _traits(rule.measure, _of_element(rule, real))


def factor_traits(rule: Rule, real: Storage) -> Traits:
    """Traits of ``factor``, in some type of the arithmetic."""
    assert rule.factor is not None
    counts = {"size", *(state.name for state in rule.states if state.dtype is not None)}
    taken = [types.int64 if name in counts else numba_type(real) for name in rule.takes]
    return _traits(rule.factor, (*(types.float64,) * rule.n_measured, *taken))


def _of_element(rule: Rule, real: Storage) -> tuple[Any, ...]:
    number = numba_type(real)
    hp = types.NamedUniTuple(number, len(rule.hp), hp_type(rule, ()))
    states = rule.states if rule.lines else rule.element_states
    return (*(number,) * (2 + len(states)), hp)


@cache
def _traits(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Traits:
    """Traits of a function for arguments of some types of Numba; kept on the disk.

    Raises:
        CompilationError: the function cannot be compiled.
    """
    kinds = [(str(kind), getattr(kind, "fields", ())) for kind in arguments]
    name = f"traits {on_disk.fingerprint(function)} {kinds}"
    kept = on_disk.load(name)
    if kept is not None:
        returned, *others = json.loads(kept)
        return Traits(tuple(returned), *others)
    if not engine_works():
        raise CompilationError(f"it cannot be looked at with llvmlite {llvmlite.__version__}")
    try:
        traits = _compiled(function, arguments, name)
    except (numba.NumbaError, numba.UnsupportedBytecodeError) as error:
        raise CompilationError(_reason(error)) from error
    on_disk.save(name, json.dumps(traits).encode())
    return traits


def _compiled(function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> Traits:
    # Here an index out of range is an exception; what is run later does not check it.
    inner, read = njit(function, **RULE_FLAGS, boundscheck=True), value_reader(arguments)

    def call(address):
        inner(*read(address))

    code = machine.made(*NativeFunction(call, name).ir())
    (overload,) = inner.overloads.values()
    result = overload.signature.return_type
    is_tuple = isinstance(result, types.BaseTuple)
    returned = tuple(str(types.unliteral(kind)) for kind in (result if is_tuple else (result,)))
    return Traits(returned, is_tuple, _REPORT in code.called)


def _reason(error: Exception) -> str:
    """The first line of an error of Numba, without its colours and the name of the stage."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    said = (line.strip() for line in lines if line.strip() and "mode pipeline" not in line)
    return next(said, type(error).__name__)
