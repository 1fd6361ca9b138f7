"""Checks of users' rules and formulas: functions that do not fit, or could raise, are refused.

The rules of this package are not checked.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np

from ...kernels.cpu.compiler import traits
from ...kernels.formula import ROUNDING, Formula, Numbers
from ...kernels.rule import GradientTransform, Rule
from ...kernels.rules.gradient import COUPLED_DECAY, SCALE, TRUST
from ...kernels.state import PARAMETER, PER, State
from ...kernels.storage import REALS, STORAGES, real_of
from ...ops.runtime import check
from ...ops.runtime.errors import reject
from .arguments import check_kind, is_int

_PACKAGE = __name__.rpartition(".nn.")[0]
_FLOATS = tuple(map(str, REALS))
_NUMBERS = (*_FLOATS, "int64")
_SCOPES = ("row", "tensor")
_OF_FORMULA = ("real", "lr", "decay", "step", "constants", "powers")


def is_own(function: Any) -> bool:
    """Whether a function is a user's."""
    return not str(getattr(function, "__module__", "")).startswith(f"{_PACKAGE}.")


# A rule


def check_rule(
    where: str, rule: Any, states: Mapping[str, float] | None, sparse_update: str | None, *,
    couples: bool | None = None,
) -> None:  # fmt: skip
    """Refuse a rule whose parts do not fit together, or do not fit the named states.

    ``couples`` says whether a weight decay is added to the gradient; by default it is, unless the
    rule decays itself.

    Raises:
        TypeError, ValueError: as `FusedOptimizer`.
    """
    check_kind(where, "rule", rule, Rule, "a Rule")
    if not is_own(rule.update):
        return
    _check_declared(where, rule)
    _check_names(where, "hp of the rule", rule.hp)
    for name in rule.hp:  # fields of a named tuple
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            wrong, expected = "has a name that cannot be", "Python names that begin with a letter"
            reject(ValueError, where, "hp of the rule", wrong, expected, repr(name))
    couples = not rule.decays if couples is None else couples
    check_scalars(where, rule, SCALE, TRUST, *((COUPLED_DECAY,) if couples else ()))
    element = ("w", "g", *(state.name for state in rule.element_states), "hp")
    _check_function(where, "update", rule.update, element)
    for name in ("lines", "matrix"):
        if getattr(rule, name) is not None:
            wrong, got = "is of no use to this class", getattr(rule, name)
            reject(TypeError, where, f"{name} of the rule", wrong, None, got)
    _check_measure(where, rule, element, sparse_update)
    _check_scopes(where, rule)
    _check_states(where, rule, states)


def _check_names(where: str, what: str, names: Any) -> None:
    """Refuse names that repeat, or are in no tuple: ``("lr")`` is a str."""
    check_kind(where, what, names, tuple, "a tuple of str")
    for name in names:
        check_kind(where, what, name, str, "a tuple of str")
    if len({*names}) < len(names):
        reject(ValueError, where, what, "has a name twice", "different ones", names)


def _check_declared(where: str, rule: Rule) -> None:
    """Refuse impossible declarations of states, each by itself."""
    what = "states of the rule"
    check_kind(where, what, rule.states, tuple, "a tuple of str or State")
    for state in rule.states:
        check_kind(where, what, state, State, "a tuple of str or State")
    _check_names(where, what, rule.names)
    for name, per, initial, is_read, dtype in rule.states:
        label = f"state {name!r} of the rule"
        if per not in PER:
            reject(ValueError, where, label, "is of something unknown", f"one of {PER}", per)
        check.flag(where, f"is_read of the {label}", is_read)
        if dtype is not None and (per == "element" or dtype != np.int32):
            expected = "None, or np.int32 for a count of rows or tensors"
            reject(ValueError, where, label, "has a wrong dtype", expected, dtype)
        if initial != PARAMETER:
            check.number(where, f"initial of the {label}", initial)
        elif per != "element":
            wrong, expected = "begins as a copy of the parameter", "one number for each element"
            reject(ValueError, where, label, wrong, expected, f"one per {per}")


def _check_scopes(where: str, rule: Rule) -> None:
    """Refuse states that no function returns, and unknown arguments of ``factor``."""
    if rule.scope not in _SCOPES:
        what, wrong = "scope of the rule", "is unknown"
        reject(ValueError, where, what, wrong, f"one of {_SCOPES}", repr(rule.scope))
    for state in rule.states:
        follows = state.per == rule.scope and rule.factor is not None
        is_given = state.per == "element" or follows or (state.per == "tensor" and state.is_read)
        if not is_given:
            label = f"state {state.name!r} of the rule"
            expected = f"scope={state.per!r}, with a factor" if state.per in _SCOPES else None
            got = f"scope={rule.scope!r}" + (", no factor" if rule.factor is None else "")
            reject(ValueError, where, label, f"is one per {state.per}", expected, got)
    names = {"size", *(state.name for state in rule.scope_states), *rule.hp}
    _check_names(where, "takes of the rule", rule.takes)
    if unknown := [name for name in rule.takes if name not in names]:
        expected = "'size', states of the scope, and fields of hp"
        reject(ValueError, where, "takes of the rule", "is unknown", expected, ", ".join(unknown))
    check_kind(where, "signed of the rule", rule.signed, tuple, "a tuple of int")
    for k in rule.signed:
        if not is_int(k) or not 0 <= k < rule.n_measured:
            expected = f"places of the {rule.n_measured} values"
            reject(ValueError, where, "signed of the rule", "is out of range", expected, k)


