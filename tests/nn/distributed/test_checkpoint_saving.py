"""Folders of checkpoints as they are written: what is left, links in them, and older versions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fusestep import nn
from fusestep.nn.base import checkpoint as files
from fusestep.nn.distributed import alone, load_checkpoint, save_checkpoint

from process_damages import edit_index, header_of, parts_of
from process_folders import FORMS, ORDERS, Job, loaded, outcome, saved
from thread_processes import ThreadCommunicator, in_threads

RECORDED = Path(__file__).parents[2] / "recorded" / "data" / "distributed"


def contents(path: Path) -> dict[str, Any]:
    """All that is in a folder: bytes of files, targets of links."""
    return {
        str(p.relative_to(path)): os.readlink(p)
        if p.is_symlink()
        else p.is_file() and p.read_bytes()
        for p in sorted(path.rglob("*"))
    }


def refused(size: int, call: Callable[[Job], Any], form: str = "range") -> tuple[str, str]:
    """What all ranks say, alike, when each of them calls something; no array changes."""

    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        job = Job(comm, FORMS[form])
        return outcome(job, lambda: call(job))

    (said,) = set(in_threads(size, program))
    return said


# Older versions


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_folders_of_0_1_1(size: int) -> None:
    """Recorded there: rows of 3 processes in both orders, divided states of 2."""
    for first in ORDERS:
        for last in ORDERS:
            assert loaded(RECORDED / "rows", size, (first, last)) == ("", "")
    assert loaded(RECORDED / "states", size, None) == ("", "")


def test_damaged_folders_of_0_1_1(tmp_path: Path) -> None:
    """They have checksums of whole arrays, which were never read; heights follow from the rows."""
    path = shutil.copytree(RECORDED / "rows", tmp_path / "bias")
    part = parts_of(path)[0]
    arrays, metadata = load_file(part), header_of(part)[0]["__metadata__"]
    save_file(arrays | {"bias": arrays["bias"] + 1}, part, metadata)
    kind, text = loaded(path, 2, FORMS["range"])
    assert kind == "ValueError" and f"part '{part.name}': array 'bias' is damaged: expected" in text
    path = shutil.copytree(RECORDED / "rows", tmp_path / "height")
    edit_index(path, lambda index: index["arrays"]["words"].update(height=5))
    kind, text = loaded(path, 2, FORMS["range"])
    assert kind == "ValueError" and "index.json: array 'words' cannot be: expected dtype" in text


def test_no_folder_passes_for_an_older_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "new", 2, FORMS["range"])

    def change(index: dict[str, Any]) -> None:
        index["format"] = "fusestep.distributed 1"
        del index["sha256"]

    edit_index(path, change)
    kind, text = loaded(path, 2, FORMS["range"])
    assert kind == "ValueError" and "index.json does not fit together" in text
    edit_index(path, lambda index: index.pop("headers"))
    kind, text = loaded(path, 2, FORMS["range"])
    assert (
        kind == "ValueError" and "is of another checkpoint: expected fusestep.distributed 1" in text
    )
    old = shutil.copytree(RECORDED / "rows", tmp_path / "old")
    edit_index(old, lambda index: index.update(sha256="0"))
    kind, text = loaded(old, 2, FORMS["range"])
    assert kind == "ValueError" and "index.json is damaged: expected sha256 0" in text


# Values, and arguments


@pytest.mark.parametrize("form", ["range", "states"])
@pytest.mark.parametrize(("name", "value"), [("step.words", -1), ("learning_rate", np.nan)])
def test_values_are_checked_by_all(form: str, name: str, value: Any, tmp_path: Path) -> None:
    """By those too that have it from nobody else, before any writes."""

    def program(comm: ThreadCommunicator) -> None:
        job = Job(comm, FORMS[form])
        job.fill()
        job.by_name()[name][...] = value
        job.save(tmp_path)

    in_threads(2, program)
    kind, text = loaded(tmp_path, 3, FORMS[form])
    assert kind == "ValueError"
    assert f"rank 2: LazyAdam: state '{name}' is out of range" in text


@pytest.mark.parametrize("name", ["words", "moment2.words", "bias"])
def test_an_array_of_one_rank_that_is_read_only(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 2, FORMS["range"])

    def load(job: Job) -> None:
        job.by_name()[name].flags.writeable = job.comm.rank != 2
        job.load(path)

    kind, text = refused(3, load)
    assert (kind, text) == (
        "ValueError",
        f"load_checkpoint: rank 2: {name} is read-only: expected a writable array, got a read-only"
        " one",
    )


def test_values_that_one_rank_refuses(tmp_path: Path) -> None:
    """An optimizer's own check of values: the others write nothing either."""
    path = saved(tmp_path / "good", 2, FORMS["range"])

    def load(job: Job) -> None:
        if job.comm.rank == 1:
            job.base._check_values = refuse
        job.load(path)

    def refuse(_: Any) -> None:
        raise ValueError("these values")

    assert refused(3, load) == ("ValueError", "load_checkpoint: rank 1: these values")


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_arguments_of_one_rank(call: Any, bad: int, tmp_path: Path) -> None:
    """Of a wrong kind: all hear of it, and nobody waits for ever."""
    path = saved(tmp_path / "good", 2, FORMS["range"])
    before = contents(path)
    for folder, shards, text in (
        (3, None, "folder has a wrong type: expected a path, got int"),
        (b"good", None, "folder has a wrong type: expected a path, got bytes"),
        (path, 3, "shards has a wrong type: expected a mapping of names to shards, got int"),
        (path, (), "shards has a wrong type: expected a mapping of names to shards, got tuple"),
        (path, {"words": 3}, "the shard of 'words' has a wrong type: expected a RowShard, got int"),
    ):

        def given(job: Job, folder: Any = folder, shards: Any = shards) -> None:
            mine = (folder, shards) if job.comm.rank == bad else (path, job.shards)
            call(mine[0], job.optimizer, job.comm, mine[1])

        assert refused(2, given) == ("TypeError", f"{call.__name__}: rank {bad}: {text}")
    kind, text = refused(
        2, lambda job: call("a\0" if job.comm.rank == bad else path, job.optimizer, job.comm,
                            job.shards)
    )  # fmt: skip
    assert kind == "ValueError" and text.startswith(f"{call.__name__}: rank {bad}: ")
    assert contents(path) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("global_step", "parameters have names of states: expected names that no state"),
        ("moment1.w", "parameters have names of states: expected names that no state"),
        ("__metadata__", "name is reserved: expected another one, got '__metadata__'"),
    ],
)
def test_names_that_are_taken(name: str, text: str, tmp_path: Path) -> None:
    """Of two arrays of one name one would be lost."""
    two = [nn.Parameter(np.ones(2, np.float32), n) for n in ("w", name)]
    with pytest.raises(ValueError, match=f"^save_checkpoint: {text}"):
        save_checkpoint(tmp_path / "new", nn.LazyAdam(two), alone())
    assert not (tmp_path / "new").exists()


