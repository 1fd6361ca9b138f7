"""The positions of a `RowTensor`: what is refused, when it is made and when it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusestep import nn, ops

from helpers import assert_same_bits, refused

VALUES = np.ones((3, 2), np.float32)
IDS = np.array([2, 0, 2])
WRONG: list[tuple[Any, int, type[Exception], str]] = [
    (np.array([0, 1, 2], np.int32), 9, TypeError, "positions have a wrong dtype"),
    (np.array([0.0, 1.0, 2.0]), 9, TypeError, "positions have a wrong dtype"),
    ([0, 1, 2], 9, TypeError, "positions"),
    (np.arange(2), 9, ValueError, "positions do not fit the indices"),
    (np.arange(4), 9, ValueError, "positions do not fit the indices"),
    (np.arange(3)[None], 9, ValueError, "positions do not fit the indices"),
    (np.array([0, 2, 1]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([0, 1, 1]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([-1, 1, 2]), 9, ValueError, "positions are no positions of a batch"),
    (np.array([0, 1, 9]), 9, ValueError, r"positions .*expected ascending ones in \[0, 9\)"),
    (np.array([0, 1, 2]), 0, ValueError, "positions are no positions of a batch"),
]
EACH_WRONG = pytest.mark.parametrize(("positions", "length", "kind", "match"), WRONG)


@EACH_WRONG
def test_positions_that_are_refused(
    positions: Any, length: int, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=f"^RowTensor: {match}"):
        nn.RowTensor(IDS, VALUES, (4, 2), positions=positions, batch_length=length)


@EACH_WRONG
def test_what_was_assigned_is_checked_by_the_step(
    positions: Any, length: int, kind: type[Exception], match: str
) -> None:
    """Also after a step with the same gradient, whose arrays are known by then."""
    for n_before in (0, 2):
        table = np.ones((4, 2), np.float32)
        opt, gradient = nn.LazyAdam([table]), nn.RowTensor(IDS, VALUES, (4, 2))
        for _ in range(n_before):
            opt((gradient,))
        gradient.positions, gradient.batch_length = positions, length
        with refused(kind, f"^LazyAdam: .*{match}", opt, gradient):
            opt((gradient,))


def test_positions_of_parts_are_refused() -> None:
    """The places of which would not be ascending."""
    part = nn.RowTensor(IDS, VALUES, (4, 2), positions=np.arange(3), batch_length=6)
    opt = nn.LazyAdam([np.ones((4, 2), np.float32)])
    with refused(ValueError, "^LazyAdam: .*has parts with positions", opt, part):
        opt(([part, nn.RowTensor(IDS, VALUES, (4, 2))],))
    opt(([part],))  # one part is no list of parts


def test_positions_need_not_be_contiguous() -> None:
    """Nor stay the same: each step reads them anew."""
    n = 9000
    rng = np.random.default_rng(0)
    ids, values = np.zeros(n, np.int64), rng.standard_normal((n, 3)).astype(np.float32)
    results = []
    for positions in (np.arange(2 * n)[::2], np.arange(2 * n)[::2].copy(), None):
        table = np.zeros((2, 3), np.float32)
        nn.SGD([table])((nn.RowTensor(
            ids, values, (2, 3), positions=positions, batch_length=2 * n * (positions is not None)
        ),))  # fmt: skip
        results.append(table)
    assert_same_bits(results[0], results[1])
    assert (results[0] != results[2]).any()  # other ranges, another order of the sum


def test_operations_without_order_do_not_need_them() -> None:
    gradient = ops.RowTensor(IDS, VALUES, (4, 2), positions=np.array([1, 5, 7]), batch_length=8)
    assert gradient.to_dense()[:, 0].tolist() == [1, 0, 2, 0]
    assert gradient.coalesce().indices.tolist() == [0, 2]
    assert "RowTensor(indices=(3,)" in repr(gradient)
