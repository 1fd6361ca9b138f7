"""Clipping of dense and sparse gradients together: by a norm of all, or by value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.private import parts_of, version_of
from ...kernels.quiet import quiet
from ...kernels.storage import STORAGES
from ...ops.norm import global_norm
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from ...ops.runtime.row_tensor import RowTensor
from ...ops.runtime.step import squares_at
from .engine.memory import DTYPE_NAMES, DTYPES, array_of, is_single
from .engine.part import number
from .engine.tensors import is_part, local, rows_of, table_shape
from .engine.threads import as_torch
from .optimizer import Fused

_NORM, _VALUE = "clip_grad_norm_", "clip_grad_value_"
_STRETCH = 1 << 14  # elements whose powers are summed by one thread


class Clipping:
    """Factors for the gradients that were measured, which the next step applies."""

    def __init__(self) -> None:
        # By the identity of a parameter; it stays alive with its gradient.
        self._known: dict[int, tuple[Tensor, Tensor | None, int, float]] = {}

    def add(self, parameter: Tensor, factor: float) -> None:
        """Scale the gradient that a parameter has now."""
        gradient = parameter.grad
        self._known[id(parameter)] = parameter, gradient, _version(gradient), factor

    def known(self, parameter: Tensor, gradient: Tensor | None) -> float | None:
        """The factor for the gradient of a parameter; None: it is not the one measured."""
        # By identity and version: another tensor is the gradient of another backward, and one that
        # was written meanwhile has another norm.
        if (found := self._known.get(id(parameter))) is None:
            return 1.0
        _, measured, version, factor = found
        return factor if gradient is measured and _version(gradient) == version else None

    def factors(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[float]:
        """The factors of all, or the one that they have in common; 1 for what was not measured.

        Raises:
            RuntimeError: gradients are not those that were measured, or have changed since.
        """
        found = [x for x in map(self.known, parameters, gradients) if x is not None]
        if len(found) < len(parameters):
            wrong, expected = "have changed since they were measured", "those of the norm"
            fix = "; clip right before the step and after scaler.unscale_, or call zero_grad"
            reject(RuntimeError, _NORM, "the gradients", wrong, expected, "others", fix)
        scaled = {x for x, g in zip(found, gradients, strict=True) if g is not None}
        return [*scaled] if len(scaled) == 1 else found

    def without(self, parameter: Tensor | None) -> Clipping | None:
        """What is left after a step, of one parameter or of all."""
        if parameter is None:
            return None
        self._known.pop(id(parameter), None)
        return self if self._known else None


def _version(tensor: Tensor | None) -> int:
    # PyTorch counts no versions of inference tensors, and raises when asked.
    return -1 if tensor is None or tensor.is_inference() else version_of(tensor)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, foreach: bool | None = None, *,
    optimizer: Fused | Sequence[Fused] | None = None,
) -> Tensor:  # fmt: skip
    """Scale gradients so that their norm, all taken together, is at most ``max_norm``::

        norm = (sum of |g|**norm_type over all elements) ** (1/norm_type)
        g <- g * min(1, max_norm / (norm + 1e-6))

    Sparse gradients count as the dense ones that they stand for: rows of equal indices are summed
    first. Nothing dense is built; powers and sums are float64. With ``optimizer`` nothing is
    written to gradients: its next step multiplies them on the way.

    Args:
        parameters: a tensor or an iterable of tensors; each counts once. float32, float64, float16
            or bfloat16; those without a gradient are left out.
        max_norm: the largest norm, at least 0.
        norm_type: above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: a norm that is infinite or NaN is an error. Else it makes gradients 0
            or NaN.
        foreach: changes nothing; all gradients of a dtype are read in one call anyway.
        optimizer: an optimizer of this package, or a list of some, that have ``parameters`` and
            whose next step scales. Others of their parameters are not scaled.

    Returns:
        The norm before, a tensor of one element on the device of the first gradient: float32, or
        float64 where a gradient is.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; a gradient has another
            dtype, layout or device, or is part of a tensor, such as a table of several processes;
            or, in the step, a gradient is another one than was measured.
        ValueError: ``max_norm`` or ``norm_type`` is out of range, or a parameter with a gradient is
            in none of the optimizers.
        TypeError: a kind does not fit; ``optimizer`` is none of this package.
        IndexError: an index of a sparse gradient is out of range.
        Nothing has changed then.

    Differs from ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients: a norm of order
    0 or below, and a negative or NaN ``max_norm``, are errors.

    Source: ``torch.nn.utils.clip_grad_norm_``; Pascanu et al. (2013), arXiv:1211.5063.

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
    limit = _number(_NORM, "max_norm", max_norm)
    check.in_range(_NORM, "max_norm", limit, limit >= 0.0, "at least 0")
    order = _number(_NORM, "norm_type", norm_type)
    check.in_range(_NORM, "norm_type", order, order > 0.0, "above 0, such as 1, 2 or inf")
    every = _parameters(_NORM, parameters)
    measured = [p for p in every if p.grad is not None]
    owners = _owners(every, optimizer)
    by_factor: dict[float, list[Tensor]] = {}
    if any(each._clipping for each, _ in owners):
        before: dict[int, set[float]] = {}
        for each, own in owners:
            for p in own if each._clipping else ():
                # In memory a gradient is still that of before an earlier call for the same step.
                if (factor := each._clipping.known(p, p.grad)) is not None:
                    before.setdefault(id(p), set()).add(factor)
        for p in measured:
            known = before.get(id(p), {1.0})
            if len(known) > 1:
                reject(ValueError, _NORM, "optimizer", "were clipped apart", "one factor", known)
            (factor,) = known
            by_factor.setdefault(factor, []).append(p)
    elif measured:
        by_factor[1.0] = measured
    norms = [x * _norm(own, order) for x, own in by_factor.items()]
    norm = norms[0] if len(norms) == 1 else float(np.linalg.norm(norms, order)) if norms else 0.0
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = limit / (norm + 1e-6)
    factor = 1.0 if factor >= 1.0 else factor  # a NaN stays one
    if optimizer is None and factor != 1.0:
        written = {id(p.grad): _writable(_NORM, p.grad) for p in measured}
        for gradient in written.values():
            gradient.mul_(factor)
    already = {id(p): x for x, own in by_factor.items() for p in own}
    for each, own in owners:
        each._clipping = each._clipping or Clipping()
        for p in own:
            each._clipping.add(p, factor * already.get(id(p), 1.0))
    is_double = any(p.grad.dtype == torch.float64 for p in measured)
    kind = torch.float64 if is_double else torch.float32
    return torch.tensor(norm, dtype=kind, device=measured[0].grad.device if measured else None)


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Bring every element of the gradients into ``[-clip_value, clip_value]``::

        g <- min(max(g, -clip_value), clip_value)

    Sparse gradients count as the dense ones that they stand for: rows of equal indices are summed
    first (in float32 for 16 bits), and the gradient is coalesced afterwards.

    Args:
        parameters: a tensor or an iterable of tensors: float32, float64, float16 or bfloat16;
            those without a gradient are left out.
        clip_value: at least 0.
        foreach: changes nothing.

    Raises:
        ValueError: ``clip_value`` is out of range.
        TypeError: a kind does not fit.
        RuntimeError: a gradient has another dtype, layout or device.
        IndexError: an index of a sparse gradient is out of range.
        Nothing has changed then.

    Differs from ``torch.nn.utils.clip_grad_value_``, which refuses sparse gradients: a negative or
    NaN ``clip_value`` is an error.

    Source: ``torch.nn.utils.clip_grad_value_``.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> clip_grad_value_(table.parameters(), 1.5)
    >>> table.weight.grad.coalesce().values()
    tensor([[1.5000, 1.5000],
            [1.0000, 1.0000]])
    """
    del foreach
    limit = _number(_VALUE, "clip_value", clip_value)
    check.in_range(_VALUE, "clip_value", limit, limit >= 0.0, "at least 0")
    every = [p for p in _parameters(_VALUE, parameters) if p.grad is not None]
    summed = [_summed(_VALUE, f"gradient {k}", p) for k, p in enumerate(every)]
    for p in every:
        _writable(_VALUE, p.grad)
    for p, gradient in zip(every, summed, strict=True):
        if not gradient.is_sparse:
            gradient.clamp_(-limit, limit)
            continue
        indices, values = gradient.indices(), gradient.values().clamp(-limit, limit)
        known = {"is_coalesced": True, "check_invariants": False}
        p.grad.copy_(torch.sparse_coo_tensor(indices, values, gradient.shape, **known))


def _number(where: str, name: str, value: Any) -> float:
    """A number, in a string or a tensor too, as PyTorch takes it."""
    try:
        return number(value)
    except (TypeError, ValueError, RuntimeError):
        return reject(TypeError, where, name, "is no number", "a number", value)


def _parameters(where: str, parameters: Any) -> list[Tensor]:
    """All parameters, each once; their gradients are of a kind that can be read."""
    every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    if not every and isinstance(parameters, GeneratorType):
        text = f"{where}: parameters is an empty generator, so nothing is clipped"
        warnings.warn(text, stacklevel=4)  # of the caller of what `no_grad` wraps
    kinds = set()
    for k, parameter in enumerate(every):
        if not isinstance(parameter, Tensor):
            got = type(parameter).__name__
            reject(TypeError, where, f"parameter {k}", "has a wrong type", "a tensor", got)
        if (gradient := parameter.grad) is None:
            continue
        kind = layout, dtype, device = gradient.layout, gradient.dtype, gradient.device
        if kind in kinds:
            continue
        name = f"gradient {k}"
        if layout not in (torch.strided, torch.sparse_coo):
            reject(RuntimeError, where, name, "has a wrong layout", "strided or sparse_coo", layout)
        if dtype not in DTYPES:
            reject(RuntimeError, where, name, "has a wrong dtype", DTYPE_NAMES, dtype)
        if device.type not in ("cpu", "cuda"):
            expected = "the host or a CUDA device"
            reject(RuntimeError, where, name, "has a wrong device", expected, device)
        kinds.add(kind)
    return [*{id(p): p for p in every}.values()]


def _owners(parameters: Sequence[Tensor], optimizer: Any) -> list[tuple[Any, list[Tensor]]]:
    """The optimizers whose next step scales, each with those of the parameters that it has."""
    several = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    several = [] if optimizer is None else several
    wanted, owners = {id(p) for p in parameters}, []
    for each in several:
        if not isinstance(each, Fused):
            expected = "an optimizer of fusestep.nn.torch (not Thor), not what wraps one"
            reject(TypeError, _NORM, "optimizer", "has a wrong type", expected, type(each).__name__)
        every = chain.from_iterable(group["params"] for group in each.param_groups)
        owners.append((each, [p for p in every if id(p) in wanted]))
    found = {id(p) for _, own in owners for p in own}
    if several and any(id(p) not in found for p in parameters if p.grad is not None):
        expected, got = "parameters of the optimizers", "one with a gradient that is in none"
        reject(ValueError, _NORM, "parameters", "are not those of optimizer", expected, got)
    return owners


def _writable(where: str, gradient: Any) -> Tensor:
    """The elements of a gradient, which can be written in place."""
    values: Tensor = parts_of(gradient)[1] if gradient.layout == torch.sparse_coo else gradient
    lies_on_itself = not is_single(values)
    if lies_on_itself or (values.is_inference() and not torch.is_inference_mode_enabled()):
        got = "elements that share memory" if lies_on_itself else "an inference tensor"
        reject(RuntimeError, where, "a gradient", "cannot be written", "memory of its own", got)
    return values


def _summed(where: str, name: str, parameter: Tensor) -> Tensor:
    """A dense gradient as it is; a sparse one coalesced, 16 bits in float32."""
    gradient: Any = parameter.grad
    if gradient.layout == torch.sparse_coo:
        rows_of(where, name, parameter, gradient)  # for its checks
        indices, shape = parts_of(gradient)[0], tuple(gradient.shape)
        most = torch.tensor(shape[: len(indices)], device=indices.device)[:, None]
        if ((indices < 0) | (indices >= most)).any():
            reject(IndexError, where, name, "has an index out of range", shape, indices)
        is_wide = gradient.dtype == torch.float64
        gradient = (gradient if is_wide else gradient.to(torch.float32)).coalesce()
    found: Tensor = gradient
    return found


@as_torch
@quiet
def _norm(parameters: Sequence[Tensor], order: float) -> float:
    """The norm of all gradients."""
    for k, parameter in enumerate(parameters):
        gradient: Any = parameter.grad
        is_dtensor = local(gradient) is not gradient
        if is_dtensor or is_part(parameter):
            wrong, expected = "is distributed", "a tensor of one process"
            fix = "; torch.nn.utils.clip_grad_norm_ takes it" if is_dtensor else ""
            got = type(gradient).__name__ if is_dtensor else "a part of a table"
            reject(RuntimeError, _NORM, f"gradient {k}", wrong, expected, got, fix)
    return _euclidean(parameters) if order == 2.0 else _of_order(parameters, order)


def _euclidean(parameters: Sequence[Tensor]) -> float:
    """Dense gradients on the host are read in one call a dtype."""
    spans: dict[torch.dtype, list[tuple[int, int]]] = {}
    others: list[Any] = []
    keep = []
    for k, parameter in enumerate(parameters):
        gradient = parameter.grad.detach()
        if gradient.layout == torch.sparse_coo:
            rows = rows_of(_NORM, f"gradient {k}", parameter, gradient)
            others.append(RowTensor(rows.indices, rows.values, table_shape(gradient)))
        elif gradient.is_cuda:
            others.append(array_of(gradient.contiguous()))
        else:
            keep.append(gradient := gradient.contiguous())
            spans.setdefault(gradient.dtype, []).append((gradient.data_ptr(), gradient.numel()))
    total = global_norm(others) ** 2 if others else 0.0
    for dtype, found in spans.items():
        addresses, sizes = np.array(found, np.int64).T
        total += float(squares_at(STORAGES[DTYPES[dtype]], addresses, sizes).sum())
    return math.sqrt(total)


def _of_order(parameters: Sequence[Tensor], order: float) -> float:
    norms = []
    for k, parameter in enumerate(parameters):
        gradient = _summed(_NORM, f"gradient {k}", parameter)
        values = (gradient.values() if gradient.is_sparse else gradient).flatten()
        # Stretches, each summed by one thread: on the host PyTorch would cut by their number.
        whole = len(values) // _STRETCH * _STRETCH
        parts = (
            values[:whole].view(-1, _STRETCH),
            values[whole:].view(-1, max(len(values) - whole, 1)),
        )
        norms += [torch.linalg.vector_norm(p, order, 1, dtype=torch.float64).cpu() for p in parts]
    return float(np.linalg.norm(torch.cat(norms).numpy(), order)) if norms else 0.0
