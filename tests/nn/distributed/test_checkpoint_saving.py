"""Folders of checkpoints as they are written: what is left, and links in them."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from fusestep import nn
from fusestep.nn.base import checkpoint as files
from fusestep.nn.distributed import RowShard, alone, checkpoint, load_checkpoint, save_checkpoint
from process_folders import FORMS, PARAMETERS, Job, loaded, outcome, parts_of, saved
from subprocesses import output_of
from thread_processes import ThreadCommunicator, in_threads


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


def read_only(job: Job, name: str) -> None:
    job.by_name()[name].flags.writeable = False


def refusing(job: Job) -> None:
    """An optimizer's own check of values."""

    def refuse(_: Any) -> None:
        raise ValueError("these values")

    job.base._check_values = refuse


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (refusing, "these values"),
        *(
            (
                partial(read_only, name=name),
                f"{name} is read-only: expected a writable array, got a")
            for name in ("words", "moment2.words", "bias"))])  # fmt: skip
@pytest.mark.parametrize("bad", [1, 2])
def test_what_one_rank_cannot_load(bad: int, change: Any, text: str, tmp_path: Path) -> None:
    """The others write nothing either."""
    path = saved(tmp_path / "good", 2, FORMS["range"])

    def load(job: Job) -> None:
        if job.comm.rank == bad:
            change(job)
        job.load(path)

    kind, said = refused(3, load)
    assert kind == "ValueError" and said.startswith(f"load_checkpoint: rank {bad}: {text}"), said


def shard_of(rows: int, comm: Any) -> dict[str, RowShard]:
    return {"words": RowShard(rows, comm)}


OF_ONE_RANK: list[tuple[str, str, Callable[[Job], dict[str, Any]]]] = [
    ("TypeError", "BAD: folder has a wrong type: expected a path, got int",
        lambda _: {"folder": 3}),
    ("TypeError", "BAD: folder has a wrong type: expected a path, got bytes",
        lambda _: {"folder": b"good"}),
    ("ValueError", "BAD: .*null", lambda _: {"folder": "a\0"}),
    ("OSError", "BAD: .*index.json", lambda _: {"folder": "index.json"}),
    ("TypeError", "BAD: optimizer has a wrong type: expected a FusedOptimizer, got NoneType",
        lambda _: {"optimizer": None}),
    ("ValueError", r"DIFFERING: optimizer\[0\] differs: expected (LazyAdam|SGD) as on rank 0",
        lambda job: {"optimizer": nn.SGD(list(job.base.parameters))}),
    ("TypeError", "BAD: shards has a wrong type: expected a mapping of names to shards, got int",
        lambda _: {"shards": 3}),
    ("TypeError", "BAD: shards has a wrong type: expected a mapping of names to shards, got tuple",
        lambda _: {"shards": ()}),
    ("TypeError", "BAD: the shard of 'words' has a wrong type: expected a RowShard, got int",
        lambda _: {"shards": {"words": 3}}),
    ("ValueError", "BAD: the shard of 'words' is one of other processes: expected rank . of 2",
        lambda _: {"shards": shard_of(10, alone())}),
    ("ValueError", "BAD: shards name no parameter: expected .*, got .'none'.",
        lambda job: {"shards": {**job.shards, "none": job.shards["words"]}}),
]  # fmt: skip


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_arguments_of_one_rank(call: Any, bad: int, tmp_path: Path) -> None:
    """All hear of it, and nobody waits for ever; the old checkpoint stays."""
    path = saved(tmp_path / "good", 2, FORMS["range"])
    before = contents(path)
    for kind, text, wrong in OF_ONE_RANK:

        def given(job: Job, wrong: Any = wrong) -> None:
            arguments = {"folder": path, "optimizer": job.optimizer, "shards": job.shards}
            if job.comm.rank == bad:
                arguments |= wrong(job)
            if isinstance(arguments["folder"], str):
                arguments["folder"] = path / arguments["folder"]
            call(**arguments, comm=job.comm)

        match = text.replace("BAD", f"rank {bad}").replace("DIFFERING", "rank 1")
        found, said = refused(2, given)
        assert found == kind and re.match(f"{call.__name__}: {match}", said), said
    assert contents(path) == before


