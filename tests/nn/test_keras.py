"""Options from Keras: Ftrl's ``beta`` and ``l2_shrinkage``, ``clipvalue`` and ``clipnorm``."""

import inspect
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import BF16, assert_same_bits, refused, sampled

from optimizers import (  # isort: skip
    BY_NAME, ONE_OF_EACH, arguments_of, assert_same_run, gradients, make, parameters)  # fmt: skip
from reference_elementwise import ftrl

F32, F64 = np.float32, np.float64
ARRAYS = ("variable", "gradient", "accum", "linear")
SHAPE = (6, 4)


def rows_of(rng: np.random.Generator, dtype: Any = F32, size: float = 1.0) -> nn.RowTensor:
    """A row-sparse gradient with rows that occur up to three times, and rows that do not."""
    values = size * rng.standard_normal((6, *SHAPE[1:]))
    return nn.RowTensor(np.array([4, 1, 4, 3, 4, 1]), values.astype(dtype), SHAPE)


def summed(gradient: nn.RowTensor) -> nn.RowTensor:
    """The same with each row once, summed in the order of its occurrences."""
    indices = np.unique(gradient.indices)
    values = np.zeros((len(indices), *SHAPE[1:]), gradient.values.dtype)
    np.add.at(values, np.searchsorted(indices, gradient.indices), gradient.values)
    return nn.RowTensor(indices, values, SHAPE)


# Ftrl


