"""Tables that grow on several processes: weights by id are those of one process."""

import re
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.nn.distributed import IdShard, alone
from fusestep.nn.distributed.id_shard import ids_of_keys, keys_of
from helpers import assert_same_bits
from thread_processes import ThreadCommunicator, in_threads

D, N = 3, 40
EACH = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, N)
DRAW = nn.UniformRows(0.2, seed=1)
BATCHES = [np.random.default_rng(k).choice(EACH[: 8 + 3 * k], 31) for k in range(10)]
GRADS = [np.random.default_rng(k).standard_normal((31, D)).astype(np.float32) for k in range(10)]


class Training:
    """One process of a training."""

    def __init__(self, comm: Any, **options: Any) -> None:
        self.comm, self.table = comm, np.zeros((N + 1, D), np.float32)
        self.opt = nn.LazyAdam([nn.Parameter(self.table, "table")], 0.1)
        self.shard = IdShard(nn.IdMap(N + 1, **options), comm)
        self.looked: list[np.ndarray] = []

    def begin(self, new: Any) -> None:
        self.opt.reset_rows(self.table, new.rows, DRAW, ids=new.ids)

    def steps(self, first: int, last: int) -> None:
        """Steps, with an eviction in the middle."""
        for k in range(first, last):
            own = np.array_split(np.arange(31), self.comm.size)[self.comm.rank]
            route = self.shard.route(BATCHES[k][own], k, self.begin)
            self.looked.append(route.gather(self.table))
            self.opt((route.scatter(GRADS[k][own]),))
            if k == 4:
                self.shard.ids.evict(unused_for=2, keep=EACH[:2])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"table": self.table, **self.opt.states_by_name(0)}

    def by_id(self) -> dict[int, Any]:
        """Weights, states, counts and last uses of each id."""
        ids, rows, counts, last = self.shard.ids.rows_of_ids()
        every = [*self.arrays().values()]
        return {
            i: (n, used, np.concatenate([a[r] for a in every]).tobytes())
            for i, r, n, used in zip(
                ids.tolist(), rows, counts.tolist(), last.tolist(), strict=True)
        }  # fmt: skip


def whole(n: int, **options: Any) -> Training:
    training = Training(alone(), **options)
    training.steps(0, n)
    return training


def together(parts: list[dict[int, Any]]) -> dict[int, Any]:
    assert sum(map(len, parts)) == len({*(i for part in parts for i in part)})
    return {i: own for part in parts for i, own in part.items()}


OPTIONS: list[dict[str, Any]] = [{}, {"after": 3}, {"chance": 0.4, "seed": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=["first", "third", "chance"])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_by_id_do_not_depend_on_the_processes(size: int, options: Any) -> None:
    """Admission, counts and eviction as those of one process; what is looked up, too."""

    def program(comm: ThreadCommunicator) -> Any:
        training = Training(comm, **options)
        training.steps(0, 10)
        return training.by_id(), training.looked

    found, one = in_threads(size, program), whole(10, **options)
    assert together([by_id for by_id, _ in found]) == one.by_id()
    assert min(len(by_id) for by_id, _ in found) > 2
    for k, rows in enumerate(one.looked):
        assert_same_bits(np.concatenate([looked[k] for _, looked in found]), rows)
    assert not one.table[0].any()


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_checkpoints_on_another_number_of_processes(sizes: tuple[int, int]) -> None:
    """Also in the middle of admissions; as if nothing had come between."""

    def first(comm: ThreadCommunicator) -> Any:
        training = Training(comm, after=2)
        training.steps(0, 6)
        step = {k: x for k, x in training.opt.state_dict().items() if x.size == 1}
        return training.shard.state_dict(training.arrays()), step

    saved = in_threads(sizes[0], first)

    def second(comm: ThreadCommunicator) -> Any:
        training = Training(comm, after=2)
        training.opt.load_state_dict({**training.opt.state_dict(), **saved[0][1]})
        training.shard.load_state_dicts((state for state, _ in saved), training.arrays())
        training.steps(6, 10)
        return training.by_id(), training.shard.ids.changed_since(4).removed

    found, one = in_threads(sizes[1], second), whole(10, after=2)
    assert together([by_id for by_id, _ in found]) == one.by_id()
    removed = np.sort(np.concatenate([own for _, own in found]))
    assert np.array_equal(removed, one.shard.ids.changed_since(4).removed)


def test_keys() -> None:
    """Keys lead back to ids, and each process has about as many."""
    assert np.array_equal(ids_of_keys(keys_of(EACH)), EACH)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        return IdShard(nn.IdMap(9), comm).owner(np.arange(30_000))

    owners = in_threads(3, program)
    assert all(np.array_equal(owners[0], own) for own in owners)
    assert np.bincount(owners[0]).min() > 9_500


def test_errors_are_those_of_all() -> None:
    """What one process finds wrong all raise; an eviction between lookup and gradient, too."""

    def failing(comm: ThreadCommunicator, case: str) -> str:
        is_bad = comm.rank == 1
        ids = nn.IdMap(4 if is_bad else 99, full="raise", seed=int(is_bad and case == "maps"))
        try:
            shard = IdShard(ids, comm)
            given = np.arange(30, dtype=np.float64 if is_bad and case == "dtype" else np.int64)
            route = shard.route(given, 2 if is_bad and case == "step" else 1)
            if case == "evicted":
                ids.evict(unused_for=0)
                route.scatter(np.ones((30, D), np.float32))
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)
        return ""

    for case, text in {
        "maps": "IdShard: rank 1: seed differs",
        "dtype": "IdShard.route: rank 1: ids have a wrong dtype", "step": "step differs",
        "full": "rank 1: IdMap: ids do not fit",
    }.items():  # fmt: skip
        found = in_threads(2, lambda comm, case=case: failing(comm, case))
        assert len({*found}) == 1 and all(found), (case, found)
        assert re.search(text, found[0]), (case, found)


