"""Damaged folders of checkpoints, read by threads that stand for processes."""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fusestep.nn.distributed import index as of_index
from helpers import more
from process_folders import FORMS, ORDERS, RECORDED, Job, loaded, outcome, parts_of, saved
from thread_processes import ThreadCommunicator, in_threads

INDEX = "index.json"
Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("whole")

    def folder(form: str, size: int) -> Path:
        path = root / f"{form} {size}"
        return path if path.is_dir() else saved(path, size, FORMS[form])

    return folder


# Damages of files, of the index, and of the index by one who writes its digest anew


def index_with(change: Callable[[Any], Any], *, seals: bool = False) -> Damage:
    def damage(path: Path) -> None:
        content = json.loads((path / INDEX).read_text())
        change(content)
        if seals:
            content.pop("sha256", None)
            text = json.dumps(content, sort_keys=True)
            content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (path / INDEX).write_text(json.dumps(content))

    return damage


def of_array(name: str, **fields: Any) -> Callable[[Any], Any]:
    return lambda index: index["arrays"][name].update(fields)


def at_part(change: Callable[[bytes], bytes], k: int = -1) -> Damage:
    return lambda path: parts_of(path)[k].write_bytes(change(parts_of(path)[k].read_bytes()))


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << place % 8
    return bytes(changed)


def exchanged_parts(path: Path) -> None:
    first, last = parts_of(path)
    contents = last.read_bytes(), first.read_bytes()
    first.write_bytes(contents[0])
    last.write_bytes(contents[1])


def a_part_of_another_checkpoint(path: Path) -> None:
    """Of the same arrays, with other numbers."""

    def program(comm: ThreadCommunicator) -> None:
        Job(comm, FORMS["range"]).save(path / "another")

    in_threads(2, program)
    shutil.copy(parts_of(path / "another")[1], parts_of(path)[1])


def a_node(name: str, make: Callable[[Path], Any]) -> Damage:
    def damage(path: Path) -> None:
        (file,) = path.glob(name)
        file.unlink()
        make(file)

    return damage


