"""Short vectors as values in compiled loops: they stay in registers from one round to the next.

A loop that adds to an array loads and stores it in every round. A local variable of this type
is a value of LLVM's vector type, which the compiler cuts into registers of any machine.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .intrinsics import of_int64s


class Vector(types.Type):
    """``count`` numbers of type ``real`` (float32 or float64)."""

    def __init__(self, real, count):
        self.real, self.count = real, count
        super().__init__(f"Vector({real}, {count})")


_IR = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, ir.VectorType(_IR[vector.real], vector.count))


def _from_f16(builder, bits, count):
    half = builder.bitcast(bits, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(half, ir.VectorType(ir.FloatType(), count))


def _from_bf16(builder, bits, count):
    words = ir.VectorType(ir.IntType(32), count)
    shift = ir.Constant(words, [16] * count)
    wide = builder.shl(builder.zext(bits, words), shift)
    return builder.bitcast(wide, ir.VectorType(ir.FloatType(), count))


# How each storage type lies in memory, and the way to float32 or float64.
_STORED = {
    "f32": (ir.FloatType(), 4, None),
    "f64": (ir.DoubleType(), 8, None),
    "f16": (ir.IntType(16), 2, _from_f16),
    "bf16": (ir.IntType(16), 2, _from_bf16),
}


def vector_loader(storage, vector):
    """A compiled function ``load(address) -> vector`` of consecutive ``storage`` elements."""
    element, itemsize, convert = _STORED[storage.name]
    real = ir.VectorType(_IR[vector.real], vector.count)

    @of_int64s(vector)
    def load(context, builder, address):
        stored = ir.VectorType(element, vector.count).as_pointer()
        values = builder.load(builder.inttoptr(address, stored), align=itemsize)
        if convert:
            values = convert(builder, values, vector.count)
        if values.type == real:
            return values
        is_wider = real.element == ir.DoubleType()
        return builder.fpext(values, real) if is_wider else builder.fptrunc(values, real)

    return load


@intrinsic
def add(typingctx, a, b):
    """The sum of two vectors, element by element."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return a(a, b), codegen


@intrinsic
def store(typingctx, address, values):
    """Write a vector to consecutive elements."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        builder.store(args[1], pointer, align=values.real.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, values), codegen
