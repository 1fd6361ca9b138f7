"""The index of a checkpoint of many processes, and the parts that it speaks of.

``index.json`` has the SHA-256 of each part and says of each array what it is and in which parts it
lies. It has a SHA-256 of itself, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ...ops.runtime.errors import reject
from ..base.arguments import is_int
from ..base.checkpoint import CODES
from .shard import ORDERS, places, span_height

FORMAT = "fusestep.distributed 3"
INDEX = "index.json"
_WHERE = "load_checkpoint"


def part_name(rank: int, size: int, token: str) -> str:
    """The file of one of ``size`` processes; the token is that of the checkpoint."""
    return f"part-{rank:05}-of-{size:05}-{token}.safetensors"


def file_digest(file: Path) -> str:
    """The SHA-256 of the content of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def index_of(parts: dict[str, str], arrays: dict[str, Any]) -> bytes:
    """The index of parts with their digests, and of arrays, each with its description."""
    content = {"format": FORMAT, "parts": parts, "arrays": arrays}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Index:
    """The content of the index of a folder, once it is found to be whole.

    Attributes:
        arrays: by name, the description of each array: ``dtype`` and ``shape``, and the ``rank`` of
            the part that has all of it, or the ``order`` of rows that lie in all parts.
        digest: two indices that differ have different ones.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another format.
    """

    def __init__(self, path: Path) -> None:
        content, self.digest = _read(path)
        self.arrays: dict[str, dict[str, Any]] = content["arrays"]
        self._parts = [(path / name, digest) for name, digest in content["parts"].items()]

    def check_parts(self, first: int, step: int) -> None:
        """Read some parts from end to end: whether they are those of this index.

        Raises:
            OSError: one is missing, or cannot be read.
            ValueError: one is damaged, or of another checkpoint.
        """
        for file, digest in self._parts[first::step]:
            part = f"part {file.name!r}"
            _check_regular(part, file)
            if (got := file_digest(file)) != digest:
                reject(ValueError, _WHERE, part, "is damaged", f"sha256 {digest}", got)

    def read(self, name: str, ids: np.ndarray | None, out: np.ndarray) -> None:
        """Read an array, or the rows of these numbers, out of the parts that have it.

        Raises:
            OSError: a part cannot be read.
            ValueError: a part has no such array.
        """
        layout = self.arrays[name]
        if "rank" in layout:
            with self._opened(layout["rank"]) as part:
                array = part.get_tensor(name)
            out[...] = array if ids is None else array[ids]
            return
        rows = layout["shape"][0]
        positions = places(np.arange(rows) if ids is None else ids, rows, layout["order"])
        height = span_height(rows, len(self._parts))
        part_of = positions // height
        for rank in np.unique(part_of).tolist():
            indices = np.flatnonzero(part_of == rank)
            local = positions[indices] - rank * height
            first, last = int(local.min()), int(local.max()) + 1
            with self._opened(rank) as part:
                out[indices] = part.get_slice(name)[first:last][local - first]

    @contextmanager
    def _opened(self, rank: int) -> Iterator[Any]:
        """Open a part; an array that it has not is the error of an index that was sealed anew."""
        file, _ = self._parts[rank]
        try:
            with safe_open(file, framework="np") as part:
                yield part
        except SafetensorError as error:
            what, wrong = f"part {file.name!r}", "does not fit the index"
            reject(ValueError, _WHERE, what, wrong, "the arrays that it names", error)


def _check_regular(what: str, file: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe would be waited for."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        reject(ValueError, _WHERE, what, "is no file", "a file, or a link to one", file)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The content of an index, and its own digest."""
    file = path / INDEX
    _check_regular(INDEX, file)
    try:
        content = json.loads(file.read_bytes())
        stated, said = content.get("format"), content.pop("sha256", None)
        digest = _digest(content)
    except (ValueError, AttributeError, RecursionError) as error:
        expected, got = f"JSON with a format in {path}", f"{type(error).__name__}: {error}"
        reject(ValueError, _WHERE, INDEX, "is no index of a checkpoint", expected, got)
    if stated != FORMAT:
        reject(ValueError, _WHERE, INDEX, "has another format", f"{FORMAT} in {path}", stated)
    if said != digest:
        reject(ValueError, _WHERE, INDEX, "is damaged", f"sha256 {said} in {path}", digest)
    if not _is_index(content):
        expected = f"the parts of a checkpoint and its arrays in {path}"
        reject(ValueError, _WHERE, INDEX, "does not fit together", expected, list(content))
    return content, digest


def _is_index(content: dict[str, Any]) -> bool:
    """Whether an index says what `save_checkpoint` could have said."""
    match content:
        case {"parts": dict(parts), "arrays": dict(arrays)}:
            size = len(parts)
            names = [part_name(rank, size, "[0-9a-f]{16}") for rank in range(size)]
            are_parts = all(map(re.fullmatch, names, parts)) and size > 0
            return are_parts and all(_is_layout(a, size) for a in arrays.values())
    return False


def _is_layout(layout: Any, size: int) -> bool:
    """Whether an array of a checkpoint of ``size`` parts can be described so."""
    match layout:
        case {"dtype": str(dtype), "shape": [*shape], "rank": rank}:
            is_placed = is_int(rank) and 0 <= rank < size
        case {"dtype": str(dtype), "shape": [_, *_] as shape, "order": order}:
            is_placed = order in ORDERS
        case _:
            return False
    return is_placed and dtype in CODES and all(is_int(n) and n >= 0 for n in shape)
