"""FTRL-Proximal on dense and row-sparse gradients, under MindSpore's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules.ftrl import ftrl_formula, ftrl_rule
from .primitive import Primitive, RowPrimitive
from .runtime import check
from .runtime.arrays import real_type
from .runtime.check import LARGEST


class ApplyFtrl(Primitive):
    """FTRL-Proximal, with ``p = -lr_power``::

        new = accum + grad*grad
        linear <- linear + grad - (new**p - accum**p) / lr * var
        var <- (sign(linear)*l1 - linear) / (new**p / lr + 2*l2)   where |linear| > l1, else 0
        accum <- new

    ``grad*grad`` must be a number of the arithmetic: in float32 a gradient of 1.8e19 or more makes
    NaN.

    Call arguments:
        lr: scalar > 0.
        lr_power: scalar <= 0; -0.5 is the fast one, others call ``pow`` for each element.

    Source: ``mindspore.ops.ApplyFtrl`` (deprecated in MindSpore 2.10); McMahan et al. (2013).

    >>> import numpy as np
    >>> w, accum, linear = (np.full(2, x, np.float32) for x in (1.0, 1.0, 0.0))
    >>> g = np.full(2, 3**0.5, np.float32)
    >>> _ = ApplyFtrl()(w, accum, linear, g, 0.1, 0.0, 0.0, -0.5)
    >>> print(w.round(4), accum)
    [0.4134 0.4134] [4. 4.]
    """

    def __call__(
        self, var: Any, accum: Any, linear: Any, grad: Any, lr: Any, l1: Any, l2: Any, lr_power: Any
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``accum`` and ``linear`` in place and return them; see the class."""
        lr, l1, l2, lr_power = self._scalars(lr=lr, l1=l1, l2=l2, lr_power=lr_power)
        check_ftrl_ranges(self.name, lr, l1, l2, lr_power)
        variables = self._variables(var=var, accum=accum, linear=linear)
        hp = ftrl_formula(l1, l2, lr_power).at(real_type(variables["var"].dtype), lr, 0.0, 0)
        self._apply_dense(ftrl_rule(lr_power), variables, hp, "grad", grad)
        return var, accum, linear


class SparseApplyFtrl(RowPrimitive):
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

    Raises:
        TypeError: a kind or dtype does not fit (an int where a float is published).

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
        self, lr: float, l1: float, l2: float, lr_power: float, use_locking: bool = False, *,
        out_of_range: str = "raise", **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(use_locking, **unknown)
        self.lr = check.float_attribute(self.name, "lr", lr)
        self.l1 = check.float_attribute(self.name, "l1", l1)
        self.l2 = check.float_attribute(self.name, "l2", l2)
        self.lr_power = check.float_attribute(self.name, "lr_power", lr_power)
        check_ftrl_ranges(self.name, self.lr, self.l1, self.l2, self.lr_power)
        self.out_of_range = check.out_of_range_rule(self.name, out_of_range)

    def __call__(
        self, var: Any, accum: Any, linear: Any, grad: Any, indices: Any
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``accum`` and ``linear`` in place and return them; see the class."""
        variables = self._variables(var=var, accum=accum, linear=linear)
        formula = ftrl_formula(self.l1, self.l2, self.lr_power)
        hp = formula.at(real_type(variables["var"].dtype), self.lr, 0.0, 0)
        self._apply_rows(ftrl_rule(self.lr_power), variables, hp, "grad", grad, indices)
        return var, accum, linear


class FusedSparseFtrl(SparseApplyFtrl):
    """`SparseApplyFtrl` for float32 variables, as published; others raise `TypeError`.

    Args:
        lr, l1, l2, lr_power: as `SparseApplyFtrl`.

    Source: ``mindspore.ops.FusedSparseFtrl`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, accum, linear = (np.full((3, 2), x, np.float32) for x in (1.0, 1.0, 0.0))
    >>> op = FusedSparseFtrl(lr=0.1, l1=0.5, l2=0.0, lr_power=-0.5)
    >>> _ = op(var, accum, linear, np.full((1, 2), 0.25, np.float32), np.array([0]))
    >>> print(var[:, 0].round(4))
    [0. 1. 1.]
    """

    _only_float32 = True


def check_ftrl_ranges(
    where: str, lr: float, l1: float, l2: float, lr_power: float, rate: str = "lr"
) -> None:
    """The ranges of FTRL's scalars; ``rate`` is what the learning rate is called."""
    # In float32, where a tiny rate is 0 and its reciprocal infinite.
    usable = 1.0 / LARGEST <= lr <= LARGEST and 1.0 / float(np.float32(lr)) <= LARGEST
    check.in_range(where, rate, lr, usable, "positive, it and its reciprocal within float32")
    check.in_range(where, "l1", l1, l1 >= 0.0, "at least 0")
    check.in_range(where, "l2", l2, l2 >= 0.0, "at least 0")
    check.in_range(where, "lr_power", lr_power, -LARGEST <= lr_power <= 0.0, "finite and at most 0")
