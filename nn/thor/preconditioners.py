"""Preconditioners of THOR: the inverses that are kept for a layer, and their use."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...ops.runtime.errors import reject
from ..base.parameter import writable
from .factors import FactorError, FloatArray, inverse, packed_times, times_packed
from .layers import ThorEmbedding, ThorLayer, ThorLayerNorm

Inverses = tuple[FloatArray, FloatArray]


class Scratch:
    """Arrays between the two products of a layer; one for all layers of a type, and no copies."""

    def __init__(self) -> None:
        self._arrays: dict[Any, FloatArray] = {}

    def take(self, shape: tuple[int, ...], real: Any) -> FloatArray:
        """An array that holds anything, until the next one is taken."""
        size = math.prod(shape)
        if real not in self._arrays or self._arrays[real].size < size:
            self._arrays[real] = np.empty(size, real)
        return self._arrays[real][:size].reshape(shape)

    def __reduce__(self) -> Any:
        return Scratch, ()


class LayerOptions(NamedTuple):
    """The options of a step for its layers."""

    damping: float  # lambda of this step
    batch_size: float  # samples that the loss averages over
    loss_scale: float
    scratch: Scratch

    @property
    def sample_scale(self) -> float:
        """The square of what makes gradients of a mean loss those of the single samples."""
        return (self.batch_size / self.loss_scale) ** 2


class Preconditioner:
    """One layer: ``g <- Ginv g Ainv`` for its weight, seen as a matrix of ``out`` rows.

    ``positions`` are the places of the parameters on which it acts, in optimizer order, and which
    of the parameters of the layer they are.
    """

    # MindSpore treats the gradient of a layer normalization anew in every step.
    needs_capture = True

    def __init__(self, layer: ThorLayer, positions: dict[int, int]) -> None:
        self.layer = layer
        self.positions = positions
        a, _, g, _ = layer.covariances
        self.inverses: Inverses = (np.zeros_like(a), np.zeros_like(g))  # packed
        self.refreshes = np.zeros(1, np.int64)  # how often they were computed
        self._results: dict[int, FloatArray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_results": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.refreshes = writable(self.refreshes)
        first, second = self.inverses
        self.inverses = (writable(first), writable(second))

    @property
    def has_factors(self) -> bool:
        """Whether the inverses are those of something."""
        return int(self.refreshes[0]) > 0

    def state(self, weight: str) -> dict[str, np.ndarray]:
        """The arrays to save, by name."""
        first, second = self.inverses
        return {
            f"matrix_a_inv.{weight}": first,
            f"matrix_g_inv.{weight}": second,
            f"refreshes.{weight}": self.refreshes,
        }

    def _label(self, factor: str) -> str:
        return f"thor: factor {factor} of layer {self.layer.name!r}"

    def inverted(self, options: LayerOptions) -> Inverses:
        """The inverses of what the layer has captured, or a `FactorError`; nothing is kept."""
        a, a_weight, g, g_weight = self.layer.covariances
        a_positions, g_positions = self.layer.normalizers
        a_damping, g_damping = (math.sqrt(options.damping / n) for n in (a_positions, g_positions))
        # Of a convolution both factors stand for a sum over positions, split between them.
        split = math.sqrt(1.0 / a_positions)
        a_inverse = inverse(self._label("A"), a, 1.0 / a_weight, a_damping)
        g_inverse = inverse(self._label("G"), g, options.sample_scale / g_weight, g_damping)
        if split != 1.0:
            a_inverse *= a_inverse.dtype.type(split)
            g_inverse *= g_inverse.dtype.type(split)
        return a_inverse, g_inverse

    def keep(self, inverses: Inverses) -> None:
        """Take the inverses for this and the next steps."""
        self.inverses = inverses
        # In a new array: the step may have to put the attributes of before back.
        self.refreshes = self.refreshes + 1

    def precondition(
        self, position: int, gradient: FloatArray, inverses: Inverses, options: LayerOptions
    ) -> FloatArray:
        """The preconditioned gradient of a parameter, in an array that the layer keeps."""
        real = self.layer.real
        if position not in self._results:
            self._results[position] = np.empty(gradient.shape, real)
        out, g = self._results[position], gradient.astype(real, copy=False)
        self._apply(self.positions[position], g, inverses, options, out)
        return out

    def _apply(
        self, _k: int, g: FloatArray, inverses: Inverses, options: LayerOptions, out: FloatArray
    ) -> None:
        """``out`` becomes the preconditioned ``g`` of parameter ``k`` of the layer."""
        matrix = g.reshape(len(g), -1)
        between = options.scratch.take(matrix.shape, self.layer.real)
        times_packed(matrix, inverses[0], between)
        packed_times(inverses[1], between, out.reshape(matrix.shape))


class EmbeddingPreconditioner(Preconditioner):
    """An embedding: ``g <- (Ainv[:, None] * g) Ginv`` with a diagonal A."""

    def inverted(self, options: LayerOptions) -> Inverses:
        """Return the inverses of A and G, each as an array; that of A has its diagonal alone."""
        a, a_weight, g, g_weight = self.layer.covariances
        root = math.sqrt(options.damping)
        frequencies = a.astype(np.float64) / a_weight
        if self.layer.is_compatible:
            frequencies /= options.batch_size
        where, scale = self._label("G"), options.sample_scale / g_weight
        g_inverse = inverse(where, g, scale, root, transposes=not self.layer.is_compatible)
        return (1.0 / (frequencies + root)).astype(a.dtype), g_inverse

    def _apply(
        self, _k: int, g: FloatArray, inverses: Inverses, options: LayerOptions, out: FloatArray
    ) -> None:
        between = options.scratch.take(g.shape, self.layer.real)
        np.multiply(g, inverses[0][:, None], out=between)
        times_packed(between, inverses[1], out)


class LayerNormPreconditioner(Preconditioner):
    """A layer normalization: ``g <- g / (F + damping)`` with diagonal factors F."""

    def inverted(self, options: LayerOptions) -> Inverses:
        """Return the inverses of the diagonal factors of weight and bias."""
        a, weight, g, _ = self.layer.covariances
        inverses = []
        for name, squares in (("weight", a), ("bias", g)):
            factor = squares.astype(np.float64) * (options.sample_scale / weight)
            if not np.isfinite(factor).all():
                k = int(np.argmin(np.isfinite(factor)))
                where, got = self._label(f"of the {name}"), f"{factor[k]} in element {k}"
                wrong = "is not finite"
                reject(FactorError, where, "the mean square", wrong, "finite numbers", got)
            inverses.append((1.0 / (factor + options.damping)).astype(squares.dtype))
        return inverses[0], inverses[1]

    def _apply(
        self, k: int, g: FloatArray, inverses: Inverses, _options: LayerOptions, out: FloatArray
    ) -> None:
        np.multiply(g, inverses[k].reshape(g.shape), out=out)


class CompatibleLayerNorm(LayerNormPreconditioner):
    """MindSpore's layer normalization: ``g <- g / (g^2/batch_size + sqrt(damping))``."""

    needs_capture = False

    def state(self, weight: str) -> dict[str, np.ndarray]:  # noqa: ARG002
        """No arrays: nothing is kept between steps."""
        return {}

    def _apply(
        self, _k: int, g: FloatArray, _inverses: Inverses, options: LayerOptions, out: FloatArray
    ) -> None:
        real = self.layer.real
        plain = g * real(1.0 / options.loss_scale)
        squares = np.square(plain) * real(1.0 / options.batch_size)
        direction = plain / (squares + real(math.sqrt(options.damping)))
        # The loss scale is divided out once more, in the step.
        np.multiply(direction, real(options.loss_scale), out=out)


def kind_of(layer: ThorLayer) -> type[Preconditioner]:
    """The class of preconditioners for a layer of this kind."""
    if isinstance(layer, ThorEmbedding):
        return EmbeddingPreconditioner
    if isinstance(layer, ThorLayerNorm):
        return CompatibleLayerNorm if layer.is_compatible else LayerNormPreconditioner
    return Preconditioner
