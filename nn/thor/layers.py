"""The layers of a net as THOR sees them: parameters, and what their factors are made of."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ...kernels.quiet import quiet
from ...ops.runtime.arrays import adopt_anywhere, real_type
from ...ops.runtime.check import FLOAT_NAMES, FLOATS
from ...ops.runtime.device import device_of, is_on_device
from ...ops.runtime.errors import message
from ...ops.runtime.launch import launch_on
from ..base.arguments import positive_float
from ..base.parameter import Parameter
from .arguments import BLOCK_SIZE
from .factors import FloatArray, add_gram, empty_packed, packed


class ThorLayer:
    """The base class of the layers: what they hold and what they capture.

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

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight = weight if isinstance(weight, Parameter) else Parameter(weight)
        self.bias = bias if isinstance(bias, Parameter | None) else Parameter(bias)
        self.name = type(self).__name__
        self.is_capturing = True
        self._block_size = BLOCK_SIZE
        self._is_compatible = False
        self._check_weight()
        if self.bias is not None and self.bias.shape != self._bias_shape:
            raise ValueError(
                self._text("bias", "has a wrong shape", self._bias_shape, self.bias.shape)
            )
        self.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight!r}, {self.bias!r})"

    def _text(self, argument: str, wrong: str, expected: object, got: object) -> str:
        return message(type(self).__name__, argument, wrong, expected, got)

    def _check_weight(self) -> None:
        self._check_ndim(2, "(out, in)")

    def _check_ndim(self, ndim: int, expected: str) -> None:
        if self.weight.ndim != ndim or self.weight.size == 0:
            raise ValueError(self._text("weight", "has a wrong shape", expected, self.weight.shape))

    @property
    def _bias_shape(self) -> tuple[int, ...]:
        return self.weight.shape[:1]

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

        Args:
            name: its place in the net.
            block_size: size of the diagonal blocks; None keeps whole factors.
            is_compatible: capture what MindSpore's layers do.
        """
        self.name = name
        self._block_size = max(self.weight.size, 1) if block_size is None else block_size
        self._is_compatible = is_compatible
        self.clear()

    def clear(self) -> None:
        """Forget what was captured."""
        self._a, self._g = self._empty()
        self._a_weight = self._g_weight = 0.0
        self._a_positions = self._g_positions = 0.0
        self._samples = 0

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        """Sums of nothing, in the form of the two factors."""
        size, width = self.weight.shape
        return (
            empty_packed(width, self._block_size, self.real),
            empty_packed(size, self._block_size, self.real),
        )

    @property
    def has_captured(self) -> bool:
        """Whether there is something to make factors of."""
        return self._samples > 0

    @property
    def covariances(self) -> tuple[FloatArray, float, FloatArray, float]:
        """The sums of both factors, each followed by what it is to be divided by."""
        return self._a, max(self._a_weight, 1.0), self._g, max(self._g_weight, 1.0)

    @property
    def normalizers(self) -> tuple[float, float]:
        """The positions of an image, as the inputs and as the outputs have them; 1 for others."""
        n = max(self._samples, 1)
        return (self._a_positions / n or 1.0), (self._g_positions / n or 1.0)

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
        with launch_on(list(compact.values()), None):  # not in a CUDA graph
            return {name: array.numpy() for name, array in compact.items()}

    def _check(self, x: Any, d: Any) -> None:
        """Refuse inputs and gradients that do not fit."""
        out, width = self.weight.shape
        self._check_floating(inputs=x, output_gradients=d)
        if x.ndim < 1 or x.shape[-1] != width:
            raise ValueError(self._text("inputs", "has a wrong shape", f"(..., {width})", x.shape))
        if d.shape != (*x.shape[:-1], out):
            raise ValueError(
                self._text("output_gradients", "has a wrong shape", (*x.shape[:-1], out), d.shape)
            )

    def _check_floating(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            if array.dtype not in FLOATS:
                raise TypeError(self._text(name, "has a wrong dtype", FLOAT_NAMES, array.dtype))

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        raise NotImplementedError

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
            TypeError: a kind or dtype does not fit.
            ValueError: a shape does not fit.
        """
        given = self._adopted(a=a, g=g)
        self._check_floating(**given)
        for (name, array), total in zip(given.items(), (self._a, self._g), strict=True):
            shape = (len(total),) * total.ndim
            if array.shape != shape:
                raise ValueError(self._text(name, "has a wrong shape", shape, array.shape))
        for name, value in (("a_normalizer", a_normalizer), ("g_normalizer", g_normalizer)):
            positive_float(type(self).__name__, name, value, np.float64)
        if not self.is_capturing:
            return
        if self.weight.is_on_device:
            given = self._copied(given)
        if self._is_compatible:
            self.clear()
        of_a, of_g = (array.astype(self.real, copy=False) for array in given.values())
        self._a += of_a if self._a.ndim == 1 else packed(of_a, self._a.shape[1])
        self._g += packed(of_g, self._g.shape[1])
        self._count(1, 1, 1)
        self._a_positions += float(a_normalizer)
        self._g_positions += float(g_normalizer)

    def _count(self, samples: int, a_weight: float, g_weight: float) -> None:
        self._samples += samples
        self._a_weight += a_weight
        self._g_weight += g_weight


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

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = (array.reshape(-1, array.shape[-1]) for array in (x, d))
        add_gram(self._a, x.astype(self.real, copy=False))
        add_gram(self._g, d.astype(self.real, copy=False))
        # MindSpore's A is divided by the rows of A, not by those of X.
        self._count(len(x), self.weight.shape[1] if self._is_compatible else len(x), len(x))


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

    def __init__(self, weight: Any, padding_idx: int | None = None) -> None:
        super().__init__(weight)
        self.padding_idx = padding_idx
        if padding_idx is None:
            return
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int | np.integer):
            raise TypeError(
                self._text("padding_idx", "has a wrong type", "an int", type(padding_idx).__name__)
            )
        if not 0 <= padding_idx < len(self.weight):
            expected = f"0 <= padding_idx < {len(self.weight)}"
            raise ValueError(self._text("padding_idx", "is out of range", expected, padding_idx))

    def _check_weight(self) -> None:
        self._check_ndim(2, "(vocab, dim)")

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        size, width = self.weight.shape
        # MindSpore does not split the factor of an embedding.
        block_size = width if self._is_compatible else self._block_size
        return np.zeros(size, self.real), empty_packed(width, block_size, self.real)

    def _check(self, x: Any, d: Any) -> None:
        size, width = self.weight.shape
        ids = x
        if ids.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(
                self._text("inputs", "has a wrong dtype", "int32 or int64 ids", ids.dtype)
            )
        self._check_floating(output_gradients=d)
        if d.shape != (*ids.shape, width):
            raise ValueError(
                self._text("output_gradients", "has a wrong shape", (*ids.shape, width), d.shape)
            )
        if is_on_device(ids):
            return
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise IndexError(
                self._text("inputs", "has an id out of range", f"0 <= id < {size}", bad)
            )

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = x.reshape(-1), d.reshape(-1, d.shape[-1])
        if self.padding_idx is not None:
            counts = x != self.padding_idx
            x, d = x[counts], d[counts]
        self._a += np.bincount(x, minlength=len(self._a)).astype(self.real)
        add_gram(self._g, d.astype(self.real, copy=False))
        # MindSpore keeps the counts, which its optimizer divides by its batch size.
        self._count(max(len(x), 1), 1 if self._is_compatible else len(x), len(x))


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

    def __init__(self, weight: Any, bias: Any = None, eps: float = 1e-5) -> None:
        super().__init__(weight, bias)
        self.eps = positive_float(type(self).__name__, "eps", eps, np.float32)

    def _check_weight(self) -> None:
        if self.weight.ndim < 1 or self.weight.size == 0:
            expected = "the shape that is normalized over"
            raise ValueError(self._text("weight", "has a wrong shape", expected, self.weight.shape))

    @property
    def _bias_shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def _empty(self) -> tuple[FloatArray, FloatArray]:
        return np.zeros(self.weight.size, self.real), np.zeros(self.weight.size, self.real)

    def _check(self, x: Any, d: Any) -> None:
        self._check_floating(inputs=x, output_gradients=d)
        shape = self.weight.shape
        if x.shape[max(x.ndim - len(shape), 0) :] != shape:
            raise ValueError(
                self._text("inputs", "has a wrong shape", f"(..., {str(shape)[1:]}", x.shape)
            )
        if d.shape != x.shape:
            raise ValueError(self._text("output_gradients", "has a wrong shape", x.shape, d.shape))

    def capture_covariances(self, *_: Any, **__: Any) -> None:
        """Refused: a layer normalization has diagonal factors.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            self._text("capture_covariances", "is not for this layer", "capture", "a call of it")
        )

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        x, d = (array.reshape(-1, self.weight.size) for array in (x, d))
        x, d = x.astype(self.real, copy=False), d.astype(self.real, copy=False)
        centered = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centered).mean(axis=1, keepdims=True)
        normalized = centered / np.sqrt(variance + self.real(self.eps))
        self._a += np.square(d * normalized).sum(axis=0)
        self._g += np.square(d).sum(axis=0)
        self._count(len(x), len(x), len(x))
