"""PyTorch's interface as it is measured: parameters with gradients in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import BenchError
from ..workers.worker_protocol import LR
from .subject import DTYPES, Prepare, Prepared, Subject, Use
from .traffic import Traffic
from .workloads import Kind

SAME_PROCESS = "torch-in-process"
"""Name of PyTorch where its step is taken in the process of ours."""


def _subject(
    name: str,
    updated: int,
    dense: str | None = None,
    rows: str | None = None,
    options: Mapping[str, Any] | None = None,
    of_rows: str | None = None,
) -> Subject:
    """A class of ``fusestep.nn.torch``.

    Args:
        name: of the class.
        updated: how many arrays of a parameter's size a step reads and writes.
        dense: what peers are asked for when all gradients are dense; None: not measured.
        rows: likewise when they are row-sparse, and the rows that occur take the step.
        options: of the class.
        of_rows: PyTorch's class of the latter; by default that of this name.
    """
    options, moved = options or {}, Traffic(updated)
    uses: dict[Kind, Use] = {}
    if dense is not None:
        uses["dense"] = Use(dense, moved, beside=_beside(name, {**options, "fused": True}))
    if rows is not None:
        uses["rows"] = Use(rows, moved, beside=_beside(of_rows or name, options))
        uses["mixed"] = Use(rows, moved)  # PyTorch would need two optimizers
    return Subject(uses, partial(_prepare, name, options))


def _beside(name: str, options: Mapping[str, Any]) -> dict[str, Prepare]:
    """PyTorch's own class, where it is installed."""
    if find_spec("torch") is None:
        return {}

    def prepare(parameters: list[np.ndarray]) -> Prepared:
        optimizer, load = _optimizer("torch.optim", name, parameters, options)
        return Prepared(lambda _: optimizer.step(), [], [], load)

    said = ", ".join(f"{key}={value}" for key, value in options.items())
    return {f"{SAME_PROCESS} {name}({said})": prepare}


def _prepare(name: str, options: Mapping[str, Any], parameters: list[np.ndarray]) -> Prepared:
    """The class of this name, on tensors in the memory of the parameters.

    Raises:
        BenchError: PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise BenchError("needs PyTorch: pip install 'fusestep[torch]'")
    optimizer, load = _optimizer("...nn.torch", name, parameters, options)
    load([np.zeros_like(array) for array in parameters])
    optimizer.step()  # makes the states
    (group,) = optimizer.param_groups
    updated: list[tuple[np.ndarray, ...]] = [
        (array, *(_array(s) for s in optimizer.state[t].values() if s.shape == t.shape))
        for array, t in zip(parameters, group["params"], strict=True)
    ]
    return Prepared(lambda _: optimizer.step(), updated, [], load)


def _optimizer(
    module: str, name: str, parameters: list[np.ndarray], options: Mapping[str, Any]
) -> tuple[Any, Callable[[Sequence[Any]], None]]:
    """One on tensors in the memory of the parameters, and what hands gradients over to it."""
    torch = import_module("torch")
    tensors = [torch.nn.Parameter(_tensor(torch, array)) for array in parameters]
    optimizer = getattr(import_module(module, __package__), name)(tensors, lr=LR, **options)

    def load(gradients: Sequence[Any]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = _gradient(torch, gradient)

    return optimizer, load


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
    "nn.torch.Adam": _subject("Adam", 3, "adam"),
    "nn.torch.AdamW": _subject("AdamW", 3, "adamw", options={"weight_decay": 0.01}),
    "nn.torch.SGD": _subject("SGD", 1, "sgd", "sgd-rows"),
    "nn.torch.SGD(momentum)": _subject("SGD", 2, "momentum", options={"momentum": 0.9}),
    "nn.torch.Adagrad": _subject("Adagrad", 2, "adagrad", "adagrad-rows"),
    "nn.torch.LazyAdam": _subject("LazyAdam", 3, None, "adam-lazy", of_rows="SparseAdam"),
}
