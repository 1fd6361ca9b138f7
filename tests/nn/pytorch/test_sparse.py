"""Sparse gradients, with duplicates: every row ("all"), or the rows that occur ("touched")."""

import inspect
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter
from fusestep.nn import torch as fused
from fusestep.nn.torch.engine import record
from fusestep.nn.torch.engine.step import Steps
from helpers import sampled
from test_numbers import BOUND, OPTIONS, Comparison, combinations, gradient
from torch_training import TABLES, assert_same_bits

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
            tensor[others] = {"step_size": optimizer.param_groups[0]["lr"]}.get(name, 0.0)


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


# The place of epsilon that makes one optimizer of two

NAMES = ["Adam", "AdamW", "LazyAdam"]
SMALL = 1e-8  # gradients beside which epsilon matters


def table_and_dense() -> tuple[Any, Any]:
    return torch.nn.Parameter(torch.zeros(6, 2)), torch.nn.Parameter(torch.zeros(3))


def give_gradients(table: Any, dense: Any, k: int) -> None:
    rows = torch.tensor([[k % 6, 3, 3]])
    values = SMALL * torch.arange(1.0, 7.0).reshape(3, 2)
    table.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=False)
    dense.grad = SMALL * torch.tensor([1.0, -2.0, k])


def of_two(name: str, package: Any) -> tuple[Any, Any]:
    table, dense = table_and_dense()
    rest = {"Adam": "Adam", "AdamW": "AdamW", "LazyAdam": "Adam"}[name]
    optimizers = package.SparseAdam([table], lr=0.1), getattr(package, rest)([dense], lr=0.1)
    for k in range(5):
        give_gradients(table, dense, k)
        for optimizer in optimizers:
            optimizer.step()
    return table, dense


def of_one(name: str, *, eps_hat: bool) -> tuple[Any, Any]:
    table, dense = table_and_dense()
    own = {"params": [table], "sparse": "touched", "weight_decay": 0.0, "eps_hat": eps_hat}
    optimizer = getattr(fused, name)([own, {"params": [dense]}], lr=0.1)
    for k in range(5):
        give_gradients(table, dense, k)
        optimizer.step()
    return table, dense


@pytest.mark.parametrize("name", NAMES)
def test_one_optimizer_has_the_numbers_of_two(name: str) -> None:
    found, of_torch = of_one(name, eps_hat=True), of_two(name, torch.optim)
    for mine, same, theirs in zip(found, of_two(name, fused), of_torch, strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=0.0)
    table, _ = of_one(name, eps_hat=False)
    assert (table / of_torch[0])[3].min() > 1.5  # what the other place of epsilon makes of it


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_option_like_others(name: str) -> None:
    cls = getattr(fused, name)
    table, _ = table_and_dense()
    assert inspect.signature(cls).parameters["eps_hat"].default is False
    optimizer = cls([table], eps_hat=True)
    assert optimizer.param_groups[0]["eps_hat"] is True
    with pytest.raises(TypeError, match=f"{name}: eps_hat has a wrong type: expected a bool"):
        cls([table], eps_hat=1)
    with pytest.raises(TypeError, match="eps_hat has a wrong type"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "eps_hat": None})
    other = torch.optim.Adam([table])
    optimizer.load_state_dict(other.state_dict())  # which does not have it
    assert optimizer.param_groups[0]["eps_hat"] is True
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="eps_hat"):
        fused.SparseAdam([table], eps_hat=True)


# Sparse and dense gradients in one step, of several dtypes: as each parameter by itself

SHAPES = ((11, 4), (7, 3), (2, 4), (2,), (40, 5))
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
# Each with float32 and, in turn, with one other type or all of them together.
ROWS = [name for name in TABLES if name != "SparseAdam"]
KINDS = [*DTYPES, "all"]
SOME = [(name, kind) for k, name in enumerate(ROWS) for kind in ("f32", KINDS[1 + k % 4])]


