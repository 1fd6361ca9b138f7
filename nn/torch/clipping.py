"""Clipping of dense and sparse gradients together: by a norm of all, or by value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ...kernels.private import outside_of_graphs, parts_of, version_of
from ...kernels.quiet import quiet
from ...kernels.storage import STORAGES
from ...ops.norm import global_norm
from ...ops.runtime import check
from ...ops.runtime.bags.tensor import BagTensor
from ...ops.runtime.device import refuse_captures
from ...ops.runtime.errors import reject
from ...ops.runtime.row_tensor import RowTensor
from ...ops.runtime.step import squares_at
from .engine.memory import (
    DTYPE_NAMES,
    DTYPES,
    Stretch,
    array_of,
    check_apart,
    check_there,
    in_memory,
    is_single,
    is_zerotensor,
)
from .engine.part import number
from .engine.table_rows import optimizers
from .engine.tensors import is_part_of_table, local, of_mesh, rows_of, table_shape
from .engine.threads import as_torch
from .optimizer import Fused

_NORM, _VALUE = "clip_grad_norm_", "clip_grad_value_"
_STRETCH = 1 << 14  # elements whose powers are summed by one thread


class Clipping:
    """Factors for the gradients that were measured, which the next step applies."""

    def __init__(self) -> None:
        # By the identity of a parameter, which stays alive here. Its gradient does not: a training
        # that goes on without a step would hold two of each.
        self._measured: dict[int, tuple[Tensor, ref[Tensor], int, float]] = {}
        self._absent: dict[int, Tensor] = {}  # parameters that had no gradient

    def add(self, parameter: Tensor, gradient: Tensor | None, factor: float) -> None:
        """Scale the gradient that a parameter has."""
        key = id(parameter)
        if gradient is None:
            self._measured.pop(key, None)
            self._absent[key] = parameter
        else:
            self._absent.pop(key, None)
            self._measured[key] = parameter, ref(gradient), _version(gradient), factor

    def known(self, parameter: Tensor, gradient: Tensor | None) -> float | None:
        """The factor for the gradient of a parameter; None: it is not the one measured."""
        # By identity and version: another tensor is the gradient of another backward, and one that
        # was written meanwhile has another norm.
        if gradient is None:
            return 1.0
        if (found := self._measured.get(id(parameter))) is None:
            return None if id(parameter) in self._absent else 1.0
        _, measured, version, factor = found
        return factor if measured() is gradient and _version(gradient) == version else None

    @property
    def is_over(self) -> bool:
        """Whether none of the gradients that were measured is left, as after a zero_grad."""
        left = (measured() is not None for _, measured, _, _ in self._measured.values())
        return bool(self._measured) and not any(left)

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
            reject(RuntimeError, _NORM, "the gradients", wrong, expected, "others", fix)
        scaled = {x for x, g in zip(found, gradients, strict=True) if g is not None}
        return [*scaled] if len(scaled) == 1 else found

    def without(self, parameter: Tensor | None) -> Clipping | None:
        """The clipping that is left after a step, of one parameter or of all."""
        if parameter is None:
            return None
        self._absent.clear()  # a gradient that comes after a step is one of a later backward
        self._measured.pop(id(parameter), None)
        return self if self._measured and not self.is_over else None


def _version(tensor: Tensor) -> int:
    # PyTorch counts no versions of inference tensors, and raises when asked. What is written to a
    # DTensor is not counted in its shard.
    every = {id(x): x for x in (tensor, local(tensor))}.values()
    return sum(-1 if x.is_inference() else version_of(x) for x in every)


# A name, a parameter, and its gradient, read once: another thread may exchange or free it.
_Given = tuple[str, Tensor, Any]


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
    written to gradients: its next step multiplies them on the way. Tables that step in backward
    have no gradient; a warning says so, unless `EmbeddingBags.update_in_backward` clips them. The
    norm of DTensors is that of all their parts: every process of their meshes calls.

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
            dtype, layout or device, no memory, or is part of a table of several processes; it is
            to be written and shares memory with another; or, in the step, it is another one than
            was measured, while of those that were some are still there.
        ValueError: ``max_norm`` or ``norm_type`` is out of range, a parameter with a gradient is in
            none of the optimizers, or one of these steps in backward.
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
    if torch.compiler.is_dynamo_compiling():
        options = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        return _norm_outside_of_graphs(parameters, max_norm, optimizer=optimizer, **options)
    del foreach
    limit = limit_of(_NORM, "max_norm", max_norm)
    order = number_of(_NORM, "norm_type", norm_type)
    check.in_range(_NORM, "norm_type", order, order > 0.0, "above 0, such as 1, 2 or inf")
    every = _given(_NORM, parameters)
    measured = [own for own in every if own[2] is not None]
    owners = _owners(every, optimizer)
    by_factor: dict[float, list[_Given]] = {}
    if any(each._clipping for each, _ in owners):
        before: dict[int, set[float]] = {}
        for each, has in owners:
            for _, p, gradient in has:
                # In memory a gradient is still that of before an earlier call for the same step.
                clipping = each._clipping
                known = 1.0 if clipping is None else clipping.known(p, gradient)
                before.setdefault(id(p), set()).add(1.0 if known is None else known)
        for one in measured:
            known_of_one = before[id(one[1])]
            if len(known_of_one) > 1:
                wrong, got = "were clipped apart", known_of_one
                reject(ValueError, _NORM, "optimizer", wrong, "one factor", got)
            (factor,) = known_of_one
            by_factor.setdefault(factor, []).append(one)
    elif measured:
        by_factor[1.0] = measured
    norms = [x * _norm(group, order) for x, group in by_factor.items()]
    norm = norms[0] if len(norms) == 1 else float(np.linalg.norm(norms, order)) if norms else 0.0
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = min(limit / (norm + 1e-6), 1.0)  # a NaN stays one
    if optimizer is None and factor != 1.0:
        written = _writable(_NORM, measured, zeros_stay=math.isfinite(factor))
        check_apart(_NORM, [Stretch.of(_elements(g), name) for name, _, g in written])
        for _, _, gradient in written:
            local(gradient).mul_(factor)
    already = {id(p): x for x, group in by_factor.items() for _, p, _ in group}
    for each, has in owners:
        clipping = each._clipping  # which a step of another thread may end
        if clipping is None or clipping.is_over:
            clipping = each._clipping = Clipping()
        for _, p, gradient in has:
            clipping.add(p, gradient, factor * already.get(id(p), 1.0))
    is_double = any(g.dtype == torch.float64 for _, _, g in measured)
    kind = torch.float64 if is_double else torch.float32
    return torch.tensor(norm, dtype=kind, device=measured[0][2].device if measured else None)


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Bring every element of the gradients into ``[-clip_value, clip_value]``::

        g <- min(max(g, -clip_value), clip_value)

    Sparse gradients count as the dense ones that they stand for: rows of equal indices are summed
    first (in float32 for 16 bits), and the gradient is coalesced afterwards. Tables that step in
    backward have none: see `clip_grad_norm_`.

    Args:
        parameters: a tensor or an iterable of tensors: float32, float64, float16 or bfloat16;
            those without a gradient are left out.
        clip_value: at least 0.
        foreach: changes nothing.

    Raises:
        ValueError: ``clip_value`` is out of range.
        TypeError: a kind does not fit.
        RuntimeError: a gradient has another dtype, layout or device, or no memory.
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
    if torch.compiler.is_dynamo_compiling():
        _values_outside_of_graphs(parameters, clip_value)
        return
    del foreach
    limit = limit_of(_VALUE, "clip_value", clip_value)
    every = [(*own[:2], _here(*own)) for own in _given(_VALUE, parameters) if own[2] is not None]
    sparse = {id(own[2]): within(limit, *own) for own in every if own[2].is_sparse}
    for _, _, gradient in _writable(_VALUE, every, zeros_stay=True):
        if (clipped := sparse.get(id(gradient))) is None:
            gradient.clamp_(-limit, limit)
        else:
            gradient.copy_(clipped)


_norm_outside_of_graphs = outside_of_graphs(clip_grad_norm_)
_values_outside_of_graphs = outside_of_graphs(clip_grad_value_)


def _here(name: str, _: Tensor, gradient: Any) -> Tensor:
    """The elements of a gradient that are here, as they are clipped one by one."""
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        wrong, expected = "is a sum that processes have not taken", "shards or replicas"
        reject(RuntimeError, _VALUE, name, wrong, expected, gradient.placements)
    return local(gradient)


def limit_of(where: str, name: str, value: Any) -> float:
    """A number of at least 0."""
    limit = number_of(where, name, value)
    check.in_range(where, name, limit, limit >= 0.0, "at least 0")
    return limit


def within(limit: float, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient with every element in ``[-limit, limit]``; rows of equal indices are summed."""
    if not gradient.is_sparse:
        return gradient.clamp(-limit, limit)
    summed = _summed(_VALUE, name, parameter, gradient)
    values = summed.values().clamp(-limit, limit).to(gradient.dtype)
    known = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(summed.indices(), values, summed.shape, **known)


