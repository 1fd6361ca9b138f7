"""Row-wise Adagrad and Adam on PyTorch's tensors, against float64 steps written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

import recorded  # noqa: E402

N, D, B = 40, 13, 60
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("RowWiseAdagrad", {}),
    "adagrad coupled": ("RowWiseAdagrad", {"weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adagrad decoupled": (
        "RowWiseAdagrad", {"weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 0.1},
    ),
    "adagrad up": ("RowWiseAdagrad", {"maximize": True}),
    "adam": ("RowWiseAdam", {}),
    "adam decaying": ("RowWiseAdam", {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 0.01}),
}  # fmt: skip
EACH = pytest.mark.parametrize("label", OPTIONS)


class Exact:
    """One parameter ``[rows, width]`` with its states, in float64."""

    def __init__(self, name: str, w: np.ndarray, options: dict[str, Any]) -> None:
        self.w, self.name, self.t = w.astype(np.float64), name, 0
        self.o = {
            "weight_decay": 0.0, "maximize": False, "decoupled_weight_decay": False,
            "eps": 1e-10 if "grad" in name else 1e-8, "betas": (0.9, 0.999), **options,
        }  # fmt: skip
        self.m, self.s = np.zeros_like(self.w), np.zeros(len(w))
        self.s += options.get("initial_accumulator_value", 0.0)

    def step(self, g: np.ndarray, rows: Any, lr: float) -> None:
        o, w = self.o, self.w[rows]
        self.t += 1
        g = (-g if o["maximize"] else g)[rows]
        if self.name == "RowWiseAdagrad":
            if not o["decoupled_weight_decay"]:
                g = g + o["weight_decay"] * w
            self.s[rows] += (g**2).mean(1)
            step = g / (np.sqrt(self.s[rows]) + o["eps"])[:, None]
            decay = o["weight_decay"] if o["decoupled_weight_decay"] else 0.0
        else:
            beta1, beta2 = o["betas"]
            self.m[rows] = beta1 * self.m[rows] + (1 - beta1) * g
            self.s[rows] = beta2 * self.s[rows] + (1 - beta2) * (g**2).mean(1)
            root = np.sqrt(self.s[rows] / (1 - beta2**self.t)) + o["eps"]
            step, decay = self.m[rows] / (1 - beta1**self.t) / root[:, None], o["weight_decay"]
        self.w[rows] = w - lr * step - lr * decay * w


@EACH
@pytest.mark.parametrize("sparse", [None, "all", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_twenty_steps(label: str, sparse: str | None, dtype: Any) -> None:
    """A table beside a matrix and a vector, which is one row; a rate that changes."""
    name, options = OPTIONS[label]
    rng = np.random.default_rng(3)
    shapes = [(N, D), (7, 9), (5,)]
    values = [rng.standard_normal(shape) for shape in shapes]
    params = [torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for v in values]
    own = {} if sparse == "dense" else {"sparse": sparse}
    optimizer = getattr(fused, name)(params, lr=0.05, **options, **own)
    exact = [Exact(name, p.detach().numpy().reshape(s if len(s) > 1 else (1, -1)), options)
             for p, s in zip(params, shapes, strict=True)]  # fmt: skip
    for k in range(20):
        lr = optimizer.param_groups[0]["lr"] = 0.05 / (1 + k)
        ids = rng.zipf(1.3, B) % N
        of_rows = torch.tensor(rng.standard_normal((B, D)), dtype=dtype)
        total = np.zeros((N, D))
        np.add.at(total, ids, of_rows.double().numpy())
        if sparse == "dense":
            params[0].grad = torch.tensor(total, dtype=dtype)
        else:
            where = torch.from_numpy(ids)[None]
            params[0].grad = torch.sparse_coo_tensor(where, of_rows, (N, D), check_invariants=False)
        for p in params[1:]:
            p.grad = torch.tensor(rng.standard_normal(p.shape), dtype=dtype)
        optimizer.step()
        exact[0].step(total, np.unique(ids) if sparse is None else np.arange(N), lr)
        for one, p in zip(exact[1:], params[1:], strict=True):
            one.step(p.grad.double().numpy().reshape(one.w.shape), np.arange(len(one.w)), lr)
    tolerance = 1e-11 if dtype is torch.float64 else 5e-6
    role = "sum" if name == "RowWiseAdagrad" else "exp_avg_sq"
    for one, p in zip(exact, params, strict=True):
        found = p.detach().double().numpy().reshape(one.w.shape)
        np.testing.assert_allclose(found, one.w, rtol=tolerance, atol=tolerance)
        state = optimizer.state[p][role]
        assert state.shape == (len(one.w),) and state.dtype == dtype
        np.testing.assert_allclose(state.double().numpy(), one.s, rtol=tolerance)


def test_steps_are_those_of_fbgemm() -> None:
    run = np.load(recorded.DATA / "fbgemm" / "rowwise_adagrad.npz")
    for mode, options in (("none", {}), ("l2", {"weight_decay": 0.1})):
        table = torch.nn.Parameter(torch.from_numpy(run["w0"].copy()))
        optimizer = fused.RowWiseAdagrad([table], lr=0.05, eps=1e-8, **options)
        for k, (ids, gradient) in enumerate(zip(run["ids"], run["grads"], strict=True)):
            rows = torch.from_numpy(ids.astype(np.int64))[None]
            table.grad = torch.sparse_coo_tensor(
                rows, torch.from_numpy(gradient), table.shape, check_invariants=False
            )
            optimizer.step()
            found = table.detach().numpy()
            np.testing.assert_allclose(found, run[f"{mode}/w"][k], rtol=3e-6, atol=1e-6)


@EACH
def test_states_go_on(label: str) -> None:
    """Saved and loaded in the middle of a run: the same bits as without."""
    name, options = OPTIONS[label]

    def new() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
        return model, getattr(fused, name)(model.parameters(), lr=0.1, **options)

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for k in numbers:
            optimizer.zero_grad()
            model(torch.tensor([k, 3, 3])).square().sum().backward()
            optimizer.step()

    whole, half = new(), new()
    steps(*whole, range(6))
    steps(*half, range(3))
    again = new()
    again[0].load_state_dict(half[0].state_dict())
    again[1].load_state_dict(half[1].state_dict())
    steps(*again, range(3, 6))
    for one, other in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_has_no_rows_and_states_of_other_shapes() -> None:
    for shape in ((), (3, 0), (0,)):
        for cls in (fused.RowWiseAdagrad, fused.RowWiseAdam):
            with pytest.raises(ValueError, match="has no rows: expected at least 1 dimension"):
                cls([torch.nn.Parameter(torch.ones(shape))])
    table = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = fused.RowWiseAdam([table])
    with pytest.raises(ValueError, match="has no rows"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(()))]})
    assert len(optimizer.param_groups) == 1
    table.grad = torch.ones(4, 3)
    optimizer.step()
    state, before = optimizer.state_dict(), table.detach().clone()
    for role, wrong in (("exp_avg_sq", (4, 3)), ("exp_avg", (4,))):
        other = {**state, "state": {0: {**state["state"][0], role: torch.zeros(wrong)}}}
        with pytest.raises(ValueError, match=f"state '{role}' of parameter 0 has a wrong shape"):
            optimizer.load_state_dict(other)
    optimizer.state[table]["exp_avg_sq"] = torch.zeros(4, 3)
    with pytest.raises(RuntimeError, match="'exp_avg_sq' of parameter 0 has a wrong shape"):
        optimizer.step()
    assert torch.equal(table.detach(), before)
    vector = torch.nn.Parameter(torch.ones(3))
    vector.grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=False)
    with pytest.raises(RuntimeError, match="has other rows: expected 1 sparse dimension"):
        fused.RowWiseAdagrad([vector]).step()
    assert (vector == 1).all()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_epsilon_that_divides_by_nothing(value: float) -> None:
    for cls in (fused.RowWiseAdagrad, fused.RowWiseAdam):
        with pytest.raises(ValueError, match="Invalid epsilon value"):
            cls([torch.nn.Parameter(torch.ones(2))], eps=value)


def test_rows_that_do_not_lie_one_after_the_other() -> None:
    """Of a transposed parameter a row is still what its first dimension numbers."""
    w = torch.nn.Parameter(torch.ones(3, 4).t())
    optimizer = fused.RowWiseAdagrad([w], lr=0.1)
    for _ in range(2):
        w.grad = torch.arange(12.0).reshape(4, 3)
        optimizer.step()
    mean = torch.arange(12.0).reshape(4, 3).square().mean(1)
    torch.testing.assert_close(optimizer.state[w]["sum"], 2 * mean)
