"""THOR for parameters on a CUDA device: its arithmetic is the host's.

``pytest -m gpu tests/gpu`` runs the tests for devices alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fusestep import nn

import gpu_arrays
from gpu_arrays import Maker
from helpers import STORAGE_DTYPES, assert_same_bits
from thor_nets import BASE, Net, Pass, make

if lacking := gpu_arrays.missing():
    pytest.skip(lacking, allow_module_level=True)
pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

pytestmark = [
    pytest.mark.gpu,
    # Frameworks and drivers have warnings of their own; test_a_step_warns_of_nothing has ours.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_steps_have_the_bits_of_the_host(maker: Maker, dtype: Any) -> None:
    ours, theirs = Net(dtype), Net(dtype, put=maker.put)
    host, opt = (make(net, **BASE, enable_clip_grad=True) for net in (ours, theirs))
    for t in range(5):
        without = (3, 7) if t == 3 else ()
        Pass(t, dtype).step(ours, host, without=without)
        Pass(t, dtype).step(theirs, opt, maker.put, without)
    state = opt.state_dict()
    for name, value in host.state_dict().items():
        assert_same_bits(state[name], value, name)
    for p, q in zip(opt.parameters, host.parameters, strict=True):
        assert_same_bits(maker.get(p.data), q.data, str(p.name))


def test_a_module_on_a_device() -> None:
    """Hooks capture in the threads of autograd; torch's own kernels round otherwise."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    on_device, x = copy.deepcopy(module).cuda(), torch.randn(16, 8)
    for one, inputs in ((module, x), (on_device, x.cuda())):
        opt = nn.thor(one, 0.05, 0.1, 0.9, batch_size=16, frequency=2)
        for _ in range(5):
            opt.zero_grad()
            one(inputs).square().mean().backward()
            opt.step()
    for p, q in zip(on_device.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-3, atol=1e-4)
