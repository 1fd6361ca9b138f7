"""What PyTorch's optimizers do not have: clipping on the way, skipped steps, dtypes; bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused  # noqa: E402

from test_numbers import gradient  # noqa: E402
from torch_training import EVERY, everything  # noqa: E402

SIXTEEN_BITS = [torch.float16, torch.bfloat16]


def mixed(dtype: Any = torch.float32) -> list[Any]:
    """A dense parameter, one of channels last, and a table; with gradients."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    table = torch.randn(9, 3, generator=generator)
    made = [torch.randn(5, 4, generator=generator), image, table]
    parameters = [torch.nn.Parameter(tensor.to(dtype)) for tensor in made]
    for parameter in parameters:
        parameter.grad = gradient(parameter, generator, rows=parameter is parameters[2])
    return parameters


def unchanged(optimizer: Any, before: list[Any]) -> bool:
    after = everything(optimizer)
    return len(after) == len(before) and all(map(torch.equal, after, before))


def test_a_factor_is_for_the_gradients_that_were_measured() -> None:
    parameters = mixed()
    optimizer = fused.Adam(parameters, sparse="all")
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    before = everything(optimizer)
    parameters[0].grad.mul_(2)
    with pytest.raises(RuntimeError, match="changed since they were measured"):
        optimizer.step()
    assert unchanged(optimizer, before)
    optimizer.zero_grad()
    parameters[0].grad = torch.ones(5, 4)
    optimizer.step()  # nothing is left of it
    parameters[0].grad = torch.full((5, 4), torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        fused.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_steps_with_what_is_not_finite_are_skipped(place: int, value: float) -> None:
    parameters = mixed()
    optimizer = fused.AdamW(parameters, sparse="touched", skip_nonfinite=True)
    for step in range(3):  # the first one too, when there are no states yet
        before, own = everything(optimizer), parameters[place].grad
        bad = own.clone().coalesce() if own.is_sparse else own.clone()
        (bad._values() if own.is_sparse else bad).view(-1)[-1] = value
        parameters[place].grad = bad
        optimizer.step()
        assert unchanged(optimizer, before)
        assert optimizer.skipped_steps == step + 1
        parameters[place].grad = own
        optimizer.step()
        assert not unchanged(optimizer, before)
        assert all(optimizer.state[p]["step"] == step + 1 for p in parameters)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Adafactor", "Lamb"])
def test_sixteen_bits_are_float32_that_is_rounded_once(name: str, dtype: Any) -> None:
    """One step of equal numbers; states too."""
    narrow = mixed(dtype) if name not in ("Adafactor", "Lamb") else mixed(dtype)[:2]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    options |= {} if name in ("Adafactor", "Lamb") else {"sparse": "all"}
    options |= {"momentum": 0.9} if name == "SGD" else {}
    options |= {"eps": (1e-4, 1e-3)} if name == "Adafactor" else {}  # it is the dtype's else
    ours = getattr(fused, name)(narrow, **options)
    for _ in range(3):
        wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
        theirs = getattr(fused, name)(wide, **options)
        for p, q in zip(narrow, wide, strict=True):
            q.grad = p.grad.float()
            if p in ours.state:
                theirs.state[q] = {
                    n: t.clone() if t.dim() == 0 else t.float() for n, t in ours.state[p].items()
                }
        ours.step()
        theirs.step()
        for p, q in zip(narrow, wide, strict=True):
            pairs = [(p, q), *((t, theirs.state[q][n]) for n, t in ours.state[p].items())]
            for found, expected in pairs:
                unit = torch.finfo(dtype).eps if found.dim() else 0.0
                torch.testing.assert_close(found.float(), expected, rtol=unit, atol=1e-7)


def test_dtypes_of_states_survive_loading() -> None:
    parameters, others = mixed(torch.bfloat16), mixed(torch.bfloat16)
    optimizer = fused.Adam(parameters, sparse="touched", state_dtype=torch.float32)
    optimizer.step()
    other = fused.Adam(others, sparse="touched")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else they share it
    for p, q in zip(parameters, others, strict=True):
        for name, tensor in optimizer.state[p].items():
            assert other.state[q][name].dtype == tensor.dtype == torch.float32
            assert torch.equal(other.state[q][name], tensor)
        q.data.copy_(p.detach())
    optimizer.step()
    other.step()
    assert all(map(torch.equal, parameters, others))


def test_options_of_a_group_are_kept_where_a_state_of_pytorch_lacks_them() -> None:
    parameters, others = mixed(), mixed()
    for p in others:
        p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
    theirs = torch.optim.Adam(others)
    theirs.step()
    ours = fused.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "sparse": "all"}])
    theirs = torch.optim.Adam([{"params": others[:2]}, {"params": others[2:]}], lr=0.5)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert [group["sparse"] for group in ours.param_groups] == [None, "all"]
    assert ours.param_groups[1]["lr"] == 0.5
    ours.step()


