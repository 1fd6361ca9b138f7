"""Clipping beside PyTorch's: sparse gradients as the dense ones that they stand for; in parts."""

import copy
import gc
import math
import pickle
import random
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from fusestep.nn import torch as fused
from helpers import meanwhile
from torch_training import refused

ORDERS = [2.0, 1.0, 3, 0.5, math.inf, "inf"]
theirs = torch.nn.utils


def gradients(dtype: Any = torch.float32, *, dense: bool = False) -> list[Any]:
    """Parameters with gradients: dense, none, of rows with duplicates, of single elements."""
    draw = torch.Generator().manual_seed(3)
    shapes = (5, 4), (3,), (9, 3), (4, 4)
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    made[0].grad = torch.randn(5, 4, generator=draw).to(dtype)
    rows = torch.tensor([[7, 0, 7, 2, 7]])
    values = torch.randn(5, 3, generator=draw).to(dtype)
    elements = torch.tensor([[3, 0, 3], [1, 2, 1]])
    single = torch.randn(3, generator=draw).to(dtype)
    for p, indices, of in ((made[2], rows, values), (made[3], elements, single)):
        wide = of if dtype == torch.float64 else of.float()
        p.grad = torch.sparse_coo_tensor(indices, of, p.shape, check_invariants=True)
        if dense:
            summed = torch.sparse_coo_tensor(indices, wide, p.shape, check_invariants=True)
            p.grad = summed.to_dense().to(dtype)
    return made


def dense_of(parameters: list[Any]) -> list[Any]:
    return [None if p.grad is None else p.grad.to_dense() for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.0, 0.25, 1e3, math.inf])
@pytest.mark.parametrize("order", ORDERS)
def test_norms_are_those_of_pytorch(order: Any, max_norm: float, dtype: Any) -> None:
    mine, other = gradients(dtype), gradients(dtype, dense=True)
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-6  # PyTorch's norm is of 16 bits too
    found = fused.clip_grad_norm_(mine, max_norm, order, foreach=True)
    expected = theirs.clip_grad_norm_(other, max_norm, order)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0.0, check_dtype=False)
    assert (found.shape, found.device) == (expected.shape, expected.device)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(dense_of(mine), dense_of(other), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("order", ORDERS)
def test_the_step_scales_as_pytorch_clips(order: Any) -> None:
    mine, other = gradients(), gradients(dense=True)
    ours, of_pytorch = fused.SGD(mine, lr=1.0), torch.optim.SGD(other, lr=1.0)
    before = dense_of(mine)
    fused.clip_grad_norm_(mine, 0.25, order, optimizer=ours)
    for gradient, kept in zip(dense_of(mine), before, strict=True):
        assert gradient is kept is None or torch.equal(gradient, kept)
    theirs.clip_grad_norm_(other, 0.25, order)
    ours.step()
    of_pytorch.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_what_is_not_finite(order: float, value: float, place: int) -> None:
    mine = gradients()
    own = mine[place].grad
    (own._values() if own.is_sparse else own).view(-1)[0] = value
    other = copy.deepcopy(mine)
    for p, dense in zip(other, dense_of(mine), strict=True):
        p.grad = None if dense is None else dense.clone()
    before = copy.deepcopy(dense_of(mine))
    for function, given in ((fused.clip_grad_norm_, mine), (theirs.clip_grad_norm_, other)):
        with pytest.raises(RuntimeError, match=f"norm of order {order} .* is non-finite"):
            function(given, 1.0, order, error_if_nonfinite=True)
    torch.testing.assert_close(dense_of(mine), before, rtol=0.0, atol=0.0, equal_nan=True)
    norm = fused.clip_grad_norm_(mine, 1.0, order)
    torch.testing.assert_close(norm, theirs.clip_grad_norm_(other, 1.0, order), equal_nan=True)
    for one, dense, first in zip(dense_of(mine), other, before, strict=True):
        if one is not None:  # what does not occur stays 0, where a dense 0 becomes NaN
            expected = torch.where((first == 0) & (one == 0), 0.0, dense.grad)
            torch.testing.assert_close(one, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.0, 0.5, math.inf])
