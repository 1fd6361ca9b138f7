"""A step finds everything that has changed in its tensors since the last one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.kernels.cpu.headers import tensor_fields  # noqa: E402
from fusestep.kernels.cpu.headers.tensors import (  # noqa: E402
    DENSE,
    MOVED,
    NONE,
    OTHER,
    ROWS,
    SAME,
    ExpectedTensors,
)
from fusestep.nn import torch as fused  # noqa: E402
from fusestep.nn.torch.optimizer import Fused  # noqa: E402

from torch_training import everything  # noqa: E402


@pytest.fixture(params=["fields", "python"])
def _look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of looking at tensors."""
    if request.param == "python":
        monkeypatch.setattr("fusestep.nn.torch.engine.binding.layout_of", lambda _: None)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each step that looks at everything by Python."""
    times: list[int] = []
    make = Fused._bound
    monkeypatch.setattr(Fused, "_bound", lambda *a: times.append(1) or make(*a))
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


def imaginary(conjugate: bool) -> Any:
    whole = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    return (whole.conj() if conjugate else whole).imag


GRADIENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "imag of a conjugate": (lambda: imaginary(False), lambda: imaginary(True)),
    "negative view": (lambda: torch.ones(3), lambda: torch._neg_view(torch.ones(3))),
    "zeros without memory": (lambda: torch.ones(3), lambda: torch._efficientzerotensor(3)),
    "strided": (lambda: torch.ones(3), lambda: torch.arange(6.0)[::2]),
    "expanded": (lambda: torch.ones(3), lambda: torch.ones(1).expand(3)),
    "of another dtype": (lambda: torch.ones(3), lambda: torch.ones(3).double()),
    "a parameter": (lambda: torch.ones(3), lambda: torch.nn.Parameter(torch.ones(3))),
    "negative rows": (
        lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2), (3,), check_invariants=False),
        lambda: torch.sparse_coo_tensor(
            [[0, 2]], torch._neg_view(torch.ones(2)), (3,), check_invariants=False
        ),
    ),
}


@pytest.mark.usefixtures("_look")
@pytest.mark.parametrize("form", ["parameter", "strided parameter", "negated parameter"])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_of_other_kinds(case: str, form: str) -> None:
    """In turn with those of the kind that was bound; the numbers are PyTorch's."""
    results = []
    for package in (fused, torch.optim):
        data = torch.arange(6.0)[::2] if form[0] == "s" else torch.arange(0.0, 6.0, 2.0)
        data = torch._neg_view(-data) if form[0] == "n" else data
        parameter, other = torch.nn.Parameter(data), torch.nn.Parameter(torch.ones(2))
        parameter.grad_dtype = None
        optimizer = package.SGD([parameter, other], lr=0.5)
        other.grad = torch.ones(2)
        for gradient in (*GRADIENTS[case], *GRADIENTS[case]):
            made = gradient()
            parameter.grad = made if package is fused else made.to_dense().float().clone()
            optimizer.step()
        results.append(parameter.detach().clone())
    torch.testing.assert_close(*results)


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


def stepped(*shape: int) -> tuple[Any, Any, Any]:
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = fused.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(shape)
    for _ in range(2):
        optimizer.step()
    return parameter, optimizer, optimizer.state[parameter]


def to_half(parameter: Any, _: Any) -> None:
    parameter.data = torch.zeros(64).view(torch.float16)[:16].view(8, 2)


def resize(_: Any, state: Any) -> None:
    state["exp_avg"].resize_(10)


def turn(_: Any, state: Any) -> None:
    state["exp_avg"].data = state["exp_avg"].t()


def lose(parameter: Any, _: Any) -> None:
    parameter.untyped_storage().resize_(0)


def lose_some(_: Any, state: Any) -> None:
    state["exp_avg_sq"].untyped_storage().resize_(40)


def lose_a_gradient(parameter: Any, _: Any) -> None:
    parameter.grad.untyped_storage().resize_(0)


def take_away(_: Any, state: Any) -> None:
    del state["exp_avg"]


def put_a_list(_: Any, state: Any) -> None:
    state["exp_avg"] = [0.0]


