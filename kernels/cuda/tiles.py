"""A rule on a tile: as many consecutive elements as the widest loads of a thread bring.

A tile is loaded into registers with vectors of 16 bytes, the rule runs on each element, and the
tile is stored. What is compiled is ``run(w, g, s0, s1, s2, i, hp)``: addresses of tensors, the first
element, and a tuple of scalars.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda, types

from ..blocks import compose, element_of, padded
from ..rules.rule import Prologue, Rule, hp_type
from ..storage import Storage, numba_type, real_of
from .functions import device_function

if config.ENABLE_CUDASIM:
    from .simulated import tile_loader, tile_storer, tuple_reader
else:
    from .intrinsics import tile_loader, tile_storer, tuple_reader

_WIDEST = 16  # bytes of a load
_CARRIERS: dict[Any, Any] = {
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
    element = _element(rule, prologue, w, g, s)
    length = _WIDEST // min(storage.itemsize for storage in (w, g, *s))
    return Tiles(
        length,
        _tile(element, w, g, s, length),
        _tile(element, w, g, s, 1),
        tuple_reader(hp_type(rule, prologue), numba_type(real_of(w))),
    )


def _element(rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: tuple[Storage, ...]) -> Any:
    """`element_of` a rule on the device."""
    on_device = cuda.jit(device=True)
    update, condition = device_function(rule.update), compose(prologue, device_function, on_device)
    return on_device(element_of(update, condition, w, g, s, device_function))


def _tile(element: Any, w: Storage, g: Storage, s: tuple[Storage, ...], length: int) -> Any:
    """``run(w, g, s0, s1, s2, i, hp)`` on ``length`` elements from ``i`` on."""
    w_type, g_type = _CARRIERS[w.carrier], _CARRIERS[g.carrier]
    type_0, type_1, type_2 = padded([_CARRIERS[x.carrier] for x in s], w_type)
    load_w, store_w = tile_loader(length, w.itemsize), tile_storer(length, w.itemsize)
    load_g, n_states = tile_loader(length, g.itemsize), len(s)
    load_0, load_1, load_2 = padded([tile_loader(length, x.itemsize) for x in s], load_w)
    store_0, store_1, store_2 = padded([tile_storer(length, x.itemsize) for x in s], store_w)

    w_bytes, g_bytes = w.itemsize, g.itemsize
    s0_bytes, s1_bytes, s2_bytes = padded([x.itemsize for x in s], 0)

    @cuda.jit(device=True)
    def run(w, g, s0, s1, s2, i, hp):
        w, g = w + i * w_bytes, g + i * g_bytes
        s0, s1, s2 = s0 + i * s0_bytes, s1 + i * s1_bytes, s2 + i * s2_bytes
        x, d = cuda.local.array(length, w_type), cuda.local.array(length, g_type)
        load_w(x, w)
        load_g(d, g)
        if n_states == 0:
            for k in range(length):
                element(x, d, (), k, hp)
        elif n_states == 1:
            a = cuda.local.array(length, type_0)
            load_0(a, s0)
            for k in range(length):
                element(x, d, (a,), k, hp)
            store_0(s0, a)
        elif n_states == 2:
            a, b = cuda.local.array(length, type_0), cuda.local.array(length, type_1)
            load_0(a, s0)
            load_1(b, s1)
            for k in range(length):
                element(x, d, (a, b), k, hp)
            store_0(s0, a)
            store_1(s1, b)
        else:
            a, b = cuda.local.array(length, type_0), cuda.local.array(length, type_1)
            c = cuda.local.array(length, type_2)
            load_0(a, s0)
            load_1(b, s1)
            load_2(c, s2)
            for k in range(length):
                element(x, d, (a, b, c), k, hp)
            store_0(s0, a)
            store_1(s1, b)
            store_2(s2, c)
        store_w(w, x)

    return run
