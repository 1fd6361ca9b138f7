"""Compiled loops, kept in the cache of kernels: a later process loads them without a compiler.

The rules of trust are those of `kernels.cache`. A loop is a closure: its key is the text of all
functions that it reaches, with what their closures hold, the architecture and the versions.
"""

from __future__ import annotations

import hashlib
import sys
import types as python_types
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ... import cache as on_disk

_PACKAGE = __name__.rpartition(".cuda.")[0]
_CONSTANTS = bool | int | float | str | bytes | np.generic | np.dtype | types.Type | None
_NAMED = type | python_types.BuiltinFunctionType | np.ufunc


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
    digest = hashlib.sha256()
    try:
        _feed(digest, loop, {})
    except _NoTextError:
        return None
    return f"cubin {capability} numba-cuda {version('numba-cuda')} {digest.hexdigest()}"


class _NoTextError(Exception):
    """An object of which nothing is known that stays the same from process to process."""


def _feed(digest: Any, value: Any, numbers: dict[int, tuple[int, Any]]) -> None:
    """Feed all that decides the machine code of a function, or of what its closure holds."""
    if isinstance(value, _CONSTANTS):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
        return
    if id(value) in numbers:
        # By its number: a closure may reach itself.
        digest.update(f"again {numbers[id(value)][0]}\n".encode())
        return
    numbers[id(value)] = len(numbers), value  # which keeps it alive, and its number its own
    if isinstance(value, _NAMED):
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
        digest.update(f"{module} {name} {getattr(value, '_fields', ())}\n".encode())
    elif isinstance(value, python_types.ModuleType):  # whose members are reached by themselves
        digest.update(f"{value.__name__}\n".encode())
    elif isinstance(value, tuple | list):
        digest.update(f"{type(value).__name__} {len(value)}\n".encode())
        for part in value:
            _feed(digest, part, numbers)
    elif isinstance(value, python_types.FunctionType):
        digest.update(f"{value.__module__}\n".encode())
        on_disk.feed_code(digest, value.__code__)
        for part in _reached(value):
            _feed(digest, part, numbers)
    else:
        # What `cuda.jit`, `numba.njit`, `functools.cache` or `intrinsic` was put on.
        names = "py_func", "__wrapped__", "_defn"
        inner = next((x for name in names if (x := getattr(value, name, None))), None)
        if inner is None:
            raise _NoTextError
        digest.update(f"{type(value).__name__} {getattr(value, 'targetoptions', '')}\n".encode())
        _feed(digest, inner, numbers)


def _reached(function: python_types.FunctionType) -> list[Any]:
    module = sys.modules.get(function.__module__ or "")
    is_ours = module is not None and module.__name__.startswith(_PACKAGE)
    if not (is_ours and function.__globals__ is vars(module)):
        return on_disk.reached(function)
    # Global names of the sources of kernels mean what the hash of all of them says.
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ())]
