"""Tables that grow, whose ids several processes own: which ids each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...kernels.keeping import mixed, unmixed
from ...ops.runtime.arrays import adopt
from ...ops.runtime.errors import reject
from ..base.arguments import MOST_STEPS, check_kind
from ..base.ids.id_arrays import OPTIONAL, STATE, checked_state, ids_of_64_bits
from ..base.ids.id_map import Admissions, IdMap
from ..engine.bag_maps import FoundRows
from .agreement import agree, attempted, jointly
from .communicator import Communicator
from .route import Route

_PREFIX = "ids."
_BY_ID = {
    "ids": ("counts", "last_uses"), "pending": ("pending_counts", "pending_last_uses"),
    "removed": ("removed_steps",),
}  # fmt: skip
"""Arrays of ids in the state of a map, and what each has for each id."""


class IdShard:
    """The ids that this process owns, and the rows that a map gives them in its table.

    The owner of an id follows from a hash of it. So weights by id are those of one process that
    has all ids, for any number of processes, while no id is evicted or refused for lack of room,
    and after equal calls of `IdMap.evict` with bounds. The numbers of rows may differ.

    Args:
        ids: the map of this process; only ``capacity``, ``pending``, ``remembered`` may differ.
        comm: the processes; all of them call this.

    Raises:
        TypeError: on a rank, ``ids`` is no `IdMap`.
        ValueError: maps differ; the error names the rank.

    >>> import numpy as np
    >>> from fusestep import nn
    >>> from fusestep.nn.distributed import IdShard, alone
    >>> table = np.zeros((10, 2), np.float32)
    >>> opt, shard = nn.LazyAdam([table]), IdShard(nn.IdMap(10), alone())
    >>> begin = lambda new: opt.reset_rows(table, new.rows, 0.5, ids=new.ids)
    >>> route = shard.route(np.array([2**40, -3, 2**40]), step=1, begin=begin)
    >>> route.gather(table)[0].tolist()
    [0.5, 0.5]
    >>> opt((route.scatter(np.ones((3, 2), np.float32)),))
    (True,)
    """

    begin = 0  # the place of its first row among those of this process

    def __init__(self, ids: IdMap, comm: Communicator) -> None:
        _, error = attempted(check_kind, "IdShard", "ids", ids, IdMap, "an IdMap")
        names = () if error else ("after", "chance", "seed", "full")
        self.signature = {name: getattr(ids, name) for name in names}
        agree(comm, "IdShard", self.signature, error)
        self.ids, self.comm = ids, comm
        # Keys are hashes, so equal shares of all keys have about as many ids each.
        firsts = [-(-(rank << 64) // comm.size) for rank in range(1, comm.size)]
        self.first_keys = np.array(firsts, np.uint64)

    def __len__(self) -> int:
        """The number of rows of this process, that of nobody included."""
        return self.ids.capacity

    def __repr__(self) -> str:
        return f"IdShard({self.ids}, rank {self.comm.rank} of {self.comm.size})"

    def route(
        self, ids: Any, step: int | None = None, begin: Callable[[Admissions], Any] | None = None,
    ) -> Route:  # fmt: skip
        """The way to the rows of ids and back; all processes call this.

        Ids without a row have row 0 of their owner, and no gradient.

        Args:
            ids: int64 or uint64 of any shape: this process's part of the batch.
            step: the number of the step, in which ids are admitted and counted; None: they are not.
            begin: lets rows of this process begin anew that are handed out, as for `IdMap`.

        Raises:
            TypeError, ValueError: on a rank, an argument does not fit, or a map is full
                (``full="raise"``); other processes may have admitted their ids then.
        """
        return Route(_StepOfShard(self, step, begin), ids)

    def owner(self, ids: np.ndarray) -> np.ndarray:
        """The rank that owns each id: int64."""
        found: np.ndarray = np.searchsorted(self.first_keys, keys_of(ids), side="right")
        return found

    # Checkpoints

    def state_dict(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The map of this process, and the rows of its ids in arrays, for a checkpoint.

        Args:
            arrays: by name, with a row for each row of the table: it, and its states.

        Returns:
            New arrays, those of the map with names that begin with ``ids.``.
        """
        state = self.ids.state_dict()
        rows = {name: array[state["rows"]] for name, array in arrays.items()}
        return {**{_PREFIX + name: array for name, array in state.items()}, **rows}

    def load_state_dicts(
        self, states: Iterable[Mapping[str, np.ndarray]], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Take over the ids that this process owns now, with their rows; all processes call this.

        Args:
            states: what `state_dict` has given on each of the processes that have saved, as many as
                there were.
            arrays: as `state_dict`; the rows of ids are written.

        Raises:
            KeyError, TypeError, ValueError: on a rank, a state does not fit the map or the arrays.
                Nothing has changed then.
        """
        where = "IdShard.load_state_dicts"
        made, rows = jointly(self.comm, where, self._own_part, where, states, arrays)
        self.ids.take_over(made)
        for name, array in arrays.items():
            array[1 : 1 + len(rows[name])] = rows[name]

    def _own_part(
        self, where: str, states: Iterable[Mapping[str, np.ndarray]],
        arrays: Mapping[str, np.ndarray],
    ) -> tuple[IdMap, dict[str, np.ndarray]]:  # fmt: skip
        """The map, and the rows of arrays, that belong to this process."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*STATE, *arrays)}
        names = {*arrays, *(_PREFIX + name for name in STATE.keys() - OPTIONAL)}
        for k, state in enumerate(states):
            if missing := sorted(names - state.keys()):
                reject(KeyError, where, f"states[{k}]", "lacks arrays", sorted(names), missing)
            of_map = {k: state[_PREFIX + k] for k in STATE if _PREFIX + k in state}
            # Its process may have more rows than this one.
            of_map = checked_state(f"{where}: states[{k}]", of_map, MOST_STEPS)
            ids = of_map["ids"]
            is_own = self.owner(ids) == self.comm.rank
            for name, array in arrays.items():
                kind, label = (array.dtype, (len(ids), *array.shape[1:])), f"states[{k}]: {name!r}"
                checked = adopt(where, label, state[name])
                if (checked.dtype, checked.shape) != kind:
                    got = f"{checked.dtype} {checked.shape}"
                    reject(ValueError, where, label, "does not fit", f"{kind[0]} {kind[1]}", got)
                parts[name].append(checked[is_own])
            for name, others in _BY_ID.items():
                mine = self.owner(of_map[name]) == self.comm.rank
                for label in (name, *others):
                    parts[label].append(of_map[label][mine])
            for label in ("step", "forgotten"):
                parts[label].append(of_map[label])
        if not parts["ids"]:
            reject(ValueError, where, "states", "are missing", "at least one", "none")
        rows = {name: np.concatenate(x) for name, x in parts.items() if x}
        # Rows are handed out anew, in the order of the parts; row 0 is that of ids without one.
        n = len(rows["ids"])
        rows |= {"rows": np.arange(1, n + 1, dtype=np.int32), "next_row": np.array([n + 1])}
        rows |= {name: rows[name].max(keepdims=True) for name in ("step", "forgotten")}
        made = self.ids.loaded(where, {name: rows[name] for name in STATE})
        for name, array in arrays.items():
            if len(array) <= n or not array.flags.writeable:
                wrong, enough = "has no room for the rows", f"at least {n + 1} rows, writable"
                reject(ValueError, where, f"array {name!r}", wrong, enough, len(array))
        return made, {name: rows[name] for name in arrays}


class _StepOfShard:
    """The shard of a route (`route.Shard`): ids in one step."""

    name, has_nobodys_row = "IdShard", True

    def __init__(
        self, shard: IdShard, step: int | None, begin: Callable[[Admissions], Any] | None
    ) -> None:
        self._shard, self._step, self._begin = shard, step, begin
        self.comm, self.first_keys = shard.comm, shard.first_keys
        self.signature = {**shard.signature, "step": str(step)}
        self._found: FoundRows | None = None

    def __len__(self) -> int:
        return len(self._shard)

    def checked_ids(self, where: str, ids: Any) -> np.ndarray:
        array = ids_of_64_bits(where, ids)
        self._shard.ids.check_step(self._shard.ids.step if self._step is None else self._step)
        return array

    def keys(self, ids: np.ndarray) -> np.ndarray:
        return keys_of(ids)

    def request(self, keys: np.ndarray, owner: np.ndarray, inverse: np.ndarray) -> np.ndarray:  # noqa: ARG002
        times = np.bincount(inverse.reshape(-1), minlength=len(keys))
        return np.stack((ids_of_keys(keys), times), axis=1)

    def rows_of(self, requests: np.ndarray) -> np.ndarray:
        id_map, (ids, times) = self._shard.ids, np.ascontiguousarray(requests.T)
        evictions = id_map.evictions
        if self._step is None:
            rows = id_map.find(ids)
        else:
            rows = id_map(ids, self._step, times=times, begin=self._begin)
        self._found = FoundRows(id_map, ids, rows, evictions)
        return rows.astype(np.int64)

    def check_rows(self) -> None:
        if self._found is not None and not self._found.are_current():
            expected, got = "an eviction after the step", "one before"
            wrong = "are not those of the lookup"
            reject(RuntimeError, "IdShard", "rows", wrong, expected, got)


def keys_of(ids: np.ndarray) -> np.ndarray:
    """The keys of ids, in whose order processes own them: uint64."""
    # Hashed twice: in its own map an owner has the ids in the order of a hash.
    found: np.ndarray = mixed(mixed(ids.view(np.uint64)))
    return found


def ids_of_keys(keys: np.ndarray) -> np.ndarray:
    """The ids that have these keys: int64."""
    found: np.ndarray = unmixed(unmixed(keys)).view(np.int64)
    return found
