"""What every optimizer has from the base class: groups, schedules, centralization, one call."""

from typing import Any

import numpy as np
import pytest
from adam_family import Halving, central
from fusestep import nn

from fusestep.bench.registry.record import (  # isort: skip
    LOST, LOST_LATER, MOVES, ROW_LOST_LATER, ROW_STOPS, STOPS)  # fmt: skip
from fusestep.ops.runtime.row_step import RowUpdate
from fusestep.ops.runtime.step import DenseUpdate
from helpers import STORAGE_DTYPES, assert_same_arrays, refused, sampled

from optimizers import (  # isort: skip
    ALL_FORMS, BY_NAME, FIXED_RATE, FORMS, ONE_OF_EACH, OWN_RATE, arguments_of, decayed_and_scaled,
    gradients, inner, make, parameters, rows)  # fmt: skip

EACH_FORM = pytest.mark.parametrize("form", FORMS)
SHAPES = {"a": (4, 3), "b": (5,), "c": (), "d.weight": (2, 3, 4)}
# Those in which parameters know nothing of each other.
APART = [form for form, (name, _) in FORMS.items() if not BY_NAME[name].together]
SCHEDULED = [form for form in FORMS if form not in FIXED_RATE + OWN_RATE]
FIXED_DECAY = [f for f in FORMS if arguments_of(f)["weight_decay"].takes == "fixed decay"]


def growing(step: int) -> float:
    return 0.1 * (1 + step)


@pytest.mark.parametrize("decay", [Halving(), growing], ids=["schedule", "callable"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in FIXED_DECAY])
def test_dynamic_weight_decay(form: str, decay: Any) -> None:
    """At each step as an optimizer with that number as its decay, from the same state."""
    scale = {n: v for n, v in decayed_and_scaled(form).items() if n == "loss_scale"}
    opt = make(form, parameters(SHAPES, form=form), weight_decay=decay, **scale)
    for step in range(3):
        assert opt.get_weight_decay() == decay(step)
        fixed = make(form, parameters(SHAPES, form=form), weight_decay=decay(step), **scale)
        fixed.load_state_dict(opt.state_dict())
        for p, q in zip(fixed.parameters, opt.parameters, strict=True):
            p.data[...] = q.data
        given = gradients(opt.parameters, step)
        for one in (opt, fixed):
            one(given)
        assert_same_arrays(opt.parameters, fixed.parameters)


@pytest.mark.parametrize("form", [form for form in SCHEDULED if form in APART])
def test_groups_are_separate_optimizers_in_one(form: str) -> None:
    """With rates of their own: MindSpore makes 1e-8 beside a schedule 0, and 1e-6 9.54e-7."""
    together, apart = parameters(SHAPES, form=form), parameters(SHAPES, form=form)
    rates = (Halving(), 1e-6, 1e-8, [0.3, 0.2, 0.1])
    if form.startswith("AdaFactor"):
        # A schedule as the default would turn the scaling off.
        options: dict[str, Any] = {"scale_parameter": False}
    else:
        options = {}
    opt = make(
        form, [{"params": [p], "lr": lr} for p, lr in zip(together, rates, strict=True)], **options
    )
    alone = [
        make(form, [{"params": [p]}], **{**options, "learning_rate": lr})
        for p, lr in zip(apart, rates, strict=True)
    ]
    for step in range(3):
        assert opt.get_lr() == (0.5 * 0.5**step, 1e-6, 1e-8, rates[3][step])
        given = gradients(together, step)
        opt(given)
        for one, g in zip(alone, given, strict=True):
            one([g])
    assert_same_arrays(together, apart)
    assert all(
        (p.data != q.data).any()
        for p, q in zip(together[::3], parameters(SHAPES, form=form)[::3], strict=True)
    )


def in_groups(form: str, params: Any, decays: Any, **options: Any) -> Any:
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(params, decays, strict=True)]
    return make(form, groups, **options)


