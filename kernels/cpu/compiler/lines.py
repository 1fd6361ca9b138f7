"""Cache lines: what the memory hands over at a time."""

from __future__ import annotations

from typing import Any

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


@njit(inline="always")
def rows_ahead(most, most_bytes, row_bytes):
    """How many rows are fetched ahead: at most so many, of so many bytes, but 2 of any length."""
    while most > 2 and most * row_bytes > most_bytes:
        most >>= 1
    return most


def fetching(n_bytes: int, fetch_line: Any) -> Any:
    """A compiled function that fetches so many bytes from an address on, line by line."""

    @njit(inline="always")
    def fetch(address):
        for line in range(0, n_bytes, LINE):
            fetch_line(address + line)
        if n_bytes > 8:  # what is longer than an element need not begin at a line
            fetch_line(address + n_bytes - 1)

    return fetch
