"""How a weight is kept: what lies beside it in memory, and how it is rounded.

A weight of 16 bits forgets updates that are smaller than half a unit of its last place. What lies
beside it remembers them: a rule sees the number that both make, in the type of the arithmetic, and
its result is written to both in the same pass. Or it is rounded up or down at random, so that small
updates act as often as their size says. `rule.Rule.kept` makes a rule of any elementwise or
row-wise one; its own function knows nothing of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .rule import Keeping
from .state import PARAMETER, State


def _master(w: Any, master: Any) -> Any:
    return master


def _weight(w: Any, copy: Any) -> Any:
    return w


def _all(x: Any, rounded: Any) -> Any:
    return (x,)


def _joined(w: Any, remainder: Any) -> Any:
    return w + remainder


def _left(x: Any, rounded: Any) -> Any:
    return (x - rounded,)


# Each operation is wrapped: Numba types uint32 op uint32 as uint64.
def _bits(i: Any, hp: Any) -> Any:
    """A hash of the place of an element: two rounds of ``lowbias32`` (Wellons, 2018), keyed."""
    x = np.uint32(np.uint32(i) + hp.rounding_begin)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(np.uint32(x * np.uint32(0x7FEB352D)) ^ hp.rounding_key)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


_STATE = State("master", initial=PARAMETER, dtype=np.float32)
MASTER = Keeping("master", (_STATE,), _master, _all)
"""A rounded weight, never read but written on the way, and all of it in float32 (NVIDIA's mixed
precision, MXNet's ``multi_precision``)."""
KAHAN = Keeping("kahan", (State("remainder", dtype=PARAMETER),), _joined, _left)
"""A rounded weight, and what rounding has cut off, rounded too (Kahan's compensated sum)."""
COPY = Keeping("copy", (State("copy"),), _weight, _all)
"""A weight that is never rounded, and a copy of it in another dtype, written on the way."""
STOCHASTIC = Keeping("stochastic", bits=_bits, hp=tuple(f"rounding{k}" for k in range(4)))
"""A weight that is rounded up or down at random (stochastic rounding), with the scalars of
`random_scalars`."""
KEEPINGS: dict[str, Keeping | None] = {
    "nearest": None, "master": MASTER, "kahan": KAHAN, "stochastic": STOCHASTIC
}  # fmt: skip
"""By name; ``"nearest"`` is the weight alone, rounded to the nearest number that can be stored."""


MOST_OF_REMAINDER = 0.99
"""A remainder that was rounded may reach the middle between two weights; so much of it does not."""


def whole_weight(keeping: Keeping | None, w: np.ndarray, beside: Sequence[Any]) -> np.ndarray:
    """A weight with what lies beside it, arrays of NumPy, in the type of the arithmetic: a copy."""
    wide = w.astype(np.result_type(w.dtype, np.float32))
    if keeping is None or keeping.load is None:
        return wide
    return np.asarray(keeping.load(wide, *(array.astype(np.float32) for array in beside)))


def begun_anew(
    keeping: Keeping, weight: Any, beside: Any, library: Any = np, cast: Any = np.ndarray.astype
) -> Any:
    """A master or remainder, begun anew where it and a weight make another weight; None: nowhere.

    Arrays are those of ``library``, NumPy or PyTorch; ``cast`` gives them another dtype.
    """
    whole, anew = beside, weight
    if keeping is KAHAN:
        part = cast(beside, library.float32) * np.float32(MOST_OF_REMAINDER)
        whole, anew = cast(weight, library.float32) + part, library.zeros_like(weight)
    rounded = cast(whole, weight.dtype)
    is_same = (rounded == weight) | (library.isnan(rounded) & library.isnan(weight))
    return None if is_same.all() else library.where(is_same, beside, cast(anew, beside.dtype))


@cache
def key_of(name: str) -> int:
    """The key of a parameter's random bits: 64 bits that follow from its name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def random_scalars(seed: Any, keys: Any, steps: Any, begins: Any) -> np.ndarray:
    """float32 ``[T, 4]``: the scalars from which the random bits of T tensors follow in a step.

    All are integers, arrays ``[T]`` or numbers: seed, `key_of` each parameter, the number of its
    update, and the place of its first element in the whole tensor, of which others have the rest.
    The bits of an element follow from these and its place, modulo 2**32.
    """
    values, n = (seed, keys, steps, begins), len(keys)
    if n <= _FEW:
        rows = [_words(*scalars) for scalars in zip(*(_listed(x, n) for x in values), strict=True)]
        return np.array(rows, np.float32)
    words = _words(*(np.atleast_1d(x).astype(np.uint64) for x in values))
    return np.stack([word.astype(np.float32) for word in words], -1)


_ALL = (1 << 64) - 1
# Of a few tensors numbers of Python are computed in a tenth of the time that arrays take.
_FEW = 8


def _listed(x: Any, n: int) -> list[int]:
    """The integers of one argument: ``n``."""
    numbers = np.ravel(x).tolist() if isinstance(x, np.ndarray | list) else [x]
    return [*map(int, numbers * n if len(numbers) == 1 else numbers)]


def _words(seed: Any, key: Any, step: Any, begin: Any) -> tuple[Any, Any, Any, Any]:
    """The halves of two words of 32 bits, of numbers or of arrays of uint64."""
    # Mixed in between: else a seed and a key that change in the same bits would cancel.
    x = mixed(mixed(mixed(seed) ^ key) ^ step)
    first = (x + begin) & 0xFFFFFFFF
    # Halves, since a float32 holds integers of 24 bits at most exactly.
    return first & 0xFFFF, first >> 16, (x >> 32) & 0xFFFF, x >> 48


def mixed(x: Any) -> Any:
    """A hash of words of 64 bits (``splitmix64``: Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


def unmixed(x: Any) -> Any:
    """The uint64 of which `mixed` makes these: an array, or one in compiled code."""
    # The factors are the inverses of those of `mixed` modulo 2**64; a shift is undone by shifts.
    # A constant below 2**63 would be signed in compiled code.
    x = ((x ^ (x >> 31) ^ (x >> 62)) * np.uint64(0x319642B2D24D8EC3)) & _ALL
    x = ((x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089) & _ALL
    return ((x ^ (x >> 30) ^ (x >> 60)) - 0x9E3779B97F4A7C15) & _ALL
