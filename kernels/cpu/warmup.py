"""Compile kernels ahead of their first use: ``fusestep warmup``."""

from __future__ import annotations

import argparse
import importlib
import itertools
import pkgutil
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numba

from .. import rules
from ..cache import cache_directory, cache_problem, clear_cache
from ..element import Kernel, kernel
from ..rule import Prologue, Rule
from ..rules.gradient import COUPLED_DECAY, SCALE, TRUST
from ..rules.norm import SCALED
from ..storage import STORAGES, Storage, real_of, state_storage
from . import bags, dense, gather, ids  # noqa: F401
from .blocks import blocks
from .compiler import machine
from .compiler.compile import PARTS, NativeFunction
from .counts import are_equal_at
from .headers import arrays, id_lists
from .matrices import step as _matrices_step  # noqa: F401
from .matrices.blocks import matrix_blocks
from .pooling import sum_rows
from .rows import arguments as row_arguments
from .rows import catch_up, draw, step, sums, write  # noqa: F401
from .tensor_counts import are_equal_floats_at
from .threads import beside, layers  # noqa: F401
from .threads.parallel import LOOPS, SHARED_LOOPS

_BY_NAME = {storage.name: storage for storage in STORAGES.values()}
_PROLOGUES: tuple[Prologue, ...] = ((), (COUPLED_DECAY,), (SCALE,), (COUPLED_DECAY, SCALE))
# LARS can be around every rule, which would double the time: it is compiled around those with
# which it was published, which are THOR's too. (Its order of scale and decay is the other one.)
_TRUST_PROLOGUES = tuple((*parts, TRUST) for parts in (*_PROLOGUES, (SCALE, COUPLED_DECAY)))


def all_rules() -> dict[str, Rule]:
    """Every rule of the package, by the name of its constant in lower case."""
    by_name = {}
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        members = vars(importlib.import_module(module.name))
        by_name.update({n.lower(): r for n, r in members.items() if isinstance(r, Rule)})
    return by_name


def loops(storages: list[Storage]) -> Iterator[NativeFunction]:
    """Loops that depend on no rule, and gain nothing from vectors that Numba makes of them."""
    yield from (*LOOPS, *SHARED_LOOPS)
    yield from (*arrays.READERS, *id_lists.READERS, layers.available_threads)
    yield from row_arguments.WRITERS
    yield from (are_equal_at, are_equal_floats_at)
    yield from (part for part in PARTS if part is not gather.gather_part)
    for storage in storages:
        for form in sums.FORMS:
            yield sums.accumulate(storage, real_of(storage), form)
        for weighted in (False, True):
            yield sum_rows(storage, real_of(storage), weighted=weighted)
        yield sums.accumulate(real_of(storage), real_of(storage), sums.OWN)


def kernels(
    chosen: Iterable[Rule], prologues: Iterable[Prologue], storages: Iterable[Storage]
) -> Iterator[Kernel]:
    """The kernels of some rules, with equal storage types of parameters and gradients."""
    for rule, prologue, storage in itertools.product(chosen, prologues, storages):
        states = tuple(state_storage(state, storage) for state in rule.states)
        yield kernel(rule, prologue, storage, storage, states)


def functions(
    chosen: list[Rule], storages: list[Storage], *, every_prologue: bool
) -> Iterator[NativeFunction]:
    """The loops of the package, and the blocks of ``chosen`` rules for equal storage types."""
    yield from loops(storages)
    yield from (gather.gather_part, *map(dense.finite_check, storages))
    prologues = _PROLOGUES if every_prologue else _PROLOGUES[:1]
    for compiled in kernels(chosen, prologues, storages):
        rule, prologue, storage = compiled.rule, compiled.prologue, compiled.w
        yield from (block for block in (matrix_blocks if rule.lines else blocks)(compiled) if block)
        if rule.layerwise and not prologue:
            norm = blocks(kernel(SCALED, (), storage, storage, ())).reduce
            yield from (norm,) if norm else ()
            trusted = _TRUST_PROLOGUES if every_prologue else _TRUST_PROLOGUES[:1]
            yield from (blocks(other).update for other in kernels([rule], trusted, [storage]))


def write_portable(folder: Path, part: slice = slice(None)) -> None:
    """Write the loops of the package, which depend on no processor, for `machine.portable`.

    Args:
        folder: where each becomes a file.
        part: which of them, where several processes share the work.
    """
    numba.config.LOOP_VECTORIZE = numba.config.SLP_VECTORIZE = 0  # for the builder's processor
    layers.start_layer()
    wanted = {f.identity: f for f in loops(list(STORAGES.values()))}
    chosen = list(wanted.items())[part]
    machine.write_portable(folder, ((name, *f.ir()) for name, f in chosen))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fusestep warmup``."""
    add = parser.add_argument
    dtype_help = "storage types of parameter, gradient and state (default: f32)"
    add("--dtype", nargs="+", choices=sorted(_BY_NAME), default=["f32"], help=dtype_help)
    rule_help = "update rules (default: all)"
    add("--rule", nargs="+", choices=sorted(all_rules()), default=None, help=rule_help)
    without = "without weight decay and loss scale, which are compiled in"
    add("--plain", action="store_true", help=without)
    add("--cuda", action="store_true", help="those of the current CUDA device, not of the CPU")
    add("--clear", action="store_true", help="first remove every kernel from the cache")


def main(args: argparse.Namespace) -> int:
    """Compile what is not in the cache yet."""
    by_name = all_rules()
    chosen = [by_name[name] for name in args.rule or by_name]
    storages = [_BY_NAME[name] for name in args.dtype]
    begin = time.perf_counter()
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # said below
        if args.clear:
            clear_cache()
        if args.cuda:
            n = _prepare_on_device(chosen, storages, plain=args.plain)
        else:
            n = _prepare(chosen, storages, plain=args.plain)
    seconds = time.perf_counter() - begin
    place, problem = cache_directory(), cache_problem()
    kept = f"kept in {place}" if place else "not kept: FUSESTEP_CACHE_DIR is empty"
    if problem:
        kept = f"not kept in {place}: {problem}"
    print(f"{n} kernels ready in {seconds:.1f} s, {kept}")
    return 0


def _prepare(chosen: list[Rule], storages: list[Storage], *, plain: bool) -> int:
    layers.start_layer()
    wanted = {f.identity: f for f in functions(chosen, storages, every_prologue=not plain)}
    for function in wanted.values():
        function.address  # noqa: B018  (compiles)
    return len(wanted)


def _prepare_on_device(chosen: list[Rule], storages: list[Storage], *, plain: bool) -> int:
    try:
        cuda = importlib.import_module("numba.cuda")
        on_device = importlib.import_module("...cuda.warmup", __name__)
    except ImportError as error:
        raise SystemExit(
            f"fusestep warmup --cuda: {error}: pip install 'fusestep[cuda13]'"
        ) from None
    if not cuda.is_available():
        raise SystemExit("fusestep warmup --cuda: Numba finds no CUDA driver")
    prologues = _PROLOGUES[:1] if plain else _PROLOGUES
    n: int = on_device.prepare_loops(kernels(chosen, prologues, storages))
    return n
