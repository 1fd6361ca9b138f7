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
from ..headers import address_of
from ..records import records

_TILE_WIDTH = 8_192  # whole rows of most matrices: a narrower tile jumps from row to row
_PART = 65_536  # elements


class Matrices(NamedTuple):
    """A tensor of the step, all ``int64``; places count elements."""

    arrays: int  # address of the addresses of the parameter and of the states of its shape
    row_state: int
    column_state: int
    matrices: int
    height: int
    width: int
    tile_height: int
    tile_width: int
    tiles_down: int
    tiles_across: int
    group: int  # matrices of a part, where a part is whole matrices
    first_part: int
    first_group: int  # number of the first group of matrices
    row_sums: int  # [matrices, tiles_across, height]
    column_sums: int  # [matrices, tiles_down, width]
    factors: int  # [matrices, height + width]; of states the rows of all matrices come first


class FactoredCall(NamedTuple):
    """Arguments of every loop, all ``int64``."""

    n_tensors: int
    tensors: np.ndarray  # [T] of `Matrices`
    gradients: np.ndarray  # [T]
    hp: np.ndarray  # [T, F]
    hp_row_bytes: int
    g_bytes: int
    real_bytes: int
    sums: np.ndarray  # float64
    factors: np.ndarray  # of the arithmetic
    states: np.ndarray  # of the arithmetic: the new ones, each tensor's where its factors are
    measured: np.ndarray  # float64 [parts]: sums of squares of the direction
    squares: int
    make_factors: int
    direction: int
    update: int


tensors_at = records(Matrices)


class FactoredTable:
    """The tensors of a step, at least one; what stays the same from step to step."""

    def __init__(self, tensors: Sequence[FactoredTensor]) -> None:
        self._addresses = np.array([tensor.addresses for tensor in tensors], np.int64)
        self.n_parts = self.n_groups = self.n_elements = self.n_sums = self.n_factors = 0
        rows = [self._row(*each) for each in zip(self._addresses, tensors, strict=True)]
        self.table = np.array(rows, np.int64)  # [T] of `Matrices`
        self.first_part = self.table[:, Matrices._fields.index("first_part")]

    def _row(self, addresses: np.ndarray, tensor: FactoredTensor) -> Matrices:
        """The next row of the table."""
        _, row_state, column_state, matrices, height, width = tensor
        states = address_of(addresses), row_state, column_state
        tile_width = min(width, _TILE_WIDTH)
        tile_height = min(height, max(1, _PART // tile_width))
        down, across = -(-height // tile_height), -(-width // tile_width)
        group = max(1, _PART // (height * width)) if down * across == 1 else 1
        cut = tile_height, tile_width, down, across, group
        of_rows, of_columns = matrices * height, matrices * width
        column_sums = self.n_sums + of_rows * across
        first = self.n_parts, self.n_groups
        places = self.n_sums, column_sums, self.n_factors
        n_groups = -(-matrices // group)
        self.n_parts += matrices * down * across if down * across > 1 else n_groups
        self.n_groups += n_groups
        self.n_elements += of_rows * width
        self.n_sums = column_sums + of_columns * down
        self.n_factors += of_rows + of_columns
        return Matrices(*states, matrices, height, width, *cut, *first, *places)
