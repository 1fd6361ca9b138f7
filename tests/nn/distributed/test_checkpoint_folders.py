"""Damaged folders of checkpoints, read by threads that stand for processes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fusestep.nn.distributed.index import _header_digest

from helpers import more
from process_damages import DAMAGES, edit_header, edit_index, header_of, parts_of
from process_folders import FORMS, ORDERS, Job, loaded, outcome, saved
from thread_processes import ThreadCommunicator, in_threads

REFUSED = ("ValueError", "TypeError", "OSError", "FileNotFoundError")


# Damages at random


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    root = tmp_path_factory.mktemp("whole")

    def folder(form: str, size: int) -> Path:
        path = root / f"{form} {size}"
        return path if path.is_dir() else saved(path, size, FORMS[form])

    return folder


def check_damages(good: Path, form: str, seed: int, path: Path) -> None:
    """Each damage once: refused by all alike, with a name, or without effect."""
    for damage in dict.fromkeys(DAMAGES):
        rng = random.Random(f"{good.name} {damage.__name__} {seed}")
        bad = path / damage.__name__
        shutil.copytree(good, bad)
        damage(rng, bad)
        orders = FORMS[form] and (rng.choice(ORDERS), rng.choice(ORDERS))
        kind, text = loaded(bad, rng.choice([1, 2, 3]), orders)
        assert kind in ("", *REFUSED), (damage.__name__, kind, text)
        assert not kind or "index.json" in text or "part-0" in text, (damage.__name__, text)
        shutil.rmtree(bad)


@pytest.mark.parametrize("seed", [0, *map(more, range(1, 20))])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_damaged_folders(form: str, size: int, seed: int, whole: Any, tmp_path: Path) -> None:
    check_damages(whole(form, size), form, seed, tmp_path)


# Damages of each kind, also by one who writes the digests anew


def resealed(path: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Another index, with the digests of what lies there now."""

    def seal(index: dict[str, Any]) -> None:
        if change is not None:
            change(index)
        if isinstance(index.get("headers"), list):
            index["headers"] = [_header_digest(part) for part in parts_of(path)]

    edit_index(path, seal, seals=True)


def of_array(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["arrays"][name].update(fields)


FITS = "index.json does not fit together: expected checkpoint, its parts"
CANNOT = r"index.json: array '{}' cannot be: expected dtype, shape, and rank or order in 2 parts"
INDICES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda index: index["parts"].pop(), FITS),
    (lambda index: index.update(parts=[]), FITS),
    (lambda index: index.update(parts=3), FITS),
    (lambda index: index["parts"].__setitem__(0, ".."), FITS),
    (lambda index: index["parts"].__setitem__(0, ""), FITS),
    (lambda index: index["parts"].__setitem__(0, "/dev/zero"), FITS),
    (lambda index: index["parts"].reverse(), FITS),
    (lambda index: index.pop("arrays"), FITS),
    (lambda index: index.update(arrays=[]), FITS),
    (lambda index: index.update(headers=3), FITS),
    (lambda index: index.update(checkpoint="../" + index["checkpoint"]), FITS),
    (lambda index: index.update(more=1), FITS),
    (lambda index: index["arrays"].update(words=3), CANNOT.format("words")),
    (lambda index: index["arrays"]["words"].pop("shape"), CANNOT.format("words")),
    *(
        (of_array("words", **{field: value}), CANNOT.format("words"))
        for field, values in {
            "order": ("unknown", None, 1, []),
            "height": (4, 5.0, True, "5", None, -5, 0, 10**30),
            "shape": ([10.0, 4], [True, 4], [10, -4], [], 10, "10", [10, None], [11, 4]),
            "dtype": ("float8", "", None, 4, ["float32"]),
            "more": (1,),
        }.items()
        for value in values
    ),
    *(
        (of_array("bias", **{field: value}), CANNOT.format("bias"))
        for field, values in {
            "rank": (0.0, True, "0", None, -1, 2, 10**30, float("nan")),
            "crc32": (1.5, "1", None, False),
            "shape": ([3.0], [float("inf")], {}),
        }.items()
        for value in values
    ),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(INDICES)))
def test_indices_that_cannot_be(k: int, whole: Any, tmp_path: Path) -> None:
    change, match = INDICES[k]
    path = shutil.copytree(whole("range", 2), tmp_path / "bad")
    resealed(path, change)
    for size in (1, 2):
        kind, text = loaded(path, size, FORMS["range"])
        assert (kind, match in text) == ("ValueError", True), text


