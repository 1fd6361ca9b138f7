"""PyTorch's steps, for the interpreter in which PyTorch is installed.

A dense step comes as torch offers it: as a loop, with ``foreach``, and fused where there is such
a kernel. Steps that torch compiles, as its tutorial on compiled optimizers shows, are another peer,
since they need a compiler and take seconds for each optimizer and shape: ``torch_worker.py compiled
THREADS``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import LR, Case, Job, Parameter, Replica, lookup, parts_of, serve

_COMPILED = "compiled"
_LOOPS: dict[str, dict[str, Any]] = {
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
}
_UNFUSED = {**_LOOPS, _COMPILED: {"foreach": True}}
_ALL = {**_UNFUSED, "fused=True": {"fused": True}}
_RMS = {"alpha": 0.9, "eps": 1e-10}

# Class, arguments and implementations of each step on dense gradients. Adafactor reads a number
# from a tensor in each step, where a compiled step is cut into pieces; that gains nothing.
_DENSE: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "adam": ("Adam", {}, _ALL),
    "amsgrad": ("Adam", {"amsgrad": True}, _ALL),
    "adamw": ("AdamW", {"weight_decay": 0.01}, _ALL),
    "sgd": ("SGD", {}, _ALL),
    "momentum": ("SGD", {"momentum": 0.9}, _ALL),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, _ALL),
    "rmsprop": ("RMSprop", _RMS, _UNFUSED),
    "rmsprop-momentum": ("RMSprop", {**_RMS, "momentum": 0.9}, _UNFUSED),
    "rmsprop-centered": ("RMSprop", {**_RMS, "centered": True}, _UNFUSED),
    "adagrad": ("Adagrad", {}, _ALL),
    "adafactor": ("Adafactor", {}, _LOOPS),
}
# Class of each step that takes sparse gradients; the step of dense parameters beside the tables.
_SPARSE = {
    "adam-lazy": ("SparseAdam", "adam"),
    "sgd-rows": ("SGD", "sgd"),
    "adagrad-rows": ("Adagrad", "adagrad"),
}


class Torch:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self.compiles = _COMPILED in sys.argv  # it has the compiled forms, and no others
        # No resident processes that compile; with one thread it compiles in this process.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.version: str = self.torch.__version__

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Forms that are compiled, where there is a compiler, or the others."""
        if self.compiles and shutil.which(os.environ.get("CXX", "g++")) is None:
            return {}
        found = self._forms(algorithm, kind, dtype)
        return {form: found[form] for form in found if (_COMPILED in form) == self.compiles}

    def _forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """For mixed gradients there is an optimizer of the tables and one of the others."""
        if algorithm == "clip-by-global-norm" and kind == "dense":
            return {f"clip_grad_norm_({label})": partial(_clip, _LOOPS[label]) for label in _LOOPS}
        if algorithm == "gather" and kind == "rows":
            return {form: partial(_gather, form) for form in (_EMBEDDING, _SELECT, _SELECT_OUT)}
        if kind == "pooled":
            part, _, rule = algorithm.partition(" ")
            if dtype != "float32" or (rule and rule not in _SPARSE):
                return {}
            name, _ = _SPARSE[rule or "sgd-rows"]
            form = "EmbeddingBag(sparse=True)" + f" + {name}" * bool(rule)
            return {form: partial(_bags, part, getattr(self.torch.optim, name))}
        if kind == "dense":
            # With foreach, Nesterov's momentum is added to the gradient itself.
            fresh, makes = algorithm == "nesterov", self._makes(algorithm, dtype)
            return {form: partial(stepped, make=makes[form], fresh=fresh) for form in makes}
        if algorithm == "adam-rows":  # for which torch needs a dense gradient
            makes = self._makes("adam", dtype)
            return {f"index_add_, {form}": partial(_densified, makes[form]) for form in makes}
        if algorithm not in _SPARSE or (algorithm == "adam-lazy" and dtype == "float16"):
            return {}
        name, beside = _SPARSE[algorithm]
        sparse = getattr(self.torch.optim, name)
        if kind == "rows":
            return {name: partial(_beside, sparse, None)}
        makes = self._makes(beside, dtype)
        return {f"{name} + {form}": partial(_beside, sparse, makes[form]) for form in makes}

    def _makes(self, algorithm: str, dtype: str) -> dict[str, Callable[[list[Any]], Any]]:
        """By form, what makes the step of dense parameters, where it is computed in this type."""
        name, options, implementations = _DENSE.get(algorithm, ("", {}, {}))
        flags = "".join(f"{key}, " for key, value in options.items() if value is True)
        return {
            f"{name}({flags}{label})": partial(self._step, name, {**options, **arguments})
            for label, arguments in implementations.items()
            if label == _COMPILED or self._is_sound(name, "fused" in arguments, dtype)
        }

    def _is_sound(self, name: str, is_fused: bool, dtype: str) -> bool:
        """False in float16 for loop and foreach, which have no other type.

        There an epsilon is 0, and where the gradient is 0 it is divided by 0; so in SparseAdam.
        """
        if name == "SGD":
            return not is_fused or self._fused_sgd_moves(dtype)
        return dtype != "float16" or is_fused or name == "Adafactor"

    def _fused_sgd_moves(self, dtype: str) -> bool:
        """False for types of 16 bits in 2.13: all whole vectors stay as they are."""
        parameter = self.torch.nn.Parameter(self.torch.ones(256, dtype=getattr(self.torch, dtype)))
        parameter.grad = self.torch.ones_like(parameter)
        self.torch.optim.SGD([parameter], lr=1.0, fused=True).step()
        return not parameter.any()

    def _step(self, name: str, options: dict[str, Any], parameters: list[Any]) -> Any:
        """The step of an optimizer, to be compiled at its first call if it is."""
        step = getattr(self.torch.optim, name)(parameters, lr=LR, **options).step
        if not self.compiles:
            return step
        config = import_module("torch._dynamo").config
        limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}
        # Beyond the limit it would go on without compilation.
        for limit, value in {**limits, "fail_on_recompile_limit_hit": True}.items():
            if hasattr(config, limit):  # not in torch of all years
                setattr(config, limit, value)
        return self.torch.compile(step)


