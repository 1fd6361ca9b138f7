"""What PyTorch's optimizers do not have: skipped steps, dtypes, users' rules; bad input."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import Rule
from fusestep.nn import torch as fused
from fusestep.nn.torch.engine.part import Method
from own_functions import AVERAGED, MEASURED, PLAIN, raising
from test_numbers import gradient
from torch_training import EVERY, everything, refused

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


def share(parameters: list[Any]) -> None:
    parameters[0].data = parameters[1].detach().contiguous().flatten()[:20].view(5, 4)
    parameters[1].data = parameters[0].detach().as_strided((2, 3, 4, 4), (48, 16, 4, 1))
    parameters[1].grad = torch.ones(2, 3, 4, 4)


def complex_numbers(parameters: list[Any]) -> None:
    parameters[0].grad = None
    parameters[0].data = torch.ones(5, 4, dtype=torch.complex64)
    parameters[0].grad = torch.ones(5, 4, dtype=torch.complex64)


def sparse(indices: Any, values: Any) -> Any:
    return torch.sparse_coo_tensor(indices, values, (9, 3), check_invariants=False)


NO_ROWS = torch.zeros(0, 1, dtype=torch.int64)  # a hybrid tensor of no sparse dimension


@pytest.mark.parametrize(("spoil", "kind", "message"), [
    (lambda p: setattr(p[0].grad, "data", torch.ones(4, 5)), RuntimeError,
     "gradient of parameter 0 has a wrong shape"),
    (share, RuntimeError, "shares memory"),
    (lambda p: setattr(p[2], "grad", sparse([[1, 9]], torch.ones(2, 3))), IndexError,
     "gradient of parameter 2"),
    (complex_numbers, RuntimeError, "does not support complex parameters"),
    (lambda p: setattr(p[2], "grad", sparse(NO_ROWS, torch.ones(1, 9, 3))), RuntimeError,
     "sparse dimension"),
])  # fmt: skip
@pytest.mark.parametrize("after", [0, 1])
def test_bad_input(spoil: Any, kind: type, message: str, after: int) -> None:
    parameters = mixed()
    optimizer = fused.AdamW(parameters, sparse="touched")
    for _ in range(after):
        optimizer.step()
    spoil(parameters)
    with refused(kind, message, optimizer):
        optimizer.step()


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
    with refused(RuntimeError, "state 'exp_avg' of parameter 0 has a wrong shape", optimizer):
        optimizer.step()


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"sparse": "lazy"}, ValueError, "sparse"),
    ({"skip_nonfinite": 1}, TypeError, "skip_nonfinite"),
    ({"state_dtype": torch.int8}, ValueError, "state_dtype"),
    ({"differentiable": True}, RuntimeError, "differentiable"),
    ({"capturable": True}, RuntimeError, "Adam: capturable=True is not supported"),
    ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
])  # fmt: skip
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
    """Groups with the order of their options and the identity of what is in them. Of iterators,
    what they would give."""

    def seen(value: Any) -> Any:
        return [*map(id, copy.copy(value))] if isinstance(value, list | Iterator) else id(value)

    return [
        [(name, seen(x)) for name, x in group.items()] if isinstance(group, dict) else id(group)
        for group in groups
    ]


@pytest.mark.parametrize("kind", BAD_GROUPS)
@pytest.mark.parametrize("name", EVERY)
def test_errors_leave_groups_as_they_were(name: str, kind: str) -> None:
    cls, groups = getattr(fused, name), BAD_GROUPS[kind]()
    before = looked_at(groups)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        cls(groups)
    optimizer = cls([SHARED])
    known, states = looked_at(optimizer.param_groups), dict(optimizer.state)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.add_param_group(groups[-1])
    assert looked_at(groups) == before
    assert looked_at(optimizer.param_groups) == known
    assert optimizer.state.keys() == states.keys()
    optimizer.add_param_group(group_of())
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("name", EVERY)
def test_bad_options_leave_groups_as_they_were(name: str) -> None:
    groups = [group_of(SHARED), {"params": SHARED, "lr": 0.5}, {"params": iter([SHARED])}]
    before = looked_at(groups)
    for options in ({"lr": -1.0}, {"state_dtype": 3}, {"skip_nonfinite": 3}, {"unknown": 3}):
        with pytest.raises((TypeError, ValueError)):
            getattr(fused, name)(groups, **options)
        assert looked_at(groups) == before


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


# Tensors that share memory: refused before anything is written, unless no element is shared

N, D = 600, 16


def rows(indices: Any, values: Any) -> Any:
    return torch.sparse_coo_tensor(indices[None], values, (N, D), check_invariants=False)


def table() -> Any:
    return torch.nn.Parameter(torch.arange(N * D, dtype=torch.float32).reshape(N, D))


ALIASES: dict[str, Callable[[Any, Any], Any]] = {
    "values": lambda w, _: rows(torch.arange(N - 1, -1, -1), w.detach()),
    "some values": lambda w, _: rows(torch.arange(5), w.detach()[7:12]),
    "values of a state": lambda _, state: rows(torch.arange(N), state["exp_avg"]),
    "indices": lambda w, _: rows(w.detach().view(-1)[:8].view(torch.int64), torch.ones(4, D)),
    "indices of a state": lambda _, state: rows(
        state["exp_avg_sq"].view(-1)[:8].view(torch.int64), torch.ones(4, D)),
    "dense": lambda w, _: w.detach(),
    "dense state": lambda _, state: state["exp_avg"],
}  # fmt: skip


@pytest.mark.parametrize("earlier_steps", [0, 1, 3])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_gradient_in_the_memory_of_the_step(alias: str, earlier_steps: int) -> None:
    """Also where it comes only in a later step, which looks at tensors in another way."""
    w = table()
    optimizer = fused.LazyAdam([w], lr=0.5)
    for _ in range(earlier_steps):
        dense = "dense" in alias
        w.grad = torch.ones(N, D) if dense else rows(torch.arange(4), torch.ones(4, D))
        optimizer.step()
    if not earlier_steps:
        zeros = {name: torch.zeros(N, D) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[w] = {"step": torch.tensor(0.0), **zeros}
    w.grad = ALIASES[alias](w, optimizer.state[w])
    with refused(RuntimeError, "shares memory: expected memory of its own", optimizer):
        optimizer.step()
    w.grad = rows(torch.arange(4), torch.ones(4, D))
    optimizer.step()


def test_a_gradient_in_the_memory_of_another_parameter() -> None:
    first, second = table(), table()
    optimizer = fused.SGD([first, second], lr=0.5)
    second.grad = rows(torch.arange(N), first.detach())
    optimizer.step()  # the other one is not written
    first.grad = torch.ones(N, D)
    with pytest.raises(RuntimeError, match="gradient of parameter 1"):
        optimizer.step()


def interleaved() -> list[Any]:
    """Views of three tensors that share none of their elements."""
    columns, every_other, hole = torch.zeros(6, 4), torch.zeros(7), torch.zeros(3, 4)
    views = [columns[:, :3], columns[:, 3:], every_other[::2], every_other[1::2]]
    views += [hole[:, :2], hole[0, 2:]]
    return [torch.nn.Parameter(view) for view in views]


def test_views_that_share_no_element() -> None:
    results = []
    for package in (fused, torch.optim):
        parameters = interleaved()
        optimizer = package.Adam(parameters, lr=0.1)
        for k in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, k + 1.0)
            optimizer.step()
        results.append([p.detach().clone() for p in parameters])
    torch.testing.assert_close(*results)


def test_views_that_share_an_element() -> None:
    whole = torch.zeros(6, 4)
    views = [torch.nn.Parameter(view) for view in (whole[:, :3], whole[:, 2:])]
    for view in views:
        view.grad = torch.ones_like(view)
    with pytest.raises(RuntimeError, match=r"parameter 1 shares memory.* that of parameter 0"):
        fused.SGD(views, lr=1.0).step()
    assert not whole.any()


def test_strides_that_are_interleaved() -> None:
    """Elements 0, 2, 4, 3, 5, 7; the others stay."""
    whole = torch.zeros(8)
    parameter = torch.nn.Parameter(whole.as_strided((2, 3), (3, 2)))
    parameter.grad = torch.ones(2, 3)
    fused.SGD([parameter], lr=1.0).step()
    assert whole.tolist() == [-1.0, 0.0, -1.0, -1.0, -1.0, -1.0, 0.0, -1.0]
    parameter = torch.nn.Parameter(whole.as_strided((2, 3), (2, 2)))
    parameter.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        fused.SGD([parameter], lr=1.0).step()


def test_a_parameter_that_is_listed_twice() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    one.grad, other.grad = torch.ones(3), torch.ones(3)
    with warnings.catch_warnings(action="ignore"):  # PyTorch's
        optimizer = fused.SGD([one, other, one], lr=1.0)
    with pytest.raises(RuntimeError, match=r"SGD: parameter 2 .* that of parameter 0"):
        optimizer.step()
    assert one.tolist() == [0.0] * 3


STATES: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "stride 0": (lambda *_: {"exp_avg": torch.zeros(1).expand(4)}, "single memory location"),
    "itself": (lambda *_: {"exp_avg": torch.zeros(5).as_strided((4,), (0,))}, "single memory"),
    "each other": (lambda own, _: {"exp_avg": own["exp_avg_sq"]}, "shares memory"),
    "another's": (lambda _, other: {"exp_avg": other["exp_avg"]}, "shares memory"),
    "the count": (lambda _, other: {"step": other["step"]}, "state 'step' .* shares memory"),
    "strided": (lambda *_: dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(8)[::2]),
                "shares memory"),
}  # fmt: skip


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("case", STATES)
def test_states_that_share_memory(case: str, loaded: bool) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = fused.Adam(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    change, text = STATES[case]
    saved = optimizer.state_dict()
    states = [optimizer.state[p] for p in parameters]
    if loaded:
        saved["state"][1] = saved["state"][1] | change(*reversed(list(saved["state"].values())))
        optimizer.load_state_dict(saved)
    else:
        states[1].update(change(states[1], states[0]))
    with refused(RuntimeError, text, optimizer):
        optimizer.step()


# Optimizers of users: their rules and scalars are looked at before a step


class Own(fused.FusedOptimizer):
    rule: Rule = AVERAGED
    found: Any = (0.5,)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.5, "weight_decay": 0.0}, **options)

    def method(self, group: Any) -> Method:  # noqa: ARG002
        return Method(self.rule)

    def scalars(self, group: Any, step: float) -> Any:  # noqa: ARG002
        return self.found


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a rule that raises": (
        {"rule": replace(PLAIN, update=raising)}, ValueError, "update 'raising' can raise"),
    "other arguments": (
        {"rule": replace(PLAIN, states=("m",))}, TypeError, "update 'plain' takes other arguments"),
    "a name of what comes before": (
        {"rule": replace(PLAIN, hp=("lr", "grad_scale"))}, ValueError,
        "hp of the rule has a name of what comes before the rule"),
    "too many": (
        {"found": (0.5, 0.5)}, ValueError, r"scalars returns another number of scalars: expected 1",
    ),
    "too few": ({"found": ()}, ValueError, "scalars returns another number of scalars"),
    "None": ({"found": (None,)}, TypeError, "lr of scalars has a wrong type"),
    "NaN": ({"found": (math.nan,)}, ValueError, "lr of scalars is NaN"),
}  # fmt: skip


def _table(*, sparse: bool) -> Any:
    table = torch.nn.Embedding(4, 2, sparse=sparse)
    torch.nn.init.ones_(table.weight)
    table(torch.tensor([1, 3, 1])).sum().backward()
    return table


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name: str, sparse: bool) -> None:
    """Nothing has changed then, and the next step is that of a new optimizer."""
    attributes, kind, match = CASES[name]
    table, other = _table(sparse=sparse), _table(sparse=sparse)
    opt = Own(table.parameters(), sparse="touched")
    for each, value in attributes.items():
        setattr(opt, each, value)
    for _ in range(2):
        with pytest.raises(kind, match=f"^Own: {match}"):
            opt.step()
    assert (table.weight == 1).all() and not opt.state
    for each in attributes:
        delattr(opt, each)
    opt.step()
    Own(other.parameters(), sparse="touched").step()
    assert torch.equal(table.weight, other.weight) and not (table.weight == 1).all()


def test_what_measures_takes_no_sparse_gradients() -> None:
    table = _table(sparse=True)
    opt = Own(table.parameters(), sparse="touched")
    opt.rule = MEASURED
    match = "^Own: sparse_update does not fit a rule that measures whole tensors"
    with pytest.raises(ValueError, match=match):
        opt.step()


def test_scalars_of_the_package_are_not_looked_at() -> None:
    """PyTorch takes a learning rate that is NaN, also in a subclass."""

    class Same(fused.SGD):
        pass

    table = _table(sparse=False)
    Same(table.parameters(), lr=torch.tensor(math.nan)).step()
    assert table.weight.isnan().all()


def test_a_method_may_follow_from_other_things_than_options() -> None:
    table = _table(sparse=False)
    opt = Own(table.parameters())
    opt.step()
    assert set(opt.state[table.weight]) == {"step", "m"}
    opt.rule = PLAIN
    before = table.weight.detach().clone()
    opt.step()
    assert torch.equal(table.weight, before - 0.5 * table.weight.grad)
