"""Cases of `digests.py`: the optimizers of nn by their registry, and two that a user may define."""

from __future__ import annotations

import copy
import inspect
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fusestep import nn
from fusestep.nn.registry import ROWS
from fusestep.nn.registry.record import COMMON

from digest_arrays import F32, Cases, gradients, parameters, plans, refusals, rows
from digest_runs import Subject, halving, of_subject

Make = Callable[..., Any]

# Optimizers of users


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


# Steps


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
    of_groups: Callable[[Any], Any] = list,
    **options: Any,
) -> None:
    """Steps of an optimizer on the parameters and gradients of a plan."""
    train(
        record,
        lambda: make(of_groups(parameters(plan, dtypes)), **options),
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


# Their cases


def made(make: Make, arguments: Mapping[str, Any], takes_rows: bool, *forms: Any) -> Subject:
    """An optimizer as a subject, with the options of its forms."""
    usual = "mixed" if takes_rows else "dense"
    return Subject(
        partial(train_on, make=make),
        partial(one_step, make),
        arguments,
        plans(takes_rows),
        usual,
        forms,
        BETWEEN,
    )


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
        found[name] = made(partial(row.make, **usual), row.arguments, row.takes_rows, *others)
    lars = ROWS["LARS"]
    for name in ("Momentum", "SGD", "Adam", "AdamWeightDecay", "Lamb", "AdaFactor", "Descent"):
        inner = ROWS[name].make if name in ROWS else partial(of_class, Descent)
        make = partial(lars.make, optimizer=partial(inner, weight_decay=0.1))
        found[f"LARS around {name}"] = made(make, {}, False)
    found["LARS"] = found.pop("LARS around Momentum")._replace(arguments=lars.arguments)
    for name, cls in (("Optimizer", Descent), ("FusedOptimizer", Heavy)):
        names = inspect.signature(getattr(nn, name)).parameters
        known = {name: argument for name, argument in COMMON.items() if name in names}
        found[name] = made(partial(of_class, cls), known, True)
    return found


def cases() -> Cases:
    of_lars = partial(dict, optimizer=nn.SGD(parameters("dense")))
    yield from refusals("nn.LARS itself", nn.LARS, of_lars, ["optimizer", "learning_rat"])
    for name, subject in subjects().items():
        yield from of_subject("nn", name, subject)
        yield from refused(f"nn.{name}", subject.run.keywords["make"])
        for group, of in GROUPS.items():
            case = partial(subject.run, plan=subject.usual, of_groups=of)
            yield f"nn.{name}() groups: {group}", case
            if "loss_scale" in subject.arguments:
                scaled = partial(case, loss_scale=4.0)
                yield f"nn.{name}(loss_scale=4.0) groups: {group}", scaled
    for name in ("Formula", "Rule", "State"):
        yield f"nn.{name}", own_rules
