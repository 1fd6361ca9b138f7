"""Two-stage rules: what LAMB measures, the ratios that follow; and LARS's factor.

Steps of LAMB are those of its optimizer, in test_family_reference.py and test_family_layerwise.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from fusestep import ops
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rule import Rule, factors, hp_type
from fusestep.kernels.rules import gradient as prologues
from fusestep.kernels.rules import lamb, lars
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.step import DenseUpdate, Variables

import reference_layerwise as layerwise
from helpers import BF16, STORAGE_DTYPES, assert_within_ulps, unchanged
from reference import wide
from roundings import Rounded, assert_rounded
from rule_cases import hp_row, real_of

LAMB_SCALARS = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "decay": 0.1}
STEP = 3
F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))


@dataclass(frozen=True)
class Form:
    """One of the two published forms."""

    rule: Rule
    ratio: Any
    reference: Any


def ratios(rule: Rule, sums: np.ndarray) -> np.ndarray:
    """The only factor of each tensor."""
    return factors(rule, sums, [{}] * len(sums))[:, 0]


FORMS = {
    "lamb": Form(lamb.LAMB, partial(ratios, lamb.LAMB), layerwise.lamb),
    "clipped": Form(lamb.LAMB_CLIPPED, partial(ratios, lamb.LAMB_CLIPPED), layerwise.lamb_clipped),
}
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def scalars(form: Form, real: Any) -> tuple[Any, dict[str, float]]:
    """For the library and for the reference."""
    known = {name: float(real(value)) for name, value in LAMB_SCALARS.items()}
    for k in ("1", "2"):
        known[f"beta{k}_power"] = known[f"beta{k}"] ** STEP
        known[f"one_minus_beta{k}"] = 1.0 - known[f"beta{k}"]
    if form.reference is layerwise.lamb_clipped:
        known["norm_decay"] = known["decay"]
    lr, *constants, decay = LAMB_SCALARS.values()
    hp = lamb.lamb_scalars(real, lr, decay, STEP, tuple(constants), ())
    return hp_type(form.rule, ())(*hp), known


def samples(n: int, seed: int = 0) -> list[np.ndarray]:
    """Parameter, gradient and moments; the second moment is 0 for some elements."""
    rng = np.random.default_rng(seed)
    w, g, m = rng.standard_normal((3, n))
    v = rng.uniform(0.0, 2.0, n) ** 2
    v[: n // 20] = 0.0
    return [w, g, m, v]


def run(form: Form, arrays: list[Any], g: Any) -> None:
    """Both stages on one tensor, in place, as an optimizer runs them."""
    real = real_of(arrays[0].dtype)
    hp = hp_row(form.rule, (), scalars(form, real)[0], real)
    update = DenseUpdate(
        form.rule, (), Variables.of([tuple(arrays)]), np.array([g.ctypes.data]),
        STORAGES[g.dtype], hp, np.zeros(1, np.int64),
    )  # fmt: skip
    ratio = form.ratio(update.sums())
    assert ratio.shape == (1,)
    hp[:, lamb.LAMB.hp.index("step")] *= ratio
    commit([update.prepared()])


def norm(x: Any) -> float:
    return math.sqrt(math.fsum(np.square(wide(x)).ravel()))


@EACH_FORM
def test_lamb_in_plain_python(form: Form) -> None:
    """First stage summed by hand, element by element; then the second."""
    arrays = samples(30, seed=1)
    hp, known = scalars(form, np.float64)
    measured = [form.rule.measure(*element, hp) for element in zip(*arrays, strict=True)]
    assert all(len(values) == form.rule.n_measured for values in measured)
    sums = [math.fsum(x * x for x in column) for column in zip(*measured, strict=True)]
    hp = hp._replace(step=hp.step * form.ratio(np.array([sums]))[0])
    expected = np.array(form.reference(*arrays, **known))
    for i, element in enumerate(zip(*arrays, strict=True)):
        found = form.rule.update(*element, hp)
        np.testing.assert_allclose(found, expected[:, i], rtol=1e-12, atol=1e-14)


# Storage of parameter, gradient, m and v, which the two forms load and store alike.
@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("lamb", (F16, F32, F32, BF16)),
        ("clipped", (F64, BF16, F16, F32)),
        ("lamb", (F32, F32, F64, F16)),
    ],
    ids=str,
)
def test_states_of_several_storage_types(name: str, types: Any) -> None:
    """With a float64 m there is still float32 in it."""
    form = FORMS[name]
    arrays = [a.astype(t) for a, t in zip(samples(500, seed=6), types, strict=True)]
    w, g, m, v = (a.copy() for a in arrays)
    run(form, [w, m, v], g)
    real = real_of(w.dtype)
    expected = form.reference(*map(Rounded, arrays), **scalars(form, real)[1])
    for role, array, exact in zip("wmv", (w, m, v), expected, strict=True):
        assert_rounded(array, exact, real, 2.0, f"{role} ")


def test_lamb_ratio() -> None:
    """|w| / |u|; 1 where one of them is 0."""
    squares = np.array([[4.0, 1.0], [4.0, 16.0], [0.0, 1.0], [4.0, 0.0], [0.0, 0.0], [np.inf, 1.0]])
    np.testing.assert_array_equal(ratios(lamb.LAMB, squares), [2.0, 0.5, 1.0, 1.0, 1.0, np.inf])


def test_clipped_lamb_ratio() -> None:
    """Limited to 10; 1 where |w| or |g| is 0, also if |u| is not."""
    squares = np.array([[4.0, 1.0, 1.0], [400.0, 1.0, 1.0], [0.0, 1.0, 1.0], [4.0, 1.0, 0.0],
                        [4.0, 0.0, 1.0]])  # fmt: skip
    found = ratios(lamb.LAMB_CLIPPED, squares)
    np.testing.assert_array_equal(found, [2.0, 10.0, 1.0, 1.0, 10.0])


@EACH_FORM
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("slot", range(4), ids=["w", "g", "m", "v"])
def test_what_is_not_finite_reaches_the_parameter(form: Form, slot: int, bad: float) -> None:
    """At its element; an infinite second moment stays in itself. (Other elements may follow.)"""
    arrays = [a.astype(np.float32) for a in samples(40, seed=8)]
    arrays[slot][17] = bad
    w, g, m, v = arrays
    run(form, [w, m, v], g)
    assert not np.isfinite(w[17]) or (slot == 3 and not np.isfinite(v[17]))


# LARS


def test_trust_in_plain_python() -> None:
    """The factor of a layer multiplies the gradient and does not see the parameter."""

    class HP:
        trust_ratio = 0.25

    assert prologues.trust(3.0, -4.0, HP) == 0.75
    assert prologues.TRUST.hp == ("trust_ratio",)


def test_lars_ratio() -> None:
    """coefficient*|w| / (|g| + decay*|w| + epsilon), in float64; 0 / 0 counts as 1."""
    norm_w, norm_g, decay = np.array(
        [[2.0, 0.0, 2.0, 0.0], [3.0, 3.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0]]
    )
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 0.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 4.0, 0.0, 0.2, 1.0])
    found = lars.lars_ratio(norm_w, norm_g, decay, 0.1, 1.0)
    np.testing.assert_array_equal(found, [0.1 * 2.0 / 5.0, 0.0, 0.1, 0.0])


def test_clipped_lars_ratio() -> None:
    """max(min(ratio / lr, 1), 0), also for a rate of 0."""
    ratio = np.array([0.2, 0.2, 0.2, 0.0])
    found = lars.clipped_ratio(ratio, np.array([0.4, 0.1, 0.0, 0.0]))
    np.testing.assert_array_equal(found, [0.5, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
@pytest.mark.parametrize("use_clip", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 5), (2, 3, 4, 5)])
def test_lars_update(dtype: np.dtype, use_clip: bool, shape: tuple[int, ...]) -> None:
    """Against the reference, for which the norms are those of the arrays."""
    rng = np.random.default_rng(9)
    w, g = (np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    op = ops.LARSUpdate(epsilon=1e-3, hyperpara=0.02, use_clip=use_clip)
    given = {"coefficient": 0.02, "epsilon": 1e-3, "decay": 0.1}
    with unchanged(w, g):
        for lr in (1e-3, 0.5):  # either side of the clip
            found = op(w, g, norm(w) ** 2, norm(g) ** 2, 0.1, lr)
            known = {**given, "lr": lr if use_clip else None}
            assert found.dtype == dtype and found.shape == shape
            expected = layerwise.lars_gradient(w, g, **known)
            scale = layerwise.lars_gradient(np.abs(wide(w)), np.abs(wide(g)), **known)
            assert_within_ulps(found, expected, scale, 8.0 if dtype == F64 else 4.0)
