"""The loops of row-sparse steps: sums in one order, sorting, parts of batches, guards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.kernels.cpu.rows import step as host_rows
from fusestep.kernels.cpu.threads.parallel import run_all
from fusestep.kernels.cuda.device.guard import NOTHING, WORDS
from fusestep.kernels.cuda.device.part import LaunchContext, run
from fusestep.kernels.cuda.rows import sort
from fusestep.kernels.cuda.rows.step import RowStep
from fusestep.kernels.element import kernel
from fusestep.kernels.rules import adam
from fusestep.kernels.storage import BF16, F16, F32, F64, Storage
from fusestep.kernels.tables import HOT, RowTable, range_length

from devices import (
    BETAS,
    GPU,
    MARKS,
    Maker,
    adopted,
    assert_close,
    assert_same,
    computed,
    numba_stream,
    on_device,
    on_host,
    only,
    positive,
    shifted,
    sized,
)
from optimizers import make as new_optimizer

pytestmark = MARKS
# Of the tables of a step: rows, columns, occurrences.
Tables = Sequence[tuple[int, int, int]]


class RowCase:
    """Tables with row-sparse gradients on the host and on the device."""

    def __init__(
        self,
        tables: Tables,
        w: Storage = F32,
        g: Storage = F32,
        s: tuple[Storage, ...] = (F32, F32),
        hottest: int = 0,
        shift: int = 0,
        index_dtype: type = np.int64,
        whole: int = 0,  # length of the batch of which the tables have parts
    ) -> None:
        self.kernel = kernel(adam.ADAM, (), w, g, s)
        rng = np.random.default_rng(7)
        scalars = rng.uniform(0.1, 0.9, (2, self.kernel.n_scalars))
        self.hp = scalars.astype(self.kernel.real.carrier)
        self.hp_of = [t % 2 for t in range(len(tables))]
        self.shapes, self.whole, self.shift = tables, whole, shift
        storages = (self.kernel.w, *self.kernel.s)
        self.variables = [
            [rng.uniform(0.1, 1.0, n * d).astype(x.dtype) for x in storages] for n, d, _ in tables
        ]
        self.indices = [rng.integers(0, n, b).astype(index_dtype) for n, _, b in tables]
        for index in self.indices:
            index[rng.permutation(len(index))[:hottest]] = 1
        self.values = [rng.uniform(-1, 1, (b, d)).astype(g.dtype) for _, d, b in tables]
        places = (rng.choice(whole, b, replace=False) for _, _, b in tables if whole)
        self.positions = [np.sort(of_table) for of_table in places]

    def tables(self, variables: Any, indices: Any, values: Any) -> list[RowTable]:
        """Addresses of these as the tables of a step."""
        made = []
        for t, (n, d, b) in enumerate(self.shapes):
            hp, itemsize = self.hp[self.hp_of[t] :].ctypes.data, self.indices[t].itemsize
            of_batch = (self.positions[t].ctypes.data, self.whole) if self.whole else ()
            given = tuple(variables[t]), hp, n, d, indices[t], itemsize, b, values[t], *of_batch
            made.append(RowTable(*given))
        return made

    def on_host(self) -> list[RowTable]:
        """The tables of the host."""
        variables = [[a.ctypes.data for a in arrays] for arrays in self.variables]
        indices, values = ([a.ctypes.data for a in of] for of in (self.indices, self.values))
        return self.tables(variables, indices, values)

    def step_on_device(self, *, touched_only: bool, drop: bool = False) -> np.ndarray:
        """One step of copies, `found`, and the guard after it."""
        guard = np.array([NOTHING, 0], np.int64)
        assert len(guard) == WORDS
        there = [[shifted(a, self.shift) for a in arrays] for arrays in self.variables]
        given = on_device([self.indices, [v.reshape(-1) for v in self.values], guard])
        variables = [[adopted(a).address for a in arrays] for arrays in there]
        indices, values = ([adopted(a).address for a in of] for of in given[:2])
        tables = self.tables(variables, indices, values)
        step = RowStep(self.kernel, tables, touched_only=touched_only, drop=drop, base=1_000)
        call = LaunchContext(numba_stream(0), adopted(given[2]).address)
        run(step, self.hp, self.hp_of, call)
        self.found = [[on_host(a) for a in arrays] for arrays in there]
        return on_host(given[2])

    def step_on_host(self, *, touched_only: bool, drop: bool = False) -> None:
        """The same step by the loops of the CPU, in place."""
        step = host_rows.RowStep(self.kernel, self.on_host(), touched_only=touched_only, drop=drop)
        assert step.bad_position == -1
        run_all(step.loops)
        step.release()

    def assert_equal(self) -> None:
        """Device and host have done the same to every element."""
        for ours, theirs in zip(self.found, self.variables, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert_close(a, b)


def compare(tables: Tables, drop: bool = False, **options: Any) -> None:
    """Both updates, on the device as on the host."""
    for touched_only in (True, False):
        case = RowCase(tables, **options)
        if drop:
            for index, (n, _, _) in zip(case.indices, tables, strict=True):
                index[::3] = [n, -1, n + 7][: len(index[::3])] + [n] * (len(index[::3]) - 3)
        guard = case.step_on_device(touched_only=touched_only, drop=drop)
        assert guard[0] == NOTHING
        case.step_on_host(touched_only=touched_only, drop=drop)
        case.assert_equal()


def test_row_steps() -> None:
    """Duplicates, several tables of different widths, ends of rows, unaligned ones, none."""
    compare([(9, 8, 20)])
    compare([(5, 3, 7), (9, 16, 0), (4, 7, 12), (3, 1, 5)])
    compare([(6, 40, 10)], shift=1, index_dtype=np.int32)
    compare([(4, 4, 0)])
    compare([(4, 5, 12)], drop=True)
    compare([(5, 3, 7), (9, 16, 30)])


def test_row_storage_types() -> None:
    """16-bit and mixed storage types."""
    compare([(6, 24, 10)], w=BF16, g=BF16)
    compare([(6, 8, 10)], w=F64, g=F32, s=(F64, F64))
    compare([(4, 9, 10)], w=F32, g=F16)


def test_hot_rows() -> None:
    """Rows with so many occurrences that they are summed range by range."""
    compare([(3, 4, HOT + 90), (4, 1, 4_500)], hottest=HOT + 40)
    compare([(3, 5, HOT + 1)], hottest=HOT + 1)
    compare([(3, 4, HOT + 90), (4, 1, 700)], hottest=HOT + 40, whole=30_000)


def test_part_of_a_batch() -> None:
    """Ranges are those of positions in the whole batch, not in this part of it."""
    n, first = HOT + 40, 300  # of the positions, 300 are in the first range
    case = RowCase([(3, 1, n)], hottest=n, whole=9_000)
    case.positions = [np.arange(n) + 4_096 - first]
    assert case.on_host()[0].bounds().tolist() == [0, first, n, n]
    # 2**24 + 1 is 2**24: with another cut the ones of the second range would be lost.
    case.values[0][...] = 1.0
    case.values[0][0], case.values[0][-1] = 2.0**24, -(2.0**24)
    first_moment, one_minus_beta1 = case.variables[0][1][1], case.hp[0, 0]
    case.step_on_device(touched_only=True)
    case.step_on_host(touched_only=True)
    case.assert_equal()
    expected = first_moment + one_minus_beta1 * (n - first - 1 - first_moment)
    computed()
    np.testing.assert_allclose(case.found[0][1][1], expected, 1e-5)


def test_guards() -> None:
    """A bad index keeps the call from writing, and is found."""
    for touched_only in (True, False):
        case = RowCase([(5, 4, 6), (3, 4, 9)])
        case.indices[1][[4, 7]] = 3, -2
        guard = case.step_on_device(touched_only=touched_only)
        case.assert_equal()
        computed()
        assert guard.tolist() == [1_000 + 6 + 4, 3]


SORTED = sized((0, 1, 32, 85), (0, 1, 2, 255, 2_047, 2_048, 2_049, 100_003, 1_000_000))


@pytest.mark.parametrize("n", SORTED)
def test_own_sort(n: int) -> None:
    """NumPy's stable sort, of any digits; nothing is written beyond the buffers."""
    rng = np.random.default_rng(n)
    whole = rng.integers(0, 1 << 62, n)
    by_rows = np.sort(np.minimum(rng.zipf(1.5, n), 63)) << 20 | np.arange(n)
    same = np.full(n, 15 << 20) | np.arange(n)
    cases = [
        (whole, 11, 10),
        (whole, 50, 3),
        (by_rows, 20, 6),
        (by_rows[::-1], 20, 6),
        (same, 20, 6),
    ]
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


