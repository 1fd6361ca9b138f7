"""What cannot become part of a CUDA graph, said before anything of it does."""

from __future__ import annotations

from typing import Any

from ...ops.runtime.errors import message


def _cannot(where: str, what: str, wrong: str, expected: str, got: str) -> RuntimeError:
    return RuntimeError(message(where, f"{what} in a CUDA graph", wrong, expected, got))


def first_of_its_kind(where: str) -> RuntimeError:
    """For a step that would have to compile and to take memory."""
    expected = "the same step once outside of a graph, which compiles it and takes memory"
    return _cannot(where, "a step", "is the first of its kind", expected, "none")


def centralizes(where: str) -> RuntimeError:
    """For a step that takes memory for centralized gradients."""
    expected = "groups without grad_centralization"
    return _cannot(where, "a step", "centralizes gradients", expected, "one with it")


def check_step(where: str, *, follows_steps: bool, has_rows: bool, sorter: Any) -> None:
    """Refuse a step that could not run in a graph.

    Args:
        where: the optimizer's name.
        follows_steps: whether rates or decays are lists or schedules of the host.
        has_rows: whether gradients are row-sparse.
        sorter: of the framework, or None.

    Raises:
        RuntimeError: it could not.
    """
    if follows_steps:
        wrong, expected = "follows the number of the step", "a number, or an array on the device"
        got = "a list or a schedule of the host"
        raise _cannot(where, "a rate or decay", wrong, expected, got)
    if has_rows and sorter is not None and not sorter.can_be_captured:
        wrong, expected = "cannot use this framework's sort", "arrays of torch or Numba"
        raise _cannot(where, "a row-sparse step", wrong, expected, type(sorter).__name__)
