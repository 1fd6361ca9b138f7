"""Adagrad and Adam with one second moment for each row of a table."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import row_wise as rules
from ..ops.runtime import check
from .base.arguments import (
    Fixed,
    arithmetic_type,
    base_arguments,
    betas_and_eps,
    non_negative_float,
    positive_float,
)
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


class RowWiseAdagrad(FusedOptimizer):
    """Adagrad with one accumulator for each row.

    With ``g`` the gradient after decay and scaling, and the mean over the elements of a row::

        s <- s + mean(g*g)
        w <- w - lr * g / (sqrt(s) + eps)

    Rows are what the first axis of a parameter numbers; a vector is one row. Gradients of equal
    indices are summed first. A table of N rows of D numbers has N numbers of state, `Adagrad`'s
    has N*D.

    Args:
        params: ... Each has at least one axis.
        accum: float >= 0, with which ``s`` begins.
        decoupled_weight_decay: False: weight decay is coupled, ``g + weight_decay * w``; True: the
            step takes ``lr * weight_decay * w`` too, and ``g`` has none.
        sparse_update: ... ``"lazy"`` and ``"dense_equivalent"`` differ by weight decay alone.

    ``s`` has the type of the arithmetic: float32, or float64 for float64 parameters.

    Raises:
        ValueError: a value does not fit, a parameter has no axis or rows without elements, or the
            gradient of a vector is row-sparse.

    Source: FBGEMM's ``EXACT_ROWWISE_ADAGRAD``; Mudigere et al. (2021), arXiv:2104.05158.

    >>> import numpy as np
    >>> w = np.ones((2, 2), np.float32)
    >>> opt = RowWiseAdagrad([w], learning_rate=0.5)
    >>> opt((np.array([[3, 4], [0, 0]], np.float32),))
    (True,)
    >>> print(opt.accum[0], w[1])
    [12.5  0. ] [1. 1.]
    """

    decoupled_weight_decay = Fixed(check.flag)

    def __init__(
        self, params: Any, accum: float = 0.0, learning_rate: Any = 0.001, eps: float = 1e-10,
        loss_scale: Any = 1.0, weight_decay: Any = 0.0, decoupled_weight_decay: bool = False, *,
        use_locking: bool = False, sparse_update: str = "lazy", skip_nonfinite: bool = False,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        states = {"accum": non_negative_float(self._name, "accum", accum)}
        self.eps = positive_float(self._name, "eps", eps, arithmetic_type(params))
        self.decoupled_weight_decay = decoupled_weight_decay
        is_decoupled = self.decoupled_weight_decay
        rule = rules.ROW_WISE_ADAGRAD_DECOUPLED if is_decoupled else rules.ROW_WISE_ADAGRAD
        super().__init__(**base, rule=rule, states=states)

    def formula(self) -> Formula:
        if self.decoupled_weight_decay:
            return Formula(rules.adagrad_decoupled_scalars, (self.eps,))
        return Formula(rules.adagrad_scalars, (self.eps,))

    accum = StateOfEach("accum", "The accumulated means of squares of the rows of each parameter.")


class RowWiseAdam(FusedOptimizer):
    """Adam with one second moment for each row.

    With ``g`` the gradient after scaling, at update t = 1, 2, ... of a parameter, and the mean over
    the elements of a row::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*mean(g*g)
        w <- w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)
               - lr * weight_decay * w

    Rows are what the first axis of a parameter numbers; a vector is one row. Gradients of equal
    indices are summed first. Bias correction and the place of ``eps`` are those of `Adam`; t counts
    the updates of the parameter, not of a row.

    Args:
        params: ... Each has at least one axis.
        weight_decay: ... It is decoupled.
        state_dtype: dtype of ``m``; default each parameter's. ``v`` has the type of the
            arithmetic: float32, or float64 for float64 parameters.

    Raises:
        ValueError: a value does not fit, a parameter has no axis or rows without elements, or the
            gradient of a vector is row-sparse.

    Source: FBGEMM's ``PARTIAL_ROWWISE_ADAM``; Kingma and Ba (2015), arXiv:1412.6980.

    >>> import numpy as np
    >>> w = np.ones((2, 2), np.float32)
    >>> opt = RowWiseAdam([w], learning_rate=0.1)
    >>> opt((np.array([[1, -1], [2, 2]], np.float32),))
    (True,)
    >>> print(w.round(4))
    [[0.9 1.1]
     [0.9 0.9]]
    """

    rowwise_bias_correction = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999,
        eps: float = 1e-8, weight_decay: Any = 0.0, loss_scale: Any = 1.0, *,
        rowwise_bias_correction: bool = False, use_locking: bool = False,
        sparse_update: str = "lazy", skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.beta1, self.beta2, self.eps = betas_and_eps(self._name, params, beta1, beta2, eps)
        self.rowwise_bias_correction = rowwise_bias_correction
        by_row = rowwise_bias_correction
        rule = rules.ROW_WISE_ADAM_BY_ROW if by_row else rules.ROW_WISE_ADAM
        super().__init__(**base, rule=rule)

    def formula(self) -> Formula:
        betas = self.beta1, self.beta2
        if self.rowwise_bias_correction:
            return Formula(rules.by_row_scalars, (*betas, self.eps, 0.0))
        return Formula(rules.adam_scalars, (*betas, self.eps), betas)

    moment1 = StateOfEach("moment1", "The first moment of each parameter.")
    moment2 = StateOfEach("moment2", "The second moments of the rows of each parameter.")
