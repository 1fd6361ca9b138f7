"""The operators of the Adam family, under MindSpore's names and argument order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules import adam as rules
from . import check
from .errors import RejectedValueError, message
from .primitive import Primitive, hp_row, real_type, require_float32


def _adam_hp(where: str, variable: np.ndarray, scalars: dict[str, float]) -> np.ndarray:
    """The scalars of a rule with a bias-corrected step size."""
    if scalars["beta2_power"] > 1.0:
        raise ValueError(
            message(where, "beta2_power", "is out of range", "at most 1", scalars["beta2_power"])
        )
    real = real_type(variable)
    return hp_row(real, rules.adam_hp(real, **scalars))


class _FusedSparseAdamBase(Primitive):
    """What `FusedSparseAdam` and `FusedSparseLazyAdam` share: all but the rows they update."""

    _touched_only: bool

    def __init__(
        self,
        use_locking: bool = False,
        use_nesterov: bool = False,
        *,
        out_of_range: str = "raise",
        **unknown: Any,
    ) -> None:
        super().__init__(use_locking, unknown, ("use_locking", "use_nesterov", "out_of_range"))
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)
        if out_of_range not in ("raise", "drop"):
            raise ValueError(
                message(self.name, "out_of_range", "is unknown", "'raise' or 'drop'", out_of_range)
            )
        self.out_of_range = out_of_range

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Any,
        indices: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        if scalars["beta1_power"] == 1.0:
            raise RejectedValueError(
                message(self.name, "beta1_power", "makes the step infinite", "not 1", 1.0)
            )
        variables = self._variables(var=var, m=m, v=v)
        require_float32(self.name, variables)
        self._apply_rows(
            rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM,
            variables,
            _adam_hp(self.name, variables["var"], scalars),
            gradient,
            indices,
            touched_only=self._touched_only,
            drop=self.out_of_range == "drop",
        )
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
        use_locking: serialise concurrent calls on overlapping memory.
        use_nesterov: Nesterov's step.
        out_of_range: ``"raise"`` an `IndexError` for indices outside of ``[0, N)``, or
            ``"drop"`` them, as MindSpore does.

    Call arguments:
        var, m, v: float32 ``[N, ...]``, at least 1-d, of one shape; updated in place.
        beta1_power, beta2_power: ``beta1**t`` and ``beta2**t`` at update t = 1, 2, ...
        lr, beta1, beta2, epsilon: scalars.
        gradient: float32 or 16-bit ``[B, ...]``.
        indices: int32 or int64 ``[B]``; duplicates are summed, B may be 0.

    Returns:
        ``(var, m, v)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape, a value or the memory of a variable does not fit.
        IndexError: an index is out of range.
        RuntimeError: ``beta1_power`` is 1, or ``var`` is 0-d (also `ValueError`).
        Nothing has been written when an error is raised.

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

    Args, call arguments, returns and errors: as `FusedSparseAdam`.

    Source: ``mindspore.ops.FusedSparseLazyAdam`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, m, v = (np.ones((3, 1, 2), np.float32) for _ in range(3))
    >>> op = FusedSparseLazyAdam()
    >>> gradient, indices = np.full((2, 1, 2), 0.1, np.float32), np.array([0, 1])
    >>> _ = op(var, m, v, 0.9, 0.999, 0.001, 0.9, 0.999, 1e-8, gradient, indices)
    >>> print(var[:, 0, 0])
    [0.9997121 0.9997121 1.       ]
    """

    _touched_only = True


class Adam(Primitive):
    """Adam on a dense gradient::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.
        use_nesterov: Nesterov's step.

    Call arguments:
        var, m, v: float32, float64, float16 or bfloat16, of one dtype and shape (0-d and
            empty work); updated in place. 16-bit variables are computed in float32.
        beta1_power, beta2_power: ``beta1**t`` and ``beta2**t`` at update t = 1, 2, ...
        lr, beta1, beta2, epsilon: scalars.
        gradient: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable
            would have to be converted).
        ValueError: a shape, a value or the memory of a variable does not fit.
        Nothing has been written when an error is raised.

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
        super().__init__(use_locking, unknown, ("use_locking", "use_nesterov"))
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        variables = self._variables(var=var, m=m, v=v)
        hp = _adam_hp(self.name, variables["var"], scalars)
        rule = rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM
        self._apply_dense(rule, variables, hp, "gradient", gradient)
        return var, m, v


class AdamNoUpdateParam(Primitive):
    """Adam's step without taking it: updates the moments and returns the step::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        u  = m,  or with use_nesterov  beta1*m + (1 - beta1)*g
        delta = -lr * sqrt(1 - beta2_power) / (1 - beta1_power) * u / (sqrt(v) + epsilon)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.
        use_nesterov: Nesterov's step.

    Call arguments:
        m, v: of one floating dtype and shape; updated in place.
        beta1_power, beta2_power, lr, beta1, beta2, epsilon: scalars, as `Adam`.
        gradient: of the shape of ``m`` and at most its precision.

    Returns:
        ``delta``, a new array of the shape and dtype of ``m``, to be added to the parameter.

    Raises:
        TypeError, ValueError: as `Adam`.

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
        super().__init__(use_locking, unknown, ("use_locking", "use_nesterov"))
        self.use_nesterov = check.flag(self.name, "use_nesterov", use_nesterov)

    def __call__(
        self,
        m: Any,
        v: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        gradient: Any,
    ) -> np.ndarray:
        """Update ``m`` and ``v`` in place and return the step; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        moments = self._variables(m=m, v=v)
        hp = _adam_hp(self.name, moments["m"], scalars)
        delta = np.empty(moments["m"].shape, moments["m"].dtype)
        rule = rules.ADAM_NESTEROV_DELTA if self.use_nesterov else rules.ADAM_DELTA
        self._apply_dense(rule, {"delta": delta, **moments}, hp, "gradient", gradient)
        return delta


class AdamWeightDecay(Primitive):
    """Adam with decoupled weight decay and without bias correction::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        var <- var - lr * (m / (sqrt(v) + epsilon) + decay*var)

    Args:
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, m, v: of one floating dtype and shape; updated in place.
        lr, beta1, beta2, epsilon, decay: scalars.
        gradient: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v)``, the updated arrays.

    Raises:
        TypeError, ValueError: as `Adam`.

    Source: ``mindspore.ops.AdamWeightDecay``; Loshchilov and Hutter (2019), arXiv:1711.05101.

    >>> import numpy as np
    >>> var, m, v = np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.ones(2, np.float32)
    >>> _ = AdamWeightDecay()(var, m, v, 0.001, 0.9, 0.999, 1e-8, 0.5, g)
    >>> print(var)
    [0.9963377 0.9963377]
    """

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        super().__init__(use_locking, unknown, ("use_locking",))

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        decay: Any,
        gradient: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``m`` and ``v`` in place and return them; see the class."""
        scalars = self._scalars(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, decay=decay)
        variables = self._variables(var=var, m=m, v=v)
        real = real_type(variables["var"])
        hp = hp_row(real, rules.adam_weight_decay_hp(real, **scalars))
        self._apply_dense(rules.ADAM_WEIGHT_DECAY, variables, hp, "gradient", gradient)
        return var, m, v


