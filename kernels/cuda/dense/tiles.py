"""A rule on a tile: as many consecutive elements as the widest loads of a thread bring.

A tile is loaded into registers with vectors of 16 bytes, the rule runs on each element, and the
tile is stored. Functions of a tile take the number of its first element first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, from_dtype, types

from ...element import Kernel, adder, element_of, scope_loader, scope_storer, values_of
from ...storage import Storage, numba_type
from ..device.backend import on_device, reader, tile_loader, tile_storer
from ..device.functions import DEVICE, device_function
from ..device.sums import putter

WIDEST = 16  # bytes of a load


def tile_length(*storages: Storage) -> int:
    """Elements of a tile: as many as the widest load of the narrowest array brings."""
    return WIDEST // min(storage.itemsize for storage in storages)


def length_of(kernel: Kernel) -> int:
    """Elements of a tile of all arrays of a step."""
    pairs = zip((kernel.w, *kernel.s), kernel.per, strict=True)
    return tile_length(kernel.g, *(storage for storage, per in pairs if per == "element"))


def element_bytes(kernel: Kernel) -> np.ndarray:
    """int64: bytes of an element of the gradient, the parameter and each state; 0 for others."""
    pairs = zip((kernel.w, *kernel.s), kernel.per, strict=True)
    return np.array([kernel.g.itemsize, *(x.itemsize * (per == "element") for x, per in pairs)])


def are_aligned(places: np.ndarray) -> np.ndarray:
    """Whether tiles can be moved by vectors: of each row of addresses and strides."""
    # A vector of 16 bytes at another address is an error that ends the work of the whole process on
    # the device. A view may begin anywhere, and is moved element by element then.
    aligned: np.ndarray = (places % WIDEST == 0).all(-1)
    return aligned


class Access(NamedTuple):
    """A tile of an array in registers."""

    kind: Any  # of its elements
    load: Any  # load(tile, address, i)
    store: Any  # store(tile, address, i)


def access(storage: Storage, length: int) -> Access:
    """Access to ``length`` elements from ``i`` on."""
    shape = length, storage.itemsize
    return Access(from_dtype(np.dtype(storage.carrier)), tile_loader(*shape), tile_storer(*shape))


def by_tiles(make: Callable[[int], Any], length: int) -> Any:
    """``tiled(column, width, is_aligned, *what)``: the tile of a row that begins at ``column``.

    ``make(n)`` makes ``tile_loop(column, *what)`` for tiles of ``n`` elements. Where the row is not
    aligned, or ends within the tile, its elements are worked on one by one.
    """
    tile_loop, single_loop = make(length), make(1)

    @cuda.jit(device=True)
    def tiled(column, width, is_aligned, *what):
        if is_aligned and column + length <= width:
            tile_loop(column, *what)
        else:
            for c in range(column, min(column + length, width)):
                single_loop(c, *what)

    return tiled


def by_chunks(make: Callable[[int], Any], length: int, threads: int, chunk: int) -> Any:
    """``chunked(number, size, is_aligned, *what)``: a thread's share of a chunk; its end singly."""
    tile_loop, single_loop, stride = make(length), make(1), threads * length

    # Unsigned: with signed bounds the compiler unrolls the loops and divides for their number of
    # rounds.
    @cuda.jit(device=True)
    def chunked(number, size, is_aligned, *what):
        begin, thread = np.uint64(number) * np.uint64(chunk), np.uint64(cuda.threadIdx.x)
        end = min(np.uint64(size), begin + np.uint64(chunk))
        whole = begin
        if is_aligned:
            # Chunks begin at multiples of a tile: only a tensor ends in single elements.
            whole = end - end % np.uint64(length)
            i = begin + thread * np.uint64(length)
            while i < whole:
                tile_loop(np.int64(i), *what)
                i += np.uint64(stride)
        i = whole + thread
        while i < end:
            single_loop(np.int64(i), *what)
            i += np.uint64(threads)

    return chunked


