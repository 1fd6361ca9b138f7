"""THOR for parameters on a CUDA device: its states, and copies for its steps, are on the host.

A step needs whole matrices, so it cannot go through them chunk by chunk, as other optimizers do
that work on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...ops.runtime.errors import message
from ...ops.runtime.launch import launch_on
from ...ops.runtime.row_step import RowGradient
from ..base.parameter import Parameter
from ..engine.conditioning import Conditioning
from ..engine.reader import read_gradient
from ..fused import FusedOptimizer


class HostCopies(FusedOptimizer):
    """An optimizer that computes on the host, with copies of what lives on a CUDA device.

    It takes dense gradients only.
    """

    _stays_on_host = True

    def _derive(self) -> None:
        # Of parameters on the host there are no copies; they are stepped themselves.
        self._copies = tuple(
            Parameter(np.empty(p.shape, p.dtype), p.name) if p.is_on_device else p
            for p in self.parameters
        )
        super()._derive()

    @property
    def _stepped(self) -> tuple[Parameter, ...]:
        return self._copies

    def _read_dense(self, parameter: Parameter, gradient: Any) -> Any:
        """A checked gradient that is not None.

        Raises:
            TypeError: its kind or dtype does not fit.
            ValueError: its shape or place does not fit, or it is row-sparse.
        """
        read = read_gradient(self._name, parameter, gradient)
        if isinstance(read, RowGradient):
            name = f"gradient of {parameter.name!r}"
            raise ValueError(message(self._name, name, "is row-sparse", *self._rows_need))
        return read

    @contextmanager
    def _on_host(self, gradients: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The gradients of a step where it is computed; those of a device are checked first.

        Raises:
            TypeError, ValueError: as `_read_dense`.
            RuntimeError: a CUDA graph is being captured.
        """
        if self._device is None:
            yield gradients
            return
        read = {
            i: self._read_dense(self.parameters[i], gradient)
            for i, gradient in enumerate(gradients)
            if gradient is not None
        }
        # On return, the streams of the gradients wait for the parameters too.
        with launch_on([*(p.array for p in self.parameters), *read.values()], None):
            copies = {i: array.numpy() for i, array in read.items()}
            yield tuple(copies.get(i) for i in range(len(gradients)))

    def _step_for_device(self, gradients: tuple[Any, ...], conditioning: Conditioning) -> None:
        """A step with gradients on the host: the parameters come there, and go back."""
        from ...kernels.cuda.device.backend import copy_in, copy_out

        moved = [
            (p.array.address, copied.data)
            for p, copied, gradient in zip(self.parameters, self._copies, gradients, strict=True)
            if gradient is not None
        ]
        with launch_on([p.array for p in self.parameters], None) as launch:
            for address, copied in moved:
                copy_out(copied, address, launch.stream)
            plan = self._plan(gradients, conditioning)
            if plan is None:
                return
            self._run(*plan, conditioning)
            for address, copied in moved:
                copy_in(address, copied, launch.stream)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_copies"]
        return state
