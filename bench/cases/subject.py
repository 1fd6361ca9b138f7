"""Subjects of measurements: operators and optimizers, ready to take steps on given parameters.

What a step must move is the model of docs/bytes.md: every array that a step updates is read once
and written once; a gradient is read once. What a kernel needs for itself (the sorted indices, for
one) does not count: it is not part of the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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
class Traffic:
    """How many arrays of a parameter's size one step moves."""

    updated: int  # read and written: the parameter and its states
    read: int = 1  # only read: the gradient
    written: int = 0  # only written
    # For each pass before the update, which needs sums over whole tensors, how many arrays
    # it reads: the gradient; with 2, the parameter too; then the states.
    passes: tuple[int, ...] = ()
    of_rows: int = 0  # states of 4 bytes a row, read and written


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

    def formula(self, kind: Kind, itemsize: int = 4) -> str:
        """Bytes that a step must move for a parameter.

        Args:
            kind: of its gradient: "dense", "rows" or "pooled".
            itemsize: bytes of an element.

        The sizes are n, the elements of a dense parameter, of which states of rows do not count; or
        N and D, rows and width of a table, B, the ids of a batch, U, the different ones of them,
        and S, the bags, each of which has a row of the gradient and an offset.
        """
        moved, parts = self.traffic, []
        if kind == "dense":
            arrays = 2 * moved.updated + moved.read + moved.written + sum(moved.passes)
            return f"{itemsize * arrays} n"
        batch, ids = ("S", " + 8 B") if kind == "pooled" else ("B", "")
        if self.looks_up:
            parts.append(f"{itemsize} (U + {batch}) D + 8 {batch}{ids}")
        if moved.updated:
            touched = "N" if self.every_row else "U"
            of_rows = f" + {8 * moved.of_rows} {touched}" * bool(moved.of_rows)
            updated = f"{2 * itemsize * moved.updated} {touched} D{of_rows}"
            parts.append(f"{updated} + ({itemsize} D + 8) {batch}{ids}")
        return " + ".join(parts)

    def bytes_moved(self, kind: Kind, itemsize: int, **sizes: int) -> int:
        """The formula's value for these sizes."""
        product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", self.formula(kind, itemsize))
        return int(eval(product, {}, sizes))


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
