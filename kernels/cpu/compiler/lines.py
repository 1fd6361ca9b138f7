"""Cache lines: what the memory hands over at a time."""

from __future__ import annotations

from ...inner import njit
from .intrinsics import prefetch_line

LINE = 64  # bytes
_MOST = 8  # lines of a span that are fetched; the hardware follows from there


@njit(inline="always")
def prefetch(address, n_bytes):
    """Fetch the lines of a span of memory, for reading.

    Also for writing: a line that no other core has is then its reader's own.
    """
    # A row need not begin at a line, nor end at one. Most rows are short: for them no loop.
    prefetch_line(address)
    if n_bytes > LINE:
        prefetch_line(address + LINE)
    for line in range(2 * LINE, min(n_bytes, _MOST * LINE), LINE):
        prefetch_line(address + line)
    prefetch_line(address + n_bytes - 1)