# What is left behind


@pytest.mark.parametrize("bad", [1, 2])
def test_a_rank_with_another_folder(bad: int, tmp_path: Path) -> None:
    """No file is left, of what was there nothing is lost, and nobody writes in vain."""
    path, new = saved(tmp_path / "good", 3, FORMS["hash"]), tmp_path / "new" / "folder"
    before = contents(path)
    for first, other in ((path, new), (new, path), (path, path / "within"), (new, new.parent)):
        folders = {bad: other}
        kind, text = refused(
            3, lambda job, to=folders, path=first: job.save(to.get(job.comm.rank, path)), "hash"
        )
        assert kind == "OSError"
        expected = f"save_checkpoint: rank {bad}: folder is another one: expected that of rank 0"
        assert text.startswith(f"{expected}, got {other}, which has no .unfinished-"), text
        files = {name for name, file in contents(tmp_path).items() if file is not False}
        assert files == {f"good/{name}" for name in before}
        assert contents(path) | before == contents(path)


def test_one_folder_by_different_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    paths = tmp_path / "real", Path("real"), Path("link")

    def program(comm: ThreadCommunicator) -> None:
        job = Job(comm, FORMS["hash"])
        job.fill()
        job.save(paths[comm.rank])

    in_threads(3, program)
    assert loaded(tmp_path / "real", 2, FORMS["range"]) == ("", "")
    assert len(list(Path("real").iterdir())) == 4


