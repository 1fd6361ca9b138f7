"""Optimizers that look at one element at a time, beside Adam's."""

from __future__ import annotations

from functools import partial

import numpy as np

from .record import LOST, LOST_LATER, MOVES, STOPS, Argument, Form, Measured, Row, Source, recorded

_RATE = {"learning_rate": 0.05}
# Of optimizers that look at signs.
_SIGNS = {name: Argument("clip", 0.1, in_states=True) for name in ("clipvalue", "clipnorm")}
_HEAVY = {"momentum": 0.9}
_SOME_ROWS = "rows that occur"
_IF_ASKED = "takes rows if `sparse_update` is given"

_heavy_ball = partial(Form, reference="elementwise.momentum", large=MOVES)
MOMENTUM = Row(
    "Momentum",
    "params, learning_rate, momentum, weight_decay=0.0, loss_scale=1.0, use_nesterov=False",
    {**_RATE, **_HEAVY},
    {"momentum": Argument("not negative", 0.5)},
    forms={
        "": _heavy_ball(renamed={"nesterov": "use_nesterov"}),
        "nesterov": _heavy_ball({"use_nesterov": True}, renamed={"nesterov": "use_nesterov"}),
    },
    measured={
        "": Measured("momentum", "momentum-lazy", {**_HEAVY, "sparse_update": "lazy"}),
        "nesterov": Measured(
            "nesterov", options={**_HEAVY, "use_nesterov": True}, on_request=("dense",)
        ),
    },
    source=recorded("to go", f"`use_nesterov` acts; {_IF_ASKED}"),
)

_sgd = partial(Form, reference="elementwise.sgd_momentum", large=MOVES)
SGD = Row(
    "SGD",
    "params, learning_rate=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, "
    "nesterov=False, loss_scale=1.0",
    _RATE,
    {
        "state_dtype": Argument("dtype", np.float16, beside=_HEAVY, in_states=True),
        "momentum": Argument("number", 0.5),
        "dampening": Argument("number", 0.5, beside=_HEAVY),
        "weight_decay": Argument("fixed decay", 0.3),
        "nesterov": Argument("flag", True, beside=_HEAVY),
    },
    forms={
        "": _sgd(reference="elementwise.sgd", rows="lazy"),
        "momentum": _sgd({**_HEAVY, "dampening": 0.3}, "with momentum"),
        "nesterov": _sgd({**_HEAVY, "nesterov": True}),
    },
    measured={
        "": Measured("sgd", "sgd-rows"),
        "momentum": Measured("momentum", options=_HEAVY, on_request=("dense",)),
    },
    source=recorded(
        "signature",
        "dampening counts the updates of each parameter; `momentum=True` raises; takes rows",
        "`stat.` (whether there was a first step); without momentum `accum.` (zeros)",
    ),
)

_rmsprop = partial(Form, renamed={"rho": "decay"}, large=LOST_LATER)
RMSPROP = Row(
    "RMSProp",
    "params, learning_rate=0.1, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False, "
    "centered=False, loss_scale=1.0, weight_decay=0.0",
    _RATE,
    {
        "decay": Argument("not negative", 0.5),
        "momentum": Argument("not negative", 0.5),
        "epsilon": Argument("positive", 0.5),
        "centered": Argument("flag", True, beside={"decay": 0.5}),
    },
    forms={
        "": _rmsprop(reference="elementwise.rmsprop"),
        "momentum": _rmsprop(_HEAVY, "with momentum", "elementwise.rmsprop"),
        "centered": _rmsprop({"centered": True}, "with `centered`", "elementwise.rmsprop_centered"),
        "both": _rmsprop({**_HEAVY, "centered": True}, "", "elementwise.rmsprop_centered"),
    },
    measured={
        "": Measured("rmsprop", "rmsprop-lazy", {"sparse_update": "lazy"}),
        "momentum": Measured("rmsprop-momentum", options=_HEAVY),
        "centered": Measured("rmsprop-centered", options={"centered": True}),
    },
    source=recorded(
        "signature",
        f"epsilon under the root everywhere; {_IF_ASKED}",
        "without momentum `moment.` (the last step)",
    ),
)
_adagrad = partial(Form, reference="elementwise.adagrad", rows="lazy")
ADAGRAD = Row(
    "Adagrad",
    "params, accum=0.1, learning_rate=0.001, update_slots=True, loss_scale=1.0, weight_decay=0.0",
    _RATE,
    {"update_slots": Argument("flag", False)},
    forms={
        "": _adagrad(large=STOPS),
        "fixed": _adagrad({"update_slots": False}, "with `update_slots=False`", large=MOVES),
    },
    measured={"": Measured("adagrad", "adagrad-rows")},
    source=recorded("signature", "no hidden epsilon; `update_slots=False` acts; takes rows"),
)
PROXIMAL_ADAGRAD = Row(
    "ProximalAdagrad",
    "params, accum=0.1, learning_rate=0.001, l1=0.0, l2=0.0, use_locking=False, "
    "loss_scale=1.0, weight_decay=0.0",
    _RATE,
    {},
    forms={
        "": Form(
            {"l1": 0.1, "l2": 0.2},
            reference="elementwise.proximal_adagrad",
            rows="lazy",
            rows_there=_SOME_ROWS,
            large=STOPS,
        )
    },
    measured={"": Measured("proximal-adagrad", "proximal-adagrad-rows", {"l1": 1e-4, "l2": 1e-4})},
    source=recorded("since 2.9", "an accumulator of 0 moves nothing"),
)

