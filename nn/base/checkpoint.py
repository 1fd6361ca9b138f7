"""Checkpoints: safetensors files, written whole or not at all, and the check of a state."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from ...kernels.files import check_target
from ...kernels.storage import STORAGES
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import UnknownArgumentError, reject
from .arguments import check_kind
from .parameter import Parameter

if os.name != "nt":
    import fcntl

_BY_SIZE = sorted(STORAGES.values(), key=lambda storage: storage.itemsize)
_FLOATS = {storage.dtype.name: storage.name.upper() for storage in _BY_SIZE}
_SAVED = frozenset(map(np.dtype, ("?", *"bhilq", *"BHILQ", *STORAGES)))
_SAVED_NAMES = f"bool, an integer, {', '.join([*_FLOATS][:-1])} or {[*_FLOATS][-1]}"
CODES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    **_FLOATS,
}  # fmt: skip
"""The names of safetensors by those of NumPy."""
_LOADED = (*CODES.values(), "C64")  # others are of 4 to 8 bits, which NumPy does not have
_SAVE = "save_checkpoint"
_PATH = f"{_SAVE}: path"
_RESERVED = "__metadata__"  # no name of an array in safetensors


def save_checkpoint(save_obj: Any, path: str | os.PathLike[str], *, flush: bool = False) -> None:
    """Write arrays by name to a safetensors file, atomically.

    The file is written beside its place, flushed to the disk and renamed: after a crash the
    old file or the new one is there, never a part of one. What a process that was killed has
    left beside ``path`` is removed by the user's next call with this path (not on Windows).

    A new file gets the permissions of any new file. One that replaces another keeps its
    permissions, and its group and owner if the system allows; where the group cannot be kept,
    there are no permissions for a group. Of a symbolic link the file is written that it points
    to, whether that exists or not; the link stays.

    An optimizer is saved without its parameters: save those too.

    Args:
        save_obj: an optimizer (its `state_dict`), a mapping of names to arrays, or an iterable
            of named `Parameter`, such as ``optimizer.parameters``.
        path: the file.
        flush: save ``state_dict(flush=True)`` of an optimizer, in which rows may sleep.

    Raises:
        TypeError: ``save_obj`` is none of these, a name is no str, or a dtype is none of bool,
            integers of 8 to 64 bits, float16, bfloat16, float32 and float64.
        ValueError: a parameter has no name, two have one, or a name is ``__metadata__``, which
            safetensors keeps for itself.
        OSError: the file cannot be written, or ``path`` is a folder, a pipe, a socket or a device.

    >>> import numpy as np, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "state.safetensors")
    >>> save_checkpoint({"a": np.arange(3.0)}, path)
    >>> load_checkpoint(path)["a"].tolist()
    [0.0, 1.0, 2.0]
    """
    # By the name as it was given: what /dev/stdout leads to may have no name of its own.
    check_target(_PATH, path)
    if check.flag(_SAVE, "flush", flush):
        if not hasattr(save_obj, "flush"):
            got = type(save_obj).__name__
            reject(TypeError, _SAVE, "save_obj", "has no rows that sleep", "an optimizer", got)
        save_obj = save_obj.state_dict(flush=True)
    named = _named(save_obj)
    for name, array in named:
        check_savable(_SAVE, name, array)
    arrays = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in named}
    target = Path(os.path.realpath(path))
    replace_file(target, save(arrays, metadata={"format": "fusestep"}), _PATH)


def replace_file(target: Path, content: bytes, what: str) -> None:
    """Write a file atomically, as `save_checkpoint` says; in the place of a symbolic link.

    What is there and no regular file is refused; ``what`` says in the message what the path is.
    """
    # The content has to be on the disk before the name points to it, and then the folder with the
    # name: after a crash of the machine a file that was only renamed can be empty.
    with new_file(target, what) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(target.parent)


@contextmanager
def new_file(target: Path, what: str) -> Iterator[BinaryIO]:
    """A file that is renamed to its place in the end; errors as `replace_file`."""
    old = check_target(what, target)
    _remove_abandoned(target)
    with _temporary(target, old) as file:
        yield file


def check_savable(where: str, name: Any, array: np.ndarray) -> None:
    """Refuse a name or a dtype with which an array could not be read again."""
    if not isinstance(name, str):
        reject(TypeError, where, f"name {name!r}", "is no str", "a str", type(name).__name__)
    if name == _RESERVED:
        reject(ValueError, where, "name", "is reserved", "another one", repr(name))
    if np.dtype(array.dtype.type) not in _SAVED:
        reject(TypeError, where, name, "has a wrong dtype", _SAVED_NAMES, array.dtype)


def _prefix(target: Path) -> str:
    """The prefix of temporary files for ``target``; short, however long its own name is."""
    return f".fusestep.{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}."


@contextmanager
def _temporary(target: Path, old: os.stat_result | None) -> Iterator[BinaryIO]:
    """A new file beside ``target`` that takes its place in the end; after an error it is gone."""
    # A file that replaces another is its owner's alone until it has the permissions of that one:
    # nobody may open it who could not open the old one.
    with _locked(target, 0o666 if old is None else old.st_mode & 0o600) as file:
        try:
            yield file
            if os.name == "nt":
                file.close()  # what is open cannot be renamed there
            elif old is not None:
                _make_like(file.fileno(), old)
            os.replace(file.name, target)
        except BaseException:
            file.close()
            Path(file.name).unlink(missing_ok=True)
            raise


def _locked(target: Path, mode: int) -> BinaryIO:
    """A new file beside ``target``, locked until it is closed or its process has ended."""
    while True:
        path = target.with_name(_prefix(target) + secrets.token_hex(8))
        file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        if os.name != "nt":
            with suppress(OSError):  # where files cannot be locked, none is taken for abandoned
                fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return file
        file.close()  # another save took it for abandoned before it was locked


def _make_like(handle: int, old: os.stat_result) -> None:
    """Give a file group, owner and permissions of another; the permissions last."""
    # The group first: of a file that belongs to somebody else it could not be changed any more.
    for owner, group in ((-1, old.st_gid), (old.st_uid, -1)):
        with suppress(OSError):
            os.fchown(handle, owner, group)
    mode = stat.S_IMODE(old.st_mode)
    # What was for one group is not for another.
    os.fchmod(handle, mode if os.fstat(handle).st_gid == old.st_gid else mode & ~0o070)


def _remove_abandoned(target: Path) -> None:
    """Remove this user's temporary files for ``target`` that no process is writing."""
    if os.name == "nt":
        return
    # In a folder that others can write to such a name may be a link to any file, or a pipe that
    # nobody writes: neither is followed or waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    for path in target.parent.glob(f"{_prefix(target)}*"):
        # Without error only what this user may open and what is not locked, so not being written.
        with suppress(OSError), _opened(path, flags) as handle:
            status = os.fstat(handle)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file by name, also through a link; it executes nothing.

    Raises:
        OSError: the file cannot be read, or ``path`` is a folder, a pipe, a socket or a device.
        TypeError: NumPy has no such dtype: an array has numbers of 4, 6 or 8 bits (F4, F6, F8).
        safetensors.SafetensorError: it is no safetensors file.
    """
    check_target("load_checkpoint: path", path)
    with safe_open(os.fspath(path), framework="np") as file:
        names = list(file.keys())
        for name in names:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _LOADED:
                expected = f"one of {', '.join(_LOADED)}"
                got = f"{dtype} in {os.fspath(path)}"
                reject(TypeError, "load_checkpoint", name, "has a wrong dtype", expected, got)
        return {name: file.get_tensor(name) for name in names}


def _named(save_obj: Any) -> list[tuple[Any, np.ndarray]]:
    if hasattr(save_obj, "state_dict"):
        save_obj = save_obj.state_dict()
    if isinstance(save_obj, Mapping):
        return [(n, adopt(_SAVE, str(n), a)) for n, a in save_obj.items()]
    check_kind(_SAVE, "save_obj", save_obj, Iterable, "an optimizer, a mapping or parameters")
    named: dict[str, np.ndarray] = {}
    for parameter in save_obj:
        if not isinstance(parameter, Parameter):
            got = type(parameter).__name__
            reject(TypeError, _SAVE, "save_obj", "holds a wrong type", "Parameters", got)
        if parameter.name is None or parameter.name in named:
            name, wrong = "parameter name", "is missing or repeats"
            reject(ValueError, _SAVE, name, wrong, "unique names", parameter.name)
        named[parameter.name] = parameter.asnumpy()
    return list(named.items())


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable, where folders can be opened (not on Windows)."""
    if os.name == "nt":
        return
    with _opened(folder, os.O_RDONLY) as handle:
        os.fsync(handle)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags)
    try:
        yield handle
    finally:
        os.close(handle)