@pytest.mark.parametrize("form", APART)
def test_none_skips_a_parameter_and_its_count(form: str) -> None:
    """With its own decay, and with a count of its own where gradients are missing."""
    together, apart = parameters(SHAPES, form=form), parameters(SHAPES, form=form)
    options, decays = decayed_and_scaled(form), (0.1, 0.2, 0.3, 0.1)
    opt = in_groups(form, together, decays, **options)
    alone = [in_groups(form, [p], [d], **options) for p, d in zip(apart, decays, strict=True)]
    patterns = [(1, 1, 0, 1), (0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 0)]
    if form in OWN_RATE:
        patterns = [(1, 1, 1, 1)] * 3  # the rate follows the count of calls
    for step, present in enumerate(patterns):
        every = gradients(together, step)
        given = [g if there else None for g, there in zip(every, present, strict=True)]
        assert opt(given) == (True,) * 4
        for one, g in zip(alone, given, strict=True):
            if g is not None:
                one([g])
    assert_same_arrays(together, apart)
    state, counts = opt.state_dict(), np.sum(patterns, 0).tolist()
    assert [state[f"step.{name}"].item() for name in SHAPES] == counts
    assert state["global_step"].tolist() == [len(patterns)]


DECOUPLED = [f for f in FORMS if inner(make(f, parameters()))._rule.decays]


IN_FLOAT64 = [(form, np.float64) for form in ONE_OF_EACH if form != "LARS"]
IN_EITHER = [  # mostly with kernels that other tests need anyway
    (form, np.float64 if form in ("Adam", "SGD-momentum", "AdaFactor") else np.float32)
    for form in FORMS
    if not form.startswith("LARS")
]


@pytest.mark.parametrize(("form", "dtype"), sampled(IN_FLOAT64, IN_EITHER))
def test_centralization(form: str, dtype: Any) -> None:
    """Of the gradient with a coupled decay, without a decoupled one; in its group alone."""
    decoupled = form in DECOUPLED
    rtol = 1e-9 if dtype is np.float64 else 1e-5
    params, plain = parameters(SHAPES, dtype, form), parameters(SHAPES, dtype, form)
    options = decayed_and_scaled(form)
    scale = options.get("loss_scale", 1.0)
    groups = [
        {"params": params[:3], "grad_centralization": True},
        {"params": params[3:], "grad_centralization": False},
    ]
    opt = make(form, groups, **options)
    same = make(form, [{"params": plain}], **({"weight_decay": 0.1} if decoupled else {}))
    for step in range(3):
        given = gradients(params, step)
        opt([g * scale for g in given])
        decayed = [g if decoupled else g + 0.1 * p.data for g, p in zip(given, plain, strict=True)]
        same([*map(central, decayed[:3]), decayed[3]])
    for p, q in zip(params, plain, strict=True):
        np.testing.assert_allclose(p.data, q.data, rtol=rtol, err_msg=p.name)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("LARS")])
def test_centralization_acts_alike_with_locking_and_checks(form: str) -> None:
    results = []
    for options in ({}, {"use_locking": True}, {"skip_nonfinite": True}):
        params = parameters(SHAPES, form=form)
        opt = make(form, [{"params": params, "grad_centralization": True}], **options)
        for step in range(2):
            opt(gradients(params, step))
        results.append(params)
    for found in results[1:]:
        assert_same_arrays(results[0], found)


SCALED = [form for form in FORMS if "loss_scale" in decayed_and_scaled(form)]


@pytest.mark.parametrize("form", SCALED)
def test_an_assigned_loss_scale_acts_from_the_next_step(form: str) -> None:
    """As if it had been given at construction; with powers of 2 to the last bit."""
    changed = make(form, parameters(SHAPES, form=form), loss_scale=4.0)
    plain = make(form, parameters(SHAPES, form=form))
    for step, scale in enumerate((4.0, 1.0, 16.0)):
        changed.loss_scale = scale
        assert changed.loss_scale == scale
        given = gradients(plain.parameters, step)
        plain(given)
        changed(tuple(np.float32(scale) * g for g in given))
    assert_same_arrays(changed.parameters, plain.parameters)
    for wrong, error in (
        (0.0, ValueError), (-1.0, ValueError), (1e39, ValueError), ("4", TypeError),
    ):  # fmt: skip
        with refused(error, "loss_scale", changed):
            changed.loss_scale = wrong
        assert changed.loss_scale == 16.0


# Large gradients


