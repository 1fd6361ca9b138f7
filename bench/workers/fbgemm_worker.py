"""FBGEMM's table batched embeddings on the CPU: a backward that updates the tables.

For the interpreter in which it is installed. The lookup before it is not timed. Dense parameters
beside the tables get torch's fused optimizer, as in models that are built on FBGEMM.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from torch_arrays import LR, arrays_of, stepped, tensor  # type: ignore[import-not-found]
from worker_protocol import Case, Job, Parameter, Replica, serve  # type: ignore[import-not-found]

# The optimizer in the tables, and that of torch for the dense parameters.
_OPTIMIZERS = {
    "sgd-rows": ("EXACT_SGD", "SGD"),
    "adagrad-rows": ("EXACT_ADAGRAD", "Adagrad"),
    "row-wise-adagrad-rows": ("EXACT_ROWWISE_ADAGRAD", "Adagrad"),
}
_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


class FBGEMM:
    """The library, on ``threads`` threads."""

    warm_up = 3

    def __init__(self, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.version: str = import_module("fbgemm_gpu").__version__
        self._ops: Any = import_module(_TRAINING)

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Exact optimizers: duplicate rows are added up first; bags of one index, or none."""
        if dtype != "float32" or kind == "dense" or algorithm not in _OPTIMIZERS:
            return {}
        inside, beside = _OPTIMIZERS[algorithm]
        dense = f" + {beside}(fused=True)" if kind == "mixed" else ""
        return {
            f"{inside}, pooling {pooling}{dense}": partial(self._replica, inside, beside, pooling)
            for pooling in ("SUM", "NONE")
        }

    def _replica(self, inside: str, beside: str, pooling: str, case: Case) -> Replica:
        """Tables that know their optimizer, and parameters with one."""
        is_table = [given.indices is not None for given in case.parameters]
        tables = [
            self._table(given, inside, pooling)
            for given in case.parameters
            if given.indices is not None
        ]
        others = [given for given in case.parameters if given.indices is None]
        optimizer = partial(getattr(self.torch.optim, beside), lr=LR, fused=True)
        dense = stepped(
            replace(case, parameters=others),
            lambda parameters: optimizer(parameters).step if parameters else lambda: None,
        )

        def load() -> None:
            for table in tables:
                table.look_up(case.fresh)
            dense.job.load()

        def step() -> None:
            looked_up = [table.looked_up for table in tables]
            self.torch.autograd.backward(looked_up, [table.gradient for table in tables])
            dense.job.step()

        def values() -> list[np.ndarray]:
            weights, rest = iter(arrays_of(t.weight() for t in tables)), iter(dense.values())
            return [next(weights if table else rest) for table in is_table]

        return Replica(Job(step, load), values)

    def _table(self, given: Parameter, optimizer: str, pooling: str) -> _Table:
        ops = self._ops
        place = (ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(*given.shape, *place)],
            optimizer=ops.OptimType[optimizer],
            learning_rate=LR,
            eps=1e-10,
            pooling_mode=ops.PoolingMode[pooling],
        )
        return _Table(module, given)


class _Table:
    """A table, the indices into it, and the gradient of what they look up."""

    def __init__(self, module: Any, given: Parameter) -> None:
        self._module = module
        self._indices = tensor(given.indices, "int64")
        self._offsets = tensor(np.arange(len(given.indices) + 1), "int64")
        self.gradient = tensor(given.gradient, "float32")
        self.looked_up: Any = None
        self.weight().copy_(tensor(given.start, "float32"))

    def weight(self) -> Any:
        """The table itself."""
        return self._module.split_embedding_weights()[0].detach()

    def look_up(self, renew: bool) -> None:
        """Get the rows, whose backward is the step; the gradient as a new array if asked."""
        if renew:
            self.gradient = self.gradient.clone()
        self.looked_up = self._module(self._indices, self._offsets)


if __name__ == "__main__":
    serve(FBGEMM)
