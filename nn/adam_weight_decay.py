"""Adam with decoupled weight decay, under MindSpore's name and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import adam as rules
from ..ops.runtime.errors import reject_unknown
from .base.arguments import betas_and_eps, step_options
from .fused import FusedOptimizer


class AdamWeightDecay(FusedOptimizer):
    """Adam with decoupled weight decay and without bias correction::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        w <- w - lr * (m / (sqrt(v) + eps) + weight_decay*w)

    Without bias correction the first update is about ``3.16 * lr`` per element at the
    defaults. There is no loss scale.

    Args:
        params: `Parameter` or arrays, or group dicts; see `Optimizer`.
        learning_rate: see `Optimizer`.
        beta1, beta2: floats in (0, 1).
        eps: float > 0.
        weight_decay: see `Optimizer`; names with "beta" or "gamma" are exempt when ungrouped.
        use_locking, skip_nonfinite, state_dtype, clipvalue, clipnorm: as `Adam`.
        sparse_update: ``"lazy"``, ``"dense_equivalent"`` or None: row-sparse gradients raise.

    Raises:
        TypeError, ValueError, KeyError: as `Adam`.

    Source: ``mindspore.nn.AdamWeightDecay``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> AdamWeightDecay([w], learning_rate=0.1, weight_decay=0.5)((np.zeros(2, np.float32),))
    (True,)
    >>> print(w)
    [0.95 0.95]
    """

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
        *,
        use_locking: bool = False,
        sparse_update: str | None = None,
        skip_nonfinite: bool = False,
        state_dtype: Any = None,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown(self._name, unknown, AdamWeightDecay)
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        options = step_options(
            use_locking, sparse_update, skip_nonfinite, state_dtype, clipvalue, clipnorm
        )
        rule = rules.ADAM_WEIGHT_DECAY
        super().__init__(learning_rate, params, weight_decay, rule=rule, **options)

    def formula(self) -> Formula:
        """See `FusedOptimizer`."""
        return Formula(rules.adam_weight_decay_scalars, (self.beta1, self.beta2, self.eps))