def test_values_are_those_of_pytorch(limit: float, dtype: Any) -> None:
    mine, other = gradients(dtype), gradients(dtype, dense=True)
    same = [p.grad for p in mine]
    assert fused.clip_grad_value_(mine, limit, foreach=False) is None
    theirs.clip_grad_value_(other, limit)
    assert all(p.grad is gradient for p, gradient in zip(mine, same, strict=True))
    assert all(map(lambda a, b: a is b is None or torch.equal(a, b), *map(dense_of, (mine, other))))
    fused.SGD(mine, lr=1.0).step()
    torch.optim.SGD(other, lr=1.0).step()
    assert all(map(torch.equal, mine, other))


def test_one_tensor_none_and_an_exhausted_generator() -> None:
    (w, none, *_) = gradients()
    other = copy.deepcopy(w)
    other.grad = w.grad.clone()
    torch.testing.assert_close(fused.clip_grad_norm_(w, 0.5), theirs.clip_grad_norm_(other, 0.5))
    torch.testing.assert_close(w.grad, other.grad)
    for nothing in ([], [none], none):
        assert fused.clip_grad_norm_(nothing, 1.0).item() == 0.0
    spent = (p for p in ())
    with pytest.warns(UserWarning, match="parameters is an empty generator"):
        fused.clip_grad_norm_(spent, 1.0)


def test_a_parameter_or_gradient_that_is_given_twice_counts_once() -> None:
    w, v = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w.grad = torch.tensor([4.0])
    assert fused.clip_grad_norm_([w, w], 2.0).item() == 4.0
    assert w.grad.item() == pytest.approx(2.0)
    v.grad = w.grad
    assert fused.clip_grad_norm_([w, v], 2.0).item() == pytest.approx(math.sqrt(8.0))
    assert w.grad.item() == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_bits_do_not_depend_on_threads(order: float) -> None:
    draw, before, found = torch.Generator().manual_seed(0), torch.get_num_threads(), set()
    every = [torch.nn.Parameter(torch.zeros(1_000_003, dtype=torch.float64)) for _ in range(2)]
    for w in every:
        w.grad = torch.randn(1_000_003, generator=draw, dtype=torch.float64)
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.add(fused.clip_grad_norm_(every, math.inf, order).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


# A part of an optimizer's parameters


MAKERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: fused.SGD(p, lr=1.0, momentum=0.5, sparse="all"),
    "Adam": lambda p: fused.Adam(p, lr=0.1, sparse="touched", maximize=True),
    "NAdam": lambda p: fused.NAdam(p, lr=0.1, sparse="touched"),
    "AdamW of groups": lambda p: fused.AdamW(
        [{"params": p[:2], "lr": 0.5}, {"params": p[2:], "weight_decay": 0.5}], sparse="all"),
    "Adagrad with decay": lambda p: fused.Adagrad(p, lr=0.1, weight_decay=0.1, sparse="touched"),
}  # fmt: skip
WHOLE = {
    "Lamb": lambda p: fused.Lamb(p, lr=0.1), "Prodigy": fused.Prodigy,
    "Adafactor": lambda p: fused.Adafactor(p, lr=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*MAKERS, *WHOLE])
