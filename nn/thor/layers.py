"""The layers of a net as THOR sees them: parameters, and what their factors are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime import check
from ...ops.runtime.arrays import adopt_anywhere, real_type
from ...ops.runtime.device import device_of, is_on_device
from ...ops.runtime.errors import reject
from ...ops.runtime.launch import launch_on
from ..base.arguments import is_int, positive_float
from ..base.parameter import Parameter
from .arguments import BLOCK_SIZE
from .factors import FloatArray, add_gram, empty_packed, packed


class ThorLayer:
    """The base class of the layers, and a dense one: what they hold and what they capture.

    Between two refreshes of its factors a layer does not capture: `capture` checks its arguments
    and returns at once. Several captures before one step add up, those of a layer that is used
    twice and those of accumulated gradients.

    Of a weight on a CUDA device the factors are kept on the host: what is captured is copied
    there, which waits. Ids of an embedding are checked then; in the steps between only shapes
    and dtypes are checked.

    Attributes:
        weight: its `Parameter`.
        bias: its second `Parameter`, or None.
        name: its place in the net, from when an optimizer has it.
        is_capturing: whether the next step needs what is captured. An optimizer sets it.
        is_compatible: whether its factors are MindSpore's, as an optimizer asks for.
    """

    NAMES: ClassVar[tuple[str, str]] = ("weight", "bias")
    """What the parameters are called behind the name of the layer."""

    _FORM: ClassVar[tuple[Collection[int], str]] = (2,), "(out, in)"  # dimensions of the weight
    _BIAS_AXES: ClassVar[slice] = slice(1)  # those of the weight that the bias has

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight = weight if isinstance(weight, Parameter) else Parameter(weight)
        self.bias = bias if isinstance(bias, Parameter | None) else Parameter(bias)
        self.name, self.is_capturing = type(self).__name__, True
        self._block_size, self.is_compatible = BLOCK_SIZE, False
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
        self.is_compatible = is_compatible
        self.clear()

    def clear(self) -> None:
        """Forget what was captured."""
        self._a, self._g = self._empty()
        self._samples = 0
        self._weights = self._positions = np.zeros(2)  # of A and of G

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        """Sums of nothing, in the form of the two factors."""
        rows, form = self.weight.shape[0], (self._block_size, self.real)
        return empty_packed(self.weight.size // rows, *form), empty_packed(rows, *form)

    @property
    def has_captured(self) -> bool:
        """Whether there is something to make factors of."""
        return self._samples > 0

    @property
    def covariances(self) -> tuple[FloatArray, float, FloatArray, float]:
        """The sums of both factors, each followed by what it is to be divided by."""
        a_weight, g_weight = np.maximum(self._weights, 1.0).tolist()
        return self._a, a_weight, self._g, g_weight

    @property
    def normalizers(self) -> tuple[float, float]:
        """The positions of an image, as the inputs and as the outputs have them; 1 for others."""
        a, g = (self._positions / max(self._samples, 1)).tolist()
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
        arrays = self._read(self._check, inputs=inputs, output_gradients=output_gradients)
        if arrays is not None:
            # What is not finite is found where the factors are inverted.
            self._add(*arrays)

    def _read(self, check_all: Callable[..., None], **named: Any) -> list[FloatArray] | None:
        """Checked arrays on the host, to be added; None where nothing is captured."""
        where = type(self).__name__
        arrays = {name: adopt_anywhere(where, name, value) for name, value in named.items()}
        device_of(where, {"the weight": self.weight.array, **arrays})
        # Checked in every step: a wrong call would else be found at the next refresh, long after.
        check_all(*arrays.values())
        if not self.is_capturing:
            return None
        read = [*arrays.values()]
        if self.weight.is_on_device:
            compact = [array.contiguous(where, name) for name, array in arrays.items()]
            with launch_on(compact):  # not in a CUDA graph
                read = [array.numpy() for array in compact]
            check_all(*read)  # values too, now that they can be read
        if self.is_compatible:
            self.clear()  # MindSpore's layers keep the last call only
        return read

    def _check(self, x: Any, d: Any) -> None:
        """Refuse inputs and gradients that do not fit."""
        self._check_floating(inputs=x, output_gradients=d)
        out, width = self.weight.shape
        if x.ndim < 1 or x.shape[-1] != width:
            self._reject(ValueError, "inputs", "has a wrong shape", f"(..., {width})", x.shape)
        self._check_shape("output_gradients", d, (*x.shape[:-1], out))

    def _check_floating(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            check.float_dtype(type(self).__name__, name, array)

    def _rows(self, array: FloatArray, width: int) -> FloatArray:
        return array.reshape(-1, width).astype(self.real, copy=False)

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = self._rows(x, x.shape[-1]), self._rows(d, d.shape[-1])
        add_gram(self._a, x.T)
        add_gram(self._g, d.T)
        # MindSpore's A is divided by the rows of A, not by those of X.
        a_weight = self.weight.shape[1] if self.is_compatible else len(x)
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
        normalizers = {"a_normalizer": a_normalizer, "g_normalizer": g_normalizer}
        arrays = self._read(partial(self._check_covariances, normalizers), a=a, g=g)
        if arrays is None:
            return
        a, g = (array.astype(self.real, copy=False) for array in arrays)
        self._a += a if self._a.ndim == 1 else packed(a, self._a.shape[1])
        self._g += packed(g, self._g.shape[1])
        self._count(1, (1, 1), (a_normalizer, g_normalizer))

    def _check_covariances(self, normalizers: dict[str, float], a: Any, g: Any) -> None:
        self._check_floating(a=a, g=g)
        for name, array, total in (("a", a, self._a), ("g", g, self._g)):
            self._check_shape(name, array, (len(total),) * total.ndim)
        for name, value in normalizers.items():
            positive_float(type(self).__name__, name, value, np.float64)

    def _count(self, samples: int, weights: Any, positions: Any = 0.0) -> None:
        """Count samples, and for A and for G what to divide by and the positions."""
        self._samples += samples
        self._weights = self._weights + weights
        self._positions = self._positions + positions


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
        block_size = width if self.is_compatible else self._block_size
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
        x, d = x.reshape(-1), self._rows(d, d.shape[-1])
        if self.padding_idx is not None:
            counts = x != self.padding_idx
            x, d = x[counts], d[counts]
        self._a += np.bincount(x, minlength=len(self._a)).astype(self.real)
        add_gram(self._g, d.T)
        # MindSpore keeps the counts, which its optimizer divides by its batch size.
        self._count(max(len(x), 1), (1 if self.is_compatible else len(x), len(x)))


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
        x, d = (self._rows(array, self.weight.size) for array in (x, d))
        centered = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centered).mean(axis=1, keepdims=True)
        normalized = centered / np.sqrt(variance + self.real(self.eps))
        self._a += np.square(d * normalized).sum(axis=0)
        self._g += np.square(d).sum(axis=0)
        self._count(len(x), (len(x), len(x)))
