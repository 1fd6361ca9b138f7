"""Rules and formulas of users: what is refused before anything is written, and what is not."""

import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.kernels.cpu.compiler import traits
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.storage import F32, F64
from fusestep.nn import Rule
from fusestep.nn.base import own_rules
from helpers import assert_same_arrays, more, refused
from optimizers import FORMS, make, parameters

from own_functions import (  # isort: skip
    ARRAY, AVERAGED, MEASURED, PLAIN, TABLE, Own, asserting, branch, importing, plain, printing,
    raising, unusual)  # fmt: skip
from subprocesses import output_of

NOT_CALLED: Any = len


def own(rule: Any = PLAIN, dtype: Any = np.float32, **options: Any) -> Own:
    return Own(0.5, [np.linspace(0.5, 2.0, 4, dtype=dtype)], rule=rule, **options)


PARTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (plain, {}, TypeError, "rule has a wrong type: expected a Rule, got function"),
    (replace(AVERAGED, states=("m")), {}, TypeError,  # type: ignore[arg-type]
     "states of the rule has a wrong type: expected a tuple of str or State, got str"),
    (replace(PLAIN, hp=("lr")), {}, TypeError,  # type: ignore[arg-type]
     "hp of the rule has a wrong type: expected a tuple of str, got str"),
    (replace(PLAIN, hp=(1,)), {}, TypeError,  # type: ignore[arg-type]
     "hp of the rule has a wrong type: expected a tuple of str, got int"),
    (replace(PLAIN, hp=("lr", "lr")), {}, ValueError,
     "hp of the rule has a name twice: expected different ones, got ('lr', 'lr')"),
    (replace(PLAIN, hp=("lr", "lambda")), {}, ValueError,
     "hp of the rule has a name that cannot be: expected Python names that begin with a "
     "letter, got 'lambda'"),
    (replace(PLAIN, hp=("lr", "grad_scale"), decays=True), {}, ValueError,
     "hp of the rule has a name of what comes before the rule: expected another one, got "
     "grad_scale"),
    (replace(PLAIN, hp=("lr", "weight_decay")), {}, ValueError,
     "hp of the rule has a name of what comes before the rule: expected another one, got "
     "weight_decay"),
    (replace(PLAIN, hp=("lr", "clip_bound")), {"clipvalue": 0.25}, ValueError,
     "hp of the rule has a name of what comes before the rule: expected another one, got "
     "clip_bound"),
    (replace(PLAIN, states=("m",)), {}, TypeError,
     "update 'plain' takes other arguments: expected (w, g, m, hp), got (w: Any, g: Any, "
     "hp: Any) -> Any"),
    (replace(PLAIN, update=NOT_CALLED), {}, TypeError,
     "update has a wrong type: expected a function, got builtin_function_or_method"),
    (replace(PLAIN, lines=plain), {}, TypeError,
     "lines of the rule is of no use to this class: expected None, got <function plain"),
    (replace(MEASURED, factor=None), {}, TypeError,
     "the rule lacks a part: expected measure, n_measured, factor and factor_of, or none of "
     "them, got no factor"),
    (replace(MEASURED, measure=None), {}, TypeError,
     "the rule lacks a part: expected measure, n_measured, factor and factor_of, or none of "
     "them, got no measure"),
    (replace(MEASURED, n_measured=-1), {}, ValueError,
     "n_measured of the rule is out of range: expected an int of at least 1, got -1"),
    (replace(MEASURED, factor_of="rate"), {}, ValueError,
     "factor_of of the rule is unknown: expected one of ('lr',), got 'rate'"),
    (replace(MEASURED, measure=lambda w, g: (w, g)), {}, TypeError,
     "measure '<lambda>' takes other arguments: expected (w, g, hp), got (w, g)"),
    (replace(MEASURED, n_measured=3), {}, TypeError,
     "factor '<lambda>' takes other arguments: expected (sum1, sum2, sum3), got (of_w, of_g)"),
    (MEASURED, {"sparse_update": "lazy"}, ValueError,
     "sparse_update does not fit a rule that measures whole tensors: expected None, got 'lazy'"),
    (AVERAGED, {"states": ("m",)}, TypeError,
     "states has a wrong type: expected a mapping of names to numbers, got tuple"),
    (AVERAGED, {"states": {}}, ValueError,
     "states differ in number: expected 1 for those of the rule (m), got none"),
    (AVERAGED, {"states": {"a": 0.0, "b": 0.0}}, ValueError,
     "states differ in number: expected 1 for those of the rule (m), got a, b"),
    (AVERAGED, {"states": {"step": 0.0}}, ValueError,
     "the name of a state is that of counts: expected another name than 'step', got 'step'"),
    (AVERAGED, {"states": {1: 0.0}}, TypeError,
     "the name of a state has a wrong type: expected a str, got int"),
    (AVERAGED, {"states": {"m": None}}, TypeError,
     "the state 'm' has a wrong type: expected a number, got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "options", "kind", "text"), PARTS)
def test_parts_that_do_not_fit(
    rule: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match="^Own: " + re.escape(text)):
        own(rule, **options)


# -- what is compiled -----------------------------------------------------------------------------

RAISES = {
    "raise": raising, "assert": asserting,
    "index of a tuple": lambda w, g, hp: w - TABLE[int(g * hp.lr)],
    "index of an array": lambda w, g, hp: w - ARRAY[int(g * hp.lr)], "print": printing,
    "list": lambda w, g, hp: [w, g][int(hp.lr)],
    "int as exponent": lambda w, g, hp: w ** int(g * hp.lr),
    "range": lambda w, g, hp: w - len(range(0, 10, int(g * hp.lr))),
}  # fmt: skip
WRONG_TYPES: list[tuple[Rule, type[Exception], str]] = [
    (replace(PLAIN, update=branch), TypeError,
     "update 'branch' returns a wrong type: expected the float w, got OptionalType(float32)"),
    (replace(PLAIN, update=lambda w, g, _: (w, g)), TypeError,
     "update '<lambda>' returns a wrong type: expected the float w, got (float32, float32)"),
    (replace(AVERAGED, update=lambda w, g, _m, _hp: w - g), TypeError,
     "update '<lambda>' returns a wrong type: expected the floats (w, m), got float32"),
    (replace(AVERAGED, update=lambda w, g, m, _: (w, g, m)), ValueError,
     "update '<lambda>' returns another number of values: expected the floats (w, m), got "
     "(float32, float32, float32)"),
    (replace(AVERAGED, states=(nn.State("m", is_read=True),)), TypeError,
     "update 'averaged' returns a wrong type: expected the float w, got (float32, float32)"),
    (replace(AVERAGED, update=lambda w, g, m, _: (w, g > m)), TypeError,
     "update '<lambda>' returns a wrong type: expected the floats (w, m), got (float32, bool)"),
    (replace(AVERAGED, update=lambda w, _g, _m, _hp: (w, 1)), TypeError,
     "update '<lambda>' returns a wrong type: expected the floats (w, m), got (float32, int64)"),
    (replace(PLAIN, update=lambda w, g, _: complex(w, g)), TypeError,
     "update '<lambda>' returns a wrong type: expected the float w, got complex64"),
    (replace(PLAIN, update=lambda w, _g, hp: w - hp.rate), TypeError,
     "update '<lambda>' cannot be compiled: expected arithmetic on numbers, for Numba, got "
     "Unknown attribute 'rate' of type hp(float32 x 1)"),
    (replace(PLAIN, update=importing), TypeError,
     "update 'importing' cannot be compiled: expected arithmetic on numbers, for Numba, got Use "
     "of unsupported opcode (IMPORT_NAME) found"),
    (replace(MEASURED, n_measured=1, factor=lambda of_w: of_w), ValueError,
     "measure '<lambda>' returns another number of values: expected the floats (value1,), got "
     "(float32, float32)"),
    (replace(MEASURED, n_measured=1, measure=plain, factor=lambda of_w: of_w), TypeError,
     "measure 'plain' returns a wrong type: expected the floats (value1,), got float32"),
    (replace(MEASURED, measure=raising), ValueError, "measure 'raising' can raise: expected no"),
    (replace(MEASURED, factor=lambda of_w, of_g: None), TypeError,  # noqa: ARG005
     "factor '<lambda>' returns a wrong type: expected the float lr, got none"),
    (replace(MEASURED, factor=lambda of_w, of_g: TABLE[int(of_w + of_g)]), ValueError,
     "factor '<lambda>' can raise: expected no"),
]  # fmt: skip


@pytest.mark.parametrize("name", RAISES)
def test_code_that_can_raise(name: str) -> None:
    """Compiled code would leave out the elements for which it does."""
    function = RAISES[name]
    text = (
        f"Own: update {function.__name__!r} can raise: expected no raise, assert, print, list, int "
        "as exponent, or index that may be out of range, got an exception, of which compiled code "
        "does not hear"
    )
    for _ in range(2):  # what is known then is no other
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            own(replace(PLAIN, update=function))


@pytest.mark.parametrize(("rule", "kind", "text"), WRONG_TYPES)
def test_what_functions_return(rule: Rule, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match="^Own: " + re.escape(text)):
        own(rule)


def test_a_refused_rule_is_refused_in_every_type() -> None:
    with pytest.raises(TypeError, match=r"expected the float w, got OptionalType\(float64\)"):
        own(replace(PLAIN, update=branch), np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_cannot_raise_is_taken(dtype: Any) -> None:
    opt = own(Rule(unusual, ("m",), ("lr",)), dtype, states={"m": 4.0})
    w = opt.parameters[0].data
    before, g = w.copy(), np.array([-1.0, 0.0, 1.5, 3.0], dtype)
    opt((g,))
    with np.errstate(all="ignore"):
        other = 1.0 / g + np.hypot(before, g) + np.copysign(before, 4.0) + np.sign(g)
    expected = np.where((before < g) & (g < 4.0), w, other)  # the last two are `total` and so on
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    assert np.isfinite(w[2:]).all() and opt.state_dict()["m.parameter_0"].tolist() == [2.0] * 4


def test_a_rule_that_decays_may_say_weight_decay() -> None:
    """But not within LARS, which adds the decay to the gradient."""
    rule = Rule(lambda w, g, hp: w - hp.lr * (g + hp.weight_decay * w), (), ("lr", "weight_decay"),
                decays=True)  # fmt: skip
    w = np.ones(2, np.float32)
    opt = Own(0.5, [nn.Parameter(w, "w")], 0.25, rule=rule)
    opt.function = lambda _real, lr, decay, *_: (lr, decay)
    opt((np.zeros(2, np.float32),))
    assert w.tolist() == [0.875, 0.875]
    match = "^LARS: hp of the rule has a name of what comes before .* got weight_decay"
    with pytest.raises(ValueError, match=match):
        nn.LARS(opt)


def test_a_rule_without_scalars() -> None:
    rule = Rule(lambda w, g, _hp: w - g, (), ())
    table = np.ones((3, 2), np.float32)
    opt = Own(0.5, [table], rule=rule, sparse_update="lazy")
    opt.function = lambda *_: ()
    opt((np.ones_like(table),))
    opt((nn.RowTensor(np.array([1]), np.ones((1, 2), np.float32), (3, 2)),))
    assert table.tolist() == [[0, 0], [-1, -1], [0, 0]]


def test_rows_for_a_rule_that_measures() -> None:
    opt = Own(0.5, [np.ones((3, 2), np.float32)], rule=MEASURED)
    rows = nn.RowTensor(np.array([1]), np.ones((1, 2), np.float32), (3, 2))
    match = "is row-sparse: expected a dense one: the rule measures whole tensors, got a RowTensor"
    with refused(ValueError, match, opt):
        opt((rows,))


SAMPLE = ("adam", "lamb_clipped", "adafactor", "rprop", "scaled")


@pytest.mark.parametrize("name", [n if n in SAMPLE else more(n) for n in sorted(all_rules())])
def test_rules_of_the_package_are_as_those_of_users_must_be(name: str) -> None:
    """They are not looked at when an optimizer is made."""
    rule = all_rules()[name]
    for real, number in ((F32, "float32"), (F64, "float64")):
        own = [s for s in rule.states if s.per == "element" and not s.is_read]
        n_stored, found = 1 + len(own), traits.update_traits(rule, real)
        assert found == traits.Traits((number,) * n_stored, n_stored > 1, False)
        if rule.measure is not None and rule.lines is None:
            found = traits.measure_traits(rule, real)
            assert (len(found.returned), found.is_tuple) == (rule.n_measured, True)
            assert {*found.returned} <= {"float32", "float64"} and not found.can_raise
        if rule.factor is not None and "scale_parameter" not in rule.takes:  # a bool
            of_step = 3 * (rule.scope == "step")  # numbers of the optimizer
            n = len(rule.scaled_fields) + len(rule.factor_states) + of_step
            found = traits.factor_traits(rule, real)
            assert found == traits.Traits(("float64",) * n, n > 1, False)


def test_nothing_is_compiled_for_optimizers_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "_traits", lambda *_: pytest.fail("looks at a rule of the package"))
    for form in FORMS:
        make(form, parameters())


# Formulas: refused before anything is written, in every step


def infinite(_real: Any, lr: float, *_: Any) -> Any:
    return (lr * math.inf,)


def _of_later_steps(_real: Any, lr: float, _decay: float, step: int, *_: Any) -> Any:
    return (lr,) if step == 1 else (lr, lr)


LAMBDA = "formula '<lambda>' "
NUMBER = f"lr of {LAMBDA}has a wrong type: expected a number"
FORMULAS: list[tuple[Any, type[Exception], str]] = [
    *(
        (lambda *_, found=found: found, kind, text)
        for found, kind, text in (
            ((0.5, 0.5), ValueError,
             f"{LAMBDA}returns another number of scalars: expected 1 ('lr',), got 2"),
            ((), ValueError,
             f"{LAMBDA}returns another number of scalars: expected 1 ('lr',), got 0"),
            (1.0, TypeError, f"what {LAMBDA}returns has a wrong type: expected a tuple, got float"),
            ((None,), TypeError, f"{NUMBER}, got NoneType"),
            (("1.0",), TypeError, f"{NUMBER}, got str"),
            ((True,), TypeError, f"{NUMBER}, got bool"),
            ((1j,), TypeError, f"{NUMBER}, got complex"),
            ((math.nan,), ValueError,
             f"lr of {LAMBDA}is NaN: expected a number or an infinity, got nan"),
            ((np.float32(np.nan),), ValueError,
             f"lr of {LAMBDA}is NaN: expected a number or an infinity, got nan"))),
    (lambda lr: (lr,), TypeError,
     f"{LAMBDA}takes other arguments: expected (real, lr, decay, step, constants, powers), "
     "got (lr)"),
    (NOT_CALLED, TypeError,
     "formula has a wrong type: expected a function, got builtin_function_or_method"),
]  # fmt: skip


def _after(opt: Own, g: Any) -> list[np.ndarray]:
    """All that an optimizer has after a step with a formula that is right."""
    vars(opt).pop("function", None)
    opt.others = ()
    opt((g,))
    return [opt.parameters[0].data, *opt.state_dict().values()]


def given_gradients() -> dict[str, Any]:
    rows = nn.RowTensor(np.array([3, 1]), np.array([[1.0], [3.0]], np.float32), (4, 1))
    return {"dense": np.ones((4, 1), np.float32), "rows": rows}


def table_of_users() -> Own:
    w = np.linspace(0.5, 2.0, 4, dtype=np.float32)[:, None].copy()
    return Own(0.5, [w], rule=AVERAGED, sparse_update="lazy")


@pytest.mark.parametrize("kind", given_gradients())
@pytest.mark.parametrize(("function", "error", "text"), FORMULAS)
def test_formulas_that_are_refused(function, error: type[Exception], text: str, kind: str) -> None:
    """Nothing has changed, and nothing is left behind: steps are those of a new optimizer."""
    g, opt = given_gradients()[kind], table_of_users()
    opt.function = function
    for _ in range(2):
        with refused(error, "^Own: " + re.escape(text), opt, g):
            opt((g,))
    assert_same_arrays(_after(opt, g), _after(table_of_users(), g))


@pytest.mark.parametrize("kind", given_gradients())
def test_a_formula_is_looked_at_in_every_step(kind: str) -> None:
    g, opt = given_gradients()[kind], table_of_users()
    opt.function = _of_later_steps
    opt((g,))
    match = "'_of_later_steps' returns another number of scalars"
    with refused(ValueError, match, opt, g):
        opt((g,))


def test_a_formula_is_checked_where_it_has_changed(monkeypatch: Any) -> None:
    opt, g, checked = own(), np.ones(4, np.float32), []
    check = own_rules._check_function
    monkeypatch.setattr(own_rules, "_check_function", lambda *x: checked.append(x) or check(*x))
    a, b = 0.5, 0.25
    for numbers, n in (((a,), 1), ((a,), 1), ((b,), 2), ((b,), 2), ((b, a), 3)):
        opt.others = (numbers,)
        opt((g,))
        assert len(checked) == n
    opt.others = ((1.0,),)
    opt((g,))
    opt.others = ((True,),)  # equal, and no number
    with refused(TypeError, "constants of the formula has a wrong type", opt):
        opt((g,))


def test_what_formula_returns() -> None:
    opt, g = own(), np.ones(4, np.float32)
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
        opt = own()
        opt.function = function
        opt((np.ones(4, np.float32),))
        assert opt.parameters[0].data.tolist() == [-math.inf] * 4


def test_an_exception_of_a_formula_says_whose_it_is() -> None:
    opt = own()
    opt.function = lambda *_: (1.0 / 0.0,)
    note = "Own: formula '<lambda>' raised it at update 1; nothing has changed"
    with refused(ZeroDivisionError, note, opt):
        opt((np.ones(4, np.float32),))


def test_an_exception_of_a_factor_says_whose_it_is() -> None:
    """In Python a division by 0 is one."""
    opt = own(replace(MEASURED, factor=lambda of_w, of_g: of_w / of_g))
    opt((np.ones(4, np.float32),))
    note = "factor '<lambda>' raised it; nothing has changed"
    with refused(ZeroDivisionError, note, opt):
        opt((np.zeros(4, np.float32),))


# Kept code

PROGRAM = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from fusestep.kernels import cache
    from fusestep.kernels.cpu.compiler.compile import NativeFunction, engine_works
    from own_rules import Good, Bad
    engine_works()  # its trial is kept, too
    if sys.argv[2] == "again":
        NativeFunction._compile = lambda self: sys.exit(f"compiles {self.identity}")
    w, before = np.ones(3, np.float32), len(cache.cache_entries())
    try:
        Bad(0.5, [w])
    except ValueError as error:
        print(error)
    assert len(cache.cache_entries()) == before + (sys.argv[2] == "first")
    Good(0.5, [w])((w.copy(),))
    print(w)
"""
MODULE = """
    from fusestep.nn import Formula, FusedOptimizer, Rule
    def bad(w, g, hp):
        if g > hp.lr:
            raise ValueError
        return w
    def good(w, g, hp):
        return w - hp.lr * g
    def scalars(real, lr, decay, step, constants, powers):
        return (lr,)
    BAD, GOOD = Rule(bad, (), ("lr",)), Rule(good, (), ("lr",))
    class Good(FusedOptimizer):
        rule = GOOD
        def __init__(self, learning_rate, params):
            super().__init__(learning_rate, params, rule=self.rule)
        def formula(self):
            return Formula(scalars)
    class Bad(Good):
        rule = BAD
"""


def test_what_is_known_is_kept(tmp_path: Path) -> None:
    """A later process compiles nothing, and refuses what was refused; of that no code is kept."""
    (tmp_path / "own_rules.py").write_text(textwrap.dedent(MODULE))
    texts = [
        output_of(PROGRAM, tmp_path, how, FUSESTEP_CACHE_DIR=str(tmp_path / "kept"))
        for how in ("first", "again")
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("Bad: update 'bad' can raise: ")
    assert texts[0].splitlines()[1] == "[0.5 0.5 0.5]"
