"""Formulas of users: what is refused before anything is written, and what is not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from helpers import assert_same_bits, refused
from own_functions import AVERAGED, MEASURED, PLAIN, Own

NOT_CALLED: Any = len


def plain(rule: nn.Rule = PLAIN) -> Own:
    return Own(0.5, [np.linspace(0.5, 2.0, 4, dtype=np.float32)], rule=rule)


def infinite(_real: Any, lr: float, *_: Any) -> Any:
    return (lr * math.inf,)


def _two(_real: Any, lr: float, *_: Any) -> Any:
    return lr, lr


def _of_later_steps(_real: Any, lr: float, _decay: float, step: int, *_: Any) -> Any:
    return (lr,) if step == 1 else (lr, lr)


FORMULAS: dict[str, tuple[Any, type[Exception], str]] = {
    "too many": (
        _two, ValueError,
        "formula '_two' returns another number of scalars: expected 1 ('lr',), got 2",
    ),
    "too few": (
        lambda *_: (), ValueError,
        "formula '<lambda>' returns another number of scalars: expected 1 ('lr',), got 0",
    ),
    "no tuple": (
        lambda *_: 1.0, TypeError,
        "what formula '<lambda>' returns has a wrong type: expected a tuple, got float",
    ),
    "None": (
        lambda *_: (None,), TypeError,
        "lr of formula '<lambda>' has a wrong type: expected a number, got NoneType",
    ),
    "a str": (
        lambda *_: ("1.0",), TypeError,
        "lr of formula '<lambda>' has a wrong type: expected a number, got str",
    ),
    "a bool": (
        lambda *_: (True,), TypeError,
        "lr of formula '<lambda>' has a wrong type: expected a number, got bool",
    ),
    "a complex": (
        lambda *_: (1j,), TypeError,
        "lr of formula '<lambda>' has a wrong type: expected a number, got complex",
    ),
    "NaN": (
        lambda *_: (math.nan,), ValueError,
        "lr of formula '<lambda>' is NaN: expected a number or an infinity, got nan",
    ),
    "NaN of NumPy": (
        lambda *_: (np.float32(np.nan),), ValueError,
        "lr of formula '<lambda>' is NaN: expected a number or an infinity, got nan",
    ),
    "other arguments": (
        lambda lr: (lr,), TypeError,
        "formula '<lambda>' takes other arguments: expected (real, lr, decay, step, constants, "
        "powers), got (lr)",
    ),
    "no function": (
        NOT_CALLED, TypeError,
        "formula has a wrong type: expected a function, got builtin_function_or_method",
    ),
}  # fmt: skip


def _after(opt: Own, g: Any) -> list[np.ndarray]:
    """All that an optimizer has after a step with a formula that is right."""
    vars(opt).pop("function", None)
    opt.others = ()
    opt((g,))
    return [opt.parameters[0].data, *opt.state_dict().values()]


def gradients() -> dict[str, Any]:
    values = np.array([[1.0], [3.0]], np.float32)
    rows = nn.RowTensor(np.array([3, 1]), values, (4, 1))
    return {"dense": np.ones((4, 1), np.float32), "rows": rows}


def table() -> Own:
    w = np.linspace(0.5, 2.0, 4, dtype=np.float32)[:, None].copy()
    return Own(0.5, [w], rule=AVERAGED, sparse_update="lazy")


@pytest.mark.parametrize("kind", gradients())
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_are_refused(name: str, kind: str) -> None:
    """Nothing has changed, and nothing is left behind: steps are those of a new optimizer."""
    function, error, text = FORMULAS[name]
    g, opt = gradients()[kind], table()
    opt.function = function
    for _ in range(2):
        with refused(error, "^Own: " + re.escape(text), opt, g):
            opt((g,))
    for found, expected in zip(_after(opt, g), _after(table(), g), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", gradients())
def test_a_formula_is_looked_at_in_every_step(kind: str) -> None:
    g, opt = gradients()[kind], table()
    opt.function = _of_later_steps
    opt((g,))
    match = "'_of_later_steps' returns another number of scalars"
    with refused(ValueError, match, opt, g):
        opt((g,))


def test_what_formula_returns() -> None:
    opt, g = plain(), np.ones(4, np.float32)
    for wrong in ((0.9,), (["a"],), (("0.9",),), ((True,),)):
        for opt.others in ((wrong[0],), ((), wrong[0])):
            name = "bases" if len(opt.others) == 2 else "constants"
            match = f"{name} of the formula has a wrong type: expected a tuple of numbers, got "
            with refused(TypeError, match, opt):
                opt((g,))
    opt.formula = lambda: (0.5,)
    match = r"^Own: what formula\(\) returns has a wrong type: expected a Formula, got tuple"
    with refused(TypeError, match, opt):
        opt((g,))


def test_scalars_may_be_infinite() -> None:
    """Also where they are beyond float32, without a warning of NumPy."""
    for function in (infinite, lambda *_: (1e300,)):
        opt = plain()
        opt.function = function
        opt((np.ones(4, np.float32),))
        assert opt.parameters[0].data.tolist() == [-math.inf] * 4


def test_an_exception_of_a_formula_says_whose_it_is() -> None:
    opt = plain()
    opt.function = lambda *_: (1.0 / 0.0,)
    note = "Own: formula '<lambda>' raised it at update 1; nothing has changed"
    with refused(ZeroDivisionError, note, opt):
        opt((np.ones(4, np.float32),))


def test_an_exception_of_a_factor_says_whose_it_is() -> None:
    """In Python a division by 0 is one."""
    opt = plain(replace(MEASURED, factor=lambda of_w, of_g: of_w / of_g))
    opt((np.ones(4, np.float32),))
    note = "factor '<lambda>' raised it; nothing has changed"
    with refused(ZeroDivisionError, note, opt):
        opt((np.zeros(4, np.float32),))
