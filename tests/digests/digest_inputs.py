"""Arrays, parameters and gradients of the cases of `digests.py`, and what is given wrongly."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from fusestep import nn
from helpers import STORAGE_DTYPES

Shape = tuple[int, ...]

F32 = STORAGE_DTYPES[0]
# What each argument is given in turn; most of it is refused.
BAD = (
    *(None, "no", -1.0, 0.0, 2, True, False, math.nan, math.inf, 1e-60, 1e60),
    *([], (0.5,), {}, object),
)


def rng_of(*seed: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(seed).encode()))


def normal(seed: Any, shape: Shape, dtype: Any = F32) -> np.ndarray:
    return np.asarray(rng_of("normal", seed).standard_normal(shape)).astype(dtype)


def strided(seed: Any, shape: Shape, dtype: Any = F32) -> np.ndarray:
    """Not contiguous: every other element of a larger array, its axes turned round."""
    return normal(seed, (*shape[::-1], 2), dtype)[..., 0].T


def rows(seed, shape: Shape, n: int, dtype=F32, index=np.int64, hot: float = 0.0) -> nn.RowTensor:
    """A row-sparse gradient with duplicates; the share ``hot`` of its indices is one row."""
    rng = rng_of("rows", seed)
    indices = rng.integers(0, max(shape[0], 1), n)
    indices[rng.random(n) < hot] = shape[0] // 2
    values = rng.standard_normal((n, *shape[1:])).astype(dtype)
    return nn.RowTensor(indices.astype(index), values, shape)


# What is stepped

Kind = Callable[[Any, Shape, Any], Any]
DENSE: dict[str, Kind] = {
    "dense": normal, "strided": strided, "none": lambda *_: None,
    "nan": lambda seed, shape, dtype: normal(seed, shape, dtype) * np.array(np.nan, dtype),
}  # fmt: skip
SPARSE: dict[str, Kind] = {
    "rows": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype),
    "int32": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype, np.int32),
    "no rows": lambda seed, shape, dtype: rows(seed, shape, 0, dtype),
    "hot": lambda seed, shape, dtype: rows(seed, shape, 3_000, dtype, hot=0.6),
    "many": lambda seed, shape, dtype: rows(seed, shape, 20_000, dtype, hot=0.3),
    "parts": lambda seed, shape, dtype: [rows((seed, n), shape, n, dtype) for n in (5, 0, 9)],
    "nan rows": lambda _, shape, dtype: nn.RowTensor(
        np.arange(2), np.full((2, *shape[1:]), np.nan, dtype), shape),
}  # fmt: skip
# The parameters of a run: the shape of each, and the kinds of its gradients from step to step.
PLANS: dict[str, tuple[tuple[Shape, str], ...]] = {
    "dense": (((9, 8), "dense"), ((11,), "dense")),
    "sizes": tuple(
        (shape, "dense") for shape in ((), (0,), (1,), (7,), (1003,), (3, 5), (0, 4), (2, 3, 4, 1))
    ),
    "large": (((203, 199), "dense"), ((40_003,), "dense")),  # several threads work on it
    "strided": (((5, 7), "strided"), ((11,), "strided, dense")),
    "sometimes": (((9, 8), "dense, none"), ((11,), "none, none, dense")),
    "nan": (((9, 8), "dense"), ((11,), "dense, nan, dense")),
    "mixed": (
        *(((9, 8), "rows"), ((5, 7), "dense"), ((11,), "dense"), ((4, 3), "none")),
        *(((6, 16), "parts"), ((5, 1), "no rows"), ((50,), "int32"), ((20, 3, 4), "rows"))),
    "widths": tuple(((40, width), "rows") for width in (1, 3, 8, 16, 64, 100)),
    "hot": (((60, 8), "hot"), ((5, 1), "hot"), ((9, 8), "rows")),
    "many": (((2_003, 16), "many"), ((40, 64), "rows")),
    "changing": (((9, 8), "rows, dense, none"), ((7, 3), "dense, int32, no rows")),
    "nan rows": (((9, 8), "rows, nan rows, rows"), ((11,), "dense")),
}  # fmt: skip
OF_ARRAYS = [
    name
    for name, plan in PLANS.items()
    if all({*kinds.split(", ")} <= {*DENSE} for _, kinds in plan)
]
EVERY_PLAN = [*PLANS]
OF_ROWS = [name for name in PLANS if name not in OF_ARRAYS]
NAMES = ("weight", "beta", "LayerNorm", "bias")  # some of them are exempt from decay, or of LARS


class Given(NamedTuple):
    """A plan, the dtypes of its parameters in turn, and that of gradients if they have another."""

    plan: str
    dtypes: Sequence[Any] = (F32,)
    of_gradients: Any = None

    def __str__(self) -> str:
        of = "" if self.of_gradients is None else f" of {self.of_gradients}"
        return f"{' '.join(map(str, self.dtypes))} {self.plan}{of}"

    def parameters(self) -> list[nn.Parameter]:
        return [
            nn.Parameter(normal(k, shape, self.dtypes[k % len(self.dtypes)]), f"{NAMES[k % 4]}{k}")
            for k, (shape, _) in enumerate(PLANS[self.plan])
        ]

    def gradients(self, params: Sequence[Any], step: int) -> list[Any]:
        found = []
        for k, ((shape, kinds), p) in enumerate(zip(PLANS[self.plan], params, strict=True)):
            of_steps = kinds.split(", ")
            make = {**DENSE, **SPARSE}[of_steps[step % len(of_steps)]]
            found.append(make((k, step), shape, self.of_gradients or p.dtype))
        return found


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
        found += [read_only, np.repeat(lines, 2, axis=0)[::2], lines[:2], value[None]]
        found += [lines.ravel()]
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
    elif isinstance(value, list | dict):
        if isinstance(value, list):
            found += [value[:1], [*value, value[0]], value[:1] * len(value), dict(enumerate(value))]
            found += [tuple(value), value[0]]
        else:
            found += [{n: x for n, x in value.items() if n != name} for name in value]
            found += [{**value, "nothing": 0.5}, [value]]
        for place, part in [*(enumerate(value) if isinstance(value, list) else value.items())]:
            for other in unusual(part):
                found.append(value.copy())
                found[-1][place] = other
    return found
