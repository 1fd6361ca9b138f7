"""Checkpoints on each rank: written by these processes, read by these, by fewer, by others."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from fusestep import nn
from fusestep.nn.distributed import (
    Communicator,
    RowShard,
    ShardedStates,
    alone,
    load_checkpoint,
    save_checkpoint,
)

from helpers import STORAGE_DTYPES, assert_same_bits
from optimizers import make
from process_checks import everywhere, refused_everywhere, smaller
from process_damages import edit_index
from process_states import SHAPES, check_states, gradients_of, params_of
from process_training import Tables, Training, assert_part_of, assert_same_training

CASES = [
    (order, form, dtype)
    for k, dtype in enumerate(STORAGE_DTYPES)
    for order, form in zip(("range", "hash"), (("LazyAdam", "FTRL"), ("FTRL", "LazyAdam"))[k % 2],
        strict=True)
]  # fmt: skip
CASES += [("range", "RowWiseAdagrad", np.float32), ("hash", "RowWiseAdam", STORAGE_DTYPES[3])]
OTHER = {"range": "hash", "hash": "range"}
SAVED = 2  # steps before it


def name_of(order: str, form: str, dtype: Any) -> str:
    return f"{order} {form} {np.dtype(dtype)}"


def saved(comm: Communicator, engine: str, folder: Path) -> None:
    """Saved, by these processes, and read again by them, and by fewer."""
    groups = [smaller(engine, comm, n) for n in range(1, comm.size if engine == "torch" else 1)]
    for case in CASES:
        order, form, dtype = case
        path = folder / name_of(order, form, dtype)
        own = Training(form, dtype, Tables(comm, order))
        own.steps(SAVED)
        own.save(path)
        own.steps(1)  # what comes later is not in it
        assert sorted(p.name for p in path.iterdir())[0] == "index.json"
        for group in [comm, *groups]:
            if group is not None:
                _resume(group, path, case)
        everywhere(comm, "until all have read it")


def resume(comm: Communicator, _: str, folder: Path) -> None:
    """What other processes have written, in either order, and without shards."""
    found = [case for case in CASES if (folder / name_of(*case)).is_dir()]
    assert found
    for case in found:
        _resume(comm, folder / name_of(*case), case)


def _resume(comm: Communicator, path: Path, case: tuple[str, str, Any]) -> None:
    order, form, dtype = case
    whole, everything = Training(form, dtype), Training(form, dtype)
    whole.steps(SAVED)
    load_checkpoint(path, everything.optimizer, alone())
    assert_same_training(everything, whole, path.name)
    again = [Training(form, dtype, Tables(comm, now)) for now in (order, OTHER[order])]
    for one in again:
        one.load(path)
        assert_part_of(one, whole, path.name)
    for one in (whole, everything, *again):
        one.steps(2)
    assert_same_training(everything, whole, path.name)
    for one in again:
        assert_part_of(one, whole, path.name)


def saved_again(comm: Communicator, _: str, folder: Path) -> None:
    """Over an older one: its parts are removed, and the new one is whole."""
    path, tables = folder / "again", Tables(comm, "range")
    own, whole = Training("LazyAdam", np.float32, tables), Training("LazyAdam", np.float32)
    names: list[set[str]] = []
    for _step in range(3):
        own.steps(1)
        whole.steps(1)
        if comm.rank == 0:  # left by a process that was killed
            left = path / ".unfinished-killed"
            left.mkdir(parents=True)
            (left / "part").touch()
        own.save(path)
        index = json.loads((path / "index.json").read_text())
        names.append(set(index["parts"]))
        everywhere(comm, "until all have looked")
        assert {p.name for p in path.iterdir()} == {"index.json", *names[-1]}
        assert len(names[-1]) == comm.size
        assert len({p.stat().st_mode for p in path.iterdir()}) == 1  # others may read all or none
    assert not names[0] & names[1] and not names[1] & names[2]
    again = Training("LazyAdam", np.float32, tables)
    again.load(path)
    assert_part_of(again, whole)


def saved_states(comm: Communicator, _: str, folder: Path) -> None:
    """Of `ShardedStates`, read by others than have written it, and by one alone."""
    for form, dtype in (
        ("Adam", np.float32),
        ("AdaFactor", np.float32),
        ("Lamb", STORAGE_DTYPES[3]),
    ):
        path = folder / f"states {form}"
        reference = make(form, params_of(SHAPES, dtype))
        opt = ShardedStates(make(form, params_of(SHAPES, dtype)), comm)
        for step in range(SAVED):
            for one in (opt, reference):
                one(gradients_of(list(reference.parameters), step))
        save_checkpoint(path, opt, comm)
        by_one = make(form, params_of(SHAPES, dtype))
        load_checkpoint(path, by_one, alone())
        again = ShardedStates(make(form, params_of(SHAPES, dtype)), comm)
        load_checkpoint(path, again, comm)
        for one in (again, by_one, reference):
            one(gradients_of(list(reference.parameters), SAVED))
        for p, q, r in zip(
            again.optimizer.parameters, reference.parameters, by_one.parameters, strict=True
        ):
            assert_same_bits(p.data, q.data, f"{form} {p.name}")
            assert_same_bits(r.data, q.data, f"{form} {p.name}")
        check_states(comm, again, reference, form)
        for name, array in by_one.state_arrays().items():
            assert_same_bits(array, reference.state_arrays()[name], f"{form} {name}")


def resume_states(comm: Communicator, _: str, folder: Path) -> None:
    """Of other processes."""
    for form, dtype in (
        ("Adam", np.float32),
        ("AdaFactor", np.float32),
        ("Lamb", STORAGE_DTYPES[3]),
    ):
        reference = make(form, params_of(SHAPES, dtype))
        opt = ShardedStates(make(form, params_of(SHAPES, dtype)), comm)
        load_checkpoint(folder / f"states {form}", opt, comm)
        for step in range(SAVED + 1):
            reference(gradients_of(list(reference.parameters), step))
        opt(gradients_of(list(reference.parameters), SAVED))
        for p, q in zip(opt.optimizer.parameters, reference.parameters, strict=True):
            assert_same_bits(p.data, q.data, f"{form} {p.name}")
        check_states(comm, opt, reference, form)


class _Broken:
    """A checkpoint, copied for each defect, and read by all processes."""

    def __init__(self, comm: Communicator, folder: Path) -> None:
        self.comm, self.folder, self.path = comm, folder, folder / "good"
        self.one = Training("LazyAdam", np.float32, Tables(comm, "range"))
        self.one.steps(1)
        self.one.save(self.path)
        self.one.save(folder / "foreign")
        self.one.steps(1)
        self.n = 0

    def refused(self, kind: type[Exception], match: str, breaks: Any) -> None:
        """``breaks`` is given the folder, on rank 0."""
        self.n += 1
        copy = self.folder / f"broken {self.n}"
        if self.comm.rank == 0:
            shutil.copytree(self.path, copy)
            breaks(copy)
        everywhere(self.comm, "until it is there")
        self.refused_there(kind, match, lambda: self.one.load(copy))

    def refused_there(self, kind: type[Exception], match: str, call: Any) -> None:
        match = f"load_checkpoint: rank 0: {match}" if self.comm.size > 1 else match
        refused_everywhere(self.comm, kind, match, call, *self.one.arrays())


def part(path: Path, rank: int) -> Path:
    return path / json.loads((path / "index.json").read_text())["parts"][rank]


def broken(comm: Communicator, _: str, folder: Path) -> None:
    """What is missing, damaged or foreign is an error of all, and nothing is written."""
    checks = _Broken(comm, folder)
    last = comm.size - 1
    missing = OSError if comm.size > 1 else FileNotFoundError

    def cut(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])

    def swap(path: Path) -> None:
        shutil.copy(part(folder / "foreign", last), part(path, last))

    def without(file: Path, name: str) -> None:
        with safe_open(file, framework="np") as content:
            metadata, arrays = content.metadata(), content.get_tensors()
        del arrays[name]
        save_file(arrays, file, metadata)

    refused = checks.refused
    refused(missing, "", lambda path: part(path, last).unlink())
    refused(missing, "", lambda path: (path / "index.json").unlink())
    refused(missing, "", shutil.rmtree)
    refused(ValueError, "part .* is damaged", lambda path: cut(part(path, last)))
    refused(ValueError, "part .* is damaged", lambda path: part(path, last).write_bytes(b""))
    refused(ValueError, "part .* is of another checkpoint", swap)
    refused(ValueError, "index.json is no index", lambda path: cut(path / "index.json"))
    other = {"format": "fusestep.distributed 9"}
    refused(ValueError, r"part .*: array 'words' is not the one of the index: .*got no such array",
        lambda path: without(part(path, last), "words"))  # fmt: skip
    refused(ValueError, "index.json has another format",
        lambda path: edit_index(path, lambda index: index.update(other)))  # fmt: skip
    refused(ValueError, "index.json is damaged",
        lambda path: edit_index(path, lambda index: index["parts"].pop()))  # fmt: skip
    _other_optimizers(comm, checks)


def _other_optimizers(comm: Communicator, checks: _Broken) -> None:
    """The checkpoint is whole, and another one's."""
    tables, path = Tables(comm, "range"), checks.path
    refused = checks.refused_there
    half = Training("LazyAdam", np.float16, tables)
    text = ".* has a wrong dtype: expected .*16, got float32 in index.json"
    refused(TypeError, text, lambda: half.load(path))
    other = Training("FTRL", np.float32, tables)
    refused(KeyError, ".*does not fit this optimizer.*missing", lambda: other.load(path))
    shard = RowShard(5, comm)
    small = nn.LazyAdam([nn.Parameter(np.ones((len(shard), 8), np.float32), "words")])
    refused(ValueError, r".*words has a wrong shape: .*, got \[97, 8\] in index.json",
        lambda: load_checkpoint(path, small, comm, {"words": shard}))  # fmt: skip
    refused(ValueError, "shards name no parameter",
        lambda: load_checkpoint(path, small, comm, {"word": shard}))  # fmt: skip
    refused(ValueError, "parameter 'words' has a wrong shape",
        lambda: load_checkpoint(path, small, comm, {"words": RowShard(97, comm)}))  # fmt: skip
    words = nn.LazyAdam(
        [nn.Parameter(np.ones((len(tables.shards["words"]), 8), np.float32), "words")]
    )
    refused(KeyError, ".*does not fit this optimizer.*more",
        lambda: load_checkpoint(path, words, comm, {"words": tables.shards["words"]}))  # fmt: skip
    refused(TypeError, "optimizer has a wrong type", lambda: load_checkpoint(path, None, comm))
    for array in small.parameters[0].data, half.params[0].data:
        assert np.isfinite(array.astype(np.float32)).all()