def in_registers(
    accesses: list[Access], length: int, work: Any, *, stored: Collection[int], k: int = 0
) -> Any:
    """``registered(i, places, how, tiles, *rest)``: ``work(tiles, *rest)`` on some elements.

    ``places`` has their addresses, ``how`` what an access takes beside them. To ``tiles``, which
    may have some already, come those of the arrays from number ``k`` on.
    """
    if k == len(accesses):
        return on_device(lambda i, places, how, tiles, *rest: work(tiles, *rest))  # noqa: ARG005
    (kind, load, store), is_stored = accesses[k], k in stored
    inner = in_registers(accesses, length, work, stored=stored, k=k + 1)

    @cuda.jit(device=True)
    def registered(i, places, how, tiles, *rest):
        tile = cuda.local.array(length, kind)
        load(tile, places[k], i, *how)
        result = inner(i, places, how, (*tiles, tile), *rest)
        if is_stored:
            store(tile, places[k], i, *how)
        return result

    return registered


@cuda.jit(device=True)
def _leave(tile, address, i):
    """Neither load nor store."""


def _tensor_access(storage: Storage) -> Access:
    """Access to the only element, whatever ``i``."""
    kind, load_one, _ = access(storage, 1)

    @cuda.jit(device=True)
    def load(tile, address, i):
        load_one(tile, address, 0)

    return Access(kind, load, _leave)


def _accesses(kernel: Kernel, length: int) -> list[Access]:
    """The gradient, then each array, of which an element may have nothing."""
    accesses = [access(kernel.g, length)]
    for storage, per in zip((kernel.w, *kernel.s), kernel.per, strict=True):
        elementwise = access(storage, length)
        left = Access(elementwise.kind, _leave, _leave)
        accesses.append({"element": elementwise, "tensor": _tensor_access(storage)}.get(per, left))
    return accesses


def _updating(kernel: Kernel, length: int) -> Any:
    """``update(tiles, hp)``: the rule on tiles in registers, that of the gradient first."""
    element = element_of(kernel, kernel.rule.update, DEVICE)

    @cuda.jit(device=True)
    def update(tiles, hp):
        for k in range(length):
            element(tiles[1:], tiles[0], k, hp)

    return update


def update_tile(kernel: Kernel, length: int) -> Any:
    """``registered(i, arrays, (), (), hp)``: the rule on a tile; the gradient comes first."""
    accesses, update = _accesses(kernel, length), _updating(kernel, length)
    return in_registers(accesses, length, update, stored=[1 + k for k in kernel.stored])


def update_summed_tile(kernel: Kernel, length: int) -> Any:
    """``registered(i, arrays, (), (total,), hp)``: the same, of a gradient summed in registers."""
    update = _updating(kernel.with_gradient(kernel.real), length)
    return in_registers(_accesses(kernel, length)[1:], length, update, stored=kernel.stored)


def _reducing(kernel: Kernel, length: int) -> Any:
    """``reduce(tiles, hp, sums)``: what is measured of tiles, to float64 sums."""
    values, add = values_of(kernel, DEVICE), adder(kernel.rule, DEVICE)
    put = putter(kernel.rule.n_measured)

    @cuda.jit(device=True)
    def reduce(tiles, hp, sums):
        for k in range(length):
            put(sums, add(sums, values(tiles[1:], tiles[0], k, hp)))

    return reduce


def reduced_tile(kernel: Kernel, length: int) -> Any:
    """``registered(i, arrays, (), (), hp, sums)``: what is measured of a tile, to float64 sums."""
    return in_registers(_accesses(kernel, length), length, _reducing(kernel, length), stored=())


def reduced_summed_tile(kernel: Kernel, length: int) -> Any:
    """``registered(i, arrays, (), (total,), hp, sums)``: as `update_summed_tile`."""
    reduce = _reducing(kernel.with_gradient(kernel.real), length)
    return in_registers(_accesses(kernel, length)[1:], length, reduce, stored=())


