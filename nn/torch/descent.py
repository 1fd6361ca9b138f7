"""Descent: SGD, its average, and by signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules import sgd as rules
from ...kernels.rules.torch.rprop import TORCH_RPROP
from .engine.options import Rounding, Sparse, arguments
from .engine.part import Group, Method, number
from .optimizer import Fused


class SGD(Fused, torch.optim.SGD):
    """PyTorch's SGD, dense and row-sparse.

    At the first update ``a = g``::

        g <- g + weight_decay*w
        a <- momentum*a + (1 - dampening)*g
        w <- w - lr*a,   nesterov: w - lr*(g + momentum*a),   without momentum: w - lr*g

    Args:
        momentum: at least 0.

    Differs from ``torch.optim.SGD``: it takes sparse gradients with momentum and decay too. States,
    and numbers but for roundings, are the same.

    Source: ``torch.optim.SGD``.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = SGD(layer.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    _counts_updates = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0,
        weight_decay: float | Tensor = 0, nesterov: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, differentiable: bool = False, fused: bool | None = None,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        if not group["momentum"]:
            return Method(rules.SGD, touches=not group["weight_decay"])
        rule = rules.MOMENTUM_NESTEROV if group["nesterov"] else rules.MOMENTUM
        return Method(rule, states=("momentum_buffer",))

    def scalars(self, group: Group, step: float) -> Numbers:
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            return (lr,)
        return lr, momentum, 1.0 - (group["dampening"] if step > 1 else 0.0)


class ASGD(Fused, torch.optim.ASGD):
    """PyTorch's ASGD: descent that shrinks the parameter, and the average of where it has been.

    At update t = 1, 2, ... of a parameter, with ``eta`` and ``mu`` from the update before (first
    ``lr`` and 1)::

        g <- g + weight_decay*w
        w <- (1 - lambd*eta)*w - eta*g
        ax <- ax + mu*(w - ax)
        eta <- lr / (1 + lambd*lr*t)**alpha,   mu <- 1 / max(1, t - t0)

    Args:
        lambd, alpha, t0: see the formula.

    Source: ``torch.optim.ASGD``; Polyak and Juditsky (1992).
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, lambd: float = 1e-4, alpha: float = 0.75,
        t0: float = 1e6, weight_decay: float = 0, foreach: bool | None = None,
        maximize: bool = False, differentiable: bool = False, capturable: bool = False, *,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(rules.ASGD, states=("ax",))

    def numbers(self, group: Group) -> dict[str, float]:
        return {"eta": number(group["lr"]), "mu": 1.0}

    def next_numbers(self, group: Group, step: float) -> dict[str, Any]:
        lr = group["lr"]
        eta = lr / (1.0 + group["lambd"] * lr * step) ** group["alpha"]
        return {"eta": eta, "mu": 1.0 / max(1.0, step - group["t0"])}

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        eta, mu = number(group["eta"]), number(group["mu"])
        return 1.0 - group["lambd"] * eta, eta, mu, 1.0


class Rprop(Fused, torch.optim.Rprop):
    """PyTorch's Rprop: each element has a step size of its own, and only signs count.

    With sizes ``s`` that begin as ``lr``::

        s <- s*etas[1] where g*g_before > 0,   s*etas[0] where g*g_before < 0
        s <- min(max(s, step_sizes[0]), step_sizes[1])
        g <- 0 where g*g_before < 0
        w <- w - s*sign(g),   g_before <- g

    Args:
        etas: a number in (0, 1) and one above 1; see the formula.
        step_sizes: the smallest and the largest size.

    Source: ``torch.optim.Rprop``; Riedmiller and Braun (1993).
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50), *, capturable: bool = False,
        foreach: bool | None = None, maximize: bool = False, differentiable: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(TORCH_RPROP, couples=False)

    def initial(self, role: str, group: Group) -> float:
        return number(group["lr"]) if role == "step_size" else 0.0

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        return (*group["etas"], *group["step_sizes"], 0.0, 1.0)
