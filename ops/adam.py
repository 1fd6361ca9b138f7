"""Adam on dense and row-sparse gradients, under MindSpore's names and argument order."""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from ..kernels.formula import Numbers
from ..kernels.rules import adam as rules
from .primitive import Named, Primitive, RowPrimitive
from .runtime import check
from .runtime.arrays import ROUNDINGS, empty_like, native
from .runtime.errors import RejectedValueError, reject


class Corrected(NamedTuple):
    """The checked scalars of a step with Adam's bias correction."""

    beta1_power: float
    beta2_power: float
    lr: float
    beta1: float
    beta2: float
    epsilon: float

    @classmethod
    def read(cls, where: str, *scalars: Any) -> Corrected:
        """Check them, in this order."""
        return cls(*map(check.scalar, repeat(where), cls._fields, scalars))

    def hp(self, where: str, variables: Named) -> Numbers:
        """The scalars of a rule for these variables."""
        power, real = self.beta2_power, ROUNDINGS[variables["m"].dtype]
        if power > 1.0:
            check.in_range(where, "beta2_power", power, False, "at most 1")
        scalars = rules.adam_scalars(real, self.lr, 0.0, 0, self[3:], (*map(real, self[:2]),))
        check.epsilon(where, "epsilon", self.epsilon, scalars[-1])
        return scalars


class Adam(Primitive):
    """Adam on a dense gradient::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Source: ``mindspore.ops.Adam``.

    >>> import numpy as np
    >>> var, m, v = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> _ = Adam()(var, m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, np.ones(2, np.float32))
    >>> print(var)
    [0.999 0.999]
    """

    def __init__(
        self, use_locking: bool = False, use_nesterov: bool = False, **unknown: Any
    ) -> None:
        super().__init__(use_locking, **unknown)
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self, var: Any, m: Any, v: Any, beta1_power: Any, beta2_power: Any, lr: Any, beta1: Any,
        beta2: Any, epsilon: Any, gradient: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = Corrected.read(self.name, beta1_power, beta2_power, lr, beta1, beta2, epsilon)
        variables = self._variables(var=var, m=m, v=v)
        rule = rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM
        self._apply_dense(rule, variables, scalars.hp(self.name, variables), "gradient", gradient)
        return var, m, v


class AdamNoUpdateParam(Primitive):
    """Adam's step without taking it: updates the moments and returns the step::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        delta = -lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Returns:
        ``delta``, a new array of the shape and dtype of ``m``, to be added to the parameter.

    Source: ``mindspore.ops.AdamNoUpdateParam`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> m, v = np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> print(AdamNoUpdateParam()(m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, g))
    [-0.001 -0.001]
    """

    def __init__(
        self, use_locking: bool = False, use_nesterov: bool = False, **unknown: Any
    ) -> None:
        super().__init__(use_locking, **unknown)
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self, m: Any, v: Any, beta1_power: Any, beta2_power: Any, lr: Any, beta1: Any, beta2: Any,
        epsilon: Any, gradient: Any,
    ) -> Any:  # fmt: skip
        """Update ``m`` and ``v`` in place and return the step; see the class."""
        scalars = Corrected.read(self.name, beta1_power, beta2_power, lr, beta1, beta2, epsilon)
        moments = self._variables(m=m, v=v)
        hp = scalars.hp(self.name, moments)
        variables = {"delta": empty_like(moments["m"]), **moments}
        rule = rules.ADAM_NESTEROV_DELTA if self.use_nesterov else rules.ADAM_DELTA
        self._apply_dense(rule, variables, hp, "gradient", gradient)
        return native(variables["delta"])


