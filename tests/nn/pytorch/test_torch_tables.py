"""All that belongs to a table of PyTorch: checked by each call before it writes."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from helpers import meanwhile
from torch_training import assert_same_bits, everything

N, D = 300, 8
ROWS = torch.tensor([3, 5])


def sparse(rows: Any = ROWS, value: float = 1.0) -> Any:
    values = torch.full((len(rows), D), value)
    return torch.sparse_coo_tensor(rows[None], values, (N, D), check_invariants=False)


def asleep(**options: Any) -> tuple[Any, Any]:
    """A table most of whose rows sleep, in a module, and its optimizer."""
    module = torch.nn.Embedding(N, D, sparse=True)
    optimizer = fused.AdamW(module.parameters(), lr=0.1, sparse="catch_up", **options)
    optimizer.watch(module)
    for _ in range(2):
        optimizer.prepare(module.weight, ROWS)
        module.weight.grad = sparse()
        optimizer.step()
    module.weight.grad = None
    return module, optimizer


def cut(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(8)
    return tensor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one number": lambda x: x.new_zeros(1), "fewer rows": lambda x: x[:-1].clone(),
    "more rows": lambda x: torch.cat((x, x)),
    "another dtype": lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.int8),
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0], "no memory": cut,
    "one place": lambda x: x.as_strided(x.shape, (0,) * x.dim()),
    "negative": lambda x: torch._neg_view(x) if x.is_floating_point() else x.to("meta"),
    "no tensor": lambda x: x.tolist(), "a part of another": lambda x: x.to_sparse(),
}  # fmt: skip
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "flush": lambda _, optimizer: optimizer.flush(),
    "prepare": lambda m, optimizer: optimizer.prepare(m.weight, torch.arange(N)),
    "state_dict": lambda _, optimizer: optimizer.state_dict(flush=True),
    "saved module": lambda m, _: m.state_dict(), "lookup": lambda m, _: m(torch.arange(N)),
    "reset_rows": lambda m, optimizer: optimizer.reset_rows(m.weight, ROWS, 0.0),
    "copy_rows": lambda m, optimizer: optimizer.copy_rows(m.weight, ROWS, ROWS + 2),
    "grow": lambda m, optimizer: optimizer.grow(m.weight, 2 * N),
    "step": lambda m, optimizer: stepped(m, optimizer),
}  # fmt: skip


def stepped(module: Any, optimizer: Any) -> None:
    module.weight.grad = sparse()
    optimizer.step()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq", "last_step"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_was_exchanged(change: str, role: str, call: str) -> None:
    """One that does not fit is refused before a number of the table or a state has changed."""
    module, optimizer = asleep()
    state = optimizer.state[module.weight]
    others = [state[name].clone() for name in ("exp_avg", "exp_avg_sq") if name != role]
    weight = module.weight.detach().clone()
    if change == "another dtype" and role != "last_step":
        state[role] = state[role].to(torch.int64)
    else:
        state[role] = CHANGES[change](state[role])
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        CALLS[call](module, optimizer)
    assert_same_bits([module.weight], [weight])
    kept = [state[name] for name in ("exp_avg", "exp_avg_sq") if name != role]
    assert_same_bits(kept, others)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("last", "step"), [(-1, 2), (-(2**31), 2), (9, 2), (0, 2**24), (0, float("nan"))]
)
def test_counts_that_are_no_steps(last: int, step: float, call: str) -> None:
    """Written into the states in place: refused where rows may be brought up to date."""
    module, optimizer = asleep()
    state, weight = optimizer.state[module.weight], module.weight.detach().clone()
    state["last_step"][7], state["step"] = last, torch.tensor(float(step))
    if call == "reset_rows" and step == step:
        return  # it reads no last steps
    with pytest.raises((RuntimeError, ValueError)):
        CALLS[call](module, optimizer)
    assert_same_bits([module.weight], [weight])


def test_states_that_lie_in_one_another() -> None:
    """Two moments in the same memory, and one in that of the weight."""
    for role in ("exp_avg", "weight"):
        module, optimizer = asleep()
        state = optimizer.state[module.weight]
        state["exp_avg_sq"] = module.weight.detach() if role == "weight" else state[role].detach()
        with pytest.raises(ValueError, match="shares memory"):
            optimizer.flush()


@pytest.mark.parametrize("role", ["exp_avg", "last_step", "idle_scalars"])
@pytest.mark.parametrize("change", ["one number", "fewer rows", "more rows"])
def test_a_loaded_state_of_another_shape(role: str, change: str) -> None:
    """Refused before anything is taken over, where rows of it sleep."""
    (_, saved), (_, optimizer) = asleep(), asleep()
    saved._saves_awake = False
    state = copy.deepcopy(saved.state_dict())
    state["state"][0][role] = CHANGES[change](state["state"][0][role])
    before = [x.clone() for x in everything(optimizer)]
    with pytest.raises(ValueError, match=f"{role!r}"):
        optimizer.load_state_dict(state)
    assert_same_bits(everything(optimizer), before)
    optimizer.flush()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scalars_that_are_no_numbers(value: float) -> None:
    """Of steps that rows have missed: refused in a load; those of other steps do not matter."""
    (_, saved), (module, optimizer) = asleep(), asleep()
    saved._saves_awake = False
    state = copy.deepcopy(saved.state_dict())
    state["state"][0]["idle_scalars"][500] = float("inf")  # of a step that no row missed
    optimizer.load_state_dict(copy.deepcopy(state))
    state["state"][0]["idle_scalars"][2, 0] = value
    with pytest.raises(ValueError, match="are no numbers"):
        optimizer.load_state_dict(state)
    optimizer.flush()
    assert torch.isfinite(module.weight).all()


# What is said of lookups that nobody has prepared


def program(how: str) -> list[str]:
    """A program with two tables; what was said in it."""
    torch.manual_seed(0)
    tables = [torch.nn.Embedding(N, D, sparse=True) for _ in range(2)]
    model: Any = torch.nn.ModuleList(tables)
    if how == "bags":
        model = fused.EmbeddingBags(tables)
    optimizer = fused.AdamW(model.parameters(), lr=0.1, sparse="catch_up")
    if how in ("watch", "resume", "one watched"):
        optimizer.watch(tables[0] if how == "one watched" else model)
    if how == "bags":
        model.update_in_backward(optimizer)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for k in range(12):
            ids = [torch.tensor([k % 3, 7, (2 * k) % 5]) for _ in tables]
            optimizer.zero_grad()
            if how == "flush":
                optimizer.flush()
            if how == "bags":
                model([own[:, None] for own in ids]).sum().backward()
                continue
            for table, own in zip(tables, ids, strict=True):
                if how == "prepare":
                    optimizer.prepare(table.weight, own)
                table(own).square().sum().backward()
            if how == "resume" and k == 6:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                for target, saved in zip((model, optimizer), state, strict=True):
                    target.load_state_dict(saved)
            optimizer.step()
    assert {w.filename for w in heard} <= {__file__}
    return [str(w.message) for w in heard]


@pytest.mark.parametrize("how", ["watch", "prepare", "flush", "resume", "bags"])
def test_programs_that_bring_rows_up_to_date_hear_nothing(how: str) -> None:
    """They watch, prepare, flush, resume, or step in backward."""
    assert program(how) == []


@pytest.mark.parametrize(("how", "names"), [("none", [0, 1]), ("one watched", [1])])
def test_stale_lookups_are_told_once_a_table(how: str, names: list[int]) -> None:
    """A gradient that follows from rows that slept is told, with the lines that mend it."""
    found = program(how)
    assert [f"parameter {k} follows" in text for k, text in zip(names, found, strict=True)]
    assert all(
        "optimizer.watch(model)" in t and "optimizer.prepare(table, ids)" in t for t in found
    )


def test_rows_that_were_reset_or_copied_are_not_stale() -> None:
    """They have begun at the step of now."""
    module, optimizer = asleep()
    optimizer.reset_rows(module.weight, ROWS + 10, 0.0)
    optimizer.copy_rows(module.weight, ROWS + 20, ROWS + 30)
    module.weight.grad = sparse(torch.cat((ROWS + 10, ROWS + 30)))
    optimizer.step()  # a warning is an error


# Beside threads that exchange what a call reads


@pytest.mark.filterwarnings("ignore:.* follows from rows that slept:RuntimeWarning")
@pytest.mark.parametrize(
    "seed", [0, *[pytest.param(k, marks=pytest.mark.exhaustive) for k in range(1, 25)]]
)
def test_tables_that_another_thread_exchanges(seed: int) -> None:
    """States, data and row numbers change, rows are reset and tables grow: calls raise, or work."""
    rng = np.random.default_rng(seed)
    module, optimizer = asleep()
    w = module.weight
    guard = [torch.full((N, D), 7.0) for _ in range(40)]  # of others, beside it in memory
    ids = torch.from_numpy(rng.integers(0, N, 64))

    def change(k: int) -> None:
        state = optimizer.state.get(w, {})
        if k % 7 == 0:
            state["exp_avg"] = state["exp_avg"].clone()
        elif k % 7 == 1:
            w.data = w.data.clone()
        elif k % 7 == 2:
            state["last_step"] = state["last_step"].clone()
        elif k % 7 == 3:
            optimizer.reset_rows(w, torch.tensor([k % N]), 0.5)
        elif k % 7 == 4:
            ids.fill_(k % (2 * N) - N // 2)
        elif k % 7 == 5 and len(w) < 3 * N:
            optimizer.grow(w, len(w) + 1)
        else:
            state["exp_avg_sq"] = torch.zeros(len(w) - k % 2, D)

    errors = RuntimeError, ValueError, IndexError, TypeError
    with meanwhile(change, *errors, KeyError):
        for k in range(400):
            try:
                optimizer.prepare(w, ids)
                rows = torch.from_numpy(rng.integers(0, N, 5)).unique()
                w.grad = torch.sparse_coo_tensor(
                    rows[None], torch.ones(len(rows), D), w.shape, check_invariants=False
                )
                optimizer.step()
                w.grad = None
                if k % 50 == 0:
                    optimizer.flush()
            except errors:
                w.grad = None
    assert all((own == 7.0).all() for own in guard)


# In company


class Marked(torch.Tensor):
    """A subclass, as libraries have them."""


def test_a_subclass_that_is_rebound() -> None:
    """Its memory is another one, which is noticed as of any other tensor."""
    w = torch.nn.Parameter(torch.zeros(N, D).as_subclass(Marked))
    optimizer = fused.AdamW([w], lr=0.1, sparse="catch_up")
    for rows in (torch.arange(N), ROWS):
        w.grad = sparse(rows)
        optimizer.step()
    before = w.data
    w.data = torch.zeros(N, D).as_subclass(Marked)
    with pytest.raises(RuntimeError, match="was rebound while rows sleep"):
        optimizer.prepare(w, torch.arange(N))
    assert_same_bits([w], [torch.zeros(N, D)])
    assert before.abs().min() > 0


def test_copies_of_tables_that_are_loaded() -> None:
    """The copy is in no state, and is there for rows that sleep all the same."""
    w = torch.nn.Parameter(torch.zeros(N, D))
    copied = torch.zeros(N, D, dtype=torch.bfloat16)
    optimizer = fused.AdamW([{"params": [w], "copies": [copied]}], lr=0.1, sparse="catch_up")
    for rows in (torch.arange(N), ROWS, ROWS):
        w.grad = sparse(rows)
        optimizer.prepare(w, rows)
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.flush()
    assert_same_bits([copied], [w.detach().bfloat16()])


def test_a_count_that_is_set_back() -> None:
    """Weights and states are those of before: later steps are none that rows have missed."""
    module, optimizer = asleep()
    w, state = module.weight, optimizer.state[module.weight]
    kept = [x.detach().clone() for x in (w, *state.values())]
    for _ in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for _ in range(3):
            stepped(module, optimizer)
            optimizer.param_groups[0]["lr"] *= 2
        found = module.weight.detach().clone()
        with torch.no_grad():
            for x, old in zip((w, *state.values()), kept, strict=True):
                x.copy_(old)
    for _ in range(3):
        stepped(module, optimizer)
    optimizer.flush()
    other, same = asleep()
    with torch.no_grad():
        for x, old in zip((other.weight, *same.state[other.weight].values()), kept, strict=True):
            x.copy_(old)
    same.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    for _ in range(3):
        stepped(other, same)
    same.flush()
    assert not torch.equal(found, w)
    torch.testing.assert_close(w, other.weight)
