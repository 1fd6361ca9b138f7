"""The command line: types of options, and messages that say what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, and end with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""
    expected = f"a whole number from {low} " + ("up" if high is None else f"to {high}")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
