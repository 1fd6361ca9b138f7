"""Row-sparse steps: sums in one order, sorting, thousands that nobody has waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fusestep
from fusestep import nn, ops
from fusestep.kernels.cuda.device import memory
from fusestep.kernels.cuda.rows import sort
from fusestep.kernels.tables import HOT, range_length

from devices import (
    BETAS,
    GPU,
    MARKS,
    Maker,
    adopted,
    assert_close,
    assert_same,
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


# A list that one block sorts; a row of up to 512 occurrences; of more, in one range and in several.
WIDTHS = sized((5,), (1, 8, 33, 300))
OCCURRENCES = {
    "short-5": (6, 16, 5),
    **{f"cold-{d}": (400, 900, d) for d in WIDTHS},
    **{f"hot-{d}": (600, 900, d) for d in WIDTHS},
    **{f"ranges-{d}": (9_000, 20_000, d) for d in sized((), WIDTHS)},
    **sized({}, {"longer ranges-8": (150_000, 300_000, 8)}),
}
OPERATORS = [ops.FusedSparseLazyAdam(), ops.FusedSparseAdam()]
BOTH = pytest.mark.parametrize("op", OPERATORS, ids=["lazy", "all"])


def row_step(
    op: Any, arrays: Sequence[np.ndarray], values: Any, indices: Any, shift: int = 0
) -> list[np.ndarray]:
    """What Adam's arrays hold after a step on copies, which begin so many elements further on."""
    *on, g = (shifted(a, shift) for a in (*arrays, values))
    op(*on, *BETAS, g, shifted(indices, min(shift, 1)))
    fusestep.synchronize()
    return [on_host(a) for a in on]


@pytest.mark.parametrize(("hottest", "b", "d"), OCCURRENCES.values(), ids=OCCURRENCES)
@BOTH
def test_rows_are_summed_as_on_the_cpu(op: Any, hottest: int, b: int, d: int) -> None:
    """In the same order: with the folded gradient, once for each row, the bits are the same.

    They are so wherever the arrays begin, too.
    Sums have no products that could become an FMA, so the order alone decides.
    """
    n, rng, length = sized(40, 500), np.random.default_rng(3), range_length(b)
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
    found, once = row_step(op, start, values, indices), row_step(op, start, folded, rows)
    moved = [row_step(op, start, values, indices, shift) for shift in (1, 3)]
    op(*start, *BETAS, values, indices)
    for a, *others, c in zip(found, once, *moved, start, strict=True):
        assert_close(a, c)
        for other in others:
            assert_same(a, other)


@BOTH
def test_memory_that_grows(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step like an earlier one works where its tables lie now."""
    monkeypatch.setattr(memory, "_rooms", {})
    monkeypatch.setattr(memory, "_LEAST", 1)
    for b in (4, 60, 4):
        start, values, indices = (
            [positive((6, 3)) for _ in "wmv"],
            positive((b, 3)),
            np.arange(b) % 6,
        )
        found = row_step(op, start, values, indices)
        op(*start, *BETAS, values, indices)
        for a, b_ in zip(found, start, strict=True):
            assert_close(a, b_)


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
