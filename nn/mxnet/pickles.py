"""States that MXNet's Updater has pickled, read by a machine that can make nothing but data."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import ml_dtypes
import numpy as np

from ...ops.runtime.errors import message

_DTYPES: dict[int, Any] = {
    0: np.float32, 1: np.float64, 2: np.float16, 3: np.uint8, 4: np.int32, 5: np.int8, 6: np.int64,
    12: ml_dtypes.bfloat16,
}  # fmt: skip
_MAGICS = (0xF993FAC9, 0xF993FACA)  # of MXNet from 1.0 on, and with NumPy's empty shapes
_DENSE = 0


def load_states(data: bytes) -> tuple[dict[Any, Any], dict[Any, int], int]:
    """The states of an Updater of MXNet, its counts of updates, and the largest of them.

    The counts are there where the optimizer was written along (``dump_optimizer=True``, which
    ``gluon.Trainer.save_states`` does); of it nothing else is read.

    Raises:
        ValueError: the bytes are no such pickle, or hold anything but dicts, tuples, lists,
            numbers, strings and dense arrays.
    """
    try:
        found = _Reader(io.BytesIO(data)).load()
        states, optimizer = found if isinstance(found, tuple) else (found, None)
        if not isinstance(states, dict):
            raise ValueError(f"a {type(states).__name__} in place of a dict")
        counts: dict[Any, int] = {}
        if optimizer is not None:
            counts = dict(optimizer.state["_index_update_count"])
        arrays = {index: _arrays(state) for index, state in states.items()}
        return arrays, counts, max(counts.values(), default=0)
    except _DAMAGES as error:
        expected, got = "a pickle of an Updater of MXNet", f"{type(error).__name__}: {error}"
        raise ValueError(message("convert", "states", "cannot be read", expected, got)) from None


_DAMAGES = (
    pickle.UnpicklingError, struct.error, AttributeError, EOFError, IndexError, KeyError,
    MemoryError, OverflowError, TypeError, UnicodeDecodeError, ValueError,
)  # fmt: skip


class _Record:
    """An object of MXNet: what was kept of it, and nothing that it could do."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NDArray(_Record):
    """An array of MXNet, as the bytes that it writes of itself."""


class _Optimizer(_Record):
    """An optimizer of MXNet, or what belongs to one."""


class _Reader(pickle.Unpickler):
    """Knows numbers, strings, containers and `_Record`; everything else is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "bytearray"), ("__builtin__", "bytearray")):
            return bytearray
        if (module, name) in (("builtins", "object"), ("__builtin__", "object")):
            return object
        if (module, name) == ("copyreg", "_reconstructor"):
            return _made
        if module.split(".")[0] == "mxnet":
            return _NDArray if name in ("NDArray", "ndarray") else _Optimizer
        raise ValueError(f"it holds {module}.{name}")

    def persistent_load(self, _: Any) -> Any:
        raise ValueError("it refers to something outside")


def _made(kind: Any, *_: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, _Record)):
        raise ValueError("it makes an object of no class of MXNet")
    return kind()


def _arrays(state: Any) -> Any:
    """A state with NumPy's arrays."""
    if isinstance(state, tuple | list):
        return type(state)(map(_arrays, state))
    if state is None or isinstance(state, bool | int | float):
        return state
    if not isinstance(state, _NDArray):
        raise ValueError(f"a {type(state).__name__} in place of an array")
    return array_of(bytes(state.state["handle"]))


def array_of(data: bytes) -> np.ndarray:
    """The array that ``MXNDArraySaveRawBytes`` has written.

    Raises:
        ValueError: it is row-sparse, of another version or dtype, or has too few or too many bytes.
        struct.error: it ends too early.
    """
    magic, kind, ndim = struct.unpack_from("<Iii", data)
    if magic not in _MAGICS or kind != _DENSE or not 0 <= ndim <= 32:
        raise ValueError("an array that is not dense, or of MXNet before 1.0")
    at = 12
    shape = struct.unpack_from(f"<{ndim}q", data, at)
    at += 8 * ndim + 8  # and the device
    (code,) = struct.unpack_from("<i", data, at)
    if code not in _DTYPES:
        raise ValueError(f"an array of dtype {code}")
    dtype, content = np.dtype(_DTYPES[code]), data[at + 4 :]
    if min(shape, default=0) < 0 or len(content) != dtype.itemsize * int(
        np.prod(shape, dtype=object)
    ):
        raise ValueError("an array whose size does not fit")
    return np.frombuffer(content, dtype).reshape(shape).copy()
