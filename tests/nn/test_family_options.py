"""Constructors of all optimizers: every argument acts, wrong ones are refused."""

import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
from argument_kinds import KINDS, schedule
from fusestep import nn
from fusestep.bench.registry import ELSEWHERE, Argument, Row
from fusestep.bench.registry.record import COMMON
from fusestep.nn.base.stateful import StateOfEach
from helpers import BF16, FAR, arrays_of, assert_same_arrays, distance, more, refused

from optimizers import (  # isort: skip
    BY_NAME, FAMILIES, gradients, make, parameters, rows, states)  # fmt: skip

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def accepted(family: Row) -> dict[str, inspect.Parameter]:
    """The arguments of the class but the first one and the unknown ones."""
    _, *others = inspect.signature(family.cls).parameters.items()
    return {n: p for n, p in others if p.kind is not inspect.Parameter.VAR_KEYWORD}


# The registry is complete


def test_every_optimizer_has_a_row() -> None:
    exported = {name: getattr(nn, name) for name in nn.__all__}
    classes = {
        n for n, c in exported.items() if isinstance(c, type) and issubclass(c, nn.Optimizer)
    }
    missing = classes - {"Optimizer", "FusedOptimizer", *BY_NAME}
    recipe = "CONTRIBUTING.md has the recipe"
    assert not missing, f"nn.__all__ has {missing} without a row in bench/registry: {recipe}"
    assert not BY_NAME.keys() - classes, "a row is of a class that nn.__all__ does not have"


@EACH_FAMILY
def test_every_argument_is_in_the_table(family: Row) -> None:
    """A new argument needs a value that acts, and a kind that says what is refused."""
    assert set(accepted(family)) == set(family.arguments)
    assert family.own.keys() <= family.arguments.keys()


@EACH_FAMILY
def test_published_signature(family: Row) -> None:
    """Names, order and defaults of what can be given by position."""
    found = []
    for name, parameter in inspect.signature(family.cls).parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            default = getattr(parameter.default, "__name__", repr(parameter.default))
            found.append(name if parameter.default is parameter.empty else f"{name}={default}")
    assert ", ".join(found).replace("=_empty", "") == family.published


# Every argument acts, by far more than the 3e-6 within which results agree with MindSpore's.

FAR_IN_16_BITS = 1e-4  # a rounding is 2**-11


def outcome(family: Row, with_rows: bool, **options: Any) -> Any:
    """An optimizer after three steps with shrinking gradients."""
    params = parameters()
    opt = family.make(params, **options)
    for step in range(3):
        given = gradients(params, step)
        if with_rows:
            given[0] = rows(params[0].shape, [4, step, 4], seed=step)
        opt([_shrunk(g, 0.3**step) for g in given])
    return opt


def _shrunk(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, nn.RowTensor):
        values = gradient.values * np.float32(factor)
        return nn.RowTensor(gradient.indices, values, gradient.dense_shape)
    return gradient * np.float32(factor)


ACTING = [
    # What clips is compared with clipping by hand in test_keras.py.
    (more if name in ("clipnorm", "clipvalue") else pytest.param)(
        family, name, with_rows, id=f"{family.name}-{name}-{'rows' * with_rows or 'dense'}")
    for family in FAMILIES
    for name, argument in family.arguments.items()
    for with_rows in (False, True)
    if argument.moved is not ELSEWHERE
    and (family.takes_rows if with_rows else not argument.rows_only)
]  # fmt: skip


# Each of these has kernels of its own: lazy rows go through that of a dense step, a sweep would
# need one more. Sweeps with decay and scale are those of test_family_rows.py.
COMPILED_IN = ("weight_decay", "loss_scale", "state_dtype")