# A row of up to 512 occurrences; of more, in one range and in several of them.
WIDTHS = sized((5,), (1, 8, 33, 300))
OCCURRENCES = {
    **{f"cold-{d}": (400, 900, d) for d in WIDTHS},
    **{f"hot-{d}": (600, 900, d) for d in WIDTHS},
    **{f"ranges-{d}": (9_000, 20_000, d) for d in sized((), WIDTHS)},
    **sized({}, {"longer ranges-8": (150_000, 300_000, 8)}),
}
OPERATORS = [ops.FusedSparseLazyAdam(), ops.FusedSparseAdam()]
BOTH = pytest.mark.parametrize("op", OPERATORS, ids=["lazy", "all"])


def row_step(op: Any, arrays: Sequence[np.ndarray], values: Any, indices: Any) -> list[np.ndarray]:
    """What Adam's arrays hold after a step on copies of them."""
    on = on_device(arrays)
    op(*on, *BETAS, *on_device([values, indices]))
    fusestep.synchronize()
    return [on_host(a) for a in on]


@pytest.mark.parametrize(("hottest", "b", "d"), OCCURRENCES.values(), ids=OCCURRENCES)
@BOTH
def test_rows_are_summed_as_on_the_cpu(op: Any, hottest: int, b: int, d: int) -> None:
    """In the same order: with the folded gradient, once for each row, the bits are the same.

    Sums have no products that could become an FMA, so the order alone decides.
    """
    n, rng, length = sized(40, 500), np.random.default_rng(3), range_length(b)
    indices = rng.integers(0, n, b)
    indices[rng.permutation(b)[:hottest]] = 7
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
    found, once = row_step(op, start, values, indices), row_step(op, start, folded, rows)
    op(*start, *BETAS, values, indices)
    for a, b_, c in zip(found, once, start, strict=True):
        assert_same(a, b_)
        assert_close(a, c)


