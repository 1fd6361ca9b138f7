"""Adam on row-sparse gradients: on the whole table, or on the rows that occur."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules import adam as rules
from .adam import adam_hp_for
from .primitive import Primitive, out_of_range_rule, require_float32
from .runtime import check
from .runtime.errors import RejectedValueError, message


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
        self.out_of_range = out_of_range_rule(self.name, out_of_range)

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
        if np.float32(scalars["beta1_power"]) == 1:
            raise RejectedValueError(
                message(
                    self.name,
                    "beta1_power",
                    "makes the step infinite",
                    "not 1",
                    scalars["beta1_power"],
                )
            )
        variables = self._variables(var=var, m=m, v=v)
        require_float32(self.name, variables)
        self._apply_rows(
            rules.ADAM_NESTEROV if self.use_nesterov else rules.ADAM,
            variables,
            adam_hp_for(self.name, variables["var"], scalars),
            "gradient",
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
        lr, beta1, beta2, epsilon: scalars; epsilon as `Adam`.
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
