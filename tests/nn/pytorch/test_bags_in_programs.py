"""Bags in programs: one step for all that comes in a backward; hooks, threads, weights, copies."""

import copy
import io
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

from bag_modules import (  # isort: skip
    IDS, SIZES, assert_as, assert_close, before, modules_of, pair, pooled, stepping)  # fmt: skip
from fusestep.nn import torch as fused
from helpers import at_once
from subprocesses import TORCH
from torch_training import refused

# Any program beside PyTorch's: one step for all that comes in a backward


def embedding(weight: Any, *, sparse: bool) -> Any:
    return torch.nn.functional.embedding(torch.tensor([1, 1, 4]), weight, sparse=sparse).sum()


TERMS: dict[str, Callable[[Any], Any]] = {
    "a penalty": lambda w: 0.5 * w.square().sum(),
    "a penalty of the first": lambda w: w.square().sum() * (w.shape[0] == 9),
    "a penalty of a row": lambda w: w[3].square().sum(),
    "a product with the table": lambda w: (torch.ones(1, w.shape[1], dtype=w.dtype) @ w.T).sum(),
    "a dense module with the same weight": lambda w: embedding(w, sparse=False),
    "a sparse module with the same weight": lambda w: embedding(w, sparse=True),
    "both": lambda w: embedding(w, sparse=True) + w.square().sum(),
}