DIGEST = "part-.* is damaged: expected sha256 "
PIPE = [os.mkfifo] if os.name != "nt" else []
DAMAGES: dict[str, list[tuple[str, str, Damage]]] = {
    "files": [
        ("FileNotFoundError|OSError", "", shutil.rmtree),
        ("FileNotFoundError|OSError", INDEX, lambda path: (path / INDEX).unlink()),
        ("FileNotFoundError|OSError", "part-00001", lambda path: parts_of(path)[1].unlink()),
        *(
            ("ValueError", f"{name}.* is no file: expected a file, or a link to one, got", damage)
            for make in (Path.mkdir, *PIPE)
            for name, damage in ((INDEX, a_node(INDEX, make)), ("part", a_node("*-00000-*", make)))
        ),
        ("ValueError", DIGEST, exchanged_parts),
        ("ValueError", DIGEST, a_part_of_another_checkpoint),
        *(
            ("ValueError", DIGEST, at_part(change, k))
            for k in (0, 1)
            for change in (
                lambda content: content[:0], lambda content: content[:8],
                lambda content: content[: len(content) // 2], lambda content: content[:-1],
                lambda content: content + b"\0", lambda content: flipped(content, 0),
                lambda content: flipped(content, -1)))],
    "an index that is none": [
        ("ValueError", f"{INDEX} .* in .*bad",
            lambda path, text=text: (path / INDEX).write_bytes(text))
        for text in (b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"[]", b"3", b"", b"\xed\xa0\x80",
            b'{"format": 1', b"NaN", b'{"format": ' + b"1" * 5000 + b"}")],
    # As it could be of another checkpoint: only the digest tells.
    "an index without its digest": [
        ("ValueError", f"{INDEX} is damaged: expected sha256 ", index_with(change))
        for change in (
            of_array("words", order="hash"), of_array("words", shape=[9, 4]),
            lambda index: [of_array(n, order="hash")(index) for n in ("words", "moment1.words")],
            of_array("bias", rank=1), of_array("bias", new=1), lambda index: index.pop("sha256"),
            lambda index: index.update(parts=dict.fromkeys(index["parts"], "a")))],
    "an index with its digest": [
        ("ValueError", f"{INDEX} does not fit together: expected the parts of a checkpoint",
            index_with(change, seals=True))
        for change in (
            lambda index: index["parts"].popitem(), lambda index: index.update(parts={}),
            lambda index: index.update(parts=3),
            lambda index: index.update(parts=[*index["parts"]]),
            lambda index: index.update(parts=dict(reversed(index["parts"].items()))),
            *(lambda index, name=name: index["parts"].update({name: index["parts"].popitem()[1]})
                for name in ("..", "", "/dev/zero")),
            lambda index: index.pop("arrays"), lambda index: index.update(arrays=[]),
            lambda index: index["arrays"].update(words=3),
            lambda index: index["arrays"]["words"].pop("shape"),
            *(of_array("words", **{field: value}) for field, values in {
                "order": ("unknown", None, 1, []), "dtype": ("float8", "", None, 4, ["float32"]),
                "shape": ([10.5, 4], [1e30, 4], [True, 4], [10, -4], [], 10, "10", [10, None]),
            }.items() for value in values),
            *(of_array("bias", **{field: value}) for field, values in {
                "rank": (0.0, True, "0", None, -1, 2, 10**30, float("nan")),
                "shape": ([3.0], [float("inf")], {}),
            }.items() for value in values))],
    "another index with its digest": [
        ("ValueError", DIGEST, index_with(
            lambda index: index.update(parts=dict.fromkeys(index["parts"])), seals=True)),
        ("ValueError", f"words has a wrong shape: expected .*, got .11, 4. in {INDEX}",
            index_with(of_array("words", shape=[11, 4]), seals=True)),
        ("ValueError", "part-00001.* does not fit the index: expected .*'?bias",
            index_with(of_array("bias", rank=1), seals=True))],
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages(kind: str, whole: Any, tmp_path: Path) -> None:
    """Each is refused by all alike, whoever reads the part, and nothing is written."""
    for error, match, damage in DAMAGES[kind]:
        path = shutil.copytree(whole("range", 2), tmp_path / "bad")
        damage(path)
        for size in (1, 3):
            found, text = loaded(path, size, FORMS["range"])
            assert re.fullmatch(error, found) and re.search(match, text), (match, found, text)
            assert size == 1 or text.startswith("load_checkpoint: rank "), text
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("form", ["range", "states"])
@pytest.mark.parametrize("step", [97, *map(more, (13, 5, 1))])
def test_flipped_bits(form: str, step: int, whole: Any, tmp_path: Path) -> None:
    """One of any byte, those of rows too: none is loaded."""
    good = whole(form, 2)
    for file in good.iterdir():
        for place in range(step // 2, file.stat().st_size, step):
            path = shutil.copytree(good, tmp_path / "bad")
            (path / file.name).write_bytes(flipped(file.read_bytes(), place))
            kind, text = loaded(path, 2, FORMS[form])
            assert kind == "ValueError" and file.name in text, (place, kind, text)
            shutil.rmtree(path)


VALUES: tuple[Any, ...] = (
    float("nan"), -1, 0, 1, 3, 10**30, -(2**63), 1.0, 0.5, "0", "", "..", "range", "hash",
    "float64", True, None, [], {}, [1], {"a": 1})  # fmt: skip


@pytest.mark.parametrize("seed", [0, *map(more, range(1, 20))])
@pytest.mark.parametrize("form", FORMS)
def test_any_value_in_the_place_of_another(form: str, seed: int, whole: Any, tmp_path) -> None:
    """In an index with its digest: it is refused by all alike, or without effect."""
    rng, good = random.Random(f"{form} {seed}"), whole(form, 2)

    def change(inside: Any) -> None:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = rng.choice(keys)
        if isinstance(inside[key], dict | list) and inside[key] and rng.random() < 0.8:
            change(inside[key])
        elif rng.random() < 0.2:
            del inside[key]
        else:
            inside[key] = rng.choice(VALUES)

    for k in range(20):
        path = shutil.copytree(good, tmp_path / f"{k}")
        index_with(change, seals=True)(path)
        orders = FORMS[form] and (rng.choice(ORDERS), rng.choice(ORDERS))
        kind, text = loaded(path, rng.choice([1, 2, 3]), orders, is_right=False)
        assert kind in ("", "ValueError", "TypeError", "KeyError"), (kind, text)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_part_is_read_whole_by_one_process(size: int, whole: Any, monkeypatch) -> None:
    path, read, original = whole("hash", 3), [], of_index.file_digest
    monkeypatch.setattr(of_index, "file_digest", lambda file: read.append(file) or original(file))
    assert loaded(path, size, FORMS["range"]) == ("", "")
    assert sorted(read) == parts_of(path)


def test_processes_that_read_different_checkpoints(whole: Any) -> None:
    folders = whole("range", 1), whole("range", 2)

    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        job = Job(comm, FORMS["range"])
        return outcome(job, lambda: job.load(folders[comm.rank]))

    ((kind, text),) = set(in_threads(2, program))
    assert kind == "ValueError" and "load_checkpoint: rank 1: index differs: expected " in text


# Other versions


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_recorded_folders(size: int) -> None:
    """An earlier commit wrote them: rows of 3 processes in both orders, divided states of 2."""
    for first in ORDERS:
        for last in ORDERS:
            assert loaded(RECORDED / "rows", size, (first, last)) == ("", "")
    assert loaded(RECORDED / "states", size, None) == ("", "")


@pytest.mark.parametrize("version", [1, 2, 4])
def test_other_formats(version: int, whole: Any, tmp_path: Path) -> None:
    """The error names both formats. No part is read, and nothing is written."""
    path = shutil.copytree(whole("range", 2), tmp_path / "other")
    index_with(lambda index: index.update(format=f"fusestep.distributed {version}"))(path)
    for part in parts_of(path):
        part.unlink()
    for size in (1, 2):
        kind, text = loaded(path, size, FORMS["range"])
        assert kind == "ValueError"
        expected = f"expected fusestep.distributed 3 in {path}, got fusestep.distributed {version}"
        assert f"{INDEX} has another format: {expected}" in text
