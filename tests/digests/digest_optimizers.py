"""Cases of `digests.py`: the optimizers of nn by their registry, and two that a user may define."""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fusestep import nn
from fusestep.nn.registry import ROWS, Argument
from fusestep.nn.registry.record import COMMON

from digest_arrays import (
    F32,
    LARGE,
    SIZES,
    Cases,
    Shape,
    labelled,
    normal,
    refusals,
    rng_of,
    rows,
    strided,
)
from helpers import BF16, STORAGE_DTYPES

Make = Callable[..., Any]
HALF, DOUBLE = np.dtype(np.float16), np.dtype(np.float64)

# What optimizers are run on

Kind = Callable[[Any, Shape, Any], Any]
DENSE: dict[str, Kind] = {
    "dense": normal,
    "strided": strided,
    "none": lambda *_: None,
    "nan": lambda seed, shape, dtype: normal(seed, shape, dtype) * np.array(np.nan, dtype),
}
SPARSE: dict[str, Kind] = {
    "rows": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype),
    "int32": lambda seed, shape, dtype: rows(seed, shape, 2 * shape[0], dtype, np.int32),
    "no rows": lambda seed, shape, dtype: rows(seed, shape, 0, dtype),
    "hot": lambda seed, shape, dtype: rows(seed, shape, 3_000, dtype, hot=0.6),
    "many": lambda seed, shape, dtype: rows(seed, shape, 20_000, dtype, hot=0.3),
    "parts": lambda seed, shape, dtype: [rows((seed, n), shape, n, dtype) for n in (5, 0, 9)],
    "nan rows": lambda _, shape, dtype: nn.RowTensor(
        np.arange(2), np.full((2, *shape[1:]), np.nan, dtype), shape
    ),
}
# The parameters of a run: the shape of each, and the kinds of its gradients from step to step.
PLANS: dict[str, tuple[tuple[Shape, str], ...]] = {
    "dense": (((9, 8), "dense"), ((11,), "dense")),
    "sizes": tuple((shape, "dense") for shape in SIZES),
    "large": ((LARGE, "dense"), ((40_003,), "dense")),
    "strided": (((5, 7), "strided"), ((11,), "strided, dense")),
    "sometimes": (((9, 8), "dense, none"), ((11,), "none, none, dense")),
    "nan": (((9, 8), "dense"), ((11,), "dense, nan, dense")),
    "mixed": (
        *(((9, 8), "rows"), ((5, 7), "dense"), ((11,), "dense"), ((4, 3), "none")),
        *(((6, 16), "parts"), ((5, 1), "no rows"), ((50,), "int32"), ((20, 3, 4), "rows")),
    ),
    "widths": tuple(((40, width), "rows") for width in (1, 3, 8, 16, 64, 100)),
    "hot": (((60, 8), "hot"), ((5, 1), "hot"), ((9, 8), "rows")),
    "many": (((2_003, 16), "many"), ((40, 64), "rows")),
    "changing": (((9, 8), "rows, dense, none"), ((7, 3), "dense, int32, no rows")),
    "nan rows": (((9, 8), "rows, nan rows, rows"), ((11,), "dense")),
}
NAMES = ("weight", "beta", "LayerNorm", "bias")  # some of them are exempt from decay, or of LARS


def plans(takes_rows: bool) -> list[str]:
    """Those of what takes row-sparse gradients or does not."""
    kinds = {*DENSE, *(SPARSE if takes_rows else ())}
    return [name for name, plan in PLANS.items() if all({*k.split(", ")} <= kinds for _, k in plan)]


def parameters(plan: str, dtypes: Sequence[Any] = (F32,)) -> list[nn.Parameter]:
    return [
        nn.Parameter(normal(k, shape, dtypes[k % len(dtypes)]), f"{NAMES[k % 4]}{k}")
        for k, (shape, _) in enumerate(PLANS[plan])
    ]


