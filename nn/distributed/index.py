"""The index of a checkpoint of many processes, and the parts that it speaks of.

``index.json`` has the digest of each part, of the whole file, and says of each array what it is
and in which parts it lies. It has a digest of itself, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ...ops.runtime.errors import reject
from ..base.arguments import is_int
from ..base.checkpoint import CODES
from .communicator import as_bytes
from .shard import ORDERS, places, stretch

FORMAT = "fusestep.distributed 3"
INDEX = "index.json"
_WITHOUT_DIGESTS = "fusestep.distributed 1"  # as version 0.1.1 wrote it
_OLD = _WITHOUT_DIGESTS, "fusestep.distributed 2"
_WHERE = "load_checkpoint"


def part_name(rank: int, size: int, token: str) -> str:
    """The file of one of ``size`` processes; the token is that of the checkpoint."""
    return f"part-{rank:05}-of-{size:05}-{token}.safetensors"


def checksum(array: np.ndarray) -> int:
    """The crc32 of the elements of an array."""
    return zlib.crc32(as_bytes(np.ascontiguousarray(array)).data)


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
            the part that has all of it, or the ``order`` of rows that lie in all parts. Indices
            of older versions have a ``crc32`` beside a rank.
        digest: two indices that differ have different ones.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        content, self.digest = _read(path)
        self.arrays: dict[str, dict[str, Any]] = content["arrays"]
        self._parts = [(path / name, digest) for name, digest in content["parts"].items()]

    def check_parts(self, first: int, step: int) -> None:
        """Read some parts from end to end: whether they are those of this index.

        Raises:
            OSError: one is missing, or cannot be read.
            ValueError: one is damaged, or holds other arrays.
        """
        for rank in range(first, len(self._parts), step):
            self._check_part(rank, *self._parts[rank])

    def _check_part(self, rank: int, file: Path, digest: str | None) -> None:
        part = f"part {file.name!r}"
        _check_regular(part, file)
        if digest is not None and (got := file_digest(file)) != digest:
            reject(ValueError, _WHERE, part, "is damaged", f"sha256 {digest}", got)
        expected, found = self._arrays_of(rank), _arrays_in(part, file)
        for name in sorted(expected.keys() | found.keys()):
            form, own_form = (arrays.get(name, "no such array") for arrays in (expected, found))
            if form != own_form:
                what, wrong = f"{part}: array {name!r}", "is not the one of the index"
                reject(ValueError, _WHERE, what, wrong, form, own_form)
            crc32 = self.arrays[name].get("crc32")
            if crc32 is not None and (own_crc32 := checksum(self._whole(name))) != crc32:
                what = f"{part}: array {name!r}"
                reject(ValueError, _WHERE, what, "is damaged", f"crc32 {crc32}", own_crc32)

    def _arrays_of(self, rank: int) -> dict[str, Any]:
        """Dtype and shape of the arrays of a part, as its header has to have them."""
        found = {}
        for name, form in self.arrays.items():
            shape = form["shape"]
            if "order" in form:
                height = stretch(shape[0], len(self._parts))
                shape = [max(0, min(shape[0] - rank * height, height)), *shape[1:]]
            if form.get("rank", rank) == rank:
                found[name] = (CODES[form["dtype"]], shape)
        return found

    def read(self, name: str, ids: np.ndarray | None, out: np.ndarray) -> None:
        """Read an array, or the rows of these numbers, out of the parts that have it."""
        form = self.arrays[name]
        if "rank" in form:
            found = self._whole(name)
            out[...] = found if ids is None else found[ids]
            return
        rows = form["shape"][0]
        at = places(np.arange(rows) if ids is None else ids, rows, form["order"])
        height = stretch(rows, len(self._parts))
        part_of = at // height
        for rank in np.unique(part_of).tolist():
            own = np.flatnonzero(part_of == rank)
            local = at[own] - rank * height
            first, last = int(local.min()), int(local.max()) + 1
            with safe_open(self._parts[rank][0], framework="np") as part:
                out[own] = part.get_slice(name)[first:last][local - first]

    def _whole(self, name: str) -> np.ndarray:
        """An array that one part has."""
        file, _ = self._parts[self.arrays[name]["rank"]]
        with safe_open(file, framework="np") as part:
            found: np.ndarray = part.get_tensor(name)
        return found


def _arrays_in(part: str, file: Path) -> dict[str, Any]:
    """Dtype and shape of the arrays of a part; safetensors checks that they fill the file."""
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    except SafetensorError as error:
        reject(ValueError, _WHERE, part, "is damaged", "a whole file", error)


def _check_regular(what: str, file: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe would be waited for."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        reject(ValueError, _WHERE, what, "is no file", "a file, or a link to one", file)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The content of an index, parts with their digests (None: it has none), and its own digest."""
    file = path / INDEX
    _check_regular(INDEX, file)
    try:
        content = json.loads(file.read_bytes())
        found, said = content.get("format"), content.pop("sha256", None)
        digest = _digest(content)
    except (ValueError, AttributeError, RecursionError) as error:
        expected, got = f"JSON with a format in {path}", f"{type(error).__name__}: {error}"
        reject(ValueError, _WHERE, INDEX, "is no index of a checkpoint", expected, got)
    if found not in (FORMAT, *_OLD):
        reject(ValueError, _WHERE, INDEX, "has another format", f"{FORMAT} in {path}", found)
    if said != (None if found == _WITHOUT_DIGESTS else digest):
        reject(ValueError, _WHERE, INDEX, "is damaged", f"sha256 {said} in {path}", digest)
    parts = content.get("parts")
    if found in _OLD and isinstance(parts, list):
        content["parts"] = {str(name): None for name in parts}
    if not _is_index(content):
        expected = f"the parts of a checkpoint and its arrays in {path}"
        reject(ValueError, _WHERE, INDEX, "does not fit together", expected, list(content))
    return content, digest


def _is_index(content: dict[str, Any]) -> bool:
    """Whether an index says what `save_checkpoint` could have said."""
    digest = type(None) if content["format"] in _OLD else str
    match content:
        case {"parts": dict(parts), "arrays": dict(arrays)}:
            size = len(parts)
            names = [part_name(rank, size, "[0-9a-f]{16}") for rank in range(size)]
            are_parts = all(map(re.fullmatch, names, parts)) and size > 0
            are_digests = all(isinstance(said, digest) for said in parts.values())
            return are_parts and are_digests and all(_is_form(a, size) for a in arrays.values())
    return False


def _is_form(form: Any, size: int) -> bool:
    """Whether an array of a checkpoint of ``size`` parts can be described so."""
    match form:
        case {"dtype": str(dtype), "shape": [*shape], "rank": rank}:
            is_placed = is_int(rank) and 0 <= rank < size
        case {"dtype": str(dtype), "shape": [_, *_] as shape, "order": order}:
            is_placed = order in ORDERS
        case _:
            return False
    return is_placed and dtype in CODES and all(is_int(n) and n >= 0 for n in shape)
