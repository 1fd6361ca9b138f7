"""Two small classifiers in NumPy, with their derivatives, for `thor_digits`.

Their layers are THOR's records: each step hands them what went in and the derivatives of what came
out. Optimizers that do not need that take the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .. import nn

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
N_CLASSES = 10


def cross_entropy(scores: FloatArray, labels: IntArray) -> tuple[float, FloatArray]:
    """The mean loss ``[N, C]`` scores have, and its derivatives by the scores."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(np.mean(np.log(total[:, 0]) - shifted[rows, labels]))
    derivatives = exponentials / total
    derivatives[rows, labels] -= 1
    return loss, derivatives / np.float32(len(labels))


class Layer(Protocol):
    """A differentiable function with parameters."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What is trained."""

    def forward(self, x: FloatArray) -> FloatArray:
        """What the layer makes of a batch."""

    def backward(self, d: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """Derivatives by the last input and by the parameters, from those by the output."""


def _initial(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """He et al. (2015): the variance of what goes through is kept by a rectifier."""
    fan_in = int(np.prod(shape[1:]))
    return np.float32(np.sqrt(2 / fan_in)) * rng.standard_normal(shape, np.float32)


class Dense:
    """``y = x W' + b``."""

    def __init__(self, rng: np.random.Generator, width: int, out: int) -> None:
        self.record = nn.ThorDense(_initial(rng, (out, width)), np.zeros(out, np.float32))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias."""
        return self.record.parameters

    def forward(self, x: FloatArray) -> FloatArray:
        """``[N, width]`` to ``[N, out]``."""
        self._x = x
        weight, bias = (p.data for p in self.parameters)
        y: FloatArray = x @ weight.T + bias
        return y

    def backward(self, d: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """As `Layer.backward`; THOR takes note."""
        self.record.capture(self._x, d)
        return d @ self.parameters[0].data, [d.T @ self._x, d.sum(axis=0)]


class Conv:
    """A 3 x 3 convolution with one row and column of zeros around the image."""

    def __init__(self, rng: np.random.Generator, channels: int, out: int, stride: int) -> None:
        self.stride = stride
        weight, bias = _initial(rng, (out, channels, 3, 3)), np.zeros(out, np.float32)
        self.record = nn.ThorConv2d(weight, bias, stride=stride, padding=1)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias."""
        return self.record.parameters

    def forward(self, x: FloatArray) -> FloatArray:
        """``[N, channels, H, W]`` to ``[N, out, H/stride, W/stride]``."""
        self._x = x
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = sliding_window_view(padded, (3, 3), axis=(2, 3))
        seen = windows[:, :, :: self.stride, :: self.stride]
        n, c, height, width = seen.shape[:4]
        self._patches = seen.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, c * 9)
        weight, bias = (p.data for p in self.parameters)
        y = self._patches @ weight.reshape(len(weight), -1).T + bias
        return np.ascontiguousarray(y.reshape(n, height, width, -1).transpose(0, 3, 1, 2))

    def backward(self, d: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """As `Layer.backward`; THOR takes note."""
        self.record.capture(self._x, d)
        weight = self.parameters[0].data
        n, out, height, width = d.shape
        rows = d.transpose(0, 2, 3, 1).reshape(-1, out)
        of_patches = (rows @ weight.reshape(out, -1)).reshape(n, height, width, -1, 3, 3)
        x, s = self._x, self.stride
        padded = np.zeros((n, x.shape[1], x.shape[2] + 2, x.shape[3] + 2), np.float32)
        for i in range(3):
            for j in range(3):
                part = of_patches[..., i, j].transpose(0, 3, 1, 2)
                padded[:, :, i : i + s * height : s, j : j + s * width : s] += part
        gradient = (rows.T @ self._patches).reshape(weight.shape)
        return padded[:, :, 1:-1, 1:-1], [gradient, d.sum(axis=(0, 2, 3))]


class Rectifier:
    """``max(x, 0)``."""

    parameters: tuple[nn.Parameter, ...] = ()

    def forward(self, x: FloatArray) -> FloatArray:
        """Of any shape."""
        self._is_on = x > 0
        return x * self._is_on

    def backward(self, d: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """As `Layer.backward`."""
        return d * self._is_on, []


class Flatten:
    """``[N, ...]`` to ``[N, all of it]``."""

    parameters: tuple[nn.Parameter, ...] = ()

    def forward(self, x: FloatArray) -> FloatArray:
        """Of any shape."""
        self._shape = x.shape
        return x.reshape(len(x), -1)

    def backward(self, d: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
        """As `Layer.backward`."""
        return d.reshape(self._shape), []


class Classifier:
    """Layers one after the other, and the mean cross entropy of their scores.

    Args:
        layers: the layers.

    Attributes:
        records: what `nn.thor` takes for its net.
        parameters: what other optimizers take, in the order of the gradients.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self.records = [layer.record for layer in self.layers if isinstance(layer, Dense | Conv)]
        self.parameters = [p for layer in self.layers for p in layer.parameters]

    def scores(self, x: FloatArray) -> FloatArray:
        """``[N, C]`` for a batch of images ``[N, 1, 8, 8]``."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def loss(self, x: FloatArray, labels: IntArray) -> float:
        """The mean loss; nothing is captured."""
        return cross_entropy(self.scores(x), labels)[0]

    def gradients(self, x: FloatArray, labels: IntArray) -> tuple[FloatArray, ...]:
        """Derivatives of the mean loss by the parameters."""
        _, d = cross_entropy(self.scores(x), labels)
        found: list[FloatArray] = []
        for layer in reversed(self.layers):
            d, own = layer.backward(d)
            found = own + found
        return tuple(found)


def mlp(seed: int) -> Classifier:
    """64 - 64 - 64 - 10."""
    rng = np.random.default_rng(seed)
    return Classifier(
        [
            Flatten(),
            Dense(rng, 64, 64),
            Rectifier(),
            Dense(rng, 64, 64),
            Rectifier(),
            Dense(rng, 64, N_CLASSES),
        ]
    )


def convnet(seed: int) -> Classifier:
    """Two convolutions, the second with a stride of 2, and a dense layer."""
    rng = np.random.default_rng(seed)
    return Classifier(
        [
            Conv(rng, 1, 8, 1),
            Rectifier(),
            Conv(rng, 8, 16, 2),
            Rectifier(),
            Flatten(),
            Dense(rng, 16 * 4 * 4, N_CLASSES),
        ]
    )