def gradients(plan: str, params: Sequence[Any], step: int, dtype: Any = None) -> list[Any]:
    found = []
    for k, ((shape, kinds), p) in enumerate(zip(PLANS[plan], params, strict=True)):
        of_steps = kinds.split(", ")
        make = {**DENSE, **SPARSE}[of_steps[step % len(of_steps)]]
        found.append(make((k, step), shape, dtype or p.dtype))
    return found


# Optimizers, and the values of their options


def halving(step: int) -> float:
    return 0.2 * 0.5 ** (step % 3)


def of_weights(parameter: nn.Parameter) -> bool:
    return "weight" in str(parameter.name)


RATES = ((0.1, 0.05, 0.2, 0.1, 0.3), nn.CosineDecayLR(0.01, 0.1, 4), halving)
# Values beside that of the registry, by what an argument takes.
FURTHER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rate", "rate or none"), RATES),
    **dict.fromkeys(("decay", "float decay", "unit decay"), (halving,)),
    "loss scale": (1_000,),
    "not positive": (-0.7, 0.0),
    "not negative": (0.0,),
    "positive": (0.5,),
    "positive or infinite": (1.02,),
    "beta1": (None, 0.5),
    "sparse update": ("dense_equivalent", None),
    "filter": (of_weights,),
}


class Subject(NamedTuple):
    """An optimizer: how it is made of parameters and options, which these are, and its forms."""

    make: Make
    arguments: Mapping[str, Argument]
    takes_rows: bool
    forms: Sequence[Mapping[str, Any]] = ()

    def turns(self) -> list[dict[str, Any]]:
        """Each option with each of its values but the usual one, and what it needs beside it."""
        found = []
        for name, argument in self.arguments.items():
            flags = (True, False) if argument.takes == "flag" else ()
            numbers = isinstance(argument.moved, int | float | tuple | type)
            moved = (argument.moved,) if numbers else ()
            found += [
                {**argument.beside, **(argument.also if value in moved else {}), name: value}
                for value in (*flags, *moved, *FURTHER.get(argument.takes, ()))
            ]
        return found


class Descent(nn.Optimizer):
    """What a user may define."""

    def construct(self, gradients: tuple[Any, ...]) -> tuple[bool, ...]:
        prepared = self.scale_grad(self.gradients_centralization(self.decay_weight(gradients)))
        rates = np.broadcast_to(self.get_lr(), len(prepared))
        for p, g, rate in zip(self.parameters, prepared, rates, strict=True):
            for part in g if isinstance(g, list) else [] if g is None else [g]:
                dense = part.to_dense() if isinstance(part, nn.RowTensor) else np.asarray(part)
                p.data -= (float(rate) * dense.astype(np.float64)).astype(p.dtype)
        return (True,) * len(prepared)


def _step(w: Any, g: Any, m: Any, hp: Any) -> Any:
    m = hp.keep * m + g
    return w - hp.lr * (m + hp.decay * w), m


def _scalars(real: Any, lr: float, decay: float, step: int, keep: Any, _: Any) -> tuple[Any, ...]:
    return real(lr / step), real(keep[0]), real(decay)


HEAVY = nn.Rule(_step, ("heavy",), ("lr", "keep", "decay"), decays=True)


class Heavy(nn.FusedOptimizer):
    """What a user may define by a rule."""

    def __init__(
        self, learning_rate: Any, parameters: Any, sparse_update: Any = "lazy", **options: Any
    ) -> None:
        options |= {"rule": HEAVY, "sparse_update": sparse_update}
        super().__init__(learning_rate, parameters, **options)

    def formula(self) -> Any:
        return nn.Formula(_scalars, (0.9,))


def own_rules(record: Any) -> None:
    for real in (np.float32, np.float64):
        record.add(nn.Formula(_scalars, (0.9,)).at(real, 0.1, 0.01, 3))
    record.add([HEAVY.states, HEAVY.hp, pickle.loads(pickle.dumps(HEAVY)) is HEAVY])
    record.add([*nn.State("m", "row", 0.5)[:4]])


def of_class(cls: Any, params: Any, **options: Any) -> Any:
    return cls(**{"learning_rate": 0.05, "parameters": params, **options})


