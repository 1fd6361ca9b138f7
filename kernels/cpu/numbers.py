"""Single numbers that a step writes with everything else, such as estimates of a step size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from .compiler.compile import part
from .compiler.intrinsics import as_pointer
from .compiler.records import records
from .headers.arrays import address_of
from .threads.parallel import Arguments, Loop


class NumberCall(NamedTuple):
    """Arguments of the loop, all ``int64``."""

    numbers: np.ndarray  # [n, 3] of `_Number`
    n: int


class _Number(NamedTuple):
    """A number and where it is written, all ``int64``."""

    target: int  # address
    source: int  # address
    n_bytes: int


_numbers_at = records(_Number)


@part(NumberCall)
def _write_numbers(index, slot, c):
    numbers = _numbers_at(c.numbers, c.n)
    for i in range(numbers.size):
        number = numbers[i]
        target = carray(as_pointer(number.target), number.n_bytes, np.uint8)
        source = carray(as_pointer(number.source), number.n_bytes, np.uint8)
        for k in range(target.size):
            target[k] = source[k]


class NumberWrite:
    """Writing single numbers with a step, from arrays of one element to addresses; see `loops`."""

    def __init__(self, numbers: Sequence[tuple[int, np.ndarray]]) -> None:
        rows = [_Number(target, address_of(x), x.itemsize) for target, x in numbers]
        self._keep = numbers
        self._call = Arguments(NumberCall(np.array(rows, np.int64), len(rows)))
        self.loops = (Loop(_write_numbers.address, 1, self._call.address, 1),)

    def release(self) -> None:
        """Do nothing: a write borrows no memory."""
