"""THOR with parameters, gradients and captures on a device.

The arithmetic is the host's, so that everything is compared to the last bit.
"""

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from devices import (  # isort: skip
    GPU, KIND, MARKS, SIMULATOR, assert_equal_runs, assert_same, capture, data_of, on_device,
    on_host, only, put, refused)  # fmt: skip
from fusestep import nn
from fusestep.nn.thor.factors import FactorError
from fusestep.ops.runtime.device import DeviceArray
from helpers import STORAGE_DTYPES, assert_same_bits
from test_thor_errors import CAPTURES, GRADIENTS
from thor_nets import BASE, Net, Pass, make

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")
pytestmark = MARKS
F32, F64, F16, BF16 = STORAGE_DTYPES


class Both:
    """THOR on the host and on a device, with the same numbers."""

    def __init__(self, dtype: Any = F32, **options: Any) -> None:
        self.host, self.device = Net(dtype), Net(dtype, put=on_device)
        self.on_cpu = make(self.host, **{**BASE, **options})
        self.opt = make(self.device, **{**BASE, **options})
        self.dtype = dtype
        self.scale = float(options.get("loss_scale", 1.0))

    def step(self, t: int, without: Sequence[int] = ()) -> None:
        step = Pass(t, self.dtype, self.scale)
        for own in self.sides():
            assert step.step(*own, without) == (True,) * 8

    def sides(self) -> tuple[Any, Any]:
        """Net, optimizer and how arrays come there, of the host and of the device."""
        return (self.host, self.on_cpu, np.asarray), (self.device, self.opt, on_device)

    def assert_equal(self, but_for: str = "nothing") -> None:
        def same(ours: Any, theirs: Any, name: str) -> None:
            if not name.endswith(but_for):
                assert_same_bits(ours, theirs, name)

        assert_equal_runs(self.opt, self.on_cpu, same)
        for ours, theirs in zip(self.device.layers, self.host.layers, strict=True):
            assert ours.is_capturing == theirs.is_capturing


def watched(name: str) -> Any:
    """A context in which calls of a method of `DeviceArray` are counted."""
    method = getattr(DeviceArray, name)
    return mock.patch.object(DeviceArray, name, autospec=True, side_effect=method)


# Steps

RATES = [0.1, 0.05, 0.02, 0.01, 0.01, 0.01]
RUNS: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    (F32, F32, {"loss_scale": 64.0, "enable_clip_grad": True}),
    (F32, F32, {"use_nesterov": True, "frequency": 3, "learning_rate": RATES}),
    (F32, F32, {"block_size": 2, "decay_filter": lambda p: p.ndim > 1}),
    (F32, F32, {"compat": "mindspore", "enable_clip_grad": True, "loss_scale": 8.0}),
    *((dtype, dtype, {}) for dtype in (F64, F16, BF16)), (F32, F64, {}))  # fmt: skip


@pytest.mark.parametrize(("dtype", "of_gradient", "options"), RUNS, ids=str)
def test_steps(dtype: Any, of_gradient: Any, options: dict[str, Any]) -> None:
    """Every kind of layer and storage type, refreshes and steps between them, None; in place."""
    both = Both(dtype, **options)
    both.dtype = of_gradient
    assert [p.is_on_device for p in both.opt.parameters] == [True] * 8
    before = data_of(both.opt)
    for t, without in enumerate([(), (3, 7), (), (0, 4), ()]):
        both.step(t, without)
        both.assert_equal()
    assert all(a is b for a, b in zip(data_of(both.opt), before, strict=True))
    assert all(type(moment) is np.ndarray for moment in both.opt.moments)
    for _, opt, _ in both.sides():
        opt((None,) * 8)
    both.assert_equal()


def test_captures() -> None:
    """Captures add up; covariances from elsewhere; between refreshes nothing is copied."""
    both, step = Both(frequency=3), Pass(7)
    for net, _, there in both.sides():
        step.capture(net, there)
    both.step(0)
    both.assert_equal()
    with watched("numpy") as calls:
        step.capture(both.device, on_device)
        assert not calls.called
        assert not both.device.fc.has_captured
        with refused(ValueError, "ThorConv2d: inputs has a wrong shape"):
            both.device.conv.capture(*on_device([np.ones((2, 3, 5, 5), F32)] * 2))
    both.step(1)
    for net, opt, there in both.sides():
        opt.request_refresh()
        step.capture(net, there)
        net.fc.clear()
        net.fc.capture_covariances(there(2 * np.eye(4)), there(np.eye(5, dtype=F32)))
        net.emb.capture_covariances(there(np.arange(7, dtype=F32)), there(np.eye(4)))
        opt(tuple(there(g) for g in step.gradients))
    both.assert_equal()
    assert both.opt.state_dict()["refreshes.fc.weight"] == 2