def check_scalars(where: str, rule: Rule, *before: GradientTransform) -> None:
    """Refuse a rule with a scalar that has the name of a scalar of a gradient transform."""
    taken = {name for part in before for name in part.hp}
    if used := [name for name in rule.hp if name in taken]:
        wrong, expected = "has a name of what comes before the rule", "another one"
        reject(ValueError, where, "hp of the rule", wrong, expected, ", ".join(used))


def _check_function(where: str, role: str, function: Any, arguments: Sequence[str]) -> None:
    """Refuse a value that is no Python function with these arguments."""
    check_kind(where, role, function, FunctionType, "a function")
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        name, expected = _named(role, function), f"({', '.join(arguments)})"
        reject(TypeError, where, name, "takes other arguments", expected, signature)


def _named(role: str, function: Any) -> str:
    return f"{role} {function.__name__!r}"


def _check_measure(
    where: str, rule: Rule, element: Sequence[str], sparse_update: str | None
) -> None:
    """Refuse a rule that lacks one of measure, n_measured, factor and factor_of, but not all."""
    parts = {
        "measure": rule.measure is not None,
        "n_measured": rule.n_measured != 0,
        "factor": rule.factor is not None,
        "factor_of": rule.factor_of not in ("", ()),
    }
    if not any(parts.values()) and not rule.is_row_wise:
        return
    measures = parts["measure"] or parts["n_measured"]
    if rule.is_row_wise and not measures:  # states of rows alone may decide
        parts = {name: parts[name] for name in ("factor", "factor_of")}
    if missing := [name for name, is_given in parts.items() if not is_given]:
        expected = "measure, n_measured, factor and factor_of, or none of them"
        reject(TypeError, where, "the rule", "lacks a part", expected, f"no {missing[0]}")
    if measures and (not is_int(rule.n_measured) or rule.n_measured < 1):
        what, wrong, expected = "n_measured of the rule", "is out of range", "an int of at least 1"
        reject(ValueError, where, what, wrong, expected, rule.n_measured)
    expected = "a str, or a tuple of str"
    check_kind(where, "factor_of of the rule", rule.factor_of, str | tuple, expected)
    for name in rule.scaled_fields:
        if name not in rule.hp:
            what, wrong, expected = "factor_of of the rule", "is unknown", f"one of {rule.hp}"
            reject(ValueError, where, what, wrong, expected, repr(name))
    if measures:
        _check_function(where, "measure", rule.measure, element)
    check_kind(where, "takes of the rule", rule.takes, tuple, "a tuple of str")
    sums = [f"sum{k + 1}" for k in range(rule.n_measured)]
    _check_function(where, "factor", rule.factor, [*sums, *rule.takes])
    if sparse_update is not None and not rule.is_row_wise:
        wrong = "does not fit a rule that measures whole tensors"
        reject(ValueError, where, "sparse_update", wrong, None, repr(sparse_update))


def _check_states(where: str, rule: Rule, states: Mapping[str, float] | None) -> None:
    """Refuse names that states cannot have in checkpoints, and initial values that do not fit."""
    states = dict.fromkeys(rule.names, 0.0) if states is None else states
    check_kind(where, "states", states, Mapping, "a mapping of names to numbers")
    if len(states) != len(rule.states):
        what, expected = f"{len(rule.states)} for those of the rule", ", ".join(rule.names)
        got = ", ".join(map(str, states)) or "none"
        reject(ValueError, where, "states", "differ in number", f"{what} ({expected})", got)
    for name, value in states.items():
        check_kind(where, "the name of a state", name, str, "a str")
        if name.partition(".")[0] == "step":
            wrong, expected = "is that of counts", "another name than 'step'"
            reject(ValueError, where, "the name of a state", wrong, expected, repr(name))
        check.number(where, f"the state {name!r}", value)


def check_compiled(where: str, rule: Rule, dtypes: Iterable[np.dtype[Any]]) -> None:
    """Refuse a checked rule, for parameters of these dtypes, that cannot be compiled or can raise.

    Raises:
        TypeError: it cannot be compiled, or returns something else than floats.
        ValueError: it returns too few or too many floats, or can raise.
    """
    if not is_own(rule.update):
        return
    stored = ["w", *(state.name for state in rule.updated_states)]
    measured = [f"value{k + 1}" for k in range(rule.n_measured)]
    follows = [*rule.scaled_fields, *(state.name for state in rule.factor_states)]
    functions: dict[str, tuple[Any, Any, list[str]]] = {
        "update": (rule.update, traits.update_traits, stored),
        "measure": (rule.measure, traits.measure_traits, measured),
        "factor": (rule.factor, traits.factor_traits, follows),
    }
    # Checked in each type of the arithmetic: a literal is harmless in float64, but turns float32
    # into float64.
    for real in dict.fromkeys(real_of(STORAGES[dtype]) for dtype in dtypes):
        for role, (function, of, names) in functions.items():
            if function is not None:
                result = _traits(where, role, function, of, rule, real)
                _check_returned(where, role, function, result, names)


