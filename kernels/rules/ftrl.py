"""FTRL-Proximal (McMahan et al., 2013, "Ad click prediction: a view from the trenches").

With ``p = -lr_power``, accumulator ``A`` and ``L`` the linear coefficient::

    A' = A + g*g
    L <- L + g - (A'**p - A**p) / lr * w
    w <- (sign(L)*l1 - L) / (A'**p / lr + 2*l2)   where |L| > l1, else 0
    A <- A'
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .formula import Numbers
from .rule import Rule, rule_helper


class FtrlHP(NamedTuple):
    """Scalars of FTRL with ``lr_power = -1/2``."""

    lr_reciprocal: Any
    l1: Any
    two_l2: Any
    zero: Any


class FtrlPowerHP(NamedTuple):
    """Scalars of FTRL with any power."""

    lr_reciprocal: Any
    l1: Any
    two_l2: Any
    zero: Any
    power: Any


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


def ftrl_rule(lr_power: float) -> Rule:
    """The rule for this power."""
    return FTRL if lr_power == -0.5 else FTRL_POWER


def ftrl_hp(real: Any, lr: float, l1: float, l2: float, lr_power: float) -> Any:
    """Every argument rounded to ``real``; the fields are those of ``ftrl_rule(lr_power)``."""
    if lr_power == -0.5:
        return ftrl_scalars(real, lr, 0.0, 0, (l1, l2), ())
    return ftrl_power_scalars(real, lr, 0.0, 0, (l1, l2, lr_power), ())


def ftrl_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> FtrlHP:
    """A `Formula` of `ftrl_hp` with the square root."""
    l1, l2 = constants
    return FtrlHP(real(1.0 / float(real(lr))), real(l1), real(2.0 * l2), real(0.0))


def ftrl_power_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> FtrlPowerHP:
    """A `Formula` of `ftrl_hp` with another power."""
    l1, l2, lr_power = constants
    hp = ftrl_scalars(real, lr, decay, step, (l1, l2), powers)
    return FtrlPowerHP(hp.lr_reciprocal, hp.l1, hp.two_l2, hp.zero, real(-lr_power))


FTRL = Rule(ftrl, ("accum", "linear"), FtrlHP._fields)
FTRL_POWER = Rule(ftrl_power, ("accum", "linear"), FtrlPowerHP._fields)
