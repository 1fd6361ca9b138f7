"""Sparse gradients, with duplicates: every row ("all"), or the rows that occur ("touched")."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

from test_numbers import BOUND, OPTIONS, Comparison, combinations, gradient  # noqa: E402

DENSE_ONLY = {"Adafactor"}
FIXED = {"maximize": False, "betas": (0.9, 0.999), "dampening": 0, "etas": (0.5, 1.2), "rho": 0.9}
# What a sign or other betas do is seen with dense gradients already.
CASES = [
    (name, options)
    for name, options in combinations()
    if name not in {*DENSE_ONLY, "SparseAdam"}
    and all(options.get(key, value) == value for key, value in FIXED.items())
]
STEPS = 8


def tables() -> list[Any]:
    torch.manual_seed(4)
    made = torch.randn(9, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    return [torch.nn.Parameter(table) for table in (*made, torch.randn(5, 2, 2).double())]


def copies(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """The tensors of a table that have its rows."""
    state = {n: t for n, t in optimizer.state[parameter].items() if t.shape == parameter.shape}
    return {n: t.detach().clone() for n, t in {"": parameter, **state}.items()}


def step_touched(optimizer: Any, parameter: Any, rows: Any) -> None:
    """PyTorch's dense step, and then every row as it was that does not occur."""
    others = torch.ones(len(parameter), dtype=torch.bool)
    others[rows.coalesce().indices()[0]] = False
    before = copies(optimizer, parameter)
    optimizer.step()
    for name, tensor in {"": parameter, **optimizer.state[parameter]}.items():
        if tensor.shape == parameter.shape and name in before:
            tensor.detach()[others] = before[name][others]
        elif tensor.shape == parameter.shape:  # a state that is new
            initial = {"step_size": optimizer.param_groups[0]["lr"]}.get(name, 0.0)
            tensor[others] = initial


@pytest.mark.parametrize("sparse", ["touched", "all"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_sparse_step_is_the_dense_one_of_its_rows(
    name: str, options: dict[str, Any], sparse: str
) -> None:
    mine, other = tables(), tables()
    ours = getattr(fused, name)(mine, lr=0.1, sparse=sparse, **options)
    # One for each table: what occurs differs.
    theirs = [getattr(torch.optim, name)([q], lr=0.1, **options) for q in other]
    generator = torch.Generator().manual_seed(6)
    comparisons = [
        Comparison(ours, their, [pair])
        for their, pair in zip(theirs, zip(mine, other, strict=True), strict=True)
    ]
    for step in range(STEPS):
        for p, q, their in zip(mine, other, theirs, strict=True):
            p.grad = gradient(p, generator, rows=step != 5)  # a dense one in between
            q.grad = p.grad.to_dense() if step != 5 else p.grad.clone()
            if sparse == "touched" and step != 5:
                step_touched(their, q, p.grad)
            else:
                their.step()
        ours.step()
        for comparison in comparisons:
            comparison.look()
    for comparison in comparisons:
        comparison.check(BOUND)


@pytest.mark.parametrize("name", [*OPTIONS, "LazyAdam", "FTRL", "Lion", "Adan", "Lamb", "LARS"])
def test_without_being_told(name: str) -> None:
    """Where both mean the same the rows that occur move; elsewhere nothing changes."""
    (table, *_) = tables()
    optimizer = getattr(fused, name)([table], lr=0.1)
    before = table.detach().clone()
    table.grad = gradient(table, torch.Generator(), rows=True)
    if name in {"SGD", "Adagrad", "SparseAdam", "LazyAdam", "FTRL"}:
        optimizer.step()
        changed = (table != before).any(dim=1).nonzero().flatten().tolist()
        assert changed == table.grad.coalesce().indices()[0].tolist()
        return
    with pytest.raises(RuntimeError, match="does not support sparse gradients") as error:
        optimizer.step()
    dense_only = {"Adafactor", "Lamb", "LARS"}
    assert ("'touched'" in str(error.value) and "'all'" in str(error.value)) != (name in dense_only)
    assert torch.equal(table, before)
    assert not any(optimizer.state[table].values() if table in optimizer.state else ())


def test_rows_of_one_dimension_and_of_several_in_turn() -> None:
    """What numbers the rows in one step is not taken over by the next."""
    expected = torch.randn(5, 4, 3)
    weight = torch.nn.Parameter(expected.clone())
    optimizer = fused.SGD([weight], lr=0.5)
    for step, n_sparse in enumerate((1, 1, 2, 2, 3, 1, 3)):
        dense = torch.zeros(5, 4, 3)
        dense[4, step % 4] = torch.arange(3.0)
        weight.grad = dense.to_sparse(n_sparse)
        optimizer.step()
        expected -= 0.5 * dense
        assert torch.equal(weight.detach(), expected)
