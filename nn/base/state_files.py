"""States where the user wants them: made by a function, such as one that maps files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from ...ops.runtime.errors import reject
from .file_set import FileSet
from .mapped_files import MappedFiles

StateMaker = Callable[[str, tuple[int, ...], np.dtype[Any], Any], np.ndarray]
"""``make(name, shape, dtype, initial)``: the array of a state, which begins with a number or with
the numbers of an array, ``initial``, or goes on where it ended."""

_maker: ContextVar[StateMaker | None] = ContextVar("maker of states", default=None)


@contextmanager
def states_in(make: StateMaker) -> Iterator[None]:
    """Have a function make the states of all optimizers that are made in this context.

    Optimizers of `fusestep.nn` and `fusestep.nn.torch` on the host ask it for each of their arrays:
    states, counts and other numbers that a resumed run needs. Those of `nn.torch` ask at the first
    gradient of a parameter, also after the context.

    Args:
        make: `MappedFiles`, or ``make(name, shape, dtype, initial) -> array``. The name is that in
            checkpoints, such as ``moment1.table`` (in `nn.torch` ``exp_avg.parameter 0``). The
            array is of NumPy,
            C-contiguous, writable, of this shape and dtype, and shares memory with nothing. It
            begins with ``initial``, a number or an array, or has what an earlier optimizer left.

    Raises:
        TypeError: it is not callable; or, where states are made, it returns no such array.
        ValueError: there an array has another shape or dtype, cannot be written, or shares memory.

    >>> import numpy as np
    >>> import fusestep
    >>> from fusestep import nn
    >>> def untouched(name, shape, dtype, initial):  # the system clears pages when they are used
    ...     made = np.zeros(shape, dtype)
    ...     if np.any(initial):
    ...         made[...] = initial
    ...     return made
    >>> with fusestep.states_in(untouched):
    ...     opt = nn.LazyAdam([np.zeros((1000, 8), np.float32)])
    """
    if not callable(make):
        got = type(make).__name__
        reject(TypeError, "states_in", "make", "has a wrong type", "a callable", got)
    token = _maker.set(make)
    try:
        yield
    except BaseException:
        # The traceback may keep an optimizer that could not be made.
        for begun in [*make.begun] if isinstance(make, MappedFiles) else ():
            begun.close()
        raise
    finally:
        _maker.reset(token)


def maker_of_states() -> StateMaker | None:
    """The function of the innermost `states_in`; None outside of all."""
    return _maker.get()


def files_of(where: str, optimizer: Callable[[], dict[str, Any]], **how: Any) -> FileSet | None:
    """The files of an optimizer that is made within `states_in` of `MappedFiles`; else None."""
    make = _maker.get()
    return FileSet(make, where, optimizer(), **how) if isinstance(make, MappedFiles) else None


def made_by(
    make: StateMaker, where: str, name: str, shape: tuple[int, ...], dtype: Any, initial: Any
) -> np.ndarray:
    """The array that a function makes of a state, checked.

    Raises:
        TypeError, ValueError: as `states_in`.
    """
    dtype, label = np.dtype(dtype), f"state {name!r}"
    array = make(name, shape, dtype, initial)
    if not isinstance(array, np.ndarray):
        got = type(array).__name__
        reject(TypeError, where, label, "has a wrong type", "an array of NumPy", got)
    if array.shape != shape:
        reject(ValueError, where, label, "has a wrong shape", shape, array.shape)
    if array.dtype != dtype:
        reject(ValueError, where, label, "has a wrong dtype", dtype, array.dtype)
    flags = array.flags
    if not (flags.writeable and flags.c_contiguous and flags.aligned):
        expected, got = "a writable C-contiguous array", "a view or one that is only read"
        reject(ValueError, where, label, "cannot be updated in place", expected, got)
    return array
