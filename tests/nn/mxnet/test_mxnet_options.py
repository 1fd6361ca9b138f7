"""Arguments of MXNet's optimizers and schedulers, by the table of `mxnet_options`; the registry."""

import copy
import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from fusestep.nn import mxnet as mx
from helpers import FAR, distance

from mxnet_options import (  # isort: skip
    HANDED_ON, HELD, NEEDED, OF_SCHEDULERS, OPTIONS, REFUSED, REQUIRED, TAKEN, Option, S, ones,
    random, rows)  # fmt: skip

POSITIONAL = {**OPTIONS, **OF_SCHEDULERS}
EVERY = {**HANDED_ON, **OF_SCHEDULERS}
EACH_CLASS = pytest.mark.parametrize("cls", POSITIONAL, ids=lambda c: c.__name__)
ALL = [(cls, name, option) for cls in EVERY for name, option in EVERY[cls].items()]
CHECKED = [(cls, name, option) for cls in HANDED_ON for name, option in HANDED_ON[cls].items()]


def named(values: Any) -> list[Any]:
    """Parameters of a test by class and argument."""
    return [pytest.param(cls, name, o, id=f"{cls.__name__}-{name}") for cls, name, o in values]


# Those that keep an argument under another name.
ATTRIBUTES = {"learning_rate": "lr", "param_idx2name": "idx2name", "pwr": "power"}
EACH_ARGUMENT = pytest.mark.parametrize(("cls", "name", "option"), named(ALL))


def make(cls: Any, **options: Any) -> Any:
    return cls(**{**NEEDED.get(cls, {}), **options})


# Signatures


@EACH_CLASS
def test_published_order_and_defaults(cls: type) -> None:
    parameters = inspect.signature(cls).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    found = {n: REQUIRED if d is inspect.Parameter.empty else d for n, d in found.items()}
    assert list(found.items()) == [(n, option.default) for n, option in POSITIONAL[cls].items()]


DEFAULTS: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (mx.Optimizer, {}, {"lr": 0.01, "use_fused_step": False, "aggregate_num": 1, "lr_mult": {}}),
    (mx.Optimizer, {"compat": "1.9"}, {"lr": 0.01, "aggregate_num": 0, "wd_mult": {}}),
    (mx.Adam, {}, {"lr": 0.001, "lazy_update": False, "aggregate_num": np.inf, "num_update": 0}),
    (mx.Adam, {"compat": "1.9"}, {"lazy_update": True, "aggregate_num": np.inf}),
    (mx.AdamW, {}, {"lr": 0.001, "aggregate_num": np.inf, "idx2name": {}, "param_dict": {}}),
]


@pytest.mark.parametrize(("cls", "options", "expected"), DEFAULTS)
def test_what_none_stands_for(cls: type, options: Any, expected: dict[str, Any]) -> None:
    opt = cls(**options)
    assert {name: getattr(opt, name) for name in expected} == expected


# Every argument is checked, and acts


@EACH_ARGUMENT
def test_bad_arguments(cls: type, name: str, option: Option) -> None:
    for value, error, text in REFUSED[option.takes]:
        with pytest.raises(error, match=rf"^{cls.__name__}: {name}(\[.*\])? .*{text}"):
            make(cls, **{name: value})


@pytest.mark.parametrize(("cls", "name", "option"), named(CHECKED))
def test_bad_values_assigned(cls: type, name: str, option: Option) -> None:
    if option.takes == "nothing":
        return  # no attribute
    opt, kept = make(cls), ATTRIBUTES.get(name, name)
    before = getattr(opt, kept)
    for value, error, text in REFUSED[option.takes]:
        if value is None and option.takes != "flag":
            continue
        with pytest.raises(error, match=rf"^{cls.__name__}: {kept}(\[.*\])? .*{text}"):
            setattr(opt, kept, value)
        assert getattr(opt, kept) == before


@pytest.mark.parametrize(("cls", "name", "option"), named(a for a in ALL if a[2].takes in TAKEN))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_ranges(cls: Any, name: str, option: Option, data: Any) -> None:
    """Every value within, as a number of Python or NumPy, is what the attribute holds."""
    value = data.draw(TAKEN[option.takes])
    given_ones = [value]
    if isinstance(value, float) and name != "aggregate_num":
        given_ones += [np.float64(value), np.array(value), np.array([value])]
    elif isinstance(value, int) and not isinstance(value, bool):
        given_ones.append(np.int64(value))
    beside: dict[str, Any] = {}  # what has to be larger
    if name == "warmup_begin_lr":
        beside["base_lr"] = max(value, 0.01)
    elif name == "warmup_steps" and "max_update" in EVERY[cls]:
        beside["max_update"] = 2**50
    for number in given_ones:
        assert getattr(make(cls, **beside, **{name: number}), ATTRIBUTES.get(name, name)) == value


