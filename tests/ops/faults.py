"""What the arguments of operators refuse, by what they are documented to take."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from fusestep import ConversionError
from helpers import BF16


class Fault(NamedTuple):
    """What is put in the place of an argument.

    Attributes:
        make: of what usually stands there.
        error: each class of which the error must be one.
        text: of the error, a pattern, behind the name of the argument.
    """

    make: Callable[[Any], Any]
    error: type[BaseException] | tuple[type[BaseException], ...]
    text: str


def values(values: Iterable[Any], error: Any, text: str) -> list[Fault]:
    """Values that are refused alike; in the text stand their type and number as they are."""
    return [
        Fault(lambda _, x=x: x, error, text.format(type=type(x).__name__, value=x)) for x in values
    ]


def _dtypes(dtypes: Iterable[Any], error: Any, text: str) -> list[Fault]:
    return [
        Fault(lambda a, d=d: a.astype(d), error, text.format(dtype=np.dtype(d))) for d in dtypes
    ]


# Arrays


def frozen(array: np.ndarray) -> np.ndarray:
    """Read-only."""
    array.flags.writeable = False
    return array


def strided(array: np.ndarray) -> np.ndarray:
    """The same values in every other column of a wider array."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def misaligned(array: np.ndarray) -> np.ndarray:
    """The same values one byte off their natural alignment."""
    found = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


class Copies:
    """An object that hands out a new array each time: an update of it would be lost."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array.copy()


class OnDevice:
    """What a CUDA array looks like from outside."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (0, False), "version": 3,
        }  # fmt: skip


_FLOATS = "(float32, float64, float16, bfloat16|a floating dtype)"
_FLOATING = f"has a wrong dtype: expected {_FLOATS}, got {{dtype}}$"
NO_ARRAY = "is no array: expected an array, got {type}$"
ARRAY = [
    *_dtypes(
        (np.int32, np.int64, np.uint8, np.complex64, bool, object, ">f4"), TypeError, _FLOATING),
    *values((None, "var", [1.0, 2.0], [[1.0]], object(), 0.5), TypeError, NO_ARRAY),
    Fault(lambda a: np.ma.masked_array(a, mask=True), TypeError, "is masked"),
]  # fmt: skip
VARIABLE = [
    *ARRAY, Fault(frozen, ValueError, "is read-only: expected a writable array"),
    Fault(strided, ValueError, "is not contiguous: expected a C-contiguous array"),
    Fault(np.asfortranarray, ValueError, "is not contiguous: expected a C-contiguous array"),
    Fault(misaligned, ValueError, "is not aligned: expected aligned elements"),
    Fault(Copies, TypeError, "cannot be updated in place"),
    Fault(OnDevice, RuntimeError, "lives on a CUDA device: .*; (for arrays|copy it)"),
]  # fmt: skip
# Beside another variable, of shape (5, 3).
SECOND_VARIABLE = [
    *VARIABLE,
    *_dtypes(
        (np.float64, np.float16, BF16), ConversionError, "differs in dtype from .*, got {dtype};"),
    *(
        Fault(lambda a, s=s: np.ones(s, a.dtype), ValueError, "differs in shape from .*5, 3., got ")
        for s in ((5, 4), (4, 3), (15,), (5, 3, 1), ())),
]  # fmt: skip
# The sources name TypeError and RuntimeError: both must catch it.
_HIGHER = (ConversionError, TypeError, RuntimeError)
GRADIENT = [
    *ARRAY,
    *_dtypes((np.float64,), _HIGHER, "has a higher dtype than the variable: .*, got {dtype}"),
    *(
        Fault(lambda a, s=s: np.ones(s, a.dtype), ValueError, "has a wrong (shape|length): expect")
        for s in ((), (3,), (5, 4), (4, 4), (15,), (5, 3, 1), (0, 3))),
]  # fmt: skip
INDICES = [
    *_dtypes(
        (np.float32, np.float64, np.int16, np.uint32, np.uint64, bool, ">i4"), TypeError,
        "has a wrong dtype: expected int32 or int64, got {dtype}$"),
    *values(([1, 0, 1, 3], None, 1, "1"), TypeError, NO_ARRAY),
    *values(
        (np.zeros((), int), np.zeros((4, 1), int), np.zeros((2, 2), int)), ValueError,
        "has a wrong shape: expected 1 dimension"),
]  # fmt: skip

# Numbers

