"""The error of the benchmark that cannot go on."""

from __future__ import annotations

from argparse import ArgumentTypeError


class BenchError(ArgumentTypeError):
    """A mistake that the user can mend; its text is the one line that the user sees."""
