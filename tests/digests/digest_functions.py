"""Cases of `digests.py`: operators, functions, schedules, parameters and checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

import numpy as np

from fusestep import nn, ops
from fusestep.nn import mxnet as mx

from digest_arrays import (
    BAD,
    F32,
    PLANS,
    STORAGE_DTYPES,
    Cases,
    defaults_of,
    gradients,
    labelled,
    normal,
    parameters,
    plans,
    refusals,
    rows,
    strided,
    unusual,
)
from digest_runs import Subject, of_subject
from operators import ADAM_UPDATE, EVERY_OPERATOR, Operator

OF_ROWS = [plan for plan in PLANS if plan not in plans(False)]

# Operators


def takes(operator: Operator, gradient: Any) -> bool:
    """Whether an operator has a kind of arguments for such a gradient."""
    if operator is ADAM_UPDATE:
        return True
    kind = nn.RowTensor if operator.takes_rows else np.ndarray
    return isinstance(gradient, kind)


def call(
    record: Any,
    operator: Operator,
    plan: str,
    dtypes: Any = (F32,),
    of_gradient: Any = None,
    **options: Any,
) -> None:
    """Three steps on the variables of parameters; and which of the given arrays are returned."""
    scalars = {name: options.pop(name) for name in operator.scalars if name in options}
    made, params = operator.new(**options), parameters(plan, dtypes)
    every = [{**operator.inputs(p.shape, p.dtype), **scalars} for p in params]
    for step in range(1, 4):
        for given, g in zip(every, gradients(plan, params, step, of_gradient), strict=True):
            if not takes(operator, g):
                continue
            given |= {operator.gradient: g}
            if operator.takes_rows:
                given |= {operator.gradient: g.values, "indices": g.indices}
            powers = {n: x**step for n, x in given.items() if n in ("beta1_power", "beta2_power")}
            returned = record.attempt(made, *{**given, **powers}.values())
            several = returned if isinstance(returned, tuple) else (returned,)
            record.add([[out is x for x in given.values()] for out in several])
    record.add(every)


def given(operator: Operator) -> dict[str, Any]:
    """Fresh arguments of one call."""
    found, sparse = operator.inputs((4, 3)), rows("call", (4, 3), 8)
    of_rows = {operator.gradient: sparse.values, "indices": sparse.indices}
    return {**found, **(of_rows if operator.takes_rows else {})}


def of_operators() -> Cases:
    for name, operator in {**EVERY_OPERATOR, "adam_update": ADAM_UPDATE}.items():
        mine, usual = plans(False), "dense"
        if operator.takes_rows:
            mine, usual = OF_ROWS, "widths"
        elif operator is ADAM_UPDATE:
            mine, usual = [*PLANS], "mixed"
        run = partial(call, operator=operator)
        known = {each: operator.known(each) for each in (*operator.constructor, *operator.scalars)}
        dtypes = STORAGE_DTYPES[:1] if operator.only_float32 else STORAGE_DTYPES
        subject = Subject(run, operator.new, known, mine, usual, dtypes=dtypes)
        yield from of_subject("ops", name, subject)
        usual_call = partial(given, operator)
        named = [*operator.arguments, "learning_rat"]
        yield from refusals(f"ops.{name}()", operator.new(), usual_call, named)
        if operator.takes_rows:
            dropping = operator.new(out_of_range="drop")
            yield from refusals(f"ops.{name}() dropped", dropping, usual_call, ["indices"])


def of_adam_update() -> Cases:
    """With an array for the new weights."""
    for label, g in (("dense", normal(0, (4, 3))), ("rows", rows(0, (4, 3), 5))):

        def usual(g: Any = g) -> dict[str, Any]:
            given = ADAM_UPDATE.inputs((4, 3))
            arrays = {name: given[name] for name in ("weight", "grad", "mean", "var")}
            return {"lr": 0.1, **arrays, "grad": g, "out": np.zeros((4, 3), F32)}

        yield from refusals(f"ops.adam_update {label}", ops.adam_update, usual)


# Functions, and what has no variables


def norms(record: Any, make: Callable[[], Any]) -> None:
    record.attempt(ops.global_norm, make())
    record.attempt(ops.clip_by_global_norm, make())
    given = make()
    record.attempt(ops.clip_by_global_norm, given, 0.5, in_place=True)
    record.add(given)


def of_norms() -> Cases:
    lists: dict[str, Callable[[], list[Any]]] = {
        "infinite": lambda: [np.full(3, np.inf, F32), normal(0, (5,))],
        "zero": lambda: [np.zeros(5, F32), rows(0, (4, 2), 0)],
    }
    for plan in PLANS:
        for dtypes in (*((dtype,) for dtype in STORAGE_DTYPES), STORAGE_DTYPES):
            for step in range(2):
                make = partial(gradients, plan, parameters(plan, dtypes), step)
                lists[f"{plan} {step} {' '.join(map(str, dtypes))}"] = make
    for label, make in lists.items():
        yield f"ops.clip_by_global_norm {label}", partial(norms, make=make)
    given = [[rows(n, (9, 4), n) for n in (5, 0, 7)], None, normal(0, (3,))]
    usual = partial(dict, x=given, clip_norm=0.5)
    yield from refusals("ops.clip_by_global_norm", ops.clip_by_global_norm, usual)
    yield from refusals("ops.global_norm", ops.global_norm)


def looked_up(record: Any, plan: str, dtype: Any) -> None:
    """Row-sparse gradients, and tables of their rows: what is looked up, and the way back."""
    lookup = ops.SparseGatherV2()
    for sparse in gradients(plan, parameters(plan, [dtype]), 0):
        if not isinstance(sparse, nn.RowTensor):
            continue
        record.add(sparse, repr(sparse), str(sparse.dtype), sparse.shape)
        record.attempt(sparse.coalesce)
        record.attempt(sparse.to_dense)
        table = normal(0, sparse.shape, sparse.dtype)
        record.attempt(lookup.backward, table)
        indices = sparse.indices.reshape(-1, 2 if len(sparse.indices) else 1).astype(np.int32)
        out = record.attempt(lookup, table, indices, 0)
        for gradient in (out, strided(0, out.shape, sparse.dtype), *unusual(out)):
            record.attempt(lookup.backward, gradient)


def of_rows() -> Cases:
    for dtype in STORAGE_DTYPES:
        for plan in OF_ROWS:
            case = partial(looked_up, plan=plan, dtype=dtype)
            yield f"ops.SparseGatherV2 {dtype} {plan}", case
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


# Parameters and checkpoints


def held(record: Any, data: Any) -> None:
    p = nn.Parameter(data, "p")
    record.add(p, repr(p), p.shape, p.ndim, p.size, str(p.dtype), np.asarray(p))
    for bad in (*unusual(np.ones((4, 3), F32)), normal(1, (2,)), data.copy()):
        record.attempt(setattr, p, "data", bad)
        record.add(p)


def file(record: Any, what: Any, content: bytes | None = None) -> None:
    """The bytes of a file that is saved, and what is read from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        if content is None:
            record.attempt(nn.save_checkpoint, what, path)
        else:
            path.write_bytes(content)
        record.add(path.read_bytes() if path.exists() else None)
        try:
            record.add(nn.load_checkpoint(path))
        except Exception as error:
            record.add(type(error).__name__, str(error).replace(folder, ""))


