"""Weights of 16 bits beside float32 masters or remainders, in nn: steps, states, bad input."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from fusestep import nn

from helpers import BF16, assert_same_bits, more, refused
from optimizers import FORMS, ONE_OF_EACH, arguments_of, gradients, make, parameters, rows

F16, F32 = np.float16, np.float32
BESIDE = {"master": "master", "kahan": "remainder"}
EACH_WAY = pytest.mark.parametrize("rounding", BESIDE)
ROUNDED = [form for form in FORMS if "rounding" in arguments_of(form) and FORMS[form][0] != "LARS"]
EACH_FORM = pytest.mark.parametrize(
    "form", [f if f in ("Adam", "SGD", "Lamb") else more(f) for f in ROUNDED if f in ONE_OF_EACH]
)


def assert_same(found: Any, expected: Any) -> None:
    """Equal arrays, one after the other."""
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def whole(opt: Any) -> list[np.ndarray]:
    """The numbers that weights and what lies beside them make."""
    if "master" in opt._states:
        return [a.copy() for a in opt._states["master"]]
    every = zip(opt.parameters, opt._states["remainder"], strict=True)
    return [p.data.astype(F32) + a.astype(F32) for p, a in every]


@EACH_FORM
@EACH_WAY
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_a_step_is_that_of_the_float32_weight(form: str, rounding: str, dtype: Any) -> None:
    """To the last bit, states too; then both are rounded."""
    takes = arguments_of(form)
    sparse = {"sparse_update": "lazy"} if takes.get("sparse_update") else {}
    params = parameters(dtype=dtype, form=form)
    ours = make(form, params, rounding=rounding, state_dtype=F32, **sparse)
    exact = [nn.Parameter(p.data.astype(F32), p.name) for p in params]
    theirs = make(form, exact, state_dtype=F32, **sparse)
    for step in range(4):
        given = gradients(params, step)
        if sparse and step % 2:
            given[0] = rows(params[0].shape, [4, 1, 4], step, dtype)
        wide = [
            nn.RowTensor(g.indices, g.values.astype(F32), g.dense_shape)
            if isinstance(g, nn.RowTensor)
            else g.astype(F32)
            for g in given
        ]
        before = whole(ours)
        for q, x in zip(exact, before, strict=True):
            q.data[...] = x
        ours(given)
        theirs(wide)
        each = zip(params, exact, ours._states[BESIDE[rounding]], before, whole(ours), strict=True)
        for p, q, beside, old, new in each:
            rounded, moves = q.data.astype(dtype), q.data != old
            left = q.data if rounding == "master" else (q.data - rounded.astype(F32)).astype(dtype)
            assert_same([p.data[moves], beside[moves]], [rounded[moves], left[moves]])
            assert_same_bits(new[~moves], old[~moves])
        expected = theirs.state_dict()
        found = {n: a for n, a in ours.state_dict().items() if not n.startswith(BESIDE[rounding])}
        assert found.keys() == expected.keys()
        assert_same(found.values(), expected.values())


@EACH_WAY
@pytest.mark.parametrize("way", ["state_dict", "pickle", "file"])
def test_resumed_runs_have_the_same_bits(way: str, rounding: str, tmp_path: Any) -> None:
    runs = []
    for stops in (False, True):
        params = parameters(dtype=BF16)
        opt = nn.Adam(params, 0.1, rounding=rounding)
        for step in range(4):
            if stops and step == 2:
                if way == "pickle":
                    params, opt = pickle.loads(pickle.dumps((params, opt)))
                elif way == "file":
                    nn.save_checkpoint(opt.state_dict(), tmp_path / "x.safetensors")
                    opt = nn.Adam(params, 0.1, rounding=rounding)
                    opt.load_state_dict(nn.load_checkpoint(tmp_path / "x.safetensors"))
                else:
                    saved = opt.state_dict()
                    opt = nn.Adam(params, 0.1, rounding=rounding)
                    opt.load_state_dict(saved)
            with warnings.catch_warnings(action="error"):
                opt(gradients(params, step))
        runs.append([p.data for p in params] + [*opt.state_dict().values()])
    assert_same(*runs)


@EACH_WAY
def test_a_state_without_them_begins_at_the_weight(rounding: str) -> None:
    params = parameters(dtype=BF16)
    before = nn.Adam(params, 0.1, state_dtype=F32)
    before(gradients(params, 0))
    opt = nn.Adam(params, 0.1, rounding=rounding, state_dtype=F32)
    with pytest.warns(UserWarning, match=f"Adam: {BESIDE[rounding]}.table begins") as told:
        opt.load_state_dict(before.state_dict())
    assert len(told) == 1
    assert_same(whole(opt), [p.data.astype(F32) for p in params])
    with pytest.raises(KeyError, match=r"moment1\.table"):
        opt.load_state_dict({n: a for n, a in before.state_dict().items() if n != "moment1.table"})


@pytest.mark.parametrize("way", ["state", "rebound"])
def test_a_weight_that_was_changed_wins(way: str) -> None:
    params = parameters(dtype=F16)
    opt = nn.SGD(params, 0.1, rounding="master")
    opt(gradients(params, 0))
    masters = whole(opt)
    if way == "state":
        params[0].data[1:3] = 7.0
        opt.load_state_dict(opt.state_dict())
    else:
        changed = params[0].data.copy()
        changed[1:3] = 7.0
        params[0].data = changed
    masters[0][1:3] = 7.0
    none = [np.zeros_like(p.data) for p in params]
    with pytest.warns(UserWarning, match=r"SGD: master\.table begins at the weight") as told:
        opt(none)
    assert len(told) == 1
    assert_same(whole(opt), masters)


@EACH_WAY
def test_clipping_lars_and_copies(rounding: str) -> None:
    """A gradient is clipped by its norm first; LARS measures the whole weight."""
    params, exact = parameters(dtype=BF16), parameters(dtype=BF16)
    exact = [nn.Parameter(p.data.astype(F32), p.name) for p in exact]
    for clip in ({"clipnorm": 0.5}, {"clipvalue": 0.1}):
        ours = nn.Momentum(params, 0.1, 0.9, rounding=rounding, state_dtype=F32, **clip)
        theirs = nn.Momentum(exact, 0.1, 0.9, **clip)
        for q, x in zip(exact, whole(ours), strict=True):
            q.data[...] = x
        given = gradients(params, 1)
        ours(given)
        theirs([g.astype(F32) for g in given])
        assert_same([p.data for p in params], [q.data.astype(BF16) for q in exact])
    ours = nn.LARS(nn.Momentum(params, 0.1, 0.9, rounding=rounding, state_dtype=F32))
    theirs = nn.LARS(nn.Momentum(exact, 0.1, 0.9))
    for q, x in zip(exact, whole(ours.opt), strict=True):
        q.data[...] = x
    ours(given)
    theirs([g.astype(F32) for g in given])
    assert_same([p.data for p in params], [q.data.astype(BF16) for q in exact])


def test_what_is_refused() -> None:
    params = parameters()
    with refused(ValueError, r"Adam: parameter 'table' does not fit rounding='kahan'", params[0]):
        nn.Adam(params, rounding="kahan")
    with pytest.raises(ValueError, match="Lamb: rounding is unknown: expected"):
        nn.Lamb(params, 0.1, rounding="master ")
    with pytest.raises(TypeError, match="rounding"):  # its rule is one on matrices
        nn.AdaFactor(parameters(dtype=F16), rounding="master")
    opt = nn.Adam(parameters(dtype=F16), rounding="master")
    with pytest.raises(AttributeError, match="rounding is fixed at construction"):
        opt.rounding = "nearest"
    state = opt.state_dict()
    state["master.table"] = state["master.table"].astype(F16)
    with pytest.raises(TypeError, match=r"master\.table"):
        opt.load_state_dict(state)
