"""RMSProp, plain and centered, under MindSpore's name and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..kernels.formula import Formula
from ..kernels.rule import Rule
from ..kernels.rules import rmsprop as rules
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import (
    Fixed,
    arithmetic_type,
    base_arguments,
    non_negative_float,
    positive_float,
)
from .base.stateful import StateOfEach
from .fused import FusedOptimizer

# By centered and whether there is a momentum.
_RULES: dict[tuple[bool, bool], Rule] = {
    (False, False): rules.RMSPROP,
    (False, True): rules.RMSPROP_MOMENTUM,
    (True, False): rules.RMSPROP_CENTERED,
    (True, True): rules.RMSPROP_CENTERED_MOMENTUM,
}
_INITIAL = {"mean_grad": 0.0, "mean_square": 1.0, "moment": 0.0}


class RMSProp(FusedOptimizer):
    """RMSProp.

    With ``g`` the gradient after decay and scaling, and ``s`` beginning at 1::

        s  <- decay*s + (1 - decay)*g*g
        mo <- momentum*mo + lr * g / sqrt(s + epsilon)
        w  <- w - mo

    With ``centered``, ``s - mg*mg + epsilon`` takes the place of ``s + epsilon``, where
    ``mg <- decay*mg + (1 - decay)*g``; where that is not positive, ``mo`` and ``w`` stay.
    Without momentum ``mo`` is the step itself and is not kept.

    Args:
        decay: float >= 0, of the running means; sensible below 1.
        momentum: float >= 0.
        epsilon: float > 0.
        centered: divide by the root of a running variance.

    Source: ``mindspore.nn.RMSProp``; Tieleman and Hinton (2012), Graves (2013).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> RMSProp([w], learning_rate=0.1)((np.array([1, -1], np.float32),))
    (True,)
    >>> print(w)
    [0.9 1.1]
    """

    centered = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 0.1, decay: float = 0.9, momentum: float = 0.0,
        epsilon: float = 1e-10, use_locking: bool = False, centered: bool = False,
        loss_scale: Any = 1.0, weight_decay: Any = 0.0, *, sparse_update: str | None = None,
        skip_nonfinite: bool = False, state_dtype: Any = None, rounding: str = "nearest",
        clipvalue: float | None = None, clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.decay = non_negative_float(self._name, "decay", decay)
        self.momentum = non_negative_float(self._name, "momentum", momentum)
        self.epsilon = positive_float(self._name, "epsilon", epsilon, arithmetic_type(params))
        self.centered = centered
        rule = _RULES[self.centered, self.momentum > 0.0]
        states = {role: _INITIAL[role] for role in rule.names}
        super().__init__(**base, rule=rule, states=states)

    def _check_used_rates(self, _rates: Sequence[float]) -> None:
        # It can be assigned to after construction.
        if self.momentum > 0.0 and "moment" not in self._states:
            wrong, expected = "needs a moment", "an optimizer that was made with a momentum"
            reject(ValueError, self._name, "momentum", wrong, expected, self.momentum)

    def formula(self) -> Formula:
        constants = self.decay, self.epsilon
        if "moment" in self._states:
            return Formula(rules.rmsprop_momentum_scalars, (*constants, self.momentum))
        return Formula(rules.rmsprop_scalars, constants)

    mean_square = StateOfEach(
        "mean_square", "The running mean of the squared gradient of each parameter."
    )

    def _empty_states(self) -> set[str]:
        # Without momentum the moment is written by MindSpore and never read.
        has_moment = "moment" in self._states
        return set() if has_moment else {f"moment.{p.name}" for p in self.parameters}