def put_zeros(_: Any, state: Any) -> None:
    state["exp_avg"] = torch._efficientzerotensor(8, 2)


def put_a_count_without_memory(_: Any, state: Any) -> None:
    state["step"] = torch._efficientzerotensor(())


def put_counts(_: Any, state: Any) -> None:
    state["step"] = torch.zeros(2)


REFUSED: dict[Any, str] = {
    to_half: "has changed since the last step",
    resize: "state 'exp_avg' .* has a wrong shape",
    turn: "state 'exp_avg' .* has a wrong shape",
    lose: "Adam: parameter 0 has no memory: expected 64 bytes, got 0",
    lose_some: "state 'exp_avg_sq' of parameter 0 has no memory: expected 64 bytes, got 40",
    lose_a_gradient: "the gradient of parameter 0 has no memory",
    take_away: "state of parameter 0 lacks 'exp_avg'",
    put_a_list: "state 'exp_avg' of parameter 0 is missing: expected a tensor, got list",
    put_zeros: "state 'exp_avg' of parameter 0 has no memory",
    put_a_count_without_memory: "state 'step' of parameter 0 is a view of another number",
    put_counts: "state 'step' of parameter 0 is no number: expected a tensor of one element",
}


@pytest.mark.usefixtures("_look")
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_no_step_can_take(change: Callable[[Any, Any], None]) -> None:
    parameter, optimizer, state = stepped(8, 2)
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones(3)
    optimizer.step()
    change(parameter, state)
    before = other.detach().clone()
    with pytest.raises(RuntimeError, match=REFUSED[change]):
        optimizer.step()
    assert torch.equal(other, before)
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
    parameter, optimizer, state = stepped(8, 2)
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
    parameter, optimizer, state = stepped(8, 2)
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
    parameter, optimizer, _ = stepped(8, 2)
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
        assert len(bound) == 1
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


# -- the comparison itself ------------------------------------------------------------------------


def expected(gradient: Any, parameter: Any) -> ExpectedTensors:
    kind = NONE if gradient is None else ROWS if gradient.layout == torch.sparse_coo else DENSE
    found = ExpectedTensors(torch, (parameter,), (gradient,), (kind,), {}, ())
    assert found.look((parameter,), (gradient,), {}) in (SAME, MOVED)
    return found


def test_six_dimensions() -> None:
    parameter = torch.zeros(1, 2, 3, 1, 2, 2)
    found = expected(torch.ones_like(parameter), parameter)
    for gradient, result in (
        (torch.ones_like(parameter), SAME),
        (torch.ones(1, 3, 2, 1, 2, 2), OTHER),
        (torch.ones(2, 3, 1, 2, 2), OTHER),
    ):
        assert found.look((parameter,), (gradient,), {}) == result
    assert found.look((parameter,), (torch.ones_like(parameter),), {}) == MOVED
    parameter.data = torch.zeros_like(parameter)
    assert found.look((parameter,), (torch.ones_like(parameter),), {}) == MOVED


@pytest.mark.parametrize(
    "other",
    [None, 3, torch.ones(4), torch.ones(3, 1), torch.ones(3).double(), torch.ones(3, device="meta"),
     torch.ones(3).to_sparse(), torch.ones(6)[::2], torch.ones(3).to(torch.complex64).imag,
     torch.nn.Parameter(torch.ones(3))],
    ids=str,
)  # fmt: skip
def test_other_gradients(other: Any) -> None:
    parameter = torch.zeros(3)
    assert expected(torch.zeros(3), parameter).look((parameter,), (other,), {}) == OTHER


@pytest.mark.parametrize("other", [torch.zeros(3), torch.ones(4).to_sparse(),
                                   torch.ones(3).double().to_sparse(), None], ids=str)  # fmt: skip
def test_other_rows(other: Any) -> None:
    given = (torch.zeros(3),)
    found = expected(torch.ones(3).to_sparse(), *given)
    assert found.look(given, (torch.zeros(3).to_sparse(),), {}) == SAME
    assert found.look(given, (other,), {}) == OTHER
    assert expected(None, *given).look(given, (other,), {}) == (SAME if other is None else OTHER)


