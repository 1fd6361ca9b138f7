"""FBGEMM's table batched embeddings on the CPU: a backward that updates the tables.

For the interpreter in which it is installed. All tables are in one module, as its users have them.
Where rows are not pooled, bags have one index, and the lookup before the backward is not timed.
Dense parameters beside the tables get torch's fused optimizer, as in models that are built on it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from torch_worker import arrays_of, stepped, tensor
from worker_protocol import LR, Case, Job, Parameter, Replica, parts_of, serve

# The optimizer in the tables, and that of torch for the dense parameters.
_OPTIMIZERS = {
    "sgd-rows": ("EXACT_SGD", "SGD"),
    "adagrad-rows": ("EXACT_ADAGRAD", "Adagrad"),
    "row-wise-adagrad-rows": ("EXACT_ROWWISE_ADAGRAD", "Adagrad"),
}
_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


class FBGEMM:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.version: str = import_module("fbgemm_gpu").__version__
        self._ops: Any = import_module(_TRAINING)

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Exact optimizers: duplicate rows are added up first; bags of one index, or none."""
        part, _, rule = algorithm.partition(" ") if kind == "pooled" else ("", "", algorithm)
        rule = rule or "sgd-rows" if part else rule  # a forward has an optimizer, too
        if dtype != "float32" or kind == "dense" or rule not in _OPTIMIZERS:
            return {}
        inside, beside = _OPTIMIZERS[rule]
        if part:
            return {f"{inside}, pooling SUM": partial(self._pooled, inside, part)}
        dense = f" + {beside}(fused=True)" if kind == "mixed" else ""
        return {
            f"{inside}, pooling {pooling}{dense}": partial(self._replica, inside, beside, pooling)
            for pooling in ("SUM", "NONE")
        }

    def _pooled(self, inside: str, part: str, case: Case) -> Replica:
        """A forward of all tables, and a backward with the step."""
        tables = self._tables(case.parameters, inside, "SUM")

        def values() -> Any:
            return arrays_of([tables.looked_up] if part == "forward" else tables.weights())

        return parts_of(part, tables.look_up, tables.backward, values)

    def _replica(self, inside: str, beside: str, pooling: str, case: Case) -> Replica:
        """Tables that know their optimizer, and parameters with one."""
        is_table = [given.indices is not None for given in case.parameters]
        sparse = [given for given in case.parameters if given.indices is not None]
        tables = self._tables(sparse, inside, pooling)
        others = [given for given in case.parameters if given.indices is None]
        optimizer = partial(getattr(self.torch.optim, beside), lr=LR, fused=True)
        dense = stepped(
            replace(case, parameters=others),
            lambda parameters: optimizer(parameters).step if parameters else lambda: None,
        )

        def load() -> None:
            tables.look_up(case.fresh)
            dense.job.load()

        def step() -> None:
            tables.backward()
            dense.job.step()

        def values() -> list[np.ndarray]:
            weights, rest = iter(arrays_of(tables.weights())), iter(dense.values())
            return [next(weights if table else rest) for table in is_table]

        return Replica(Job(step, load), values)

    def _tables(self, given: list[Parameter], optimizer: str, pooling: str) -> _Tables:
        ops = self._ops
        place = (ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(*one.shape, *place) for one in given],
            optimizer=ops.OptimType[optimizer],
            learning_rate=LR,
            eps=1e-10,
            pooling_mode=ops.PoolingMode[pooling],
        )
        # Without pooling rows of all tables come one below the other.
        return _Tables(module, given, axis=0 if pooling == "NONE" else 1)


class _Tables:
    """Tables, the indices into them, and the gradient of what they look up."""

    def __init__(self, module: Any, given: list[Parameter], axis: int) -> None:
        self._module = module
        self._indices = tensor(np.concatenate([one.indices for one in given]), "int64")
        lengths = [np.full(len(one.gradient), one.bag or 1) for one in given]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        self._offsets = tensor(offsets, "int64")
        self._gradient = tensor(np.concatenate([one.gradient for one in given], axis), "float32")
        self.looked_up: Any = None
        for weight, one in zip(self.weights(), given):
            weight.copy_(tensor(one.start, "float32"))

    def weights(self) -> list[Any]:
        """The tables themselves."""
        return [weight.detach() for weight in self._module.split_embedding_weights()]

    def look_up(self, renew: bool = False) -> None:
        """Get the rows, whose backward is the step; the gradient as a new array if asked."""
        if renew:
            self._gradient = self._gradient.clone()
        self.looked_up = self._module(self._indices, self._offsets)

    def backward(self) -> None:
        """Update the tables."""
        self.looked_up.backward(self._gradient)


if __name__ == "__main__":
    serve(FBGEMM)
