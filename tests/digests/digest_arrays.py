"""The arrays, gradients and wrong arguments of the cases of `digests.py`."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from fusestep import nn

Shape = tuple[int, ...]
Cases = Iterator[tuple[str, Callable[[Any], object]]]

DTYPES: dict[str, Any] = {
    **{name: np.dtype(name) for name in ("float32", "float64", "float16")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
F32 = DTYPES["float32"]
REQUIRED = inspect.Parameter.empty
SIZES: tuple[Shape, ...] = ((), (0,), (1,), (7,), (1003,), (3, 5), (0, 4), (2, 3, 4, 1))
WIDTHS = (1, 3, 8, 16, 64, 100)
LARGE = (203, 199)  # several threads work on it
# Shape of a table, number of indices, and the share of them that is one row.
ROWS: tuple[tuple[Shape, int, float], ...] = (
    *(((9, 8), 0, 0.0), ((0, 4), 0, 0.0), ((20, 3, 4), 50, 0.0), ((50,), 2_000, 0.9)),
    *(((60, 8), 3_000, 0.6), ((5, 1), 700, 0.95), ((2_003, 16), 20_000, 0.3)),
)
# What each argument is given in turn; most of it is refused.
BAD = (None, "no", -1.0, 0.0, 2, True, math.nan, math.inf, 1e-60, 1e60, [], (0.5,), {}, object)


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


def arguments_of(function: Any) -> dict[str, Any]:
    """Names and defaults of the arguments that have a name."""
    parameters = inspect.signature(function).parameters.values()
    nameless = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p.default for p in parameters if p.kind not in nameless}


# Options


def moved(name: str, default: Any, table: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Values for an argument, other than its default: those of the table, or near the default.

    An argument that is not in the table though it should be gets a value that no one takes.
    """
    if name in table:
        return table[name]
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int):
        return (default + 1,)
    if isinstance(default, float):
        return (default * 0.75 or 0.1,)
    if isinstance(default, tuple):
        return (tuple(moved(name, part, {})[0] for part in default),)
    return (object(),)


def turns(
    of: str,
    known: Mapping[str, Any],
    table: Mapping[str, tuple[Any, ...]],
    beside: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Each argument with each of its values, and what it needs beside it."""
    found = []
    for name, default in known.items():
        own = f"{of}.{name}"
        values = moved(own if own in table else name, default, table)
        found += [{**beside.get(own, {}), name: value} for value in values]
    return found


def labelled(options: Mapping[str, Any]) -> str:
    """Options as they stand in the name of a case."""
    plain = (type(None), bool, int, float, str, tuple, dict, np.dtype)
    shown = {
        name: value
        if isinstance(value, plain)
        else getattr(value, "__name__", type(value).__name__)
        for name, value in options.items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())


# What is refused


def unusual(value: Any) -> list[Any]:
    """What comes in the place of an argument: other kinds, dtypes, shapes and places."""
    if isinstance(value, float):
        arrays = (np.array(value), np.array([value]), np.array([value] * 2))
        return [*BAD, np.float32(value), *arrays, -value, 1.5, [value]]
    if not isinstance(value, np.ndarray):
        return [*BAD]
    read_only = value.copy()
    read_only.flags.writeable = False
    return [
        *(*BAD, read_only, np.repeat(value, 2, axis=0)[::2], value[:2], value[None], value.ravel()),
        *(value.astype(t) for t in (np.int8, np.int32, np.complex64, *DTYPES.values())),
        *(nn.Parameter(value.astype(F32)), np.ma.masked_array(value), value.tolist()),
        *(value - 1, value + 1, value * 2**20),
    ]


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
        record.add([x for x in given.values() if isinstance(x, np.ndarray)])


def refusals(
    label: str,
    function: Callable[..., Any],
    usual: Callable[[], dict[str, Any]] = dict,
    names: Sequence[str] = (),
) -> Cases:
    """A case for each argument, and one for an argument that there is not."""
    for name in names or (*arguments_of(function), "learning_rat"):
        yield f"{label} bad {name}", partial(faults, function=function, usual=usual, name=name)


# What optimizers are run on

Kind = Callable[[Any, Shape, Any], Any]
DENSE: dict[str, Kind] = {
    "dense": normal,
    "strided": strided,
    "none": lambda *_: None,
    "nan": lambda seed, shape, dtype: normal(seed, shape, dtype) * np.array(np.nan, dtype),
}
SPARSE: dict[str, Kind] = {
    "rows": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype),
    "int32": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype, np.int32),
    "no rows": lambda seed, shape, dtype: rows(seed, shape, 0, dtype),
    "hot": lambda seed, shape, dtype: rows(seed, shape, 3_000, dtype, hot=0.6),
    "many": lambda seed, shape, dtype: rows(seed, shape, 20_000, dtype, hot=0.3),
    "parts": lambda seed, shape, dtype: [rows((seed, n), shape, n, dtype) for n in (5, 0, 9)],
    "nan rows": lambda _, shape, dtype: nn.RowTensor(
        np.arange(2), np.full((2, *shape[1:]), np.nan, dtype), shape
    ),
}
# The parameters of a run: the shape of each, and the kinds of its gradients from step to step.
PLANS: dict[str, tuple[tuple[Shape, str], ...]] = {
    "dense": (((9, 8), "dense"), ((11,), "dense")),
    "sizes": tuple((shape, "dense") for shape in SIZES),
    "large": ((LARGE, "dense"), ((40_003,), "dense")),
    "strided": (((5, 7), "strided"), ((11,), "strided, dense")),
    "sometimes": (((9, 8), "dense, none"), ((11,), "none, none, dense")),
    "nan": (((9, 8), "dense"), ((11,), "dense, nan, dense")),
    "mixed": (
        *(((9, 8), "rows"), ((5, 7), "dense"), ((11,), "dense"), ((4, 3), "none")),
        *(((6, 16), "parts"), ((5, 1), "no rows"), ((50,), "int32"), ((20, 3, 4), "rows")),
    ),
    "widths": tuple(((40, width), "rows") for width in WIDTHS),
    "hot": (((60, 8), "hot"), ((5, 1), "hot"), ((9, 8), "rows")),
    "many": (((2_003, 16), "many"), ((40, 64), "rows")),
    "changing": (((9, 8), "rows, dense, none"), ((7, 3), "dense, int32, no rows")),
    "nan rows": (((9, 8), "rows, nan rows, rows"), ((11,), "dense")),
}
NAMES = ("weight", "beta", "LayerNorm", "bias")  # some of them are exempt from decay, or of LARS


def plans(takes_rows: bool) -> list[str]:
    """Those of what takes row-sparse gradients or does not."""
    kinds = {*DENSE, *(SPARSE if takes_rows else ())}
    return [name for name, plan in PLANS.items() if all({*k.split(", ")} <= kinds for _, k in plan)]


def parameters(plan: str, dtypes: Sequence[Any] = (F32,)) -> list[nn.Parameter]:
    return [
        nn.Parameter(normal(k, shape, dtypes[k % len(dtypes)]), f"{NAMES[k % 4]}{k}")
        for k, (shape, _) in enumerate(PLANS[plan])
    ]


def gradients(plan: str, params: Sequence[Any], step: int, dtype: Any = None) -> list[Any]:
    found = []
    for k, ((shape, kinds), p) in enumerate(zip(PLANS[plan], params, strict=True)):
        of_steps = kinds.split(", ")
        make = {**DENSE, **SPARSE}[of_steps[step % len(of_steps)]]
        found.append(make((k, step), shape, dtype or p.dtype))
    return found
