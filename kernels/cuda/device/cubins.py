"""Compiled loops, kept in the cache of kernels: a later process loads them without a compiler.

The rules of trust are those of `kernels.cache`. A loop is a closure: its key is the text of all
functions that it reaches, with what their closures hold, the architecture and the versions.
"""

from __future__ import annotations

import hashlib
import sys
import types as python_types
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ... import cache as on_disk

_PACKAGE = __name__.rpartition(".cuda.")[0]
_CONSTANTS = bool | int | float | str | bytes | np.generic | np.dtype | types.Type | None
_NAMED = type | python_types.BuiltinFunctionType | python_types.ModuleType | np.ufunc


class Cubin(NamedTuple):
    """A loop as the driver loads it."""

    entry: str  # the name of its kernel
    code: bytes


def load(loop: Any, capability: Any) -> Cubin | None:
    """The kept loop for a compute capability; None if there is none."""
    identity = _identity(loop, capability)
    kept = identity and on_disk.load(identity)
    if not kept:
        return None
    entry, _, code = kept.partition(b"\n")
    return Cubin(entry.decode(), code)


def save(loop: Any, capability: Any, cubin: Cubin) -> None:
    """Keep a loop for `load`, unless it reaches what has no text."""
    if identity := _identity(loop, capability):
        on_disk.save(identity, cubin.entry.encode() + b"\n" + cubin.code)


def _identity(loop: Any, capability: Any) -> str | None:
    try:
        told = "\n".join(_told(loop, {}))
    except _NoTextError:
        return None
    digest = hashlib.sha256(told.encode()).hexdigest()
    return f"cubin {capability} numba-cuda {version('numba-cuda')} {digest}"


class _NoTextError(Exception):
    """An object of which nothing is known that stays the same from process to process."""


def _told(value: Any, known: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """Everything that decides the machine code of a function, or of what its closure holds."""
    if isinstance(value, _CONSTANTS):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in known:
        yield f"again {known[id(value)][0]}"
        return
    known[id(value)] = len(known), value  # which keeps it alive, and its number its own
    if isinstance(value, _NAMED):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
        yield f"{module} {name} {getattr(value, '_fields', ())}"
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for part in value:
            yield from _told(part, known)
    elif isinstance(value, python_types.FunctionType):
        yield from _of_function(value, known)
    else:
        # What `cuda.jit`, `numba.njit`, `functools.cache` or `intrinsic` was put on.
        names = "py_func", "__wrapped__", "_defn"
        inner = next((x for name in names if (x := getattr(value, name, None))), None)
        if inner is None:
            raise _NoTextError
        yield f"{type(value).__name__} {getattr(value, 'targetoptions', '')}"
        yield from _told(inner, known)


def _of_function(function: Any, known: dict[int, tuple[int, Any]]) -> Iterator[str]:
    code, module = function.__code__, str(function.__module__)
    yield module
    yield from _of_code(code)
    # Global names of the sources of kernels mean what the hash of all of them says.
    is_ours = module.startswith(_PACKAGE)
    if not (is_ours and function.__globals__ is vars(sys.modules[module])):
        for name in sorted({*_names(code)} & function.__globals__.keys()):
            yield name
            yield from _told(function.__globals__[name], known)
    for cell in function.__closure__ or ():
        yield from _told(cell.cell_contents, known)
    yield from _told(function.__defaults__ or (), known)


def _of_code(code: python_types.CodeType) -> Iterator[str]:
    names = code.co_names, code.co_varnames, code.co_freevars
    yield f"{code.co_code.hex()} {names}"
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            yield from _of_code(constant)
        else:
            yield repr(constant)


def _names(code: python_types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            yield from _names(constant)
