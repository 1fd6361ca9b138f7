"""Cases of `digests.py`: MXNet's optimizers, THOR, parameters and checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusestep import nn
from fusestep.nn import mxnet as mx

from digest_arrays import (
    BAD,
    DTYPES,
    F32,
    Cases,
    Shape,
    arguments_of,
    faults,
    gradients,
    labelled,
    normal,
    parameters,
    plans,
    refusals,
    rng_of,
    turns,
    unusual,
)
from digest_optimizers import BETWEEN, OPTIONS, Make, halving, of_weights, options_of

# MXNet's optimizers

MX_OPTIONS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.1,),
    "lr_scheduler": (mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1), halving),
    "lazy_update": (True, False),
    "use_fused_step": (False,),
    "compat": ("1.9",),
    "clip_gradient": (0.4, 0.0),
    "rescale_grad": (0.5, 0.0),
    "epsilon": (0.01,),
    "param_idx2name": ({0: "a_weight", 1: "b_bias", 2: "c_gamma"},),
    "param_dict": ({0: SimpleNamespace(lr_mult=0.5, wd_mult=2.0)},),
    "aggregate_num": (1, 3),
    "sym": (None,),
    "AdamW.compat": (),
}


class Signs(mx.Optimizer):
    """What a user may define."""

    def step(self, indices: Any, weights: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
        for index, weight, grad in zip(indices, weights, grads, strict=True):
            self._update_count(index)
            weight -= (self._get_lr(index) * np.sign(grad)).astype(weight.dtype)


def all_arguments(cls: type) -> dict[str, Any]:
    """Those that a class passes on included."""
    found: dict[str, Any] = {}
    for each in cls.__mro__[:-1]:
        found = {**arguments_of(each.__init__), **found} if "__init__" in vars(each) else found
    return {name: default for name, default in found.items() if name != "self"}


def update(
    record: Any, make: Make, plan: str, way: str = "together", dtype: str = "float32"
) -> None:
    """Five steps; the states go through bytes before the last two."""
    updater = mx.get_updater(make())
    weights = [p.data for p in parameters(plan, [DTYPES[dtype]])]
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
            updater = mx.get_updater(opt if way == "update" else make())
            record.attempt(updater.set_states, kept)
    record.add(updater.states, states)


def bad_updates(record: Any, cls: Any) -> None:
    """What an updater and the methods of an optimizer refuse."""
    w, g = normal(0, (9, 8)), normal(1, (9, 8))
    beyond = [nn.RowTensor(np.array([i]), g[:1], (9, 8)) for i in (9, -1)]
    wrong = [*unusual(w), *beyond, [w], [0, 0], (w, w), (w, g), {0: -1.0}, {0: "no"}, {"x": 2.0}]
    for bad in wrong:
        for place in range(3):
            updater, given = mx.get_updater(cls()), [0, g, w.copy()]
            given[place] = bad
            for each in (given, [[x] for x in given]):
                record.attempt(updater, *each)
                record.add(each[2], updater.states)
        record.attempt(cls().update, 0, w.copy(), g, bad)
        record.attempt(mx.get_updater(cls()).set_states, bad)
        for name in ("set_lr_mult", "set_wd_mult", "set_learning_rate"):
            record.attempt(getattr(cls(), name), bad)


def registered(record: Any) -> None:
    """A class of a user by its name; it is forgotten afterwards."""
    for _ in range(2):
        record.attempt(mx.register, Signs)
    update(record, partial(mx.create, "SIGNS", learning_rate=0.1), "dense")
    del mx.Optimizer.opt_registry["signs"]


def of_mxnet() -> Cases:
    found = {name: getattr(mx, name) for name in mx.__all__}
    classes = {
        n: c for n, c in found.items() if isinstance(c, type) and issubclass(c, mx.Optimizer)
    }
    for name, cls in {**classes, "Optimizer": Signs}.items():
        mine, known = plans(cls is not Signs), all_arguments(cls)
        run = partial(update, plan="mixed" if "mixed" in mine else "dense")
        for dtype in DTYPES:
            for plan in mine:
                case = partial(update, make=cls, plan=plan, dtype=dtype)
                yield f"nn.mxnet.{name} {dtype} {plan}", case
        for k, options in enumerate(turns(name, known, MX_OPTIONS, {})):
            halves = [*DTYPES][2:] if "multi_precision" in options else [[*DTYPES][1 + k % 3]]
            for dtype in ("float32", *halves):
                for way in ("together", "one by one", "update"):
                    label = f"nn.mxnet.{name}({labelled(options)}) {dtype} {way}"
                    yield label, partial(run, make=partial(cls, **options), dtype=dtype, way=way)
        yield f"nn.mxnet.{name} bad updates", partial(bad_updates, cls=cls)
        yield from refusals(f"nn.mxnet.{name}", cls, names=(*known, "learning_rat"))
    created = partial(mx.create, "ADAM", learning_rate=0.1)
    yield "nn.mxnet.create", partial(update, make=created, plan="dense", way="update")
    yield "nn.mxnet.register", registered
    for name in ("create", "register", "get_updater", "Updater"):
        yield from refusals(f"nn.mxnet.{name}", found[name])


# THOR

# Shapes of the parameters of a layer, of its inputs and of its outputs.
LAYERS: dict[str, tuple[tuple[Shape, ...], Shape, Shape]] = {
    "ThorEmbedding": (((7, 4),), (6,), (6, 4)),
    "ThorConv2d": (((3, 2, 3, 3), (3,)), (6, 2, 5, 5), (6, 3, 3, 3)),
    "ThorDense": (((5, 4), (5,)), (6, 4), (6, 5)),
    "ThorLayerNorm": (((5,), (5,)), (6, 5), (6, 5)),
}
# Options of layers; of a convolution with the rows and columns that come out.
OWN: tuple[tuple[str, dict[str, Any], Shape], ...] = (
    ("ThorEmbedding", {"padding_idx": 0}, ()),
    ("ThorLayerNorm", {"eps": 0.1}, ()),
    ("ThorConv2d", {"stride": 2, "padding": 1}, (3, 3)),
    ("ThorConv2d", {"padding": "same"}, (5, 5)),
    ("ThorConv2d", {"padding": "valid", "dilation": 2}, (1, 1)),
    ("ThorConv2d", {"stride": (1, 2), "padding": (0, 1)}, (3, 3)),
    *((name, {"bias": None}, ()) for name in ("ThorConv2d", "ThorDense", "ThorLayerNorm")),
)
THOR_OPTIONS: dict[str, tuple[Any, ...]] = {
    **{name: OPTIONS[name] for name in ("learning_rate", "weight_decay", "loss_scale")},
    "damping": (0.5, (0.1, 0.2, 0.3, 0.4, 0.5), halving),
    "momentum": (0.0, 0.5),
    "decay_filter": (of_weights,),
    "split_indices": (None,),
    "bad_factor": ("skip",),
    "frequency": (3, 100),
    "compat": ("mindspore",),
    "block_size": (2, None),
}


def layer(name: str, dtype: str = "float32", **options: Any) -> Any:
    arrays = [normal((name, k), shape, DTYPES[dtype]) for k, shape in enumerate(LAYERS[name][0])]
    return getattr(nn, name)(**{**dict(zip(("weight", "bias"), arrays, strict=False)), **options})


def passed(name: str, step: int = 0, dtype: str = "float32", out: Shape = ()) -> dict[str, Any]:
    """What goes through a layer in a step; ``out`` are other rows and columns that come out."""
    _, x, d = LAYERS[name]
    ids, of_x = rng_of(step).integers(0, 7, x), normal((name, step, "x"), x, DTYPES[dtype])
    of_d = normal((name, step, "d"), (*d[: len(d) - len(out)], *out), DTYPES[dtype])
    return {"inputs": ids if name == "ThorEmbedding" else of_x, "output_gradients": of_d}


def thor(net: Any, **options: Any) -> Any:
    usual = {"learning_rate": 0.02, "damping": 0.07, "momentum": 0.9, "batch_size": 6}
    return nn.thor(net, **{**usual, "frequency": 2, **options})


def resumed(opt: Any, make: Callable[[], Any]) -> Any:
    other = make()
    for p, q in zip(other.parameters, opt.parameters, strict=True):
        p.data = q.data.copy()
    other.load_state_dict(opt.state_dict())
    return other


def infinite(opt: Any, _: Any) -> None:
    """In the step to come, which computes factors."""
    opt.request_refresh()
    bad = np.full((6, 4), np.inf, F32)
    opt.net["ThorDense"].capture(bad, np.ones((6, 5), F32))


THOR_BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    **{name: BETWEEN[name] for name in ("pickled", "copied", "rebound", "with another loss scale")},
    "resumed": resumed,
    "refreshed": lambda opt, _: opt.request_refresh(),
    "infinite": infinite,
    "cleared": lambda opt, _: infinite(opt, None) or opt.clear_captured(),
}


def precondition(
    record: Any,
    dtype: str = "float32",
    own: tuple[str, dict[str, Any], Shape] = ("", {}, ()),
    between: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> None:
    """Five steps of THOR on a net with each kind of layer, one of which has options of its own."""
    name_of_own, of_own, out = own

    def make() -> Any:
        layers = {n: layer(n, dtype, **(of_own if n == name_of_own else {})) for n in LAYERS}
        further = nn.Parameter(normal("scale", (3,), DTYPES[dtype]))
        return thor(SimpleNamespace(**layers, scale=further), **options)

    opt = make()
    for step in range(5):
        changed = record.attempt(between, opt, make) if between and step == 3 else None
        opt = opt if changed is None else changed
        for name in LAYERS:
            shape = out if name == name_of_own else ()
            opt.net[name].capture(**passed(name, step, dtype, shape))
        given: list[Any] = [normal((step, p.name), p.shape, p.dtype) for p in opt.parameters]
        given[step - 1] = None if step % 2 else given[step - 1]
        record.add(opt.get_lr(), opt.skipped_steps)
        record.attempt(opt, given)
        record.add(opt.parameters)
    record.add(opt, opt.state_dict(), opt.net)


def bad_captures(record: Any, name: str) -> None:
    for argument in passed(name):
        faults(record, layer(name).capture, partial(passed, name), argument)
    a, g = (np.eye(n, dtype=F32) for n in (4, 5))
    usual = partial(dict, a=a, g=g, a_normalizer=1.0, g_normalizer=1.0)
    for argument in usual():
        faults(record, layer(name).capture_covariances, usual, argument)


def one_step(**options: Any) -> Any:
    """What a step of THOR leaves: one without any capture, and one with it."""
    opt, found = thor(layer("ThorDense"), **options), list[Any]()
    for _ in range(2):
        try:
            found.append(opt([normal(0, (5, 4)), None]))
        except RuntimeError as error:
            found.append(error)
        opt.net["net"].capture(**passed("ThorDense"))
    return [found, opt, opt.parameters, opt.state_dict()]


def of_thor() -> Cases:
    known, found = options_of(nn.thor, "net"), {}
    for k, options in enumerate([{}, *turns("thor", known, THOR_OPTIONS, {})]):
        for dtype in DTYPES if not k or "compat" in options else ("float32", [*DTYPES][1 + k % 3]):
            case = partial(precondition, dtype=dtype, **options)
            found[f"nn.thor({labelled(options)}) {dtype}"] = case
    for label, between in THOR_BETWEEN.items():
        for bad in ("raise", "skip"):
            found[f"nn.thor {label} {bad}"] = partial(precondition, between=between, bad_factor=bad)
    for own in OWN:
        for compat in (None, "mindspore"):
            case = partial(precondition, own=own, compat=compat)
            found[f"nn.{own[0]}({labelled(own[1])}) compat={compat}"] = case
    yield from found.items()
    yield from refusals("nn.thor", one_step, names=(*known, "learning_rat"))
    yield from refusals("nn.thor", thor, names=("net",))
    for name in LAYERS:
        yield f"nn.{name} bad captures", partial(bad_captures, name=name)
        names = (*arguments_of(getattr(nn, name)), "learning_rat")
        usual = partial(dict, name=name, weight=np.ones((5, 4), F32), bias=np.ones(5, F32))
        yield from refusals(f"nn.{name}", layer, usual, names)


# Parameters and checkpoints


def held(record: Any, data: Any) -> None:
    p = nn.Parameter(data, "p")
    record.add(p, repr(p), p.shape, p.ndim, p.size, str(p.dtype), np.asarray(p))
    for bad in (*unusual(np.ones((4, 3), F32)), normal(1, (2,)), data.copy()):
        record.attempt(setattr, p, "data", bad)
        record.add(p)


def saved(record: Any, what: Any) -> None:
    """The bytes of a file, and what is read from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        record.attempt(nn.save_checkpoint, what, path)
        if path.exists():
            record.add(path.read_bytes(), nn.load_checkpoint(path))


