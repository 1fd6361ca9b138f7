"""Cases of `digests.py`: MXNet's optimizers, THOR, parameters and checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusestep import nn
from fusestep.nn import mxnet as mx

from digest_arrays import (
    BAD,
    F32,
    Cases,
    Shape,
    defaults_of,
    labelled,
    normal,
    refusals,
    rows,
    unusual,
)
from digest_optimizers import (
    BETWEEN,
    RATES,
    gradients,
    halving,
    of_weights,
    parameters,
    plans,
    train,
)
from helpers import STORAGE_DTYPES
from thor_nets import BASE, Net, Pass, make


def turns(known: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Each argument with each of its values: those of the table, or one near the default."""
    found = []
    for name, default in known.items():
        near: Any = object()  # what no one takes
        if isinstance(default, bool):
            near = not default
        elif isinstance(default, int | float):
            near = type(default)(default * 0.75) or 1
        found += [{name: value} for value in table.get(name, (near,))]
    return found


# MXNet's optimizers

MX_OPTIONS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.1,),
    "lr_scheduler": (mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1), halving),
    "lazy_update": (True, False),
    "use_fused_step": (False,),
    "wd": (0.1,),
    "clip_gradient": (0.4, 0.0),
    "rescale_grad": (0.5, 0.0),
    "epsilon": (0.01,),
    "param_idx2name": ({0: "a_weight", 1: "b_bias", 2: "c_gamma"},),
    "param_dict": ({0: SimpleNamespace(lr_mult=0.5, wd_mult=2.0)},),
    "aggregate_num": (1, 3),
    "sym": (None,),
    "compat": ("1.9",),
}


class Signs(mx.Optimizer):
    """What a user may define."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
        for index, weight, grad in zip(indices, weights, grads, strict=True):
            self._update_count(index)
            weight -= (self._get_lr(index) * np.sign(grad)).astype(weight.dtype)


def update(
    record: Any, new: Callable[..., Any], plan: str, way: str = "together", dtype: Any = F32
) -> None:
    """Five steps; the states go through bytes before the last two."""
    updater = mx.get_updater(new())
    weights = [p.data for p in parameters(plan, [dtype])]
    indices: list[Any] = [*range(len(weights) - 1), "last"]
    states = [*map(updater.optimizer.create_state_multi_precision, indices, weights)]
    for step in range(5):
        given, opt = gradients(plan, weights, step), updater.optimizer
        if way == "together":
            updater(indices, given, weights)
        elif way == "update":
            opt.update_multi_precision(indices, weights, given, states)
        else:
            for each in zip(indices, given, weights, strict=True):
                updater(*each)
        record.add(weights, opt.num_update, opt.learning_rate)
        if step == 2:
            opt.set_lr_mult({0: 0.5, "last": 2.0})
            opt.set_wd_mult({1: 3.0})
            kept = record.attempt(updater.get_states)
            updater = mx.get_updater(opt if way == "update" else new())
            record.attempt(updater.set_states, kept)
    record.add(updater.states, states)


def stateful(cls: Any, g: Any, state: Any) -> None:
    """An update with a state of the caller."""
    cls().update(0, normal(0, (9, 8)), g, tuple(state) if isinstance(state, list) else state)


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
    stepped = partial(stateful, cls, g)
    yield from refusals(f"{label} state", stepped, of_state, ["state"])
    yield from refusals(f"{label} rate", partial(call, "set_learning_rate"),
                        partial(dict, value=g), ["value"])  # fmt: skip
    for method, value in {
        "set_lr_mult": {0: 0.5},
        "set_wd_mult": {0: 0.5},
        "set_states": b"",
        "set_learning_rate": 0.1,
    }.items():
        usual = partial(dict, value=value)
        yield from refusals(f"{label}.{method}", partial(call, method), usual, ["value"])


def registered(record: Any) -> None:
    """A class of a user by its name; it is forgotten afterwards."""
    for _ in range(2):
        record.attempt(mx.register, Signs)
    update(record, partial(mx.create, "SIGNS", learning_rate=0.1), "dense")
    del mx.Optimizer.opt_registry["signs"]


def of_mxnet() -> Cases:
    for name, cls in {"Adam": mx.Adam, "AdamW": mx.AdamW, "Optimizer": Signs}.items():
        known: dict[str, Any] = {}
        for each in cls.__mro__[:-1]:  # those that a class passes on included
            known = {**defaults_of(each), **known}
        mine = plans(cls is not Signs)
        usual = "mixed" if "mixed" in mine else "dense"
        for dtype in STORAGE_DTYPES:
            for plan in mine:
                case = partial(update, new=cls, plan=plan, dtype=dtype)
                yield f"nn.mxnet.{name} {dtype} {plan}", case
        for k, options in enumerate(turns(known, MX_OPTIONS)):
            halves = STORAGE_DTYPES[2:] if "multi_precision" in options else ()
            for dtype in (F32, *(halves or (STORAGE_DTYPES[1 + k % 3],))):
                for way in ("together", "one by one", "update"):
                    case = partial(update, new=partial(cls, **options), plan=usual, way=way)
                    label = f"nn.mxnet.{name}({labelled(options)}) {dtype} {way}"
                    yield label, partial(case, dtype=dtype)
        yield from refused(f"nn.mxnet.{name}", cls)
        yield from refusals(f"nn.mxnet.{name}", cls, names=[*known, "learning_rat"])
    created = partial(mx.create, "ADAM", learning_rate=0.1)
    yield "nn.mxnet.create", partial(update, new=created, plan="dense", way="update")
    yield "nn.mxnet.register", registered
    for name in ("create", "register", "get_updater", "Updater"):
        yield from refusals(f"nn.mxnet.{name}", getattr(mx, name))


# THOR

# Options of layers, the place of each in the net; of a convolution with what comes out.
OWN: tuple[tuple[str, dict[str, Any], Shape], ...] = (
    ("emb", {"padding_idx": 0}, ()),
    ("ln", {"eps": 0.1}, ()),
    ("conv", {"stride": 2, "padding": 1}, (3, 3)),
    ("conv", {"padding": "same"}, (5, 5)),
    ("conv", {"padding": "valid", "dilation": 2}, (1, 1)),
    ("conv", {"stride": (1, 2), "padding": (0, 1)}, (3, 3)),
    *((place, {"bias": None}, (3, 3) * (place == "conv")) for place in ("conv", "fc", "ln")),
)
THOR_OPTIONS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.1, *RATES),
    "damping": (0.5, (0.1, 0.2, 0.3, 0.4, 0.5), halving),
    "momentum": (0.0, 0.5),
    "weight_decay": (0.3, halving),
    "loss_scale": (4.0, 1_000),
    "decay_filter": (of_weights,),
    "split_indices": (None,),
    "frequency": (3, 100),
    "compat": ("mindspore",),
    "block_size": (2, None),
    "bad_factor": ("skip",),
}
thor = partial(make, **{**BASE, "weight_decay": 0.0})


def infinite(opt: Any, _: Any) -> None:
    """In the step to come, which computes factors."""
    opt.request_refresh()
    opt.net.fc.capture(np.full((6, 4), np.inf, F32), np.ones((6, 5), F32))


THOR_BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    **{n: BETWEEN[n] for n in ("resumed", "pickled", "copied", "rebound")},
    "with another loss scale": BETWEEN["with another loss scale"],
    "refreshed": lambda opt, _: opt.request_refresh(),
    "infinite": infinite,
    "cleared": lambda opt, _: infinite(opt, None) or opt.clear_captured(),
}


def precondition(
    record: Any, dtype: Any = F32, own: Any = ("conv", {"stride": 2, "padding": 1}, (3, 3)),
    between: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Steps of THOR on a net with each kind of layer, one of which has options of its own."""
    place, of_own, out = own

    def new() -> Any:
        net = Net(dtype)
        usual = getattr(net, place)
        given = {name: getattr(usual, name) for name in ("weight", "bias") if hasattr(usual, name)}
        setattr(net, place, type(usual)(**{**given, **of_own}))
        return thor(net, **options)

    def give(opt: Any, step: int) -> list[Any]:
        through = Pass(step, dtype)
        for layer, x, d in zip(opt.net.layers, through.inputs, through.outputs, strict=True):
            of_conv = normal((step, out), (6, 3, *out), dtype) if out and d.ndim == 4 else d
            layer.capture(x, of_conv)
        given: list[Any] = [normal((step, p.name), p.shape, p.dtype) for p in opt.parameters]
        given[step - 1] = None if step % 2 else given[step - 1]
        return given

    train(record, new, give, between)


