"""Functions that nothing but compiled code calls."""

from __future__ import annotations

from typing import Any

import numba

NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of Numba that leave out the entries from Python, which are half of a compilation."""


def njit(function: Any = None, **options: Any) -> Any:
    """`numba.njit` for what only compiled code calls: a call from Python would end the process."""
    return numba.njit(function, **options, **NO_WRAPPERS)
