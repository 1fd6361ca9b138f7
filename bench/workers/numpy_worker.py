"""NumPy's steps, as a careful user writes them: in place, with scratch arrays, in blocks.

The five rules that people write themselves, on dense gradients and on rows. States are float32 for
every type of parameter; parameters and gradients of 16 bits are converted to float32 and back,
since NumPy's own arithmetic on them is slow and overflows.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from worker_protocol import LR, Case, Job, Parameter, Replica, serve

Array = np.ndarray

# Large enough to hide the calls (and, in threads, the interpreter's lock), small enough for the
# cache: 512 KiB of each array.
_BLOCK = 2**17
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_DECAY, _MOMENTUM = 0.01, 0.9
_TINY = 1e-30  # so that nothing is divided by zero


# -- rules: ``rule(t, w, g, *states, a)``, in place, with a scratch array -------------------------


def _sgd(_t: int, w: Array, g: Array, a: Array) -> None:
    w -= np.multiply(g, LR, out=a)


def _momentum(t: int, w: Array, g: Array, m: Array, a: Array) -> None:
    m *= _MOMENTUM
    m += g
    _sgd(t, w, m, a)


def _adam(t: int, w: Array, g: Array, m: Array, v: Array, a: Array) -> None:
    """``w -= lr * mhat / (sqrt(vhat) + epsilon)``, the corrections moved to the scalars."""
    m *= _BETA1
    m += np.multiply(g, 1 - _BETA1, out=a)
    v *= _BETA2
    np.multiply(g, g, out=a)
    a *= 1 - _BETA2
    v += a
    root = (1 - _BETA2**t) ** 0.5
    np.sqrt(v, out=a)
    a += _EPSILON * root
    np.divide(m, a, out=a)
    a *= LR * root / (1 - _BETA1**t)
    w -= a


def _adamw(t: int, w: Array, g: Array, m: Array, v: Array, a: Array) -> None:
    w *= 1 - LR * _DECAY
    _adam(t, w, g, m, v, a)


def _adagrad(_t: int, w: Array, g: Array, s: Array, a: Array) -> None:
    s += np.multiply(g, g, out=a)
    np.sqrt(s, out=a)
    a += _TINY
    np.divide(g, a, out=a)
    a *= LR
    w -= a


# Rule and number of states.
_RULES: dict[str, tuple[Callable[..., None], int]] = {
    "sgd": (_sgd, 0),
    "momentum": (_momentum, 1),
    "adam": (_adam, 2),
    "adamw": (_adamw, 2),
    "adagrad": (_adagrad, 1),
}
# Algorithms on row-sparse gradients; what comes before the hyphen is their rule.
_WITH_ROWS = ("adam-lazy", "adam-rows", "sgd-rows", "momentum-lazy", "adagrad-rows")


class _Sweep:
    """Applies rules to arrays in blocks, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self._own = threading.local()
        self._map: Callable[..., Any] = ThreadPoolExecutor(threads).map if threads > 1 else map

    def __call__(
        self, rule: Callable[..., None], t: int, gradient: Array, arrays: Sequence[Array]
    ) -> None:
        """Take one step of the parameter and its states, which lie in memory like the gradient."""
        flat = [array.reshape(-1) for array in (*arrays, gradient)]

        def run(start: int) -> None:
            w, *states, g = (array[start : start + _BLOCK] for array in flat)
            if not hasattr(self._own, "scratch"):
                self._own.scratch = np.zeros((3, _BLOCK), np.float32)
            a, *wide = (x[: w.size] for x in self._own.scratch)
            if w.dtype == np.float32:
                rule(t, w, g, *states, a)
                return
            wide[0][...], wide[1][...] = w, g
            rule(t, *wide, *states, a)
            w[...] = wide[0]

        starts = range(0, gradient.size, _BLOCK)
        list((self._map if len(starts) > 1 else map)(run, starts))


class _Variable:
    """A parameter with its rule, its states and its gradient."""

    def __init__(self, rule: str, given: Parameter, dtype: Any, densify: bool) -> None:
        self._rule, count = _RULES[rule]
        self.w, self.g = (
            np.array(array, dtype, order="C") for array in (given.start, given.gradient)
        )
        self._arrays = [self.w, *(np.full(given.shape, 0.0, np.float32) for _ in range(count))]
        self._indices = given.indices
        is_dense = densify and given.indices is not None
        self._dense = np.full(given.shape, 0.0, np.float32) if is_dense else None

    def step(self, t: int, sweep: _Sweep) -> None:
        """Take step number ``t``; with a row-sparse gradient, on the rows that occur."""
        if self._indices is None:
            sweep(self._rule, t, self.g, self._arrays)
            return
        rows, sums = _merge(self._indices, self.g)
        if self._dense is not None:
            self._dense[rows] = sums
            sweep(self._rule, t, self._dense, self._arrays)
            self._dense[rows] = 0
            return
        picked = [array[rows] for array in self._arrays]
        sweep(self._rule, t, sums, picked)
        for array, new in zip(self._arrays, picked):
            array[rows] = new


def _merge(indices: Array, values: Array) -> tuple[Array, Array]:
    """The distinct indices and the sums of their rows; faster than ``np.add.at``."""
    order = np.argsort(indices)
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sums = np.add.reduceat(values[order].astype(np.float32, copy=False), starts, axis=0)
    return ordered[starts], sums


class NumPy:
    """The library, on ``threads`` threads where a user can have them."""

    version = np.__version__

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Blocks of the arrays, one after the other or in threads."""
        if dtype == "bfloat16" and find_spec("ml_dtypes") is None:
            return {}
        if algorithm not in (_RULES if kind == "dense" else _WITH_ROWS):
            return {}
        forms = {"blocks": 1, "blocks in threads": self._threads}
        return {form: partial(_swept, n) for form, n in forms.items() if n > 1 or form == "blocks"}


def _swept(threads: int, case: Case) -> Replica:
    """One set of arrays, updated in place."""
    dtype = import_module("ml_dtypes").bfloat16 if case.dtype == "bfloat16" else case.dtype
    rule, densify = case.algorithm.partition("-")[0], case.algorithm == "adam-rows"
    variables = [_Variable(rule, given, dtype, densify) for given in case.parameters]
    sweep, numbers = _Sweep(threads), itertools.count(1)

    def step() -> None:
        t = next(numbers)
        for variable in variables:
            variable.step(t, sweep)

    def load() -> None:
        if case.fresh:
            for variable in variables:
                variable.g = variable.g.copy()

    return Replica(Job(step, load), lambda: [variable.w for variable in variables])


if __name__ == "__main__":
    serve(NumPy)
