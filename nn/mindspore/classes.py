"""MindSpore's optimizers, each with the step of the class of its name in `fusestep.nn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import nn

from ...ops.runtime.errors import reject
from .. import (
    adafactor,
    adagrad,
    adam,
    adan,
    ftrl,
    layerwise,
    lion,
    prodigy,
    rmsprop,
    row_wise,
    rprop,
    sgd,
)
from .binding import Binding
from .optimizer import Added, Fused


class AdaFactor(Fused, nn.AdaFactor, step=adafactor.AdaFactor):
    """`mindspore.nn.AdaFactor` with the step of `fusestep.nn.AdaFactor`."""


class AdaMax(Fused, nn.AdaMax, step=adam.AdaMax):
    """`mindspore.nn.AdaMax` with the step of `fusestep.nn.AdaMax`."""


class Adadelta(Fused, nn.Adadelta, step=adagrad.Adadelta):
    """`mindspore.nn.Adadelta` with the step of `fusestep.nn.Adadelta`."""


class Adagrad(Fused, nn.Adagrad, step=adagrad.Adagrad):
    """`mindspore.nn.Adagrad` with the step of `fusestep.nn.Adagrad`."""


class Adam(Fused, nn.Adam, step=adam.Adam):
    """`mindspore.nn.Adam` with the step of `fusestep.nn.Adam`."""


class Adan(Added, step=adan.Adan):
    """`fusestep.nn.Adan` in MindSpore, which has none."""


class AdamOffload(Fused, nn.AdamOffload, step=adam.AdamOffload):
    """`mindspore.nn.AdamOffload` with the step of `fusestep.nn.AdamOffload`."""


class AdamWeightDecay(Fused, nn.AdamWeightDecay, step=adam.AdamWeightDecay):
    """`mindspore.nn.AdamWeightDecay` with the step of `fusestep.nn.AdamWeightDecay`."""


class ASGD(Fused, nn.ASGD, step=sgd.ASGD):
    """`mindspore.nn.ASGD` with the step of `fusestep.nn.ASGD`."""

    @classmethod
    def _follows(cls, inner: Any, step: int) -> Mapping[str, Any]:
        """The numbers with which MindSpore's next step begins: its size, the average's share."""
        mu, rates = 1.0 / max(1.0, step - inner.t0) if step else 1.0, [0.0] * len(inner.parameters)
        if step:
            lrs = inner._rates_at(step - 1)
            rates = [lr / (1.0 + inner.lambd * lr * step) ** inner.alpha for lr in lrs]
        names = [str(p.name) for p in inner.parameters]
        return {f"mu_{name}": mu for name in names} | {
            f"eta_{name}": eta for name, eta in zip(names, rates, strict=True)
        }


class FTRL(Fused, nn.FTRL, step=ftrl.FTRL):
    """`mindspore.nn.FTRL` with the step of `fusestep.nn.FTRL`."""


class Lamb(Fused, nn.Lamb, step=layerwise.Lamb):
    """`mindspore.nn.Lamb` with the step of `fusestep.nn.Lamb`; MindSpore's has none on a CPU."""


class LARS(Fused, nn.LARS, step=layerwise.LARS):  # type: ignore[arg-type]
    """`mindspore.nn.LARS` around an optimizer of this module; MindSpore's has no step on a CPU."""

    def _bound(self, arguments: dict[str, Any]) -> tuple[Binding, Any]:
        optimizer = arguments.pop("optimizer")
        if not isinstance(optimizer, Fused):
            wrong, expected = "has a wrong type", "one of fusestep.nn.mindspore"
            reject(TypeError, "LARS", "optimizer", wrong, expected, type(optimizer).__name__)
        binding: Any = optimizer._binding  # one for both: either may find that memory has moved
        return binding, layerwise.LARS(binding.inner, **arguments)


class LazyAdam(Fused, nn.LazyAdam, step=adam.LazyAdam):
    """`mindspore.nn.LazyAdam` with the step of `fusestep.nn.LazyAdam`."""


class Lion(Added, step=lion.Lion):
    """`fusestep.nn.Lion` in MindSpore, which has none."""


class Momentum(Fused, nn.Momentum, step=sgd.Momentum):
    """`mindspore.nn.Momentum` with the step of `fusestep.nn.Momentum`."""


class Prodigy(Added, step=prodigy.Prodigy):
    """`fusestep.nn.Prodigy` in MindSpore, which has none; ``d`` is a Parameter."""


class ProximalAdagrad(Fused, nn.ProximalAdagrad, step=adagrad.ProximalAdagrad):
    """`mindspore.nn.ProximalAdagrad` with the step of `fusestep.nn.ProximalAdagrad`."""


class RMSProp(Fused, nn.RMSProp, step=rmsprop.RMSProp):
    """`mindspore.nn.RMSProp` with the step of `fusestep.nn.RMSProp`."""


class RowWiseAdagrad(Added, step=row_wise.RowWiseAdagrad):
    """`fusestep.nn.RowWiseAdagrad` in MindSpore, which has none."""


class RowWiseAdam(Added, step=row_wise.RowWiseAdam):
    """`fusestep.nn.RowWiseAdam` in MindSpore, which has none."""


class Rprop(Fused, nn.Rprop, step=rprop.Rprop):
    """`mindspore.nn.Rprop` with the step of `fusestep.nn.Rprop`."""


class SGD(Fused, nn.SGD, step=sgd.SGD):
    """`mindspore.nn.SGD` with the step of `fusestep.nn.SGD`."""

    @classmethod
    def _follows(cls, inner: Any, step: int) -> Mapping[str, Any]:
        """The momentum, and for each parameter whether its first update is still to come."""
        stats = {f"stat.{p.name}": float(step == 0) for p in inner.parameters}
        return {**super()._follows(inner, step), **(stats if inner.momentum else {})}
