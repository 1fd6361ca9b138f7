"""THOR: its factors and steps against dense linear algebra in float64."""

import math
from typing import Any

import numpy as np
import pytest
import thor_nets
from fusestep import nn
from fusestep.nn.thor import conv as thor_conv
from helpers import FAR, distance

from thor_nets import (  # isort: skip
    BASE, DAMPING, Net, Pass, block_diagonal, data, kronecker_solve, make, random, train,
)  # fmt: skip

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")

TOLERANCE = {np.float64: 1e-10, np.float32: 2e-4}


def assert_near(found: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    assert found.dtype == dtype
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE[dtype], error


def root(value: float) -> float:
    return math.sqrt(value)


# ------------------------------------------------------------- The preconditioned gradient itself


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("block_size", [128, None, 4, 1])
@pytest.mark.parametrize("shape", [(5, 7), (8, 4), (1, 9), (6, 1)])
def test_dense_is_a_kronecker_solve(shape: Any, block_size: int | None, dtype: Any) -> None:
    rng = random(1)
    x, d = rng.standard_normal((2, 20, 20))
    x, d, g = x[:, : shape[1]], d[:, : shape[0]] / 20, rng.standard_normal(shape)
    layer = nn.ThorDense(rng.standard_normal(shape).astype(dtype))
    opt = make(layer, batch_size=20, block_size=block_size)
    before = layer.weight.data.copy()
    layer.capture(x.astype(dtype), d.astype(dtype))
    opt((g.astype(dtype),))
    size = block_size or 100
    a = block_diagonal(x.T @ x / 20, size) + root(DAMPING) * np.eye(shape[1])
    per_sample = d * 20
    b = block_diagonal(per_sample.T @ per_sample / 20, size) + root(DAMPING) * np.eye(shape[0])
    assert_near(before - layer.weight.data, kronecker_solve(a, b, g), dtype)


CONVOLUTIONS = [
    {}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (0, 2)}, {"padding": "same"},
    {"padding": "same", "stride": (2, 3)}, {"padding": "valid", "dilation": 2},
    {"padding": "same", "dilation": (1, 2)},
]  # fmt: skip


