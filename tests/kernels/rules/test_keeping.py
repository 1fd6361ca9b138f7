"""Ways to keep a weight: every rule, dense and row-sparse, gives what it gives in float32."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.cpu.warmup import all_rules
from fusestep.kernels.keeping import KAHAN, MASTER
from fusestep.kernels.rule import Keeping, Rule, hp_type
from fusestep.kernels.rules import adam, mxnet
from fusestep.kernels.rules.gradient import COUPLED_DECAY
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.row_step import RowGradient, RowUpdate
from fusestep.ops.runtime.step import DenseUpdate, Variables

from helpers import assert_same_bits, more

F32 = np.float32
HALVES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
SAMPLE = "adam", "lion", "row_wise_adagrad", "sgd"
RULES = {
    name: rule
    for name, rule in sorted(all_rules().items())
    if not (rule.is_two_stage or rule.lines or rule.matrix)
}
N, D = 40, 12


def step(
    rule: Rule, arrays: list[np.ndarray], g: np.ndarray, indices: np.ndarray | None, *, lazy: bool
) -> None:
    """One step of a rule behind a coupled decay, in place."""
    prologue = (COUPLED_DECAY,)
    hp = np.linspace(0.1, 0.6, len(hp_type(rule, prologue)._fields), dtype=F32)[None]
    variables, one = Variables.of([tuple(arrays)]), np.zeros(1, np.int64)
    if indices is None:
        place, storage = np.array([g.ctypes.data]), STORAGES[g.dtype]
        update: Any = DenseUpdate(rule, prologue, variables, place, storage, hp, one)
    else:
        given = variables, [RowGradient.of(indices, g)], STORAGES[g.dtype], hp, [0], lazy
        update = RowUpdate.of(["x"], rule, prologue, *given)
    commit([update.prepared()])


def begin(rule: Rule, generator: np.random.Generator) -> list[np.ndarray]:
    """The states of a plain rule, in float32."""
    return [
        np.zeros(rule.shape_of(state, (N, D)), state.dtype)
        if state.dtype is not None
        else generator.uniform(0.5, 1.0, rule.shape_of(state, (N, D))).astype(F32)
        for state in rule.states
    ]


@pytest.mark.parametrize("lazy", [None, False, True], ids=["dense", "every row", "lazy"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("keeping", [MASTER, KAHAN], ids=lambda keeping: keeping.name)
@pytest.mark.parametrize("name", [name if name in SAMPLE else more(name) for name in RULES])
def test_a_rule_does_not_know_how_its_weight_is_kept(
    name: str, keeping: Keeping, half: str, lazy: bool | None
) -> None:
    """What the plain rule makes of the same number in float32, rounded to what is stored."""
    rule, dtype, generator = RULES[name], HALVES[half], np.random.default_rng(1)
    kept, x = rule.kept(keeping), generator.standard_normal((N, D)).astype(F32)
    weight, beside = x.astype(dtype), x.copy()
    if keeping is KAHAN:
        beside = (x - weight.astype(F32)).astype(dtype)
        x = weight.astype(F32) + beside.astype(F32)
    plain, own = begin(rule, np.random.default_rng(2)), begin(rule, np.random.default_rng(2))
    for k in range(3):
        indices, shape = None, (N, D)
        if lazy is not None:
            indices = generator.integers(0, N, 30)
            shape = (30, D)
        g = generator.standard_normal(shape).astype(dtype if k % 2 else F32)
        before = weight.copy(), beside.copy()
        step(rule, [x, *plain], g, indices, lazy=bool(lazy))
        step(kept, [weight, *own, beside], g, indices, lazy=bool(lazy))
        written = np.ones(N, bool)
        if lazy:
            written[:] = False
            written[indices] = True
        rounded = x.astype(dtype)
        expected = rounded, x
        if keeping is KAHAN:
            expected = rounded, (x - rounded.astype(F32)).astype(dtype)
        for found, new, old in zip((weight, beside), expected, before, strict=True):
            assert_same_bits(found[written], new[written])
            assert_same_bits(found[~written], old[~written])
        if keeping is KAHAN:
            x = weight.astype(F32) + beside.astype(F32)
        for found, expected in zip(own, plain, strict=True):
            assert_same_bits(found, expected)


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
