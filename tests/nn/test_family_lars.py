"""LARS around every other optimizer: its formula, and that it leaves the optimizer as it was."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import reference_layerwise as reference
from adam_family import Descent
from fusestep import nn, ops
from helpers import assert_same_arrays, refused, sampled, unchanged

from optimizers import (  # isort: skip
    FORMS, ONE_OF_EACH, decayed_and_scaled, gradients, make, parameters, rows)  # fmt: skip

# The default filter leaves out the two in the middle.
SHAPES = {"w": (4, 3), "LayerNorm.g": (3,), "fc.bias": (5,), "v": (7,)}
ACTS = (True, False, False, True)
INSIDE = [form for form in FORMS if not form.startswith("LARS")]
EACH_INSIDE = pytest.mark.parametrize("form", INSIDE)
LARS_OPTIONS = {"coefficient": 0.3, "epsilon": 0.01}


class Schedule(nn.LearningRateSchedule):
    """Remembers the steps for which it was asked."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.asked: list[int] = []

    def construct(self, global_step: int) -> float:
        self.asked.append(global_step)
        return self.start / (1 + global_step)


def build(form: str, params: Any, **options: Any) -> Any:
    """The optimizer to wrap."""
    if form == "custom":
        return Descent(parameters=params, **{"learning_rate": 0.5, **options})
    return make(form, params, **options)


