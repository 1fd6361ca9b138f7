"""Adagrad and Adam with one second moment for each row of a table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules import row_wise as rules
from ...ops.runtime import check
from .engine.options import (
    ROWWISE,
    Rounding,
    Sparse,
    above_0,
    betas_in_range,
    not_negative,
    with_defaults,
)
from .engine.part import Group, Method
from .optimizer import Fused


class RowWiseAdagrad(Fused, torch.optim.Optimizer):
    """Adagrad with one accumulator for each row.

    With ``g`` the gradient, and the mean over the elements of a row::

        s <- s + mean(g*g)
        w <- w - lr * g / (sqrt(s) + eps)

    Rows are what the first dimension of a parameter numbers; a vector is one row. Sparse gradients
    of equal indices are summed first. The state of a table of N rows is ``sum``, ``[N]``, in
    float32 (float64 for float64 parameters).

    Args:
        eps: above 0.
        weight_decay: at least 0: added to the gradient, ``g + weight_decay*w``.
        initial_accumulator_value: at least 0: what ``s`` begins with.
        decoupled_weight_decay: the step takes ``lr*weight_decay*w`` instead.

    In the step a parameter without dimensions, or with rows without elements, raises, and so does
    a sparse gradient of a vector, or one with several sparse dimensions.

    Source: FBGEMM's ``EXACT_ROWWISE_ADAGRAD``, which DLRM's ``RWSAdagrad`` follows for sparse
    gradients; Mudigere et al. (2021), arXiv:2104.05158.

    >>> import torch
    >>> table = torch.nn.Embedding(3, 2, sparse=True)
    >>> optimizer = RowWiseAdagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([2, 2])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["sum"]
    tensor([0., 0., 4.])
    """

    _counts_updates = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, eps: float = 1e-10,
        weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
        decoupled_weight_decay: bool = False, *, maximize: bool = False,
        sparse: Sparse | None = None, skip_nonfinite: bool = False, rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, weight_decay=weight_decay,
                     initial_accumulator_value=initial_accumulator_value)  # fmt: skip
        above_0(eps=eps)  # else a row without gradients is divided by 0
        check.flag(type(self).__name__, "decoupled_weight_decay", decoupled_weight_decay)
        super().__init__(**with_defaults(locals()))

    def method(self, group: Group) -> Method:
        if group["decoupled_weight_decay"]:
            rule = rules.ROW_WISE_ADAGRAD_DECOUPLED
            return Method(rule, couples=False, touches=True, states=("sum",))
        return Method(rules.ROW_WISE_ADAGRAD, touches=True, states=("sum",))

    def initial(self, role: str, group: Group) -> float:  # noqa: ARG002
        return float(group["initial_accumulator_value"])

    def scalars(self, group: Group, step: float) -> Numbers:  # noqa: ARG002
        lr = group["lr"]
        decay = (lr * group["weight_decay"],) if group["decoupled_weight_decay"] else ()
        return (group["eps"], lr, *decay)


class RowWiseAdam(Fused, torch.optim.Optimizer):
    """Adam with one second moment for each row.

    With ``g`` the gradient, at update t = 1, 2, ... of a parameter, and the mean over the elements
    of a row::

        m <- m + (1 - beta1)*(g - m)
        v <- v + (1 - beta2)*(mean(g*g) - v)
        w <- w - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) - lr*weight_decay*w

    Rows are what the first dimension of a parameter numbers; a vector is one row. Sparse gradients
    of equal indices are summed first. The states are ``exp_avg``, of the shape of the parameter,
    and ``exp_avg_sq``, ``[N]`` for N rows, in float32 (float64 for float64 parameters); t counts
    the updates of the parameter, not of a row.

    Args:
        eps: above 0.
        state_dtype: of ``exp_avg``; None: that of each parameter, or float32 where ``rounding`` is
            ``"master"``.

    In the step a parameter without dimensions, or with rows without elements, raises, and so does
    a sparse gradient of a vector, or one with several sparse dimensions.

    Source: FBGEMM's ``PARTIAL_ROWWISE_ADAM``; Kingma and Ba (2015), arXiv:1412.6980.

    >>> import torch
    >>> table = torch.nn.Embedding(3, 2, sparse=True)
    >>> optimizer = RowWiseAdam(table.parameters(), lr=0.1)
    >>> table(torch.tensor([2, 2])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["exp_avg_sq"].shape
    torch.Size([3])
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, maximize: bool = False,
        rowwise_bias_correction: bool = False, sparse: Sparse | None = None,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
    ) -> None:  # fmt: skip
        not_negative(lr=lr, weight_decay=weight_decay)
        betas_in_range(betas)
        above_0(eps=eps)
        super().__init__(**with_defaults(locals()))

    _more_options = ROWWISE

    def method(self, group: Group) -> Method:
        states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if group["rowwise_bias_correction"]:
            rule, states = rules.ROW_WISE_ADAM_BY_ROW, (*states, "updates")
            return Method(rule, couples=False, touches=True, states=states)
        return Method(rules.ROW_WISE_ADAM, couples=False, touches=True, states=states)

    def scalars(self, group: Group, step: float) -> Numbers:
        (beta1, beta2), lr = group["betas"], group["lr"]
        if group["rowwise_bias_correction"]:
            decay = lr * group["weight_decay"]
            return (1.0 - beta1, 1.0 - beta2, group["eps"], lr, decay, 1.0)
        corrections = 1.0 - beta1**step, 1.0 - beta2**step
        scalars = 1.0 / corrections[1], group["eps"], lr / corrections[0]
        return (1.0 - beta1, 1.0 - beta2, *scalars, lr * group["weight_decay"])
