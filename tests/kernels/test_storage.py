"""Storage types: every 16-bit pattern, both ways; every combination; odd sizes and shapes."""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit
import reference
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rules import adam as rules
from fusestep.kernels.storage import BF16 as BF16_STORAGE
from fusestep.kernels.storage import F16, STORAGES, Storage, real_of
from fusestep.ops.runtime.step import DenseUpdate, Variables
from helpers import BF16, PAIRWISE, STORAGE_DTYPES, assert_same_bits, sampled
from roundings import Rounded, assert_rounded

SIXTEEN_BITS = pytest.mark.parametrize("storage", [F16, BF16_STORAGE], ids=lambda s: s.name)
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def load(storage: Storage, bits: np.ndarray) -> np.ndarray:
    """The compiled conversion to float32."""
    convert = storage.to_real

    @njit
    def loop(bits, out):
        for i in range(bits.size):
            out[i] = convert(bits[i])

    out = np.empty(bits.shape, np.float32)
    loop(bits, out)
    return out


def store(storage: Storage, values: np.ndarray) -> np.ndarray:
    """The compiled conversion from float32 or float64, as an array of the storage type."""
    convert = storage.from_wide if values.dtype == np.float64 else storage.from_real

    @njit
    def loop(values, out):
        for i in range(values.size):
            out[i] = convert(values[i])

    out = np.empty(values.shape, np.uint16)
    loop(values, out)
    return out.view(storage.dtype)


def narrowed(storage: Storage, values: np.ndarray) -> np.ndarray:
    """The conversion of NumPy or ml_dtypes."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(storage.dtype)


def is_nan(values: np.ndarray) -> np.ndarray:
    # ml_dtypes looks at a signalling NaN by converting it, which raises the flag.
    with np.errstate(invalid="ignore"):
        return np.isnan(values)


def assert_same_numbers(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, but any NaN for any NaN."""
    __tracebackhide__ = True
    nan = is_nan(expected)
    np.testing.assert_array_equal(is_nan(actual), nan)
    assert_same_bits(actual[~nan], expected[~nan])


@SIXTEEN_BITS
def test_every_pattern_is_loaded(storage: Storage) -> None:
    with np.errstate(invalid="ignore"):
        expected = PATTERNS.view(storage.dtype).astype(np.float32)
    assert np.isnan(expected).sum() > 200
    assert_same_numbers(load(storage, PATTERNS), expected)


@SIXTEEN_BITS
def test_every_pattern_survives_a_load_and_a_store(storage: Storage) -> None:
    stored = store(storage, load(storage, PATTERNS))
    assert_same_numbers(stored, PATTERNS.view(storage.dtype))
    nan = is_nan(stored)
    np.testing.assert_array_equal(np.signbit(stored[nan]), PATTERNS[nan] >= 1 << 15)


def finite_values(storage: Storage) -> np.ndarray:
    """All finite values in increasing order, as float64."""
    patterns = PATTERNS.view(storage.dtype)
    values = patterns[~is_nan(patterns)].astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@SIXTEEN_BITS
def test_ties_go_to_even(storage: Storage) -> None:
    """Halfway between any two neighbours, and one float32 step to each side of it."""
    values = finite_values(storage)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    below, above = (np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf))
    for numbers in (below, middle, above):
        assert_same_numbers(store(storage, numbers), narrowed(storage, numbers))
    # Where float32 can hold the halfway point, which is everywhere but below its own range:
    exact = middle.astype(np.float64) * 2 == values[:-1] + values[1:]
    assert exact.sum() > 60_000
    assert (store(storage, middle).view(np.uint16)[exact] & 1 == 0).all()


@SIXTEEN_BITS
def test_overflow(storage: Storage) -> None:
    """From halfway beyond the largest number on it is infinite."""
    largest = float(ml_dtypes.finfo(storage.dtype).max)
    ulp = largest - finite_values(storage)[-2]
    edge = np.float32(largest + ulp / 2)
    numbers = np.array([largest, np.nextafter(edge, np.float32(0)), edge, 3e38, np.inf], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    found = store(storage, numbers)
    assert_same_bits(found, narrowed(storage, numbers))
    assert np.isfinite(found[[0, 1, 5, 6]].astype(np.float32)).all()
    assert np.isinf(found[[2, 4, 7, 9]].astype(np.float32)).all()


@SIXTEEN_BITS
def test_random_float32_patterns_are_stored(storage: Storage) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 500_000, np.uint32)
    numbers = bits.view(np.float32)
    assert np.isnan(numbers).any()
    assert_same_numbers(store(storage, numbers), narrowed(storage, numbers))


@SIXTEEN_BITS
def test_every_float32_nan_stays_a_nan(storage: Storage) -> None:
    # A payload in the low bits alone would become an infinity if it were cut off.
    bits = np.uint32(0x7F800000) | np.concatenate([1 << np.arange(23), [0x7FFFFF, 0xFFFF]])
    bits = np.concatenate([bits, bits | 0x80000000]).astype(np.uint32)
    assert np.isnan(store(storage, bits.view(np.float32)).astype(np.float32)).all()


