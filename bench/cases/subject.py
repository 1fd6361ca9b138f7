"""Subjects of measurements: operators and optimizers, ready to take steps on given parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .traffic import Traffic
from .workloads import Kind

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class Bags(NamedTuple):
    """Ids that pooled rows are looked up by, of all tables in turn, and the gradient of them."""

    ids: np.ndarray  # ``[n]``
    offsets: np.ndarray  # ``[tables * samples + 1]``
    grad: np.ndarray  # ``[samples, sum of D]``


class Prepared(NamedTuple):
    """A subject on given parameters."""

    step: Callable[[Sequence[Any]], object]  # takes the gradients, in the order of the parameters
    # For each parameter the arrays of its size that a step reads and writes.
    updated: list[tuple[np.ndarray, ...]]
    reads: list[np.ndarray]  # parameters that a step only reads
    # Hands gradients over before a step, which is not timed; None: they are arguments.
    load: Callable[[Sequence[Any]], object] | None = None


Prepare = Callable[[list[np.ndarray]], Prepared]


@dataclass(frozen=True)
class Use:
    """The step that a subject takes with one kind of gradients."""

    algorithm: str | None  # the name under which peers are asked for the same step; None: nobody is
    traffic: Traffic  # what it must move
    every_row: bool = False  # a row-sparse gradient makes all rows take the step
    # Rows are read and copied, or pooled, before they take a step, if they do.
    looks_up: bool = False
    is_matrix: bool = False  # it is measured on a square matrix, not on a vector
    in_place: bool = False  # the gradient is what it updates
    start: float = 0.0  # what the parameters start from. At 0, the norms of LARS would stop it.
    in_process: bool = False  # PyTorch takes the same step in this process, too


@dataclass(frozen=True, eq=False)
class Subject:
    """An operator or an optimizer that takes steps."""

    uses: Mapping[Kind, Use]  # what it does with each kind of gradients that it is measured with
    prepare: Prepare  # makes it for these parameters
    dtypes: tuple[str, ...] = tuple(DTYPES)  # of the parameters that it takes


def clock() -> Any:
    """The module of arrays on a CUDA device, which needs Numba's CUDA."""
    return import_module("..gpu.clock", __package__)


def written_zeros(like: Any) -> Any:
    """Zeros in memory that has been written, unlike that of ``np.zeros``.

    Reading memory that was never written costs no traffic: it is all one page.
    """
    if not isinstance(like, np.ndarray):
        return clock().zeros(like.shape, like.dtype)
    array = np.empty_like(like)
    array.fill(0)
    return array
