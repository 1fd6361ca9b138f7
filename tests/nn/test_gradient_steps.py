"""Decay, centralization and scaling of gradients, in a step or apart; custom optimizers."""

import copy
from typing import Any

import numpy as np
import pytest
import reference
from adam_family import Descent, central, gradients_of, ones, parameters, rows
from fusestep import nn
from helpers import assert_same_bits, refused, unchanged

# Gradients as separate steps


def test_decay_weight() -> None:
    a, b, c = parameters("a", "b.beta", "c")
    opt = nn.Optimizer(0.1, [a, b, c], weight_decay=0.5, loss_scale=4.0)
    given = [ones(4, 3), ones(4, 3), rows([2, 0, 2])]
    with unchanged(given, opt):
        dense, exempt, sparse = opt.decay_weight(given)
    np.testing.assert_array_equal(dense, 1 + 2 * a.data)
    assert exempt is given[1]
    # Once for each row that occurs, not once for each occurrence.
    assert sparse.indices.tolist() == [0, 2]
    np.testing.assert_allclose(sparse.values, [1 + 2 * c.data[0], 2 + 2 * c.data[2]], rtol=1e-6)
    assert opt.decay_weight([None, None, None]) == (None, None, None)


def test_scale_grad() -> None:
    opt = nn.Optimizer(0.1, parameters("a", "b"), loss_scale=3.0)
    given = [ones(4, 3), rows([2, 0, 2])]
    with unchanged(given):
        dense, sparse = opt.scale_grad(given)
    np.testing.assert_array_equal(dense, np.float32(1) / np.float32(3))
    np.testing.assert_array_equal(sparse.values, np.float32(1) / np.float32(3))
    assert sparse.indices.tolist() == [2, 0, 2]
    assert nn.Optimizer(0.1, parameters("a")).scale_grad(given[:1])[0] is given[0]
    assert opt.scale_grad([None, None]) == (None, None)


@pytest.mark.parametrize("method", ["decay_weight", "scale_grad", "gradients_centralization"])
def test_separate_steps_check_their_gradients(method: str) -> None:
    opt = nn.Optimizer(
        0.1, [{"params": parameters("a", "b"), "grad_centralization": True}], 0.5, 2.0
    )
    act = getattr(opt, method)
    for given, error, text in (
        ([ones(4, 3)], ValueError, "gradients has a wrong length: expected 2, one for each"),
        (ones(2, 4, 3), TypeError, "gradients has a wrong type: expected a tuple or list"),
        ([ones(4, 3), "x"], TypeError, "no array"),
    ):
        with refused(error, text, opt):
            act(given)


def test_decay_weight_does_not_broadcast() -> None:
    opt = nn.Optimizer(0.1, parameters("a"), 0.5)
    with refused(ValueError, "has a wrong shape", opt):
        opt.decay_weight([ones(3)])


@pytest.mark.parametrize("method", ["decay_weight", "scale_grad", "gradients_centralization"])
def test_separate_steps_take_lists_of_row_tensors(method: str) -> None:
    opt = nn.Optimizer(0.1, [{"params": parameters("a"), "grad_centralization": True}], 0.5, 2.0)
    parts = [rows([2]), rows([0, 2])]
    whole = rows([2, 0, 2])
    (listed,), (single,) = (getattr(opt, method)([given]) for given in (parts, whole))
    np.testing.assert_allclose(listed.to_dense(), single.to_dense(), rtol=1e-6)


def test_broadcast_params_with_one_process() -> None:
    assert nn.Optimizer(0.1, [ones(2)]).broadcast_params((True,)) is True


# Gradient centralization


