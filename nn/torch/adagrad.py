"""Adagrad, its fading forms Adadelta and RMSprop, and FTRL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rule import Rule
from ...kernels.rules import adagrad as plain_rules
from ...kernels.rules import ftrl as ftrl_rules
from ...kernels.rules import sgd as sgd_rules
from ...kernels.rules.torch import adagrad as rules
from ...kernels.rules.torch.adam import share_of
from .engine.options import KERAS, Rounding, Sparse, arguments, not_negative, with_defaults
from .engine.part import Group, Method, RuleChoice, number
from .optimizer import Fused


class Adagrad(Fused, torch.optim.Adagrad):
    """PyTorch's Adagrad, dense and row-sparse.

    At update t = 1, 2, ... of a parameter::

        g <- g + weight_decay*w
        A <- A + g*g
        w <- w - lr / (1 + (t - 1)*lr_decay) * g / (sqrt(A) + eps)

    Args:
        lr_decay: at least 0; see the formula.
        initial_accumulator_value: at least 0: what ``A`` begins with, in all groups.

    Differs from ``torch.optim.Adagrad``: it takes sparse gradients with a weight decay too. States,
    and numbers but for roundings, are the same.

    Source: ``torch.optim.Adagrad``; Duchi, Hazan and Singer (2011).

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = Adagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, lr_decay: float = 0,
        weight_decay: float = 0, initial_accumulator_value: float = 0, eps: float = 1e-10,
        foreach: bool | None = None, *, maximize: bool = False, differentiable: bool = False,
        fused: bool | None = None, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        return Method(rules.TORCH_ADAGRAD, touches=not group["weight_decay"])

    def initial(self, role: str, group: Group) -> float:  # noqa: ARG002
        # Not of the group: PyTorch's class takes the one of the constructor, of later groups too.
        return float(self.defaults["initial_accumulator_value"])

    def scalars(self, group: Group, step: float) -> Numbers:
        return group["lr"] / (1.0 + (step - 1.0) * group["lr_decay"]), group["eps"]


class Adadelta(Fused, torch.optim.Adadelta):
    """PyTorch's Adadelta: steps in the units of those before them::

        g <- g + weight_decay*w
        s <- rho*s + (1 - rho)*g*g
        u  = sqrt(d + eps) / sqrt(s + eps) * g
        d <- rho*d + (1 - rho)*u*u
        w <- w - lr*u

    Args:
        rho: in [0, 1].

    Source: ``torch.optim.Adadelta``; Zeiler (2012), arXiv:1212.5701.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1.0, rho: float = 0.9, eps: float = 1e-6,
        weight_decay: float = 0, foreach: bool | None = None, *, capturable: bool = False,
        maximize: bool = False, differentiable: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(plain_rules.ADADELTA, states=("square_avg", "acc_delta"))

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        rho = group["rho"]
        return group["lr"], rho, 1.0 - rho, group["eps"]


_RMSPROP = {
    (False, False): rules.TORCH_RMSPROP,
    (True, False): rules.TORCH_RMSPROP_MOMENTUM,
    (False, True): rules.TORCH_RMSPROP_CENTERED,
    (True, True): rules.TORCH_RMSPROP_CENTERED_MOMENTUM,
}


class RMSprop(Fused, torch.optim.RMSprop):
    """PyTorch's RMSprop: steps in units of the recent size of gradients::

        g <- g + weight_decay*w
        v <- alpha*v + (1 - alpha)*g*g
        u  = g / (sqrt(v) + eps)
            centered: a <- a + (1 - alpha)*(g - a),  u = g / (sqrt(v - a*a) + eps)
        w <- w - lr*u,   with momentum: b <- momentum*b + u,  w <- w - lr*b

    Args:
        alpha: at least 0.
        momentum: at least 0.
        centered: see the formula.

    Source: ``torch.optim.RMSprop``; Graves (2013), arXiv:1308.0850.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = RMSprop(layer.parameters(), lr=0.1, centered=True)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
        weight_decay: float = 0, momentum: float = 0, centered: bool = False,
        capturable: bool = False, foreach: bool | None = None, maximize: bool = False,
        differentiable: bool = False, *, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:
        return Method(_RMSPROP[group["momentum"] > 0, bool(group["centered"])])

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        alpha, momentum = group["alpha"], group["momentum"]
        scalars = group["lr"], alpha, 1.0 - alpha, group["eps"]
        scalars += (momentum,) if momentum > 0 else ()
        return (*scalars, share_of(1.0 - alpha), 0.0) if group["centered"] else scalars


