"""Steps on the host for parameters on a CUDA device: `AdamOffload`, and ``target = "CPU"``.

States live on the host and the arithmetic is done there. Parameters and gradients come in chunks
through pinned memory, and the parameters go back, while the host works on the next chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.parallel import commit
from ...kernels.storage import Piece
from ...ops.runtime import cuda
from ...ops.runtime.arrays import address_of
from ...ops.runtime.device import cannot_be_captured, is_captured
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.step import Variables
from ..base.parameter import Parameter
from .host import Host, prepared
from .layout import Batch
from .plan import Call, Classes, Plan, Update
from .reader import check_rows

CHUNK = 1 << 22
"""Elements that come at a time."""


class Offload:
    """Steps of parameters on a device, with states and arithmetic on the host.

    ``parameter`` is one that lives where all do.
    """

    works_on_host = True

    def __init__(self, host: Host, parameter: Parameter) -> None:
        self._host, self._parameter = host, parameter
        self.turn = host.turn

    def forget(self) -> None:
        """Nothing is kept that an address is part of."""

    def ready(self, update: Update, classes: Classes, *, may_skip: bool) -> None:  # noqa: ARG002
        """Refuse to become part of a CUDA graph: the step waits for the device."""
        if is_captured(self._parameter.array):
            raise cannot_be_captured()

    def run(self, plan: Plan) -> None:
        """Parameters and gradients come to the host, which waits; the parameters go back."""
        layout, arrays = plan.given.layout, plan.given.arrays
        if arrays:
            with launch_on(arrays, layout.lock_spans if plan.use_locking else None) as launch:
                rows = {batch: _checked_rows(batch, plan) for batch in layout.batches}
                for call in plan.calls:
                    if call.batch.row_sparse:
                        _run_rows(call, rows[call.batch], plan, launch.stream)
                    else:
                        _run_dense(call, plan, launch.stream)
        commit([], self._host.count(layout))


def _checked_rows(batch: Batch, plan: Plan) -> list[RowGradient]:
    """The row-sparse gradients of a batch with their indices, which are in range, on the host."""
    rows = []
    for row in plan.given.rows_of(batch) if batch.row_sparse else ():
        indices = row.indices.numpy()
        rows.append(row._replace(indices=indices, index_address=address_of(indices)))
    if rows:
        check_rows(batch, rows)
    return rows


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


def _run_dense(call: Call, plan: Plan, stream: Any) -> None:
    """A step on the dense tensors of a batch, chunk by chunk."""
    batch, gradients = call.batch, call.gradients
    is_measured = bool(plan.conditioning.is_measured or call.rule.measure)
    split = not is_measured  # a norm is that of a whole tensor
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
        own = call._replace(
            batch=_batch_of(batch, chosen, variables),
            gradients=np.array(list(map(address_of, of_g)), np.int64),
            hp=call.hp[call.hp_of[chosen]],
            hp_of=np.arange(len(chosen)),
        )
        if is_measured:
            own = own._replace(rates=call.rates[chosen], decays=call.decays[chosen])
        commit([prepared(own, plan)])

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


def _run_rows(call: Call, rows: Sequence[RowGradient], plan: Plan, stream: Any) -> None:
    """A step on the tables of a batch, one after the other; ``rows`` are checked."""
    tensors = call.batch.variables.tensors

    def work(t: int, views: list[np.ndarray]) -> None:
        w, values = views
        shape, of_values = tensors[t][0].shape, rows[t].values.shape
        variables = Variables.of([(w.reshape(shape), *tensors[t][1:])])
        gradient = RowGradient.of(rows[t].indices, values.reshape(of_values))
        own = call._replace(
            batch=_batch_of(call.batch, [t], variables),
            gradients=[gradient],
            hp_of=call.hp_of[t : t + 1],
        )
        commit([prepared(own, plan)])

    pieces = [
        [
            Piece(w.address, w.size, w.dtype, True),
            Piece(row.values_address, row.values.size, row.values.dtype, False),
        ]
        for (w, *_), row in zip(tensors, rows, strict=True)
    ]
    cuda.device.staging.staging().run(pieces, work, stream)
