"""MXNet's steps, for the interpreter in which MXNet is installed.

Its update operators for SGD and Adam, one call per parameter. The row-sparse gradient that they
take has every row once: the backward of ``Embedding`` adds up the duplicates, so it belongs to the
step. The bias correction of Adam is in the learning rate, where MXNet's own optimizers have it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import LR, Case, Job, Parameter, Replica, serve

_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
# Steps on row-sparse gradients, and the same step on dense ones. The operators are lazy if they
# are not told otherwise.
_WITH_ROWS = {
    "adam-lazy": "adam",
    "adam-rows": "adam, every row",
    "sgd-rows": "sgd",
    "momentum-lazy": "momentum",
}


class MXNet:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        del threads  # the environment says it
        self.mx: Any = import_module("mxnet")
        nd = self.nd = self.mx.nd
        self.version: str = self.mx.__version__
        self._one = nd.ones(1)  # the scale of gradients, where a number is made an array
        # By algorithm: its name, the number of states, and the operator with what it takes beside
        # the learning rate.
        self._steps: dict[str, tuple[str, int, Callable[..., object]]] = {
            "sgd": ("sgd_update", 0, nd.sgd_update),
            "momentum": ("sgd_mom_update", 1, partial(nd.sgd_mom_update, momentum=0.9)),
            "adam": ("adam_update", 2, partial(nd.adam_update, **_ADAM)),
            "adam, every row": (
                "adam_update(lazy_update=False)",
                2,
                partial(nd.adam_update, lazy_update=False, **_ADAM),
            ),
            "adamw": ("contrib.adamw_update", 2, self._adamw),
        }

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """One operator.

        There is no bfloat16; float16 is emulated on a CPU, 40 times slower than float32.
        """
        name = algorithm if kind == "dense" else _WITH_ROWS.get(algorithm, "")
        if dtype != "float32" or name not in self._steps:
            return {}
        form, count, operator = self._steps[name]
        form = form if kind == "dense" else f"Embedding.backward, {form}"
        return {form: partial(self._replica, count, operator, name.startswith("adam"))}

    def _replica(
        self, count: int, operator: Callable[..., object], is_adam: bool, case: Case
    ) -> Replica:
        """Arrays and an operator on them."""
        nd = self.nd
        weights = [nd.array(given.start, dtype=case.dtype) for given in case.parameters]
        for given, w in zip(case.parameters, weights):
            if given.indices is not None:
                w.attach_grad(stype="row_sparse")
        states = [[nd.zeros(w.shape, dtype=w.dtype) for _ in range(count)] for w in weights]
        gradients = [nd.array(given.gradient, dtype=case.dtype) for given in case.parameters]
        lookups = self._look_up(case.parameters, weights)
        originals, numbers = list(gradients), itertools.count(1)

        def load() -> None:
            if case.fresh:
                gradients[:] = [gradient.copy() for gradient in originals]
                nd.waitall()

        def step() -> None:
            t = next(numbers)
            rate = LR * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) if is_adam else LR
            for w, g, looked_up, state in zip(weights, gradients, lookups, states):
                if looked_up is not None:
                    looked_up.backward(g, retain_graph=True)
                    g = w.grad
                operator(w, g, *state, lr=rate, out=w)
            nd.waitall()

        return Replica(Job(step, load), lambda: [np.asarray(w.asnumpy()) for w in weights])

    def _look_up(self, parameters: list[Parameter], weights: list[Any]) -> list[Any]:
        """The rows of each table, whose backward can be asked for again and again."""
        found: list[Any] = []
        with self.mx.autograd.record():
            for given, w in zip(parameters, weights):
                if given.indices is None:
                    found.append(None)
                    continue
                indices = self.nd.array(given.indices, dtype="int64")
                sizes = {"input_dim": given.shape[0], "output_dim": given.shape[1]}
                found.append(self.nd.Embedding(indices, w, sparse_grad=True, **sizes))
        self.nd.waitall()
        return found

    def _adamw(self, *arrays: Any, lr: float, out: Any) -> None:
        """Torch's: the decay is that of the plain learning rate."""
        rates = {"lr": lr, "eta": 1.0, "wd": LR * 0.01}
        self.nd.contrib.adamw_update(*arrays, self._one, out=out, **rates, **_ADAM)


if __name__ == "__main__":
    serve(MXNet)
