"""Checkpoints of tables and states that several processes hold: written and read in parallel.

A checkpoint is a folder: a safetensors file of each process with the rows that it owns, and
``index.json``, which says what lies where. The index is renamed to its place last: a folder has
a whole checkpoint, or none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ...kernels.files import check_target
from ...ops.runtime.errors import reject
from ..base.arguments import check_kind
from ..base.checkpoint import check_savable, replace_file
from ..base.optimizer import Optimizer
from ..base.stateful import StatefulOptimizer
from .agreement import agree, attempted, gather_texts
from .communicator import Communicator, LostProcessError
from .index import FORMAT, INDEX, Index, checksum, index_of, new_token, part_names
from .joint_step import check_on_host
from .shard import RowShard
from .states import ShardedStates

_UNFINISHED = ".unfinished-"
_OF_INDEX = f"save_checkpoint: {INDEX}"


class _Array(NamedTuple):
    """An array of a checkpoint."""

    array: np.ndarray  # of this process: its rows, or all of it
    shard: RowShard | None  # whose rows they are; None: the same on all processes
    owner: int  # who writes it then

    def belongs_to(self, rank: int) -> bool:
        """Whether a process writes it, or its rows of it."""
        return self.shard is not None or self.owner == rank

    @property
    def form(self) -> dict[str, Any]:
        """The description of the array in the index."""
        dtype = str(self.array.dtype)
        if self.shard is None:
            return {"dtype": dtype, "shape": list(self.array.shape), "rank": self.owner}
        division = {"order": self.shard.order, "height": self.shard.height}
        return {"dtype": dtype, "shape": [self.shard.rows, *self.array.shape[1:]], **division}

    @property
    def content(self) -> dict[str, int]:
        """The checksum of an array that one process writes; the others must have the same."""
        if self.shard is not None:
            return {}
        return {"crc32": checksum(self.array)}


def save_checkpoint(
    folder: str | os.PathLike[str],
    optimizer: Optimizer | ShardedStates,
    comm: Communicator,
    shards: Mapping[str, RowShard] | None = None,
) -> None:
    """Write parameters and states of all processes to a folder; all processes call this.

    Each process writes its rows and the states that it keeps; what all have, and have to have
    alike, one writes. A process that ends at any moment leaves the last whole checkpoint of the
    folder as it was.

    The folder may be a symbolic link to one. Links in it are not followed: they are replaced, as
    files of an older checkpoint are, and what they point to stays as it is.

    Args:
        folder: one that all processes reach, by whatever path; made if it is missing.
        optimizer: the optimizer, with its parameters, on the host.
        comm: the processes.
        shards: by the name of a parameter, whose rows it holds.

    Raises:
        TypeError: on a rank, a kind does not fit.
        ValueError: on a rank, a parameter is on a device, has not the rows of its shard, a state
            without rows, or the name of a state or ``__metadata__``; a name is that of no
            parameter; a shard is one of other processes. Or the optimizers differ, or what has
            no shard.
        OSError: on a rank, a file cannot be written, or its folder is another one. The error
            names the rank, and no file of this checkpoint is left.
        LostProcessError: a process has ended.

    >>> import numpy as np, tempfile
    >>> from fusestep import nn
    >>> from fusestep.nn.distributed import RowShard, alone, load_checkpoint, save_checkpoint
    >>> table = nn.Parameter(np.ones((4, 2), np.float32), name="table")
    >>> opt, shards = nn.LazyAdam([table]), {"table": RowShard(4, alone())}
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder, opt, alone(), shards)
    >>> table.data[:] = 0
    >>> load_checkpoint(folder, opt, alone(), shards)
    >>> float(table.data.sum())
    8.0
    """
    where = "save_checkpoint"
    path, arrays = _given(where, folder, optimizer, shards, comm)
    keeps_all = not isinstance(optimizer, ShardedStates)
    kept = {n: a for n, a in arrays.items() if keeps_all or a.belongs_to(comm.rank)}
    forms = {name: {**a.form, **a.content} for name, a in kept.items()}
    known = _union(where, [json.loads(text) for text in gather_texts(comm, json.dumps(forms))])
    token = gather_texts(comm, new_token())[0]
    own = {
        name: np.ascontiguousarray(a.array).reshape(a.array.shape)  # 0-d stays so
        for name, a in kept.items()
        if a.belongs_to(comm.rank)
    }
    _make_folder(where, path, comm, token)
    part = path / part_names(token, comm.size)[comm.rank]
    metadata = {"format": FORMAT, "checkpoint": token, "rank": str(comm.rank)}
    _, error = attempted(_write_part, part, own, metadata)
    try:
        agree(comm, where, {}, error)
    except LostProcessError:  # the first process may have heard from all, and write the index
        raise
    except Exception:
        _remove_parts([part])
        raise
    # All have said that their part is on the disk. Until the index is there the folder has the
    # checkpoint of before; from then on, this one.
    if comm.rank == 0:
        _, error = attempted(_write_index, path, token, comm.size, known)
    agree(comm, where, {}, error)


def _make_folder(where: str, path: Path, comm: Communicator, token: str) -> None:
    """Make the folder, and see that it is one: that all find in it what the first one puts there.

    Paths tell nothing: machines may reach a folder by different ones.
    """
    probe = path / f"{_UNFINISHED}{token}"
    _, error = attempted(_make_probe, path, probe, comm.rank)
    try:
        agree(comm, where, {}, error)
        _, error = attempted(_check_probe, where, probe)
        agree(comm, where, {}, error)
    finally:
        if comm.rank == 0:
            with suppress(OSError, ValueError):  # a later call removes it
                probe.rmdir()


def _make_probe(path: Path, probe: Path, rank: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        check_target(_OF_INDEX, path / INDEX)
        probe.mkdir()


def _check_probe(where: str, probe: Path) -> None:
    if not probe.is_dir():
        expected, got = "that of rank 0", f"{probe.parent}, which has no {probe.name}"
        reject(OSError, where, "folder", "is another one", expected, got)


def _write_part(part: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    with TemporaryDirectory(prefix=_UNFINISHED, dir=part.parent) as folder:
        unfinished = Path(folder, part.name)
        unfinished.touch()  # with the permissions of a new file; safetensors gives its owner's only
        mode = unfinished.stat().st_mode
        try:
            save_file(arrays, unfinished, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"save_checkpoint: {part.parent}: {error}") from error
        unfinished.chmod(mode)
        with open(unfinished, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, part)


def _write_index(path: Path, token: str, size: int, arrays: dict[str, Any]) -> None:
    """Write the index, with which the checkpoint is the new one, and remove the parts of others."""
    index, names = path / INDEX, part_names(token, size)
    try:
        replace_file(index, index_of(path, token, size, arrays), _OF_INDEX)
    except Exception:
        with suppress(OSError):
            is_new = index.is_file() and token.encode() in index.read_bytes()
            if not is_new:
                _remove_parts(path / name for name in names)
        raise
    _remove_parts(old for old in path.glob("part-*.safetensors") if old.name not in names)
    for left in path.glob(f"{_UNFINISHED}*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)


def _remove_parts(parts: Iterable[Path]) -> None:
    for part in parts:
        with suppress(OSError):
            part.unlink()


def _union(where: str, forms_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The arrays of all processes: states of a parameter may be with its owner alone."""
    known: dict[str, Any] = {}
    for rank, forms in enumerate(forms_by_rank):
        for name, form in forms.items():
            if known.setdefault(name, form) != form:
                what, wrong = f"rank {rank}: {name!r}", "differs, and has no shard"
                reject(ValueError, where, what, wrong, f"{known[name]} as on other ranks", form)
    for name, form in known.items():
        for rank in range(len(forms_by_rank)) if "rank" not in form else [form["rank"]]:
            if name not in forms_by_rank[rank]:
                expected = f"{name!r}, as on other ranks"
                reject(ValueError, where, f"rank {rank}", "lacks an array", expected, "none")
    return known


