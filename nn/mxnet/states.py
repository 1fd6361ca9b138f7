"""States of an Updater as bytes: those that it writes itself, and ``.states`` files of MXNet 1.9.

Reading either can execute nothing. What is written here has arrays in the safetensors format, and
the rest as JSON among them. What MXNet wrote is a pickle: a machine reads it that makes nothing
but dicts, tuples, lists, numbers, strings and dense arrays.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from ...kernels.storage import FOREIGN, STORAGES
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import message, reject
from ..base.arguments import check_kind, count, is_int

_FORMAT = "fusestep.nn.mxnet.Updater/1"
_DOCUMENT = "document"
# MXNet's numbers of dtypes and of a dense array, and how an array of its versions from 1.0 begins.
_DTYPES: dict[int, Any] = {
    0: np.float32, 1: np.float64, 2: np.float16, 3: np.uint8, 4: np.int32, 5: np.int8, 6: np.int64,
    12: ml_dtypes.bfloat16,
}  # fmt: skip
_DENSE = 0
_MAGICS = (0xF993FAC9, 0xF993FACA)  # the second one where arrays may have no elements
# What reading bytes that were damaged or made by hand can run into.
_DAMAGES = (
    pickle.UnpicklingError, safetensors.SafetensorError, struct.error, AttributeError, EOFError,
    LookupError, MemoryError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip

Counts = dict[Any, int]


def dump(states: Mapping[Any, Any], counts: Mapping[Any, int], num_update: int) -> bytes:
    """States by index, and the counts of updates, as bytes."""
    tensors: dict[str, np.ndarray] = {}
    document = {
        "format": _FORMAT,
        "states": [
            [_index(index), _structure(state, f"state.{k}", tensors)]
            for k, (index, state) in enumerate(states.items())
        ],
        "counts": [[_index(index), t] for index, t in counts.items()],
        "num_update": num_update,
    }
    tensors[_DOCUMENT] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    return bytes(save_tensors(tensors))


def load(data: Any) -> tuple[dict[Any, Any], Counts | None, int]:
    """The states by index, the counts of updates, and the largest of them.

    The counts are None in a file of MXNet that was written without the optimizer
    (``dump_optimizer=False``). Nothing else of an optimizer is read.

    Raises:
        TypeError: ``data`` are no bytes.
        ValueError: they are of neither format, damaged, or of another kind of object.
    """
    check_kind("set_states", "states", data, bytes | bytearray | memoryview, "bytes")
    data = bytes(data)
    # A safetensors file begins with the length of its header, a pickle with what is no length.
    read = _read_own if int.from_bytes(data[:8], "little") < len(data) else _read_pickle
    try:
        states, counts, num_update = read(data)
        for index in (*states, *(counts or ())):
            _index(index)
        for number in (num_update, *(counts or {}).values()):
            count("set_states", "a count", number)
    except _DAMAGES as error:
        expected, got = "those of get_states or of MXNet 1.9", f"{type(error).__name__}: {error}"
        text = message("set_states", "states", "cannot be read", expected, got)
        raise ValueError(text) from None
    return states, counts, num_update


def _index(index: Any) -> int | str:
    if not (is_int(index) or isinstance(index, str)):
        wrong, got = "cannot be written", repr(index)
        reject(TypeError, "get_states", "an index", wrong, "an int or a str", got)
    return index if isinstance(index, str) else int(index)


# States as they are written here


def _structure(value: Any, name: str, tensors: dict[str, np.ndarray]) -> Any:
    """``value`` with names in the place of its arrays, which go to ``tensors``."""
    if type(value) in (tuple, list):  # a subclass could not be made again
        parts = [_structure(part, f"{name}.{k}", tensors) for k, part in enumerate(value)]
        return {type(value).__name__: parts}
    on_device = DeviceArray.adopt("get_states", name, value)
    value = value if on_device is None else on_device.numpy()
    is_foreign = isinstance(value, np.ndarray) and value.dtype in FOREIGN.values()
    if is_foreign or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
        # The format has all of them, its reader for NumPy has not.
        kept = value.view(STORAGES[value.dtype].carrier) if is_foreign else value
        tensors[name] = np.ascontiguousarray(kept).reshape(value.shape)
        return {value.dtype.name if is_foreign else "array": name}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    expected = "None, numbers, arrays of real numbers, tuples and lists"
    got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
    return reject(TypeError, "get_states", name, "cannot be written", expected, got)


def _restored(value: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    ((kind, content),) = value.items()
    if kind == "value":
        return content
    if kind in ("array", *FOREIGN):
        array = tensors[content].copy()  # of its own, and writable
        return array.view(FOREIGN[kind]) if kind in FOREIGN else array
    parts = [_restored(part, tensors) for part in content]
    return {"tuple": tuple, "list": list}[kind](parts)


def _read_own(data: bytes) -> tuple[dict[Any, Any], Counts, int]:
    tensors = load_tensors(data)
    document = json.loads(tensors.pop(_DOCUMENT).tobytes())
    if document["format"] != _FORMAT:
        raise ValueError("another format")
    states, counts = (dict(document[name]) for name in ("states", "counts"))
    if (len(states), len(counts)) != (len(document["states"]), len(document["counts"])):
        raise ValueError("an index twice")
    restored = {index: _restored(state, tensors) for index, state in states.items()}
    return restored, counts, document["num_update"]


# Pickles of MXNet


class _Record:
    """An object of MXNet: its state, and nothing that it could do."""

    state: Any

    def __init__(self, *_: Any) -> None:
        """Whatever it was made from does not matter."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """A reader of numbers, strings, containers and `_Record`; everything else is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "mxnet":
            return _Record
        if (module, name) in (("builtins", "bytearray"), ("__builtin__", "bytearray")):
            return bytearray
        raise ValueError(f"{module}.{name}")


def _read_pickle(data: bytes) -> tuple[dict[Any, Any], Counts | None, int]:
    content = _Reader(io.BytesIO(data)).load()
    states, optimizer = content if isinstance(content, tuple) else (content, None)
    counts = None if optimizer is None else dict(optimizer.state["_index_update_count"])
    arrays = {index: _arrays(state) for index, state in states.items()}
    return arrays, counts, max((counts or {}).values(), default=0)


def _arrays(state: Any) -> Any:
    """A state with NumPy's arrays in the place of MXNet's."""
    if isinstance(state, tuple | list):
        return type(state)(map(_arrays, state))
    if state is None or isinstance(state, bool | int | float):
        return state
    return _array(bytes(state.state["handle"]))


def _array(data: bytes) -> np.ndarray:
    """The array that MXNet has written: magic, storage, shape, device, dtype, elements."""
    magic, storage, ndim = struct.unpack_from("<Iii", data)
    if magic not in _MAGICS or storage != _DENSE or not 0 <= ndim <= 32:
        raise ValueError("an array that is not dense, or of MXNet before 1.0")
    *shape, _, _, code = struct.unpack_from(f"<{ndim}q3i", data, 12)
    if min(shape, default=0) < 0:  # which would stand for whatever fits
        raise ValueError("an array with a negative size")
    return np.frombuffer(data[12 + 8 * ndim + 12 :], _DTYPES[code]).reshape(shape).copy()