_ftrl = partial(Form, reference="elementwise.ftrl", rows="lazy", rows_there=_SOME_ROWS, large=LOST)
FTRL = Row(
    "FTRL",
    "params, initial_accum=0.1, learning_rate=0.001, lr_power=-0.5, l1=0.0, l2=0.0, "
    "use_locking=False, loss_scale=1.0, weight_decay=0.0",
    _RATE,
    {
        "learning_rate": Argument("fixed rate", 0.1),
        "initial_accum": Argument("not negative", 1.0),
        "lr_power": Argument("not positive", -0.3),
        "beta": Argument("not negative", 1.0),
        "l2_shrinkage": Argument("not negative", 0.3),
    },
    forms={
        "": _ftrl({"l1": 0.1, "l2": 0.2}),
        "power": _ftrl({"lr_power": -0.7, "l1": 0.1}),
        "shrunk": _ftrl({"l2_shrinkage": 0.3, "beta": 1.0, "l1": 0.1, "l2": 0.2}),
        "power shrunk": _ftrl({"lr_power": -0.7, "l2_shrinkage": 0.3, "beta": 1.0}),
    },
    measured={
        "": Measured("ftrl", "ftrl-rows"),
        "lr_power=-0.4": Measured(None, options={"lr_power": -0.4}, on_request=("dense",)),
    },
    source=recorded(
        "since 2.9",
        "sign of `l1` in dense steps; NaN shows; a rate assigned later acts on rows too; "
        "`beta` and `l2_shrinkage` are Keras's",
    ),
)

ADAMAX = Row(
    "AdaMax",
    "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, "
    "loss_scale=1.0",
    {**_RATE, "eps": 0.01},
    {},
    forms={"": Form(reference="elementwise.adamax", large=MOVES)},
    measured={"": Measured(None)},
    source=recorded("signature", _IF_ASKED),
)
ADADELTA = Row(
    "Adadelta",
    "params, learning_rate=1.0, rho=0.9, epsilon=1e-06, loss_scale=1.0, weight_decay=0.0",
    {"learning_rate": 0.5, "epsilon": 0.01},
    {"rho": Argument("closed unit", 0.5), "epsilon": Argument("not negative", 0.1)},
    forms={"": Form(reference="elementwise.adadelta", large=STOPS)},
    measured={"": Measured(None)},
    source=recorded("signature", _IF_ASKED),
)
ASGD = Row(
    "ASGD",
    "params, learning_rate=0.1, lambd=0.0001, alpha=0.75, t0=1000000.0, weight_decay=0.0",
    {**_RATE, "lambd": 0.3},
    {
        "lambd": Argument("not negative", 0.9),
        "alpha": Argument("float", 30.0),
        "t0": Argument("float", 0.0, in_states=True),
    },
    forms={
        "": Form(reference="elementwise.asgd", large=MOVES),
        "averaged": Form({"t0": 0.0}, reference="elementwise.asgd", large=MOVES),
    },
    measured={"": Measured(None)},
    source=recorded(
        "signature",
        f"a rate that is assigned acts one step earlier; `lambd` below 0 raises; {_IF_ASKED}",
        "`eta_`, `mu_` (they follow from the step)",
    ),
)
RPROP = Row(
    "Rprop",
    "params, learning_rate=0.1, etas=(0.5, 1.2), step_sizes=(1e-06, 50.0), weight_decay=0.0",
    _RATE,
    {
        **_SIGNS,
        "etas": Argument("factors", (0.1, 8.0)),
        "step_sizes": Argument("limits", (0.2, 0.3)),
    },
    forms={"": Form(reference="elementwise.rprop", large=MOVES)},
    measured={"": Measured(None)},
    source=recorded(
        "signature",
        "a NaN shows; an element begins at its own first update; 16 bits are stored, float32 is "
        f"computed; `step_sizes` of 0 raise; {_IF_ASKED}",
    ),
)
LION = Row(
    "Lion",
    "params, learning_rate=0.0001, beta1=0.9, beta2=0.99, weight_decay=0.0, loss_scale=1.0",
    _RATE,
    {
        **_SIGNS,
        "loss_scale": Argument("loss scale", 4.0, in_states=True),  # signs have no scale
        "beta1": Argument("open unit", 0.02, beside={"beta2": 0.1}),
        "beta2": Argument("open unit", 0.1),
    },
    forms={"": Form(reference="elementwise.lion", large=MOVES)},
    measured={"": Measured(None)},
    source=Source("Chen et al. (2023)", "recorded", differs="compared with runs of optax 0.2.8"),
)
ADAN = Row(
    "Adan",
    "params, learning_rate=0.001, beta1=0.98, beta2=0.92, beta3=0.99, eps=1e-08, "
    "weight_decay=0.0, loss_scale=1.0",
    {**_RATE, "eps": 0.01},
    {"beta2": Argument("open unit", 0.5), "beta3": Argument("open unit", 0.3)},
    forms={"": Form(reference="elementwise.adan", large=LOST_LATER)},
    measured={"": Measured(None)},
    source=Source(
        "Xie et al. (2022)", "recorded", differs="compared with runs of pytorch_optimizer 4.1"
    ),
)
ELEMENTWISE_ROWS = (
    *(MOMENTUM, SGD, ASGD, RMSPROP, RPROP, ADAGRAD, PROXIMAL_ADAGRAD, ADADELTA, FTRL, ADAMAX),
    *(LION, ADAN),
)
