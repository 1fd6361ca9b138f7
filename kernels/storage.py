"""Storage types of tensors and their conversion to and from the type of the arithmetic.

A 16-bit tensor travels as ``uint16``: Numba computes in neither 16-bit format on the CPU.
Arithmetic is float32, or float64 where the parameter is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .inner import njit
from .state import PARAMETER, State


@dataclass(frozen=True, eq=False)
class Storage:
    """A type of elements in memory; compared by identity.

    Its properties are declared once, in its definition below.
    """

    name: str  # short, part of kernel names; in capitals the name in safetensors
    dtype: np.dtype[Any]  # of the user's array; frameworks use the same name
    carrier: type  # the NumPy scalar type through which kernels see the memory
    to_real: Callable[..., Any]  # compiled: to float32 or float64
    from_real: Callable[..., Any]  # compiled: from float32, to the nearest, ties to even
    from_wide: Callable[..., Any]  # compiled: from float64, rounded once
    itemsize: int  # bytes
    exponent: int  # mask of the bits of the exponent, all set in an infinity or a NaN
    widen: Callable[..., Any] | None = None  # LLVM: a vector of carriers to float32, if they differ
    # Compiled, of 16 bits: from a float32 and 32 random bits, to one of the two nearest numbers
    # that can be stored; to either with the probability that makes its mean the float32.
    at_random: Callable[..., Any] | None = None


@intrinsic
def f16_to_f32(typingctx, bits):
    """The float32 value of a bit pattern of float16; exact."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx, x):
    """The bit pattern of the float16 nearest to a float32, ties to even."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


def _widen_f16(builder, bits, count):
    half = builder.bitcast(bits, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(half, ir.VectorType(ir.FloatType(), count))


def _widen_bf16(builder, bits, count):
    words = ir.VectorType(ir.IntType(32), count)
    shift = ir.Constant(words, [16] * count)
    wide = builder.shl(builder.zext(bits, words), shift)
    return builder.bitcast(wide, ir.VectorType(ir.FloatType(), count))


@njit
def _same(x):
    return x


@njit
def _to_f32(x):
    return np.float32(x)


@njit
def _to_f64(x):
    return np.float64(x)


@njit
def _to_i32(x):
    return np.int32(x)


@njit
def _f16_to_f32(u):
    return f16_to_f32(u)


@njit
def _f32_to_f16(x):
    return f32_to_f16(x)


# Every uint32 operation is wrapped: Numba types uint32 op uint32 as uint64.
@njit
def _bf16_to_f32(u):
    return np.uint32(np.uint32(u) << np.uint32(16)).view(np.float32)


@njit
def _f32_to_bf16(x):
    bits = np.float32(x).view(np.uint32)
    # Half a unit of the kept half is added, less 1 where that half is even, so that a tie goes to
    # the even neighbour. A carry runs into the exponent, as it has to: the next number is larger.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    # A NaN must not be carried into an infinity: keep its top bits and make it quiet.
    quiet = np.uint32(bits | np.uint32(0x400000))
    return np.uint16(np.uint32(quiet if x != x else rounded) >> np.uint32(16))


@njit
def _bf16_at_random(x, bits):
    word = np.float32(x).view(np.uint32)
    # As many random bits as are cut off: they carry with the probability of what is cut off.
    carried = np.uint32(word + np.uint32(bits >> np.uint32(16)))
    # What a carry would make infinite is rounded to the nearest. The last finite number is odd, so
    # that is a carry of half a unit, which leaves an infinity as it is.
    nearest, end = np.uint32(word + np.uint32(0x8000)), np.uint32(0x7F800000)
    moved = nearest if np.uint32(carried & end) == end else carried
    quiet = np.uint32(word | np.uint32(0x400000))
    return np.uint16(np.uint32(quiet if x != x else moved) >> np.uint32(16))


@njit
def _f16_at_random(x, bits):
    word = np.float32(x).view(np.uint32)
    sign, size = np.uint32(word & np.uint32(0x80000000)), abs(np.float32(x))
    # Below the normal numbers all lie as far apart as the smallest of these, to which the number is
    # moved for as long.
    least, none = np.float32(2.0**-14), np.float32(0.0)
    moved = least if size < least else none
    carried = np.float32(size + moved).view(np.uint32)
    # Float16 has 13 bits less than float32: so many random bits are added, and the mask cuts them.
    carried = np.uint32(carried + np.uint32(bits >> np.uint32(19)))
    rounded = np.uint32(carried & np.uint32(0xFFFFE000)).view(np.float32) - moved
    signed = np.uint32(np.float32(rounded).view(np.uint32) | sign).view(np.float32)
    # Beyond the largest finite number, and of a NaN, the nearest is taken.
    return f32_to_f16(signed if rounded <= np.float32(65504.0) else np.float32(x))


@njit
def _to_odd_f32(x):
    """A float64 as float32 that can be rounded again without rounding twice.

    Towards zero, and the last bit set when anything was cut off: the next rounding, to 11 bits
    or fewer, then sees that the value is not a tie (Boldo and Melquiond, 2008).
    """
    near = np.float32(x)
    bits = np.float32(near).view(np.uint32)
    too_far = np.uint32(1) if abs(np.float64(near)) > abs(x) else np.uint32(0)
    inexact = np.uint32(1) if np.float64(near) != x else np.uint32(0)
    return np.uint32(np.uint32(bits - too_far) | inexact).view(np.float32)


@njit
def _f64_to_f16(x):
    return _f32_to_f16(_to_odd_f32(x))


@njit
def _f64_to_bf16(x):
    return _f32_to_bf16(_to_odd_f32(x))


class Piece(NamedTuple):
    """Consecutive elements of a device array, which a step moves to the host."""

    address: int
    size: int
    dtype: np.dtype[Any]
    goes_back: bool  # whether they are written back

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize


F32 = Storage("f32", np.dtype(np.float32), np.float32, _same, _same, _to_f32, 4, 0x7F800000)
F64 = Storage("f64", np.dtype(np.float64), np.float64, _same, _to_f64, _same, 8, 0x7FF << 52)
_of_f16 = _f16_to_f32, _f32_to_f16, _f64_to_f16
_of_bf16 = _bf16_to_f32, _f32_to_bf16, _f64_to_bf16
F16 = Storage(
    "f16", np.dtype(np.float16), np.uint16, *_of_f16, 2, 0x7C00, _widen_f16, _f16_at_random
)
BF16 = Storage(
    "bf16",
    np.dtype(ml_dtypes.bfloat16),
    np.uint16,
    *_of_bf16,
    2,
    0x7F80,
    _widen_bf16,
    _bf16_at_random,
)
I32 = Storage("i32", np.dtype(np.int32), np.int32, _same, _to_i32, _to_i32, 4, 0)
"""The storage of counts, which are states; it is no type of the arithmetic."""

STORAGES: dict[np.dtype[Any], Storage] = {s.dtype: s for s in (F32, F64, F16, BF16)}
"""The storages of parameters, gradients and states of elements, by dtype."""
FOREIGN = {dtype.name: dtype for dtype in STORAGES if dtype.isbuiltin != 1}
"""The dtypes that NumPy has from another package (ml_dtypes), by name."""


def storage_of(dtype: np.dtype[Any]) -> Storage:
    """The storage of a state of a dtype."""
    return I32 if dtype == I32.dtype else STORAGES[dtype]


def real_of(storage: Storage) -> Storage:
    """The storage type of the arithmetic for a parameter stored as ``storage``."""
    return F64 if storage is F64 else F32


REALS = {dtype: storage for dtype, storage in STORAGES.items() if real_of(storage) is storage}
"""The storages of the types of the arithmetic, by dtype."""


def state_storage(state: State, w: Storage, asked: Storage | None = None) -> Storage:
    """The storage of a state (`State.dtype`) of a parameter that is stored as ``w``."""
    if state.dtype == PARAMETER:
        return w
    if state.dtype is not None:
        return storage_of(np.dtype(state.dtype))
    if state.per == "element":
        return w if asked is None or state.initial == PARAMETER else asked
    return real_of(w)


def numba_type(storage: Storage) -> Any:
    """The Numba scalar type of the arithmetic type ``storage`` (float32 or float64)."""
    return types.float64 if storage is F64 else types.float32
