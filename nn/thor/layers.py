"""The layers of a net as THOR sees them: parameters, and what their factors are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, NoReturn

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime.arrays import adopt_anywhere, real_type
from ...ops.runtime.check import FLOAT_NAMES, FLOATS
from ...ops.runtime.device import device_of, is_on_device
from ...ops.runtime.errors import reject
from ...ops.runtime.launch import launch_on
from ..base.arguments import is_int, positive_float
from ..base.parameter import Parameter
from .arguments import BLOCK_SIZE
from .factors import FloatArray, add_gram, empty_packed, packed

Both = tuple[float, float]
"""A number of A and one of G."""


class ThorLayer:
    """The base class of the layers, and a dense one: what they hold and what they capture.

    Between two refreshes of its factors a layer does not capture: `capture` checks its arguments
    and returns at once. Several captures before one step add up, those of a layer that is used
    twice and those of accumulated gradients.

    Of a weight on a CUDA device the factors are kept on the host: what is captured is copied
    there, which waits. Ids of an embedding are looked at then; in the steps between only shapes
    and dtypes are checked.

    Attributes:
        weight: its `Parameter`.
        bias: its second `Parameter`, or None.
        name: its place in the net, from when an optimizer has it.
        is_capturing: whether the next step needs what is captured. An optimizer sets it.
    """

    NAMES: ClassVar[tuple[str, str]] = ("weight", "bias")
    """What the parameters are called behind the name of the layer."""

    _FORM: ClassVar[tuple[Collection[int], str]] = (2,), "(out, in)"  # dimensions of the weight
    _BIAS_AXES: ClassVar[slice] = slice(1)  # those of the weight that the bias has

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight = weight if isinstance(weight, Parameter) else Parameter(weight)
        self.bias = bias if isinstance(bias, Parameter | None) else Parameter(bias)
        self.name, self.is_capturing = type(self).__name__, True
        self._block_size, self._is_compatible = BLOCK_SIZE, False
        dimensions, form = self._FORM
        if self.weight.ndim not in dimensions or self.weight.size == 0:
            self._reject(ValueError, "weight", "has a wrong shape", form, self.weight.shape)
        if self.bias is not None:
            self._check_shape("bias", self.bias, self.weight.shape[self._BIAS_AXES])
        self.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight!r}, {self.bias!r})"

    def _reject(
        self, kind: type[Exception], name: str, wrong: str, expected: object, got: object
    ) -> NoReturn:
        reject(kind, type(self).__name__, name, wrong, expected, got)

    def _check_shape(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            self._reject(ValueError, name, "has a wrong shape", shape, array.shape)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in optimizer order."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def real(self) -> Any:
        """The type of the arithmetic: float64 for a float64 weight, else float32."""
        return real_type(self.weight.dtype)

    # What an optimizer sets and reads

    def configure(self, name: str, block_size: int | None, *, is_compatible: bool) -> None:
        """Called by the optimizer that takes the layer; what was captured before is dropped.

        Without a ``block_size`` factors are whole; with ``is_compatible`` they are MindSpore's.
        """
        self.name = name
        self._block_size = max(self.weight.size, 1) if block_size is None else block_size
        self._is_compatible = is_compatible
        self.clear()

    def clear(self) -> None:
        """Forget what was captured."""
        self._a, self._g = self._empty()
        self._samples = 0
        self._weights = self._positions = (0.0, 0.0)  # of A and of G

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        """Sums of nothing, in the form of the two factors."""
        rows = self.weight.shape[0]
        sizes = self.weight.size // rows, rows
        a, g = (empty_packed(n, self._block_size, self.real) for n in sizes)
        return a, g

    @property
    def has_captured(self) -> bool:
        """Whether there is something to make factors of."""
        return self._samples > 0

    @property
    def covariances(self) -> tuple[FloatArray, float, FloatArray, float]:
        """The sums of both factors, each followed by what it is to be divided by."""
        a_weight, g_weight = self._weights
        return self._a, max(a_weight, 1.0), self._g, max(g_weight, 1.0)

    @property
    def normalizers(self) -> tuple[float, float]:
        """The positions of an image, as the inputs and as the outputs have them; 1 for others."""
        a, g = (positions / max(self._samples, 1) for positions in self._positions)
        return a or 1.0, g or 1.0

    # Capturing

    @quiet
    def capture(self, inputs: Any, output_gradients: Any) -> None:
        """Take note of what went through the layer.

        Args:
            inputs: what the layer was called with, as the class says.
            output_gradients: derivatives of the loss by what it returned (before any activation),
                of the loss as it was differentiated: averaged over the batch and multiplied by
                the loss scale.

        Raises:
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit.
            IndexError: an id of an embedding is out of range.
        """
        given = self._adopted(inputs=inputs, output_gradients=output_gradients)
        self._check(*given.values())
        # Checked in every step: a wrong call would else be found at the next refresh, long after.
        if not self.is_capturing:
            return
        if self.weight.is_on_device:
            given = self._copied(given)
            self._check(*given.values())  # values too, now that they can be read
        if self._is_compatible:
            self.clear()  # MindSpore's layers keep the last call only
        # What is not finite is found where the factors are inverted.
        self._add(*given.values())

    def _adopted(self, **named: Any) -> dict[str, Any]:
        """Arrays where the weight lives; nothing else of them is known."""
        where = type(self).__name__
        arrays = {name: adopt_anywhere(where, name, value) for name, value in named.items()}
        device_of(where, {"the weight": self.weight.array, **arrays})
        return arrays

    def _copied(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Copies on the host of arrays on a device."""
        where = type(self).__name__
        compact = {name: array.contiguous(where, name) for name, array in arrays.items()}
        with launch_on(list(compact.values())):  # not in a CUDA graph
            return {name: array.numpy() for name, array in compact.items()}

    def _check(self, x: Any, d: Any) -> None:
        """Refuse inputs and gradients that do not fit."""
        self._check_floating(inputs=x, output_gradients=d)
        out, width = self.weight.shape
        if x.ndim < 1 or x.shape[-1] != width:
            self._reject(ValueError, "inputs", "has a wrong shape", f"(..., {width})", x.shape)
        self._check_shape("output_gradients", d, (*x.shape[:-1], out))

    def _check_floating(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            if array.dtype not in FLOATS:
                self._reject(TypeError, name, "has a wrong dtype", FLOAT_NAMES, array.dtype)

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = (array.reshape(-1, array.shape[-1]) for array in (x, d))
        add_gram(self._a, x.astype(self.real, copy=False).T)
        add_gram(self._g, d.astype(self.real, copy=False).T)
        # MindSpore's A is divided by the rows of A, not by those of X.
        a_weight = self.weight.shape[1] if self._is_compatible else len(x)
        self._count(len(x), (a_weight, len(x)))

    @quiet
    def capture_covariances(
        self, a: Any, g: Any, a_normalizer: float = 1.0, g_normalizer: float = 1.0
    ) -> None:
        """Take note of covariances that were computed elsewhere, instead of `capture`.

        Args:
            a: ``[n, n]``: ``X'X/N`` of the inputs (patches of a convolution); the frequencies
                ``[vocab]`` of an embedding's ids, with ``compat="mindspore"`` their counts.
            g: ``[out, out]``: ``D'D/N`` of the output gradients.
            a_normalizer: positions of an image as the patches have them, for a convolution.
            g_normalizer: positions of an image as the output has them.

        Raises:
            TypeError: a kind or dtype does not fit, or it is a layer normalization, which has
                diagonal factors.
            ValueError: a shape does not fit.
        """
        if self._g.ndim == 1:
            name, wrong = "capture_covariances", "is not for this layer"
            self._reject(TypeError, name, wrong, "capture", "a call of it")
        given = self._adopted(a=a, g=g)
        self._check_floating(**given)
        for name, total in (("a", self._a), ("g", self._g)):
            self._check_shape(name, given[name], (len(total),) * total.ndim)
        for name, value in (("a_normalizer", a_normalizer), ("g_normalizer", g_normalizer)):
            positive_float(type(self).__name__, name, value, np.float64)
        if not self.is_capturing:
            return
        if self.weight.is_on_device:
            given = self._copied(given)
        if self._is_compatible:
            self.clear()
        a_covariance, g_covariance = (
            array.astype(self.real, copy=False) for array in given.values()
        )
        self._a += a_covariance if self._a.ndim == 1 else packed(a_covariance, self._a.shape[1])
        self._g += packed(g_covariance, self._g.shape[1])
        self._count(1, (1, 1), (float(a_normalizer), float(g_normalizer)))

    def _count(self, samples: int, weights: Both, positions: Both = (0.0, 0.0)) -> None:
        """Count samples, and for A and for G what to divide by and the positions."""
        self._samples += samples
        self._weights = self._weights[0] + weights[0], self._weights[1] + weights[1]
        self._positions = self._positions[0] + positions[0], self._positions[1] + positions[1]


class ThorDense(ThorLayer):
    """A fully connected layer ``y = x W' + b``.

    With ``N`` rows of inputs ``X`` and of output gradients ``D``, and ``d = D * batch_size /
    loss_scale`` the gradients of the single samples::

        A = X'X / N        G = d'd / N

    Args:
        weight: ``(out, in)`` `Parameter` or array.
        bias: ``(out,)``, or None. It takes the plain gradient.

    ``capture(inputs, output_gradients)`` takes ``(..., in)`` and ``(..., out)`` with the same
    leading dimensions; each row of these counts as a sample.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape does not fit.

    Source: MindSpore's ``DenseThor``; Martens and Grosse (2015), arXiv:1503.05671.

    >>> import numpy as np
    >>> layer = ThorDense(np.zeros((2, 3), np.float32), np.zeros(2, np.float32))
    >>> layer.capture(np.ones((8, 3), np.float32), np.ones((8, 2), np.float32))
    >>> layer.has_captured
    True
    """


class ThorEmbedding(ThorLayer):
    """An embedding ``y = W[ids]``: a dense layer on one-hot inputs.

    Its A is diagonal: the frequencies of the ids, ``A = counts / N``; ``G = d'd / N`` as for
    `ThorDense`.

    Args:
        weight: ``(vocab, dim)`` `Parameter` or array.
        padding_idx: an id that takes no part, as in PyTorch; None for none.

    ``capture(inputs, output_gradients)`` takes int32 or int64 ids of any shape and gradients of
    that shape with a last dimension ``dim``.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape does not fit, or ``padding_idx`` is out of range.

    Source: MindSpore's ``EmbeddingThor``.

    >>> import numpy as np
    >>> layer = ThorEmbedding(np.zeros((5, 2), np.float32))
    >>> layer.capture(np.array([[0, 3], [3, 3]]), np.ones((2, 2, 2), np.float32))
    >>> layer.has_captured
    True
    """

    NAMES = ("embedding_table", "")
    _FORM = (2,), "(vocab, dim)"

    def __init__(self, weight: Any, padding_idx: int | None = None) -> None:
        super().__init__(weight)
        self.padding_idx = padding_idx
        if padding_idx is None:
            return
        if not is_int(padding_idx):
            got = type(padding_idx).__name__
            self._reject(TypeError, "padding_idx", "has a wrong type", "an int", got)
        if not 0 <= padding_idx < len(self.weight):
            expected = f"0 <= padding_idx < {len(self.weight)}"
            self._reject(ValueError, "padding_idx", "is out of range", expected, padding_idx)

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        size, width = self.weight.shape
        # MindSpore does not split the factor of an embedding.
        block_size = width if self._is_compatible else self._block_size
        return np.zeros(size, self.real), empty_packed(width, block_size, self.real)

    def _check(self, x: Any, d: Any) -> None:
        (size, width), ids = self.weight.shape, x
        if ids.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            self._reject(TypeError, "inputs", "has a wrong dtype", "int32 or int64 ids", ids.dtype)
        self._check_floating(output_gradients=d)
        self._check_shape("output_gradients", d, (*ids.shape, width))
        if is_on_device(ids) or not ids.size:
            return
        first, last = int(ids.min()), int(ids.max())
        if first < 0 or last >= size:
            wrong, bad = "has an id out of range", first if first < 0 else last
            self._reject(IndexError, "inputs", wrong, f"0 <= id < {size}", bad)

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = x.reshape(-1), d.reshape(-1, d.shape[-1])
        if self.padding_idx is not None:
            counts = x != self.padding_idx
            x, d = x[counts], d[counts]
        self._a += np.bincount(x, minlength=len(self._a)).astype(self.real)
        add_gram(self._g, d.astype(self.real, copy=False).T)
        # MindSpore keeps the counts, which its optimizer divides by its batch size.
        self._count(max(len(x), 1), (1 if self._is_compatible else len(x), len(x)))


class ThorLayerNorm(ThorLayer):
    """A layer normalization ``y = weight * xhat + bias`` over the last dimensions.

    Its factors are diagonal: the mean squares of the gradients of the single samples::

        F_weight = mean of (d * xhat)^2        F_bias = mean of d^2

    Args:
        weight: `Parameter` or array of the shape that is normalized over.
        bias: of the same shape, or None.
        eps: float > 0 beside the variance.

    ``capture(inputs, output_gradients)`` takes arrays of one shape that ends with that of the
    weight: what went in, before it was normalized, and the gradients of what came out.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape or value does not fit.

    >>> import numpy as np
    >>> layer = ThorLayerNorm(np.ones(3, np.float32), np.zeros(3, np.float32))
    >>> layer.capture(np.eye(3, dtype=np.float32), np.ones((3, 3), np.float32))
    >>> layer.has_captured
    True
    """

    NAMES = ("gamma", "beta")
    _FORM = range(1, 65), "the shape that is normalized over"
    _BIAS_AXES = slice(None)

    def __init__(self, weight: Any, bias: Any = None, eps: float = 1e-5) -> None:
        super().__init__(weight, bias)
        self.eps = positive_float(type(self).__name__, "eps", eps, np.float32)

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        return np.zeros(self.weight.size, self.real), np.zeros(self.weight.size, self.real)

    def _check(self, x: Any, d: Any) -> None:
        self._check_floating(inputs=x, output_gradients=d)
        shape = self.weight.shape
        if x.shape[max(x.ndim - len(shape), 0) :] != shape:
            expected = f"(..., {str(shape)[1:]}"
            self._reject(ValueError, "inputs", "has a wrong shape", expected, x.shape)
        self._check_shape("output_gradients", d, x.shape)

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = (array.reshape(-1, self.weight.size) for array in (x, d))
        x, d = x.astype(self.real, copy=False), d.astype(self.real, copy=False)
        centered = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centered).mean(axis=1, keepdims=True)
        normalized = centered / np.sqrt(variance + self.real(self.eps))
        self._a += np.square(d * normalized).sum(axis=0)
        self._g += np.square(d).sum(axis=0)
        self._count(len(x), (len(x), len(x)))
