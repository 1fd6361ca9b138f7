"""A step finds all that has changed since the last one, and writes more than parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter
from fusestep.nn import torch as fused
from fusestep.nn.torch.optimizer import Fused
from torch_training import any_gradient, assert_equal_models, everything, net, refused, since, train


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each parameter that is looked at by Python."""
    times: list[int] = []
    make = Fused._entry
    monkeypatch.setattr(Fused, "_entry", lambda *a: times.append(1) or make(*a))
    return times


def test_a_first_step_in_inference_mode() -> None:
    """Tensors that are made there have no counts of changes."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = fused.Adam([parameter], lr=1.0)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 2.0


# -- what a gradient may be in a later step -------------------------------------------------------


def test_one_element_whose_gradient_is_marked_negative() -> None:
    """The strides of both are the same then."""
    parameter = torch.nn.Parameter(torch.ones(2)[::2])
    optimizer = fused.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([1 + 2j]).imag
    optimizer.step()
    parameter.grad = torch.tensor([1 + 2j]).conj().imag
    optimizer.step()
    assert parameter.item() == 1.0


def test_strides_along_one_element_mean_nothing(bound: list[int]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3, 1, 1))
    optimizer = fused.SGD([parameter], lr=1.0)
    for strides in ((3, 1, 1, 1), (3, 1, 3, 3), (3, 1, 7, 9)):
        parameter.grad = torch.ones(12).as_strided((4, 3, 1, 1), strides)
        optimizer.step()
    assert (parameter == -3.0).all()
    assert len(bound) == 1


# -- what a parameter and a state may have become -------------------------------------------------


def stepped(shape=(4,), name: str = "Adam", steps: int = 1, **options) -> tuple[Any, Any, Any]:
    """A parameter of ones with its optimizer, and its states."""
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = getattr(fused, name)([parameter], **options)
    parameter.grad = torch.ones(shape)
    for _ in range(steps):
        optimizer.step()
    return parameter, optimizer, optimizer.state[parameter]


def cut(tensor: Any, n_bytes: int = 0) -> None:
    tensor.untyped_storage().resize_(n_bytes)


NO_NUMBERS = ("1", torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.bool))
REFUSED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("state 'exp_avg' .* has a wrong shape", lambda _, s: s["exp_avg"].resize_(10)),
    ("state 'exp_avg' .* has a wrong shape",
     lambda _, s: setattr(s["exp_avg"], "data", s["exp_avg"].t())),
    ("NAdam: parameter 0 has no memory: expected 64 bytes, got 0", lambda p, _: cut(p)),
    ("state 'exp_avg_sq' of parameter 0 has no memory: expected 64 bytes, got 40",
     lambda _, s: cut(s["exp_avg_sq"], 40)),
    ("the gradient of parameter 0 has no memory", lambda p, _: cut(p.grad)),
    *((f"state of parameter 0 lacks '{name}': expected", lambda _, s, name=name: s.pop(name))
      for name in ("exp_avg", "exp_avg_sq", "mu_product", "step")),
    ("state of parameter 0 lacks 'mu_product'", lambda _, s: s.update(mu_product=None)),
    ("state 'exp_avg' of parameter 0 is missing: expected a tensor, got list",
     lambda _, s: s.update(exp_avg=[0.0])),
    ("state 'exp_avg' of parameter 0 has no memory",
     lambda _, s: s.update(exp_avg=torch._efficientzerotensor(8, 2))),
    ("state 'step' of parameter 0 is a view of another number",
     lambda _, s: s.update(step=torch._efficientzerotensor(()))),
    *((f"state '{name}' of parameter 0 is no number: expected a tensor of one element",
       lambda _, s, name=name, x=x: s.update({name: x}))
      for name in ("step", "mu_product") for x in NO_NUMBERS),
]  # fmt: skip


@pytest.mark.parametrize(("text", "change"), REFUSED)
def test_what_no_step_can_take(text: str, change: Callable[[Any, Any], None]) -> None:
    parameter, optimizer, state = stepped((8, 2), "NAdam", 2)
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones(3)
    optimizer.step()
    change(parameter, state)
    with refused(RuntimeError, text, other):
        optimizer.step()
    assert optimizer.state[other]["step"].item() == 1.0


@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("part", ["_indices", "_values"])
def test_rows_whose_memory_was_let_go(part: str, size: int) -> None:
    table = torch.nn.Parameter(torch.zeros(70, 3))
    optimizer = fused.SparseAdam([table])
    table.grad = torch.ones(70, 3).to_sparse(1)
    for _ in range(2):
        optimizer.step()
    before = everything(optimizer)
    getattr(table.grad, part)().untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=r"has no memory|out of bounds for storage"):
        optimizer.step()
    assert all(map(torch.equal, everything(optimizer), before))


def test_a_wrapper_of_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    parameter = torch.nn.Parameter(TwoTensor(torch.zeros(3, 4), torch.zeros(3, 4)))
    parameter.grad = TwoTensor(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="Adam: parameter 0 has no memory: expected 48 bytes"):
        fused.Adam([parameter], foreach=False).step()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_of_another_dtype(name: str) -> None:
    parameter, optimizer, state = stepped((8, 2), steps=2)
    twin, other = copy.deepcopy((parameter, optimizer))
    state[name].data = state[name].double()
    for each in (parameter, twin):
        each.grad = torch.full((8, 2), 0.25)
    for _ in range(2):
        optimizer.step()
        other.step()
    torch.testing.assert_close(parameter.detach(), twin.detach())
    assert state[name].dtype == torch.float64
    assert state["step"].item() == 4.0


def test_memory_that_comes_back_as_it_was() -> None:
    """As sharded training and offloading do between two steps."""
    parameter, optimizer, state = stepped((8, 2), steps=2)
    twin, other = copy.deepcopy((parameter, optimizer))
    for tensor in (parameter, *state.values()):
        kept = tensor.detach().clone()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(kept.nbytes)
        tensor.detach().copy_(kept)
    twin.grad = parameter.grad
    optimizer.step()
    other.step()
    assert torch.equal(parameter, twin)


def test_a_lazy_copy_does_not_see_the_step() -> None:
    parameter, optimizer, _ = stepped((8, 2), steps=2)
    before = parameter.detach().clone()
    lazy = torch._lazy_clone(parameter.detach())
    optimizer.step()
    assert torch.equal(lazy, before)
    assert not torch.equal(parameter, before)


# -- memory that moves in every step --------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "SparseAdam", "Adafactor", "Lamb"])
def test_exchanged_memory_is_no_new_binding(name: str, bound: list[int]) -> None:
    """Parameters and states, with dense gradients or rows; the numbers are those without it."""
    results = []
    for moves in (True, False):
        bound.clear()
        parameters = [torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(fused, name)(parameters, lr=0.1, **options)
        for k in range(6):
            for j, parameter in enumerate(parameters):
                g = torch.full((6, 4), 0.5 + k + j)
                parameter.grad = g.to_sparse(1) if name == "SparseAdam" else g
                if moves:
                    parameter.data = parameter.data.clone()
                    for role, x in optimizer.state[parameter].items():
                        if isinstance(x, torch.Tensor):
                            optimizer.state[parameter][role] = x.clone()
            optimizer.step()
        results.append(everything(optimizer))
        assert len(bound) == 2
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("fault", [
    torch._neg_view(torch.ones(64)), torch.ones(128)[::2],
    pytest.param(torch.ones(64).double(), marks=any_gradient), None,
], ids=["negative", "strided", "double", "none"])  # fmt: skip
def test_memory_that_moves_in_a_step_that_is_bound_anew(fault: Any) -> None:
    """The old binding, which is used again, must have noticed."""
    one, other = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
    one.grad_dtype = None
    optimizer = fused.SGD([other, one], lr=1.0)
    for k in range(4):
        one.grad, other.grad = torch.ones(64), torch.ones(64)
        if k == 2:
            kept = [p.data for p in (one, other)]
            one.data, other.data = one.data.clone(), other.data.clone()
            one.grad = fault
        optimizer.step()
    assert (other == -4.0).all()
    assert all((old == -2.0).all() for old in kept)


def test_a_gradient_of_nothing_beside_an_empty_one() -> None:
    """Neither has an address; the one has elements all the same."""
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (4, 0)]
    optimizer = fused.SGD(parameters, lr=1.0)
    for gradients in ([1.0, 1.0], [1.0, 1.0], [0.0, 1.0]):
        for p, x in zip(parameters, gradients, strict=True):
            p.grad = torch.full_like(p, x) if x else torch._efficientzerotensor(p.shape)
        optimizer.step()
    assert parameters[0].tolist() == [-1.0] * 4


def test_the_end_of_a_gradient_is_cut_off_beside_a_whole_one() -> None:
    """The storage has as many bytes as the gradient, which begins behind its first."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = fused.SGD(parameters, lr=1.0)
    for _ in range(2):
        parameters[0].grad, parameters[1].grad = torch.ones(4), torch.ones(12)[8:]
        optimizer.step()
    cut(parameters[1].grad, 36)
    with pytest.raises(RuntimeError, match="the gradient of parameter 1 has no memory"):
        optimizer.step()
    assert all((p == -1.0).all() for p in parameters)


