"""Trainings of tables whose steps follow from their numbers: of one process, or of several."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from fusestep import nn
from fusestep.nn import distributed
from helpers import assert_same_bits
from optimizers import is_row_wise, make

SHAPES: dict[str, tuple[int, ...]] = {
    "words": (97, 8), "tones": (61,), "cubes": (13, 3, 5), "few": (2, 4),
}  # fmt: skip
"""Rows of numbers, numbers, rows of matrices, and fewer rows than processes."""
INDICES = {"words": np.int64, "tones": np.int32, "cubes": np.int64, "few": np.int32}
IDS: dict[str, tuple[int, ...]] = {"cubes": (-1, 1)}
"""The shape of a process's part of the ids, where it is not ``[B]``."""
LENGTHS = {"words": 9000, "tones": 5000, "cubes": 1200, "few": 1500}
"""Of the batch: the sum of a row with more than 512 occurrences is one of ranges of 4096."""
HOT = 1  # the row that half of the occurrences are of


@cache
def batch(step: int, name: str, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and gradients of all processes."""
    shape, length = SHAPES[name], LENGTHS[name] + 300 * (step % 3)
    rng = np.random.default_rng([step, *name.encode()])
    ids = np.where(rng.random(length) < 0.5, HOT, rng.integers(0, shape[0], length))
    return ids.astype(INDICES[name]), rng.standard_normal((length, *shape[1:])).astype(dtype)


def part(step: int, length: int, comm: distributed.Communicator) -> slice:
    """The occurrences of this process: as many as others have, or not, or none."""
    rng = np.random.default_rng([step, comm.size])
    shares = np.ones(comm.size) if step % 3 == 0 else rng.random(comm.size)
    if step % 3 == 2 and comm.size > 1:
        shares[rng.integers(comm.size)] = 0
    ends = np.rint(np.cumsum([0, *shares]) / shares.sum() * length).astype(int)
    return slice(int(ends[comm.rank]), int(ends[comm.rank + 1]))


class Tables:
    """Which rows a process has of each table, and its gradients."""

    def __init__(self, comm: distributed.Communicator, order: str) -> None:
        self.comm, self.order = comm, order
        self.shards = {
            name: distributed.RowShard(shape[0], comm, order=order)
            for name, shape in SHAPES.items()
        }
        self._known: dict[tuple[int, np.dtype[Any]], list[nn.RowTensor]] = {}

    def route(self, step: int, name: str) -> distributed.Route:
        ids, _ = batch(step, name, np.dtype(np.float32))
        own = ids[part(step, len(ids), self.comm)]
        return self.shards[name].route(own.reshape(IDS.get(name, (-1,))))

    def gradients(self, step: int, dtype: np.dtype[Any]) -> list[nn.RowTensor]:
        """Those of a step, exchanged once for all trainings."""
        if (step, dtype) not in self._known:
            routes = {name: self.route(step, name) for name in SHAPES}
            self._known[step, dtype] = [
                route.scatter(self.given(step, name, dtype)) for name, route in routes.items()
            ]
        return self._known[step, dtype]

    def given(self, step: int, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """The gradients that this process has."""
        _, values = batch(step, name, dtype)
        own = values[part(step, len(values), self.comm)]
        return own.reshape(*own.shape[:1], *([1] if name in IDS else []), *own.shape[1:])


def whole_gradients(step: int, dtype: np.dtype[Any]) -> list[nn.RowTensor]:
    """As one process has them."""
    return [nn.RowTensor(*batch(step, name, dtype), shape) for name, shape in SHAPES.items()]


class Training:
    """An optimizer of all tables: of one process without ``tables``."""

    def __init__(self, form: str, dtype: Any, tables: Tables | None = None, **options: Any) -> None:
        self.dtype, self.tables = np.dtype(dtype), tables
        self._row_wise = is_row_wise(form)
        rng = np.random.default_rng(0)
        wholes = {n: rng.standard_normal(s).astype(dtype) for n, s in SHAPES.items()}
        if tables is not None:
            wholes = {n: whole[tables.shards[n].indices] for n, whole in wholes.items()}
        self.params = self._taken([nn.Parameter(array, name) for name, array in wholes.items()])
        self.optimizer = make(form, self.params, **options)
        if tables is not None:
            distributed.together(self.optimizer, tables.comm)

    def _taken(self, of_tables: list[Any]) -> list[Any]:
        """Without those of vectors, where a vector is one row, and no table."""
        shapes = zip(of_tables, SHAPES.values(), strict=True)
        return [one for one, shape in shapes if len(shape) > 1 or not self._row_wise]

    @property
    def done(self) -> int:
        """The number of steps."""
        return int(self.optimizer.global_step[0])

    def steps(self, n: int) -> None:
        for step in range(self.done, self.done + n):
            known = self.tables.gradients if self.tables else whole_gradients
            self.optimizer(tuple(self._taken(known(step, self.dtype))))

    def save(self, folder: Any) -> None:
        self._exchange(distributed.save_checkpoint, folder)

    def load(self, folder: Any) -> None:
        self._exchange(distributed.load_checkpoint, folder)

    def _exchange(self, function: Any, folder: Any) -> None:
        assert self.tables is not None
        shards = {p.name: self.tables.shards[p.name] for p in self.params}
        function(folder, self.optimizer, self.tables.comm, shards)

    def arrays(self) -> list[np.ndarray]:
        """All that a step may write."""
        states = self.optimizer.state_arrays().values()
        return [*(p.data for p in self.params), *states, self.optimizer._skipped]

    def by_name(self) -> Mapping[str, np.ndarray]:
        return {p.name: p.data for p in self.params} | self.optimizer.state_arrays()


def assert_part_of(own: Training, whole: Training, label: str = "") -> None:
    """Tables, states and counters of a process are those of one with everything."""
    assert own.tables is not None
    found, expected = own.by_name(), whole.by_name()
    assert found.keys() == expected.keys(), label
    for name, array in expected.items():
        table = name.rpartition(".")[2]
        is_divided = table in SHAPES and array.shape[:1] == SHAPES[table][:1]
        rows = array[own.tables.shards[table].indices] if is_divided else array
        assert_same_bits(found[name], rows, f"{label}: {name}")


def assert_same_training(one: Training, other: Training, label: str = "") -> None:
    """Two of one process."""
    found, expected = one.by_name(), other.by_name()
    assert found.keys() == expected.keys(), label
    for name, array in expected.items():
        assert_same_bits(found[name], array, f"{label}: {name}")
