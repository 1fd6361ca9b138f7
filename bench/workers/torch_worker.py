"""PyTorch's steps, for the interpreter in which PyTorch is installed.

A dense step comes as torch offers it: as a loop, with ``foreach``, and fused where there is such
a kernel. Steps that torch compiles are another peer, since that takes seconds for each of them:
`torch_compile_worker`.
"""

# ruff: noqa: B905  # Python 3.8 has no zip(strict=True)

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch_arrays import (  # type: ignore[import-not-found]
    arrays_of,
    gradient_of,
    parameters_of,
    tensor,
)
from worker_protocol import Case, Job, Replica, lookup, serve  # type: ignore[import-not-found]

_LOOP, _FOREACH, _FUSED, _COMPILED = "foreach=False", "foreach=True", "fused=True", "compiled"
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    _LOOP: {"foreach": False},
    _FOREACH: {"foreach": True},
    _FUSED: {"fused": True},
    _COMPILED: {"foreach": True},
}
_ALL = (_LOOP, _FOREACH, _FUSED, _COMPILED)
_UNFUSED = (_LOOP, _FOREACH, _COMPILED)
_RMS = {"alpha": 0.9, "eps": 1e-10}

# Class, arguments and implementations of each step on dense gradients. Adafactor reads a number
# from a tensor in each step, where a compiled step is cut into pieces; that gains nothing.
_DENSE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
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
    "adafactor": ("Adafactor", {}, (_LOOP, _FOREACH)),
}
# Class of each step that takes sparse gradients; the step of dense parameters beside the tables.
_SPARSE = {
    "adam-lazy": ("SparseAdam", "adam"),
    "sgd-rows": ("SGD", "sgd"),
    "adagrad-rows": ("Adagrad", "adagrad"),
}
# Steps for which torch needs a dense gradient.
_DENSIFIED = {"adam-rows": "adam"}
_CLIP = {"clip_grad_norm_(foreach=False)": False, "clip_grad_norm_(foreach=True)": True}
_EMBEDDING, _SELECT, _SELECT_OUT = "nn.functional.embedding", "index_select", "index_select(out=)"


