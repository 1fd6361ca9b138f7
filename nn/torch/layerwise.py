"""Steps that are scaled by the norms of a whole parameter: LAMB and LARS."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules import lamb as rules
from ...kernels.rules.torch import lars as lars_rules
from .engine.options import Rounding, betas_in_range, not_negative, with_defaults
from .engine.part import Group, Method
from .optimizer import Fused


class Lamb(Fused, torch.optim.Optimizer):
    """LAMB: Adam's direction, scaled per parameter to the parameter's norm.

    With L2 norms over a whole parameter, at its update t = 1, 2, ...::

        m <- m + (1 - beta1)*(g - m),   v <- v + (1 - beta2)*(g*g - v)
        u  = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay*w
        w <- w - lr * ratio * u,   ratio = |w| / |u|, or 1 where either norm is 0

    Sparse gradients raise in the step: the norm is that of the whole parameter.

    Source: You et al. (2020), arXiv:1904.00962.
    """

    _takes_sparse = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.0, *, maximize: bool = False,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas)
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(rules.LAMB, couples=False, states=("exp_avg", "exp_avg_sq"))

    def scalars(self, group: Group, step: float) -> Numbers:
        beta1, beta2 = group["betas"]
        corrections = 1.0 / (1.0 - beta1**step), 1.0 / (1.0 - beta2**step)
        options = group["eps"], group["weight_decay"], group["lr"]
        return (1.0 - beta1, 1.0 - beta2, *corrections, *options)


class LARS(Fused, torch.optim.Optimizer):
    """LARS: momentum on gradients that are scaled to the norm of their parameter.

    With L2 norms over a whole parameter; at the first update ``a = g``::

        c  = trust_coefficient * |w| / (|g| + weight_decay*|w| + eps), or 1 where |w| or |g| is 0
        g <- c * (g + weight_decay*w)
        a <- momentum*a + (1 - dampening)*g
        w <- w - lr*a,   nesterov: w - lr*(g + momentum*a)

    A group with ``trust_coefficient=None``, for biases and norms, has ``c = 1``.

    Args:
        momentum, weight_decay, eps: at least 0.
        trust_coefficient: at least 0, or None.

    Sparse gradients raise in the step: the norm is that of the whole parameter.

    Source: You, Gitman and Ginsburg (2017), arXiv:1708.03888.
    """

    _counts_updates = False
    _takes_sparse = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-1, momentum: float = 0.9,
        dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
        trust_coefficient: float | None = 1e-3, eps: float = 1e-8, *, maximize: bool = False,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps,
                     trust_coefficient=trust_coefficient or 0.0)  # fmt: skip
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:
        rule = lars_rules.TORCH_LARS_NESTEROV if group["nesterov"] else lars_rules.TORCH_LARS
        return Method(rule, couples=False, states=("momentum_buffer",))

    def scalars(self, group: Group, step: float) -> Numbers:
        dampening = group["dampening"] if step > 1 else 0.0
        lr, momentum = group["lr"], group["momentum"]
        return lr, momentum, 1.0 - dampening, 1.0, group["weight_decay"]

    def constants(self, group: Group) -> dict[str, float]:
        # What `Rule.factor` takes are numbers: NaN stands for None.
        coefficient = group["trust_coefficient"]
        return {
            "weight_decay": group["weight_decay"],
            "trust_coefficient": math.nan if coefficient is None else coefficient,
            "epsilon": group["eps"],
        }