@pytest.mark.parametrize(("family", "name", "with_rows"), ACTING)
def test_argument_acts(family: Row, name: str, with_rows: bool) -> None:
    argument = family.arguments[name]
    how = {"sparse_update": "lazy" if name in COMPILED_IN else "dense_equivalent"}
    how = how if with_rows else {}
    if name == "weight_decay" and "loss_scale" in family.arguments:
        how["loss_scale"] = 3.0  # by the kernels of `decayed_and_scaled`
    plain, moved = (
        outcome(family, with_rows, **{**how, **argument.beside, **change})
        for change in ({}, {**argument.also, name: argument.moved})
    )
    if argument.in_states:
        found = [(states(moved)[n], a) for n, a in states(plain).items()]
        assert max(distance([a], [b]) for a, b in found) > FAR_IN_16_BITS
    else:
        pairs = zip(moved.parameters, plain.parameters, strict=True)
        # The other parameter has a dense gradient in both.
        assert (
            max(distance([p.data], [q.data]) for p, q in list(pairs)[: 1 if with_rows else 2]) > FAR
        )


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if "state_dtype" in f.arguments], ids=lambda f: f.name
)
def test_state_dtype_is_that_of_every_state(family: Row) -> None:
    """After steps with one of the types, which take kernels of their own; else from the start."""
    stepping = FAMILIES.index(family) % 2
    for k, dtype in enumerate((np.float64, BF16)):
        options = {"state_dtype": dtype, **family.arguments["state_dtype"].beside}
        opt = family.make(parameters(), **options)
        if k == stepping:
            opt = outcome(family, False, **options)
        sizes = {p.size for p in opt.parameters}
        # Neither those of rows and columns, nor copies of parameters.
        found = {
            n: a.dtype
            for n, a in states(opt).items()
            if a.size in sizes and not n.startswith("p0.")
        }
        assert found
        assert set(found.values()) == {np.dtype(dtype)}, found


def test_lars_acts_through_the_optimizer_that_is_given() -> None:
    family = BY_NAME["LARS"]
    one, other = (outcome(family, False, optimizer=cls) for cls in (nn.SGD, nn.Adagrad))
    assert distance([one.parameters[0].data], [other.parameters[0].data]) > FAR


# What is refused


KNOWN = [
    pytest.param(family, name, argument, id=f"{family.name}-{name}")
    for family in FAMILIES
    for name, argument in family.arguments.items()
]
EACH_ARGUMENT = pytest.mark.parametrize(("family", "name", "argument"), KNOWN)


def refuse(family: Row, error: type[Exception], text: str, **options: Any) -> None:
    """The class refuses the options and leaves the parameter as it was, nameless too."""
    p = nn.Parameter(np.ones(2, np.float32))
    with refused(error, f"^{family.name}: {text}", p):
        family.make([p], **options)
    if family.build is None:
        assert p.name is None


@EACH_ARGUMENT
def test_wrong_values(family: Row, name: str, argument: Argument) -> None:
    for value, error, text in KINDS[argument.takes].refused(name):
        refuse(family, error, text, **{**argument.beside, name: value})


def test_numbers_that_float64_can_hold() -> None:
    """In the arithmetic of float32 they are 1 or 0, and the step would be infinite or 0/0."""
    for family in FAMILIES:
        for name, value in (("beta1", 1 - 1e-9), ("eps", 1e-50)):
            if family.arguments.get(name) is COMMON[name]:
                opt = family.make(parameters(dtype=np.float64), **{name: value})
                assert getattr(opt, name) == value


@EACH_FAMILY
def test_attributes_of_every_optimizer(family: Row) -> None:
    opt = family.make(parameters())
    for name, kept, impossible, kind in (
        ("target", "CPU", ("GPU", "Ascend", "cpu"), 1), ("unique", True, (False,), None)
    ):  # fmt: skip
        setattr(opt, name, kept)
        for value, error in (*((x, ValueError) for x in impossible), (kind, TypeError)):
            with pytest.raises(error, match=rf"^\w+: {name} "):
                setattr(opt, name, value)
        assert getattr(opt, name) == kept
    described = {n: x for n, x in vars(family.cls).items() if isinstance(x, StateOfEach)}
    for name, state in described.items():
        found = getattr(opt, name) if hasattr(opt, name) else ()  # `vhat` is there with amsgrad
        assert len(found) in (0, 2) and " of " in str(state.__doc__)
        with pytest.raises(AttributeError, match="has no setter"):
            setattr(opt, name, ())


def test_a_loss_scale_of_an_optimizer_of_users() -> None:
    for value, error, text in KINDS["loss scale"].refused("loss_scale"):
        with pytest.raises(error, match=f"^Optimizer: {text}"):
            nn.Optimizer(0.1, parameters(), loss_scale=value)


@EACH_ARGUMENT
def test_right_values(family: Row, name: str, argument: Argument) -> None:
    """At the edges of what is taken too; a step with each is finite. Those of all types of states
    are above."""
    for value in KINDS[argument.takes].taken:
        params = parameters()
        also = argument.also if value is argument.moved else {}
        opt = family.make(params, **{**argument.beside, **also, name: value})
        if name == "state_dtype":
            continue
        assert opt(gradients(params, 0)) == (True, True)
        assert all(np.isfinite(p.data).all() for p in params)


