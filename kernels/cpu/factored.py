"""Adafactor on matrices: three passes over the gradients of any number of tensors in one step.

The states of rows and columns are small, and the first pass makes the new ones beside the old
ones; the last pass, which writes the parameters, puts them in their place.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from ..compile import NativeFunction, part
from ..factored_blocks import FactoredKernel
from ..inner import njit
from .factored_layout import (
    AVERAGE,
    COLUMN_STATE,
    COLUMN_SUMS,
    COLUMNS,
    FACTORS,
    GROUP,
    HEIGHT,
    MATRICES,
    ROW_STATE,
    ROW_SUMS,
    TILE_HEIGHT,
    TILE_WIDTH,
    TILES_ACROSS,
    TILES_DOWN,
    WIDTH,
    FactoredCall,
    FactoredTable,
    W,
    read_call,
)
from .headers import address_of
from .intrinsics import as_pointer, call8, call9
from .parallel import Loop, get_num_threads, run_all
from .search import last_at_most
from .sort import int64s

_SERIAL_BELOW = 32_768  # elements


@njit
def _tensor(c, t):
    return carray(as_pointer(c.tensors), (c.n_tensors, COLUMNS), np.int64)[t]


@njit
def _part_of(c, index):
    """The tensor of a part, its first tile and the tile after its last."""
    first = int64s(c.first_part, c.n_tensors)
    t = last_at_most(first, c.n_tensors, index)
    tensor = _tensor(c, t)
    begin = (index - first[t]) * tensor[GROUP]
    n_tiles = tensor[MATRICES] * tensor[TILES_DOWN] * tensor[TILES_ACROSS]
    return t, begin, min(begin + tensor[GROUP], n_tiles)


@njit
def _tile(tensor, number):
    """Matrix, place down and across, and size of a tile."""
    tiles = tensor[TILES_DOWN] * tensor[TILES_ACROSS]
    matrix, rest = number // tiles, number % tiles
    down, across = rest // tensor[TILES_ACROSS], rest % tensor[TILES_ACROSS]
    height = min(tensor[TILE_HEIGHT], tensor[HEIGHT] - down * tensor[TILE_HEIGHT])
    width = min(tensor[TILE_WIDTH], tensor[WIDTH] - across * tensor[TILE_WIDTH])
    return matrix, down, across, height, width


@njit
def _offset(tensor, matrix, down, across):
    """Elements before a tile's first one."""
    row = matrix * tensor[HEIGHT] + down * tensor[TILE_HEIGHT]
    return row * tensor[WIDTH] + across * tensor[TILE_WIDTH]


@njit
def _factor_places(c, tensor, matrix, down, across):
    """Addresses of the row and column factors of a tile."""
    place = tensor[FACTORS] + matrix * (tensor[HEIGHT] + tensor[WIDTH])
    row = place + down * tensor[TILE_HEIGHT]
    column = place + tensor[HEIGHT] + across * tensor[TILE_WIDTH]
    return c.factors + row * c.real_bytes, c.factors + column * c.real_bytes


@part
def sum_squares(index, slot, call):
    """Sums over the rows and columns of the tiles of one part."""
    c = read_call(call)
    t, begin, end = _part_of(c, index)
    tensor, g = _tensor(c, t), int64s(c.gradients, c.n_tensors)[t]
    for number in range(begin, end):
        matrix, down, across, height, width = _tile(tensor, number)
        offset = _offset(tensor, matrix, down, across)
        of_rows = (matrix * tensor[TILES_ACROSS] + across) * tensor[HEIGHT]
        of_columns = (matrix * tensor[TILES_DOWN] + down) * tensor[WIDTH]
        call8(
            c.squares,
            tensor[W] + offset * c.w_bytes,
            g + offset * c.g_bytes,
            height,
            width,
            tensor[WIDTH],
            c.sums + (tensor[ROW_SUMS] + of_rows + down * tensor[TILE_HEIGHT]) * 8,
            c.sums + (tensor[COLUMN_SUMS] + of_columns + across * tensor[TILE_WIDTH]) * 8,
            c.hp + t * c.hp_row_bytes,
        )


@njit
def _add_tiles(address, n_tiles, n):
    """Add the sums of the tiles to those of the first, in order."""
    sums = carray(as_pointer(address), (n_tiles, n), np.float64)
    for k in range(1, n_tiles):
        for i in range(n):
            sums[0, i] += sums[k, i]


@njit
def _new_states(c, tensor):
    """Addresses of the new states of rows and columns of a tensor."""
    rows = c.states + tensor[FACTORS] * c.real_bytes
    return rows, rows + tensor[MATRICES] * tensor[HEIGHT] * c.real_bytes


