"""THOR on PyTorch modules that live on a device.

Tensors of the CPU are given out as tensors of a CUDA device, which is the host here.
"""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest

from fusestep import nn

from devices import GPU, KIND, MARKS, SIMULATOR, only

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")
modules: Any = importlib.import_module("test_thor_torch")
loss_of, make, make_module, train = (
    modules.loss_of, modules.make, modules.make_module, modules.train,
)  # fmt: skip
pytestmark = MARKS


@pytest.fixture
def given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is one of a device."""
    if KIND != SIMULATOR:
        pytest.skip("tensors of the CPU are given out as those of the simulator")
    from simulator import give_out_tensors

    give_out_tensors(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> dict[Any, list[Any]]:
    """The parameters of modules on the host after some steps."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        module = make_module(dtype=dtype)
        steps(module, make(module), dtype, range(5))
        found[dtype] = list(module.parameters())
    return found


def steps(module: Any, opt: Any, dtype: Any, numbers: range) -> None:
    for t in numbers:
        opt.zero_grad()
        loss_of(module, t, dtype).backward()
        opt.step()


def same_bits(module: Any, expected: list[Any]) -> None:
    for p, q in zip(module.parameters(), expected, strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p, q)


@only(SIMULATOR, reason="the expected parameters are those of the host")
def test_runs(expected: dict[Any, list[Any]], request: pytest.FixtureRequest) -> None:
    """The steps are those of the host; storage may be replaced, optimizers be copied."""
    request.getfixturevalue("given_out")  # the expected ones are of the host
    for dtype, parameters in expected.items():
        module = make_module(dtype=dtype)
        opt = make(module)
        assert opt.target == "CPU"
        assert all(p.is_on_device and type(p.data) is torch.Tensor for p in opt.parameters)
        steps(module, opt, dtype, range(2))
        for p in module.parameters():
            p.data = p.data.clone()
        other_module, other = copy.deepcopy((module, opt))
        steps(module, opt, dtype, range(2, 5))
        same_bits(module, parameters)
        steps(other_module, other, dtype, range(2, 5))
        same_bits(other_module, parameters)


@pytest.mark.usefixtures("given_out")
def test_pickles() -> None:
    """An optimizer that is pickled with its module goes on with it."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    opt, x = make(module), torch.randn(6, 4)
    pairs = [(module, opt), pickle.loads(pickle.dumps((module, opt)))]
    for one, its in pairs:
        for _ in range(4):
            its.zero_grad()
            one(x).square().sum().backward()
            its.step()
        assert all(p.is_on_device for p in its.parameters)
    same_bits(pairs[1][0], list(module.parameters()))


@pytest.mark.usefixtures("given_out")
def test_bfloat16_and_strides() -> None:
    """bfloat16, and gradients that are not contiguous."""
    module = torch.nn.Linear(8, 4).to(torch.bfloat16)
    opt, x = make(module), torch.randn(4, 8, dtype=torch.bfloat16)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = (module(x).t().float() - 1).square().mean()
        loss.backward()
        module.weight.grad = module.weight.grad.t().contiguous().t()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.usefixtures("given_out")
def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row-sparse gradients, devices of other kinds, and modules that were moved."""
    module = torch.nn.Embedding(5, 4, sparse=True)
    opt = make(module)
    module(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="gradient of 'weight' is row-sparse: expected a dense"):
        opt.step()
    module = make_module()
    opt = make(module)
    train(module, opt, range(1))
    monkeypatch.undo()
    for p in module.parameters():
        p.data = p.data.clone()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match="its data lives elsewhere than"):
        opt.step()
    same_bits(module, before)


@only(GPU, reason="hooks capture in the threads of autograd")
def test_a_module_on_a_device() -> None:
    """PyTorch's own kernels round otherwise there."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    there, x = copy.deepcopy(module).cuda(), torch.randn(16, 8)
    for one, inputs in ((module, x), (there, x.cuda())):
        opt = nn.thor(one, 0.05, 0.1, 0.9, batch_size=16, frequency=2)
        for _ in range(5):
            opt.zero_grad()
            one(inputs).square().mean().backward()
            opt.step()
    for p, q in zip(there.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-3, atol=1e-4)
