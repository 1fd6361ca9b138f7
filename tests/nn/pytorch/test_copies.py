"""Copies of 16 bits that a step writes beside float32 parameters."""

import copy
import threading
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused
from helpers import at_once, more
from test_options import SIXTEEN_BITS, mixed

from torch_training import (  # isort: skip
    EVERY, FOLDERS, TABLES, any_gradient, assert_same_bits, everything, refused)  # fmt: skip

# A rule on matrices, and a class that takes no dense gradients.
COPIED = [name for name in EVERY if name not in ("Adafactor", "SparseAdam")]
SAMPLE = "AdamW", "RowWiseAdagrad"
EACH = pytest.mark.parametrize("name", [n if n in SAMPLE else more(n) for n in COPIED])


def pair(name: str, dtype: Any = torch.bfloat16) -> tuple[list[Any], list[Any]]:
    """Parameters with copies, the second without; a copy has the order of its parameter."""
    parameters = mixed()[: None if name in TABLES else 2]
    copies = [torch.empty_like(p, dtype=dtype).copy_(p) for p in parameters]
    return parameters, [copies[0], None, *copies[2:]] if len(copies) > 1 else copies


def made(name: str, parameters: Any, copies: Any = None, **options: Any) -> Any:
    group = {"params": parameters} | ({} if copies is None else {"copies": copies})
    sparse = {"sparse": "touched"} if name in TABLES else {}
    return getattr(fused, name)([group], lr=0.1, **sparse, **options)


@EACH
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=["f16", "bf16"])
@pytest.mark.parametrize("narrow", [more(False), pytest.param(True, marks=any_gradient)])
def test_a_step_writes_them(name: str, dtype: Any, narrow: bool) -> None:
    """The bits of a step without copies, and its result rounded to the nearest."""
    parameters, copies = pair(name, dtype)
    exact = mixed()[: len(parameters)]
    ours, theirs = made(name, parameters, copies), made(name, exact)
    for p in (parameters[0], exact[0]) if narrow else ():  # any dtype, in one optimizer
        p.grad, given, p.grad_dtype = None, p.grad, None
        p.grad = given.to(dtype)
    for _ in range(3):
        ours.step()
        theirs.step()
        assert_same_bits(everything(theirs), without_copies(ours))
        for k in (0, 2)[: len(parameters) - 1]:
            whole = parameters[k].detach()
            moved = torch.ones(len(whole), dtype=torch.bool)
            if parameters[k].grad.is_sparse:
                moved[:] = False
                moved[parameters[k].grad.coalesce().indices()[0]] = True
            assert torch.equal(copies[k][moved], whole[moved].to(dtype))
            assert torch.equal(copies[k][~moved], pair(name, dtype)[1][k][~moved])


def without_copies(optimizer: Any) -> list[Any]:
    other = copy.copy(optimizer)
    other.state = {
        p: {n: x for n, x in state.items() if n != "copy"} for p, state in optimizer.state.items()
    }
    return everything(other)


def test_copies_that_lie_otherwise() -> None:
    """In other orders of memory, a leaf that requires a gradient, and strided ones."""
    parameters = mixed()[:2]
    wide = torch.zeros(5, 8, dtype=torch.bfloat16)
    copies = [wide[:, ::2], torch.nn.Parameter(torch.zeros(2, 3, 4, 4, dtype=torch.float16))]
    optimizer = made("Lion", parameters, copies)
    for _ in range(2):
        version = copies[1]._version
        optimizer.step()
        assert_same_bits(copies, [parameters[0].bfloat16(), parameters[1].half()])
        assert copies[1]._version > version
    assert not wide[:, 1::2].any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
@pytest.mark.parametrize("way", ["dict", "cleared", "deepcopy", *FOLDERS])
def test_they_stay_those_of_the_caller(way: str) -> None:
    """A state dict has none; whatever is loaded, steps go on writing to the same tensors."""
    from torch_training import net, through_folder, train

    def with_copies(seed: int) -> Any:
        model = net(seed, torch.float32)
        copies = [p.detach().bfloat16() for p in model.parameters()]
        group = {"params": [*model.parameters()], "copies": copies}
        return model, copies, fused.Adagrad([group], lr=0.1)

    model, copies, optimizer = with_copies(0)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    assert "copies" not in saved["param_groups"][0]
    assert not any("copy" in state for state in saved["state"].values())
    if way in FOLDERS:
        fresh, copies, other = with_copies(1)
        model, optimizer = through_folder(model, optimizer, fresh, other, **FOLDERS[way])
    elif way == "dict":
        optimizer.load_state_dict(copy.deepcopy(saved))
    elif way == "cleared":
        optimizer.state.clear()
    else:
        optimizer, model, copies = copy.deepcopy((optimizer, model, copies))
    train(model, optimizer, range(2, 4))
    assert_same_bits(copies, [p.bfloat16() for p in model.parameters()])


