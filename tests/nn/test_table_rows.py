"""Rows of tables that begin anew or become copies of others, in nn and nn.torch."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from helpers import BF16, assert_same_arrays, assert_same_bits, refused
from optimizers import assert_same_run

N, D = 14, 5
SOME, OTHERS = np.array([11, 2, 7]), np.array([0, 1, 3, 4, 5, 6, 8, 9, 10, 12, 13])
IN_NN: dict[str, Any] = {
    "Adam": lambda w, **o: nn.Adam([w], 0.1, **o),
    "AMSGrad": lambda w, **o: nn.Adam([w], 0.1, use_amsgrad=True, sparse_update="lazy", **o),
    "Adagrad": lambda w, **o: nn.Adagrad([w], 0.3, 0.1, **o),
    "FTRL": lambda w, **o: nn.FTRL([w], 0.2, **o), "SGD": lambda w, **o: nn.SGD([w], 0.1, **o),
    "RowWiseAdagrad": lambda w, **o: nn.RowWiseAdagrad([w], 0.25, 0.1, **o),
    "LazyAdam by row": lambda w, **o: nn.LazyAdam([w], 0.1, rowwise_bias_correction=True, **o),
    "catch-up": lambda w, **o: nn.LazyAdam([w], 0.1, sparse_update="catch_up", **o),
}  # fmt: skip


def table(dtype: Any = np.float32) -> np.ndarray:
    found: np.ndarray = np.random.default_rng(1).standard_normal((N, D)).astype(dtype)
    return found


def trained(name: str, *, dtype: Any = np.float32, steps: int = 6, **options: Any) -> Any:
    """An optimizer that has taken some steps on some rows."""
    opt, rng = IN_NN[name](table(dtype), **options), np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.integers(0, N, 9)
        opt([nn.RowTensor(ids, rng.standard_normal((9, D)).astype(dtype), (N, D))])
    return opt


def step(opt: Any, rng: np.random.Generator, n: int, dtype: Any = np.float32) -> None:
    """A step on rows below ``n`` of a table that may have more."""
    ids, values = rng.integers(0, n, 9), rng.standard_normal((9, D)).astype(dtype)
    opt([nn.RowTensor(ids, values, opt.parameters[0].shape)])


def of_rows(opt: Any, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The weights and all that is kept for some rows."""
    arrays = {"w": opt.parameters[0].data, **opt.states_by_name(0)}
    return {name: a[rows].copy() for name, a in arrays.items() if a.shape[:1] == (N,)}


@pytest.mark.parametrize("name", IN_NN)
def test_reset(name: str) -> None:
    """States begin as at construction, weights at what is given; other rows keep every bit."""
    opt, fresh = trained(name), IN_NN[name](table())
    others = of_rows(opt, OTHERS)
    opt.reset_rows(opt.parameters[0], SOME, weights=7.0)
    for role, found in of_rows(opt, SOME).items():
        expected = of_rows(fresh, SOME)[role]
        if role == "w":
            expected = np.full_like(expected, 7.0)
        if role.startswith("last_step"):
            expected = np.full_like(expected, opt._steps[0])
        assert_same_bits(found, expected, role)
    assert_same_arrays(of_rows(opt, OTHERS), others)


@pytest.mark.parametrize("name", IN_NN)
def test_copy(name: str) -> None:
    """Copies go on as their originals; a row may be read and written in one call."""
    opt = trained(name)
    opt.copy_rows(opt.parameters[0].data, SOME, np.array([2, 5, 11], np.int32))
    before = trained(name)
    before.flush() if name == "catch-up" else None
    for source, target in zip(SOME, (2, 5, 11), strict=True):
        found, expected = of_rows(opt, np.array([target])), of_rows(before, np.array([source]))
        assert_same_arrays(found, expected)


@pytest.mark.parametrize("rounding", ["master", "kahan", "stochastic"])
def test_what_lies_beside_weights_is_reset(rounding: str) -> None:
    """A master is the weight, as at construction, a remainder is 0, an own copy is written."""
    opt = trained("Adam", dtype=BF16, rounding=rounding)
    opt.reset_rows(opt.parameters[0], SOME, weights=0.1)
    assert (opt.parameters[0].data[SOME] == BF16.type(0.1)).all()
    state = opt.state_dict()
    if rounding == "master":
        assert (state["master.parameter_0"][SOME] == BF16.type(0.1)).all()
    elif rounding == "kahan":
        assert (state["remainder.parameter_0"][SOME] == 0).all()
    copied = table().astype(BF16)
    other = nn.Adam([{"params": [table()], "copies": [copied]}])
    other.reset_rows(other.parameters[0], SOME, weights=np.full((3, D), 0.1))
    assert (copied[SOME] == BF16.type(0.1)).all()


