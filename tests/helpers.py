"""What several test files share: operators as tables, unchanged buffers, distances in ulps."""

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fusestep import nn, ops

BF16 = np.dtype(ml_dtypes.bfloat16)
STORAGE_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BF16)
_EACH = range(len(STORAGE_DTYPES))
PAIRWISE = [
    tuple(STORAGE_DTYPES[i] for i in (w, g, (w + g) % len(STORAGE_DTYPES)))
    for w, g in product(_EACH, repeat=2)
]
"""Storage of parameter, gradient and states: any two of them in all combinations."""
# ulps are of the storage type; ml_dtypes has its own finfo.
EPSILON = {dtype: float(ml_dtypes.finfo(dtype).eps) for dtype in STORAGE_DTYPES}
TINY = {dtype: float(ml_dtypes.finfo(dtype).smallest_subnormal) for dtype in STORAGE_DTYPES}


def arrays_of(values: Any) -> list[np.ndarray]:
    """Every array in nested dicts, lists, RowTensors, Parameters and optimizers."""
    if isinstance(values, np.ndarray):
        return [values]
    if isinstance(values, nn.Parameter):
        return [values.data]
    if isinstance(values, ops.RowTensor):
        return [values.indices, values.values]
    if isinstance(values, nn.Optimizer):
        return [p.data for p in values.parameters] + list(values.state_arrays().values())
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [array for value in values for array in arrays_of(value)]
    return []


def more(*values: Any, **options: Any) -> Any:
    """Parameters of a test that goes on where a sample ends: ``pytest -m exhaustive tests``."""
    return pytest.param(*values, marks=pytest.mark.exhaustive, **options)


def sampled(every: Iterable[tuple[Any, ...]], sample: Collection[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: a sample always, the others as `more`."""
    return [*sample, *(more(*one) for one in every if one not in sample)]


def in_turn(cases: Iterable[Any], *, beside_float32: bool = True) -> list[tuple[Any, np.dtype]]:
    """Each case in float32 and, in turn, in one other type: each is a kernel of its own. Without
    ``beside_float32`` each case has one type, which is any of them."""
    first, *others = STORAGE_DTYPES
    if not beside_float32:
        return [(case, STORAGE_DTYPES[k % len(STORAGE_DTYPES)]) for k, case in enumerate(cases)]
    chosen = ((case, (first, others[k % len(others)])) for k, case in enumerate(cases))
    return [(case, dtype) for case, dtypes in chosen for dtype in dtypes]


def typed(cases: Collection[Any]) -> list[Any]:
    """Parameters of a test: each case in the types that it has `in_turn`, in others as `more`."""
    return sampled(product(cases, STORAGE_DTYPES), in_turn(cases))


def label(value: Any) -> str:
    """The name of a parameter of a test."""
    return str(getattr(value, "name", value))


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """Every byte of every array in `values` is the same afterwards."""
    __tracebackhide__ = True
    arrays = arrays_of(values)
    before = [array.tobytes() for array in arrays]
    yield
    changed = [
        k for k, (a, old) in enumerate(zip(arrays, before, strict=True)) if a.tobytes() != old
    ]
    assert not changed, f"arrays {changed} of {len(arrays)} changed"


@contextmanager
def refused(error: type[BaseException], match: str, *values: Any) -> Iterator[None]:
    """The block raises `error` with a text that matches, and no array in `values` changes."""
    __tracebackhide__ = True
    with unchanged(*values), pytest.raises(error, match=match):
        yield


def at_once(calls: Collection[Callable[[], Any]]) -> None:
    """Make the calls at once, each on a thread of its own; what one raises is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def meanwhile(act: Callable[[int], Any], *passed: type[BaseException]) -> Iterator[None]:
    """Another thread calls ``act(1)``, ``act(2)``, ... until the block ends; errors of the classes
    in ``passed`` do not stop it."""
    is_over = threading.Event()

    def work() -> None:
        k = 0
        while not is_over.is_set():
            k += 1
            with suppress(*passed):
                act(k)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def assign(array: np.ndarray, **attributes: Any) -> None:
    """Set `shape` or `dtype` of an array, which NumPy advises against, and programs do."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for name, value in attributes.items():
            setattr(array, name, value)


def assert_same_bits(actual: Any, expected: Any, label: str = "") -> None:
    """Equal dtypes, shapes and bytes: a NaN equals itself, 0.0 and -0.0 differ."""
    __tracebackhide__ = True
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, label
    assert actual.shape == expected.shape, label
    if actual.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(actual, expected, err_msg=label)
        raise AssertionError(f"{label}: equal values, different bits")


def assert_same_arrays(found: Any, expected: Any, label: str = "") -> None:
    """Two collections as `arrays_of` takes them have the same arrays, to the last bit."""
    __tracebackhide__ = True
    arrays, others = arrays_of([found]), arrays_of([expected])
    assert arrays, label
    for k, (a, b) in enumerate(zip(arrays, others, strict=True)):
        assert_same_bits(a, b, f"{label}, array {k}")


def assert_within_ulps(actual: np.ndarray, expected: Any, scale: Any, ulps: float) -> None:
    """`|actual - expected|` is at most `ulps` units in the last place of `scale`. Units are those
    of the dtype of `actual`. `scale` is the largest term that the expected value is a sum of: what
    cancels leaves the rounding of the terms behind, not that of the difference. Below the normal
    range the unit is the smallest subnormal."""
    __tracebackhide__ = True
    largest = np.maximum(np.abs(np.asarray(scale, np.float64)), TINY[actual.dtype])
    unit = EPSILON[actual.dtype] * np.exp2(np.floor(np.log2(largest)))
    allowed = ulps * np.maximum(unit, TINY[actual.dtype])
    error = np.abs(actual.astype(np.float64) - np.asarray(expected, np.float64))
    off = ~(error <= allowed)
    if off.any():
        where = np.unravel_index(np.argmax(np.where(off, error / allowed, 0)), error.shape)
        raise AssertionError(
            f"{off.sum()} of {off.size} off, worst at {tuple(map(int, where))}: "
            f"{actual[where]!r} for {np.asarray(expected)[where]!r}, "
            f"{error[where] / np.broadcast_to(allowed, error.shape)[where] * ulps:.3g} ulps"
        )


FAR = 1e-3
"""What moves a result by more than this acts: the tolerance of a comparison is 3e-6."""


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value of its array in `b` if it is not 0."""
    wide = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b, strict=True)]
    return max(float(np.max(np.abs(x - y)) / (np.max(np.abs(y)) or 1.0)) for x, y in wide)
