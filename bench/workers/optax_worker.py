"""Optax's steps, compiled by JAX, for the interpreter in which both are installed.

Parameters and states are donated, so they are updated in place. JAX has no row-sparse gradients
of its own: the derivative of a lookup is dense, and so are its gradients here where the step
needs more of them than a sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from worker_protocol import LR, Case, Job, Parameter, Replica, lookup, serve

_RMS = {"decay": 0.9, "eps": 1e-10}
_ADAGRAD = {"initial_accumulator_value": 0.0, "eps": 1e-10}

# Label, function and arguments of each transformation.
_DENSE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("adam", "adam", {}),
    "amsgrad": ("amsgrad", "amsgrad", {}),
    "adamw": ("adamw", "adamw", {"weight_decay": 0.01}),
    "sgd": ("sgd", "sgd", {}),
    "momentum": ("sgd(momentum)", "sgd", {"momentum": 0.9}),
    "nesterov": ("sgd(nesterov)", "sgd", {"momentum": 0.9, "nesterov": True}),
    "rmsprop": ("rmsprop", "rmsprop", _RMS),
    "rmsprop-momentum": ("rmsprop(momentum)", "rmsprop", {**_RMS, "momentum": 0.9}),
    "rmsprop-centered": ("rmsprop(centered)", "rmsprop", {**_RMS, "centered": True}),
    "adagrad": ("adagrad", "adagrad", _ADAGRAD),
    "lamb": ("lamb", "lamb", {}),
    "lars": ("lars", "lars", {"eps": 1e-5}),
    "adafactor": ("adafactor", "adafactor", {}),
}
# Steps that a dense gradient takes as well: rows that do not occur have a gradient of 0.
_DENSIFIED = {"adam-rows": "adam", "adagrad-rows": "adagrad"}
# Sums of squares overflow; where the gradient is 0, so is the epsilon that it is divided by.
_NOT_IN_FLOAT16 = {"lamb", "lars", "adafactor", "clip-by-global-norm", "adam-rows"}


class Optax:
    """The library, on ``threads`` processors: JAX takes as many threads as it may use."""

    def __init__(self, threads: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        os.environ["JAX_PLATFORMS"] = "cpu"
        self.jax: Any = import_module("jax")
        self.optax: Any = import_module("optax")
        self.version = f"{self.optax.__version__}, jax {self.jax.__version__}"

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """All of a type are in that type."""
        if dtype == "float16" and algorithm in _NOT_IN_FLOAT16:
            return {}
        if kind == "dense":
            if algorithm == "clip-by-global-norm":
                return {"clip_by_global_norm": self._clip}
            if algorithm not in _DENSE:
                return {}
            label, name, options = _DENSE[algorithm]
            return {label: partial(self._optimizer, name, options)}
        if algorithm == "gather" and kind == "rows":
            modes = {"take": "fill", "at[].get(mode='promise_in_bounds')": "promise_in_bounds"}
            return {form: partial(self._gather, mode) for form, mode in modes.items()}
        if algorithm == "sgd-rows":
            return {"at[].add": lambda case: self._replica(case, _scatter, None)}
        if algorithm in _DENSIFIED:
            label, name, options = _DENSE[_DENSIFIED[algorithm]]
            return {f"at[].add into zeros, {label}": partial(self._optimizer, name, options)}
        return {}

    def _replica(self, case: Case, update: Callable[..., Any], state: Any) -> Replica:
        """Arrays and a compiled function that replaces them."""
        parameters: Any = self._starts(case)
        gradients = [self._gradient(given, case) for given in case.parameters]
        compiled = self.jax.jit(update, donate_argnums=(0, 1))

        def step() -> None:
            nonlocal parameters, state
            parameters, state = compiled(parameters, state, gradients)
            parameters[-1].block_until_ready()  # what was compiled together is ready together

        return Replica(Job(step), lambda: parameters)

    def _optimizer(self, name: str, options: dict[str, Any], case: Case) -> Replica:
        """An optimizer, which densifies what is row-sparse."""
        optimizer = getattr(self.optax, name)(LR, **options)
        zeros_like, apply_updates = self.jax.numpy.zeros_like, self.optax.apply_updates

        def update(parameters: Any, state: Any, gradients: Any) -> Any:
            dense = [
                zeros_like(w).at[g[0]].add(g[1]) if isinstance(g, tuple) else g
                for w, g in zip(parameters, gradients)
            ]
            updates, state = optimizer.update(dense, state, parameters)
            return apply_updates(parameters, updates), state

        return self._replica(case, update, optimizer.init(self._starts(case)))

    def _starts(self, case: Case) -> list[Any]:
        return [self._array(given.start, case) for given in case.parameters]

    def _array(self, array: np.ndarray, case: Case) -> Any:
        return self.jax.numpy.array(array, case.dtype)  # a copy

    def _gradient(self, given: Parameter, case: Case) -> Any:
        """Dense, or indices (32 bits, as JAX has them by default) and values."""
        values = self._array(given.gradient, case)
        if given.indices is None:
            return values
        return self.jax.numpy.array(given.indices.astype(np.int32)), values

    def _gather(self, mode: str, case: Case) -> Replica:
        (table,), (indices, _) = self._starts(case), self._gradient(case.parameters[0], case)
        look_up = self.jax.jit(lambda table, indices: table.at[indices].get(mode=mode))
        return lookup(lambda: look_up(table, indices).block_until_ready())

    def _clip(self, case: Case) -> Replica:
        """Gradients are donated as well, so they are new ones each time."""
        originals = [self._gradient(given, case) for given in case.parameters]
        clip = self.optax.clip_by_global_norm(1.0)
        state = clip.init(originals)
        update = self.jax.jit(lambda gradients: clip.update(gradients, state)[0], donate_argnums=0)
        gradients: list[Any] = []

        def load() -> None:
            gradients[:] = [original.copy() for original in originals]
            self.jax.block_until_ready(gradients)

        def step() -> None:
            gradients[:] = update(gradients)
            gradients[-1].block_until_ready()

        return Replica(Job(step, load), lambda: gradients)


def _scatter(parameters: Any, state: None, gradients: Any) -> Any:
    """Plain descent, whose row-sparse gradients need not be dense ones first."""
    stepped = [
        w.at[g[0]].add(-LR * g[1]) if isinstance(g, tuple) else w - LR * g
        for w, g in zip(parameters, gradients)
    ]
    return stepped, state


if __name__ == "__main__":
    serve(Optax)