def test_swapped_tensors() -> None:
    """PyTorch swaps none that has a weak reference."""
    results = []
    for package in (fused, torch.optim):
        one, other = (torch.nn.Parameter(torch.full((3,), x)) for x in (0.0, 10.0))
        optimizer = package.SGD([one, other], lr=1.0, momentum=0.5)
        for k in range(5):
            if k == 2:
                torch.utils.swap_tensors(one, other)
            one.grad, other.grad = torch.full((3,), 1.0), torch.full((3,), 2.0)
            optimizer.step()
        results.append(torch.stack([one, other]).detach())
    assert torch.equal(*results)


def test_memory_that_moves_onto_another_parameter() -> None:
    one, other = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    optimizer = fused.SGD([one, other], lr=1.0)
    one.grad, other.grad = torch.ones(8), torch.ones(8)
    for _ in range(2):
        optimizer.step()
    kept = one.data
    one.data = other.data
    with pytest.raises(RuntimeError, match="parameter 1 shares memory"):
        optimizer.step()
    one.data = kept
    one.grad = other.detach()
    with pytest.raises(RuntimeError, match="shares memory"):
        optimizer.step()
    one.data, other.data = other.data, kept  # they change places
    one.grad = torch.ones(8)
    optimizer.step()
    assert (one == -3.0).all()
    assert (other == -3.0).all()


