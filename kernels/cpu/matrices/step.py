"""Rules on matrices: three passes over the gradients of any number of tensors in one step.

A tensor is a list of equal matrices. A part has several small matrices; a large matrix is cut into
tiles, whose sums are added in order. The cut depends on the shape alone, so the result does not
depend on the number of threads.

The states of rows and columns are small. New states are computed beside the old ones, and replace
them when the parameters are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from ...element import Kernel
from ...inner import njit
from ...tables import MatrixTensor
from ..compiler.compile import NativeFunction, part
from ..compiler.intrinsics import as_pointer, call_address
from ..compiler.records import int64s, last_at_most, records
from ..headers.arrays import address_of
from ..threads.parallel import Arguments, Loop, get_num_threads, run_all
from .blocks import matrix_blocks

_TILE_WIDTH = 8_192  # whole rows of most matrices: a narrower tile jumps from row to row
_PART = 65_536  # elements
_SERIAL_BELOW = 32_768  # elements


class MatrixRow(NamedTuple):
    """A tensor of the step, all ``int64``; places count elements."""

    arrays: int  # address of the addresses of the parameter and its states
    row_state: int
    column_state: int
    matrices: int
    height: int
    width: int
    tile_height: int
    tile_width: int
    tiles_down: int
    tiles_across: int
    group: int  # matrices of a part, if a part has whole matrices; else 1
    first_part: int
    first_group: int  # number of the first group of matrices
    row_sums: int  # [matrices, tiles_across, height]
    column_sums: int  # [matrices, tiles_down, width]
    factors: int  # [matrices, height + width]; new states: those of all rows, then of all columns


class MatrixCall(NamedTuple):
    """Arguments of every loop, all ``int64``."""

    n_tensors: int
    tensors: np.ndarray  # [T] of `MatrixRow`
    gradients: np.ndarray  # [T]
    hp: np.ndarray  # [T, F]
    hp_row_bytes: int
    g_bytes: int
    real_bytes: int
    sums: np.ndarray  # float64
    factors: np.ndarray  # of the arithmetic
    states: np.ndarray  # of the arithmetic: new states, at the places of the factors
    measured: np.ndarray  # float64 [parts]: sums of the squares that the rule measures
    terms: int
    make_factors: int
    reduce: int
    update: int


_tensors_at = records(MatrixRow)


class MatrixTable:
    """The tensors of a step, at least one, and their cut, which is the same in each step."""

    def __init__(self, tensors: Sequence[MatrixTensor]) -> None:
        self._addresses = np.array([tensor.addresses for tensor in tensors], np.int64)
        self.n_parts = self.n_groups = self.n_elements = self.n_sums = self.n_factors = 0
        rows = [self._row(*each) for each in zip(self._addresses, tensors, strict=True)]
        self.table = np.array(rows, np.int64)  # [T] of `MatrixRow`
        self.first_part = self.table[:, MatrixRow._fields.index("first_part")]

    def _row(self, addresses: np.ndarray, tensor: MatrixTensor) -> MatrixRow:
        _, matrices, height, width = tensor
        states = address_of(addresses), tensor.row_state, tensor.column_state
        tile_width = min(width, _TILE_WIDTH)
        tile_height = min(height, max(1, _PART // tile_width))
        down, across = -(-height // tile_height), -(-width // tile_width)
        group = max(1, _PART // (height * width)) if down * across == 1 else 1
        cut = tile_height, tile_width, down, across, group
        n_rows, n_columns = matrices * height, matrices * width
        column_sums = self.n_sums + n_rows * across
        first = self.n_parts, self.n_groups
        places = self.n_sums, column_sums, self.n_factors
        n_groups = -(-matrices // group)
        self.n_parts += matrices * down * across if down * across > 1 else n_groups
        self.n_groups += n_groups
        self.n_elements += n_rows * width
        self.n_sums = column_sums + n_columns * down
        self.n_factors += n_rows + n_columns
        return MatrixRow(*states, matrices, height, width, *cut, *first, *places)


@njit(inline="always")
def _part_of(c, index):
    """The number of a part's tensor, the tensor, its first tile and the tile after its last."""
    tensors = _tensors_at(c.tensors, c.n_tensors)
    t = last_at_most(tensors.first_part, c.n_tensors, index)
    tensor = tensors[t]
    begin = (index - tensor.first_part) * tensor.group
    n_tiles = tensor.matrices * tensor.tiles_down * tensor.tiles_across
    return t, tensor, begin, min(begin + tensor.group, n_tiles)


