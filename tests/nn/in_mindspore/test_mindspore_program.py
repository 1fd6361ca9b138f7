"""Programs of MindSpore: `Model.train`, functions that give gradients, checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore.nn", reason="MindSpore is not installed")

import mindspore
from mindspore import dataset, nn
from mindspore.train import LearningRateScheduler, Model
from fusestep import nn as ours
from fusestep.bench.report.result import SpecialResult
from fusestep.bench.special import in_mindspore, training
from fusestep.nn import mindspore as fused
from mindspore_training import batches, dense_net, gradients_like, losses, parameter

OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 3.0}, "AdaFactor": {}, "AdaMax": {}, "Adadelta": {},
    "Adagrad": {"learning_rate": 0.1}, "Adam": {"learning_rate": 0.05}, "AdamOffload": {},
    "AdamWeightDecay": {"weight_decay": 0.1}, "FTRL": {"learning_rate": 0.1}, "LazyAdam": {},
    "Momentum": {"learning_rate": 0.1, "momentum": 0.9}, "ProximalAdagrad": {},
    "RMSProp": {"learning_rate": 0.01}, "Rprop": {"learning_rate": 0.01},
    "SGD": {"momentum": 0.9, "dampening": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_model_train(scale: float) -> None:
    def samples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for x, y in batches(dense_net())[:6]:
            yield from zip(x.asnumpy(), y.asnumpy(), strict=True)

    def run(module: Any) -> tuple[list[np.ndarray], float]:
        net = dense_net()
        data = dataset.GeneratorDataset(samples, ["x", "y"], shuffle=False).batch(8)
        optimizer = module.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=scale)
        callback = LearningRateScheduler(lambda _, step: 0.1 / step)
        manager = mindspore.amp.FixedLossScaleManager(scale, drop_overflow_update=False)
        model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=manager)
        model.train(2, data, callbacks=[callback], dataset_sink_mode=False)
        return [p.asnumpy() for p in net.trainable_params()], float(optimizer.get_lr().asnumpy())

    (expected, rate), (found, own_rate) = run(nn), run(fused)
    assert own_rate == rate == np.float32(0.1 / 12)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_value_and_grad() -> None:
    def run(module: Any) -> list[float]:
        net = dense_net()
        optimizer = module.Adam(net.trainable_params(), 0.05)
        forward = nn.WithLossCell(net, nn.MSELoss())
        gradients_of = mindspore.value_and_grad(forward, None, optimizer.parameters)
        found = []
        for x, y in batches(net)[:10]:
            loss, gradients = gradients_of(x, y)
            assert optimizer(gradients) == (True,) * len(optimizer.parameters)
            found.append(float(loss.asnumpy()))
        return found

    np.testing.assert_allclose(run(fused), run(nn), rtol=1e-5)


@pytest.mark.usefixtures("synchronous")
@pytest.mark.parametrize("name", OPTIONS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """From MindSpore to this package and back, by files: as MindSpore alone."""
    net, options = dense_net(), OPTIONS[name]
    expected = losses(net, getattr(nn, name)(net.trainable_params(), **options), 0, 15)
    found: list[float] = []
    for k, module in enumerate((nn, fused, nn)):
        net = dense_net()
        optimizer = getattr(module, name)(net.trainable_params(), **options)
        if k:
            kept = mindspore.load_checkpoint(str(tmp_path / f"{k}.ckpt"))
            assert mindspore.load_param_into_net(optimizer, kept) == ([], [])
        found += losses(net, optimizer, 5 * k, 5 * k + 5)
        mindspore.save_checkpoint(optimizer, str(tmp_path / f"{k + 1}.ckpt"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_checkpoints_of_other_options_are_refused(tmp_path: Path) -> None:
    net, other = dense_net(), dense_net()
    optimizer = fused.Adam(net.trainable_params())
    gradients = gradients_like(net.trainable_params())
    optimizer(gradients)
    theirs = nn.Adam(other.trainable_params(), beta1=0.5)
    losses(other, theirs, 0, 2)
    path = str(tmp_path / "other.ckpt")
    mindspore.save_checkpoint(theirs, path)
    mindspore.load_param_into_net(optimizer, mindspore.load_checkpoint(path))
    before = [p.asnumpy().copy() for p in optimizer.get_parameters()]
    for _ in range(2):
        with pytest.raises(ValueError, match="state 'beta1_power' is of other options"):
            optimizer(gradients)
    for p, values in zip(optimizer.get_parameters(), before, strict=True):
        np.testing.assert_array_equal(p.asnumpy(), values)


def test_a_state_that_was_assigned_to_is_looked_at() -> None:
    w = parameter(np.ones(3))
    optimizer, gradient = fused.Adam([w], 0.5), gradients_like([w])
    optimizer(gradient)
    kept = mindspore.ops.assign(optimizer.beta1_power, mindspore.Tensor(0.5, mindspore.float32))
    with pytest.raises(ValueError, match="state 'beta1_power' is of other options"):
        optimizer(gradient)
    assert kept.asnumpy() == 0.5 and optimizer.global_step.asnumpy() == 1
    optimizer.beta1_power.set_data(mindspore.Tensor(0.9, mindspore.float32))
    optimizer(gradient)
    for count, error in ((-1, ValueError), (2**31 - 1, (OverflowError, ValueError))):
        optimizer = fused.SGD([w], 0.5)
        optimizer(gradient)
        before = w.asnumpy().copy()
        mindspore.ops.assign(optimizer.global_step, mindspore.Tensor([count], mindspore.int32))
        with pytest.raises(error, match="global_step"):
            optimizer(gradient)
        assert (w.asnumpy() == before).all()


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_state_goes_on_outside_of_mindspore(is_converted: bool, tmp_path: Path) -> None:
    net = dense_net()
    optimizer = fused.Adam(net.trainable_params(), 0.05)
    losses(net, optimizer, 0, 3)
    path = str(tmp_path / "kept.safetensors")
    if is_converted:
        mindspore.save_checkpoint(optimizer, str(tmp_path / "kept.ckpt"))
        mindspore.ckpt_to_safetensors(str(tmp_path / "kept.ckpt"), str(tmp_path))
    else:
        mindspore.save_checkpoint(optimizer, path, format="safetensors")
    state = ours.load_checkpoint(path)
    parameters = [ours.Parameter(state[p.name], p.name) for p in optimizer.parameters]
    own = ours.Adam(parameters, 0.05)
    own.load_state_dict({name: state[name] for name in state if name in own.state_dict()})
    gradients = gradients_like(optimizer.parameters)
    optimizer(gradients)
    own([g.asnumpy() for g in gradients])
    for p, w in zip(parameters, optimizer.parameters, strict=True):
        np.testing.assert_array_equal(p.data, w.asnumpy())


def test_the_benchmark_of_iterations(monkeypatch: Any) -> None:
    monkeypatch.setattr(in_mindspore, "_PERCEPTRONS", {"2x8": (2, 8)})
    monkeypatch.setattr(in_mindspore, "_TABLES", {"0Kx4": (50, 4)})
    monkeypatch.setattr(in_mindspore, "_OPTIMIZERS", {"Adam": {}})
    monkeypatch.setattr(training, "_ROUNDS", 3)
    result = SpecialResult("in-mindspore", "")
    in_mindspore.run(result, 1, lambda _: None)
    assert {*result.times} == {
        f"{model} Adam {of}: {part}"
        for model in ("2x8", "0Kx4")
        for of in ("nn.mindspore", "mindspore")
        for part in ("step", "iteration")
    }
    assert all(time.median > 0 for time in result.times.values())