def _traits(
    where: str, role: str, function: Any, of: Callable[..., traits.Traits], *arguments: Any
) -> traits.Traits:
    """The traits of a function that compiled code can call."""
    name = _named(role, function)
    try:
        result = of(*arguments)
    except traits.CompilationError as error:
        expected = "arithmetic on numbers, for Numba"
        reject(TypeError, where, name, "cannot be compiled", expected, error)
    if result.can_raise:
        wrong, got = "can raise", "an exception, of which compiled code does not hear"
        expected = (
            "no raise, assert, print, list, int as exponent, or index that may be out of range"
        )
        reject(ValueError, where, name, wrong, expected, got)
    return result


def _check_returned(
    where: str, role: str, function: Any, result: traits.Traits, names: Sequence[str]
) -> None:
    """Refuse results other than a float for each name; one is alone, but where it is measured."""
    what, kinds = _named(role, function), _NUMBERS if role == "factor" else _FLOATS
    takes_tuple = len(names) > 1 or role == "measure"
    listed = f"({', '.join(names)}{',' * (len(names) == 1)})" if takes_tuple else names[0]
    expected = f"the float{'s' * takes_tuple} {listed}"
    got = ", ".join(result.returned)
    got = f"({got})" if result.is_tuple else got
    if result.is_tuple != takes_tuple or not {*result.returned} <= {*kinds}:
        reject(TypeError, where, what, "returns a wrong type", expected, got)
    if len(result.returned) != len(names):
        reject(ValueError, where, what, "returns another number of values", expected, got)


# A formula


def checked_scalars(where: str, what: str, returned: Any, names: Sequence[str]) -> Numbers:
    """The scalars of these ``names`` that a user's function has returned, checked.

    Raises:
        TypeError: ``returned`` is no tuple of numbers.
        ValueError: there are too few or too many, or one is a NaN.
    """
    check_kind(where, f"what {what} returns", returned, tuple | list, "a tuple")
    if len(returned) != len(names):
        wrong, expected = "returns another number of scalars", f"{len(names)} {names}"
        reject(ValueError, where, what, wrong, expected, len(returned))
    scalars = []
    for name, value in zip(names, returned, strict=True):
        label = f"{name} of {what}"
        number = value if type(value) is float else check.number(where, label, value)
        if number != number:
            reject(ValueError, where, label, "is NaN", "a number or an infinity", number)
        scalars.append(number)
    return tuple(scalars)


class OwnFormula(Formula):
    """A user's formula, whose scalars are checked before a step uses them."""

    where: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, where: str, formula: Formula, names: tuple[str, ...]) -> OwnFormula:
        """The formula for an optimizer, and a rule with scalars of some ``names``."""
        made = cls(*formula)
        made.where, made.names = where, names
        return made

    def at(self, real: Any, lr: float, decay: float, step: int) -> Any:
        """The checked scalars of an update, as `Formula.at`.

        Raises:
            TypeError, ValueError: as `checked_scalars`.
        """
        where, what = self.where, _named("formula", self.function)
        try:
            returned = super().at(real, lr, decay, step)
        except Exception as error:
            error.add_note(f"{where}: {what} raised it at update {step}; nothing has changed")
            raise
        return tuple(map(ROUNDING[real], checked_scalars(where, what, returned, self.names)))


def checked_formula(
    where: str, rule: Rule, formula: Formula, known: Formula | None = None
) -> Formula:
    """The formula for a rule; a user's formula becomes an `OwnFormula`.

    It is ``known``, which was checked, where that has the same objects: in nearly every step.

    Raises:
        TypeError, ValueError: it is no formula, or its numbers are no numbers.
    """
    if known is not None and type(formula) is Formula and {*map(type, formula[1:])} == {tuple}:
        before, now = ((f.function, *f.constants, None, *f.bases) for f in (known, formula))
        if len(before) == len(now) and all(map(is_, before, now)):
            return known
    check_kind(where, "what formula() returns", formula, Formula, "a Formula")
    if not is_own(formula.function):
        return formula
    _check_function(where, "formula", formula.function, _OF_FORMULA)
    for name in ("constants", "bases"):
        values, what = getattr(formula, name), f"{name} of the formula"
        check_kind(where, what, values, tuple, "a tuple of numbers")
        for value in values:
            if not is_int(value):
                check_kind(where, what, value, float | np.floating, "a tuple of numbers")
    return OwnFormula.of(where, formula, rule.hp)
