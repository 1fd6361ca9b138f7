"""The layout of one step: the kernel calls that its gradients need, and the tensors of each.

A layout depends on the kinds and dtypes of the gradients alone, so it is made once and used
for every later step with gradients of the same kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.headers import arrays as headers
from ...kernels.lazy import lazy
from ...kernels.rule import Rule
from ...kernels.storage import STORAGES
from ...ops.runtime.arrays import address_of
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.step import Variables
from ..base.parameter import Parameter
from .batch import Batch, RandomBits


class GradientKind(NamedTuple):
    """The kind of a gradient: its dtype, and the dtype of its indices if it is row-sparse."""

    dtype: np.dtype[Any]
    index_dtype: np.dtype[Any] | None = None
    pooled: bool = False  # whether it is a `BagTensor`

    @property
    def row_sparse(self) -> bool:
        """Whether it has indices."""
        return self.index_dtype is not None


GradientKinds = tuple[GradientKind | None, ...]
"""The kind of each parameter's gradient; None where there is none."""
Place = tuple[np.ndarray, int, tuple[int, ...], np.dtype[Any]]
"""An array, its address, shape and dtype."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The batches of a step."""

    # One for each kernel call. Row-sparse batches come first: they check indices before they write.
    batches: tuple[Batch, ...]
    active: np.ndarray  # int64: places of all parameters that have a gradient
    is_complete: bool  # whether these are all parameters
    dense_bytes: tuple[int, ...]  # sizes of the dense gradients, in order
    kinds: GradientKinds  # the kind of each parameter's gradient
    # The expected headers of the gradients' arrays (for a row-sparse gradient the indices, then
    # the values) and of the variables, if every parameter has a gradient; else None.
    expected: headers.Expected | None
    dense_arrays: np.ndarray  # int64: places of the dense gradients among these arrays
    row_arrays: tuple[int, ...]  # places of the indices of row-sparse gradients, -1 for pooled ones
    memory: list[list[int]]  # begins and ends of the active variables, in order
    places: tuple[Place, ...]  # the active variables on the host, when the layout was made

    @property
    def is_in_place(self) -> bool:
        """Whether the variables on the host have kept their addresses, shapes and dtypes.

        NumPy can resize an array, or change its shape, in place.
        """
        return all(place[1:] == _place(place[0])[1:] for place in self.places)

    def shares_memory(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether any byte of these spans, addresses and sizes, belongs to an active variable."""
        return headers.lie_in(self.memory, spans)

    @lazy
    def has_pooled(self) -> bool:
        """Whether any gradient is that of pooled rows."""
        return -1 in self.row_arrays

    @lazy
    def n_row_batches(self) -> int:
        """The number of row-sparse kernel calls."""
        return sum(batch.row_sparse for batch in self.batches)


def build_layout(
    where: str, kinds: GradientKinds, parameters: Sequence[Parameter],
    tensors: Sequence[tuple[Any, ...]], rules: Sequence[Rule], class_of: np.ndarray,
) -> Layout:  # fmt: skip
    """Group parameters (with their states) whose gradients are of these ``kinds``.

    ``rules`` and ``class_of`` have the rule and the class of options of each parameter.
    """
    active = [(i, kind, tensors[i]) for i, kind in enumerate(kinds) if kind is not None]
    groups: dict[Any, list[int]] = {}
    for i, kind, arrays in active:
        key = (kind.row_sparse, kind.dtype, rules[i], *(a.dtype for a in arrays))
        groups.setdefault(key, []).append(i)
    dense = [i for i, kind, _ in active if not kind.row_sparse]
    sparse = [i for i, kind, _ in active if kind.row_sparse]
    batches = []
    for (row_sparse, dtype, rule, *_), positions in groups.items():
        place = {i: k for k, i in enumerate(sparse if row_sparse else dense)}
        variables = Variables.of([tensors[i] for i in positions])
        places, are_all = np.array([place[i] for i in positions]), len(positions) == len(kinds)
        names = [str(parameters[i].name) for i in positions]
        batches.append(Batch(
            rule, np.array(positions), variables, STORAGES[dtype], row_sparse, places, are_all,
            tuple([f"{where}: gradient of {name!r}" for name in names]), class_of[positions],
            RandomBits.of(rule, names),
        ))  # fmt: skip
    written = [array for _, _, arrays in active for array in arrays]
    # An empty array overlaps nothing, whatever its address.
    spans = sorted((address_of(a), address_of(a) + a.nbytes) for a in written if a.size)
    memory = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    is_complete = len(active) == len(kinds)
    are_plain = not any(isinstance(w, DeviceArray) for _, _, (w, *_) in active)
    gradients = [(kind, arrays[0]) for _, kind, arrays in active]
    layouts, dense_arrays, row_arrays = _array_layouts(gradients)
    can_expect = is_complete and headers.usable and are_plain
    expected = headers.expected_arrays(layouts, memory, written) if can_expect else None
    return Layout(
        tuple(sorted(batches, key=lambda batch: not batch.row_sparse)),
        np.array([i for i, _, _ in active], np.int64),
        is_complete,
        tuple(w.size * kind.dtype.itemsize for _, kind, (w, *_) in active if not kind.row_sparse),
        kinds,
        expected,
        dense_arrays,
        row_arrays,
        memory.tolist(),
        tuple(_place(a) for a in written if not isinstance(a, DeviceArray)),
    )


def _place(array: np.ndarray) -> Place:
    return array, address_of(array), array.shape, array.dtype


def _array_layouts(
    gradients: Sequence[tuple[GradientKind, Any]],
) -> tuple[list[headers.ArrayLayout], np.ndarray, tuple[int, ...]]:
    """The layouts of gradient arrays, and the places of dense ones and of indices among them."""
    layouts: list[headers.ArrayLayout] = []
    dense, rows = [], []
    for kind, w in gradients:
        if kind.pooled:
            rows.append(-1)
        elif kind.index_dtype is None:
            dense.append(len(layouts))
            layouts.append((kind.dtype, w.shape))
        else:
            rows.append(len(layouts))
            layouts.append((kind.index_dtype, (headers.OPEN,)))
            layouts.append((kind.dtype, (headers.OPEN, *w.shape[1:])))
    return layouts, np.array(dense, np.int64), tuple(rows)


class Gradients(NamedTuple):
    """The checked gradients of one step."""

    layout: Layout
    addresses: np.ndarray  # int64: those of the dense gradients, in order
    rows: list[RowGradient]  # the row-sparse gradients, in order
    keep: Sequence[Any]  # objects that must stay alive until the step is done
    streams: Sequence[DeviceArray] = ()  # on a device: one array of each stream, if active

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
