"""Row-wise Adagrad and Adam on PyTorch's tensors, against the float64 references."""

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference
import reference_row_wise as row_wise
from fusestep.nn import torch as fused

N, D, B = 40, 13, 60
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("RowWiseAdagrad", {}),
    "adagrad coupled": ("RowWiseAdagrad", {"weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adagrad decoupled": (
        "RowWiseAdagrad", {"weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 0.1}),
    "adagrad up": ("RowWiseAdagrad", {"maximize": True}),
    "adam": ("RowWiseAdam", {}),
    "adam decaying": ("RowWiseAdam", {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 0.01}),
}  # fmt: skip


def exact_step(name: str, options: dict[str, Any], lr: float, t: int, w: Any, g: Any) -> Any:
    """The step of update t = 1, 2, ... of a reference, of which only the states are missing."""
    known = {"eps": 1e-10 if name == "RowWiseAdagrad" else 1e-8, "betas": (0.9, 0.999), **options}
    decay, eps = known.get("weight_decay", 0.0), known["eps"]
    g = -g if known.get("maximize") else g
    if name == "RowWiseAdam":
        powers = [beta**t for beta in known["betas"]]
        hp = reference.adam_scalars(
            lr, *known["betas"], eps * np.sqrt(1 - powers[1]), *powers, decay, np.float64
        )
        return partial(row_wise.adam, w, g, hp=hp)
    if known.get("decoupled_weight_decay"):
        return partial(row_wise.adagrad_decoupled, w, g, lr=lr, eps=eps, decay=decay)
    return partial(row_wise.adagrad, w, g + decay * w, lr=lr, eps=eps)


@pytest.mark.parametrize("label", OPTIONS)
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
    exact = []  # the parameter and its states
    for p, shape in zip(params, shapes, strict=True):
        w = p.detach().double().numpy().reshape(shape if len(shape) > 1 else (1, -1))
        of_rows = np.full(len(w), options.get("initial_accumulator_value", 0.0))
        exact.append([w.copy(), *[np.zeros_like(w)] * (name == "RowWiseAdam"), of_rows])

    def take(i: int, g: np.ndarray, rows: Any, lr: float, t: int) -> None:
        w, *states = (array[rows] for array in exact[i])
        for array, found in zip(
            exact[i], exact_step(name, options, lr, t, w, g[rows])(*states), strict=True
        ):
            array[rows] = found

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
        take(0, total, np.unique(ids) if sparse is None else np.arange(N), lr, k + 1)
        for i, p in enumerate(params[1:], 1):
            g = p.grad.double().numpy().reshape(exact[i][0].shape)
            take(i, g, np.arange(len(g)), lr, k + 1)
    tolerance = 1e-11 if dtype is torch.float64 else 5e-6
    role = "sum" if name == "RowWiseAdagrad" else "exp_avg_sq"
    for (w, *_, of_rows), p in zip(exact, params, strict=True):
        found = p.detach().double().numpy().reshape(w.shape)
        np.testing.assert_allclose(found, w, rtol=tolerance, atol=tolerance)
        state = optimizer.state[p][role]
        assert state.shape == (len(w),) and state.dtype == dtype
        np.testing.assert_allclose(state.double().numpy(), of_rows, rtol=tolerance)


def test_what_has_no_rows_and_states_of_other_shapes() -> None:
    for shape in ((), (3, 0), (0,)):
        for cls in (fused.RowWiseAdagrad, fused.RowWiseAdam):
            with pytest.raises(ValueError, match="has no rows: expected at least 1 dimension"):
                cls([torch.nn.Parameter(torch.ones(shape))])
    with pytest.raises(ValueError, match=r"RowWiseAdagrad: parameter 0 .* is uninitialized"):
        fused.RowWiseAdagrad(torch.nn.LazyLinear(3).parameters())
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
