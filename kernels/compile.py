"""From functions to machine code: C functions with addresses, and rules to blocks.

The loops of this package (drivers) do not know a rule. A rule is compiled into a *block*,

    block(w, g, s0, s1, s2, n, hp)        seven int64: addresses, a count, an address

which updates ``n`` contiguous elements, and a driver calls it through its address. A new rule
then costs one small compilation, the drivers are compiled once for all rules, and the dense,
row-sparse, serial and parallel paths run the very same machine code, hence give equal bits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core.ccallback import CFunc

from .cache import KernelCache, fingerprint
from .cpu.intrinsics import as_pointer, tuple_reader
from .rules.rule import RULE_FLAGS, Part, Prologue, Rule, hp_type
from .storage import F64, Storage, numba_type, real_of

_I64 = types.int64
_BLOCK_ARGUMENTS = 7
_PART_ARGUMENTS = 3
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class NativeFunction:
    """A function of ``int64`` arguments that is compiled when its address is first asked for.

    Args:
        function: the Python function; it returns nothing.
        n_arguments: how many ``int64`` arguments it takes.
        identity: what distinguishes it in the on-disk cache.
    """

    def __init__(self, function: Callable[..., None], n_arguments: int, identity: str) -> None:
        self._function = function
        self._n_arguments = n_arguments
        self.identity = identity
        self._compiled: CFunc | None = None

    @property
    def address(self) -> int:
        """The address of the machine code, compiled or read from the cache on first use."""
        if self._compiled is None:
            with _lock:
                if self._compiled is None:
                    self._compiled = self._compile()
        address: int = self._compiled.address
        return address

    def _compile(self) -> CFunc:
        compiled = self._uncompiled()
        compiled._cache = KernelCache(self.identity)
        compiled.compile()
        return compiled

    def _uncompiled(self) -> CFunc:
        signature = ((_I64,) * self._n_arguments, types.void)
        return CFunc(self._function, signature, {}, {"error_model": "numpy"})

    def assembly(self) -> str:
        """The assembly text of a fresh compilation (a cached one keeps none)."""
        compiled = self._uncompiled()
        compiled.compile()
        text: str = compiled._library.get_asm_str()
        return text


PARTS: list[NativeFunction] = []
"""Every part that was defined, for `fusestep.kernels.warmup`."""


def part(function: Callable[[int, int, int], None]) -> NativeFunction:
    """Decorator: one part of a parallel loop, ``part(index, slot, call)``.

    ``index`` numbers the part, ``slot`` the thread that runs it (for scratch memory), ``call``
    is the address of the loop's arguments.
    """
    made = NativeFunction(
        function, _PART_ARGUMENTS, f"{function.__module__}.{function.__qualname__}"
    )
    PARTS.append(made)
    return made


def call_reader(cls: Any) -> Any:
    """The compiled reader of a loop's arguments: a record of ``int64``, read by name.

    A record travels as one pointer. The same fields in a named tuple take seconds more to
    compile, because every function that is handed the tuple gets one argument per field.
    """
    record = np.dtype([(name, np.int64) for name in cls._fields])

    @njit
    def read(address):
        return carray(as_pointer(address), 1, record)[0]

    return read


@dataclass(frozen=True, eq=False)
class Kernel:
    """A rule behind a prologue, compiled for three storage types.

    Attributes:
        rule: the update rule.
        prologue: what happens to the gradient first.
        w: storage of the parameter; the arithmetic follows it.
        g: storage of the gradient.
        s: storage of the states.
        block: updates contiguous elements.
        block_zero: the same for a gradient that is 0 everywhere and is not read.
        block_real: the same for a gradient in the type of the arithmetic (summed rows).
        real: storage of the arithmetic, of ``hp`` and of summed gradients.
    """

    rule: Rule
    prologue: Prologue
    w: Storage
    g: Storage
    s: Storage
    block: NativeFunction
    block_zero: NativeFunction
    block_real: NativeFunction
    real: Storage


@cache
def kernel(rule: Rule, prologue: Prologue, w: Storage, g: Storage, s: Storage) -> Kernel:
    """The kernel of ``rule`` for these storage types; nothing is compiled yet."""
    block, block_zero, block_real = (
        _block(rule, prologue, w, gradient, s) for gradient in (g, None, real_of(w))
    )
    return Kernel(rule, prologue, w, g, s, block, block_zero, block_real, real_of(w))


@cache
def _block(
    rule: Rule, prologue: Prologue, w: Storage, g: Storage | None, s: Storage
) -> NativeFunction:
    element = _element(rule, prologue, w, g, s)
    function = _span(element, len(rule.states), hp_type(rule, prologue), w, g, s)
    parts = " ".join(fingerprint(p.apply) + str(p.hp) for p in prologue)
    gradient = g.name if g else "zero"
    return NativeFunction(
        function,
        _BLOCK_ARGUMENTS,
        f"block {rule.update.__name__} {fingerprint(rule.update)} {rule.hp} "
        f"prologue {parts} storage {w.name} {gradient} {s.name}",
    )


def _compose(prologue: tuple[Part, ...]) -> Any:
    """One compiled function out of the parts of a prologue, first part first."""
    if not prologue:

        @njit
        def identity(g, w, hp):
            return g

        return identity
    first, rest = njit(**RULE_FLAGS)(prologue[0].apply), _compose(prologue[1:])

    @njit
    def composed(g, w, hp):
        return rest(first(g, w, hp), w, hp)

    return composed


def _element(rule: Rule, prologue: Prologue, w: Storage, g: Storage | None, s: Storage) -> Any:
    """``element(w, g, states, i, hp)``: load, prologue, rule, store for one element.

    ``n_states`` and ``zero_gradient`` are constants of the closure, so that Numba prunes
    the other branches before it types them.
    """
    update, condition = njit(**RULE_FLAGS)(rule.update), _compose(prologue)
    load_w, load_s = w.to_real, s.to_real
    wide = real_of(w) is F64
    store_w, store_s = (w.from_wide, s.from_wide) if wide else (w.from_real, s.from_real)
    load_g = g.to_real if g else w.to_real
    real = numba_type(real_of(w))
    n_states, zero_gradient = len(rule.states), g is None

    @njit(error_model="numpy")
    def element(w, g, states, i, hp):
        x = real(load_w(w[i]))
        d = real(0) if zero_gradient else real(load_g(g[i]))
        d = condition(d, x, hp)
        if n_states == 0:
            w[i] = store_w(update(x, d, hp))
        elif n_states == 1:
            x, a = update(x, d, real(load_s(states[0][i])), hp)
            w[i], states[0][i] = store_w(x), store_s(a)
        elif n_states == 2:
            x, a, b = update(x, d, real(load_s(states[0][i])), real(load_s(states[1][i])), hp)
            w[i], states[0][i], states[1][i] = store_w(x), store_s(a), store_s(b)
        else:
            a, b = real(load_s(states[0][i])), real(load_s(states[1][i]))
            x, a, b, c = update(x, d, a, b, real(load_s(states[2][i])), hp)
            w[i], states[0][i] = store_w(x), store_s(a)
            states[1][i], states[2][i] = store_s(b), store_s(c)

    return element


def _span(
    element: Any, n_states: int, hp: type, w: Storage, g: Storage | None, s: Storage
) -> Callable[..., None]:
    """The loop of a block over ``n`` contiguous elements."""
    read_hp = tuple_reader(hp, numba_type(real_of(w)))
    w_type, s_type = w.carrier, s.carrier
    g_type = g.carrier if g else w.carrier

    def block(w_address, g_address, s0, s1, s2, n, hp_address):
        scalars = read_hp(hp_address)
        w = carray(as_pointer(w_address), n, w_type)
        g = carray(as_pointer(g_address), n, g_type)
        if n_states == 0:
            states = ()
        elif n_states == 1:
            states = (carray(as_pointer(s0), n, s_type),)
        elif n_states == 2:
            states = (carray(as_pointer(s0), n, s_type), carray(as_pointer(s1), n, s_type))
        else:
            states = (
                carray(as_pointer(s0), n, s_type),
                carray(as_pointer(s1), n, s_type),
                carray(as_pointer(s2), n, s_type),
            )
        for i in range(w.size):
            element(w, g, states, i, scalars)

    return block
