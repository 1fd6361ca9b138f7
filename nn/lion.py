"""Evolved sign momentum, under its authors' name and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import lion as rules
from .base.arguments import arithmetic_type, base_arguments, open_unit
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


class Lion(FusedOptimizer):
    """Lion: steps of one size, along the signs of an average of the gradients.

    With ``g`` the gradient after scaling, and ``m`` beginning at 0::

        w <- w - lr * (sign(beta1*m + (1 - beta1)*g) + weight_decay*w)
        m <- beta2*m + (1 - beta2)*g

    A good learning rate is three to ten times smaller than Adam's, and a good weight decay as
    much larger.

    Args:
        weight_decay: float or int >= 0, or a callable of the step; decoupled. Ungrouped it acts on
            every parameter, whatever its name.

    Source: Chen et al. (2023), "Symbolic discovery of optimization algorithms",
    arXiv:2302.06675, algorithm 2.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> Lion([w], learning_rate=0.1)((np.array([3, -1], np.float32),))
    (True,)
    >>> print(w)
    [0.9 1.1]
    """

    _filter_names = False

    def __init__(
        self, params: Any, learning_rate: Any = 1e-4, beta1: float = 0.9, beta2: float = 0.99,
        weight_decay: Any = 0.0, loss_scale: Any = 1.0, *, use_locking: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        real = arithmetic_type(params)
        self.beta1 = open_unit(self._name, "beta1", beta1, real)
        self.beta2 = open_unit(self._name, "beta2", beta2, real)
        super().__init__(**base, rule=rules.LION)

    def formula(self) -> Formula:
        return Formula(rules.lion_scalars, (self.beta1, self.beta2))

    exp_avg = StateOfEach("exp_avg", "The average of each parameter's gradients.")