# States


def test_states() -> None:
    """A state is taken over on either side; and goes on as before."""
    both = Both(frequency=3)
    for t in range(4):
        both.step(t)
    state = both.opt.state_dict()
    resumed = Both(frequency=3)
    for k, p in enumerate(both.opt.parameters):
        put(resumed.opt.parameters[k].data, p.asnumpy())
        resumed.on_cpu.parameters[k].data[...] = p.asnumpy()
    resumed.opt.load_state_dict(both.on_cpu.state_dict())
    resumed.on_cpu.load_state_dict(state)
    for t in range(4, 7):
        both.step(t)
        resumed.step(t)
    resumed.assert_equal()
    assert_equal_runs(both.opt, resumed.opt, assert_same_bits)
    with refused(ValueError, "'refreshes.fc.weight' is out of range", *data_of(both.opt)):
        both.opt.load_state_dict({**state, "refreshes.fc.weight": np.array([-1])})


def test_copies() -> None:
    """Pickles and deep copies live on the device, apart, and go on as the original does."""
    both = Both()
    both.step(0)
    pair = both.device, both.opt
    for net, opt in (copy.deepcopy(pair), pickled(pair)):
        assert all(p.is_on_device for p in opt.parameters)
        assert net.fc.weight is opt.parameters[3]
        assert net.fc.weight.array.address != both.device.fc.weight.array.address
        other = copy.deepcopy((both.host, both.on_cpu))
        for t in range(1, 4):
            Pass(t).step(net, opt, on_device)
            Pass(t).step(*other)
        assert_equal_runs(opt, other[1], assert_same_bits)
    both.step(1)
    both.assert_equal()


def test_rebinding() -> None:
    """A parameter can be bound to other memory on the device, and changed there."""
    both = Both()
    both.step(0)
    p, old = both.opt.parameters[3], both.opt.parameters[3].data
    p.data = on_device(np.ones(p.shape, F32))
    both.on_cpu.parameters[3].data[...] = 1.0
    before = on_host(old)
    both.step(1)
    both.assert_equal()
    assert_same_bits(on_host(old), before)
    with refused(ValueError, "lives elsewhere than", p.data):
        p.data = np.ones(p.shape, F32)


# Numbers on the device, skipped steps


def test_numbers() -> None:
    """Learning rate and loss scale may live on the device, and change there."""
    both = Both(loss_scale=8.0, enable_clip_grad=True)
    lr, scale = on_device([np.array(0.125, F32), np.array([8.0], F32)])
    options = {**BASE, "learning_rate": lr, "loss_scale": scale, "enable_clip_grad": True}
    both.device = Net(put=on_device)
    both.opt = make(both.device, **options)
    for rate in (0.125, 0.5):
        put(lr, np.array(rate, F32))
        for p in both.on_cpu.get_lr_parameter(list(both.on_cpu.parameters)):
            p.data[...] = rate
        both.step(0)
        both.step(1)
    assert both.opt.state_dict()["learning_rate"] == np.float32(0.5)  # the host's is of its groups
    both.assert_equal(but_for="learning_rate")


def test_overflows() -> None:
    """A step in which `found_inf` is not 0 changes nothing, and forgets what was captured."""
    both, flag = Both(), on_device(np.zeros(1, F32))
    both.opt.found_inf = flag
    both.step(0)
    both.step(1)
    put(flag, np.ones(1, F32))
    bad = Pass(2)
    bad.outputs[2][...] = np.inf
    bad.gradients[3][...] = np.nan
    before = both.opt.state_dict()
    bad.capture(both.device, on_device)
    with watched("assign") as assigned:
        assert both.opt(tuple(on_device(bad.gradients))) == (True,) * 8
    assert not assigned.called
    assert_same([*both.opt.state_dict().values()], [*before.values()])
    assert both.opt.skipped_steps == 1
    assert not both.device.fc.has_captured
    put(flag, np.zeros(1, F32))
    for t in (2, 3):
        both.step(t)
    both.assert_equal()
    with refused(ValueError, "found_inf lives elsewhere than the parameters"):
        both.on_cpu.found_inf = flag


