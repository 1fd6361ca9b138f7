"""Gradient transforms of a step, which come before the rule: decay, loss scale, factors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.rule import Prologue
from ...kernels.rules.gradient import COUPLED_DECAY, SCALE
from ...ops.runtime.device import DeviceArray
from ..base.groups import ParameterOptions
from ..base.numbers import number_of
from .layout import Batch, KernelCall

if TYPE_CHECKING:
    from ...kernels.cuda.device.part import DevicePart


class Conditioning:
    """MindSpore's order: coupled weight decay, then the loss scale.

    Coupled is a weight decay that is part of the gradient; else the rule has it.
    """

    is_measured = False  # whether `complete` has to be called, with scalars for each tensor
    leaves_decay = True  # whether the rule applies the weight decays, if it has any
    scales_decay = True  # whether a decay that joins the gradient is multiplied by the loss scale
    options_on_device: tuple[Any, ...] = ()  # on which `measured_on_device` depends too
    is_of_one_step = False  # whether what that returns is of no use in another step

    def __init__(
        self,
        options: Sequence[ParameterOptions],
        loss_scale: float | DeviceArray,
        *,
        coupled: bool,
    ) -> None:
        self._options, self.loss_scale, self._is_coupled = options, loss_scale, coupled
        # The mean is taken of decay and gradient together, as in MindSpore: where a gradient is
        # centralized the decay has joined it before the kernel reads it.
        self._joins = np.array([not option.centralize for option in options])
        # Compiled in front of the rule. Whether a decay acts is decided once for all parameters,
        # or each subset with a gradient would have a kernel of its own.
        self.prologue = self._parts(coupled and any(o.decay != 0.0 for o in options))

    def _parts(self, decays: bool) -> Prologue:
        return ((COUPLED_DECAY,) if decays else ()) + self._scaling

    @property
    def _scaling(self) -> Prologue:
        # What is on a device may become another one.
        is_one = not isinstance(self.loss_scale, DeviceArray) and self.loss_scale == 1.0
        return () if is_one else (SCALE,)

    @property
    def _scale(self) -> float:
        """The loss scale; one on a device is waited for."""
        return number_of(self.loss_scale)

    def centralized_with(self, i: int, decay: float) -> float:  # noqa: ARG002
        """The factor with which parameter ``i`` joins its gradient before that is centralized."""
        return decay * self._scale if self._is_coupled else 0.0

    def scalars(self, i: int, decay: float) -> tuple[float, ...]:
        """The scalars of the gradient transform of parameter ``i``, in the order of its parts."""
        if not self.prologue:
            return ()
        scale = self._scale
        # A centralized gradient already holds the decay: it is centralized with it.
        return self._of_parts(0.0 if self._options[i].centralize else decay * scale, scale)

    def _of_parts(self, decay: float, scale: float) -> tuple[float, ...]:
        scalars = [part.scalars(decay, scale) for part in self.prologue if part.scalars]
        return tuple(itertools.chain.from_iterable(scalars))

    def acts(self, positions: np.ndarray) -> np.ndarray:
        """Whether the weight decay of each parameter is part of its gradient transform; bool."""
        acts: np.ndarray = self._joins[positions]
        return acts

    def complete(self, call: KernelCall, column: dict[str, int]) -> None:
        """Fill in, in their columns, the scalars of dense tensors that have to be measured."""

    def measured_on_device(
        self,
        batch: Batch,  # noqa: ARG002
        gradients: np.ndarray,  # noqa: ARG002
        column: dict[str, int],  # noqa: ARG002
    ) -> DevicePart | None:
        """The launches that fill in these scalars on a device, for gradients at some addresses."""
        return None
