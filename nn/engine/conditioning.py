"""The gradient transforms of a step, before the rule: decay, scale, factors, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from ...kernels.quiet import quiet
from ...kernels.rule import Prologue, columns
from ...kernels.rules.gradient import CLIP, COUPLED_DECAY, SCALE
from ...ops.runtime.device import DeviceArray
from ...ops.runtime.errors import reject
from ...ops.runtime.row_step import RowGradient, row_squares
from ...ops.runtime.step import squares_at
from ..base.groups import ParameterOptions
from ..base.numbers import item
from .batch import NOTHING, Batch, KernelCall, index_lists


def transform_scalars(
    prologue: Prologue, decay: float, factor: float, bound: float = 0.0
) -> tuple[float, ...]:
    """The scalars of gradient transforms, in their order."""
    scalars = [transform.scalars(decay, factor, bound) for transform in prologue]
    return tuple(chain.from_iterable(scalars))


class Conditioning:
    """Gradient transforms in MindSpore's order: coupled weight decay, then the loss scale.

    A coupled weight decay is added to the gradient; otherwise the rule applies it.
    """

    is_measured = False  # whether `fill_measured_scalars` is called, for scalars of each tensor
    leaves_decay = True  # whether the rule applies the weight decays, if it has any
    measures_rows = False  # whether row-sparse gradients are measured too
    bound = 0.0  # the bound of elements that are clipped

    def __init__(
        self, options: Sequence[ParameterOptions], loss_scale: float | DeviceArray, *,
        coupled: bool,
    ) -> None:  # fmt: skip
        self._options, self.loss_scale, self._is_coupled = options, loss_scale, coupled
        # The prologue is compiled with the rule. Whether a decay acts is decided once for all
        # parameters; otherwise each subset that has a gradient would need a kernel of its own.
        self.prologue = self._parts(coupled and any(o.decay != 0.0 for o in options))

    def _parts(self, decays: bool) -> Prologue:
        return ((COUPLED_DECAY,) if decays else ()) + self._scaling

    @property
    def _scaling(self) -> Prologue:
        # A loss scale on a device may change in each step.
        is_one = not isinstance(self.loss_scale, DeviceArray) and self.loss_scale == 1.0
        return () if is_one else (SCALE,)

    @property
    def _scale(self) -> float:
        """The loss scale; the host waits for one on a device."""
        return item(self.loss_scale)

    def centralized_with(self, i: int, decay: float) -> float:  # noqa: ARG002
        """The factor by which parameter ``i`` is added to its gradient before centralization."""
        return decay * self._scale if self._is_coupled else 0.0

    def scalars(self, i: int, decay: float) -> tuple[float, ...]:
        """The scalars of the gradient transforms of parameter ``i``, in their order."""
        if not self.prologue:
            return ()
        scale = self._scale
        # A centralized gradient already contains the decay: as in MindSpore, the mean is that of
        # their sum.
        return self._of_parts(0.0 if self._options[i].centralize else decay * scale, scale)

    def _of_parts(self, decay: float, scale: float) -> tuple[float, ...]:
        return transform_scalars(self.prologue, decay, 1.0 / scale, self.bound)

    @property
    def joins(self) -> np.ndarray:
        """Whether the step adds the weight decay of each parameter to its gradient; bool."""
        return np.array([not option.centralize for option in self._options])

    @quiet  # what is infinite or NaN reaches the parameter: no reason to stop half way
    def measure(self, calls: Sequence[KernelCall]) -> None:
        """Fill in the scalars of calls that follow from measuring their tensors."""
        for call in calls:
            if call.rates is not NOTHING:
                kernel = call.update.kernel
                self.fill_measured_scalars(call, columns(kernel.rule, kernel.prologue))

    def fill_measured_scalars(self, call: KernelCall, column: dict[str, int]) -> None:
        """Fill in the scalars of one call, in their columns."""


class Clipping(Conditioning):
    """Gradient transforms in Keras's order: the loss scale, clipping, then coupled weight decay.

    With a ``bound`` each element is clipped, in the pass of the step. With a ``limit`` the norm of
    each tensor is clipped: it is measured first, and the scale of the gradient gets the factor. A
    gradient is centralized before, without the decay.
    """

    def __init__(
        self, options: Sequence[ParameterOptions], loss_scale: float | DeviceArray, *,
        coupled: bool, bound: float | None, limit: float | None,
    ) -> None:  # fmt: skip
        self.bound, self.limit = bound or 0.0, limit or 0.0
        self.is_measured = self.measures_rows = limit is not None
        super().__init__(options, loss_scale, coupled=coupled)

    def _parts(self, decays: bool) -> Prologue:
        clip = (SCALE,) if self.is_measured else (*self._scaling, CLIP)
        return clip + ((COUPLED_DECAY,) if decays else ())

    def centralized_with(self, i: int, decay: float) -> float:  # noqa: ARG002
        """Zero: the decay is added after clipping."""
        return 0.0

    def scalars(self, i: int, decay: float) -> tuple[float, ...]:  # noqa: ARG002
        """The scalars of the parts; factors of norms come from `fill_measured_scalars`."""
        return self._of_parts(decay, self._scale)

    def fill_measured_scalars(self, call: KernelCall, column: dict[str, int]) -> None:
        """Multiply the scale of each tensor by ``limit / max(norm, limit)``."""
        batch, scale = call.batch, 1.0 / self._scale
        if batch.row_sparse:
            squares = _squares_of_rows(batch, call.gradients)
        else:
            sizes = np.diff(batch.variables.table.first)
            squares = squares_at(batch.g, call.gradients, sizes).tolist()
        norms = [math.sqrt(square) * scale for square in squares]
        # A norm that is not finite gives NaN: such a gradient must not look clipped.
        factors = [self.limit / max(n, self.limit) if math.isfinite(n) else math.nan for n in norms]
        call.update.hp[:, column["grad_scale"]] = np.array(factors) * scale


def _squares_of_rows(batch: Batch, gradients: Sequence[RowGradient]) -> list[float]:
    """The sum of squares of each row-sparse gradient of a batch, duplicates summed first.

    Raises:
        ValueError: a gradient has only a part of the batch, as for a table that is sharded.
        IndexError: an index is out of range.
    """
    variables, lists = batch.variables, index_lists(batch, gradients)
    for label, gradient in zip(batch.labels, gradients, strict=True):
        n, whole = len(gradient.indices), gradient.source.whole_length
        if n < whole:
            wrong, got = "needs the norm of a whole gradient", f"{n} of {whole}"
            reject(ValueError, label, "clipnorm", wrong, "all occurrences of the batch", got)
    each = zip(batch.labels, lists, variables.tensors, gradients, strict=True)
    return [
        row_squares(label, [own], [(arrays[0].shape, gradient)], batch.g, variables.real)
        for label, own, arrays, gradient in each
    ]
