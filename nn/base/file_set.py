"""The files of one optimizer in a folder, of which a manifest says what belongs together."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import secrets
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from ...kernels.cpu.process.forks import in_child
from ...kernels.files import check_target
from ...ops.runtime.errors import reject
from .checkpoint import replace_file

if os.name == "nt":
    import msvcrt
else:
    import fcntl

if TYPE_CHECKING:
    from .state_files import MappedFiles

MANIFEST, LOCK, _VERSION = "manifest.json", "manifest.lock", 1
SCALARS = "idle_scalars"
"""The name of the scalars of the last steps in checkpoints and files."""
_NEW = "files that are being made"
_FIX = "; go on with a checkpoint in an empty folder"
_alive: weakref.WeakSet[FileSet] = weakref.WeakSet()


class FileSet:
    """Makes the states of one optimizer in the files of a folder, as a function of `states_in`.

    No other one can have the folder while this object lives. What it takes over is mapped, and
    nothing is written before `complete`.

    Args:
        files: how files are mapped.
        where: the name of the optimizer in errors.
        optimizer: what tells it from those that states mean something else to, in types of JSON.
        grows: parameters may join later, with files that begin anew.

    Attributes:
        left: the files that an earlier optimizer has left, and that were not taken over: the
            dtype, shape and bytes of each; None without a manifest.
        begins: whether a file that is not there is made.
        cut: why the files that are there belong to no set; "" where they do.
        has_manifest: whether there was one.
        is_resumed: whether files are to be taken over.
        may_sleep: whether the scalars of missed steps are among them.
        made: those of this optimizer, in the same form.
        parameters: what a front end notes of each parameter.

    Raises:
        OSError, ValueError: the manifest cannot be read, or is that of another optimizer.
        RuntimeError: an optimizer that is alive has the folder.
    """

    def __init__(
        self, files: MappedFiles, where: str, optimizer: dict[str, Any], *, grows: bool = False
    ) -> None:
        self._files, self.where, self._optimizer, self._grows = files, where, optimizer, grows
        self._lock = weakref.finalize(self, os.close, _locked(where, files.folder / LOCK))
        _alive.add(self)
        files.begun.add(self)
        self.made: dict[str, Any] = {}
        self.cut, self._text = "", b""
        found = self._read()
        self.has_manifest = found is not None
        if found is None:
            sets = dict(map(_head_of, files.folder.glob("*.safetensors")))
            sets.pop("", None)
            found = {"cut": "" if sets else _NEW, "set": next(iter(sets.values()), None)}
            found |= {"files": dict.fromkeys(sets), "parameters": {}}
        self.is_resumed = found["cut"] != _NEW
        self.may_sleep = self.has_manifest or not self.is_resumed
        self.set, self.left, self.parameters = found["set"], found["files"], found["parameters"]
        if not self.is_resumed:
            self.set, self.left, self.parameters = secrets.token_hex(8), {}, {}
            self.leave(_NEW)  # files without a manifest would be those of an older version
        self.begins = grows or not self.is_resumed

    def _read(self) -> Any:
        """The manifest, as it has to be; None where there is none."""
        path, found = self._files.folder / MANIFEST, None
        if check_target(MANIFEST, path, follows=False) is None:
            return None
        self._text = path.read_bytes()
        with suppress(ValueError, RecursionError):
            found = json.loads(self._text)
        if not isinstance(found, dict) or found.pop("sum", None) != _sum(found):
            expected = f"one of version {_VERSION}"
            reject(ValueError, self.where, str(path), "is no manifest", expected, "another file")
        if found["cut"] == _NEW:
            return found
        if found["cut"]:
            expected, got = "a set of files that belong together", found["cut"]
            reject(ValueError, self.where, str(path), "tells of a part", expected, got, _FIX)
        for key in self._optimizer:
            if (got := found["optimizer"].get(key)) != self._optimizer[key]:
                name, expected = f"{key} in {path}", self._optimizer[key]
                reject(ValueError, self.where, name, "is another one", expected, got)
        return found

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], initial: Any
    ) -> np.ndarray:
        """The array of a state; see `states_in`."""
        files, record = self._files, [dtype.name, [*shape], math.prod(shape) * dtype.itemsize]
        if name in self.left:
            if self.left[name] not in (None, record):
                expected, got = f"{dtype} {shape}", self.left[name]
                reject(ValueError, self.where, f"state {name!r}", "is another one", expected, got)
            array = files.take(name, shape, dtype, self.set)
            del self.left[name]
        else:
            is_optional = name.startswith(SCALARS) and not self.has_manifest
            if not (self.begins or is_optional):
                expected, got = "all files of the optimizer", f"none in {files.folder}"
                reject(ValueError, self.where, f"state {name!r}", "is missing", expected, got)
            self._check_alone()
            array = files.make(name, shape, dtype, initial, self.set)
        self.made[name] = record
        return array

    def complete(self) -> None:
        """Note that all files are there.

        Raises:
            ValueError: there are some that the optimizer does not have.
        """
        for name in () if self._grows else self.left:
            expected, got = "files of the optimizer alone", f"{name!r} in {self._files.folder}"
            reject(ValueError, self.where, f"file {name!r}", "is foreign", expected, got)
        self.leave("")
        self._files.begun.discard(self)

    def write(self) -> None:
        """Write the manifest, if anything in it has changed."""
        content = {
            "version": _VERSION, "set": self.set, "cut": self.cut, "optimizer": self._optimizer,
            "parameters": self.parameters, "files": {**self.left, **self.made},
        }  # fmt: skip
        text = json.dumps({**content, "sum": _sum(content)}).encode()
        if text != self._text:
            self._check_alone()
            replace_file(self._files.folder / MANIFEST, text, MANIFEST)
            self._text = text

    def leave(self, why: str) -> None:
        """Note what has made the files parts of no set any more."""
        self.cut = why
        self.write()

    @contextmanager
    def changing(self, why: str) -> Iterator[None]:
        """Note that files change together: a process that ends meanwhile leaves a part."""
        before = "" if self.cut == why else self.cut
        self.leave(why)
        yield
        self.leave(before)

    def close(self) -> None:
        """Let others have the folder."""
        self._lock()

    def _check_alone(self) -> None:
        if not self._lock.alive:
            expected, got = "the process that made the optimizer", "a child of it"
            reject(RuntimeError, self.where, "the folder", "is another one's", expected, got)

    def __reduce__(self) -> Any:
        return type(None), ()  # the states of a copy are in memory


def _sum(content: dict[str, Any]) -> int:
    """A sum over a manifest, by which one that others have written is told."""
    return zlib.crc32(json.dumps([_VERSION, content]).encode())


@in_child
def _close_all() -> None:
    # Else a child that outlives its parent would keep the folder from the next process.
    for each in list(_alive):
        each.close()


def _locked(where: str, path: Path) -> int:
    """A handle of a file that no other handle of any process locks, until it is closed."""
    check_target(LOCK, path, follows=False)
    for may_wait in (True, False):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | CAREFUL, 0o666)
        try:
            if os.name == "nt":
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if may_wait:
                gc.collect()  # an optimizer that nobody has may wait for it
                continue
            expected, got = "one optimizer at a time: `del` the other one", str(path.parent)
            reject(RuntimeError, where, "the folder", "is in use", expected, got)
        return handle
    raise AssertionError


CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags that neither follow a link nor wait for a pipe."""


def carefully(path: str, flags: int) -> int:
    """An opener of `open` that neither follows a link nor waits for a pipe."""
    return os.open(path, flags | CAREFUL, 0o666)


def _head_of(path: Path) -> tuple[str, str | None]:
    """The name of the state that a file is of, and its set; "" where it is no such file."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        with open(path, "rb", opener=carefully) as opened:
            head = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), 1 << 20)))
        about, name = head.pop("__metadata__"), unquote(path.stem)
        if about.pop("format") == "fusestep" and [*head] == [name]:
            return name, about.get("set")
    return "", None


def set_of(path: Path) -> str | None:
    """The set of a file of states; "" where it is no such file."""
    name, found = _head_of(path)
    return found if name else ""
