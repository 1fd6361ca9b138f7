"""Gradient descent, plain and with momentum, under MindSpore's names and defaults."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.formula import Formula
from ..kernels.rules import sgd as rules
from ..ops.runtime import check
from ..ops.runtime.errors import reject
from .base.arguments import Fixed, base_arguments, check_kind, non_negative_float
from .base.groups import Groups
from .base.stateful import StateOfEach
from .fused import FusedOptimizer


def _number_at_least_0(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        got = type(value).__name__
        reject(TypeError, where, name, "has a wrong type", "a float or int", got)
    return check.scalar_at_least_0(where, name, value)


class Momentum(FusedOptimizer):
    """Gradient descent with momentum.

    With ``g`` the gradient after decay and scaling::

        a <- momentum*a + g
        w <- w - lr*a,   or with use_nesterov  w - lr*(g + momentum*a)

    Args:
        momentum: float >= 0.

    Source: ``mindspore.nn.Momentum``; Sutskever et al. (2013).

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> opt = Momentum([w], learning_rate=0.1, momentum=0.5)
    >>> for _ in range(2):
    ...     _ = opt((np.ones(2, np.float32),))
    >>> print(w)
    [0.75 0.75]
    """

    use_nesterov = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any, momentum: float, weight_decay: Any = 0.0,
        loss_scale: Any = 1.0, use_nesterov: bool = False, *, use_locking: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.momentum = non_negative_float(self._name, "momentum", momentum)
        self.use_nesterov = use_nesterov
        rule = rules.MOMENTUM_NESTEROV if self.use_nesterov else rules.MOMENTUM
        super().__init__(**base, rule=rule, states={"moments": 0.0})

    def formula(self) -> Formula:
        return Formula(rules.momentum_scalars, (self.momentum, 0.0))

    moments = StateOfEach("moments", "The accumulated gradient of each parameter.")

    def _derived_state(self, _step: int) -> dict[str, np.ndarray]:
        return {"momentum": np.array(self.momentum, np.float32)}


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with momentum and dampening.

    With ``g`` the gradient after decay and scaling, and with a momentum above 0::

        a <- g                                   at the first update of a parameter
        a <- momentum*a + (1 - dampening)*g      later
        w <- w - lr*a,   or with nesterov  w - lr*(g + momentum*a)

    With a momentum of 0, ``w <- w - lr*g`` and there is no state.

    Args:
        momentum, dampening: floats or ints >= 0.
        weight_decay: a float or int >= 0, no schedule; coupled, ``g + weight_decay*w``.
        nesterov: Nesterov's step; needs a momentum above 0 and no dampening.
        sparse_update: ... Without momentum the default is ``"lazy"``, which then equals
            ``"dense_equivalent"`` but for weight decay.

    Source: ``mindspore.nn.SGD``.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> SGD([w], learning_rate=0.25)((np.array([1, -2], np.float32),))
    (True,)
    >>> print(w)
    [0.75 1.5 ]
    """

    # Without momentum there is no state for one.
    momentum = Fixed(_number_at_least_0, lambda sgd: "accum" not in sgd._states)
    nesterov = Fixed(check.flag)

    def __init__(
        self, params: Any, learning_rate: Any = 0.1, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: Any = 0.0, nesterov: bool = False, loss_scale: Any = 1.0, *,
        use_locking: bool = False, sparse_update: str | None = None, skip_nonfinite: bool = False,
        state_dtype: Any = None, rounding: str = "nearest", clipvalue: float | None = None,
        clipnorm: float | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.momentum = momentum
        self.dampening = _number_at_least_0(self._name, "dampening", dampening)
        self.nesterov = nesterov
        if self.nesterov and not (self.momentum > 0.0 and self.dampening == 0.0):
            got = f"momentum {self.momentum}, dampening {self.dampening}"
            expected = "momentum > 0, dampening 0"
            reject(ValueError, self._name, "nesterov", "is impossible", expected, got)
        rule = rules.MOMENTUM_NESTEROV if self.nesterov else rules.MOMENTUM
        states = {"accum": 0.0}
        if self.momentum == 0.0:
            rule, states = rules.SGD, {}
            # Nothing but weight decay moves a row whose gradient is 0.
            base["sparse_update"] = "lazy" if sparse_update is None else sparse_update
        super().__init__(**base, rule=rule, states=states)

    def _check_groups(self, groups: Groups) -> None:
        super()._check_groups(groups)
        for option in groups.options:
            check_kind(self._name, "weight_decay", option.decay, float, "a float or int")

    def formula(self) -> Formula:
        if self._rule is rules.SGD:
            return Formula(rules.sgd_scalars)
        # Whether an update is the first, which is not dampened, MindSpore keeps for each element
        # (`stat`). The count of updates tells it for the parameter.
        return Formula(rules.momentum_scalars, (self.momentum, self.dampening))

    @property
    def accum(self) -> tuple[np.ndarray, ...]:
        """The accumulated gradient of each parameter; only with a momentum above 0."""
        if "accum" not in self._states:
            raise AttributeError("SGD: accum is there with a momentum above 0 only")
        return self._state("accum")

    def _derived_state(self, _step: int) -> dict[str, np.ndarray]:
        return {"momentum": np.array(self.momentum, np.float32)}

    def _empty_states(self) -> set[str]:
        # stat tells whether there was a first step, which the count of updates tells too.
        roles = ["stat"] if "accum" in self._states else ["stat", "accum"]
        return {f"{role}.{p.name}" for role in roles for p in self.parameters}


class ASGD(FusedOptimizer):
    """Averaged stochastic gradient descent.

    With ``g`` the gradient after decay and scaling, and ``l`` the learning rate of the step
    before (of the first step its own), at update t = 1, 2, ... of a parameter::

        eta = l / (1 + lambd*l*(t - 1))**alpha
        w  <- (1 - lambd*eta)*w - eta*g
        ax <- ax + mu*(w - ax),   mu = 1 / max(1, t - 1 - t0), and 1 at first

    ``ax`` is the parameter itself until step ``t0 + 2``, and then an average of it.

    Args:
        lambd: float >= 0, a decay of the parameter.
        alpha: float, with which power ``eta`` falls.
        t0: float, the step at which averaging begins.

    Source: ``mindspore.nn.ASGD``; Polyak and Juditsky (1992), in the form of Bottou's code.

    >>> import numpy as np
    >>> w = np.ones(2, np.float32)
    >>> opt = ASGD([w], learning_rate=0.1, lambd=0.0, t0=0.0)
    >>> for _ in range(3):
    ...     _ = opt((np.ones(2, np.float32),))
    >>> print(w.round(4), opt.ax[0].round(4))
    [0.7 0.7] [0.75 0.75]
    """

    # MindSpore's ``eta`` comes from the step before, and with it the learning rate.
    _rate_lag = 1

    def __init__(
        self, params: Any, learning_rate: Any = 0.1, lambd: float = 1e-4, alpha: float = 0.75,
        t0: float = 1e6, weight_decay: Any = 0.0, *, use_locking: bool = False,
        sparse_update: str | None = None, skip_nonfinite: bool = False, state_dtype: Any = None,
        rounding: str = "nearest", clipvalue: float | None = None, clipnorm: float | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        base = base_arguments(locals())
        self.lambd = non_negative_float(self._name, "lambd", lambd)
        self.alpha = check.float_attribute(self._name, "alpha", alpha)
        self.t0 = check.float_attribute(self._name, "t0", t0)
        super().__init__(**base, rule=rules.ASGD)

    def formula(self) -> Formula:
        return Formula(rules.asgd_scalars, (self.lambd, self.alpha, self.t0))

    ax = StateOfEach("ax_", "The average of each parameter.")

    def _empty_states(self) -> set[str]:
        # They follow from the rates and the number of updates.
        return {f"{name}_{p.name}" for name in ("eta", "mu") for p in self.parameters}
