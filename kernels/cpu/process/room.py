"""Memory and threads for libraries that end the process, or wait for ever, where there are none.

LLVM does where it gets no memory. TBB and OpenMP do where a thread does not start, and Numba's
workqueue waits for one that never was. So both are tried beforehand.
"""

from __future__ import annotations

import _thread
import mmap
from queue import SimpleQueue

_LIBRARIES = 32 << 20  # a layer: its libraries, and the functions that are loaded with it
_STACK = 8 << 20  # of a thread: what systems have as default; TBB takes half of it


def require_room(n_bytes: int) -> None:
    """Raise a MemoryError if so much memory cannot be had now."""
    try:
        mmap.mmap(-1, n_bytes).close()
    except OSError as error:
        raise MemoryError(
            f"fusestep: there is no room to load or compile a kernel: "
            f"expected {n_bytes >> 20} MiB, got less"
        ) from error


def can_start(n_threads: int) -> bool:
    """Whether so many threads can be started now, by a library that is not loaded yet.

    So many are started, beside memory for others: their own is free some time after they end.
    """
    end: SimpleQueue[None] = SimpleQueue()
    try:
        with mmap.mmap(-1, _LIBRARIES + n_threads * _STACK):
            for _ in range(n_threads):
                _thread.start_new_thread(end.get, ())
    except (OSError, RuntimeError, MemoryError):
        return False
    finally:
        for _ in range(n_threads):
            end.put(None)
    return True
