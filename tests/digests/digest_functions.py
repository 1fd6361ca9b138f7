"""Cases of `digests.py`: functions of gradients, pooled tables, schedules and files."""

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from digest_inputs import BAD, EVERY_PLAN, F32, OF_ROWS, Given, normal, strided, unusual
from digest_record import Record, wrongly
from digest_steps import Cases, Signs, Subject, labelled, of_subject, update
from fusestep import nn, ops
from fusestep.nn import mxnet as mx
from helpers import STORAGE_DTYPES
from own_functions import AVERAGED, Own

# Gradients and rows of tables


def norms(record: Record, given: Given) -> None:
    for step in range(2):
        make = partial(given.gradients, given.parameters(), step)
        record.attempt(ops.global_norm, x=make())
        record.attempt(ops.clip_by_global_norm, make())
        changed = make()
        record.try_wrongly(ops.clip_by_global_norm, x=changed, clip_norm=0.5)
        record.attempt(ops.clip_by_global_norm, changed, 0.5, in_place=True)
        record.add(changed)


def looked_up(record: Record, given: Given) -> None:
    """Row-sparse gradients, and tables of their rows: what is looked up, and the way back."""
    lookup = ops.SparseGatherV2()
    for sparse in given.gradients(given.parameters(), 0):
        if not isinstance(sparse, nn.RowTensor):
            continue
        parts = {"values": sparse.values, "dense_shape": sparse.dense_shape}
        record.try_wrongly(ops.RowTensor, indices=sparse.indices, **parts)
        record.add(sparse, repr(sparse), str(sparse.dtype), sparse.shape)
        record.attempt(sparse.coalesce)
        record.attempt(sparse.to_dense)
        table = normal(0, sparse.shape, sparse.dtype)
        record.attempt(lookup.backward, table)
        indices = sparse.indices.reshape(-1, 2 if len(sparse.indices) else 1).astype(np.int32)
        record.try_wrongly(lookup, params=table, indices=indices, axis=0)
        out = record.attempt(lookup, table, indices, 0)
        for gradient in (out, strided(0, out.shape, sparse.dtype), *unusual(out)):
            record.attempt(lookup.backward, gradient)


def pooled(record: Record, pooling: str, dtype: Any, **options: Any) -> None:
    shapes = ((9, 3), (5, 16))
    tables = [normal(k, shape, dtype) for k, shape in enumerate(shapes)]
    form = (20,) if pooling == "none" else (5, 4)
    ids = [np.arange(20).reshape(form) % n for n, _ in shapes]
    bags = ops.EmbeddingBags(pooling, **options)
    out = record.attempt(bags, tables=tables, ids=ids)
    record.attempt(bags, tables, [own + 4 for own in ids])
    record.add([g.to_rows() for g in bags.gradients(tables, ids, None, out)])
    opt = nn.Adagrad(tables)
    stepped = nn.EmbeddingBags(tables, opt, pooling, **options)
    record.attempt(stepped.backward, out)
    record.attempt(stepped, ids)
    record.attempt(stepped.backward, out)
    record.add(tables, opt.state_dict())


def lost(record: Record, given: Given, rounding: str) -> None:
    """Shares of updates that 16 bits lose, before and after a step."""
    params = given.parameters()
    opt = nn.Adam(params, 1e-3, rounding=rounding)
    for step in range(2):
        gradients = given.gradients(params, step)
        record.attempt(nn.rounded_away, opt, gradients)
        record.attempt(opt, gradients)
    record.add(params, opt.state_dict())


def rows_anew(record: Record) -> None:
    """Rows that sleep, begin anew, or are copied."""
    w = normal(0, (9, 4), np.float32)
    opt = nn.LazyAdam([w], 0.1, sparse_update="catch_up")
    for step in range(4):
        opt([ops.RowTensor(np.array([step, 2]), normal(step, (2, 4), np.float32), w.shape)])
    record.attempt(opt.prepare, w, np.array([0, 1]))
    for rows in (np.array([1, 7]), np.array([9])):
        record.attempt(opt.reset_rows, w, rows, nn.UniformRows(0.5, seed=3))
        record.attempt(opt.copy_rows, w, rows, rows - 1)
    record.attempt(nn.UniformRows, -1.0)
    record.attempt(nn.NormalRows(0.5, seed=3), np.array([1, -7]), (2, 4))
    record.add(w, opt.state_dict(), opt.state_dict(flush=True), w)
    record.attempt(opt.grow, w, 12)
    record.add(opt.parameters, opt.state_dict())


def growing(record: Record) -> None:
    """Ids that get rows, lose them, and come back."""
    ids = nn.IdMap(9, after=2, full="evict")
    for step in range(6):
        batch = (np.arange(8) * 1_000_003 * (step + 1)) % 17 - 5
        record.attempt(ids, batch, step)
        record.attempt(ids.evict, unused_for=3, keep=batch[:1])
    record.try_wrongly(ids, ids=np.arange(3), step=6)
    record.try_wrongly(nn.IdMap, capacity=3)
    record.attempt(ids.grow, 12)
    record.attempt(ids.changed_since, 3)
    record.add(ids.state_dict(), repr(ids))