def number_of(where: str, name: str, value: Any) -> float:
    """A number, in a string or a tensor too, as PyTorch takes it."""
    try:
        return number(value)
    except (TypeError, ValueError, RuntimeError):
        return reject(TypeError, where, name, "is no number", "a number", value)


def _given(where: str, parameters: Any) -> list[_Given]:
    """All parameters, each once, with gradients of a kind that can be read."""
    every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    if not every and isinstance(parameters, GeneratorType):
        text = f"{where}: parameters is an empty generator, so nothing is clipped"
        warnings.warn(text, stacklevel=4)  # of the caller of what `no_grad` wraps
    kinds, found = set(), dict[int, _Given]()
    for k, parameter in enumerate(every):
        if not isinstance(parameter, Tensor):
            got = type(parameter).__name__
            reject(TypeError, where, f"parameter {k}", "has a wrong type", "a tensor", got)
        name, gradient = f"gradient {k}", parameter.grad
        found.setdefault(id(parameter), (name, parameter, gradient))
        if gradient is None:
            continue
        kind = layout, dtype, device = gradient.layout, gradient.dtype, gradient.device
        if kind in kinds:
            continue
        if layout not in (torch.strided, torch.sparse_coo):
            reject(RuntimeError, where, name, "has a wrong layout", "strided or sparse_coo", layout)
        if dtype not in DTYPES:
            reject(RuntimeError, where, name, "has a wrong dtype", DTYPE_NAMES, dtype)
        if device.type not in ("cpu", "cuda"):
            expected = "the host or a CUDA device"
            reject(RuntimeError, where, name, "has a wrong device", expected, device)
        if device.type == "cuda":
            refuse_captures([device])
        kinds.add(kind)
    absent = {id(p) for _, p, g in found.values() if g is None and p.requires_grad}
    for each in optimizers() if absent else ():
        bags = getattr(each, "_in_backward", None)
        updates = bags and getattr(bags(), "_updates", None)
        if updates and updates.limit is None and absent & {*map(id, updates._weights)}:
            text = "tables of EmbeddingBags step in backward, before this, and are not clipped"
            fix = "; update_in_backward(optimizer, max_norm=...), or clip_value, clips them"
            warnings.warn(f"{where}: {text}{fix}", RuntimeWarning, stacklevel=4)
    return [*found.values()]


