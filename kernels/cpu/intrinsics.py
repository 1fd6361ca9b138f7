"""All LLVM-level code for the CPU: pointers, calls, atomics, prefetch."""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


@intrinsic
def as_pointer(typingctx, address):
    """An ``int64`` address as a ``void*``, for ``carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


def _loader(scalar):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], context.get_value_type(scalar).as_pointer())
            return builder.load(pointer)

        return scalar(types.int64), codegen

    return load


load_int32 = _loader(types.int32)
load_int64 = _loader(types.int64)


def tuple_reader(cls, scalar):
    """A compiled function ``read(address) -> cls`` of consecutive values of type ``scalar``.

    Reading a named tuple of scalars inside the kernel is the cheapest way found to hand
    over many of them: they sit in registers, and their number does not change the signature.
    """
    count = len(cls._fields)
    result = types.NamedUniTuple(scalar, count, cls)

    @intrinsic
    def read(typingctx, address):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], context.get_value_type(scalar).as_pointer())
            values = [
                builder.load(builder.gep(pointer, [ir.Constant(_I64, k)])) for k in range(count)
            ]
            return context.make_tuple(builder, result, values)

        return result(types.int64), codegen

    return read


def array_reader(carriers):
    """A compiled function ``read(addresses, offset, n)``: a tuple of arrays of ``n`` elements.

    There is one for each NumPy scalar type of ``carriers``; it begins ``offset`` elements after the
    address of its number in the list at ``addresses``.
    """
    arrays = [types.Array(from_dtype(np.dtype(carrier)), 1, "C") for carrier in carriers]
    result = types.Tuple(arrays)

    @intrinsic
    def read(typingctx, addresses, offset, n):
        def codegen(context, builder, signature, args):
            place, offset, n = args
            base = builder.inttoptr(place, _I64.as_pointer())
            made = []
            for k, kind in enumerate(arrays):
                element = context.get_data_type(kind.dtype)
                itemsize = ir.Constant(_I64, context.get_abi_sizeof(element))
                address = builder.load(builder.gep(base, [ir.Constant(_I64, k)]))
                first = builder.add(address, builder.mul(offset, itemsize))
                array = context.make_array(kind)(context, builder)
                populate_array(
                    array,
                    data=builder.inttoptr(first, element.as_pointer()),
                    shape=[n],
                    strides=[itemsize],
                    itemsize=itemsize,
                    meminfo=None,
                )
                made.append(array._getvalue())
            return context.make_tuple(builder, result, made)

        return result(types.int64, types.int64, types.int64), codegen

    return read


@intrinsic
def call_address(typingctx, function, *arguments):
    """Call the C function at address ``function`` with any number of ``int64`` arguments."""
    count = len(arguments)

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64] * count)
        values = cgutils.unpack_tuple(builder, args[1], count)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), codegen


@intrinsic
def threads_of_numba(typingctx):
    """What ``numba.get_num_threads()`` returns, once its threading layer has been started."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(_I32, [])
        function = cgutils.get_or_insert_function(builder.module, function_type, "get_num_threads")
        return builder.call(function, [])

    return types.int32(), codegen


def _element(context, builder, array_type, array, index, index_type):
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [context.cast(builder, index, index_type, types.intp)])


@intrinsic
def atomic_add(typingctx, array, index, value):
    """``array[index] += value`` on integers, atomic; returns the old value.

    The ordering is monotonic: the counter hands out work, it publishes no data. The data
    is published by the barrier of the parallel loop.
    """
    dtype = array.dtype

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1], signature.args[1])
        old = context.cast(builder, args[2], signature.args[2], dtype)
        return builder.atomic_rmw("add", pointer, old, "monotonic")

    return dtype(array, index, value), codegen


@intrinsic
def compare_and_swap(typingctx, array, index, expected, new):
    """Acquire on success: what the last holder of a lock wrote is visible after it."""
    dtype = array.dtype

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1], signature.args[1])
        old = context.cast(builder, args[2], signature.args[2], dtype)
        new = context.cast(builder, args[3], signature.args[3], dtype)
        result = builder.cmpxchg(pointer, old, new, "acquire", "monotonic")
        return builder.extract_value(result, 0)

    return dtype(array, index, expected, new), codegen


@intrinsic
def load_acquire(typingctx, array, index):
    """Atomic load with acquire ordering."""
    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1], signature.args[1])
        return builder.load_atomic(pointer, "acquire", size)

    return array.dtype(array, index), codegen


@intrinsic
def store_release(typingctx, array, index, value):
    """Atomic store with release ordering: all writes before it are visible to the next holder."""
    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1], signature.args[1])
        new = context.cast(builder, args[2], signature.args[2], signature.args[0].dtype)
        builder.store_atomic(new, pointer, "release", size)
        return context.get_dummy_value()

    return types.void(array, index, value), codegen


@intrinsic
def cpu_pause(typingctx):
    """Tell the core that this is a spin loop. (Inline assembly would abort the process.)"""

    def codegen(context, builder, signature, args):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            function = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        elif machine in ("aarch64", "arm64"):
            function = ir.FunctionType(ir.VoidType(), [_I32])
            name = "llvm.aarch64.hint"
            hint = [ir.Constant(_I32, 1)]
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), hint)
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetcher(write):
    @intrinsic
    def prefetch(typingctx, address):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
            function = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
            declared = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
            # (address, read or write, temporal locality 3 = keep, data cache)
            flags = [ir.Constant(_I32, k) for k in (write, 3, 1)]
            builder.call(declared, [pointer, *flags])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch


prefetch_read = _prefetcher(0)
prefetch_write = _prefetcher(1)
