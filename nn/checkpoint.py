"""Checkpoints: safetensors files, written whole or not at all, and the check of a state."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from ..ops.arrays import adopt
from ..ops.errors import UnknownArgumentError, message
from .parameter import Parameter


def save_checkpoint(save_obj: Any, path: str | os.PathLike[str]) -> None:
    """Write arrays by name to a safetensors file, atomically.

    The file is written beside its place, flushed to the disk and renamed: after a crash the
    old file or the new one is there, never a part of one.

    An optimizer is saved without its parameters: save those too.

    Args:
        save_obj: an optimizer (its `state_dict`), a mapping of names to arrays, or an iterable
            of named `Parameter`, such as ``optimizer.parameters``.
        path: the file.

    Raises:
        TypeError: ``save_obj`` is none of these.
        ValueError: a parameter has no name, or two have one.
        OSError: the file cannot be written.

    >>> import numpy as np, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "state.safetensors")
    >>> save_checkpoint({"a": np.arange(3.0)}, path)
    >>> load_checkpoint(path)["a"].tolist()
    [0.0, 1.0, 2.0]
    """
    arrays = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in _named(save_obj)}
    target = Path(path)
    for name, array in arrays.items():
        if array.dtype.kind in "cOSUMm":
            raise TypeError(
                message("save_checkpoint", name, "has a wrong dtype", "numbers", array.dtype)
            )
    content = save(arrays, metadata={"format": "fusestep"})
    # Opened as any new file is, so that it gets the permissions of one.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    file = open(temporary, "xb")  # noqa: SIM115  (closed below, before the rename)
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _flush_folder(target.parent)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file by name; it can execute nothing.

    Raises:
        OSError: the file cannot be read.
        safetensors.SafetensorError: it is no safetensors file.
    """
    return load_file(os.fspath(path))


def _named(save_obj: Any) -> list[tuple[str, np.ndarray]]:
    if hasattr(save_obj, "state_dict"):
        save_obj = save_obj.state_dict()
    if isinstance(save_obj, Mapping):
        return [(str(n), adopt("save_checkpoint", str(n), a)) for n, a in save_obj.items()]
    if not isinstance(save_obj, Iterable):
        raise TypeError(
            message(
                "save_checkpoint",
                "save_obj",
                "has a wrong type",
                "an optimizer, a mapping or parameters",
                type(save_obj).__name__,
            )
        )
    named: dict[str, np.ndarray] = {}
    for parameter in save_obj:
        if not isinstance(parameter, Parameter):
            got = type(parameter).__name__
            raise TypeError(
                message("save_checkpoint", "save_obj", "holds a wrong type", "Parameters", got)
            )
        if parameter.name is None or parameter.name in named:
            raise ValueError(
                message(
                    "save_checkpoint",
                    "parameter name",
                    "is missing or repeats",
                    "unique names",
                    parameter.name,
                )
            )
        named[parameter.name] = parameter.asnumpy()
    return list(named.items())


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable, where folders can be opened (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_state(where: str, state: Any) -> dict[str, Any]:
    """A copy of the mapping ``state``.

    Raises:
        TypeError: it is no mapping.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            message(where, "state", "has a wrong type", "a mapping", type(state).__name__)
        )
    return dict(state)


def steps_done(where: str, value: Any) -> int:
    """The number of steps that a saved ``global_step`` tells.

    Raises:
        TypeError: it is no array of int32.
        ValueError: it has another shape than ``(1,)`` or is negative.
    """
    array = adopt(where, "state 'global_step'", value)
    if array.dtype != np.int32:
        raise TypeError(
            message(where, "state 'global_step'", "has a wrong dtype", "int32", array.dtype)
        )
    if array.shape != (1,):
        raise ValueError(
            message(where, "state 'global_step'", "has a wrong shape", "(1,)", array.shape)
        )
    if array[0] < 0:
        raise ValueError(
            message(where, "state 'global_step'", "is out of range", "at least 0", array[0])
        )
    return int(array[0])


def checked_state(
    where: str, state: Mapping[str, Any], own: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """``state`` as arrays that fit ``own`` in names, dtypes and shapes.

    Raises:
        KeyError: a name is missing or unknown.
        TypeError: a dtype differs.
        ValueError: a shape differs.
    """
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or foreign:
        raise UnknownArgumentError(
            message(
                where,
                "state",
                "does not fit this optimizer",
                f"all of its {len(own)} names",
                f"missing {missing[:3]}, unknown {foreign[:3]}",
            )
        )
    arrays = {name: adopt(where, f"state {name!r}", value) for name, value in state.items()}
    for name, array in arrays.items():
        if name.startswith("learning_rate") and not (np.asarray(array, np.float64) >= 0).all():
            raise ValueError(
                message(where, f"state {name!r}", "is out of range", "finite and at least 0", array)
            )
        if name.startswith("learning_rate") and array.dtype in (np.float32, np.float64):
            array = array.astype(own[name].dtype)  # MindSpore keeps float32
            is_number = array.size == own[name].size == 1
            arrays[name] = array = array.reshape(own[name].shape) if is_number else array
        if array.dtype != own[name].dtype:
            raise TypeError(
                message(where, f"state {name!r}", "has a wrong dtype", own[name].dtype, array.dtype)
            )
        if array.shape != own[name].shape:
            raise ValueError(
                message(where, f"state {name!r}", "has a wrong shape", own[name].shape, array.shape)
            )
    return arrays
