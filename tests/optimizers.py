"""Every optimizer class of nn as one table, and runs of any of them.

A class that is not in `FAMILIES`, or an argument that its entry does not have, fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fusestep import nn

Options = Mapping[str, Any]
ELSEWHERE = object()  # what the argument does is no number: errors, concurrency, skipped steps


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        takes: what may be given, a key of `KINDS` in test_family_options.py.
        moved: a value with which a run ends far from one with the value in `Family.base`.
        beside: other arguments, in both runs.
        also: other arguments, in the run with the moved value.
        in_states: it shows in the states, not in the parameters.
        rows_only: it shows with row-sparse gradients only.
    """

    takes: str
    moved: Any = ELSEWHERE
    beside: Options = field(default_factory=dict)
    also: Options = field(default_factory=dict)
    in_states: bool = False
    rows_only: bool = False


@dataclass(frozen=True)
class Family:
    """One class.

    Attributes:
        cls: the class.
        published: its positional arguments with their defaults, as MindSpore has them.
        base: the arguments of a run: the required ones, and others with which all act.
        arguments: all arguments but the parameters (or the optimizer) to work on.
        takes_rows: whether it can take row-sparse gradients.
        build: makes one from parameters and options, where it is not ``cls``.
    """

    cls: type
    published: str
    base: Options
    arguments: Mapping[str, Argument]
    takes_rows: bool = True
    build: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.cls.__name__

    def make(self, params: Any, **options: Any) -> Any:
        """An optimizer with the options of `base` unless others are given."""
        return (self.build or self.cls)(params, **{**self.base, **options})


HEAVY = {"momentum": 0.9}
MOMENTUM = partial(nn.Momentum, learning_rate=0.5, **HEAVY)


def around(params: Any, optimizer: Callable[..., Any] = MOMENTUM, **options: Any) -> nn.LARS:
    """LARS around ``optimizer(params, ...)``; takes the arguments of both."""
    own = {name: options.pop(name) for name in LARS_ARGUMENTS if name in options}
    return nn.LARS(optimizer(params, **options), **own)


FLAG = Argument("flag", True)
COMMON = {
    "learning_rate": Argument("rate", 0.1),
    "weight_decay": Argument("decay", 0.3),
    "use_locking": Argument("flag"),
    "skip_nonfinite": Argument("flag"),
    "state_dtype": Argument("dtype", np.float16, in_states=True),
}
SCALED = {**COMMON, "loss_scale": Argument("loss scale", 4.0)}
# Without decay, a step with g = 0 may be no step.
ROWS = {
    "sparse_update": Argument("sparse update", "lazy", beside={"weight_decay": 0.3}, rows_only=True)
}
BETAS = {"beta1": Argument("open unit", 0.5), "beta2": Argument("open unit", 0.9)}
ADAM = {**SCALED, **ROWS, **BETAS, "eps": Argument("positive", 0.1), "use_nesterov": FLAG}
ADAM_BASE = {"learning_rate": 0.05, "eps": 0.01}
L1_L2 = {"l1": Argument("not negative", 0.3), "l2": Argument("not negative", 0.9)}
GIVEN = {"relative_step": False}
LARS_ARGUMENTS = {
    "epsilon": Argument("not negative", 1.0),
    "coefficient": Argument("not negative", 0.3),
    "use_clip": FLAG,
    "lars_filter": Argument("filter", lambda p: p.name == "nothing"),
}

