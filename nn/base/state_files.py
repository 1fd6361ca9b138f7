"""States where the user wants them: made by a function, such as one that maps files."""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ...kernels.files import check_target
from ...ops.runtime.errors import reject
from .checkpoint import CODES, new_file
from .file_set import SCALARS, FileSet, carefully, set_of

StateMaker = Callable[[str, tuple[int, ...], np.dtype[Any], Any], np.ndarray]
"""``make(name, shape, dtype, initial)``: the array of a state, which begins with a number or with
the numbers of an array, ``initial``, or goes on where it ended."""

_maker: ContextVar[StateMaker | None] = ContextVar("maker of states", default=None)
_PAGE = 4_096
_WHERE = "MappedFiles"


@contextmanager
def states_in(make: StateMaker) -> Iterator[None]:
    """Have a function make the states of all optimizers that are made in this context.

    Optimizers of `fusestep.nn` and `fusestep.nn.torch` on the host ask it for each of their arrays:
    states, counts and other numbers that a resumed run needs. Those of `nn.torch` ask at the first
    gradient of a parameter, also after the context.

    Args:
        make: ``make(name, shape, dtype, initial) -> array``. The name is that in checkpoints, such
            as ``moment1.table`` (in `nn.torch` ``exp_avg.parameter 0``). The array is of NumPy,
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


class MappedFiles:
    """Files of a folder that states are mapped to, one for each; for `states_in`.

    Nothing is read or written but the pages that steps touch. A file that is there already is taken
    over as it is: an optimizer that is made anew on the same parameters goes on where the last one
    ended, counts of updates included. Each is a safetensors file of one array.

    The room on the disk is reserved when a file is made, where the system can
    (``posix_fallocate``), so that a full disk raises there. Pages go to the disk when the system
    writes them: after a crash of the process everything is there that a step has written, after one
    of the machine any part. One optimizer at a time uses a folder.

    Args:
        folder: made if it is not there.
        fill: write states of more than a page that begin with another number than 0, or with the
            weight (``accum`` of Adagrad and FTRL, masters); False: they raise.
        reads_ahead: let the system read and map pages around those that a step touches: for dense
            gradients, which touch all. False, for rows that lie far apart: no page but theirs.

    Raises:
        OSError: the folder or a file cannot be made, or the disk has no room.
        ValueError: a file is torn or of another state; or ``fill`` would be needed.

    >>> import tempfile
    >>> import fusestep
    >>> import numpy as np
    >>> from fusestep import nn
    >>> table, folder = np.zeros((1000, 8), np.float32), tempfile.mkdtemp()
    >>> for _ in range(2):
    ...     with fusestep.states_in(fusestep.MappedFiles(folder)):
    ...         opt = nn.LazyAdam([table])
    ...     _ = opt((nn.RowTensor(np.array([3]), np.ones((1, 8), np.float32), (1000, 8)),))
    >>> opt.global_step.tolist()
    [2]
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, fill: bool = False, reads_ahead: bool = False
    ) -> None:
        self.folder, self.fill, self.reads_ahead = Path(folder), fill, reads_ahead
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun: weakref.WeakSet[FileSet] = weakref.WeakSet()  # of optimizers to be complete

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
            if hasattr(os, "posix_fallocate"):
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
