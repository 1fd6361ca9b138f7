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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...ops.runtime.errors import reject
from ..base.checkpoint import replace_file
from ..base.optimizer import Optimizer
from ..base.stateful import StatefulOptimizer
from .agreement import agree, attempted, gather_texts
from .communicator import Communicator, LostProcessError, as_bytes
from .joint_step import check_on_host
from .shard import ORDERS, RowShard, places
from .states import ShardedStates

_FORMAT = "fusestep.distributed 1"
_INDEX = "index.json"
_UNFINISHED = ".unfinished-"


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
        """How the index describes it."""
        dtype = str(self.array.dtype)
        if self.shard is None:
            return {"dtype": dtype, "shape": list(self.array.shape), "rank": self.owner}
        of_rows = {"order": self.shard.order, "height": self.shard.height}
        return {"dtype": dtype, "shape": [self.shard.rows, *self.array.shape[1:]], **of_rows}

    @property
    def content(self) -> dict[str, int]:
        """What tells whether all processes have it alike, where one writes it."""
        if self.shard is not None:
            return {}
        return {"crc32": zlib.crc32(as_bytes(np.ascontiguousarray(self.array)).data)}


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

    Args:
        folder: where all processes reach it; made if it is missing.
        optimizer: the optimizer, with its parameters, on the host.
        comm: the processes.
        shards: by the name of a parameter, whose rows it holds.

    Raises:
        TypeError: on a rank, a kind does not fit.
        ValueError: on a rank, a parameter is on a device, has not the rows of its shard, or a state
            without rows; a name is that of no parameter; a shard is one of other processes. Or
            the optimizers differ, or what has no shard.
        OSError: on a rank, a file cannot be written, or its folder is another one. The error
            names the rank.
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
    >>> table.data.sum()
    np.float32(8.0)
    """
    where, path = "save_checkpoint", Path(folder)
    arrays, error = attempted(_arrays, where, optimizer, shards or {}, comm)
    agree(comm, where, {"optimizer": _kind_of(optimizer)}, error)
    keeps_all = not isinstance(optimizer, ShardedStates)
    kept = {n: a for n, a in arrays.items() if keeps_all or a.belongs_to(comm.rank)}
    forms = {name: {**a.form, **a.content} for name, a in kept.items()}
    known = _union(where, [json.loads(text) for text in gather_texts(comm, json.dumps(forms))])
    token = gather_texts(comm, secrets.token_hex(8))[0]
    own = {
        name: np.ascontiguousarray(a.array).reshape(a.array.shape)  # 0-d stays so
        for name, a in kept.items()
        if a.belongs_to(comm.rank)
    }
    names = [f"part-{rank:05}-of-{comm.size:05}-{token}.safetensors" for rank in range(comm.size)]
    _, error = attempted(_write_part, path, names[comm.rank], own, token)
    try:
        agree(comm, where, {}, error)
    except LostProcessError:  # the first process may have heard from all, and write the index
        raise
    except Exception:
        with suppress(OSError):
            (path / names[comm.rank]).unlink()
        raise
    if comm.rank == 0:
        index = {"format": _FORMAT, "checkpoint": token, "parts": names, "arrays": known}
        _, error = attempted(_write_index, path, index)
    agree(comm, where, {}, error)


def _write_part(path: Path, name: str, arrays: dict[str, np.ndarray], token: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=_UNFINISHED, dir=path) as folder:
        unfinished = Path(folder, name)
        unfinished.touch()  # with the permissions of a new file; safetensors gives its owner's only
        mode = unfinished.stat().st_mode
        try:
            save_file(arrays, unfinished, metadata={"format": _FORMAT, "checkpoint": token})
        except SafetensorError as error:
            raise OSError(f"save_checkpoint: {path}: {error}") from error
        unfinished.chmod(mode)
        with open(unfinished, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path / name)


def _write_index(path: Path, index: dict[str, Any]) -> None:
    """The moment at which the checkpoint is the new one; parts of others are removed."""
    for rank, name in enumerate(index["parts"]):
        if not (path / name).is_file():
            expected, got = f"one folder, {path}", f"no {name} in it"
            reject(OSError, "save_checkpoint", f"rank {rank}", "writes elsewhere", expected, got)
    replace_file(path / _INDEX, json.dumps(index, indent=1).encode())
    for old in path.glob("part-*.safetensors"):
        if old.name not in index["parts"]:
            with suppress(OSError):
                old.unlink()
    for left in path.glob(f"{_UNFINISHED}*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)


def _union(where: str, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all processes have: states of a parameter may be with its owner alone."""
    known: dict[str, Any] = {}
    for rank, forms in enumerate(of_ranks):
        for name, form in forms.items():
            if known.setdefault(name, form) != form:
                what, wrong = f"rank {rank}: {name!r}", "differs, and has no shard"
                reject(ValueError, where, what, wrong, f"{known[name]} as on other ranks", form)
    for name, form in known.items():
        for rank in range(len(of_ranks)) if "rank" not in form else [form["rank"]]:
            if name not in of_ranks[rank]:
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
    read.

    The arguments are those of `save_checkpoint`.

    Raises:
        OSError: on a rank, the index or a part is missing or cannot be read.
        KeyError: the checkpoint has not the names of the optimizer, or more.
        TypeError: a dtype differs.
        ValueError: a shape differs, the index or a part is damaged, or a part is of another
            checkpoint.
        LostProcessError: a process has ended.
    """
    where, path = "load_checkpoint", Path(folder)
    arrays, error = attempted(_arrays, where, optimizer, shards or {}, comm)
    agree(comm, where, {"optimizer": _kind_of(optimizer)}, error)
    of_ranks = gather_texts(comm, json.dumps(list(arrays)))
    names = {name for text in of_ranks for name in json.loads(text)}
    index, error = attempted(_checked_index, where, path, arrays, names)
    agree(comm, where, {"checkpoint": index and index["checkpoint"]}, error)
    _, error = attempted(_load, path, index, arrays, optimizer)
    agree(comm, where, {}, error)


def _checked_index(
    where: str, path: Path, arrays: dict[str, _Array], names: set[str]
) -> dict[str, Any]:
    """The index, when all that it names is there and fits; ``names`` are those of all ranks."""
    index = _read_index(where, path)
    for rank, name in enumerate(index["parts"]):
        try:
            with safe_open(path / name, framework="np") as part:
                token, found = (part.metadata() or {}).get("checkpoint"), set(part.keys())
        except SafetensorError as error:
            reject(ValueError, where, f"part {name!r}", "is damaged", "a whole file", error)
        if token != index["checkpoint"]:
            wrong = "is of another checkpoint"
            reject(ValueError, where, f"part {name!r}", wrong, index["checkpoint"], token)
        of_part = {n for n, form in index["arrays"].items() if form.get("rank", rank) == rank}
        if not of_part <= found:
            lacking = sorted(of_part - found)[:3]
            reject(ValueError, where, f"part {name!r}", "lacks arrays", lacking, "none")
    _check_names(where, "missing", names - index["arrays"].keys())
    for name, a in arrays.items():
        saved, own = index["arrays"][name], a.form
        if saved["dtype"] != own["dtype"]:
            reject(TypeError, where, name, "has a wrong dtype", own["dtype"], saved["dtype"])
        if saved["shape"] != own["shape"]:
            reject(ValueError, where, name, "has a wrong shape", own["shape"], saved["shape"])
    _check_names(where, "more", index["arrays"].keys() - names)
    return index


def _check_names(where: str, which: str, names: set[str]) -> None:
    if names:
        expected, got = "the names of the optimizer", f"{which}: {sorted(names)[:3]}"
        reject(KeyError, where, "checkpoint", "does not fit this optimizer", expected, got)


def _read_index(where: str, path: Path) -> dict[str, Any]:
    text = (path / _INDEX).read_text()
    try:
        index: dict[str, Any] = json.loads(text)
        found = index["format"]
        is_whole = found != _FORMAT or _is_whole(index)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        reject(ValueError, where, _INDEX, "is no index of a checkpoint", _FORMAT, str(path))
    if found != _FORMAT:
        reject(ValueError, where, _INDEX, "has another format", _FORMAT, found)
    return index


def _is_whole(index: dict[str, Any]) -> bool:
    """Whether what an index says belongs together."""
    parts, forms = index["parts"], index["arrays"].values()
    divided = [form for form in forms if "rank" not in form]
    return (
        all(Path(name).name == name for name in parts)
        and all(0 <= form["rank"] < len(parts) for form in forms if "rank" in form)
        and all(form["height"] * len(parts) >= form["shape"][0] for form in divided)
        and all(form["order"] in ORDERS for form in divided)
    )


def _load(path: Path, index: dict[str, Any], arrays: dict[str, _Array], optimizer: Any) -> None:
    """Rows into their places; the rest by way of the optimizer, which looks at the values."""
    files = [path / name for name in index["parts"]]
    whole: dict[str, np.ndarray] = {}
    for name, a in arrays.items():
        saved = index["arrays"][name]
        if "rank" in saved:
            with safe_open(files[saved["rank"]], framework="np") as part:
                found = part.get_tensor(name)
            whole[name] = found if a.shard is None else found[a.shard.indices]
        elif a.shard is None:
            whole[name] = np.empty_like(a.array)
            _read_rows(files, name, saved, np.arange(len(a.array)), whole[name])
    base = _keeper(optimizer)
    own = base.state_arrays()
    base.load_state_dict({name: whole.get(name, array) for name, array in own.items()})
    for parameter in base.parameters:
        if str(parameter.name) in whole:
            parameter.array[...] = whole[str(parameter.name)]
    for name, a in arrays.items():
        if a.shard is not None and name not in whole:
            _read_rows(files, name, index["arrays"][name], a.shard.indices, a.array)


def _read_rows(
    files: list[Path], name: str, saved: dict[str, Any], ids: np.ndarray, out: np.ndarray
) -> None:
    """Rows by their numbers, out of the parts that have them."""
    at = places(ids, saved["shape"][0], saved["order"])
    part_of = at // saved["height"]
    for rank in np.unique(part_of).tolist():
        own = np.flatnonzero(part_of == rank)
        local = at[own] - rank * saved["height"]
        with safe_open(files[rank], framework="np") as part:
            first, last = int(local.min()), int(local.max()) + 1
            rows = part.get_slice(name)[first:last]
        out[own] = rows[local - first]


def _keeper(optimizer: Any) -> Any:
    """The optimizer itself that has the states."""
    return optimizer.optimizer if isinstance(optimizer, ShardedStates) else optimizer


def _kind_of(optimizer: Any) -> list[Any]:
    """What has to be the same for all processes."""
    return [type(_keeper(optimizer)).__name__, isinstance(optimizer, ShardedStates)]


def _arrays(
    where: str, optimizer: Any, shards: Mapping[str, RowShard], comm: Communicator
) -> dict[str, _Array]:
    """What an optimizer has, by name."""
    base = _keeper(optimizer)
    if not isinstance(base, StatefulOptimizer):
        got = type(base).__name__
        reject(TypeError, where, "optimizer", "has a wrong type", "a FusedOptimizer", got)
    check_on_host(where, base)
    names = [str(parameter.name) for parameter in base.parameters]
    if unknown := sorted(shards.keys() - set(names)):
        reject(ValueError, where, "shards", "name no parameter", names, unknown)
    owners = optimizer.owners if isinstance(optimizer, ShardedStates) else [0] * len(names)
    found = {name: _Array(array, None, 0) for name, array in base.state_arrays().items()}
    for i, (name, parameter) in enumerate(zip(names, base.parameters, strict=True)):
        shard, states = shards.get(name), base.states_by_name(i)
        array = parameter.array
        if shard is not None and (shard.comm.rank, shard.comm.size) != (comm.rank, comm.size):
            expected = f"rank {comm.rank} of {comm.size}, as comm"
            wrong, got = "is one of other processes", f"{shard.comm.rank} of {shard.comm.size}"
            reject(ValueError, where, f"the shard of {name!r}", wrong, expected, got)
        if shard is not None and len(array) != len(shard):
            expected, got = f"the {len(shard)} rows of its shard", array.shape
            reject(ValueError, where, f"parameter {name!r}", "has a wrong shape", expected, got)
        for label, state in {name: array, **states}.items():
            if shard is not None and state.shape != array.shape:
                wrong, expected = "cannot be divided by rows", f"the shape {array.shape}"
                reject(ValueError, where, f"state {label!r}", wrong, expected, state.shape)
            found[label] = _Array(state, shard, owners[i])
        found[f"step.{name}"] = _Array(found[f"step.{name}"].array, None, owners[i])
    return found
