"""Stochastic rounding by whole numbers and fractions: the random bits, and what they decide."""

import hashlib
from fractions import Fraction
from typing import Any

import numpy as np

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & LONG
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & LONG
    return x ^ x >> 31


def bits_of(seed: int, name: str, update: int, place: int) -> int:
    """The 32 random bits of an element, by its place in the parameter of this name."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    word = _mixed(_mixed(_mixed(seed) ^ key) ^ update)
    x = place + word & WORD
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x ^= word >> 32
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def rounded(x: Any, dtype: Any, bits: int) -> Any:
    """A float32 rounded to 16 bits: away from 0 if the bits carry what is cut off to the next."""
    dtype = np.dtype(dtype).type
    nearest, size = dtype(x), np.abs(np.float32(x))
    if not np.isfinite(size):
        return nearest
    n_bits, least = (13, np.float32(2.0**-14)) if dtype is np.float16 else (16, np.float32(0.0))
    if size < least:  # a multiple of 2**-37, as float32 has beside the least normal number
        size = size + least - least
    low = dtype(size)
    low = np.nextafter(low, dtype(0)) if np.float32(low) > size else low
    # The distance to the next number, which may be infinite, is that of the last ones or less.
    high, before = np.nextafter(low, dtype(np.inf)), np.nextafter(low, dtype(0))
    exact, below = Fraction(float(size)), Fraction(float(low))
    gap = Fraction(float(high)) - below if np.isfinite(high) else below - Fraction(float(before))
    takes_high = (exact - below) / gap + Fraction(bits >> 32 - n_bits, 1 << n_bits) >= 1
    if takes_high and not np.isfinite(high):
        return nearest
    return np.copysign(high if takes_high else low, dtype(x))


def all_rounded(x: Any, dtype: Any, seed: int, name: str, update: int) -> Any:
    """The elements of a float32 array, as they lie one after the other, rounded in an update."""
    found = [
        rounded(number, dtype, bits_of(seed, name, update, place))
        for place, number in enumerate(np.asarray(x).reshape(-1))
    ]
    return np.array(found, dtype).reshape(np.shape(x))
