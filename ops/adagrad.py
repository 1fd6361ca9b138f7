"""Adagrad and proximal Adagrad on dense gradients, under MindSpore's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules import adagrad as rules
from .primitive import Primitive
from .runtime import check
from .runtime.arrays import rounding


class ApplyAdagrad(Primitive):
    """Adagrad::

        accum <- accum + grad*grad            (with update_slots)
        var <- var - lr * grad / sqrt(accum)

    Where the accumulator is 0, ``var`` stays: it has seen no gradient.

    Args:
        update_slots: whether ``accum`` is updated.
        use_locking: serialise concurrent calls on overlapping memory (an addition).

    Call arguments:
        var, accum: float32, float64, float16 or bfloat16, of one dtype and shape; updated in
            place. 16-bit variables are computed in float32.
        lr: scalar.
        grad: of the shape of ``var`` and at most its precision.

    Returns:
        ``(var, accum)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable
            would have to be converted).
        ValueError: a shape, a value or the memory of a variable does not fit.
        Nothing has been written when an error is raised.

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
        super().__init__(use_locking, unknown, ("update_slots", "use_locking"))
        self.update_slots = check.flag(self.name, "update_slots", update_slots)

    def __call__(self, var: Any, accum: Any, lr: Any, grad: Any) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        rate = check.scalar(self.name, "lr", lr)
        variables = self._variables(var=var, accum=accum)
        real = rounding(variables["var"].dtype)
        rule = rules.ADAGRAD if self.update_slots else rules.ADAGRAD_FIXED
        hp = rules.adagrad_hp(real, rate)
        self._apply_dense(rule, variables, hp, "grad", grad)
        return var, accum


class ApplyProximalAdagrad(Primitive):
    """Adagrad's step followed by soft thresholding and shrinking::

        accum <- accum + grad*grad
        e = lr / sqrt(accum)
        p = var - e*grad
        var <- sign(p) * max(|p| - e*l1, 0) / (1 + e*l2)

    Where the accumulator is 0, ``var`` stays: it has seen no gradient.

    Args:
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, accum: as `ApplyAdagrad`.
        lr: scalar.
        l1, l2: scalars >= 0: strengths of the regularisation.
        grad: as `ApplyAdagrad`.

    Returns:
        ``(var, accum)``, the updated arrays.

    Raises:
        TypeError, ValueError: as `ApplyAdagrad`.

    Source: ``mindspore.ops.ApplyProximalAdagrad`` (deprecated in MindSpore 2.10), whose kernels
    use ``e`` where its documentation has ``lr``; Duchi and Singer (2009).

    >>> import numpy as np
    >>> w, accum = np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> g = np.array([2.0, -2.0], np.float32)
    >>> _ = ApplyProximalAdagrad()(w, accum, 0.1, 1.0, 0.0, g)
    >>> print(w)
    [0.84999996 1.0500001 ]
    """

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        super().__init__(use_locking, unknown, ("use_locking",))

    def __call__(
        self, var: Any, accum: Any, lr: Any, l1: Any, l2: Any, grad: Any
    ) -> tuple[Any, Any]:
        """Update ``var`` and ``accum`` in place and return them; see the class."""
        scalars = proximal_scalars(self.name, lr, l1, l2)
        variables = self._variables(var=var, accum=accum)
        hp = proximal_hp_for(variables["var"], scalars)
        self._apply_dense(rules.PROXIMAL_ADAGRAD, variables, hp, "grad", grad)
        return var, accum


def proximal_scalars(where: str, lr: Any, l1: Any, l2: Any) -> tuple[float, float, float]:
    """The checked scalars of a proximal step.

    Raises:
        TypeError: one is no real number.
        ValueError: one is not finite, or ``l1`` or ``l2`` is negative.
    """
    return (
        check.scalar(where, "lr", lr),
        check.scalar_at_least_0(where, "l1", l1),
        check.scalar_at_least_0(where, "l2", l2),
    )


def proximal_hp_for(
    variable: np.ndarray, scalars: tuple[float, float, float]
) -> rules.ProximalAdagradHP:
    """The scalars of the rule for ``variable``."""
    real = rounding(variable.dtype)
    return rules.proximal_adagrad_hp(real, *scalars)