class ApplyAdamWithAmsgradV2(Primitive):
    """AMSGrad: Adam that divides by the largest second moment seen so far::

        m <- beta1*m + (1 - beta1)*g
        v <- beta2*v + (1 - beta2)*g*g
        vhat <- max(vhat, v)
        var <- var - lr * sqrt(1 - beta2_power) / (1 - beta1_power) * m / (sqrt(vhat) + epsilon)

    The maximum is over the moment without bias correction. With ``beta1_power == 1`` the step
    is infinite or NaN, without an error.

    Args:
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, m, v, vhat: of one floating dtype and shape (0-d and empty work); updated in place.
        beta1_power, beta2_power, lr, beta1, beta2, epsilon: scalars, as `Adam`.
        grad: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v, vhat)``, the updated arrays.

    Raises:
        TypeError, ValueError: as `Adam`.

    Source: ``mindspore.ops.ApplyAdamWithAmsgradV2``; Reddi, Kale and Kumar (2018),
    arXiv:1904.09237.

    >>> import numpy as np
    >>> f = lambda *rows: np.array(rows, np.float32)
    >>> var, m, v = f([0.2, 0.2], [0.2, 0.2]), f([0.1, 0.2], [0.4, 0.3]), f([0.2, 0.1], [0.3, 0.4])
    >>> vhat, grad = f([0.1, 0.2], [0.6, 0.2]), f([0.4, 0.2], [0.2, 0.3])
    >>> op = ApplyAdamWithAmsgradV2()
    >>> _ = op(var, m, v, vhat, 0.9, 0.999, 0.01, 0.8, 0.999, 1e-8, grad)
    >>> print(var)
    [[0.19886853 0.1985858 ]
     [0.19853032 0.19849943]]
    """

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        super().__init__(use_locking, unknown, ("use_locking",))

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        vhat: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        beta1: Any,
        beta2: Any,
        epsilon: Any,
        grad: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Update the four variables in place and return them; see the class."""
        scalars = self._scalars(
            beta1_power=beta1_power,
            beta2_power=beta2_power,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        variables = self._variables(var=var, m=m, v=v, vhat=vhat)
        hp = _adam_hp(self.name, variables["var"], scalars)
        self._apply_dense(rules.ADAM_AMSGRAD, variables, hp, "grad", grad)
        return var, m, v, vhat


class ApplyAdamWithAmsgrad(Primitive):
    """`ApplyAdamWithAmsgradV2` with the betas and epsilon as attributes.

    Args:
        beta1, beta2, epsilon: scalars.
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, m, v, vhat: of one floating dtype and shape; updated in place.
        beta1_power, beta2_power, lr: scalars.
        grad: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, m, v, vhat)``, the updated arrays.

    Raises:
        TypeError, ValueError: as `Adam`.

    Source: ``mindspore.ops.ApplyAdamWithAmsgrad``.

    >>> import numpy as np
    >>> var, m, v, vhat = np.ones((4, 1), np.float32), *np.zeros((3, 4, 1), np.float32)
    >>> _ = ApplyAdamWithAmsgrad()(var, m, v, vhat, 0.9, 0.999, 0.001, np.ones((4, 1), np.float32))
    >>> print(var[0])
    [0.999]
    """

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__(use_locking, unknown, ("beta1", "beta2", "epsilon", "use_locking"))
        self.beta1 = check.scalar(self.name, "beta1", beta1)
        self.beta2 = check.scalar(self.name, "beta2", beta2)
        self.epsilon = check.scalar(self.name, "epsilon", epsilon)

    def __call__(
        self,
        var: Any,
        m: Any,
        v: Any,
        vhat: Any,
        beta1_power: Any,
        beta2_power: Any,
        lr: Any,
        grad: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Update the four variables in place and return them; see the class."""
        scalars = self._scalars(beta1_power=beta1_power, beta2_power=beta2_power, lr=lr)
        scalars.update(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)
        variables = self._variables(var=var, m=m, v=v, vhat=vhat)
        hp = _adam_hp(self.name, variables["var"], scalars)
        self._apply_dense(rules.ADAM_AMSGRAD, variables, hp, "grad", grad)
        return var, m, v, vhat