TOGETHER: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (mx.Adam, {"lazy_update": True, "use_fused_step": False}, AssertionError, "lazy_update needs"),
    (mx.Adam, {"compat": "1.9", "use_fused_step": False}, ValueError, "is not in MXNet 1.9"),
    (mx.AdamW, {"compat": "1.9"}, ValueError, r"compat has no AdamW: expected '2\.0', got '1\.9'"),
    (mx.AdamW, {"lazy_update": True}, TypeError, "argument 'lazy_update' is unknown"),
    (mx.Adam, {"eps": 1e-8}, TypeError, "argument 'eps' is unknown: .*did you mean 'epsilon'"),
    (mx.Adam, {"betas": (0.9, 0.99)}, KeyError, "'betas' is unknown: .*did you mean 'beta1'"),
    (mx.Adam, {"learning_rate": 0.1, "lr_scheduler": lambda n: 0.5 / n}, ValueError,
     r"learning_rate is given beside a callable: .*0\.1"),
    (mx.Adam, {"learning_rate": 0.1, "lr_scheduler": S.FactorScheduler(2, 1, 1e-8, 0.5, 3, 0.3)},
     ValueError, r"warmup_begin_lr is too large: .*base_lr = 0\.1, got 0\.3"),
    *((cls, {name: 0.5}, error, f"argument '{name}' is unknown: .*{text}")
      for cls in OPTIONS
      for name, error, text in (("clip_grad", KeyError, "did you mean 'clip_gradient'"),
                                ("lr", TypeError, "did you mean 'learning_rate'"),
                                ("momentum", TypeError, "expected one of .*rescale_grad"))),
    *((cls, {"warmup_step": 1}, error, "'warmup_step' is unknown: .*did you mean 'warmup_steps'")
      for cls in OF_SCHEDULERS for error in (KeyError, TypeError)),
    *((cls, {"warmup_begin_lr": 0.5}, ValueError, "warmup_begin_lr is too large: .*base_lr = 0.01")
      for cls in OF_SCHEDULERS),
    *((cls, {"warmup_steps": n}, ValueError, f"warmup_steps is too large: .* = 8, got {n}")
      for cls in (S.PolyScheduler, S.CosineScheduler) for n in (8, 9)),  # MXNet divides by zero
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "error", "text"), TOGETHER)
def test_what_does_not_go_together(cls: type, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^({cls.__name__}|FactorScheduler): .*{text}"):
        make(cls, **options)


def outcome(cls: type, options: dict[str, Any], *, with_rows: bool) -> list[np.ndarray]:
    """The arrays after three steps that are always the same, or the rates of a scheduler."""
    if cls in NEEDED:
        made = make(cls, **options)
        return [np.array([made(n) for n in range(1, 13)])]
    made = cls(**{"learning_rate": 0.1, **options})
    w = random(6, 4)
    state = made.create_state(0, w)
    for seed in range(3):
        g = rows([seed, 4, seed], (6, 4)) if with_rows else random(6, 4, seed=seed)
        made.update(0, w, g, state)
    return [w, *state]


@pytest.mark.parametrize(
    ("cls", "name", "option"),
    named(a for a in ALL if a[2].moved is not None and a[0] is not S.LRScheduler),
)
def test_every_argument_acts(cls: type, name: str, option: Option) -> None:
    given_ones = ({}, {name: option.moved})
    a, b = (
        outcome(cls, {**option.beside, **x}, with_rows=name == "lazy_update") for x in given_ones
    )
    assert distance(a, b) > FAR


@pytest.mark.parametrize("name", ["lr_mult", "wd_mult"])
@pytest.mark.parametrize("way", ["setter", "attribute"])
def test_bad_multipliers(name: str, way: str) -> None:
    opt = mx.Adam()
    give = getattr(opt, f"set_{name}") if way == "setter" else lambda x: setattr(opt, name, x)
    give({0: 2.0})
    for value, error, text in REFUSED["multipliers"]:
        with pytest.raises(error, match=rf"^Adam: {name}(\[0\])? .*{text}"):
            give(value)
        assert getattr(opt, name) == {0: 2.0}


def test_what_was_given_is_copied() -> None:
    names, factors, held, steps = {0: "a_bias"}, {0: 3}, dict(HELD), [2, 4]
    opt = mx.Adam(param_idx2name=names, param_dict=held, compat="1.9")
    scheduler = S.MultiFactorScheduler(steps, 0.5)
    opt.set_lr_mult(factors)
    opt.set_wd_mult(factors)
    kept = copy.copy((opt.idx2name, opt.lr_mult, opt.wd_mult, opt.param_dict, scheduler.step))
    assert (names, factors, steps) == ({0: "a_bias"}, {0: 3}, [2, 4])
    for given_one in (names, factors, held):
        given_one.clear()
    steps.append(5)
    assert kept == ({0: "a_bias"}, {0: 3.0}, {"a_bias": 0.0, 0: 3.0}, HELD, [2, 4])
    assert (opt.idx2name, opt.lr_mult, opt.wd_mult, opt.param_dict, scheduler.step) == kept


# Factors


NAMES = {0: "fc1_weight", 1: "fc1_bias"}
# The index that is updated, the factor, and options of the optimizer: what the error hints at;
# None: the factor may be of what comes later, or is of a weight.
FACTORS: list[tuple[Any, Any, dict[str, Any], str | None]] = [
    (0, "fc1_wieght", {"param_idx2name": NAMES}, "; did you mean 'fc1_weight'[?]"),
    (0, "other", {"param_idx2name": NAMES}, ""), (0, "fc1_weight", {}, ""),
    (0, "0", {"param_idx2name": NAMES}, ""), (0, 7, {}, None),
    (0, 7, {"param_idx2name": NAMES}, None), ("a", "b", {}, None),
    (0, "b", {"param_dict": {"b": HELD[0]}}, None), (0, "b", {"param_idx2name": {"b": "x"}}, None),
]  # fmt: skip


@pytest.mark.parametrize("cls", [mx.Adam, mx.AdamW])
@pytest.mark.parametrize("table", ["lr_mult", "wd_mult"])
@pytest.mark.parametrize(("index", "key", "options", "hint"), FACTORS)
def test_factors_for_no_weight(
    cls: type, table: str, index: Any, key: Any, options: Any, hint: str | None
) -> None:
    opt = cls(wd=0.5, **options)
    updater, w = mx.Updater(opt), ones(3)
    getattr(opt, f"set_{table}")({key: 2.0})
    if hint is not None:
        text = f"{table}\\['{key}'\\] is a factor for no weight: expected .*{key}{hint}$"
        for given_ones in ((0, ones(3), w), ([0, 1], [ones(3)] * 2, [w, ones(3)])):
            with pytest.raises(ValueError, match=f"^{cls.__name__}: {text}"):
                updater(*given_ones)
        assert (w == 1).all() and (updater.states, opt.num_update) == ({}, 0)
        opt.idx2name = {0: key}  # a name may become known later
    updater(index, ones(3), w)
    assert opt.num_update == 1
    if index == "a":  # strs are indices from now on
        updater(0, ones(3), ones(3))


def test_names_that_do_not_decay() -> None:
    """In 1.9 all but weights and gammas, unless told otherwise; and names may change."""
    names = dict(enumerate(("fc_weight", "fc_bias", "bn_gamma", "bn_beta")))
    opt = mx.Adam(param_idx2name=names, compat="1.9", wd=0.5)
    opt.set_wd_mult({"fc_bias": 2, "fc_weight": 3})
    opt.set_wd_mult({"bn_beta": 1})  # a new table: fc_bias is exempt again
    assert [opt._get_wd(i) for i in range(5)] == [0.5, 0.0, 0.5, 0.5, 0.5]
    opt.set_wd_mult({})
    opt.idx2name = {0: "fc2_weight"}  # the table has names that no weight has any more
    mx.Updater(opt)(0, ones(3), ones(3))
    opt.set_wd_mult({"fc_weight": 0.0})
    with pytest.raises(ValueError, match="fc_weight"):
        mx.Updater(opt)(0, ones(3), ones(3))


# Registry


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.Optimizer, "opt_registry", dict(mx.Optimizer.opt_registry))


