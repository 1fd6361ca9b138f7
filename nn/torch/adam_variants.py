"""Variants of Adam: other moments, other steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules import adam as plain_rules
from ...kernels.rules import lion as lion_rules
from ...kernels.rules.torch import adam as rules
from .adam import moments_of
from .engine.options import Rounding, Sparse, arguments, betas_in_range, not_negative, with_defaults
from .engine.part import Group, Method, number, shrink_of
from .optimizer import Fused


class NAdam(Fused, torch.optim.NAdam):
    """PyTorch's NAdam: Adam with Nesterov's momentum.

    At update t = 1, 2, ... of a parameter, with
    ``mu_t = beta1 * (1 - 0.5 * 0.96**(t*momentum_decay))`` and their product ``p`` so far::

        g <- g + weight_decay*w            (decoupled_weight_decay: w <- w - lr*weight_decay*w)
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g
        d = sqrt(v / (1 - beta2**t)) + eps
        w <- w - lr * (1 - mu_t) / (1 - p) * g / d - lr * mu_(t+1) / (1 - p*mu_(t+1)) * m / d

    Args:
        momentum_decay: at least 0; see the formula.

    Source: ``torch.optim.NAdam``; Dozat (2016).
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 2e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0, momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False, *, foreach: bool | None = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        return Method(rules.TORCH_NADAM, not group.get("decoupled_weight_decay"))

    def numbers(self, group: Group) -> dict[str, float]:  # noqa: ARG002
        return {"mu_product": 1.0}

    def next_numbers(self, group: Group, step: float) -> dict[str, Any]:
        # In the type of the state, as PyTorch multiplies it.
        return {"mu_product": group["mu_product"] * _momentum(group, step)}

    def scalars(self, group: Group, step: float) -> Numbers:
        (beta1, beta2), lr = group["betas"], group["lr"]
        mu, mu_next = _momentum(group, step), _momentum(group, step + 1)
        product = number(self.next_numbers(group, step)["mu_product"])
        gradient_size = lr * (1.0 - mu) / (1.0 - product)
        moment_size = lr * mu_next / (1.0 - product * mu_next)
        shrink = shrink_of(group) if group.get("decoupled_weight_decay") else 1.0
        root = 1.0 / math.sqrt(1.0 - beta2**step)
        scalars = moment_size, root, group["eps"], shrink, gradient_size
        return (*moments_of(beta1, beta2), *scalars)


def _momentum(group: Group, step: float) -> float:
    beta1, _ = group["betas"]
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * group["momentum_decay"])))


class RAdam(Fused, torch.optim.RAdam):
    """PyTorch's RAdam: Adam that waits until the second moment is known well enough.

    At update t = 1, 2, ... of a parameter, with
    ``r_inf = 2 / (1 - beta2) - 1`` and ``r = r_inf - 2*t*beta2**t / (1 - beta2**t)``::

        g <- g + weight_decay*w            (decoupled_weight_decay: w <- w - lr*weight_decay*w)
        m <- m + (1 - beta1)*(g - m)
        v <- beta2*v + (1 - beta2)*g*g
        w <- w - lr * m / (1 - beta1**t) * c * sqrt(1 - beta2**t) / (sqrt(v) + eps)
            with c = sqrt((r - 4)*(r - 2)*r_inf / ((r_inf - 4)*(r_inf - 2)*r)), where r > 5
        w <- w - lr * m / (1 - beta1**t)       elsewhere

    Source: ``torch.optim.RAdam``; Liu et al. (2020), arXiv:1908.03265.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0, decoupled_weight_decay: bool = False, *,
        foreach: bool | None = None, maximize: bool = False, capturable: bool = False,
        differentiable: bool = False, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        return Method(rules.TORCH_RADAM, not group.get("decoupled_weight_decay"))

    def scalars(self, group: Group, step: float) -> Numbers:
        (beta1, beta2), lr = group["betas"], group["lr"]
        shrink = shrink_of(group) if group.get("decoupled_weight_decay") else 1.0
        size, correction = lr / (1.0 - beta1**step), 1.0 - beta2**step
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * step * beta2**step / correction
        if adapts := length > 5.0:
            rectification = (length - 4.0) * (length - 2.0) * longest
            rectification /= (longest - 4.0) * (longest - 2.0) * length
            size *= math.sqrt(correction) * math.sqrt(rectification)
        return (*moments_of(beta1, beta2), size, group["eps"], shrink, float(adapts), 1.0)


class Adamax(Fused, torch.optim.Adamax):
    """PyTorch's Adamax: Adam by the largest gradient that was seen.

    At update t = 1, 2, ... of a parameter::

        g <- g + weight_decay*w
        m <- m + (1 - beta1)*(g - m)
        u <- max(beta2*u, |g| + eps)
        w <- w - lr / (1 - beta1**t) * m / u

    Source: ``torch.optim.Adamax``; Kingma and Ba (2015), arXiv:1412.6980.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 2e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0, foreach: bool | None = None, *,
        maximize: bool = False, differentiable: bool = False, capturable: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(rules.TORCH_ADAMAX)

    def scalars(self, group: Group, step: float) -> Numbers:
        beta1, beta2 = group["betas"]
        scalars = group["lr"] / (1.0 - beta1**step), group["eps"]
        return (rules.share_of(1.0 - beta1), 0.0, beta2, *scalars)


class Lion(Fused, torch.optim.Optimizer):
    """Lion: steps of one size, along the signs of an average::

        w <- w - lr * (sign(beta1*m + (1 - beta1)*g) + weight_decay*w)
        m <- beta2*m + (1 - beta2)*g

    Source: Chen et al. (2023), arXiv:2302.06675.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, *, maximize: bool = False, sparse: Sparse | None = None,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, weight_decay=weight_decay)
        betas_in_range(betas)
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(lion_rules.LION, couples=False)

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        beta1, beta2 = group["betas"]
        options = group["lr"], group["weight_decay"], 0.0, 1.0
        return (beta1, 1.0 - beta1, beta2, 1.0 - beta2, *options)


class Adan(Fused, torch.optim.Optimizer):
    """Adan: Nesterov's momentum by way of the change of the gradient.

    At update t = 1, 2, ... of a parameter, with ``d = g - g_before`` (0 at the first update) and
    ``h = g + beta2*d``::

        m <- m + (1 - beta1)*(g - m),  e <- e + (1 - beta2)*(d - e),  n <- n + (1 - beta3)*(h*h - n)
        w <- w - lr * (m / (1 - beta1**t) + beta2*e / (1 - beta2**t))
                    / (sqrt(n / (1 - beta3**t)) + eps)
        w <- w / (1 + lr*weight_decay)

    The betas are those of PyTorch's habit: near 1, what stays of the past.

    Args:
        betas: three numbers in [0, 1).

    Source: Xie et al. (2022), arXiv:2208.06677.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False, sparse: Sparse | None = None,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        betas_in_range(betas, 3)
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(plain_rules.ADAN, couples=False)

    def scalars(self, group: Group, step: float) -> Numbers:
        constants, decay = (*group["betas"], group["eps"]), group["weight_decay"]
        return plain_rules.adan_scalars(float, group["lr"], decay, int(step), constants, ())
