"""Adam and what is made of it."""

from __future__ import annotations

from functools import partial

from .record import LOST_LATER, Argument, Form, Measured, Row, recorded

_PUBLISHED = (
    "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, use_locking=False, "
    "use_nesterov=False, weight_decay=0.0, loss_scale=1.0"
)
BASE = {"learning_rate": 0.05, "eps": 0.01}
_EPS_HAT = {"eps_hat": Argument("flag", False)}
# Where every row takes each step, all have as many updates as their parameter.
BY_ROW = {
    "rowwise_bias_correction": Argument("flag", True, {"sparse_update": "lazy"}, rows_only=True)
}
_EVERY_ROW, _SOME_ROWS = "every row moves", "rows that occur"
_form = partial(Form, reference="adam", large=LOST_LATER)

ADAM = Row(
    "Adam",
    f"{_PUBLISHED}, use_amsgrad=False",
    BASE,
    {
        # Gradients shrink, but only a short memory forgets the large ones.
        "use_amsgrad": Argument("flag", True, beside={"beta2": 0.5}),
        "use_lazy": Argument("flag", True, beside={"sparse_update": None}, rows_only=True),
        "use_offload": Argument("flag"),
        **_EPS_HAT,
    },
    forms={
        "": _form(rows="dense_equivalent", rows_there=_EVERY_ROW),
        "nesterov": _form({"use_nesterov": True}, rows="dense_equivalent"),
        "usual": _form({"eps_hat": False}, rows="dense_equivalent"),
        "amsgrad": _form({"use_amsgrad": True}, "with `use_amsgrad`", reference="adam_amsgrad"),
        "lazy": _form({"use_lazy": True}, "with `use_lazy`", rows="lazy", rows_there=_SOME_ROWS),
    },
    measured={
        "": Measured("adam", "adam-rows"),
        "nesterov": Measured(None, options={"use_nesterov": True}, on_request=("dense",)),
        "amsgrad": Measured("amsgrad", options={"use_amsgrad": True}),
    },
    source=recorded(
        "signature",
        "`use_amsgrad` with `use_nesterov` raises; with `use_offload` gradient centralization "
        "acts; takes rows with `use_amsgrad` or `use_offload` if `sparse_update` is given",
    ),
)
LAZY_ADAM = Row(
    "LazyAdam",
    _PUBLISHED,
    BASE,
    {"weight_decay": Argument("float decay", 0.3), **_EPS_HAT, **BY_ROW},
    forms={"": _form(rows="lazy", rows_there=_SOME_ROWS)},
    measured={"": Measured("adam", "adam-lazy", on_request=("dense",))},
    source=recorded("since 2.0"),
)
ADAM_OFFLOAD = Row(
    "AdamOffload",
    _PUBLISHED,
    BASE,
    _EPS_HAT,
    forms={"": _form()},
    measured={
        "": Measured(
            "adam",
            "adam-rows",
            {"sparse_update": "dense_equivalent"},
            on_request=("dense", "rows"),
        )
    },
    source=recorded(
        "since 2.0",
        "parameters live on the host, so it is `Adam`; gradient centralization acts; takes rows "
        "if `sparse_update` is given",
    ),
)
ADAM_WEIGHT_DECAY = Row(
    "AdamWeightDecay",
    "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0",
    BASE,
    {"correct_bias": Argument("flag", True)},
    forms={
        "": _form(reference="adam_weight_decay"),
        "usual": _form({"correct_bias": True}, reference="adam_weight_decay"),
    },
    measured={"": Measured("adamw", options={"weight_decay": 0.01})},
    source=recorded(
        "to go", "gradient centralization acts; takes rows if `sparse_update` is given"
    ),
)
ROWS_OF_ADAM = (ADAM, LAZY_ADAM, ADAM_OFFLOAD, ADAM_WEIGHT_DECAY)
