"""Checkpoints of tables and states that several processes hold: written and read in parallel.

A checkpoint is a folder: a safetensors file of each process with the rows that it owns, and
``index.json``, which says what lies where. The index is renamed to its place last: a folder has
a whole checkpoint, or none.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
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
from .agreement import agree, attempted, gather_texts, jointly
from .communicator import Communicator, LostProcessError, as_bytes
from .index import FORMAT, INDEX, Index, file_digest, index_of, part_name
from .joint_step import check_on_host
from .shard import RowShard
from .states import ShardedStates

_UNFINISHED = ".unfinished-"
_OF_INDEX = f"save_checkpoint: {INDEX}"


class _Array(NamedTuple):
    """An array of a checkpoint."""

    array: np.ndarray  # of this process: its rows, or all of it
    shard: RowShard | None  # whose rows they are; None: one process writes it
    owner: int  # who writes it then

    @property
    def layout(self) -> dict[str, Any]:
        """The description of the array in the index."""
        dtype, shape = str(self.array.dtype), self.array.shape
        if self.shard is None:
            return {"dtype": dtype, "shape": list(shape), "rank": self.owner}
        return {"dtype": dtype, "shape": [self.shard.rows, *shape[1:]], "order": self.shard.order}


def save_checkpoint(
    folder: str | os.PathLike[str], optimizer: Optimizer | ShardedStates, comm: Communicator,
    shards: Mapping[str, RowShard] | None = None,
) -> None:  # fmt: skip
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
    kept = {n: a for n, a in arrays.items() if a.shard is not None or a.owner == comm.rank}
    _, error = attempted(_make_folder, path, comm.rank)
    received = agree(comm, where, _common(arrays, optimizer), error, (secrets.randbits(62), 0))
    names = [part_name(rank, comm.size, f"{received[0, 0]:016x}") for rank in range(comm.size)]
    part = path / names[comm.rank]
    try:
        digest = jointly(comm, where, _write_part, part, {n: a.array for n, a in kept.items()})
        jointly(comm, where, _check_folder, where, path / names[0])
    except LostProcessError:
        raise
    except Exception:
        _remove([part])
        raise
    # All parts are on the disk. Until the index is there the folder has the checkpoint of before;
    # from then on, this one.
    said = gather_texts(comm, json.dumps([digest, {name: a.layout for name, a in kept.items()}]))
    if comm.rank == 0:
        digests, layouts = zip(*map(json.loads, said), strict=True)
        described = {name: layout for by_name in layouts for name, layout in by_name.items()}
        _, error = attempted(_write_index, path, dict(zip(names, digests, strict=True)), described)
    agree(comm, where, {}, error)


def _common(arrays: dict[str, _Array], optimizer: Any) -> dict[str, Any]:
    """The entries that all processes have alike: arrays without a shard, but of `ShardedStates`."""
    is_alike = not isinstance(optimizer, ShardedStates)
    whole = {n: a for n, a in arrays.items() if a.shard is None and is_alike}
    return {
        "shards": {n: a.layout for n, a in arrays.items() if a.shard is not None},
        "arrays without a shard": {
            n: {**a.layout, "crc32": zlib.crc32(as_bytes(np.ascontiguousarray(a.array)).data)}
            for n, a in whole.items()
        },
    }


def _make_folder(path: Path, rank: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        check_target(_OF_INDEX, path / INDEX)


def _check_folder(where: str, first: Path) -> None:
    """Whether the folder is that of rank 0: machines may reach it by different paths."""
    if not first.is_file():
        expected, got = "that of rank 0", f"{first.parent}, which has no {first.name}"
        reject(OSError, where, "folder", "is another one", expected, got)


def _write_part(part: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write a part to the disk; its digest."""
    # Contiguous ones; those without dimensions stay so.
    content = {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in arrays.items()}
    with TemporaryDirectory(prefix=_UNFINISHED, dir=part.parent) as folder:
        unfinished = Path(folder, part.name)
        unfinished.touch()  # with the permissions of a new file; safetensors gives its owner's only
        mode = unfinished.stat().st_mode
        try:
            save_file(content, unfinished, metadata={"format": FORMAT})
        except SafetensorError as error:
            raise OSError(f"save_checkpoint: {part.parent}: {error}") from error
        unfinished.chmod(mode)
        with open(unfinished, "r+b") as file:
            os.fsync(file.fileno())
        digest = file_digest(unfinished)  # here nobody can exchange it
        os.replace(unfinished, part)
    return digest