def test_steps_of_single_parameters_by_threads() -> None:
    parameters, copies = pair("AdamW")
    optimizer = made("AdamW", parameters[:1], copies[:1])
    other = made("AdamW", parameters[2:], copies[2:])

    def work(one: Any, parameter: Any) -> None:
        for _ in range(50):
            one.step(param=parameter)

    at_once([partial(work, optimizer, parameters[0]), partial(work, other, parameters[2])])
    assert torch.equal(copies[0], parameters[0].bfloat16())


@pytest.mark.parametrize("rounding", ["nearest", "master", "stochastic"])
def test_other_threads_run_while_a_step_does(rounding: str) -> None:
    """A step holds Python's lock before and after its loops, not in them."""
    threads, n = torch.get_num_threads(), 1 << 22
    w = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    w.grad = torch.ones_like(w)
    optimizer = fused.AdamW([w], rounding=rounding, state_dtype=torch.float32)
    optimizer.step()
    counted, ends = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not ends.is_set():
            counted += 1

    other = threading.Thread(target=count)
    torch.set_num_threads(1)
    other.start()
    try:
        before, most = counted, 0
        for _ in range(20):
            optimizer.step(param=w)
            before, most = counted, max(most, counted - before)
    finally:
        ends.set()
        other.join()
        torch.set_num_threads(threads)
    # A step takes milliseconds, and Python's lock changes hands every five at most.
    assert most > 1000


@pytest.mark.parametrize(("copies", "error", "text"), [
    ([None], ValueError, "copies do not fit the parameters: expected a list of 2"),
    ("ab", ValueError, "copies do not fit the parameters"),
    ([None, 3], TypeError, r"copies\[1\] has a wrong type: expected a tensor or None"),
    ([torch.zeros(5, 4), None], ValueError, r"copies\[0\] does not fit its parameter"),
    ([torch.zeros(4, 5).half(), None], ValueError, r"copies\[0\] does not fit its parameter"),
    ([torch.zeros(5, 4, device="meta").half(), None], ValueError, r"copies\[0\] does not fit"),
])  # fmt: skip
def test_copies_that_do_not_fit(copies: Any, error: Any, text: str) -> None:
    parameters = mixed()[:2]
    group = {"params": parameters, "copies": copies}
    with pytest.raises(error, match=f"SGD: {text}"):
        fused.SGD([group], lr=0.1)
    assert group == {"params": parameters, "copies": copies}
    optimizer = fused.SGD(mixed()[2:], lr=0.1)
    with pytest.raises(error, match=text):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_copies_of_weights_that_cannot_have_them() -> None:
    parameters, copies = pair("Adafactor")
    with pytest.raises(ValueError, match="Adafactor: copies do not fit a rule on matrices"):
        made("Adafactor", parameters, copies)
    with pytest.raises(ValueError, match="rounding='master' does not fit"):
        made("SGD", parameters[:1], copies[:1], rounding="master")
    narrow = [p.detach().bfloat16() for p in parameters]
    with pytest.raises(ValueError, match=r"copies\[0\] does not fit its parameter"):
        made("SGD", narrow, copies)


@pytest.mark.parametrize("of", ["another copy", "a parameter", "a gradient", "itself"])
def test_copies_that_share_memory(of: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    for p in parameters:
        p.grad = torch.ones(64)
    copies: list[Any] = [torch.zeros(64).bfloat16(), None]
    if of == "another copy":
        copies[1] = copies[0]
    elif of == "a parameter":
        copies[0] = parameters[1].detach().view(torch.bfloat16)[:64]
    elif of == "a gradient":
        copies[0] = parameters[1].grad.view(torch.bfloat16)[:64]
    else:
        copies[0] = torch.zeros(1).bfloat16().expand(64)
    optimizer = fused.SGD([{"params": parameters, "copies": copies}], lr=0.1)
    with refused(RuntimeError, r"shares memory|single memory location", optimizer):
        optimizer.step()
