"""All LLVM-level code for the CPU: pointers, arrays, calls, atomics, prefetch, short vectors."""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic, models, register_model

from ...private import populate_array

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


def int64_intrinsic(result):
    """Decorator: a compiled function of ``int64`` from ``emit(context, builder, *values)``."""

    def decorate(emit):
        count = emit.__code__.co_argcount - 2

        @intrinsic
        def compiled(typingctx, *arguments):
            def codegen(context, builder, signature, args):
                values = _unpacked(builder, args[0], count)
                made = emit(context, builder, *values)
                return context.get_dummy_value() if result == types.void else made

            return result(types.UniTuple(types.int64, count)), codegen

        return compiled

    return decorate


def _unpacked(builder, values, count):
    return [builder.extract_value(values, k) for k in range(count)]


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


@int64_intrinsic(types.voidptr)
def as_pointer(context, builder, address):
    """An address as a ``void*``, for ``carray``."""
    return builder.inttoptr(address, _POINTER)


@int64_intrinsic(types.int32)
def load_int32(context, builder, address):
    """The ``int32`` at an address."""
    return builder.load(_pointer(builder, address, _I32))


@int64_intrinsic(types.int64)
def load_int64(context, builder, address):
    """The ``int64`` at an address."""
    return builder.load(_pointer(builder, address, _I64))


def tuple_reader(cls, scalar):
    """A compiled function ``read(address) -> cls`` of consecutive values of type ``scalar``.

    Reading a named tuple of scalars inside the kernel is the cheapest way found to pass many of
    them: they lie in registers, and their number does not change the signature.
    """
    count = len(cls._fields)
    result = types.NamedUniTuple(scalar, count, cls)

    @int64_intrinsic(result)
    def read(context, builder, address):
        first = _pointer(builder, address, context.get_value_type(scalar))
        places = [builder.gep(first, [ir.Constant(_I64, k)]) for k in range(count)]
        return context.make_tuple(builder, result, [builder.load(place) for place in places])

    return read


def value_reader(kinds):
    """A compiled function ``read(address)``: the tuple of Numba types ``kinds`` at an address."""
    result = types.Tuple(kinds)

    @int64_intrinsic(result)
    def read(context, builder, address):
        return builder.load(_pointer(builder, address, context.get_value_type(result)))

    return read


def array_reader(carriers, per):
    """A compiled function ``read(addresses, row, rows, width)``: a tuple of arrays of some rows.

    Array ``k`` has the NumPy scalar type ``carriers[k]`` and the ``k``-th address in the list at
    ``addresses``. It has a number for each ``per[k]``: "element", "row", "column" or "tensor".
    Arrays of elements and rows are cut to ``rows`` rows from ``row`` on, the others are whole.
    """
    arrays = [types.Array(from_dtype(np.dtype(carrier)), 1, "C") for carrier in carriers]
    result = types.Tuple(arrays)

    @int64_intrinsic(result)
    def read(context, builder, addresses, row, rows, width):
        first, made = _pointer(builder, addresses, _I64), []
        zero, one = (ir.Constant(_I64, n) for n in (0, 1))
        elements = [builder.mul(n, width) for n in (row, rows)]
        spans = {"element": elements, "row": (row, rows), "column": (zero, width)}
        for k, kind in enumerate(arrays):
            element = context.get_data_type(kind.dtype)
            itemsize = ir.Constant(_I64, context.get_abi_sizeof(element))
            offset, n = spans.get(per[k], (zero, one))
            address = builder.load(builder.gep(first, [ir.Constant(_I64, k)]))
            data = _pointer(builder, builder.add(address, builder.mul(offset, itemsize)), element)
            array = context.make_array(kind)(context, builder)
            populate_array(array, data, [n], [itemsize], itemsize, meminfo=None)
            made.append(array._getvalue())
        return context.make_tuple(builder, result, made)

    return read


@intrinsic
def call_address(typingctx, function, *arguments):
    """Call the C function at address ``function`` with any number of ``int64`` arguments."""
    count = len(arguments)

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64] * count)
        values = _unpacked(builder, args[1], count)
        builder.call(_pointer(builder, args[0], kind), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), codegen


@int64_intrinsic(types.int64)
def number_from(context, builder, function):
    """The result of the C function ``int function(void)`` at an address."""
    kind = ir.FunctionType(_I32, [])
    return builder.sext(builder.call(_pointer(builder, function, kind), []), _I64)


