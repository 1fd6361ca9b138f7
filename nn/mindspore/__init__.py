"""MindSpore's optimizers with fused steps, for PyNative mode on a CPU.

``fusestep.nn.mindspore`` takes the place of ``mindspore.nn``, which is imported with it: names that
are not written anew here (layers, losses, cells) are MindSpore's.
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
