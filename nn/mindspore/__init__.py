"""MindSpore's optimizers with fused steps, for PyNative mode on a CPU.

``fusestep.nn.mindspore`` takes the place of ``mindspore.nn``, which is imported with it: names that
are not written anew here (layers, losses, cells) are MindSpore's.

>>> from mindspore import ops
>>> from fusestep.nn import mindspore as nn
>>> net = nn.Dense(3, 4)
>>> optimizer = nn.Adam(net.trainable_params(), learning_rate=0.1)
>>> optimizer(tuple(ops.ones_like(p) for p in optimizer.parameters))
(True, True)
>>> optimizer.moment1[0].name
'moment1.weight'
"""

from typing import Any

import mindspore.nn as _nn

from .classes import (
    ASGD,
    FTRL,
    LARS,
    SGD,
    Adadelta,
    AdaFactor,
    Adagrad,
    Adam,
    AdaMax,
    AdamOffload,
    AdamWeightDecay,
    Lamb,
    LazyAdam,
    Momentum,
    ProximalAdagrad,
    RMSProp,
    Rprop,
)

__all__ = [
    "ASGD", "AdaFactor", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamOffload", "AdamWeightDecay",
    "FTRL", "LARS", "Lamb", "LazyAdam", "Momentum", "ProximalAdagrad", "RMSProp", "Rprop", "SGD",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)