def test_what_has_no_shard_is_alike(tmp_path: Path) -> None:
    """Tables without their shards, other numbers of one rank, states that are with their owners."""

    def save(job: Job, *, divides: bool) -> None:
        other = Job(job.comm, FORMS["range"])
        other.by_name()["bias"][...] = job.comm.rank
        save_checkpoint(tmp_path / "new", other.base, job.comm, other.shards if divides else None)

    text = "save_checkpoint: rank 1: arrays without a shard"
    for form, match, call in (
        ("range", r"\['moment1.tones'\]\['shape'\]\[0\] differs: expected 4 as on rank 0, got 3",
            lambda job: save(job, divides=False)),
        ("range", r"\['bias'\]\['crc32'\] differs: expected [0-9]+ as on rank 0, got ",
            lambda job: save(job, divides=True)),
        ("states", r"\['moment1.words'\] differs: expected ",
            lambda job: save_checkpoint(tmp_path / "new", job.base, job.comm)),
    ):  # fmt: skip
        kind, said = refused(2, call, form)
        assert kind == "ValueError" and re.match(text + match, said), said
    assert not list((tmp_path / "new").glob("*"))


def test_optimizers_that_a_checkpoint_does_not_fit(tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 2, FORMS["range"])

    def load(params: dict[str, Any], cls: Any = nn.LazyAdam, **shards: int) -> Any:
        def call(job: Job) -> None:
            own = {name: RowShard(rows, job.comm) for name, rows in shards.items()}
            arrays = {n: a[: len(own.get(n, a))].copy() for n, a in params.items()}
            opt = cls([nn.Parameter(array, name) for name, array in arrays.items()])
            load_checkpoint(path, opt, job.comm, own)

        return call

    words, tones, bias = (np.ones(*PARAMETERS[name]) for name in ("words", "tones", "bias"))
    whole = {"words": words, "tones": tones, "bias": bias}
    for kind, text, call in (
        ("TypeError", ".*words has a wrong dtype: expected float16, got float32 in index.json",
            load({**whole, "words": words.astype(np.float16)})),
        ("ValueError", ".*words has a wrong shape: expected .9, 4., got .10, 4. in index.json",
            load({**whole, "words": words[:9]}, words=9)),
        ("KeyError", ".*does not fit this optimizer: expected the names .*, got missing: .'linear",
            load(whole, nn.FTRL, words=10)),
        ("KeyError", ".*does not fit this optimizer: .*, got more: .'moment1.tones'",
            load({"words": words, "bias": bias}, words=10)),
        ("ValueError", "parameter 'words' has a wrong shape: expected the 49 rows of its shard",
            lambda job: load_checkpoint(path, job.base, job.comm, shard_of(97, job.comm))),
    ):  # fmt: skip
        found, said = refused(2, call)
        assert found == kind and re.match(f".?load_checkpoint: rank 0: {text}", said), said


@pytest.mark.parametrize(("name", "text"), [
    ("global_step", "parameters have names of states: expected names that no state"),
    ("moment1.w", "parameters have names of states: expected names that no state"),
    ("__metadata__", "name is reserved: expected another one, got '__metadata__'"),
])  # fmt: skip
def test_names_that_are_taken(name: str, text: str, tmp_path: Path) -> None:
    """Of two arrays of one name one would be lost."""
    two = [nn.Parameter(np.ones(2, np.float32), n) for n in ("w", name)]
    with pytest.raises(ValueError, match=f"^save_checkpoint: {text}"):
        save_checkpoint(tmp_path / "new", nn.LazyAdam(two), alone())
    assert not (tmp_path / "new").exists()


# What is left behind


def test_a_folder_that_is_saved_to_again(tmp_path: Path) -> None:
    """The files of older checkpoints and of killed processes are removed, others are left."""
    (tmp_path / ".unfinished-killed").mkdir()
    for name in (".unfinished-killed/part", "part-00000-of-00001-0.safetensors", "notes"):
        (tmp_path / name).touch()
    known = set()
    for size in (2, 3):
        saved(tmp_path, size, FORMS["hash"])
        parts = parts_of(tmp_path)
        assert len(parts) == size and not known & set(parts)
        known |= set(parts)
        left = {tmp_path / "index.json", tmp_path / "notes", *parts}
        assert set(tmp_path.iterdir()) == left
        assert len({path.stat().st_mode for path in left}) == 1  # others may read all or none


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from fusestep.nn.distributed import alone
    from process_folders import FORMS, Job

    path, before = Path(sys.argv[1]), 0
    events = {"open", "os.mkdir", "os.chmod", "os.rename", "os.remove", "os.rmdir"}

    def kill_at(event, arguments):
        if event in events and str(path) in str(arguments[0]):
            left.pop()
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    for k in range(1, 100):
        if (child := os.fork()) == 0:  # it is killed before it does the k-th thing to a file
            try:
                job = Job(alone(), FORMS["range"])
                job.by_name()["global_step"][...] = k
                left = [None] * k
                sys.addaudithook(kill_at)
                job.save(path)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), code
        job = Job(alone(), FORMS["range"])
        job.load(path)
        found = int(job.base.global_step[0])
        assert found in (before, k)
        print("new" if found == k else "old")
        before = found
        if code == 0:
            break
    job.save(path)
    print(len(os.listdir(path)))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
