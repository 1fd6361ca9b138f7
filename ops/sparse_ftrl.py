"""FTRL-Proximal on the rows of row-sparse gradients."""

from __future__ import annotations

from typing import Any

from ..kernels.rules.ftrl import ftrl_rule
from .ftrl import check_ftrl_ranges, ftrl_hp_for
from .primitive import Primitive, out_of_range_rule, require_float32
from .runtime import check


class SparseApplyFtrl(Primitive):
    """FTRL-Proximal on the rows that occur in a row-sparse gradient.

    Gradient rows of equal indices are summed to ``g``, then for these rows, with
    ``p = -lr_power``::

        new = accum + g*g
        linear <- linear + g - (new**p - accum**p) / lr * var
        var <- (sign(linear)*l1 - linear) / (new**p / lr + 2*l2)   where |linear| > l1, else 0
        accum <- new

    All other rows stay as they are. ``g*g`` must be a number of the arithmetic, as in `ApplyFtrl`.

    Args:
        lr: float > 0.
        l1, l2: floats >= 0: strengths of the regularisation.
        lr_power: float <= 0; -0.5 is the fast one, others call ``pow`` for each element.
        use_locking: serialise concurrent calls on overlapping memory, row by row.
        out_of_range: ``"raise"`` an `IndexError` for indices outside of ``[0, N)``, or
            ``"drop"`` them.

    Call arguments:
        var, accum, linear: float32, float64, float16 or bfloat16 ``[N, ...]``, at least 1-d,
            of one dtype and shape; updated in place.
        grad: ``[B, ...]``, of at most the precision of ``var``.
        indices: int32 or int64 ``[B]``; duplicates are summed, B may be 0.

    Returns:
        ``(var, accum, linear)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit (an int where a float is published).
        ValueError: a shape, a value or the memory of a variable does not fit.
        IndexError: an index is out of range.
        Nothing has been written when an error is raised.

    Source: ``mindspore.ops.SparseApplyFtrl`` (deprecated in MindSpore 2.8), which applies
    duplicates one after the other.

    >>> import numpy as np
    >>> var, accum, linear = (np.full((3, 2), x, np.float32) for x in (1.0, 1.0, 0.0))
    >>> op = SparseApplyFtrl(lr=0.1, l1=0.0, l2=0.0, lr_power=-0.5)
    >>> _ = op(var, accum, linear, np.full((1, 2), 3**0.5, np.float32), np.array([2]))
    >>> print(var[:, 0].round(4), accum[:, 0])
    [1.     1.     0.4134] [1. 1. 4.]
    """

    def __init__(
        self,
        lr: float,
        l1: float,
        l2: float,
        lr_power: float,
        use_locking: bool = False,
        *,
        out_of_range: str = "raise",
        **unknown: Any,
    ) -> None:
        known = ("lr", "l1", "l2", "lr_power", "use_locking", "out_of_range")
        super().__init__(use_locking, unknown, known)
        self.lr = check.float_attribute(self.name, "lr", lr)
        self.l1 = check.float_attribute(self.name, "l1", l1)
        self.l2 = check.float_attribute(self.name, "l2", l2)
        self.lr_power = check.float_attribute(self.name, "lr_power", lr_power)
        check_ftrl_ranges(self.name, self.lr, self.l1, self.l2, self.lr_power)
        self.out_of_range = out_of_range_rule(self.name, out_of_range)

    def __call__(
        self, var: Any, accum: Any, linear: Any, grad: Any, indices: Any
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``accum`` and ``linear`` in place and return them; see the class."""
        variables = self._variables(var=var, accum=accum, linear=linear)
        self._check_dtype(variables)
        scalars = {"lr": self.lr, "l1": self.l1, "l2": self.l2, "lr_power": self.lr_power}
        self._apply_rows(
            ftrl_rule(self.lr_power),
            variables,
            ftrl_hp_for(variables["var"], scalars),
            "grad",
            grad,
            indices,
            touched_only=True,
            drop=self.out_of_range == "drop",
        )
        return var, accum, linear

    def _check_dtype(self, variables: dict[str, Any]) -> None:
        """Every dtype of variables is taken."""


class FusedSparseFtrl(SparseApplyFtrl):
    """`SparseApplyFtrl` for float32 variables, as published.

    Args, call arguments, returns and errors: as `SparseApplyFtrl`; variables of another dtype
    than float32 raise `TypeError`.

    Source: ``mindspore.ops.FusedSparseFtrl`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, accum, linear = (np.full((3, 2), x, np.float32) for x in (1.0, 1.0, 0.0))
    >>> op = FusedSparseFtrl(lr=0.1, l1=0.5, l2=0.0, lr_power=-0.5)
    >>> _ = op(var, accum, linear, np.full((1, 2), 0.25, np.float32), np.array([0]))
    >>> print(var[:, 0].round(4))
    [0. 1. 1.]
    """

    def _check_dtype(self, variables: dict[str, Any]) -> None:
        require_float32(self.name, variables)