def load_checkpoint(
    folder: str | os.PathLike[str],
    optimizer: Optimizer | ShardedStates,
    comm: Communicator,
    shards: Mapping[str, RowShard] | None = None,
) -> None:
    """Read what `save_checkpoint` has written; any number of processes do, and all call this.

    Each process reads the rows that it owns now, in either order of rows. Everything is checked
    before anything is written; only a file that cannot be read any more then leaves tables half
    read. The index, the headers of the parts and every array that was saved without a shard have
    checksums. **Rows that were saved by a shard have none**: dtype, shape and place are checked,
    and numbers that have changed are loaded. Folders of version 0.1.1 have no checksums of the
    index and the headers.

    Symbolic links are followed: the folder, the index and the parts may be links.

    The arguments are those of `save_checkpoint`.

    Raises:
        OSError: on a rank, the index or a part is missing or cannot be read.
        KeyError: the checkpoint has not the names of the optimizer, or more.
        TypeError: a dtype differs from that of the optimizer, or a kind does not fit.
        ValueError: a shape differs, an array is read-only, the index or a part is damaged or no
            file, a part is of another checkpoint, or the processes read different ones.
        LostProcessError: a process has ended.
    """
    where = "load_checkpoint"
    path, arrays = _given(where, folder, optimizer, shards, comm)
    texts = gather_texts(comm, json.dumps(list(arrays)))
    names = {name for text in texts for name in json.loads(text)}
    index, error = attempted(_fitting_index, where, path, arrays, names)
    agree(comm, where, {"index": index and index.digest}, error)
    whole, error = attempted(_whole_arrays, index, arrays, optimizer)
    agree(comm, where, {}, error)
    # The first write, on all processes: before it each has checked all that it can.
    _, error = attempted(_write, index, whole, arrays, optimizer)
    agree(comm, where, {}, error)