@int64_intrinsic(types.void)
def store_clock(context, builder, address):
    """Write the identifier of this thread's processor-time clock on Linux, an ``int32``."""
    if platform.system() != "Linux":
        return
    place = _pointer(builder, address, _I32)
    this = builder.call(_declared(builder, "pthread_self", _I64), [])
    builder.call(_declared(builder, "pthread_getcpuclockid", _I32, _I64, place.type), [this, place])


def _declared(builder, name, result, *arguments):
    # A second declaration of one name is an error.
    declared = builder.module.globals.get(name)
    return declared or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def threads_of_numba(typingctx):
    """The result of ``numba.get_num_threads()``, after its threading layer has started."""

    def codegen(context, builder, signature, args):
        return builder.call(_declared(builder, "get_num_threads", _I32), [])

    return types.int32(), codegen


@intrinsic
def limit_numba(typingctx, threads):
    """``numba.set_num_threads`` for the calling thread, unchecked."""

    def codegen(context, builder, signature, args):
        count = builder.trunc(args[0], _I32)
        builder.call(_declared(builder, "set_num_threads", ir.VoidType(), _I32), [count])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def sleep(typingctx):
    """Yield the core for about 50 us, the shortest sleep of common systems."""

    def codegen(context, builder, signature, args):
        name = "Sleep" if platform.system() == "Windows" else "usleep"
        result = ir.VoidType() if name == "Sleep" else _I32
        builder.call(_declared(builder, name, result, _I32), [ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@int64_intrinsic(types.int64)
def atomic_add(context, builder, address, value):
    """Add to the ``int64`` at an address, atomically; returns the value before."""
    # Release and acquire: what a thread wrote before it adds is seen by whoever reads the sum.
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), value, "acq_rel")


@int64_intrinsic(types.int32)
def atomic_exchange(context, builder, address, value):
    """``value`` to the ``int32`` at ``address``; returns what was there, to one thread alone."""
    kind = ir.IntType(32)
    new = builder.trunc(value, kind)
    return builder.atomic_rmw("xchg", _pointer(builder, address, kind), new, "monotonic")


@int64_intrinsic(types.int32)
def load_acquire(context, builder, address):
    """The ``int32`` at an address, or the lower half of an ``int64``; with acquire ordering."""
    return builder.load_atomic(_pointer(builder, address, _I32), "acquire", 4)


