"""A convolution as THOR sees it: the patches of its input are the rows of a dense layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...ops.runtime.errors import reject
from ..base.arguments import is_int
from .factors import FloatArray, add_gram
from .layers import ThorLayer

Pair = tuple[int, int]
Margins = tuple[Pair, Pair]
_CHUNK_BYTES = 8 << 20
"""Patches are made for so many samples at a time that they stay in the cache."""


class ThorConv2d(ThorLayer):
    """A 2-d convolution (cross-correlation), as a dense layer on patches of its input.

    With ``P`` the patches under the layer's own stride, padding and dilation, ``T`` positions in
    each of ``N`` images, and ``d`` the output gradients of the single samples::

        A = P'P / (N*T)        G = d'd / (N*T)

    Args:
        weight: ``(out, channels, kh, kw)`` `Parameter` or array.
        bias: ``(out,)``, or None. It takes the plain gradient.
        stride: int or pair of ints >= 1.
        padding: int or pair of ints >= 0, rows and columns of zeros on either side; ``"valid"``:
            none; ``"same"``: so many that the output has ``ceil(size / stride)`` rows and columns,
            the odd one behind.
        dilation: int or pair of ints >= 1.
        groups: only 1.

    ``capture(inputs, output_gradients)`` takes ``(N, channels, H, W)`` and ``(N, out, OH, OW)``.

    Raises:
        TypeError: a kind or dtype does not fit.
        ValueError: a shape or value does not fit, or ``groups`` is above 1.

    Source: MindSpore's ``Conv2dThor``; Grosse and Martens (2016), arXiv:1602.01407.

    >>> import numpy as np
    >>> layer = ThorConv2d(np.zeros((4, 1, 3, 3), np.float32), stride=2, padding=1)
    >>> layer.capture(np.ones((2, 1, 8, 8), np.float32), np.ones((2, 4, 4, 4), np.float32))
    >>> layer.normalizers
    (16.0, 16.0)
    """

    _FORM = (4,), "(out, channels, kh, kw)"

    def __init__(
        self, weight: Any, bias: Any = None, stride: int | Pair = 1, padding: int | Pair | str = 0,
        dilation: int | Pair = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(weight, bias)
        self._kernel: Pair = self.weight.shape[2], self.weight.shape[3]
        self.stride = self._pair("stride", stride, 1)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            expected = "an int, a pair, 'same' or 'valid'"
            self._reject(ValueError, "padding", "is unknown", expected, repr(padding))
        is_named = isinstance(padding, str)
        self.padding: Any = padding if is_named else self._pair("padding", padding, 0)
        self.dilation = self._pair("dilation", dilation, 1)
        (self.groups, _) = self._pair("groups", groups, 1)
        if self.groups > 1:
            fix = "; give weight and bias as plain Parameters: they take the plain gradient"
            reject(ValueError, type(self).__name__, "groups", "is not supported", "1", groups, fix)

    def _pair(self, name: str, value: Any, least: int) -> Pair:
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2 or not all(map(is_int, pair)):
            got = repr(value) if isinstance(value, tuple | list) else type(value).__name__
            self._reject(TypeError, name, "has a wrong type", "an int or a pair of ints", got)
        if min(pair) < least:
            self._reject(ValueError, name, "is out of range", f"at least {least}", value)
        return int(pair[0]), int(pair[1])

    def _margins(self, size: Pair) -> Margins:
        """Zeros before and behind the rows and the columns of an image."""
        if self.padding == "same":
            return same_margins(size, self._kernel, self.stride, self.dilation)
        rows, columns = (0, 0) if self.padding == "valid" else self.padding
        return (rows, rows), (columns, columns)

    def _check(self, x: Any, d: Any) -> None:
        self._check_floating(inputs=x, output_gradients=d)
        out, channels = self.weight.shape[:2]
        if x.ndim != 4 or x.shape[1] != channels:
            expected = f"(N, {channels}, H, W)"
            self._reject(ValueError, "inputs", "has a wrong shape", expected, x.shape)
        size = (x.shape[2], x.shape[3])
        padded = tuple(n + sum(m) for n, m in zip(size, self._margins(size), strict=True))
        reach = tuple(d * (k - 1) + 1 for k, d in zip(self._kernel, self.dilation, strict=True))
        if padded[0] < reach[0] or padded[1] < reach[1]:
            wrong, expected = "is smaller than the kernel", f"at least {reach} with its padding"
            self._reject(ValueError, "inputs", wrong, expected, padded)
        positions = tuple(
            (n - r) // s + 1 for n, r, s in zip(padded, reach, self.stride, strict=True)
        )
        self._check_shape("output_gradients", d, (len(x), out, *positions))

    def _add(self, x: FloatArray, d: FloatArray) -> None:
        real, size, dilation = self.real, (x.shape[2], x.shape[3]), self.dilation
        margins = self._margins(size)
        if self.is_compatible:  # means over the batch, patches under "same" without dilation
            x, d = (a.astype(real, copy=False).mean(axis=0, keepdims=True) for a in (x, d))
            dilation = 1, 1
            margins = same_margins(size, self._kernel, self.stride, dilation)
        n_patches, n_positions = 0, d.shape[2] * d.shape[3]
        row_bytes = (len(self._a) + len(self._g)) * max(n_positions, 1) * np.dtype(real).itemsize
        chunk = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, len(x), chunk):
            images, gradients = (a[start : start + chunk].astype(real, copy=False) for a in (x, d))
            rows = patches(images, self._kernel, self.stride, margins, dilation)
            add_gram(self._a, rows)
            n_patches += rows.shape[1]
            by_channel = np.ascontiguousarray(gradients.transpose(1, 0, 2, 3))
            add_gram(self._g, by_channel.reshape(len(self._g), -1))
        positions = n_patches, len(x) * n_positions
        self._count(len(x), positions, positions)


def same_margins(size: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Margins:
    """The zeros with which the output has ``ceil(size / stride)`` rows and columns."""
    margins = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        missing = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        margins.append((missing // 2, missing - missing // 2))
    return margins[0], margins[1]


def patches(
    x: FloatArray, kernel: Pair, stride: Pair, margins: Margins, dilation: Pair
) -> FloatArray:
    """The patches of a convolution over ``[N, C, H, W]``, one a position: ``[C*kh*kw, N*OH*OW]``.

    Rows are in the order of a weight, columns in that of an output.
    """
    if any(sum(margins, ())):
        rows, columns = margins
        height, width = x.shape[2] + sum(rows), x.shape[3] + sum(columns)
        padded = np.zeros((*x.shape[:2], height, width), x.dtype)
        padded[:, :, rows[0] : height - rows[1], columns[0] : width - columns[1]] = x
        x = padded
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    windows = sliding_window_view(x, reach, axis=(2, 3))
    seen = windows[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    ordered = seen.transpose(1, 4, 5, 0, 2, 3)
    return np.ascontiguousarray(ordered).reshape(x.shape[1] * kernel[0] * kernel[1], -1)