def _owners(given: Sequence[_Given], optimizer: Any) -> list[tuple[Any, list[_Given]]]:
    """The optimizers whose next step scales, each with those of the parameters that it has."""
    if optimizer is None:
        return []
    several = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    wanted, owners, found = {id(own[1]): own for own in given}, [], set[int]()
    for each in several:
        if not isinstance(each, Fused):
            expected = "an optimizer of fusestep.nn.torch (not Thor), not what wraps one"
            reject(TypeError, _NORM, "optimizer", "has a wrong type", expected, type(each).__name__)
        if each._in_backward is not None and each._in_backward() is not None:
            expected, got = "update_in_backward(optimizer, max_norm=...)", type(each).__name__
            reject(ValueError, _NORM, "optimizer", "steps in backward", expected, got)
        keys = [id(p) for group in each.param_groups for p in group["params"]]
        owners.append((each, [wanted[key] for key in keys if key in wanted]))
        found.update(keys)
    if several and any(g is not None and id(p) not in found for _, p, g in given):
        expected, got = "parameters of the optimizers", "one with a gradient that is in none"
        reject(ValueError, _NORM, "parameters", "are not those of optimizer", expected, got)
    return owners


def _writable(where: str, given: Sequence[_Given], *, zeros_stay: bool) -> list[_Given]:
    """Each gradient once, after a check that all can be written; not zeros without memory."""
    found: dict[int, _Given] = {}
    for own in given:
        name, _, gradient = own
        values = _elements(gradient)
        if is_zerotensor(values):
            if zeros_stay:
                continue
            expected, got = "memory of its own", "zeros without memory"
            reject(RuntimeError, where, name, "cannot be written", expected, got)
        check_there(where, name, values)
        lies_on_itself = not is_single(values)
        if lies_on_itself or (values.is_inference() and not torch.is_inference_mode_enabled()):
            got = "elements that share memory" if lies_on_itself else "an inference tensor"
            reject(RuntimeError, where, name, "cannot be written", "memory of its own", got)
        found.setdefault(id(gradient), own)
    return [*found.values()]


