"""Cases of `digests.py`: steps of all optimizers and operators with every option."""

import copy
import inspect
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optimizers
import thor_nets
from digest_inputs import BAD, EVERY_PLAN, F32, OF_ARRAYS, OF_ROWS, PLANS, Given, normal, rng_of
from digest_record import Record, wrongly
from fusestep import nn, ops
from fusestep.bench.registry import Argument
from fusestep.bench.registry.record import COMMON
from fusestep.nn import mxnet as mx
from helpers import BF16, STORAGE_DTYPES
from mxnet_options import HANDED_ON, OPTIONS
from operators import ADAM_UPDATE, EVERY_OPERATOR, Operator
from own_functions import AVERAGED, Own

Cases = Iterator[tuple[str, Callable[[Record], object]]]
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
    "damping": ((0.1, 0.2, 0.3, 0.4, 0.5), halving), "loss scale": (1_000,),
    "not positive": (-0.7, 0.0), "not negative": (0.0,), "number or None": (0.0,),
    "positive": (0.5,), "positive or infinite": (1.02,), "beta1": (None, 0.5),
    "sparse update": ("dense_equivalent", None), "out of range": ("drop",), "filter": (of_weights,),
    "scheduler": (halving,), "aggregate": (1, 3), "frequency": (3, 100), "block size": (2, None),
    "form": ("mindspore",), **dict.fromkeys(("version", "compat"), ("1.9",)),
}  # fmt: skip
# What a registry moves an argument to that is taken over; others are callables and texts.
MOVED = (int, float, tuple, type, dict, mx.lr_scheduler.LRScheduler)
# Dtypes of parameters, of gradients, and of states where they have others.
STORAGES = (
    *((F32, HALF, None), (F32, BF16, DOUBLE), (F32, DOUBLE, None), (DOUBLE, F32, None)),
    *((DOUBLE, DOUBLE, F32), (HALF, F32, F32), (BF16, BF16, F32), (F32, F32, BF16)),
)


class Subject(NamedTuple):
    """What takes steps.

    Attributes:
        run: takes them: ``run(record, given, between=, **options)``.
        arguments: the options, by a registry.
        plans: names of `PLANS`, on which it runs.
        usual: the plan of runs with options.
        between: what may happen to it between two steps.
        dtypes: of its parameters.
    """

    run: Callable[..., None]
    arguments: Mapping[str, Any]
    plans: Sequence[str]
    usual: str
    between: Mapping[str, Callable[..., Any]] = {}
    dtypes: Sequence[np.dtype] = STORAGE_DTYPES


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


def runs(name: str, subject: Subject) -> Iterator[tuple[dict[str, Any], Given]]:
    """Options of each run, and what is given to it."""
    _, known, plans, usual, _, dtypes = subject
    for plan in plans:
        for dtype in dtypes[::3] if plan in ("large", "many") else dtypes:
            yield {}, Given(plan, (dtype,))
        if "nan" in plan and "skip_nonfinite" in known:
            yield {"skip_nonfinite": True}, Given(plan)
    yield {}, Given(usual, dtypes)
    of_options = turns(known)
    for k, options in enumerate(of_options):
        for dtype in dict.fromkeys((F32, dtypes[(1 + k % 3) % len(dtypes)])):
            yield options, Given(usual, (dtype,))
    of_options = [one for one in of_options if not {"state_dtype", "sparse_update"} & {*one}]
    for k, (w, g, s) in enumerate(STORAGES if of_options and len(dtypes) > 1 else ()):
        kept: dict[str, Any] = {}
        if s and "state_dtype" in known:
            kept = {**known["state_dtype"].beside, "state_dtype": s}
        yield kept, Given(usual, (w,), g)
        rng = rng_of(name, k)
        together = [options for options in of_options if rng.random() < 0.2]
        mixed = {name: value for options in together for name, value in options.items()}
        yield {**mixed, **kept}, Given(plans[int(rng.integers(len(plans)))], (w,), g)


def refuse(record: Record, subject: Subject, name: str) -> None:
    """Bad values for an option."""
    for value in BAD:
        record.attempt(partial(subject.run, record, Given(subject.plans[0]), **{name: value}))