_FTRL_OPTIONS = ("l1", "l2", "lr_power", "beta", "l2_shrinkage")


class FTRL(Fused, torch.optim.Optimizer):
    """FTRL-Proximal, which keeps weights at 0 that do not matter.

    With ``p = -lr_power``::

        g <- g + weight_decay*w
        L <- L + g + 2*l2_shrinkage*w - ((A + g*g)**p - A**p) / lr * w,   A <- A + g*g
        w <- (sign(L)*l1 - L) / ((beta + A**p) / lr + 2*l2)   where |L| > l1, else 0

    With a learning rate of 0 nothing moves.

    Args:
        lr_power: at most 0.
        initial_accumulator_value: that of ``A``, at least 0.
        l1, l2: at least 0.
        beta, l2_shrinkage: at least 0, as in `nn.FTRL`.

    Source: ``mindspore.nn.FTRL``, ``keras.optimizers.Ftrl``; McMahan et al. (2013).

    >>> import torch
    >>> table = torch.nn.Embedding(10, 2, sparse=True)
    >>> optimizer = FTRL(table.parameters(), lr=0.1, l1=0.01)
    >>> table(torch.tensor([3, 3, 7])).sum().backward()
    >>> optimizer.step()
    """

    _counts_updates = False
    _more_options = KERAS
    _chooses_anew = True  # the rule divides by the rate

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1, l1: float = 0.0, l2: float = 0.0,
        weight_decay: float = 0.0, *, beta: float = 0.0, l2_shrinkage: float = 0.0,
        maximize: bool = False, sparse: Sparse | None = None, skip_nonfinite: bool = False,
        state_dtype: torch.dtype | None = None, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, initial_accumulator_value=initial_accumulator_value, l1=l1, l2=l2,
                     weight_decay=weight_decay)  # fmt: skip
        if not lr_power <= 0.0:
            raise ValueError(f"Invalid lr_power value: {lr_power}")
        super().__init__(**with_defaults(locals()))

    def _complete(self, group: dict[str, Any]) -> None:
        super()._complete(group)
        not_negative(**{name: group[name] for name in KERAS})

    def method(self, group: Group) -> Method:
        # The rule divides by the rate; with 0 torch.distributed.checkpoint makes states.
        rests = number(group["lr"]) == 0.0
        picked = ftrl_rules.ftrl_rule(group["lr_power"], group["l2_shrinkage"])
        rule: Rule = sgd_rules.SGD if rests else picked
        return Method(rule, touches=True)

    def _new_state(
        self, group: Group, parameter: Tensor, choice: RuleChoice, _: Any = None
    ) -> dict[str, Any]:
        rule = ftrl_rules.FTRL
        if keeping := choice.rule.keeping:
            rule = rule.kept(keeping)
        chosen = choice._replace(rule=rule, states=rule.names)
        return super()._new_state(group, parameter, chosen)

    def initial(self, role: str, group: Group) -> float:
        return float(group["initial_accumulator_value"]) if role == "accum" else 0.0

    def scalars(self, group: Group, step: float) -> Numbers:
        lr = group["lr"]
        if lr == 0.0:
            return (0.0,)
        formula = ftrl_rules.ftrl_formula(*(group[name] for name in _FTRL_OPTIONS))
        scalars: Numbers = formula.function(float, lr, 0.0, int(step), formula.constants, ())
        return scalars
