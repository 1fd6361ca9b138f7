"""PyTorch's interface as it is measured: parameters with gradients in ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...ops import RowTensor
from ..errors import BenchError
from ..workers import worker_protocol
from ..workers.worker_protocol import LR, Case, Replica
from .subject import DTYPES, Prepared, Subject, Traffic, Use, clock, written_zeros
from .workloads import Kind

SAME_PROCESS = "torch-in-process"
"""Name of PyTorch where its step is taken in the process of ours."""


def _subject(
    name: str,
    updated: int,
    dense: str | None = None,
    rows: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Subject:
    """A class of ``fusestep.nn.torch``.

    Args:
        name: of the class.
        updated: how many arrays of a parameter's size a step reads and writes.
        dense: what peers are asked for when all gradients are dense; None: not measured.
        rows: what they are asked for when gradients are row-sparse, and the rows that occur take
            the step; None: not measured.
        options: of the class.
    """
    moved, uses = Traffic(updated), dict[Kind, Use]()
    if dense is not None:
        uses["dense"] = Use(dense, moved, in_process=True)
    if rows is not None:
        uses["rows"] = Use(rows, moved, in_process=True)
        uses["mixed"] = Use(rows, moved)  # PyTorch would need two optimizers
    return Subject(uses, partial(_prepare, name, options or {}))


def forms_here(
    algorithm: str, kind: str, dtype: str, threads: int
) -> dict[str, Callable[[Case], Replica]]:
    """PyTorch's forms of a step for this process, as its worker has them; of dense ones the fused.

    Empty where it is not installed.
    """
    if find_spec("torch") is None:
        return {}
    folder = str(Path(worker_protocol.__file__).parent)  # where workers find each other
    if folder not in sys.path:
        sys.path.append(folder)
    found = import_module("torch_worker").Torch(threads).forms(algorithm, kind, dtype)
    return {form: found[form] for form in found if kind != "dense" or "fused=True" in form}


def _prepare(name: str, options: Mapping[str, Any], parameters: list[np.ndarray]) -> Prepared:
    """The class of this name, on tensors in the memory of the parameters.

    On a device they are copies, in PyTorch's own memory.

    Raises:
        BenchError: PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise BenchError("needs PyTorch: pip install 'fusestep[torch]'")
    torch, fused = import_module("torch"), import_module("...nn.torch", __package__)
    tensors = [torch.nn.Parameter(_tensor(torch, array)) for array in parameters]
    optimizer = getattr(fused, name)(tensors, lr=LR, **options)

    def load(gradients: Sequence[Any]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = _gradient(torch, gradient)

    load([written_zeros(array) for array in parameters])
    optimizer.step()  # makes the states
    updated = []
    for tensor in tensors:
        states = (s for s in optimizer.state[tensor].values() if s.shape == tensor.shape)
        updated.append(tuple(_array(torch, one) for one in (tensor.detach(), *states)))
    return Prepared(lambda _: optimizer.step(), updated, [], load)


def _tensor(torch: Any, array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        if not torch.cuda.is_available():
            raise BenchError("needs PyTorch with CUDA")
        return _tensor(torch, clock().get(array)).to("cuda")
    if array.dtype == DTYPES["bfloat16"]:  # torch does not take NumPy's
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(torch: Any, tensor: Any) -> Any:
    """The memory of a tensor as an array; on a device the tensor itself."""
    if tensor.is_cuda:
        return tensor
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.numpy()


def _gradient(torch: Any, gradient: Any) -> Any:
    """Dense, or sparse and uncoalesced as ``nn.Embedding(sparse=True)`` leaves it."""
    if not isinstance(gradient, RowTensor):
        return _tensor(torch, gradient)
    indices, values = (_tensor(torch, array) for array in (gradient.indices, gradient.values))
    shape = gradient.dense_shape
    return torch.sparse_coo_tensor(indices[None], values, shape, check_invariants=False)


TORCH: dict[str, Subject] = {
    "nn.torch.Adam": _subject("Adam", 3, "adam"),
    "nn.torch.AdamW": _subject("AdamW", 3, "adamw", options={"weight_decay": 0.01}),
    "nn.torch.SGD": _subject("SGD", 1, "sgd", "sgd-rows"),
    "nn.torch.SGD(momentum)": _subject("SGD", 2, "momentum", options={"momentum": 0.9}),
    "nn.torch.Adagrad": _subject("Adagrad", 2, "adagrad", "adagrad-rows"),
    "nn.torch.LazyAdam": _subject("LazyAdam", 3, None, "adam-lazy"),
}
