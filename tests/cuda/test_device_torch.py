"""PyTorch's form on a device: the numbers of the host."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fusestep import nn, synchronize

from devices import GPU, MARKS, STUB, capture, computed, only, refused

pytestmark = [*MARKS, only(STUB, GPU, reason="PyTorch has no tensors there")]


FRAMEWORKS = ("torch",)
"""Frameworks of these tests."""


@pytest.fixture
def torch(framework: Any) -> Any:
    del framework
    return pytest.importorskip("torch")


def models(torch: Any, dtype: Any) -> list[list[Any]]:
    """Equal parameters on the host and on the device: dense ones and a table."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 4), (7,), (9, 3))]
    return [
        [torch.nn.Parameter(tensor.to(device, copy=True)) for tensor in made]
        for device in ("cpu", "cuda")
    ]


NAMES = ("SGD", "Adagrad", "RMSprop", "AdamW", "NAdam", "ASGD", "FTRL", "LazyAdam")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_host(torch: Any, name: str, dtype: str) -> None:
    from fusestep.nn import torch as fused

    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(2)
    both = models(torch, kind)
    optimizers = [getattr(fused, name)(m, lr=0.1, weight_decay=0.1, sparse="touched") for m in both]
    for _ in range(5):
        for p, q in zip(*both, strict=True):
            if p.shape == (9, 3):
                indices = torch.randint(0, 9, (1, 6), generator=generator)
                values = torch.randn(6, 3, generator=generator).to(kind)
                p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
            else:
                p.grad = torch.randn(p.shape, generator=generator).to(kind)
            q.grad = p.grad.cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            optimizers[1].step()
            torch.cuda.synchronize()
        optimizers[0].step()
    computed()
    bound = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype]
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=bound, atol=bound)


def test_options_that_a_device_refuses(torch: Any) -> None:
    from fusestep.nn import torch as fused

    parameter = torch.nn.Parameter(torch.ones(3, 2, device="cuda"))
    with pytest.raises(RuntimeError, match="capturable"):
        fused.Adam([parameter], capturable=True)
    parameter.grad = torch.ones(3, 2, device="cuda")
    for name in ("LARS", "Adafactor"):
        with pytest.raises(RuntimeError, match="on CUDA devices"):
            getattr(fused, name)([parameter]).step()


def test_captures_are_refused(torch: Any) -> None:
    """By one error, before PyTorch has copied, read or scaled anything."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fusestep.nn import torch as fused

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
            made.append(str(function))
            return function(*args, **(kwargs or {}))

    made: list[str] = []
    dense, table = (torch.nn.Parameter(torch.ones(6, 4, device="cuda")) for _ in range(2))
    own = fused.Adam([dense, table], sparse="touched")
    unscaled, strict = fused.SGD([dense], fused=True), fused.SGD([dense], skip_nonfinite=True)
    unscaled.grad_scale, unscaled.found_inf = (
        torch.full((1,), x, device="cuda") for x in (2.0, 0.0)
    )
    calls = [
        own.step, own.step, unscaled.step, strict.step,
        lambda: fused.clip_grad_norm_([dense, table], 1.0),
        lambda: fused.clip_grad_norm_([dense, table], 1.0, math.inf, optimizer=own),
        lambda: fused.clip_grad_value_([dense, table], 1.0),
    ]  # fmt: skip
    for k, call in enumerate(calls):
        # Neither lies as kernels need it: they are copied.
        dense.grad = torch.ones(4, 6, device="cuda").T
        indices = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
        values = torch.ones(4, 3, device="cuda").T
        table.grad = torch.sparse_coo_tensor(indices, values, (6, 4), check_invariants=False)
        before = len(own.state)
        made.clear()
        text = "a CUDA graph is being captured"
        with refused(RuntimeError, text), capture() as enqueued, Operations():
            call()
        assert (made, enqueued, len(own.state)) == ([], [], before), k
        call()


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "AdamOffload"])
def test_memory_of_parameters_is_exchanged(torch: Any, name: str) -> None:
    """A step writes where the parameter lies now, and refuses what it has become otherwise."""
    parameter = torch.ones(5, 4, device="cuda")
    own = nn.Parameter(parameter)
    optimizer = getattr(nn, name)([own], 0.1)
    for step in range(3):
        g = torch.ones(5, 4, device="cuda")
        if step and name != "AdamOffload":
            g = nn.RowTensor(torch.arange(5, device="cuda"), g, (5, 4))
        optimizer((g,))
        synchronize()
        assert own.array.address == parameter.data_ptr()
        parameter.data = torch.full((5, 4), float(step), device="cuda")
    parameter.data = torch.ones(4, 5, device="cuda")
    with refused(ValueError, "data has a wrong shape: expected (5, 4), got (4, 5)"):
        optimizer((torch.ones(5, 4, device="cuda"),))
    assert optimizer.global_step == 3
