"""Proximal Adagrad on the rows of row-sparse gradients."""

from __future__ import annotations

from typing import Any

from ..kernels.rules.adagrad import PROXIMAL_ADAGRAD
from .adagrad import proximal_hp_for, proximal_scalars
from .primitive import Primitive, out_of_range_rule, require_float32


class SparseApplyProximalAdagrad(Primitive):
    """Proximal Adagrad on the rows that occur in a row-sparse gradient.

    Gradient rows of equal indices are summed to ``g``, then for these rows::

        accum <- accum + g*g
        e = lr / sqrt(accum)
        p = var - e*g
        var <- sign(p) * max(|p| - e*l1, 0) / (1 + e*l2)

    All other rows stay as they are; so does an element whose accumulator is 0.

    Args:
        use_locking: serialise concurrent calls on overlapping memory, row by row.
        out_of_range: ``"raise"`` an `IndexError` for indices outside of ``[0, N)``, or
            ``"drop"`` them.

    Call arguments:
        var, accum: float32, float64, float16 or bfloat16 ``[N, ...]``, at least 1-d, of one
            dtype and shape; updated in place.
        lr: scalar.
        l1, l2: scalars >= 0: strengths of the regularisation.
        grad: ``[B, ...]``, of at most the precision of ``var``.
        indices: int32 or int64 ``[B]``; duplicates are summed, B may be 0.

    Returns:
        ``(var, accum)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape, a value or the memory of a variable does not fit.
        IndexError: an index is out of range.
        Nothing has been written when an error is raised.

    Source: ``mindspore.ops.SparseApplyProximalAdagrad`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, accum = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    >>> op = SparseApplyProximalAdagrad()
    >>> _ = op(var, accum, 0.1, 0.0, 0.0, np.ones((2, 2), np.float32), np.array([1, 1]))
    >>> print(var[:, 0], accum[:, 0])
    [1.  0.9 1. ] [0. 4. 0.]
    """

    def __init__(
        self, use_locking: bool = False, *, out_of_range: str = "raise", **unknown: Any
    ) -> None:
        super().__init__(use_locking, unknown, ("use_locking", "out_of_range"))
        self.out_of_range = out_of_range_rule(self.name, out_of_range)

    def __call__(
        self, var: Any, accum: Any, lr: Any, l1: Any, l2: Any, grad: Any, indices: Any
    ) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        scalars = proximal_scalars(self.name, lr, l1, l2)
        variables = self._variables(var=var, accum=accum)
        self._check_dtype(variables)
        self._apply_rows(
            PROXIMAL_ADAGRAD,
            variables,
            proximal_hp_for(variables["var"], scalars),
            "grad",
            grad,
            indices,
            touched_only=True,
            drop=self.out_of_range == "drop",
        )
        return var, accum

    def _check_dtype(self, variables: dict[str, Any]) -> None:
        """Every dtype of variables is taken."""


class FusedSparseProximalAdagrad(SparseApplyProximalAdagrad):
    """`SparseApplyProximalAdagrad` for float32 variables, as published.

    Args, call arguments, returns and errors: as `SparseApplyProximalAdagrad`; variables of
    another dtype than float32 raise `TypeError`.

    Source: ``mindspore.ops.FusedSparseProximalAdagrad`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, accum = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    >>> op = FusedSparseProximalAdagrad()
    >>> _ = op(var, accum, 0.1, 1.0, 0.0, np.ones((1, 2), np.float32), np.array([2]))
    >>> print(var[:, 0].round(4))
    [1.  1.  0.8]
    """

    def _check_dtype(self, variables: dict[str, Any]) -> None:
        require_float32(self.name, variables)
