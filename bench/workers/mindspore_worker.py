"""MindSpore's steps, for the interpreter in which MindSpore is installed.

Its optimizers, in graph mode: in PyNative mode they take longer (2.10: up to twice as long on
rows) and keep a thread busy between the steps. The operators that they call take as long when they
are called alone. MindSpore searches for the best number of threads during the first steps, which
is why its warm-up is long.

What is left out has no CPU kernel in 2.10 (Lamb, LARS), does not do on the CPU what it says
(``nn.Momentum`` ignores ``use_nesterov``), or takes duplicate rows one after the other
(``SparseApply*``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import LR, Case, Job, Replica, serve

# Forms and arguments of the optimizers.
_RMSPROP = {"decay": 0.9, "epsilon": 1e-10}
_L1_L2 = {"l1": 1e-4, "l2": 1e-4}
_OPTIMIZERS: dict[str, dict[str, dict[str, Any]]] = {
    "adam": {"nn.Adam": {}},
    "amsgrad": {"nn.Adam(use_amsgrad)": {"use_amsgrad": True}},
    "adamw": {"nn.AdamWeightDecay": {"eps": 1e-8, "weight_decay": 0.01}},
    "sgd": {"nn.SGD": {}},
    "momentum": {"nn.Momentum": {"momentum": 0.9}, "nn.SGD(momentum)": {"momentum": 0.9}},
    "nesterov": {"nn.SGD(nesterov)": {"momentum": 0.9, "nesterov": True}},
    "rmsprop": {"nn.RMSProp": _RMSPROP},
    "rmsprop-momentum": {"nn.RMSProp(momentum)": {**_RMSPROP, "momentum": 0.9}},
    "rmsprop-centered": {"nn.RMSProp(centered)": {**_RMSPROP, "centered": True}},
    "adagrad": {"nn.Adagrad": {"accum": 0.0}},
    "proximal-adagrad": {"nn.ProximalAdagrad": {"accum": 0.0, **_L1_L2}},
    "ftrl": {"nn.FTRL": {"initial_accum": 0.0}},
    "adafactor": {"nn.AdaFactor": {"relative_step": False, "beta1": None}},
    "adam-lazy": {"nn.LazyAdam": {}},
}
# Steps on rows, each with that of the dense parameters beside a table, whose optimizers take both.
_WITH_ROWS = {
    "adam-lazy": "adam-lazy",
    "adam-rows": "adam",
    "ftrl-rows": "ftrl",
    "proximal-adagrad-rows": "proximal-adagrad",
}
_ONLY_FLOAT32 = {"amsgrad", "ftrl", *_WITH_ROWS}


class MindSpore:
    """The library, on ``threads`` threads."""

    warm_up = 25
    keeps_memory = True

    def __init__(self, threads: int) -> None:
        self.ms: Any = import_module("mindspore")
        self.version: str = self.ms.__version__
        self.ms.set_device("CPU")
        self.ms.set_context(mode=self.ms.GRAPH_MODE)
        if threads != os.cpu_count():  # else its own choice, which is all of them
            self.ms.device_context.cpu.op_tuning.threads_num(threads)

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """The optimizers, and two functions."""
        if dtype == "bfloat16" or (dtype == "float16" and algorithm in _ONLY_FLOAT32):
            return {}
        functions = {
            ("gather", "rows"): ("ops.Gather", self._gather),
            ("clip-by-global-norm", "dense"): ("ops.clip_by_global_norm", self._clip),
        }
        if (algorithm, kind) in functions:
            form, make = functions[algorithm, kind]
            return {form: partial(self._replica, make, is_function=True)}
        name = _WITH_ROWS.get(algorithm, "") if kind != "dense" else algorithm
        if kind == "dense" and name == "adam-lazy":
            return {}
        return {
            form: partial(self._replica, partial(self._optimizer_cell, arguments))
            for form, arguments in _OPTIMIZERS.get(name, {}).items()
        }

    def _replica(
        self, make: Callable[[Case, list[Any]], Any], case: Case, is_function: bool = False
    ) -> Replica:
        """A cell, compiled at its first call, with its inputs; or a function, with its results."""
        variables = [
            self.ms.Parameter(self._tensor(given.start, case), name=f"parameter_{index}")
            for index, given in enumerate(case.parameters)
        ]
        cell, inputs = make(case, variables), self._inputs(case)
        results = list(variables)

        def load() -> None:
            if case.fresh:
                inputs[:] = self._inputs(case)

        def step() -> None:
            found = cell(*inputs)
            if is_function:
                results[:] = found
            results[-1].asnumpy()  # waits, if the call has not

        return Replica(Job(step, load), lambda: [result.asnumpy() for result in results])

    def _tensor(self, array: np.ndarray, case: Case) -> Any:
        return self.ms.Tensor(array.astype(case.dtype))

    def _inputs(self, case: Case) -> list[Any]:
        """The gradients; after row-sparse values the indices, as int32, which all take."""
        inputs = []
        for given in case.parameters:
            inputs.append(self._tensor(given.gradient, case))
            if given.indices is not None:
                inputs.append(self.ms.Tensor(given.indices.astype(np.int32)))
        return inputs

    def _optimizer_cell(self, arguments: dict[str, Any], case: Case, variables: list[Any]) -> Any:
        """An optimizer; row-sparse gradients are put together on the way to it."""
        nn = self.ms.nn
        name = case.form.partition("(")[0].removeprefix("nn.")
        optimizer = getattr(nn, name)(variables, learning_rate=LR, **arguments)
        if case.kind != "dense":
            optimizer.target = "CPU"  # without it duplicates are not merged
        row_tensor = import_module("mindspore.common.sparse_tensor").RowTensorInner
        # For each parameter the place of its gradient among the inputs, and the shape of a table.
        places = [0, *itertools.accumulate(1 + (p.indices is not None) for p in case.parameters)]
        shapes = [None if p.indices is None else p.shape for p in case.parameters]
        plan = tuple(zip(places, shapes))

        class Cell(nn.Cell):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.optimizer = optimizer
                self.plan = plan

            def construct(self, *inputs: Any) -> Any:
                gradients: tuple[Any, ...] = ()
                for position, shape in self.plan:
                    gradient = inputs[position]
                    if shape is not None:
                        gradient = row_tensor(inputs[position + 1], gradient, shape)
                    gradients = (*gradients, gradient)
                return self.optimizer(gradients)

        return Cell()

    def _gather(self, _: Case, variables: list[Any]) -> Any:
        gather, (table,) = self.ms.ops.Gather(), variables

        def look_up(_: Any, indices: Any) -> Any:
            return (gather(table, indices, 0),)

        return self.ms.jit(look_up)

    def _clip(self, *_: Any) -> Any:
        clip = self.ms.ops.clip_by_global_norm

        def clipped(*gradients: Any) -> Any:
            return clip(gradients, 1.0)

        return self.ms.jit(clipped)


if __name__ == "__main__":
    serve(MindSpore)
