"""Optimizers that look at whole tensors: Lamb, AdaFactor, LARS."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import BF16, STORAGE_DTYPES, assert_same_arrays, assert_same_bits, at_once, more, typed
from optimizers import BY_NAME, FORMS, ONE_OF_EACH, gradients, make, parameters, states

WHOLE = [form for form, (name, _) in FORMS.items() if not BY_NAME[name].takes_rows]
SHAPES = {"a": (6, 4), "b": (5,), "c": (), "d": (2, 3, 4), "e": (1,)}


# The formulas, in float64


def test_adafactor_begins_anew_with_another_beta1() -> None:
    opt, fresh = make("AdaFactor", parameters(SHAPES)), make("AdaFactor-plain", parameters(SHAPES))
    opt(gradients(opt.parameters, 0))
    opt.init_ada_factor_state(None)
    for p, q in zip(opt.parameters, fresh.parameters, strict=True):
        p.data = q.data.copy()
    for step in range(2):
        for one in (opt, fresh):
            one(gradients(one.parameters, step))
    assert_same_arrays(opt.parameters, fresh.parameters)
    assert list(opt.state_dict()) == list(fresh.state_dict())


@pytest.mark.parametrize("form", ["Lamb", "Lamb-clipped"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("slot", range(4), ids=["g", "w", "m", "v"])
def test_what_is_not_finite_reaches_the_parameter_of_lamb(slot: int, bad: float, form: str) -> None:
    """At its element; an infinite second moment stays in itself. (Other elements may follow.)"""
    opt = make(form, parameters({"a": (40,)}))
    given = gradients(opt.parameters, 0)
    opt(given)
    w, (m, v) = opt.parameters[0].data, opt._states_of_each()[0]
    (given[0], w, m, v)[slot][17] = bad
    opt(given)
    assert not np.isfinite(w[17]) or (slot == 3 and not np.isfinite(v[17]))


@pytest.mark.parametrize("state", ["exp_avg_sq_col_a", "exp_avg_sq_b"])
def test_a_nan_in_a_second_moment_of_adafactor_stays(state: str) -> None:
    opt = make("AdaFactor", parameters(SHAPES))
    array = opt.state_arrays()[state]
    array[0] = np.nan
    opt(gradients(opt.parameters, 0))
    assert np.isnan(array[0])
    assert np.isnan(next(p.data.flat[0] for p in opt.parameters if state.endswith(f"_{p.name}")))


# Sizes and dtypes


@pytest.mark.parametrize(("form", "dtype"), typed(WHOLE), ids=str)
def test_zero_empty_and_0d_tensors(form: str, dtype: Any) -> None:
    """They move as the others do, or not at all, and nothing becomes NaN."""
    shapes = {"zero": (3, 2), "still": (3, 2), "empty": (0, 3), "none": (3, 0), "c": (), "e": (1,)}
    params = parameters(shapes, dtype)
    params[0].data[...] = 0
    before = [p.data.copy() for p in params]
    opt = make(form, params)
    for step in range(3):
        given = gradients(params, step)
        given[1][...] = 0
        assert opt(given) == (True,) * len(params)
    assert all(np.isfinite(p.data.astype(np.float64)).all() for p in params)
    assert_same_bits(params[1].data, before[1])
    moves = [(p.data != w).all() for p, w in zip(params, before, strict=True)]
    # A factor of |w| = 0 leaves nothing of the gradient; Lamb and AdaFactor have a way out.
    # Small steps are lost in 16 bits.
    if dtype.itemsize > 2:
        assert moves == [not form.startswith("LARS"), False, True, True, True, True]


DTYPES = [(dtype, dtype) for dtype in STORAGE_DTYPES]
DTYPES += [(np.float32, np.float16), (np.float32, np.float64), (BF16, np.float32)]
EVERY_PAIR = [*product(STORAGE_DTYPES, repeat=2)]  # the kernels are those of test_storage.py
OF_SEVERAL = [("Adam", EVERY_PAIR), *((form, DTYPES) for form in ("Lamb", "LARS", "AdaFactor"))]


@pytest.mark.parametrize(("form", "dtypes"), OF_SEVERAL)
def test_several_dtypes_in_one_optimizer(form: str, dtypes: Any) -> None:
    """Each tensor is as in an optimizer of its own, whatever the dtypes of the gradients."""
    together, apart = (
        [parameters({f"p{k}": (5, 3)}, dtype)[0] for k, (dtype, _) in enumerate(dtypes)]
        for _ in range(2)
    )
    start = [p.data.copy() for p in apart]
    opt, alone = make(form, together), [make(form, [p]) for p in apart]
    for step in range(2):
        given = [
            gradients([p], step, dtype)[0] for p, (_, dtype) in zip(together, dtypes, strict=True)
        ]
        opt(given)
        for one, g in zip(alone, given, strict=True):
            one([g])
    for p, q, w in zip(together, apart, start, strict=True):
        assert_same_bits(p.data, q.data, str(p.name))
        assert (p.data != w).any()


# The types in turn: each has a kernel of its own, and the forms of a class come one after another.
ROUNDED = [
    (pytest.param if form in ONE_OF_EACH else more)(form, (np.dtype(np.float16), BF16)[k % 2])
    for k, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("form", "dtype"), ROUNDED, ids=str)
def test_16_bit_parameters_are_rounded_once(form: str, dtype: Any) -> None:
    """A step is that of the float32 arithmetic, rounded at the store; the gradient is not."""
    low = parameters(SHAPES, dtype, form)
    wide = [nn.Parameter(p.data.astype(np.float32), p.name) for p in low]
    given = gradients(wide, 0)
    one, other = make(form, low), make(form, wide)
    begin = one.state_arrays()
    for name, array in other.state_arrays().items():
        array[...] = begin[name]  # where some begin is no 16-bit number
    for opt in (one, other):
        opt(given)
    for p, q in zip(low, wide, strict=True):
        assert_same_bits(p.data, q.data.astype(dtype), str(p.name))
    for name, array in states(one).items():
        assert_same_bits(array, states(other)[name].astype(array.dtype), name)


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_a_float64_gradient_of_a_float32_parameter_is_rounded_first(form: str) -> None:
    one, other = (make(form, parameters(SHAPES, form=form)) for _ in range(2))
    given = gradients(one.parameters, 0, np.float64)
    one(given)
    other([g.astype(np.float32) for g in given])
    assert_same_arrays(one.parameters, other.parameters)


# Bits depend on the tensor alone


# Locking


LOCKING = ("Momentum", "SGD-momentum", "RMSProp-both", "FTRL", "Lamb", "LARS", "AdaFactor")


@pytest.mark.parametrize("form", LOCKING)
def test_two_threads_step_in_some_order(form: str) -> None:
    """Both stages of a step see one state: the result is that of one of the two orders."""
    shapes = {"a": (250, 300), "b": (40_000,)}
    first, second = (gradients(parameters(shapes), step) for step in (1, 2))

    def serial(order: Any) -> list[np.ndarray]:
        opt = make(form, parameters(shapes))
        for given in order:
            opt(given)
        return [p.data for p in opt.parameters]

    one, other = serial((first, second)), serial((second, first))
    assert not np.array_equal(one[0], other[0])
    for _ in range(10):
        opt = make(form, parameters(shapes), use_locking=True)
        at_once([lambda g=g, opt=opt: opt(g) for g in (first, second)])
        found = [p.data for p in opt.parameters]
        equal = [all(map(np.array_equal, found, order)) for order in (one, other)]
        assert sum(equal) == 1
        assert opt.global_step.tolist() == [2]


def test_adafactor_leaves_zero_by_its_second_epsilon() -> None:
    """Its first update is the gradient's sign, its first rate 0.01: the size is what is left."""
    w = np.zeros((3, 4), np.float32)
    nn.AdaFactor([w], eps=(1e-30, 10.0), beta1=None)((np.ones((3, 4), np.float32),))
    np.testing.assert_allclose(w, -0.01 * 10.0, rtol=1e-6)


def test_adafactor_of_infinite_size_changes_everything_or_nothing() -> None:
    """Warnings are errors here: none may come between the states and the parameter."""
    w = np.full((3, 4), 1e38, np.float32)
    opt = nn.AdaFactor([w], 100.0, relative_step=False, beta1=None)
    opt((np.ones((3, 4), np.float32),))
    assert np.isinf(w).all()
    assert opt.global_step[0] == 1