class AdamWeightDecay(Primitive):
    """Adam with decoupled weight decay and without bias correction::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        var <- var - lr * (m / (sqrt(v) + epsilon) + decay*var)

    Source: ``mindspore.ops.AdamWeightDecay``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> var, m, v = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> _ = AdamWeightDecay()(var, m, v, 0.001, 0.9, 0.999, 1e-8, 0.5, g)
    >>> print(var)
    [0.9963377 0.9963377]
    """

    def __call__(
        self, var: Any, m: Any, v: Any, lr: Any, beta1: Any, beta2: Any, epsilon: Any, decay: Any,
        gradient: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        lr, beta1, beta2, epsilon, decay = self._scalars(
            lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, decay=decay
        )
        variables = self._variables(var=var, m=m, v=v)
        real = ROUNDINGS[variables["var"].dtype]
        check.epsilon(self.name, "epsilon", epsilon, real(epsilon))
        hp = rules.adam_weight_decay_scalars(real, lr, decay, 0, (beta1, beta2, epsilon), ())
        self._apply_dense(rules.ADAM_WEIGHT_DECAY, variables, hp, "gradient", gradient)
        return var, m, v


class _FusedSparseAdamBase(RowPrimitive):
    """Base of `FusedSparseAdam` and `FusedSparseLazyAdam`, which update different rows."""

    _only_float32 = True

    def __init__(
        self, use_locking: bool = False, use_nesterov: bool = False, *,
        out_of_range: str = "raise", **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(use_locking, **unknown)
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)
        self.out_of_range = check.out_of_range_rule(self.name, out_of_range)

    def __call__(
        self, var: Any, m: Any, v: Any, beta1_power: Any, beta2_power: Any, lr: Any, beta1: Any,
        beta2: Any, epsilon: Any, gradient: Any, indices: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = Corrected.read(self.name, beta1_power, beta2_power, lr, beta1, beta2, epsilon)
        # In float32, the type in which the step takes it: 1 - 1e-9 is 1 there.
        if np.float32(scalars.beta1_power) == 1:
            wrong, got = "makes the step infinite", scalars.beta1_power
            reject(RejectedValueError, self.name, "beta1_power", wrong, "not 1", got)
        variables = self._variables(var=var, m=m, v=v)
        rule = rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM
        hp = scalars.hp(self.name, variables)
        self._apply_rows(rule, variables, hp, "gradient", gradient, indices)
        return var, m, v


class FusedSparseAdam(_FusedSparseAdamBase):
    """Adam with a row-sparse gradient, equal to dense Adam on the whole table.

    Gradient rows of equal indices are summed, then every row takes Adam's step, rows that do
    not occur with ``g = 0``::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Args:
        out_of_range: ... MindSpore drops them.

    Raises:
        ValueError: ... Where ``beta1_power`` is 1 or ``var`` is 0-d it is a `RuntimeError` too.

    Source: ``mindspore.ops.FusedSparseAdam`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, m, v = (np.ones((3, 1, 2), np.float32) for _ in range(3))
    >>> op = FusedSparseAdam()
    >>> gradient, indices = np.full((2, 1, 2), 0.1, np.float32), np.array([0, 1])
    >>> _ = op(var, m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, gradient, indices)
    >>> print(var[:, 0, 0])
    [0.9997121  0.9997121  0.99971527]
    """

    _touched_only = False


class FusedSparseLazyAdam(_FusedSparseAdamBase):
    """Adam that updates only the rows that occur in a row-sparse gradient.

    Gradient rows of equal indices are summed to ``g``, then for these rows::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    All other rows of ``var``, ``m`` and ``v`` stay as they are, which is not what dense Adam
    does: there the moments decay and move the weights at every step.

    Raises:
        ValueError: ... Where ``beta1_power`` is 1 or ``var`` is 0-d it is a `RuntimeError` too.

    Source: ``mindspore.ops.FusedSparseLazyAdam`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, m, v = (np.ones((3, 1, 2), np.float32) for _ in range(3))
    >>> op = FusedSparseLazyAdam()
    >>> gradient, indices = np.full((2, 1, 2), 0.1, np.float32), np.array([0, 1])
    >>> _ = op(var, m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, gradient, indices)
    >>> print(var[:, 0, 0])
    [0.9997121 0.9997121 1.       ]
    """
