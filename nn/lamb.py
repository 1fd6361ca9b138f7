"""LAMB, under MindSpore's name and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import lamb as rules
from ..ops.runtime import check
from .base.arguments import Fixed, base_arguments, betas_and_eps
from .fused import FusedOptimizer


class Lamb(FusedOptimizer):
    """LAMB: Adam's direction, scaled per parameter to the parameter's norm.

    With L2 norms over a whole parameter, at its update t = 1, 2, ...::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay*w
        w <- w - lr * ratio * u,   ratio = |w| / |u|, or 1 where either norm is 0

    With ``clip_ratio`` the form of MindSpore 1.x: the ratio is limited to [0, 10], the norm is
    that of ``m / (1 - beta1**t) / sqrt(v / (1 - beta2**t) + eps) + weight_decay*w``,
    and it is 1 where ``|w|`` or ``|g|`` is 0.

    A step reads each parameter, gradient and moment twice and writes them once; the norms are
    summed in float64, in an order that does not depend on the number of threads. There is no
    loss scale: the direction does not depend on the gradient's, but for ``eps``.

    Args:
        params: `Parameter` or arrays, or group dicts; see `Optimizer`.
        learning_rate: see `Optimizer`.
        beta1, beta2: floats in (0, 1).
        eps: float > 0.
        weight_decay: see `Optimizer`; names with "beta" or "gamma" are exempt when ungrouped.
        clip_ratio: the form of MindSpore 1.x.
        use_locking, skip_nonfinite, state_dtype, rounding, clipvalue, clipnorm: see
            `FusedOptimizer`.

    Raises:
        TypeError: a kind does not fit (an int where a float is published).
        ValueError: a value does not fit, or a gradient is row-sparse: the norm is that of the
            whole parameter.
        KeyError: an unknown keyword (also `TypeError`).

    Source: ``mindspore.nn.Lamb``; You et al. (2020), arXiv:1904.00962.

    >>> import numpy as np
    >>> w = np.array([3.0, 4.0], np.float32)
    >>> Lamb([w], learning_rate=0.1)((np.ones(2, np.float32),))
    (True,)
    >>> print(w.round(4))  # a step of length 0.1 * |w| = 0.5
    [2.6464 3.6464]
    """

    clip_ratio = Fixed(check.flag)
    _rows_need = ("a dense one: LAMB scales by the norm of the whole parameter", "a RowTensor")

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
        *,
        clip_ratio: bool = False,
        use_locking: bool = False,
        skip_nonfinite: bool = False,
        state_dtype: Any = None,
        rounding: str = "nearest",
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:
        base = base_arguments(locals())
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        self.clip_ratio = clip_ratio
        rule = rules.LAMB_CLIPPED if self.clip_ratio else rules.LAMB
        super().__init__(**base, rule=rule, states={"lamb_m": 0.0, "lamb_v": 0.0})

    def formula(self) -> Formula:
        """See `FusedOptimizer`."""
        return Formula(rules.lamb_scalars, (self.beta1, self.beta2, self.eps))