@pytest.mark.parametrize("name", [*IN_NN, "master", "kahan", "stochastic"])
def test_a_table_that_grows(name: str) -> None:
    """Every bit is that of a table which had the rows from the beginning."""
    options, dtype = ({}, np.float32) if name in IN_NN else ({"rounding": name}, BF16)
    make, small = IN_NN.get(name, IN_NN["Adam"]), table(dtype)
    large = np.concatenate((small, np.zeros((6, D), dtype)))
    grows, other = make(small.copy(), **options), make(large, **options)
    rngs = [np.random.default_rng(0) for _ in range(2)]
    for n in (N, N, N + 6, N + 6):
        if n > len(grows.parameters[0]):
            found = grows.grow(grows.parameters[0], n)
            assert found is grows.parameters[0].data and found.shape == (n, D)
        for opt, rng in zip((grows, other), rngs, strict=True):
            step(opt, rng, n, dtype)
            opt.reset_rows(opt.parameters[0], np.array([n - 1, 1]), weights=0.5)
    for opt in (grows, other):
        opt.flush()
    assert_same_run(grows, other)


def test_columns_are_no_rows() -> None:
    """In a square table the state of a column stays, though it has as many numbers."""
    opt = nn.AdaFactor([np.random.default_rng(2).standard_normal((4, 4)).astype(np.float32)])
    opt([np.arange(16, dtype=np.float32).reshape(4, 4)])
    before = {role: x.copy() for role, x in opt.state_dict().items()}
    opt.reset_rows(opt.parameters[0], np.array([1, 2]))
    changed = {role for role, x in opt.state_dict().items() if (x != before[role]).any()}
    assert changed == {"exp_avg.parameter_0", "exp_avg_sq_row_parameter_0"}


def test_weights_by_id() -> None:
    """An id gets the same numbers in any row; weights that are not given stay, and are awake."""
    draw, opts = nn.UniformRows(0.5, seed=9), [trained("Adam") for _ in range(2)]
    opts[0].reset_rows(opts[0].parameters[0], SOME, draw, ids=np.array([900, 7, 2**62]))
    opts[1].reset_rows(
        opts[1].parameters[0], SOME[::-1].copy(), draw, ids=np.array([2**62, 7, 900])
    )
    found = [opt.parameters[0].data[SOME] for opt in opts]
    assert_same_bits(*found)
    assert np.abs(found[0]).max() < 0.5 and len(np.unique(found[0])) == 3 * D
    many = draw(np.arange(100_000), (100_000, 2))
    assert abs(many.mean()) < 2e-3 and abs(np.corrcoef(many.T)[0, 1]) < 1e-2
    asleep, awake = trained("catch-up"), trained("Adam")
    for opt in (asleep, awake):
        opt.reset_rows(opt.parameters[0], SOME)
    asleep.flush()
    np.testing.assert_allclose(
        asleep.parameters[0].data, awake.parameters[0].data, rtol=1e-5, atol=1e-6
    )


def test_bad_input() -> None:
    """Rows, weights, ids and tables that do not fit: one error, nothing written."""
    opt = trained("Adam")
    p = opt.parameters[0]
    cases: list[tuple[Any, str, Any]] = [
        (IndexError, "is out of range", lambda: opt.reset_rows(p, np.array([N]))),
        (TypeError, "expected int32 or int64", lambda: opt.reset_rows(p, np.array([1.0]))),
        (ValueError, "has a row twice", lambda: opt.reset_rows(p, np.array([1, 1]))),
        (ValueError, "weights have a wrong shape", lambda: opt.reset_rows(p, SOME, np.ones(3))),
        (TypeError, "weights have a wrong dtype", lambda: opt.reset_rows(p, SOME, np.array("a"))),
        (ValueError, "ids do not fit", lambda: opt.reset_rows(p, SOME, 0.0, ids=np.ones(2, int))),
        (ValueError, "is none of the optimizer's", lambda: opt.reset_rows(table(), SOME)),
        (ValueError, "another length", lambda: opt.copy_rows(p, SOME, SOME[:2])),
        (ValueError, "target has a row twice", lambda: opt.copy_rows(p, SOME, SOME * 0)),
        (IndexError, "is out of range", lambda: opt.copy_rows(p, SOME - 3, SOME)),
    ]  # fmt: skip
    cases += [
        (ValueError, "rows is out of range: expected 14 <", lambda: opt.grow(p, N)),
        (TypeError, "rows has a wrong type", lambda: opt.grow(p, 20.0)),
        (ValueError, "is none of the optimizer's", lambda: opt.grow(table(), 20)),
    ]
    for error, text, call in cases:
        with refused(error, text, opt):
            call()
    both = nn.SGD([p])
    with refused(RuntimeError, "cannot grow: expected one of this optimizer alone", opt):
        opt.grow(p, 20)
    del both
    number = nn.SGD([np.array(1.0, np.float32)])
    with refused(RuntimeError, "has none", number):
        number.reset_rows(number.parameters[0], np.array([0]))
    with pytest.raises(ValueError, match="UniformRows: bound"):
        nn.UniformRows(-1.0)
    with pytest.raises(ValueError, match="NormalRows: std"):
        nn.NormalRows(-1.0)


