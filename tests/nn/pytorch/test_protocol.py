"""What PyTorch asks of an optimizer beside its numbers: hooks, closures, groups, copies, files."""

import copy
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from fusestep.nn import torch as fused

from torch_training import (  # isort: skip
    DENSE, EVERY, FOLDERS, TABLES, Tagger, assert_equal_models, assert_same_bits, batch_of, loss_of,
    net, snapshot, through_folder, train)  # fmt: skip


def pair(name: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Our model and optimizer, and PyTorch's."""
    mine, other = net(), net()
    ours = getattr(fused, name)(mine.parameters(), **options)
    return mine, ours, other, getattr(torch.optim, name)(other.parameters(), **options)


def made(name: str, model: Any, **options: Any) -> Any:
    """An optimizer of any class for any model: sparse gradients need a word for some."""
    has_tables = isinstance(model, Tagger)
    if has_tables and name in TABLES:
        options["sparse"] = "touched"
    if has_tables:
        groups = [*model.words.parameters(), *model.tags.parameters()]
        return getattr(fused, name)(groups, **options)
    return getattr(fused, name)(model.parameters(), **options)


def model_for(name: str) -> Any:
    """One whose gradients the class takes."""
    return Tagger() if name in TABLES else net()


# Hooks


def add(events: list[str], what: str) -> Any:
    return lambda *_: events.append(what)


def test_hooks_run_in_order_and_once() -> None:
    model, events = net(), []

    class Noisy(fused.Adam):
        def scalars(self, *given: Any) -> Any:
            events.append("step")
            return super().scalars(*given)

    fused.Adam(net().parameters())  # the parent has its hooks first
    optimizer = Noisy(model.parameters())
    handles = [
        register_optimizer_step_pre_hook(add(events, "all before")),
        register_optimizer_step_post_hook(add(events, "all after")),
        optimizer.register_step_pre_hook(add(events, "before")),
        optimizer.register_step_post_hook(add(events, "after")),
    ]
    try:
        train(model, optimizer, range(2))
        assert events == ["all before", "before", "step", "after", "all after"] * 2
    finally:
        for handle in handles:
            handle.remove()
    train(model, optimizer, range(1))
    assert events[10:] == ["step"]


@pytest.mark.parametrize("name", EVERY)
def test_hooks_run_once_for_subclasses(name: str) -> None:
    parent = getattr(fused, name)
    child = type("Child", (parent,), {})
    events: list[str] = []
    for cls in (child, parent, type("Grandchild", (child,), {})):
        model = model_for(name)
        optimizer = made(name, model) if cls is parent else cls(model.parameters())
        optimizer.register_step_pre_hook(add(events, "before"))
        optimizer.register_step_post_hook(add(events, "after"))
        optimizer.step()  # nothing has a gradient
    assert events == ["before", "after"] * 3


def test_a_hook_may_replace_the_arguments() -> None:
    optimizer = fused.SGD(net().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda self, *_: ((self, lambda: "of the hook"), {}))
    assert optimizer.step(lambda: "given") == "of the hook"


# Closures


@pytest.mark.parametrize("name", DENSE)
def test_a_closure_is_called_once_with_derivatives(name: str) -> None:
    mine, ours, other, theirs = pair(name)
    for step in range(4):
        results = []
        for model, optimizer in ((mine, ours), (other, theirs)):
            calls = []

            def closure(model: Any = model, optimizer: Any = optimizer, calls: Any = calls) -> Any:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = loss_of(model, step)  # noqa: B023
                loss.backward()
                return loss

            with torch.no_grad():
                results.append(float(optimizer.step(closure=closure)))
                assert not torch.is_grad_enabled()
            assert calls == [True]
        assert results[0] == pytest.approx(results[1], rel=1e-11)
    assert_equal_models(mine, other)


def test_a_closure_that_raises_changes_nothing() -> None:
    model = net()
    optimizer = fused.Adam(model.parameters())
    train(model, optimizer, range(2))
    before, count = snapshot(model), float(optimizer.state[model[0].weight]["step"])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert_same_bits(model.parameters(), before)
    assert float(optimizer.state[model[0].weight]["step"]) == count


# Gradients


@pytest.mark.parametrize("name", EVERY)
def test_gradients_stay_as_they_are(name: str) -> None:
    model = model_for(name)
    optimizer = made(name, model, maximize=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        before = [g.clone() for g in held]
        optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                g, b = held.pop(0), before.pop(0)
                assert p.grad is g
                assert g.layout == b.layout
                if g.is_sparse:
                    assert not g.is_coalesced()
                    assert torch.equal(g._indices(), b._indices())
                    g, b = g._values(), b._values()
                assert torch.equal(g, b)


@pytest.mark.parametrize("name", EVERY)
def test_parameters_without_a_gradient_are_left_out(name: str) -> None:
    model = model_for(name)
    optimizer = made(name, model)
    first, second, *_ = model.parameters()
    loss_of(model, 0).backward()
    first.grad, before = None, first.detach().clone()
    optimizer.step()
    assert torch.equal(first, before)
    if name == "Adagrad":  # has states from the beginning, as PyTorch's
        assert float(optimizer.state[first]["step"]) == 0.0
    else:
        assert first not in optimizer.state
    count = optimizer.state[second].get("step")
    second.grad = None
    optimizer.step()
    assert count is None or float(optimizer.state[second]["step"]) == 1.0


@pytest.mark.parametrize("name", [name for name in EVERY if name != "Prodigy"])
def test_steps_within_the_backward_pass_are_one_step_of_all(name: str) -> None:
    mine, other = model_for(name), model_for(name)
    ours, theirs = made(name, mine), made(name, other)

    def update(parameter: Any) -> None:
        ours.step(param=parameter)
        parameter.grad = None

    for group in ours.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(update)
    for step in range(5):
        loss_of(mine, step).backward()
    train(other, theirs, range(5))
    assert_same_bits(mine.parameters(), other.parameters())
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        values, expected = ours.state[p].values(), theirs.state[q].values()
        assert_same_bits(map(torch.as_tensor, values), map(torch.as_tensor, expected))


def test_a_parameter_that_changes_its_group_steps_as_that_says() -> None:
    parameter, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    of_each = [{"params": [p], "lr": lr} for p, lr in ((parameter, 1.0), (other, 10.0))]
    optimizer = fused.SGD(of_each, momentum=0.0)
    first, second = optimizer.param_groups
    parameter.grad = torch.ones(2)
    for _ in range(2):
        optimizer.step(param=parameter)
    first["params"], second["params"] = second["params"], first["params"]
    optimizer.step(param=parameter)
    assert parameter.tolist() == [-12.0] * 2


def test_a_state_that_was_there_stays_the_same_dict() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = fused.Adam([parameter])
    own = optimizer.state[parameter]
    own["note"], parameter.grad = "of a user", torch.ones(2)
    optimizer.step()
    assert optimizer.state[parameter] is own and {"note", "exp_avg"} <= own.keys()


def test_a_foreign_parameter_is_refused() -> None:
    optimizer = fused.SGD(net().parameters())
    with pytest.raises(ValueError, match="param is foreign"):
        optimizer.step(param=torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("name", EVERY)
def test_a_stale_backward_raises(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = getattr(fused, name)([weight])
    loss = (weight * weight).sum()
    is_sparse = name == "SparseAdam"
    for _ in range(2):  # the second by what is kept of the first
        weight.grad = torch.ones(3, 3).double()
        weight.grad = weight.grad.to_sparse(1) if is_sparse else weight.grad
        version = weight._version
        optimizer.step()
        assert weight._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)
        loss = (weight * weight).sum()


# Groups


def test_an_added_group_has_our_options() -> None:
    model = Tagger()
    optimizer = fused.AdamW(model.words.parameters(), sparse="touched")
    optimizer.add_param_group({"params": model.tags.parameters(), "sparse": "all"})
    assert [group["sparse"] for group in optimizer.param_groups] == ["touched", "all"]
    optimizer.add_param_group({"params": model.head.parameters()})
    assert optimizer.param_groups[-1]["sparse"] == "touched"
    with pytest.raises(ValueError, match="sparse is unknown"):
        optimizer.add_param_group({"params": [torch.ones(1)], "sparse": "some"})


# Copies and files


def by_state_dict(model: Any, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(saved["model"])
    again = made(type(optimizer).__name__, fresh)
    again.load_state_dict(saved["optimizer"])
    return fresh, again


COPIES: dict[str, Any] = {
    "deepcopy": lambda *both: copy.deepcopy(both),
    "pickle": lambda *both: pickle.loads(pickle.dumps(both)), "file": by_state_dict,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*distributed is.*:UserWarning")
@pytest.mark.parametrize("copied", [*COPIES, *FOLDERS])
@pytest.mark.parametrize("name", EVERY)
def test_copies_go_on_as_the_original(name: str, copied: str) -> None:
    if name == "SGD" and copied == "full folder":
        pytest.skip("PyTorch refuses optimizers without states there")
    model = model_for(name)
    optimizer = made(name, model)
    train(model, optimizer, range(3))
    optimizer.zero_grad()  # PyTorch copies gradients too, but for those of no leaf
    if copied in FOLDERS:  # where a new optimizer has to make states
        fresh = copy.deepcopy(model)
        model_2, optimizer_2 = through_folder(
            model, optimizer, fresh, made(name, fresh), **FOLDERS[copied]
        )
    else:
        model_2, optimizer_2 = COPIES[copied](model, optimizer)
    at_copy = snapshot(model_2)
    train(model, optimizer, range(3, 6))
    assert_same_bits(model_2.parameters(), at_copy)  # nothing is shared
    train(model_2, optimizer_2, range(3, 6))
    assert_same_bits(model.parameters(), model_2.parameters())
    assert optimizer_2.param_groups[0].keys() == optimizer.param_groups[0].keys()


@pytest.mark.parametrize("flag", ["fused", "capturable"])
def test_fused_and_captured_runs_go_on(flag: str) -> None:
    """As PyTorch's own, and back to it; hooks see the flags, and what they write stays."""
    runs: dict[Any, Any] = {}
    for package in (torch.optim, fused):
        parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12))
        first = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        runs[package] = parameter, package.AdamW([parameter])
        for k in range(3):
            parameter.grad = torch.cos(parameter.detach() * k)
            first.step()
        saved = copy.deepcopy(first.state_dict())
        saved["param_groups"][0]["fused"] = True if flag == "fused" else None
        saved["param_groups"][0]["capturable"] = flag == "capturable" and package is fused
        seen: list[Any] = []

        def hook(optimizer: Any, seen: list[Any] = seen) -> None:
            seen.append(optimizer.param_groups[0][flag])
            (state,) = optimizer.state.values()
            state["step"] = torch.tensor(float(state["step"]) + 4.0)

        runs[package][1].register_load_state_dict_post_hook(hook)
        runs[package][1].load_state_dict(saved)
        assert seen == [saved["param_groups"][0][flag]]
    for _ in range(2):
        for k in range(3):
            for p, optimizer in runs.values():
                p.grad = torch.sin(p.detach() + k)
                optimizer.step()
        (p, theirs), (q, ours) = runs.values()
        torch.testing.assert_close(q, p)
        of_theirs, of_ours = theirs.state_dict(), ours.state_dict()
        torch.testing.assert_close(of_ours["state"], of_theirs["state"])
        found, expected = of_ours["param_groups"][0], of_theirs["param_groups"][0]
        assert found[flag] is True
        assert {**found, **expected, flag: True} == found
        theirs.load_state_dict({**of_ours, "param_groups": [expected]})
        ours.load_state_dict({**of_theirs, "param_groups": [found]})


def entries_of_others() -> dict[str, Any]:
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1), (3,), check_invariants=True)
    return {"number": 3, "none": None, "list": [1.0, torch.ones(2, dtype=torch.float16)],
            "dict": {"a": torch.ones(2, dtype=torch.int32)}, "vector": torch.ones(3),
            "single": torch.tensor(2.0), "rows": rows}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_entries_of_others_go_through_states(name: str) -> None:
    """Beside states, in the place of states that were not made yet, and under keys of their own."""
    model, other = model_for(name), model_for(name)
    optimizer, fresh = made(name, model), made(name, other)
    train(model, optimizer, range(2))
    last = optimizer.param_groups[0]["params"][-1]
    for p in list(optimizer.state):
        optimizer.state[p].update(entries_of_others())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] |= {"wrapper": entries_of_others(), **entries_of_others()}
    fresh.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    for own in (fresh.state["wrapper"], fresh.state, fresh.state.get(last, entries_of_others())):
        assert own["number"] == 3 and own["none"] is None and own["rows"].is_sparse
        assert own["vector"].dtype == torch.float32 and len(own["list"]) == 2
    assert fresh.state_dict()["state"]["wrapper"]["dict"]["a"].dtype == torch.int32
    for key in ("wrapper", *entries_of_others()):
        del fresh.state[key]
    train(model, optimizer, range(2, 4))
    train(other, fresh, range(2, 4))
    assert_same_bits(model.parameters(), other.parameters())
    before = dict(fresh.state)
    for value in (3, None, [1]):
        with pytest.raises(TypeError, match=f"^{name}: state of parameter 0 has a wrong type"):
            fresh.load_state_dict({**saved, "state": {**saved["state"], 0: value}})
    assert fresh.state.keys() == before.keys()


