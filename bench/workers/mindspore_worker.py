"""MindSpore's steps, for the interpreter in which MindSpore is installed.

Everything runs in graph mode: single operators in PyNative mode take longer (2.10: up to
twice as long for ``FusedSparseAdam``) and keep a thread busy between the steps. MindSpore
searches for the best number of threads during the first steps, which is why its warm-up is
long.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import Job, serve  # type: ignore[import-not-found]

# Powers of the betas at the first step, learning rate, betas, epsilon.
_SCALARS = (0.9, 0.999, 1e-3, 0.9, 0.999, 1e-8)


_MOMENTS = ("var", "m", "v")
# Attributes, variables and scalars of each operator; then come the gradient and the indices.
_OPERATORS: dict[str, tuple[dict[str, float], tuple[str, ...], tuple[float, ...]]] = {
    "Adam": ({}, _MOMENTS, _SCALARS),
    "ApplyAdamWithAmsgradV2": ({}, (*_MOMENTS, "vhat"), _SCALARS),
    "FusedSparseAdam": ({}, _MOMENTS, _SCALARS),
    "FusedSparseLazyAdam": ({}, _MOMENTS, _SCALARS),
    "FusedSparseFtrl": (
        {"lr": 1e-3, "l1": 0.0, "l2": 0.0, "lr_power": -0.5},
        ("var", "accum", "linear"),
        (),
    ),
    "FusedSparseProximalAdagrad": ({}, ("var", "accum"), (1e-3, 0.0, 0.0)),
}


class MindSpore:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self.ms: Any = import_module("mindspore")
        self.version: str = self.ms.__version__
        self.ms.set_device("CPU")
        self.ms.set_context(mode=self.ms.GRAPH_MODE)
        if threads != os.cpu_count():  # else its own choice, which is all of them
            self.ms.device_context.cpu.op_tuning.threads_num(threads)

    def job(self, request: dict[str, Any]) -> Job:
        """One step of the form on zeros of the given shape."""
        (shape,) = request["shapes"]
        form = request["form"]
        batches = self._batches(request["inputs"], shape)
        if form.startswith("nn.Adam"):
            variable = self._variable("w", shape)
            amsgrad = "use_amsgrad" in form
            call = self.ms.nn.Adam([variable], learning_rate=1e-3, use_amsgrad=amsgrad)
            calls: list[Any] = [lambda batch=batch: call(batch) for batch in batches]
        else:
            call, variable = self._operator(form.removeprefix("ops."), shape)
            calls = [lambda batch=batch: call(*batch) for batch in batches]
        count = 0

        def step() -> None:
            nonlocal count
            calls[count % len(calls)]()
            count += 1
            # The call returns before the work is done; reading the variable waits for it.
            variable.asnumpy()

        return Job(step)

    def _batches(self, inputs: dict[str, list[str]], shape: list[int]) -> list[tuple[Any, ...]]:
        """Per step the gradient, and the indices as int32, the only type that is taken."""
        tensor = self.ms.Tensor
        if "indices" not in inputs:
            return [(tensor(np.load(path).reshape(shape)),) for path in inputs["gradient"]]
        return [
            (tensor(np.load(values)), tensor(np.load(indices).astype(np.int32)))
            for values, indices in zip(inputs["gradient"], inputs["indices"], strict=True)
        ]

    def _variable(self, name: str, shape: list[int]) -> Any:
        return self.ms.Parameter(self.ms.Tensor(np.zeros(shape, np.float32)), name=name)

    def _operator(self, name: str, shape: list[int]) -> tuple[Any, Any]:
        """A compiled cell that applies the operator to its own variables, and the first of them."""
        nn = self.ms.nn
        make = getattr(self.ms.ops.operations.nn_ops, name)
        attributes, names, scalars = _OPERATORS[name]
        variables = [self._variable(name, shape) for name in names]
        numbers = tuple(self.ms.Tensor(np.float32(value)) for value in scalars)

        class Cell(nn.Cell):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.variables = self_variables
                self.numbers = numbers
                self.operator = make(**attributes)

            def construct(self, *inputs: Any) -> Any:
                return self.operator(*self.variables, *self.numbers, *inputs)

        self_variables = self.ms.ParameterTuple(variables)
        return Cell(), variables[0]


if __name__ == "__main__":
    serve(MindSpore)