def test_normal_rows() -> None:
    """They are normal and apart by id, column and seed, and follow from these, not from order."""
    draw, n = nn.NormalRows(0.5, seed=3), 20_000
    ids = np.random.default_rng(0).permutation(2 * n)[:n] - n
    found = draw(ids, (n, 8)) / np.float32(0.5)
    below = np.vectorize(NormalDist().cdf)(np.sort(found, axis=None)[::10])
    assert abs(below - (np.arange(n * 8)[::10] + 0.5) / (n * 8)).max() < 1.6 / np.sqrt(n * 8)
    others = nn.NormalRows(1.0, seed=4)(ids, (n, 8)), draw(ids + 1, (n, 8)), np.roll(found, 1, 1)
    for other in others:
        assert abs(np.corrcoef(found.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(n * 8)
    order = np.random.default_rng(1).permutation(n)[: n // 3]
    assert np.array_equal(draw(ids[order], (len(order), 2, 4)), draw(ids, (n, 2, 4))[order])
    assert np.array_equal(draw(ids[5:6], (1, 8))[0] / np.float32(0.5), found[5])


TORCH = {
    "AdamW": {"sparse": "touched"}, "Adagrad": {"initial_accumulator_value": 0.3},
    "SparseAdam": {"sparse": "catch_up"}, "RowWiseAdam": {"rowwise_bias_correction": True},
    "SGD": {"momentum": 0.9, "sparse": "touched"},
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_pytorch(name: str) -> None:
    """The same in nn.torch; autograd sees a change."""
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    torch.manual_seed(0)
    model = torch.nn.Embedding(N, D, sparse=True)
    optimizer = getattr(fused, name)(model.parameters(), lr=0.1, **TORCH[name])
    optimizer.watch(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(N, (9,))).square().sum().backward()
        optimizer.step()
    state, version = optimizer.state[model.weight], model.weight._version
    kept = {k: x.clone() for k, x in state.items() if k != "step" and x.shape[:1] == (N,)}
    weight = model.weight.detach().clone()
    rows = torch.from_numpy(SOME)
    optimizer.reset_rows(model.weight, rows, torch.full((3, D), 2.0, requires_grad=True))
    assert model.weight._version > version and (model.weight[rows] == 2.0).all()
    assert torch.equal(model.weight[OTHERS], weight[OTHERS])
    for role, before in kept.items():
        assert torch.equal(state[role][OTHERS], before[OTHERS])
        initial = {"sum": 0.3, "last_step": 4}.get(role, 0.0)
        assert (state[role][rows] == initial).all(), role
    optimizer.flush()
    optimizer.copy_rows(model.weight, rows[:1], torch.tensor([1]))
    assert torch.equal(model.weight[1], model.weight[SOME[0]])
    for role in kept:
        assert torch.equal(state[role][1], state[role][SOME[0]])
    optimizer.reset_rows(model.weight, rows, nn.UniformRows(0.1))
    assert (model.weight[rows].abs() <= 0.1).all()
    with pytest.raises(ValueError, match="parameter is foreign"):
        optimizer.reset_rows(torch.zeros(N, D), rows)
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(D, N).T)
    with pytest.raises(RuntimeError, match="does not fit"):
        optimizer.reset_rows(optimizer.param_groups[0]["params"][0], rows)


@pytest.mark.parametrize("name", TORCH)
def test_a_table_of_pytorch_that_grows(name: str) -> None:
    """Every bit is that of a table which had the rows from the beginning."""
    torch = pytest.importorskip("torch")
    from fusestep.nn import torch as fused

    models = [torch.nn.Embedding(n, D, sparse=True) for n in (N, N + 6)]
    with torch.no_grad():
        models[1].weight.zero_()
        models[1].weight[:N] = models[0].weight
    make = getattr(fused, name)
    optimizers = [make(m.parameters(), lr=0.1, **TORCH[name]) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.watch(model)
    for n in (N, N, N + 6, N + 6):
        if n > len(models[0].weight):
            with pytest.raises(RuntimeError, match="cannot grow"):
                optimizers[0].grow(models[0].weight, n)
            optimizers[0].zero_grad()
            optimizers[0].grow(models[0].weight, n)
        ids = torch.randint(n, (9,))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
            optimizer.reset_rows(model.weight, torch.tensor([n - 1]), weights=0.5)
    for optimizer in optimizers:
        optimizer.flush()
    assert torch.equal(models[0].weight, models[1].weight)
    mine, theirs = (o.state[m.weight] for o, m in zip(optimizers, models, strict=True))
    assert mine.keys() == theirs.keys() and all(
        torch.equal(*map(torch.as_tensor, (x, theirs[role]))) for role, x in mine.items()
    )