def _fitting_index(where: str, path: Path, arrays: dict[str, _Array], names: set[str]) -> Index:
    """The index, when all that it names is there and fits; ``names`` are those of all ranks."""
    index = Index(path)
    _check_names(where, "missing", names - index.arrays.keys())
    for name, a in arrays.items():
        saved, own = index.arrays[name], a.form
        for kind, key in ((TypeError, "dtype"), (ValueError, "shape")):
            if saved[key] != own[key]:
                got = f"{saved[key]} in {INDEX}"
                reject(kind, where, name, f"has a wrong {key}", own[key], got)
        if not a.array.flags.writeable:
            reject(ValueError, where, name, "is read-only", "a writable array", "a read-only one")
    _check_names(where, "more", index.arrays.keys() - names)
    index.check_parts()
    return index


def _check_names(where: str, which: str, names: set[str]) -> None:
    if names:
        expected, got = "the names of the optimizer", f"{which}: {sorted(names)[:3]}"
        reject(KeyError, where, "checkpoint", "does not fit this optimizer", expected, got)


def _whole_arrays(index: Index, arrays: dict[str, _Array], optimizer: Any) -> dict[str, np.ndarray]:
    """The arrays in memory, checked: all but the rows of shards that were saved as such."""
    whole: dict[str, np.ndarray] = {}
    for name, a in arrays.items():
        if index.is_whole(name):
            found = index.whole(name)
            whole[name] = found if a.shard is None else found[a.shard.indices]
        elif a.shard is None:
            whole[name] = np.empty_like(a.array)
            index.read_rows(name, np.arange(len(a.array)), whole[name])
    base = _keeper(optimizer)
    base.fitting(_state_of(base, whole))
    return whole


def _state_of(base: Any, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: whole.get(name, array) for name, array in base.state_arrays().items()}


