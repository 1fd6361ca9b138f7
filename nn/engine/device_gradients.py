"""Gradients on a device that are like those of the step before: read by their forms alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...ops.runtime.device import DeviceArray, DeviceLayout, lie_on
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.row_tensor import RowTensor
from .layout import Gradients, Layout


class _RowLook(NamedTuple):
    """The form of a `RowTensor` on a device."""

    dense_shape: tuple[int, ...]
    indices: DeviceArray
    values: DeviceArray

    @classmethod
    def of(cls, gradient: Any, read: RowGradient) -> _RowLook | None:
        """The form of a gradient; None if it was read in another one."""
        is_itself = type(gradient) is RowTensor and read.rows is None and read.positions is None
        if not (is_itself and read.values is gradient.values and read.indices is gradient.indices):
            return None
        arrays = gradient.indices.without_owner(), gradient.values.without_owner()
        return cls(gradient.dense_shape, *arrays)

    def is_of(self, gradient: Any) -> bool:
        """Whether a gradient has this form."""
        if type(gradient) is not RowTensor or gradient.dense_shape != self.dense_shape:
            return False
        if gradient.positions is not None or gradient.batch_length:  # `read` checks these
            return False
        return self.indices.is_like(gradient.indices) and self.values.is_like(gradient.values)


class _DenseLook(NamedTuple):
    """The dense gradients on a device that are of one framework and dtype."""

    layout: DeviceLayout  # of the first
    places: list[int]  # among all gradients
    dense: list[int]  # their places among all dense gradients
    signatures: list[Any]  # of each, for its framework

    def addresses(self, gradients: tuple[Any, ...]) -> list[int] | None:
        """Where those of another step lie; None if one is of another form."""
        framework, own = self.layout.framework, [gradients[i] for i in self.places]
        is_alike = [*map(framework.signature, own)] == self.signatures
        return [*map(framework.address, own)] if is_alike else None


class LastOnDevice(NamedTuple):
    """The last step on a device, if its gradients were not copied, and none was pooled."""

    layout: Layout
    types: list[type]  # of all gradients
    dense: list[_DenseLook]
    rows: list[tuple[int, _RowLook]]  # with their places
    order: np.ndarray  # of each dense gradient the place in the lists of ``dense``
    streams: Sequence[DeviceArray]
    apart: list[list[int]]  # addresses of dense gradients that were found apart from variables

    @classmethod
    def of(cls, given: Gradients, gradients: tuple[Any, ...]) -> LastOnDevice | None:
        """A record of gradients that were read; None if one is not plain, or was copied."""
        read, rows, n_dense = iter(given.keep), list[tuple[int, _RowLook]](), 0
        dense: dict[Any, _DenseLook] = {}
        for i, gradient in enumerate(gradients):
            array: Any = None if gradient is None else next(read)
            if isinstance(array, RowGradient):
                row_look = _RowLook.of(gradient, array)
                if row_look is None:
                    return None
                rows.append((i, row_look))
            elif array is not None:
                signature = array.signature if array.owner is gradient else None
                if signature is None:
                    return None
                key = array.framework, array.dtype
                look = dense.setdefault(key, _DenseLook(array.layout, [], [], []))
                look.places.append(i)
                look.dense.append(n_dense)
                look.signatures.append(signature)
                n_dense += 1
        streams = {(array.framework, array.stream): array for array in reversed(given.arrays)}
        first = given.arrays[0]
        others = [a for key, a in streams.items() if key != (first.framework, first.stream)]
        order = np.argsort([k for look in dense.values() for k in look.dense])
        looks = [*map(type, gradients)], [*dense.values()], rows, order
        return cls(given.layout, *looks, [a.without_owner() for a in (first, *others)], [])

    def read(self, gradients: tuple[Any, ...]) -> Gradients | None:
        """The gradients of another step; None if one is not like that of the last."""
        if [*map(type, gradients)] != self.types:
            return None
        rows: list[RowGradient] = []
        found: list[list[int]] = []
        layout = self.layout
        for i, row_look in self.rows:
            gradient = gradients[i]
            if not row_look.is_of(gradient):
                return None
            rows.append(RowGradient.of(gradient.indices, gradient.values))
        for look in self.dense:
            own = look.addresses(gradients)
            if own is None:
                return None
            found.append(own)
        spans = [span for row in rows for span in row.spans]
        if found != self.apart:
            for look, own in zip(self.dense, found, strict=True):
                if not lie_on(look.layout, own):
                    return None
                n_bytes = [layout.dense_bytes[k] for k in look.dense]
                spans += zip(own, n_bytes, strict=True)
        if spans and layout.shares_memory(spans):
            return None
        self.apart[:] = found
        addresses = np.array([*chain(*found)], np.int64)
        if len(found) > 1:
            addresses = addresses[self.order]
        return Gradients(layout, addresses, rows, gradients, self.streams)
