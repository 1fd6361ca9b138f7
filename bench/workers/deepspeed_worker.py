"""DeepSpeed's optimizers for the CPU, for the interpreter in which it is installed.

DeepSpeed compiles them when they are first asked for, which takes minutes, and keeps the result
(under ``~/.cache/torch_extensions``, where torch is not told otherwise).
"""

# ruff: noqa: B905  # Python 3.8 has no zip(strict=True)

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from torch_arrays import arrays_of, gradient_of, parameters_of  # type: ignore[import-not-found]
from worker_protocol import Case, Job, Replica, serve  # type: ignore[import-not-found]

_LR = 1e-3
# Module, class and arguments of each step; of those on row-sparse gradients as well.
_OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "adamw": ("adam", "DeepSpeedCPUAdam", {"adamw_mode": True, "weight_decay": 0.01}),
    "adagrad": ("adagrad", "DeepSpeedCPUAdagrad", {}),
}
_ON_ROWS = {"adagrad-rows": "adagrad"}
_HALF_STATES = "fp32_optimizer_states=False"


class DeepSpeed:
    """The library, on ``threads`` threads."""

    warm_up = 3

    def __init__(self, threads: int) -> None:
        # Ninja, which compiles, is beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        import_module("torch").set_num_threads(threads)
        self.version: str = import_module("deepspeed").__version__

    def forms(self, algorithm: str, kind: str, dtype: str) -> list[str]:
        """States are float32, or of the type of the parameters."""
        name = _ON_ROWS.get(algorithm) if kind != "dense" else algorithm
        if name not in _OPTIMIZERS:
            return []
        form = _OPTIMIZERS[name][1]
        if kind != "dense":
            return [f"coalesce, {form}"] if dtype == "float32" else []
        return [form] if dtype == "float32" else [form, f"{form}({_HALF_STATES})"]

    def replica(self, case: Case) -> Replica:
        """Parameters with an optimizer, which takes row-sparse gradients coalesced."""
        module, name, options = _OPTIMIZERS[_ON_ROWS.get(case.algorithm, case.algorithm)]
        parameters = parameters_of(case.parameters, case.dtype)
        originals = [gradient_of(given, case.dtype) for given in case.parameters]
        optimizer = getattr(import_module(f"deepspeed.ops.{module}"), name)(
            parameters, lr=_LR, fp32_optimizer_states=_HALF_STATES not in case.form, **options
        )
        # Adagrad (0.19) overwrites the last elements of a gradient whose size is no multiple of 16.
        fresh = case.fresh or module == "adagrad"

        def load() -> None:
            for parameter, gradient in zip(parameters, originals):
                parameter.grad = gradient.clone() if fresh else gradient

        def step() -> None:
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            optimizer.step()

        return Replica(Job(step, load), lambda: arrays_of(parameters))


if __name__ == "__main__":
    serve(DeepSpeed)
