"""Cases of `digests.py`: MXNet's optimizers, and THOR."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fusestep import nn
from fusestep.nn import mxnet as mx
from fusestep.nn.registry import Argument

from digest_arrays import F32, Cases, Shape, gradients, normal, parameters, plans, refusals, rows
from digest_optimizers import BETWEEN, train
from digest_runs import Subject, of_subject
from mxnet_options import HANDED_ON, OPTIONS
from thor_nets import BASE, Net, Pass, make

# MXNet's optimizers


class Signs(mx.Optimizer):
    """What a user may define."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
        for index, weight, grad in zip(indices, weights, grads, strict=True):
            self._update_count(index)
            weight -= (self._get_lr(index) * np.sign(grad)).astype(weight.dtype)


CLASSES = {"Adam": mx.Adam, "AdamW": mx.AdamW, "Optimizer": Signs}
WAYS = ("", "one by one", "by update")  # else all weights in one call of an updater


def update(
    record: Any,
    make: Callable[..., Any],
    plan: str = "dense",
    way: str = "",
    dtypes: Sequence[Any] = (F32,),
    of_gradient: Any = None,
    **options: Any,
) -> None:
    """Five steps; the states go through bytes before the last two."""

    def new() -> Any:
        return make(**copy.deepcopy(options))  # schedulers keep what they have computed

    updater = mx.get_updater(new())
    weights = [p.data for p in parameters(plan, dtypes)]
    indices: list[Any] = [*range(len(weights) - 1), "last"]
    states = [*map(updater.optimizer.create_state_multi_precision, indices, weights)]
    for step in range(5):
        given, opt = gradients(plan, weights, step, of_gradient), updater.optimizer
        if way == "by update":
            opt.update_multi_precision(indices, weights, given, states)
        elif way:
            for each in zip(indices, given, weights, strict=True):
                updater(*each)
        else:
            updater(indices, given, weights)
        record.add(weights, opt.num_update, opt.learning_rate)
        if step == 2:
            opt.set_lr_mult({0: 0.5, "last": 2.0})
            opt.set_wd_mult({1: 3.0})
            kept = record.attempt(updater.get_states)
            updater = mx.get_updater(opt if way == "by update" else new())
            record.attempt(updater.set_states, kept)
    record.add(updater.states, states)


def refused(label: str, cls: Any) -> Cases:
    """What an updater and the methods of an optimizer refuse."""
    g = normal(1, (9, 8))

    def update(index: Any, gradient: Any, weight: Any) -> Any:
        updater = mx.get_updater(cls())
        try:
            updater(index, gradient, weight)
        finally:
            updater(0, g, normal(0, (9, 8)))
        return updater.states

    def with_state(state: Any) -> None:
        cls().update(0, normal(0, (9, 8)), g, tuple(state) if isinstance(state, list) else state)

    def call(method: str, value: Any) -> None:
        opt = cls()
        getattr(mx.get_updater(opt) if method == "set_states" else opt, method)(value)

    for kind, gradient in {"dense": g, "sparse": rows(0, (9, 8), 4)}.items():
        for several in (False, True):
            given = {"index": 0, "gradient": gradient, "weight": normal(0, (9, 8))}
            given = {name: [value] for name, value in given.items()} if several else given
            usual = partial(copy.deepcopy, given)
            yield from refusals(f"{label} {kind} {several}", update, usual, [*given])
    of_state = partial(dict, state=[normal(2, (9, 8)), normal(3, (9, 8))])
    yield from refusals(f"{label} state", with_state, of_state, ["state"])
    of_method = {"set_lr_mult": {0: 0.5}, "set_wd_mult": {0: 0.5}, "set_states": b""}
    for method, value in {**of_method, "set_learning_rate": 0.1}.items():
        usual = partial(dict, value=value)
        yield from refusals(f"{label}.{method}", partial(call, method), usual, ["value"])


def registered(record: Any) -> None:
    """A class of a user by its name; it is forgotten afterwards."""
    for _ in range(2):
        record.attempt(mx.register, Signs)
    update(record, partial(mx.create, "SIGNS", learning_rate=0.1))
    del mx.Optimizer.opt_registry["signs"]


def of_mxnet() -> Cases:
    for name, cls in CLASSES.items():
        known = {**OPTIONS[mx.Optimizer], **HANDED_ON[getattr(mx, name)]}
        known["learning_rate"] = replace(known["learning_rate"], takes="number")  # no schedule
        takes_rows = cls is not Signs
        usual = "mixed" if takes_rows else "dense"
        for way in WAYS:
            run, once = partial(update, make=cls, way=way), None if way else cls
            subject = Subject(run, once, known, plans(takes_rows), usual)
            yield from of_subject("nn.mxnet", f"{name} {way}".strip(), subject)
        yield from refused(f"nn.mxnet.{name}", cls)
    created = partial(mx.create, "ADAM", learning_rate=0.1)
    yield "nn.mxnet.create", partial(update, make=created, way="by update")
    yield "nn.mxnet.register", registered
    for name in ("create", "register", "get_updater", "Updater"):
        yield from refusals(f"nn.mxnet.{name}", getattr(mx, name))


# THOR

