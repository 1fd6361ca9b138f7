"""Nets for the tests of THOR: every kind of layer, with gradients worked out by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fusestep import nn

Put = Callable[[np.ndarray], Any]
BATCH = 6
DAMPING = 0.07
BASE = {"learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.01}


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def array(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


class Net:
    """One layer of each kind, and a parameter of none; ``put`` says where they live."""

    def __init__(self, dtype: Any = np.float32, seed: int = 0, put: Put = np.asarray) -> None:
        rng = random(seed)

        def new(*shape: int) -> Any:
            return put(array(rng, *shape, dtype=dtype))

        self.emb = nn.ThorEmbedding(new(7, 4))
        self.conv = nn.ThorConv2d(new(3, 2, 3, 3), new(3), stride=2, padding=1)
        self.fc = nn.ThorDense(new(5, 4), new(5))
        self.ln = nn.ThorLayerNorm(new(5), new(5))
        self.scale = nn.Parameter(new(3))

    @property
    def layers(self) -> tuple[Any, ...]:
        return self.emb, self.conv, self.fc, self.ln


class Pass:
    """What went through the layers of a `Net` in one step, and the gradients of its parameters."""

    def __init__(self, seed: int, dtype: Any = np.float32, scale: float = 1.0) -> None:
        rng = random(100 + seed)

        def new(*shape: int) -> np.ndarray:
            return array(rng, *shape, dtype=dtype)

        self.ids = rng.integers(0, 7, BATCH)
        self.inputs = (self.ids, new(BATCH, 2, 5, 5), new(BATCH, 4), new(BATCH, 5))
        shapes = ((BATCH, 4), (BATCH, 3, 3, 3), (BATCH, 5), (BATCH, 5))
        factor = np.asarray(scale / BATCH, dtype)
        self.outputs = tuple(new(*shape) * factor for shape in shapes)
        wanted = ((7, 4), (3, 2, 3, 3), (3,), (5, 4), (5,), (5,), (5,), (3,))
        self.gradients = tuple(new(*shape) * np.asarray(scale, dtype) for shape in wanted)

    def capture(self, net: Net, put: Put = np.asarray) -> None:
        for layer, x, d in zip(net.layers, self.inputs, self.outputs, strict=True):
            layer.capture(put(x), put(d))

    def step(self, net: Net, opt: Any, put: Put = np.asarray, without: Sequence[int] = ()) -> Any:
        """A step, in which the parameters in ``without`` have no gradient."""
        self.capture(net, put)
        return opt(tuple(None if i in without else put(g) for i, g in enumerate(self.gradients)))


def train(opt: Any, net: Net, steps: range, dtype: Any = np.float32, scale: float = 1.0) -> None:
    for t in steps:
        assert Pass(t, dtype, scale).step(net, opt) == (True,) * 8


def make(net: Any, **changed: Any) -> Any:
    """THOR whose first step takes the preconditioned gradient off the parameters."""
    options = {
        "learning_rate": 1.0, "damping": DAMPING, "momentum": 0.0, "batch_size": BATCH,
        "frequency": 2,
    }  # fmt: skip
    return nn.thor(net, **{**options, **changed})


def data(opt: Any) -> list[np.ndarray]:
    return [p.data.copy() for p in opt.parameters]


def patches(x: np.ndarray, kernel: Any, stride: Any, before: Any, after: Any, dilation: Any) -> Any:
    """``[N, OH, OW, C*kh*kw]``, with loops and no strides: float64."""
    n, c, h, w = x.shape
    (kh, kw), (sh, sw), (dh, dw) = kernel, stride, dilation
    wide = np.zeros((n, c, h + before[0] + after[0], w + before[1] + after[1]))
    wide[:, :, before[0] : before[0] + h, before[1] : before[1] + w] = x
    oh = (wide.shape[2] - dh * (kh - 1) - 1) // sh + 1
    ow = (wide.shape[3] - dw * (kw - 1) - 1) // sw + 1
    found = np.zeros((n, oh, ow, c, kh, kw))
    for i in range(oh):
        for j in range(ow):
            for a in range(kh):
                for b in range(kw):
                    found[:, i, j, :, a, b] = wide[:, :, i * sh + a * dh, j * sw + b * dw]
    return found.reshape(n, oh, ow, -1)


def block_diagonal(matrix: np.ndarray, size: int) -> np.ndarray:
    """The blocks of a full matrix, with zeros around them."""
    place = np.arange(len(matrix)) // size
    return np.where(place[:, None] == place[None, :], matrix, 0.0)


def kronecker_solve(a: np.ndarray, g: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """``(G kron A)^-1`` times the gradient, as one dense system of linear equations."""
    matrix = gradient.reshape(len(gradient), -1)
    solved = np.linalg.solve(np.kron(g, a), matrix.reshape(-1))
    return solved.reshape(gradient.shape)
