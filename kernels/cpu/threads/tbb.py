"""TBB under Numba's threading layer, when the process forks.

TBB's threads do not exist in a child, which would wait for ever for a lock that one of them held.
So they are ended before a fork, and start again when they are next needed. TBB can be ended only
if no other thread of the process is registered with it: every living thread is that ever ran a
parallel loop.

Numba tries to end it too, but prints a message if it cannot, and does not try in a thread that has
not started the layer. So Numba's handle of TBB is released, and this module holds one of its own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from ...private import find


class _Definition(ctypes.Structure):
    """``PyModuleDef``."""

    _fields_ = [
        # ``PyModuleDef_Base``: an object's header, and three words.
        ("base", ctypes.c_char * (object.__basicsize__ + 3 * ctypes.sizeof(ctypes.c_void_p))),
        ("name", ctypes.c_char_p),
        ("doc", ctypes.c_char_p),
        ("size", ctypes.c_ssize_t),
        ("others", ctypes.c_void_p * 4),
        ("free", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


_definition_of = ctypes.pythonapi.PyModule_GetDef
_definition_of.restype = ctypes.POINTER(_Definition)
_definition_of.argtypes = [ctypes.py_object]


class _Library(NamedTuple):
    """Functions of a ``tbb::task_scheduler_handle``: of its address, and of a mode."""

    get: Any
    finalize: Any


# While this handle is held, idle threads of TBB wait for more work; otherwise it is null.
_handle = ctypes.c_void_p()
_NO_EXCEPTION = 1  # tbb::finalize_nothrowing
_SYMBOL = "_ZN3tbb6detail2r1{}"
_SIGNATURES = "3getERNS0_2d121task_scheduler_handleE", "8finalizeERNS0_2d121task_scheduler_handleEl"


@cache
def _library() -> _Library | None:
    """The functions of TBB, after Numba's handle is released; None if that cannot be done."""
    tbbpool = find("tbb")
    if tbbpool is None:
        return None
    loaded, definition = ctypes.CDLL(tbbpool.__file__), _definition_of(tbbpool)
    give_up = definition.contents.free if definition else None
    try:
        get, finalize = (loaded[_SYMBOL.format(rest)] for rest in _SIGNATURES)
    except AttributeError:
        return None
    if not give_up:
        return None
    get.restype, finalize.restype = None, ctypes.c_bool
    get.argtypes, finalize.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_ssize_t]
    give_up(id(tbbpool))  # what Numba does when a process ends
    return _Library(get, finalize)


def hold() -> None:
    """Keep the threads of a started layer alive until `end`, instead of Numba."""
    library = _library()
    if library and not _handle:
        library.get(ctypes.byref(_handle))


def end() -> bool:
    """End the threads; returns whether TBB is unused again, so that a child can start it."""
    hold()  # an interrupt may have come between the last end and this
    library = _library()
    return bool(library and library.finalize(ctypes.byref(_handle), _NO_EXCEPTION))
