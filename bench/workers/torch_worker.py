"""PyTorch's steps, for the interpreter in which PyTorch is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import Job, serve  # type: ignore[import-not-found]

# Class and arguments of each form.
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam(fused=True)": ("Adam", {"fused": True}),
    "Adam(foreach=True)": ("Adam", {"foreach": True}),
    "Adam(amsgrad, fused=True)": ("Adam", {"amsgrad": True, "fused": True}),
    "SparseAdam": ("SparseAdam", {}),
    "SGD(fused=True)": ("SGD", {"fused": True}),
    "SGD(momentum, fused=True)": ("SGD", {"momentum": 0.9, "fused": True}),
    "RMSprop(foreach=True)": ("RMSprop", {"foreach": True}),
    "RMSprop(momentum, foreach=True)": ("RMSprop", {"momentum": 0.9, "foreach": True}),
    "RMSprop(centered, foreach=True)": ("RMSprop", {"centered": True, "foreach": True}),
    "Adagrad(fused=True)": ("Adagrad", {"fused": True}),
    "Adafactor(foreach=True)": ("Adafactor", {"foreach": True}),
}


class Torch:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.version: str = self.torch.__version__

    def job(self, request: dict[str, Any]) -> Job:
        """One step of the form on zeros of the given shapes."""
        torch = self.torch
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in request["shapes"]]
        name, options = _FORMS[request["form"]]
        optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **options)
        # Cloned into torch's own memory, which is better aligned than NumPy's.
        gradients = [
            torch.from_numpy(np.load(path)).clone() for path in request["inputs"]["gradient"]
        ]
        if "indices" in request["inputs"]:
            return self._rows(request, parameters[0], gradients, optimizer)
        if request["new_gradients"]:
            return Job(optimizer.step, lambda: _assign(parameters, gradients, new=True))
        _assign(parameters, gradients, new=False)
        return Job(optimizer.step)

    def _rows(self, request: dict[str, Any], table: Any, gradients: Any, optimizer: Any) -> Job:
        """Uncoalesced sparse gradients, as ``nn.Embedding(sparse=True)`` leaves them."""
        batches = [
            self.torch.sparse_coo_tensor(
                self.torch.from_numpy(np.load(path)[None]), values, table.shape
            )
            for path, values in zip(request["inputs"]["indices"], gradients, strict=True)
        ]
        count = 0

        def load() -> None:
            nonlocal count
            table.grad = batches[count % len(batches)]
            count += 1

        return Job(optimizer.step, load)


def _assign(parameters: list[Any], gradients: list[Any], new: bool) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        gradient = gradient.reshape(parameter.shape)
        parameter.grad = gradient.clone() if new else gradient


if __name__ == "__main__":
    serve(Torch)
