"""THOR for parameters on a CUDA device: it preconditions on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...ops.runtime.errors import reject
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import RowGradient
from ..base.parameter import Parameter
from ..engine.reader import read_gradient
from .arguments import NAME


def read_dense(parameter: Parameter, gradient: Any, rows_need: tuple[str, str | None]) -> Any:
    """A checked gradient that is not None.

    Raises:
        TypeError: its kind or dtype does not fit.
        ValueError: its shape or place does not fit, or it is row-sparse.
    """
    read = read_gradient(NAME, parameter, gradient)
    if isinstance(read, RowGradient):
        reject(ValueError, NAME, f"gradient of {parameter.name!r}", "is row-sparse", *rows_need)
    return read


@contextmanager
def copies_on_host(
    parameters: Sequence[Parameter], gradients: Sequence[Any]
) -> Iterator[tuple[Any, ...]]:
    """Copies on the host of what is not None among checked gradients on a device.

    On return, the streams of the gradients wait for the parameters too.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    arrays = [*(p.array for p in parameters), *(g for g in gradients if g is not None)]
    with launch_on(arrays, None):
        yield tuple(None if g is None else g.numpy() for g in gradients)
