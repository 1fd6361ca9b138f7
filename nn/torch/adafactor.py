"""Adafactor, whose second moments of matrices are those of rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.adafactor.step import FactoredStep
from ...kernels.cpu.parallel import Prepared
from ...kernels.element import kernel
from ...kernels.rules.adafactor import size_factors
from ...kernels.rules.formula import Numbers
from ...kernels.rules.rule import columns
from ...kernels.rules.torch.adafactor import TORCH_ADAFACTOR
from ...ops.norm import squares_at
from .method import Before, Group, Method
from .optimizer import Fused
from .part import Choice, Given, Part
from .tensors import number


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
        params, lr, beta2_decay, eps: as ``torch.optim.Adafactor``.
        d, weight_decay, foreach, maximize: likewise.
        skip_nonfinite, state_dtype: see `Optimizer`.

    Raises:
        ValueError: an argument is out of range.

    Sparse gradients raise in the step: means are over all rows.

    Source: ``torch.optim.Adafactor``; Shazeer and Stern (2018), arXiv:1804.04235.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Adafactor(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    _takes_sparse = False

    def method(self, group: Group) -> Method:  # noqa: ARG002
        """See `Optimizer`."""
        return Method(TORCH_ADAFACTOR, couples=False)

    def shapes(self, roles: Sequence[str], parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """See `Optimizer`."""
        if parameter.dim() < 2:
            return super().shapes(roles, parameter)
        *first, height, width = parameter.shape
        return {"row_var": (*first, height, 1), "col_var": (*first, 1, width)}

    def _check(self, group: Group, choice: Choice, name: str, parameter: Tensor) -> bool:
        # An empty one has no size to step by.
        return super()._check(group, choice, name, parameter) and parameter.numel() > 0

    def scalars(self, group: Group, step: float) -> Numbers:
        """See `Optimizer`."""
        lr, fading = number(group["lr"]), step ** group["beta2_decay"]
        epsilon = group["eps"][0]
        if epsilon is None:  # that of the first one counts, as in PyTorch
            dtype = next(p.dtype for p in group["params"] if p.grad is not None)
            epsilon = torch.finfo(dtype).eps
        largest = 1.0 / epsilon if epsilon else np.inf
        of_moments = 1.0 - fading, fading, 0.0, 0.0, epsilon, largest, 0.0, 1.0
        return (*of_moments, min(lr, step**-0.5), lr * group["weight_decay"], 1.0)

    def complete(
        self, squares: np.ndarray, hp: np.ndarray, column: dict[str, int], part: Part
    ) -> None:
        """See `Optimizer`."""
        sizes = np.maximum(1, np.diff(part.batch.variables.table.first)).tolist()
        groups = part.of_groups(self.param_groups)
        for k, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            of_size = squares[k, 0], squares[k, 1], size, group["eps"][1], group["d"], True
            hp[k, column["step"]] *= size_factors(*of_size)[0]

    def _measured(self, part: Part, given: Given, before: Before, hp: np.ndarray) -> Prepared:
        if part.matrices is None:
            return super()._measured(part, given, before, hp)
        rule, prologue, variables = part.choice.rule, before.prologue, part.batch.variables
        compiled = kernel(rule, prologue, variables.w, part.batch.g, ())
        step = FactoredStep(compiled, part.matrices, part.gradients(given), hp)
        sizes = np.diff(variables.table.first)
        of_w = squares_at(variables.w, variables.table.addresses[:, 0], sizes)
        squares = np.stack([of_w, step.direction_squares()], axis=1)
        self.complete(squares, hp, columns(rule, prologue), part)
        return step
