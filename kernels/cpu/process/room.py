"""Check for memory and threads before calling libraries that abort or hang without them.

LLVM ends the process if it gets no memory, TBB and OpenMP if a thread does not start; Numba's
workqueue waits for such a thread for ever. So memory and threads are tried beforehand.
"""

from __future__ import annotations

import _thread
import mmap
from queue import SimpleQueue

_LIBRARIES = 32 << 20  # bytes of a layer: its libraries, and the functions that are loaded with it
_STACK = 8 << 20  # bytes of a thread's stack, by default of the system; TBB takes half of it


def require_room(n_bytes: int) -> None:
    """Raise a MemoryError if ``n_bytes`` of memory cannot be allocated now."""
    try:
        mmap.mmap(-1, n_bytes).close()
    except OSError as error:
        raise MemoryError(
            f"fusestep: there is no room to load or compile a kernel: "
            f"expected {n_bytes >> 20} MiB, got less"
        ) from error


def can_start(n_threads: int) -> bool:
    """Whether ``n_threads`` can be started now, by a library that is not loaded yet.

    As many threads are started for a moment.
    """
    end: SimpleQueue[None] = SimpleQueue()
    try:
        # Memory for the later threads, since that of one becomes free only some time after its end.
        with mmap.mmap(-1, _LIBRARIES + n_threads * _STACK):
            for _ in range(n_threads):
                _thread.start_new_thread(end.get, ())
    except (OSError, RuntimeError, MemoryError):
        return False
    finally:
        for _ in range(n_threads):
            end.put(None)
    return True
