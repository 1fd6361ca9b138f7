"""Row-sparse gradients: steps on them, their sums, sorting, whole ones, and between processes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import fusestep

from devices import (  # isort: skip
    BETAS, COMPUTES, MARKS, Maker, adopted, assert_alike, assert_calls_alike, assert_close,
    assert_same, gradient, numba_stream, on_device, on_host, positive, refused, rows, shifted,
    sized, told, unchanged)  # fmt: skip
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory
from fusestep.kernels.cuda.rows import sort
from fusestep.kernels.tables import HOT, ranges_of
from fusestep.nn.distributed import RowShard, all_reduce, alone, save_checkpoint
from helpers import STORAGE_DTYPES
from thread_processes import ThreadCommunicator, in_threads

pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES

SORTED = sized((0, 1, 32, 85), (0, 1, 2, 255, 2_047, 2_048, 2_049, 100_003, 1_000_000))


@pytest.mark.parametrize("n", SORTED)
def test_own_sort(n: int) -> None:
    """NumPy's stable sort, of any digits; nothing is written beyond the buffers."""
    rng = np.random.default_rng(n)
    whole = rng.integers(0, 1 << 62, n)
    by_rows = np.sort(np.minimum(rng.zipf(1.5, n), 63)) << 20 | np.arange(n)
    same = np.full(n, 15 << 20) | np.arange(n)
    of_rows = by_rows, by_rows[::-1], same
    cases = [(whole, 11, 10), (whole, 50, 3), *((keys, 20, 6) for keys in of_rows)]
    cases += sized([], [(whole, 0, 62), (whole, 31, 1), (by_rows, 20, 24)])
    for keys, first_bit, n_bits in cases:
        buffers = [np.full(size + 1, -7) for size in (n, n, sort.scratch_words(n))]
        buffers[0][:n] = keys
        there = on_device(buffers)
        addresses = [adopted(a).address for a in there]
        place = sort.sort_keys(*addresses, n, first_bit, n_bits, numba_stream(0))
        found = [on_host(a) for a in there]
        order = np.argsort(keys >> first_bit & (1 << n_bits) - 1, kind="stable")
        assert all(buffer[-1] == -7 for buffer in found)
        assert_same(found[addresses.index(place)][:n], keys[order])


# A list that one block sorts; a row of up to 512 occurrences; of more, in one range and in several.
WIDTHS = sized((5,), (1, 8, 33, 300))
OCCURRENCES = {
    "short-5": (6, 16, 5), **{f"cold-{d}": (*sized((60, 200), (400, 900)), d) for d in WIDTHS},
    **{f"hot-{d}": (*sized((540, 640), (600, 900)), d) for d in WIDTHS},
    **{f"ranges-{d}": (9_000, 20_000, d) for d in sized((), WIDTHS)},
    **sized({}, {"longer ranges-8": (150_000, 300_000, 8)}),
}  # fmt: skip
OPERATORS = [ops.FusedSparseLazyAdam(), ops.FusedSparseAdam()]
BOTH = pytest.mark.parametrize("op", OPERATORS, ids=["lazy", "all"])


def row_step(op, arrays: Sequence[np.ndarray], values, indices, shift: int = 0) -> list[np.ndarray]:
    """Adam's arrays after a step on copies, which begin so many elements further on."""
    *on, g = (shifted(a, shift) for a in (*arrays, values))
    op(*on, *BETAS, g, shifted(indices, min(shift, 1)))
    fusestep.synchronize()
    return [on_host(a) for a in on]


