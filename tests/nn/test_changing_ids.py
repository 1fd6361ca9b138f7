"""Ids, indices and offsets that another thread changes during a call: no write outside of rows."""

import pytest
from helpers import more
from subprocesses import run_python

# Tables lie between rows that belong to nobody. The loader writes two batches, whose rows leave a
# remainder of 0 and of 1 by 4, and in between numbers of no rows, near and far.
PROGRAM = """
import sys, threading
from functools import partial
import numpy as np
from fusestep import nn, ops
from fusestep.nn.distributed import RowShard, alone

rounds, *kinds = sys.argv[1:]
N, D, BAGS, rng = 64, 8, 500, np.random.default_rng()

def table():
    rooms.append(np.zeros((3 * N, D), np.float32))
    return rooms[-1][N:-N]

def changing(n, dtype=np.int64):
    batches = [4 * rng.integers(0, N // 4, n) + k for k in range(2)]
    bad = [np.full(n, x) for x in (-1, N, -(2**30), 2**30)]
    bad.append(batches[1] + 2**30 * rng.integers(0, 2, n))
    loaded.append((batches[0].astype(dtype), batches + bad))
    return loaded[-1][0]

def offsets_of(n, bags=BAGS):
    even, last = np.linspace(0, n, bags + 1).astype(int), n * (np.arange(bags + 1) == bags)
    bad = even * 2**30, even - 2**40, rng.permutation(even), np.where(even == 90, 2**40, even)
    loaded.append((even.copy(), [even, last, *bad]))
    return loaded[-1][0]

def rows_of(n, dtype=np.int64):
    return nn.RowTensor(changing(n, dtype), np.ones((n, D), np.float32), (N, D))

def of_rows(**options):
    tables = [table() for _ in range(3)]
    optimizer = nn.Adam(tables, 0.1, **options)
    given = rows_of(3_000), rows_of(20_000), rows_of(900, np.int32)
    return [lambda: optimizer(given)]

def operator(op):
    arrays, given = [table() for _ in range(3)], rows_of(20_000)
    scalars = [np.float32(x) for x in (0.9, 0.99, 0.1, 0.9, 0.99, 1e-8)]
    return [lambda: op(*arrays, *scalars, given.values, given.indices)]

def bags(pooling="sum", joined=False, how="lazy", **options):
    tables = [table(), table()]
    own = nn.EmbeddingBags(tables, nn.Adam(tables, 0.1, sparse_update=how), pooling, **options)
    given, offsets = [changing(3_000), changing(9_000)], [offsets_of(3_000), offsets_of(9_000)]
    if joined:
        given, offsets = given[1], offsets_of(9_000, 2 * BAGS)
    def call():
        out = own(given, offsets)
        assert np.isfinite(out).all()
        own.backward(np.ones_like(out))
    return [call]

def prepared():
    w = table()
    optimizer, ids, rows = nn.Adam([w], 0.1, sparse_update="catch_up"), changing(9_000), rows_of(50)
    return [lambda: optimizer.prepare(w, ids), lambda: optimizer((rows,))]

def whole():
    rows = rows_of(20_000)
    return [rows.to_dense, rows.coalesce]

def routed():
    w, ids, shard = table(), changing(9_000), RowShard(N, alone(), order="hash")
    return [lambda: shard.route(ids).gather(w)]

def of_torch(what):
    import torch
    from fusestep.nn import torch as fused
    w = [torch.nn.Parameter(torch.from_numpy(table())) for _ in range(2)]
    optimizer = fused.Adam(w, 0.1, sparse="all" if what == "bags" else what)
    if what == "bags":
        made = partial(torch.nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum")
        modules = [made(x, include_last_offset=True) for x in w]
        own = fused.EmbeddingBags(modules)
        own.update_in_backward(fused.LazyAdam(own.parameters(), 0.1))
        ids = [torch.from_numpy(changing(n)) for n in (3_000, 9_000)]
        offsets = [torch.from_numpy(offsets_of(n)) for n in (3_000, 9_000)]
        return [lambda: own(ids, offsets).sum().backward()]
    for x, n in zip(w, (3_000, 20_000)):
        ids, values = torch.from_numpy(changing(n))[None], torch.ones(n, D)
        x.grad = torch.sparse_coo_tensor(ids, values, (N, D), check_invariants=False)
    asked = torch.from_numpy(changing(9_000))
    return [optimizer.step, lambda: optimizer.prepare(w[1], asked)]

KINDS = {
    "touched": partial(of_rows, sparse_update="lazy"),
    "all": partial(of_rows, sparse_update="dense_equivalent"),
    "catch_up": partial(of_rows, sparse_update="catch_up"),
    "locking": partial(of_rows, sparse_update="lazy", use_locking=True),
    "one operator": partial(operator, ops.FusedSparseLazyAdam()),
    "operator": partial(operator, ops.FusedSparseAdam(use_locking=True)),
    "bags": bags, "joined": partial(bags, joined=True),
    "left out": partial(bags, padding_idx=4, out_of_range="drop"),
    "means": partial(bags, "mean", padding_idx=5),
    "maxima": partial(bags, "max", how="catch_up"),
    "prepare": prepared, "whole": whole, "route": routed,
    "torch touched": partial(of_torch, "touched"), "torch catch_up": partial(of_torch, "catch_up"),
    "torch bags": partial(of_torch, "bags"),
}

def load():
    while not stop:
        for array, contents in loaded:
            if rng.random() < 0.1:
                array[:] = contents[rng.integers(len(contents))]
            array[:] = contents[rng.integers(2)]

sys.setswitchinterval(1e-6)
for kind in kinds:
    print(end=kind, flush=True)
    rooms, loaded, stop, raised = [], [], [], 0
    calls = KINDS[kind]()
    for call in calls:
        call()  # compiles
    thread = threading.Thread(target=load)
    thread.start()
    for k in range(int(rounds)):
        try:
            calls[k % len(calls)]()
        except (IndexError, ValueError) as error:
            text = str(error)
            assert "range" in text or "offsets" in text or "changed" in text, error
            raised += 1
    stop.append(1)
    thread.join()
    for room in rooms:
        assert not room[:N].any() and not room[2 * N:].any()
        assert not room[N : 2 * N].reshape(-1, 4, D)[:, 2:].any()
    print("", raised)
"""
GROUPS = {
    "rows": ("touched", "all", "catch_up", "locking", "one operator", "operator", "whole"),
    "bags": ("bags", "joined", "left out", "means", "maxima", "prepare", "route"),
    "torch": ("torch touched", "torch catch_up", "torch bags"),
}


@pytest.mark.parametrize("rounds", [300, more(10_000)])
@pytest.mark.parametrize("group", GROUPS)
def test_ids_that_another_thread_changes(group: str, rounds: int) -> None:
    """An error, or the rows of either batch; other rows and what lies beside stay as they are."""
    if group == "torch":
        pytest.importorskip("torch")
    done = run_python(PROGRAM, rounds, *GROUPS[group], timeout=900, NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    raised = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert rounds == 300 or all(raised)  # the loader was there in time
