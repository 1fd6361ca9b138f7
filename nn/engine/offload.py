"""Steps on the host for parameters on a CUDA device: `AdamOffload`, and ``target = "CPU"``.

States live on the host, which computes. Parameters and gradients come in chunks through pinned
memory; the parameters go back while the host works on the next chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...kernels.cpu.threads.parallel import commit
from ...kernels.storage import Piece
from ...ops.runtime import cuda
from ...ops.runtime.arrays import address_of
from ...ops.runtime.errors import reject
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import RowGradient
from ...ops.runtime.step import Variables
from .batch import NOTHING, Batch, KernelCall, check_rows
from .host import Host, ready
from .plan import Plan

CHUNK = 1 << 22
"""Elements of a chunk."""


class Offload:
    """Steps of parameters on a device, with states and arithmetic on the host."""

    def __init__(self, host: Host) -> None:
        self._host, self.exclusive = host, host.exclusive

    def run(self, plan: Plan) -> None:
        """Take a step: parameters and gradients come to the host, and the parameters go back."""
        layout, arrays = plan.given.layout, plan.given.arrays
        if arrays:
            with launch_on(arrays, use_locking=plan.use_locking) as launch:
                # The indices of all batches are checked before the first chunk is written: a bad
                # index in a later chunk would leave half a step.
                rows = {batch: _checked_rows(batch, plan) for batch in layout.batches}
                for call in plan.calls:
                    _run(call, rows[call.batch], plan, launch.stream)
        # Counted last: only when all parameters have gone back to the device.
        commit([], self._host.count(layout))


def _checked_rows(batch: Batch, plan: Plan) -> list[RowGradient]:
    """The row-sparse gradients of a batch with their indices on the host, checked."""
    rows = []
    for row in plan.given.of(batch) if batch.row_sparse else ():
        if row.rows is not None:
            wrong, expected = "is that of pooled rows on a device", "a RowTensor, or states there"
            reject(RuntimeError, batch.labels[0], "a gradient", wrong, expected, "a BagTensor")
        rows.append(row.with_arrays(indices=row.indices.numpy()))
    if rows:
        check_rows(batch, rows)
    return rows


class TensorSlice(NamedTuple):
    """Elements ``begin .. end`` of tensor ``t`` of a batch."""

    t: int
    begin: int
    end: int


def chunks_of(sizes: Sequence[int], *, split: bool) -> Iterator[list[TensorSlice]]:
    """Lists of slices of about `CHUNK` elements each; with ``split`` long tensors are cut."""
    chunk: list[TensorSlice] = []
    room = CHUNK
    for t, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room) if split else size
            chunk.append(TensorSlice(t, begin, end))
            room -= end - begin
            begin = end
            if room <= 0:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


def _run(call: KernelCall, rows: Sequence[RowGradient], plan: Plan, stream: Any) -> None:
    """Take a step on a batch: chunk by chunk, or table by table with their checked ``rows``."""
    batch, tensors = call.batch, call.batch.variables.tensors
    is_measured = call.rates is not NOTHING
    # A tensor that has states of rows or of the tensor, or is measured, must not be cut.
    kernel = call.update.kernel
    rule = kernel.rule
    is_apart = rule.is_elementwise and not rule.is_row_wise
    split = is_apart and not (is_measured or rows)
    sizes = [arrays[0].size for arrays in tensors]
    tables = [[TensorSlice(t, 0, size)] for t, size in enumerate(sizes)]
    chunks = tables if rows else list(chunks_of(sizes, split=split))

    def work(k: int, views: list[np.ndarray]) -> None:
        chosen, gradient_views = [part.t for part in chunks[k]], views[1::2]
        here = []
        for (t, begin, end), w in zip(chunks[k], views[::2], strict=True):
            there, *states = tensors[t]
            if split:
                here.append((w, *(state.reshape(-1)[begin:end] for state in states)))
            else:
                here.append((w.reshape(there.shape), *states))
        gradients: Any = np.array(list(map(address_of, gradient_views)), np.int64)
        if rows:
            values = gradient_views[0].reshape(rows[k].values.shape)
            gradients = [rows[k].with_arrays(values=values)]
        own_batch = replace(
            batch,
            positions=batch.positions[chosen],
            variables=Variables.of(here),
            places=batch.places[chosen],
            labels=tuple(batch.labels[t] for t in chosen),
            class_of=batch.class_of[chosen],
        )
        hp, touched_only = call.update.hp[np.asarray(call.update.hp_of)[chosen]], plan.touched_only
        given = kernel.prologue, gradients, hp, np.arange(len(chosen))
        update = own_batch.update(*given, touched_only=touched_only)
        own = KernelCall(own_batch, update)
        if is_measured:
            own = own._replace(rates=call.rates[chosen], decays=call.decays[chosen],
                               constants=call.constants[: len(chosen)])  # fmt: skip
            plan.conditioning.measure([own])
        updates = ready([own], plan.method.constants_of_step)
        commit(updates[0] if updates else [])

    pieces = [[piece for part in chunk for piece in _pieces(call, rows, part)] for chunk in chunks]
    cuda.device.staging.staging().run(pieces, work, stream)


def _pieces(call: KernelCall, rows: Sequence[RowGradient], part: TensorSlice) -> list[Piece]:
    """The pieces of memory of a slice: the parameter, which goes back, and the gradient."""
    (t, begin, end), g = part, call.batch.g
    w, n = call.batch.variables.tensors[t][0], end - begin
    if rows:
        span = rows[t].source.values, rows[t].values.size
    else:
        span = int(call.gradients[t]) + begin * g.itemsize, n
    at_w = w.address + begin * w.itemsize
    return [Piece(at_w, n, w.dtype, True), Piece(*span, g.dtype, False)]
