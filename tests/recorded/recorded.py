"""Cases recorded from the original systems, and how closely the library must meet them.

The files and their format are described in ``data/README.md``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

DATA = Path(__file__).with_name("data")

# Of the larger of |expected| and FLOOR * max|expected|: an element that cancelled to almost
# nothing is held to the rounding errors of its neighbours, not to those of its own value.
RELATIVE_TOLERANCE = {np.dtype(np.float32): 3e-6, np.dtype(np.float16): 2e-3}
FLOOR = 1e-3

# A dense gradient, or (indices, values) in the order of lookup, with duplicates.
Gradient = np.ndarray | tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Step:
    """One recorded call: what went in besides the variables, and what they held after it."""

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One recorded run, called "<file>/<case>": `initial` arrays, then one `Step` a call."""

    name: str
    meta: dict[str, Any]
    initial: dict[str, np.ndarray]
    steps: tuple[Step, ...]

    @property
    def api(self) -> str:
        """The recorded callable, such as ``ops.Adam``."""
        return self.meta["api"]

    @property
    def hyper(self) -> dict[str, Any]:
        """Constructor and scalar arguments, as recorded."""
        return self.meta["hyper"]

    @property
    def dtype(self) -> np.dtype:
        """Storage type of the parameters."""
        return np.dtype(self.meta["dtype"])


@dataclass(frozen=True)
class Trace:
    """What happened to one parameter. Step t = 1, 2, ... made ``weights[t]`` and, of each of the
    states, ``states[...][t - 1]``."""

    weights: np.ndarray
    gradients: tuple[Gradient, ...]
    states: dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """One recorded optimizer with its parameters."""

    name: str
    meta: dict[str, Any]
    traces: tuple[Trace, ...]

    @property
    def hyper(self) -> dict[str, Any]:
        """Arguments of the constructor that were not left at their defaults."""
        return self.meta["hyper"]

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return self.meta["T"]


def runs(folder: str, kind: type[Run], trace: Callable[..., Trace]) -> dict[str, Any]:
    """Every recorded run of a folder, by the name of its file; ``trace(arrays, i, meta)`` reads
    parameter `i` of a file."""
    found = {}
    for path in sorted((DATA / folder).glob("*.npz")):
        arrays, meta = _read(path)
        traces = tuple(trace(arrays, i, meta) for i in range(len(meta["shapes"])))
        found[path.stem] = kind(path.stem, meta, traces)
    return found


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file, which tests share, so they are read-only; and its ``meta``."""
    with np.load(path) as archive:
        arrays = dict(archive)
    meta = json.loads(str(arrays.pop("meta")))
    for array in arrays.values():
        array.setflags(write=False)
    return arrays, meta


def files(pattern: str) -> list[str]:
    """Names, without suffix, of the recorded files that match, in alphabetical order."""
    return sorted(path.stem for path in DATA.glob(f"{pattern}.npz"))


def all_cases(pattern: str) -> dict[str, Case]:
    """Every case of the files that match, by name."""
    return {case.name: case for file in files(pattern) for case in cases(file)}


def cases(file: str) -> list[Case]:
    """Every case of a recorded file, in the order of recording."""
    arrays, meta = _read(DATA / f"{file}.npz")
    found = {
        name: Case(f"{file}/{name}", own, {}, tuple(Step() for _ in range(own["steps"])))
        for name, own in meta["cases"].items()
    }
    for key, array in arrays.items():
        name, *where, entry = key.split("/")
        _place(found[name], where)[entry] = array
    return list(found.values())


def _place(case: Case, where: list[str]) -> dict[str, np.ndarray]:
    """The dictionary of `case` that the path ``in``, ``t<k>/in`` or ``t<k>/out`` means."""
    match where:
        case ["in"]:
            return case.initial
        case [step, "in"]:
            return _step(case, step).inputs
        case [step, "out"]:
            return _step(case, step).outputs
    raise ValueError(f"{case.name}: unknown entry {'/'.join(where)}")


def _step(case: Case, label: str) -> Step:
    """The step that is called ``t1``, ``t2``, ... in a file."""
    return case.steps[int(label.removeprefix("t")) - 1]


def assert_close_recorded(
    actual: ArrayLike, expected: ArrayLike, dtype: DTypeLike, label: str = "array",
    reached: ArrayLike = 0.0,
) -> None:  # fmt: skip
    """Compare every element: relative 3e-6 for float32, 2e-3 for float16.

    `actual` must be stored as `dtype` and have the shape of `expected`; NaN and infinities must
    be where they are expected; integers must be equal. `reached`, the largest magnitude that
    each element has had before, allows two units in its last place: a weight that went from
    0.4 to 0.002 still holds the rounding of 0.4.
    """
    __tracebackhide__ = True
    actual, expected = np.asarray(actual), np.asarray(expected)
    dtype = np.dtype(dtype)
    if actual.dtype != dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{label}: expected {dtype} {expected.shape}, got {actual.dtype} {actual.shape}"
        )
    if actual.size == 0:
        return
    error = _error(actual, expected)
    allowed = _allowed(expected, dtype, np.asarray(reached))
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    if error[worst] > allowed[worst]:
        raise AssertionError(
            f"{label}: {np.count_nonzero(error > allowed)} of {error.size} elements are off, "
            f"worst {tuple(map(int, worst))}: expected {expected[worst]!r}, "
            f"got {actual[worst]!r}, off by {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
        )


def _error(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Absolute differences; 0 between equal infinities or two NaN, inf where only one is."""
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    comparable = np.isfinite(actual) & np.isfinite(expected)
    error = np.where(same, 0.0, np.inf)
    error[comparable] = np.abs(
        actual[comparable].astype(np.float64) - expected[comparable].astype(np.float64)
    )
    return error


def _allowed(expected: np.ndarray, dtype: np.dtype, reached: np.ndarray) -> np.ndarray:
    """The largest absolute error of every element."""
    if dtype.kind in "iub":
        return np.zeros(expected.shape)
    size = np.abs(np.where(np.isfinite(expected), expected, 0.0).astype(np.float64))
    relative = RELATIVE_TOLERANCE[dtype] * np.maximum(size, FLOOR * size.max())
    return np.maximum(relative, 2.0 * np.finfo(dtype).eps * np.abs(reached))