@SIXTEEN_BITS
def test_float64_is_rounded_once(storage: Storage) -> None:
    """A hair beyond halfway is no tie, though float32 does not see the hair."""
    values = finite_values(storage)
    values = values[values > 1e-3]
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    hair = middle * 2.0**-45
    for sign in (1.0, -1.0):
        assert_same_numbers(store(storage, sign * (middle + hair)), narrowed(storage, sign * high))
        assert_same_numbers(store(storage, sign * (middle - hair)), narrowed(storage, sign * low))


@SIXTEEN_BITS
def test_float64_beyond_float32(storage: Storage) -> None:
    smallest = float(ml_dtypes.finfo(storage.dtype).smallest_subnormal)
    numbers = np.array(
        [1e300, 1e39, np.inf, np.nan, 1e-300, 1e-46, 0.0, smallest / 2, 0.6 * smallest]
    )
    expected = np.array([np.inf, np.inf, np.inf, np.nan, 0, 0, 0, 0, smallest])
    for sign in (1.0, -1.0):
        assert_same_numbers(store(storage, sign * numbers), narrowed(storage, sign * expected))


SHAPES = [
    (), (0,), (1,), (7,), (1003,), (0, 3), (7, 1), (17, 59), (1003, 1), (1, 1003),
    (3, 5, 7), (1, 1, 1), (2, 3, 4, 5), (5, 1, 0, 2), (1, 1003, 1, 1),
]  # fmt: skip
HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
POWERS = {"beta1_power": 0.9, "beta2_power": 0.99}
COMBINATIONS = sampled(product(STORAGE_DTYPES, repeat=3), PAIRWISE)
PADDING = 32


class Guarded:
    """An array inside of a larger one, whose rest must not change."""

    def __init__(self, values: np.ndarray) -> None:
        self.whole = np.full(values.size + 2 * PADDING, 7, values.dtype)
        self.array = self.whole[PADDING : PADDING + values.size].reshape(values.shape)
        self.array[...] = values

    def check(self) -> None:
        outside = np.concatenate([self.whole[:PADDING], self.whole[-PADDING:]])
        assert (outside == outside.dtype.type(7)).all()


def adam_scalars(real: Any) -> tuple[Any, ...]:
    """The library's."""
    lr, *constants = HYPER.values()
    return rules.adam_scalars(real, lr, 0.0, 1, tuple(constants), (*map(real, POWERS.values()),))


def step(
    tensors: list[tuple[np.ndarray, ...]], gradients: list[np.ndarray], hp: tuple[Any, ...]
) -> None:
    """One compiled Adam step on any number of tensors, in one call."""
    variables = Variables.of(tensors)
    update = DenseUpdate(
        rules.ADAM, (), variables, np.array([g.ctypes.data for g in gradients]),
        STORAGES[gradients[0].dtype], np.array([hp], variables.real.dtype),
        np.zeros(len(tensors), np.int64))  # fmt: skip
    commit([update.prepared()])


def random_tensors(
    w: np.dtype, g: np.dtype, s: np.dtype
) -> tuple[list[tuple[Guarded, ...]], list[Guarded]]:
    """Parameter and moments of every shape, and gradients."""
    rng = np.random.default_rng(4)
    tensors, gradients = [], []
    for shape in SHAPES:
        numbers = rng.uniform(0.1, 2.0, (4, *shape)) * rng.choice([-1, 1], (4, *shape))
        parameter, m = numbers[0].astype(w), numbers[1].astype(s)
        v, gradient = (numbers[2] ** 2).astype(s), numbers[3].astype(g)
        tensors.append(tuple(Guarded(np.asarray(a)) for a in (parameter, m, v)))
        gradients.append(Guarded(np.asarray(gradient)))
    return tensors, gradients


@pytest.mark.parametrize(("w", "g", "s"), COMBINATIONS, ids=str)
def test_dense_step_of_storage_combinations(w: np.dtype, g: np.dtype, s: np.dtype) -> None:
    """All shapes in one call: each element as the reference has it, nothing beyond the ends."""
    tensors, gradients = random_tensors(w, g, s)
    before = [[a.array.copy() for a in tensor] for tensor in tensors]
    real = real_of(STORAGES[w]).dtype.type
    hp = adam_scalars(real)
    step([tuple(a.array for a in t) for t in tensors], [g.array for g in gradients], hp)
    expected_hp = reference.adam_scalars(**HYPER, **POWERS, real=real)
    for shape, tensor, gradient, old in zip(SHAPES, tensors, gradients, before, strict=True):
        parameter, *moments = map(Rounded, old)
        exact = reference.adam(parameter, Rounded(gradient.array), *moments, expected_hp)
        for role, guarded, value in zip("wmv", tensor, exact, strict=True):
            guarded.check()
            if guarded.array.size:
                assert_rounded(guarded.array, value, real, 2.0, f"{role} of shape {shape} ")
        gradient.check()
        if shape == (1003,):
            assert all((a.array != b).any() for a, b in zip(tensor, old, strict=True))


def test_bfloat16_is_what_ml_dtypes_calls_so() -> None:
    assert STORAGES[BF16] is BF16_STORAGE
    assert set(STORAGES) == set(STORAGE_DTYPES)