def subjects() -> dict[str, Subject]:
    """By the name of a class, and of what LARS has inside."""
    found: dict[str, Subject] = {}
    for name, row in ROWS.items():
        usual, *others = (
            {
                **({"sparse_update": form.rows or "dense_equivalent"} if row.takes_rows else {}),
                **form.options,
            }
            for form in row.forms.values()
        )
        found[name] = Subject(partial(row.make, **usual), row.arguments, row.takes_rows, others)
    lars = found.pop("LARS")
    for name in ("Momentum", "SGD", "Adam", "AdamWeightDecay", "Lamb", "AdaFactor", "Descent"):
        inner = ROWS[name].make if name in ROWS else partial(of_class, Descent)
        make = partial(lars.make, optimizer=partial(inner, weight_decay=0.1))
        found[f"LARS around {name}"] = Subject(make, {}, False)
    found["LARS"] = found.pop("LARS around Momentum")._replace(arguments=lars.arguments)
    for name, cls in (("Optimizer", Descent), ("FusedOptimizer", Heavy)):
        names = inspect.signature(getattr(nn, name)).parameters
        known = {name: argument for name, argument in COMMON.items() if name in names}
        found[name] = Subject(partial(of_class, cls), known, True)
    return found


# Dtypes of parameters, of gradients, and of states where they have others.
STORAGES = (
    *((F32, HALF, None), (F32, BF16, DOUBLE), (F32, DOUBLE, None), (DOUBLE, F32, None)),
    *((DOUBLE, DOUBLE, F32), (HALF, F32, F32), (BF16, BF16, F32), (F32, F32, BF16)),
)
# How the parameters of a run are grouped.
GROUPS: dict[str, Callable[[list[nn.Parameter]], list[dict[str, Any]]]] = {
    "rates": lambda p: [{"params": p[:1], "lr": 0.2}, {"params": p[1:]}],
    "decays": lambda p: [
        {"params": p[:1], "weight_decay": 0.3},
        {"params": p[1:], "weight_decay": halving},
    ],
    "centralized": lambda p: [{"params": p, "grad_centralization": True, "weight_decay": 0.1}],
    "ordered": lambda p: [
        {"params": p[1:], "lr": nn.ExponentialDecayLR(0.1, 0.9, 2)},
        {"params": p[:1], "grad_centralization": True, "weight_decay": 0.1},
        {"order_params": p},
    ],
}


def grouped(params: Any, make: Make, of: Callable[[Any], Any], **options: Any) -> Any:
    return make(of(params), **options)


def train(
    record: Any,
    make: Callable[[], Any],
    give: Callable[[Any, int], Any],
    between: Callable[[Any, Callable[[], Any]], Any] | None = None,
) -> None:
    """Five steps; before the last two something may happen to the optimizer."""
    opt = make()
    record.add(repr(opt))
    for step in range(5):
        if between is not None and step == 3:
            changed = record.attempt(between, opt, make)
            opt = opt if changed is None else changed
        given = give(opt, step)
        record.add(opt.get_lr(), opt.get_weight_decay())
        record.attempt(opt, given)
        record.add(opt.parameters)
    state = opt.state_dict()
    record.add(given, state, opt.global_step, getattr(opt, "skipped_steps", None))
    for role in sorted({name.split(".")[0] for name in state if "." in name}):
        record.add(role, getattr(opt, role, None))


def train_on(
    record: Any,
    make: Make,
    plan: str,
    dtypes: Sequence[Any] = (F32,),
    of_gradient: Any = None,
    between: Any = None,
) -> None:
    """Steps of an optimizer on the parameters and gradients of a plan."""
    train(
        record,
        lambda: make(parameters(plan, dtypes)),
        lambda opt, step: gradients(plan, opt.parameters, step, of_gradient),
        between,
    )


# What may happen between two steps


def anew(opt: Any, make: Callable[[], Any], state: Mapping[str, Any] | None = None) -> Any:
    """Another optimizer, of copies of the parameters, that goes on from a state."""
    other = make()
    for p, q in zip(other.parameters, opt.parameters, strict=True):
        p.data = q.data.copy()
    other.load_state_dict(opt.state_dict() if state is None else state)
    return other