@EACH_FAMILY
def test_unknown_keyword(family: Row) -> None:
    """It is named together with the nearest known one and all that are known."""
    known = list(inspect.signature(family.cls).parameters)[:-1]
    positional = family.make(parameters()).opt if family.name == "LARS" else parameters()
    for name in family.arguments:
        for error in (TypeError, KeyError):
            with pytest.raises(error, match=f"'{name}_' is unknown.*did you mean '{name}'") as info:
                family.cls(positional, **{**_required(family), f"{name}_": 0.5})
        listed = re.search("expected one of (.*), got", str(info.value))
        assert listed
        assert set(listed[1].split(", ")) == set(known)


@EACH_FAMILY
def test_arguments_of_other_optimizers_are_unknown(family: Row) -> None:
    """An argument that would do nothing is not taken."""
    others = {name for other in FAMILIES for name in other.arguments} - set(family.arguments)
    positional = family.make(parameters()).opt if family.name == "LARS" else parameters()
    for name in others:
        with pytest.raises(TypeError, match=f"^{family.name}: argument '{name}' is unknown"):
            family.cls(positional, **_required(family), **{name: 0.5})


def _required(family: Row) -> dict[str, Any]:
    """What has no default, beside the first argument."""
    needed = [n for n, p in accepted(family).items() if p.default is p.empty]
    return {n: family.base[n] for n in needed}


@EACH_FAMILY
def test_required_arguments(family: Row) -> None:
    for name in _required(family):
        with pytest.raises(TypeError, match=f"missing .*'{name}'"):
            family.cls(parameters(), **{n: v for n, v in _required(family).items() if n != name})


# What is special


def test_ftrl_has_one_fixed_rate() -> None:
    """Its states sum up what earlier steps did with it."""
    family = BY_NAME["FTRL"]
    for lr in (0.1, schedule, [0.1, 0.2]):
        p = nn.Parameter(np.ones(2, np.float32))
        with refused(ValueError, "^FTRL: a group has a learning rate", p):
            family.make([{"params": [p], "lr": lr}])
        assert p.name is None


def test_ftrl_rate_that_is_assigned_later_is_checked() -> None:
    opt = nn.FTRL(parameters(), learning_rate=0.1)
    opt(gradients(opt.parameters, 0))
    opt.get_lr_parameter(opt.parameters[0]).data[...] = 0.0
    with refused(ValueError, "^FTRL: ", opt):
        opt(gradients(opt.parameters, 1))