def labelled(options: Mapping[str, Any]) -> str:
    """Options as they stand in the name of a case."""
    plain = (type(None), bool, int, float, str, tuple, dict, np.dtype)
    shown = {n: x if isinstance(x, plain) else getattr(x, "__name__", type(x).__name__)
             for n, x in options.items()}  # fmt: skip
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def of_subject(place: str, name: str, subject: Subject) -> Cases:
    """All that a subject does and refuses."""
    label, run = f"{place}.{name}", subject.run
    for options, given in runs(name, subject):
        yield f"{label}({labelled(options)}) {given}", partial(run, given=given, **options)
    of_plans = [p for p in ("dense", subject.usual, "sometimes") if p in subject.plans]
    for change, between in subject.between.items():
        for plan in of_plans:
            yield f"{label} {plan} {change}", partial(run, given=Given(plan), between=between)
    for plan in of_plans[: 2 * bool(subject.arguments)]:
        yield f"{label} {plan} wrongly", partial(wrongly, case=partial(run, given=Given(plan)))
    for option in (*subject.arguments, "learning_rat"):
        yield f"{label} bad {option}", partial(refuse, subject=subject, name=option)


# Optimizers


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


# How the parameters of a run are grouped.
GROUPS: dict[str, Callable[[list[nn.Parameter]], list[dict[str, Any]]]] = {
    "rates": lambda p: [{"params": p[:1], "lr": 0.2}, {"params": p[1:]}],
    "decays": lambda p: [
        {"params": p[:1], "weight_decay": 0.3}, {"params": p[1:], "weight_decay": halving}],
    "centralized": lambda p: [{"params": p, "grad_centralization": True, "weight_decay": 0.1}],
    "ordered": lambda p: [
        {"params": p[1:], "lr": nn.ExponentialDecayLR(0.1, 0.9, 2)},
        {"params": p[:1], "grad_centralization": True, "weight_decay": 0.1}, {"order_params": p}],
}  # fmt: skip


def resumed(opt: Any, new: Callable[[], Any], through: Callable[[Any], Any] = dict) -> Any:
    """Another optimizer, of copies of the parameters, that goes on from a state."""
    other = new()
    for p, q in zip(other.parameters, opt.parameters, strict=True):
        p.data = q.data.copy()
    other.load_state_dict(through(opt.state_dict()))
    return other


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        nn.save_checkpoint(state, path)
        return nn.load_checkpoint(path)