def read(opt: Any, make: Callable[[], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        nn.save_checkpoint(opt, path)
        return anew(opt, make, nn.load_checkpoint(path))


def of_mindspore(opt: Any, make: Callable[[], Any]) -> Any:
    return anew(opt, make, {n: a for n, a in opt.state_dict().items() if not n.startswith("step.")})


def rebound(opt: Any, _: Any) -> None:
    for p in opt.parameters:
        p.data = p.data.copy()


def rated(opt: Any, _: Any) -> None:
    for rate in opt.get_lr_parameter(list(opt.parameters)):
        rate.data[...] = 0.3


BETWEEN: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "resumed": anew,
    "read": read,
    "resumed as MindSpore's": of_mindspore,
    "pickled": lambda opt, _: pickle.loads(pickle.dumps(opt)),
    "copied": lambda opt, _: copy.deepcopy(opt),
    "rebound": rebound,
    "with another rate": rated,
    "with another loss scale": lambda opt, _: setattr(opt, "loss_scale", 8.0),
    "at step 100": lambda opt, _: setattr(opt, "global_step", np.array([100], np.int32)),
}


# What is refused


def odd_steps(record: Any, make: Make) -> None:
    """Of the memory of a parameter; of one that is read-only; the last step of all."""
    for change in (
        lambda opt, _: [opt.parameters[0].data, None],
        lambda opt, given: opt.parameters[0].data.setflags(write=False) or given,
        lambda opt, given: setattr(opt, "global_step", np.array([2**31 - 1], np.int32)) or given,
    ):
        opt = make(parameters("dense"))
        record.attempt(opt, change(opt, gradients("dense", opt.parameters, 0)))
        record.add(opt.state_dict(), opt.parameters)


def refused(label: str, make: Make) -> Cases:
    """Wrong gradients, states, attributes and parameters of an optimizer, and what they leave."""

    def usual(name: str, value: Any) -> dict[str, Any]:
        opt = make(parameters("dense"))
        return {"opt": opt, name: value(opt)}

    def step(opt: Any, given: Any) -> None:
        try:
            opt(given)
        finally:
            opt(gradients("dense", opt.parameters, 0))

    def load(opt: Any, state: Any) -> None:
        opt.load_state_dict(state)

    def assign(name: str, opt: Any, value: Any) -> Any:
        setattr(opt, name, value)
        return opt.loss_scale, opt.global_step, opt.target, opt.unique

    first = gradients("dense", parameters("dense"), 0)
    sparse = [rows(0, (9, 8), 4), first[1]]
    of_steps = {
        "dense": first,
        "sparse": sparse,
        "mixed": [[*sparse], first[1]],
        "of a vector": [first[0], rows(0, (11,), 4)],
        "of parts that differ": [[sparse[0], rows(0, (8, 8), 4)], first[1]],
    }
    for kind, given in of_steps.items():
        of_opt = partial(usual, "given", lambda _, given=given: given)
        yield from refusals(f"{label} {kind} step", step, of_opt, ["given"])
    yield f"{label} odd steps", partial(odd_steps, make=make)
    of_opt = partial(usual, "state", lambda opt: opt.state_dict())
    yield from refusals(f"{label} load", load, of_opt, ["state"])
    for name in ("loss_scale", "global_step", "target", "unique", "found_inf", "learning_rate"):
        of_opt = partial(usual, "value", lambda opt, name=name: getattr(opt, name, None))
        yield from refusals(f"{label}.{name}", partial(assign, name), of_opt, ["value"])
    of_opt = partial(usual, "of", lambda opt: [*opt.parameters, nn.Parameter(np.ones(1))])
    yield from refusals(f"{label} rate", lambda opt, of: opt.get_lr_parameter(of), of_opt, ["of"])
    p, q = nn.Parameter(np.ones((2, 3), F32), "a"), nn.Parameter(np.ones((5, 3), F32), "b")
    options = {"lr": 0.1, "weight_decay": 0.1, "grad_centralization": True}
    grouped = [{"params": [p], **options}, {"params": [q]}, {"order_params": [p, q]}]
    of_groups = {
        "two": [p, q],
        "groups": grouped,
        "overlapping": [q.data[:3], q.data[2:]],
        "both": [{"params": [p], "order_params": [p]}],
        "equal names": [p, nn.Parameter(q.data, "a")],
    }
    for kind, params in of_groups.items():
        of_make = partial(dict, params=params)
        yield from refusals(f"{label} of {kind}", lambda params: make(params), of_make, ["params"])


def one_step(make: Make, **options: Any) -> list[Any]:
    """What is left by a step of an optimizer with these options."""
    opt = make(parameters("dense"), **options)
    opt(gradients("dense", opt.parameters, 0))
    return [opt, opt.state_dict(), opt.parameters]


# The cases

Run = tuple[dict[str, Any], str, tuple[Any, ...], Any]


def runs(name: str, subject: Subject, usual: str) -> Iterator[Run]:
    """Options, plan, dtypes of the parameters, and that of gradients where they have another."""
    mine, turns = plans(subject.takes_rows), subject.turns()
    for plan in mine:
        for dtype in (F32, BF16) if plan in ("large", "many") else STORAGE_DTYPES:
            yield {}, plan, (dtype,), None
        if "nan" in plan and "skip_nonfinite" in subject.arguments:
            yield {"skip_nonfinite": True}, plan, (F32,), None
        for form in subject.forms:
            yield {**form}, plan, (F32,), None
    yield {}, usual, STORAGE_DTYPES, None
    for k, options in enumerate(turns):
        for dtype in (F32, STORAGE_DTYPES[1 + k % 3]):
            yield options, usual, (dtype,), None
    turns = [options for options in turns if not {"state_dtype", "sparse_update"} & {*options}]
    for k, (w, g, s) in enumerate(STORAGES if turns else ()):
        kept: dict[str, Any] = {}
        if s and "state_dtype" in subject.arguments:
            kept = {**subject.arguments["state_dtype"].beside, "state_dtype": s}
        yield kept, usual, (w,), g
        rng = rng_of(name, k)
        together = [options for options in turns if rng.random() < 0.2]
        mixed = {name: value for options in together for name, value in options.items()}
        yield {**mixed, **kept}, mine[int(rng.integers(len(mine)))], (w,), g


def of_subject(name: str, subject: Subject) -> Cases:
    make, known = subject.make, subject.arguments
    usual, found = "mixed" if subject.takes_rows else "dense", {}
    for options, plan, dtypes, g in runs(name, subject, usual):
        label = f"nn.{name}({labelled(options)}) {' '.join(map(str, dtypes))} {plan}"
        case = partial(train_on, make=partial(make, **options), plan=plan, dtypes=dtypes)
        found[label + f" of {g}" * bool(g)] = partial(case, of_gradient=g)
    for group, of in GROUPS.items():
        for options in ({}, {"loss_scale": 4.0}) if "loss_scale" in known else ({},):
            case = partial(train_on, make=partial(grouped, make=make, of=of, **options), plan=usual)
            found[f"nn.{name}({labelled(options)}) groups: {group}"] = case
    for label, between in BETWEEN.items():
        for plan in ("dense", usual, "sometimes"):
            case = partial(train_on, make=make, plan=plan, between=between)
            found[f"nn.{name} {plan} {label}"] = case
    yield from found.items()
    yield from refused(f"nn.{name}", make)
    yield from refusals(f"nn.{name}", partial(one_step, make), names=[*known, "learning_rat"])


def cases() -> Cases:
    of_lars = partial(dict, optimizer=nn.SGD(parameters("dense")))
    yield from refusals("nn.LARS itself", nn.LARS, of_lars, ["optimizer", "learning_rat"])
    for name, subject in subjects().items():
        yield from of_subject(name, subject)
    for name in ("Formula", "Rule", "State"):
        yield f"nn.{name}", own_rules