def test_states_that_do_not_fit() -> None:
    """One error, and nothing has changed."""
    training = whole(3)
    arrays, state = training.arrays(), training.shard.state_dict(training.arrays())
    other = Training(alone())
    cases: list[tuple[Any, str, Any]] = [
        (KeyError, "lacks arrays", [{k: x for k, x in state.items() if k != "table"}]),
        (ValueError, "does not fit", [{**state, "table": state["table"][1:]}]),
        (ValueError, "does not fit", [state, state]), (ValueError, "are missing", []),
    ]  # fmt: skip
    for error, text, states in cases:
        with pytest.raises(error, match=text):
            other.shard.load_state_dicts(states, other.arrays())
        assert len(other.shard.ids) == 0 and not other.table.any()
    sealed = {name: x.copy() for name, x in other.arrays().items()}
    sealed["table"].flags.writeable = False
    with pytest.raises(ValueError, match="expected at least 15 rows, writable"):
        other.shard.load_state_dicts([state], sealed)
    torn = {**state, "ids.counts": state["ids.counts"][:-1]}
    with pytest.raises(ValueError, match=r"states\[0\]: state does not fit"):
        other.shard.load_state_dicts([torn], other.arrays())
    assert len(other.shard.ids) == 0
    small = IdShard(nn.IdMap(3), alone())
    with pytest.raises(ValueError, match="does not fit"):
        small.load_state_dicts([state], {k: x[:3] for k, x in arrays.items()})
    with pytest.raises(ValueError, match="array 'table' has no room for the rows: expected"):
        other.shard.load_state_dicts([state], {k: x[:3] for k, x in other.arrays().items()})

    def on_two(comm: ThreadCommunicator) -> Any:
        """There is no room on the second: the first has changed nothing either."""
        ids = nn.IdMap([1_000, 3][comm.rank])
        with pytest.raises(ValueError, match=r"rank 1|does not fit"):
            IdShard(ids, comm).load_state_dicts([state], {k: x.copy() for k, x in arrays.items()})
        return len(ids)

    assert in_threads(2, on_two) == [0, 0]
    with pytest.raises(TypeError, match="ids has a wrong type"):
        IdShard(3, alone())  # type: ignore[arg-type]
    older = {name: x for name, x in state.items() if name != "ids.pending_last_uses"}
    other.shard.load_state_dicts([older], other.arrays())
    assert other.by_id() == training.by_id()
    route = training.shard.route(BATCHES[0], 9, training.begin)
    training.shard.ids.evict(unused_for=0)
    with pytest.raises(RuntimeError, match="are not those of the lookup"):
        route.scatter(GRADS[0])
