"""Steps on the host for parameters on a CUDA device: `AdamOffload`, and ``target = "CPU"``.

States live on the host and the arithmetic is done there. Parameters and gradients come in chunks
through pinned memory, and the parameters go back, while the host works on the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...kernels.storage import Piece
from ...ops.runtime import cuda
from ...ops.runtime.arrays import address_of
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.step import Variables
from .layout import Batch

CHUNK = 1 << 22
"""Elements that come at a time."""


class Part(NamedTuple):
    """Elements ``begin .. end`` of tensor ``t`` of a batch."""

    t: int
    begin: int
    end: int


def chunks_of(sizes: Sequence[int], *, split: bool) -> Iterator[list[Part]]:
    """Parts of about `CHUNK` elements together; with ``split`` long tensors are cut."""
    chunk: list[Part] = []
    room = CHUNK
    for t, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room) if split else size
            chunk.append(Part(t, begin, end))
            room -= end - begin
            begin = end
            if room <= 0:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


def run_dense(
    batch: Batch,
    gradients: np.ndarray,
    step: Callable[[Batch, list[int], np.ndarray], None],
    *,
    split: bool,
    stream: Any,
) -> None:
    """A step on the dense tensors of a batch, chunk by chunk.

    Args:
        batch: parameters on the device, states on the host.
        gradients: int64 ``[T]``: their addresses on the device.
        step: the step on the host, called with a batch of parts, the numbers of their tensors,
            and the addresses of their gradients.
        split: whether tensors may be cut.
        stream: the caller's.
    """
    tensors, g = batch.variables.tensors, batch.g
    chunks = list(chunks_of([arrays[0].size for arrays in tensors], split=split))

    def work(k: int, views: list[np.ndarray]) -> None:
        parts, of_w, of_g = chunks[k], views[::2], views[1::2]
        variables = Variables.of(
            [
                _part_of(tensors[part.t], part, w) if split else _whole(tensors[part.t], w)
                for part, w in zip(parts, of_w, strict=True)
            ]
        )
        chosen = [part.t for part in parts]
        step(_batch_of(batch, chosen, variables), chosen, _addresses(of_g))

    pieces = [
        [piece for part in chunk for piece in _pieces(tensors[part.t][0], gradients, g, part)]
        for chunk in chunks
    ]
    cuda.device.staging.staging().run(pieces, work, stream)


def _part_of(tensor: tuple[Any, ...], part: Part, w: np.ndarray) -> tuple[np.ndarray, ...]:
    """A part of a parameter that has come to the host, with the same part of each state."""
    return (w, *(state.reshape(-1)[part.begin : part.end] for state in tensor[1:]))


def _whole(tensor: tuple[Any, ...], w: np.ndarray) -> tuple[np.ndarray, ...]:
    """A parameter that has come to the host, with its states, which may have other shapes."""
    return (w.reshape(tensor[0].shape), *tensor[1:])


def _pieces(w: Any, gradients: np.ndarray, g: Any, part: Part) -> list[Piece]:
    """What comes of a part: the parameter, which goes back, and the gradient."""
    t, begin, end = part
    at_w, at_g = w.address + begin * w.itemsize, int(gradients[t]) + begin * g.itemsize
    return [Piece(at_w, end - begin, w.dtype, True), Piece(at_g, end - begin, g.dtype, False)]


def _batch_of(batch: Batch, chosen: list[int], variables: Variables) -> Batch:
    return replace(
        batch,
        positions=batch.positions[chosen],
        variables=variables,
        places=batch.places[chosen],
        labels=tuple(batch.labels[t] for t in chosen),
    )


def _addresses(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([address_of(array) for array in arrays], np.int64)


def rows_on_host(rows: Sequence[RowGradient]) -> list[RowGradient]:
    """Row-sparse gradients with their indices on the host; the values are still on the device."""
    return [
        RowGradient(indices, row.values, address_of(indices), row.values_address)
        for row in rows
        for indices in [row.indices.numpy()]
    ]


def run_rows(
    batch: Batch,
    rows: Sequence[RowGradient],
    step: Callable[[Batch, int, RowGradient], None],
    *,
    stream: Any,
) -> None:
    """A step on the tables of a batch, one after the other.

    Args:
        batch: parameters on the device, states on the host.
        rows: from `rows_on_host`, checked.
        step: the step on the host, called with a batch of one table, its number, and its
            gradient.
        stream: the caller's.
    """
    tensors = batch.variables.tensors

    def work(t: int, views: list[np.ndarray]) -> None:
        w, values = views
        shape, of_values = tensors[t][0].shape, rows[t].values.shape
        variables = Variables.of([(w.reshape(shape), *tensors[t][1:])])
        gradient = RowGradient.of(rows[t].indices, values.reshape(of_values))
        step(_batch_of(batch, [t], variables), t, gradient)

    pieces = [
        [
            Piece(w.address, w.size, w.dtype, True),
            Piece(row.values_address, row.values.size, row.values.dtype, False),
        ]
        for (w, *_), row in zip(tensors, rows, strict=True)
    ]
    cuda.device.staging.staging().run(pieces, work, stream)
