"""Parts that the workers of torch and of what is built on it share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import Case, Job, Parameter, Replica


def tensor(array: np.ndarray, dtype: str) -> Any:
    """A copy in torch's own memory, which is better aligned than NumPy's."""
    torch = import_module("torch")
    return torch.from_numpy(array).to(getattr(torch, dtype), copy=True)


def parameters_of(case: Case) -> list[Any]:
    """Torch's parameters at their start."""
    parameter = import_module("torch").nn.Parameter
    return [parameter(tensor(given.start, case.dtype)) for given in case.parameters]


def _gradient(given: Parameter, dtype: str) -> Any:
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


def stepped(
    case: Case, make: Callable[[list[Any]], Callable[[], object]], *, fresh: bool = False
) -> Replica:
    """Parameters that get their gradients before each step.

    Args:
        case: the case.
        make: makes the step of the parameters.
        fresh: new gradients in any case: the step changes them.
    """
    parameters = parameters_of(case)
    gradients = [_gradient(given, case.dtype) for given in case.parameters]

    def load() -> None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone() if fresh or case.fresh else gradient

    return Replica(Job(make(parameters), load), lambda: arrays_of(parameters))
