"""Bags in PyTorch: against its EmbeddingBag and dense optimizers; its protocols; bad input."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusestep import ops  # noqa: E402
from fusestep.kernels.tables import LEFT_OUT  # noqa: E402
from fusestep.nn import torch as fused  # noqa: E402
from fusestep.nn.torch.bags import rows_of_bags  # noqa: E402

SIZES = [(40, 5), (7, 16), (300, 64)]


def modules_of(mode: str = "sum", dtype: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.EmbeddingBag(n, d, mode=mode, dtype=dtype, **options) for n, d in SIZES
    )


def bags_of(step: int, batch: int = 30) -> tuple[list[Any], list[Any]]:
    """Ids and offsets as PyTorch has them; some bags are empty."""
    rng, ids, offsets = np.random.default_rng(step), [], []
    for n, _ in SIZES:
        lengths = rng.integers(0, 6, batch)
        offsets.append(torch.tensor(np.cumsum(lengths) - lengths))
        ids.append(torch.tensor(rng.integers(0, n, lengths.sum())))
    return ids, offsets


def pooled(modules: Any, ids: Any, offsets: Any, weights: Any = None) -> Any:
    """The outputs of PyTorch's own modules."""
    if weights is not None:
        every = zip(modules, ids, offsets, weights, strict=True)
        return torch.cat([m(i, o, w) for m, i, o, w in every], dim=1)
    return torch.cat([m(i, o) for m, i, o in zip(modules, ids, offsets, strict=True)], dim=1)


def gradient_of(out: Any, step: int) -> Any:
    return torch.tensor(np.random.default_rng(90 + step).standard_normal(out.shape)).to(out.dtype)


def weights_of(module: Any) -> list[Any]:
    return [parameter.detach() for parameter in module.parameters()]


def assert_equal(one: Any, other: Any) -> None:
    __tracebackhide__ = True
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_of_weights_are_as_these(dtype: Any) -> None:
    """Of their shape and dtype, whatever those are."""
    ours = fused.EmbeddingBags(modules_of())
    ids = [torch.tensor(np.random.default_rng(n).integers(0, n, (6, 4))) for n, _ in SIZES]
    factors = [torch.rand(6, 4, dtype=dtype, requires_grad=True) for _ in SIZES]
    grad = torch.rand(6, 85)
    ours(ids, None, factors).backward(grad)
    for weight, own, factor, part in zip(
        ours.weights, ids, factors, grad.split([d for _, d in SIZES], 1), strict=True
    ):
        assert (factor.grad.shape, factor.grad.dtype) == ((6, 4), dtype)
        expected = (weight[own] * part[:, None]).sum(2).to(dtype)
        torch.testing.assert_close(factor.grad, expected)


