"""FTRL-Proximal (McMahan et al., 2013, "Ad click prediction: a view from the trenches").

With ``p = -lr_power``, accumulator ``A`` and ``L`` the linear coefficient::

    A' = A + g*g
    L <- L + g - (A'**p - A**p) / lr * w
    w <- (sign(L)*l1 - L) / (A'**p / lr + 2*l2)   where |L| > l1, else 0
    A <- A'
"""

from __future__ import annotations

import math
from typing import Any

from ..formula import Formula, Numbers
from ..rule import Rule, rule_helper


@rule_helper
def solve(w: Any, g: Any, linear: Any, old_root: Any, new_root: Any, hp: Any) -> Any:
    """The new ``w`` and ``linear``, given ``A**p`` before and after the update."""
    linear = linear + g - (new_root - old_root) * hp.lr_reciprocal * w
    solution = (math.copysign(hp.l1, linear) - linear) / (new_root * hp.lr_reciprocal + hp.two_l2)
    # "inside" as "<=", so that a NaN in linear reaches the parameter.
    return (hp.zero if abs(linear) <= hp.l1 else solution), linear


def ftrl(w: Any, g: Any, accum: Any, linear: Any, hp: Any) -> Any:
    """FTRL with the square root, which compiles to packed instructions."""
    new_accum = accum + g * g
    w, linear = solve(w, g, linear, math.sqrt(accum), math.sqrt(new_accum), hp)
    return w, new_accum, linear


def ftrl_power(w: Any, g: Any, accum: Any, linear: Any, hp: Any) -> Any:
    """FTRL with any power; calls the C library's ``pow`` for every element."""
    new_accum = accum + g * g
    w, linear = solve(w, g, linear, math.pow(accum, hp.power), math.pow(new_accum, hp.power), hp)
    return w, new_accum, linear


def ftrl_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``."""
    l1, l2 = constants
    return real(1.0 / float(real(lr))), real(l1), real(2.0 * l2), real(0.0)


def ftrl_power_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """As `ftrl_scalars`, with another power than -1/2."""
    l1, l2, lr_power = constants
    return (*ftrl_scalars(real, lr, decay, step, (l1, l2), powers), real(-lr_power))


_HP = ("lr_reciprocal", "l1", "two_l2", "zero")
FTRL = Rule(ftrl, ("accum", "linear"), _HP)
FTRL_POWER = Rule(ftrl_power, ("accum", "linear"), (*_HP, "power"))


def ftrl_rule(lr_power: float) -> Rule:
    """The rule for this power."""
    return FTRL if lr_power == -0.5 else FTRL_POWER


def ftrl_formula(l1: float, l2: float, lr_power: float) -> Formula:
    """The scalars of the rule for this power."""
    if lr_power == -0.5:
        return Formula(ftrl_scalars, (l1, l2))
    return Formula(ftrl_power_scalars, (l1, l2, lr_power))
