"""Every optimizer against its float64 reference: parameters and states, step by step."""

from typing import Any

import numpy as np
import pytest
from exact_steps import FORMS, exact_step
from helpers import STORAGE_DTYPES
from optimizers import decayed_and_scaled, make, parameters
from roundings import Rounded, assert_rounded

SHAPES = {"matrix": (20, 30), "vector": (101,), "number": (), "batch": (2, 3, 5)}
F32, *OTHERS = STORAGE_DTYPES
# Each form in float32 with all that an optimizer does to a gradient, and in one other type.
TYPED = [(form, F32) for form in FORMS]
TYPED += [(form, OTHERS[k % len(OTHERS)]) for k, form in enumerate(FORMS)]
# Of the bound. A kernel may do the same in another order, with scalars that are rounded once
# more; in float64 the reference itself is as far off.
ALLOWED = 2.0


def spread(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """Numbers of both signs over three decades, some of them 0."""
    size = np.exp(rng.uniform(np.log(1e-2), np.log(1e1), shape))
    signed = size * rng.choice([-1.0, 1.0], shape) * (rng.random(shape) > 0.05)
    return np.asarray(signed).astype(dtype)


def new(form: str, dtype: Any, rng: np.random.Generator, **options: Any) -> Any:
    """An optimizer of parameters in `SHAPES`."""
    params = parameters(SHAPES, dtype, form)
    for p in params:
        p.data[...] = spread(rng, p.shape, dtype)
    return make(form, params, **options)


def arrays_of_each(opt: Any) -> list[list[np.ndarray]]:
    """Each parameter and its states, copied."""
    each = (
        (p.data, *states) for p, states in zip(opt.parameters, opt._states_of_each(), strict=True)
    )
    return [[array.copy() for array in arrays] for arrays in each]


def conditioned(opt: Any, g: Any, w: Any, real: Any, decay: float, scale: float) -> Any:
    """The gradient after coupled decay and loss scale."""
    if decay and not opt._rule.decays:
        g = g + float(real(decay * scale)) * w
    return g if scale == 1.0 else g * float(real(1.0 / scale))


@pytest.mark.parametrize(("form", "dtype"), TYPED, ids=str)
def test_steps_are_those_of_the_reference(form: str, dtype: Any) -> None:
    """Three steps, each from where the one before has arrived."""
    rng, real = np.random.default_rng(3), np.float64 if dtype == np.float64 else np.float32
    options = decayed_and_scaled(form) if dtype == F32 else {}
    opt = new(form, dtype, rng, **options)
    decay, scale = options.get("weight_decay", 0.0), options.get("loss_scale", 1.0)
    for t in range(1, 4):
        before, rates = arrays_of_each(opt), opt._rates_at(t - 1)
        given = [spread(rng, p.shape, dtype) for p in opt.parameters]
        opt(given)
        for i, (w, *states) in enumerate(before):
            step = exact_step(form, opt, rates[i], t, real, decay)
            old, after = Rounded(w), arrays_of_each(opt)[i]
            g = conditioned(opt, Rounded(given[i]), old, real, decay, scale)
            expected = step(old, g, *map(Rounded, states))
            # Without momentum some references have a state more.
            for k, (found, exact) in enumerate(zip(after, expected, strict=False)):
                assert_rounded(found, exact, real, ALLOWED, f"array {k} after step {t}: ")


ONE_STAGE = [form for form in FORMS if not make(form, parameters())._rule.measure]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("form", ONE_STAGE)
def test_what_is_not_finite_is_not_lost(form: str, bad: float) -> None:
    """From a gradient, a parameter or a state, it reaches what it reaches in the reference. Beside
    that an infinite state may become NaN. Other elements hear nothing of it."""
    rng, places = np.random.default_rng(5), (0, 5, 16, 100)
    given = [spread(rng, shape, F32) for shape in SHAPES.values()]
    n_arrays = len(arrays_of_each(new(form, F32, rng))[1])
    for slot in range(-1, n_arrays if bad > 0 or np.isnan(bad) else 1):
        if (form, slot) == (
            "Adam-amsgrad",
            3,
        ):  # the larger one of a NaN and a number is the number
            continue
        opt, clean = (new(form, F32, np.random.default_rng(6)) for _ in range(2))
        for one in (opt, clean):  # some first steps read no states
            one(given)
        step = exact_step(form, opt, opt._rates_at(1)[0], 2, np.float32)
        g = given[1].copy()
        held = [g, opt.parameters[1].data, *opt._states_of_each()[1]][slot + 1]
        held[list(places)] = bad
        (w, *states) = arrays_of_each(opt)[1]
        clean(given)
        opt([given[0], g, *given[2:]])
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = step(w, g, *states)
        after, without = (arrays_of_each(one)[1] for one in (opt, clean))
        for found, exact, other in zip(after, expected, without, strict=False):
            is_finite, expected_so = np.isfinite(found), np.isfinite(exact)
            assert (is_finite == expected_so if slot < 0 else is_finite <= expected_so).all(), slot
            np.testing.assert_array_equal(np.delete(found, places), np.delete(other, places))
