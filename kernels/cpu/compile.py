"""From functions to machine code: C functions of integers that are called by their addresses."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numba
import numpy as np
import numpy.ma  # Numba's first call would, and a child that is forked meanwhile wait for it
from llvmlite.binding import ffi
from numba import types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc.parallel import _backend_init_thread_lock

from ..inner import njit
from .cache import KernelCache
from .headers import address_of
from .records import records

_I64 = types.int64
_lock = threading.RLock()

if numba.config.DISABLE_JIT:
    raise RuntimeError(
        "fusestep: NUMBA_DISABLE_JIT switches off the compiler, and without it there are no "
        f"kernels: expected it unset or 0, got {numba.config.DISABLE_JIT}"
    )


def fork_between(*locks: Any) -> None:
    """Let every fork of this process wait until no other thread holds one of ``locks``.

    A child has only the thread that forked: a lock that another one held is never released
    there. A new lock in the child would not do, as what the lock guards may be half changed:
    lists of Numba, the heap and tables of LLVM, queues of threads. Waiting lasts as long as one
    compilation or step. Locks are taken in the order in which steps take them; those given in a
    later call come before those of an earlier one.
    """
    mine = threading.local()

    def acquire() -> None:
        held = ExitStack()
        # A list: a signal handler may fork while this fork waits.
        vars(mine).setdefault("forks", []).append(held)
        for lock in locks:
            held.enter_context(lock)

    def release() -> None:  # what has been taken: an interrupt may have ended the waiting
        mine.forks.pop().close()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


fork_between(_lock, global_compiler_lock, _backend_init_thread_lock, ffi.lib._lock)


class NativeFunction:
    """A function of ``int64``, compiled at the first use of its address; returns nothing."""

    def __init__(self, function: Callable[..., None], identity: str) -> None:
        self._function = function
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
        signature = ((_I64,) * self._function.__code__.co_argcount, types.void)
        return CFunc(self._function, signature, {}, {"error_model": "numpy"})

    def assembly(self) -> str:
        """The assembly text of a fresh compilation (a cached one keeps none)."""
        compiled = self._uncompiled()
        compiled.compile()
        text: str = compiled._library.get_asm_str()
        return text


PARTS: list[NativeFunction] = []
"""Every part that was defined, for `fusestep.kernels.cpu.warmup`."""


def part(arguments: Any) -> Callable[[Callable[..., None]], NativeFunction]:
    """Decorator: one part of a parallel loop, ``part(index, slot, c)``.

    ``index`` numbers the part, ``slot`` the thread that runs it (for scratch memory), ``c`` is a
    record with the fields of ``arguments``, those of the loop: machine code gets its address.
    """
    at = records(arguments)

    def decorate(function: Callable[..., None]) -> NativeFunction:
        inlined = njit(function, inline="always")

        def run_part(index, slot, call):
            inlined(index, slot, at(call, 1)[0])

        made = NativeFunction(run_part, f"{function.__module__}.{function.__qualname__}")
        PARTS.append(made)
        return made

    return decorate


class Arguments:
    """The arguments of a loop in memory: arrays, which are kept alive, as addresses, None as 0."""

    def __init__(self, call: tuple[int | np.ndarray | None, ...]) -> None:
        self._call = call
        self.words = array(
            "q", [address_of(x) if isinstance(x, np.ndarray) else x or 0 for x in call]
        )
        self.address, _ = self.words.buffer_info()
