"""From NumPy to torch and back, for the workers of torch and of what is built on it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import Parameter  # type: ignore[import-not-found]


def tensor(array: np.ndarray, dtype: str) -> Any:
    """A copy in torch's own memory, which is better aligned than NumPy's."""
    torch = import_module("torch")
    return torch.from_numpy(array).to(getattr(torch, dtype), copy=True)


def parameters_of(given: Iterable[Parameter], dtype: str) -> list[Any]:
    """Torch's parameters at their start."""
    torch = import_module("torch")
    return [torch.nn.Parameter(tensor(parameter.start, dtype)) for parameter in given]


def gradient_of(given: Parameter, dtype: str) -> Any:
    """Dense, or sparse and uncoalesced as ``nn.Embedding(sparse=True)`` leaves it."""
    values = tensor(given.gradient, dtype)
    if given.indices is None:
        return values
    indices = tensor(given.indices, "int64")[None]
    torch = import_module("torch")
    return torch.sparse_coo_tensor(indices, values, given.shape, check_invariants=False)


def arrays_of(tensors: Iterable[Any]) -> list[np.ndarray]:
    """Their values as float32."""
    return [one.detach().float().numpy() for one in tensors]