def read(record: Any, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        try:
            record.add(nn.load_checkpoint(path))
        except Exception as error:
            record.add(type(error).__name__, str(error).replace(folder, ""))


def of_files() -> Cases:
    arrays = {name: normal(name, (4, 3), dtype) for name, dtype in DTYPES.items()}
    for name, array in arrays.items():
        yield f"nn.Parameter {name}", partial(held, data=array)
    yield from refusals("nn.Parameter", nn.Parameter, partial(dict, data=np.ones((4, 3), F32)))
    kinds = [np.arange(4).astype(kind) for kind in ("?", *"bhilqBHILQ", "F", "U")]
    arrays["strided"], p = normal(0, (4, 6))[:, ::2], nn.Parameter(np.ones(2, F32))
    things: list[Any] = [arrays, [nn.Parameter(np.ones(2, F32), "a")], [p], p, *BAD]
    things += [{"a": each} for each in (*kinds, *BAD)] + [{"__metadata__": p}, {1: np.ones(1)}]
    for k, what in enumerate(things):
        yield f"nn.save_checkpoint {k}", partial(saved, what=what)
    for content in (b"", b"nothing", b"\0" * 8, b"\2" + b"\0" * 7 + b"{}"):
        yield f"nn.load_checkpoint {content!r}", partial(read, content=content)


def cases() -> Cases:
    yield from of_mxnet()
    yield from of_thor()
    yield from of_files()