def margins(options: dict[str, Any], size: Any, kernel: Any) -> tuple[Any, Any, Any, Any]:
    """Stride, zeros before, zeros behind, dilation; the outputs of "same" from its definition."""
    pair = {k: v if isinstance(v, tuple) else (v, v) for k, v in options.items()}
    stride, dilation = pair.get("stride", (1, 1)), pair.get("dilation", (1, 1))
    padding = options.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding != "same":
        both = padding if isinstance(padding, tuple) else (padding, padding)
        return stride, both, both, dilation
    missing = [
        max((math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)
    ]
    before = tuple(m // 2 for m in missing)
    return stride, before, tuple(m - b for m, b in zip(missing, before, strict=True)), dilation


@pytest.mark.parametrize("block_size", [128, 4])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_conv_is_a_kronecker_solve(options: dict[str, Any], block_size: int, monkeypatch) -> None:
    monkeypatch.setattr(thor_conv, "_CHUNK_BYTES", 4000)  # several chunks of samples
    rng = random(2)
    kernel, size, n = (3, 2), (7, 6), 5
    layer = nn.ThorConv2d(rng.standard_normal((4, 2, *kernel)), **options)
    opt = make(layer, batch_size=n, block_size=block_size)
    before = layer.weight.data.copy()
    x = rng.standard_normal((n, 2, *size))
    seen = thor_nets.patches(x, kernel, *margins(options, size, kernel))
    _, oh, ow, width = seen.shape
    d, g = rng.standard_normal((n, 4, oh, ow)) / n, rng.standard_normal(layer.weight.shape)
    layer.capture(x, d)
    opt((g,))
    t = oh * ow
    p, s = seen.reshape(-1, width), (d * n).transpose(0, 2, 3, 1).reshape(-1, 4)
    # Sums over positions, one root of their number with either factor.
    a = root(t) * block_diagonal(p.T @ p / (n * t), block_size) + root(DAMPING) * np.eye(width)
    b = root(t) * block_diagonal(s.T @ s / (n * t), block_size) + root(DAMPING) * np.eye(4)
    assert_near(before - layer.weight.data, kronecker_solve(a, b, g), np.float64)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_is_a_kronecker_solve(padding_idx: int | None) -> None:
    rng = random(3)
    layer = nn.ThorEmbedding(rng.standard_normal((7, 5)), padding_idx)
    opt = make(layer, batch_size=8)
    before = layer.weight.data.copy()
    ids, d = rng.integers(0, 5, (8, 3)), rng.standard_normal((8, 3, 5)) / 8
    g = rng.standard_normal((7, 5))
    layer.capture(ids, d)
    opt((g,))
    kept = ids.reshape(-1) != padding_idx
    one_hot = np.eye(7)[ids.reshape(-1)[kept]]
    s = 8 * d.reshape(-1, 5)[kept]
    a = one_hot.T @ one_hot / kept.sum() + root(DAMPING) * np.eye(7)
    b = s.T @ s / kept.sum() + root(DAMPING) * np.eye(5)
    expected = np.linalg.solve(np.kron(a, b), g.reshape(-1)).reshape(7, 5)
    assert_near(before - layer.weight.data, expected, np.float64)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_layer_norm_is_a_diagonal_solve(shape: tuple[int, ...]) -> None:
    rng = random(4)
    layer = nn.ThorLayerNorm(rng.standard_normal(shape), rng.standard_normal(shape), eps=0.01)
    opt = make(layer, batch_size=9)
    before = data(opt)
    x, d = rng.standard_normal((2, 9, 4, *shape)) * 3
    g = rng.standard_normal((2, *shape))
    layer.capture(x, d / 9)
    opt(tuple(g))
    axes = tuple(range(2, x.ndim))
    normal = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 0.01)
    factors = [np.mean((d * normal) ** 2, (0, 1)), np.mean(d**2, (0, 1))]
    for b, p, gradient, factor in zip(before, opt.parameters, g, factors, strict=True):
        assert_near(b - p.data, gradient / (factor + DAMPING), np.float64)


def test_other_parameters_take_the_plain_gradient() -> None:
    net, first = Net(), Pass(0)
    opt = make(net)
    before = data(opt)
    first.step(net, opt)
    names = [p.name for p in opt.parameters]
    assert names == [
        "emb.embedding_table", "conv.weight", "conv.bias", "fc.weight", "fc.bias",
        "ln.gamma", "ln.beta", "scale",
    ]  # fmt: skip
    for i, name in enumerate(names):
        moved = np.abs(before[i] - opt.parameters[i].data - first.gradients[i]).max()
        assert (moved < 1e-6) == (name in ("conv.bias", "fc.bias", "scale")), name


def test_captures_add_up() -> None:
    """The parts of a batch, and a layer that is used twice, count as one batch."""
    rng = random(5)
    x, d, g = rng.standard_normal((3, 12, 12))
    found = []
    for parts in (1, 3):
        layer = nn.ThorDense(np.zeros((12, 12)))
        opt = make(layer)
        for rows, gradients in zip(np.split(x, parts), np.split(d, parts), strict=True):
            layer.capture(rows, gradients)
        opt((g,))
        found.append(layer.weight.data)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_storage_types(dtype: Any) -> None:
    """Products are float32 for weights of 16 bits; each is rounded once at the store."""
    rng = random(6)
    x, d, g, w = (rng.standard_normal((8, 8)).astype(dtype) for _ in range(4))
    steps = []
    for kind in (dtype, np.float64):
        layer = nn.ThorDense(w.astype(kind))
        opt = make(layer)
        layer.capture(x.astype(kind), d.astype(kind))
        opt((g.astype(kind),))
        steps.append(layer.weight.data)
    assert steps[0].dtype == dtype
    np.testing.assert_allclose(
        steps[0].astype(np.float64), steps[1], rtol=2 * np.finfo(dtype).eps, atol=1e-3
    )


# --------------------------------------------------------------------------------------- Factors


# ------------------------------------------------------------------------------ Every argument acts

CHANGED: dict[str, Any] = {
    "learning_rate": 0.05, "damping": 0.5, "momentum": 0.4, "weight_decay": 0.1, "loss_scale": 4.0,
    "batch_size": 3, "use_nesterov": True, "decay_filter": lambda p: p.name == "fc.weight",
    "enable_clip_grad": True, "frequency": 3, "compat": "mindspore", "block_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_every_argument_acts(name: str) -> None:
    results = []
    for changed in ({}, {name: CHANGED[name]}):
        net = Net()
        opt = make(net, **{**BASE, **changed})
        train(opt, net, range(3))
        results.append(data(opt))
    assert distance(results[1], results[0]) > FAR


@pytest.mark.parametrize(
    "options", [{}, *({"enable_clip_grad": True, "compat": x} for x in (None, "mindspore"))]
)
def test_loss_scale_cancels(options: dict[str, Any]) -> None:
    """Gradients and captured output gradients hold it; the steps do not."""
    results = []
    for scale in (1.0, 1024.0):
        net = Net()
        opt = make(net, **BASE, loss_scale=scale, **options)
        train(opt, net, range(3), scale=scale)
        results.append(data(opt))
    assert distance(results[1], results[0]) < 1e-4


def test_clipping_limits_each_tensor() -> None:
    net, first = Net(np.float64), Pass(0, np.float64)
    plain = make(net, weight_decay=0.3)
    before = data(plain)
    first.step(net, plain)
    steps = [b - p.data for b, p in zip(before, plain.parameters, strict=True)]
    clipped_net = Net(np.float64)
    clipped = make(clipped_net, weight_decay=0.3, enable_clip_grad=True)
    first.step(clipped_net, clipped)
    for b, p, step in zip(before, clipped.parameters, steps, strict=True):
        expected = step / max(1.0, float(np.linalg.norm(step)))
        np.testing.assert_allclose(b - p.data, expected, rtol=1e-6)


def test_momentum_is_that_of_nn_momentum() -> None:
    """With factors that do nothing, THOR is Momentum."""
    for options in ({}, {"use_nesterov": True}, {"weight_decay": 0.1, "loss_scale": 2.0}):
        g = random(10).standard_normal((3, 4, 4)).astype(np.float32)
        layer = nn.ThorDense(np.ones((4, 4), np.float32))
        opt = make(layer, damping=1.0, momentum=0.9, learning_rate=0.1, frequency=100, **options)
        w = np.ones((4, 4), np.float32)
        other = nn.Momentum([w], learning_rate=0.1, momentum=0.9, **options)
        for t in range(3):
            layer.capture_covariances(np.zeros((4, 4)), np.zeros((4, 4)))
            opt((g[t],))
            other((g[t],))
            np.testing.assert_allclose(layer.weight.data, w, rtol=1e-6)
        np.testing.assert_allclose(opt.moments[0], other.moments[0], rtol=1e-5)


@pytest.mark.parametrize("damping", [[0.3, 0.2], np.array([0.3, 0.2]), lambda t: 0.3 - 0.1 * t])
def test_damping_of_each_step(damping: Any) -> None:
    found, expected = Net(), Net()
    opt, other = make(found, damping=damping), make(expected, damping=0.3)
    for t in range(2):
        opt.request_refresh()
        other.request_refresh()
        other.damping = 0.3 - 0.1 * t
        Pass(t).step(found, opt)
        Pass(t).step(expected, other)
    for a, b in zip(data(opt), data(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
