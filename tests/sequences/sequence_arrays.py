"""Arrays for sequences of calls: sizes on both sides of every threshold, at the same addresses."""

import importlib
import math
import pkgutil
from typing import Any

import numpy as np
from fusestep import nn
from fusestep.kernels import cpu
from helpers import BF16

F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))
DTYPES = (F32, F64, F16, BF16)
# What a gradient has where it is of another dtype: one, as each is a kernel more.
OTHER = {F64: F32, F32: BF16, F16: F32, BF16: F32}

_LARGEST = 300_000
_SMALL = 70


def thresholds() -> list[int]:
    """Every constant of the kernels of the CPU that a number of elements, rows or occurrences may
    be compared with; most are sizes, and the others do no harm."""
    found = set()
    in_cpu = pkgutil.walk_packages(cpu.__path__, f"{cpu.__name__}.")
    for name in ("fusestep.kernels.tables", *(module.name for module in in_cpu)):
        found |= {
            value
            for name, value in vars(importlib.import_module(name)).items()
            if name.isupper() and type(value) is int and 1 < value <= _LARGEST
        }
    return sorted(found)


THRESHOLDS = thresholds()
# That 32,768 elements take another way than fewer is what began this.
assert {512, 1_024, 8_192, 32_768, 65_536, 262_144} <= set(THRESHOLDS)


def size(rng: np.random.Generator, most: int = _LARGEST) -> int:
    """Small mostly; else at a threshold or beside it, or of any magnitude."""
    rng = _often(rng)
    kind = rng.random()
    if kind < 0.5 or most <= _SMALL:
        return min(int(rng.integers(_SMALL)), most)
    if kind < 0.8:
        return min(int(np.exp(rng.uniform(4.0, 11.5))), most)
    reached = [n for n in THRESHOLDS if n < most]
    # A large one takes as long as hundreds of small ones.
    weights = np.array([min(1.0, 32_768 / n) for n in reached])
    return int(rng.choice(reached, p=weights / weights.sum()) + rng.integers(-1, 2))


def _often(rng: np.random.Generator) -> np.random.Generator:
    """One of a few that make the same numbers each time: sizes come again."""
    return np.random.default_rng(int(rng.integers(6))) if rng.random() < 0.4 else rng


def shape(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """Of about ``n`` elements."""
    if n == 1 and rng.random() < 0.5:
        return ()
    n_axes = int(rng.integers(1, 4))
    if n_axes == 1 or n == 0:
        return (n,) if n_axes < 3 else (3, n, 2)
    width = int(rng.choice([1, 2, 3, 7, 16]))
    return (max(1, n // width), width) if n_axes == 2 else (2, max(1, n // width // 2), width)


def pick(rng: np.random.Generator, values: Any) -> Any:
    """One of a sequence, as it is."""
    return values[int(rng.integers(len(values)))]


_rng = np.random.default_rng(0)
_NORMAL = {F64: _rng.standard_normal(2 * _LARGEST)}
_POSITIVE = {F64: _rng.uniform(0.1, 1.0, 2 * _LARGEST)}
for _numbers in (_NORMAL, _POSITIVE):
    _numbers.update({dtype: _numbers[F64].astype(dtype) for dtype in DTYPES})


def _stretch(rng: np.random.Generator, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """As many of ``numbers`` as ``shape`` has elements, from any of them on."""
    n = math.prod(shape)
    if n > len(numbers) // 2:
        return np.resize(numbers, shape)
    begin = int(rng.integers(len(numbers) - n))
    return numbers[begin : begin + n].reshape(shape)


class Memory:
    """Arrays of any dtype and shape, placed at the same addresses again and again."""

    def __init__(self, n_bytes: int = 1 << 24) -> None:
        self._bytes = np.zeros(n_bytes, np.uint8)
        self.forget()

    def forget(self) -> None:
        """What comes now lies where the arrays so far do."""
        self._end = 0

    def place(self, values: Any) -> np.ndarray:
        """A copy of ``values``."""
        values = np.asarray(values)
        begin = -(-self._end // 64) * 64
        end = begin + values.nbytes
        if end > self._bytes.size:
            return values.copy()
        self._end = end
        array = self._bytes[begin:end].view(values.dtype).reshape(values.shape)
        array[...] = values
        return array

    def normal(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Normally distributed numbers."""
        return self.place(_stretch(rng, _NORMAL[dtype], shape))

    def positive(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Numbers between 0.1 and 1."""
        return self.place(_stretch(rng, _POSITIVE[dtype], shape))

    def indices(self, rng: np.random.Generator, n_rows: int, n: int) -> np.ndarray:
        """``n`` numbers of rows: some often, hot ones too."""
        kind = pick(rng, ("any", "few", "hot", "in order"))
        found = rng.integers(0, min(n_rows, 5) if kind == "few" else n_rows, n)
        if kind == "hot":
            found[rng.random(n) < 0.6] = rng.integers(n_rows)
        elif kind == "in order":
            found.sort()
        return self.place(found.astype(pick(rng, (np.int32, np.int64))))

    def rows(self, rng: np.random.Generator, shape: tuple[int, ...], dtype, n: int) -> nn.RowTensor:
        """A row-sparse gradient with ``n`` rows; with none where there are no rows."""
        n = n if shape[0] else 0
        indices = self.indices(rng, max(1, shape[0]), n)
        return nn.RowTensor(indices, self.normal(rng, (n, *shape[1:]), dtype), shape)


def table(rng: np.random.Generator) -> tuple[tuple[int, ...], int]:
    """The shape of a table and a number of occurrences, of which not both are large."""
    rng = _often(rng)
    if rng.random() < 0.25:
        return (size(rng, 4_096) + 1, int(rng.choice([1, 2, 17]))), size(rng, 40_000)
    width = size(rng, 2_048) if rng.random() < 0.3 else int(rng.choice([1, 2, 3, 16, 64]))
    n_rows = 1 + size(rng, max(2, 100_000 // max(1, width)))
    tail = () if width == 1 else (width,) if width % 2 or rng.random() < 0.7 else (width // 2, 2)
    return (n_rows, *tail), size(rng, max(2, 60_000 // max(1, width)))


def n_elements(shape: tuple[int, ...]) -> int:
    """Of an array of this shape."""
    return math.prod(shape)
