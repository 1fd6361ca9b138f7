"""The optimizers with one second moment for each row."""

from __future__ import annotations

from functools import partial

from .adam import BY_ROW
from .record import ROW_LOST_LATER, ROW_STOPS, Argument, Form, Measured, Row, Source

_RATE = {"learning_rate": 0.05, "accum": 0.1}
_form = partial(Form, rows="lazy", rows_there="the rows that occur")

ROW_WISE_ADAGRAD = Row(
    "RowWiseAdagrad",
    "params, accum=0.0, learning_rate=0.001, eps=1e-10, loss_scale=1.0, weight_decay=0.0, "
    "decoupled_weight_decay=False",
    _RATE,
    {"decoupled_weight_decay": Argument("flag", True, beside={"weight_decay": 0.3})},
    forms={
        "": _form(reference="row_wise.adagrad", large=ROW_STOPS),
        "decoupled": _form(
            {"decoupled_weight_decay": True},
            "with `decoupled_weight_decay=True`",
            "row_wise.adagrad_decoupled",
            large=ROW_STOPS,
        ),
    },
    measured={"": Measured(None, "row-wise-adagrad-rows")},
    source=Source("FBGEMM 1.8", "recorded", differs="dense gradients too; `eps` is 1e-10"),
    row_wise=True,
)
ROW_WISE_ADAM = Row(
    "RowWiseAdam",
    "params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.0, "
    "loss_scale=1.0",
    {"learning_rate": 0.05, "eps": 0.01},
    BY_ROW,
    forms={"": _form(reference="row_wise.adam", large=ROW_LOST_LATER)},
    measured={"": Measured(None, "row-wise-adam-rows")},
    source=Source("FBGEMM 1.8", "reference", differs="bias correction as `Adam`'s; on the CPU too"),
    row_wise=True,
)
ROW_WISE_ROWS = (ROW_WISE_ADAGRAD, ROW_WISE_ADAM)