@BOTH
def test_every_step_has_the_same_bits(op: Any) -> None:
    """In every run, and whoever sorts the keys."""
    rng = np.random.default_rng(4)
    b, n, d = sized((80, 9, 3), (100_000, 3_000, 24))
    indices = np.where(rng.random(b) < 0.3, 5, rng.zipf(1.2, b) % n)
    values, start = (
        rng.standard_normal((b, d)).astype(np.float32),
        [positive((n, d)) for _ in "wmv"],
    )
    found = [row_step(op, start, values, indices) for _ in range(3)]
    by_numba = [Maker().put(a) for a in start]
    op(*by_numba, *BETAS, Maker().put(values), Maker().put(indices))
    found.append([on_host(a) for a in by_numba])
    for other in found[1:]:
        for a, b_ in zip(other, found[0], strict=True):
            assert_same(a, b_)


@pytest.mark.parametrize("form", ["Adam", "Lamb", "Lamb-clipped"])
@only(GPU, reason="blocks end in another order in every run")
def test_every_dense_step_has_the_same_bits(form: str) -> None:
    """The sums of LAMB's norms among them."""
    sizes = ((200_140,), (7,), (10_007,))
    start, steps = [positive(s) for s in sizes], [[positive(s) for s in sizes] for _ in range(2)]
    runs = []
    for _ in range(3):
        opt = new_optimizer(form, [nn.Parameter(w) for w in on_device(start)])
        for gs in steps:
            opt(on_device(gs))
        runs.append([p.asnumpy() for p in opt.parameters])
    for other in runs[1:]:
        for a, b in zip(other, runs[0], strict=True):
            assert_same(a, b)


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
