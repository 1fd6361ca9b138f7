"""Adagrad, its fading forms Adadelta and RMSprop, and FTRL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.formula import Numbers
from ...kernels.rule import Rule
from ...kernels.rules import adagrad as plain_rules
from ...kernels.rules import ftrl as ftrl_rules
from ...kernels.rules import sgd as sgd_rules
from ...kernels.rules.torch import adagrad as rules
from .engine.options import KERAS, not_negative
from .engine.part import Choice, Group, Method, number
from .optimizer import Fused


class Adagrad(Fused, torch.optim.Adagrad):
    """PyTorch's Adagrad.

    At update t = 1, 2, ..., with ``g`` negated first where ``maximize``::

        g <- g + weight_decay*w
        A <- A + g*g
        w <- w - lr / (1 + (t - 1)*lr_decay) * g / (sqrt(A) + eps)

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value: as ``torch.optim.Adagrad``.
        eps, foreach, maximize, differentiable, fused: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: ``differentiable``.

    Source: ``torch.optim.Adagrad``; Duchi, Hazan and Singer (2011).

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = Adagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Group) -> Method:
        """See `Optimizer`."""
        return Method(rules.TORCH_ADAGRAD, touches=not group["weight_decay"])

    def initial(self, role: str, group: Group) -> float:
        """See `Optimizer`."""
        return float(group["initial_accumulator_value"]) if role == "sum" else 0.0

    def scalars(self, group: Group, step: float) -> Numbers:
        """See `Optimizer`."""
        return number(group["lr"]) / (1.0 + (step - 1.0) * group["lr_decay"]), group["eps"]


class Adadelta(Fused, torch.optim.Adadelta):
    """PyTorch's Adadelta: steps in the units of those before them.

    ::

        g <- g + weight_decay*w
        s <- rho*s + (1 - rho)*g*g
        u  = sqrt(d + eps) / sqrt(s + eps) * g
        d <- rho*d + (1 - rho)*u*u
        w <- w - lr*u

    Args:
        params, lr, rho, eps, weight_decay: as ``torch.optim.Adadelta``.
        foreach, capturable, maximize, differentiable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adagrad`.

    Source: ``torch.optim.Adadelta``; Zeiler (2012), arXiv:1212.5701.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Adadelta(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Group) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(plain_rules.ADADELTA, states=("square_avg", "acc_delta"))

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        """See `Optimizer`."""
        rho = group["rho"]
        return number(group["lr"]), rho, 1.0 - rho, group["eps"]


_RMSPROP = {
    (False, False): rules.TORCH_RMSPROP,
    (True, False): rules.TORCH_RMSPROP_MOMENTUM,
    (False, True): rules.TORCH_RMSPROP_CENTERED,
    (True, True): rules.TORCH_RMSPROP_CENTERED_MOMENTUM,
}


class RMSprop(Fused, torch.optim.RMSprop):
    """PyTorch's RMSprop.

    ::

        g <- g + weight_decay*w
        v <- alpha*v + (1 - alpha)*g*g
        u  = g / (sqrt(v) + eps)
            centered: a <- a + (1 - alpha)*(g - a),  u = g / (sqrt(v - a*a) + eps)
        w <- w - lr*u,   with momentum: b <- momentum*b + u,  w <- w - lr*b

    Args:
        params, lr, alpha, eps, weight_decay, momentum: as ``torch.optim.RMSprop``.
        centered, capturable, foreach, maximize, differentiable: likewise.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError, RuntimeError: as `Adagrad`.

    Source: ``torch.optim.RMSprop``; Graves (2013), arXiv:1308.0850.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = RMSprop(layer.parameters(), lr=0.1, centered=True)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def method(self, group: Group) -> Method:
        """See `Optimizer`."""
        return Method(_RMSPROP[group["momentum"] > 0, bool(group["centered"])])

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        """See `Optimizer`."""
        alpha, momentum = group["alpha"], group["momentum"]
        scalars = number(group["lr"]), alpha, 1.0 - alpha, group["eps"]
        return (*scalars, momentum) if momentum > 0 else scalars


_FTRL_OPTIONS = ("l1", "l2", "lr_power", "beta", "l2_shrinkage")


class FTRL(Fused, torch.optim.Optimizer):
    """FTRL-Proximal, which keeps weights at 0 that do not matter.

    With ``p = -lr_power``::

        g <- g + weight_decay*w
        L <- L + g + 2*l2_shrinkage*w - ((A + g*g)**p - A**p) / lr * w,   A <- A + g*g
        w <- (sign(L)*l1 - L) / ((beta + A**p) / lr + 2*l2)   where |L| > l1, else 0

    With a learning rate of 0 nothing moves.

    Args:
        params: as in ``torch.optim``.
        lr: learning rate, at least 0; a number or a tensor of one element.
        lr_power: at most 0.
        initial_accumulator_value: that of ``A``, at least 0.
        l1, l2: at least 0.
        weight_decay: coupled, at least 0.
        beta, l2_shrinkage: at least 0, as in `nn.FTRL`.
        maximize: as `Adagrad`.
        sparse, skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    Source: ``mindspore.nn.FTRL``, ``keras.optimizers.Ftrl``; McMahan et al. (2013).

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = FTRL(table.parameters(), lr=0.1, l1=0.01)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    _counts_updates = False
    _more_options = KERAS

    def __init__(
        self, params: Any, lr: Any = 1e-2, lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1, l1: float = 0.0, l2: float = 0.0,
        weight_decay: float = 0.0, *, beta: float = 0.0, l2_shrinkage: float = 0.0,
        maximize: bool = False, **own: Any,
    ) -> None:  # fmt: skip
        not_negative(lr=lr, initial_accumulator_value=initial_accumulator_value, l1=l1, l2=l2,
                     weight_decay=weight_decay)  # fmt: skip
        if not lr_power <= 0.0:
            raise ValueError(f"Invalid lr_power value: {lr_power}")
        defaults = {
            "lr": lr, "lr_power": lr_power, "l1": l1, "l2": l2, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, beta=beta, l2_shrinkage=l2_shrinkage, **own)

    def _complete(self, group: dict[str, Any]) -> None:
        super()._complete(group)
        not_negative(**{name: group[name] for name in KERAS})

    def method(self, group: Group) -> Method:
        """See `Optimizer`."""
        # The rule divides by the rate; with 0 torch.distributed.checkpoint makes states.
        rests = number(group["lr"]) == 0.0
        picked = ftrl_rules.ftrl_rule(group["lr_power"], group["l2_shrinkage"])
        rule: Rule = sgd_rules.SGD if rests else picked
        return Method(rule, touches=True)

    def _new_state(self, group: Group, parameter: Tensor, choice: Choice) -> dict[str, Any]:
        rule = ftrl_rules.FTRL
        own = choice._replace(rule=rule, states=rule.names)
        return super()._new_state(group, parameter, own)

    def initial(self, role: str, group: Group) -> float:
        """See `Optimizer`."""
        return float(group["initial_accumulator_value"]) if role == "accum" else 0.0

    def scalars(self, group: Group, step: float) -> Numbers:
        """See `Optimizer`."""
        lr = number(group["lr"])
        if lr == 0.0:
            return (0.0,)
        formula = ftrl_rules.ftrl_formula(*(group[name] for name in _FTRL_OPTIONS))
        scalars: Numbers = formula.function(float, lr, 0.0, int(step), formula.constants, ())
        return scalars
