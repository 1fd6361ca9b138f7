"""MXNet's interface as it is measured: weights and states come with every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import ops
from .subject import DTYPES, Prepared, Subject, Use, written_zeros
from .traffic import Traffic
from .workloads import Kind

_LR = 1e-3
_ADAM = Traffic(3)


def _uses(dense: str | None, rows: str | None, every_row: bool) -> Mapping[Kind, Use]:
    uses: dict[Kind, Use] = {}
    if dense is not None:
        uses["dense"] = Use(dense, _ADAM)
    if rows is not None:
        uses["rows"] = uses["mixed"] = Use(rows, _ADAM, every_row)
    return uses


@dataclass(frozen=True)
class AdamUpdate:
    """The operator, on one weight."""

    lazy: bool
    dtypes = tuple(DTYPES)

    @property
    def uses(self) -> Mapping[Kind, Use]:
        """Dense gradients once; rows in either way."""
        return _uses(None, "adam-lazy", False) if self.lazy else _uses("adam", "adam-rows", True)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """In place on the weight."""
        (weight,) = parameters
        states = written_zeros(weight), written_zeros(weight)
        options = {"out": weight, "lr": _LR, "lazy_update": self.lazy}

        def step(gradients: Sequence[Any]) -> object:
            return ops.adam_update(weight, *gradients, *states, **options)

        return Prepared(step, [(weight, *states)], [])


@dataclass(frozen=True)
class MxnetOptimizer:
    """An optimizer, on a list of weights.

    Args:
        name: the registered name of its class.
        arguments: of the class.
        dense: what peers are asked for when all gradients are dense.
        rows: likewise when they are row-sparse; None: not measured.
        every_row: a row-sparse gradient makes all rows take the step.
    """

    name: str
    arguments: Mapping[str, Any]
    dense: str | None
    rows: str | None = None
    every_row: bool = False
    dtypes = tuple(DTYPES)

    @property
    def uses(self) -> Mapping[Kind, Use]:
        """What it does with each kind of gradients."""
        return _uses(self.dense, self.rows, self.every_row)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """Make it, with a state for each of these weights."""
        from ...nn import mxnet as mx  # versions to compare with may not have it

        optimizer = mx.create(self.name, learning_rate=_LR, **self.arguments)
        indices = list(range(len(parameters)))
        # Of the weight's own dtype, as the byte model counts them.
        states = [(written_zeros(p), written_zeros(p)) for p in parameters]

        def step(gradients: Sequence[Any]) -> None:
            optimizer.update(indices, parameters, list(gradients), states)

        return Prepared(step, [(p, *s) for p, s in zip(parameters, states, strict=True)], [])


MXNET: dict[str, Subject] = {
    "ops.adam_update": AdamUpdate(lazy=False),
    "ops.adam_update(lazy)": AdamUpdate(lazy=True),
    "nn.mxnet.Adam": MxnetOptimizer("adam", {}, "adam", "adam-rows", every_row=True),
    "nn.mxnet.Adam(lazy)": MxnetOptimizer("adam", {"lazy_update": True}, None, "adam-lazy"),
    "nn.mxnet.AdamW": MxnetOptimizer("adamw", {"wd": 0.01}, "adamw"),
}
