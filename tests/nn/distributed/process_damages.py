"""Damages of a folder that holds a checkpoint of several processes, one at random each time."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "index.json"
VALUES: tuple[Any, ...] = (
    float("nan"), float("inf"), -1, 0, 1, 3, 10**30, 2**63, -(2**63), 1.0, 0.5, "0", "1", "", "..",
    "range", "hash", "float64", True, False, None, [], {}, [1], {"a": 1}, [[]],
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16", "I8", "U8", "BOOL", "I32", "I64", "F8_E4M3", "C64", "X")


def parts_of(path: Path) -> list[Path]:
    return sorted(path.glob("part-*"))


# The index


def sealed(index: dict[str, Any]) -> dict[str, Any]:
    """With the digest that belongs to it, as one who means it would write it."""
    if "sha256" in index:
        content = {name: value for name, value in index.items() if name != "sha256"}
        text = json.dumps(content, sort_keys=True)
        index["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return index


def edit_index(path: Path, change: Callable[[Any], Any], *, seals: bool = False) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(sealed(index) if seals else index))


def _place(rng: random.Random, content: Any) -> tuple[Any, Any]:
    """A container within, and a key of it: near the root as likely as far from it."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = rng.choice(keys)
        if not isinstance(content[key], dict | list) or not content[key] or rng.random() < 0.2:
            return content, key
        content = content[key]


def a_value(rng: random.Random, path: Path) -> None:
    """Any value in the place of any other."""

    def change(index: Any) -> None:
        inside, key = _place(rng, index)
        inside[key] = rng.choice([v for v in VALUES if repr(v) != repr(inside[key])])

    edit_index(path, change)


def a_lost_entry(rng: random.Random, path: Path) -> None:
    def change(index: Any) -> None:
        inside, key = _place(rng, index)
        del inside[key]

    edit_index(path, change)


def a_renamed_entry(rng: random.Random, path: Path) -> None:
    def change(index: Any) -> None:
        inside = rng.choice([index, index["arrays"], rng.choice(list(index["arrays"].values()))])
        name = rng.choice(list(inside))
        inside[name + "x"] = inside.pop(name)

    edit_index(path, change)


def exchanged_entries(rng: random.Random, path: Path) -> None:
    def change(index: Any) -> None:
        arrays = index["arrays"]
        one, other = rng.sample(
            [n for n in arrays if any(arrays[n] != form for form in arrays.values())], 2
        )
        arrays[one], arrays[other] = arrays[other], arrays[one]

    edit_index(path, change)


def a_key_twice(rng: random.Random, path: Path) -> None:
    """Of two values for one key readers take the last one."""
    index = json.loads((path / INDEX).read_text())
    name = rng.choice(list(index["arrays"]))
    form = index["arrays"][name]
    field = rng.choice(list(form))
    text, value = json.dumps(form), json.dumps(rng.choice(VALUES))
    twice = f'{text[:-1]}, "{field}": {value}}}'
    (path / INDEX).write_text(json.dumps(index).replace(f'"{name}": {text}', f'"{name}": {twice}'))


def brackets(rng: random.Random, path: Path) -> None:
    n, (a, b) = rng.choice([(1, "[]"), (100_000, "[]"), (30_000, ('{"a":', "}"))])
    (path / INDEX).write_text(a * n + "1" + b * n)


def a_long_number(rng: random.Random, path: Path) -> None:
    digits = rng.choice([20, 400, 5000])
    text = (path / INDEX).read_text()
    (path / INDEX).write_text(text.replace('"rank": 0', '"rank": ' + "1" * digits, 1))


