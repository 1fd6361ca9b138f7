"""The guard of a call: a word on the device that says whether the call may write.

Indices are checked on the device, and the host does not wait for the answer. Every later loop of
the call reads the word and leaves when something was found. An optimizer has one guard for all its
steps, which stays closed. It is two ``int64``: what was found, `NOTHING` at first, and that index.
"""

from __future__ import annotations

from numba import cuda

from .backend import load_int64

# The largest number, because the smallest position counts of all that are found (`lower_int64`).
NOTHING = (1 << 63) - 1
FOUND, INDEX, WORDS = range(3)
BYTES = 8 * WORDS


@cuda.jit(device=True)
def is_closed(guard):
    """Whether the call may not write; ``guard`` 0 is that of a call that cannot fail."""
    return guard != 0 and load_int64(guard) != NOTHING
