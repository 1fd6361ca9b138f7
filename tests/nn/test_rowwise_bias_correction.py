"""Bias correction by the number of updates of each row, in nn and nn.torch."""

from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import assert_same_bits

N, D, LR, BETA1, BETA2, EPS = 12, 9, 0.05, 0.9, 0.99, 1e-3


class Reference:
    """Rows in float64, each with a count of its own."""

    def __init__(self, *, row_wise: bool, inside: bool, decay: float = 0.0) -> None:
        self.row_wise, self.inside, self.decay = row_wise, inside, decay
        self.w = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32).astype(float)
        self.m, self.v = np.zeros((N, D)), np.zeros((N, 1 if row_wise else D))
        self.t = np.zeros(N, int)

    def step(self, ids: np.ndarray, values: np.ndarray) -> None:
        """A row-sparse gradient: epsilon stands inside of the second correction, or outside."""
        for row in np.unique(ids):
            g = values[ids == row].astype(float).sum(0)
            self.t[row] += 1
            first, second = 1.0 - BETA1 ** self.t[row], 1.0 - BETA2 ** self.t[row]
            square = np.mean(g * g) if self.row_wise else g * g
            self.m[row] = BETA1 * self.m[row] + (1.0 - BETA1) * g
            self.v[row] = BETA2 * self.v[row] + (1.0 - BETA2) * square
            root = np.sqrt(self.v[row] / second)
            divisor = root + (EPS if self.inside else EPS / np.sqrt(second))
            self.w[row] -= LR * self.m[row] / first / divisor + LR * self.decay * self.w[row]


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Some rows occur always, some late, some never."""
    rng = np.random.default_rng(7)
    found = []
    for step in range(25):
        ids = rng.integers(0, 5 + step // 5, 8)
        found.append((ids, rng.standard_normal((8, D)).astype(np.float32)))
    return found


IN_NN: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "LazyAdam": (nn.LazyAdam, {}, {"row_wise": False, "inside": False}),
    "LazyAdam usual": (nn.LazyAdam, {"eps_hat": False}, {"row_wise": False, "inside": True}),
    "RowWiseAdam": (
        nn.RowWiseAdam, {"weight_decay": 0.1}, {"row_wise": True, "inside": False, "decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_NN)
def test_nn(name: str) -> None:
    """Weights and counts of rows that begin at different times."""
    cls, options, of_reference = IN_NN[name]
    reference = Reference(**of_reference)
    w = reference.w.astype(np.float32)
    options |= {"beta1": BETA1, "beta2": BETA2, "eps": EPS}
    opt = cls([w], learning_rate=LR, rowwise_bias_correction=True, **options)
    plain = cls([w.copy()], learning_rate=LR, **options)
    for ids, values in batches():
        reference.step(ids, values)
        gradient = nn.RowTensor(ids, values, (N, D))
        opt([gradient])
        plain([gradient])
    np.testing.assert_allclose(w, reference.w, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(opt.state_dict()["updates.parameter_0"], reference.t)
    assert np.abs(plain.parameters[0].data - w).max() > 1e-2


def test_nesterov_and_resume() -> None:
    """A run that was resumed has the bits of one that was not; nesterov is another rule."""
    ends = {}
    for nesterov in (False, True):

        def make(w: Any, nesterov: bool = nesterov) -> Any:
            return nn.LazyAdam(
                [w], LR, use_nesterov=nesterov, rowwise_bias_correction=True, eps=EPS
            )

        opt = make(np.ones((N, D), np.float32))
        for k, (ids, values) in enumerate(batches()):
            if k == 10:
                resumed = make(opt.parameters[0].data.copy())
                resumed.load_state_dict(opt.state_dict())
            for own in (opt, resumed) if k >= 10 else (opt,):
                own([nn.RowTensor(ids, values, (N, D))])
        assert_same_bits(opt.parameters[0].data, resumed.parameters[0].data)
        ends[nesterov] = opt.parameters[0].data
    assert (ends[False] != ends[True]).any()


def test_dense_gradients_count_every_row() -> None:
    """With dense gradients it is the correction by the count of the parameter."""
    ws = [np.ones((N, D), np.float32) for _ in range(2)]
    opts = [
        nn.LazyAdam([w], LR, rowwise_bias_correction=by_row)
        for w, by_row in zip(ws, (True, False), strict=True)
    ]
    for _, values in batches():
        for opt in opts:
            opt([np.resize(values, (N, D))])
    np.testing.assert_allclose(*ws, rtol=1e-5, atol=1e-6)


def test_what_it_excludes() -> None:
    """Rows that sleep have no idle form with it; a number has no rows."""
    w = np.ones((N, D), np.float32)
    with pytest.raises(ValueError, match="'catch_up' is impossible"):
        nn.LazyAdam([w], rowwise_bias_correction=True, sparse_update="catch_up")
    with pytest.raises(ValueError, match="has no rows"):
        nn.LazyAdam([np.array(1.0, np.float32)], rowwise_bias_correction=True)
    with pytest.raises(TypeError, match="rowwise_bias_correction has a wrong type"):
        nn.LazyAdam([w], rowwise_bias_correction=1)


IN_TORCH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LazyAdam": ({}, {"row_wise": False, "inside": True}),
    "AdamW": (
        {"weight_decay": 0.1, "sparse": "touched"},
        {"row_wise": False, "inside": True, "decay": 0.1}),
    "SparseAdam": ({}, {"row_wise": False, "inside": False}),
    "RowWiseAdam": ({"weight_decay": 0.1}, {"row_wise": True, "inside": True, "decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_TORCH)
def test_pytorch(name: str) -> None:
    """The same in nn.torch; AdamW decays before the step."""
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    options, of_reference = IN_TORCH[name]
    reference = Reference(**of_reference)
    w = torch.nn.Parameter(torch.tensor(reference.w, dtype=torch.float32))
    options |= {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS}
    optimizer = getattr(fused, name)([w], rowwise_bias_correction=True, **options)
    for ids, values in batches():
        reference.step(ids, values)
        w.grad = torch.sparse_coo_tensor(
            torch.from_numpy(ids)[None], torch.from_numpy(values), (N, D), check_invariants=True
        )
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), reference.w, rtol=2e-5, atol=2e-6)
    assert optimizer.state_dict()["state"][0]["updates"].tolist() == reference.t.tolist()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    group = [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "amsgrad": True}]
    with pytest.raises(ValueError, match="excludes amsgrad"):
        fused.AdamW(group, rowwise_bias_correction=True)
