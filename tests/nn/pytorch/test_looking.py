"""A step finds all that has changed since the last one, and writes more than parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from fusestep.kernels.cpu.headers import tensor_fields  # noqa: E402
from fusestep.kernels.cpu.headers.arrays import PLAIN, ROWS  # noqa: E402
from fusestep.kernels.cpu.headers.tensors import (  # noqa: E402
    FITS,
    FOREIGN,
    MOVED,
    OTHER,
    OTHER_GRADIENT,
    OTHERS,
    REORDERED,
    UNLIKE,
    RecordedTensors,
    TensorLook,
    form_of,
)
from fusestep.nn import torch as fused  # noqa: E402
from fusestep.nn.torch.optimizer import Fused  # noqa: E402

from torch_training import assert_equal_models, everything, net, refused, train  # noqa: E402


@pytest.fixture(params=["fields", "python"])
def _look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of looking at tensors."""
    if request.param == "python":
        monkeypatch.setattr("fusestep.kernels.cpu.headers.tensors.layout_of", lambda _: None)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each parameter that is looked at by Python."""
    times: list[int] = []
    make = Fused._entry
    monkeypatch.setattr(Fused, "_entry", lambda *a: times.append(1) or make(*a))
    return times


def test_the_fields_of_tensors_are_known_here() -> None:
    """Of every PyTorch that the tests run with; steps take a fifth longer without."""
    layout = tensor_fields.layout_of(torch)
    assert layout is not None
    assert layout.fields.inline >= 5
    assert len(set(layout.codes.values())) == 6


def test_a_first_step_in_inference_mode() -> None:
    """Tensors that are made there have no counts of changes."""
    tensor_fields.layout_of.cache_clear()
    tensor_fields.layout_or_obstacle.cache_clear()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with torch.inference_mode():
        fused.SGD([parameter], lr=1.0).step()
    assert tensor_fields.layout_of(torch) is not None


@pytest.mark.parametrize("place", [8, 12, 20])
def test_a_wrong_place_of_the_count_of_changes_is_found_out(place: int) -> None:
    fields = tensor_fields.layout_of(torch).fields  # type: ignore[union-attr]
    assert tensor_fields._counts_changes(torch, fields)
    assert not tensor_fields._counts_changes(torch, fields._replace(changes=place))
    assert tensor_fields._counts_changes(torch, fields)


@pytest.mark.parametrize(
    ("name", "found", "text"),
    [("_found", None, "were not found"), ("_counts_changes", False, "changes are not counted")],
)
def test_tensors_are_not_read_where_fields_lie_elsewhere(
    name: str, found: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_fields, name, lambda *_: found)
    looked_for = tensor_fields.layout_or_obstacle.__wrapped__
    monkeypatch.setattr(tensor_fields, "layout_or_obstacle", looked_for)
    with pytest.warns(RuntimeWarning, match=f"reads tensors through Python, .*{text}"):
        assert tensor_fields.layout_of.__wrapped__(torch) is None


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


def stepped(
    shape: Any = (4,), name: str = "Adam", steps: int = 1, **options: Any
) -> tuple[Any, Any, Any]:
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


@pytest.mark.usefixtures("_look")
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


@pytest.mark.usefixtures("_look")
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


@pytest.mark.parametrize(
    "fault",
    [torch._neg_view(torch.ones(64)), torch.ones(128)[::2], torch.ones(64).double(), None],
    ids=["negative", "strided", "double", "none"],
)
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


@pytest.mark.usefixtures("_look")
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


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam"])
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
    for option in ("differentiable", "capturable"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update({option: True, "lr": 5.0})
        with pytest.raises(RuntimeError, match=option):
            optimizer.load_state_dict(saved)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0][option]) == (0.1, False)


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


# -- the comparison itself ------------------------------------------------------------------------


def recorded(parameter: Any, gradient: Any, **states: Any) -> RecordedTensors:
    """A parameter with states, and a gradient of this kind, as they are."""
    own = [parameter, *states.values()]
    forms = [form_of(torch, tensor, PLAIN, n_bytes=tensor.nbytes) for tensor in own]
    is_sparse = gradient.layout == torch.sparse_coo
    n_bytes = 0 if is_sparse else gradient.nbytes
    forms.append(form_of(torch, gradient, ROWS if is_sparse else PLAIN, n_bytes=n_bytes))
    strides = [0] * gradient.dim() if is_sparse else gradient.stride()
    dims = [(*t.shape, *t.stride()) for t in own] + [(*gradient.shape, *strides)]
    types = [*map(type, own), type(gradient)]
    return RecordedTensors(forms, dims, [None, *states, None], -1, types, True)


class Looked:
    """A look at parameters, which knows some of them; what it finds, in words of the module."""

    def __init__(self, parameters: tuple[Any, ...], known: dict[int, RecordedTensors]) -> None:
        self.look, self.parameters = TensorLook(torch, len(parameters)), parameters
        for k, own in known.items():
            self.look.record(k, len(own.forms), own)

    def __call__(self, gradients: Any, states: Any = None, parameters: Any = None) -> int:
        self.held = [None] * self.look.n_held
        given = self.parameters if parameters is None else parameters, tuple(gradients)
        return self.look.look(*given, {} if states is None else states, self.held)

    @property
    def status(self) -> list[int]:
        return self.look.status.tolist()


def test_six_dimensions() -> None:
    parameter = torch.zeros(1, 2, 3, 1, 2, 2)
    look = Looked((parameter,), {0: recorded(parameter, torch.ones_like(parameter))})
    assert look([torch.ones_like(parameter)]) == MOVED | OTHERS
    for gradient, flags in (
        (torch.ones_like(parameter), 0),
        (torch.ones(1, 3, 2, 1, 2, 2), UNLIKE),
        (torch.ones(2, 3, 1, 2, 2), UNLIKE),
    ):
        assert look([gradient]) == flags
        assert look.status == [OTHER_GRADIENT if flags else FITS]
    parameter.data = torch.zeros_like(parameter)
    assert look([torch.ones_like(parameter)]) == MOVED
    parameter.data = torch.zeros(1, 3, 2, 1, 2, 2)
    assert look([torch.ones_like(parameter)]) == UNLIKE
    assert look.status == [OTHER]


def test_other_parameters() -> None:
    one, other, gradient = torch.zeros(3), torch.zeros(3), torch.ones(3)
    look = Looked((one, other), {0: recorded(one, gradient)})
    assert look([gradient, None]) == MOVED | OTHERS
    assert look([gradient, gradient]) == OTHERS | UNLIKE
    assert look.status == [FITS, OTHER]  # nothing is known of it
    for parameters, gradients in (
        ((), (None, None)), ((one,), (None,)), ((one, other), (None,)), ((other, one), ()),
    ):  # fmt: skip
        assert look(gradients, parameters=parameters) == FOREIGN
    assert look([gradient, None], parameters=(other, one)) == MOVED | OTHERS
    assert look([gradient, None], parameters=(torch.zeros(4), one)) == UNLIKE


def test_other_states() -> None:
    """Whatever else a user keeps there, and in whatever order parameters come."""
    one, other, third = (torch.zeros(3) for _ in range(3))
    own = {"mine": 1, "sum": torch.zeros(3), "square": torch.zeros(3)}
    known = recorded(one, one, **{name: own[name] for name in ("sum", "square")})
    look = Looked((one, other), {0: known, 1: recorded(other, other)})
    given = torch.ones(3), torch.ones(3)
    states = {one: own, other: {}}
    assert [look(given, states) for _ in range(2)] == [MOVED | OTHERS, 0]
    assert look.held[:2] == [own, {}]
    places = look.look.addresses[[1, 2, 3, 5]].tolist()
    assert places == [x.data_ptr() for x in (one, own["sum"], own["square"], other)]
    more = {"first": 0, **own, "last": None}
    for fine in (
        {one: more, other: {"sum": None}}, {one: own}, {other: {}, one: own},
        {other: None, one: own}, {"of the user": 3, one: own, third: {}},
    ):  # fmt: skip
        assert look(given, fine) == 0, fine
        assert look.held[2:] == [own["sum"], own["square"]]
    for wrong in (
        {}, {other: {}}, {one: {}, other: own}, {one: None, other: {}},
        {one: dict(reversed(own.items())), other: {}}, {third: own, other: {}},
        {one: {"sum": own["sum"], "cube": own["square"]}, other: {}},
        {one: {**own, "square": 3}, other: {}}, {one: {**own, "square": None}, other: {}},
        {one: {**own, "sum": torch.zeros(4)}, other: {}}, {one: 3},
    ):  # fmt: skip
        assert look(given, wrong) == UNLIKE, wrong
        assert look.status == [OTHER, FITS]
    assert look(given, {one: {**own, "sum": torch.zeros(3)}, other: {}}) == MOVED


def test_a_state_that_is_gone() -> None:
    """What was last found in a dict is not taken for what is in it now."""
    one, state = torch.zeros(3), torch.zeros(3)
    look = Looked((one,), {0: recorded(one, one, sum=state)})
    assert look([one + 1], {one: {"sum": state}}) == MOVED | OTHERS
    assert look([one + 1], {one: {}}) == UNLIKE
    assert look([one + 1], {one: {"other": state}}) == UNLIKE


class Restless(dict[Any, Any]):
    """States that never come in the order in which they are listed."""

    def __iter__(self) -> Any:
        return iter([*self.keys()][::-1])


def test_states_whose_order_cannot_be_found() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    look = Looked((one, other), {})
    assert look([None, None], Restless({one: {}, other: {}})) == REORDERED


def test_what_was_found_is_held() -> None:
    """Another thread may drop a state while a step runs."""
    one, states = torch.zeros(3), {}
    states[one] = {"sum": torch.zeros(3)}
    look = Looked((one,), {0: recorded(one, one, **states[one])})
    was = weakref.ref(states[one]["sum"])
    assert look([torch.ones(3)], states) == MOVED | OTHERS
    del states[one]
    assert was() is not None
    del look.held
    assert was() is None


def test_records_that_are_exchanged() -> None:
    """Of more and of fewer tensors, and of parameters that come later."""
    parameters = tuple(torch.zeros(3) for _ in range(9))
    look, gradients, states = Looked(parameters, {}), [None] * 9, {}
    for k in (4, 1, 8, 1, 4, 2, 1):
        own = {f"{j}": torch.zeros(3) for j in range(len(states) % 3)}
        states[parameters[k]], gradients[k] = own, torch.ones(3)
        made = recorded(parameters[k], gradients[k], **own)
        look.look.record(k, len(made.forms), made)
        look(gradients, states)
        assert look(gradients, states) == 0
        first = int(look.look.first[k])
        places = look.look.addresses[first : first + len(own) + 1].tolist()
        assert places == [x.data_ptr() for x in (parameters[k], *own.values())]
        assert look.look.gradients[k] == gradients[k].data_ptr()
        assert look.look.active[: look.look.found[0]].tolist() == [
            j for j, gradient in enumerate(gradients) if gradient is not None
        ]


def test_what_is_fetched_may_be_gone(bound: list[int]) -> None:
    """Where tensors were is fetched before it is known whether they are still there."""
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


def test_fetching_without_tensors() -> None:
    states = {torch.zeros(3): {"sum": torch.zeros(3)} for _ in range(50)}
    known = {k: recorded(p, p, **state) for k, (p, state) in enumerate(states.items())}
    look = Looked(tuple(states), known)
    look.look.fetch()  # nothing has been seen yet
    assert look([torch.ones(3)] * 50, states) == MOVED | OTHERS
    del states, known
    for _ in range(3):
        look.look.fetch()