class Torch:
    """The library, on ``threads`` threads.

    Attributes:
        compiles: it has the compiled forms, and no others.
    """

    warm_up = 3
    compiles = False

    def __init__(self, threads: int) -> None:
        # No resident processes that compile; with one thread it compiles in this process.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.version: str = self.torch.__version__

    def forms(self, algorithm: str, kind: str, dtype: str) -> list[str]:
        """For mixed gradients there is an optimizer of the tables and one of the others."""
        if kind == "dense":
            clips = algorithm == "clip-by-global-norm" and not self.compiles
            return [*_CLIP] if clips else self._sound_forms(algorithm, dtype)
        if algorithm == "gather" and not self.compiles:
            return [_EMBEDDING, _SELECT, _SELECT_OUT] if kind == "rows" else []
        if algorithm in _DENSIFIED:
            dense = self._sound_forms(_DENSIFIED[algorithm], dtype)
            return [f"index_add_, {form}" for form in dense]
        if algorithm not in _SPARSE or (algorithm == "adam-lazy" and dtype == "float16"):
            return []
        name, beside = _SPARSE[algorithm]
        if kind == "rows":
            return [] if self.compiles else [name]
        return [f"{name} + {form}" for form in self._sound_forms(beside, dtype)]

    def _sound_forms(self, algorithm: str, dtype: str) -> list[str]:
        """The forms of a dense step that compute it in this type."""
        return [
            form
            for form, (name, options, is_compiled) in _dense_forms(algorithm).items()
            if is_compiled == self.compiles
            and self._is_sound(name, "fused" in options, is_compiled, dtype)
        ]

    def _is_sound(self, name: str, is_fused: bool, is_compiled: bool, dtype: str) -> bool:
        """False in float16 for loop and foreach, which have no other type.

        There an epsilon is 0, and where the gradient is 0 it is divided by 0; so in SparseAdam.
        """
        if name == "SGD":
            return not is_fused or self._fused_sgd_moves(dtype)
        return dtype != "float16" or is_fused or is_compiled or name == "Adafactor"

    def _fused_sgd_moves(self, dtype: str) -> bool:
        """False for types of 16 bits in 2.13: all whole vectors stay as they are."""
        parameter = self.torch.nn.Parameter(self.torch.ones(256, dtype=getattr(self.torch, dtype)))
        parameter.grad = self.torch.ones_like(parameter)
        self.torch.optim.SGD([parameter], lr=1.0, fused=True).step()
        return not parameter.any()

    def replica(self, case: Case) -> Replica:
        """Parameters with an optimizer, or with what stands in its place."""
        if case.algorithm == "gather":
            return self._gather(case)
        parameters = parameters_of(case.parameters, case.dtype)
        if case.algorithm in _DENSIFIED:
            return self._densified(case, parameters)
        gradients = [gradient_of(given, case.dtype) for given in case.parameters]
        # With foreach, Nesterov's momentum is added to the gradient itself.
        fresh = case.fresh or case.algorithm == "nesterov"

        def load() -> None:
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone() if fresh else gradient

        if case.algorithm == "clip-by-global-norm":
            clip, foreach = self.torch.nn.utils.clip_grad_norm_, _CLIP[case.form]
            job = Job(lambda: clip(parameters, 1.0, foreach=foreach), load)
            return Replica(job, lambda: arrays_of([x.grad for x in parameters]))
        return Replica(Job(self._step(case, parameters), load), lambda: arrays_of(parameters))

    def _step(self, case: Case, parameters: list[Any]) -> Callable[[], object]:
        """One step of all optimizers of the case."""
        if case.kind == "dense":
            return self._dense_step(case.algorithm, case.form, parameters)
        name, algorithm = _SPARSE[case.algorithm]
        tables: list[Any] = []
        others: list[Any] = []
        for given, parameter in zip(case.parameters, parameters):
            (others if given.indices is None else tables).append(parameter)
        sparse = getattr(self.torch.optim, name)(tables, lr=1e-3)
        if not others:
            step: Callable[[], object] = sparse.step
            return step
        dense = self._dense_step(algorithm, case.form.split(" + ")[1], others)
        return lambda: (sparse.step(), dense())

    def _dense_step(self, algorithm: str, form: str, parameters: list[Any]) -> Callable[[], object]:
        name, options, compiled = _dense_forms(algorithm)[form]
        optimizer = getattr(self.torch.optim, name)(parameters, lr=1e-3, **options)
        step: Callable[[], object] = optimizer.step
        return self._compiled(step) if compiled else step

    def _compiled(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step, compiled at its first call, as often as there are new parameters."""
        config = import_module("torch._dynamo").config
        limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}
        # Beyond the limit it would go on without compilation.
        for name, value in {**limits, "fail_on_recompile_limit_hit": True}.items():
            if hasattr(config, name):  # not in torch of all years
                setattr(config, name, value)
        compiled: Callable[[], object] = self.torch.compile(step)
        return compiled

    def _densified(self, case: Case, parameters: list[Any]) -> Replica:
        """Row-sparse gradients are added up in dense ones, which are zero between the steps."""
        rows: list[tuple[Any, Any, Any]] = []
        others = []
        for given, parameter in zip(case.parameters, parameters):
            gradient = tensor(given.gradient, case.dtype)
            if given.indices is None:
                parameter.grad = gradient
                others.append(parameter)
            else:
                parameter.grad = self.torch.zeros_like(parameter)
                rows.append((parameter.grad, tensor(given.indices, "int64"), gradient))
        form = case.form.split(", ", 1)[1]
        dense = self._dense_step(_DENSIFIED[case.algorithm], form, parameters)

        def load() -> None:
            if case.fresh:
                rows[:] = [(grad, indices.clone(), x.clone()) for grad, indices, x in rows]
                for parameter in others:
                    parameter.grad = parameter.grad.clone()

        def step() -> None:
            for gradient, indices, values in rows:
                gradient.index_add_(0, indices, values)
            dense()
            for gradient, indices, _ in rows:
                gradient.index_fill_(0, indices, 0)

        return Replica(Job(step, load), lambda: arrays_of(parameters))

    def _gather(self, case: Case) -> Replica:
        """Looking up rows, into a new tensor or into one that is there."""
        (given,) = case.parameters
        torch = self.torch
        table, indices = tensor(given.start, case.dtype), tensor(given.indices, "int64")
        out = table.new_zeros(given.gradient.shape)
        look_ups = {
            _SELECT_OUT: lambda: torch.index_select(table, 0, indices, out=out),
            _SELECT: lambda: torch.index_select(table, 0, indices),
            _EMBEDDING: lambda: torch.nn.functional.embedding(indices, table),
        }
        return lookup(look_ups[case.form], arrays_of)


def _dense_forms(algorithm: str) -> dict[str, tuple[str, dict[str, Any], bool]]:
    """Class, arguments and whether to compile it, of each form of a step on dense gradients."""
    if algorithm not in _DENSE:
        return {}
    name, options, implementations = _DENSE[algorithm]
    flags = "".join(f"{key}, " for key, value in options.items() if value is True)
    return {
        f"{name}({flags}{label})": (name, {**options, **arguments}, label == _COMPILED)
        for label, arguments in _IMPLEMENTATIONS.items()
        if label in implementations and (label != _COMPILED or _compiler())
    }


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


if __name__ == "__main__":
    serve(Torch)