@njit
def _tile(tensor, number):
    """The matrix of a tile, its place down and across, its size, and the elements before it."""
    tiles = tensor.tiles_down * tensor.tiles_across
    matrix, rest = number // tiles, number % tiles
    down, across = rest // tensor.tiles_across, rest % tensor.tiles_across
    top, left = down * tensor.tile_height, across * tensor.tile_width
    height = min(tensor.tile_height, tensor.height - top)
    width = min(tensor.tile_width, tensor.width - left)
    offset = (matrix * tensor.height + top) * tensor.width + left
    return matrix, down, across, height, width, offset


@njit
def _call_on_tile(c, block, t, tensor, tile, row_values, column_values, total):
    _, _, _, height, width, offset = tile
    g = int64s(c.gradients, c.n_tensors)[t] + offset * c.g_bytes
    sizes, hp = (height, width, tensor.width), c.hp + t * c.hp_row_bytes
    call_address(block, tensor.arrays, offset, g, *sizes, row_values, column_values, hp, total)


@part(MatrixCall)
def sum_terms(index, slot, c):
    """Sum over the rows and the columns of the tiles of one part."""
    t, tensor, begin, end = _part_of(c, index)
    for number in range(begin, end):
        tile = _tile(tensor, number)
        matrix, down, across, height, width, _ = tile
        row = (matrix * tensor.tiles_across + across) * tensor.height + down * tensor.tile_height
        column = (matrix * tensor.tiles_down + down) * tensor.width + across * tensor.tile_width
        column_sums = c.sums + (tensor.column_sums + column) * 8
        row_sums = c.sums + (tensor.row_sums + row) * 8
        # The block adds to its sums, in memory as it was allocated.
        carray(as_pointer(column_sums), width, np.float64)[:] = 0.0
        carray(as_pointer(row_sums), height, np.float64)[:] = 0.0
        _call_on_tile(c, c.terms, t, tensor, tile, row_sums, column_sums, 0)


@njit
def _add_tiles(address, n_tiles, n):
    """Add the sums of all tiles to those of the first tile, in order."""
    sums = carray(as_pointer(address), (n_tiles, n), np.float64)
    for k in range(1, n_tiles):
        for i in range(n):
            # In order, whatever thread did which tile: the bits do not depend on their number.
            sums[0, i] += sums[k, i]


@njit
def _new_states(c, tensor):
    """Addresses of the new states of rows and columns of a tensor."""
    rows = c.states + tensor.factors * c.real_bytes
    return rows, rows + tensor.matrices * tensor.height * c.real_bytes