_AMSGRAD, _NESTEROV = "use_amsgrad", "nesterov is impossible: expected momentum > 0, dampening 0"
EXCLUDED: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("Adam", f"{one} excludes {other}", {one: True, other: True})
        for one, other in (
            ("use_lazy", "use_offload"), (_AMSGRAD, "use_lazy"), (_AMSGRAD, "use_offload"),
            (_AMSGRAD, "use_nesterov"))),
    ("Adam", "sparse_update contradicts use_lazy: expected 'lazy', got '?dense",
     {"use_lazy": True, "sparse_update": "dense_equivalent"}),
    ("Adam", "clipnorm excludes clipvalue: expected at most one of them",
     {"clipvalue": 1.0, "clipnorm": 1.0}),
    ("SGD", _NESTEROV, {"nesterov": True}),
    ("SGD", _NESTEROV, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ("SGD", _NESTEROV, {"nesterov": True, "dampening": 0.1}),
    ("AdaFactor", "learning_rate excludes relative_step", {"learning_rate": 0.1}),
    ("AdaFactor", "learning_rate excludes relative_step", {"learning_rate": schedule}),
    ("AdaFactor", "learning_rate is missing", {"relative_step": False}),
    ("AdaFactor", "warmup_init needs relative_step: expected relative_step=True, got False",
     {"relative_step": False, "learning_rate": 0.1, "warmup_init": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "options"), EXCLUDED)
def test_options_that_exclude_each_other(name: str, text: str, options: dict[str, Any]) -> None:
    refuse(BY_NAME[name], ValueError, text, **options)


def test_sgd_refuses_a_schedule_as_decay_of_a_group_too() -> None:
    p = nn.Parameter(np.ones(2, np.float32))
    with refused(TypeError, "^SGD: .*weight_decay ", p):
        nn.SGD([{"params": [p], "weight_decay": schedule}])


def test_lars_around_something_else() -> None:
    lars = BY_NAME["LARS"].make(parameters())
    for given in (3, None, nn.SGD, [np.ones(2, np.float32)], lars):
        with pytest.raises(TypeError, match=r"^LARS: optimizer has a wrong type: expected another"):
            nn.LARS(given)


def test_adafactor_scales_every_fixed_rate_and_no_schedule() -> None:
    """A NumPy float is a float; an array or a schedule turns ``scale_parameter`` off."""
    for lr, scaled in ((0.5, True), (np.float32(0.5), True), ([0.5], False), (schedule, False)):
        assert nn.AdaFactor(parameters(), lr, relative_step=False).scale_parameter is scaled, lr


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(("form", "name", "value", "text"), [
    ("AdaFactor-plain", "beta1", 0.9, "AdaFactor: beta1 needs a first moment: .*got 0.9"),
    ("RMSProp", "momentum", 0.5, "RMSProp: momentum needs a moment: .*got 0.5"),
    ("FTRL", "lr_power", -0.3, "FTRL: lr_power needs another rule: .*got -0.3"),
    ("FTRL-power", "lr_power", -0.5, "FTRL: lr_power needs another rule: .*got -0.5"),
])  # fmt: skip
def test_what_needs_another_rule_cannot_be_assigned(
    form: str, name: str, value: float, text: str, is_sparse: bool
) -> None:
    """The scalars would be of another number than the rule reads."""
    takes_rows = is_sparse and form != "AdaFactor-plain"
    opt = make(form, parameters(), **({"sparse_update": "lazy"} if takes_rows else {}))
    table, vector = gradients(opt.parameters, 0)
    given = (rows((6, 4), [1, 3, 1]) if takes_rows else table, vector)
    opt(given)
    before = getattr(opt, name)
    setattr(opt, name, value)
    with refused(ValueError, text, opt):
        opt(given)
    setattr(opt, name, before)
    opt(given)
    assert opt.global_step == 2


@pytest.mark.parametrize(
    ("form", "name"), [("RMSProp-momentum", "momentum"), ("AdaFactor", "beta1")]
)
def test_a_moment_can_be_left_unused(form: str, name: str) -> None:
    """Assigned 0: as an optimizer that has kept a moment with this factor from the start."""
    opt = make(form, parameters())
    opt(gradients(opt.parameters, 0))
    setattr(opt, name, 0.0)
    plain = make(f"{form.partition('-')[0]}{'-plain' * (name == 'beta1')}", parameters())
    known = opt.state_arrays()
    for array, now in zip(arrays_of(plain.parameters), arrays_of(opt.parameters), strict=True):
        array[...] = now
    for n, array in plain.state_arrays().items():
        array[...] = known[n]
    for one in (opt, plain):
        one(gradients(opt.parameters, 1))
    for p, q in zip(opt.parameters, plain.parameters, strict=True):
        np.testing.assert_allclose(p.data, q.data, 1e-6)


FIXED = {
    "use_nesterov": ("Adam", "Adam-nesterov", "LazyAdam", "AdamOffload", "Momentum"),
    "use_amsgrad": ("Adam", "Adam-amsgrad"), "use_lazy": ("Adam", "Adam-lazy"),
    "use_offload": ("Adam",), "nesterov": ("SGD-momentum", "SGD-nesterov"), "momentum": ("SGD",),
    "centered": ("RMSProp", "RMSProp-both"), "update_slots": ("Adagrad", "Adagrad-fixed"),
    "clip_ratio": ("Lamb", "Lamb-clipped"), "relative_step": ("AdaFactor",),
    "warmup_init": ("AdaFactor",), "clipvalue": ("Adam",), "clipnorm": ("Adam",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), [(n, form) for n in FIXED for form in FIXED[n]])
def test_what_chose_the_rule_cannot_be_assigned(name: str, form: str) -> None:
    """It would do nothing: more than the next step was made from it. Copies keep it too."""
    opt = make(form, parameters())
    before = getattr(opt, name)
    value = 0.9 if name in ("momentum", "clipvalue", "clipnorm") else not before
    cls = type(opt).__name__
    text = f"^{cls}: {name} is fixed at construction: expected an optimizer that is made with it, "
    for one in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        with pytest.raises(AttributeError, match=f"{text}got {value}$"):
            setattr(one, name, value)
        assert getattr(one, name) == before
        one(gradients(one.parameters, 0))


def test_a_momentum_of_sgd_can_be_assigned_where_there_is_a_state_for_it() -> None:
    """As an optimizer that has had this momentum from the start, 0 in between."""
    one, other = (
        make("SGD-momentum", parameters()), make("SGD-momentum", parameters(), momentum=0.5),
    )  # fmt: skip
    for momentum in (0.0, 0.5):
        one.momentum = momentum
    for opt in (one, other):
        for step in range(3):
            opt(gradients(opt.parameters, step))
    assert_same_arrays(one.parameters, other.parameters)
    for wrong, error in ((-0.1, ValueError), ("0.5", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^SGD: momentum "):
            one.momentum = wrong
    assert one.momentum == 0.5
