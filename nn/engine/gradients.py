"""The gradients of a step that are read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...kernels.storage import Storage
from ...ops.runtime import check
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.row_step import IndexList, RowGradient, check_lists
from .layout import Batch, Layout


class Gradients(NamedTuple):
    """The checked gradients of one step."""

    layout: Layout
    addresses: np.ndarray  # int64: those of the dense gradients, in order
    rows: list[RowGradient]  # the row-sparse gradients, in order
    keep: Sequence[Any]  # objects that must stay alive until the step is done
    streams: Sequence[DeviceArray] = ()  # on a device: one array of each stream, if known

    @property
    def arrays(self) -> Sequence[Any]:
        """Arrays of all streams of a step on a device; the first, a parameter, decides."""
        if self.streams:
            return self.streams
        variables = (batch.variables.tensors for batch in self.layout.batches)
        found = [arrays[0] for tensors in variables for arrays in tensors]
        for gradient in self.keep:
            found += gradient[:2] if isinstance(gradient, RowGradient) else [gradient]
        return found

    def of(self, batch: Batch) -> Any:
        """The gradients of a batch: addresses of dense gradients, or row-sparse gradients."""
        if not batch.row_sparse:
            return self.addresses if batch.is_all else self.addresses[batch.places]
        is_only = self.layout.n_row_batches == 1
        return self.rows if is_only else [self.rows[k] for k in batch.places]

    @property
    def by_batch(self) -> list[tuple[Batch, Any]]:
        """The batches with their gradients."""
        return [(batch, self.of(batch)) for batch in self.layout.batches]


def by_storage(
    by_batch: Iterable[tuple[Batch, Any]],
) -> tuple[tuple[Storage, np.ndarray, np.ndarray], ...]:
    """The arrays of all gradients by storage type: int64 addresses and numbers of elements."""
    arrays: dict[Storage, list[tuple[int, int]]] = {}
    for batch, gradients in by_batch:
        found = arrays.setdefault(batch.g, [])
        if batch.row_sparse:
            itemsize = batch.g.itemsize
            found += [(g.source.values, g.values.nbytes // itemsize) for g in gradients]
        else:
            sizes = np.diff(batch.variables.table.first)
            found += zip(gradients.tolist(), sizes.tolist(), strict=True)
    return tuple(
        # Each array once: pooled tables share one array of gradients.
        (storage, *np.array([*dict.fromkeys(spans)], np.int64).reshape(-1, 2).T.copy())
        for storage, spans in arrays.items()
    )


def index_lists(batch: Batch, gradients: Sequence[RowGradient]) -> list[IndexList]:
    """The indices of the gradients of a batch.

    Raises:
        ValueError: its tables have too many rows for its sort keys.
    """
    entries = zip(batch.labels, gradients, batch.variables.tensors, strict=True)
    lists = [IndexList(label, len(g.indices), w.shape[0]) for label, g, (w, *_) in entries]
    check_lists(batch.labels[0], lists)
    return lists


def check_rows(batch: Batch, gradients: Sequence[RowGradient]) -> None:
    """Check all indices of a batch on the host; as `GradientReader.check_indices`."""
    for own, gradient in zip(index_lists(batch, gradients), gradients, strict=True):
        check.indices_in_range(own.where, gradient.indices, own.rows)