def params64(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Any:
    return parameters(shapes, np.float64)


def lars_gradients(params, given, acts, decays, rates=None, **options) -> list[np.ndarray]:
    """What the reference hands on; with rates they are clipped to."""
    rates = [None] * len(params) if rates is None else rates
    options = {**LARS_OPTIONS, **options}
    return [
        reference.lars_gradient(p.data, g, decay=decay, lr=lr, **options).astype(p.dtype)
        if act
        else g
        for p, g, act, decay, lr in zip(params, given, acts, decays, rates, strict=True)
    ]


def assert_close(one: Any, other: Any, rtol: float = 1e-10) -> None:
    __tracebackhide__ = True
    for p, q in zip(one.parameters, other.parameters, strict=True):
        np.testing.assert_allclose(p.data, q.data, rtol=rtol, atol=1e-4 * rtol, err_msg=p.name)


# The formula


IN_FLOAT64 = [(form, np.float64) for form in ONE_OF_EACH if form != "LARS"]
IN_EITHER = [  # mostly with kernels that other tests need anyway
    (form, np.float64 if form in ("Adam", "Momentum", "Lamb", "AdaFactor") else np.float32)
    for form in INSIDE
]


@pytest.mark.parametrize(("form", "dtype"), sampled(IN_FLOAT64, IN_EITHER))
def test_formula(form: str, dtype: Any) -> None:
    """The optimizer's own step with the reference's gradient, and without its decay."""
    use_locking = dtype is np.float32
    options = decayed_and_scaled(form)
    scale = options.get("loss_scale", 1.0)
    rtol = 1e-10 if dtype is np.float64 else 1e-5
    inner = make(form, parameters(SHAPES, dtype), use_locking=use_locking, **options)
    opt, plain = nn.LARS(inner, **LARS_OPTIONS), make(form, parameters(SHAPES, dtype))
    for step in range(3):
        given = gradients(opt.parameters, step)
        assert opt([g * scale for g in given]) == (True,) * len(SHAPES)
        plain(lars_gradients(plain.parameters, given, ACTS, [0.1] * 4))
    assert_close(opt, plain, rtol)


@pytest.mark.parametrize("inside", ["SGD", "custom"])
def test_decay_acts_only_where_lars_acts(inside: str) -> None:
    """And there after the factor; a name with "beta" is exempt, as it is without LARS."""
    params = params64({**SHAPES, "beta": (3,)})
    before = [p.data.copy() for p in params]
    nn.LARS(build(inside, params, weight_decay=0.1))([np.zeros(p.shape) for p in params])
    moved = [not np.array_equal(p.data, w) for p, w in zip(params, before, strict=True)]
    assert moved == [True, False, False, True, False]


@pytest.mark.parametrize("inside", ["SGD", "Lamb", "custom"])
@pytest.mark.parametrize("coefficient", [1e-3, 0.3, 100.0])
def test_use_clip(inside: str, coefficient: float) -> None:
    """With the rate of each group at each step, fixed or scheduled."""

    def in_groups(**more: Any) -> Any:
        params = params64()
        groups = [
            {"params": params[:1], "lr": 0.5, **more},
            {"params": params[1:3], "lr": Schedule(0.25)}, {"params": params[3:], **more},
        ]  # fmt: skip
        return build(inside, groups, learning_rate=Schedule(0.125))

    options = {**LARS_OPTIONS, "coefficient": coefficient}
    opt, plain = nn.LARS(in_groups(weight_decay=0.1), use_clip=True, **options), in_groups()
    for step in range(3):
        given = gradients(opt.parameters, step)
        rates = (0.5, 0.25 / (1 + step), 0.25 / (1 + step), 0.125 / (1 + step))
        assert opt.get_lr() == rates
        opt(given)
        decays = [0.1, 0.0, 0.0, 0.1]
        plain(lars_gradients(plain.parameters, given, ACTS, decays, rates, **options))
    assert_close(opt, plain)


def test_filter() -> None:
    seen = []

    def only_v(parameter: nn.Parameter) -> bool:
        seen.append(parameter.name)
        return parameter.name == "v"

    opt, plain = (
        nn.LARS(nn.SGD(params64(), 0.5), lars_filter=only_v, **LARS_OPTIONS),
        nn.SGD(params64(), 0.5),
    )
    assert seen == list(SHAPES)
    given, again = gradients(opt.parameters, 0), copy.deepcopy(opt)
    for one in (opt, again, pickle.loads(pickle.dumps(opt))):  # without the filter, which is local
        one(given)
    plain(lars_gradients(plain.parameters, given, (False, False, False, True), [0.0] * 4))
    for one in (opt, again):
        assert_close(one, plain)
    assert len(seen) == len(SHAPES)


# The optimizer inside


@EACH_INSIDE
def test_the_optimizer_is_left_as_it_was(form: str) -> None:
    """Its plain steps are those of one that was never wrapped, from the same state."""
    options = decayed_and_scaled(form)
    inner, twin = (make(form, parameters(SHAPES), **options) for _ in range(2))
    opt = nn.LARS(inner, **LARS_OPTIONS)
    for step in range(3):
        opt(gradients(inner.parameters, step))
        twin.load_state_dict(inner.state_dict())
        for p, q in zip(twin.parameters, inner.parameters, strict=True):
            p.data[...] = q.data
        for one in (inner, twin):
            assert one.get_weight_decay() == 0.1
            assert one.loss_scale == options.get("loss_scale", 1.0)
            one(gradients(one.parameters, 10 + step))
        assert_same_arrays(inner.parameters, twin.parameters)
    assert inner.global_step.tolist() == [6]


def test_what_lars_tells_is_the_optimizers() -> None:
    inner = nn.Momentum(parameters(SHAPES), [0.5, 0.25], 0.9, weight_decay=0.1, loss_scale=4.0)
    opt = nn.LARS(inner)
    opt(gradients(inner.parameters, 0))
    assert opt.parameters is inner.parameters
    assert np.shares_memory(opt.global_step, inner.global_step)
    assert (opt.get_lr(), opt.get_weight_decay(), opt.loss_scale) == (0.25, 0.1, 4.0)
    assert opt.get_lr_parameter(opt.parameters[0]) is inner.get_lr_parameter(inner.parameters[0])
    assert list(opt.state_dict()) == list(inner.state_dict())
    opt([None] * 4)
    with refused(RuntimeError, "^Momentum: learning_rate has no value for step 2", opt):
        opt([None] * 4)


@pytest.mark.parametrize("centralize", [False, True])
@pytest.mark.parametrize("fixed_rate", [False, True])
@pytest.mark.parametrize("inside", ["Momentum", "Adam", "Lamb", "AdamWeightDecay", "custom"])
def test_schedules_are_asked_once_a_step(inside: str, fixed_rate: bool, centralize: bool) -> None:
    """MindSpore asks for steps 0, 2, 4, ... where the decay alone is scheduled."""
    decay, rate = Schedule(0.1), Schedule(0.5)
    options = {"learning_rate": 0.5 if fixed_rate else rate, "weight_decay": decay}
    groups = [{"params": parameters(SHAPES), "grad_centralization": centralize}]
    inner = build(inside, groups, **options)
    opt = nn.LARS(inner, **LARS_OPTIONS)
    for step in range(4):
        (inner if step == 2 else opt)(gradients(inner.parameters, step))
    assert decay.asked == [0, 1, 2, 3]
    # A custom optimizer asks by itself.
    assert sorted(set(rate.asked)) == ([] if fixed_rate else [0, 1, 2, 3])
    assert inside == "custom" or len(rate.asked) <= 4
    assert inner.global_step.tolist() == [4]


# Custom optimizers


def test_custom_optimizer() -> None:
    opt, plain = (
        nn.LARS(Descent(0.5, params64(), weight_decay=0.1, loss_scale=4.0), **LARS_OPTIONS),
        Descent(0.5, params64()),
    )
    for step in range(3):
        given = gradients(opt.parameters, step)
        scaled = [4 * g for g in given]
        with unchanged(scaled):
            opt(scaled)
        plain(lars_gradients(plain.parameters, given, ACTS, [0.1] * 4))
    assert_close(opt, plain)
    assert opt.global_step.tolist() == [3]
    assert (opt.opt.loss_scale, opt.opt.get_weight_decay()) == (4.0, 0.1)


def test_custom_optimizer_that_raises_is_restored() -> None:
    class Broken(Descent):
        def construct(self, gradients: tuple[Any, ...]) -> Any:
            assert (self.get_weight_decay(), self.loss_scale) == (0.0, 1.0)
            raise ArithmeticError(f"broken by {len(gradients)}")

    inner = Broken(0.5, parameters(SHAPES), weight_decay=0.1, loss_scale=4.0)
    with refused(ArithmeticError, "broken by 4", inner):
        nn.LARS(inner)(gradients(inner.parameters, 0))
    assert (inner.get_weight_decay(), inner.loss_scale) == (0.1, 4.0)


def test_custom_optimizer_skips_none_and_refuses_rows() -> None:
    class Sparse(Descent):
        def construct(self, gradients: tuple[Any, ...]) -> Any:
            return [None if g is None else type(g) for g in gradients]

    opt = nn.LARS(Sparse(0.5, parameters(SHAPES)))
    given = gradients(opt.parameters, 0)
    # Where LARS does not act, a gradient is passed on as it is.
    row = rows((5,), [1])
    assert opt([None, None, row, given[3]]) == [None, None, nn.RowTensor, np.ndarray]
    with refused(ValueError, "gradient of 'w' is row-sparse", opt.opt):
        opt([rows((4, 3), [1]), *given[1:]])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_centralization_is_the_same_for_custom_optimizers(decay: float) -> None:
    """One formula for both ways in which a step is made."""
    results = []
    for inside in ("SGD", "custom"):
        groups = [{"params": params64(), "grad_centralization": True, "weight_decay": decay}]
        opt = nn.LARS(build(inside, groups, learning_rate=0.5), **LARS_OPTIONS)
        opt(gradients(opt.parameters, 0))
        results.append(opt)
    assert_close(*results)


# Copies


class Clipped(nn.Momentum):
    """A user's own step around that of the package."""

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        return super().construct(ops.clip_by_global_norm(gradients, 1e-3))


def test_a_subclass_keeps_its_own_step() -> None:
    """LARS's gradient, then what the subclass does with it, without decay and loss scale."""
    inside = Clipped(parameters({"w": (6,)}), 1.0, 0.0, weight_decay=0.5, loss_scale=4.0)
    opt, (w,) = nn.LARS(inside, **LARS_OPTIONS), inside.parameters
    for step in range(2):
        before, (g,) = w.data.copy(), gradients(opt.parameters, step)
        opt((g,))
        expected = reference.lars_gradient(before, g / 4.0, decay=0.5, **LARS_OPTIONS)
        expected *= 1e-3 / np.sqrt(np.sum(expected**2))
        np.testing.assert_allclose(before - w.data, expected, atol=2e-7)
    assert inside.loss_scale == 4.0
    assert inside.get_weight_decay() == 0.5
