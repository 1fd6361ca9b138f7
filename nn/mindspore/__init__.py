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

import mindspore as _mindspore
import mindspore.nn as _nn

if not _mindspore.__version__.startswith("2.10."):  # in others memory may be somebody else's
    raise ImportError(f"fusestep.nn.mindspore: needs MindSpore 2.10, got {_mindspore.__version__}")

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
    Adan,
    Lamb,
    LazyAdam,
    Lion,
    Momentum,
    Prodigy,
    ProximalAdagrad,
    RMSProp,
    RowWiseAdagrad,
    RowWiseAdam,
    Rprop,
)

__all__ = [
    "ASGD", "AdaFactor", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamOffload", "AdamWeightDecay",
    "Adan", "FTRL", "LARS", "Lamb", "LazyAdam", "Lion", "Momentum", "Prodigy", "ProximalAdagrad",
    "RMSProp", "RowWiseAdagrad", "RowWiseAdam", "Rprop", "SGD",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)


def __dir__() -> list[str]:
    return sorted({*dir(_nn), *__all__})