OF_THOR = {
    "learning_rate": Argument("rate", 0.1),
    "damping": Argument("damping", 0.5),
    "momentum": Argument("not negative", 0.5),
    "weight_decay": Argument("decay", 0.3),
    "loss_scale": Argument("loss scale", 4.0),
    "batch_size": Argument("count", 24),
    "use_nesterov": Argument("flag"),
    "decay_filter": Argument("filter"),
    "split_indices": Argument("none"),
    "enable_clip_grad": Argument("flag"),
    "frequency": Argument("count", 3),
    "compat": Argument("form"),
    "block_size": Argument("count", 2),
    "bad_factor": Argument("what to do"),
}
# Options of layers, the place of each in the net; of a convolution with what comes out.
LAYERS: tuple[tuple[str, dict[str, Any], Shape], ...] = (
    ("emb", {"padding_idx": 0}, ()),
    ("ln", {"eps": 0.1}, ()),
    ("conv", {"stride": 2, "padding": 1}, (3, 3)),
    ("conv", {"padding": "same"}, (5, 5)),
    ("conv", {"padding": "valid", "dilation": 2}, (1, 1)),
    ("conv", {"stride": (1, 2), "padding": (0, 1)}, (3, 3)),
    *((place, {"bias": None}, (3, 3) * (place == "conv")) for place in ("conv", "fc", "ln")),
)
FORMS: tuple[Mapping[str, Any], ...] = (
    *({"own": own, "compat": compat} for own in LAYERS for compat in (None, "mindspore")),
    *({"frequency": 100}, {"block_size": None}, {"compat": "mindspore"}),
)


def infinite(opt: Any, _: Any) -> None:
    """In the step to come, which computes factors."""
    opt.request_refresh()
    opt.net["fc"].capture(np.full((6, 4), np.inf, F32), np.ones((6, 5), F32))


BETWEEN_OF_THOR: dict[str, Callable[[Any, Any], Any]] = {
    **{n: BETWEEN[n] for n in ("resumed", "pickled", "copied", "rebound")},
    "with another loss scale": BETWEEN["with another loss scale"],
    "refreshed": lambda opt, _: opt.request_refresh(),
    "infinite": infinite,
    "cleared": lambda opt, _: infinite(opt, None) or opt.clear_captured(),
}


def precondition(
    record: Any,
    thor: Callable[..., Any],
    plan: str,  # noqa: ARG001  (of its layers)
    dtypes: Sequence[Any] = (F32,),
    of_gradient: Any = None,
    between: Any = None,
    own: tuple[str, dict[str, Any], Shape] = LAYERS[2],
    **options: Any,
) -> None:
    """Steps of THOR on a net with each kind of layer, one of which has options of its own."""
    place, of_own, out = own

    def new() -> Any:
        net = Net(dtypes[0])
        usual = getattr(net, place)
        held = {name: getattr(usual, name, None) for name in ("weight", "bias")}
        given = {name: p for name, p in held.items() if p is not None}
        setattr(net, place, type(usual)(**{**given, **of_own}))
        return thor(net, **options)

    def give(opt: Any, step: int) -> list[Any]:
        through = Pass(step, dtypes[0])
        layers = [layer for layer in opt.net.values() if hasattr(layer, "capture")]
        for layer, x, d in zip(layers, through.inputs, through.outputs, strict=True):
            of_conv = normal((step, out), (6, 3, *out), d.dtype) if out and d.ndim == 4 else d
            layer.capture(x, of_conv)
        given: list[Any] = [
            normal((step, p.name), p.shape, of_gradient or p.dtype) for p in opt.parameters
        ]
        given[step - 1] = None if step % 2 else given[step - 1]
        return given

    train(record, new, give, between)


def one_step(thor: Callable[..., Any], **options: Any) -> Any:
    """What a step of THOR leaves: one without any capture, and one with it."""
    opt, found = thor(nn.ThorDense(normal(0, (5, 4)), normal(1, (5,))), **options), list[Any]()
    for _ in range(2):
        try:
            found.append(opt([normal(0, (5, 4)), None]))
        except RuntimeError as error:
            found.append(error)
        opt.net["net"].capture(normal(2, (6, 4)), normal(3, (6, 5)))
    return [found, opt, opt.parameters, opt.state_dict()]


def bad_captures(place: str) -> Cases:
    net, through = Net(), Pass(0)
    layer = getattr(net, place)
    k, label = net.layers.index(layer), f"nn.{type(layer).__name__}"
    usual = partial(dict, inputs=through.inputs[k], output_gradients=through.outputs[k])
    yield from refusals(f"{label} captures", layer.capture, usual)
    a, g = (np.eye(n, dtype=F32) for n in (4, 5))
    usual = partial(dict, a=a, g=g, a_normalizer=1.0, g_normalizer=1.0)
    yield from refusals(f"{label} captures covariances", layer.capture_covariances, usual)
    usual = partial(dict, weight=np.ones((5, 4), F32), bias=np.ones(5, F32))
    yield from refusals(label, type(layer), usual)


def of_thor() -> Cases:
    for bad in ("raise", "skip"):
        thor = partial(make, **{**BASE, "weight_decay": 0.0, "bad_factor": bad})
        subject = Subject(
            partial(precondition, thor=thor),
            partial(one_step, thor),
            OF_THOR,
            ("layers",),
            "layers",
            FORMS,
            BETWEEN_OF_THOR,
        )
        yield from of_subject("nn", "thor" if bad == "raise" else "thor that skips", subject)
    yield from refusals("nn.thor", thor, names=["net"])
    for place in ("emb", "conv", "fc", "ln"):
        yield from bad_captures(place)


def cases() -> Cases:
    yield from of_mxnet()
    yield from of_thor()