# -- what is built on PyTorch has these, too -------------------------------------------------------


def tensor(array: np.ndarray, dtype: str) -> Any:
    """A copy in torch's own memory, which is better aligned than NumPy's; on its default device."""
    torch = import_module("torch")
    writable = torch.from_numpy(np.require(array, requirements="W"))
    return writable.to(torch.empty(0).device, getattr(torch, dtype), copy=True)


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
    return [one.detach().float().cpu().numpy() for one in tensors]


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


# -- its steps -------------------------------------------------------------------------------------


def _beside(sparse: Any, make: Callable[[list[Any]], Any] | None, case: Case) -> Replica:
    """An optimizer of the tables; if it is mixed, the step of the others beside it."""

    def both(parameters: list[Any]) -> Callable[[], object]:
        tables: list[Any] = []
        others: list[Any] = []
        for given, parameter in zip(case.parameters, parameters):
            (others if given.indices is None else tables).append(parameter)
        step: Callable[[], object] = sparse(tables, lr=LR).step
        dense = make(others) if make and others else None
        return (lambda: (step(), dense())) if dense else step

    replica: Replica = stepped(case, both)
    return replica


def _bags(part: str, optimizer: Any, case: Case) -> Replica:
    """A module for each table, whose outputs are put side by side; and a step of the tables."""
    torch = import_module("torch")
    inputs: list[tuple[Any, Any]] = []
    modules = []
    for given in case.parameters:
        bags = torch.arange(0, len(given.indices), given.bag)
        inputs.append((tensor(given.indices, "int64"), bags))
        start = tensor(given.start, case.dtype)
        options = {"freeze": False, "mode": "sum", "sparse": True}
        modules.append(torch.nn.EmbeddingBag.from_pretrained(start, **options))
    parameters = [module.weight for module in modules]
    step = optimizer(parameters, lr=LR).step
    gradient = tensor(np.concatenate([given.gradient for given in case.parameters], 1), case.dtype)
    pooled: list[Any] = []

    def forward() -> None:
        pooled[:] = [torch.cat([module(*own) for module, own in zip(modules, inputs)], 1)]

    def backward() -> None:
        for parameter in parameters:
            parameter.grad = None
        pooled.pop().backward(gradient)
        step()

    return parts_of(part, forward, backward, lambda: arrays_of(pooled or parameters))


def _densified(make: Callable[[list[Any]], Any], case: Case) -> Replica:
    """Row-sparse gradients are added up in dense ones, which are zero between the steps."""

    def densifying(parameters: list[Any]) -> Callable[[], object]:
        dense, pairs = make(parameters), zip(parameters, case.parameters)
        tables = [(p, p.new_zeros(p.shape)) for p, given in pairs if given.indices is not None]

        def step() -> None:
            named = [(table, total, table.grad._indices()[0]) for table, total in tables]
            for table, total, rows in named:
                total.index_add_(0, rows, table.grad._values())
                table.grad = total
            dense()
            for _, total, rows in named:
                total.index_fill_(0, rows, 0)

        return step

    replica: Replica = stepped(case, densifying)
    return replica


def _clip(options: dict[str, Any], case: Case) -> Replica:
    clip = import_module("torch").nn.utils.clip_grad_norm_
    made: list[Any] = []

    def step_of(parameters: list[Any]) -> Callable[[], object]:
        made[:] = parameters
        return lambda: clip(parameters, 1.0, **options)

    return Replica(stepped(case, step_of).job, lambda: arrays_of(x.grad for x in made))


_EMBEDDING, _SELECT, _SELECT_OUT = "nn.functional.embedding", "index_select", "index_select(out=)"


def _gather(form: str, case: Case) -> Replica:
    """Looking up rows, into a new tensor or into one that is there."""
    (given,) = case.parameters
    torch = import_module("torch")
    table, indices = tensor(given.start, case.dtype), tensor(given.indices, "int64")
    out = table.new_zeros(given.gradient.shape)
    look_ups = {
        _SELECT_OUT: lambda: torch.index_select(table, 0, indices, out=out),
        _SELECT: lambda: torch.index_select(table, 0, indices),
        _EMBEDDING: lambda: torch.nn.functional.embedding(indices, table),
    }
    return lookup(look_ups[form], arrays_of)


if __name__ == "__main__":
    serve(Torch)