def of_one_rank(comm: Communicator, _: str, folder: Path) -> None:
    """What one process gives, or where it writes, is wrong: all hear of it; the old one stays."""
    for bad in {0, comm.size - 1} if comm.size > 1 else ():
        _of_rank(comm, bad, folder)


def _of_rank(comm: Communicator, bad: int, folder: Path) -> None:
    path, tables = folder / f"of rank {bad}", Tables(comm, "hash")
    one = Training("LazyAdam", np.float32, tables)
    one.steps(1)
    one.save(path)
    saved_files = {p.name: p.read_bytes() for p in path.iterdir()}
    everywhere(comm, "until all have read them")
    one.steps(1)
    shards = tables.shards | ({"none": tables.shards["few"]} if comm.rank == bad else {})
    for call in (save_checkpoint, load_checkpoint):
        refused_everywhere(
            comm, ValueError, f"rank {bad}: shards name no parameter",
            lambda call=call: call(path, one.optimizer, comm, shards), *one.arrays(),
        )  # fmt: skip
    a_file = folder / f"a file {comm.rank}"
    a_file.write_text("no folder")
    where = a_file if comm.rank == bad else path
    save, arrays = partial(save_checkpoint, path, one.optimizer), one.arrays()
    refused_everywhere(comm, OSError, f"rank {bad}: ", lambda: one.save(where), *arrays)
    own_folder = folder / f"own {comm.rank}"
    text = "rank 1: folder is another one: expected that of rank 0, got .*own 1"
    refused_everywhere(comm, OSError, text, lambda: one.save(own_folder), *arrays)
    assert not list(own_folder.iterdir())
    other = nn.SGD([nn.Parameter(p.data, p.name) for p in one.params])
    save_other = partial(save_checkpoint, path, other if comm.rank == bad else one.optimizer)
    text = f"rank {bad or 1}: optimizer"
    refused_everywhere(comm, ValueError, text, lambda: save_other(comm, tables.shards), *arrays)
    text = "differs, and has no shard: expected"
    refused_everywhere(comm, ValueError, text, lambda: save(comm), *arrays)
    of_alone = {"words": RowShard(97, alone())} if comm.rank == bad else tables.shards
    text = f"rank {bad}: the shard of 'words' is one of other processes"
    refused_everywhere(comm, ValueError, text, lambda: save(comm, of_alone), *arrays)
    everywhere(comm, "until all are refused")
    assert saved_files == {p.name: p.read_bytes() for p in path.iterdir()}
    again, whole = (Training("LazyAdam", np.float32, of) for of in (tables, None))
    again.load(path)
    whole.steps(1)
    assert_part_of(again, whole)
    everywhere(comm, "until all have read it")