# Bad input: an error before anything is written


def refuse_gradient(parameters: list[Any]) -> None:
    parameters[0].grad.data = torch.ones(4, 5)


def overlap(parameters: list[Any]) -> None:
    parameters[0].grad = parameters[0].detach()


def share(parameters: list[Any]) -> None:
    parameters[0].data = parameters[1].detach().contiguous().flatten()[:20].view(5, 4)
    parameters[1].data = parameters[0].detach().as_strided((2, 3, 4, 4), (48, 16, 4, 1))
    parameters[1].grad = torch.ones(2, 3, 4, 4)


def out_of_range(parameters: list[Any]) -> None:
    parameters[2].grad = torch.sparse_coo_tensor(
        [[1, 9]], torch.ones(2, 3), (9, 3), check_invariants=False
    )


def complex_numbers(parameters: list[Any]) -> None:
    parameters[0].grad = None
    parameters[0].data = torch.ones(5, 4, dtype=torch.complex64)
    parameters[0].grad = torch.ones(5, 4, dtype=torch.complex64)


def without_rows(parameters: list[Any]) -> None:
    """A hybrid tensor of no sparse dimension."""
    values = torch.ones(1, 9, 3)
    parameters[2].grad = torch.sparse_coo_tensor(
        torch.zeros(0, 1, dtype=torch.int64), values, (9, 3), check_invariants=False
    )


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (refuse_gradient, RuntimeError, "gradient of parameter 0 has a wrong shape"),
        (overlap, RuntimeError, "shares memory"),
        (share, RuntimeError, "shares memory"),
        (out_of_range, IndexError, "gradient of parameter 2"),
        (complex_numbers, RuntimeError, "does not support complex parameters"),
        (without_rows, RuntimeError, "sparse dimension"),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
def test_bad_input(spoil: Any, kind: type, message: str, after: int) -> None:
    parameters = mixed()
    optimizer = fused.AdamW(parameters, sparse="touched")
    for _ in range(after):
        optimizer.step()
    spoil(parameters)
    before = everything(optimizer)
    with pytest.raises(kind, match=message):
        optimizer.step()
    assert unchanged(optimizer, before)


@pytest.mark.parametrize("other", [torch.float64, torch.float16, torch.bfloat16])
def test_a_parameter_whose_dtype_changes(other: Any) -> None:
    """Its states stay as they are, and go on."""
    results = []
    for dtype in (torch.float32, other):
        parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = fused.AdamW([parameter], lr=0.125)
        for k in range(6):
            if k == 3:
                parameter.data = parameter.data.to(dtype)
            parameter.grad = torch.tensor([0.5, -1.0, 0.25 * k], dtype=parameter.dtype)
            optimizer.step()
        results.append(parameter.detach().float())
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    near = 1e-6 if other == torch.float64 else 2e-2
    torch.testing.assert_close(*results, rtol=near, atol=near)


def test_parameters_that_are_nowhere() -> None:
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    parameter.grad = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="device"):
        fused.SGD([parameter]).step()


def test_a_state_of_another_model() -> None:
    parameters = mixed()
    optimizer, other = fused.Adam(parameters, sparse="all"), fused.Adam(mixed(), sparse="all")
    other.step()
    saved = other.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(4, 4)
    optimizer.load_state_dict(saved)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="state 'exp_avg' of parameter 0 has a wrong shape"):
        optimizer.step()
    assert unchanged(optimizer, before)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"sparse": "lazy"}, ValueError, "sparse"),
        ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite"),
        ({"state_dtype": torch.int8}, ValueError, "state_dtype"),
        ({"differentiable": True}, RuntimeError, "differentiable"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        fused.Adam(mixed(), **options)


def group_of(*parameters: Any, **options: Any) -> dict[str, Any]:
    made = parameters or (torch.nn.Parameter(torch.ones(2, 3)),)
    return {"params": list(made), **options}


SHARED = torch.nn.Parameter(torch.ones(2, 3))
BAD_GROUPS: dict[str, Any] = {
    "own option": lambda: [group_of(SHARED), group_of(sparse="lazy")],
    "dtype": lambda: [group_of(SHARED, lr=0.5), group_of(state_dtype=torch.int8)],
    "flag": lambda: [group_of(SHARED), group_of(skip_nonfinite=True)],
    "differentiable": lambda: [group_of(SHARED), group_of(differentiable=True)],
    "twice": lambda: [group_of(SHARED), group_of(SHARED)],
    "no tensor": lambda: [group_of(SHARED), group_of(3)],
    "no leaf": lambda: [group_of(SHARED), group_of(SHARED * 2)],
    "a set": lambda: [group_of(SHARED), {"params": {SHARED}}],
    "no dict": lambda: [group_of(SHARED), 3],
    "names": lambda: [group_of(SHARED), group_of(("w", torch.nn.Parameter(torch.ones(2, 3))))],
    "an iterator": lambda: [{"params": iter([SHARED])}, group_of(sparse="lazy")],
}


def looked_at(groups: list[Any]) -> list[Any]:
    """Groups with what is in them, of iterators what they would give."""
    return [
        {
            name: [*copy.copy(x)] if name == "params" and not isinstance(x, set) else x
            for name, x in group.items()
        }
        if isinstance(group, dict)
        else group
        for group in groups
    ]


def same(found: list[Any], expected: list[Any]) -> bool:
    """Compared by identity where there are tensors, and with the order of options."""
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, dict):
            if one is not other:
                return False
        elif list(one) != list(other) or any(
            len(x) != len(y) or any(a is not b for a, b in zip(x, y, strict=True))
            if isinstance(x, list)
            else x is not y
            for x, y in zip(one.values(), other.values(), strict=True)
        ):
            return False
    return True


