"""FTRL-Proximal, under MindSpore's name and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.formula import Formula
from ..kernels.rules.ftrl import ftrl_formula, ftrl_rule
from ..ops.ftrl import check_ftrl_ranges
from ..ops.runtime import check
from ..ops.runtime.check import LARGEST
from ..ops.runtime.errors import reject
from .base.arguments import base_arguments, check_kind, non_negative_float
from .base.groups import Groups
from .base.stateful import StateOfEach
from .fused import FusedOptimizer

# Options with a value that has a rule of its own; of the others the rule has this scalar.
_OWN_RULES = (("lr_power", "power", -0.5), ("l2_shrinkage", "two_shrinkage", 0.0))


class FTRL(FusedOptimizer):
    """FTRL-Proximal ("follow the regularized leader").

    With ``g`` the gradient after decay and scaling, and ``p = -lr_power``::

        A' = A + g*g
        L <- L + g + 2*l2_shrinkage*w - (A'**p - A**p) / lr * w
        w <- (sign(L)*l1 - L) / ((beta + A'**p) / lr + 2*l2)   where |L| > l1, else 0
        A <- A'

    Weight decay is coupled, ``g + weight_decay * w``, and acts on every ungrouped parameter
    whatever its name. The learning rate is fixed: ``L`` sums up what earlier steps did with it.
    ``g*g`` must be a number of the arithmetic: in float32 a ``g`` of 1.8e19 or more makes NaN.

    ``beta`` and ``l2_shrinkage`` are those of ``keras.optimizers.Ftrl`` and of TensorFlow's FtrlV2,
    where ``l2`` counts twice too. Unlike a weight decay the shrinkage is no part of ``A``. In a
    lazy step it acts on the rows that occur.

    Args:
        params: ... Groups have no ``lr``.
        initial_accum: float >= 0, with which ``A`` begins.
        learning_rate: float > 0.
        lr_power: float <= 0; -0.5 is the fast one, others call ``pow`` for each element.
        l1, l2: floats >= 0: strengths of the regularisation.
        weight_decay: float or int >= 0, or a callable of the step. Ungrouped it acts on every
            parameter, whatever its name.
        beta: float >= 0, as in the paper; ``beta / learning_rate`` is within float32.
        l2_shrinkage: float >= 0: Keras's ``l2_shrinkage_regularization_strength``.

    Raises:
        ValueError: a value does not fit, or a group has a learning rate.

    Source: ``mindspore.nn.FTRL`` (deprecated in MindSpore 2.9), ``keras.optimizers.Ftrl`` (Keras
    3); McMahan et al. (2013).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> opt = FTRL([w], initial_accum=1.0, learning_rate=0.1)
    >>> opt((np.full(2, 3**0.5, np.float32),))
    (True,)
    >>> print(w.round(4))
    [0.4134 0.4134]
    """

    _filter_names = False

    def __init__(
        self, params: Any, initial_accum: float = 0.1, learning_rate: float = 0.001,
        lr_power: float = -0.5, l1: float = 0.0, l2: float = 0.0, use_locking: bool = False,
        loss_scale: Any = 1.0, weight_decay: Any = 0.0, *, beta: float = 0.0,
        l2_shrinkage: float = 0.0, sparse_update: str = "lazy", skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        initial = non_negative_float(self._name, "initial_accum", initial_accum)
        check_kind(self._name, "learning_rate", learning_rate, float | np.floating, "a fixed float")
        self.l1 = non_negative_float(self._name, "l1", l1)
        self.l2 = non_negative_float(self._name, "l2", l2)
        self.lr_power = check.float_attribute(self._name, "lr_power", lr_power)
        self.beta = non_negative_float(self._name, "beta", beta)
        self.l2_shrinkage = non_negative_float(self._name, "l2_shrinkage", l2_shrinkage)
        self._check_ranges(float(learning_rate))
        rule = ftrl_rule(self.lr_power, self.l2_shrinkage)
        states = {"moments": initial, "linear": 0.0}
        super().__init__(**base, rule=rule, states=states)

    def _check_groups(self, groups: Groups) -> None:
        super()._check_groups(groups)
        if groups.is_group_lr:
            wrong, got = "has a learning rate", "one of its own"
            fix = "; FTRL has one fixed learning rate"
            reject(ValueError, self._name, "a group", wrong, "no 'lr'", got, fix)

    def _check_ranges(self, lr: float) -> None:
        check_ftrl_ranges(self._name, lr, self.l1, self.l2, self.lr_power, "learning_rate")
        beta, shrinkage = self.beta, self.l2_shrinkage
        usable = beta >= 0.0 and beta / lr <= LARGEST
        check.in_range(self._name, "beta", beta, usable, "at least 0, with beta / lr in float32")
        usable = 0.0 <= 2.0 * shrinkage <= LARGEST
        expected = "at least 0, its double within float32"
        check.in_range(self._name, "l2_shrinkage", shrinkage, usable, expected)

    def formula(self) -> Formula:
        return ftrl_formula(self.l1, self.l2, self.lr_power, self.beta, self.l2_shrinkage)

    def _check_used_rates(self, rates: Sequence[float]) -> None:
        # They can be assigned to after construction.
        for name, field, plain in _OWN_RULES:
            value = getattr(self, name)
            if (value != plain) != (field in self._rule.hp):
                wrong = "needs another rule"
                expected = f"an optimizer that was made with it: {plain} has a rule of its own"
                reject(ValueError, self._name, name, wrong, expected, value)
        for rate in rates:
            self._check_ranges(rate)

    moments = StateOfEach("moments", "The accumulated squares of each parameter.")
    linear = StateOfEach("linear", "The linear coefficient of each parameter.")