def test_another_index_without_its_digest(whole: Any, tmp_path: Path) -> None:
    """As it could be of another checkpoint: only the digest tells."""
    for k, change in enumerate((
        of_array("words", order="hash"),
        lambda index: [of_array(n, order="hash")(index) for n, a in index["arrays"].items()
                       if "order" in a],
        of_array("words", shape=[9, 4]),
        lambda index: index["headers"].reverse(),
        of_array("bias", crc32=0),
    )):  # fmt: skip
        path = shutil.copytree(whole("range", 2), tmp_path / str(k))
        edit_index(path, change)
        for orders in (FORMS["range"], FORMS["hash"]):
            kind, text = loaded(path, 2, orders)
            assert kind == "ValueError" and "rank 0: index.json is damaged: expected sha256" in text


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "{}", "[]", "3", "", "\ud800", '{"format": 1', "NaN"]
)
def test_texts_that_are_no_index(text: str, whole: Any, tmp_path: Path) -> None:
    path = shutil.copytree(whole("hash", 2), tmp_path / "bad")
    (path / "index.json").write_bytes(text.encode(errors="surrogatepass"))
    kind, said = loaded(path, 2, FORMS["hash"])
    assert kind == "ValueError"
    assert "rank 0: index.json " in said and f"in {path}" in said, said


def other_array(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> str:
    """Another array in the last part that has one of this name."""
    file = [part for part in parts_of(path) if name in header_of(part)[0]][-1]
    arrays, metadata = load_file(file), header_of(file)[0]["__metadata__"]
    save_file(arrays | {name: np.ascontiguousarray(change(arrays[name]))}, file, metadata)
    resealed(path)
    return file.name


OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float64": lambda a: a.astype(np.float64), "int8": lambda a: a.astype(np.int8),
    "bool": lambda a: a.astype(bool), "int32": lambda a: a.view(np.int32),
    "narrow": lambda a: a[..., :1], "wide": lambda a: np.repeat(a, 2, -1),
    "short": lambda a: a[: len(a) - 1], "long": lambda a: np.repeat(a, 2, 0),
    "flat": lambda a: a.reshape(-1)[1:], "deep": lambda a: a[None], "none": lambda a: a[:0],
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("name", ["words", "moment1.words", "bias", "moment2.bias"])
def test_arrays_that_are_others(name: str, change: str, whole: Any, tmp_path: Path) -> None:
    """Of another dtype or shape, in a part that belongs to the index otherwise."""
    path = shutil.copytree(whole("hash", 2), tmp_path / "bad")
    part = other_array(path, name, OTHERS[change])
    for size in (1, 3):
        kind, text = loaded(path, size, FORMS["range"])
        expected = f"part '{part}': array '{name}' is not the one of the index: expected ("
        assert (kind, expected in text) == ("ValueError", True), text


@pytest.mark.parametrize("name", ["bias", "moment1.bias", "step.words", "global_step"])
def test_checksums_of_whole_arrays(name: str, whole: Any, tmp_path: Path) -> None:
    path = shutil.copytree(whole("range", 2), tmp_path / "bad")
    part = other_array(path, name, lambda a: a + a.dtype.type(1))
    kind, text = loaded(path, 3, FORMS["range"])
    assert kind == "ValueError"
    assert f"part '{part}': array '{name}' is damaged: expected crc32" in text


def test_headers_have_digests(whole: Any, tmp_path: Path) -> None:
    """Two arrays of one kind under each other's name, and parts in each other's place."""
    path = shutil.copytree(whole("range", 3), tmp_path / "arrays")

    def change(header: dict[str, Any]) -> None:
        header["words"], header["moment1.words"] = header["moment1.words"], header["words"]

    edit_header(parts_of(path)[1], change)
    kind, text = loaded(path, 2, FORMS["range"])
    assert (kind, f"part '{parts_of(path)[1].name}' has another header: expected sha256" in text) \
        == ("ValueError", True)  # fmt: skip
    path = shutil.copytree(whole("hash", 2), tmp_path / "parts")
    saved(path, 2, FORMS["range"])  # its rows are as many in both parts
    first, last = parts_of(path)
    arrays = load_file(first), load_file(last)
    rows = arrays[0].keys() & arrays[1].keys()
    metadata = [header_of(part)[0]["__metadata__"] for part in (first, last)]
    assert rows and [m["rank"] for m in metadata] == ["0", "1"]
    assert metadata[0] | {"rank": "1"} == metadata[1]  # so their headers are never alike


def test_rows_have_no_checksum(whole: Any, tmp_path: Path) -> None:
    """As the docstring says: other numbers of rows are loaded."""
    path = shutil.copytree(whole("range", 2), tmp_path / "other")
    other_array(path, "words", lambda a: a + np.float32(1))
    assert loaded(path, 2, FORMS["range"], is_right=False) == ("", "")


def test_processes_that_read_different_checkpoints(whole: Any) -> None:
    folders = whole("range", 1), whole("range", 2)

    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        job = Job(comm, FORMS["range"])
        return outcome(job, lambda: job.load(folders[comm.rank]))

    ((kind, text),) = set(in_threads(2, program))
    assert kind == "ValueError" and "load_checkpoint: rank 1: index differs: expected " in text