@pytest.mark.parametrize("how", ["lazy", "dense_equivalent"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("tail", [(3,), (2, 4), ()])
def test_centralization_of_row_sparse_gradients(
    tail: tuple[int, ...], decay: float, how: str
) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((5, *tail))
    values, indices = rng.standard_normal((4, *tail)), np.array([3, 1, 3, 0])
    g = reference.densify(indices, values, w.shape)
    present = np.isin(np.arange(5), indices)
    g += decay * w * (present.reshape(-1, *[1] * len(tail)) if how == "lazy" else 1)
    g = central(g)
    p = nn.Parameter(w.copy(), "w")
    opt = nn.Adam(
        [{"params": [p], "grad_centralization": True}],
        0.1, 0.8, 0.9, 1e-3, weight_decay=decay, loss_scale=4.0, sparse_update=how)  # fmt: skip
    opt([nn.RowTensor(indices, 4 * values, w.shape)])
    hp = reference.adam_scalars(0.1, 0.8, 0.9, 1e-3, 0.8, 0.9, real=np.float64)
    expected, m, _ = reference.adam(w, g, 0 * w, 0 * w, hp)
    select = present if how == "lazy" else np.full(5, True)
    np.testing.assert_allclose(p.data[select], expected[select], rtol=1e-9)
    np.testing.assert_allclose(opt.moment1[0][select], m[select], rtol=1e-10, atol=1e-15)
    assert_same_bits(p.data[~select], w[~select])


def test_centralized_16_bit_gradients_do_not_overflow() -> None:
    """weight_decay * loss_scale * w is beyond float16, but not beyond the arithmetic."""
    plain, centralized = (np.array([[8, 24], [16, 32]], np.float16) for _ in range(2))
    options = {"weight_decay": 0.125, "loss_scale": 2.0**16, "eps": 1e-3}
    gradient = [np.array([[1, 2], [3, 4]], np.float16)]
    nn.Adam([{"params": [plain]}], 0.5, **options)(gradient)
    groups = [{"params": [centralized], "grad_centralization": True}]
    nn.Adam(groups, 0.5, **options)(gradient)
    assert np.isfinite(plain).all()
    assert np.isfinite(centralized).all()
    # The decayed gradient is about w / 8: above and below its mean in each row.
    assert (np.sign(centralized - [[8, 24], [16, 32]]) == [[1, -1], [1, -1]]).all()


# Custom optimizers


def test_custom_optimizer() -> None:
    """decay, centralization, scaling, group rates, counting."""
    a, b = parameters("a", "b", dtype=np.float64)
    before = a.data.copy(), b.data.copy()
    opt = Descent(
        lambda step: 0.5**step,
        [
            {"params": [a], "grad_centralization": True, "lr": 0.25},
            {"params": [b], "weight_decay": 0.0}],
        weight_decay=0.5,
        loss_scale=2.0)  # fmt: skip
    g, h = gradients_of(opt, 1, np.float64)
    assert opt([2 * g, 2 * h]) is True
    np.testing.assert_allclose(a.data, before[0] - 0.25 * central(g + 0.5 * before[0]), rtol=1e-12)
    np.testing.assert_allclose(b.data, before[1] - h, rtol=1e-12)
    assert opt.global_step.tolist() == [1]
    assert opt.get_lr() == (0.25, 0.5)


def test_custom_optimizer_that_raises_is_not_counted() -> None:
    class Broken(nn.Optimizer):
        def construct(self, gradients: tuple[Any, ...]) -> Any:
            raise ArithmeticError(f"broken by {len(gradients)}")

    opt = Broken(0.1, [ones(2)])
    with refused(ArithmeticError, "broken", opt):
        opt([ones(2)])


def test_base_class_has_no_step() -> None:
    opt = nn.Optimizer(0.1, [ones(2)])
    with refused(NotImplementedError, "define construct", opt):
        opt([ones(2)])


def test_custom_optimizer_state() -> None:
    opt = Descent([0.5, 0.25], parameters("a"))
    opt([ones(4, 3)])
    state = opt.state_dict()
    assert set(state) == {"global_step", "learning_rate"}
    other = Descent([0.0, 0.0], parameters("a"))
    other.load_state_dict(state)
    assert other.get_lr() == 0.25
    for again in (copy.deepcopy(opt), copy.copy(opt)):
        assert again.get_lr() == 0.25