@pytest.mark.parametrize("size", [1.84e19, 1.85e19, 1e38])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "LARS-AdaFactor"])
def test_gradient_whose_square_is_infinite(form: str, size: float) -> None:
    """As the documents say: one element has a large gradient once, and gradients go on."""
    w = nn.Parameter(np.ones((4, 4), np.float32), "w")
    opt, one = make(form, [w]), np.ones((4, 4), np.float32)
    first = one.copy()
    first[1, 1] = size
    opt([first])
    after, at_first = w.data.copy(), w.data[1, 1]
    opt([one])
    lost, large = np.isnan(w.data), ALL_FORMS[form].large
    if large is MOVES:
        assert at_first != 1
        assert np.isfinite(w.data).all()
    elif size < 1.845e19:
        assert np.isfinite(w.data).all()
    elif large is STOPS:
        assert at_first == w.data[1, 1] == 1
        assert np.isfinite(w.data).all()
    elif large is ROW_STOPS:
        assert np.isfinite(w.data).all()
        assert at_first != 1
        assert (w.data[1] == after[1]).all()
    elif large is ROW_LOST_LATER:
        assert np.isfinite(after).all()
        is_lost = size > 1e20  # of a mean the square of 1.85e19 is a quarter
        assert lost[1].all() == is_lost and lost.sum() == 4 * is_lost
    elif large is LOST:
        assert np.isnan(at_first)
        assert lost.sum() == 1
    elif form.startswith("AdaFactor"):
        assert np.isnan(after).all()
    else:
        assert large is LOST_LATER
        assert at_first == 1
        assert np.isfinite(after).all()
        assert lost[1, 1]
        assert lost.all() if form == "Lamb-clipped" else lost.sum() == 1


@pytest.mark.parametrize("beta1", [0.9, None])
def test_large_gradient_of_a_vector_in_adafactor(beta1: float | None) -> None:
    w = nn.Parameter(np.ones(5, np.float32), "w")
    opt, one = nn.AdaFactor([w], beta1=beta1), np.ones(5, np.float32)
    opt([np.where(np.arange(5) == 1, np.float32(1e38), one)])
    opt([one])
    assert w.data[1] == 1
    assert (w.data[[0, 2, 3, 4]] != 1).all()


def test_large_gradient_in_mxnet() -> None:
    """Its squares are taken a thousandth."""
    for size, after in ((5.8e20, 0.9), (5.9e20, 1.0)):
        w = np.ones(1, np.float32)
        updater = nn.mxnet.get_updater(nn.mxnet.Adam(0.1))
        updater([0], [np.array([size], np.float32)], [w])
        np.testing.assert_allclose(w, after, rtol=1e-5)
        updater([0], [np.ones(1, np.float32)], [w])
        assert np.isfinite(w).all()


# One kernel call for all that is alike


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel calls of every step, by kind."""
    made: list[str] = []
    for kind in (DenseUpdate, RowUpdate):

        def count(update: Any, _original: Any = kind.prepared, **options: Any) -> Any:
            made.append(type(update).__name__)
            return _original(update, **options)

        monkeypatch.setattr(kind, "prepared", count)
    return made


@pytest.mark.parametrize("form", [form for form in SCHEDULED if form in APART])
def test_one_call_for_all_dense_tensors(form: str, calls: list[str]) -> None:
    """Whatever the groups, decays and counts of updates are."""
    params = parameters(SHAPES, form=form)
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:3], "weight_decay": 0.3},
              {"params": params[3:], "grad_centralization": True}]  # fmt: skip
    opt = make(form, groups)
    for step in range(3):
        given = gradients(params, step)
        opt([None, *given[1:]] if step == 1 else given)
    assert calls == ["DenseUpdate"] * 3


def test_one_call_for_each_kind_of_gradient_and_dtype(calls: list[str]) -> None:
    shape = (4, 3)
    dtypes = [dtype for dtype in STORAGE_DTYPES for _ in range(3)]
    opt = nn.LazyAdam([np.ones(shape, dtype) for dtype in dtypes], weight_decay=0.1)
    dense = [np.ones(shape, dtype) for dtype in dtypes]
    sparse = [rows(shape, [1, 2, 1], dtype=dtype) for dtype in dtypes]
    both = [x if k % 2 else y for k, (x, y) in enumerate(zip(dense, sparse, strict=True))]
    halves = [g.astype(np.float16 if k % 2 else np.float32) for k, g in enumerate(dense)]
    for given, n_dense, n_rows in (
        (dense, 4, 0), (sparse, 0, 4), (both, 4, 4), (halves, 8, 0), ([None] * 12, 0, 0)
    ):  # fmt: skip
        calls.clear()
        opt(given)
        assert sorted(calls) == ["DenseUpdate"] * n_dense + ["RowUpdate"] * n_rows