def update_step(
    variable: np.ndarray, gradient: np.ndarray, accum: np.ndarray, linear: np.ndarray, *,
    learning_rate: float, learning_rate_power: float, l1_regularization_strength: float,
    l2_regularization_strength: float, l2_shrinkage_regularization_strength: float, beta: float,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """``keras.optimizers.Ftrl.update_step`` of Keras 3 in float64, with Keras's names."""
    l2_reg = l2_regularization_strength + beta / (2.0 * learning_rate)
    grad_to_use = gradient + 2 * l2_shrinkage_regularization_strength * variable
    new_accum = accum + gradient**2
    power, old_power = new_accum**-learning_rate_power, accum**-learning_rate_power
    linear = linear + (grad_to_use - (power - old_power) / learning_rate * variable)
    quadratic = power / learning_rate + 2 * l2_reg
    l1 = l1_regularization_strength
    return (np.clip(linear, -l1, l1) - linear) / quadratic, new_accum, linear


@pytest.mark.parametrize(
    "options",
    [(0.2, -0.5, 0.02, 0.1, 0.05, 1.0), (0.2, -0.7, 0.02, 0.1, 0.05, 0.5),
     (0.2, -0.5, 0.0, 0.0, 0.0, 1.0), (0.2, -0.5, 0.0, 0.0, 0.3, 0.0),
     (0.2, 0.0, 0.1, 0.0, 0.3, 0.2), (0.2, -0.5, 0.02, 0.1, 0.0, 0.0)])  # fmt: skip
def test_ftrl_is_that_of_keras(options: tuple[float, ...]) -> None:
    """The reference of every other test of FTRL, by Keras's names for its options."""
    theirs = [name for name in inspect.signature(update_step).parameters if name not in ARRAYS]
    ours = ("lr", "lr_power", "l1", "l2", "l2_shrinkage", "beta")
    rng = np.random.default_rng(1)
    w = rng.standard_normal(SHAPE)
    found = expected = (w, np.full(SHAPE, 0.1), np.zeros(SHAPE))
    for _ in range(6):
        g = rng.standard_normal(SHAPE)
        found = ftrl(found[0], g, *found[1:], **dict(zip(ours, options, strict=True)))
        expected = update_step(
            expected[0], g, *expected[1:], **dict(zip(theirs, options, strict=True))
        )
        np.testing.assert_allclose(found, expected, 1e-12, 1e-14)


@pytest.mark.parametrize(("name", "value", "text"), [
    ("beta", 1e38, "beta is out of range: expected at least 0, with beta / lr in float32"),
    ("l2_shrinkage", 3e38, "l2_shrinkage is out of range: expected at least 0, its double"),
])  # fmt: skip
def test_ftrl_options_whose_scalars_are_infinite(name: str, value: float, text: str) -> None:
    w = np.ones(3, F32)
    with refused(ValueError, f"FTRL: {text}", w):
        nn.FTRL([w], learning_rate=0.1, **{name: value})
    opt = nn.FTRL([w], learning_rate=0.1, beta=1.0, l2_shrinkage=0.1)
    for wrong in (value, -0.5, math.nan, math.inf):
        setattr(opt, name, wrong)
        with refused(ValueError, f"FTRL: {name} is out of range", opt):
            opt([np.ones(3, F32)])
    setattr(opt, name, 0.5)
    opt([np.ones(3, F32)])


# Clipping

LIMITS = {"clipvalue": 0.375, "clipnorm": 1.5}
CLIPS = ("clipvalue", "clipnorm")
SCALE = 4.0


def clipped(name: str, values: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """A gradient by ``_clip_gradients`` of Keras, after the loss scale; in its own type."""
    real, limit = values.dtype.type, LIMITS[name]
    if name == "clipvalue":
        return np.clip(values * real(1.0 / scale), -real(limit), real(limit))
    norm = math.sqrt(math.fsum((values.astype(F64) ** 2).ravel())) / scale
    return values * real(limit / max(norm, limit) / scale)


def by_hand(name: str, gradient: Any, scale: float = 1.0) -> Any:
    """A gradient in the type of the arithmetic, clipped."""
    if isinstance(gradient, nn.RowTensor):
        rows = summed(nn.RowTensor(gradient.indices, in_arithmetic(gradient.values), SHAPE))
        return nn.RowTensor(rows.indices, clipped(name, rows.values, scale), SHAPE)
    return clipped(name, in_arithmetic(gradient), scale)


def in_arithmetic(values: np.ndarray) -> np.ndarray:
    return values if values.dtype == F64 else values.astype(F32)


FORMS = [form for form in ONE_OF_EACH if not form.startswith("LARS")]


CLIPPED = [(form, CLIPS[k % 2], F32, "lazy") for k, form in enumerate(FORMS)]
CLIPPED += [("Adam", *one, "lazy") for one in product(CLIPS, (F64, np.float16, BF16))]
CLIPPED += [*product(["Adam", "FTRL", "RowWiseAdagrad"], CLIPS, [F32], ["dense_equivalent"])]


@pytest.mark.parametrize(
    ("form", "name", "dtype", "how"), sampled(product(FORMS, CLIPS, [F32], ["lazy"]), CLIPPED),
    ids=str)  # fmt: skip
def test_every_optimizer_clips(form: str, name: str, dtype: Any, how: str) -> None:
    """Steps are those with gradients that were divided by the loss scale and clipped before.

    Weight decay, coupled or not, is that of the optimizer without clipping. Some gradients are
    within the limits. The loss scale is a power of two, by which nothing is rounded. Gradients are
    clipped as numbers of the arithmetic, not of what they are stored in. That of a row which does
    not occur is 0, clipped or not, and the row decays or stays.
    """
    real = F64 if dtype is F64 else F32
    scaled = {"loss_scale": SCALE} if "loss_scale" in arguments_of(form) else {}
    scale = scaled.get("loss_scale", 1.0)
    takes_rows = BY_NAME[form.partition("-")[0]].takes_rows
    rows = {"sparse_update": how} if takes_rows else {}
    one, other = (
        make(form, parameters(dtype=dtype), weight_decay=0.1, **rows, **more)
        for more in ({**scaled, name: LIMITS[name]}, {})
    )
    rng = np.random.default_rng(2)
    for step in range(4):
        given = [(g * real(scale * 0.3**step)) for g in gradients(one.parameters, step, real)]
        given = [g.astype(dtype) for g in given]
        if step == 2:
            given[1] = None
        if takes_rows and step % 2:
            given[0] = rows_of(rng, dtype, scale * 0.2**step)
        one(given)
        other([g if g is None else by_hand(name, g, scale) for g in given])
        if real is F32:
            assert_same_run(one, other)
            continue
        for p, q in zip(one.parameters, other.parameters, strict=True):  # a sum was rounded
            np.testing.assert_allclose(p.data, q.data, 1e-11)


def test_a_norm_is_that_of_a_tensor() -> None:
    """Not of all of them; groups with rates of their own share the limit, rows and dense ones."""
    params = [nn.Parameter(np.ones(SHAPE, F32), n) for n in "abc"]
    groups = [{"params": params[:2], "lr": 1.0}, {"params": params[2:], "lr": 0.5}]
    opt = nn.SGD(groups, clipnorm=1.0)
    given = [np.full(SHAPE, 5.0, F32), rows_of(np.random.default_rng(6)), np.full(SHAPE, 0.1, F32)]
    opt(given)
    moved = [float(np.linalg.norm(1.0 - p.data.astype(F64))) for p in params]
    np.testing.assert_allclose(moved, [1.0, 1.0, 0.5 * 0.1 * math.sqrt(24)], rtol=1e-6)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_centralized_gradients_are_clipped(kind: str, name: str) -> None:
    """Centralized first, without the decay, which comes last."""
    w = np.random.default_rng(7).standard_normal(SHAPE)
    p = nn.Parameter(w.copy(), "w")
    groups = [{"params": [p], "grad_centralization": True, "weight_decay": 0.3}]
    opt = nn.SGD(groups, 0.5, loss_scale=SCALE, sparse_update="lazy", **{name: LIMITS[name]})
    rng = np.random.default_rng(8)
    given: Any = rows_of(rng, F64, 9.0) if kind == "rows" else 9.0 * rng.standard_normal(SHAPE)
    opt([given])
    at = np.unique(given.indices) if kind == "rows" else np.arange(SHAPE[0])
    g = summed(given).values if kind == "rows" else given
    g = clipped(name, g - g.mean(axis=1, keepdims=True), SCALE)
    expected = w.copy()
    expected[at] -= 0.5 * (g + 0.3 * w[at])
    np.testing.assert_allclose(p.data, expected, rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_norm_that_is_not_finite(bad: float) -> None:
    """The whole tensor becomes NaN, and no other one; or the step is skipped."""
    for skips in (False, True):
        params = parameters()
        opt = nn.SGD(params, 0.1, clipnorm=1.0, skip_nonfinite=skips)
        given = gradients(params, 0)
        given[0][2, 1] = bad
        before = [p.data.copy() for p in params]
        opt(given)
        assert np.isnan(params[0].data).all() != skips
        assert np.isfinite(params[1].data).all() and opt.skipped_steps == int(skips)
        if skips:
            assert_same_bits(params[0].data, before[0])


def test_elements_that_are_not_finite() -> None:
    """An infinity is clipped like any number; a NaN stays one, and alone."""
    w = np.zeros(4, F32)
    nn.SGD([w], 1.0, clipvalue=0.5)([np.array([np.inf, -np.inf, np.nan, 0.25], F32)])
    np.testing.assert_array_equal(w, np.array([-0.5, 0.5, np.nan, -0.25], F32))


# What is refused


@pytest.mark.parametrize("name", CLIPS)
def test_lars_and_thor_do_not_clip_so(name: str) -> None:
    """The factor of LARS follows from the gradient as it is; THOR has `enable_clip_grad`."""
    inner = nn.Momentum(parameters(), 0.1, 0.9, **{name: 0.5})
    with refused(ValueError, f"LARS: optimizer has {name}: expected one that does not clip", inner):
        nn.LARS(inner)
    with pytest.raises(TypeError, match=f"LARS: argument '{name}' is unknown"):
        nn.LARS(nn.Momentum(parameters(), 0.1, 0.9), **{name: 0.5})
    with pytest.raises(TypeError, match=f"'{name}' is unknown"):
        nn.thor({"w": nn.Parameter(np.ones(2, F32), "w")}, 0.1, 0.01, 0.9, **{name: 0.5})


def test_clipping_in_several_processes() -> None:
    """A norm of a table in parts would be that of a part."""
    from fusestep.nn.distributed import ShardedStates, alone, together

    opt = nn.LazyAdam(parameters(), clipnorm=1.0)
    with refused(ValueError, "optimizer clips by norms: expected one that does not", opt):
        together(opt, alone())
    given = rows_of(np.random.default_rng(0))
    values, places = given.values, np.arange(6)
    part = nn.RowTensor(given.indices, values, SHAPE, positions=places, batch_length=9)
    with refused(ValueError, "gradient of 'table': clipnorm needs the norm of a whole", opt):
        opt([part, None])
    opt([nn.RowTensor(given.indices, values, SHAPE, positions=places, batch_length=6), None])
    assert opt.global_step == 1
    one, other = nn.Adam(parameters(), clipnorm=0.1), nn.Adam(parameters(), clipnorm=0.1)
    sharded = ShardedStates(one, alone())
    together(value := nn.Adam(parameters(), clipvalue=0.1), alone())
    given = gradients(other.parameters, 0)
    for call in (sharded, other, value):
        call(given)
    assert_same_run(one, other)


# nn.torch.FTRL


def test_ftrl_of_torch_has_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    w = np.random.default_rng(10).standard_normal(SHAPE).astype(F32)
    more = {"lr_power": -0.5, "l1": 0.02, "l2": 0.1, "beta": 1.0, "l2_shrinkage": 0.05}
    for power in (-0.5, -0.7):
        options = {**more, "lr_power": power}
        ours = nn.FTRL([w.copy()], learning_rate=0.2, **options)
        parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
        theirs = fused.FTRL([parameter], lr=0.2, **options)
        for step in range(4):
            gradient = np.random.default_rng(step).standard_normal(SHAPE).astype(F32)
            ours([gradient])
            parameter.grad = torch.from_numpy(gradient.copy())
            if step == 2:  # of a file that knows nothing of them
                state = theirs.state_dict()
                for name in ("beta", "l2_shrinkage"):
                    del state["param_groups"][0][name]
                theirs.load_state_dict(state)
            theirs.step()
            assert_same_bits(parameter.detach().numpy(), ours.parameters[0].data)


@pytest.mark.parametrize("name", ["beta", "l2_shrinkage"])
def test_ftrl_of_torch_refuses(name: str) -> None:
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"Invalid {name} value: -0.5"):
        fused.FTRL([parameter], **{name: -0.5})
    optimizer = fused.FTRL([parameter], **{name: 0.5})
    with pytest.raises(ValueError, match=f"Invalid {name} value: nan"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], name: math.nan})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert [group[name] for group in optimizer.param_groups] == [0.5, 0.5]