def as_state(where: str, state: Any) -> dict[str, Any]:
    """A copy of the mapping ``state``; any other kind is a `TypeError`."""
    check_kind(where, "state", state, Mapping, "a mapping")
    return dict(state)


def steps_done(where: str, value: Any) -> int:
    """The number of steps that a saved ``global_step`` tells: int32, ``(1,)`` and at least 0."""
    name = "state 'global_step'"
    array = adopt(where, name, value)
    if array.dtype != np.int32:
        reject(TypeError, where, name, "has a wrong dtype", "int32", array.dtype)
    if array.shape != (1,):
        reject(ValueError, where, name, "has a wrong shape", "(1,)", array.shape)
    check.in_range(where, name, array[0], array[0] >= 0, "at least 0")
    return int(array[0])


def checked_state(
    where: str, state: Mapping[str, Any], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """``state`` as arrays like others in names (else a `KeyError`), dtypes and shapes."""
    missing, foreign = sorted(like.keys() - state.keys()), sorted(state.keys() - like.keys())
    if missing or foreign:
        expected = f"all of its {len(like)} names"
        got = f"missing {missing[:3]}, unknown {foreign[:3]}"
        wrong = "does not fit this optimizer"
        reject(UnknownArgumentError, where, "state", wrong, expected, got)
    arrays = {name: adopt(where, f"state {name!r}", value) for name, value in state.items()}
    for name, array in arrays.items():
        label, mine, is_rate = f"state {name!r}", like[name], name.startswith("learning_rate")
        if is_rate and array.size == mine.size == 1:
            array = array.reshape(mine.shape)
        # MindSpore keeps rates in float32.
        if array.dtype != mine.dtype and not (is_rate and array.dtype in (np.float32, np.float64)):
            reject(TypeError, where, label, "has a wrong dtype", mine.dtype, array.dtype)
        if array.shape != mine.shape:
            reject(ValueError, where, label, "has a wrong shape", mine.shape, array.shape)
        rates = np.asarray(array, np.float64) if is_rate else np.zeros(0)
        if not ((rates >= 0) & (rates <= check.LARGEST)).all():
            reject(ValueError, where, label, "is out of range", "finite and at least 0", array)
        arrays[name] = array.astype(mine.dtype, copy=False)
    return arrays
