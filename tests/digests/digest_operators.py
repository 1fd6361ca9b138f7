"""Cases of `digests.py`: operators, functions and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from fusestep import nn, ops
from fusestep.nn import mxnet as mx

from digest_arrays import (
    BAD,
    DTYPES,
    F32,
    LARGE,
    REQUIRED,
    ROWS,
    SIZES,
    WIDTHS,
    Cases,
    Shape,
    arguments_of,
    labelled,
    moved,
    normal,
    positive,
    refusals,
    rows,
    strided,
    unusual,
)

Given = Callable[[], dict[str, Any]]

# Operators

GRADIENTS = ("gradient", "grad")
SCALARS = {
    "beta1": 0.9,
    "beta2": 0.99,
    "lr": 0.05,
    "learning_rate": 0.05,
    "epsilon": 1e-3,
    "decay": 0.1,
    "momentum": 0.8,
    "l1": 0.02,
    "l2": 0.1,
    "lr_power": -0.5,
    "beta1_power": 0.9,
    "beta2_power": 0.99,
    "norm_weight": 4.0,
    "norm_gradient": 9.0,
    "weight_decay": 0.2,
}
RANGES: dict[str, Callable[[np.ndarray], Any]] = {
    "stat": np.round,  # some elements take their first step
    "mean_gradient": lambda x: x / 10,  # a positive variance everywhere
}


def operators() -> dict[str, Any]:
    """Those that are called with a gradient."""
    found = {name: getattr(ops, name) for name in ops.__all__}
    return {
        name: cls
        for name, cls in found.items()
        if isinstance(cls, type) and {*GRADIENTS} & {*arguments_of(cls.__call__)}
    }


def of_call(
    cls: Any, shape: Shape = (9, 8), dtype: Any = F32, sparse: Any = None, **changed: Any
) -> dict[str, Any]:
    """Fresh arguments of a call, in order; ``changed`` are others than usual."""
    found: dict[str, Any] = {}
    for name in [*arguments_of(cls.__call__)][1:]:
        if name in GRADIENTS:
            found[name] = normal(name, shape, dtype)
        elif name in SCALARS:
            found[name] = SCALARS[name]
        elif name == "indices":
            given = sparse() if sparse else rows("call", shape, 2 * shape[0], dtype)
            found |= {next(n for n in found if n in GRADIENTS): given.values, name: given.indices}
        else:
            array = RANGES.get(name, np.asarray)(positive(name, shape))
            found[name] = np.asarray(array).astype(dtype)
    return {**found, **changed}


def make_operator(cls: Any, **options: Any) -> Any:
    """An operator with these options, and with what it cannot do without."""
    needed = {n: SCALARS[n] for n, default in arguments_of(cls).items() if default is REQUIRED}
    return cls(**{**needed, **options})


def call(record: Any, cls: Any, options: Mapping[str, Any], given: Given) -> None:
    """Three steps on the same variables; and which of the given arrays are returned."""
    operator, arguments = make_operator(cls, **options), given()
    for step in range(1, 4):
        for power in {"beta1_power", "beta2_power"} & {*arguments}:
            arguments[power] = SCALARS[power] ** step
        returned = operator(*arguments.values())
        several = returned if isinstance(returned, tuple) else (returned,)
        record.add(returned, [[out is x for x in arguments.values()] for out in several])
    record.add([*arguments.values()])


def variants(cls: Any) -> Iterator[tuple[dict[str, Any], str, Given]]:
    """What an operator is called with: its options, a label, and what makes the arguments."""
    given, usual = partial(of_call, cls), of_call(cls)
    gradient, takes_rows = next(n for n in usual if n in GRADIENTS), "indices" in usual
    for of_dtype, dtype in {"float32": F32}.items() if takes_rows else DTYPES.items():
        for shape in [(40, width) for width in WIDTHS] if takes_rows else SIZES:
            yield {}, f"{of_dtype} {shape}", partial(given, shape, dtype)
    for name, default in arguments_of(cls).items():
        for value in moved(name, SCALARS.get(name, default), {"out_of_range": ("drop",)}):
            beyond = partial(rows, 0, (5_000, 8), 70) if value == "drop" else None
            yield {name: value}, "usual", partial(given, sparse=beyond)
            yield {name: value}, "large", partial(given, LARGE)
    for name in (name for name in usual if name in SCALARS):
        yield {}, f"half {name}", partial(given, **{name: SCALARS[name] / 2})
    for shape, n, hot in ROWS if takes_rows else ():
        for index in (np.int32, np.int64):
            sparse = partial(rows, 0, shape, n, index=index, hot=hot)
            yield {}, f"{n} of {shape} {index.__name__}", partial(given, shape, sparse=sparse)
    if takes_rows:
        return
    for low, high in (("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")):
        lower = {gradient: normal(low, (9, 8), DTYPES[low])}
        yield {}, f"{high} of {low}", partial(given, dtype=DTYPES[high], **lower)
    not_finite = np.where(normal(0, (9, 8)) > 1, np.float32("nan"), np.float32(1))
    for label, array in (("strided", strided(0, (9, 8))), ("nan", not_finite)):
        yield {}, label, partial(given, **{gradient: array})


def of_operator(name: str, cls: Any) -> Cases:
    for options, label, given in variants(cls):
        case = partial(call, cls=cls, options=options, given=given)
        yield f"ops.{name}({labelled(options)}) {label}", case
    names = (*arguments_of(cls), "use_lockin")
    yield from refusals(f"ops.{name}", partial(make_operator, cls), names=names)
    usual = partial(of_call, cls, (4, 3))
    yield from refusals(f"ops.{name}()", make_operator(cls), usual)
    if "indices" in usual():
        dropping = make_operator(cls, out_of_range="drop")
        yield from refusals(f"ops.{name}() dropped", dropping, usual, ["indices"])


# Functions, and what has no variables

LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "dense": lambda d: [normal(shape, shape, d) for shape in SIZES],
    "rows": lambda d: [rows(width, (40, width), 90, d, hot=0.2) for width in WIDTHS],
    "hot rows": lambda d: [rows(0, shape, n, d, hot=hot) for shape, n, hot in ROWS],
    "parts": lambda d: [[rows(n, (9, 4), n, d) for n in (5, 0, 7)], None, normal(0, (3,), d)],
    "large": lambda d: [normal(0, LARGE, d), rows(1, (2_003, 16), 9_000, d, np.int32, 0.6)],
    "strided": lambda d: [strided(0, (5, 7), d), None],
    "infinite": lambda d: [np.full(3, np.inf, d), normal(0, (5,), d)],
    "zero": lambda d: [np.zeros(5, d), rows(0, (4, 2), 0, d)],
    "storages": lambda d: [normal(0, (40,), each) for each in (*DTYPES.values(), d)],
    "empty": lambda _: [],
    "integers": lambda _: [np.arange(3)],
    "bad index": lambda d: [nn.RowTensor(np.array([4]), np.ones((1, 2), d), (4, 2))],
    "other parts": lambda d: [[rows(0, (9, 4), 2, d), rows(0, (8, 4), 2, d)]],
}


def of_norms() -> Cases:
    usual = partial(dict, x=LISTS["parts"](F32), clip_norm=0.5)
    yield from refusals("ops.clip_by_global_norm", ops.clip_by_global_norm, usual)
    yield from refusals("ops.global_norm", ops.global_norm)
    for name in ("global_norm", "clip_by_global_norm"):
        for of_dtype, dtype in DTYPES.items():
            for kind, make in LISTS.items():
                case = partial(_attempt, getattr(ops, name), make(dtype))
                yield f"ops.{name} {of_dtype} {kind}", case


def _attempt(function: Callable[..., Any], given: Any, record: Any) -> None:
    record.attempt(function, given)


def gather(record: Any, shape: Shape, dtype: Any, indices: np.ndarray) -> None:
    lookup, table = ops.SparseGatherV2(), normal(0, shape, dtype)
    record.attempt(lookup.backward, np.ones(shape, dtype))
    out = record.attempt(lookup, table, indices, 0)
    for gradient in (out, strided(0, out.shape, dtype), *unusual(out)):
        record.attempt(lookup.backward, gradient)


def row_tensor(record: Any, given: nn.RowTensor) -> None:
    record.add(given, repr(given), str(given.dtype), given.shape)
    record.attempt(given.coalesce)
    record.attempt(given.to_dense)


def of_rows() -> Cases:
    for of_dtype, dtype in DTYPES.items():
        for shape, n, hot in (*(((40, width), 26, 0.0) for width in WIDTHS), *ROWS):
            given = rows(0, shape, n, dtype, hot=hot)
            label = f"{of_dtype} {n} of {shape}"
            yield f"ops.RowTensor {label}", partial(row_tensor, given=given)
            indices = given.indices.reshape(-1, 2 if n else 1).astype(np.int32)
            case = partial(gather, shape=shape, dtype=dtype, indices=indices)
            yield f"ops.SparseGatherV2 {label}", case
    looked_up = partial(dict, params=normal(0, (4, 3)), indices=np.array([3, 0]), axis=0)
    yield from refusals("ops.SparseGatherV2()", ops.SparseGatherV2(), looked_up)
    usual = partial(dict, indices=np.array([1, 0]), values=np.ones((2, 3)), dense_shape=(4, 3))
    yield from refusals("ops.RowTensor", ops.RowTensor, usual)


def pooled(record: Any, pooling: str, dtype: Any, options: dict[str, Any]) -> None:
    shapes = ((9, 3), (5, 16))
    tables = [normal(k, shape, dtype) for k, shape in enumerate(shapes)]
    ids = [np.arange(20) % n if pooling == "none" else np.arange(20).reshape(5, 4) % n
           for n, _ in shapes]  # fmt: skip
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
    for of_dtype, dtype in DTYPES.items():
        for pooling in ("sum", "mean", "none"):
            for options in ({}, {"padding_idx": 2}, {"out_of_range": "drop"}):
                case = partial(pooled, pooling=pooling, dtype=dtype, options=options)
                label = f"({pooling}, {labelled(options)}) {of_dtype}"
                yield f"ops.EmbeddingBags{label}", case
    case = partial(pooled, pooling="sum", dtype=F32, options={})
    yield from (
        (f"{name} of EmbeddingBags", case) for name in ("ops.BagTensor", "nn.EmbeddingBags")
    )


ADAM_OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"lazy_update": False}, {"beta1": 0.5}, {"beta2": 0.5}, {"epsilon": 0.1}, {"wd": 0.1}),
    *({"rescale_grad": 0.5}, {"clip_gradient": 0.3}, {"use_locking": True}, {"compat": "1.9"}),
    {"wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3, "compat": "1.9"},
    {"wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.3, "lazy_update": False},
)


def adam_update(
    record: Any, given: Callable[[], Any], dtype: Any, out: str, options: Mapping[str, Any]
) -> None:
    """Three steps, whose new weights go to ``out``."""
    shape = given().shape
    named = {name: positive(name, shape, dtype) for name in ("weight", "mean", "var", "other")}
    w, mean, var, _ = named.values()
    for step in range(3):
        rated = {"lr": 0.05 / (step + 1), **options}
        result = ops.adam_update(w, given(), mean, var, named.get(out), **rated)
        record.add(named, result, result is named.get(out))


def of_adam_update() -> Cases:
    for of_dtype, dtype in DTYPES.items():
        sources = {f"{s}": partial(normal, 0, s, dtype) for s in (*SIZES, LARGE)}
        for shape, n, hot in ROWS:
            sources[f"{n} rows of {shape}"] = partial(rows, 0, shape, n, dtype, hot=hot)
        for k, (label, given) in enumerate(sources.items()):
            all_of_them = dtype is F32 and label in ("(3, 5)", "50 rows of (20, 3, 4)")
            for options in ADAM_OPTIONS if all_of_them else (ADAM_OPTIONS[1 + k % 11], {}):
                for out in ("none", "weight", "other"):
                    case = partial(adam_update, given=given, dtype=dtype, out=out, options=options)
                    name = f"ops.adam_update({labelled(options)}) {of_dtype} {label} to {out}"
                    yield name, case
    names = ("weight", "grad", "mean", "var", "out")
    for label, sparse in (("dense", False), ("rows", True)):
        changed = {"grad": rows(0, (4, 3), 5)} if sparse else {}
        usual = partial(_of_update, names, changed)
        yield from refusals(f"ops.adam_update {label}", ops.adam_update, usual)


def _of_update(names: tuple[str, ...], changed: dict[str, Any]) -> dict[str, Any]:
    return {"lr": 0.1, **{name: positive(name, (4, 3)) for name in names}, **changed}


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


def schedules() -> dict[str, Any]:
    """What is made of numbers: schedules and lists of rates, and the schedulers of MXNet."""
    rates = mx.lr_scheduler
    found = {f"nn.{name}": getattr(nn, name) for name in nn.__all__}
    found |= {f"nn.mxnet.lr_scheduler.{n}": getattr(rates, n) for n in rates.__all__}
    kinds = (nn.LearningRateSchedule, rates.LRScheduler)
    return {
        name: value
        for name, value in found.items()
        if name.endswith("_lr") or (isinstance(value, type) and issubclass(value, kinds))
    }


def values(record: Any, make: Callable[..., Any], **options: Any) -> None:
    """The values of many steps, and those of steps that are none."""
    schedule = make(**options)
    record.add(schedule)
    for step in (*range(25), 10**6, np.int64(3), np.arange(6), *BAD) if callable(schedule) else ():
        record.attempt(schedule, step)


def of_schedule(name: str, make: Any) -> Cases:
    numbers = {**NUMBERS, **({"step": [2, 5, 9]} if "MultiFactor" in name else {})}
    given = {n: numbers.get(n, not default) for n, default in arguments_of(make).items()}
    needed = {n: given[n] for n, default in arguments_of(make).items() if default is REQUIRED}
    in_turn = [{**needed, n: given[n]} for n in given if n not in needed]
    for options in (needed, *in_turn, *([given] if len(in_turn) > 1 else [])):
        yield f"{name}({labelled(options)})", partial(values, make=make, **options)
    yield from refusals(name, make, partial(dict, needed))


def cases() -> Cases:
    for name, cls in operators().items():
        yield from of_operator(name, cls)
    yield from of_norms()
    yield from of_rows()
    yield from of_bags()
    yield from of_adam_update()
    for name, make in schedules().items():
        yield from of_schedule(name, make)