def bad_captures(place: str) -> Cases:
    net, through = Net(), Pass(0)
    layer = getattr(net, place)
    k, label = net.layers.index(layer), f"nn.{type(layer).__name__} captures"
    usual = partial(dict, inputs=through.inputs[k], output_gradients=through.outputs[k])
    yield from refusals(label, layer.capture, usual)
    a, g = (np.eye(n, dtype=F32) for n in (4, 5))
    usual = partial(dict, a=a, g=g, a_normalizer=1.0, g_normalizer=1.0)
    yield from refusals(f"{label} covariances", layer.capture_covariances, usual)


def one_step(**options: Any) -> Any:
    """What a step of THOR leaves: one without any capture, and one with it."""
    opt, found = thor(nn.ThorDense(normal(0, (5, 4)), normal(1, (5,))), **options), list[Any]()
    for _ in range(2):
        try:
            found.append(opt([normal(0, (5, 4)), None]))
        except RuntimeError as error:
            found.append(error)
        opt.net["net"].capture(normal(2, (6, 4)), normal(3, (6, 5)))
    return [found, opt, opt.parameters, opt.state_dict()]


def of_thor() -> Cases:
    known = {name: default for name, default in defaults_of(nn.thor).items() if name != "net"}
    for k, options in enumerate([{}, *turns(known, THOR_OPTIONS)]):
        every = not k or "compat" in options
        for dtype in STORAGE_DTYPES if every else (F32, STORAGE_DTYPES[1 + k % 3]):
            case = partial(precondition, dtype=dtype, **options)
            yield f"nn.thor({labelled(options)}) {dtype}", case
    for label, between in THOR_BETWEEN.items():
        for bad in ("raise", "skip"):
            case = partial(precondition, between=between, bad_factor=bad)
            yield f"nn.thor {label} {bad}", case
    for own in OWN:
        for compat in (None, "mindspore"):
            case = partial(precondition, own=own, compat=compat)
            yield f"nn.thor {own[0]}({labelled(own[1])}) compat={compat}", case
    yield from refusals("nn.thor", one_step, names=[*known, "learning_rat"])
    yield from refusals("nn.thor", thor, names=["net"])
    for place, layer in vars(Net()).items():
        if place != "scale":
            yield from bad_captures(place)
            usual = partial(dict, weight=np.ones((5, 4), F32), bias=np.ones(5, F32))
            yield from refusals(f"nn.{type(layer).__name__}", type(layer), usual)


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
    for of in (of_mxnet, of_thor, of_files):
        yield from of()
