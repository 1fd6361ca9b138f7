"""PyTorch's interface as it is measured: parameters with gradients in ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import BenchError
from .subject import DTYPES, Prepared, Subject, Use
from .traffic import Traffic
from .workloads import Kind

_LR = 1e-3


@dataclass(frozen=True)
class TorchOptimizer:
    """A class of ``fusestep.nn.torch``.

    Args:
        name: of the class.
        updated: how many arrays of a parameter's size a step reads and writes.
        dense: what peers are asked for when all gradients are dense; None: not measured.
        rows: likewise when they are row-sparse, and the rows that occur take the step.
        options: of the class.
    """

    name: str
    updated: int
    dense: str | None = None
    rows: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uses(self) -> Mapping[Kind, Use]:
        """What it does with each kind of gradients."""
        uses: dict[Kind, Use] = {}
        if self.dense is not None:
            uses["dense"] = Use(self.dense, Traffic(self.updated))
        if self.rows is not None:
            uses["rows"] = uses["mixed"] = Use(self.rows, Traffic(self.updated))
        return uses

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All."""
        return tuple(DTYPES)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """On tensors in the memory of the parameters.

        Raises:
            BenchError: PyTorch is not installed.
        """
        if find_spec("torch") is None:
            raise BenchError("needs PyTorch: pip install 'fusestep[torch]'")
        torch = import_module("torch")
        fused = import_module("...nn.torch", __package__)
        tensors = [torch.nn.Parameter(_tensor(torch, array)) for array in parameters]
        optimizer = getattr(fused, self.name)(tensors, lr=_LR, **self.options)

        def load(gradients: Sequence[Any]) -> None:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = _gradient(torch, gradient)

        load([np.zeros_like(array) for array in parameters])
        optimizer.step()  # makes the states
        updated: list[tuple[np.ndarray, ...]] = [
            (array, *(_array(s) for s in optimizer.state[t].values() if s.shape == t.shape))
            for array, t in zip(parameters, tensors, strict=True)
        ]
        return Prepared(lambda _: optimizer.step(), updated, [], load)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == DTYPES["bfloat16"]:  # torch does not take NumPy's
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Any) -> np.ndarray:
    torch = import_module("torch")
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy()
        return bits.view(DTYPES["bfloat16"])
    array: np.ndarray = tensor.numpy()
    return array


def _gradient(torch: Any, gradient: Any) -> Any:
    """Dense, or sparse and uncoalesced as ``nn.Embedding(sparse=True)`` leaves it."""
    if isinstance(gradient, np.ndarray):
        return _tensor(torch, gradient)
    indices, values = torch.from_numpy(gradient.indices)[None], _tensor(torch, gradient.values)
    shape = gradient.dense_shape
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


TORCH: dict[str, Subject] = {
    "nn.torch.Adam": TorchOptimizer("Adam", 3, "adam"),
    "nn.torch.AdamW": TorchOptimizer("AdamW", 3, "adamw", options={"weight_decay": 0.01}),
    "nn.torch.SGD": TorchOptimizer("SGD", 1, "sgd", "sgd-rows"),
    "nn.torch.SGD(momentum)": TorchOptimizer("SGD", 2, "momentum", options={"momentum": 0.9}),
    "nn.torch.Adagrad": TorchOptimizer("Adagrad", 2, "adagrad", "adagrad-rows"),
    "nn.torch.LazyAdam": TorchOptimizer("LazyAdam", 3, None, "adam-lazy"),
}
