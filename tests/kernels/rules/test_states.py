"""Rules of more states than any of the package: every storage type, and sums; see test_bits.py."""

from textwrap import indent
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fusestep.kernels import element
from fusestep.kernels.cpu.blocks import CPU
from fusestep.kernels.cpu.threads.parallel import commit
from fusestep.kernels.rules.gradient import COUPLED_DECAY
from fusestep.kernels.rules.sgd import MOMENTUM
from fusestep.kernels.storage import STORAGES
from fusestep.ops.runtime.step import DenseUpdate, Variables
from many_states import FIVE, FOUR, SCALARS, expected, expected_sizes

Array = Any
F16, F32, F64, BF16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16
UNIT = {np.dtype(kind): 2.0**-bits for kind, bits in ((F16, 11), (BF16, 8), (F32, 24), (F64, 53))}
KINDS = [
    pytest.param(F32, F32, (F32,) * 5, id="f32"), pytest.param(F64, F64, (F64,) * 5, id="f64"),
    pytest.param(BF16, BF16, (BF16,) * 5, id="bf16"),
    pytest.param(F32, F16, (F16, F32, F16, BF16, F32), id="mixed"),
]  # fmt: skip
DECAY = 0.25


def new(rule: Any, shape: Any, kinds: Any, seed: int) -> tuple[Array, ...]:
    """A parameter and the states of a rule, all different."""
    rng = np.random.default_rng(seed)
    count = 1 + len(rule.states)
    return tuple(rng.uniform(0.5, 2.0, shape).astype(kind) for kind in kinds[:count])


def scalars_of(real: Any, *more: float) -> Array:
    return np.array([(*SCALARS, *more), (0.02, 0.8, 0.2, 1e-2, *more)], real)


def real_of(w: Any) -> Any:
    return F64 if w is F64 else F32


def compare(found: tuple[Array, ...], before: tuple[Array, ...], g: Array, hp: Array) -> None:
    """With the step in float64, rounded as the arithmetic and each array are."""
    w, *states = (a.astype(F64) for a in before)
    wanted = expected(w, np.asarray(g, F64), states, hp.astype(F64))
    arithmetic = UNIT[hp.dtype]
    for array, exact in zip(found, wanted, strict=True):
        # Terms are below 8 and a quotient of them below 32; each is rounded once or twice.
        near = UNIT[array.dtype] * np.abs(exact) + 64 * arithmetic * np.maximum(1, np.abs(exact))
        assert np.all(np.abs(array.astype(F64) - exact) <= near)


@pytest.mark.parametrize("rule", [FOUR, FIVE], ids=["four", "five"])
@pytest.mark.parametrize(("w", "g", "s"), KINDS)
def test_dense(rule: Any, w: Any, g: Any, s: Any) -> None:
    """Tensors of many sizes in one call, on several threads and with scalars of their own."""
    shapes = [(1,), (7,), (), (0, 3), (1_003,), (250, 300)]
    tensors = [new(rule, shape, (w, *s), k) for k, shape in enumerate(shapes)]
    before = [tuple(a.copy() for a in arrays) for arrays in tensors]
    rng = np.random.default_rng(9)
    gradients = [rng.uniform(-1.0, 1.0, shape).astype(g) for shape in shapes]
    addresses = np.array([a.ctypes.data for a in gradients])
    hp, hp_of = scalars_of(real_of(w)), np.arange(len(shapes)) % 2
    given = Variables.of(tensors), addresses, STORAGES[np.dtype(g)], hp, hp_of
    commit([DenseUpdate(rule, (), *given).prepared()])
    for found, old, gradient, row in zip(tensors, before, gradients, hp_of, strict=True):
        compare(found, old, gradient, hp[row])


@pytest.mark.parametrize(("w", "g", "s"), KINDS)
def test_five_sums_of_four_states(w: Any, g: Any, s: Any) -> None:
    shapes = [(3,), (70_001,), (0,)]
    tensors = [new(FOUR, shape, (w, *s), k) for k, shape in enumerate(shapes)]
    gradients = [np.linspace(-1.0, 1.0, n).astype(g) for (n,) in shapes]
    addresses = np.array([a.ctypes.data for a in gradients])
    hp = scalars_of(real_of(w))
    arguments = (Variables.of(tensors), addresses, STORAGES[np.dtype(g)], hp, np.array([0, 1, 0]))
    found = DenseUpdate(FOUR, (), *arguments).sums()
    assert found.shape == (3, 5)
    for t, row in enumerate((0, 1, 0)):
        x, *states = (a.astype(F64) for a in tensors[t])
        wanted = expected_sizes(x, gradients[t].astype(F64), states, hp[row].astype(F64))
        np.testing.assert_allclose(found[t], wanted, rtol=1e-6)


def test_a_generated_function_can_be_read(monkeypatch, capsys) -> None:
    """`FUSESTEP_SHOW=1` prints it as the head of its module explains it."""
    f32 = STORAGES[np.dtype(F32)]
    kernel = element.kernel(MOMENTUM, (COUPLED_DECAY,), f32, f32, (f32,))
    element.element_of(kernel, MOMENTUM.update, CPU)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FUSESTEP_SHOW", "1")
    element.element_of(kernel, MOMENTUM.update, CPU)
    shown = capsys.readouterr().err
    assert element.__doc__ is not None and indent(shown.strip(), "    ") in element.__doc__