def test_a_profiled_step_has_its_mark() -> None:
    model = net()
    optimizer = fused.AdamW(model.parameters())
    for seen in range(2):
        with torch.autograd.profiler.profile(enabled=bool(seen), use_kineto=False) as found:
            train(model, optimizer, [seen])
    assert "Optimizer.step#AdamW.step" in {event.key for event in found.key_averages()}


# Compiled models and steps


def test_compiled_models_and_steps() -> None:
    mine, other = net(), net()
    ours, theirs = fused.AdamW(mine.parameters()), torch.optim.AdamW(other.parameters())
    compiled = torch.compile(mine, backend="eager")
    train(compiled, ours, range(3))
    step = torch.compile(ours.step, backend="eager")
    for k in range(3, 6):
        ours.zero_grad()
        loss_of(compiled, k).backward()
        step()
    train(other, theirs, range(6))
    assert_equal_models(mine, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_within_a_compiled_function() -> None:
    mine, other = net(), net()
    ours = fused.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="eager")
    def once(x: Any) -> Any:
        loss = (mine(x) - 0.5).pow(2).sum()
        ours.zero_grad()
        loss.backward()
        ours.step()
        return loss

    for k in range(4):
        once(batch_of(k, mine))
    train(other, theirs, range(4))
    assert_equal_models(mine, other)
