"""Cases of `digests.py`: the optimizers of nn."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fusestep import nn

from digest_arrays import (
    BAD,
    DTYPES,
    F32,
    REQUIRED,
    Cases,
    arguments_of,
    gradients,
    labelled,
    parameters,
    plans,
    refusals,
    rng_of,
    rows,
    turns,
    unusual,
)

Make = Callable[..., Any]


def halving(step: int) -> float:
    return 0.2 * 0.5 ** (step % 3)


def of_weights(parameter: nn.Parameter) -> bool:
    return "weight" in str(parameter.name)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.1, (0.1, 0.05, 0.2, 0.1, 0.3), nn.CosineDecayLR(0.01, 0.1, 4), halving),
    "weight_decay": (0.3, halving),
    "loss_scale": (4.0, 1000),
    "sparse_update": ("lazy", "dense_equivalent", None),
    "state_dtype": (DTYPES["float16"],),
    "clipvalue": (0.25,),
    "clipnorm": (0.5,),
    "eps": (0.01,),
    "epsilon": (0.01,),
    "lr_power": (-0.3, -0.7, 0.0),
    "decay": (0.5, 0.0),
    "accum": (1.0, 0.0),
    "initial_accum": (1.0, 0.0),
    "l1": (0.3,),
    "l2": (0.9,),
    "momentum": (0.5,),
    "coefficient": (0.3,),
    "lars_filter": (of_weights,),
    "AdaFactor.eps": ((1e-3, 0.01),),
    "AdaFactor.beta1": (0.5, None),
    "FTRL.learning_rate": (0.1,),
    "SGD.weight_decay": (0.3,),
    "AdaFactor.learning_rate": (0.1, (0.1, 0.05, 0.2, 0.1, 0.3), halving),
}
# What an option needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "Adam.use_lazy": {"sparse_update": None},
    "SGD.nesterov": {"momentum": 0.9, "dampening": 0.0},
    "SGD.dampening": {"momentum": 0.9},
    "SGD.state_dtype": {"momentum": 0.9},
    "AdaFactor.learning_rate": {"relative_step": False},
    "AdaFactor.relative_step": {"learning_rate": 0.05},
    "AdaFactor.warmup_init": {"learning_rate": None, "relative_step": True},
}
# Dtypes of parameters, of gradients, and of states where they have others.
STORAGES = (
    *(("float32", "float16", ""), ("float32", "bfloat16", "float64"), ("float32", "float64", "")),
    *(("float64", "float32", ""), ("float64", "float64", "float32")),
    *(("float16", "float32", "float32"), ("bfloat16", "bfloat16", "float32")),
    ("float32", "float32", "bfloat16"),
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


if hasattr(nn, "FusedOptimizer"):
    HEAVY = nn.Rule(_step, ("heavy",), ("lr", "keep", "decay"), decays=True)

    class Heavy(nn.FusedOptimizer):
        """What a user may define by a rule."""

        def __init__(
            self, params: Any, learning_rate: Any = 0.1, sparse_update: Any = "lazy", **options: Any
        ) -> None:
            options = {"rule": HEAVY, "sparse_update": sparse_update, **options}
            super().__init__(learning_rate, params, **options)

        def formula(self) -> Any:
            return nn.Formula(_scalars, (0.9,))

    def _formula(record: Any) -> None:
        for real in (np.float32, np.float64):
            record.add(nn.Formula(_scalars, (0.9,)).at(real, 0.1, 0.01, 3))

    def _rule(record: Any) -> None:
        record.add([HEAVY.states, HEAVY.hp, pickle.loads(pickle.dumps(HEAVY)) is HEAVY])


def build(cls: Any, params: Any, **options: Any) -> Any:
    """An optimizer that moves within five steps, and takes row-sparse gradients if it can."""
    known = arguments_of(cls)
    given: dict[str, Any] = {"params" if "params" in known else "parameters": params}
    if known["learning_rate"] is not None:
        given["learning_rate"] = 0.05
    if known.get("momentum") is REQUIRED:
        given["momentum"] = 0.9
    if known.get("sparse_update", "none") is None:
        given["sparse_update"] = "dense_equivalent"
    return cls(**{**given, **options})


def around(params: Any, inner: Any = nn.Momentum, **options: Any) -> nn.LARS:
    decayed = build(inner, params, weight_decay=0.1)
    return nn.LARS(decayed, **{"coefficient": 0.1, **options})


def grouped(params: Any, make: Make, of: Callable[[Any], Any], **options: Any) -> Any:
    return make(of(params), **options)


def train(
    record: Any,
    make: Make,
    plan: str,
    dtypes: Sequence[str] = ("float32",),
    of_gradient: str | None = None,
    between: Callable[[Any, Make], Any] | None = None,
) -> None:
    """Five steps; before the last two something may happen to the optimizer."""
    opt = make(parameters(plan, [DTYPES[name] for name in dtypes]))
    record.add(repr(opt))
    for step in range(5):
        if between is not None and step == 3:
            changed = record.attempt(between, opt, make)
            opt = opt if changed is None else changed
        given = gradients(plan, opt.parameters, step, of_gradient and DTYPES[of_gradient])
        record.add(opt.get_lr(), opt.get_weight_decay(), opt(given), opt.parameters)
    state = opt.state_dict()
    record.add(given, state, opt.global_step, getattr(opt, "skipped_steps", None))
    for role in sorted({name.split(".")[0] for name in state if "." in name}):
        record.add(role, getattr(opt, role, None))


# What may happen between two steps


def anew(opt: Any, make: Make, state: Mapping[str, Any] | None = None) -> Any:
    """Another optimizer, of copies of the parameters, that goes on from a state."""
    other = make([nn.Parameter(p.data.copy(), p.name) for p in opt.parameters])
    other.load_state_dict(opt.state_dict() if state is None else state)
    return other


def read(opt: Any, make: Make) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        nn.save_checkpoint(opt, path)
        return anew(opt, make, nn.load_checkpoint(path))


def of_mindspore(opt: Any, make: Make) -> Any:
    return anew(opt, make, {n: a for n, a in opt.state_dict().items() if not n.startswith("step.")})


def rebound(opt: Any, _: Make) -> None:
    for p in opt.parameters:
        p.data = p.data.copy()


def rated(opt: Any, _: Make) -> None:
    for rate in opt.get_lr_parameter(list(opt.parameters)):
        rate.data[...] = 0.3


BETWEEN: dict[str, Callable[[Any, Make], Any]] = {
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

STEPS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda g, _: g[:1],
    lambda g, _: dict(enumerate(g)),
    lambda _, opt: [opt.parameters[0].data, None],
    lambda g, opt: opt.parameters[0].data.setflags(write=False) or g,
    lambda g, opt: setattr(opt, "global_step", np.array([2**31 - 1], np.int32)) or g,
    lambda g, _: [g[0], rows(0, (11,), 4)],
    lambda g, _: [[g[0], rows(0, (9, 8), 4)], g[1]],
    lambda g, _: [[rows(0, (9, 8), 4), rows(0, (8, 8), 4)], g[1]],
    lambda g, _: [rows(0, (8, 8), 4), g[1]],
    lambda g, _: [nn.RowTensor(np.array([0, -1]), g[0][:2], (9, 8)), g[1]],
    lambda g, _: [nn.RowTensor(np.array([0, 9]), g[0][:2], (9, 8)), g[1]],
)


def bad_steps(record: Any, make: Make) -> None:
    """Gradients that are refused, and that nothing has changed then."""
    of_first = [lambda g, _, bad=bad: [bad, g[1]] for bad in unusual(np.ones((9, 8), F32))]
    for wrong in (*STEPS, *of_first, *(lambda *_, bad=bad: bad for bad in BAD)):
        opt = make(parameters("dense"))
        usual = gradients("dense", opt.parameters, 0)
        for given in (wrong(usual, opt), usual):
            record.attempt(opt, given)
            record.add(opt.state_dict(), opt.parameters)


def bad_states(record: Any, make: Make) -> None:
    """States that are refused, and that nothing has changed then."""
    opt = make(parameters("dense"))
    opt(gradients("dense", opt.parameters, 0))
    state = opt.state_dict()
    wrong: list[Any] = [*BAD, {**state, "nothing": np.zeros(1)}]
    for name, array in state.items():
        wrong.append({n: a for n, a in state.items() if n != name})
        others = (array.astype(np.int8), array.astype(np.float64), array[None], array - 1)
        wrong += [{**state, name: other} for other in (*others, array + 0.5, "no", None)]
    for each in wrong:
        record.attempt(opt.load_state_dict, each)
        record.add(opt.state_dict())


def bad_attributes(record: Any, make: Make) -> None:
    steps = (np.array([5], np.int32), np.array([5]), np.array([-1], np.int32), np.zeros(2, "i"))
    for name in ("loss_scale", "global_step", "target", "unique", "found_inf", "learning_rate"):
        opt = make(parameters("dense"))
        for value in (*BAD, *steps, "CPU", "GPU", "Ascend", 8.0, False):
            record.attempt(setattr, opt, name, value)
            record.add(opt.loss_scale, opt.global_step, opt.target, opt.unique)
    for value in (*BAD, *opt.parameters, [*opt.parameters], nn.Parameter(np.ones(1))):
        record.attempt(opt.get_lr_parameter, value)


def bad_parameters(record: Any, make: Make) -> None:
    array, base = np.ones((2, 3), F32), np.ones((5, 3), F32)
    p, other, fixed = (
        nn.Parameter(array, "a"),
        nn.Parameter(base, "a"),
        nn.Parameter(base, "c", False),
    )
    wrong: list[Any] = [*unusual(array), array, p, fixed, {}, {"params": []}, {"params": p}]
    wrong += [{"params": [p], "rl": 1.0}, {"params": [p], "lr": -1.0}, {"params": [p], "lr": "no"}]
    wrong += [{"params": [p], "weight_decay": "no"}, {"params": [p], "grad_centralization": 1}]
    wrong += [{"params": [p], "order_params": [p]}, {"order_params": [p]}]
    wrong = [*BAD, *wrong, *([each] for each in wrong), [array, array], [base[:3], base[2:]]]
    wrong += [[p, other], [p, [p]], [{"params": [p]}, {"params": [p]}], [{"params": [p]}, other]]
    wrong += [[{"params": [p]}, {"order_params": [other]}]]
    for each in wrong:
        record.attempt(make, each)


def one_step(make: Make, **options: Any) -> list[Any]:
    """What is left by a step of an optimizer with these options."""
    opt = make(parameters("dense"), **options)
    opt(gradients("dense", opt.parameters, 0))
    return [opt, opt.state_dict(), opt.parameters]


# The cases

Run = tuple[dict[str, Any], str, tuple[str, ...], str | None]


def runs(name: str, known: Mapping[str, Any], mine: list[str], usual: str) -> Iterator[Run]:
    """Options, plan, dtypes of the parameters, and that of gradients where they have another."""
    for plan in mine:
        for dtype in DTYPES if plan not in ("large", "many") else ("float32", "bfloat16"):
            yield {}, plan, (dtype,), None
    yield {}, usual, tuple(DTYPES), None
    of_options = turns(name, known, OPTIONS, BESIDE)
    for k, options in enumerate(of_options):
        yield options, usual, ("float32",), None
        yield options, usual, ([*DTYPES][1 + k % 3],), None
    for plan in (plan for plan in mine if "nan" in plan and "skip_nonfinite" in known):
        yield {"skip_nonfinite": True}, plan, ("float32",), None
    of_options = [options for options in of_options if "state_dtype" not in options]
    for k, (w, g, s) in enumerate(STORAGES if of_options else ()):
        beside = BESIDE.get(f"{name}.state_dtype", {})
        kept = {**beside, "state_dtype": DTYPES[s]} if s and "state_dtype" in known else {}
        yield kept, usual, (w,), g
        rng = rng_of(name, k)
        mixed = [o for o in of_options if rng.random() < 0.2 and o != {"sparse_update": None}]
        together = {name: value for options in mixed for name, value in options.items()}
        yield {**together, **kept}, mine[int(rng.integers(len(mine)))], (w,), g


def of_family(name: str, make: Make, known: Mapping[str, Any], takes_rows: bool) -> Cases:
    """The cases of a class whose options are ``known``."""
    usual, found = "mixed" if takes_rows else "dense", {}
    for options, plan, dtypes, g in runs(name, known, plans(takes_rows), usual):
        label = f"nn.{name}({labelled(options)}) {' '.join(dtypes)} {plan}" + f" of {g}" * bool(g)
        case = partial(train, plan=plan, dtypes=dtypes, of_gradient=g)
        found[label] = partial(case, make=partial(make, **options))
    for group, of in GROUPS.items():
        for options in ({}, {"loss_scale": 4.0}) if "loss_scale" in known else ({},):
            case = partial(train, make=partial(grouped, make=make, of=of, **options), plan=usual)
            found[f"nn.{name}({labelled(options)}) groups: {group}"] = case
    for label, between in BETWEEN.items():
        for plan in ("dense", usual, "sometimes"):
            case = partial(train, make=make, plan=plan, between=between)
            found[f"nn.{name} {plan} {label}"] = case
    for refused in (bad_steps, bad_states, bad_attributes, bad_parameters):
        found[f"nn.{name} {refused.__name__}"] = partial(refused, make=make)
    yield from found.items()
    yield from refusals(f"nn.{name}", partial(one_step, make), names=(*known, "learning_rat"))


def options_of(cls: Any, but: str) -> dict[str, Any]:
    return {name: default for name, default in arguments_of(cls).items() if name != but}


def cases() -> Cases:
    for name in nn.__all__:
        cls = getattr(nn, name)
        is_optimizer = isinstance(cls, type) and issubclass(cls, nn.Optimizer)
        if is_optimizer and "params" in arguments_of(cls):
            known = options_of(cls, "params")
            yield from of_family(name, partial(build, cls), known, "sparse_update" in known)
    yield from of_family("LARS", around, options_of(nn.LARS, "optimizer"), takes_rows=False)
    for inner in (nn.SGD, nn.Adam, nn.AdamWeightDecay, nn.Lamb, nn.AdaFactor, Descent):
        make = partial(around, inner=inner)
        yield from of_family(f"LARS around {inner.__name__}", make, {}, takes_rows=False)
    known = options_of(nn.Optimizer, "parameters")
    yield from of_family("Optimizer", partial(build, Descent), known, takes_rows=True)
    if hasattr(nn, "FusedOptimizer"):
        known = {"learning_rate": 0.1, **options_of(nn.FusedOptimizer, "parameters")}
        known = {name: known[name] for name in known if name not in ("rule", "states")}
        yield from of_family("FusedOptimizer", partial(build, Heavy), known, takes_rows=True)
        yield from (("nn.Formula at", _formula), ("nn.Rule", _rule))
    if hasattr(nn, "State"):
        yield "nn.State", lambda record: record.add([*nn.State("m", "row", 0.5)[:4]])
