"""Kinds of arguments: what each takes and refuses, whatever the registry or the code says of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fusestep import nn
from helpers import BF16


@dataclass(frozen=True)
class Kind:
    """Values of an argument: ``TypeError``, ``ValueError`` and accepted ones."""

    wrong_kinds: tuple[Any, ...] = ()
    wrong_values: tuple[Any, ...] = ()
    taken: tuple[Any, ...] = ()
    expected: str = "a float"  # what the error of a wrong kind asks for

    def refused(self, name: str) -> Iterator[tuple[Any, type[Exception], str]]:
        """What is refused for the argument of this name, with error and regular expression."""
        item = rf"{name}(\[[01]\])?"
        for value in self.wrong_kinds:
            yield value, TypeError, rf"{item} has a wrong d?type: expected {self.expected}"
        for value in self.wrong_values:
            yield value, ValueError, rf"{item} (is|has a wrong) [a-z ]+: expected .*, got "


def schedule(step: int) -> float:
    return 0.1 / (1 + step)


NOT_FINITE = (np.nan, np.inf)
NO_FLOATS = (1, 0, True, "0.5", None, np.array(0.5), np.int64(1), [0.5])
NO_NUMBERS = ("0.5", None, np.array(0.5), [0.5])
RATE = "a float, an int, an array, an iterable of floats or a schedule"
NO_RATES = ("0.1", b"0.1", 1j, np.int64(1), np.array(1j), [[0.1]], ["a"], {"lr": 0.1}, object())
BAD_RATES = (
    -0.1, -1, np.array(-0.1), *NOT_FINITE, 1e39, [], [0.1, -0.1], [0.1, np.nan], np.zeros(0),
    np.ones((2, 2)))  # fmt: skip
KINDS = {
    "rate": Kind(
        (*NO_RATES, None), BAD_RATES, (0.5, 2, np.float32(0.5), [0.5, 0.1], schedule), RATE),
    "fixed rate": Kind(
        (1, True, "0.1", None, np.array(0.1), nn.Parameter(np.array(0.1)), [0.1], schedule),
        (0.0, -0.1, *NOT_FINITE, 1e-50, 1e39), (0.5, np.float32(0.5)), "a fixed float"),
    "rate or none": Kind(NO_RATES, (None, *BAD_RATES), (0.5, 2, [0.5, 0.1], schedule), RATE),
    "damping": Kind(
        ("0.1", None, True, {}), (0.0, -0.1, np.nan, [0.1, -0.1], [[0.1]], []), (0.5, schedule),
        "a float, an array, an iterable of floats or a schedule"),
    "decay": Kind(NO_NUMBERS, (-0.1, *NOT_FINITE, 1e39), (0.5, 0, 1, np.float32(0.5), schedule)),
    "float decay": Kind(
        (*NO_NUMBERS, 0, 1, True), (-0.1, *NOT_FINITE), (0.5, np.float32(0.5), schedule)),
    "fixed decay": Kind((*NO_NUMBERS, schedule), (-0.1, *NOT_FINITE), (0.5, 1, np.float32(0.5))),
    "unit decay": Kind(
        NO_NUMBERS, (-0.1, 1.0, 1, *NOT_FINITE, np.float32(1.5)), (0.5, 0, schedule)),
    "loss scale": Kind(
        NO_NUMBERS, (0, 0.0, -1.0, *NOT_FINITE), (0.5, 2, np.float32(8)), "a float or int"),
    "open unit": Kind(
        NO_FLOATS, (0.0, 1.0, -0.5, 1.5, *NOT_FINITE, 1 - 1e-9), (0.5, np.float32(0.5))),
    "open unit 64": Kind(NO_FLOATS, (0.0, 1.0, -0.5, 1.5, *NOT_FINITE), (0.5, np.float32(0.5))),
    "beta1": Kind((1, 0, True, "0.5", [0.5]), (-0.1, 1.0, 1.5, *NOT_FINITE), (None, 0.0, 0.5)),
    "below 1": Kind(NO_FLOATS, (-0.1, 1.0, 1.5, *NOT_FINITE), (0.0, 0.5, np.float32(0.5))),
    "positive or infinite": Kind(
        NO_FLOATS, (0.0, -1.0, np.nan, -np.inf, 1e-50), (0.5, np.float32(2), np.inf)),
    "false": Kind((1, 0, None, "yes"), (True,), (False,), "a bool"),
    "one": Kind((1.0, "1", None, True), (0, 2, -1), (1, np.int64(1)), "an int"),
    "two floats": Kind(
        (None, 0.5, "ab", (1, 0.5), (0.5, 0), (None, 0.5), {0.1, 0.2}, (0.5,), (0.5,) * 3, []),
        ((-1e-3, 0.5), (0.5, -1e-3), (np.nan, 0.5), (0.5, np.inf)),
        ((0.0, 0.5), [0.5, 0.0], (np.float32(1e-30), np.float64(1e-3))), "a (pair of floats|float)",
    ),
    "closed unit": Kind(NO_FLOATS, (-0.5, 1.5, *NOT_FINITE), (0.0, 1.0, np.float32(0.5))),
    "float": Kind(NO_FLOATS, (*NOT_FINITE, -np.inf), (0.0, -1.0, np.float32(0.5))),
    "factors": Kind(
        (None, 0.5, [0.5, 1.2], (0, 1.2), (0.5, 2)),
        ((0.5,), (0.5, 1.2, 2.0), (0.0, 1.2), (1.0, 1.2), (0.5, 1.0), (0.5, np.inf), (np.nan, 2.0)),
        ((0.5, 1.5), (np.float32(0.5), 8.0)), "a (tuple of two floats|float)"),
    "limits": Kind(
        (None, 0.5, [0.5, 1.2], (0.5, 2), (1, 2.0)),
        ((0.5,), (0.5,) * 3, (0.0, 1.0), (-0.1, 1.0), (2.0, 1.0), (0.1, np.inf), (np.nan, 2.0)),
        ((0.5, 0.5), (np.float32(1e-6), 8.0)), "a (tuple of two floats|float)"),
    "positive": Kind(NO_FLOATS, (0.0, -1e-8, *NOT_FINITE, 1e-50), (0.5, np.float32(0.5))),
    "positive 64": Kind(NO_FLOATS, (0.0, -1e-8, *NOT_FINITE), (0.5, 1e-50)),
    "count": Kind((2.0, True, "3", None), (0, -3), (3, np.int64(3)), "an int"),
    "at least 2": Kind((2.0, True, "3", None), (1, 0, -3), (3, np.int64(3)), "an int"),
    "not negative": Kind(NO_FLOATS, (-0.1, *NOT_FINITE), (0.0, 0.5, np.float32(0.5))),
    "not positive": Kind(NO_FLOATS, (0.1, *NOT_FINITE, -np.inf), (0.0, -1.0, np.float32(-0.3))),
    "number": Kind(NO_NUMBERS, (-0.1, -1, *NOT_FINITE), (0, 1, 0.5, np.float32(0.5))),
    "flag": Kind((1, 0, None, "yes", np.bool_(True)), (), (False, True), "a bool"),
    "sparse update": Kind((), ("eager", "", 3, False, ["lazy"]), ("lazy", "dense_equivalent")),
    "rounding": Kind((), ("Master", "", 3, None, ["kahan"]), ("nearest",)),
    "dtype": Kind(
        (int, np.int8, np.complex64, "banana", 3), (), (None, np.float64, "float16", BF16),
        "float32, float64, float16, bfloat16"),
    "clip": Kind(
        ("0.5", 1j, True, [0.5]), (0, 0.0, -1.0, *NOT_FINITE, 1e-50),
        (None, 0.5, 2, np.float32(8), np.array(0.5)), "a number"),
    "filter": Kind((None, True, "bias", 3), (), (lambda _: True,), "a callable"),
}  # fmt: skip
