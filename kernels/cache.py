"""The on-disk cache of compiled code: one file per kernel, named by all that it depends on.

Numba's own cache does not see that a function called by a closure has changed, never hits
for closures over compiled functions, and keeps an index per function that two processes can
leave pointing at each other's code. Here the file name is the hash of everything that decides
the machine code, so an entry can be missing but never stale, and entries are written to a
temporary file and renamed, so a reader sees a whole one or none.

Loading an entry runs what is in it. So one counts only if nobody but the user of this process can
have written it: the folder and the file belong to that user, and no one else may write to them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm

from .files import check_target

PACKAGE = Path(__file__).resolve().parent
_MAGIC = b"fusestep kernel 2\n"
_SUFFIX = ".kernel"
_Dispatcher = type(numba.njit(lambda: None))
_CONSTANTS = int | float | bool | str | tuple | np.generic
_problems: dict[Path, str] = {}  # folders that this process does without, and why


def sources_hash() -> str:
    """Hash of every source file below ``kernels/``, as they are now."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# Taken before the other modules are imported: what is compiled later is the code of then.
IMPORTED_SOURCES = sources_hash()


def cache_directory() -> Path | None:
    """Where compiled kernels are kept; None when ``FUSESTEP_CACHE_DIR`` is set but empty, or
    when there is no folder to keep them in.

    ``FUSESTEP_CACHE_DIR``, else ``NUMBA_CACHE_DIR/fusestep``, else the user's cache folder.
    """
    chosen = os.environ.get("FUSESTEP_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"]) / "fusestep"
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home folder, as containers have
        return None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "fusestep"


def cache_problem() -> str | None:
    """Why this process has had to do without the folder; None if it has not."""
    directory = cache_directory()
    return None if directory is None else _problems.get(directory)


def cache_entries() -> list[Path]:
    """The files of the cache, those of other versions included; none of a folder not trusted."""
    directory = cache_directory()
    if directory is None:
        return []
    try:
        with _opened(directory) as folder:
            return [directory / name for name in folder.entries()]
    except OSError:
        return []


def clear_cache() -> None:
    """Remove every entry, but for a folder not trusted; who has loaded one keeps running on it."""
    directory = cache_directory()
    if directory is None:
        return
    try:
        with _opened(directory) as folder:
            for name in folder.entries():
                with suppress(FileNotFoundError):  # another process clears it too
                    folder.remove(name)
    except FileNotFoundError:  # nothing has been kept yet
        return
    except OSError as error:
        _do_without(directory, error)


def fingerprint(function: Any) -> str:
    """Hash of a function's module, code, constants, closure and of every function it reaches.

    Reached are functions by a global name, as an attribute of a global module or from the
    closure; global numbers and strings count with their values. A user's own rule therefore
    misses the cache when it, or anything that it calls, has changed.
    """
    digest = hashlib.sha256()
    _feed_function(digest, function, set())
    return digest.hexdigest()


def _feed_function(digest: Any, function: Any, seen: set[int]) -> None:
    function = getattr(function, "py_func", function)
    if id(function) in seen:
        return
    seen.add(id(function))
    digest.update(f"{function.__module__} ".encode())
    feed_code(digest, function.__code__)
    for value in reached(function):
        if isinstance(value, types.FunctionType | _Dispatcher):
            _feed_function(digest, value, seen)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        elif isinstance(value, _CONSTANTS):
            digest.update(f"{type(value).__name__} {value!r}".encode())


