"""MXNet's optimizers on NumPy and CUDA arrays: ``from fusestep.nn import mxnet as mx``.

`Adam` and `AdamW` of ``mxnet.optimizer``, the base class `Optimizer` with its registry, the
`Updater`, and the schedulers of ``mxnet.lr_scheduler``. MXNet is retired since 2023; where its
versions disagree, ``compat`` chooses, and where it has traps, ``docs/numbers.md`` says what is
done here instead.

>>> import numpy as np
>>> from fusestep.nn import mxnet as mx
>>> opt = mx.create("adam", lr_scheduler=mx.lr_scheduler.FactorScheduler(10, 0.5, base_lr=0.1))
>>> updater = mx.get_updater(opt)
>>> w = np.ones(2, np.float32)
>>> updater(0, np.array([1, -1], np.float32), w)  # index, gradient, weight
>>> print(w.round(5))
[0.9 1.1]
"""

import sys

from ...ops.runtime.row_tensor import RowTensor
from . import lr_scheduler
from .adam import Adam, AdamW
from .optimizer import Optimizer, ScheduledRateError, create, register
from .updater import Updater, get_updater

# ``mx.optimizer.Adam`` as in MXNet is ``mx.Adam``.
optimizer = sys.modules[__name__]

__all__ = [
    "Adam",
    "AdamW",
    "Optimizer",
    "RowTensor",
    "ScheduledRateError",
    "Updater",
    "create",
    "get_updater",
    "lr_scheduler",
    "optimizer",
    "register",
]
