"""PyTorch's form on a device: the numbers of the host."""

from __future__ import annotations

from typing import Any

import pytest

from devices import GPU, MARKS, STUB, computed, only

pytestmark = [*MARKS, only(STUB, GPU, reason="PyTorch has no tensors there")]


@pytest.fixture
def torch(framework: Any) -> Any:
    if type(framework).__name__ != "TorchMaker":
        pytest.skip("PyTorch's tensors")
    found = pytest.importorskip("torch", reason="torch is not installed")
    if not found.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return found


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
