"""Where the gradient of an occurrence lies: in a row of its own, or in one that many share.

A loop is compiled for one form, so what the others need costs nothing. The forms are those of the
host (`kernels.cpu.rows.sums`), and so are the numbers: a product with a weight is rounded before it
is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numba import cuda, int32

from ...rule import product
from ...storage import F64, Storage, numba_type
from ...tables import RowTable
from ..dense.tiles import wide_loader
from ..device.backend import load_float32, load_float64, load_int32, tile_loader
from ..device.functions import device_function


class SourceForm(NamedTuple):
    """How the gradients of the occurrences of a table are found, in a kernel."""

    place: Callable[..., Any]
    """``place(g, real)`` makes ``run(table, position)``: where the gradient of a position lies."""
    start: Callable[..., Any]
    """``start(g, real, length)`` makes ``run(total, place, column)``: load a tile of it."""


def _own_place(g: Storage, _: Storage) -> Any:
    g_bytes = g.itemsize

    @cuda.jit(device=True)
    def run(table, position):
        return table.values + position * (table.width * g_bytes)

    return run


@cuda.jit(device=True)
def _first_element(table, position):
    """The first element of the gradient of a position, for tables that are pooled or not."""
    if table.gradient_rows == 0:
        return position * table.unit
    return load_int32(table.gradient_rows + 4 * position) * table.unit


def _shared_place(g: Storage, _: Storage) -> Any:
    g_bytes = g.itemsize

    @cuda.jit(device=True)
    def run(table, position):
        return table.values + _first_element(table, position) * g_bytes

    return run


def _weighted_place(g: Storage, real: Storage) -> Any:
    address, weight = _shared_place(g, real), _weight(real)

    @cuda.jit(device=True)
    def run(table, position):
        return address(table, position), weight(table, position)

    return run


def _chosen_place(g: Storage, real: Storage) -> Any:
    weight, g_bytes = _weight(real), g.itemsize

    @cuda.jit(device=True)
    def run(table, position):
        first = _first_element(table, position)
        winners = table.winners + 4 * first if table.winners != 0 else 0
        address = table.values + first * g_bytes
        return address, weight(table, position), winners, position + table.first

    return run


def _weight(real: Storage) -> Any:
    """``run(table, position)``: 1 in a table without weights, which changes no number."""
    load, kind = load_float64 if real is F64 else load_float32, numba_type(real)
    real_bytes = real.itemsize

    @cuda.jit(device=True)
    def run(table, position):
        if table.weights == 0:
            return kind(1)
        return load(table.weights + real_bytes * position)

    return run


def _plain_start(g: Storage, real: Storage, length: int) -> Any:
    return wide_loader(g, real, length)


def weighted_start(g: Storage, real: Storage, length: int) -> Any:
    """``run(total, place, column)``: a tile times a weight; ``place`` is an address and that."""
    start, multiply = wide_loader(g, real, length), device_function(product)

    @cuda.jit(device=True)
    def run(total, place, column):
        start(total, place[0], column)
        for k in range(length):
            total[k] = multiply(total[k], place[1])

    return run


def _chosen_start(g: Storage, real: Storage, length: int) -> Any:
    start, load, kind = weighted_start(g, real, length), tile_loader(length, 4), numba_type(real)

    @cuda.jit(device=True)
    def run(total, place, column):
        start(total, place, column)
        if place[2] != 0:
            winners = cuda.local.array(length, int32)
            load(winners, place[2], column)
            for k in range(length):
                if winners[k] != place[3]:
                    total[k] = kind(0)

    return run


OWN = SourceForm(_own_place, _plain_start)
"""Each position has a row of its own."""
SHARED = SourceForm(_shared_place, _plain_start)
"""Some tables have a list of the rows of positions: positions may share a row."""
WEIGHTED = SourceForm(_weighted_place, weighted_start)
"""`SHARED`, and some tables have a list of the weights of positions."""
CHOSEN = SourceForm(_chosen_place, _chosen_start)
"""`SHARED`, for maxima: in some tables each element belongs to one position."""


def form_of(tables: Sequence[RowTable]) -> SourceForm:
    """The form that serves all tables of a step."""
    if not any(table.source.rows for table in tables):
        return OWN
    if any(table.source.argmax for table in tables):
        return CHOSEN
    return WEIGHTED if any(table.source.weights for table in tables) else SHARED
