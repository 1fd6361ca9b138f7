"""Adagrad on dense gradients, proximal Adagrad on row-sparse ones too; MindSpore's names."""

from __future__ import annotations

from typing import Any

from ..kernels.formula import Numbers
from ..kernels.rules import adagrad as rules
from .primitive import Named, Primitive, RowPrimitive
from .runtime import check
from .runtime.arrays import ROUNDINGS


class ApplyAdagrad(Primitive):
    """Adagrad::

        accum <- accum + grad*grad            (with update_slots)
        var <- var - lr * grad / sqrt(accum)

    Where the accumulator is 0, ``var`` stays: it has seen no gradient.

    Args:
        update_slots: whether ``accum`` is updated.
        use_locking: ... It is an addition.

    Source: ``mindspore.ops.ApplyAdagrad``; Duchi, Hazan and Singer (2011).

    >>> import numpy as np
    >>> w, accum = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> _ = ApplyAdagrad()(w, accum, 0.1, np.array([3.0, 0.0], np.float32))
    >>> print(w, accum)
    [0.9 1. ] [9. 0.]
    """

    def __init__(
        self, update_slots: bool = True, *, use_locking: bool = False, **unknown: Any
    ) -> None:
        super().__init__(use_locking, **unknown)
        self.update_slots = check.flag(self.name, "update_slots", update_slots)

    def __call__(self, var: Any, accum: Any, lr: Any, grad: Any) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        rate = check.scalar(self.name, "lr", lr)
        variables = self._variables(var=var, accum=accum)
        rule = rules.ADAGRAD if self.update_slots else rules.ADAGRAD_FIXED
        hp = rules.adagrad_scalars(ROUNDINGS[variables["var"].dtype], rate, 0.0, 0, (), ())
        self._apply_dense(rule, variables, hp, "grad", grad)
        return var, accum


class ApplyProximalAdagrad(Primitive):
    """Adagrad's step followed by soft thresholding and shrinking::

        accum <- accum + grad*grad
        e = lr / sqrt(accum)
        p = var - e*grad
        var <- sign(p) * max(|p| - e*l1, 0) / (1 + e*l2)

    Where the accumulator is 0, ``var`` stays: it has seen no gradient.

    Source: ``mindspore.ops.ApplyProximalAdagrad`` (deprecated in MindSpore 2.10), whose kernels
    use ``e`` where its documentation has ``lr``; Duchi and Singer (2009).

    >>> import numpy as np
    >>> w, accum = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.array([2.0, -2.0], np.float32)
    >>> _ = ApplyProximalAdagrad()(w, accum, 0.1, 1.0, 0.0, g)
    >>> print(w)
    [0.84999996 1.0500001 ]
    """

    def __call__(
        self, var: Any, accum: Any, lr: Any, l1: Any, l2: Any, grad: Any
    ) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        variables, hp = _proximal(self, var, accum, lr, l1, l2)
        self._apply_dense(rules.PROXIMAL_ADAGRAD, variables, hp, "grad", grad)
        return var, accum


class SparseApplyProximalAdagrad(RowPrimitive):
    """Proximal Adagrad on the rows that occur in a row-sparse gradient.

    Gradient rows of equal indices are summed to ``g``, then for these rows::

        accum <- accum + g*g
        e = lr / sqrt(accum)
        p = var - e*g
        var <- sign(p) * max(|p| - e*l1, 0) / (1 + e*l2)

    All other rows stay as they are; so does an element whose accumulator is 0.

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
        super().__init__(use_locking, **unknown)
        self.out_of_range = check.out_of_range_rule(self.name, out_of_range)

    def __call__(
        self, var: Any, accum: Any, lr: Any, l1: Any, l2: Any, grad: Any, indices: Any
    ) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        variables, hp = _proximal(self, var, accum, lr, l1, l2)
        self._apply_rows(rules.PROXIMAL_ADAGRAD, variables, hp, "grad", grad, indices)
        return var, accum


class FusedSparseProximalAdagrad(SparseApplyProximalAdagrad):
    """`SparseApplyProximalAdagrad` for float32 variables, as published; others raise `TypeError`.

    Source: ``mindspore.ops.FusedSparseProximalAdagrad`` (deprecated in MindSpore 2.8).

    >>> import numpy as np
    >>> var, accum = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    >>> op = FusedSparseProximalAdagrad()
    >>> _ = op(var, accum, 0.1, 1.0, 0.0, np.ones((1, 2), np.float32), np.array([2]))
    >>> print(var[:, 0].round(4))
    [1.  1.  0.8]
    """

    _only_float32 = True


def _proximal(
    operator: Primitive, var: Any, accum: Any, lr: Any, l1: Any, l2: Any
) -> tuple[Named, Numbers]:
    """The checked variables of a proximal step, and the scalars of its rule."""
    where, at_least_0 = operator.name, check.scalar_at_least_0
    rate = check.scalar(where, "lr", lr)
    constants = at_least_0(where, "l1", l1), at_least_0(where, "l2", l2)
    variables = operator._variables(var=var, accum=accum)
    real = ROUNDINGS[variables["var"].dtype]
    return variables, rules.proximal_adagrad_scalars(real, rate, 0.0, 0, constants, ())
