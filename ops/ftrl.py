"""FTRL-Proximal on dense gradients, under MindSpore's name and argument order."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.rules.ftrl import FtrlHP, FtrlPowerHP, ftrl_hp, ftrl_rule
from .primitive import Primitive
from .runtime import check
from .runtime.arrays import rounding
from .runtime.check import LARGEST


class ApplyFtrl(Primitive):
    """FTRL-Proximal, with ``p = -lr_power``::

        new = accum + grad*grad
        linear <- linear + grad - (new**p - accum**p) / lr * var
        var <- (sign(linear)*l1 - linear) / (new**p / lr + 2*l2)   where |linear| > l1, else 0
        accum <- new

    ``grad*grad`` must be a number of the arithmetic: in float32 a gradient of 1.8e19 or more makes
    NaN.

    Args:
        use_locking: serialise concurrent calls on overlapping memory.

    Call arguments:
        var, accum, linear: float32, float64, float16 or bfloat16, of one dtype and shape;
            updated in place. 16-bit variables are computed in float32.
        grad: of the shape of ``var`` and at most its precision.
        lr: scalar > 0.
        l1, l2: scalars >= 0: strengths of the regularisation.
        lr_power: scalar <= 0; -0.5 is the fast one, others call ``pow`` for each element.

    Returns:
        ``(var, accum, linear)``, the updated arrays.

    Raises:
        TypeError: a kind or dtype does not fit (`fusestep.ConversionError` where a variable
            would have to be converted).
        ValueError: a shape, a value or the memory of a variable does not fit.
        Nothing has been written when an error is raised.

    Source: ``mindspore.ops.ApplyFtrl`` (deprecated in MindSpore 2.10); McMahan et al. (2013).

    >>> import numpy as np
    >>> w, accum, linear = (np.full(2, x, np.float32) for x in (1.0, 1.0, 0.0))
    >>> g = np.full(2, 3**0.5, np.float32)
    >>> _ = ApplyFtrl()(w, accum, linear, g, 0.1, 0.0, 0.0, -0.5)
    >>> print(w.round(4), accum)
    [0.4134 0.4134] [4. 4.]
    """

    def __init__(self, use_locking: bool = False, **unknown: Any) -> None:
        super().__init__(use_locking, unknown, ("use_locking",))

    def __call__(
        self,
        var: Any,
        accum: Any,
        linear: Any,
        grad: Any,
        lr: Any,
        l1: Any,
        l2: Any,
        lr_power: Any,
    ) -> tuple[Any, Any, Any]:
        """Update ``var``, ``accum`` and ``linear`` in place and return them; see the class."""
        scalars = self._scalars(lr=lr, l1=l1, l2=l2, lr_power=lr_power)
        check_ftrl_ranges(
            self.name, scalars["lr"], scalars["l1"], scalars["l2"], scalars["lr_power"]
        )
        variables = self._variables(var=var, accum=accum, linear=linear)
        hp = ftrl_hp_for(variables["var"], scalars)
        self._apply_dense(ftrl_rule(scalars["lr_power"]), variables, hp, "grad", grad)
        return var, accum, linear


def check_ftrl_ranges(
    where: str, lr: float, l1: float, l2: float, lr_power: float, rate: str = "lr"
) -> None:
    """The ranges of FTRL's scalars; ``rate`` is what the learning rate is called.

    Raises:
        ValueError: one is out of range.
    """
    # In float32, where a tiny rate is 0 and its reciprocal infinite.
    usable = 1.0 / LARGEST <= lr <= LARGEST and 1.0 / float(np.float32(lr)) <= LARGEST
    check.in_range(where, rate, lr, usable, "positive, it and its reciprocal within float32")
    check.in_range(where, "l1", l1, l1 >= 0.0, "at least 0")
    check.in_range(where, "l2", l2, l2 >= 0.0, "at least 0")
    check.in_range(where, "lr_power", lr_power, -LARGEST <= lr_power <= 0.0, "finite and at most 0")


def ftrl_hp_for(variable: np.ndarray, scalars: dict[str, float]) -> FtrlHP | FtrlPowerHP:
    """The scalars of the rule for ``variable``."""
    real = rounding(variable.dtype)
    hp: FtrlHP | FtrlPowerHP = ftrl_hp(real, **scalars)
    return hp
