"""Stateful optimizers under MindSpore's names, on NumPy arrays."""

from ..ops.arrays import RowTensor
from .adam import Adam, AdamOffload, LazyAdam
from .adam_weight_decay import AdamWeightDecay
from .checkpoint import load_checkpoint, save_checkpoint
from .optimizer import Optimizer
from .parameter import Parameter
from .schedule import LearningRateSchedule

__all__ = [
    "Adam",
    "AdamOffload",
    "AdamWeightDecay",
    "LazyAdam",
    "LearningRateSchedule",
    "Optimizer",
    "Parameter",
    "RowTensor",
    "load_checkpoint",
    "save_checkpoint",
]