def with_sum(
    kernel: Kernel, gradient: Callable[[int], Any], make_tile: Callable[[Kernel, int], Any],
    length: int,
) -> Any:  # fmt: skip
    """``summed(column, first, arrays, source, *rest)``: a function of a tile, its gradient summed.

    ``gradient(length)`` is ``load(total, column, first, *source)``, for columns of the row whose
    first element is number ``first``; ``arrays`` is where the addresses of all arrays lie.
    """
    load, work, kind = gradient(length), make_tile(kernel, length), numba_type(kernel.real)
    read_arrays = address_reader(kernel)

    @cuda.jit(device=True)
    def summed(column, first, arrays, source, *rest):
        total = cuda.local.array(length, kind)
        load(total, column, first, *source)
        # Addresses not before the sum: they would take registers.
        work(first + column, read_arrays(arrays), (), (total,), *rest)

    return summed


def address_reader(kernel: Kernel) -> Any:
    """``read(address)``: the addresses of the parameter and its states."""
    return reader(types.UniTuple(types.int64, 1 + len(kernel.s)))


class ScopeStates(NamedTuple):
    """The states of a row or a tensor, number ``i`` of the arrays."""

    load: Any  # load(i, arrays, (), ()): as numbers
    store: Any  # store(i, arrays, (), (), values): those that are written


def scope_states(kernel: Kernel, begin: int) -> ScopeStates:
    """The states of a rule; what is stored are values from number ``begin`` on."""
    read, accesses = kernel.places(kernel.rule.scope_states), []
    for k, storage in enumerate((kernel.w, *kernel.s)):
        kind, load, store = access(storage, 1)
        accesses.append(Access(kind, load if k in read else _leave, store))
    loaded = in_registers(accesses, 1, scope_loader(kernel, DEVICE), stored=())
    written = kernel.places(kernel.rule.factor_states)
    to_tiles = scope_storer(kernel, DEVICE, begin)
    return ScopeStates(loaded, in_registers(accesses, 1, to_tiles, stored=written))


@cache
def wide_loader(g: Storage, real: Storage, length: int) -> Any:
    """``load_wide(total, address, i)``: load a tile of ``g`` as numbers of type ``real``."""
    (g_type, load, _), to_kind = access(g, length), numba_type(real)
    to_real = device_function(g.to_real)

    @cuda.jit(device=True)
    def load_wide(total, address, i):
        d = cuda.local.array(length, g_type)
        load(d, address, i)
        for k in range(length):
            total[k] = to_kind(to_real(d[k]))

    return load_wide


def add_next(start: Any, place_of: Any, real: Storage, length: int, n: int) -> Any:
    """``add_tiles(total, i, k, *source)``: add what lies at places number ``k`` to ``k + n - 1``.

    ``place_of(k, *source)`` is one of them. All are loaded at once, that their way from memory is
    waited for less often, and added in order.
    """
    kind = numba_type(real)

    @cuda.jit(device=True)
    def add_tiles(total, i, k, *source):
        tiles = cuda.local.array((n, length), kind)
        for j in range(n):
            start(tiles[j], place_of(k + j, *source), i)
        for j in range(n):
            for c in range(length):
                total[c] += tiles[j, c]

    return add_tiles


def add_between(start: Any, place_of: Any, real: Storage, length: int, at_once: int) -> Any:
    """``add_range(total, i, k, end, *source)``: as `add_next`, up to ``end``.

    So many are loaded ``at_once``, of the rest a quarter of that, and so on.
    """
    if at_once == 0:
        return on_device(lambda total, i, k, end, *source: None)  # noqa: ARG005
    add = add_next(start, place_of, real, length, at_once)
    fewer = max(1, at_once // 4) if at_once > 1 else 0
    add_rest = add_between(start, place_of, real, length, fewer)

    @cuda.jit(device=True)
    def add_range(total, i, k, end, *source):
        while k + at_once <= end:
            add(total, i, k, *source)
            k += at_once
        add_rest(total, i, k, end, *source)

    return add_range
