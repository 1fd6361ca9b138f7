"""Adaptive Nesterov momentum, under its authors' name and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import adam as rules
from .base.arguments import arithmetic_type, base_arguments, betas_and_eps, open_unit
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


class Adan(FusedOptimizer):
    """Adan: Adam with Nesterov's momentum, by way of the change of the gradient.

    With ``g`` the gradient after scaling and ``h`` that of the update before (of the first update
    its own), at update t = 1, 2, ... of a parameter::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*(g - h)
        n <- beta3*n + (1 - beta3)*(g + beta2*(g - h))**2
        d  = (m/(1 - beta1**t) + beta2*v/(1 - beta2**t)) / (sqrt(n/(1 - beta3**t)) + eps)
        w <- (w - lr*d) / (1 + lr*weight_decay)

    It keeps four arrays for each parameter.

    Args:
        beta1, beta2, beta3: floats in (0, 1). (The paper's betas are 1 less these.)
        weight_decay: float or int >= 0, or a callable of the step; a proximal step. Ungrouped it
            acts on every parameter, whatever its name.

    Source: Xie et al. (2022), "Adan: adaptive Nesterov momentum algorithm for faster optimizing
    deep models", arXiv:2208.06677, algorithm 1, with the bias corrections of its authors' code.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> Adan([w], learning_rate=0.1)((np.array([3, -1], np.float32),))
    (True,)
    >>> print(w.round(6))
    [0.9 1.1]
    """

    _filter_names = False

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.98, beta2: float = 0.92,
        beta3: float = 0.99, eps: float = 1e-8, weight_decay: Any = 0.0, loss_scale: Any = 1.0, *,
        use_locking: bool = False, sparse_update: str | None = None, skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        self.beta3 = open_unit(self._name, "beta3", beta3, arithmetic_type(params))
        super().__init__(**base, rule=rules.ADAN)

    def formula(self) -> Formula:
        return Formula(rules.adan_scalars, (self.beta1, self.beta2, self.beta3, self.eps))

    exp_avg = StateOfEach("exp_avg", "The average of each parameter's gradients, ``m``.")
    exp_avg_diff = StateOfEach("exp_avg_diff", "The average of their changes, ``v``.")
    exp_avg_sq = StateOfEach(
        "exp_avg_sq", "The average of the squares of what they point to, ``n``."
    )
    previous_grad = StateOfEach("previous_grad", "The last gradient of each parameter.")