DENSE = [
    ("Adagrad", "touched", {"lr": 0.1}), ("SGD", "touched", {"lr": 0.1}),
    ("Adam", "all", {"lr": 0.01}), ("AdamW", "all", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", "all", {"lr": 0.01, "momentum": 0.5}), ("Adadelta", "all", {"lr": 1.0}),
    ("Adamax", "all", {"lr": 0.01}), ("NAdam", "all", {"lr": 0.01}), ("RAdam", "all", {"lr": 0.01}),
    ("SGD", "all", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
]  # fmt: skip


USES: dict[str, Callable[[Any], Any]] = {
    "square": lambda out: out.square().sum(), "sum": lambda out: out.sum(),
    "tanh": lambda out: out.tanh().sum(), "detached": lambda out: out.detach().sum(),
}  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """Bags that are looked up, of other ids with each seed, and the way in which they are given."""

    seed: int
    batch: int
    longest: int
    form: str
    weighted: bool

    @property
    def ids(self) -> list[Any]:
        return [
            torch.from_numpy(self._drawn(n).integers(0, n, sum(self.lengths))) for n, _ in SIZES
        ]

    @property
    def lengths(self) -> list[int]:
        if self.form == "square":
            return [3] * self.batch
        return self._drawn(0).integers(0, self.longest + 1, self.batch).tolist()

    @property
    def factors(self) -> list[Any] | None:
        """Those of each id; new leaves."""
        drawn = [
            torch.from_numpy(self._drawn(n).standard_normal(sum(self.lengths))) for n, _ in SIZES
        ]
        return [one.requires_grad_() for one in drawn] if self.weighted else None

    def _drawn(self, n: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, n])

    def offsets(self, *, last: bool = False) -> Any:
        bounds = torch.tensor([0, *self.lengths]).cumsum(0)
        return bounds if last else bounds[:-1]

    def theirs(self, modules: Any, factors: Any) -> Any:
        each = zip(modules, self.ids, factors or [None] * len(SIZES), strict=True)
        return torch.cat([m(i, self.offsets(), per_sample_weights=f) for m, i, f in each], 1)

    def ours(self, bags: Any, factors: Any) -> Any:
        """What becomes of the ids afterwards does not matter."""
        ids, offsets = self.ids, [self.offsets()] * len(SIZES)
        if self.form == "square":
            shaped = factors and [f.reshape(-1, 3) for f in factors]
            ids = [own.reshape(-1, 3) for own in ids]
            out = bags(ids, None, shaped)
        elif self.form == "joined":
            ids, (first, second) = [torch.cat(ids)], (self.offsets(last=True) for _ in SIZES)
            bounds = torch.cat([first[:-1], first[-1] + second])
            out = bags(ids[0], bounds, factors and torch.cat(factors))
        else:
            out = bags(ids, offsets, factors)
        for own in ids:
            own.fill_(0)
        return out


@st.composite
def forwards(draw: st.DrawFn, *, weighted: bool) -> tuple[Forward, str, bool]:
    """With the use of its output, and whether that is multiplied by one of other ids."""
    longest, form = draw(st.sampled_from([6, 6, 200])), ["offsets", "square", "joined"]
    of = Forward(
        draw(st.integers(0, 99)), draw(st.integers(0, 12)), longest, draw(st.sampled_from(form)),
        weighted and draw(st.booleans()))  # fmt: skip
    return of, draw(st.sampled_from([*USES])), draw(st.booleans())


@pytest.mark.parametrize(("name", "sparse", "options"), DENSE, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_programs(name: str, sparse: str, options: dict[str, Any], data: st.DataObject) -> None:
    """Forwards, penalties and gradients that were left, beside PyTorch's modules and optimizer. The
    row that counts for nothing is another one in each step."""
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    theirs = modules_of(mode)
    ours = fused.EmbeddingBags(copy.deepcopy(theirs))
    dense = getattr(torch.optim, name)(theirs.parameters(), **options)
    optimizer = getattr(fused, name)(ours.parameters(), sparse=sparse, **options)
    in_backward = data.draw(st.booleans())
    if in_backward:
        ours.update_in_backward(optimizer)
    calls = st.lists(forwards(weighted=mode == "sum"), min_size=1, max_size=3)
    for step in range(data.draw(st.integers(1, 4))):
        padding = data.draw(st.sampled_from([None, 2, -8, 0]))
        for module in (*theirs, *ours.children()):
            module.padding_idx = padding
        every, term = data.draw(calls), data.draw(st.none() | st.sampled_from([*TERMS]))
        is_left = data.draw(st.booleans())
        factors = []
        for modules, method in ((theirs, "theirs"), (ours, "ours")):
            weights = list(modules.parameters())
            if is_left:
                weights[0].square().sum().backward()
            own, loss = [forward.factors for forward, *_ in every], torch.zeros(())
            for (forward, use, is_product), of_ids in zip(every, own, strict=True):
                out = getattr(forward, method)(modules, of_ids)
                if is_product:
                    other = replace(forward, seed=forward.seed + 1, weighted=False)
                    out = out * getattr(other, method)(modules, None)
                loss = loss + USES[use](out)
            one = Forward(step, 4, 6, "offsets", weighted=False)  # which steps in any case
            loss = loss + getattr(one, method)(modules, None).square().sum()
            loss = loss + sum(TERMS[term](w).to_dense() for w in weights) if term else loss
            loss.backward()
            factors.append([f.grad for each in own if each for f in each])
        for a, b in zip(*factors, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        dense.step()
        dense.zero_grad()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
        assert all(w.grad is None for w in ours.weights)
        assert all(s["step"] == step + 1 for s in optimizer.state.values() if "step" in s)
        assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("term", TERMS)
def test_gradients_from_elsewhere_act(term: str, dtype: Any) -> None:
    theirs, dense, ours, _ = pair()
    ours.to(dtype)
    for _ in range(3):
        dense.zero_grad()
        loss = pooled(theirs, IDS).square().sum()
        (loss + sum(TERMS[term](m.weight).to_dense() for m in theirs)).backward()
        dense.step()
        loss = ours(IDS).square().sum() + sum(map(TERMS[term], ours.weights))
        if dtype == torch.float16 and term == "a sparse module with the same weight":
            tables = before(ours)
            kind = NotImplementedError if TORCH >= (2, 7) else RuntimeError
            with pytest.raises(kind, match="Half"):  # of PyTorch's sum of such
                loss.backward()
            assert_as(ours, tables)
            return
        loss.backward()
        assert all(w.grad is None for w in ours.weights)
    close = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.detach().double(), other.detach(), **close)


def test_a_gradient_that_no_step_takes_changes_nothing() -> None:
    """A class for sparse gradients alone refuses a penalty, and keeps it in ``.grad``."""
    bags, optimizer = stepping(fused.SparseAdam)
    tables = before(bags)
    with pytest.raises(RuntimeError, match="dense gradients"):
        (bags(IDS).sum() + bags.weights[1].square().sum()).backward()
    assert_as(bags, tables)
    assert not optimizer.state
    assert torch.equal(bags.weights[1].grad, 2 * tables[1])
    bags.weights[1].grad = None
    bags(IDS).sum().backward()
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_checkpoints(calls: int, is_reentrant: bool) -> None:
    """Forwards within a backward, and backwards within it, are parts of one step."""
    theirs, dense, ours, optimizer = pair()

    def loss(f: Any, is_kept: bool) -> Any:
        total, one = torch.zeros(()), torch.ones((), requires_grad=True)
        for k in range(calls):

            def part(x: Any, k: int = k) -> Any:
                return (f([i.roll(k) for i in IDS]) * x).square().sum()

            kept = {"use_reentrant": is_reentrant}
            total = total + (checkpoint(part, one, **kept) if is_kept else part(one))
        return total

    for _ in range(3):
        dense.zero_grad()
        loss(lambda ids: pooled(theirs, ids), False).backward()
        dense.step()
        loss(ours, True).backward()
    assert_close(ours, theirs)
    assert all(s["step"] == 3 for s in optimizer.state.values())


def test_a_backward_that_fails_leaves_nothing_for_the_next() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(*_: Any) -> Any:
            raise ArithmeticError

    theirs, dense, ours, _ = pair()
    x = torch.ones((), requires_grad=True)
    for _ in range(3):
        tables = before(ours)
        y = Failing.apply(x)  # whose node comes after that of the bags
        with pytest.raises(ArithmeticError):
            (ours(IDS) * y).sum().backward()
        assert_as(ours, tables)
        dense.zero_grad()
        pooled(theirs, IDS).sum().backward()
        dense.step()
        ours(IDS).sum().backward()
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad"])
def test_both_ways_of_a_gradient(name: str, dtype: Any) -> None:
    """In backward, and left for a step: the same bits; learning rates follow schedulers."""
    fast, slow = (fused.EmbeddingBags(modules_of(dtype=dtype)) for _ in range(2))
    optimizers = [getattr(fused, name)(m.parameters(), lr=0.1) for m in (fast, slow)]
    fast.update_in_backward(optimizers[0])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for step in range(3):
        forward = Forward(step, 30, 6, "offsets", weighted=False)
        for module, optimizer in zip((fast, slow), optimizers, strict=True):
            out = forward.ours(module, None)
            assert out.dtype == dtype
            out.square().sum().backward()
            if module is slow:
                assert all(w.grad.is_sparse for w in module.parameters())
                optimizer.step()
                optimizer.zero_grad()
            assert all(w.grad is None for w in module.parameters())
        for scheduler in schedulers:
            scheduler.step()
        assert_as(fast, before(slow))
    assert optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**3


def test_gradients_are_accumulated_and_clipped() -> None:
    """As those of PyTorch's modules with sparse gradients."""
    theirs, norms = modules_of(sparse=True), []
    ours = fused.EmbeddingBags(modules_of())
    for k in range(2):
        ids = [own.roll(k) for own in IDS]
        for out in (pooled(theirs, ids), ours(ids)):
            out.square().sum().backward()
    for module in (theirs, ours):
        optimizer = fused.LazyAdam(module.parameters(), lr=0.1)
        norms.append(fused.clip_grad_norm_(module.parameters(), 0.5))
        optimizer.step()
    torch.testing.assert_close(*norms)
    assert_close(theirs, ours)


def test_a_scaler_works_on_gradients_and_is_refused_in_backward() -> None:
    for in_backward in (False, True):
        bags = fused.EmbeddingBags(modules_of())
        optimizer = fused.LazyAdam(bags.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if in_backward:
            bags.update_in_backward(optimizer)
        scaler.scale(bags(IDS).sum()).backward()
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


# What a backward is asked for


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_that_are_asked_for_take_no_step(dtype: Any) -> None:
    bags, optimizer = stepping()
    tables = before(bags)
    factors = [torch.rand(2, 3, dtype=dtype, requires_grad=True) for _ in SIZES]

    def out() -> Any:
        return bags(IDS, None, factors).sum()

    for own, table, ids in zip(torch.autograd.grad(out(), factors), tables, IDS, strict=True):
        torch.testing.assert_close(own, table[ids].sum(2).to(dtype))
    (left,) = torch.autograd.grad(bags(IDS).sum(), [bags.weights[1]])
    assert left.to_dense().sum() == 6 * 8
    both = torch.autograd.grad(out(), [factors[0], bags.weights[0]])
    assert [x.is_sparse for x in both] == [False, True]
    out().backward(inputs=factors)
    assert_as(bags, tables)
    assert not optimizer.state
    assert all(w.grad is None for w in bags.weights)
    out().backward(inputs=[bags.weights[1]])
    assert torch.equal(bags.weights[0], tables[0])
    assert not torch.equal(bags.weights[1], tables[1])
    loss = out()
    torch.autograd.grad(loss, factors, retain_graph=True)
    loss.backward()
    assert not torch.equal(bags.weights[0], tables[0])


def test_backward_twice_and_gradients_of_gradients_are_refused() -> None:
    bags, _ = stepping(fused.SGD)
    factors = [torch.rand(2, 3, requires_grad=True) for _ in SIZES]
    found, _ = torch.autograd.grad(
        bags(IDS, None, factors).square().sum(), factors, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()
    loss = bags(IDS).sum()
    loss.backward(retain_graph=True)
    with refused(RuntimeError, "has updated the tables already", bags):
        loss.backward()


def test_gradients_are_let_go() -> None:
    """With the last reference that a user has."""
    bags, _ = stepping(fused.SGD)
    for _ in range(2):
        array = np.ones((2, 12), np.float32)
        kept, grad = weakref.ref(array), torch.from_numpy(array)
        bags(IDS).backward(grad)
        del array, grad
        assert kept() is None


def test_an_error_in_backward_changes_nothing() -> None:
    bags, optimizer = stepping()
    tables, loss = before(bags), bags(IDS).sum()
    optimizer.state[bags.weights[1]] = {"step": torch.tensor(1.0)}
    with pytest.raises(RuntimeError, match="lacks"):
        loss.backward(retain_graph=True)
    assert all(w.grad is None for w in bags.weights)
    assert_as(bags, tables)
    optimizer.state.clear()
    loss.backward()  # the same again, as nothing was done
    assert not torch.equal(bags.weights[0], tables[0])


def test_frozen_tables() -> None:
    """They rest, also where a gradient of before is left; the others step, or have gradients."""
    bags, _ = stepping(fused.Adagrad)
    frozen, other = bags.weights
    frozen.requires_grad_(False)
    frozen.grad = left = torch.ones_like(frozen)
    tables = before(bags)
    bags(IDS).sum().backward()
    assert torch.equal(frozen, tables[0])
    assert frozen.grad is left
    assert (other != tables[1]).any(1).nonzero().flatten().tolist() == [0, 3, 7, 29]
    bags.update_in_backward(None)
    bags(IDS).sum().backward()
    assert frozen.grad is left
    assert other.grad.to_dense()[[3, 7], 0].tolist() == [1, 3]


# Hooks, and steps of others


def test_hooks_of_a_step_see_no_stand_in() -> None:
    bags, optimizer = stepping()
    seen: list[Any] = []

    def see(name: str) -> Any:
        def hook(one: Any, args: Any, kwargs: Any) -> None:
            assert one is optimizer
            assert (args, kwargs) == ((optimizer,), {})
            seen.append((name, [w.grad for w in bags.weights]))

        return hook

    handles = [
        optimizer.register_step_pre_hook(see("pre")),
        optimizer.register_step_post_hook(see("post")),
        register_optimizer_step_pre_hook(see("all, pre")),
        register_optimizer_step_post_hook(see("all, post")),
    ]
    try:
        bags(IDS).sum().backward()
        assert [name for name, _ in seen] == ["all, pre", "pre", "post", "all, post"]
        assert all(grads == [None, None] for _, grads in seen)
        seen.clear()
        (bags(IDS).sum() + bags.weights[0].sum()).backward()
        grads = dict(seen)
        assert torch.equal(grads["pre"][0], torch.ones(9, 4))
        assert grads["pre"][1] is None
        assert grads["post"] == [None, None]
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_may_change_what_came_from_elsewhere() -> None:
    bags, optimizer = stepping(fused.SGD)
    tables = before(bags)
    optimizer.register_step_pre_hook(lambda *_: setattr(bags.weights[0], "grad", None))
    (bags(IDS).sum() + bags.weights[0].sum()).backward()
    counts = torch.bincount(IDS[0].reshape(-1), minlength=9)[:, None]
    torch.testing.assert_close(bags.weights[0].detach(), tables[0] - 0.1 * counts)


def test_a_hook_that_raises_stops_the_step() -> None:
    bags, optimizer = stepping()
    tables = before(bags)

    def stop(*_: Any) -> None:
        raise ArithmeticError

    handle = optimizer.register_step_pre_hook(stop)
    loss = bags(IDS).sum()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    assert_as(bags, tables)
    handle.remove()
    loss.backward()
    assert not torch.equal(bags.weights[0], tables[0])


def test_a_hook_of_a_step_may_go_backward() -> None:
    bags, optimizer = stepping()
    depth = []

    def again(*_: Any) -> None:
        if len(depth) < 2:
            depth.append(1)
            with torch.enable_grad():
                bags(IDS).sum().backward()

    optimizer.register_step_post_hook(again)
    bags(IDS).sum().backward()
    assert all(s["step"] == 3 for s in optimizer.state.values())


def test_who_may_step() -> None:
    bags, optimizer = stepping()
    first = bags.weights[0]
    for call in (
        optimizer.step, lambda: optimizer.step(param=first),
        lambda: optimizer.step(lambda: first.sum()),
        lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1).optimizer.step(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="the optimizer steps in backward, not by step"):
            call()
    other = fused.EmbeddingBags(list(bags.children()))
    with pytest.raises(ValueError, match="optimizer steps in backward already"):
        other.update_in_backward(optimizer)
    bags.update_in_backward(optimizer)  # once more
    bags(IDS).sum().backward()
    copy.deepcopy(optimizer).step()  # has no gradients
    del bags  # nobody steps in its backward any more
    optimizer.step()
    other.update_in_backward(optimizer)


def test_another_optimizer_takes_over() -> None:
    """The one before takes steps again, in its own way, and none in backward."""
    bags, first = stepping(fused.SGD, [(9, 4)], lr=1.0)
    second = fused.SGD(bags.parameters(), lr=0.5)
    bags.update_in_backward(second)
    (table,) = before(bags)
    bags([torch.tensor([[1]])]).sum().backward()
    assert torch.equal(bags.weights[0][1], table[1] - 0.5)
    bags.weights[0].grad = torch.ones(9, 4)
    first.step()
    with pytest.raises(RuntimeError, match="the optimizer steps in backward"):
        second.step()


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_in_backward(threads: int) -> None:
    """Every backward is a step, and none is lost."""
    bags, optimizer = stepping(fused.LazyAdam)

    def work(k: int) -> None:
        for i in range(60):
            loss = bags([own.roll(k) for own in IDS]).sum()
            if i % 3 == 0:
                loss = loss + bags(IDS).sum()
            loss.backward()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        at_once([partial(work, k) for k in range(threads)])
    finally:
        sys.setswitchinterval(interval)
    assert all(s["step"] == 60 * threads for s in optimizer.state.values())
    assert all(w.grad is None and w.isfinite().all() for w in bags.weights)
    bags(IDS).sum().backward()


# Weights that were replaced, and copies


def assigned(bags: Any) -> None:
    bags.load_state_dict({f"{k}.weight": torch.rand(n, d) for k, (n, d) in enumerate(SIZES)},
                         assign=True)  # fmt: skip


def assigned_before(bags: Any) -> None:
    modules = modules_of(dtype=torch.float32)
    state = modules.state_dict()
    modules.load_state_dict(state, assign=True)  # puts parameters into it
    bags.load_state_dict(state)


def grown(bags: Any) -> None:
    bags.get_submodule("0").weight = torch.nn.Parameter(torch.rand(20, 4))


def another_module(bags: Any) -> None:
    setattr(bags, "1", torch.nn.EmbeddingBag(30, 8, mode="sum", sparse=True))


def converted(bags: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        bags.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REPLACED = [assigned, assigned_before, grown, another_module, converted]


@pytest.mark.parametrize("replace", REPLACED, ids=lambda f: f.__name__)
def test_replaced_weights_are_refused_until_the_optimizer_has_them(replace: Any) -> None:
    bags, optimizer = stepping()
    bags(IDS).sum().backward()
    replace(bags)
    tables = before(bags)
    for _ in range(2):
        if all(a is b for a, b in zip(bags.weights, optimizer.param_groups[0]["params"])):  # noqa: B905
            break  # what was loaded was copied
        with pytest.raises(ValueError, match=r"the weight of table \d was replaced"):
            bags(IDS)
        with torch.no_grad():
            assert bags(IDS).shape == (2, 12)
    assert_as(bags, tables)
    optimizer.param_groups[0]["params"] = bags.weights
    bags(IDS).sum().backward()
    assert not torch.equal(bags.weights[0], tables[0])
    bags.update_in_backward(None)
    bags(IDS).sum().backward()
    assert all(w.grad is not None for w in bags.weights)


def test_weights_that_are_replaced_between_forward_and_backward() -> None:
    bags, _ = stepping()
    old = bags.weights
    tables = before(bags)
    out = bags(IDS).sum()
    grown(bags)
    fused_anew = fused.LazyAdam(bags.parameters(), lr=0.1)
    bags.update_in_backward(fused_anew)
    with pytest.raises(ValueError, match="the weight of table 0 was replaced"):
        out.backward()
    for weight, table in zip(old, tables, strict=True):
        assert torch.equal(weight.detach(), table)


def test_weights_need_the_tables_of_their_forward() -> None:
    """A table that has changed, or lies elsewhere, gives no gradients of weights; nothing steps."""
    for change in (
        lambda weight: weight.mul_(2), lambda weight: weight.set_(weight.clone()),
        lambda weight: setattr(weight, "data", weight.clone()),
    ):  # fmt: skip
        bags, _ = stepping(fused.SGD, [(9, 4)])
        factors = torch.ones(1, 2, requires_grad=True)
        out = bags([torch.tensor([[1, 2]])], None, [factors])
        with torch.no_grad():
            change(bags.weights[0])
        tables = before(bags)
        with pytest.raises(RuntimeError, match="the tables have changed since the forward"):
            out.sum().backward()
        assert factors.grad is None
        assert_as(bags, tables)


def test_tensors_that_were_replaced() -> None:
    """Also by wider ones, of which a gradient from before is none."""
    bags, _ = stepping(fused.SGD, [(4, 4)])
    ids = [torch.tensor([[1, 1]])]
    for _ in range(2):
        bags.weights[0].data = torch.ones(4, 4)
        out = bags(ids)
        assert out.tolist() == [[2, 2, 2, 2]]
        out.sum().backward()
        assert (bags.weights[0][1] != 1).all()
    out = bags(ids)
    bags.weights[0].data = torch.rand(4, 8)
    tables = before(bags)
    bags(ids)
    with pytest.raises(RuntimeError, match=r"has a wrong shape: expected \(4, 8\), got \(4, 4\)"):
        out.sum().backward()
    assert_as(bags, tables)
    assert bags.weights[0].grad is None


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


def test_functional_calls() -> None:
    bags, _ = stepping()
    tables = before(bags)
    given = {f"{k}.weight": w.clone().requires_grad_() for k, w in enumerate(tables)}
    with pytest.raises(ValueError, match="the weight of table 0 was replaced"):
        torch.func.functional_call(bags, given, (IDS,))
    frozen = {name: w.detach() for name, w in given.items()}
    assert torch.equal(torch.func.functional_call(bags, frozen, (IDS,)), bags(IDS))
    bags.update_in_backward(None)
    torch.func.functional_call(bags, given, (IDS,)).sum().backward()
    assert all(w.grad.is_sparse for w in given.values())
    assert_as(bags, tables)


def saved(bags: Any) -> Any:
    file = io.BytesIO()
    torch.save(bags, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "save": saved,
    "of a model": lambda bags: copy.deepcopy(torch.nn.Sequential(bags))[0],
    "save of a model": lambda bags: saved(torch.nn.Sequential(bags))[0],
}  # fmt: skip


@pytest.mark.parametrize("way", COPIES)
def test_copies_train(way: str) -> None:
    """They leave gradients, and then step in backward too, as the first one still does."""
    bags, optimizer = stepping()
    bags(IDS).sum().backward()
    tables = before(bags)
    copied = COPIES[way](bags)
    with pytest.warns(RuntimeWarning, match="update_in_backward"):
        copied(IDS).sum().backward()
    COPIES[way](copied)(IDS).sum().backward()  # of one that has warned
    assert all(w.grad.is_sparse for w in copied.weights)
    own = fused.LazyAdam(copied.parameters(), lr=0.1)
    own.step()
    own.zero_grad()
    assert_as(bags, tables)
    copied.load_state_dict(bags.state_dict())
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied.update_in_backward(own)
    for module in (bags, copied):
        module(IDS).sum().backward()
    assert_as(bags, before(copied))
    assert not torch.equal(bags.weights[0], tables[0])


def test_the_state_of_modules_both_ways() -> None:
    theirs = modules_of()
    model = torch.nn.ModuleDict({"tables": copy.deepcopy(theirs)})
    ours = torch.nn.ModuleDict({"tables": fused.EmbeddingBags(modules_of())})
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    ours.load_state_dict(model.state_dict())
    assert_as(ours, before(model))
    model.load_state_dict(ours.state_dict())
    assert [*ours.state_dict()] == [*model.state_dict()]
    bags = fused.EmbeddingBags(OrderedDict(user=theirs[0], item=theirs[1]))
    assert [*bags.state_dict()] == ["user.weight", "item.weight"]
    assert bags.weights[0] is theirs[0].weight
