"""All LLVM-level code for CUDA: tiles of consecutive elements between memory and registers.

Addresses are ``int64``. Pointers lie in the address space of global memory, so that loads are
``LDG``, not the generic ``LD``; vectors of 16 bytes are one instruction each. Numba's own arrays
give neither.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...rule import product

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_GLOBAL = 1
_WIDEST = 16  # bytes of an instruction


def _pieces(builder, address, i, element, count, itemsize):
    """The vectors that elements from ``i`` on are moved by: first one, length, pointer.

    Elements of 2 bytes travel in pairs, as words of 4: the compiler has no vector of eight.
    """
    address = builder.add(address, builder.mul(i, ir.Constant(_I64, itemsize)))
    length = min(count, _WIDEST // itemsize)
    if itemsize == 2 and length > 1:
        kind = ir.VectorType(_I32, length // 2)
    else:
        kind = ir.VectorType(element, length) if length > 1 else element
    for first in range(0, count, length):
        place = builder.add(address, ir.Constant(_I64, first * itemsize))
        yield first, length, builder.inttoptr(place, ir.PointerType(kind, _GLOBAL))


def _unpacked(builder, vector, itemsize, length):
    if length == 1:
        return [vector]
    n_words, shift = length // 2 if itemsize == 2 else length, ir.Constant(_I32, 16)
    words = [builder.extract_element(vector, ir.Constant(_I32, k)) for k in range(n_words)]
    if itemsize != 2:
        return words
    pairs = [(word, builder.lshr(word, shift)) for word in words]
    return [builder.trunc(half, ir.IntType(16)) for pair in pairs for half in pair]


def _packed(builder, values, itemsize):
    if len(values) == 1:
        return values[0]
    if itemsize == 2:
        halves = [builder.zext(value, _I32) for value in values]
        shift = ir.Constant(_I32, 16)
        pairs = zip(halves[::2], halves[1::2], strict=True)
        values = [builder.or_(low, builder.shl(high, shift)) for low, high in pairs]
    vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for k, value in enumerate(values):
        vector = builder.insert_element(vector, value, ir.Constant(_I32, k))
    return vector


def _tile_mover(count, itemsize, move):
    """``move_tile(tile, address, i)``: move ``count`` elements of a local array, from ``i``."""

    @intrinsic
    def move_tile(typingctx, tile, address, i):
        def codegen(context, builder, signature, args):
            kind, (array, *place) = signature.args[0], args
            data = context.make_array(kind)(context, builder, array).data
            element = context.get_data_type(kind.dtype)
            for first, length, pointer in _pieces(builder, *place, element, count, itemsize):
                numbers = (ir.Constant(_I64, k) for k in range(first, first + length))
                move(builder, pointer, [builder.gep(data, [k]) for k in numbers], itemsize)
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), codegen

    return move_tile


def _load_vector(builder, pointer, places, itemsize):
    # Aligned as a whole: without that the compiler would split it. `are_aligned` answers for it.
    vector = builder.load(pointer, align=len(places) * itemsize)
    for value, place in zip(_unpacked(builder, vector, itemsize, len(places)), places, strict=True):
        builder.store(value, place)


def _store_vector(builder, pointer, places, itemsize):
    values = [builder.load(place) for place in places]
    builder.store(_packed(builder, values, itemsize), pointer, align=len(places) * itemsize)


def tile_loader(count, itemsize):
    """``load(tile, address, i)``: ``count`` elements of an array from ``i`` on."""
    return _tile_mover(count, itemsize, _load_vector)


def tile_storer(count, itemsize):
    """``store(tile, address, i)``: write a local array to elements from ``i`` on."""
    return _tile_mover(count, itemsize, _store_vector)


def _at(context, builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(context.get_value_type(kind), _GLOBAL))


def _bytes(kind):
    return kind.bitwidth // 8


def reader(kind):
    """``read(address) -> kind``: a number, or consecutive ones as a tuple, named or nested."""

    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, signature, args):
            place = 0

            def load(part):
                nonlocal place
                if isinstance(part, types.BaseTuple):
                    return context.make_tuple(builder, part, [load(k) for k in part])
                field = builder.add(args[0], ir.Constant(_I64, place))
                place += _bytes(part)
                return builder.load(_at(context, builder, field, part), align=_bytes(part))

            return load(kind)

        return kind(types.int64), codegen

    return read


def storer(kind):
    """``store(address, value)``: a number, or a tuple of them, each rounded to ``kind``."""

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            source, parts = signature.args[1], [args[1]]
            if isinstance(source, types.BaseTuple):
                parts = [builder.extract_value(args[1], k) for k in range(source.count)]
            for k, part in enumerate(parts):
                # A tuple of equal types has a ``dtype``; a number is its own.
                part = context.cast(builder, part, getattr(source, "dtype", source), kind)
                field = builder.add(args[0], ir.Constant(_I64, k * _bytes(kind)))
                builder.store(part, _at(context, builder, field, kind), align=_bytes(kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.unliteral(value)), codegen

    return store


_KINDS = (types.int32, types.int64, types.float32, types.float64)
load_int32, load_int64, load_float32, load_float64 = map(reader, _KINDS)
store_int32, store_int64, store_float32, store_float64 = map(storer, _KINDS)


@intrinsic
def rounded_product(typingctx, x, y):
    """``x * y`` that is not fused with what is added to it."""
    name = {32: "llvm.nvvm.mul.rn.f", 64: "llvm.nvvm.mul.rn.d"}[x.bitwidth]

    def codegen(context, builder, signature, args):
        kind = args[0].type
        function = ir.FunctionType(kind, [kind, kind])
        declared = builder.module.globals.get(name)
        return builder.call(declared or ir.Function(builder.module, function, name), args)

    return x(x, y), codegen


def _atomic(operation):
    """``atomic(address, value)``: change the ``int64`` at an address; what was there before."""

    # On integers alone, whose sums and minima are the same in any order; those of floats would show
    # in the last bits.
    @intrinsic
    def atomic(typingctx, address, value):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], ir.PointerType(_I64, _GLOBAL))
            return builder.atomic_rmw(operation, pointer, args[1], "monotonic")

        return types.int64(types.int64, types.int64), codegen

    return atomic


lower_int64 = _atomic("min")


REPLACED = {product: rounded_product}
"""Functions that mean something else on a device than their text says."""

on_device = cuda.jit(device=True)


def for_blocks(threads, blocks):
    """``cuda.jit`` of a loop of which a multiprocessor has room for so many blocks."""
    return cuda.jit(launch_bounds=(threads, blocks))