def test_a_part_of_the_parameters(name: str) -> None:
    """Clipped apart, on the way: as clipped before. In later steps too, and each for itself."""
    make = {**MAKERS, **WHOLE}[name]
    mine, other = (gradients(dense=name in WHOLE) for _ in range(2))
    ours, plain = make(mine), make(other)
    for step in range(3):
        for k in (1, 2, 3):
            if mine[k].grad is None and step:
                mine[k].grad, other[k].grad = torch.ones(3), torch.ones(3)
        norms = []
        for parameters, given in ((mine, {"optimizer": ours}), (other, {})):
            first = fused.clip_grad_norm_(parameters[2:], 0.125, **given)
            again = fused.clip_grad_norm_(parameters[:3], 0.0625, 1.0, **given)
            norms.append(torch.stack([first, again]))
        torch.testing.assert_close(*norms)
        assert first < 10.0 and again > 0.0625
        ours.step()
        plain.step()
        for p, q in zip(mine, other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            p.grad, q.grad = (None if g is None else g.detach().clone() for g in (p.grad, p.grad))


def test_a_step_of_one_parameter_keeps_the_factors_of_others() -> None:
    mine, other = gradients(), gradients()
    ours, plain = fused.SGD(mine, lr=1.0), fused.SGD(other, lr=1.0)
    fused.clip_grad_norm_(mine, 0.25, optimizer=ours)
    fused.clip_grad_norm_(other, 0.25)
    for p in (mine[2], mine[0]):
        ours.step(param=p)
        p.grad = None
    ours.step()
    plain.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    mine[0].grad = torch.ones(5, 4)
    ours.step()  # nothing is left


def test_a_part_that_has_changed_since() -> None:
    mine = gradients()
    optimizer = fused.SGD(mine, lr=1.0)
    fused.clip_grad_norm_(mine[:2], 0.25, optimizer=optimizer)
    mine[1].grad = torch.ones(3)  # had none
    with pytest.raises(RuntimeError, match="changed since they were measured"):
        optimizer.step()
    assert all(not p.any() for p in mine)
    mine[1].grad = None
    mine[2].grad = mine[2].grad.clone()  # was not measured
    optimizer.step()


def test_two_optimizers_with_one_factor() -> None:
    mine, other = gradients(), gradients()
    both = fused.SGD(mine[:2], lr=1.0), fused.SGD(mine[2:], lr=1.0)
    fused.clip_grad_norm_(mine, 0.25, optimizer=both)
    fused.clip_grad_norm_(other, 0.25)
    for optimizer in (*both, fused.SGD(other, lr=1.0)):
        optimizer.step()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


# What is remembered until the step


def both(n: int = 2) -> tuple[list[Any], Any]:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(n)]
    for p in parameters:
        p.grad = torch.ones(3)
    return parameters, fused.SGD(parameters, lr=1.0)


def drop(parameters: list[Any], *_: Any) -> None:
    for p in parameters:
        p.grad = None


def step_one(parameters: list[Any], optimizer: Any) -> None:
    optimizer.step(param=parameters[0])
    parameters[0].data.fill_(1.0)


def skip_in_scaler(_: Any, optimizer: Any) -> None:
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf


def skip_nonfinite(parameters: list[Any], optimizer: Any) -> None:
    optimizer.skip_nonfinite = True
    parameters[1].grad = None  # of which no step is taken
    parameters[0].grad = torch.full((3,), torch.nan)
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    optimizer.step()


