"""From functions to machine code: C functions of integers that are called by their addresses."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite
import numba
import numpy.ma  # noqa: F401  (else Numba's first call does, and a forked child waits for it)
from numba import types

from ... import cache as on_disk
from ...inner import njit
from ...lazy import lazy
from ...private import compiler_locks
from ..process.forks import fork_between
from ..process.room import require_room
from . import machine
from .machine import Code, Loaded, PythonEntry
from .records import records

_I64 = types.int64
# More than loading and compiling were seen to take: LLVM ends the process if it gets no memory.
_LOADER_BYTES, _COMPILER_BYTES = 16 << 20, 192 << 20
_lock = threading.RLock()

if numba.config.DISABLE_JIT:
    raise RuntimeError(
        "fusestep: NUMBA_DISABLE_JIT switches off the compiler, and without it there are no "
        f"kernels: expected it unset or 0, got {numba.config.DISABLE_JIT}"
    )


fork_between(_lock, *compiler_locks())


_TRIAL = "a trial of the engine"
_SUM = """define i64 @"sum"(i64 %a, i64 %b) {
    %c = add i64 %a, %b
    ret i64 %c
}"""


@cache
def engine_works() -> bool:
    """Whether this package can keep and load machine code itself: tried once, on a sum.

    If a new llvmlite lacks something, Numba compiles all functions anew in each process.
    """
    try:
        require_room(_LOADER_BYTES)
        kept = on_disk.load(_TRIAL)
        code = (
            Code.from_bytes(kept) if kept else machine.made("sum", _SUM, PythonEntry(returns=True))
        )
        # A call, not only the load: an engine that works has run something.
        if Loaded(code).entry()(20, 22) != 42:
            raise RuntimeError("it computes something else")
    except MemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"fusestep: with llvmlite {llvmlite.__version__} machine code cannot be kept: "
            f"{error!r}; every process compiles its kernels anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    if not kept:
        on_disk.save(_TRIAL, code.to_bytes())
    return True


class _ByNumba:
    """A function that Numba itself compiles and calls, instead of `Loaded`."""

    def __init__(self, compiled: Any, entry: PythonEntry | None) -> None:
        self._compiled, self._entry = compiled, entry
        self.address: int = compiled.address

    def entry(self) -> Callable[..., int]:
        """The function for Python."""
        assert self._entry is not None
        # The first holds the GIL while the function runs, the second releases it.
        make = ctypes.PYFUNCTYPE if self._entry.holds_gil else ctypes.CFUNCTYPE
        arguments = [ctypes.c_int64] * self._compiled.__wrapped__.__code__.co_argcount
        return make(ctypes.c_int64 if self._entry.returns else None, *arguments)(self.address)


class NativeFunction:
    """A function of ``int64``, compiled at the first use of its address.

    Args:
        function: returns nothing, or an ``int64`` if ``entry`` says so.
        identity: everything that decides its machine code beside the sources of the package.
        entry: how Python calls it; None: only compiled code calls it.
    """

    def __init__(
        self, function: Callable[..., Any], identity: str, entry: PythonEntry | None = None
    ) -> None:
        self._function = function
        self.identity = identity
        self._entry = entry
        self._loaded: Loaded | _ByNumba | None = None

    @lazy
    def address(self) -> int:
        """The address of the machine code; it is compiled, or read from the cache, at first use."""
        with _lock:
            # Another thread may have loaded it while this one waited.
            self._loaded = self._loaded or self._load()
        return self._loaded.address

    @property
    def is_loaded(self) -> bool:
        """Whether its machine code is in memory."""
        return self._loaded is not None

    @lazy
    def call(self) -> Callable[..., int]:
        """The function for Python."""
        self.address  # noqa: B018  (loads)
        assert self._loaded is not None
        with _lock:
            return self._loaded.entry()

    def _load(self) -> Loaded | _ByNumba:
        if not engine_works():
            require_room(_COMPILER_BYTES)
            return _ByNumba(self._compile(), self._entry)
        require_room(_LOADER_BYTES)
        return Loaded(self._code())

    def _code(self) -> Code:
        kept = on_disk.load(self.identity)
        if kept is not None:
            return Code.from_bytes(kept)
        require_room(_COMPILER_BYTES)
        portable = machine.portable(self.identity)
        code = machine.finished(portable) if portable else machine.made(*self.ir())
        on_disk.save(self.identity, code.to_bytes())
        return code

    def ir(self) -> tuple[str, str, PythonEntry | None]:
        """The symbol and LLVM's IR, after Numba has compiled the function; the entry."""
        compiled = self._compile()
        return compiled.native_name, compiled.inspect_llvm(), self._entry

    def _compile(self) -> Any:
        result = _I64 if self._entry and self._entry.returns else types.void
        arguments = (_I64,) * self._function.__code__.co_argcount
        return numba.cfunc(result(*arguments), error_model="numpy")(self._function)

    def assembly(self) -> str:
        """The assembly of a fresh compilation (machine code from the cache has no text)."""
        return machine.assembly(self._compile().inspect_llvm())


PARTS: list[NativeFunction] = []
"""Every `part` of the package, for `fusestep.kernels.cpu.warmup`."""


def part(arguments: Any) -> Callable[[Callable[..., None]], NativeFunction]:
    """Decorator: one part of a parallel loop, ``part(index, slot, c)``.

    ``index`` is the number of the part, ``slot`` that of the thread that runs it (for scratch
    memory). ``c`` is a record of the loop's arguments, with the fields of ``arguments``: machine
    code gets its address.
    """
    records_at = records(arguments)

    def decorate(function: Callable[..., None]) -> NativeFunction:
        inlined = njit(function, inline="always")

        def run_part(index, slot, call):
            inlined(index, slot, records_at(call, 1)[0])

        made = NativeFunction(run_part, f"{function.__module__}.{function.__qualname__}")
        PARTS.append(made)
        return made

    return decorate
