"""Dense steps of Adafactor, whose second moments of matrices are those of rows and columns."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.cpu.adafactor.step import FactoredStep, FactoredTable
from ...kernels.cpu.parallel import Prepared
from ...kernels.element import Kernel, kernel
from ...kernels.quiet import quiet
from ...kernels.rules.adafactor import size_factors
from ...kernels.rules.rule import Rule, columns
from ...kernels.tables import FactoredTensor
from ...ops.norm import squares_at
from ...ops.runtime import cuda
from .conditioning import Conditioning
from .host import prepared_measured
from .layout import Batch
from .plan import Call

if TYPE_CHECKING:
    from ...kernels.cuda.device.part import Part

SizeOptions = tuple[float, float, bool]
"""Epsilon of a parameter's size, threshold of clipping, whether steps are relative to sizes."""


@dataclass(frozen=True)
class FactoredUpdate:
    """A `Factored` of Adafactor."""

    rule: Rule  # for tensors whose second moments are kept in full
    options: SizeOptions
    has_average: bool  # whether there is a first moment
    tables: MutableMapping[Batch, FactoredTable]  # of matrices on the host, which are made once

    @quiet
    def prepared(self, call: Call, conditioning: Conditioning) -> Prepared:
        """See `Factored`."""
        batch, gradients = call.batch, call.gradients
        if not _has_matrices(batch):
            return prepared_measured(call, conditioning, self._complete)
        variables, column = batch.variables, columns(self.rule, conditioning.prologue)
        if conditioning.is_measured:
            conditioning.complete(call, column)
        if batch not in self.tables:
            self.tables[batch] = FactoredTable(matrices_of(batch))
        squares = np.zeros((len(gradients), 2))
        if self.options[2]:
            sizes = np.diff(variables.table.first)
            squares[:, 0] = squares_at(variables.w, variables.table.addresses[:, 0], sizes)
        step = FactoredStep(
            self._kernel(batch, conditioning), self.tables[batch], gradients, call.hp
        )
        squares[:, 1] = step.direction_squares()
        self._complete(squares, call, column)
        return step

    def _complete(self, squares: np.ndarray, call: Call, column: dict[str, int]) -> None:
        sizes = np.maximum(1, np.diff(call.batch.variables.table.first)).tolist()
        found = [
            size_factors(of_w, of_u, size, *self.options)
            for (of_w, of_u), size in zip(squares.tolist(), sizes, strict=True)
        ]
        of_step, of_decay = np.array(found).T
        call.hp[:, column["step"]] *= of_step
        call.hp[:, column["decay"]] *= of_decay

    def part(self, batch: Batch, gradients: np.ndarray, conditioning: Conditioning) -> Part:
        """See `Factored`."""
        variables, prologue = batch.variables, conditioning.prologue
        measured = conditioning.measured_on_device(batch, gradients, columns(self.rule, prologue))
        adafactor, dense = cuda.adafactor.step, cuda.dense
        options = adafactor.Options(*self.options)
        if _has_matrices(batch):
            compiled, tensors = self._kernel(batch, conditioning), matrices_of(batch)
            step = adafactor.MatrixStep(compiled, tensors, gradients, options)
        else:
            compiled = kernel(self.rule, prologue, variables.w, batch.g, variables.s)
            sizes, addresses = np.diff(variables.table.first), variables.table.addresses
            follow = adafactor.rms_kernel(compiled, dense.step.TensorRow, options)
            step = dense.step.DenseStep(compiled, addresses, gradients, sizes, follow)
        parts: Part = cuda.device.part.Parts(measured, step)
        return parts

    def _kernel(self, batch: Batch, conditioning: Conditioning) -> Kernel:
        variables = batch.variables
        average = variables.s[:1] if self.has_average else ()
        return kernel(self.rule, conditioning.prologue, variables.w, batch.g, average)


def _has_matrices(batch: Batch) -> bool:
    # All of a batch have the same states, so all are matrices or none is.
    return is_factored(batch.variables.tensors[0][0])


def is_factored(parameter: Any) -> bool:
    """Whether its second moments are kept as those of rows and columns."""
    return bool(parameter.ndim >= 2 and parameter.size > 0)


def matrices_of(batch: Batch) -> list[FactoredTensor]:
    """The tensors of a batch that have row and column states, as lists of matrices."""
    variables = batch.variables
    of_each = zip(variables.tensors, variables.table.addresses.tolist(), strict=True)
    return [FactoredTensor.of(a[0].shape, addresses) for a, addresses in of_each]
