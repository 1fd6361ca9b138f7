"""Gradients clipped tensor by tensor, after weight decay and loss scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...kernels.rule import Prologue
from ...kernels.rules.gradient import TRUST
from ...kernels.rules.norm import SCALED
from ...ops.runtime.step import DenseUpdate
from ..engine.batch import KernelCall
from ..engine.conditioning import Conditioning

LARGEST_NORM = 1.0


class ClippedConditioning(Conditioning):
    """THOR's order: weight decay, the loss scale, then a norm of each tensor of at most 1."""

    is_measured = True

    def _parts(self, decays: bool) -> Prologue:
        return (*super()._parts(decays), TRUST)

    def fill_measured_scalars(self, call: KernelCall, column: dict[str, int]) -> None:
        """Fill in the factor of each tensor: 1 over its norm where that is above 1."""
        batch, hp, before = call.batch, call.update.hp, self.prologue[:-1]
        fields = [name for part in before for name in part.hp]
        scalars = np.ones((len(hp), 1 + len(fields)), hp.dtype)
        scalars[:, 1:] = hp[:, [column[name] for name in fields]]
        variables, hp_of = replace(batch.variables, s=()), np.arange(len(hp))
        measured = variables, call.gradients, batch.g, scalars, hp_of
        squares = DenseUpdate(SCALED, before, *measured).sums()
        norms = np.maximum(np.sqrt(squares[:, 0]), LARGEST_NORM)
        hp[:, column["trust_ratio"]] = LARGEST_NORM / norms
