"""MXNet's interface as it is measured: weights and states come with every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import ops
from ..workers.worker_protocol import LR
from .subject import Prepared, Subject, Traffic, Use, written_zeros
from .workloads import Kind


def _uses(
    dense: str | None, rows: str | None = None, *, every_row: bool = False
) -> Mapping[Kind, Use]:
    """The names that peers are asked for; every step is one of Adam."""
    of_dense, of_rows = Use(dense, Traffic(3)), Use(rows, Traffic(3), every_row)
    uses: dict[Kind, Use] = {"dense": of_dense, "rows": of_rows, "mixed": of_rows}
    return {kind: use for kind, use in uses.items() if use.algorithm is not None}


def _adam_update(lazy: bool, parameters: list[np.ndarray]) -> Prepared:
    """The operator, in place on one weight."""
    (weight,) = parameters
    states = written_zeros(weight), written_zeros(weight)
    update: Any = partial(ops.adam_update, out=weight, lr=LR, lazy_update=lazy)

    def step(gradients: Sequence[Any]) -> object:
        return update(weight, *gradients, *states)

    return Prepared(step, [(weight, *states)], [])


def optimizer(name: str, arguments: Mapping[str, Any], parameters: list[np.ndarray]) -> Prepared:
    """The class of this registered name, with a state for each weight."""
    from ...nn import mxnet as mx  # versions to compare with may not have it

    made = mx.create(name, learning_rate=LR, **arguments)
    indices = list(range(len(parameters)))
    # Of the weight's own dtype, as the byte model counts them.
    states = [(written_zeros(p), written_zeros(p)) for p in parameters]

    def step(gradients: Sequence[Any]) -> None:
        made.update(indices, parameters, list(gradients), states)

    return Prepared(step, [(p, *s) for p, s in zip(parameters, states, strict=True)], [])


_IN_ALL_ROWS = _uses("adam", "adam-rows", every_row=True)
_LAZY = _uses(None, "adam-lazy")
MXNET: dict[str, Subject] = {
    "ops.adam_update": Subject(_IN_ALL_ROWS, partial(_adam_update, False)),
    "ops.adam_update(lazy)": Subject(_LAZY, partial(_adam_update, True)),
    "nn.mxnet.Adam": Subject(_IN_ALL_ROWS, partial(optimizer, "adam", {})),
    "nn.mxnet.Adam(lazy)": Subject(_LAZY, partial(optimizer, "adam", {"lazy_update": True})),
    "nn.mxnet.AdamW": Subject(_uses("adamw"), partial(optimizer, "adamw", {"wd": 0.01})),
}
