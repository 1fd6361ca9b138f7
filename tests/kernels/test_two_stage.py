"""Two-stage rules: what LAMB measures, the ratios that follow, the step; and LARS's factor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from fusestep import ops
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rule import Prologue, Rule, factors, hp_type
from fusestep.kernels.rules import gradient as prologues
from fusestep.kernels.rules import lamb, lars
from fusestep.kernels.rules.gradient import SCALE
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.step import DenseUpdate, Variables

import reference_layerwise as layerwise
from helpers import BF16, STORAGE_DTYPES, assert_same_bits, assert_within_ulps, unchanged
from reference import wide
from rule_cases import condition, hp_row, real_of, with_prologues

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


def scalars(form: Form, real: Any, **changed: float) -> tuple[Any, dict[str, float]]:
    """For the library and for the reference; `changed` are hyper-parameters."""
    given = {**LAMB_SCALARS, **changed}
    known = {name: float(real(value)) for name, value in given.items()}
    for k in ("1", "2"):
        known[f"beta{k}_power"] = known[f"beta{k}"] ** STEP
        known[f"one_minus_beta{k}"] = 1.0 - known[f"beta{k}"]
    if form.reference is layerwise.lamb_clipped:
        known["norm_decay"] = known["decay"]
    lr, *constants, decay = given.values()
    hp = lamb.lamb_scalars(real, lr, decay, STEP, tuple(constants), ())
    return hp_type(form.rule, ())(*hp), known


def samples(n: int, seed: int = 0) -> list[np.ndarray]:
    """Parameter, gradient and moments; the second moment is 0 for some elements."""
    rng = np.random.default_rng(seed)
    w, g, m = rng.standard_normal((3, n))
    v = rng.uniform(0.0, 2.0, n) ** 2
    v[: n // 20] = 0.0
    return [w, g, m, v]


def run(form: Form, arrays: list[Any], g: Any, prologue: Prologue = (), **changed: float) -> None:
    """Both stages on one tensor, in place, as an optimizer runs them."""
    real = real_of(arrays[0].dtype)
    hp = hp_row(form.rule, prologue, scalars(form, real, **changed)[0], real)
    update = DenseUpdate(
        form.rule, prologue, Variables.of([tuple(arrays)]), np.array([g.ctypes.data]),
        STORAGES[g.dtype], hp, np.zeros(1, np.int64),
    )  # fmt: skip
    ratio = form.ratio(update.sums())
    assert ratio.shape == (1,)
    hp[:, lamb.LAMB.hp.index("step")] *= ratio
    commit([update.prepared()])


def norm(x: Any) -> float:
    return math.sqrt(math.fsum(np.square(wide(x)).ravel()))


def lamb_terms(w: Any, g: Any, m: Any, known: Any, new: Any) -> list[Any]:
    """Both summands of m; the old parameter, and the step with all that its direction sums up.

    `new` is the reference's result and `g` the size of the gradient.
    """
    root = np.sqrt(new[2] / (1 - known["beta2_power"])) + known["epsilon"]
    direction = new[1] / (1 - known["beta1_power"]) / root + known["decay"] * w
    ratio = norm(w - new[0]) / norm(known["lr"] * direction)
    mean = known["beta1"] * np.abs(m) + known["one_minus_beta1"] * np.abs(g)
    terms = mean / (1 - known["beta1_power"]) / root + known["decay"] * np.abs(w)
    return [np.abs(w) + known["lr"] * ratio * terms, mean, new[2]]


def assert_near(form: Form, found: Any, before: list[Any], g: Any, size: Any) -> None:
    """Within 4 ulps, as in test_rules_elementwise.py."""
    __tracebackhide__ = True
    _, known = scalars(form, real_of(before[0].dtype))
    w, m, v = (wide(a) for a in before)
    expected = form.reference(w, g, m, v, **known)
    scales = lamb_terms(w, size, m, known, expected)
    for role, array, exact, scale in zip("wmv", found, expected, scales, strict=True):
        assert_within_ulps(array, exact, scale, 8.0 if array.dtype == F64 else 4.0, role)


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


@pytest.mark.parametrize(("name", "dtype", "prologue"), with_prologues(FORMS, (SCALE,)))
def test_compiled_lamb_within_4_ulps(name: str, dtype: np.dtype, prologue: Prologue) -> None:
    """Three steps; the norms are those of the gradient after the prologue."""
    form = FORMS[name]
    w, _, m, v = (a.astype(dtype) for a in samples(700, seed=2))
    for step in range(3):
        gradient = samples(700, seed=3 + step)[1].astype(dtype)
        before = [w.copy(), m.copy(), v.copy()]
        g, size = condition(gradient, w, prologue, real_of(dtype))
        run(form, [w, m, v], gradient, prologue)
        assert_near(form, [w, m, v], before, g, size)


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
    found = [w, m.astype(np.float32) if m.dtype == F64 else m, v]
    assert_near(form, found, [arrays[0], *arrays[2:]], wide(g), np.abs(wide(g)))


@EACH_FORM
def test_every_scalar_of_lamb_acts(form: Form) -> None:
    """Each hyper-parameter off its value moves the parameter far beyond the tolerance."""
    results = {}
    for name in (None, *LAMB_SCALARS):
        w, g, m, v = (a.astype(np.float32) for a in samples(50, seed=7))
        changed = {name: 0.5} if name else {}
        run(form, [w, m, v], g, **changed)
        results[name] = w
    for name in LAMB_SCALARS:
        assert np.abs(results[name] - results[None]).max() > 1e-3, name


@EACH_FORM
def test_each_tensor_has_its_own_ratio(form: Form) -> None:
    """Several tensors in one call, to the last bit what each is alone."""
    sizes = (5, 140_000, 1, 0, 333)
    alone = [[a.astype(np.float32) for a in samples(n, seed=n)] for n in sizes]
    together = [[a.copy() for a in arrays] for arrays in alone]
    for k, (w, g, m, v) in enumerate(alone):
        w *= 10.0**k
        together[k][0] *= 10.0**k
        run(form, [w, m, v], g)
    hp = np.repeat(np.array([scalars(form, np.float32)[0]]), len(sizes), axis=0)
    update = DenseUpdate(
        form.rule, (), Variables.of([(w, m, v) for w, _, m, v in together]),
        np.array([g.ctypes.data for _, g, _, _ in together]), STORAGES[F32], hp,
        np.arange(len(sizes)),
    )  # fmt: skip
    hp[:, -1] *= form.ratio(update.sums())
    commit([update.prepared()])
    assert len(set(hp[:, -1].tolist())) == len(sizes)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)


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
def test_lamb_without_gradient_and_history(form: Form) -> None:
    """No decay: nothing moves. A parameter of 0 takes the step of a ratio of 1."""
    w, zeros = np.array([1.0, -2.0, -0.0], np.float32), np.zeros(3, np.float32)
    arrays = [w.copy(), zeros.copy(), zeros.copy()]
    run(form, arrays, zeros, decay=0.0)
    assert_same_bits(arrays[0], w)
    arrays = [zeros.copy(), zeros.copy(), zeros.copy()]
    run(form, arrays, np.full(3, 2.0, np.float32), decay=0.0)
    _, known = scalars(form, np.float32, decay=0.0)
    mean, square = 0.1 * 2.0 / (1 - 0.9**STEP), 0.01 * 4.0 / (1 - 0.99**STEP)
    step = known["lr"] * mean / (math.sqrt(square) + 1e-3)
    np.testing.assert_allclose(arrays[0], -step, rtol=1e-5)


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