@pytest.mark.parametrize("name", ["adam", "Adam", "ADAM", "adamW"])
def test_create(name: str) -> None:
    for create in (mx.create, mx.Optimizer.create_optimizer, mx.optimizer.create):
        opt = create(name, learning_rate=0.25)
        assert (type(opt).__name__.lower(), opt.learning_rate) == (name.lower(), 0.25)
    with pytest.raises(ValueError, match="epsilon is out of range"):
        mx.create(name, epsilon=-1.0)
    with pytest.raises(ValueError, match=r"^create: name is unknown: .*adam, adamw.*, got 'sgd'"):
        mx.create("sgd")
    with pytest.raises(TypeError, match=r"^create: name has a wrong type: .* a str, got type"):
        mx.create(mx.Adam)


@pytest.mark.usefixtures("_registry")
def test_register() -> None:
    class MyRule(mx.Optimizer):
        pass

    assert mx.register(MyRule) is MyRule
    assert type(mx.create("myrule", wd=0.5)) is MyRule
    other = type("MYRULE", (mx.Optimizer,), {})
    with pytest.warns(UserWarning, match=r"^register: .*MYRULE takes the place of .*\.MyRule"):
        mx.Optimizer.register(other)
    assert type(mx.create("myrule")) is other
    before = dict(mx.Optimizer.opt_registry)
    for klass in (int, lambda: 0, "adam", None, mx.Adam()):
        with pytest.raises(TypeError, match=r"^register: klass .* expected a subclass of Optim"):
            mx.register(klass)
    assert mx.Optimizer.opt_registry == before