def mixed_gradient(parameter: Any, k: int, step: int) -> Any:
    """Of rows with duplicates, or dense; which one changes in the course of the steps."""
    generator = torch.Generator().manual_seed(100 * step + k)
    if k in (0, 1) or (k == 4 and step % 3 == 2):
        rows = torch.randint(0, len(parameter), (1, 9), generator=generator)
        values = torch.randn(9, *parameter.shape[1:], generator=generator).to(parameter.dtype)
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def mixed_parameters(dtypes: list[Any]) -> list[Any]:
    torch.manual_seed(1)
    shapes = SHAPES * len(dtypes)
    return [Parameter(torch.randn(s).to(dtypes[k // len(SHAPES)])) for k, s in enumerate(shapes)]


@pytest.mark.parametrize("sparse", ["touched", "all"])
@pytest.mark.parametrize(("name", "dtypes"), sampled(product(ROWS, KINDS), SOME))
def test_a_step_of_all_is_one_of_each(name: str, dtypes: str, sparse: str) -> None:
    kinds = [*DTYPES.values()] if dtypes == "all" else [DTYPES[dtypes]]
    mine, other = mixed_parameters(kinds), mixed_parameters(kinds)
    cls = getattr(fused, name)
    together = cls(mine, sparse=sparse, maximize=True)
    alone = [cls([q], sparse=sparse, maximize=True) for q in other]
    for step in range(6):
        for k, (p, q) in enumerate(zip(mine, other, strict=True)):
            p.grad = mixed_gradient(p, k % len(SHAPES), step)
            q.grad = p.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    assert_same_bits(mine, other)
    for p, q, optimizer in zip(mine, other, alone, strict=True):
        found, expected = together.state[p].values(), optimizer.state[q].values()
        assert_same_bits(map(torch.as_tensor, found), map(torch.as_tensor, expected))
        assert torch.isfinite(p).all()


def made_of(indices: Any, values: Any) -> Any:
    """A gradient of a table of 9 rows."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, (9, *values.shape[1:]))


def rows_of_every_kind(kind: str, generator: Any) -> Any:
    """A gradient of a float32 table ``[9, 3]``, or None."""
    n = int(torch.randint(2, 20, (), generator=generator))
    ids = torch.randint(0, 9, (1, n), generator=generator)
    values = torch.randn(n, 3, generator=generator)
    changed: dict[str, Any] = {
        "empty": lambda: made_of(ids[:, :0], values[:0]),
        "one": lambda: made_of(ids[:, :1], values.as_strided((1, 3), (7, 1))),
        "turned": lambda: made_of(ids, values.reshape(3, n).t()),
        "strided ids": lambda: made_of(ids.repeat(1, 2)[:, ::2], values),
        "inside": lambda: made_of(ids[:, 1:], values[1:]),
        "negative": lambda: made_of(ids, torch._neg_view(values)),
        "one row for all": lambda: made_of(ids, values[:1].expand(n, 3)),
        "coalesced": lambda: made_of(ids, values).coalesce(),
        "both dimensions": lambda: made_of(ids, values).to_dense().to_sparse(2),
        "half": lambda: made_of(ids, values.half()),
        "dense": lambda: made_of(ids, values).to_dense(), "none": lambda: None,
    }  # fmt: skip
    if kind == "inference":
        with torch.inference_mode():
            return made_of(ids.clone(), values.clone())
    return changed.get(kind, lambda: made_of(ids, values))()


KINDS = (
    *("plain",) * 8, "empty", "one", "turned", "strided ids", "inside", "negative",
    "one row for all", "coalesced", "both dimensions", "half", "dense", "none", "inference",
)  # fmt: skip


@pytest.mark.parametrize("name", ["LazyAdam", "SparseAdam", "Adagrad"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_change_their_kind_in_each_step(name: str, seed: int) -> None:
    """What is remembered of sparse gradients gives the bits of reading them anew."""
    generator = torch.Generator().manual_seed(seed)
    mine, other = ([Parameter(torch.ones(9, 3)) for _ in range(2)] for _ in range(2))
    for table in (*mine, *other):
        table.grad_dtype = None  # any
    more = {} if name == "SparseAdam" else {"sparse": "touched"}
    ours, theirs = (getattr(fused, name)(tables, lr=0.1, **more) for tables in (mine, other))
    left_out = {"dense"} if name == "SparseAdam" else set()
    left_out |= set() if hasattr(torch.Tensor, "grad_dtype") else {"half"}
    kinds = [k for k in KINDS if k not in left_out]
    for step in range(60):
        for k, (p, q) in enumerate(zip(mine, other, strict=True)):
            number = int(torch.randint(0, len(kinds), (), generator=generator))
            kind = kinds[number] if (step + k) % 3 else "plain"
            p.grad = q.grad = rows_of_every_kind(kind, generator)
        if step % 20 == 10:  # memory that moves
            mine[0].data = mine[0].data.clone()
        ours.step()
        theirs._steps = Steps()  # nothing is known of the steps before
        theirs.step()
        for p, q in zip(mine, other, strict=True):
            assert_same_bits(p.detach(), q.detach())


@pytest.mark.parametrize("part", ["values", "indices"])
def test_rows_in_memory_that_the_step_writes(part: str) -> None:
    """Also where a gradient is like those before, and where the memory has just moved there."""
    table, optimizer = Parameter(torch.ones(9, 4)), None
    ids, values = torch.tensor([[1, 2]]), torch.ones(2, 4)
    optimizer = fused.LazyAdam([table])
    for _ in range(3):
        table.grad = made_of(ids, values)
        optimizer.step()
    moments = optimizer.state[table]["exp_avg"]
    for written in (table.detach(), moments):
        if part == "values":
            table.grad = made_of(ids, written[3:5])
        else:
            table.grad = made_of(written[3:4].view(torch.int64), values)
        before = table.detach().clone()
        with pytest.raises(RuntimeError, match="shares memory"):
            optimizer.step()
        assert torch.equal(table, before)
    for step in range(4):
        if step == 2:
            table.data = values.new_ones(9, 4)
        table.grad = made_of(ids, values)
        optimizer.step()
    table.grad = made_of(ids, table.data[5:7])
    with pytest.raises(RuntimeError, match="shares memory"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(9, 3), (9,), (9, 2, 2), (9, 1)])
@pytest.mark.parametrize("name", ["LazyAdam", "SparseAdam"])
def test_plain_rows_are_read_without_python(name: str, shape: tuple[int, ...], monkeypatch) -> None:
    table, read = Parameter(torch.ones(shape)), []
    optimizer, make = getattr(fused, name)([table]), record.rows_of
    monkeypatch.setattr(record, "rows_of", lambda *given: read.append(1) or make(*given))
    for n in (2, 3, 0, 700):
        ids = torch.arange(n)[None] % 9
        table.grad = made_of(ids, torch.ones(n, *shape[1:]))
        optimizer.step()
    assert len(read) <= 2  # of the first step


def test_rows_in_the_memory_of_a_count_that_was_a_number() -> None:
    table = Parameter(torch.ones(9, 1))
    optimizer = fused.SparseAdam([table])
    for _ in range(3):
        table.grad = made_of(torch.tensor([[1]]), torch.ones(1, 1))
        optimizer.step()
    count = optimizer.state[table]["step"] = torch.tensor(3.0)
    table.grad = made_of(torch.tensor([[1]]), count.view(1, 1))
    with pytest.raises(RuntimeError, match="shares memory"):
        optimizer.step()


def test_a_part_of_a_batch_in_the_place_of_a_whole_one() -> None:
    """Positions in the whole batch decide how the sum of a hot row is rounded."""
    torch.manual_seed(0)
    values, found = torch.randn(3000, 1), []
    for steps_before in (0, 3):
        table = Parameter(torch.ones(9, 1))
        optimizer = fused.SGD([table], lr=1e-3, sparse="touched")
        for _ in range(steps_before):
            table.grad = made_of(torch.tensor([[1]]), torch.ones(1, 1))
            optimizer.step()
        table.row_positions = torch.arange(2000, 5000).numpy(), 6000
        table.grad = made_of(torch.full((1, 3000), 2), values)
        optimizer.step()
        found.append(table.detach()[2])
    assert_same_bits(*found)
    del table.row_positions
    table.grad, table.data = made_of(torch.full((1, 3000), 2), values), torch.ones(9, 1)
    optimizer.step()
    assert not torch.equal(table.detach()[2], found[0])