@njit
def _copy(target, source, n_bytes):
    words = carray(as_pointer(target), n_bytes // 4, np.int32)
    words[:] = carray(as_pointer(source), n_bytes // 4, np.int32)


@part
def make_factors(index, slot, call):
    """New states and factors of one group of matrices."""
    c = read_call(call)
    first = int64s(c.first_group, c.n_tensors)
    t = last_at_most(first, c.n_tensors, index)
    tensor = _tensor(c, t)
    height, width, across, down = (
        tensor[HEIGHT],
        tensor[WIDTH],
        tensor[TILES_ACROSS],
        tensor[TILES_DOWN],
    )
    begin = (index - first[t]) * tensor[GROUP]
    new_rows, new_columns = _new_states(c, tensor)
    for matrix in range(begin, min(begin + tensor[GROUP], tensor[MATRICES])):
        rows, columns = matrix * height * c.real_bytes, matrix * width * c.real_bytes
        _copy(new_rows + rows, tensor[ROW_STATE] + rows, height * c.real_bytes)
        _copy(new_columns + columns, tensor[COLUMN_STATE] + columns, width * c.real_bytes)
        row_sums = c.sums + (tensor[ROW_SUMS] + matrix * across * height) * 8
        column_sums = c.sums + (tensor[COLUMN_SUMS] + matrix * down * width) * 8
        _add_tiles(row_sums, across, height)
        _add_tiles(column_sums, down, width)
        factors, _ = _factor_places(c, tensor, matrix, 0, 0)
        call8(
            c.make_factors,
            row_sums,
            column_sums,
            height,
            width,
            new_rows + rows,
            new_columns + columns,
            factors,
            c.hp + t * c.hp_row_bytes,
        )


@part
def sum_direction(index, slot, call):
    """The squares of the direction of one part."""
    c = read_call(call)
    t, begin, end = _part_of(c, index)
    tensor, g = _tensor(c, t), int64s(c.gradients, c.n_tensors)[t]
    out = c.measured + index * 8
    carray(as_pointer(out), 1, np.float64)[0] = 0.0
    for number in range(begin, end):
        matrix, down, across, height, width = _tile(tensor, number)
        offset = _offset(tensor, matrix, down, across)
        row_factors, column_factors = _factor_places(c, tensor, matrix, down, across)
        call9(
            c.direction,
            tensor[W] + offset * c.w_bytes,
            g + offset * c.g_bytes,
            height,
            width,
            tensor[WIDTH],
            row_factors,
            column_factors,
            c.hp + t * c.hp_row_bytes,
            out,
        )


@part
def store_states(index, slot, call):
    """The new states of one tensor in their place."""
    c = read_call(call)
    tensor = _tensor(c, index)
    new_rows, new_columns = _new_states(c, tensor)
    matrix_bytes = tensor[MATRICES] * c.real_bytes
    _copy(tensor[ROW_STATE], new_rows, tensor[HEIGHT] * matrix_bytes)
    _copy(tensor[COLUMN_STATE], new_columns, tensor[WIDTH] * matrix_bytes)


@part
def update_matrices(index, slot, call):
    """The update of one part."""
    c = read_call(call)
    t, begin, end = _part_of(c, index)
    tensor, g = _tensor(c, t), int64s(c.gradients, c.n_tensors)[t]
    for number in range(begin, end):
        matrix, down, across, height, width = _tile(tensor, number)
        offset = _offset(tensor, matrix, down, across)
        row_factors, column_factors = _factor_places(c, tensor, matrix, down, across)
        call9(
            c.update,
            tensor[W] + offset * c.w_bytes,
            g + offset * c.g_bytes,
            tensor[AVERAGE] + offset * c.s_bytes,
            height,
            width,
            tensor[WIDTH],
            row_factors,
            column_factors,
            c.hp + t * c.hp_row_bytes,
        )


class FactoredStep:
    """One step: `direction_squares` computes, then `loops` write.

    Args:
        kernel: the compiled blocks.
        table: the tensors.
        gradients: int64 ``[T]``: addresses of the gradients.
        hp: ``[T, F]`` scalars in the type of the arithmetic.

    Attributes:
        loops: the third pass: the states of rows and columns, the parameters and their first
            moments.
    """

    def __init__(
        self, kernel: FactoredKernel, table: FactoredTable, gradients: np.ndarray, hp: np.ndarray
    ) -> None:
        self._table = table
        self._measured = np.empty(table.n_parts)
        sums = np.empty(table.n_sums)
        factors, states = (np.empty(table.n_factors, kernel.real.dtype) for _ in range(2))
        self._keep = (gradients, hp, sums, factors, states)  # the loops have their addresses
        call = FactoredCall(
            len(gradients),
            address_of(table.table),
            address_of(gradients),
            address_of(table.first_part),
            address_of(table.first_group),
            address_of(hp),
            hp.strides[0],
            kernel.w.itemsize,
            kernel.g.itemsize,
            kernel.s.itemsize if kernel.s else 0,
            kernel.real.itemsize,
            address_of(sums),
            address_of(factors),
            address_of(states),
            address_of(self._measured),
            kernel.squares.address,
            kernel.factors.address,
            kernel.direction.address,
            kernel.update.address,
        )
        self._call = np.array(call, np.int64)
        self._threads = 1 if table.n_elements < _SERIAL_BELOW else get_num_threads()
        self.loops = (
            self._loop(store_states, len(table.table)),
            self._loop(update_matrices, table.n_parts),
        )

    def _loop(self, function: NativeFunction, n: int) -> Loop:
        return Loop.of(function, n, address_of(self._call), self._threads)

    def direction_squares(self) -> np.ndarray:
        """float64 ``[T]``, the sum of squares of each tensor's direction; nothing is written.

        The first two passes: row and column means and what follows from them; the direction.
        """
        table = self._table
        run_all(
            (
                self._loop(sum_squares, table.n_parts),
                self._loop(make_factors, table.n_groups),
                self._loop(sum_direction, table.n_parts),
            )
        )
        return np.add.reduceat(self._measured, table.first_part)

    def release(self) -> None:
        """Nothing was borrowed."""
