"""NumPy's steps, as a careful user writes them: in place, with scratch arrays, in blocks.

States are float32 for every type of parameter; parameters and gradients of 16 bits are converted
to float32 and back, since NumPy's own arithmetic on them is slow and overflows.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy_rules import ELEMENTWISE, TENSORWISE, clip, rule_and_states, zeros
from worker_protocol import Case, Job, Parameter, Replica, lookup, serve

Array = np.ndarray

# Algorithms on row-sparse gradients; what comes before the last hyphen is their rule.
_WITH_ROWS = (
    *("adam-lazy", "adam-rows", "sgd-rows", "momentum-lazy", "adagrad-rows", "ftrl-rows"),
    *("proximal-adagrad-rows", "row-wise-adagrad-rows", "row-wise-adam-rows"),
)
# Large enough to hide the calls (and, in threads, the interpreter's lock), small enough for the
# cache: 512 KiB of each array.
_BLOCK = 2**17


class _Sweep:
    """Applies rules to arrays in blocks of about ``block`` elements, on ``threads`` threads."""

    def __init__(self, block: int, threads: int) -> None:
        self._block, self._scratch = block, threading.local()
        self._map: Callable[..., Any] = ThreadPoolExecutor(threads).map if threads > 1 else map

    def __call__(self, rule: Callable[..., None], t: int, arrays: Sequence[Array]) -> None:
        """Take one step; the arrays are cut along their first axis."""
        length = len(arrays[0])
        per_block = max(1, self._block * length // max(1, arrays[0].size))

        def run(start: int) -> None:
            w, g, *states = (array[start : start + per_block] for array in arrays)
            a, b, *wide = self._buffers(w)
            if not wide:
                rule(t, w, g, *states, a, b)
                return
            wide[0][...], wide[1][...] = w, g
            rule(t, *wide, *states, a, b)
            w[...] = wide[0]

        starts = range(0, length, per_block)
        list((self._map if len(starts) > 1 else map)(run, starts))

    def _buffers(self, like: Array) -> list[Array]:
        """Two scratch arrays of a thread, and two more for a parameter of 16 bits."""
        buffers: list[Array] = getattr(self._scratch, "buffers", [])
        count = 2 if like.dtype == np.float32 else 4
        if len(buffers) < count or buffers[0].size < like.size:
            buffers = [np.zeros(like.size, np.float32) for _ in range(count)]
            self._scratch.buffers = buffers
        return [buffer[: like.size].reshape(like.shape) for buffer in buffers[:count]]


class _Variable:
    """A parameter with its rule, its states and its gradient.

    Where a rule may be applied to any part, dense arrays have one axis and tables have two.
    """

    def __init__(self, algorithm: str, given: Parameter, dtype: Any, densify: bool) -> None:
        self._rule, states = rule_and_states(algorithm, given.shape)
        self.w, self.g = np.array(given.start, dtype), np.array(given.gradient, dtype)
        self._arrays, self._indices = [self.w, *states], given.indices
        if algorithm in ELEMENTWISE and given.indices is None:
            self.g = self.g.reshape(-1)
            self._arrays = [array.reshape(-1) for array in self._arrays]
        self._dense = zeros(given.shape) if densify and given.indices is not None else None

    def step(self, t: int, sweep: _Sweep) -> None:
        """Take step number ``t``; with a row-sparse gradient, on the rows that occur."""
        w, *states = self._arrays
        if self._indices is None:
            sweep(self._rule, t, [w, self.g, *states])
            return
        rows, sums = _merge(self._indices, self.g)
        if self._dense is not None:
            self._dense[rows] = sums
            sweep(self._rule, t, [w, self._dense, *states])
            self._dense[rows] = 0
            return
        w, *states = picked = [array[rows] for array in self._arrays]
        sweep(self._rule, t, [w, sums, *states])
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
        """Elementwise rules work in blocks, the others need whole arrays."""
        if dtype == "bfloat16" and find_spec("ml_dtypes") is None:
            return {}
        if algorithm == "gather" and kind == "rows":
            options = {"take": False, "take(out=, mode='clip')": True}
            return {form: partial(_gather, into) for form, into in options.items()}
        if algorithm == "clip-by-global-norm" and kind == "dense":
            return {"whole arrays": _clip}
        if algorithm not in ((*ELEMENTWISE, *TENSORWISE) if kind == "dense" else _WITH_ROWS):
            return {}
        rule = algorithm if kind == "dense" else algorithm.rpartition("-")[0]
        sweeps = {"whole arrays": (sys.maxsize, 1)}
        if rule not in TENSORWISE:
            sweeps["blocks"] = _BLOCK, 1
            if self._threads > 1:
                sweeps["blocks in threads"] = _BLOCK, self._threads
        return {form: partial(_swept, rule, *sweep) for form, sweep in sweeps.items()}


def _swept(rule: str, block: int, threads: int, case: Case) -> Replica:
    """One set of arrays, updated in place."""
    densify, dtype = case.algorithm == "adam-rows", _dtype(case.dtype)
    variables = [_Variable(rule, given, dtype, densify) for given in case.parameters]
    sweep, numbers = _Sweep(block, threads), itertools.count(1)

    def step() -> None:
        t = next(numbers)
        for variable in variables:
            variable.step(t, sweep)

    def load() -> None:
        if case.fresh:
            for variable in variables:
                variable.g = variable.g.copy()

    return Replica(Job(step, load), lambda: [variable.w for variable in variables])


def _gather(into: bool, case: Case) -> Replica:
    (given,) = case.parameters
    table = np.array(given.start, _dtype(case.dtype))
    options: dict[str, Any] = {}
    if into:
        options = {"out": np.zeros(given.gradient.shape, table.dtype), "mode": "clip"}
    return lookup(lambda: table.take(given.indices, axis=0, **options))


def _dtype(name: str) -> Any:
    return np.dtype(name if name != "bfloat16" else import_module("ml_dtypes").bfloat16)


def _clip(case: Case) -> Replica:
    dtype = _dtype(case.dtype)
    originals = [np.array(given.gradient, dtype) for given in case.parameters]
    gradients: list[Array] = []

    def load() -> None:
        gradients[:] = [original.copy() for original in originals]

    return Replica(Job(lambda: clip(gradients), load), lambda: gradients)


if __name__ == "__main__":
    serve(NumPy)
