"""Prodigy against its float64 reference, over all of its options."""

import math
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import assert_same_arrays, refused
from reference_prodigy import OPTIONS, Group, Prodigy, reference_with

SHAPES = [(7, 5), (11,), (), (3, 0), (2, 3, 4)]


def both(options: dict[str, Any], dtype: Any = np.float64) -> tuple[Any, Any, list[np.ndarray]]:
    """The reference and the optimizer on equal parameters, and where their gradients lead."""
    rng = np.random.default_rng(0)
    start, end = ([np.array(rng.standard_normal(s)) for s in SHAPES] for _ in range(2))
    exact = reference_with([start], options)
    given = {"learning_rate" if name == "lr" else name: x for name, x in options.items()}
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    return exact, nn.Prodigy([w.astype(dtype) for w in start], **given), end


def gradients(params: Any, end: list[np.ndarray], k: int) -> list[Any]:
    """Towards ``end``, with a missing one now and then."""
    of_each = [np.array((1.0 + 0.3 * math.sin(k + i)) * (w - e)) for i, (w, e) in
               enumerate(zip(params, end, strict=True))]  # fmt: skip
    if k % 7 == 3:
        of_each[1] = None
    return of_each


@pytest.mark.parametrize("label", OPTIONS)
def test_a_hundred_steps(label: str) -> None:
    exact, opt, end = both(OPTIONS[label])
    for k in range(100):
        given = gradients(exact.groups[0].params, end, k)
        mine = [None if g is None else g.copy() for g in given]
        assert exact.step([given])
        opt(mine)
        assert math.isclose(opt.d, exact.d, rel_tol=1e-10)
    for i, (p, state) in enumerate(zip(opt.parameters, exact.states[0], strict=True)):
        found = {n: opt._states[n][i] for n in opt._states}
        np.testing.assert_allclose(p.data, exact.groups[0].params[i], rtol=1e-9, atol=1e-9)
        wanted = {"exp_avg": state.m, "exp_avg_sq": state.v, "s": state.s, "p0": state.p0}
        for name, array in found.items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert opt.d != opt.d0 or label == "default"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_types_find_the_same_distance(dtype: Any) -> None:
    exact, opt, end = both({"d0": 1e-2, "eps": 1e-3}, dtype)
    for k in range(60):
        exact.step([gradients(exact.groups[0].params, end, k)])
        given = gradients([p.data.astype(float) for p in opt.parameters], end, k)
        opt([None if g is None else np.asarray(g, np.float32) for g in given])
    assert math.isclose(opt.d, exact.d, rel_tol=1e-4 if dtype is np.float32 else 0.1)


def test_a_group_of_rate_0_goes_on_along_its_states() -> None:
    exact, _, end = both({})
    first, second = (
        Group(exact.groups[0].params[:2]), Group(exact.groups[0].params[2:], lr=1.0))  # fmt: skip
    exact = Prodigy([first, second], d0=1e-2)
    params = [[w.copy() for w in g.params] for g in (first, second)]
    opt = nn.Prodigy([{"params": own} for own in params], d0=1e-2)
    for k in range(20):
        given = gradients([*first.params, *second.params], end, k)
        mine = [None if g is None else g.copy() for g in given]
        exact.step([given[:2], given[2:]])
        opt(mine)
    resting = nn.Prodigy([{"params": params[0]}, {"params": params[1], "lr": 0.0}], d0=1e-2)
    resting.load_state_dict({**opt.state_dict(), **{
        n: x for n, x in resting.state_dict().items() if n.startswith("learning_rate")
    }})  # fmt: skip
    second.lr = 0.0
    states = [resting._states["exp_avg"][i].copy() for i in range(2, 5)]
    for k in range(20, 25):
        given = gradients([*first.params, *second.params], end, k)
        mine = [None if g is None else g.copy() for g in given]
        exact.step([given[:2], given[2:]])
        resting(mine)
    for i, w in enumerate([*first.params, *second.params]):
        np.testing.assert_allclose(resting.parameters[i].data, w, rtol=1e-9, atol=1e-9)
    assert_same_arrays(states, resting._states["exp_avg"][2:])


def test_a_step_without_a_denominator_is_none() -> None:
    opt = nn.Prodigy([np.ones(3)])
    before = opt.state_dict()
    for given in (np.zeros(3), None):
        assert opt((given,)) == (True,)
    assert_same_arrays(opt.state_dict(), before)
    opt((np.ones(3),))
    assert opt.state_dict()["global_step"] == 1


def test_the_way_begins_where_the_first_gradient_comes() -> None:
    """Weights that are loaded after the optimizer was made are where the way begins."""
    w = np.ones(3)
    opt = nn.Prodigy([w])
    w[:] = 5.0
    opt((np.ones(3),))
    assert opt._states["p0"][0].tolist() == [5, 5, 5]
    opt((np.ones(3),))
    assert opt._states["p0"][0].tolist() == [5, 5, 5]


def test_what_it_refuses() -> None:
    w = np.ones((3, 2))
    opt = nn.Prodigy([w])
    with refused(ValueError, "is row-sparse: expected a dense one", opt):
        opt((nn.RowTensor(np.array([1]), np.ones((1, 2)), (3, 2)),))
    apart = nn.Prodigy([{"params": [np.ones(2)], "lr": 0.5}, {"params": [np.ones(2)]}])
    with refused(ValueError, "learning_rate differs between groups: expected 1.0 or 0.0, got 0.5",
                 apart):  # fmt: skip
        apart((np.ones(2), np.ones(2)))
    for options in ({"slice_p": 11}, {"fsdp_in_use": True}):
        with pytest.raises(ValueError, match="is not supported"):
            nn.Prodigy([w], **options)
    with pytest.raises(ValueError, match="cannot be divided among processes"):
        opt.keep_states([True])