def test_tensors_that_compiled_code_cannot_read() -> None:
    """Strided, empty, of inference mode, parameters, cut out of larger ones: the same output."""
    modules = modules_of()
    ours = fused.EmbeddingBags(copy.deepcopy(modules))
    ids, offsets = bags_of(2)
    out = ours(ids, offsets)
    with torch.inference_mode():
        inference = [own.clone() for own in ids]
    changes: list[Any] = [
        inference,
        [own.int() for own in ids],
        [torch.stack([own, own], 1)[:, 0] for own in ids],
        [torch.cat([own, own])[len(own) :] for own in ids],
        [torch.nn.Parameter(own, requires_grad=False) for own in ids],
    ]
    for change in changes:
        assert torch.equal(ours(change, offsets), out)
    square = [torch.tensor(np.random.default_rng(n).integers(0, n, (6, 4))) for n, _ in SIZES]
    for view in (
        lambda own: own.t().contiguous().t(),
        lambda own: own[:, :2],
        lambda own: own[:, ::2],
        lambda own: own[:1, ::2],
        lambda own: own[:4, :1].expand(4, 4),
        lambda own: own.reshape(-1)[:9].unfold(0, 4, 1),
    ):
        views = list(map(view, square))
        assert torch.equal(ours(views), ours([own.contiguous() for own in views]))
    nothing = [torch.tensor([], dtype=torch.int64)] * 3
    assert not ours(nothing, [torch.zeros(4, dtype=torch.int64)] * 3).any()
    assert ours(nothing, nothing).shape == (0, 85)
    gone = ids[1].clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        ours([ids[0], gone, ids[2]], offsets)
    for thing in (torch.tensor(1), torch.tensor([1.0]), None, 3, ids[0].to_sparse()):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            ours([ids[0], thing, ids[2]], offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad"])
def test_both_ways_of_a_gradient(name: str, dtype: Any) -> None:
    """In backward, and left for a step: the same bits; learning rates follow schedulers."""
    fast, slow = (fused.EmbeddingBags(modules_of(dtype=dtype)) for _ in range(2))
    optimizers = [getattr(fused, name)(m.parameters(), lr=0.1) for m in (fast, slow)]
    fast.update_in_backward(optimizers[0])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(3):
        ids, offsets = bags_of(step)
        for module, optimizer in zip((fast, slow), optimizers, strict=True):
            out = module(ids, offsets)
            assert out.dtype == dtype
            out.backward(gradient_of(out, step))
            if module is slow:
                assert all(w.grad.is_sparse for w in module.parameters())
                optimizer.step()
                optimizer.zero_grad()
            assert all(w.grad is None for w in module.parameters())
        for scheduler in schedulers:
            scheduler.step()
        assert_equal(fast, slow)
    assert optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**3


def test_gradients_are_accumulated_and_clipped() -> None:
    """As those of PyTorch's modules with sparse gradients."""
    theirs, ours = modules_of(sparse=True), fused.EmbeddingBags(modules_of())
    for step in range(2):
        ids, offsets = bags_of(step)
        for out in (pooled(theirs, ids, offsets), ours(ids, offsets)):
            out.backward(gradient_of(out, step))
    norms, optimizers = [], []
    for module in (theirs, ours):
        optimizer = fused.LazyAdam(module.parameters(), lr=0.1)
        norms.append(fused.clip_grad_norm_(module.parameters(), 0.5))
        optimizer.step()
        optimizers.append(optimizer)
    assert torch.allclose(norms[0], norms[1], rtol=1e-6)
    for a, b in zip(weights_of(theirs), weights_of(ours), strict=True):
        torch.testing.assert_close(a, b)


def test_a_scaler_works_on_gradients_and_is_refused_in_backward() -> None:
    for in_backward in (False, True):
        bags = fused.EmbeddingBags(modules_of())
        optimizer = fused.LazyAdam(bags.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if in_backward:
            bags.update_in_backward(optimizer)
        scaler.scale(bags(*bags_of(0)).sum()).backward()
        if in_backward:
            with pytest.raises((AssertionError, RuntimeError)):
                scaler.step(optimizer)
            with pytest.raises(RuntimeError, match="the optimizer steps in backward"):
                optimizer.step()
            bags.update_in_backward(None)
            optimizer.step()
            continue
        scaler.step(optimizer)
        scaler.update()


def test_the_state_of_modules_both_ways() -> None:
    theirs = modules_of()
    model = torch.nn.ModuleDict({"tables": copy.deepcopy(theirs)})
    ours = torch.nn.ModuleDict({"tables": fused.EmbeddingBags(modules_of())})
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    ours.load_state_dict(model.state_dict())
    assert_equal(ours, model)
    model.load_state_dict(ours.state_dict())
    assert [*ours.state_dict()] == [*model.state_dict()]
    named = OrderedDict(user=theirs[0], item=theirs[1])
    bags = fused.EmbeddingBags(named)
    assert [*bags.state_dict()] == ["user.weight", "item.weight"]
    assert bags.weights[0] is theirs[0].weight


def test_sizes_single_ids_and_last_offsets() -> None:
    torch.manual_seed(1)
    bags = fused.EmbeddingBags([(9, 4), torch.nn.Embedding(5, 3, padding_idx=1)], "mean")
    ids = [torch.tensor([[1, 8], [0, 0]]), torch.tensor([4, 1])]
    first, second = bags.weights
    expected = torch.cat([first[ids[0]].mean(1), second[ids[1]]], dim=1)
    torch.testing.assert_close(bags(ids), expected)
    whole = fused.EmbeddingBags([(9, 4)], include_last_offset=True)
    out = whole([ids[0].reshape(-1)], [torch.tensor([0, 2, 4])])
    torch.testing.assert_close(out, whole([ids[0]]))
    with torch.no_grad():
        assert not whole([ids[0]]).requires_grad
    embeddings = fused.EmbeddingBags([torch.nn.Embedding(5, 3), torch.nn.Embedding(9, 4)])
    first, second = embeddings.weights
    expected = torch.cat([first[ids[1]], second[[8, 0]]], dim=1)
    assert torch.equal(embeddings([ids[1], torch.tensor([8, 0])]), expected)
    with pytest.raises(ValueError, match=r"ids\[1\] have another number of bags"):
        embeddings([ids[1], torch.tensor([8])])
    with pytest.raises(ValueError, match=r"ids\[0\] has a wrong shape"):
        bags([torch.tensor([1, 8]), ids[1]])  # without offsets nobody knows what a bag is


def test_frozen_tables() -> None:
    bags = fused.EmbeddingBags([(9, 4), (5, 3)])
    bags.weights[0].requires_grad_(False)
    ids = [torch.tensor([[1]]), torch.tensor([[2]])]
    bags(ids).sum().backward()
    assert bags.weights[0].grad is None
    assert bags.weights[1].grad.to_dense()[2].tolist() == [1, 1, 1]


def test_frozen_tables_rest_in_backward() -> None:
    """Also where a gradient of before is left; the others step."""
    bags = fused.EmbeddingBags([(9, 4), (5, 3)])
    bags.update_in_backward(fused.Adagrad(bags.parameters(), lr=0.1))
    frozen, other = bags.weights
    frozen.requires_grad_(False)
    frozen.grad = left = torch.ones_like(frozen)
    before = [w.detach().clone() for w in (frozen, other)]
    bags([torch.tensor([[1]]), torch.tensor([[2]])]).sum().backward()
    assert torch.equal(frozen, before[0])
    assert frozen.grad is left
    assert (other != before[1]).any(1).tolist() == [False, False, True, False, False]


def test_weights_need_the_tables_of_their_forward() -> None:
    """A table that has changed, or lies elsewhere, gives no gradients of weights; nothing steps."""
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: weight.set_(weight.clone()),
        lambda weight: setattr(weight, "data", weight.clone()),
    ):
        bags = fused.EmbeddingBags([(9, 4)])
        bags.update_in_backward(fused.SGD(bags.parameters(), lr=0.1))
        factors = torch.ones(1, 2, requires_grad=True)
        out = bags([torch.tensor([[1, 2]])], None, [factors])
        with torch.no_grad():
            change(bags.weights[0])
        before = bags.weights[0].detach().clone()
        with pytest.raises(RuntimeError, match="the tables have changed since the forward"):
            out.sum().backward()
        assert factors.grad is None
        assert torch.equal(bags.weights[0], before)


def test_tensors_that_were_replaced() -> None:
    bags = fused.EmbeddingBags([(9, 4)])
    bags.update_in_backward(fused.LazyAdam(bags.parameters(), lr=0.1))
    for _ in range(2):
        bags.weights[0].data = torch.ones(9, 4)
        out = bags([torch.tensor([[1, 1]])])
        assert out.tolist() == [[2, 2, 2, 2]]
        out.sum().backward()
        assert (bags.weights[0][1] != 1).all()


def test_tables_that_became_others_at_the_same_place() -> None:
    """Of fewer rows, of another dtype, or the other way round in memory."""
    bags = fused.EmbeddingBags([(4, 4)])
    (weight,), ids = bags.weights, [torch.tensor([[3, 1]])]
    whole = weight.detach()
    bags(ids)
    weight.data = whole.t()
    with pytest.raises(ValueError, match=r"tables\[0\] is not contiguous"):
        bags(ids)
    weight.data = whole[:3]
    with pytest.raises(IndexError, match=r"ids\[0\]\[0\] is out of range"):
        bags(ids)
    weight.data = whole
    half = torch.rand(4, 4).to(torch.float16)
    bags = fused.EmbeddingBags([torch.nn.EmbeddingBag.from_pretrained(half, mode="sum")])
    for dtype in (torch.float16, torch.bfloat16):
        bags.weights[0].data = half.view(dtype)
        expected = half.view(dtype)[[3, 1]].float().sum(0, keepdim=True).to(dtype)
        assert torch.equal(bags(ids), expected)


def test_a_table_that_is_wider_than_in_its_forward() -> None:
    bags = fused.EmbeddingBags([(4, 4)])
    bags.update_in_backward(fused.SGD(bags.parameters(), lr=0.1))
    ids = [torch.tensor([[3, 1]])]
    out = bags(ids)
    bags.weights[0].data = wide = torch.rand(4, 8)
    before = wide.clone()
    bags(ids)
    with pytest.raises(RuntimeError, match=r"has a wrong shape: expected \(4, 8\), got \(4, 4\)"):
        out.sum().backward()
    assert torch.equal(wide, before)
    assert bags.weights[0].grad is None


def test_numbers_that_are_marked_as_negative() -> None:
    """As PyTorch marks them, instead of writing them: those that are meant are read."""
    bags = fused.EmbeddingBags([(4, 4)])
    ids, factors = torch.tensor([[3, 1]]), torch.rand(1, 2)
    out, marked = bags([ids], None, [factors]), torch._neg_view
    assert torch.equal(bags([marked(-ids)], None, [factors]), out)
    assert torch.equal(bags([ids], None, [marked(-factors)]), out)
    with pytest.raises(IndexError, match=r"ids\[0\]\[0\] is out of range"):
        bags([marked(ids)])
    for grad in (torch.ones(1, 4), marked(-torch.ones(1, 4))):
        bags.weights[0].grad = None
        bags([ids]).backward(grad)
        assert bags.weights[0].grad.to_dense()[[1, 3]].tolist() == [[1] * 4] * 2


def test_another_optimizer_takes_over() -> None:
    """The one before takes steps again, in its own way, and none in backward."""
    bags = fused.EmbeddingBags([(9, 4)])
    first, second = (fused.SGD(bags.parameters(), lr=lr) for lr in (1.0, 0.5))
    for optimizer in (first, second):
        bags.update_in_backward(optimizer)
    before = bags.weights[0].detach().clone()
    bags([torch.tensor([[1]])]).sum().backward()
    assert torch.equal(bags.weights[0][1], before[1] - 0.5)
    bags.weights[0].grad = torch.ones(9, 4)
    first.step()
    with pytest.raises(RuntimeError, match="the optimizer steps in backward"):
        second.step()


def test_gradients_of_gradients_are_refused() -> None:
    bags = fused.EmbeddingBags([(9, 4)])
    factors = torch.rand(1, 2, requires_grad=True)
    out = bags([torch.tensor([[1, 2]])], None, [factors])
    (found,) = torch.autograd.grad(out.square().sum(), factors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_gradients_are_let_go() -> None:
    """With the last reference that a user has."""
    bags = fused.EmbeddingBags([(9, 4), (5, 3)])
    bags.update_in_backward(fused.SGD(bags.parameters(), lr=0.1))
    for _ in range(2):
        array = np.ones((1, 7), np.float32)
        kept, grad = weakref.ref(array), torch.from_numpy(array)
        bags([torch.tensor([[1]]), torch.tensor([[2]])]).backward(grad)
        del array, grad
        assert kept() is None


def test_backward_twice_is_refused() -> None:
    bags = fused.EmbeddingBags([(9, 4)])
    bags.update_in_backward(fused.SGD(bags.parameters(), lr=0.1))
    out = bags([torch.tensor([[1]])])
    out.sum().backward(retain_graph=True)
    before = bags.weights[0].detach().clone()
    with pytest.raises(RuntimeError, match="has updated the tables already"):
        out.sum().backward()
    assert torch.equal(bags.weights[0], before)


def test_an_error_in_backward_changes_nothing() -> None:
    bags = fused.EmbeddingBags([(9, 4)])
    optimizer = fused.LazyAdam(bags.parameters(), lr=0.1)
    bags.update_in_backward(optimizer)
    before = bags.weights[0].detach().clone()
    out = bags([torch.tensor([[1]])])
    optimizer.state[bags.weights[0]] = {"step": torch.tensor(1.0)}
    loss = out.sum()
    with pytest.raises(RuntimeError, match="lacks"):
        loss.backward(retain_graph=True)
    assert bags.weights[0].grad is None
    assert torch.equal(bags.weights[0], before)
    optimizer.state.clear()
    loss.backward()  # the same again, as nothing was done
    assert (bags.weights[0][1] != before[1]).all()


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "mode is not supported", lambda: fused.EmbeddingBags([(2, 2)], "least")),
        (ValueError, "mode differs", lambda: fused.EmbeddingBags(
            [torch.nn.EmbeddingBag(2, 2, mode="sum"), torch.nn.EmbeddingBag(2, 2, mode="mean")])),
        (ValueError, "mode differs", lambda: fused.EmbeddingBags(modules_of(), "mean")),
        (ValueError, "share a weight", lambda: fused.EmbeddingBags([modules_of()[0]] * 2)),
        (TypeError, "tables have a wrong type", lambda: fused.EmbeddingBags(3)),
        (TypeError, "table '0' has a wrong type", lambda: fused.EmbeddingBags([3])),
        (ValueError, "tables are missing", lambda: fused.EmbeddingBags([])),
        (ValueError, "ids has a wrong shape",
         lambda: fused.EmbeddingBags([(2, 2)])(torch.tensor([1]))),
        (ValueError, "ids do not fit", lambda: fused.EmbeddingBags([(2, 2)])([])),
        (TypeError, r"ids\[0\] has a wrong type", lambda: fused.EmbeddingBags([(2, 2)])([[1]])),
        (TypeError, r"ids\[0\] has a wrong dtype",
         lambda: fused.EmbeddingBags([(2, 2)])([torch.tensor([[1.0]])])),
        (IndexError, r"ids\[0\]\[0\] is out of range",
         lambda: fused.EmbeddingBags([(2, 2)])([torch.tensor([[2]])])),
        (TypeError, "optimizer has a wrong type",
         lambda: fused.EmbeddingBags([(2, 2)]).update_in_backward(torch.optim.SGD)),
        (ValueError, "optimizer has other parameters", lambda: fused.EmbeddingBags(
            [(2, 2)]).update_in_backward(fused.SGD(modules_of().parameters(), lr=0.1))),
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=f"EmbeddingBags: .*{text}"):
        call()