def test_bad_factors() -> None:
    """A factor without an inverse raises and changes nothing, or is skipped."""
    bad = Pass(2)
    bad.outputs[2][...] = np.inf
    both = Both()
    bad.capture(both.device, on_device)
    with refused(FactorError, "factor G of layer 'fc'", *data_of(both.opt)):
        both.opt(tuple(on_device(bad.gradients)))
    assert both.opt.global_step == 0
    both.opt.clear_captured()
    both.step(0)
    both.assert_equal()
    both = Both(bad_factor="skip")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for own in both.sides():
            bad.step(*own)
    assert len(found) == 2
    both.step(1)
    both.assert_equal()


# Errors


@pytest.mark.parametrize(("layer", "x", "d", "error", "text"), CAPTURES)
def test_bad_captures(layer: int, x: Any, d: Any, error: type[Exception], text: str) -> None:
    """Captures that the host refuses are refused before anything of them is taken note of."""
    net = Net(put=on_device)
    record = net.layers[layer]
    if not isinstance(x, str):
        with pytest.raises(error, match=text):
            record.capture(*on_device([x, d]))
    assert not record.has_captured


def test_captures_that_live_elsewhere() -> None:
    net, host = Net(put=on_device), Net()
    x, d = np.ones((3, 4), F32), np.ones((3, 5), F32)
    for call, text in (
        (lambda: net.fc.capture(on_device(x), d), "output_gradients lives elsewhere than the we"),
        (lambda: net.fc.capture(x, on_device(d)), "inputs lives elsewhere than the weight"),
        (lambda: net.fc.capture(x, d), "inputs lives elsewhere than the weight"),
        (lambda: net.fc.capture(x, d), "expected CUDA device 0, got the host"),
        (lambda: net.fc.capture_covariances(on_device(np.eye(4)), np.eye(5)),
         "g lives elsewhere than the weight"),
        (lambda: host.fc.capture(on_device(x), d), "inputs lives elsewhere than the weight"),
    ):  # fmt: skip
        with refused(ValueError, text):
            call()
    assert not net.fc.has_captured


ELSEWHERE = [
    (3, np.ones((5, 4), F32), ValueError, "gradient of 'fc.weight' lives elsewhere than"),
    (7, np.ones(3, F32), ValueError, "gradient of 'scale' lives elsewhere than"),
]


@pytest.mark.parametrize(("place", "bad", "error", "text"), [*GRADIENTS, *ELSEWHERE])
def test_bad_gradients(place: int, bad: Any, error: type[Exception], text: str) -> None:
    """A step that is refused leaves everything, what was captured included."""
    both, step = Both(), Pass(0)
    step.capture(both.device, on_device)
    gradients = on_device(step.gradients)
    gradients[place] = bad if "elsewhere" in text else on_device(bad)
    with watched("numpy") as calls, pytest.raises(error, match=text):
        both.opt(tuple(gradients))
    assert not calls.called  # all gradients are checked before the first one is copied
    assert both.opt.global_step == 0
    both.opt(tuple(on_device(step.gradients)))
    step.step(both.host, both.on_cpu)
    both.assert_equal()
    with refused(ValueError, "lives elsewhere than", both.device.fc.weight.data):
        both.on_cpu(tuple(on_device(step.gradients)))


@only(SIMULATOR, reason="frameworks copy them, but for Numba")
def test_strided_arrays() -> None:
    both, step = Both(), Pass(0)
    step.capture(both.device, on_device)
    gradients, wide = on_device(step.gradients), on_device(np.ones((5, 8), F32))[:, ::2]
    gradients[3] = wide
    with refused(ValueError, "gradient of 'fc.weight' is not contiguous"):
        both.opt(tuple(gradients))
    both.device.fc.clear()
    with refused(ValueError, "ThorDense: inputs is not contiguous"):
        both.device.fc.capture(wide, on_device(np.ones((5, 5), F32)))
    assert not both.device.fc.has_captured and both.opt.global_step == 0


def test_nets() -> None:
    """All parameters live in one place; a net may hold other arrays, with all that they hold."""
    net = Net(put=on_device)
    net.activations = on_device(np.ones(3, F32))
    net.activations.layer = nn.ThorDense(np.ones((2, 3), F32))
    assert len(make(net).parameters) == 8
    net.scale = nn.Parameter(np.ones(3, F32))
    with refused(ValueError, "lives elsewhere than"):
        make(net)


