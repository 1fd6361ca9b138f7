"""MappedFiles: a file for each state, of which only the pages are read that steps touch."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from ...kernels.files import check_target
from ...ops.runtime.errors import reject
from .checkpoint import CODES, new_file

SCALARS = "idle_scalars"
"""The name of the scalars of the last steps in checkpoints and files."""
_PAGE = 4_096
_WHERE = "MappedFiles"
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_HEAD = re.compile(
    rb'.{8}{"__metadata__": {"format": "fusestep"(?:, "set": "(\w+)")?}, ("(?:[^"\\]|\\.)*"): ',
    re.DOTALL,
)


class MappedFiles:
    """Files of a folder that states are mapped to, one for each; for `states_in`.

    Nothing is read or written but the pages that steps touch. An optimizer that is made anew on the
    same parameters goes on where the last one ended, counts of updates and rows that sleep
    included. It takes over all files or none: ``manifest.json`` tells which belong together, and to
    what optimizer. Each is a safetensors file of one array.

    Pages go to the disk when the system writes them: after a crash of the process everything is
    there that a step has written, after one of the machine any part. One optimizer at a time has a
    folder, which is free again when that is deleted or its process has ended.

    Args:
        folder: made if it is not there.
        fill: write states of more than a page that begin with another number than 0, or with the
            weight (``accum`` of Adagrad and FTRL, masters); False: they raise.
        reads_ahead: let the system read and map pages around those that a step touches: for dense
            gradients, which touch all. False, for rows that lie far apart: no page but theirs.
        reserve: take all room on the disk when a file is made, where the system can
            (``posix_fallocate``), so that a full disk raises there. False: a file takes room for
            the pages that steps touch; a full disk ends the process by SIGBUS in a step.

    Raises:
        OSError: the folder or a file cannot be made, the disk has no room, or a link, a pipe or a
            device stands in the place of a file.
        ValueError: files are missing, torn, or of another optimizer, a value in them cannot be, or
            ``fill`` would be needed. Nothing was taken over then.
        RuntimeError: an optimizer that is alive has the folder.

    >>> import tempfile
    >>> import fusestep
    >>> import numpy as np
    >>> from fusestep import nn
    >>> table, folder = np.zeros((1000, 8), np.float32), tempfile.mkdtemp()
    >>> for _ in range(2):
    ...     with fusestep.states_in(fusestep.MappedFiles(folder)):
    ...         opt = nn.LazyAdam([table])
    ...     _ = opt((nn.RowTensor(np.array([3]), np.ones((1, 8), np.float32), (1000, 8)),))
    ...     steps = opt.global_step.tolist()
    ...     del opt
    >>> steps
    [2]
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, fill: bool = False, reads_ahead: bool = False,
        reserve: bool = True,
    ) -> None:  # fmt: skip
        self.folder, self.fill, self.reads_ahead = Path(folder), fill, reads_ahead
        self.reserve = reserve
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun: weakref.WeakSet[Any] = weakref.WeakSet()  # of optimizers to be complete

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], initial: Any
    ) -> np.ndarray:
        """The mapped array of a state by itself, for a function of your own; see `states_in`."""
        is_there = check_target(_WHERE, self._file(name), follows=False) is not None
        return self.take(name, shape, dtype) if is_there else self.make(name, shape, dtype, initial)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], of: str | None = None
    ) -> np.ndarray:
        """The mapped array of a state that is there, of a set of files."""
        file, begin = self._file(name), self._head(name, shape, dtype, of)
        if check_target(_WHERE, file, follows=False) is None:
            reject(ValueError, _WHERE, f"state {name!r}", "is missing", str(file), "none")
        with open(file, "r+b", opener=carefully) as opened:
            size = len(begin) + math.prod(shape) * dtype.itemsize
            if opened.read(len(begin)) != begin or os.fstat(opened.fileno()).st_size != size:
                label, expected = f"state {name!r}", f"{dtype} {shape}, {size} bytes"
                reject(ValueError, _WHERE, label, "is torn or another one", expected, str(file))
            return self._mapped(opened, shape, dtype, len(begin))

    def make(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], initial: Any,
        of: str | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The mapped array of a new file, in the place of an older one of the set."""
        file, begin = self._file(name), self._head(name, shape, dtype, of)
        n_bytes, label = math.prod(shape) * dtype.itemsize, f"state {name!r}"
        is_there = check_target(_WHERE, file, follows=False) is not None
        if is_there and set_of(file) != of:
            expected = "a file of the optimizer"
            reject(ValueError, _WHERE, label, "is torn or another one", expected, str(file))
        is_large = dtype.kind not in "iu" and n_bytes > _PAGE and not name.startswith(SCALARS)
        if np.any(initial) and is_large and not self.fill:
            expected = "MappedFiles(folder, fill=True), which writes all of it"
            got = "a copy of the weight" if isinstance(initial, np.ndarray) else initial
            reject(ValueError, _WHERE, label, "does not begin at 0", expected, got)
        with new_file(file, _WHERE) as opened:
            opened.write(begin)
            opened.flush()
            if self.reserve and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, len(begin) + n_bytes)
            opened.truncate(len(begin) + n_bytes)
        with open(file, "r+b", opener=carefully) as opened:
            array = self._mapped(opened, shape, dtype, len(begin))
        if np.any(initial):
            array[...] = initial
        return array

    def _file(self, name: str) -> Path:
        return self.folder / f"{quote(name, safe=' ')}.safetensors"

    @staticmethod
    def _head(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], of: str | None) -> bytes:
        """The head of a file: of safetensors, up to the end of a page."""
        if dtype.name not in CODES:
            expected = ", ".join(CODES)
            reject(TypeError, _WHERE, f"state {name!r}", "has a wrong dtype", expected, dtype)
        n_bytes, about = math.prod(shape) * dtype.itemsize, {"format": "fusestep"}
        tensor = {"dtype": CODES[dtype.name], "shape": [*shape], "data_offsets": [0, n_bytes]}
        about |= {} if of is None else {"set": of}
        text = json.dumps({"__metadata__": about, name: tensor}).encode()
        text = text.ljust(-(-(len(text) + 8) // _PAGE) * _PAGE - 8)
        return len(text).to_bytes(8, "little") + text

    def _mapped(
        self, opened: Any, shape: tuple[int, ...], dtype: np.dtype[Any], begin: int
    ) -> np.ndarray:
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        memory = mmap.mmap(opened.fileno(), 0)
        if not self.reads_ahead and hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)
        return np.ndarray(shape, dtype, memory, begin)


def carefully(path: str, flags: int) -> int:
    """An opener of `open` that neither follows a link nor waits for a pipe."""
    return os.open(path, flags | _CAREFUL, 0o666)


def set_of(path: Path) -> str | None:
    """The set of a file of states, None for an older version's; "": it is no such file."""
    with suppress(OSError), open(path, "rb", opener=carefully) as opened:
        head = _HEAD.match(opened.read(1 << 16) or b"")  # None: a pipe
        if head and json.loads(head[2]) == unquote(path.stem):
            return head[1].decode() if head[1] else None
    return ""