@intrinsic
def cpu_pause(typingctx):
    """Tell the core that this is a spin loop. (Inline assembly would abort the process.)"""

    def codegen(context, builder, signature, args):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            builder.call(_declared(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        elif machine in ("aarch64", "arm64"):
            # Hint 1 is ``yield``.
            hint = _declared(builder, "llvm.aarch64.hint", ir.VoidType(), _I32)
            builder.call(hint, [ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetching(locality):
    """A compiled function that fetches a cache line for reading; ``locality`` is LLVM's."""

    @int64_intrinsic(types.void)
    def prefetch(context, builder, address):
        kinds = _POINTER, _I32, _I32, _I32
        declared = _declared(builder, "llvm.prefetch.p0", ir.VoidType(), *kinds)
        # (address, 0: to read, locality, 1: data)
        flags = [ir.Constant(_I32, k) for k in (0, locality, 1)]
        builder.call(declared, [builder.inttoptr(address, _POINTER), *flags])

    return prefetch


prefetch_line = _prefetching(2)
"""Fetch a cache line for reading, to the second cache.

The second cache can fetch more lines at once than the first, and is near enough for most loops.
"""
prefetch_first = _prefetching(3)
"""Fetch a cache line for reading, to the first cache: where most lines are in the second."""


@int64_intrinsic(types.void)
def copy_bytes(context, builder, target, source, n_bytes):
    """Copy memory that does not overlap."""
    pointers = _POINTER, _POINTER
    kinds = *pointers, _I64, ir.IntType(1)
    declared = _declared(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *kinds)
    places = [builder.inttoptr(address, _POINTER) for address in (target, source)]
    # The last argument: the memory is not volatile.
    builder.call(declared, [*places, n_bytes, ir.Constant(ir.IntType(1), 0)])


class Vector(types.Type):
    """``count`` numbers of type ``real`` (float32 or float64) as a value of compiled loops.

    A loop that adds to an array loads and stores it in every round. A local variable of this type
    is a value of LLVM's vector type, which the compiler cuts into registers of any machine.
    """

    def __init__(self, real, count):
        self.real, self.count = real, count
        super().__init__(f"Vector({real}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        real = manager[vector.real].get_value_type()
        super().__init__(manager, vector, ir.VectorType(real, vector.count))


def vector_loader(storage, vector):
    """A compiled function ``load(address) -> vector`` of consecutive ``storage`` elements."""
    carrier = from_dtype(np.dtype(storage.carrier))

    @int64_intrinsic(vector)
    def load(context, builder, address):
        element, real = context.get_data_type(carrier), context.get_value_type(vector)
        stored = ir.VectorType(element, vector.count).as_pointer()
        # Aligned as one element only: a row of an odd width begins anywhere, and an aligned load of
        # a vector there would fault.
        values = builder.load(builder.inttoptr(address, stored), align=storage.itemsize)
        if storage.widen:
            values = storage.widen(builder, values, vector.count)
        if values.type == real:
            return values
        is_wider = real.element == ir.DoubleType()
        return builder.fpext(values, real) if is_wider else builder.fptrunc(values, real)

    return load


@intrinsic
def add_vectors(typingctx, a, b):
    """The sum of two vectors, element by element."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return a(a, b), codegen


@intrinsic
def multiply_vectors(typingctx, a, b):
    """The product of two vectors, element by element."""

    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return a(a, b), codegen


def repeating_loader(vector):
    """A compiled function ``load(address) -> vector``: one number in all elements."""

    @int64_intrinsic(vector)
    def load(context, builder, address):
        real = context.get_value_type(vector)
        unknown, first = ir.Constant(real, ir.Undefined), ir.Constant(_I32, 0)
        number = builder.load(_pointer(builder, address, real.element))
        # Only element 0 is set; the shuffle takes it for all.
        one = builder.insert_element(unknown, number, first)
        return builder.shuffle_vector(one, unknown, _zeros(vector.count))

    return load


def _zeros(count):
    return ir.Constant(ir.VectorType(_I32, count), [0] * count)


@intrinsic
def store_vector(typingctx, address, values):
    """Write a vector to consecutive elements."""

    def codegen(context, builder, signature, args):
        # Aligned as one element, as in `vector_loader`.
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        builder.store(args[1], pointer, align=values.real.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, values), codegen


@intrinsic
def where_greater(typingctx, a, b, x, y):
    """The elements of ``x`` where those of ``a`` are greater than those of ``b``, else of ``y``."""

    def codegen(context, builder, signature, args):
        # Ordered: with a NaN the comparison is false.
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return x(a, b, x, y), codegen


@intrinsic
def where_equal(typingctx, a, b, x):
    """The elements of ``x`` where those of ``a`` and ``b``, whole numbers, are equal, else 0."""

    def codegen(context, builder, signature, args):
        equal = builder.icmp_signed("==", args[0], args[1])
        return builder.select(equal, args[2], ir.Constant(args[2].type, None))

    return x(a, b, x), codegen


def repeated(vector):
    """A compiled function ``repeat(number) -> vector`` of whole numbers, all the same."""

    @int64_intrinsic(vector)
    def repeat(context, builder, number):
        kind = context.get_value_type(vector)
        number = builder.trunc(number, kind.element)
        unknown, first = ir.Constant(kind, ir.Undefined), ir.Constant(_I32, 0)
        one = builder.insert_element(unknown, number, first)
        return builder.shuffle_vector(one, unknown, _zeros(vector.count))

    return repeat


@intrinsic
def sum_of_elements(typingctx, vector):
    """The elements of a vector of ``2**n`` added up: halves, then halves of their sums."""

    def codegen(context, builder, signature, args):
        (values,), count = args, vector.count
        while count > 1:
            count //= 2
            # This order is part of the result: no width of registers may change it.
            kind = ir.VectorType(_I32, count)
            lanes = [ir.Constant(kind, list(range(k, k + count))) for k in (0, count)]
            halves = [builder.shuffle_vector(values, values, half) for half in lanes]
            values = builder.fadd(*halves)
        return builder.extract_element(values, ir.Constant(_I32, 0))

    return vector.real(vector), codegen
