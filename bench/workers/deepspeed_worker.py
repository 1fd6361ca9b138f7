"""DeepSpeed's optimizers for the CPU, for the interpreter in which it is installed.

DeepSpeed compiles them when they are first asked for, which takes minutes, and keeps the result
(under ``~/.cache/torch_extensions``, where torch is not told otherwise).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch_worker import stepped
from worker_protocol import LR, Case, Replica, serve

# Module, class and arguments of each step.
_OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "adamw": ("adam", "DeepSpeedCPUAdam", {"adamw_mode": True, "weight_decay": 0.01}),
    "adagrad": ("adagrad", "DeepSpeedCPUAdagrad", {}),
}


class DeepSpeed:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        # Ninja, which compiles, is beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        import_module("torch").set_num_threads(threads)
        self.version: str = import_module("deepspeed").__version__

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """States are float32, or of the type of the parameters."""
        is_float32 = dtype == "float32"
        if kind != "dense":
            if algorithm != "adagrad-rows" or not is_float32:
                return {}
            return {"coalesce, DeepSpeedCPUAdagrad": partial(_replica, "adagrad", {})}
        if algorithm not in _OPTIMIZERS:
            return {}
        name = _OPTIMIZERS[algorithm][1]
        states: dict[str, dict[str, Any]] = {name: {}}
        if not is_float32:
            states[f"{name}(fp32_optimizer_states=False)"] = {"fp32_optimizer_states": False}
        return {form: partial(_replica, algorithm, given) for form, given in states.items()}


def _replica(algorithm: str, states: dict[str, Any], case: Case) -> Replica:
    """Parameters with an optimizer, which takes row-sparse gradients coalesced."""
    module, name, options = _OPTIMIZERS[algorithm]
    optimizer = getattr(import_module(f"deepspeed.ops.{module}"), name)

    def make(parameters: list[Any]) -> Callable[[], object]:
        made = optimizer(parameters, lr=LR, **options, **states)

        def step() -> None:
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            made.step()

        return step

    # Adagrad (0.19) overwrites the last elements of a gradient whose size is no multiple of 16.
    replica: Replica = stepped(case, make, fresh=module == "adagrad")
    return replica


if __name__ == "__main__":
    serve(DeepSpeed)
