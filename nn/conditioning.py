"""What happens to the gradients of a step before the rule: decay, loss scale, factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..kernels.rules.gradient import COUPLED_DECAY, SCALE
from ..kernels.rules.rule import Prologue
from .groups import ParameterOptions
from .layout import Batch


class Conditioning:
    """MindSpore's order: coupled weight decay, then the loss scale.

    Args:
        options: the parameters with their options.
        loss_scale: gradients are divided by it.
        coupled: whether weight decay is part of the gradient; else the rule has it.

    Attributes:
        prologue: the parts that are compiled in front of the rule.
        is_measured: whether `complete` has to be called, with scalars for each tensor.
    """

    is_measured = False

    def __init__(
        self, options: Sequence[ParameterOptions], loss_scale: float, *, coupled: bool
    ) -> None:
        self._options = options
        self._loss_scale = loss_scale
        self._coupling = loss_scale if coupled else 0.0
        self.prologue = self._parts(coupled and any(o.decay != 0.0 for o in options))

    def _parts(self, decays: bool) -> Prologue:
        scaled = (SCALE,) if self._loss_scale != 1.0 else ()
        return ((COUPLED_DECAY,) if decays else ()) + scaled

    def centralized_with(self, i: int, decay: float) -> float:  # noqa: ARG002
        """The factor with which parameter ``i`` joins its gradient before that is centralized."""
        return decay * self._coupling

    def left_to_rule(self, decays: Sequence[float]) -> Sequence[float]:
        """The weight decays that the rule applies, if it has any."""
        return decays

    def scalars(self, i: int, decay: float) -> tuple[float, ...]:
        """The scalars of the prologue of parameter ``i``, in the order of its parts."""
        scalars: tuple[float, ...] = ()
        if COUPLED_DECAY in self.prologue:
            # A centralized gradient already holds the decay: it is centralized with it.
            factor = 0.0 if self._options[i].centralize else decay * self._coupling
            scalars += (factor, 0.0)
        if SCALE in self.prologue:
            scalars += (1.0 / self._loss_scale,)
        return scalars

    def complete(
        self,
        batch: Batch,
        gradients: np.ndarray,
        hp: np.ndarray,
        column: dict[str, int],
        rates: np.ndarray,
        decays: np.ndarray,
    ) -> None:
        """Fill in the scalars that have to be measured.

        Args:
            batch: dense tensors.
            gradients: int64 ``[T]``: addresses of their gradients.
            hp: ``[T, F]``: their scalars.
            column: where each scalar is.
            rates: float64 ``[T]``: learning rates.
            decays: float64 ``[T]``: weight decays.
        """

    def complete_on_device(
        self,
        *arguments: Any,
    ) -> AbstractContextManager[Callable[[np.ndarray], None]]:
        """As `complete`, for tensors on a device and without waiting for it.

        Args:
            arguments: those of `complete`, and the launch.

        Returns:
            A context in which to launch the step. It gives what enqueues the change of the
            scalars on the device, called with the addresses of the rows of ``hp`` there.
        """
        raise NotImplementedError