def test_other_numbers_of_tensors() -> None:
    one = torch.zeros(3)
    found = ExpectedTensors(torch, (one,), (None,), (NONE,), {}, ())
    assert found.look((one,), (None,), {}) == MOVED
    assert found.look((one,), (None,), {}) == SAME
    for parameters, gradients in (
        ((), (None,)), ((one, one), (None,)), ((one,), ()), ((None,), (None,)),
    ):  # fmt: skip
        assert found.look(parameters, gradients, {}) == OTHER


def test_other_states() -> None:
    """Those of the same parameters, in the same order, whatever else a user keeps there."""
    one, other, third = (torch.zeros(3) for _ in range(3))
    states = {one: {"mine": 1, "sum": torch.zeros(3), "square": torch.zeros(3)}, other: {}}
    given = (one, other), (torch.ones(3), torch.ones(3))
    found = ExpectedTensors(torch, *given, (DENSE, DENSE), states, (("sum", "square"), ()))
    assert [found.look(*given, states) for _ in range(2)] == [MOVED, SAME]
    first = states[one]
    places = [*found.written]
    assert places == [x.data_ptr() for x in (one, other, first["sum"], first["square"])]
    more = {"first": 0, **first, "last": None}
    assert found.look(*given, {one: more, other: {"sum": None}}) == SAME
    for wrong in (
        {}, {one: first}, {other: {}, one: first}, {**states, torch.zeros(3): {}},
        {one: {}, other: first}, {one: None, other: {}}, [one, other], None,
        {one: dict(reversed(first.items())), other: {}},
        {one: {"sum": first["sum"], "cube": first["square"]}, other: {}}, {third: first, other: {}},
        {one: {**first, "square": 3}, other: {}}, {one: {**first, "square": None}, other: {}},
        {one: {**first, "sum": torch.zeros(4)}, other: {}},
    ):  # fmt: skip
        assert found.look(*given, wrong) == OTHER
    assert found.look(*given, {one: {**first, "sum": torch.zeros(3)}, other: {}}) == MOVED
    assert found.look(*given, {one: {**first, "sum": one}, other: {}}) == OTHER  # one memory twice


def test_a_state_that_is_gone() -> None:
    """What was last found in a dict is not taken for what is in it now."""
    one, state = torch.zeros(3), torch.zeros(3)
    found = ExpectedTensors(torch, (one,), (one + 1,), (DENSE,), {one: {"sum": state}}, (("sum",),))
    assert found.look((one,), (one + 1,), {one: {"sum": state}}) == MOVED
    assert found.look((one,), (one + 1,), {one: {}}) == OTHER


@pytest.mark.parametrize("change", ["add", "exchange", "number", "delete", "reorder"])
def test_states_that_a_user_changes(change: str, bound: list[int]) -> None:
    results = []
    for package in (fused, torch.optim):
        parameters = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
        optimizer = package.Adam(parameters, lr=0.1)
        for k in range(6):
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.full((5,), 1.0 + i - k)
            state = optimizer.state[parameters[1]]
            if k == 3 and change == "add":
                optimizer.state[parameters[1]] = {"of the user": [], **state, "another": 2}
            elif k == 3 and change == "exchange":
                state["exp_avg"] = torch.full((5,), 0.25)
            elif k == 3 and change == "number":
                state["step"] = torch.tensor(8.0)
            elif k == 3 and change == "delete":
                del optimizer.state[parameters[1]]
            elif k == 3:
                optimizer.state[parameters[1]] = dict(reversed(state.items()))
            optimizer.step()
        results.append(everything(optimizer))
    torch.testing.assert_close(*results)
    assert len(bound) == (2 if change in ("delete", "reorder") else 1)


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
    assert len(bound) == 1


def test_fetching_without_tensors() -> None:
    states = {torch.zeros(3): {"sum": torch.zeros(3)} for _ in range(50)}
    given = (*states,), (torch.ones(3),) * 50
    found = ExpectedTensors(torch, *given, (DENSE,) * 50, states, [("sum",)] * 50)
    found.fetch()  # nothing has been seen yet
    assert found.look(*given, states) == MOVED
    del states, given
    for _ in range(3):
        found.fetch()