def test_values_of_a_sparse_gradient_in_the_memory_of_the_table() -> None:
    table = torch.nn.Parameter(torch.ones(8, 4))
    optimizer, ids = fused.LazyAdam([table]), torch.tensor([[1, 6]])
    for _ in range(2):
        table.grad = torch.sparse_coo_tensor(ids, torch.ones(2, 4), (8, 4), check_invariants=False)
        optimizer.step()
    with torch.no_grad():
        table.grad = torch.sparse_coo_tensor(
            ids, table[2:4], (8, 4), is_coalesced=True, check_invariants=False
        )
    assert table.grad._values().data_ptr() == table[2:4].data_ptr()
    with refused(RuntimeError, "shares memory", optimizer, table):
        optimizer.step()


# -- what a step writes beside parameters: counts, numbers, and what autograd looks at ------------


NUMBERS = {"NAdam": ("step", "mu_product"), "ASGD": ("step", "eta", "mu"), "Adam": ("step",)}


def require_gradients(x: Any) -> Any:
    return x.detach().clone().requires_grad_()


def infer(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


def in_one_dimension(x: Any) -> Any:
    return x.reshape(1).clone()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "change", [require_gradients, infer, in_one_dimension, torch.Tensor.double]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_kind(name: str, change: Any, grad: bool) -> None:
    _, optimizer, state = stepped(name=name)
    twin = copy.deepcopy(optimizer)
    (other,) = twin.state.values()
    for number in NUMBERS[name]:
        state[number] = change(state[number])
    for each in (optimizer, twin):
        each.param_groups[0]["params"][0].grad = torch.full((4,), 0.5)
        with torch.set_grad_enabled(grad):
            each.step()
            each.step()
    for role, x in other.items():
        torch.testing.assert_close(state[role].detach().reshape(x.shape), x, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_of_other_dtypes(dtype: Any) -> None:
    """PyTorch gives those that it loads the dtype of the parameter."""
    _, optimizer, state = stepped(name="NAdam")
    before = state["mu_product"].item()
    state["mu_product"] = state["mu_product"].to(dtype)
    state["step"] = torch.tensor(1, dtype=torch.int64)
    optimizer.step()
    assert state["mu_product"].dtype == dtype
    assert state["mu_product"].item() < before
    assert state["step"].item() == 2


def test_counts_of_python() -> None:
    """Of `SparseAdam` they are ints, or what was put there."""
    table = torch.nn.Parameter(torch.ones(5, 2))
    optimizer = fused.SparseAdam([table])
    table.grad = torch.ones(5, 2).to_sparse(1)
    for k in range(6):
        optimizer.step()
        state = optimizer.state[table]
        assert float(state["step"]) == k + 1
        if k == 2:
            state["step"] = torch.tensor(3.0)
        if k == 4:
            state["step"] = 5.0


def test_a_gradient_in_the_end_of_a_parameter_around_another_is_refused() -> None:
    memory = torch.zeros(60)
    around, within = Parameter(memory.as_strided((10, 2), (6, 1))), Parameter(memory[2:4])
    around.grad, within.grad = torch.ones(10, 2), torch.ones(2)
    optimizer = fused.SGD([around, within], lr=0.1)
    optimizer.step()
    before, within.grad = memory.clone(), memory[54:56]
    with pytest.raises(RuntimeError, match="shares memory"):
        optimizer.step()
    assert torch.equal(memory, before)


@pytest.mark.parametrize("how", ["plain", "strided", "rows"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adafactor"])
def test_autograd_sees_that_states_have_changed(name: str, how: str) -> None:
    if how == "rows" and name == "Adafactor":
        pytest.skip("takes none")
    data = torch.ones(4, 6)[:, ::2] if how == "strided" else torch.ones(4, 3)
    parameter = torch.nn.Parameter(data)
    options = {"momentum": 0.9} if name == "SGD" else {}
    options |= {"sparse": "all"} if how == "rows" else {}
    optimizer = getattr(fused, name)([parameter], **options)
    optimizer.zero_grad()
    for _ in range(3):
        parameter.grad = torch.ones(4, 3).to_sparse(1) if how == "rows" else torch.ones(4, 3)
        tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
        before = [t._version for t in tensors]
        optimizer.step()
        assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    for saved in optimizer.state[parameter].values():
        weight = torch.ones(saved.shape, requires_grad=True)
        loss = (weight * saved).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_loaded_state_that_lacks_some() -> None:
    parameter, optimizer, _ = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["exp_avg"]
    fresh = fused.Adam([parameter])
    fresh.load_state_dict(saved)
    optimizer.param_groups[0]["amsgrad"] = True  # as in PyTorch, where it is a KeyError
    for one, missing in ((fresh, "exp_avg"), (optimizer, "max_exp_avg_sq")):
        with refused(RuntimeError, f"state of parameter 0 lacks '{missing}': expected", one):
            one.step()


def test_a_momentum_that_begins_later() -> None:
    """As in PyTorch it begins with the gradient."""
    parameter, optimizer, _ = stepped(name="SGD", lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones(4))


def test_inference_tensors() -> None:
    """They have no count of changes."""
    with torch.inference_mode():
        parameter = torch.ones(6)[::2]
        plain = torch.ones(3)
        plain.grad, parameter.grad = torch.ones(3), torch.ones(3)
        optimizer = fused.SGD([plain, parameter], lr=1.0)
    for _ in range(3):
        optimizer.step()
    assert plain.tolist() == parameter.tolist() == [-2.0] * 3


@pytest.mark.parametrize("name", [pytest.param("Adam", marks=since(2, 7)), "NAdam", "RAdam"])
def test_groups_of_both_weight_decays(name: str) -> None:
    models = net(), net()
    for model, package in zip(models, (fused, torch.optim), strict=True):
        last = {"params": model[2].parameters(), "decoupled_weight_decay": True}
        groups = [{"params": model[0].parameters()}, last]
        train(model, getattr(package, name)(groups, lr=0.05, weight_decay=0.1), range(4))
    assert_equal_models(*models)


# -- what a step takes over from the one before, where it may not ---------------------------------


def of_ones(*shape: int, n: int = 1) -> list[Any]:
    made = [Parameter(torch.zeros(shape)) for _ in range(n)]
    for parameter in made:
        parameter.grad = torch.ones(shape)
    return made


def test_a_parameter_that_goes_to_another_group() -> None:
    first, second, third = of_ones(3, n=3)
    groups = [{"params": [first, second], "lr": 0.0}, {"params": [third], "lr": 1.0}]
    optimizer = fused.SGD(groups, lr=1.0)
    optimizer.step()
    optimizer.step(param=second)
    one, other = optimizer.param_groups
    other["params"].insert(0, one["params"].pop())
    optimizer.step()
    assert second.tolist() == [-1.0] * 3
    optimizer.step(param=second)
    assert second.tolist() == [-2.0] * 3
    other["params"].pop(0)
    with pytest.raises(ValueError, match="foreign"):
        optimizer.step(param=second)


def test_a_parameter_that_is_turned_in_its_place() -> None:
    (parameter,) = of_ones(2, 2)
    optimizer = fused.SGD([parameter], lr=1.0)
    parameter.grad.zero_()
    optimizer.step()
    parameter.data = parameter.data.t()
    parameter.grad.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    optimizer.step()
    assert parameter.tolist() == [[0.0, -1.0], [0.0, 0.0]]


def test_gradients_that_come_and_go_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = of_ones(3, n=4)
    optimizer = fused.Adam(parameters)
    bound = []
    make = type(optimizer)._entry
    monkeypatch.setattr(type(optimizer), "_entry", lambda *a: bound.append(1) or make(*a))
    for k in range(8):
        parameters[0].grad = torch.ones(3) if k % 2 else None
        optimizer.step()
    assert sum(bound) == 4
    assert [optimizer.state[p]["step"].item() for p in parameters] == [4.0, 8.0, 8.0, 8.0]


def test_state_dtype_of_states_that_are_made_at_once() -> None:
    parameter = Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = fused.Adagrad([parameter], state_dtype=torch.float32)
    assert optimizer.state[parameter]["sum"].dtype == torch.float32


def test_skip_nonfinite_is_of_the_optimizer() -> None:
    (parameter,) = of_ones(1)
    with pytest.raises(ValueError, match="no option of groups"):
        fused.SGD([{"params": [parameter], "skip_nonfinite": True}])
    optimizer, other = fused.SGD([parameter], skip_nonfinite=True), fused.SGD(of_ones(1))
    parameter.grad = torch.tensor([torch.nan])
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert (copied.skipped_steps, copied.skip_nonfinite) == (1, True)
    other.load_state_dict(optimizer.state_dict())
    assert not other.skip_nonfinite


def test_what_fails_leaves_groups_as_they_were() -> None:
    (parameter, later) = of_ones(1, n=2)
    optimizer = fused.Adam([parameter], lr=0.1)
    with pytest.raises(ValueError, match="sparse"):
        optimizer.add_param_group({"params": [later], "sparse": "bogus"})
    optimizer.add_param_group({"params": [later], "sparse": "all"})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update({"differentiable": True, "lr": 5.0})
    with pytest.raises(RuntimeError, match="differentiable"):
        optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["differentiable"]) == (0.1, False)
    with pytest.raises(RuntimeError, match="capturable"):
        optimizer.add_param_group({"params": of_ones(1), "capturable": True})
    assert len(optimizer.param_groups) == 2


def test_a_momentum_of_rows_from_pytorch() -> None:
    """Its SGD keeps a sparse momentum of sparse gradients."""
    results = []
    for package, options in ((torch.optim, {}), (fused, {"sparse": "all"})):
        table = Parameter(torch.zeros(4, 2))
        first = torch.optim.SGD([table], lr=0.1, momentum=0.9)
        values = torch.ones(2, 2)
        table.grad = torch.sparse_coo_tensor([[1, 3]], values, (4, 2), check_invariants=False)
        first.step()
        optimizer = package.SGD([table], lr=0.1, momentum=0.9, **options)
        optimizer.load_state_dict(first.state_dict())
        optimizer.step()
        results.append(table.detach().clone())
    torch.testing.assert_close(*results)


def test_states_and_memory_that_are_exchanged_here_and_there(bound: list[int]) -> None:
    results = []
    for package in (fused, torch.optim):
        parameters = [torch.nn.Parameter(torch.full((3, k + 1), 1.0)) for k in range(40)]
        optimizer = package.AdamW(parameters, lr=0.1)
        for k in range(8):
            optimizer.zero_grad()
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 1.0 + i - k)
            for parameter, state in [*optimizer.state.items()][k::7]:
                if k % 2:
                    parameter.data = parameter.data.clone()
                    state["exp_avg"] = state["exp_avg"].clone()
                else:
                    optimizer.state[parameter] = {name: x.clone() for name, x in state.items()}
            optimizer.step()
        results.append(everything(optimizer))
    torch.testing.assert_close(*results)
    assert len(bound) == 40
