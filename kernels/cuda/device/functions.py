"""Functions of rules and storage types, for the device.

A function that Numba compiled for the CPU could be called from a kernel as it is, but it would
keep its options: on a device ``fastmath={"contract"}`` turns into full fast-math, which assumes
away NaN and infinity and divides approximately. So every function is taken as the Python text
that it is, with all functions of this package that it reaches, and compiled anew.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Hashable
from functools import cache

from ...element import Compiler
from .backend import REPLACED, on_device

_PACKAGE = __name__.rpartition(".kernels.")[0]


@cache
def device_function(function):
    """``function`` and what it calls, compiled for the device without fast-math."""
    if function in REPLACED:
        return REPLACED[function]
    plain = _text_of(function)
    return on_device(_with_device_callees(plain))


def _with_device_callees(plain):
    """A copy whose global names of functions of this package mean those of the device."""
    names = dict(plain.__globals__)
    for name in {i.argval for i in dis.get_instructions(plain) if i.opname == "LOAD_GLOBAL"}:
        value = names.get(name)
        if isinstance(value, Hashable) and (value in REPLACED or _is_ours(value)):
            names[name] = device_function(value)
    copy = types.FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def _is_ours(value):
    plain = _text_of(value)
    return isinstance(plain, types.FunctionType) and plain.__module__.startswith(_PACKAGE)


def _text_of(function):
    """The Python function that `cuda.jit`, `numba.njit` or `functools.cache` was put on."""
    if hasattr(function, "cache_info"):
        return function.__wrapped__
    return getattr(function, "py_func", function)


DEVICE = Compiler(device_function, device_function, device_function, on_device, on_device)
"""How functions of an element are compiled here."""
