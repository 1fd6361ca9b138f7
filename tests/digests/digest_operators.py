"""Cases of `digests.py`: operators by the table of the tests; functions and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

import numpy as np

from fusestep import nn, ops
from fusestep.nn import mxnet as mx

from digest_arrays import (
    BAD,
    F32,
    LARGE,
    ROWS,
    SIZES,
    Cases,
    Shape,
    defaults_of,
    labelled,
    normal,
    positive,
    refusals,
    rows,
    strided,
    unusual,
)
from helpers import STORAGE_DTYPES
from operators import EVERY_OPERATOR, Operator

Given = Callable[[], dict[str, Any]]


def given(operator: Operator, shape: Shape, dtype: Any = F32, **changed: Any) -> dict[str, Any]:
    """Fresh arguments of a call; ``rows`` are those of its gradient."""
    found = operator.inputs(shape, dtype)
    sparse = changed.pop("rows", lambda: rows("call", shape, 2 * shape[0], dtype))
    if operator.takes_rows:
        found |= {operator.gradient: sparse().values, "indices": sparse().indices}
    return {**found, **changed}


def call(record: Any, operator: Operator, options: Mapping[str, Any], make: Given) -> None:
    """Three steps on the same variables; and which of the given arrays are returned."""
    made, arguments = operator.new(**options), make()
    powers = {name: arguments[name] for name in ("beta1_power", "beta2_power") if name in arguments}
    for step in range(1, 4):
        returned = made(*{**arguments, **{n: x**step for n, x in powers.items()}}.values())
        several = returned if isinstance(returned, tuple) else (returned,)
        record.add(returned, [[out is x for x in arguments.values()] for out in several])
    record.add([*arguments.values()])


def variants(operator: Operator) -> Iterator[tuple[dict[str, Any], str, Given]]:
    """What an operator is called with: its options, a label, and what makes the arguments."""
    usual, gradient = partial(given, operator), operator.gradient
    dtypes = STORAGE_DTYPES[:1] if operator.name.startswith("Fused") else STORAGE_DTYPES
    for shape in () if operator.takes_rows else SIZES:
        for dtype in dtypes:
            yield {}, f"{dtype} {shape}", partial(usual, shape, dtype)
    for shape, n, hot in ROWS if operator.takes_rows else ():
        for dtype, index in (*((dtype, np.int64) for dtype in dtypes), (F32, np.int32)):
            sparse = partial(rows, 0, shape, n, dtype, index, hot)
            label = f"{dtype} {n} of {shape} {index.__name__}"
            yield {}, label, partial(usual, shape, dtype, rows=sparse)
    for name in operator.constructor:
        known = operator.known(name)
        other = {"flag": True, "out of range": "drop"}.get(known.takes, known.moved)
        options = {**known.beside, name: known.moved if known.moved is False else other}
        beyond = {"rows": partial(rows, 0, (5_000, 8), 70)} if other == "drop" else {}
        yield options, "usual", partial(usual, (9, 8), **beyond)
        yield options, "large", partial(usual, LARGE)
    for name in operator.scalars:
        known = operator.known(name)
        yield (
            {**known.beside},
            f"{name}={known.moved}",
            partial(usual, (9, 8), **{name: known.moved}),
        )
    if operator.takes_rows:
        return
    for low, high in ((2, 0), (3, 0), (0, 1)):
        lower = normal(low, (9, 8), STORAGE_DTYPES[low])
        label = f"{STORAGE_DTYPES[high]} of {lower.dtype}"
        yield {}, label, partial(usual, (9, 8), STORAGE_DTYPES[high], **{gradient: lower})
    not_finite = np.where(normal(0, (9, 8)) > 1, np.float32("nan"), np.float32(1))
    for label, array in (("strided", strided(0, (9, 8))), ("nan", not_finite)):
        yield {}, label, partial(usual, (9, 8), **{gradient: array})


def of_operators() -> Cases:
    for name, operator in EVERY_OPERATOR.items():
        for options, label, make in variants(operator):
            case = partial(call, operator=operator, options=options, make=make)
            yield f"ops.{name}({labelled(options)}) {label}", case
        yield from refusals(
            f"ops.{name}", operator.new, names=[*operator.constructor, "use_lockin"]
        )
        usual = partial(given, operator, (4, 3))
        yield from refusals(
            f"ops.{name}()", operator.new(), usual, [*operator.arguments, "learning_rat"]
        )
        if operator.takes_rows:
            dropping = operator.new(out_of_range="drop")
            yield from refusals(f"ops.{name}() dropped", dropping, usual, ["indices"])


# Functions, and what has no variables

LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "dense": lambda d: [normal(shape, shape, d) for shape in SIZES],
    "rows": lambda d: [rows(shape, shape, n, d, hot=hot) for shape, n, hot in ROWS],
    "parts": lambda d: [[rows(n, (9, 4), n, d) for n in (5, 0, 7)], None, normal(0, (3,), d)],
    "large": lambda d: [normal(0, LARGE, d), rows(1, (2_003, 16), 9_000, d, np.int32, 0.6)],
    "strided": lambda d: [strided(0, (5, 7), d), None],
    "infinite": lambda d: [np.full(3, np.inf, d), normal(0, (5,), d)],
    "zero": lambda d: [np.zeros(5, d), rows(0, (4, 2), 0, d)],
    "storages": lambda d: [normal(0, (40,), each) for each in (*STORAGE_DTYPES, d)],
    "empty": lambda _: [],
    "integers": lambda _: [np.arange(3)],
    "bad index": lambda d: [nn.RowTensor(np.array([4]), np.ones((1, 2), d), (4, 2))],
    "other parts": lambda d: [[rows(0, (9, 4), 2, d), rows(0, (8, 4), 2, d)]],
}


def norms(record: Any, name: str, make: Callable[[], Any]) -> None:
    record.attempt(getattr(ops, name), make())
    if name == "clip_by_global_norm":
        gradients = make()
        record.attempt(ops.clip_by_global_norm, gradients, 0.5, in_place=True)
        record.add(gradients)


def of_norms() -> Cases:
    usual = partial(dict, x=LISTS["parts"](F32), clip_norm=0.5)
    yield from refusals("ops.clip_by_global_norm", ops.clip_by_global_norm, usual)
    yield from refusals("ops.global_norm", ops.global_norm)
    for name in ("global_norm", "clip_by_global_norm"):
        for dtype in STORAGE_DTYPES:
            for kind, make in LISTS.items():
                case = partial(norms, name=name, make=partial(make, dtype))
                yield f"ops.{name} {dtype} {kind}", case


def looked_up(record: Any, sparse: nn.RowTensor) -> None:
    """A row-sparse gradient, and a table of its rows: what is looked up, and the way back."""
    record.add(sparse, repr(sparse), str(sparse.dtype), sparse.shape)
    record.attempt(sparse.coalesce)
    record.attempt(sparse.to_dense)
    lookup, table = ops.SparseGatherV2(), normal(0, sparse.shape, sparse.dtype)
    record.attempt(lookup.backward, table)
    indices = sparse.indices.reshape(-1, 2 if len(sparse.indices) else 1).astype(np.int32)
    out = record.attempt(lookup, table, indices, 0)
    for gradient in (out, strided(0, out.shape, sparse.dtype), *unusual(out)):
        record.attempt(lookup.backward, gradient)


def of_rows() -> Cases:
    for dtype in STORAGE_DTYPES:
        for shape, n, hot in ROWS:
            case = partial(looked_up, sparse=rows(0, shape, n, dtype, hot=hot))
            yield f"ops.SparseGatherV2 {dtype} {n} of {shape}", case
    usual = partial(dict, params=normal(0, (4, 3)), indices=np.array([3, 0]), axis=0)
    yield from refusals("ops.SparseGatherV2()", ops.SparseGatherV2(), usual)
    usual = partial(dict, indices=np.array([1, 0]), values=np.ones((2, 3)), dense_shape=(4, 3))
    yield from refusals("ops.RowTensor", ops.RowTensor, usual)


def pooled(record: Any, pooling: str, dtype: Any, options: dict[str, Any]) -> None:
    shapes = ((9, 3), (5, 16))
    tables = [normal(k, shape, dtype) for k, shape in enumerate(shapes)]
    form = (20,) if pooling == "none" else (5, 4)
    ids = [np.arange(20).reshape(form) % n for n, _ in shapes]
    bags = ops.EmbeddingBags(pooling, **options)
    out = record.attempt(bags, tables, ids)
    record.attempt(bags, tables, [own + 4 for own in ids])
    record.add([g.to_rows() for g in bags.gradients(tables, ids, None, out)])
    opt = nn.Adagrad(tables)
    stepped = nn.EmbeddingBags(tables, opt, pooling, **options)
    record.attempt(stepped.backward, out)
    record.attempt(stepped, ids)
    record.attempt(stepped.backward, out)
    record.add(tables, opt.state_dict())


def of_bags() -> Cases:
    for dtype in STORAGE_DTYPES:
        for pooling in ("sum", "mean", "none", "max"):
            for options in ({}, {"padding_idx": 2}, {"out_of_range": "drop"}):
                case = partial(pooled, pooling=pooling, dtype=dtype, options=options)
                yield f"ops.EmbeddingBags({pooling}, {labelled(options)}) {dtype}", case
    # Gradients are BagTensors, and the optimizer is stepped by bags of nn.
    yield from ((f"{name} of bags", case) for name in ("ops.BagTensor", "nn.EmbeddingBags"))


ADAM_OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"lazy_update": False}, {"beta1": 0.5}, {"beta2": 0.5}, {"epsilon": 0.1}, {"wd": 0.1}),
    *({"rescale_grad": 0.5}, {"clip_gradient": 0.3}, {"use_locking": True}, {"compat": "1.9"}),
    {"wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3, "compat": "1.9"},
    {"wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3, "lazy_update": False},
)


def adam_update(record: Any, make: Callable[[], Any], out: str, options: dict[str, Any]) -> None:
    """Three steps, whose new weights go to ``out``."""
    named = {n: positive(n, make().shape, make().dtype) for n in ("weight", "mean", "var", "other")}
    w, mean, var, _ = named.values()
    for step in range(3):
        rated = {"lr": 0.05 / (step + 1), **options}
        result = ops.adam_update(w, make(), mean, var, named.get(out), **rated)
        record.add(named, result, result is named.get(out))


def of_adam_update() -> Cases:
    for dtype in STORAGE_DTYPES:
        sources = {f"{s}": partial(normal, 0, s, dtype) for s in (*SIZES, LARGE)}
        for shape, n, hot in ROWS:
            sources[f"{n} rows of {shape}"] = partial(rows, 0, shape, n, dtype, hot=hot)
        for k, (label, make) in enumerate(sources.items()):
            every = dtype == F32 and label in ("(3, 5)", "50 rows of (20, 3, 4)")
            for options in ADAM_OPTIONS if every else (ADAM_OPTIONS[1 + k % 11], {}):
                for out in ("none", "weight", "other"):
                    case = partial(adam_update, make=make, out=out, options=options)
                    yield f"ops.adam_update({labelled(options)}) {dtype} {label} to {out}", case
    arrays = {name: positive(name, (4, 3)) for name in ("weight", "grad", "mean", "var", "out")}
    for label, changed in (("dense", {}), ("rows", {"grad": rows(0, (4, 3), 5)})):

        def usual(changed: dict[str, Any] = changed) -> dict[str, Any]:
            return {"lr": 0.1, **{name: array.copy() for name, array in arrays.items()}, **changed}

        yield from refusals(f"ops.adam_update {label}", ops.adam_update, usual)


# Schedules

NUMBERS: dict[str, Any] = {
    "learning_rate": 0.1,
    "decay_rate": 0.7,
    "decay_steps": 4,
    "min_lr": 0.01,
    "max_lr": 0.1,
    "end_learning_rate": 0.01,
    "power": 0.5,
    "warmup_steps": 3,
    "total_step": 13,
    "pwr": 1.5,
    "step_per_epoch": 2,
    "decay_epoch": 3,
    "warmup_epoch": 2,
    "milestone": [2, 5, 9],
    "learning_rates": [0.1, 0.05, 0.01],
    "factor": 0.5,
    "stop_factor_lr": 0.03,
    "step": 3,
    "base_lr": 0.1,
    "warmup_begin_lr": 0.002,
    "max_update": 11,
    "final_lr": 0.01,
    "warmup_mode": "constant",
    "milestones": [4, 9],
    "schedules": [nn.WarmUpLR(0.1, 3), 0.05, lambda step: 0.1 / (step + 1)],
}


def values(record: Any, make: Callable[..., Any], **options: Any) -> None:
    """The values of many steps, and those of steps that are none."""
    schedule = make(**options)
    record.add(schedule)
    for step in (*range(25), 10**6, np.int64(3), np.arange(6), *BAD) if callable(schedule) else ():
        record.attempt(schedule, step)


def of_schedules() -> Cases:
    """What is made of numbers: schedules and lists of rates, and the schedulers of MXNet."""
    kinds = (nn.LearningRateSchedule, mx.lr_scheduler.LRScheduler)
    for place, module in (("nn", nn), ("nn.mxnet.lr_scheduler", mx.lr_scheduler)):
        for name in module.__all__:
            make = getattr(module, name)
            if name.endswith("_lr") or (isinstance(make, type) and issubclass(make, kinds)):
                yield from of_schedule(f"{place}.{name}", make)


def of_schedule(name: str, make: Any) -> Cases:
    numbers = {**NUMBERS, **({"step": [2, 5, 9]} if "MultiFactor" in name else {})}
    known = defaults_of(make)
    given = {n: numbers.get(n, not default) for n, default in known.items()}
    needed = {n: given[n] for n, default in known.items() if default is Parameter.empty}
    in_turn = [{**needed, n: given[n]} for n in given if n not in needed]
    for options in (needed, *in_turn, *([given] if len(in_turn) > 1 else [])):
        yield f"{name}({labelled(options)})", partial(values, make=make, **options)
    yield from refusals(name, make, partial(dict, needed))


def cases() -> Cases:
    for of in (of_operators, of_norms, of_rows, of_bags, of_adam_update, of_schedules):
        yield from of()