def of_files() -> Cases:
    arrays = {str(dtype): normal(str(dtype), (4, 3), dtype) for dtype in STORAGE_DTYPES}
    for name, array in arrays.items():
        yield f"nn.Parameter {name}", partial(held, data=array)
    yield from refusals("nn.Parameter", nn.Parameter, partial(dict, data=np.ones((4, 3), F32)))
    kinds = [np.arange(4).astype(kind) for kind in ("?", *"bhilqBHILQ", "F", "U")]
    arrays["strided"], p = normal(0, (4, 6))[:, ::2], nn.Parameter(np.ones(2, F32))
    things: list[Any] = [arrays, [nn.Parameter(np.ones(2, F32), "a")], [p], p, *BAD]
    things += [{"a": each} for each in (*kinds, *BAD)] + [{"__metadata__": p}, {1: np.ones(1)}]
    for k, what in enumerate(things):
        yield f"nn.save_checkpoint {k}", partial(file, what=what)
    for content in (b"", b"nothing", b"\0" * 8, b"\2" + b"\0" * 7 + b"{}"):
        yield f"nn.load_checkpoint {content!r}", partial(file, what=None, content=content)


def cases() -> Cases:
    for of in (
        *(of_operators, of_adam_update, of_norms, of_rows, of_bags, of_schedules),
        of_files,
    ):
        yield from of()