def test_a_kill_at_any_moment(tmp_path: Path) -> None:
    """The folder has the checkpoint of before or the new one; the next save tidies up."""

    def program(comm: ThreadCommunicator) -> None:
        Job(comm, FORMS["range"]).save(tmp_path)

    in_threads(1, program)
    *found, n_files = output_of(KILLED, tmp_path).split()
    n_old = found.count("old")
    assert found == ["old"] * n_old + ["new"] * (len(found) - n_old)
    assert n_old >= 8 and len(found) - n_old >= 2 and n_files == "2"


@pytest.mark.parametrize("bad", [1, 2])
def test_a_rank_with_another_folder(bad: int, tmp_path: Path) -> None:
    """No file is left, and of what was there nothing is lost."""
    path, new = saved(tmp_path / "good", 3, FORMS["hash"]), tmp_path / "new" / "folder"
    before = contents(path)
    for first, other in ((path, new), (new, path), (path, path / "within"), (new, new.parent)):
        folders = {bad: other}
        kind, text = refused(
            3, lambda job, to=folders, path=first: job.save(to.get(job.comm.rank, path)), "hash"
        )
        assert kind == "OSError"
        expected = f"save_checkpoint: rank {bad}: folder is another one: expected that of rank 0"
        assert text.startswith(f"{expected}, got {other}, which has no part-00000-of-"), text
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


FULL = OSError(28, "No space left on device", "index.json")
FAULTS = (
    (checkpoint, "save_file", SafetensorError("No space left on device")),
    (checkpoint.os, "replace", FULL), (checkpoint, "file_digest", FULL),
    (checkpoint, "_check_folder", FULL), (checkpoint, "replace_file", FULL),
    (files, "_flush_folder", FULL))  # fmt: skip


@pytest.mark.parametrize(("module", "moment", "error"), FAULTS)
def test_a_disk_that_is_full(module, moment: str, error: Exception, tmp_path, monkeypatch) -> None:
    """New files are removed, unless the index is there already and only could not be flushed."""

    def full(*_: Any, **__: Any) -> None:
        raise error

    path = saved(tmp_path / "good", 2, FORMS["range"])
    before = contents(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, moment, full)
        kind, text = refused(2, lambda job: job.save(path))
    assert kind == "OSError" and re.search("rank 0: .*No space left on device", text), text
    is_there = moment == "_flush_folder"
    assert (contents(path) == before) != is_there
    assert loaded(path, 3, FORMS["range"], is_right=not is_there) == ("", "")
    assert refused(2, lambda job: job.save(path)) == ("", "")
    assert len(list(path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["a folder", "a named pipe"])
@pytest.mark.parametrize("linked", [False, True])
def test_no_file_in_the_place_of_the_index(kind: str, linked: bool, tmp_path, monkeypatch) -> None:
    """It is refused before any part is written."""
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


# Links


def linked(path: Path, target: Path) -> Path:
    """A folder of links to the files of another one."""
    path.mkdir()
    for file in target.iterdir():
        (path / file.name).symlink_to(file)
    return path


def test_links(tmp_path: Path) -> None:
    """They are read. The folder is followed; links in it are replaced, what they point to stays."""
    path = saved(tmp_path / "good", 2, FORMS["hash"])
    links, before = linked(tmp_path / "links", path), contents(path)
    (tmp_path / "link").symlink_to(links)
    assert loaded(tmp_path / "link", 3, FORMS["range"]) == ("", "")
    saved(tmp_path / "link", 1, FORMS["range"])
    assert contents(path) == before
    assert (tmp_path / "link").is_symlink()
    assert not [file for file in links.iterdir() if file.is_symlink()]
    assert len(list(links.iterdir())) == 2
    for folder in (path, links):
        assert loaded(folder, 2, FORMS["range"]) == ("", "")


def test_links_to_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "good", 1, FORMS["range"])
    for file in (parts_of(path)[0], path / "index.json"):
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
