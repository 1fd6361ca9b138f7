"""How Adafactor's matrices are cut into parts, and where their sums and factors lie.

A tensor is a list of equal matrices. Small matrices are dealt with several to a part; a large
one is cut into tiles, whose sums are added in order. The cut depends on the shape alone, so the
result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...tables import FactoredTensor
from ..compile import call_reader
from ..headers import address_of

_TILE_WIDTH = 8_192  # whole rows of most matrices: a narrower tile jumps from row to row
_PART = 65_536  # elements

# Columns of the table of tensors, int64 [T, COLUMNS]; places count elements.
(
    ARRAYS,  # address of the addresses of the parameter and of the states of its shape
    ROW_STATE,
    COLUMN_STATE,
    MATRICES,
    HEIGHT,
    WIDTH,
    TILE_HEIGHT,
    TILE_WIDTH,
    TILES_DOWN,
    TILES_ACROSS,
    GROUP,  # matrices of a part, where a part is whole matrices
    ROW_SUMS,  # [matrices, TILES_ACROSS, height]
    COLUMN_SUMS,  # [matrices, TILES_DOWN, width]
    FACTORS,  # [matrices, height + width]; of states the rows of all matrices come first
    COLUMNS,
) = range(15)


class FactoredCall(NamedTuple):
    """Arguments of every loop, all ``int64``."""

    n_tensors: int
    tensors: int  # [T, COLUMNS]
    gradients: int  # [T]
    first_part: int  # [T]: number of each tensor's first part
    first_group: int  # [T]: number of each tensor's first group of matrices
    hp: int  # [T, F]
    hp_row_bytes: int
    g_bytes: int
    real_bytes: int
    sums: int  # float64
    factors: int  # of the arithmetic
    states: int  # of the arithmetic: the new ones, each tensor's where its factors are
    measured: int  # float64 [parts]: sums of squares of the direction
    squares: int
    make_factors: int
    direction: int
    update: int


read_call = call_reader(FactoredCall)


class FactoredTable:
    """The tensors of a step; what stays the same from step to step.

    Args:
        tensors: at least one.
    """

    def __init__(self, tensors: Sequence[FactoredTensor]) -> None:
        rows, parts, groups, n_sums, n_factors = [], [], [], 0, 0
        self._addresses = np.array([tensor.addresses for tensor in tensors], np.int64)
        for place, tensor in zip(self._addresses, tensors, strict=True):
            cut = _cut(tensor)
            _, _, down, across, group = cut
            in_rows, in_columns = tensor.matrices * tensor.height, tensor.matrices * tensor.width
            column_sums = n_sums + in_rows * across
            rows.append((address_of(place), *tensor[1:], *cut, n_sums, column_sums, n_factors))
            n_sums = column_sums + in_columns * down
            n_factors += in_rows + in_columns
            groups.append(-(-tensor.matrices // group))
            parts.append(tensor.matrices * down * across if down * across > 1 else groups[-1])
        self.table = np.array(rows, np.int64)
        self.n_elements = sum(t.matrices * t.height * t.width for t in tensors)
        self.first_part, self.n_parts = _offsets(parts)
        self.first_group, self.n_groups = _offsets(groups)
        self.n_sums, self.n_factors = n_sums, n_factors


def _cut(tensor: FactoredTensor) -> tuple[int, int, int, int, int]:
    """Height and width of a tile, tiles down and across, and matrices of a part."""
    width = min(tensor.width, _TILE_WIDTH)
    height = min(tensor.height, max(1, _PART // width))
    down, across = -(-tensor.height // height), -(-tensor.width // width)
    group = max(1, _PART // (tensor.height * tensor.width)) if down * across == 1 else 1
    return height, width, down, across, group


def _offsets(counts: Sequence[int]) -> tuple[np.ndarray, int]:
    ends = np.cumsum(counts)
    return np.concatenate(([0], ends[:-1])), int(ends[-1])
