"""Rules that know rows: each is measured by itself, in every loop, with the same bits."""

# ruff: noqa: ARG001  # the arguments of rules are fixed
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fusestep import nn
from fusestep.kernels.rule import Rule
from fusestep.kernels.state import State
from helpers import assert_same_arrays, assert_same_bits

F16, F32, F64, BF16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16


def mean_and_size(w: Any, g: Any, m: Any, hp: Any) -> Any:
    return g, g


def of_row(total: Any, squares: Any, size: Any, seen: Any, largest: Any, floor: Any) -> Any:
    """A factor from a signed sum, a sum of squares, a count of updates and a running maximum."""
    seen = seen + 1
    rms = math.sqrt(squares / size)
    largest = max(largest, rms)
    return (1.0 + total / size) / (largest + floor * seen), seen, largest


def centred(w: Any, g: Any, m: Any, hp: Any) -> Any:
    m = m + hp.fresh * (g - m)
    return w - hp.lr * m, m


COUNTED = Rule(
    centred, (State("m"), State("seen", "row", dtype=np.int32), State("largest", "row")),
    ("lr", "fresh", "floor"), mean_and_size, 2, of_row, "lr", signed=(0,), scope="row",
    takes=("size", "seen", "largest", "floor"))  # fmt: skip


def scalars(real: Any, lr: Any, decay: Any, step: Any, constants: Any, powers: Any) -> Any:
    return real(lr), real(0.5), real(0.25)