@pytest.mark.parametrize("kind", BAD_GROUPS)
@pytest.mark.parametrize("name", EVERY)
def test_errors_leave_groups_as_they_were(name: str, kind: str) -> None:
    cls, groups = getattr(fused, name), BAD_GROUPS[kind]()
    before, members = looked_at(groups), list(groups)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        cls(groups)
    assert all(a is b for a, b in zip(groups, members, strict=True))
    assert same(looked_at(groups), before)
    optimizer = cls([SHARED])
    known, states = copy.copy(optimizer.param_groups), dict(optimizer.state)
    last = groups[-1]
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.add_param_group(last)
    assert same(looked_at(groups), before)
    assert same(optimizer.param_groups, known)
    assert optimizer.state.keys() == states.keys()
    optimizer.add_param_group(group_of())
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("name", EVERY)
def test_bad_options_leave_groups_as_they_were(name: str) -> None:
    groups = [group_of(SHARED), {"params": SHARED, "lr": 0.5}, {"params": iter([SHARED])}]
    before = [dict(group) for group in groups]
    for options in ({"lr": -1.0}, {"state_dtype": 3}, {"skip_nonfinite": 3}, {"unknown": 3}):
        with pytest.raises((TypeError, ValueError)):
            getattr(fused, name)(groups, **options)
        assert all(list(group) == list(old) for group, old in zip(groups, before, strict=True))
        assert groups[0]["params"] is before[0]["params"] and groups[1]["params"] is SHARED
        assert list(copy.copy(groups[2]["params"])) == [SHARED]


def test_thor_that_fails_leaves_no_hooks() -> None:
    layer = torch.nn.Linear(2, 1)
    before = {name: dict(x) for name, x in vars(layer).items() if name.endswith("_hooks") and x}
    wrong = {"lr": -1.0, "damping": "x", "momentum": -1.0, "weight_decay": -1.0, "batch_size": 0,
             "frequency": 0, "block_size": 0, "bad_factor": "x"}  # fmt: skip
    for options in ({name: value} for name, value in wrong.items()):
        with pytest.raises((TypeError, ValueError)):
            fused.Thor(layer, **options)
        after = {name: dict(x) for name, x in vars(layer).items() if name.endswith("_hooks") and x}
        assert after == before, options


@pytest.mark.parametrize("name", ["Lamb", "LARS", "Adafactor"])
def test_norms_of_whole_parameters_take_no_rows(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparse'"):
        getattr(fused, name)(mixed(), sparse="touched")
    with pytest.raises(ValueError, match="sparse is unknown"):
        getattr(fused, name)([{"params": mixed(), "sparse": "touched"}])


@pytest.mark.parametrize("name", ["Rprop", "SparseAdam"])
def test_a_weight_decay_that_pytorch_does_not_read(name: str) -> None:
    """An option of a group that the class does not know changes nothing."""
    found = []
    for package in (fused, torch.optim):
        w = torch.nn.Parameter(torch.ones(4, 2))
        w.grad = torch.full((4, 2), 0.5)
        if name == "SparseAdam":
            w.grad = w.grad.to_sparse(1)
        optimizer = getattr(package, name)([{"params": [w], "weight_decay": 0.3}])
        optimizer.step()
        optimizer.step()
        found.append(w.detach())
    torch.testing.assert_close(found[0], found[1])


def test_ftrl_rests_while_its_rate_is_0() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.full((3,), 0.5)
    optimizer = fused.FTRL([w], lr=0.1)
    moved = []
    for rate in (0.1, 0.0, 0.1, 0.0):
        before = w.detach().clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        moved.append(not torch.equal(w.detach(), before))
    assert moved == [True, False, True, False]
