"""Random sequences of calls: ``python sequence_program.py how threads seed first end``.

Prints a line for each call from ``first`` on: its number, what it is, and a digest of all that it
has left. With ``how`` = "kept" as a user has it, on one to four threads; with "fresh" on one, and
before each call everything is dropped that the package keeps between calls, so that nothing can be
left over: optimizers are made anew from their states, and what a failing call has changed is put
back. Both must print the same. "stale" is "kept" with a defect, which must show.
"""

import functools
import hashlib
import io
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import fusestep
import sequence_operators as operators
from fusestep import nn
from fusestep.kernels import formula
from fusestep.kernels.cpu.threads.workspace import Pool
from optimizers import FORMS
from sequence_arrays import DTYPES, Memory, pick
from sequence_optimizers import Trained

ERRORS = (TypeError, ValueError, IndexError, RuntimeError)
# Compiled code: it is made of nothing but its arguments, and takes milliseconds to load again.
COMPILED = ("kernel", "_block", "_reduce", "accumulate", "matrix_blocks", "finite_check")
_N_SLOTS = 4
_PARTS = 3


def _modules() -> list[Any]:
    """Those of the package that are used."""
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("fusestep.")]


def droppers() -> dict[str, Callable[[], None]]:
    """What empties each cache, pool and container of a module, by its name. A module's dict or list
    in lower case is taken for something that calls fill."""
    found: dict[str, Callable[[], None]] = {}
    for module in _modules():
        for name, value in vars(module).items():
            label = f"{module.__name__}.{name}"
            if isinstance(value, functools._lru_cache_wrapper):
                if value.__module__ == module.__name__ and name not in COMPILED:
                    found[label] = value.cache_clear
            elif isinstance(value, Pool):
                found[label] = value.free.clear
            elif isinstance(value, dict | list) and name.islower() and not name.startswith("__"):
                found[label] = value.clear
    return found


class World:
    """What the calls of one Python thread are made on.

    Args:
        seed: decides everything; modulo `_PARTS` which operators and forms of optimizers there are.
        kept: see the module.
    """

    def __init__(self, seed: int, *, kept: bool) -> None:
        self._seed, self._kept = seed, kept
        self._memory = Memory()
        self._slots: list[Any] = [None] * _N_SLOTS
        self._rooms = [Memory(1 << 23) for _ in range(_N_SLOTS)]
        self._drop = [] if kept else list(droppers().values())
        # Some of them often, rather than all of them seldom: they share what is kept.
        of_operators = range(seed % _PARTS, len(operators.NAMES), _PARTS)
        self._operators = [(operators.NAMES[i], DTYPES[i % len(DTYPES)]) for i in of_operators]
        self._operator = self._operators[0]
        # Other seeds have the same forms in other dtypes.
        begin = seed // _PARTS * len(FORMS)
        self._forms = range(begin + seed % _PARTS, begin + len(FORMS), _PARTS)

    def perform(self, number: int) -> Iterator[str]:
        """One call: what it is, then a digest."""
        rng = np.random.default_rng([self._seed, number])
        if self._kept and rng.random() < 0.3:
            fusestep.set_num_threads(int(rng.integers(1, 5)))
        for drop in self._drop:
            drop()
        call = self._call(np.random.default_rng([self._seed, number, 1]), number)
        yield f"{number} {' '.join(call.text.split())}"
        before = [array.copy() for array in call.arrays]
        result: Any = None
        try:
            result, error = call.run(), ""
        except ERRORS as raised:
            error = f"{type(raised).__name__} {raised}"
            if not self._kept:
                for array, old in zip(call.arrays, before, strict=True):
                    array.flags.writeable = True
                    array[...] = old
        if self._kept and call.check is not None and not error:
            call.check(before)
        digest = hashlib.sha1(error.encode(), usedforsecurity=False)
        _feed(digest, [call.arrays, result])
        yield f" {error} {digest.hexdigest()}"

    def _call(self, rng: np.random.Generator, number: int) -> operators.Call:
        if rng.random() < 0.4:
            if rng.random() < 0.6:  # else the one of before: it shares most with it
                self._operator = pick(rng, self._operators)
            return operators.make(*self._operator, rng, self._memory)
        k = int(rng.integers(_N_SLOTS))
        if self._slots[k] is not None and rng.random() < 0.05:
            self._slots[k].drop()
            self._slots[k] = None
        if self._slots[k] is None:
            number = pick(rng, self._forms)
            self._slots[k] = Trained(rng, self._rooms[k], kept=self._kept, number=number)
        slot = self._slots[k]
        call: operators.Call = slot.change(rng) if rng.random() < 0.15 else slot.step(rng)
        return call


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8) if value.ndim else value.tobytes())
    elif isinstance(value, nn.RowTensor):
        _feed(digest, [value.indices, value.values])
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(digest, part)
    else:
        digest.update(repr(value).encode())


class _Untyped(dict):  # type: ignore[type-arg]
    """Powers of float32 and float64 under one key."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1:], value)


def main(how: str, n_threads: int, seed: int, first: int, end: int) -> None:
    """Run the calls ``first .. end - 1``, on each Python thread those of another seed."""
    if how == "stale":
        formula._powers = _Untyped()
    kept = how != "fresh"
    worlds = [World(seed + 333 * _PARTS * k, kept=kept) for k in range(n_threads)]

    def run(k: int) -> None:
        for number in range(first, end):
            for text in worlds[k].perform(number):
                lines[k].write(text)
                lines[k].flush()
            lines[k].write("\n")

    lines: list[Any] = [sys.stdout] + [io.StringIO() for _ in worlds[1:]]
    if not kept:
        for k in range(n_threads):
            run(k)
    else:
        sys.setswitchinterval(1e-5 if n_threads > 1 else sys.getswitchinterval())
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(run, range(n_threads)))  # raises what a thread has raised
    for of_thread in lines[1:]:
        sys.stdout.write(of_thread.getvalue())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
