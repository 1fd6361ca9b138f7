"""Combinations in which the subjects of `digests.py` take steps: one table for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fusestep import nn
from fusestep.nn import mxnet as mx

from digest_arrays import F32, Cases, labelled, refusals, rng_of
from helpers import BF16, STORAGE_DTYPES

HALF, DOUBLE = np.dtype(np.float16), np.dtype(np.float64)


def halving(step: int) -> float:
    return 0.2 * 0.5 ** (step % 3)


def of_weights(parameter: nn.Parameter) -> bool:
    return "weight" in str(parameter.name)


RATES = ((0.1, 0.05, 0.2, 0.1, 0.3), nn.CosineDecayLR(0.01, 0.1, 4), halving)
# Values beside that of a registry, by what an argument takes.
FURTHER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rate", "rate or none"), RATES),
    **dict.fromkeys(("decay", "float decay", "unit decay"), (halving,)),
    "damping": ((0.1, 0.2, 0.3, 0.4, 0.5), halving),
    "loss scale": (1_000,),
    "not positive": (-0.7, 0.0),
    "not negative": (0.0,),
    "number or None": (0.0,),
    "positive": (0.5,),
    "positive or infinite": (1.02,),
    "beta1": (None, 0.5),
    "sparse update": ("dense_equivalent", None),
    "out of range": ("drop",),
    "filter": (of_weights,),
    "scheduler": (halving,),
    "aggregate": (1, 3),
    **dict.fromkeys(("version", "compat"), ("1.9",)),
}
# What a registry moves an argument to that is taken over; others are callables and texts.
MOVED = (int, float, tuple, type, dict, mx.lr_scheduler.LRScheduler)
# Dtypes of parameters, of gradients, and of states where they have others.
STORAGES = (
    *((F32, HALF, None), (F32, BF16, DOUBLE), (F32, DOUBLE, None), (DOUBLE, F32, None)),
    *((DOUBLE, DOUBLE, F32), (HALF, F32, F32), (BF16, BF16, F32), (F32, F32, BF16)),
)


def turns(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each option with each of its values but the usual one, and what it needs beside it."""
    found = []
    for name, argument in arguments.items():
        flags = (True, False) if argument.takes.startswith("flag") else ()
        moved = (argument.moved,) if isinstance(argument.moved, MOVED) else ()
        also = getattr(argument, "also", {})
        found += [
            {**argument.beside, **(also if value in moved else {}), name: value}
            for value in (*flags, *moved, *FURTHER.get(argument.takes, ()))
        ]
    return found


class Subject(NamedTuple):
    """What takes steps.

    Attributes:
        run: takes them: ``run(record, plan=, dtypes=, of_gradient=, between=, **options)``.
        once: makes one with options, for what these refuse; None: another subject does.
        arguments: the options, by a registry.
        plans: names of `PLANS`, on which it runs.
        usual: the plan of runs with options.
        forms: options with rules or states of their own.
        between: what may happen to it between two steps.
        dtypes: of its parameters.
    """

    run: Callable[..., None]
    once: Callable[..., Any] | None
    arguments: Mapping[str, Any]
    plans: Sequence[str]
    usual: str
    forms: Sequence[Mapping[str, Any]] = ()
    between: Mapping[str, Callable[[Any, Callable[[], Any]], Any]] = {}
    dtypes: Sequence[np.dtype] = STORAGE_DTYPES


Run = tuple[Mapping[str, Any], str, Sequence[Any], Any]


def runs(name: str, subject: Subject) -> Iterator[Run]:
    """Options, plan, dtypes of the parameters, and that of gradients where they have another."""
    _, _, known, mine, usual, forms, _, dtypes = subject
    for plan in mine:
        for dtype in dtypes[::3] if plan in ("large", "many") else dtypes:
            yield {}, plan, (dtype,), None
        if "nan" in plan and "skip_nonfinite" in known:
            yield {"skip_nonfinite": True}, plan, (F32,), None
        for form in forms:
            yield form, plan, (F32,), None
    yield {}, usual, dtypes, None
    of_options = turns(known)
    for k, options in enumerate(of_options):
        for dtype in dict.fromkeys((F32, dtypes[(1 + k % 3) % len(dtypes)])):
            yield options, usual, (dtype,), None
    of_options = [one for one in of_options if not {"state_dtype", "sparse_update"} & {*one}]
    for k, (w, g, s) in enumerate(STORAGES if of_options and len(dtypes) > 1 else ()):
        kept: dict[str, Any] = {}
        if s and "state_dtype" in known:
            kept = {**known["state_dtype"].beside, "state_dtype": s}
        yield kept, usual, (w,), g
        rng = rng_of(name, k)
        together = [options for options in of_options if rng.random() < 0.2]
        mixed = {name: value for options in together for name, value in options.items()}
        yield {**mixed, **kept}, mine[int(rng.integers(len(mine)))], (w,), g


def of_subject(place: str, name: str, subject: Subject) -> Cases:
    """All that a subject does and refuses, but for what it refuses by its own methods."""
    label, found = f"{place}.{name}", dict[str, Any]()
    for options, plan, dtypes, g in runs(name, subject):
        case = partial(subject.run, plan=plan, dtypes=dtypes, of_gradient=g, **options)
        types = " ".join(map(str, dtypes))
        found[f"{label}({labelled(options)}) {types} {plan}" + f" of {g}" * bool(g)] = case
    for change, between in subject.between.items():
        for plan in ("dense", subject.usual, "sometimes"):
            if plan in subject.plans:
                case = partial(subject.run, plan=plan, between=between)
                found[f"{label} {plan} {change}"] = case
    yield from found.items()
    if subject.once is not None:
        yield from refusals(label, subject.once, names=[*subject.arguments, "learning_rat"])