def _elements(gradient: Any) -> Tensor:
    """The elements that a gradient has in memory here: of a sparse one its values."""
    values: Tensor = parts_of(gradient)[1] if gradient.is_sparse else local(gradient)
    return values


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


@outside_of_graphs  # also where PyTorch's compiler has not seen the call, as with a generator
@as_torch
@quiet
def _norm(given: Sequence[_Given], order: float) -> float:
    """The norm of all gradients, in all processes of their meshes."""
    here: dict[Any, list[_Given]] = {}  # by mesh; None: this process has all of them
    for name, parameter, gradient in given:
        if is_part_of_table(parameter):
            expected, got = "a tensor of one process, or a DTensor", "a part of a table"
            reject(RuntimeError, _NORM, name, "is distributed", expected, got)
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


def _euclidean(given: Sequence[_Given], _: float) -> float:
    """Dense gradients on the host are read in one call a dtype."""
    spans: dict[torch.dtype, list[tuple[int, int]]] = {}
    others: list[Any] = []
    keep = []  # until they are read
    for name, parameter, gradient in given:
        if isinstance(gradient, BagTensor):
            others.append(gradient)
            continue
        if gradient.is_sparse:
            rows = rows_of(_NORM, name, parameter, gradient)
            indices, values = (
                array_of(x) if isinstance(x, Tensor) else x for x in (rows.indices, rows.values)
            )
            others.append(RowTensor(indices, values, table_shape(gradient)))
            continue
        keep.append(read := in_memory(gradient, _NORM, name))
        if read.is_cuda:
            others.append(array_of(read))
        else:
            spans.setdefault(read.dtype, []).append((read.data_ptr(), read.numel()))
    total = global_norm(others) ** 2 if others else 0.0
    for dtype, found in spans.items():
        addresses, sizes = np.array(found, np.int64).T
        total += float(squares_at(STORAGES[DTYPES[dtype]], addresses, sizes).sum())
    return math.sqrt(total)


def _of_order(given: Sequence[_Given], order: float) -> float:
    norms = []
    for own in given:
        name, _, g = own
        read = _summed(_NORM, *own).values() if g.is_sparse else in_memory(g, _NORM, name)
        values = read.flatten()
        # Stretches, each summed by one thread: on the host PyTorch would cut by their number.
        whole = len(values) // _STRETCH * _STRETCH
        parts = (
            values[:whole].view(-1, _STRETCH),
            values[whole:].view(-1, max(len(values) - whole, 1)),
        )
        norms += [torch.linalg.vector_norm(p, order, 1, dtype=torch.float64).cpu() for p in parts]
    return float(np.linalg.norm(torch.cat(norms).numpy(), order)) if norms else 0.0