@pytest.mark.parametrize("moment", ["replace_file", "_flush_folder"])
def test_an_index_that_cannot_be_written(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are removed, unless it is there already and only could not be flushed."""
    from fusestep.nn.distributed import checkpoint

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "index.json")

    path = saved(tmp_path / "good", 2, FORMS["range"])
    before = contents(path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if moment == "replace_file" else files, moment, full)
        kind, text = refused(2, lambda job: job.save(path))
    assert kind == "OSError" and "rank 0: [Errno 28] No space left on device" in text
    if moment == "replace_file":
        assert contents(path) == before
        assert loaded(path, 3, FORMS["range"]) == ("", "")
    else:
        assert contents(path)["index.json"] != before["index.json"]
        assert loaded(path, 3, FORMS["range"], is_right=False) == ("", "")
    assert refused(2, lambda job: job.save(path)) == ("", "")
    assert len(list(path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["a folder", "a named pipe"])
@pytest.mark.parametrize("linked", [False, True])
def test_no_file_in_the_place_of_the_index(
    kind: str, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before any part is written."""
    from fusestep.nn.distributed import checkpoint

    monkeypatch.setattr(checkpoint, "_write_part", None)
    path = tmp_path / "checkpoint"
    path.mkdir()
    index = path / "index.json"
    node = tmp_path / "node" if linked else index
    node.mkdir() if kind == "a folder" else os.mkfifo(node)
    if linked:
        index.symlink_to(node)
    error, text = refused(2, lambda job: job.save(path))
    assert "rank 0: " in text and f"index.json is {kind}: expected a regular file" in text
    assert error in ("OSError", "IsADirectoryError")
    assert os.listdir(path) == ["index.json"]
    assert index.is_symlink() == linked
    assert node.is_dir() if kind == "a folder" else node.is_fifo()


# Links, and what is no file


def linked(path: Path, target: Path) -> Path:
    """A folder of links to the files of another one."""
    path.mkdir()
    for file in target.iterdir():
        (path / file.name).symlink_to(file)
    return path


def test_links_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 2, FORMS["hash"])
    (tmp_path / "link").symlink_to(path)
    for other in (tmp_path / "link", linked(tmp_path / "links", path)):
        assert loaded(other, 3, FORMS["range"]) == ("", "")


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """The folder is followed. Links in it are replaced; what they point to stays whole."""
    path = saved(tmp_path / "good", 2, FORMS["hash"])
    links, before = linked(tmp_path / "links", path), contents(path)
    (tmp_path / "link").symlink_to(links)
    saved(tmp_path / "link", 1, FORMS["range"])
    assert contents(path) == before
    assert (tmp_path / "link").is_symlink()
    assert not [file for file in links.iterdir() if file.is_symlink()]
    assert len(list(links.iterdir())) == 2
    for folder in (path, links):
        assert loaded(folder, 2, FORMS["range"]) == ("", "")


def test_links_to_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 1, FORMS["range"])
    part = parts_of(path)[0]
    for file in (part, path / "index.json"):
        file.unlink()
        file.symlink_to(tmp_path / "nothing")
        kind, text = loaded(path, 2, FORMS["range"])
        assert kind == "OSError" and str(file) in text
    saved(path, 2, FORMS["range"])
    assert loaded(path, 2, FORMS["range"]) == ("", "")
    assert not (path / "index.json").is_symlink() and not (tmp_path / "nothing").exists()
    (tmp_path / "folder").symlink_to(tmp_path / "nothing")
    kind, text = refused(2, lambda job: job.save(tmp_path / "folder"))
    assert kind == "OSError" and f"{tmp_path / 'folder'}" in text


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
@pytest.mark.parametrize("name", ["index.json", "part-"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 2, FORMS["range"])
    file = next(file for file in path.iterdir() if file.name.startswith(name))
    file.unlink()
    os.mkfifo(file)
    kind, text = loaded(path, 2, FORMS["range"])
    assert kind == "ValueError"
    assert f"{file.name}" in text and "is no file: expected a file, or a link to one, got" in text
