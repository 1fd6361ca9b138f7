"""The arrays and wrong arguments of the cases of `digests.py`."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusestep import nn

from helpers import STORAGE_DTYPES, arrays_of

Shape = tuple[int, ...]
Cases = Iterator[tuple[str, Callable[[Any], object]]]

F32 = STORAGE_DTYPES[0]
SIZES: tuple[Shape, ...] = ((), (0,), (1,), (7,), (1003,), (3, 5), (0, 4), (2, 3, 4, 1))
LARGE = (203, 199)  # several threads work on it
# Shape of a table, number of indices, and the share of them that is one row.
ROWS: tuple[tuple[Shape, int, float], ...] = (
    *(((40, width), 80, 0.0) for width in (1, 3, 8, 16, 64, 100)),
    *(((9, 8), 0, 0.0), ((0, 4), 0, 0.0), ((20, 3, 4), 50, 0.0), ((50,), 2_000, 0.9)),
    *(((60, 8), 3_000, 0.6), ((5, 1), 700, 0.95), ((2_003, 16), 20_000, 0.3)),
)
# What each argument is given in turn; most of it is refused.
BAD = (
    None,
    "no",
    -1.0,
    0.0,
    2,
    True,
    False,
    math.nan,
    math.inf,
    1e-60,
    1e60,
    [],
    (0.5,),
    {},
    object,
)


def rng_of(*seed: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(seed).encode()))


def normal(seed: Any, shape: Shape, dtype: Any = F32) -> np.ndarray:
    return np.asarray(rng_of("normal", seed).standard_normal(shape)).astype(dtype)


def positive(seed: Any, shape: Shape, dtype: Any = F32) -> np.ndarray:
    return np.asarray(rng_of("positive", seed).uniform(0.1, 1.0, shape)).astype(dtype)


def strided(seed: Any, shape: Shape, dtype: Any = F32) -> np.ndarray:
    """Not contiguous: every other element of a larger array, its axes turned round."""
    return normal(seed, (*shape[::-1], 2), dtype)[..., 0].T


def rows(
    seed: Any, shape: Shape, n: int, dtype: Any = F32, index: Any = np.int64, hot: float = 0.0
) -> nn.RowTensor:
    """A row-sparse gradient with duplicates; the share ``hot`` of its indices is one row."""
    rng = rng_of("rows", seed)
    indices = rng.integers(0, max(shape[0], 1), n)
    indices[rng.random(n) < hot] = shape[0] // 2
    values = rng.standard_normal((n, *shape[1:])).astype(dtype)
    return nn.RowTensor(indices.astype(index), values, shape)


def defaults_of(function: Any) -> dict[str, Any]:
    """Names and defaults of the arguments that have a name."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def labelled(options: Mapping[str, Any]) -> str:
    """Options as they stand in the name of a case."""
    plain = (type(None), bool, int, float, str, tuple, dict, np.dtype)
    shown = {n: x if isinstance(x, plain) else getattr(x, "__name__", type(x).__name__)
             for n, x in options.items()}  # fmt: skip
    return ", ".join(f"{name}={value}" for name, value in shown.items())


# What is refused


def unusual(value: Any) -> list[Any]:
    """What comes in the place of a value: other kinds, dtypes, shapes and places, in each part."""
    found: list[Any] = [*BAD]
    if isinstance(value, float):
        arrays = (np.array(value), np.array([value]), np.array([value] * 2))
        found += [np.float32(value), *arrays, -value, 1.5, [value]]
    elif isinstance(value, np.ndarray):
        read_only = value.copy()
        read_only.flags.writeable = False
        lines = np.atleast_1d(value)
        found += [
            read_only,
            np.repeat(lines, 2, axis=0)[::2],
            lines[:2],
            value[None],
            lines.ravel(),
        ]
        found += [value.astype(t) for t in (np.int8, np.int32, np.complex64, *STORAGE_DTYPES)]
        found += [nn.Parameter(value.astype(F32)), np.ma.masked_array(value), value.tolist()]
        found += [np.asarray(other) for other in (value - 1, value + 1, value * 2**20)]
    elif isinstance(value, str):
        found += ["CPU", "GPU", "Ascend"]
    elif isinstance(value, nn.Parameter):
        found += [value.data, [value], nn.Parameter(value.data, value.name, False)]
    elif isinstance(value, nn.RowTensor):
        indices, values, shape = value.indices, value.values, value.dense_shape
        found += [nn.RowTensor(indices, values, (shape[0] + k, *shape[1:])) for k in (-1, 1)]
        found += [nn.RowTensor(indices + k, values, shape) for k in (-1, shape[0])]
        found += [[value, values], [value, value], nn.RowTensor(indices[:2], values[:2], shape)]
    elif isinstance(value, list):
        found += [
            value[:1],
            [*value, value[0]],
            value[:1] * len(value),
            dict(enumerate(value)),
            tuple(value),
            value[0],
        ]
        parts = [(k, other) for k, part in enumerate(value) for other in unusual(part)]
        found += [[*value[:k], other, *value[k + 1 :]] for k, other in parts]
    elif isinstance(value, dict):
        found += [{n: x for n, x in value.items() if n != name} for name in value]
        found += [{**value, "nothing": 0.5}, [value]]
        parts = [(name, other) for name, part in value.items() for other in unusual(part)]
        found += [{**value, name: other} for name, other in parts]
    return found


def faults(
    record: Any, function: Callable[..., Any], usual: Callable[[], dict[str, Any]], name: str
) -> None:
    """Calls with other values for one argument, and what they leave."""
    given = usual()
    others = [other for other, x in given.items() if isinstance(x, np.ndarray)]
    for value in (*unusual(given.get(name)), *others):
        given = usual()
        given[name] = given.get(value, value) if isinstance(value, str) else value
        record.attempt(function, **given)
        record.add(arrays_of(given))


def refusals(
    label: str,
    function: Callable[..., Any],
    usual: Callable[[], dict[str, Any]] = dict,
    names: Sequence[str] = (),
) -> Cases:
    """A case for each argument; without ``names`` for all, and for one that there is not."""
    for name in names or (*defaults_of(function), "learning_rat"):
        yield f"{label} bad {name}", partial(faults, function=function, usual=usual, name=name)