def _write(
    index: Index, whole: dict[str, np.ndarray], arrays: dict[str, _Array], optimizer: Any
) -> None:
    """Write what was checked to its place, and rows from the parts to theirs."""
    base = _keeper(optimizer)
    base.load_state_dict(_state_of(base, whole))
    for parameter in base.parameters:
        if str(parameter.name) in whole:
            parameter.array[...] = whole[str(parameter.name)]
    for name, a in arrays.items():
        if a.shard is not None and name not in whole:
            index.read_rows(name, a.shard.indices, a.array)


def _keeper(optimizer: Any) -> Any:
    """The optimizer itself that has the states."""
    return optimizer.optimizer if isinstance(optimizer, ShardedStates) else optimizer


def _kind_of(optimizer: Any) -> list[Any]:
    """The class of the optimizer and its form, which must be the same on all processes."""
    return [type(_keeper(optimizer)).__name__, isinstance(optimizer, ShardedStates)]


def _given(
    where: str, folder: Any, optimizer: Any, shards: Any, comm: Communicator
) -> tuple[Path, dict[str, _Array]]:
    """The folder, and the arrays of the optimizer, when the arguments of all processes fit."""
    _, error = attempted(check_kind, where, "folder", folder, str | os.PathLike, "a path")
    if error is None:
        shards = {} if shards is None else shards
        arrays, error = attempted(_arrays, where, optimizer, shards, comm)
    agree(comm, where, {"optimizer": _kind_of(optimizer)}, error)
    return Path(folder), arrays


def _arrays(
    where: str, optimizer: Any, shards: Mapping[str, RowShard], comm: Communicator
) -> dict[str, _Array]:
    """The arrays of an optimizer by name: parameters, states and counts."""
    base = _keeper(optimizer)
    if not isinstance(base, StatefulOptimizer):
        got = type(base).__name__
        reject(TypeError, where, "optimizer", "has a wrong type", "a FusedOptimizer", got)
    check_on_host(where, base)
    names = [str(parameter.name) for parameter in base.parameters]
    _check_shards(where, shards, names, comm)
    if taken := sorted(base.state_arrays().keys() & set(names)):
        expected = "names that no state of the optimizer has"
        reject(ValueError, where, "parameters", "have names of states", expected, taken)
    owners = optimizer.owners if isinstance(optimizer, ShardedStates) else [0] * len(names)
    found = {name: _Array(array, None, 0) for name, array in base.state_arrays().items()}
    for i, (name, parameter) in enumerate(zip(names, base.parameters, strict=True)):
        shard, states = shards.get(name), base.states_by_name(i)
        array = parameter.array
        if shard is not None and len(array) != len(shard):
            expected, got = f"the {len(shard)} rows of its shard", array.shape
            reject(ValueError, where, f"parameter {name!r}", "has a wrong shape", expected, got)
        for label, state in {name: array, **states}.items():
            if shard is not None and state.shape[:1] != array.shape[:1]:
                wrong, expected = "cannot be divided by rows", f"{len(array)} rows"
                reject(ValueError, where, f"state {label!r}", wrong, expected, state.shape)
            found[label] = _Array(state, shard, owners[i])
        found[f"step.{name}"] = _Array(found[f"step.{name}"].array, None, owners[i])
    for name, a in found.items():
        check_savable(where, name, a.array)
    return found


def _check_shards(where: str, shards: Any, names: list[str], comm: Communicator) -> None:
    """Whether these are shards of parameters and of these processes."""
    check_kind(where, "shards", shards, Mapping, "a mapping of names to shards")
    if unknown := sorted(shards.keys() - set(names)):
        reject(ValueError, where, "shards", "name no parameter", names, unknown)
    for name, shard in shards.items():
        what = f"the shard of {name!r}"
        check_kind(where, what, shard, RowShard, "a RowShard")
        if (shard.comm.rank, shard.comm.size) != (comm.rank, comm.size):
            expected = f"rank {comm.rank} of {comm.size}, as comm"
            wrong, got = "is one of other processes", f"{shard.comm.rank} of {shard.comm.size}"
            reject(ValueError, where, what, wrong, expected, got)