def of_mindspore(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without what its checkpoints do not have."""
    return {name: array for name, array in state.items() if not name.startswith("step.")}


def rebound(opt: Any, _: Any) -> None:
    for p in opt.parameters:
        p.data = p.data.copy()


def rated(opt: Any, _: Any) -> None:
    for rate in opt.get_lr_parameter(list(opt.parameters)):
        rate.data[...] = 0.3


def at(step: int, opt: Any, _: Any) -> None:
    opt.global_step = np.array([step], np.int32)


# What may happen between two steps.
BETWEEN: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "resumed": resumed, "read": partial(resumed, through=through_a_file),
    "resumed as MindSpore's": partial(resumed, through=of_mindspore),
    "pickled": lambda opt, _: pickle.loads(pickle.dumps(opt)),
    "copied": lambda opt, _: copy.deepcopy(opt), "rebound": rebound, "with another rate": rated,
    "with another loss scale": lambda opt, _: setattr(opt, "loss_scale", 8.0),
    "at step 100": partial(at, 100), "at the last step": partial(at, 2**31 - 1),
    "by its own memory": lambda opt, _: opt([p.data for p in opt.parameters]),
    "read-only": lambda opt, _: opt.parameters[0].data.setflags(write=False),
}  # fmt: skip
ATTRIBUTES = ("loss_scale", "global_step", "target", "unique", "found_inf", "learning_rate")


def assign(opt: Any, name: str, value: Any) -> list[Any]:
    """What attributes are after an assignment."""
    setattr(opt, name, value)
    return [getattr(opt, each, None) for each in ATTRIBUTES]


def train(
    record: Record, given: Given, make: Callable[..., Any],
    between: Callable[..., Any] | None = None, of_groups: Callable[[Any], Any] = list,
    **options: Any,
) -> None:  # fmt: skip
    """Five steps; before the last two something may happen to the optimizer."""

    def new() -> Any:
        return make(of_groups(given.parameters()), **options)

    opt = new()
    record.add(repr(opt))
    record.try_wrongly(make, params=of_groups(given.parameters()))
    for step in range(5):
        if between is not None and step == 3:
            changed = record.attempt(between, opt, new)
            opt = changed if isinstance(changed, type(opt)) else opt
        if hasattr(opt, "request_refresh"):
            capture(record, opt, step)
        of_step = given.gradients(opt.parameters, step)
        record.add(opt.get_lr(), opt.get_weight_decay())
        record.attempt(opt, gradients=of_step)
        record.add(opt.parameters)
    state = opt.state_dict()
    record.add(of_step, state, opt.global_step, getattr(opt, "skipped_steps", None))
    for role in sorted({name.split(".")[0] for name in state if "." in name}):
        record.add(role, getattr(opt, role, None))
    record.try_wrongly(opt.load_state_dict, state_dict=state)
    record.try_wrongly(opt.get_lr_parameter, param=[*opt.parameters])
    for name in ATTRIBUTES:
        record.try_wrongly(partial(assign, opt, name), value=getattr(opt, name, None))


def of_class(cls: Any, params: Any, **options: Any) -> Any:
    return cls(**{"learning_rate": 0.05, "parameters": params, **options})


def optimizer(make: Callable[..., Any], arguments: Mapping[str, Any], takes_rows: bool) -> Subject:
    plans, usual = (EVERY_PLAN, "mixed") if takes_rows else (OF_ARRAYS, "dense")
    return Subject(partial(train, make=make), arguments, plans, usual, BETWEEN)


def subjects() -> dict[str, Subject]:
    """By the forms of the registry, and what LARS has inside; and two that a user may define."""
    found: dict[str, Subject] = {}
    for form, (name, _) in optimizers.FORMS.items():
        row, make = optimizers.BY_NAME[name], partial(optimizers.make, form)
        if row.takes_rows:
            make.keywords["sparse_update"] = optimizers.ALL_FORMS[form].rows or "dense_equivalent"
        found[form] = optimizer(make, row.arguments if form == name else {}, row.takes_rows)
    descent = partial(of_class, Descent)
    for name in ("Momentum", "SGD", "Adam", "AdamWeightDecay", "Lamb", "AdaFactor", "Descent"):
        inner = descent if name == "Descent" else optimizers.BY_NAME[name].make
        make = partial(optimizers.make, "LARS", optimizer=partial(inner, weight_decay=0.1))
        found[f"LARS around {name}"] = optimizer(make, {}, False)
    decayed = found.pop("LARS around Momentum")
    found["LARS"] = decayed._replace(arguments=found["LARS"].arguments)
    by_rule = partial(of_class, Own, rule=AVERAGED, sparse_update="lazy")
    for name, make in (("Optimizer", descent), ("FusedOptimizer", by_rule)):
        names = inspect.signature(getattr(nn, name)).parameters
        known = {name: argument for name, argument in COMMON.items() if name in names}
        found[name] = optimizer(make, known, True)
    return found


def of_optimizers() -> Cases:
    for name, subject in subjects().items():
        yield from of_subject("nn", name, subject)
        for group, of in GROUPS.items():
            for scaled in ({}, {"loss_scale": 4.0} if "loss_scale" in subject.arguments else {}):
                case = partial(subject.run, given=Given(subject.usual), of_groups=of, **scaled)
                yield f"nn.{name}({labelled(scaled)}) groups: {group}", case
        if subject.arguments:
            case = partial(subject.run, given=Given("dense"), of_groups=GROUPS["ordered"])
            yield f"nn.{name} groups wrongly", partial(wrongly, case=case)


# MXNet's optimizers


class Signs(mx.Optimizer):
    """What a user may define."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
        for index, weight, grad in zip(indices, weights, grads, strict=True):
            self._update_count(index)
            weight -= (self._get_lr(index) * np.sign(grad)).astype(weight.dtype)


def update(
    record: Record, given: Given, make: Callable[..., Any], way: str = "", **options
) -> None:
    """Five steps; the states go through bytes before the last two."""

    def new() -> Any:
        return make(**copy.deepcopy(options))  # schedulers keep what they have computed

    updater = mx.get_updater(new())
    weights = [p.data for p in given.parameters()]
    indices: list[Any] = [*range(len(weights) - 1), "last"]
    states = [*map(updater.optimizer.create_state_multi_precision, indices, weights)]
    for step in range(5):
        grads, opt = given.gradients(weights, step), updater.optimizer
        record.try_wrongly(updater, index=indices, grad=grads, weight=weights)
        if way == "by update":
            named = {"index": indices, "weight": weights, "grad": grads, "state": states}
            record.try_wrongly(opt.update, **{name: several[0] for name, several in named.items()})
            opt.update_multi_precision(*named.values())
        elif way:
            for each in zip(indices, grads, weights, strict=True):
                updater(*each)
        else:
            updater(indices, grads, weights)
        record.add(weights, opt.num_update, opt.learning_rate)
        if step == 2:
            opt.set_lr_mult({0: 0.5, "last": 2.0})
            opt.set_wd_mult({1: 3.0})
            kept = record.attempt(updater.get_states)
            updater = mx.get_updater(opt if way == "by update" else new())
            record.attempt(updater.set_states, states=kept)
    record.add(updater.states, states)
    record.try_wrongly(opt.set_lr_mult, args_lr_mult={0: 0.5})
    record.try_wrongly(opt.set_wd_mult, args_wd_mult={0: 0.5})
    record.try_wrongly(opt.set_learning_rate, lr=0.5)


def of_mxnet() -> Cases:
    for name, cls in (("Adam", mx.Adam), ("AdamW", mx.AdamW), ("Optimizer", Signs)):
        known = {**OPTIONS[mx.Optimizer], **HANDED_ON[getattr(mx, name)]}
        known["learning_rate"] = Argument("number", known["learning_rate"].moved)  # no schedule
        plans, usual = (OF_ARRAYS, "dense") if cls is Signs else (EVERY_PLAN, "mixed")
        for way in ("", " one by one", " by update"):  # "": all weights in one call of an updater
            run = partial(update, make=cls, way=way.strip())
            yield from of_subject("nn.mxnet", name + way, Subject(run, known, plans, usual))


# THOR

OF_THOR = {
    **{name: COMMON[name] for name in ("learning_rate", "weight_decay", "loss_scale")},
    "damping": Argument("damping", 0.5), "momentum": Argument("not negative", 0.5),
    "batch_size": Argument("count", 24), "use_nesterov": Argument("flag"),
    "decay_filter": Argument("filter"), "enable_clip_grad": Argument("flag"),
    "frequency": Argument("frequency"), "compat": Argument("form"),
    "block_size": Argument("block size"), "bad_factor": Argument("what to do"),
    "split_indices": Argument("nothing alone"),
}  # fmt: skip
SHAPES = ((7, 4), (3, 2, 3, 3), (3,), (5, 4), (5,), (5,), (5,), (3,))
PLANS["layers"] = tuple((shape, "dense, dense, none") for shape in SHAPES)


def thor(params: Sequence[nn.Parameter], **options: Any) -> Any:
    """THOR on a net of layers of each kind, which has parameters of its own."""
    net = thor_nets.Net(params[0].dtype)
    return thor_nets.make(net, **{**thor_nets.BASE, "weight_decay": 0.0, **options})


def capture(record: Record, opt: Any, step: int) -> None:
    """Before a step of THOR: what goes through its layers."""
    through = thor_nets.Pass(step, opt.parameters[0].dtype)
    layers = zip(opt.net.values(), through.inputs, through.outputs, strict=False)
    for layer, inputs, of_outputs in layers:
        record.attempt(layer.capture, inputs=inputs, output_gradients=of_outputs)


def infinite(opt: Any, _: Any) -> None:
    """In the step to come, which computes factors."""
    opt.request_refresh()
    opt.net["fc"].capture(np.full((6, 4), np.inf, F32), np.ones((6, 5), F32))


BETWEEN_OF_THOR: dict[str, Callable[[Any, Any], Any]] = {
    **BETWEEN, "refreshed": lambda opt, _: opt.request_refresh(), "infinite": infinite,
    "cleared": lambda opt, _: infinite(opt, None) or opt.clear_captured(),
}  # fmt: skip


# A kind of layer, the shape of its weight, options, and what goes in and comes out.
CONV, IMAGES = (nn.ThorConv2d, (3, 2, 3, 3)), normal("images", (6, 2, 5, 5))
LAYERS: tuple[tuple[Any, tuple[int, ...], dict[str, Any], np.ndarray, tuple[int, ...]], ...] = (
    (nn.ThorEmbedding, (7, 4), {"padding_idx": 0}, np.arange(6) % 3, (6, 4)),
    (nn.ThorDense, (5, 4), {"bias": np.ones(5, F32)}, normal("rows", (6, 4)), (6, 5)),
    (nn.ThorLayerNorm, (5,), {"eps": 0.1}, normal("rows", (6, 5)), (6, 5)),
    (*CONV, {"padding": "same"}, IMAGES, (6, 3, 5, 5)),
    (*CONV, {"padding": "valid", "dilation": 2}, IMAGES, (6, 3, 1, 1)),
    (*CONV, {"stride": (1, 2), "padding": (0, 1)}, IMAGES, (6, 3, 3, 3)),
)


def layer_of_thor(record: Record, place: int) -> None:
    """The covariances of what goes through a layer."""
    kind, shape, options, inputs, out = LAYERS[place]
    record.try_wrongly(kind, weight=normal("weight", shape), **options)
    layer = kind(normal("weight", shape), **options)
    record.attempt(layer.capture, inputs=inputs, output_gradients=normal("out", out))
    record.add(layer.covariances, layer.normalizers)
    covariances = {"a": np.eye(4, dtype=F32), "g": np.eye(5, dtype=F32)}
    record.attempt(layer.capture_covariances, **covariances, a_normalizer=1.0, g_normalizer=1.0)


def of_thor() -> Cases:
    for name, bad, known in (("thor", "raise", OF_THOR), ("thor that skips", "skip", {})):
        run = partial(train, make=partial(thor, bad_factor=bad))
        subject = Subject(run, known, ["layers"], "layers", BETWEEN_OF_THOR)
        yield from of_subject("nn", name, subject)
    for place, (kind, *_) in enumerate(LAYERS):
        case = partial(layer_of_thor, place=place)
        yield f"nn.{kind.__name__} {place}", case
        yield f"nn.{kind.__name__} {place} wrongly", partial(wrongly, case=case)


# Operators


def call(record: Record, given: Given, operator: Operator, **options: Any) -> None:
    """Three steps on the variables of parameters; and which of the given arrays are returned."""
    scalars = {name: options.pop(name) for name in operator.scalars if name in options}
    made, params = operator.new(**options), given.parameters()
    every = [{**operator.inputs(p.shape, p.dtype), **scalars} for p in params]
    kind: Any = nn.RowTensor if operator.takes_rows else np.ndarray
    for step in range(1, 4):
        for inputs, g in zip(every, given.gradients(params, step), strict=True):
            if not isinstance(g, object if operator is ADAM_UPDATE else kind):
                continue
            inputs |= {operator.gradient: g}
            if operator.takes_rows:
                inputs |= {operator.gradient: g.values, "indices": g.indices}
            powers = {n: x**step for n, x in inputs.items() if n in ("beta1_power", "beta2_power")}
            if operator is ADAM_UPDATE:
                record.try_wrongly(ops.adam_update, **inputs, out=np.zeros_like(inputs["weight"]))
            else:
                record.try_wrongly(made, **inputs)
            returned = record.attempt(made, *{**inputs, **powers}.values())
            several = returned if isinstance(returned, tuple) else (returned,)
            record.add([[out is x for x in inputs.values()] for out in several])
    record.add(every)


def of_operators() -> Cases:
    for name, operator in {**EVERY_OPERATOR, "adam_update": ADAM_UPDATE}.items():
        plans, usual = (OF_ROWS, "widths") if operator.takes_rows else (OF_ARRAYS, "dense")
        if operator is ADAM_UPDATE:
            plans, usual = EVERY_PLAN, "mixed"
        known = {each: operator.known(each) for each in (*operator.constructor, *operator.scalars)}
        dtypes = STORAGE_DTYPES[:1] if operator.takes_rows else STORAGE_DTYPES
        run = partial(call, operator=operator)
        yield from of_subject("ops", name, Subject(run, known, plans, usual, dtypes=dtypes))


def cases() -> Cases:
    for of in (of_optimizers, of_mxnet, of_thor, of_operators):
        yield from of()
