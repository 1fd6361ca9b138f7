"""How the gradients of one step lie: which kernel calls they need, and on what.

A layout depends on the kinds and dtypes of the gradients alone, so it is made once and used
for every later step with gradients of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..kernels.cpu import headers
from ..kernels.storage import STORAGES, Storage
from ..ops.arrays import address_of
from ..ops.locks import Span
from ..ops.step import Variables


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of one kernel call: equal storage types of parameters, gradients and states.

    Attributes:
        positions: int64 ``[T]``: places of the tensors in optimizer order.
        variables: parameters and states.
        g: storage of the gradients.
        row_sparse: whether the gradients are.
        places: int64 ``[T]``: places among the dense, or the row-sparse, gradients.
        is_all: whether these are all parameters of the optimizer, in order.
        labels: how errors name the gradients.
    """

    positions: np.ndarray
    variables: Variables
    g: Storage
    row_sparse: bool
    places: np.ndarray
    is_all: bool
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """The batches of a step.

    Attributes:
        batches: one for each kernel call.
        active: int64: places of all parameters that have a gradient.
        is_complete: whether these are all parameters.
        expected: the headers of the gradients where all are dense, else None.
        dense_bytes: int64: sizes of the dense gradients, in order.
        begins, ends: the memory of all active variables, sorted.
    """

    @cached_property
    def lock_spans(self) -> list[Span]:
        """The memory of all active variables, for locking."""
        return sorted(span for batch in self.batches for span in batch.variables.spans)

    batches: tuple[Batch, ...]
    active: np.ndarray
    is_complete: bool
    dense_bytes: np.ndarray
    expected: headers.Expected | None
    begins: np.ndarray
    ends: np.ndarray


Kind = tuple[bool, np.dtype[Any]] | None
"""Row-sparse or not, and the dtype; None without a gradient."""


def build_layout(
    kinds: Sequence[Kind], tensors: Sequence[tuple[np.ndarray, ...]], labels: Sequence[str]
) -> Layout:
    """Group parameters (with their states) whose gradients are of these ``kinds``."""
    groups: dict[Any, list[int]] = {}
    for i, (kind, arrays) in enumerate(zip(kinds, tensors, strict=True)):
        if kind is not None:
            groups.setdefault((kind, *(a.dtype for a in arrays)), []).append(i)
    dense = [i for i, kind in enumerate(kinds) if kind is not None and not kind[0]]
    sparse = [i for i, kind in enumerate(kinds) if kind is not None and kind[0]]
    batches = []
    for ((row_sparse, dtype), *_), positions in groups.items():
        place = {i: k for k, i in enumerate(sparse if row_sparse else dense)}
        batches.append(
            Batch(
                np.array(positions),
                Variables.of([tensors[i] for i in positions]),
                STORAGES[dtype],
                row_sparse,
                np.array([place[i] for i in positions]),
                len(positions) == len(kinds),
                tuple(labels[i] for i in positions),
            )
        )
    expected = None
    if len(dense) == len(kinds) and headers.usable():
        dtypes = [kind[1] for kind in kinds if kind is not None]
        expected = headers.Expected(dtypes, [arrays[0].shape for arrays in tensors])
    dense_bytes = [
        arrays[0].size * kind[1].itemsize
        for kind, arrays in zip(kinds, tensors, strict=True)
        if kind is not None and not kind[0]
    ]
    active = sorted(dense + sparse)
    spans = sorted(
        (address_of(a), address_of(a) + a.nbytes) for i in active for a in tensors[i] if a.size
    )
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    return Layout(
        tuple(batches),
        np.array(active, np.int64),
        len(active) == len(kinds),
        np.array(dense_bytes, np.int64),
        expected,
        begins,
        ends,
    )


def shares_memory(layout: Layout, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each range of bytes, whether it overlaps a variable of the layout."""
    # Variables do not overlap: the last one that begins before a range ends decides.
    last = np.searchsorted(layout.begins, ends, side="left") - 1
    before = layout.ends[last] if len(layout.ends) else np.zeros(len(last), np.int64)
    return (last >= 0) & (before > begins) & (ends > begins)
