"""Adagrad, proximal Adagrad and Adadelta, under MindSpore's names and defaults."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Formula
from ..kernels.rules import adagrad as rules
from ..ops.runtime import check
from .base.arguments import Fixed, base_arguments, non_negative_float
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


class Adagrad(FusedOptimizer):
    """Adagrad.

    With ``g`` the gradient after decay and scaling::

        A <- A + g*g                  (with update_slots)
        w <- w - lr * g / sqrt(A)

    Where ``A`` is 0, ``w`` stays: it has seen no gradient.

    Args:
        accum: float >= 0, with which ``A`` begins.
        update_slots: whether ``A`` is updated.
        sparse_update: ... ``"lazy"`` and ``"dense_equivalent"`` differ by weight decay alone.

    Source: ``mindspore.nn.Adagrad``; Duchi, Hazan and Singer (2011).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> Adagrad([w], accum=0.0, learning_rate=0.1)((np.array([3, 0], np.float32),))
    (True,)
    >>> print(w)
    [0.9 1. ]
    """

    update_slots = Fixed(check.flag)

    def __init__(
        self, params: Any, accum: float = 0.1, learning_rate: Any = 0.001,
        update_slots: bool = True, loss_scale: Any = 1.0, weight_decay: Any = 0.0, *,
        use_locking: bool = False, sparse_update: str = "lazy", skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        states = {"accum": non_negative_float(self._name, "accum", accum)}
        self.update_slots = update_slots
        rule = rules.ADAGRAD if self.update_slots else rules.ADAGRAD_FIXED
        super().__init__(**base, rule=rule, states=states)

    def formula(self) -> Formula:
        return Formula(rules.adagrad_scalars)

    accum = StateOfEach("accum", "The accumulated squares of each parameter.")


class ProximalAdagrad(FusedOptimizer):
    """Adagrad's step followed by soft thresholding and shrinking.

    With ``g`` the gradient after decay and scaling::

        A <- A + g*g
        e  = lr / sqrt(A)
        p  = w - e*g
        w <- sign(p) * max(|p| - e*l1, 0) / (1 + e*l2)

    Where ``A`` is 0, ``w`` stays: it has seen no gradient.

    Args:
        accum: float >= 0, with which ``A`` begins.
        l1, l2: floats >= 0: strengths of the regularisation.
        sparse_update: ... With ``"dense_equivalent"`` rows that do not occur are regularised too.

    Source: ``mindspore.nn.ProximalAdagrad`` (deprecated in MindSpore 2.9), whose kernels use
    ``e`` where its documentation has ``lr``; Duchi and Singer (2009).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> opt = ProximalAdagrad([w], accum=0.0, learning_rate=0.1, l1=1.0)
    >>> opt((np.array([2, -2], np.float32),))
    (True,)
    >>> print(w.round(4))
    [0.85 1.05]
    """

    def __init__(
        self, params: Any, accum: float = 0.1, learning_rate: Any = 0.001, l1: float = 0.0,
        l2: float = 0.0, use_locking: bool = False, loss_scale: Any = 1.0, weight_decay: Any = 0.0,
        *, sparse_update: str = "lazy", skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        states = {"accum": non_negative_float(self._name, "accum", accum)}
        self.l1 = non_negative_float(self._name, "l1", l1)
        self.l2 = non_negative_float(self._name, "l2", l2)
        super().__init__(**base, rule=rules.PROXIMAL_ADAGRAD, states=states)

    def formula(self) -> Formula:
        return Formula(rules.proximal_adagrad_scalars, (self.l1, self.l2))

    accum = StateOfEach("accum", "The accumulated squares of each parameter.")


class Adadelta(FusedOptimizer):
    """Adagrad whose sum fades, with steps in the units of the parameter.

    With ``g`` the gradient after decay and scaling, and ``A`` and ``U`` beginning at 0::

        A <- rho*A + (1 - rho)*g*g
        d  = sqrt(U + epsilon) / sqrt(A + epsilon) * g
        U <- rho*U + (1 - rho)*d*d
        w <- w - lr * d

    Args:
        rho: float in [0, 1].
        epsilon: float >= 0; with 0 an element without any gradient becomes NaN.

    Source: ``mindspore.nn.Adadelta``; Zeiler (2012), arXiv:1212.5701.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> Adadelta([w], rho=0.0, epsilon=0.01)((np.array([0, -1], np.float32),))
    (True,)
    >>> print(w.round(4))
    [1.     1.0995]
    """

    def __init__(
        self, params: Any, learning_rate: Any = 1.0, rho: float = 0.9, epsilon: float = 1e-6,
        loss_scale: Any = 1.0, weight_decay: Any = 0.0, *, use_locking: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.rho = non_negative_float(self._name, "rho", rho)
        check.in_range(self._name, "rho", rho, self.rho <= 1.0, "at most 1")
        self.epsilon = non_negative_float(self._name, "epsilon", epsilon)
        super().__init__(**base, rule=rules.ADADELTA)

    def formula(self) -> Formula:
        return Formula(rules.adadelta_scalars, (self.rho, self.epsilon))

    accum = StateOfEach("accum", "The fading sum of the squares of each parameter's gradients.")
    accum_update = StateOfEach(
        "accum_update", "The fading sum of the squares of each parameter's steps."
    )
