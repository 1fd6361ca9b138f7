"""FTRL-Proximal (McMahan et al., 2013, "Ad click prediction: a view from the trenches").

With ``p = -lr_power``, accumulator ``A`` and ``L`` the linear coefficient::

    A' = A + g*g
    L <- L + g + 2*l2_shrinkage*w - (A'**p - A**p) / lr * w
    w <- (sign(L)*l1 - L) / ((beta + A'**p) / lr + 2*l2)   where |L| > l1, else 0
    A <- A'

MindSpore has neither ``beta`` nor ``l2_shrinkage``, which are TensorFlow's. The shrinkage is no
part of ``A``. Without it there are rules that do not add ``0*w``, NaN for an infinite ``w``.
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


def ftrl_shrunk(w: Any, g: Any, accum: Any, linear: Any, hp: Any) -> Any:
    """`ftrl` with the shrinkage."""
    new_accum, shrunk = accum + g * g, g + hp.two_shrinkage * w
    w, linear = solve(w, shrunk, linear, math.sqrt(accum), math.sqrt(new_accum), hp)
    return w, new_accum, linear


def ftrl_power_shrunk(w: Any, g: Any, accum: Any, linear: Any, hp: Any) -> Any:
    """`ftrl_power` with the shrinkage."""
    new_accum, shrunk = accum + g * g, g + hp.two_shrinkage * w
    old_root, new_root = math.pow(accum, hp.power), math.pow(new_accum, hp.power)
    w, linear = solve(w, shrunk, linear, old_root, new_root, hp)
    return w, new_accum, linear


def ftrl_scalars(
    real: Any, lr: float, _decay: float, _step: int, constants: Numbers, _powers: Numbers
) -> Numbers:
    """Every argument rounded to ``real``; ``beta / lr`` is a part of what is divided by."""
    l1, l2, beta = constants
    rate = float(real(lr))
    return real(1.0 / rate), real(l1), real(2.0 * l2 + beta / rate), real(0.0)


def ftrl_last_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """`ftrl_scalars`, then the power or the doubled shrinkage."""
    l1, l2, beta, last = constants
    return (*ftrl_scalars(real, lr, decay, step, (l1, l2, beta), powers), real(last))


def ftrl_power_shrunk_scalars(
    real: Any, lr: float, decay: float, step: int, constants: Numbers, powers: Numbers
) -> Numbers:
    """`ftrl_scalars`, then the power and the doubled shrinkage."""
    l1, l2, beta, power, twice = constants
    scalars = ftrl_scalars(real, lr, decay, step, (l1, l2, beta), powers)
    return (*scalars, real(power), real(twice))


_STATES = ("accum", "linear")
_HP = ("lr_reciprocal", "l1", "two_l2", "zero")
FTRL = Rule(ftrl, _STATES, _HP)
FTRL_POWER = Rule(ftrl_power, _STATES, (*_HP, "power"))
FTRL_SHRUNK = Rule(ftrl_shrunk, _STATES, (*_HP, "two_shrinkage"))
FTRL_POWER_SHRUNK = Rule(ftrl_power_shrunk, _STATES, (*_HP, "power", "two_shrinkage"))

_RULES = {
    (False, False): FTRL,
    (True, False): FTRL_POWER,
    (False, True): FTRL_SHRUNK,
    (True, True): FTRL_POWER_SHRUNK,
}
_SCALARS = (ftrl_scalars, ftrl_last_scalars, ftrl_power_shrunk_scalars)


def ftrl_rule(lr_power: float, l2_shrinkage: float = 0.0) -> Rule:
    """The rule for this power and shrinkage."""
    return _RULES[lr_power != -0.5, l2_shrinkage != 0.0]


def ftrl_formula(
    l1: float, l2: float, lr_power: float, beta: float = 0.0, l2_shrinkage: float = 0.0
) -> Formula:
    """The scalars of the rule for these options."""
    last: Numbers = () if lr_power == -0.5 else (-lr_power,)
    if l2_shrinkage != 0.0:
        last = (*last, 2.0 * l2_shrinkage)
    return Formula(_SCALARS[len(last)], (l1, l2, beta, *last))