_NOT_FINITE = (np.nan, np.inf, -np.inf, np.float32(np.nan))
_NUMBER = [
    # "expected an array" would send the user the wrong way: a number is what is asked for.
    *values(
        (None, "0.1", b"0.1", True, np.bool_(True), 1j, [0.1], (0.1,), object()), TypeError,
        "has a wrong d?type: expected a (real )?number, got "),
    *values(
        (np.array("0.1"), np.array(1j)), TypeError, "has a wrong dtype: expected a real number, got"
    ),
    *values((*_NOT_FINITE, np.array([np.inf])), ValueError, "is not finite: expected a finite n"),
    *values(
        [np.full(shape, 0.5) for shape in ((0,), (2,), (1, 1))], ValueError,
        r"has a wrong shape: expected a scalar, \(\) or \(1,\), got "),
    # Infinite in the arithmetic, like the infinity that is refused.
    *values((1e39, 10**400), ValueError, "is too large: expected a float32 number, got "),
]  # fmt: skip
_FLOAT = [
    *values(
        (1, 0, np.int64(1), True, None, "0.1", [0.1], np.array(0.1)), TypeError,
        "has a wrong type: expected a float, got {type}$"),
    *values(_NOT_FINITE, ValueError, "is not finite"),
]  # fmt: skip
_OUT = "is out of range: expected "
_RANGES: dict[str, list[Fault]] = {
    "number": [],
    "not negative": values((-1e-6, -0.5, -1.0), ValueError, _OUT + "at least 0, got {value}$"),
    "positive": values((0.0, -1.0), ValueError, _OUT + "above 0, got {value}$"),
    "not positive": values((0.5, 1e-9), ValueError, _OUT + "finite and at most 0, got {value}$"),
    "closed unit": values((1.1, -0.1), ValueError, _OUT + "between 0 and 1, got {value}$"),
    "at most 1": values((1.5,), ValueError, _OUT + "at most 1, got {value}$"),
    "reciprocal": values(
        (0.0, -0.1, 1e-39, 1e-50), ValueError,
        _OUT + "positive, it and its reciprocal within float32, got {value}$"),
    # 1 - 1e-9 is 1 in float32, where the division takes place.
    "not 1": values(
        (1.0, 1, np.float32(1), 1 - 1e-9), (ValueError, RuntimeError),
        "makes the step infinite: expected not 1"),
    # Where moments are 0 it would be 0/0.
    "epsilon": values(
        (1e-46, np.float64(7e-46), -1e-46), ValueError,
        "is 0 in float32: expected at least 1e-45, or 0 itself, got {value}$"),
}  # fmt: skip
_RANGES["epsilon of MXNet"] = [*_RANGES["not negative"], *_RANGES["epsilon"][:2]]
FAULTS: dict[str, list[Fault]] = {
    "array": ARRAY,
    "variable": VARIABLE,
    "second variable": SECOND_VARIABLE,
    "gradient": GRADIENT,
    "indices": INDICES,
    **{takes: [*_NUMBER, *faults] for takes, faults in _RANGES.items()},
    **{f"{takes} float": [*_FLOAT, *faults] for takes, faults in _RANGES.items()},
    "flag": values(
        (1, 0, None, "True", np.bool_(True)),
        TypeError,
        "has a wrong type: expected a bool, got {type}$"),
    "out of range": values(
        ("ignore", None, True, "DROP"), ValueError, "is unknown: expected 'raise' or 'drop', got "),
    "version": values(("1.8", None, 2.0), ValueError, "is unknown: expected '2.0' or '1.9', got "),
}  # fmt: skip
# What is taken at the edges of ranges; of either kind of float.
TAKEN: dict[str, tuple[Any, ...]] = {
    "number": (0.0, -0.5, 0, np.float32(0.5)), "not negative": (0, 0.0, -0.0),
    "closed unit": (0, 1.0), "at most 1": (1.0, 0.0, -0.5), "reciprocal": (np.float32(3e-39), 1),
    "not positive": (0, -0.0), "epsilon": (0.0, 1e-45, -0.5), "epsilon of MXNet": (0, 1e-45),
    "not 1": (2.0, 0.0), "not negative float": (0.0, np.float64(0.0)),
    "reciprocal float": (np.float32(3e-39),), "not positive float": (0.0,), "flag": (False, True),
    "out of range": ("drop", "raise"), "version": ("2.0", "1.9"),
}  # fmt: skip
