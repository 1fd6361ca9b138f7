"""Adam, AdamW, and Adam on the rows that occur."""

from __future__ import annotations

import math
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules.torch import adam as rules
from ...ops.runtime.errors import reject
from ..engine.reader import is_row_sparse
from .engine.options import (
    EPS_HAT,
    ROWWISE,
    Rounding,
    Sparse,
    arguments,
    betas_in_range,
    not_negative,
    with_defaults,
)
from .engine.part import Group, Method, RuleChoice, number, shrink_of
from .optimizer import Fused


@lru_cache(64)  # asked for in every step
def moments_of(beta1: float, beta2: float) -> Numbers:
    """The scalars of Adam's two moments."""
    return rules.share_of(1.0 - beta1), 0.0, beta2, 1.0 - beta2


# PyTorch's class takes it from 2.7 on.
_DECOUPLED = dict.fromkeys(
    {"decoupled_weight_decay"} - signature(torch.optim.Adam).parameters.keys(), False
)


class Adam(Fused, torch.optim.Adam):
    """PyTorch's Adam, dense and row-sparse.

    At update t = 1, 2, ... of a parameter::

        g <- g + weight_decay*w            (decoupled_weight_decay: w <- w - lr*weight_decay*w)
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g     (amsgrad: the largest v so far in the place of v)
        w <- w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    With ``eps_hat`` the last line is
    ``w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)``.

    Differs from ``torch.optim.Adam``: it takes sparse gradients, and ``eps_hat`` is new. States,
    and numbers but for roundings, are the same.

    Source: ``torch.optim.Adam``; Kingma and Ba (2015), arXiv:1412.6980.
    """

    _more_options = EPS_HAT | _DECOUPLED

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, foreach: bool | None = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        fused: bool | None = None, decoupled_weight_decay: bool = False, eps_hat: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        is_coupled = not group.get("decoupled_weight_decay")
        if group.get("rowwise_bias_correction"):
            if group["amsgrad"]:
                where, name = type(self).__name__, "rowwise_bias_correction"
                reject(ValueError, where, name, "excludes amsgrad", "at most one of them", "both")
            return Method(rules.TORCH_ADAM_BY_ROW, is_coupled)
        return Method(rules.TORCH_AMSGRAD if group["amsgrad"] else rules.TORCH_ADAM, is_coupled)

    def scalars(self, group: Group, step: float) -> Numbers:
        (beta1, beta2), lr = group["betas"], group["lr"]
        shrink = shrink_of(group) if group.get("decoupled_weight_decay") else 1.0
        if group.get("rowwise_bias_correction"):
            hat = float(group["eps_hat"])
            return (*moments_of(beta1, beta2), lr, 1.0, group["eps"], shrink, hat)
        size, correction = lr / (1.0 - beta1**step), math.sqrt(1.0 - beta2**step)
        # One rule for both places of epsilon: the correction of the second moment is a factor of
        # the step, or of the root to which epsilon is added.
        step_sizes = (size * correction, 1.0) if group["eps_hat"] else (size, 1.0 / correction)
        return (*moments_of(beta1, beta2), *step_sizes, group["eps"], shrink)


class AdamW(Fused, torch.optim.AdamW):
    """PyTorch's AdamW: Adam with a decoupled weight decay, dense and row-sparse.

    At update t = 1, 2, ... of a parameter::

        w <- w - lr*weight_decay*w
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g     (amsgrad: the largest v so far in the place of v)
        w <- w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    With ``eps_hat`` the last line is
    ``w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)``.

    Differs from ``torch.optim.AdamW``: it takes sparse gradients, and ``eps_hat`` and
    ``rowwise_bias_correction`` are new. States, and numbers but for roundings, are the same.

    Source: ``torch.optim.AdamW``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = AdamW(table.parameters(), lr=0.1, sparse="touched")
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
        fused: bool | None = None, eps_hat: bool = False, rowwise_bias_correction: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    method = Adam.method
    scalars = Adam.scalars
    _more_options = EPS_HAT | ROWWISE

    def _complete(self, group: dict[str, Any]) -> None:
        super()._complete(group)
        group["decoupled_weight_decay"] = True  # a state of PyTorch before 2.7 does not


class SparseAdam(Fused, torch.optim.SparseAdam):
    """PyTorch's SparseAdam: Adam on the rows that occur, for sparse gradients only.

    Rows of equal indices are summed first. At update t = 1, 2, ... of a parameter, in the
    rows that occur::

        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g
        w <- w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)

    A step with a dense gradient is a RuntimeError, as in PyTorch; but for the step with a gradient
    and a learning rate of 0 by which ``torch.distributed.checkpoint`` makes states: PyTorch's
    cannot resume from there.

    Differs from ``torch.optim.SparseAdam``: what stands behind ``maximize`` is new. States,
    and numbers but for roundings, are the same.

    Source: ``torch.optim.SparseAdam``.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = SparseAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, maximize: bool = False, *, rowwise_bias_correction: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    _more_options = ROWWISE

    def method(self, group: Group) -> Method:
        by_row = group["rowwise_bias_correction"]
        rule = rules.TORCH_ADAM_BY_ROW if by_row else rules.TORCH_ADAM
        return Method(rule, couples=False, touches=True)

    def scalars(self, group: Group, step: float) -> Numbers:
        beta1, beta2 = group["betas"]
        if group["rowwise_bias_correction"]:
            moments = moments_of(beta1, beta2)
            return (*moments, group["lr"], 1.0, group["eps"], 1.0, 1.0)
        size = group["lr"] * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        return 1.0 - beta1, 0.0, beta2, 1.0 - beta2, size, 1.0, group["eps"], 1.0

    def _new_step(self) -> Any:
        # Not a tensor as in the other classes, but an int, as PyTorch's class has it.
        return 0

    def _check(
        self, group: Group, choice: RuleChoice, name: str, parameter: Tensor, gradient: Any
    ) -> bool:
        if is_row_sparse(gradient):
            return super()._check(group, choice, name, parameter, gradient)
        # By such a step torch.distributed.checkpoint makes states.
        if number(group["lr"]) == 0.0 and parameter not in self.state:
            return False
        raise RuntimeError(
            "SparseAdam does not support dense gradients, please consider Adam instead"
        )


class LazyAdam(Fused, torch.optim.Optimizer):
    """Adam that leaves rows alone which do not occur in a sparse gradient.

    At update t = 1, 2, ... of a table, in the rows that occur (of a dense gradient, in all)::

        g <- g + weight_decay*w
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g     (amsgrad: the largest v so far in the place of v)
        w <- w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    With ``eps_hat`` the last line is
    ``w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)``. The count of updates,
    and with it the correction of the bias, is that of the whole table.

    Args:
        weight_decay: coupled, of the rows that occur; at least 0.

    ``torch.optim`` has none: its Adam refuses sparse gradients, and its SparseAdam dense ones.

    Source: ``mindspore.nn.LazyAdam``, with PyTorch's numbers.

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = LazyAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, *,
        maximize: bool = False, eps_hat: bool = False, rowwise_bias_correction: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:
        return Adam.method(self, group)._replace(touches=True)

    scalars = Adam.scalars
    _more_options = EPS_HAT | ROWWISE