@pytest.mark.parametrize("name", ["learning_rate", "damping"])
def test_used_up(name: str) -> None:
    """A list of rates or dampings that is used up raises before the step; so do LARS and targets.
    States stay on the host, and LARS around THOR computes gradients of its own."""
    both = Both(**{name: [0.1, 0.1]})
    assert both.opt.target == both.on_cpu.target == "CPU"
    both.opt.target = "CPU"
    for target in ("GPU", "Ascend"):
        wrong = "thor: target is impossible: expected 'CPU': this optimizer works"
        with refused(ValueError, wrong):
            both.opt.target = target
    with refused(RuntimeError, "lives on a CUDA device", *data_of(both.opt)):
        nn.LARS(both.opt)(tuple(on_device(Pass(0).gradients)))
    assert both.opt.global_step == 0
    assert both.opt.loss_scale == 1.0
    both.step(0)
    both.step(1)
    with refused(RuntimeError, f"thor: {name} has no value for step 2", *data_of(both.opt)):
        Pass(2).step(both.device, both.opt, on_device)
    both.assert_equal()


def test_graphs() -> None:
    """Nothing of it can be part of a CUDA graph, and nothing has changed."""
    both, step = Both(), Pass(1)
    x, d = on_device(step.inputs[2]), on_device(step.outputs[2])
    Pass(0).capture(both.device, on_device)
    gradients = tuple(on_device(step.gradients))
    for call in (lambda: both.opt(gradients), lambda: both.device.fc.capture(x, d)):
        with refused(RuntimeError, "a CUDA graph is being captured", *data_of(both.opt)), capture():
            call()
    assert both.opt.global_step == 0
    both.device.fc.clear()
    both.opt.clear_captured()
    both.step(0)
    both.assert_equal()


# PyTorch's modules: tensors of the CPU are given out as tensors of a CUDA device, which is the host


@pytest.fixture
def nets() -> Any:
    """Modules of PyTorch and their steps, of the tests of THOR on the host."""
    pytest.importorskip("torch", reason="torch is not installed")
    return importlib.import_module("test_thor_torch")


@pytest.fixture
def given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is one of a device."""
    if KIND != SIMULATOR:
        pytest.skip("tensors of the CPU are given out as those of the simulator")
    pytest.importorskip("torch", reason="torch is not installed")
    from simulator import give_out_tensors

    give_out_tensors(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@only(SIMULATOR, reason="the expected parameters are those of the host")
def test_modules(nets: Any, dtype: str, request: pytest.FixtureRequest) -> None:
    """The steps are those of the host; storage may be replaced, optimizers be copied. Gradients
    need not be contiguous."""
    kind = getattr(nets.torch, dtype)

    def go_on(module: Any, opt: Any, numbers: range, moved: Any = lambda grad: grad) -> Any:
        for t in numbers:
            opt.zero_grad()
            nets.loss_of(module, t, kind).backward()
            module.fc.weight.grad = moved(module.fc.weight.grad)
            opt.step()
        return list(module.parameters())

    host, module = nets.make_module(dtype=kind), nets.make_module(dtype=kind)
    expected = go_on(host, nets.make(host), range(5))
    request.getfixturevalue("given_out")  # the expected ones are of the host
    opt = nets.make(module)
    assert opt.target == "CPU"
    assert all(p.is_on_device and type(p.data) is nets.torch.Tensor for p in opt.parameters)
    go_on(module, opt, range(2))
    for p in module.parameters():
        p.data = p.data.clone()
    for own in ((module, opt), copy.deepcopy((module, opt))):
        found = go_on(*own, range(2, 5), lambda grad: grad.t().contiguous().t())
        for p, q in zip(found, expected, strict=True):
            assert p.dtype == q.dtype == kind
            assert p.equal(q)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


MODULES: tuple[Callable[[Any, pytest.MonkeyPatch], None], ...] = (
    lambda nets, patch: nets.test_copies_go_on_alike(pickled, patch),
    lambda nets, _: nets.test_bfloat16(),
    lambda nets, _: nets.test_accumulated_gradients_count_as_one_batch(),
    lambda nets, _: nets.test_sparse_gradients_are_refused(),
)


@pytest.mark.parametrize("test", MODULES)
@pytest.mark.usefixtures("given_out")
def test_as_on_the_host(nets: Any, test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of modules on the host hold for those on a device, too."""
    test(nets, monkeypatch)


@pytest.mark.usefixtures("given_out")
def test_moved_modules(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nets.make_module()
    opt = nets.make(module)
    nets.train(module, opt, range(1))
    monkeypatch.undo()
    for p in module.parameters():
        p.data = p.data.clone()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match="its data lives elsewhere than"):
        opt.step()
    assert all(map(nets.torch.equal, module.parameters(), before))


@only(GPU, reason="hooks capture in the threads of autograd")
def test_a_module_on_a_device(nets: Any) -> None:
    """PyTorch's own kernels round otherwise there."""
    torch = nets.torch
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
