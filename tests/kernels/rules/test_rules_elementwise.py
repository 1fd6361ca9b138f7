"""Rules outside of Adam's family at their edges.

Their steps are compared with the references in test_family_reference.py and test_ops_reference.py,
states of several storage types in test_states.py.
"""

import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
import exact_steps
import optimizers
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.keeping import KAHAN, MASTER
from fusestep.kernels.rule import Rule
from fusestep.kernels.rules import adagrad, adam, ftrl, mxnet, rmsprop, sgd
from helpers import STORAGE_DTYPES, assert_same_bits, sampled
from rule_cases import CASES, NEUTRAL, OPTIMIZER, real_of, run_dense

F32, F64, F16 = (np.dtype(d) for d in (np.float32, np.float64, np.float16))


def test_every_rule_of_the_package_is_tested() -> None:
    """Here, in the files beside this one, or those of optimizers by the registry. Adafactor's are
    tested with its norms, Prodigy's in test_prodigy.py, those that count rows in
    test_rowwise_bias_correction.py, and those of PyTorch's form beside PyTorch."""
    from test_rules import RULES as ADAM

    tested = [case.rule for case in CASES.values()]
    tested += [rule for rule, _, _ in ADAM.values()]
    assert len(set(tested)) == len(tested)
    tested += [optimizers.make(form, optimizers.parameters())._rule for form in exact_steps.FORMS]
    elsewhere = "torch_", "prodigy"
    others = {n: rule for n, rule in all_rules().items() if not n.startswith(elsewhere)}
    missing = {n for n, rule in others.items() if rule not in tested and not n.endswith("by_row")}
    of_vectors = {"adafactor", "adafactor_plain"}
    assert missing == {*of_vectors, *(f"{name}_matrix" for name in of_vectors)}


# Edges

# FTRL's rules that are shrunk decay; the first three have no weight of their own.
MOVING = [
    name
    for name in CASES
    if name not in ("scaled", "scaled_in_place", "lars_gradient") and "shrunk" not in name
]
OF_RULES = [*product(MOVING, [F32], (False, True))]
OF_RULES += [(name, STORAGE_DTYPES[1 + k % 3], k % 2 == 0) for k, name in enumerate(MOVING)]


@pytest.mark.parametrize(
    ("name", "dtype", "has_prologue"),
    sampled(product(MOVING, STORAGE_DTYPES, (False, True)), OF_RULES), ids=str)  # fmt: skip
def test_nothing_moves_without_gradient_and_history(
    name: str, dtype: np.dtype, has_prologue: bool
) -> None:
    """All states 0, all gradients 0: also -0.0 and subnormal parameters keep their bits. FTRL's
    parameter is a function of its states, and where they are 0 it is 0."""
    case, prologue = CASES[name], OPTIMIZER if has_prologue else ()
    w = np.array([1.0, -3.0, 0.0, -0.0, 1e-7, 60000.0, -1e-40] * 5).astype(dtype)
    arrays = [w.copy(), *(np.zeros_like(w) for _ in case.kinds)]
    run_dense(case.rule, arrays, np.zeros_like(w), case.hp(real_of(dtype)), prologue, NEUTRAL)
    assert_same_bits(arrays[0], np.zeros_like(w) if name.startswith("ftrl") else w)
    for state in arrays[1:]:
        assert_same_bits(state, np.zeros_like(w))


def float32s(*values: Any) -> list[np.ndarray]:
    return [np.array(v, np.float32) for v in values]


@pytest.mark.parametrize("with_momentum", [False, True])
def test_centered_rmsprop_waits_without_a_positive_variance(with_momentum: bool) -> None:
    """The means go on; parameter and moment keep their values where the variance is <= 0."""
    # With a decay of 1/2: the variances are -3/4, 0, 1 and NaN.
    w, g, mg, s, mo = float32s(
        [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0], [2.0, 1.0, 0.0, np.nan],
        [0.5, 1.0, 2.0, 2.0], [0.5, 0.25, 0.125, 0.5])  # fmt: skip
    case = CASES["rmsprop_centered_momentum" if with_momentum else "rmsprop_centered"]
    arrays = [w, mg, s, *([mo] if with_momentum else [])]
    run_dense(case.rule, arrays, g, case.hp(np.float32, decay=0.5, epsilon=0.0))
    assert_same_bits(mg[:3], float32s([1.0, 1.0, 0.0])[0])
    assert_same_bits(s, float32s([0.25, 1.0, 1.0, 1.0])[0])
    assert w[:2].tolist() == [1.0, 2.0] and np.isnan(w[3])
    if with_momentum:
        assert mo[:2].tolist() == [0.5, 0.25] and np.isnan(mo[3])
        assert mo[2] == np.float32(0.8) * np.float32(0.125)
        assert w[2] == np.float32(3.0) - mo[2]