FAMILIES = (
    Family(
        nn.Adam,
        "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, use_locking=False, "
        "use_nesterov=False, weight_decay=0.0, loss_scale=1.0, use_amsgrad=False",
        ADAM_BASE,
        {
            **ADAM,
            # Gradients shrink, but only a short memory forgets the large ones.
            "use_amsgrad": Argument("flag", True, beside={"beta2": 0.5}),
            "use_lazy": Argument("flag", True, beside={"sparse_update": None}, rows_only=True),
            "use_offload": Argument("flag"),
        },
    ),
    Family(
        nn.LazyAdam,
        "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, use_locking=False, "
        "use_nesterov=False, weight_decay=0.0, loss_scale=1.0",
        ADAM_BASE,
        {**ADAM, "weight_decay": Argument("float decay", 0.3)},
    ),
    Family(
        nn.AdamOffload,
        "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, use_locking=False, "
        "use_nesterov=False, weight_decay=0.0, loss_scale=1.0",
        ADAM_BASE,
        ADAM,
    ),
    Family(
        nn.AdamWeightDecay,
        "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0",
        ADAM_BASE,
        {**COMMON, **ROWS, **BETAS, "eps": Argument("positive", 0.1)},
    ),
    Family(
        nn.Momentum,
        "params, learning_rate, momentum, weight_decay=0.0, loss_scale=1.0, use_nesterov=False",
        {"learning_rate": 0.05, **HEAVY},
        {**SCALED, **ROWS, "momentum": Argument("not negative", 0.5), "use_nesterov": FLAG},
    ),
    Family(
        nn.SGD,
        "params, learning_rate=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, "
        "nesterov=False, loss_scale=1.0",
        {"learning_rate": 0.05},
        {
            **SCALED,
            **ROWS,
            "state_dtype": Argument("dtype", np.float16, beside=HEAVY, in_states=True),
            "momentum": Argument("number", 0.5),
            "dampening": Argument("number", 0.5, beside=HEAVY),
            "weight_decay": Argument("fixed decay", 0.3),
            "nesterov": Argument("flag", True, beside=HEAVY),
        },
    ),
    Family(
        nn.RMSProp,
        "params, learning_rate=0.1, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False, "
        "centered=False, loss_scale=1.0, weight_decay=0.0",
        {"learning_rate": 0.05},
        {
            **SCALED,
            **ROWS,
            "decay": Argument("not negative", 0.5),
            "momentum": Argument("not negative", 0.5),
            "epsilon": Argument("positive", 0.5),
            "centered": Argument("flag", True, beside={"decay": 0.5}),
        },
    ),
    Family(
        nn.Adagrad,
        "params, accum=0.1, learning_rate=0.001, update_slots=True, loss_scale=1.0, "
        "weight_decay=0.0",
        {"learning_rate": 0.05},
        {
            **SCALED,
            **ROWS,
            "accum": Argument("not negative", 1.0),
            "update_slots": Argument("flag", False),
        },
    ),
    Family(
        nn.ProximalAdagrad,
        "params, accum=0.1, learning_rate=0.001, l1=0.0, l2=0.0, use_locking=False, "
        "loss_scale=1.0, weight_decay=0.0",
        {"learning_rate": 0.05},
        {**SCALED, **ROWS, **L1_L2, "accum": Argument("not negative", 1.0)},
    ),
    Family(
        nn.FTRL,
        "params, initial_accum=0.1, learning_rate=0.001, lr_power=-0.5, l1=0.0, l2=0.0, "
        "use_locking=False, loss_scale=1.0, weight_decay=0.0",
        {"learning_rate": 0.05},
        {
            **SCALED,
            **ROWS,
            **L1_L2,
            "learning_rate": Argument("fixed rate", 0.1),
            "initial_accum": Argument("not negative", 1.0),
            "lr_power": Argument("not positive", -0.3),
        },
    ),
    Family(
        nn.Lamb,
        "params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0",
        ADAM_BASE,
        {
            **COMMON,
            **BETAS,
            "eps": Argument("positive", 0.1),
            "clip_ratio": Argument("flag", True, beside={"eps": 0.5}),
        },
        takes_rows=False,
    ),
    Family(
        nn.LARS,
        "optimizer, epsilon=1e-05, coefficient=0.001, use_clip=False, lars_filter=default_filter",
        {"coefficient": 0.1},
        LARS_ARGUMENTS,
        takes_rows=False,
        build=around,
    ),
    Family(
        nn.AdaFactor,
        "params, learning_rate=None, eps=(1e-30, 0.001), clip_threshold=1.0, decay_rate=0.8, "
        "beta1=0.9, weight_decay=0.0, scale_parameter=True, relative_step=True, "
        "warmup_init=False, compression=False, loss_scale=1.0",
        {},
        {
            **SCALED,
            "learning_rate": Argument("rate or none", 0.1, beside={**GIVEN, "learning_rate": 0.05}),
            "eps": Argument("two floats", (0.5, 1e-3)),
            "clip_threshold": Argument("positive", 0.5),
            "decay_rate": Argument("open unit 64", 0.3, beside={**GIVEN, "learning_rate": 0.05}),
            "beta1": Argument("beta1", 0.5),
            "weight_decay": Argument("unit decay", 0.3),
            "scale_parameter": Argument("flag", False),
            "relative_step": Argument("flag", False, also={"learning_rate": 0.05}),
            "warmup_init": FLAG,
            "compression": Argument("flag", True, in_states=True),
            # The direction does not depend on the scale of the gradient, but for epsilon.
            "loss_scale": Argument("loss scale", 4.0, beside={"eps": (0.5, 1e-3)}),
        },
        takes_rows=False,
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}

# Forms of the classes, each with a rule or a set of states of its own.
FORMS: dict[str, tuple[str, Options]] = {
    "Adam": ("Adam", {}),
    "Adam-nesterov": ("Adam", {"use_nesterov": True}),
    "Adam-amsgrad": ("Adam", {"use_amsgrad": True}),
    "Adam-lazy": ("Adam", {"use_lazy": True}),
    "LazyAdam": ("LazyAdam", {}),
    "AdamOffload": ("AdamOffload", {}),
    "AdamWeightDecay": ("AdamWeightDecay", {}),
    "Momentum": ("Momentum", {}),
    "Momentum-nesterov": ("Momentum", {"use_nesterov": True}),
    "SGD": ("SGD", {}),
    "SGD-momentum": ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    "SGD-nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSProp": ("RMSProp", {}),
    "RMSProp-momentum": ("RMSProp", {"momentum": 0.9}),
    "RMSProp-centered": ("RMSProp", {"centered": True}),
    "RMSProp-both": ("RMSProp", {"momentum": 0.9, "centered": True}),
    "Adagrad": ("Adagrad", {}),
    "Adagrad-fixed": ("Adagrad", {"update_slots": False}),
    "ProximalAdagrad": ("ProximalAdagrad", {"l1": 0.1, "l2": 0.2}),
    "FTRL": ("FTRL", {"l1": 0.1, "l2": 0.2}),
    "FTRL-power": ("FTRL", {"lr_power": -0.7, "l1": 0.1}),
    "Lamb": ("Lamb", {}),
    "Lamb-clipped": ("Lamb", {"clip_ratio": True}),
    "LARS": ("LARS", {}),
    "LARS-clipped": ("LARS", {"use_clip": True}),
    "LARS-Lamb": ("LARS", {"optimizer": partial(nn.Lamb, learning_rate=0.5)}),
    "LARS-AdamWeightDecay": ("LARS", {"optimizer": nn.AdamWeightDecay}),
    "LARS-AdaFactor": ("LARS", {"optimizer": nn.AdaFactor}),
    "AdaFactor": ("AdaFactor", {}),
    "AdaFactor-plain": ("AdaFactor", {"beta1": None}),
    "AdaFactor-compressed": ("AdaFactor", {"compression": True}),
    "AdaFactor-rate": ("AdaFactor", {"relative_step": False, "learning_rate": 0.05}),
}

# One form of each class, that with the most states (and plain Adam, whose kernels LazyAdam has
# too): what forms of a class share, like the types of arrays, is tested with these alone where it
# needs kernels of its own.
ONE_OF_EACH = (
    *("Adam", "Adam-amsgrad", "LazyAdam", "AdamOffload", "AdamWeightDecay", "Momentum"),
    *("SGD-momentum", "RMSProp-both", "Adagrad", "ProximalAdagrad", "FTRL"),
    *("Lamb", "LARS", "AdaFactor"),
)


def make(form: str, params: Any, **options: Any) -> Any:
    """An optimizer of one of the `FORMS`."""
    name, own = FORMS[form]
    return BY_NAME[name].make(params, **{**own, **options})


def decayed_and_scaled(form: str) -> dict[str, Any]:
    """Options for a weight decay, and for a loss scale where there is one."""
    name, own = FORMS[form]
    cls = own.get("optimizer", MOMENTUM) if name == "LARS" else BY_NAME[name].cls
    scaled = "loss_scale" in inspect.signature(cls).parameters
    return {"weight_decay": 0.1} | ({"loss_scale": 3.0} if scaled else {})


def inner(opt: Any) -> Any:
    """The optimizer inside LARS, or ``opt`` itself."""
    return opt.opt if isinstance(opt, nn.LARS) else opt


SHAPES: dict[str, tuple[int, ...]] = {"table": (6, 4), "vector": (5,)}


def parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: Any = np.float32) -> Any:
    """Fresh parameters, the same ones each time."""
    rng = np.random.default_rng(1)
    return [
        nn.Parameter(np.array(rng.standard_normal(shape)).astype(dtype), name)
        for name, shape in shapes.items()
    ]


def gradients(params: Sequence[nn.Parameter], step: int, dtype: Any = None) -> list[Any]:
    """Dense gradients of a step."""
    rng = np.random.default_rng(100 + step)
    return [np.array(rng.standard_normal(p.shape)).astype(dtype or p.dtype) for p in params]


def rows(shape: tuple[int, ...], indices: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
    """A row-sparse gradient with these indices."""
    values = np.random.default_rng(seed).standard_normal((len(indices), *shape[1:]))
    return nn.RowTensor(np.array(indices, np.int64), values.astype(dtype), shape)


def states(opt: Any) -> dict[str, np.ndarray]:
    """The arrays that hold what was learned: neither counters nor options."""
    others = ("step.", "learning_rate", "global_step", "momentum", "beta1", "beta2", "afactor_step")
    return {n: array for n, array in opt.state_dict().items() if not n.startswith(others)}
