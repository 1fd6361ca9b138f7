"""Private interfaces of Numba and llvmlite: all that this package stands on, and nothing else.

The page on new versions says what each is for, and which test tells that it has changed. Their
documented interfaces (`numba.extending`, `llvmlite.ir`, `llvmlite.binding`) are imported where they
are used.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype
from numba.np.ufunc.parallel import _backend_init_thread_lock

__all__ = [
    "COMPILER_LOCKS", "CFunc", "Dispatcher", "NumbaError", "UnsupportedBytecodeError", "cgutils",
    "from_dtype", "get_host_cpu_features", "omp_pool", "populate_array", "register_helpers",
    "RUNTIME_HELPERS", "tbb_pool",
]  # fmt: skip

# What is around them in Python can be interrupted; a fork waits for the locks inside.
COMPILER_LOCKS = (
    global_compiler_lock._lock,
    _backend_init_thread_lock,
    ffi.lib._lock._lock,
)
RUNTIME_HELPERS: dict[str, int] = _nrt_python.c_helpers
"""Addresses of Numba's own functions that compiled code may call, by name."""


def register_helpers() -> None:
    """Let LLVM know all functions that Numba's compiled code may call."""
    cpu_target.target_context.refresh()


def omp_pool() -> Any:
    """The module of Numba's OpenMP layer; an `ImportError` where there is none."""
    from numba.np.ufunc import omppool

    return omppool


def tbb_pool() -> Any:
    """The module of Numba's TBB layer; an `ImportError` where there is none."""
    from numba.np.ufunc import tbbpool

    return tbbpool