class Counted(nn.FusedOptimizer):
    """A rule of a user with two states for each row, one of them a count."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(0.1, params, rule=COUNTED, **options)

    def formula(self) -> nn.Formula:
        return nn.Formula(scalars)


def expected(w: Any, g: Any, m: Any, seen: Any, largest: Any) -> tuple[Any, ...]:
    """One step in float64, of rows that occur."""
    m = m + 0.5 * (g - m)
    seen = seen + 1
    largest = np.maximum(largest, np.sqrt((g * g).mean(1)))
    factor = (1.0 + g.mean(1)) / (largest + 0.25 * seen)
    return w - 0.1 * factor[:, None] * m, m, seen, largest


def states_of(opt: Any) -> list[np.ndarray]:
    return [opt.parameters[0].data, *opt._states_of_each()[0]]


@pytest.mark.parametrize("how", ["dense", "lazy", "dense_equivalent"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(F64, 1e-12), (F32, 2e-6), (F16, 4e-3), (BF16, 3e-2)]
)
@pytest.mark.parametrize("width", [1, 3, 64, 257])
def test_a_rule_of_a_user(how: str, dtype: Any, tolerance: float, width: int) -> None:
    """Signed sums, counts and maxima of rows; some rows occur often, one more than HOT times."""
    rng, n = np.random.default_rng(width), 50
    start = rng.standard_normal((n, width))
    opt = Counted([start.astype(dtype)], sparse_update=None if how == "dense" else how)
    w, m = opt.parameters[0].data.astype(F64), np.zeros((n, width))
    seen, largest = np.zeros(n, int), np.zeros(n)
    for _ in range(3):
        ids = np.where(np.arange(900) % 3 > 0, 7, rng.integers(0, n // 2, 900))
        values = (rng.integers(-8, 9, (900, width)) / 1_024).astype(dtype)  # exact sums
        total = np.zeros((n, width))
        np.add.at(total, ids, values.astype(F64))
        given = nn.RowTensor(ids, values, (n, width))
        opt((total.astype(F32 if dtype in (F16, BF16) else dtype) if how == "dense" else given,))
        rows = np.unique(ids) if how == "lazy" else np.arange(n)
        w[rows], m[rows], seen[rows], largest[rows] = expected(
            w[rows], total[rows], m[rows], seen[rows], largest[rows]
        )
    found = states_of(opt)
    assert found[2].dtype == np.int32
    np.testing.assert_array_equal(found[2], seen)
    assert found[3].dtype == (F64 if dtype is F64 else F32)
    for array, exact in ((found[0], w), (found[1], m), (found[3], largest)):
        np.testing.assert_allclose(array.astype(F64), exact, rtol=tolerance, atol=tolerance)


def test_what_is_not_finite_stays_in_its_row() -> None:
    for form in (nn.RowWiseAdagrad, nn.RowWiseAdam):
        for bad in (np.nan, np.inf):
            g, clean = (np.random.default_rng(1).standard_normal((9, 33)).astype(F32),) * 2
            g = g.copy()
            g[4, 5] = bad
            found, without = (form([np.ones((9, 33), F32)]) for _ in range(2))
            found((g,))
            without((clean,))
            others = np.arange(9) != 4
            for a, b in zip(states_of(found), states_of(without), strict=True):
                assert_same_bits(a[others], b[others])
            assert np.isnan(found.parameters[0].data[4, 5])


def test_a_row_without_gradients_stays() -> None:
    """With an accumulator of 0 too: nothing is divided by zero."""
    table = np.ones((3, 4), F32)
    g = np.zeros((3, 4), F32)
    g[1] = 1
    for _ in range(2):
        nn.RowWiseAdagrad([table])((g,))
    assert (table[[0, 2]] == 1).all() and (table[1] < 1).all()


# A number for each tensor


def norm(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    return (g,)


def of_tensor(squares: Any, v: Any, beta: Any) -> Any:
    v = beta * v + (1.0 - beta) * squares
    return 1.0 / (math.sqrt(v) + 1e-8), v


def along_moment(w: Any, g: Any, m: Any, v: Any, hp: Any) -> Any:
    m = hp.beta * m + hp.size * g
    return w - hp.lr * m, m


NORMALISED = Rule(
    along_moment, (State("m"), State("v", "tensor", initial=0.5)), ("lr", "beta", "size"), norm, 1,
    of_tensor, "size", takes=("v", "beta"))  # fmt: skip


class Normalised(nn.FusedOptimizer):
    """Momentum of gradients that are divided by a running norm of the whole tensor."""

    def formula(self) -> nn.Formula:
        return nn.Formula(lambda real, lr, *_: (real(lr), real(0.75), real(1.0)))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_state_of_a_tensor(dtype: Any) -> None:
    shapes, rng = [(70_000,), (3, 4), ()], np.random.default_rng(2)
    params = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    opt = Normalised(0.1, params, rule=NORMALISED)
    wanted = [[p.astype(F64), np.zeros(p.shape), 0.5] for p in params]
    for _ in range(3):
        given = [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]
        opt(given)
        for own, g in zip(wanted, given, strict=True):
            own[2] = 0.75 * own[2] + 0.25 * (g.astype(F64) ** 2).sum()
            own[1] = 0.75 * own[1] + g / (np.sqrt(own[2]) + 1e-8)
            own[0] = own[0] - 0.1 * own[1]
    for (m, v), (w, exact_m, exact_v), p in zip(opt._states_of_each(), wanted, params, strict=True):
        assert v.shape == (1,) and v.dtype == dtype
        rtol = 1e-12 if dtype is F64 else 5e-6
        np.testing.assert_allclose(v[0], exact_v, rtol=rtol)
        np.testing.assert_allclose(m, exact_m, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(p, w, rtol=rtol, atol=rtol)
    again = Normalised(0.1, [p.copy() for p in params], rule=NORMALISED)
    again.load_state_dict(opt.state_dict())
    g = [np.ones(shape, dtype) for shape in shapes]
    opt(g)
    again(g)
    assert_same_arrays(opt.parameters, again.parameters)


# What contradicts itself

WRONG = [
    ({"scope": "column"}, ValueError, "scope of the rule is unknown"),
    ({"scope": "tensor"}, ValueError, "state 'seen' of the rule is one per row"),
    ({"factor": None}, TypeError, "the rule lacks a part"),
    ({"factor_of": ()}, TypeError, "the rule lacks a part"),
    ({"factor_of": "rate"}, ValueError, "factor_of of the rule is unknown"),
    ({"takes": ("size", "seen", "largest", "m")}, ValueError, "takes of the rule is unknown"),
    ({"takes": ("size", "seen", "largest")}, TypeError, "factor 'of_row' takes other arguments"),
    ({"signed": (2,)}, ValueError, "signed of the rule is out of range"),
    ({"n_measured": 1}, TypeError, "takes other arguments"),
    (
        {"states": (State("m"), State("seen", "row", is_read=True), State("largest", "row"))},
        ValueError, "factor 'of_row' returns another number of values"),
    ({"states": (State("m"), State("seen", "block"), State("largest", "row"))}, ValueError,
     "state 'seen' of the rule is of something unknown"),
    ({"states": (State("m", dtype=np.int32), State("seen", "row"), State("largest", "row"))},
     ValueError, "state 'm' of the rule has a wrong dtype"),
    ({"states": (State("m"), State("seen", "row", "parameter"), State("largest", "row"))},
     ValueError, "state 'seen' of the rule begins as a copy of the parameter"),
    ({"states": (State("m"), State("m", "row"), State("largest", "row"))}, ValueError,
     "states of the rule has a name twice"),
    ({"states": (State("m"), State("seen", "column"), State("largest", "row"))}, ValueError,
     "state 'seen' of the rule is one per column"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "text"), WRONG)
def test_declarations_that_contradict_themselves(changed: Any, error: Any, text: str) -> None:
    w = np.ones((2, 3), F32)
    with pytest.raises(error, match=text):
        nn.FusedOptimizer.__init__(
            Counted.__new__(Counted), 0.1, [w], rule=replace(COUNTED, **changed)
        )
    assert (w == 1).all()


@pytest.mark.parametrize("form", [nn.RowWiseAdagrad, nn.RowWiseAdam, Counted])
@pytest.mark.parametrize("shape", [(), (3, 0), (0,), (2, 0, 3)])
def test_parameters_without_rows(form: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no rows: expected at least 1 axis"):
        form([np.ones((2, 2), F32), np.ones(shape, F32)])


def test_a_vector_is_one_row() -> None:
    v = np.zeros(4, F32)
    opt = nn.RowWiseAdagrad([v], learning_rate=1.0)
    opt((np.array([2, 0, 0, 0], F32),))
    assert v.tolist() == [-2, 0, 0, 0] and opt.accum[0].tolist() == [1]
    with pytest.raises(
        ValueError, match="is row-sparse: expected a dense one: a vector is one row"
    ):
        opt((nn.RowTensor(np.array([1]), np.ones(1, F32), (4,)),))
    assert v.tolist() == [-2, 0, 0, 0]
