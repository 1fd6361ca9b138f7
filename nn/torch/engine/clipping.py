"""Clipping of gradients: their norm, their elements, and the factors that a step applies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ....kernels.private import outside_of_graphs, parts_of, version_of
from ....kernels.quiet import quiet
from ....kernels.storage import STORAGES
from ....ops.norm import global_norm
from ....ops.runtime import check
from ....ops.runtime.bags.tensor import BagTensor
from ....ops.runtime.errors import reject
from ....ops.runtime.row_tensor import RowTensor
from ....ops.runtime.step import squares_at
from .memory import DTYPES, array_of, in_memory
from .part import number
from .tensors import is_part_of_table, local, of_mesh, rows_of, table_shape
from .threads import as_torch

NORM, VALUE = "clip_grad_norm_", "clip_grad_value_"
_STRETCH = 1 << 14  # elements whose powers are summed by one thread

NamedGradient = tuple[str, Tensor, Any]
"""A name, a parameter, and its gradient, read once: another thread may exchange or free it."""


class Clipping:
    """Factors for the gradients that were measured, which the next step applies."""

    def __init__(self) -> None:
        # By the identity of a parameter, which stays alive here. Its gradient does not: a training
        # that goes on without a step would hold two of each. None: there was no gradient.
        self._known: dict[int, tuple[Tensor, ref[Tensor] | None, int, float]] = {}

    def add(self, parameter: Tensor, gradient: Tensor | None, factor: float) -> None:
        """Scale the gradient that a parameter has."""
        measured = (None, 0) if gradient is None else (ref(gradient), _version(gradient))
        self._known[id(parameter)] = parameter, *measured, factor

    def known(self, parameter: Tensor, gradient: Tensor | None) -> float | None:
        """The factor for the gradient of a parameter; None: it is not the one measured."""
        found = self._known.get(id(parameter))
        if gradient is None or found is None:
            return 1.0
        # By identity and version: another tensor is the gradient of another backward, and one that
        # was written meanwhile has another norm.
        _, measured, version, factor = found
        is_same = measured is not None and measured() is gradient
        return factor if is_same and _version(gradient) == version else None

    @property
    def is_over(self) -> bool:
        """Whether none of the gradients that were measured is left, as after a zero_grad."""
        measured = [own for _, own, *_ in self._known.values() if own is not None]
        return bool(measured) and not any(own() is not None for own in measured)

    def factors(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[float]:
        """The factors of all, or the one that they have in common; 1 for what was not measured.

        Raises:
            RuntimeError: gradients are not those that were measured, or have changed since.
        """
        if self.is_over:
            return [1.0]
        found = [x for x in map(self.known, parameters, gradients) if x is not None]
        if len(found) < len(parameters):
            wrong, expected = "have changed since they were measured", "those of the norm"
            fix = "; clip right before the step and after scaler.unscale_, or call zero_grad"
            reject(RuntimeError, NORM, "the gradients", wrong, expected, "others", fix)
        scaled = {x for x, g in zip(found, gradients, strict=True) if g is not None}
        return [*scaled] if len(scaled) == 1 else found

    def without(self, parameter: Tensor | None) -> Clipping | None:
        """The clipping that is left after a step, of one parameter or of all."""
        if parameter is None:
            return None
        # A gradient that comes after a step is one of a later backward.
        left = {k: own for k, own in self._known.items() if own[1] and k != id(parameter)}
        self._known = left
        return self if left and not self.is_over else None


def _version(tensor: Tensor) -> int:
    # PyTorch counts no versions of inference tensors, and raises when asked. What is written to a
    # DTensor is not counted in its shard.
    every = {id(x): x for x in (tensor, local(tensor))}.values()
    return sum(-1 if x.is_inference() else version_of(x) for x in every)


def limit_of(where: str, name: str, value: Any) -> float:
    """A number of at least 0."""
    limit = checked_number(where, name, value)
    check.in_range(where, name, limit, limit >= 0.0, "at least 0")
    return limit


def within(limit: float, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient with every element in ``[-limit, limit]``; rows of equal indices are summed."""
    if not gradient.is_sparse:
        return gradient.clamp(-limit, limit)
    summed = _summed(VALUE, name, parameter, gradient)
    values = summed.values().clamp(-limit, limit).to(gradient.dtype)
    known = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(summed.indices(), values, summed.shape, **known)