@pytest.mark.parametrize(("hottest", "b", "d"), OCCURRENCES.values(), ids=OCCURRENCES)
@BOTH
def test_rows_are_summed_as_on_the_cpu(op: Any, hottest: int, b: int, d: int) -> None:
    """In the same order: with the folded gradient, once for each row, the bits are the same. They
    are so wherever the arrays begin, too. Sums have no products that could become an FMA, so the
    order alone decides."""
    n, rng, length = sized(40, 500), np.random.default_rng(3), ranges_of(b)[0]
    indices = rng.integers(0, n, b)
    indices[rng.permutation(b)[:hottest]] = 7
    indices[(indices != 7) & (rng.random(b) < 0.5)] = 39  # another row by its highest bit alone
    values = rng.standard_normal((b, d)).astype(np.float32)
    rows = np.unique(indices)
    folded = np.zeros((len(rows), d), np.float32)
    for k, row in enumerate(rows):
        places = np.flatnonzero(indices == row)
        parts = [places]
        if len(places) > HOT:
            parts = [places[places // length == r] for r in range(-(-b // length))]
        totals = [
            sum(values[part][1:], values[part[0]]) if len(part) else folded[k] for part in parts
        ]
        folded[k] = sum(totals[1:], totals[0])
    start = [positive((n, d)) for _ in range(3)]
    found = row_step(op, start, values, indices)
    assert_same(row_step(op, start, folded, rows), found)
    for shift in (1, 3):
        assert_same(row_step(op, start, values, indices, shift), found)
    op(*start, *BETAS, values, indices)
    assert_close(found, start)


@BOTH
def test_memory_that_grows(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step like an earlier one works where its tables lie now."""
    monkeypatch.setattr(memory, "_rooms", {})
    monkeypatch.setattr(memory, "_LEAST", 1)
    for b in (4, 60, 4):
        start, values, indices = (
            [positive((6, 3)) for _ in "wmv"], positive((b, 3)), np.arange(b) % 6)  # fmt: skip
        found = row_step(op, start, values, indices)
        op(*start, *BETAS, values, indices)
        assert_close(found, start)


@BOTH
def test_every_step_has_the_same_bits(op: Any) -> None:
    """In every run, and whoever sorts the keys."""
    rng = np.random.default_rng(4)
    b, n, d = sized((80, 9, 3), (100_000, 3_000, 24))
    indices = np.where(rng.random(b) < 0.3, 5, rng.zipf(1.2, b) % n)
    values = rng.standard_normal((b, d)).astype(np.float32)
    start = [positive((n, d)) for _ in "wmv"]
    found = [row_step(op, start, values, indices) for _ in range(3)]
    by_numba = [Maker().put(a) for a in start]
    op(*by_numba, *BETAS, Maker().put(values), Maker().put(indices))
    found.append([on_host(a) for a in by_numba])
    assert_same(found[1:], found[:1] * 3)


def test_thousands_of_pending_steps() -> None:
    """More than there are guards; sums of powers of two are exact."""
    n = sized(40, 2_100)
    p = nn.Parameter(on_device(np.zeros((8, 4), np.float32)), "w")
    opt, values = nn.SGD([p], 0.5), np.full((3, 4), 0.25, np.float32)
    rows = on_device(nn.RowTensor(np.array([1, 6, 1]), values, (8, 4)))
    for _ in range(n):
        opt([rows])
    fusestep.synchronize()
    assert opt.global_step[0] == n
    expected = np.zeros((8, 4), np.float32)
    expected[1], expected[6] = -0.25 * n, -0.125 * n
    assert_same(p.asnumpy(), expected)


# Whole gradients, outside of a step


def compare_sums(host: nn.RowTensor) -> None:
    """Device and host add up alike, to the last bit, and leave the gradient as it is."""
    theirs = on_device(host)
    with unchanged(theirs):
        dense, distinct = theirs.to_dense(), theirs.coalesce()
    assert_same([dense, distinct], [host.to_dense(), host.coalesce()])
    if COMPUTES:  # how many there are
        for made in (dense, distinct.indices.native(), distinct.values.native()):
            assert host.dtype == BF16 or type(made) is type(theirs.values.native())


def test_row_sums() -> None:
    """Every storage type and size of indices; tails, no rows, no columns, empty tensors."""
    for dtype in (F32, F64, F16, BF16):
        compare_sums(rows([4, 1, 4, 0, 1, 4], (6, 9), dtype))
    for shape in ((6,), (6, 1), (6, 4), (6, 2, 3), (6, 40), (6, 0)):
        compare_sums(rows([5, 1, 5], shape))
        compare_sums(rows([], shape))
    compare_sums(rows([], (0, 3)))
    host = rows([3, 3, 0], (4, 5))
    compare_sums(nn.RowTensor(host.indices.astype(np.int32), host.values, (4, 5)))
    # A sum of zeros is 0, not -0; and what is not finite stays so.
    host = rows([1, 2, 2, 3], (4, 2))
    host.values[...] = [[-0.0, 1.0], [-0.0, np.inf], [-0.0, 1.0], [np.inf, -np.inf]]
    compare_sums(host)
    # Not aligned to 16 bytes.
    room, index = gradient((4, 9)), np.array([1, 0, 1])
    theirs = nn.RowTensor(on_device(index), on_device(room)[1:], (3, 9))
    assert_same(theirs.to_dense(), nn.RowTensor(index, room[1:], (3, 9)).to_dense())


def test_bad_rows() -> None:
    """Bad rows are an error at once, also where there are no rows or no columns."""
    for bad, shape in (([1, 7, -1], (4, 3)), ([2, 1, -3], (4, 3)), ([5], (0, 3)), ([5], (4, 0))):
        tensor = on_device(rows(bad, shape))
        place = next(k for k, index in enumerate(bad) if not 0 <= index < shape[0])
        text = f"RowTensor: indices[{place}] is out of range: expected 0 <= index < {shape[0]}, got"
        for call in (tensor.coalesce, tensor.to_dense):
            with refused(IndexError, f"{text} {bad[place]}", tensor.indices, tensor.values):
                call()
    # The attributes can be assigned to.
    tensor = on_device(rows([1, 1], (4, 3)))
    for values, error, text in (
        (on_device(gradient((3, 3))), ValueError, "has a wrong length"),
        (gradient((2, 3)), RuntimeError, "lives on a CUDA device"),
    ):
        tensor.values = values
        for call in (tensor.coalesce, tensor.to_dense):
            with refused(error, text):
                call()


# The steps of custom optimizers

SHAPES = (
    (5, 4), (7,), (3, 2, 3), sized((2, 40), (2, 100_003)), (4, 1), (0, 3), (3, 0), ())  # fmt: skip


def helpers(params: Any, gradients: Any) -> list[Any]:
    """Each published step of a custom optimizer."""
    groups = [{"params": params, "weight_decay": 0.3, "grad_centralization": True}]
    opt = nn.Optimizer(0.1, groups, loss_scale=4.0)
    steps = opt.decay_weight, opt.gradients_centralization, opt.scale_grad
    return [step(tuple(gradients)) for step in steps]


def test_steps_of_custom_optimizers() -> None:
    """`decay_weight`, `gradients_centralization` and `scale_grad` are as on the host."""
    for dtype, of_gradient in ((F32, F32), (F64, F32), (F32, F64), (F16, F16), (BF16, BF16)):
        arrays = [positive(shape, dtype) for shape in SHAPES]
        given: list[Any] = [gradient(shape, of_gradient) for shape in SHAPES]
        given[1], given[0] = None, rows([3, 1, 3], (5, 4), of_gradient)
        given[3] = [rows(own, SHAPES[3], of_gradient) for own in ([1], [0, 1])]
        assert_calls_alike(helpers, arrays, given, compare=assert_close)
    w, host = on_device(positive((5, 4))), gradient((5, 4))
    opt = nn.Optimizer(0.1, [w], weight_decay=0.1)
    for bad in (host, rows([1], (5, 4))):
        with refused(ValueError, "lives elsewhere than", w):
            opt.decay_weight((bad,))
    with refused(ValueError, "has a wrong shape", w):
        opt.decay_weight((on_device(gradient((4, 5))),))
    with told(IndexError, "got 5", w):
        opt.decay_weight((on_device(rows([5], (5, 4))),))


# On their way between processes

N = 7


def test_routes() -> None:
    """All storage types, shapes of ids and of rows; ids of the host and of the device."""
    for dtype, tail in ((F32, (4,)), (F64, ()), (F16, (3, 2)), (BF16, (5,))):
        table = gradient((N, *tail), dtype)
        shard = RowShard(N, alone(), order="hash")
        for ids in (np.array([[1, 6], [1, 0]]), np.array([4], np.int32), np.empty((0, 2), int)):
            values = gradient((*ids.shape, *tail), dtype)
            theirs, ours = shard.route(on_device(ids)), shard.route(ids)
            found = theirs.gather(on_device(table)), theirs.scatter(on_device(values))
            expected = ours.gather(table), ours.scatter(values)
            assert_same(found, expected)
            assert found[1].positions.tobytes() == expected[1].positions.tobytes()
            assert found[1].batch_length == expected[1].batch_length


def test_parts() -> None:
    """Rows that one of three processes has, of the whole batch: positions are cut into ranges. That
    their sums do not depend on the number of processes is tested on the host."""
    n, rng = HOT + HOT // 4, np.random.default_rng(0)
    ids = np.where(rng.random(n) < 0.9, 3, rng.integers(0, N, n))
    values = np.ones((n, 2), np.float32)
    # 2**24 + 1 is 2**24: of the ones those are left that are not in the first range.
    ids[[0, -1]], values[0], values[-1] = 3, 2.0**24, -(2.0**24)
    for first in (0, 2_000, 3_500):
        places = first + 5 * np.arange(n)
        given = [
            nn.RowTensor(ids[own], values[own], (N, 2), positions=places[own], batch_length=12 * n)
            for own in (ids % 3 == rank for rank in range(3))
        ]
        sgd = partial(nn.SGD, learning_rate=1.0)
        assert_alike(sgd, [np.zeros((N, 2), F32)], [[g] for g in given])


def test_refused_routes() -> None:
    """Processes that cannot send arrays of devices."""
    table = on_device(np.zeros((N, 2), np.float32))

    def program(comm: ThreadCommunicator) -> None:
        route = RowShard(N, comm).route(np.array([1]))
        with refused(ValueError, "Route.gather: rank 0: table is on a device"):
            route.gather(table)
        with refused(ValueError, "Route.scatter: rank 0: gradient is on a device"):
            route.scatter(on_device(np.ones((1, 2), np.float32)))

    in_threads(2, program)
    for given in on_device([gradient((N, 2)), rows([1], (N, 2))]):
        with refused(RuntimeError, "all_reduce: gradient 0 lives on a CUDA device"):
            all_reduce((given,), alone())
    shards = {"table": RowShard(N, alone())}
    with refused(ValueError, "save_checkpoint: optimizer is on a device", table):
        save_checkpoint("nowhere", nn.SGD([nn.Parameter(table, "table")]), alone(), shards)
    route = RowShard(N, alone()).route(np.array([1, 2]))
    with refused(ValueError, "table has a wrong shape", table):
        route.gather(on_device(np.zeros((N + 1, 2), np.float32)))
