"""The index of a checkpoint of many processes, and the parts that it speaks of.

``index.json`` says of each array what it is and in which parts it lies. It has a digest of itself
and of the header of every part, and a checksum of each array that one part holds whole; rows that
several parts hold have none. What is read here is checked against all of that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
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

FORMAT = "fusestep.distributed 2"
INDEX = "index.json"
_WITHOUT_DIGESTS = "fusestep.distributed 1"  # as version 0.1.1 wrote it
_WHERE = "load_checkpoint"
_TOKEN = re.compile("[0-9a-f]{16}")


def new_token() -> str:
    """A token that tells the parts of one checkpoint from those of another."""
    return secrets.token_hex(8)


def part_names(token: str, size: int) -> list[str]:
    """The files of a checkpoint of ``size`` processes."""
    return [f"part-{rank:05}-of-{size:05}-{token}.safetensors" for rank in range(size)]


def checksum(array: np.ndarray) -> int:
    """The crc32 of the elements of an array."""
    return zlib.crc32(as_bytes(np.ascontiguousarray(array)).data)


def index_of(path: Path, token: str, size: int, arrays: dict[str, Any]) -> bytes:
    """The index of parts that are all written; ``arrays`` describes each array."""
    names = part_names(token, size)
    content = {
        "format": FORMAT,
        "checkpoint": token,
        "parts": names,
        "headers": [_header_digest(path / name) for name in names],
        "arrays": arrays,
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _header_digest(file: Path) -> str:
    """The digest of the header of a safetensors file: its length, and that many bytes."""
    with open(file, "rb") as content:
        length = content.read(8)
        header = content.read(int.from_bytes(length, "little"))
    return hashlib.sha256(length + header).hexdigest()


class Index:
    """The content of the index of a folder, once it is found to be whole.

    Attributes:
        arrays: by name, the description of each array: ``dtype`` and ``shape``, and ``rank`` and
            ``crc32`` where one part has all of it, or ``order`` and ``height`` of the stretches of
            rows that the parts have.
        digest: two indices that differ have different ones.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        content, self.digest = _read(path)
        self._token, self._format = content["checkpoint"], content["format"]
        self._parts = [path / name for name in content["parts"]]
        self._headers: list[str] | None = content.get("headers")
        self.arrays: dict[str, dict[str, Any]] = content["arrays"]

    def check_parts(self) -> None:
        """Whether the headers of all parts are those that belong to this index.

        Raises:
            OSError: a part is missing, or cannot be read.
            ValueError: one is damaged, of another checkpoint, or holds other arrays.
        """
        for rank, file in enumerate(self._parts):
            part = f"part {file.name!r}"
            metadata, found = _header(part, file)
            identity = tuple(metadata.get(key) for key in ("format", "checkpoint"))
            if identity != (self._format, self._token):
                expected = f"{self._format}, {self._token}"
                reject(ValueError, _WHERE, part, "is of another checkpoint", expected, identity)
            expected_arrays = self._arrays_of(rank)
            for name in sorted(expected_arrays.keys() | found.keys()):
                form, own_form = (a.get(name, "no such array") for a in (expected_arrays, found))
                if form != own_form:
                    what, wrong = f"{part}: array {name!r}", "is not the one of the index"
                    reject(ValueError, _WHERE, what, wrong, form, own_form)
            if self._headers is not None and _header_digest(file) != self._headers[rank]:
                wrong, expected = "has another header", f"sha256 {self._headers[rank]}"
                reject(ValueError, _WHERE, part, wrong, expected, _header_digest(file))

    def _arrays_of(self, rank: int) -> dict[str, Any]:
        """Dtype and shape of the arrays of a part, as its header has to have them."""
        found = {}
        for name, form in self.arrays.items():
            shape = form["shape"]
            if "height" in form:
                left = shape[0] - rank * form["height"]
                shape = [max(0, min(left, form["height"])), *shape[1:]]
            if form.get("rank", rank) == rank:
                found[name] = (CODES[form["dtype"]], shape)
        return found

    def is_whole(self, name: str) -> bool:
        """Whether one part has all of an array."""
        return "rank" in self.arrays[name]

    def whole(self, name: str) -> np.ndarray:
        """An array that one part has.

        Raises:
            ValueError: it is damaged.
        """
        form = self.arrays[name]
        file = self._parts[form["rank"]]
        with safe_open(file, framework="np") as part:
            found: np.ndarray = part.get_tensor(name)
        if (got := checksum(found)) != form["crc32"]:
            what = f"part {file.name!r}: array {name!r}"
            reject(ValueError, _WHERE, what, "is damaged", f"crc32 {form['crc32']}", got)
        return found

    def read_rows(self, name: str, ids: np.ndarray, out: np.ndarray) -> None:
        """Rows by their numbers, out of the parts that have them."""
        form = self.arrays[name]
        at, height = places(ids, form["shape"][0], form["order"]), form["height"]
        part_of = at // height
        for rank in np.unique(part_of).tolist():
            own = np.flatnonzero(part_of == rank)
            local = at[own] - rank * height
            with safe_open(self._parts[rank], framework="np") as part:
                first, last = int(local.min()), int(local.max()) + 1
                rows = part.get_slice(name)[first:last]
            out[own] = rows[local - first]