def checked_number(where: str, name: str, value: Any) -> float:
    """A number, in a string or a tensor too, as PyTorch takes it."""
    try:
        return number(value)
    except (TypeError, ValueError, RuntimeError):
        return reject(TypeError, where, name, "is no number", "a number", value)


@outside_of_graphs  # also where PyTorch's compiler has not seen the call, as with a generator
@as_torch
@quiet
def norm_of(given: Sequence[NamedGradient], order: float) -> float:
    """The norm of all gradients, in all processes of their meshes."""
    here: dict[Any, list[NamedGradient]] = {}  # by mesh; None: this process has all of them
    for name, parameter, gradient in given:
        if is_part_of_table(parameter):
            expected, got = "a tensor of one process, or a DTensor", "a part of a table"
            reject(RuntimeError, NORM, name, "is distributed", expected, got)
        mesh, is_counted = getattr(gradient, "device_mesh", None), True
        if mesh is not None:
            gradient = _summed_over(gradient)
            at = zip(gradient.placements, mesh.get_coordinate(), strict=True)
            is_counted = not any(k for own, k in at if own.is_replicate())  # one of the copies
        here.setdefault(mesh, []).extend([(name, parameter, local(gradient))] * is_counted)
    measure, norms = _euclidean if order == 2.0 else _of_order, list[float]()
    for mesh, own in here.items():
        norm = measure(own, order)
        norms += [norm] if mesh is None else of_mesh(mesh, norm)
    return norms[0] if len(norms) == 1 else float(np.linalg.norm(norms, order))


def _summed_over(gradient: Any) -> Any:
    """A distributed gradient without sums that the processes have not taken."""
    if not any(own.is_partial() for own in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    wanted = [Replicate() if own.is_partial() else own for own in gradient.placements]
    return gradient.redistribute(placements=wanted)


def _euclidean(given: Sequence[NamedGradient], _: float) -> float:
    """Dense gradients on the host are read in one call a dtype."""
    spans: dict[torch.dtype, list[tuple[int, int]]] = {}
    others: list[Any] = []
    keep = []  # until they are read
    for name, parameter, gradient in given:
        if isinstance(gradient, BagTensor):
            others.append(gradient)
            continue
        if gradient.is_sparse:
            rows = rows_of(NORM, name, parameter, gradient)
            indices, values = (
                array_of(x) if isinstance(x, Tensor) else x for x in (rows.indices, rows.values)
            )
            others.append(RowTensor(indices, values, table_shape(gradient)))
            continue
        keep.append(read := in_memory(gradient, NORM, name))
        if read.is_cuda:
            others.append(array_of(read))
        else:
            spans.setdefault(read.dtype, []).append((read.data_ptr(), read.numel()))
    total = global_norm(others) ** 2 if others else 0.0
    for dtype, found in spans.items():
        addresses, sizes = np.array(found, np.int64).T
        total += float(squares_at(STORAGES[DTYPES[dtype]], addresses, sizes).sum())
    return math.sqrt(total)


def _of_order(given: Sequence[NamedGradient], order: float) -> float:
    norms = []
    for own in given:
        name, _, g = own
        read = _summed(NORM, *own).values() if g.is_sparse else in_memory(g, NORM, name)
        values = read.flatten()
        # Stretches, each summed by one thread: on the host PyTorch would cut by their number.
        whole = len(values) // _STRETCH * _STRETCH
        parts = (
            values[:whole].view(-1, _STRETCH),
            values[whole:].view(-1, max(len(values) - whole, 1)),
        )
        norms += [torch.linalg.vector_norm(p, order, 1, dtype=torch.float64).cpu() for p in parts]
    return float(np.linalg.norm(torch.cat(norms).numpy(), order)) if norms else 0.0


def _summed(where: str, name: str, parameter: Tensor, gradient: Any) -> Tensor:
    """A sparse gradient, coalesced, 16 bits in float32."""
    rows_of(where, name, parameter, gradient)  # for its checks
    indices, values = map(in_memory, parts_of(gradient))
    shape, is_coalesced = tuple(gradient.shape), gradient.is_coalesced()
    most = torch.tensor(shape[: len(indices)], device=indices.device)[:, None]
    if ((indices < 0) | (indices >= most)).any():
        reject(IndexError, where, name, "has an index out of range", shape, indices)
    values = values if values.dtype == torch.float64 else values.to(torch.float32)
    known = {"is_coalesced": is_coalesced, "check_invariants": False}
    return torch.sparse_coo_tensor(indices, values, shape, **known).coalesce()
