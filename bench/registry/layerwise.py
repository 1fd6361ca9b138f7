"""Optimizers that look at whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ... import nn
from .adam import BASE
from .record import LOST_LATER, MINDSPORE, MOVES, STOPS, Argument, Form, Measured, Row, Source

_lamb = partial(Form, renamed={"epsilon": "eps"}, large=LOST_LATER)
LAMB = Row(
    "Lamb",
    "params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0",
    BASE,
    {"clip_ratio": Argument("flag", True, beside={"eps": 0.5})},
    forms={
        "": _lamb(reference="layerwise.lamb"),
        "clipped": _lamb(
            {"clip_ratio": True},
            reference="layerwise.lamb_clipped",
            renamed={"epsilon": "eps", "norm_decay": "decay"},
        ),
    },
    measured={"": Measured("lamb", passes=(4,))},
    source=Source(
        MINDSPORE,
        "patched",
        "to go; no CPU kernel",
        "returns True, not the operator's tensors; `clip_ratio=True` is the form of MindSpore 1.x",
    ),
    needs="a dense one: LAMB scales by the norm of the whole parameter",
)

MOMENTUM = partial(nn.Momentum, learning_rate=0.5, momentum=0.9)
_OF_LARS = {
    "epsilon": Argument("not negative", 1.0),
    "coefficient": Argument("not negative", 0.3),
    "use_clip": Argument("flag", True),
    "lars_filter": Argument("filter", lambda p: p.name == "nothing"),
}


def around(params: Any, optimizer: Callable[..., Any] = MOMENTUM, **options: Any) -> nn.LARS:
    """LARS around ``optimizer(params, ...)``; takes the arguments of both."""
    own = {name: options.pop(name) for name in _OF_LARS if name in options}
    return nn.LARS(optimizer(params, **options), **own)


LARS = Row(
    "LARS",
    "optimizer, epsilon=1e-05, coefficient=0.001, use_clip=False, lars_filter=default_filter",
    {"coefficient": 0.1},
    _OF_LARS,
    forms={
        "": Form(large=MOVES),
        "clipped": Form({"use_clip": True}, large=MOVES),
        "Lamb": Form({"optimizer": partial(nn.Lamb, learning_rate=0.5)}, large=MOVES),
        "AdamWeightDecay": Form({"optimizer": nn.AdamWeightDecay}, large=MOVES),
        "AdaFactor": Form({"optimizer": nn.AdaFactor}),
    },
    measured={"": Measured("lars", passes=(2,), start=1.0)},
    source=Source(
        MINDSPORE,
        "patched",
        "since 2.9; no CPU kernel",
        "leaves the wrapped optimizer as it is; see [what numbers you get](numbers.md#mindspore)",
    ),
    needs="a dense one, or a lars_filter that leaves this parameter out",
    states="those of the optimizer that it wraps",
    build=around,
)

_GIVEN = {"relative_step": False, "learning_rate": 0.05}
ADAFACTOR = Row(
    "AdaFactor",
    "params, learning_rate=None, eps=(1e-30, 0.001), clip_threshold=1.0, decay_rate=0.8, "
    "beta1=0.9, weight_decay=0.0, scale_parameter=True, relative_step=True, "
    "warmup_init=False, compression=False, loss_scale=1.0",
    {},
    {
        "learning_rate": Argument("rate or none", 0.1, beside=_GIVEN),
        "eps": Argument("two floats", (0.5, 1e-3)),
        "clip_threshold": Argument("positive", 0.5),
        "decay_rate": Argument("open unit 64", 0.3, beside=_GIVEN),
        "beta1": Argument("beta1", 0.5),
        "weight_decay": Argument("unit decay", 0.3),
        "scale_parameter": Argument("flag", False),
        "relative_step": Argument("flag", False, also={"learning_rate": 0.05}),
        "warmup_init": Argument("flag", True),
        "compression": Argument("flag", True, in_states=True),
        # The direction does not depend on the scale of the gradient, but for epsilon.
        "loss_scale": Argument("loss scale", 4.0, beside={"eps": (0.5, 1e-3)}),
    },
    forms={
        "": Form(),
        "plain": Form({"beta1": None}),
        "compressed": Form({"compression": True}),
        "rate": Form(_GIVEN),
    },
    measured={
        "": Measured(
            "adafactor",
            options={"learning_rate": None, "beta1": None},
            passes=(2, 1),
            is_matrix=True,
        )
    },
    source=Source(
        MINDSPORE,
        "recorded",
        "experimental",
        "`loss_scale` and groups act; `weight_decay` may be a schedule; `beta1` at least 1 raises",
        "arrays of one element in the place of the absent ones",
    ),
    needs="a dense one: Adafactor needs means over all rows",
    states="`exp_avg.` with `beta1`; `exp_avg_sq_row_`, `exp_avg_sq_col_` of matrices, "
    "`exp_avg_sq_` of others; `afactor_step`",
)
PRODIGY = Row(
    "Prodigy",
    "params, learning_rate=1.0, beta1=0.9, beta2=0.999, beta3=None, eps=1e-08, weight_decay=0.0, "
    "decouple=True, use_bias_correction=False, safeguard_warmup=False, d0=1e-06, d_coef=1.0, "
    "growth_rate=inf, fsdp_in_use=False, slice_p=1, loss_scale=1.0",
    {"d0": 0.01, "eps": 0.01},
    {
        "learning_rate": Argument("rate", 0.1),
        "beta1": Argument("below 1", 0.5),
        "beta2": Argument("below 1", 0.9),
        "beta3": Argument("beta1"),  # these show where steps have gone far: see its own tests
        "eps": Argument("positive", 0.1),
        "decouple": Argument("flag", False, beside={"weight_decay": 0.3}),
        "use_bias_correction": Argument("flag", True),
        "safeguard_warmup": Argument("flag"),
        "d0": Argument("positive", 0.1),
        "d_coef": Argument("positive"),
        "growth_rate": Argument("positive or infinite"),
        "fsdp_in_use": Argument("false"),
        "slice_p": Argument("one"),
    },
    forms={
        "": Form(large=STOPS),
        "plain": Form({"beta1": 0.0}, large=STOPS),
        "coupled": Form({"decouple": False}, large=STOPS),
    },
    measured={"": Measured(None, options={"d0": 0.1, "beta2": 0.9}, passes=(4,))},
    source=Source(
        "prodigyopt 1.1.2", "reference", differs="not on devices; no `slice_p` or `fsdp_in_use`"
    ),
    needs="a dense one: the estimate is that of all elements",
    together=True,
)
LAYERWISE_ROWS = (LAMB, LARS, ADAFACTOR, PRODIGY)
