"""Every optimizer as one table: how it is made, and what a step of it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import nn
from .subject import DTYPES, Prepared, Use
from .traffic import Traffic
from .workloads import Kind

_LR = 1e-3


@dataclass(frozen=True)
class Optimizer:
    """A class of `fusestep.nn` with arguments that decide what it moves.

    Args:
        make: the optimizer of a list of parameters.
        traffic: what a dense step moves.
        dense: what peers are asked for when all gradients are dense.
        rows: likewise when they are row-sparse; None: not measured.
        every_row: a row-sparse gradient makes all rows take the step.
        is_matrix: it is measured on a square matrix.
        start: what the parameters start from.
    """

    make: Callable[[Sequence[np.ndarray]], Any]
    traffic: Traffic
    dense: str | None
    rows: str | None = None
    every_row: bool = False
    is_matrix: bool = False
    start: float = 0.0

    @property
    def uses(self) -> Mapping[Kind, Use]:
        """What it does with each kind of gradients."""
        uses: dict[Kind, Use] = {
            "dense": Use(self.dense, self.traffic, is_matrix=self.is_matrix, start=self.start),
        }
        if self.rows is not None:
            uses["rows"] = uses["mixed"] = Use(self.rows, self.traffic, self.every_row)
        return uses

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All."""
        return tuple(DTYPES)

    def prepare(self, parameters: list[np.ndarray]) -> Prepared:
        """Make it for these parameters."""
        optimizer = self.make(parameters)
        shapes = {parameter.name: parameter.shape for parameter in optimizer.parameters}
        states: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
        for name, state in optimizer._state_arrays().items():
            parameter = name.partition(".")[2]
            if shapes.get(parameter) == state.shape:
                states[parameter].append(state)
        updated = [(parameter.data, *states[parameter.name]) for parameter in optimizer.parameters]
        return Prepared(lambda gradients: optimizer(gradients), updated, [])


def _lars(parameters: Sequence[np.ndarray]) -> nn.LARS:
    return nn.LARS(nn.Momentum(parameters, _LR, 0.9))


OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": Optimizer(lambda p: nn.SGD(p, _LR), Traffic(1), "sgd", "sgd-rows"),
    "SGD(momentum)": Optimizer(lambda p: nn.SGD(p, _LR, momentum=0.9), Traffic(2), "momentum"),
    "Momentum": Optimizer(
        lambda p: nn.Momentum(p, _LR, 0.9, sparse_update="lazy"),
        Traffic(2),
        "momentum",
        "momentum-lazy",
    ),
    "Momentum(nesterov)": Optimizer(
        lambda p: nn.Momentum(p, _LR, 0.9, use_nesterov=True), Traffic(2), "nesterov"
    ),
    "RMSProp": Optimizer(
        lambda p: nn.RMSProp(p, _LR, sparse_update="lazy"), Traffic(2), "rmsprop", "rmsprop-lazy"
    ),
    "RMSProp(momentum)": Optimizer(
        lambda p: nn.RMSProp(p, _LR, momentum=0.9), Traffic(3), "rmsprop-momentum"
    ),
    "RMSProp(centered)": Optimizer(
        lambda p: nn.RMSProp(p, _LR, centered=True), Traffic(3), "rmsprop-centered"
    ),
    "Adagrad": Optimizer(
        lambda p: nn.Adagrad(p, learning_rate=_LR), Traffic(2), "adagrad", "adagrad-rows"
    ),
    "ProximalAdagrad": Optimizer(
        lambda p: nn.ProximalAdagrad(p, learning_rate=_LR, l1=1e-4, l2=1e-4),
        Traffic(2),
        "proximal-adagrad",
        "proximal-adagrad-rows",
    ),
    "FTRL": Optimizer(lambda p: nn.FTRL(p, learning_rate=_LR), Traffic(3), "ftrl", "ftrl-rows"),
    "FTRL(lr_power=-0.4)": Optimizer(
        lambda p: nn.FTRL(p, learning_rate=_LR, lr_power=-0.4), Traffic(3), None
    ),
    "Adam": Optimizer(lambda p: nn.Adam(p, _LR), Traffic(3), "adam", "adam-rows", every_row=True),
    "Adam(nesterov)": Optimizer(lambda p: nn.Adam(p, _LR, use_nesterov=True), Traffic(3), None),
    "Adam(amsgrad)": Optimizer(lambda p: nn.Adam(p, _LR, use_amsgrad=True), Traffic(4), "amsgrad"),
    "LazyAdam": Optimizer(lambda p: nn.LazyAdam(p, _LR), Traffic(3), "adam", "adam-lazy"),
    "AdamOffload": Optimizer(
        lambda p: nn.AdamOffload(p, _LR, sparse_update="dense_equivalent"),
        Traffic(3),
        "adam",
        "adam-rows",
        every_row=True,
    ),
    "AdamWeightDecay": Optimizer(
        lambda p: nn.AdamWeightDecay(p, _LR, weight_decay=0.01), Traffic(3), "adamw"
    ),
    "Lamb": Optimizer(lambda p: nn.Lamb(p, _LR), Traffic(3, passes=(4,)), "lamb"),
    "LARS": Optimizer(_lars, Traffic(2, passes=(2,)), "lars", start=1.0),
    "AdaFactor": Optimizer(
        lambda p: nn.AdaFactor(p, beta1=None),
        Traffic(1, passes=(2, 1)),
        "adafactor",
        is_matrix=True,
    ),
}
