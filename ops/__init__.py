"""Primitive operators: checked, stateless, in place, under their published names."""

from .adagrad import ApplyAdagrad, ApplyProximalAdagrad
from .adam import Adam, AdamNoUpdateParam, AdamWeightDecay
from .adam_update import adam_update
from .amsgrad import ApplyAdamWithAmsgrad, ApplyAdamWithAmsgradV2
from .embedding import SparseGatherV2
from .ftrl import ApplyFtrl
from .fused_sparse_adam import FusedSparseAdam, FusedSparseLazyAdam
from .lars import LARSUpdate
from .norm import clip_by_global_norm, global_norm
from .rmsprop import ApplyCenteredRMSProp, ApplyRMSProp
from .runtime.arrays import RowTensor
from .runtime.errors import ConversionError, RejectedValueError, UnknownArgumentError
from .sgd import SGD, ApplyMomentum
from .sparse_ftrl import FusedSparseFtrl, SparseApplyFtrl
from .sparse_proximal_adagrad import FusedSparseProximalAdagrad, SparseApplyProximalAdagrad

__all__ = [
    "SGD",
    "Adam",
    "AdamNoUpdateParam",
    "AdamWeightDecay",
    "ApplyAdagrad",
    "ApplyAdamWithAmsgrad",
    "ApplyAdamWithAmsgradV2",
    "ApplyCenteredRMSProp",
    "ApplyFtrl",
    "ApplyMomentum",
    "ApplyProximalAdagrad",
    "ApplyRMSProp",
    "ConversionError",
    "FusedSparseAdam",
    "FusedSparseFtrl",
    "FusedSparseLazyAdam",
    "FusedSparseProximalAdagrad",
    "LARSUpdate",
    "RejectedValueError",
    "RowTensor",
    "SparseApplyFtrl",
    "SparseApplyProximalAdagrad",
    "SparseGatherV2",
    "UnknownArgumentError",
    "adam_update",
    "clip_by_global_norm",
    "global_norm",
]
