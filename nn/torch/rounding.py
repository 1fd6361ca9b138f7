"""Updates that rounding to 16 bits would lose."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...ops.runtime.errors import reject
from ..base.arguments import check_kind
from .engine.part import number
from .engine.tensors import is_part
from .optimizer import FusedOptimizer


@torch.no_grad()
def rounded_away(optimizer: FusedOptimizer) -> dict[Tensor, float]:
    """The share of each parameter that the next step would move, and rounding would keep in place.

    Of an element whose weight is w, and would be x after a step without rounding, that is::

        x != w  and  round(x) == round(w)

    with ``round`` to the nearest number of the parameter's dtype; w is the whole weight, with what
    lies beside it. With ``rounding="nearest"`` these updates are lost in every step; other ways of
    rounding keep them. Gradients are divided by an attribute ``grad_scale``, as in a step, and are
    not clipped. Nothing is written: the step is taken on copies of all parameters and states, in
    float32 (float64 for float64 parameters).

    Args:
        optimizer: one of this package, with gradients in ``.grad``, dense or sparse.

    Returns:
        By parameter that has a gradient: a share from 0 to 1 of all its elements. ``{name:
        shares[p] for name, p in model.named_parameters() if p in shares}`` has them by name.

    Raises:
        TypeError: it is another optimizer, or `Thor`.
        RuntimeError: as ``step``; a parameter is distributed.

    >>> import torch
    >>> from fusestep.nn import torch as fused
    >>> w = torch.nn.Parameter(torch.tensor([0.01, 1.0, 100.0, 5.0], dtype=torch.bfloat16))
    >>> optimizer = fused.SGD([w], lr=1e-3)
    >>> w.grad = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    >>> float(rounded_away(optimizer)[w])
    0.5
    """
    where = "rounded_away"
    expected = "a FusedOptimizer of fusestep.nn.torch"
    check_kind(where, "optimizer", optimizer, FusedOptimizer, expected)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if is_part(p):
            reject(RuntimeError, where, "a parameter", "is distributed", "a whole one", type(p))
    gradients = tuple(p.grad for p in parameters)
    trial = copy.deepcopy(optimizer)
    copies: list[Any] = [p for group in trial.param_groups for p in group["params"]]
    wholes = []
    for p in copies:
        state = trial.state.get(p, {})
        p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        if "master" in state:
            p.data.copy_(state.pop("master"))
        elif "remainder" in state:
            p.data.add_(state.pop("remainder"))
        wholes.append(p.detach().clone())
    for group in trial.param_groups:
        group["rounding"] = "nearest"
    scale = vars(optimizer).get("grad_scale")
    trial._step(None, 1.0 if scale is None else 1.0 / number(scale), gradients)
    return {
        p: float(((x != w) & (x.to(p.dtype) == w.to(p.dtype))).float().mean())
        for p, x, w, g in zip(parameters, copies, wholes, gradients, strict=True)
        if g is not None and p.numel()
    }
