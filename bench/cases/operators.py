"""Every operator as one table: how it is made and called, and what a step of it moves.

The tests of operators and the benchmark both start from it, so an operator that is missing here
fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import ops
from .subject import DTYPES, Prepared, Subject, Traffic, Use, written_zeros
from .workloads import Kind

SCALARS: dict[str, Any] = {
    "beta1_power": 0.9,
    "beta2_power": 0.999,
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
}


@dataclass(frozen=True)
class Operator:
    """How an operator is made and called."""

    make: Any  # the class
    variables: tuple[str, ...]  # names of the arrays that it updates
    scalars: Mapping[str, Any]  # names and values of the scalars of a call
    algorithm: str | None  # what peers are asked for
    arguments: tuple[str, ...]  # names of a call's arguments in the published order
    # Arguments of the constructor that have no default.
    attributes: Mapping[str, Any] = field(default_factory=dict)
    traffic: Traffic | None = None  # what a step moves; by default all variables, and the gradient
    every_row: bool = False  # a row-sparse gradient makes all rows take the step

    @property
    def name(self) -> str:
        """The name of the class."""
        return str(self.make.__name__)

    @property
    def gradient(self) -> str:
        """The name of the gradient among the arguments."""
        return "gradient" if "gradient" in self.arguments else "grad"

    @property
    def takes_rows(self) -> bool:
        """Whether the gradient is row-sparse; then parameters are float32."""
        return "indices" in self.arguments

    @property
    def subject(self) -> Subject:
        """The subject that is measured, on the one kind of gradients that it takes."""
        traffic = self.traffic or Traffic(updated=len(self.variables))
        use = Use(self.algorithm, traffic, self.every_row)
        kind: Kind = "rows" if self.takes_rows else "dense"
        dtypes = ("float32",) if self.takes_rows else tuple(DTYPES)
        return Subject({kind: use}, self.prepare, dtypes)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """An instance with the parameter as its first variable; the others start at 0."""
        (parameter,) = parameters
        others = {name: written_zeros(parameter) for name in self.variables[1:]}
        arrays = {self.variables[0]: parameter, **others}
        given = {**self.scalars, **arrays}
        place = self.arguments.index(self.gradient)
        before = [given[name] for name in self.arguments[:place]]
        after = [given[name] for name in self.arguments[place + 1 :] if name in given]
        instance = self.make(**self.attributes)

        def step(gradients: Sequence[Any]) -> object:
            return instance(*before, *gradients, *after)

        def row_step(gradients: Sequence[Any]) -> object:
            (rows,) = gradients
            return instance(*before, rows.values, rows.indices)

        updates = self.traffic is None or self.traffic.updated > 0
        return Prepared(
            row_step if self.takes_rows else step,
            [tuple(arrays.values()) if updates else ()],
            [] if updates else [parameter],
        )


def _published(
    make: Any, algorithm: str | None, values: Mapping[str, Any], **more: Any
) -> Operator:
    """An operator whose signature says what its arguments are; ``values`` are those of scalars."""
    names = tuple(inspect.signature(make.__call__).parameters)[1:]
    scalars = {name: values[name] for name in names if name in values}
    variables = tuple(n for n in names if n not in (*scalars, "gradient", "grad", "indices"))
    return Operator(make, variables, scalars, algorithm, names, **more)


_ADAMW = {**SCALARS, "decay": 0.1}
_MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}
_RMSPROP = {"learning_rate": 0.1, "decay": 0.9, "momentum": 0.8, "epsilon": 1e-3}
_PROXIMAL = {"lr": 0.1, "l1": 0.05, "l2": 0.1}
_FTRL = {**_PROXIMAL, "lr_power": -0.5}
OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        _published(ops.FusedSparseAdam, "adam-rows", SCALARS, every_row=True),
        _published(ops.FusedSparseLazyAdam, "adam-lazy", SCALARS),
        _published(ops.Adam, "adam", SCALARS),
        _published(ops.AdamNoUpdateParam, None, SCALARS, traffic=Traffic(updated=2, written=1)),
        _published(ops.AdamWeightDecay, "adamw", _ADAMW),
        _published(ops.ApplyAdamWithAmsgradV2, "amsgrad", SCALARS),
        _published(ops.ApplyAdamWithAmsgrad, "amsgrad", SCALARS),
        _published(ops.ApplyMomentum, "momentum", _MOMENTUM),
        _published(ops.SGD, "momentum", _MOMENTUM),
        _published(ops.ApplyRMSProp, "rmsprop-momentum", _RMSPROP),
        _published(ops.ApplyCenteredRMSProp, "rmsprop-centered-momentum", _RMSPROP),
        _published(ops.ApplyAdagrad, "adagrad", _PROXIMAL),
        _published(ops.ApplyProximalAdagrad, "proximal-adagrad", _PROXIMAL),
        _published(ops.ApplyFtrl, "ftrl", _FTRL),
        _published(ops.FusedSparseFtrl, "ftrl-rows", {}, attributes=_FTRL),
        _published(ops.SparseApplyFtrl, "ftrl-rows", {}, attributes=_FTRL),
        _published(ops.FusedSparseProximalAdagrad, "proximal-adagrad-rows", _PROXIMAL),
        _published(ops.SparseApplyProximalAdagrad, "proximal-adagrad-rows", _PROXIMAL),
    )
}
# It updates nothing: `weight` is only read, so it is in no table of operators that write.
LARS_UPDATE = _published(
    ops.LARSUpdate,
    None,
    {"norm_weight": 4.0, "norm_gradient": 9.0, "weight_decay": 0.2, "learning_rate": 1e-3},
    traffic=Traffic(updated=0, read=2, written=1),
)


def _gather(parameters: list[np.ndarray]) -> Callable[[Sequence[Any]], object]:
    (table,), lookup = parameters, ops.SparseGatherV2()
    return lambda gradients: lookup(table, gradients[0].indices, 0)


def _clip_in_place(_: list[np.ndarray]) -> Callable[[Sequence[Any]], object]:
    """Clip to less what was clipped before: within its limit nothing would be done."""
    limit = 1.0
    last: Sequence[Any] = ()

    def step(gradients: Sequence[Any]) -> object:
        nonlocal last, limit
        limit = limit * (1.0 - 2.0**-9) if gradients is last else 1.0
        last = gradients
        return ops.clip_by_global_norm(gradients, limit, in_place=True)

    return step


def _function(
    make: Callable[[list[np.ndarray]], Callable[[Sequence[Any]], object]],
    use: Use,
    kind: Kind = "dense",
) -> Subject:
    """A subject that updates no variables: it makes new arrays out of those that it is given.

    Args:
        make: called with the parameters, gives what takes the gradients.
        use: what it does with them.
        kind: of gradients that it is measured on.
    """

    def prepare(parameters: list[np.ndarray]) -> Prepared:
        reads = parameters if kind == "rows" else []
        return Prepared(make(parameters), [()] * len(parameters), reads)

    return Subject({kind: use}, prepare)


FUNCTIONS: dict[str, Subject] = {
    "global_norm": _function(
        lambda _: ops.global_norm, Use("global-norm", Traffic(updated=0, read=1))
    ),
    "clip_by_global_norm": _function(
        lambda _: ops.clip_by_global_norm,
        Use("clip-by-global-norm", Traffic(updated=0, written=1, passes=(1,))),
    ),
    "clip_by_global_norm(in_place)": _function(
        _clip_in_place,
        Use("clip-by-global-norm", Traffic(updated=1, read=0, passes=(1,)), in_place=True),
    ),
    "SparseGatherV2": _function(
        _gather, Use("gather", Traffic(updated=0, read=0, written=1), looks_up=True), "rows"
    ),
}