def _write_index(path: Path, parts: dict[str, str], arrays: dict[str, Any]) -> None:
    """Write the index, with which the checkpoint is the new one, and remove the parts of others."""
    index, content = path / INDEX, index_of(parts, arrays)
    try:
        replace_file(index, content, _OF_INDEX)
    except Exception:
        with suppress(OSError):
            if not (index.is_file() and index.read_bytes() == content):
                _remove(path / name for name in parts)
        raise
    _remove(old for old in path.glob("part-*.safetensors") if old.name not in parts)
    for left in path.glob(f"{_UNFINISHED}*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)


def _remove(parts: Iterable[Path]) -> None:
    for part in parts:
        with suppress(OSError):
            part.unlink()


def load_checkpoint(
    folder: str | os.PathLike[str], optimizer: Optimizer | ShardedStates, comm: Communicator,
    shards: Mapping[str, RowShard] | None = None,
) -> None:  # fmt: skip
    """Read what `save_checkpoint` has written; any number of processes do, and all call this.

    Each process reads the rows that it owns now, in either order of rows. Everything is checked
    before anything is written; only a file that cannot be read any more then leaves tables half
    read. The index has a digest of itself and of every part: the processes deal out the parts, and
    read each once from end to end before they read rows.

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
    # Each part is checked by one process. The others would check the same file again.
    jointly(comm, where, index.check_parts, comm.rank, comm.size)
    whole = jointly(comm, where, _whole_arrays, index, arrays, _keeper(optimizer))
    # The first write, on all processes: before it they have checked all that they can.
    jointly(comm, where, _write, index, whole, arrays, _keeper(optimizer))


def _fitting_index(where: str, path: Path, arrays: dict[str, _Array], names: set[str]) -> Index:
    """The index, when all that it names fits; ``names`` are those of all ranks."""
    index = Index(path)
    for which, wrong in (
        ("missing", names - index.arrays.keys()),
        ("more", index.arrays.keys() - names),
    ):
        if wrong:
            expected, got = "the names of the optimizer", f"{which}: {sorted(wrong)[:3]}"
            reject(KeyError, where, "checkpoint", "does not fit this optimizer", expected, got)
    for name, a in arrays.items():
        saved, layout = index.arrays[name], a.layout
        for kind, key in ((TypeError, "dtype"), (ValueError, "shape")):
            if saved[key] != layout[key]:
                got = f"{saved[key]} in {INDEX}"
                reject(kind, where, name, f"has a wrong {key}", layout[key], got)
        if not a.array.flags.writeable:
            reject(ValueError, where, name, "is read-only", "a writable array", "a read-only one")
    return index


def _whole_arrays(index: Index, arrays: dict[str, _Array], base: Any) -> dict[str, np.ndarray]:
    """The arrays that are not divided by rows now, in memory: they fit the optimizer."""
    whole = {name: np.empty_like(a.array) for name, a in arrays.items() if a.shard is None}
    for name, array in whole.items():
        index.read(name, None, array)
    base.fitting(_state_of(base, whole))
    return whole


def _state_of(base: Any, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: whole.get(name, array) for name, array in base.state_arrays().items()}


def _write(
    index: Index, whole: dict[str, np.ndarray], arrays: dict[str, _Array], base: Any
) -> None:
    base.load_state_dict(_state_of(base, whole))
    for name, a in arrays.items():
        if a.shard is None:
            a.array[...] = whole[name]  # parameters: states are there already
        else:
            index.read(name, a.shard.indices, a.array)
    base.wake_late()


def _keeper(optimizer: Any) -> Any:
    """The optimizer itself that has the states."""
    return optimizer.optimizer if isinstance(optimizer, ShardedStates) else optimizer


def _given(
    where: str, folder: Any, optimizer: Any, shards: Any, comm: Communicator
) -> tuple[Path, dict[str, _Array]]:
    """The folder, and the arrays of the optimizer, when the arguments of all processes fit."""
    shards = {} if shards is None else shards
    arrays, error = attempted(_arrays, where, folder, optimizer, shards, comm)
    kind = [type(_keeper(optimizer)).__name__, isinstance(optimizer, ShardedStates)]
    agree(comm, where, {"optimizer": kind}, error)
    return Path(folder), arrays


def _arrays(
    where: str, folder: Any, optimizer: Any, shards: Mapping[str, RowShard], comm: Communicator
) -> dict[str, _Array]:
    """The arrays of an optimizer by name: parameters, states and counts."""
    check_kind(where, "folder", folder, str | os.PathLike, "a path")
    base = _keeper(optimizer)
    check_kind(where, "optimizer", base, StatefulOptimizer, "a FusedOptimizer")
    check_on_host(where, base)
    names = [str(parameter.name) for parameter in base.parameters]
    _check_shards(where, shards, names, comm)
    if taken := sorted(base.state_arrays().keys() & set(names)):
        expected = "names that no state of the optimizer has"
        reject(ValueError, where, "parameters", "have names of states", expected, taken)
    owners = optimizer.owners if isinstance(optimizer, ShardedStates) else [0] * len(names)
    by_name = {name: _Array(array, None, 0) for name, array in base.state_arrays().items()}
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
            by_name[label] = _Array(state, shard, owners[i])
        by_name[f"step.{name}"] = _Array(by_name[f"step.{name}"].array, None, owners[i])
    for name, a in by_name.items():
        check_savable(where, name, a.array)
    return by_name


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