@pytest.mark.parametrize("pooling", ["sum", "mean", "max", "weighted sum"])
def test_rows_that_pytorch_makes_of_bags(pooling: str) -> None:
    """As on a device, where ids that count for nothing, or are bad, are rows of zeros."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=shape).astype(np.float32) for shape in ((50, 8), (9, 4))]
    ids = [rng.integers(0, len(table), 30) for table in tables]
    weights = [rng.normal(size=30).astype(np.float32)] * 2 if "weighted" in pooling else None
    offsets, grad = [np.arange(0, 31, 3)] * 2, rng.normal(size=(10, 12)).astype(np.float32)
    bags = ops.EmbeddingBags(pooling.removeprefix("weighted "))
    for found in bags.gradients(tables, ids, offsets, grad, weights):
        expected = found.to_rows()
        indices, values = rows_of_bags(found, torch.from_numpy)
        np.testing.assert_array_equal(indices.numpy(), expected.indices)
        np.testing.assert_array_equal(values.numpy(), expected.values)
        marked = found.indices.copy()
        marked[3], marked[5] = LEFT_OUT, found.dense_shape[0]
        of_marked = ops.BagTensor(
            found.gradient.with_arrays(indices=marked), found.unit, found.dense_shape
        )
        indices, values = rows_of_bags(of_marked, torch.from_numpy)
        assert not values[[3, 5]].any()
        assert ((indices >= 0) & (indices < found.dense_shape[0])).all()
        others = np.delete(np.arange(30), (3, 5))
        np.testing.assert_array_equal(values.numpy()[others], expected.values[others])


# Features that share tables

FEATURES = [0, 2, 0, 1]


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("updates", [False, True])
def test_features_that_share_a_table(mode: str, updates: bool) -> None:
    """As PyTorch's modules that are called several times; ids as lists, or all in one tensor."""
    theirs, ours = modules_of(mode, sparse=mode == "sum"), modules_of(mode)
    bags = fused.EmbeddingBags(ours, features=FEATURES)
    optimizer, other = (fused.Adagrad(m.parameters(), lr=0.1) for m in (bags, theirs))
    if updates:
        bags.update_in_backward(optimizer)
    for step in range(3):
        rng, ids, offsets = np.random.default_rng(step), [], []
        for table in FEATURES:
            lengths = rng.integers(0, 6, 30)
            offsets.append(torch.tensor(np.cumsum(lengths) - lengths))
            ids.append(torch.tensor(rng.integers(0, SIZES[table][0], lengths.sum())))
        given: tuple[Any, Any] = ids, offsets
        if step == 1:  # as torchrec's KeyedJaggedTensor has them: values() and offsets()
            begins = np.cumsum([0, *(len(own) for own in ids)])
            every = [own + int(at) for own, at in zip(offsets, begins, strict=False)]
            given = torch.cat(ids), torch.cat([*every, torch.tensor(begins[-1:])])
        out = bags(*given)
        expected = pooled([theirs[t] for t in FEATURES], ids, offsets)
        torch.testing.assert_close(out, expected)
        gradient = gradient_of(out, step)
        for result, taken in ((out, optimizer), (expected, other)):
            taken.zero_grad()
            result.backward(gradient)
            if taken is other or not updates:
                taken.step()
        for a, b in zip(weights_of(bags), weights_of(theirs), strict=True):
            torch.testing.assert_close(a, b)
    assert bags.state_dict().keys() == theirs.state_dict().keys()
    again = copy.deepcopy(bags)
    assert torch.equal(again(ids, offsets), bags(ids, offsets))


def test_features_that_are_refused() -> None:
    for features, text in (([0, 3], r"features\[1\] is no table"), ("01", "features have a wrong")):
        with pytest.raises((TypeError, ValueError), match=f"EmbeddingBags: {text}"):
            fused.EmbeddingBags(modules_of(), features=features)
    bags = fused.EmbeddingBags(modules_of(), features=FEATURES)
    with pytest.raises(ValueError, match="ids do not fit: expected a list of 4 tensors"):
        bags([torch.tensor([1])] * 3)
