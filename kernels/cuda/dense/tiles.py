"""A rule on a tile: as many consecutive elements as the widest loads of a thread bring.

A tile is loaded into registers with vectors of 16 bytes, the rule runs on each element, and the
tile is stored. What is compiled is ``run(w, g, s0, s1, s2, i, hp)``: addresses of tensors, the
number of the first element, and a tuple of scalars.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from ...element import element_of, values_of
from ...rules.rule import Prologue, Rule, hp_type
from ...storage import Storage, numba_type, real_of
from ..device.backend import tile_loader, tile_storer, tuple_reader
from ..device.functions import DEVICE, device_function

_WIDEST = 16  # bytes of a load
CARRIERS: dict[Any, Any] = {
    np.float32: types.float32,
    np.float64: types.float64,
    np.uint16: types.uint16,
}


class Tiles(NamedTuple):
    """The functions of a rule on the device.

    Attributes:
        length: elements of a vectorised tile.
        vector: ``run`` on a tile that begins at a multiple of 16 bytes in every tensor.
        single: ``run`` on one element.
        read_hp: reads the scalars from an address.
    """

    length: int
    vector: Any
    single: Any
    read_hp: Any


@cache
def tiles(rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]) -> Tiles:
    """For these storage types; nothing is compiled yet."""
    element = element_of(rule.update, prologue, w, g, s, DEVICE)
    length = _WIDEST // min(storage.itemsize for storage in (w, g, *s))
    return Tiles(
        length,
        _tile(element, w, g, s, length),
        _tile(element, w, g, s, 1),
        tuple_reader(hp_type(rule, prologue), numba_type(real_of(w))),
    )


def padded(values: list[Any], filler: Any) -> list[Any]:
    """One value for each state that there may be; the filler is never used."""
    return values + [filler] * (3 - len(values))


def _tile(element: Any, w: Storage, g: Storage, s: tuple[Storage, ...], length: int) -> Any:
    """``run(w, g, s0, s1, s2, i, hp)`` on ``length`` elements from ``i`` on."""
    g_type, g_bytes, load_g = CARRIERS[g.carrier], g.itemsize, tile_loader(length, g.itemsize)
    update = _update(element, w, s, length)

    @cuda.jit(device=True)
    def run(w, g, s0, s1, s2, i, hp):
        d = cuda.local.array(length, g_type)
        load_g(d, g + i * g_bytes)
        update(w, s0, s1, s2, i, d, hp)

    return run


def _update(element: Any, w: Storage, s: tuple[Storage, ...], length: int) -> Any:
    """``update(w, s0, s1, s2, i, d, hp)``: the rule on ``length`` elements, ``d`` in registers."""
    w_type, n_states = CARRIERS[w.carrier], len(s)
    type_0, type_1, type_2 = padded([CARRIERS[x.carrier] for x in s], w_type)
    load_w, store_w = tile_loader(length, w.itemsize), tile_storer(length, w.itemsize)
    load_0, load_1, load_2 = padded([tile_loader(length, x.itemsize) for x in s], load_w)
    store_0, store_1, store_2 = padded([tile_storer(length, x.itemsize) for x in s], store_w)
    w_bytes = w.itemsize
    s0_bytes, s1_bytes, s2_bytes = padded([x.itemsize for x in s], 0)

    @cuda.jit(device=True)
    def update(w, s0, s1, s2, i, d, hp):
        w, s0, s1, s2 = w + i * w_bytes, s0 + i * s0_bytes, s1 + i * s1_bytes, s2 + i * s2_bytes
        x = cuda.local.array(length, w_type)
        load_w(x, w)
        if n_states == 0:
            for k in range(length):
                element((x,), d, k, hp)
        elif n_states == 1:
            a = cuda.local.array(length, type_0)
            load_0(a, s0)
            for k in range(length):
                element((x, a), d, k, hp)
            store_0(s0, a)
        elif n_states == 2:
            a, b = cuda.local.array(length, type_0), cuda.local.array(length, type_1)
            load_0(a, s0)
            load_1(b, s1)
            for k in range(length):
                element((x, a, b), d, k, hp)
            store_0(s0, a)
            store_1(s1, b)
        else:
            a, b = cuda.local.array(length, type_0), cuda.local.array(length, type_1)
            c = cuda.local.array(length, type_2)
            load_0(a, s0)
            load_1(b, s1)
            load_2(c, s2)
            for k in range(length):
                element((x, a, b, c), d, k, hp)
            store_0(s0, a)
            store_1(s1, b)
            store_2(s2, c)
        store_w(w, x)

    return update


class MeasuredTiles(NamedTuple):
    """The first stage of a two-stage rule.

    Attributes:
        length: elements of a vectorised tile.
        vector: ``add(sums, w, g, s0, s1, i, hp)``: squares of such a tile to float64 sums.
        single: the same for one element.
    """

    length: int
    vector: Any
    single: Any


@cache
def measured_tiles(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> MeasuredTiles:
    """For these storage types; nothing is compiled yet."""
    length = tiles(rule, prologue, w, g, s).length
    return MeasuredTiles(
        length, *(_measured_tile(rule, prologue, w, g, s, count) for count in (length, 1))
    )


def _measured_tile(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...], length: int
) -> Any:
    """``add(sums, w, g, s0, s1, i, hp)`` on ``length`` elements from ``i`` on."""
    assert rule.measure is not None
    values = values_of(rule.measure, prologue, w, g, s, DEVICE)
    n_values, n_states = rule.n_measured, len(s)
    w_type, g_type = CARRIERS[w.carrier], CARRIERS[g.carrier]
    type_0, type_1, _ = padded([CARRIERS[x.carrier] for x in s], w_type)
    load_w, load_g = tile_loader(length, w.itemsize), tile_loader(length, g.itemsize)
    load_0, load_1, _ = padded([tile_loader(length, x.itemsize) for x in s], load_w)
    w_bytes, g_bytes = w.itemsize, g.itemsize
    s0_bytes, s1_bytes, _ = padded([x.itemsize for x in s], 0)

    @cuda.jit(device=True)
    def add_squares(sums, found):
        # Written out: an index that is not known to the compiler would put the sums into memory.
        sums[0] += np.float64(found[0]) * np.float64(found[0])
        if n_values > 1:
            sums[1] += np.float64(found[1]) * np.float64(found[1])
        if n_values > 2:
            sums[2] += np.float64(found[2]) * np.float64(found[2])

    @cuda.jit(device=True)
    def add(sums, w, g, s0, s1, i, hp):
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        load_w(x, w + i * w_bytes)
        load_g(d, g + i * g_bytes)
        if n_states == 0:
            for k in range(length):
                add_squares(sums, values((x,), d, k, hp))
        else:
            a, b = cuda.local.array(length, type_0), cuda.local.array(length, type_1)
            load_0(a, s0 + i * s0_bytes)
            load_1(b, s1 + i * s1_bytes)
            for k in range(length):
                add_squares(sums, values((x, a, b), d, k, hp))

    return add


class Sums(NamedTuple):
    """Sums of gradients in registers, a tile of each.

    Attributes:
        start: ``start(total, g)``: the sum is the gradient at an address.
        add: ``add(total, g)``: and a further one.
        add_4: ``add_4(total, g0, g1, g2, g3)``: and four, in this order, loaded at once.
        store: ``store(address, total)``.
    """

    start: Any
    add: Any
    add_4: Any
    store: Any


@cache
def sums(g: Storage, real: Storage, length: int) -> Sums:
    """For gradients stored as ``g`` that are summed in the type ``real``."""
    g_type, load_g = CARRIERS[g.carrier], tile_loader(length, g.itemsize)
    to_type, to_real = numba_type(real), device_function(g.to_real)

    @cuda.jit(device=True)
    def start(total, g):
        d = cuda.local.array(length, g_type)
        load_g(d, g)
        for k in range(length):
            total[k] = to_type(to_real(d[k]))

    @cuda.jit(device=True)
    def add(total, g):
        d = cuda.local.array(length, g_type)
        load_g(d, g)
        for k in range(length):
            total[k] += to_type(to_real(d[k]))

    @cuda.jit(device=True)
    def add_4(total, g0, g1, g2, g3):
        a, b = cuda.local.array(length, g_type), cuda.local.array(length, g_type)
        c, d = cuda.local.array(length, g_type), cuda.local.array(length, g_type)
        load_g(a, g0)
        load_g(b, g1)
        load_g(c, g2)
        load_g(d, g3)
        for k in range(length):
            first = total[k] + to_type(to_real(a[k])) + to_type(to_real(b[k]))
            total[k] = first + to_type(to_real(c[k])) + to_type(to_real(d[k]))

    return Sums(start, add, add_4, tile_storer(length, real.itemsize))


class RowTiles(NamedTuple):
    """The functions of a rule on rows whose gradients are summed first.

    Attributes:
        length: elements of a vectorised tile.
        update: ``update(w, s0, s1, s2, i, total, hp)``: the rule on such a tile.
        update_one: the same on one element.
        read_hp: reads the scalars from an address.
    """

    length: int
    update: Any
    update_one: Any
    read_hp: Any


@cache
def row_tiles(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]
) -> RowTiles:
    """For these storage types; nothing is compiled yet."""
    length, _, _, read_hp = tiles(rule, prologue, w, g, s)
    element = element_of(rule.update, prologue, w, real_of(w), s, DEVICE)
    return RowTiles(length, _update(element, w, s, length), _update(element, w, s, 1), read_hp)