def _header(part: str, file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata, and dtype and shape of each array; safetensors checks that they fill the file."""
    _check_regular(part, file)
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            forms = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            return opened.metadata() or {}, forms
    except SafetensorError as error:
        reject(ValueError, _WHERE, part, "is damaged", "a whole file", error)


def _check_regular(what: str, file: Path) -> None:
    """Refuse what is no file, before it is opened: a pipe would be waited for."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        reject(ValueError, _WHERE, what, "is no file", "a file, or a link to one", file)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The content of an index, without its digest, and a digest."""
    file = path / INDEX
    _check_regular(INDEX, file)
    try:
        content = json.loads(file.read_bytes())
        found = content.get("format")
        said = content.pop("sha256", None)
        digest = _digest(content)
    except (ValueError, AttributeError, RecursionError) as error:
        expected, got = f"JSON with a format in {path}", f"{type(error).__name__}: {error}"
        reject(ValueError, _WHERE, INDEX, "is no index of a checkpoint", expected, got)
    if found not in (FORMAT, _WITHOUT_DIGESTS):
        reject(ValueError, _WHERE, INDEX, "has another format", f"{FORMAT} in {path}", found)
    if said != (digest if found == FORMAT else None):
        reject(ValueError, _WHERE, INDEX, "is damaged", f"sha256 {said} in {path}", digest)
    _check_content(path, content)
    return content, digest


def _check_content(path: Path, content: dict[str, Any]) -> None:
    """Whether what an index says is what `save_checkpoint` could have said."""
    match content:
        case {"checkpoint": str(token), "parts": [*parts], "arrays": dict(arrays), **more}:
            others = {"format", "headers"} if content["format"] == FORMAT else {"format"}
            headers = more.get("headers", parts)
            is_index = bool(_TOKEN.fullmatch(token)) and more.keys() == others
            is_index = is_index and len(parts) > 0 and parts == part_names(token, len(parts))
            is_index = is_index and isinstance(headers, list) and len(headers) == len(parts)
        case _:
            is_index = False
    if not is_index:
        expected = f"checkpoint, its parts, their headers and arrays in {path}"
        reject(ValueError, _WHERE, INDEX, "does not fit together", expected, list(content))
    for name, form in arrays.items():
        if not _is_form(form, len(parts)):
            what = f"{INDEX}: array {name!r}"
            expected = f"dtype, shape, and rank or order in {len(parts)} parts"
            reject(ValueError, _WHERE, what, "cannot be", expected, form)


def _is_form(form: Any, size: int) -> bool:
    """Whether an array of a checkpoint of ``size`` parts can be described so."""
    match form:
        case {"dtype": dtype, "shape": [*shape], "rank": rank, "crc32": crc32, **more}:
            is_placed = is_int(rank) and 0 <= rank < size and is_int(crc32)
        case {
            "dtype": dtype,
            "shape": [rows, *_] as shape,
            "order": order,
            "height": height,
            **more,
        }:
            is_placed = is_int(rows) and is_int(height) and height == stretch(rows, size)
            is_placed = is_placed and order in ORDERS
        case _:
            return False
    are_sizes = all(is_int(n) and n >= 0 for n in shape)
    return is_placed and are_sizes and not more and isinstance(dtype, str) and dtype in CODES
