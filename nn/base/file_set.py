"""States that a function makes, and the set of files of one optimizer, which a manifest tells."""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from ...kernels.cpu.process.forks import in_child
from ...kernels.files import check_target
from ...ops.runtime.errors import reject
from .checkpoint import replace_file
from .mapped_files import SCALARS, MappedFiles, carefully, set_of

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOADED, MOVED = "states that were being loaded", "states that have moved into memory"
"""Why files are no set."""
_NEW = "files that were being made"
_MANIFEST, _VERSION = "manifest.json", 1
_alive: weakref.WeakSet[FileSet] = weakref.WeakSet()


class FileSet:
    """The files of one optimizer: makes its states, as a function of `states_in`.

    Files that are there are mapped, and nothing of theirs is written before the first step.

    Args:
        files: how files are mapped.
        where: the name of the optimizer in errors.
        optimizer: what tells it from those that its states mean something else to.
        grows: parameters may join later.

    Attributes:
        left: the files of an earlier optimizer: dtype, shape and bytes; None without a manifest.
        made: those of this one.
        has_manifest: False: the files are those of an older version.
        parameters: what a front end notes of parameters, in types of JSON.

    Raises:
        OSError, ValueError: the manifest cannot be read, or is that of another optimizer.
        RuntimeError: another optimizer that is alive has the folder.
    """

    def __init__(
        self, files: MappedFiles, where: str, optimizer: dict[str, Any], *, grows: bool = False
    ) -> None:
        self._files, self.where, self._optimizer, self._grows = files, where, optimizer, grows
        self.close = weakref.finalize(self, os.close, _locked(where, files.folder))
        _alive.add(self)
        files.begun.add(self)
        self.made: dict[str, Any] = {}
        self._cut, self._text = "", b""
        manifest, folder = self._read(), files.folder
        if manifest is None:
            sets = {unquote(path.stem): set_of(path) for path in folder.glob("*.safetensors")}
            sets = {name: number for name, number in sets.items() if number != ""}
            manifest = {"cut": "" if sets else _NEW, "set": next(iter(sets.values()), None)}
            manifest |= {"files": dict.fromkeys(sets), "parameters": {}}
        self.is_resumed, self.has_manifest = manifest["cut"] != _NEW, "version" in manifest
        self.set, self.left = manifest["set"], manifest["files"]
        self.parameters = manifest["parameters"]
        if not self.is_resumed:
            self.set, self.left, self.has_manifest = self.set or secrets.token_hex(8), {}, True
            self.write(_NEW)  # files without a manifest would be those of an older version

    def _read(self) -> Any:
        """The manifest, as it has to be; None where there is none."""
        path, manifest = self._files.folder / _MANIFEST, None
        if check_target(_MANIFEST, path, follows=False) is None:
            return None
        with open(path, "rb", opener=carefully) as file:
            self._text, label = file.read(), str(path)
        with suppress(ValueError, RecursionError):
            manifest = json.loads(self._text)
        if not isinstance(manifest, dict) or manifest.pop("sum", None) != _sum(manifest):
            expected = f"one of version {_VERSION}"
            reject(ValueError, self.where, label, "is no manifest", expected, "another file")
        if manifest["cut"] not in ("", _NEW):
            expected, fix = "files that belong together", "; go on with a checkpoint elsewhere"
            reject(ValueError, self.where, label, "is of no set", expected, manifest["cut"], fix)
        if manifest["cut"] != _NEW and (got := manifest["optimizer"]) != self._optimizer:
            reject(ValueError, self.where, label, "is another one's", self._optimizer, got)
        return manifest

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], initial: Any
    ) -> np.ndarray:
        """The array of a state; see `states_in`."""
        files, label, array = self._files, f"state {name!r}", None
        record = [dtype.name, [*shape], math.prod(shape) * dtype.itemsize]
        if name in self.left:
            if self.left[name] not in (None, record):
                got = self.left[name]
                reject(ValueError, self.where, label, "is another one", f"{dtype} {shape}", got)
            array = files.take(name, shape, dtype, self.set)
        elif self._grows:
            is_whole = name.partition(".")[2] not in {n.partition(".")[2] for n in self.left}
        else:
            is_whole = not self.is_resumed
        if array is None:
            # An older version has kept no scalars.
            if not (is_whole or (name.startswith(SCALARS) and not self.has_manifest)):
                expected, got = "all files of the optimizer", f"none in {files.folder}"
                reject(ValueError, self.where, label, "is missing", expected, got)
            self.check_alone()
            array = files.make(name, shape, dtype, initial, self.set)
        self.made[name] = record
        return array

    def complete(self) -> None:
        """Note that all files are there.

        Raises:
            ValueError: there are some that the optimizer does not have.
        """
        for name in () if self._grows else self.left.keys() - self.made:
            expected, got = "files of the optimizer alone", f"one in {self._files.folder}"
            reject(ValueError, self.where, f"state {name!r}", "is foreign", expected, got)
        self.write()
        self._files.begun.discard(self)

    def write(self, cut: str = "", *, for_good: bool = False) -> None:
        """Write the manifest, if anything in it has changed; ``cut``: why the files are no set."""
        if for_good:
            self._cut = cut
        content = {
            "version": _VERSION, "set": self.set, "cut": self._cut or cut,
            "optimizer": self._optimizer, "parameters": self.parameters,
            "files": {**self.left, **self.made},
        }  # fmt: skip
        text = json.dumps({**content, "sum": _sum(content)}).encode()
        if text != self._text:
            self.check_alone()
            replace_file(self._files.folder / _MANIFEST, text, _MANIFEST)
            self._text = text

    def check_alone(self) -> None:
        """Refuse writes of a child, whose states are those of its parent.

        Raises:
            RuntimeError: this is one.
        """
        if not self.close.alive:
            expected, got = "the process that made the optimizer", "a child of it"
            reject(RuntimeError, self.where, "the folder", "is another one's", expected, got)

    def __reduce__(self) -> Any:
        return type(None), ()  # the states of a copy are in memory


def _sum(content: dict[str, Any]) -> int:
    """A sum over a manifest, which tells one that was damaged or is of another version."""
    return zlib.crc32(json.dumps([_VERSION, content]).encode())


@in_child
def _close_all() -> None:
    # Else a child that outlives its parent would keep the folder from the next process.
    for each in list(_alive):
        each.close()


def _locked(where: str, folder: Path) -> int:
    """A handle that locks a folder for as long as it is open."""
    check_target("manifest.lock", folder / "manifest.lock", follows=False)
    handle = carefully(str(folder / "manifest.lock"), os.O_RDWR | os.O_CREAT)
    for _ in range(2):
        with suppress(BlockingIOError, PermissionError):
            if sys.platform == "win32":
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        gc.collect()  # an optimizer that nobody has may be alive
    os.close(handle)
    expected = "one optimizer at a time: `del` the other one first"
    return reject(RuntimeError, where, "the folder", "is in use", expected, str(folder))


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
