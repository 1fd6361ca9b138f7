"""From functions to machine code: C functions of integers that are called by their addresses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core.ccallback import CFunc

from .cache import KernelCache
from .cpu.intrinsics import as_pointer

_I64 = types.int64
_PART_ARGUMENTS = 3
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class NativeFunction:
    """A function of ``int64`` arguments that is compiled when its address is first asked for.

    Args:
        function: the Python function; it returns nothing.
        n_arguments: how many ``int64`` arguments it takes.
        identity: what distinguishes it in the on-disk cache.
    """

    def __init__(self, function: Callable[..., None], n_arguments: int, identity: str) -> None:
        self._function = function
        self._n_arguments = n_arguments
        self.identity = identity
        self._compiled: CFunc | None = None

    @property
    def address(self) -> int:
        """The address of the machine code, compiled or read from the cache on first use."""
        if self._compiled is None:
            with _lock:
                if self._compiled is None:
                    self._compiled = self._compile()
        address: int = self._compiled.address
        return address

    def _compile(self) -> CFunc:
        compiled = self._uncompiled()
        compiled._cache = KernelCache(self.identity)
        compiled.compile()
        return compiled

    def _uncompiled(self) -> CFunc:
        signature = ((_I64,) * self._n_arguments, types.void)
        return CFunc(self._function, signature, {}, {"error_model": "numpy"})

    def assembly(self) -> str:
        """The assembly text of a fresh compilation (a cached one keeps none)."""
        compiled = self._uncompiled()
        compiled.compile()
        text: str = compiled._library.get_asm_str()
        return text


PARTS: list[NativeFunction] = []
"""Every part that was defined, for `fusestep.kernels.warmup`."""


def part(function: Callable[[int, int, int], None]) -> NativeFunction:
    """Decorator: one part of a parallel loop, ``part(index, slot, call)``.

    ``index`` numbers the part, ``slot`` the thread that runs it (for scratch memory), ``call``
    is the address of the loop's arguments.
    """
    made = NativeFunction(
        function, _PART_ARGUMENTS, f"{function.__module__}.{function.__qualname__}"
    )
    PARTS.append(made)
    return made


def call_reader(cls: Any) -> Any:
    """The compiled reader of a loop's arguments: a record of ``int64``, read by name.

    A record travels as one pointer. The same fields in a named tuple take seconds more to
    compile, because every function that is handed the tuple gets one argument per field.
    """
    record = np.dtype([(name, np.int64) for name in cls._fields])

    @njit
    def read(address):
        return carray(as_pointer(address), 1, record)[0]

    return read