def of_gradients() -> Cases:
    for rounding in ("nearest", "master", "kahan", "stochastic"):
        case = partial(lost, given=Given("dense", (np.dtype(np.float16),)), rounding=rounding)
        yield f"nn.rounded_away({rounding})", case
    yield from of_subject("ops", "clip_by_global_norm", Subject(norms, {}, EVERY_PLAN, "mixed"))
    yield from of_subject("ops", "SparseGatherV2", Subject(looked_up, {}, OF_ROWS, "widths"))
    for dtype in STORAGE_DTYPES:
        for pooling in ("sum", "mean", "none", "max"):
            for options in ({}, {"padding_idx": 2}, {"out_of_range": "drop"}):
                case = partial(pooled, pooling=pooling, dtype=dtype, **options)
                label = f"ops.EmbeddingBags({pooling}, {labelled(options)}) {dtype}"
                yield from ((label, case), (f"{label} wrongly", partial(wrongly, case=case)))
    # Gradients are BagTensors, and the optimizer is stepped by bags of nn.
    yield from ((f"{name} of bags", case) for name in ("ops.BagTensor", "nn.EmbeddingBags"))
    yield "ops.global_norm", partial(norms, given=Given("mixed"))
    yield "ops.RowTensor", partial(looked_up, given=Given("mixed"))


# Schedules

# Values of arguments by their names, or else their types; others are halves, thirds, ... by place.
NUMBERS: dict[str, Any] = {
    "min_lr": 0.01, "warmup_begin_lr": 0.002, "max_update": 11, "total_step": 13,
    "step_per_epoch": 2, "int": 3, "bool": True, "str": "constant", "list[int]": [2, 5, 9],
    "Sequence[int]": [2, 5], "Sequence[float]": [0.1, 0.05],
    "Sequence[Schedule | float]": [nn.WarmUpLR(0.1, 3), 0.05, lambda step: 0.1 / (step + 1)],
}  # fmt: skip


def values(record: Record, make: Callable[..., Any], **options: Any) -> None:
    """The values of many steps, and those of steps that are none."""
    record.try_wrongly(make, **options)
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
    known = [p for p in inspect.signature(make).parameters.values() if p.kind != p.VAR_KEYWORD]
    given = {
        p.name: NUMBERS.get(p.name, NUMBERS.get(p.annotation, 1 / (k + 2)))
        for k, p in enumerate(known)
    }
    needed = {p.name: given[p.name] for p in known if p.default is p.empty}
    for options in (needed, *({**needed, n: given[n]} for n in given if n not in needed), given):
        yield f"{name}({labelled(options)})", partial(values, make=make, **options)
    yield f"{name} wrongly", partial(wrongly, case=partial(values, make=make, **given))


# What has no steps


def held(record: Record, data: Any) -> None:
    p = nn.Parameter(data, "p")
    record.add(p, repr(p), p.shape, p.ndim, p.size, str(p.dtype), np.asarray(p))
    record.try_wrongly(nn.Parameter, data=data)
    record.try_wrongly(partial(setattr, p, "data"), value=data)


def save(data: Any, content: bytes | None = None) -> Any:
    """The bytes of a file that is saved, and what is read from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        try:
            if content is None:
                nn.save_checkpoint(data, path)
            else:
                path.write_bytes(content)
            return path.read_bytes(), nn.load_checkpoint(path)
        except Exception as error:
            raise RuntimeError(type(error).__name__, str(error).replace(folder, "")) from None


def saved(record: Record) -> None:
    """Of arrays of every dtype, of parameters, and of what is neither; and damaged files."""
    kinds = (*STORAGE_DTYPES, "?", *"bhilqBHILQFU")
    record.attempt(save, {str(kind): np.arange(4).astype(kind) for kind in kinds})
    record.try_wrongly(save, data=[nn.Parameter(np.ones(2, F32), "a")])
    for content in (b"", b"nothing", b"\0" * 8, b"\2" + b"\0" * 7 + b"{}"):
        record.attempt(save, None, content)


def own_rules(record: Record) -> None:
    """A rule, a formula and a state that a user may define."""
    formula = Own(0.1, [np.ones(2, F32)], rule=AVERAGED).formula()
    record.add([formula.at(real, 0.1, 0.01, 3) for real in (np.float32, np.float64)])
    record.add([AVERAGED.states, AVERAGED.hp, *nn.State("m", "row", 0.5)[:4]])


def registered(record: Record) -> None:
    """A class of a user by its name; it is forgotten afterwards."""
    for _ in range(2):
        record.attempt(mx.register, klass=Signs)
    for name, way in (("SIGNS", ""), ("ADAM", "by update")):
        update(record, Given("dense"), partial(mx.create, name, learning_rate=0.1), way)
    del mx.Optimizer.opt_registry["signs"]
    record.try_wrongly(mx.create, name="ADAM", learning_rate=0.1)
    record.try_wrongly(mx.get_updater, optimizer=Signs())


def cases() -> Cases:
    yield from of_gradients()
    yield from of_schedules()
    others = {
        **{f"nn.Parameter {t}": partial(held, data=normal(0, (4, 3), t)) for t in STORAGE_DTYPES},
        **dict.fromkeys(("nn.save_checkpoint", "nn.load_checkpoint"), saved),
        **dict.fromkeys(("nn.Formula", "nn.Rule", "nn.State"), own_rules),
        **dict.fromkeys(("nn.UniformRows", "nn.NormalRows"), rows_anew), "nn.IdMap": growing,
        **{f"nn.mxnet.{n}": registered for n in ("create", "register", "get_updater", "Updater")},
    }  # fmt: skip
    for name, case in others.items():
        yield f"{name}", partial(wrongly, case=case)
