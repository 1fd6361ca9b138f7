"""Clipping by the global norm of dense and sparse gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.quiet import quiet
from ...kernels.storage import STORAGES
from ...ops.norm import global_norm
from ...ops.runtime.errors import reject
from ...ops.runtime.row_tensor import RowTensor
from ...ops.runtime.step import squares_at
from .engine.memory import DTYPE_NAMES, DTYPES, array_of
from .engine.tensors import is_part, local, rows_of, table_shape
from .engine.threads import as_torch
from .optimizer import Fused

_WHERE = "clip_grad_norm_"


class Clipping:
    """A factor for the gradients that were measured, which the next step applies."""

    def __init__(self, factor: float, gradients: Sequence[Tensor]) -> None:
        self.known_factor = factor
        self._measured = [(gradient, _version(gradient)) for gradient in gradients]

    def holds(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the gradients that were measured, unchanged."""
        # By identity and version: another tensor is the gradient of another backward, and one that
        # was written meanwhile has another norm.
        known = self._measured
        return len(known) == len(gradients) and all(
            g is measured and _version(g) == version
            for g, (measured, version) in zip(gradients, known, strict=True)
        )

    def factor(self, gradients: Sequence[Tensor]) -> float:
        """The factor, for these gradients.

        Raises:
            RuntimeError: they are not those that were measured, or have changed since.
        """
        if not self.holds(gradients):
            wrong, expected = "have changed since they were measured", "those of the norm"
            fix = "; clip right before the step and after scaler.unscale_, or call zero_grad"
            reject(RuntimeError, _WHERE, "the gradients", wrong, expected, "others", fix)
        return self.known_factor


def _version(tensor: Tensor) -> int:
    # PyTorch counts no versions of inference tensors, and raises when asked.
    return -1 if tensor.is_inference() else int(tensor._version)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, foreach: bool | None = None, *,
    optimizer: Fused | Sequence[Fused] | None = None,
) -> Tensor:  # fmt: skip
    """Scale gradients so that their norm, all taken together, is at most ``max_norm``::

        g <- g * min(1, max_norm / (norm + 1e-6))

    Sparse gradients count as the dense ones that they stand for: rows of equal indices are summed
    first. Nothing dense is built; squares and sums are float64. Gradients are read once. With
    ``optimizer`` nothing is written to them: its next step multiplies them on the way.

    Args:
        parameters: a tensor or an iterable of tensors, as in ``torch.nn.utils.clip_grad_norm_``.
        max_norm: the largest norm.
        norm_type: 2.
        error_if_nonfinite: a norm that is infinite or NaN is an error.
        foreach: accepted; all gradients of a dtype are read in one call anyway.
        optimizer: an optimizer of this package, or a list of some, whose next step scales. Those
            of their parameters that have a gradient are ``parameters``.

    Returns:
        The norm before, as a tensor of one element.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; a gradient is that of a
            part of a tensor, such as a table of several processes; or, in the step, a gradient is
            another one than was measured.
        ValueError: another ``norm_type``, or an optimizer has other parameters.
        TypeError: ``optimizer`` is none of this package.

    Source: ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients.

    >>> import torch
    >>> from fusestep.nn.torch import Adam
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = Adam(table.parameters(), sparse="touched")
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> clip_grad_norm_(table.parameters(), 1.0, optimizer=optimizer)  # sqrt(2*2*2 + 2*1*1)
    tensor(3.1623)
    >>> optimizer.step()
    """
    del foreach
    if float(norm_type) != 2.0:
        reject(ValueError, _WHERE, "norm_type", "is not supported", 2, norm_type)
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_gradient = [p for p in every if p.grad is not None]
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [] if optimizer is None else optimizers
    clippings = [(each, _gradients_of(each)) for each in optimizers]
    if optimizers and {id(g) for _, own in clippings for g in own} != {
        id(p.grad) for p in with_gradient
    }:
        expected, got = "all parameters of the optimizers that have a gradient", "others"
        reject(ValueError, _WHERE, "parameters", "are not those of optimizer", expected, got)
    before = {
        each._clipping.known_factor if each._clipping and each._clipping.holds(own) else 1.0
        for each, own in clippings
    } or {1.0}
    if len(before) > 1:
        reject(ValueError, _WHERE, "optimizer", "were clipped apart", "one factor", sorted(before))
    (already,) = before
    # In memory the gradients are still those of before an earlier call for the same step.
    norm = already * _norm(with_gradient)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = float(max_norm) / (norm + 1e-6)
    factor = 1.0 if factor >= 1.0 else factor  # a NaN stays one
    for each, gradients in clippings:
        each._clipping = Clipping(already * factor, gradients)
    if not optimizers and factor != 1.0:
        for parameter in with_gradient:
            gradient = parameter.grad
            is_sparse = gradient.layout == torch.sparse_coo
            (gradient._values() if is_sparse else gradient).mul_(factor)
    is_double = any(p.grad.dtype == torch.float64 for p in with_gradient)
    return torch.tensor(norm, dtype=torch.float64 if is_double else torch.float32)


def _gradients_of(optimizer: Any) -> list[Tensor]:
    if not isinstance(optimizer, Fused):
        expected = "an optimizer of fusestep.nn.torch (not Thor), not what wraps one"
        got = type(optimizer).__name__
        reject(TypeError, _WHERE, "optimizer", "has a wrong type", expected, got)
    every = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [gradient for gradient in every if gradient is not None]


@as_torch
@quiet
def _norm(parameters: Sequence[Tensor]) -> float:
    """The norm of all gradients; dense ones on the host are read in one call a dtype."""
    spans: dict[torch.dtype, list[tuple[int, int]]] = {}
    others: list[Any] = []
    keep = []
    for k, parameter in enumerate(parameters):
        gradient = parameter.grad.detach()
        is_dtensor = local(gradient) is not gradient
        if is_dtensor or is_part(parameter):
            wrong, expected = "is distributed", "a tensor of one process"
            fix = "; torch.nn.utils.clip_grad_norm_ takes it" if is_dtensor else ""
            got = type(gradient).__name__ if is_dtensor else "a part of a table"
            reject(RuntimeError, _WHERE, f"gradient {k}", wrong, expected, got, fix)
        if gradient.layout == torch.sparse_coo:
            rows = rows_of(_WHERE, f"gradient {k}", parameter, gradient)
            others.append(RowTensor(rows.indices, rows.values, table_shape(gradient)))
        elif gradient.is_cuda:
            others.append(array_of(gradient.contiguous()))
        else:
            keep.append(gradient := gradient.contiguous())
            spans.setdefault(gradient.dtype, []).append((gradient.data_ptr(), gradient.numel()))
    total = global_norm(others) ** 2 if others else 0.0
    for dtype, found in spans.items():
        if dtype not in DTYPES:
            reject(RuntimeError, _WHERE, "a gradient", "has a wrong dtype", DTYPE_NAMES, dtype)
        addresses, sizes = np.array(found, np.int64).T
        total += float(squares_at(STORAGES[DTYPES[dtype]], addresses, sizes).sum())
    return math.sqrt(total)
