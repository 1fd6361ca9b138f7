"""Adafactor, whose second moments of matrices are those of rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ...kernels.formula import Numbers
from ...kernels.rules.torch.adafactor import TORCH_ADAFACTOR
from ...kernels.rules.torch.adam import share_of
from ...kernels.state import State
from .engine.options import arguments
from .engine.part import Group, Method, RuleChoice
from .optimizer import Fused


class Adafactor(Fused, torch.optim.Adafactor):
    """PyTorch's Adafactor: second moments of rows and columns, steps relative to the parameter.

    At update t = 1, 2, ... of a tensor of two or more dimensions (of a smaller one ``V`` is kept
    in full), with ``b = t**beta2_decay``, ``rho = min(lr, 1 / sqrt(t))`` and root mean squares
    ``|.|`` over the whole parameter::

        R <- R + b*(mean of g*g over each row - R),   C likewise over each column
        V  = R*C / max(mean(R), eps1)
        u  = g / sqrt(max(V, eps1**2))
        w <- w - lr*weight_decay*w - max(eps2, |w|) * rho * u / max(1, |u| / d)

    Args:
        beta2_decay: at most 0.
        eps: ``eps1``, at least 0 or None (that of the dtype), and ``eps2``, at least 0.
        d: at least 1.
        state_dtype: of the states; None: that of each parameter.

    Sparse gradients raise in the step: means are over all rows.

    Differs from ``torch.optim.Adafactor``: ``foreach`` changes no number; ``skip_nonfinite`` and
    ``state_dtype`` are new. States, and numbers but for roundings, are the same.

    Source: ``torch.optim.Adafactor``; Shazeer and Stern (2018), arXiv:1804.04235.
    """

    _takes_sparse = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-2, beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
        weight_decay: float = 0.0, *, foreach: bool | None = None, maximize: bool = False,
        skip_nonfinite: bool = False, state_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))

    def method(self, group: Group) -> Method:  # noqa: ARG002
        return Method(TORCH_ADAFACTOR, couples=False)

    def shapes(self, choice: RuleChoice, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        if choice.rule.on(tuple(parameter.shape)) is choice.rule:
            return super().shapes(choice, parameter)
        *first, height, width = parameter.shape
        return {"row_var": (*first, height, 1), "col_var": (*first, 1, width)}

    def _dtype_of(self, state: State, parameter: Tensor, asked: Any) -> Any:  # noqa: ARG002
        return asked  # as in PyTorch; the step computes in the type of the arithmetic

    def _check(
        self, group: Group, choice: RuleChoice, name: str, parameter: Tensor, *rest: Any
    ) -> bool:
        # An empty one has no size to step by.
        return super()._check(group, choice, name, parameter, *rest) and parameter.numel() > 0

    def scalars(self, group: Group, step: float) -> Numbers:
        lr, fading = group["lr"], step ** group["beta2_decay"]
        epsilon = group["eps"][0]
        if epsilon is None:  # that of the first one counts, as in PyTorch
            every = group["params"]
            dtype = next((p.dtype for p in every if p.grad is not None), every[0].dtype)
            epsilon = torch.finfo(dtype).eps
        largest = 1.0 / epsilon if epsilon else np.inf
        moments = 1.0 - fading, fading, 0.0, 0.0, epsilon, largest, 0.0, 1.0
        return (*moments, min(lr, step**-0.5), lr * group["weight_decay"], 1.0, 0.0,
                share_of(fading))  # fmt: skip

    def constants(self, group: Group) -> dict[str, float]:
        sizes = {"epsilon2": group["eps"][1], "clip_threshold": group["d"]}
        return {**sizes, "scale_parameter": True}