def load(_: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def remove(parameters: list[Any], optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()
    step_one(parameters, optimizer)
    optimizer.param_groups[0]["params"].append(parameters[1])


def clip_nothing(parameters: list[Any], optimizer: Any) -> None:
    drop(parameters)
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    optimizer.step()


MEANWHILE = [drop, step_one, skip_in_scaler, skip_nonfinite, load, remove, clip_nothing]


@pytest.mark.parametrize("how", MEANWHILE)
@pytest.mark.parametrize("had_none", [False, True])
@pytest.mark.parametrize("by_param", [False, True])
def test_a_measurement_ends_with_its_gradients(by_param: bool, had_none: bool, how: Any) -> None:
    """The gradients of a later backward are stepped as they are, and none is kept alive."""
    parameters, optimizer = both()
    if had_none:
        parameters[1].grad = None
    left = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    how(parameters, optimizer)
    drop(parameters)
    gc.collect()
    assert not any(gradient() is not None for gradient in left)
    for p in parameters:
        p.grad = torch.ones(3)
    for p in parameters if by_param else [None]:
        optimizer.step(param=p)
    assert all(torch.equal(p.detach(), torch.zeros(3)) for p in parameters)


def test_copies_know_nothing_of_what_was_measured() -> None:
    parameters, optimizer = both()
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = copied.param_groups[0]["params"]
        for p in own:
            p.grad = torch.ones(3)
        copied.step()
        assert all(torch.equal(p.detach(), torch.zeros(3)) for p in own)


def test_gradients_that_are_dropped_are_not_missed() -> None:
    """The others are scaled by the norm that was measured, as where gradients are written."""
    parameters, optimizer = both()
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    parameters[1].grad = None
    optimizer.step()
    scaled = 1.0 - 0.5 / math.sqrt(6.0)
    assert torch.allclose(parameters[0], torch.full((3,), scaled))
    assert torch.equal(parameters[1].detach(), torch.ones(3))


def test_what_changes_while_others_are_still_there() -> None:
    parameters, optimizer = both()
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    for change in (lambda p: p.grad.mul_(1), lambda p: setattr(p, "grad", p.grad.clone())):
        change(parameters[0])
        for given in ({}, {"param": parameters[0]}):
            with pytest.raises(RuntimeError, match="changed since they were measured"):
                optimizer.step(**given)
    assert all(torch.equal(p.detach(), torch.ones(3)) for p in parameters)
    optimizer.step(param=parameters[1])
    optimizer.step()  # of the first one nothing is left
    assert torch.equal(parameters[0].detach(), torch.zeros(3))


def test_a_clip_before_backward_is_refused() -> None:
    parameters, optimizer = both()
    drop(parameters, optimizer)
    fused.clip_grad_norm_(parameters, 0.5, optimizer=optimizer)
    parameters[0].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="clip right before the step"):
        optimizer.step()


def test_optimizers_that_take_their_steps_apart() -> None:
    parameters, one = both()
    other = fused.SGD(parameters[1:], lr=1.0)
    one.param_groups[0]["params"].pop()
    for _ in range(2):  # the other one takes no step the first time
        drop(parameters, None)
        for p in parameters:
            p.grad = torch.ones(3)
        fused.clip_grad_norm_(parameters, 0.5, optimizer=[one, other])
        one.step()
    other.step()
    factor = 0.5 / math.sqrt(6.0)
    assert torch.allclose(parameters[0], torch.full((3,), 1.0 - 2.0 * factor))
    assert torch.allclose(parameters[1], torch.full((3,), 1.0 - factor))
    shared = fused.SGD(parameters, lr=1.0), fused.SGD(parameters, lr=1.0)
    fused.clip_grad_norm_(parameters, 0.5, optimizer=shared)
    shared[0].step()
    with pytest.raises(ValueError, match="optimizer were clipped apart"):
        fused.clip_grad_norm_(parameters, 0.5, optimizer=shared)


# Gradients without memory


def cut(tensor: Any, n_bytes: int = 0, of: Any = None) -> Any:
    """A tensor, or what it is a part ``of``, with less memory than it had."""
    (tensor if of is None else of).untyped_storage().resize_(n_bytes)
    return tensor


def part(n_bytes: int, take: Callable[[Any], Any], n: int = 12) -> Any:
    whole = torch.ones(n)
    return cut(take(whole), n_bytes, whole)


def in_rows(indices: Any = None, values: Any = None) -> Any:
    indices = torch.tensor([[0, 2]]) if indices is None else indices
    values = torch.ones(2) if values is None else values
    shape = (6,) if len(indices) == 1 else (3, 2)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


class Wrapping(torch.Tensor):
    """A tensor of a library, around another one."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def fake(make: Any = lambda: torch.ones(6)) -> Any:
    with FakeTensorMode():
        return make()


MULTI = torch.tensor([[0, 2], [1, 1]])
WITHOUT_MEMORY: dict[str, Callable[[], Any]] = {
    "freed": lambda: cut(torch.ones(6)), "shrunk": lambda: cut(torch.ones(6), 8),
    "freed, float64": lambda: cut(torch.ones(6, dtype=torch.float64)),
    "freed, bfloat16": lambda: cut(torch.ones(6, dtype=torch.bfloat16)),
    "of a freed one": lambda: part(0, lambda t: t[6:]),
    "of a shrunk one": lambda: part(40, lambda t: t[6:]),
    "strided, freed": lambda: part(0, lambda t: t[::2]),
    "strided, shrunk": lambda: part(40, lambda t: t[::2]),
    "expanded, freed": lambda: part(0, lambda t: t.expand(6), 1),
    "negated, freed": lambda: part(0, torch._neg_view), "fake": fake,
    "functional": lambda: torch._to_functional_tensor(torch.ones(6)),
    "wrapping": lambda: Wrapping(torch.ones(6)),
    "values freed": lambda: in_rows(None, cut(torch.ones(2))),
    "values shrunk": lambda: in_rows(None, cut(torch.ones(2), 4)),
    "indices freed": lambda: in_rows(cut(torch.tensor([[0, 2]]))),
    "indices shrunk": lambda: in_rows(cut(torch.tensor([[0, 2]]), 8)),
    "values of elements freed": lambda: in_rows(MULTI, cut(torch.ones(2))),
    "indices of elements freed": lambda: in_rows(cut(MULTI.clone())),
    "indices of elements shrunk": lambda: in_rows(cut(MULTI.clone(), 24)),
}  # fmt: skip
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda p, _: fused.clip_grad_norm_(p, 0.5),
    "sum": lambda p, _: fused.clip_grad_norm_(p, 0.5, 1.0),
    "on the way": lambda p, o: fused.clip_grad_norm_(p, 0.5, optimizer=o),
    "value": lambda p, _: fused.clip_grad_value_(p, 0.5),
}


def beside(gradient: Any) -> list[Any]:
    """Parameters of which the second has this gradient."""
    first = torch.nn.Parameter(torch.ones(3))
    first.grad = torch.ones(3)
    second = torch.nn.Parameter(torch.ones(gradient.shape, dtype=gradient.dtype))
    second.grad = gradient
    return [first, second]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_gradients_without_memory_are_refused(name: str, way: str) -> None:
    parameters = beside(WITHOUT_MEMORY[name]())
    optimizer = fused.SGD(parameters, lr=1.0)
    where = "clip_grad_value_" if way == "value" else "clip_grad_norm_"
    what = r"(the \w+ of )?gradient 1 has no memory: expected \d+ bytes, got \d+"
    with pytest.raises(RuntimeError, match=f"^{where}: {what}$"):
        WAYS[way](parameters, optimizer)
    assert torch.equal(parameters[0].grad, torch.ones(3))
    parameters[1].grad = None
    optimizer.step()  # nothing is kept for it
    assert torch.equal(parameters[0].detach(), torch.zeros(3))


WITH_NUMBERS: dict[str, Callable[[], Any]] = {
    "zeros": lambda: torch._efficientzerotensor(6),
    "zeros, float64": lambda: torch._efficientzerotensor(6, dtype=torch.float64),
    "negated": lambda: torch._neg_view(torch.ones(6)), "strided": lambda: torch.ones(12)[::2],
    "values negated": lambda: in_rows(None, torch._neg_view(torch.ones(2))),
    "values of elements negated": lambda: in_rows(MULTI, torch._neg_view(torch.ones(2))),
    "indices are zeros": lambda: in_rows(torch._efficientzerotensor(1, 2, dtype=torch.int64)),
    "empty, freed": lambda: cut(torch.ones(0)),
    "no rows, freed": lambda: in_rows(cut(torch.zeros(1, 0, dtype=torch.int64)), torch.ones(0)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_gradients_of_which_the_numbers_are_known(name: str, way: str) -> None:
    parameters = beside(WITH_NUMBERS[name]())
    other = copy.deepcopy(parameters)
    for p, q in zip(parameters, other, strict=True):
        q.grad = p.grad.clone().to_dense() if p.grad.is_sparse else p.grad.clone()
    found = WAYS[way](parameters, optimizer := fused.SGD(parameters, lr=1.0))
    if way == "value":
        theirs.clip_grad_value_(other, 0.5)
    else:
        expected = theirs.clip_grad_norm_(other, 0.5, 1.0 if way == "sum" else 2.0)
        torch.testing.assert_close(found, expected)
    optimizer.step()
    torch.optim.SGD(other, lr=1.0).step()
    torch.testing.assert_close(parameters, other)


def test_zeros_without_memory_cannot_become_nan() -> None:
    parameters = beside(torch._efficientzerotensor(6))
    parameters[0].grad[1] = torch.nan
    with pytest.raises(
        RuntimeError, match=r"gradient 1 cannot be written: .* zeros without memory"
    ):
        fused.clip_grad_norm_(parameters, 0.5)
    assert parameters[0].grad.isnan().sum() == 1


def test_gradients_that_share_memory() -> None:
    """They are read as they are, and brought into a range; what would be scaled twice raises."""
    whole = torch.ones(9)
    for first, second in (
        (whole[:3], whole[:3]), (whole[:3], whole[2:]), (whole[3:6], whole.view(3, 3)[:, ::2]),
        (whole[:3], in_rows(MULTI, whole[1:3])),
    ):  # fmt: skip
        parameters = beside(second)
        parameters[0].grad = first
        with pytest.raises(RuntimeError, match=r"gradient . shares memory: .* that of gradient ."):
            fused.clip_grad_norm_(parameters, 0.5)
        assert torch.equal(whole, torch.ones(9))
        n = 3 + (2 if second.is_sparse else second.numel())
        found = fused.clip_grad_norm_(parameters, 0.5, optimizer=fused.SGD(parameters))
        assert found.item() == pytest.approx(math.sqrt(n))
    fused.clip_grad_value_(beside(whole[:6])[1:] + beside(whole[3:])[1:], 0.5)
    assert torch.equal(whole, torch.full((9,), 0.5))


def test_gradients_that_another_thread_exchanges_and_frees() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2_000)) for _ in range(20)]
    optimizer, draw, errors = fused.SGD(parameters, lr=0.0), random.Random(0), []

    def exchange(_: int) -> None:
        p = draw.choice(parameters)
        new = draw.choice([None, torch.ones(2_000), torch._efficientzerotensor(2_000),
                           cut(torch.ones(2_000)), torch.ones(1).expand(2_000)])  # fmt: skip
        old, p.grad = p.grad, new  # PyTorch itself reads a gradient that is freed by this
        del old

    with meanwhile(exchange):
        for k in range(400):
            try:
                [*WAYS.values()][k % 4](parameters, optimizer)
            except RuntimeError as error:
                errors.append(str(error))
    assert all(re.search("has no memory|cannot be written", text) for text in errors)


# Compiled functions


class Module:
    """What `ClippingModule` stands before."""

    trainer = types.SimpleNamespace(scaler=None)

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        theirs.clip_grad_norm_(optimizer.param_groups[0]["params"], given["gradient_clip_val"])


class Clipped(fused.ClippingModule, Module):
    pass


COMPILED: dict[str, Callable[[Any, Any], Any]] = {
    **WAYS, "generator": lambda p, _: fused.clip_grad_norm_((x for x in p), 0.5),
    "error_if_nonfinite": lambda p, _: fused.clip_grad_norm_(p, 0.5, 3.0, True, True),
    "several optimizers": lambda p, o: fused.clip_grad_norm_(p, 0.5, optimizer=[o]),
    "a trainer, norm": lambda _, o: Clipped().configure_gradient_clipping(o, 0.5, "norm"),
    "a trainer, value": lambda _, o: Clipped().configure_gradient_clipping(o, 0.5, "value"),
}  # fmt: skip


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_functions_clip(way: str, is_sparse: bool) -> None:
    torch._dynamo.reset()
    both = [gradients(dense=not is_sparse) for _ in range(2)]
    optimizers = [fused.SGD(p, lr=1.0) for p in both]

    def clip_and_step(parameters: list[Any], optimizer: Any) -> Any:
        found = COMPILED[way](parameters, optimizer)
        optimizer.step()
        return found

    compiled = torch.compile(clip_and_step, backend="eager")
    found = [f(*a) for f, *a in zip((clip_and_step, compiled), both, optimizers, strict=True)]
    assert found[0] is found[1] is None or torch.equal(*found)
    assert all(map(torch.equal, *both))


# Bad input: one error, and nothing is written


def given(data: Any, gradient: Any = None) -> Any:
    """A parameter with a gradient, which is what it has itself by default."""
    parameter = torch.nn.Parameter(data)
    parameter.grad = data if gradient is None else gradient
    return parameter


def in_inference_mode() -> Any:
    with torch.inference_mode():
        return torch.ones(2)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "index": (lambda: given(torch.zeros(6), in_rows(torch.tensor([[1, 6]]))), IndexError,
              "out of range"),
    "layout": (lambda: given(torch.eye(2).to_sparse_csr()), RuntimeError, "wrong layout"),
    "dtype": (lambda: given(torch.ones(2, dtype=torch.complex64)), RuntimeError, "wrong dtype"),
    "device": (lambda: given(torch.empty(2, device="meta")), RuntimeError, "wrong device"),
    "itself": (lambda: given(torch.zeros(2, 2), torch.ones(1, 2).expand(2, 2)), RuntimeError,
               "cannot be written"),
    "overlapping": (lambda: given(torch.zeros(3, 2), torch.ones(4).as_strided((3, 2), (1, 1))),
                    RuntimeError, "cannot be written"),
    "inference": (lambda: given(torch.zeros(2), in_inference_mode()), RuntimeError,
                  "cannot be written"),
    "no tensor": (lambda: "w", TypeError, "parameter 4 has a wrong type"),
}  # fmt: skip
NORM: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative": ({"max_norm": -1.0}, ValueError, "max_norm is out of range: .* at least 0"),
    "NaN": ({"max_norm": math.nan}, ValueError, "max_norm is out of range"),
    "text": ({"max_norm": "much"}, TypeError, "max_norm is no number"),
    "None": ({"max_norm": None}, TypeError, "max_norm is no number"),
    "two": ({"max_norm": torch.ones(2)}, TypeError, "max_norm is no number"),
    "order 0": ({"norm_type": 0}, ValueError, "norm_type is out of range: .* above 0"),
    "order -1": ({"norm_type": -1.0}, ValueError, "norm_type is out of range"),
    "order -inf": ({"norm_type": -math.inf}, ValueError, "norm_type is out of range"),
    "order NaN": ({"norm_type": math.nan}, ValueError, "norm_type is out of range"),
    "order": ({"norm_type": "fro"}, TypeError, "norm_type is no number"),
    "foreign": ({"optimizer": 0}, ValueError, "are not those of optimizer"),
    "wrapped": ({"optimizer": torch.optim.SGD}, TypeError, "an optimizer of fusestep"),
    "wrapped in a list": ({"optimizer": 0}, TypeError, "an optimizer of fusestep"),
}


def readable(parameters: list[Any]) -> list[Any]:
    """The gradients of which PyTorch can make copies."""
    tensors = [p.grad for p in parameters if isinstance(p, torch.Tensor) and p.grad is not None]
    tensors = [g._values() if g.layout == torch.sparse_coo else g for g in tensors]
    return [g for g in tensors if g.layout == torch.strided and g.device.type == "cpu"]


@pytest.mark.parametrize("name", NORM)
def test_arguments_of_the_norm_that_are_refused(name: str) -> None:
    given, kind, message = NORM[name]
    parameters = gradients()
    if name == "foreign":
        given = {"optimizer": fused.SGD(parameters[:2])}
    elif "wrapped" in name:
        wrapped = torch.optim.SGD(parameters)
        given = {"optimizer": [wrapped] if "list" in name else wrapped}
    arguments = {"max_norm": 0.125, **given}
    with refused(kind, f"^clip_grad_norm_: .*{message}", *readable(parameters)):
        fused.clip_grad_norm_(parameters, **arguments)
    if name == "foreign":  # nothing is kept for the step
        given["optimizer"].step()
        assert torch.equal(parameters[0].detach(), -0.001 * parameters[0].grad)


@pytest.mark.parametrize("limit", [-1.0, math.nan, None, "much"])
def test_values_that_are_refused(limit: Any) -> None:
    parameters = gradients()
    kind = ValueError if isinstance(limit, float) else TypeError
    with refused(kind, "^clip_grad_value_: clip_value is ", *readable(parameters)):
        fused.clip_grad_value_(parameters, limit)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("order", [2.0, 3.0, None])
def test_gradients_that_are_refused(order: float | None, name: str) -> None:
    make, kind, message = BAD[name]
    parameters = [*gradients(), make()]
    with refused(kind, message, *readable(parameters)):
        if order is None:
            fused.clip_grad_value_(parameters, 0.125)
        else:
            fused.clip_grad_norm_(parameters, 0.125, order)
