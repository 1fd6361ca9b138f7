"""Clipping of dense and sparse gradients together, by a norm of all or by value; in trainers too.

The trainers are those of Hugging Face and Lightning. Neither is imported: the classes here stand
before theirs in the bases of a user's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.private import outside_of_graphs, parts_of
from ...ops.runtime import check
from ...ops.runtime.device import refuse_captures
from ...ops.runtime.errors import reject
from .engine import memory
from .engine.clipping import (
    NORM,
    VALUE,
    Clipping,
    NamedGradient,
    checked_number,
    limit_of,
    norm_of,
    within,
)
from .engine.table_rows import optimizers
from .engine.tensors import local
from .optimizer import Fused


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
    limit = limit_of(NORM, "max_norm", max_norm)
    order = checked_number(NORM, "norm_type", norm_type)
    check.in_range(NORM, "norm_type", order, order > 0.0, "above 0, such as 1, 2 or inf")
    every = _given(NORM, parameters)
    measured = [item for item in every if item[2] is not None]
    owners = _owners(every, optimizer)
    by_factor: dict[float, list[NamedGradient]] = {}
    before: dict[int, set[float]] = {}
    for each, has in owners:
        for _, p, gradient in has:
            # In memory a gradient is still that of before an earlier call for the same step.
            clipping = each._clipping
            scale = 1.0 if clipping is None else clipping.known(p, gradient)
            before.setdefault(id(p), set()).add(1.0 if scale is None else scale)
    for one in measured:
        factor, *others = factors = before.get(id(one[1]), {1.0})
        if others:
            reject(ValueError, NORM, "optimizer", "were clipped apart", "one factor", factors)
        by_factor.setdefault(factor, []).append(one)
    norms = [x * norm_of(group, order) for x, group in by_factor.items()]
    norm = norms[0] if len(norms) == 1 else float(np.linalg.norm(norms, order)) if norms else 0.0
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    factor = min(limit / (norm + 1e-6), 1.0)  # a NaN stays one
    if optimizer is None and factor != 1.0:
        written = _writable(NORM, measured, zeros_stay=math.isfinite(factor))
        memory.check_no_alias(NORM, [memory.Span.of(_elements(g), name) for name, _, g in written])
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
    limit = limit_of(VALUE, "clip_value", clip_value)
    every = [(*item[:2], _here(*item)) for item in _given(VALUE, parameters) if item[2] is not None]
    sparse = {id(item[2]): within(limit, *item) for item in every if item[2].is_sparse}
    for _, _, gradient in _writable(VALUE, every, zeros_stay=True):
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
        reject(RuntimeError, VALUE, name, wrong, expected, gradient.placements)
    return local(gradient)


def _given(where: str, parameters: Any) -> list[NamedGradient]:
    """All parameters, each once, with gradients of a kind that can be read."""
    every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    if not every and isinstance(parameters, GeneratorType):
        text = f"{where}: parameters is an empty generator, so nothing is clipped"
        warnings.warn(text, stacklevel=4)  # of the caller of what `no_grad` wraps
    kinds, named = set(), dict[int, NamedGradient]()
    for k, parameter in enumerate(every):
        if not isinstance(parameter, Tensor):
            got = type(parameter).__name__
            reject(TypeError, where, f"parameter {k}", "has a wrong type", "a tensor", got)
        name, gradient = f"gradient {k}", parameter.grad
        named.setdefault(id(parameter), (name, parameter, gradient))
        if gradient is None:
            continue
        kind = layout, dtype, device = gradient.layout, gradient.dtype, gradient.device
        if kind in kinds:
            continue
        if layout not in (torch.strided, torch.sparse_coo):
            reject(RuntimeError, where, name, "has a wrong layout", "strided or sparse_coo", layout)
        if dtype not in memory.DTYPES:
            reject(RuntimeError, where, name, "has a wrong dtype", memory.DTYPE_NAMES, dtype)
        if device.type not in ("cpu", "cuda"):
            expected = "the host or a CUDA device"
            reject(RuntimeError, where, name, "has a wrong device", expected, device)
        if device.type == "cuda":
            refuse_captures([device])
        kinds.add(kind)
    absent = {id(p) for _, p, g in named.values() if g is None and p.requires_grad}
    for each in optimizers() if absent else ():
        bags = getattr(each, "_in_backward", None)
        updates = bags and getattr(bags(), "_updates", None)
        if updates and updates.limit is None and absent & {*map(id, updates.weights)}:
            text = "tables of EmbeddingBags step in backward, before this, and are not clipped"
            fix = "; update_in_backward(optimizer, max_norm=...), or clip_value, clips them"
            warnings.warn(f"{where}: {text}{fix}", RuntimeWarning, stacklevel=4)
    return [*named.values()]


def _owners(
    gradients: Sequence[NamedGradient], optimizer: Any
) -> list[tuple[Any, list[NamedGradient]]]:
    """The optimizers whose next step scales, each with those of the parameters that it has."""
    if optimizer is None:
        return []
    several = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    wanted, owners, held = {id(item[1]): item for item in gradients}, [], set[int]()
    for each in several:
        if not isinstance(each, Fused):
            expected = "an optimizer of fusestep.nn.torch (not Thor), not what wraps one"
            reject(TypeError, NORM, "optimizer", "has a wrong type", expected, type(each).__name__)
        if each._in_backward is not None and each._in_backward() is not None:
            expected, got = "update_in_backward(optimizer, max_norm=...)", type(each).__name__
            reject(ValueError, NORM, "optimizer", "steps in backward", expected, got)
        keys = [id(p) for group in each.param_groups for p in group["params"]]
        owners.append((each, [wanted[key] for key in keys if key in wanted]))
        held.update(keys)
    if several and any(g is not None and id(p) not in held for _, p, g in gradients):
        expected, got = "parameters of the optimizers", "one with a gradient that is in none"
        reject(ValueError, NORM, "parameters", "are not those of optimizer", expected, got)
    return owners


def _writable(
    where: str, gradients: Sequence[NamedGradient], *, zeros_stay: bool
) -> list[NamedGradient]:
    """Each gradient once, after a check that all can be written; not zeros without memory."""
    named: dict[int, NamedGradient] = {}
    for item in gradients:
        name, _, gradient = item
        values = _elements(gradient)
        if memory.is_zerotensor(values):
            if zeros_stay:
                continue
            expected, got = "memory of its own", "zeros without memory"
            reject(RuntimeError, where, name, "cannot be written", expected, got)
        memory.check_there(where, name, values)
        lies_on_itself = not memory.is_single(values)
        if lies_on_itself or (values.is_inference() and not torch.is_inference_mode_enabled()):
            got = "elements that share memory" if lies_on_itself else "an inference tensor"
            reject(RuntimeError, where, name, "cannot be written", "memory of its own", got)
        named.setdefault(id(gradient), item)
    return [*named.values()]


def _elements(gradient: Any) -> Tensor:
    """The elements that a gradient has in memory here: of a sparse one its values."""
    values: Tensor = parts_of(gradient)[1] if gradient.is_sparse else local(gradient)
    return values


class ClippingTrainer:
    """A ``transformers.Trainer`` that clips by the norm of sparse gradients too.

    ::

        class MyTrainer(ClippingTrainer, transformers.Trainer): ...

    Hugging Face's Trainer measures gradients in every step, for its log even with
    ``max_grad_norm=0``, by ``clip_grad_norm_`` of its accelerator; PyTorch has no norm of sparse
    ones. Where a gradient is sparse, `clip_grad_norm_` of this package takes its place, for any
    optimizer; where none is, nothing changes.

    >>> class Accelerator:  # as accelerate has it
    ...     def unscale_gradients(self): ...
    ...     def clip_grad_norm_(self, parameters, max_norm, norm_type=2): ...
    >>> class Trainer:  # as transformers has it
    ...     def __init__(self):
    ...         self.create_accelerator_and_postprocess()
    ...     def create_accelerator_and_postprocess(self):
    ...         self.accelerator = Accelerator()
    >>> class MyTrainer(ClippingTrainer, Trainer): ...
    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> MyTrainer().accelerator.clip_grad_norm_(table.parameters(), 1.0)
    tensor(3.1623)
    """

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the Trainer does, and let it take sparse gradients."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        theirs = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = partial(_clip, self.accelerator, theirs)


class ClippingModule:
    """A ``lightning.LightningModule`` that clips sparse gradients too, by norm or by value.

    ::

        class MyModule(ClippingModule, lightning.LightningModule): ...

    ``gradient_clip_val`` and ``gradient_clip_algorithm`` of the Trainer then act on the gradients
    of an optimizer of which some are sparse, by `clip_grad_norm_` and `clip_grad_value_` of this
    package; where none is, nothing changes.

    Raises:
        RuntimeError: in a step, an optimizer with ``fused=True`` leaves unscaling to its step,
            which comes after clipping.

    >>> class LightningModule:  # as lightning has it
    ...     class trainer: scaler = None
    ...     def configure_gradient_clipping(self, optimizer, **kwargs): ...
    >>> class MyModule(ClippingModule, LightningModule): ...
    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> MyModule().configure_gradient_clipping(torch.optim.SGD(table.parameters()), 1.5, "value")
    >>> table.weight.grad.coalesce().values()
    tensor([[1.5000, 1.5000],
            [1.0000, 1.0000]])
    """

    trainer: Any

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:  # fmt: skip
        """Clip the gradients of an optimizer before its step; the Trainer calls it."""
        groups = optimizer.param_groups
        every = list(chain.from_iterable(group["params"] for group in groups))
        if not _any_is_sparse(every):
            super().configure_gradient_clipping(  # type: ignore[misc]
                optimizer, gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )  # fmt: skip
        elif gradient_clip_val:
            if self.trainer.scaler is not None and any(group.get("fused") for group in groups):
                wrong = "fused=True leaves unscaling to the step, after clipping"
                raise RuntimeError(f"ClippingModule: {wrong}: expected fused=False with a scaler")
            clip = clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_
            clip(every, gradient_clip_val)


def _clip(
    accelerator: Any, theirs: Callable[..., Any], parameters: Iterable[Tensor], max_norm: float,
    norm_type: float = 2,
) -> Any:  # fmt: skip
    every = list(parameters)
    if not _any_is_sparse(every):
        return theirs(every, max_norm, norm_type=norm_type)
    accelerator.unscale_gradients()
    return clip_grad_norm_(every, max_norm, norm_type)


def _any_is_sparse(parameters: Iterable[Tensor]) -> bool:
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)