# A part


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_part(file: Path, header: dict[str, Any] | str, data: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, data = header_of(file)
    change(header)
    write_part(file, header, data)


def _a_part(rng: random.Random, path: Path) -> Path:
    """One that holds arrays; rows may be fewer than processes."""
    return rng.choice([p for p in parts_of(path) if header_of(p)[0].keys() > {"__metadata__"}])


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def a_field(rng: random.Random, path: Path) -> None:
    """Dtype, shape or offsets of an array."""

    def change(header: dict[str, Any]) -> None:
        entry = header[rng.choice(_names(header))]
        begin, end = entry["data_offsets"]
        shape = entry["shape"]
        before = json.dumps(entry)
        while json.dumps(entry) == before:
            entry["dtype"], entry["shape"], entry["data_offsets"] = rng.choice([
                (rng.choice(DTYPES), shape, [begin, end]),
                (entry["dtype"], rng.choice([shape[::-1], shape[1:], [1, *shape], [-1], [2**63]]),
                    [begin, end]),
                (entry["dtype"], shape, rng.choice([
                    [end, begin], [begin + 1, end + 1], [begin, end - 1], [0, end - begin],
                    [begin, 2**64], [-1, end], [float(begin), end],
                ])),
            ])  # fmt: skip

    edit_header(_a_part(rng, path), change)


def exchanged_arrays(rng: random.Random, path: Path) -> None:
    """Two arrays under the names of each other: the same bytes, to the last one."""

    def change(header: dict[str, Any]) -> None:
        names = _names(header)
        if len(names) > 1:
            one, other = rng.sample(names, 2)
            header[one], header[other] = header[other], header[one]

    edit_header(_a_part(rng, path), change)


def a_renamed_array(rng: random.Random, path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        name = rng.choice(_names(header))
        header[rng.choice(["", "x", name + " "])] = header.pop(name)

    edit_header(_a_part(rng, path), change)


def an_array_twice(rng: random.Random, path: Path) -> None:
    file = _a_part(rng, path)
    header, data = header_of(file)
    one, other = rng.choice(_names(header)), rng.choice(_names(header))
    text = f'{json.dumps(header)[:-1]}, "{one}": {json.dumps(header[other])}}}'
    write_part(file, text, data)


def other_metadata(rng: random.Random, path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        metadata = header["__metadata__"]
        metadata[rng.choice([*metadata, "x"])] = rng.choice(
            ["", "0", "1", "fusestep.distributed 1"]
        )

    edit_header(rng.choice(parts_of(path)), change)


def a_length(rng: random.Random, path: Path) -> None:
    file = rng.choice(parts_of(path))
    length = rng.choice([0, 1, 2**63, 2**64 - 1, 100_000_001, file.stat().st_size - 8])
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


# Files


def _a_file(rng: random.Random, path: Path) -> Path:
    return rng.choice([path / INDEX, *parts_of(path)])


def flipped_bytes(rng: random.Random, path: Path) -> None:
    """One byte or a few, not those of rows, which have no checksum."""
    file = _a_file(rng, path)
    content, kept = bytearray(file.read_bytes()), _rows_in(file)
    places = [k for k in range(len(content)) if not any(k in span for span in kept)]
    for k in rng.sample(places, min(len(places), rng.choice([1, 1, 1, 4]))):
        content[k] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
    file.write_bytes(content)


def _rows_in(file: Path) -> list[range]:
    """Where the rows of tables lie in a file."""
    if file.name == INDEX:
        return []
    arrays = json.loads(file.with_name(INDEX).read_text())["arrays"]
    header, data = header_of(file)
    begin = file.stat().st_size - len(data)
    spans = [header[n]["data_offsets"] for n in _names(header) if "order" in arrays[n]]
    return [range(begin + first, begin + end) for first, end in spans]


def cut(rng: random.Random, path: Path) -> None:
    file = _a_file(rng, path)
    content = file.read_bytes()
    file.write_bytes(
        content[: rng.choice([0, 4, 8, rng.randrange(len(content)), len(content) - 1])]
    )


def longer(rng: random.Random, path: Path) -> None:
    file = _a_file(rng, path)
    file.write_bytes(file.read_bytes() + rng.choice([b"\0", b"{}", b" ", bytes(100)]))


def exchanged_parts(rng: random.Random, path: Path) -> None:
    files = [path / INDEX, *parts_of(path)]
    one, other = rng.sample(parts_of(path) if len(files) > 2 and rng.random() < 0.7 else files, 2)
    contents = one.read_bytes(), other.read_bytes()
    for file, content in zip((other, one), contents, strict=True):
        file.write_bytes(content)


def a_lost_file(rng: random.Random, path: Path) -> None:
    _a_file(rng, path).unlink()


def a_folder_for_a_file(rng: random.Random, path: Path) -> None:
    file = _a_file(rng, path)
    file.unlink()
    file.mkdir()


def one_more_file(rng: random.Random, path: Path) -> None:
    name = rng.choice(["part-x", "index.json.old", parts_of(path)[0].name.replace("-of-", "-off-")])
    shutil.copy(_a_file(rng, path), path / name)


DAMAGES: tuple[Callable[[random.Random, Path], None], ...] = (
    a_value, a_value, a_value, a_lost_entry, a_renamed_entry, exchanged_entries, a_key_twice,
    brackets, a_long_number,
    a_field, a_field, exchanged_arrays, exchanged_arrays, a_renamed_array, an_array_twice,
    other_metadata, a_length,
    flipped_bytes, flipped_bytes, flipped_bytes, cut, longer, exchanged_parts, a_lost_file,
    a_folder_for_a_file, one_more_file,
)  # fmt: skip
