"""Stateful optimizers on NumPy arrays, under MindSpore's names; under MXNet's in `mxnet`."""

from ..kernels.formula import Formula
from ..kernels.rule import Rule
from ..kernels.state import State
from ..ops.runtime.row_tensor import RowTensor
from . import mxnet
from .adafactor import AdaFactor
from .adagrad import Adadelta, Adagrad, ProximalAdagrad
from .adam import Adam, AdaMax, AdamOffload, AdamWeightDecay, LazyAdam
from .adan import Adan
from .base.checkpoint import load_checkpoint, save_checkpoint
from .base.ids.id_arrays import TooManyChangesError
from .base.ids.id_map import IdMap
from .base.optimizer import Optimizer
from .base.parameter import Parameter
from .base.uniform_rows import NormalRows, UniformRows
from .embedding_bags import EmbeddingBags
from .ftrl import FTRL
from .fused import FusedOptimizer
from .layerwise import LARS, Lamb
from .lion import Lion
from .prodigy import Prodigy
from .rmsprop import RMSProp
from .rounding import rounded_away
from .row_wise import RowWiseAdagrad, RowWiseAdam
from .rprop import Rprop
from .schedules.decay import (
    CosineDecayLR,
    ExponentialDecayLR,
    InverseDecayLR,
    LearningRateSchedule,
    NaturalExpDecayLR,
    PolynomialDecayLR,
    WarmUpLR,
)
from .schedules.lists import (
    cosine_decay_lr,
    exponential_decay_lr,
    inverse_decay_lr,
    natural_exp_decay_lr,
    piecewise_constant_lr,
    polynomial_decay_lr,
    warmup_lr,
)
from .schedules.sequential import SequentialLR
from .sgd import ASGD, SGD, Momentum
from .thor import thor
from .thor.conv import ThorConv2d
from .thor.layers import ThorDense, ThorEmbedding, ThorLayerNorm

__all__ = [
    "ASGD",
    "AdaFactor",
    "AdaMax",
    "Adadelta",
    "Adagrad",
    "ProximalAdagrad",
    "EmbeddingBags",
    "FTRL",
    "Lamb",
    "LARS",
    "Lion",
    "RMSProp",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Rprop",
    "SGD",
    "Momentum",
    "Adam",
    "AdamOffload",
    "AdamWeightDecay",
    "Adan",
    "CosineDecayLR",
    "ExponentialDecayLR",
    "Formula",
    "FusedOptimizer",
    "IdMap",
    "InverseDecayLR",
    "LazyAdam",
    "LearningRateSchedule",
    "NaturalExpDecayLR",
    "NormalRows",
    "Optimizer",
    "Parameter",
    "PolynomialDecayLR",
    "Prodigy",
    "RowTensor",
    "Rule",
    "SequentialLR",
    "State",
    "ThorConv2d",
    "ThorDense",
    "ThorEmbedding",
    "ThorLayerNorm",
    "TooManyChangesError",
    "UniformRows",
    "WarmUpLR",
    "cosine_decay_lr",
    "exponential_decay_lr",
    "inverse_decay_lr",
    "load_checkpoint",
    "mxnet",
    "natural_exp_decay_lr",
    "piecewise_constant_lr",
    "polynomial_decay_lr",
    "rounded_away",
    "save_checkpoint",
    "thor",
    "warmup_lr",
]