@njit
def _copy(target, source, n_bytes):
    # States are float32 or float64: words of 4 bytes divide both.
    words = carray(as_pointer(target), n_bytes // 4, np.int32)
    words[:] = carray(as_pointer(source), n_bytes // 4, np.int32)


@part(MatrixCall)
def make_factors(index, slot, c):
    """Compute new states and factors of one group of matrices."""
    tensors = _tensors_at(c.tensors, c.n_tensors)
    t = last_at_most(tensors.first_group, c.n_tensors, index)
    tensor = tensors[t]
    height, width = tensor.height, tensor.width
    begin = (index - tensor.first_group) * tensor.group
    new_rows, new_columns = _new_states(c, tensor)
    for matrix in range(begin, min(begin + tensor.group, tensor.matrices)):
        rows, columns = matrix * height * c.real_bytes, matrix * width * c.real_bytes
        _copy(new_rows + rows, tensor.row_state + rows, height * c.real_bytes)
        _copy(new_columns + columns, tensor.column_state + columns, width * c.real_bytes)
        row_sums = c.sums + (tensor.row_sums + matrix * tensor.tiles_across * height) * 8
        column_sums = c.sums + (tensor.column_sums + matrix * tensor.tiles_down * width) * 8
        _add_tiles(row_sums, tensor.tiles_across, height)
        _add_tiles(column_sums, tensor.tiles_down, width)
        states, hp = (new_rows + rows, new_columns + columns), c.hp + t * c.hp_row_bytes
        out = c.factors + (tensor.factors + matrix * (height + width)) * c.real_bytes
        call_address(c.make_factors, row_sums, column_sums, height, width, *states, out, hp)


@njit
def _call_with_factors(c, block, index, total):
    t, tensor, begin, end = _part_of(c, index)
    for number in range(begin, end):
        tile = _tile(tensor, number)
        matrix, down, across, _, _, _ = tile
        place = tensor.factors + matrix * (tensor.height + tensor.width)
        row = c.factors + (place + down * tensor.tile_height) * c.real_bytes
        column = place + tensor.height + across * tensor.tile_width
        _call_on_tile(c, block, t, tensor, tile, row, c.factors + column * c.real_bytes, total)


@part(MatrixCall)
def reduce_part(index, slot, c):
    """Sum the squares that the rule measures in one part."""
    out = c.measured + index * 8
    carray(as_pointer(out), 1, np.float64)[0] = 0.0
    _call_with_factors(c, c.reduce, index, out)


@part(MatrixCall)
def store_states(index, slot, c):
    """Replace the states of one tensor by the new ones."""
    tensor = _tensors_at(c.tensors, c.n_tensors)[index]
    new_rows, new_columns = _new_states(c, tensor)
    matrix_bytes = tensor.matrices * c.real_bytes
    _copy(tensor.row_state, new_rows, tensor.height * matrix_bytes)
    _copy(tensor.column_state, new_columns, tensor.width * matrix_bytes)


@part(MatrixCall)
def update_matrices(index, slot, c):
    """Update one part."""
    _call_with_factors(c, c.update, index, 0)


class MatrixStep:
    """One step: `measured_squares` runs the first two passes, `loops` are the third, which writes.

    The kernel is as for `matrix_blocks`, ``gradients`` are int64 addresses, and ``hp`` are
    ``[T, F]`` scalars in the type of the arithmetic.
    """

    def __init__(
        self, kernel: Kernel, table: MatrixTable, gradients: np.ndarray, hp: np.ndarray
    ) -> None:
        self._table = table
        self._measured = np.empty(table.n_parts)
        factors, states = (np.empty(table.n_factors, kernel.real.dtype) for _ in range(2))
        tensors = len(gradients), table.table, gradients, hp, hp.strides[0]
        scratch = np.empty(table.n_sums), factors, states, self._measured
        itemsizes = kernel.g.itemsize, kernel.real.itemsize
        passes = (block.address for block in matrix_blocks(kernel))
        self._call = Arguments(MatrixCall(*tensors, *itemsizes, *scratch, *passes))
        self._threads = 1 if table.n_elements < _SERIAL_BELOW else get_num_threads()
        # Both loops run in one commit: no interrupt comes between states and parameters.
        self.loops = (
            self._loop(store_states, len(table.table)),
            self._loop(update_matrices, table.n_parts),
        )

    def _loop(self, function: NativeFunction, n: int) -> Loop:
        return Loop.of(function, n, self._call.address, self._threads)

    def measured_squares(self) -> np.ndarray:
        """float64 ``[T]``: the sum of squares that the rule measures of each tensor."""
        table = self._table
        passes = (sum_terms, table.n_parts), (make_factors, table.n_groups)
        run_all(tuple(self._loop(*each) for each in (*passes, (reduce_part, table.n_parts))))
        return np.add.reduceat(self._measured, table.first_part)

    def release(self) -> None:
        """Do nothing: a step borrows no memory."""
