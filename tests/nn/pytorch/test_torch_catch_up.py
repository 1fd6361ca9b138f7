"""Rows that sleep in nn.torch: lookups, autograd, state dicts, and what is refused."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import distributed
from fusestep.nn import torch as fused
from helpers import at_once
from torch_training import assert_same_bits, everything

N, D = 60, 11
MAKERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda p, how: fused.Adam(p, 1e-2, sparse=how),
    "Adam eps_hat": lambda p, how: fused.Adam(p, 1e-2, eps_hat=True, maximize=True, sparse=how),
    "AMSGrad": lambda p, how: fused.Adam(p, 1e-2, amsgrad=True, sparse=how),
    "AdamW": lambda p, how: fused.AdamW(p, 1e-2, weight_decay=0.1, sparse=how),
    "LazyAdam": lambda p, how: fused.LazyAdam(p, 1e-2, sparse=how),
    "SparseAdam": lambda p, how: fused.SparseAdam(p, 1e-2, sparse=how),
    "SGD": lambda p, how: fused.SGD(p, 1e-2, weight_decay=0.1, sparse=how),
    "SGD momentum": lambda p, how: fused.SGD(p, 1e-3, 0.9, 0.5, weight_decay=0.1, sparse=how),
    "RMSprop": lambda p, how: fused.RMSprop(p, 1e-3, momentum=0.9, sparse=how),
    "RMSprop centered": lambda p, how: fused.RMSprop(p, 1e-3, centered=True, sparse=how),
    "Adagrad": lambda p, how: fused.Adagrad(p, 1e-2, sparse=how),
    "Lion": lambda p, how: fused.Lion(p, 1e-3, weight_decay=0.1, sparse=how),
}
EACH = pytest.mark.parametrize("name", MAKERS)
STALE = pytest.mark.filterwarnings("ignore:.* follows from rows that slept:RuntimeWarning")


def tables(make: Callable[..., Any], table: Any = None) -> tuple[list[Any], list[Any]]:
    """A table twice, with an optimizer that lets rows sleep, and one that does not."""
    torch.manual_seed(0)
    first = table or torch.nn.Embedding(N, D, sparse=True)
    both = [first, copy.deepcopy(first)]
    return both, [
        make(t.parameters(), how) for t, how in zip(both, ("catch_up", "all"), strict=True)
    ]


def ids_of(step: int, n: int = 7) -> Any:
    """Ids, most of which are small."""
    return (N * torch.rand(n, generator=torch.Generator().manual_seed(step)) ** 3).long()


def train(model: Any, optimizer: Any, steps: range, dense: int = -1) -> None:
    """Steps towards numbers that follow from the number of the step."""
    for step in steps:
        ids = ids_of(step)
        target = torch.randn(len(ids), D, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ((model(ids) - target) ** 2).sum().backward()
        if step == dense:
            model.weight.grad = model.weight.grad.to_dense()
        optimizer.step()


@EACH
def test_numbers_of_every_row(name: str) -> None:
    """The numbers of ``sparse="all"``, beside a dense gradient too."""
    (asleep, awake), (one, other) = tables(MAKERS[name])
    one.watch(asleep)
    dense = -1 if name == "SparseAdam" else 40
    for model, optimizer in ((asleep, one), (awake, other)):
        train(model, optimizer, range(90), dense)
    assert (one.state[asleep.weight]["last_step"] < 90).any()
    one.flush()
    torch.testing.assert_close(asleep.weight, awake.weight, rtol=1e-5, atol=2e-5)


@EACH
@pytest.mark.parametrize("way", ["model first", "optimizer first", "deepcopy"])
def test_resume_is_bit_equal(name: str, way: str) -> None:
    """A resumed run has the bits of the one that was saved and goes on, and so has a copy."""
    (model, _), (optimizer, _) = tables(MAKERS[name])
    optimizer.watch(model)
    train(model, optimizer, range(30))
    before = [x.clone() for x in everything(optimizer)]
    if way == "deepcopy":
        resumed, again = copy.deepcopy((model, optimizer))
        resumed._forward_pre_hooks.clear()
        assert_same_bits(everything(optimizer), before)
    else:
        order = [model, optimizer] if way == "model first" else [optimizer, model]
        files = {own: io.BytesIO() for own in order}
        for own, file in files.items():  # one after the other
            torch.save(own.state_dict(), file)
            file.seek(0)
        weights, state = (torch.load(files[own], weights_only=True) for own in (model, optimizer))
        resumed = torch.nn.Embedding(N, D, sparse=True)
        resumed.load_state_dict(weights)
        again = MAKERS[name](resumed.parameters(), "catch_up")
        again.load_state_dict(state)
        optimizer.flush()
        assert_same_bits([weights["weight"]], [model.weight])  # nothing was left to be done
    again.watch(resumed)
    for own in ((model, optimizer), (resumed, again)):
        train(*own, range(30, 60))
    assert_same_bits(everything(optimizer), everything(again))
    assert_same_bits([model.weight], [resumed.weight])


def test_scheduler_options_and_groups() -> None:
    """Rates, betas and epsilon that change; groups, one of which has no gradient now and then."""
    torch.manual_seed(1)
    models = [torch.nn.ModuleList(torch.nn.Embedding(N, D, sparse=True) for _ in range(2))]
    models.append(copy.deepcopy(models[0]))
    optimizers = []
    for model, how in zip(models, ("catch_up", "all"), strict=True):
        groups = [{"params": model[0].weight}, {"params": model[1].weight, "lr": 1e-3}]
        optimizers.append(fused.AdamW(groups, 1e-2, sparse=how))
    optimizers[0].watch(models[0])
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 50) for o in optimizers]
    for step in range(100):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            if step == 60:
                optimizer.param_groups[0].update(betas=(0.8, 0.99), eps=1e-6)
            optimizer.zero_grad()
            loss = model[0](ids_of(step)).square().sum()
            if step % 3:
                loss = loss + model[1](ids_of(step + 500)).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
    optimizers[0].flush()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)


def test_autograd_sees_what_was_written() -> None:
    """A lookup where nothing is due raises no version; two lookups before a backward are fine."""
    (model, awake), (optimizer, other) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    for own in ((model, optimizer), (awake, other)):
        train(*own, range(20))
    ids, version = ids_of(0, 20), model.weight._version
    model(ids)
    assert model.weight._version > version
    version = model.weight._version
    model(ids)
    assert model.weight._version == version
    for own, opt in ((model, optimizer), (awake, other)):
        opt.zero_grad()
        first = own(torch.tensor([1, 50]))
        (first * own(torch.tensor([59, 58]))).sum().backward()
        opt.step()
    optimizer.flush()
    torch.testing.assert_close(model.weight, awake.weight, rtol=1e-5, atol=2e-5)


def test_tied_output_layer() -> None:
    """Weights that are an output layer too have dense gradients, so no row sleeps."""
    (model, awake), (optimizer, other) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    for own, opt in ((model, optimizer), (awake, other)):
        for step in range(10):
            opt.zero_grad()
            logits = own(ids_of(step)) @ own.weight.T
            torch.nn.functional.cross_entropy(logits, ids_of(step + 1)).backward()
            opt.step()
    assert (optimizer.state[model.weight]["last_step"] == 10).all()
    torch.testing.assert_close(model.weight, awake.weight, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["EmbeddingBag", "EmbeddingBags", "in backward"])
def test_bags_and_their_weights(kind: str) -> None:
    """Bags with factors that are learnt, in two calls before one backward."""
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(N, D, mode="sum", sparse=True)
    both = [bag, copy.deepcopy(bag)]
    found = []
    for module, how in zip(both, ("catch_up", "all"), strict=True):
        optimizer = fused.AdamW(module.parameters(), 1e-2, weight_decay=0.1, sparse=how)
        called = module
        if kind == "EmbeddingBag":
            optimizer.watch(module)
        else:
            called = fused.EmbeddingBags([module])
            if kind == "in backward":
                called.update_in_backward(optimizer)
        factors = torch.ones(4, 3, requires_grad=True)
        for step in range(40):
            ids = [ids_of(step, 12).reshape(4, 3), ids_of(step + 99, 12).reshape(4, 3)]
            if kind == "EmbeddingBag":
                # PyTorch's keeps the table for the gradients of factors: all at once, before.
                optimizer.prepare(module.weight, torch.stack(ids))
                outs = [called(own, per_sample_weights=factors) for own in ids]
            else:
                outs = [called([own], per_sample_weights=[factors]) for own in ids]
            (outs[0] * outs[1]).tanh().sum().backward()
            if kind != "in backward":
                optimizer.step()
                optimizer.zero_grad()
        optimizer.flush()
        found.append((module.weight.detach(), factors.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=5e-5)


def test_sharded_embedding() -> None:
    """The owner of rows brings them up to date before they travel."""
    table = fused.ShardedEmbedding(N, D, distributed.alone(), seed=1)
    (model, awake), (optimizer, other) = tables(MAKERS["AdamW"], table)
    for own in ((model, optimizer), (awake, other)):
        train(*own, range(40))
    optimizer.load_state_dict(optimizer.state_dict())
    for own in ((model, optimizer), (awake, other)):
        train(*own, range(40, 60))
    optimizer.flush()
    torch.testing.assert_close(model.weight, awake.weight, rtol=1e-5, atol=2e-5)


@STALE
def test_states_of_others() -> None:
    """A dense state begins awake; what sleeps can be flushed on the way to a file, and not else."""
    (model, awake), (optimizer, other) = tables(MAKERS["AdamW"])
    for own in ((model, optimizer), (awake, other)):
        train(*own, range(5))
    flushed = optimizer.state_dict(flush=True)
    assert flushed["state"][0].keys() == other.state_dict()["state"][0].keys()
    train(model, optimizer, range(5, 8))
    optimizer.param_groups[0]["sparse"] = "all"
    with pytest.raises(RuntimeError, match=r"has rows that sleep: expected none: flush\(\)"):
        train(model, optimizer, range(8, 9))
    optimizer.flush()
    train(model, optimizer, range(8, 9))
    for _ in range(2):  # the way back and forth is open as long as no row sleeps
        optimizer.param_groups[0]["sparse"] = "catch_up"
        train(model, optimizer, range(9, 12))
        optimizer.flush()
        optimizer.param_groups[0]["sparse"] = "all"
        train(model, optimizer, range(12, 15))
        optimizer.param_groups[0]["lr"] = 2e-2
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2))})
        train(model, optimizer, range(15, 17))
    other.param_groups[0]["sparse"] = "catch_up"
    train(awake, other, range(5, 6))
    assert sorted(other.state[awake.weight]["last_step"].unique().tolist()) == [5, 6]
    del optimizer.param_groups[1:]
    state = optimizer.state_dict()
    state["param_groups"][0]["sparse"] = "catch_up"
    state["state"][0]["last_step"] = torch.full((N,), 99, dtype=torch.int32)
    state["state"][0]["idle_scalars"] = torch.zeros(2_048, 9)
    own = [x.clone() for x in everything(other)]
    with pytest.raises(ValueError, match="has rows of another time: expected steps from 0 to 25"):
        other.load_state_dict(state)
    state["state"][0]["last_step"][:] = 24
    del state["state"][0]["idle_scalars"]
    with pytest.raises(ValueError, match="has rows that sleep: expected state 'idle_scalars'"):
        other.load_state_dict(state)
    assert_same_bits(everything(other), own)


@STALE
def test_a_dense_state_is_loaded_back() -> None:
    """A run that goes back to an earlier dense state has the numbers of one that began there."""
    (model, awake), (optimizer, other) = tables(MAKERS["AdamW"])
    for own in ((model, optimizer), (awake, other)):
        train(*own, range(4))
    weights, state = copy.deepcopy((awake.state_dict(), other.state_dict()))
    optimizer.watch(model)
    train(model, optimizer, range(4, 30))
    for own, opt, how in ((model, optimizer, "catch_up"), (awake, other, "all")):
        own.load_state_dict(weights)
        state["param_groups"][0]["sparse"] = how
        opt.load_state_dict(copy.deepcopy(state))
        train(own, opt, range(4, 40))
    optimizer.flush()
    torch.testing.assert_close(model.weight, awake.weight, rtol=1e-5, atol=2e-5)


def test_bad_input() -> None:
    """What cannot sleep, and what is no table of the optimizer: one error, nothing written."""
    (model, _), (optimizer, _) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    train(model, optimizer, range(5))
    with pytest.raises(IndexError, match="index out of range"):
        model(torch.tensor([1, N]))
    before = [x.clone() for x in everything(optimizer)]
    with pytest.raises(IndexError, match=r"is out of range: expected 0 <= index < 60, got 60"):
        optimizer.prepare(model.weight, torch.tensor([1, N]))
    with pytest.raises(TypeError, match="expected int32 or int64, got float32"):
        optimizer.prepare(model.weight, torch.ones(2))
    with pytest.raises(ValueError, match="parameter is foreign"):
        optimizer.prepare(torch.zeros(3, 2), torch.tensor([1]))
    with pytest.raises(ValueError, match="has no table to watch"):
        optimizer.watch(torch.nn.Embedding(3, 2))
    second = fused.AdamW(model.parameters(), sparse="touched")
    ones = torch.ones(1, D)
    model.weight.grad = torch.sparse_coo_tensor([[1]], ones, (N, D), check_invariants=True)
    with pytest.raises(
        RuntimeError, match=r"has rows that sleep: expected none: flush\(\) of that"
    ):
        second.step()
    optimizer.zero_grad()
    assert_same_bits(everything(optimizer), before)
    for cls, options, error in (
        (fused.Adadelta, {}, "steps without a gradient can be summed"),
        (fused.Adam, {"weight_decay": 0.1}, "AdamWeightDecay's or AdamW's"),
    ):
        table = torch.nn.Embedding(N, D, sparse=True)
        other = cls(table.parameters(), sparse="catch_up", **options)
        table(torch.tensor([1])).sum().backward()
        own = [x.clone() for x in everything(other)]
        with pytest.raises(ValueError, match=error):
            other.step()
        assert_same_bits(everything(other), own)


@STALE
def test_state_that_was_changed() -> None:
    """A last step of another shape or dtype is refused, and the table stays."""
    (model, _), (optimizer, _) = tables(MAKERS["AdamW"])
    train(model, optimizer, range(3))
    optimizer.state[model.weight]["last_step"] = torch.zeros(N - 1, dtype=torch.int32)
    weight = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="'last_step' does not fit its table"):
        optimizer.step()
    assert np.array_equal(weight, model.weight.detach())


@pytest.mark.parametrize("case", ["nesterov", "momentum", "amsgrad", "double", "weight_decay"])
def test_options_that_change_while_rows_sleep(case: str) -> None:
    """Those that make another rule raise, and go on after a flush."""
    name, error = "SGD momentum" if case in ("nesterov", "momentum") else "AMSGrad", RuntimeError
    (model, _), (optimizer, _) = tables(lambda p, how: MAKERS[name](p, how))
    optimizer.watch(model)
    train(model, optimizer, range(5))
    group = optimizer.param_groups[0]
    if case == "nesterov":
        group.update(dampening=0.0)
    values = {"nesterov": True, "momentum": 0.0, "amsgrad": False, "weight_decay": 0.5}
    if case == "double":
        model.double()
    else:
        group[case], error = values[case], ValueError if case == "weight_decay" else RuntimeError
    model._forward_pre_hooks.clear()
    before = [x.clone() for x in everything(optimizer)]
    with pytest.raises(error, match=r"rows that sleep|is impossible|was rebound"):
        train(model, optimizer, range(5, 6))
    assert_same_bits(everything(optimizer), before)


def test_steps_that_change_nothing_are_no_change() -> None:
    """A lookup wakes rows of Adagrad and plain SGD, and autograd sees none of it."""
    for make in (lambda p: fused.Adagrad(p, 0.1, sparse="catch_up"),
                 lambda p: fused.SGD(p, 0.1, sparse="catch_up")):  # fmt: skip
        model = torch.nn.Embedding(N, D, sparse=True)
        optimizer = make(model.parameters())
        optimizer.watch(model)
        train(model, optimizer, range(4))
        used = (model.weight**2).sum()
        model(torch.arange(N))
        assert not optimizer.is_asleep(model.weight)
        used.backward()


@STALE
@pytest.mark.parametrize("name", ["last_step", "idle_scalars"])
def test_states_of_other_shapes(name: str) -> None:
    """One error, and nothing has changed."""
    (model, _), (optimizer, _) = tables(MAKERS["AdamW"])
    train(model, optimizer, range(4))
    state = optimizer.state_dict()
    wrong = {**state["state"][0], name: state["state"][0][name][:-1].clone()}
    before = [x.clone() for x in everything(optimizer)]
    with pytest.raises(ValueError, match=f"state '{name}' has a wrong shape"):
        optimizer.load_state_dict({**state, "state": {0: wrong}})
    assert_same_bits(everything(optimizer), before)
    train(model, optimizer, range(4, 6))


def test_two_optimizers_in_turn() -> None:
    """Each raises while rows sleep in the other one."""
    (model, _), (one, _) = tables(MAKERS["AdamW"])
    other = MAKERS["LazyAdam"](model.parameters(), "catch_up")
    for k, (own, foreign) in enumerate([(one, other), (other, one)] * 2):
        train(model, own, range(k, k + 1))
        before = [x.clone() for x in everything(foreign)]
        with pytest.raises(RuntimeError, match="has rows that sleep: expected none: flush"):
            train(model, foreign, range(k, k + 1))
        assert_same_bits(everything(foreign), before)
        own.flush()


def test_ids_of_every_kind() -> None:
    """Strided ones of NumPy are those that they show; a list is none."""
    (model, other), (optimizer, dense) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    train(model, optimizer, range(9))
    train(other, dense, range(9))
    optimizer.prepare(model.weight, np.arange(40)[::2])
    torch.testing.assert_close(model.weight[:40:2], other.weight[:40:2], rtol=1e-5, atol=2e-5)
    with pytest.raises(TypeError, match="ids"):
        optimizer.prepare(model.weight, [1, 2])


def test_lookups_of_several_threads() -> None:
    """All bring rows up to date at once, after each step."""
    (model, other), (optimizer, dense) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    for k in range(60):
        train(model, optimizer, range(k, k + 1))
        train(other, dense, range(k, k + 1))
        at_once([partial(model, torch.arange(t, N, 3)) for t in range(3)])
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-5, atol=2e-5)


def test_a_table_that_was_rebound() -> None:
    """Other memory while rows sleep is refused by lookups and steps, until a flush."""
    (model, _), (optimizer, _) = tables(MAKERS["AdamW"])
    optimizer.watch(model)
    train(model, optimizer, range(3))
    model.weight.data = model.weight.data.clone()
    for call in (lambda: model(ids_of(1)), optimizer.step):
        with pytest.raises(RuntimeError, match="was rebound while rows sleep"):
            call()
    optimizer.flush()
    train(model, optimizer, range(3, 5))


def test_what_has_no_rows_steps_as_ever() -> None:
    """Beside tables that sleep: a number, a strided parameter; a sparse gradient it cannot have."""
    torch.manual_seed(0)
    strided = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    shapes = [torch.randn(5, 2), torch.ones(()), strided]
    both = [[torch.nn.Parameter(x.clone()) for x in shapes] for _ in range(2)]
    optimizers = [MAKERS["AdamW"](p, how) for p, how in zip(both, ("catch_up", "all"), strict=True)]
    for _ in range(3):
        gradients = [torch.randn_like(x) for x in shapes]
        for parameters, optimizer in zip(both, optimizers, strict=True):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            optimizer.step()
    assert_same_bits(*both)
    assert ["last_step" in optimizers[0].state[p] for p in both[0]] == [True, False, False]
    turned = torch.nn.Parameter(torch.ones(2, 5).t())
    turned.grad = torch.sparse_coo_tensor([[0]], [[1.0, 1.0]], (5, 2), check_invariants=False)
    with pytest.raises(RuntimeError, match="does not fit sparse='catch_up': expected a contiguous"):
        MAKERS["AdamW"]([turned], "catch_up").step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_code_notices_that_lookups_are_watched() -> None:
    table = torch.nn.Embedding(N, D, sparse=True)
    optimizer = MAKERS["AdamW"](table.parameters(), "catch_up")
    compiled = torch.compile(lambda ids: table(ids) * 1.0, backend="eager")
    compiled(torch.tensor([0]))
    optimizer.watch(table)
    for ids in (torch.tensor([1, 2]), torch.tensor([3, 4])):
        compiled(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = compiled(torch.tensor([1, 2]))
    optimizer.flush()
    assert torch.equal(found, table.weight[1:3])