@pytest.mark.parametrize("rule", [ftrl.FTRL, ftrl.FTRL_POWER], ids=["root", "power"])
def test_ftrl_inside_of_the_threshold_is_zero(rule: Rule) -> None:
    """On the threshold too; the next number beyond is not."""
    beyond = np.nextafter(np.float32(0.5), np.float32(1))
    linear = np.array([0.0, 0.25, -0.5, 0.5, beyond, -beyond, np.nan] * 5, np.float32)
    w, accum, g = np.full(35, 3.0, np.float32), np.full(35, 4.0, np.float32), np.zeros(35)
    hp = CASES["ftrl" if rule is ftrl.FTRL else "ftrl_power"].hp(np.float32, l1=0.5)
    run_dense(rule, [w, accum, linear], g.astype(np.float32), hp)
    w = w.reshape(5, 7)
    assert_same_bits(w[:, :4], np.zeros((5, 4), np.float32))  # and not -0.0
    assert (w[:, 4] < 0).all() and (w[:, 5] > 0).all()
    assert np.isnan(w[:, 6]).all()


@pytest.mark.parametrize("name", ["ftrl", "ftrl_power"])
def test_ftrl_without_regularisation_and_history_is_zero(name: str) -> None:
    """0 / 0 otherwise: a model that has seen nothing predicts nothing."""
    w, accum, linear, g = float32s(np.ones(20), np.zeros(20), np.zeros(20), np.zeros(20))
    run_dense(CASES[name].rule, [w, accum, linear], g, CASES[name].hp(np.float32, l1=0.0, l2=0.0))
    assert_same_bits(w, np.zeros(20, np.float32))


def test_ftrl_rule_follows_the_options() -> None:
    """Rule and scalars fit each other."""
    for (power, shrinkage), rule in {
        (-0.5, 0.0): ftrl.FTRL, (-0.3, 0.0): ftrl.FTRL_POWER, (0.0, 0.0): ftrl.FTRL_POWER,
        (-0.5, 0.1): ftrl.FTRL_SHRUNK, (-0.3, 0.1): ftrl.FTRL_POWER_SHRUNK,
    }.items():  # fmt: skip
        assert ftrl.ftrl_rule(power, shrinkage) is rule
        formula = ftrl.ftrl_formula(0.0, 0.0, power, 1.0, shrinkage)
        assert len(formula.at(np.float32, 0.1, 0.0, 1)) == len(rule.hp)


def test_proximal_adagrad_shrinks_to_zero() -> None:
    """Within the threshold exactly 0, of either sign of the step; beyond it closer to 0."""
    g, w = float32s([1.0, -1.0, 1.0, -1.0, 0.0], [0.5, -0.5, 3.0, -3.0, 0.25])
    accum = np.array([3.0, 3.0, 3.0, 3.0, 4.0], np.float32)
    hp = CASES["proximal_adagrad"].hp(np.float32, lr=0.5, l1=2.0, l2=0.0)
    run_dense(adagrad.PROXIMAL_ADAGRAD, [w, accum], g, hp)
    # A rate of 1/4 everywhere: |w - g/4| - 1/2, not below 0.
    assert w.tolist() == [0.0, 0.0, 2.25, -2.25, 0.0]


def test_stat_that_marks_no_first_step_is_kept() -> None:
    """Only a `stat` above 0 becomes 0: one below it, or a NaN, stays to be seen."""
    w, a, g = float32s(np.ones(3), np.ones(3), np.ones(3))
    stat = np.array([-1.0, np.nan, 0.0], np.float32)
    before = stat.copy()
    run_dense(sgd.SGD_FIRST_STEP, [w, a, stat], g, CASES["sgd_first_step"].hp(np.float32))
    assert_same_bits(stat, before)


@pytest.mark.parametrize("make", [rmsprop.rmsprop_scalars, rmsprop.rmsprop_momentum_scalars])
def test_complements_are_taken_of_rounded_numbers(make: Any) -> None:
    """1 - 0.999 between float32 numbers is 1.3e-5 below 0.001, which shows in every step."""
    extra = (0.0,) if make is rmsprop.rmsprop_momentum_scalars else ()
    hp = make(np.float32, 0.1, 0.0, 1, (0.999, 1e-10, *extra), ())
    assert hp[1] == np.float32(0.0009999871) != np.float32(0.001)
    assert all(type(x) is np.float32 for x in hp)
    hp = sgd.momentum_scalars(np.float32, 0.1, 0.0, 2, (0.9, 0.999), ())
    assert hp[2] == np.float32(0.0009999871)


# Ways to keep a weight


def test_rules_that_cannot_be_kept_so() -> None:
    for rule in (mxnet.MXNET_ADAM.kept(MASTER), *(r for r in all_rules().values() if r.lines)):
        with pytest.raises(ValueError, match="the weight of this rule cannot be kept as kahan"):
            rule.kept(KAHAN)


def test_a_kept_rule_is_one_everywhere() -> None:
    """Kernels are known by the identity of their rule."""
    kept = adam.ADAM.kept(KAHAN)
    assert kept is adam.ADAM.kept(KAHAN) is pickle.loads(pickle.dumps(kept))
    assert kept.names == (*adam.ADAM.names, "remainder")
    assert all(pickle.loads(pickle.dumps(keeping)) is keeping for keeping in (MASTER, KAHAN))