def feed_code(digest: Any, code: types.CodeType) -> None:
    """Feed a digest with what a function does, and with its constants."""
    # Without line numbers: a function that has only moved within its file is the same.
    digest.update(code.co_code + repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            feed_code(digest, constant)
        else:
            digest.update(f"{type(constant).__name__} {constant!r}".encode())


def reached(function: types.FunctionType) -> list[Any]:
    """The values that ``function`` can reach by the names in its code; None for no global."""
    # In the order of the code, which a set would not keep: the digest depends on it.
    names = list(dict.fromkeys(_names(function.__code__)))
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    values += function.__defaults__ or ()
    # NumPy is no part of the text: its version is in the key.
    modules = [v for v in values if isinstance(v, types.ModuleType) and v is not np]
    for module in modules:  # grows by the modules that are attributes of modules
        members = [getattr(module, name, None) for name in names]
        values += members
        modules += [m for m in members if isinstance(m, types.ModuleType) and m not in modules]
    return values


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in the code of a function, and in that of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def load(identity: str) -> bytes | None:
    """The entry for ``identity`` and all else that decides machine code; None if there is none."""
    key = _key(identity)
    path = _path(key)
    return None if path is None else _load(path, key)


def save(identity: str, content: bytes) -> None:
    """Keep an entry for `load`; a folder that cannot be written is reported once."""
    key = _key(identity)
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _opened(path.parent) as folder:
            # If a file has changed since, which of both texts was compiled is not known.
            if sources_hash() == IMPORTED_SOURCES:
                _write(folder, path.name, key, content)
    except OSError as error:
        _do_without(path.parent, error)


def _key(identity: str) -> str:
    return "\n".join((identity, *_common_key()))


@cache
def _common_key() -> tuple[str, ...]:
    config = numba.config
    return (
        __name__,  # a rule's fingerprint has the names of modules, also those of this package
        repr(processor()),
        IMPORTED_SOURCES,
        f"numba {numba.__version__} llvmlite {llvmlite.__version__}",
        f"python {sys.version_info[:3]} {sys.implementation.cache_tag}",
        f"numpy {np.__version__}",
        # Settings of Numba by which it makes other machine code of the same sources.
        repr((config.OPT, config.BOUNDSCHECK, config.DEBUG_JIT)),
    )


@cache
def processor() -> dict[str, str]:
    """The processor that code is made for: this machine's, unless Numba is told of another one."""
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    return {
        "cpu": llvm.get_host_cpu_name() if name is None else name,
        "features": _host_features() if features is None else features,
    }


def _host_features() -> str:
    """The features of this CPU that Numba compiles for; it can be told to do without AVX."""
    features = llvm.get_host_cpu_features()
    if not numba.config.ENABLE_AVX:
        features.update({name: False for name in features if name.startswith("avx")})
    return str(features.flatten())


def _path(key: str) -> Path | None:
    directory = cache_directory()
    name = hashlib.sha256(key.encode()).hexdigest()
    return None if directory is None else directory / f"{name}{_SUFFIX}"


class _Folder(NamedTuple):
    """An open folder, whose files are named relative to ``handle``.

    So it stays the one that was checked when somebody who may write to a folder above it
    exchanges what its path leads to. Before the check such a person can choose among folders
    that pass it, which only this user has written; those above are therefore not checked.
    """

    path: Path
    handle: int | None  # None on Windows, where files have whole paths

    def entries(self) -> list[str]:
        """The names of the files with compiled code."""
        with os.scandir(self.path if self.handle is None else self.handle) as found:
            return sorted(
                entry.name
                for entry in found
                # Other files, which a user may have put there, are none of ours.
                if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False)
            )

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file itself, not of what a link points to; waits for no writer."""
        for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
            flags |= getattr(os, flag, 0)
        return os.open(self.named(name), flags, 0o600, dir_fd=self.handle)

    def rename(self, old: str, new: str) -> None:
        """Let ``new`` be the file that is ``old``."""
        names = self.named(old), self.named(new)
        os.replace(*names, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def remove(self, name: str) -> None:
        """Remove a file itself, not what a link points to."""
        os.unlink(self.named(name), dir_fd=self.handle)

    def named(self, name: str) -> str:
        """The path of a file in the folder, which the functions of `os` take with ``handle``."""
        return str(self.path / name) if self.handle is None else name


@contextmanager
def _opened(directory: Path) -> Iterator[_Folder]:
    """A folder that only this user can have written, for one use.

    It is not kept open: a daemon closes descriptors that it does not know, and their numbers
    come to mean something else. OSError: it cannot be opened, or others may write to it.
    """
    if not hasattr(os, "geteuid"):  # Windows, where a user's folders are that user's by default
        yield _Folder(directory, None)
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        distrust = _distrust(os.fstat(handle))
        if distrust:
            raise PermissionError(distrust)
        yield _Folder(directory, handle)
    finally:
        os.close(handle)


def _distrust(status: os.stat_result) -> str | None:
    """Why somebody else may have written what has this status, or None."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"its mode {mode:o} lets others put machine code there; chmod go-w mends that"
    return None


def _load(path: Path, key: str) -> bytes | None:
    """The payload of the entry for ``key``; a folder that cannot be used is reported once."""
    try:
        with _opened(path.parent) as folder:
            return _read(folder, path.name, key)
    except FileNotFoundError:  # nothing has been kept yet
        return None
    except OSError as error:
        _do_without(path.parent, error)
        return None


def _read(folder: _Folder, name: str, key: str) -> bytes | None:
    """The payload of an entry that is whole, ours and for exactly ``key``."""
    try:
        handle = folder.open(name, os.O_RDONLY)
    except OSError:  # there is none, or a link
        return None
    try:
        # The file that is open is judged, not its name, which may lead to another one by now.
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or _distrust(status):
            return None
        # Closed below, once, whatever the reading raises.
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
    except OSError:
        return None
    finally:
        os.close(handle)
    return unsealed(key, content)


def sealed(key: str, payload: bytes) -> bytes:
    """A payload behind its key and a digest of itself."""
    return _header(key, payload) + payload


def unsealed(key: str, content: bytes) -> bytes | None:
    """The payload that was `sealed` under this key; None if it was not, or has changed since."""
    payload = content[len(_header(key, b"")) :]
    return payload if content == sealed(key, payload) else None


def _header(key: str, payload: bytes) -> bytes:
    # The digest of the payload finds an entry that was cut short or changed, that of the key one
    # that was copied from elsewhere: a name alone would have to be believed.
    return _MAGIC + hashlib.sha256(key.encode()).digest() + hashlib.sha256(payload).digest()


def _write(folder: _Folder, name: str, key: str, payload: bytes) -> None:
    check_target("an entry of the cache", folder.named(name), folder.handle)
    temporary = f".new-{secrets.token_hex(8)}"
    # A new file under a name that nobody can guess, then renamed: readers see the old entry or the
    # new one, and one that others may have written is replaced, not written into.
    handle = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(key, payload))
        folder.rename(temporary, name)
    except BaseException:
        with suppress(FileNotFoundError):  # an interrupt right after it was renamed
            folder.remove(temporary)
        raise


def _do_without(directory: Path, error: OSError) -> None:
    if directory in _problems:
        return
    _problems[directory] = str(error)
    warnings.warn(
        f"fusestep cannot keep compiled kernels in {directory} ({error}); every process "
        "compiles them anew. Set FUSESTEP_CACHE_DIR to a folder that only you can write, or to "
        "nothing to do without.",
        RuntimeWarning,
        stacklevel=2,
    )
