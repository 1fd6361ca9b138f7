"""What each rank does; started by `test_processes` with an engine, a folder and names of parts."""

import copy
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import process_checkpoints
import process_errors
import process_states
import process_sums
from fusestep import nn
from fusestep.nn import distributed
from fusestep.nn.distributed import Communicator
from helpers import STORAGE_DTYPES, assert_same_bits, in_turn
from optimizers import BY_NAME, FORMS, decayed_and_scaled, make
from process_checks import communicator, everywhere, run_parts, smaller

from process_training import (  # isort: skip
    SHAPES, Tables, Training, assert_part_of, batch, part, whole_gradients)  # fmt: skip

TAKING = [form for form, (name, _) in FORMS.items() if BY_NAME[name].takes_rows]
STEPS = 3
ORDERS = ("range", "hash")


def updates(form: str) -> list[dict[str, Any]]:
    """Lazy and dense-equivalent steps; Adam-lazy has no such setting."""
    if form == "Adam-lazy":
        return [{}]
    return [{"sparse_update": how} for how in ("lazy", "dense_equivalent")]


def optimizers(comm: Communicator, *_: Any) -> None:
    """Every optimizer has the bits of one process, in each table, each state, each counter."""
    tables = [Tables(comm, order) for order in ORDERS]
    cases = [(form, how, dtype) for form, dtype in in_turn(TAKING) for how in updates(form)]
    for form, how, dtype in cases[comm.rank :: comm.size]:  # each compiles a part of the kernels
        Training(form, dtype, **how).steps(1)
    everywhere(comm, "until all are there")
    for k, (form, how, dtype) in enumerate(cases):
        beside_one(tables[(k + k // 4) % 2], form, dtype, **how)


def training(comm: Communicator, *_: Any) -> None:
    """Gradients that follow from gathered rows, two exchanges under way at once, a dense rest."""
    for order in ORDERS:
        for dtype in STORAGE_DTYPES:
            _train(Tables(comm, order), dtype)


def _train(tables: Tables, dtype: Any) -> None:
    own, whole = (Training("LazyAdam", dtype, of) for of in (tables, None))
    for step in range(STEPS):
        names = list(SHAPES)
        routes = {name: tables.route(step, name) for name in names}
        arriving = {n: routes[n].start_gather(p) for n, p in zip(names, own.params, strict=True)}
        kept = [p.data.copy() for p in own.params]
        for p in own.params:
            p.data[...] = 0  # the rows are on their way already
        rows = {name: arriving[name].wait() for name in reversed(names)}
        gradients, of_all, returning = {}, [], {}
        for name, p, before, everything in zip(names, own.params, kept, whole.params, strict=True):
            p.data[...] = before
            ids, _ = batch(step, name, np.dtype(np.float32))
            expected = everything.data[ids]
            mine = expected[part(step, len(ids), tables.comm)]
            assert_same_bits(rows[name].reshape(mine.shape), mine, name)
            gradients[name] = rows[name] * rows[name]
            of_all.append(nn.RowTensor(ids, expected * expected, everything.shape))
            returning[name] = routes[name].start_scatter(gradients[name])
        for gradient in gradients.values():
            gradient[...] = np.nan
        arrived = {name: returning[name].wait() for name in reversed(names)}
        own.optimizer(tuple(arrived[name] for name in names))
        whole.optimizer(tuple(of_all))
        assert_part_of(own, whole, f"{tables.order} {dtype}")


def without_positions(comm: Communicator, *_: Any) -> None:
    """A test that can fail: the sum of a hot row depends on where its occurrences are."""
    tables = Tables(comm, "range")
    own, whole = Training("SGD", np.float32, tables), Training("SGD", np.float32)
    for gradient in tables.gradients(1, own.dtype):
        gradient.positions, gradient.batch_length = None, 0
    own.optimizer(tuple(tables.gradients(1, own.dtype)))
    whole.optimizer(tuple(whole_gradients(1, own.dtype)))
    found = own.by_name()["words"], whole.by_name()["words"][tables.shards["words"].indices]
    is_same = everywhere(comm, found[0].tobytes() == found[1].tobytes())
    assert ("False" in is_same) == (comm.size > 1), is_same
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


def beside_one(tables: Tables, form: str, dtype, gradients=None, **options) -> None:
    """Steps of these processes, with gradients of another type or not, beside those of one."""
    own, whole = (Training(form, dtype, of, **options) for of in (tables, None))
    for one in (own, whole):
        one.dtype = np.dtype(dtype if gradients is None else gradients)
        one.steps(STEPS)
    assert_part_of(own, whole, f"{form} {dtype} {gradients} {options}")


def decayed(comm: Communicator, *_: Any) -> None:
    """With weight decay and loss scale, of which each row has its part once."""
    tables = Tables(comm, "hash")
    for form in ("Adam", "AdamWeightDecay", "SGD-momentum", "FTRL"):
        for how in updates(form):
            beside_one(tables, form, np.float32, **how, **decayed_and_scaled(form))


def storages(comm: Communicator, *_: Any) -> None:
    """Gradients and states of other types than the table's."""
    tables = Tables(comm, "hash")
    beside_one(tables, "LazyAdam", ml_dtypes.bfloat16, np.float32)
    beside_one(tables, "LazyAdam", ml_dtypes.bfloat16, state_dtype=np.float32)


def some_have_no_rows(comm: Communicator, *_: Any) -> None:
    """Tables of 0 and of 1 row, and a step in which no process has an occurrence."""
    for rows in (0, 1):
        shard = distributed.RowShard(rows, comm, order="hash")
        table = np.ones((len(shard), 3), np.float32)
        optimizer = make("LazyAdam", [table])
        distributed.together(optimizer, comm)
        for ids in (np.empty((0, 2), np.int32), np.zeros((rows, 2), np.int64)):
            route = shard.route(ids)
            assert route.gather(table).shape == (*ids.shape, 3)
            optimizer((route.scatter(np.ones((*ids.shape, 3), np.float32)),))
        assert (table != 1).all()
        assert sum(map(int, everywhere(comm, len(shard)))) == rows


def not_waited_for(comm: Communicator, engine: str, *_: Any) -> None:
    """Exchanges that nobody waits for keep their arrays; communicators cost nothing."""
    shard = distributed.RowShard(30_000, comm)
    table = np.ones((len(shard), 16), np.float32)
    route = shard.route(np.arange(0, 30_000, 7))
    for _step in range(10):
        route.start_gather(table)
    assert (route.gather(table) == 1).all()
    for _step in range(3_000 if engine == "mpi" else 1):
        assert getattr(distributed, f"over_{engine}")().size == comm.size
    assert copy.deepcopy(comm) is comm


def groups(comm: Communicator, engine: str, *_: Any) -> None:
    """The first processes as a group of their own."""
    few = smaller(engine, comm, comm.size - 1)
    if few is not None:
        assert (few.rank, few.size) == (comm.rank, comm.size - 1)
        beside_one(Tables(few, "range"), "FTRL", np.float32)
    everywhere(comm, "until they are done")


def errors(comm: Communicator, *_: Any) -> None:
    """Of one rank, on all: of the first, and of the last."""
    for bad in sorted({0, comm.size - 1}):
        process_errors.check(comm, bad)


PARTS = {
    name: function
    for module in (sys.modules[__name__], process_checkpoints, process_states, process_sums)
    for name, function in vars(module).items()
}


def main(engine: str, folder: str, *names: str) -> None:
    """The program of one rank."""
    with communicator(engine) as comm:
        run_parts(comm, {name: PARTS[name] for name in names}, engine, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
