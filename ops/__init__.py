"""Primitive operators: checked, stateless, in place, under their published names."""

from .adagrad import (
    ApplyAdagrad,
    ApplyProximalAdagrad,
    FusedSparseProximalAdagrad,
    SparseApplyProximalAdagrad,
)
from .adam import Adam, AdamNoUpdateParam, AdamWeightDecay, FusedSparseAdam, FusedSparseLazyAdam
from .adam_update import adam_update
from .amsgrad import ApplyAdamWithAmsgrad, ApplyAdamWithAmsgradV2
from .embedding import SparseGatherV2
from .embedding_bags import EmbeddingBags
from .ftrl import ApplyFtrl, FusedSparseFtrl, SparseApplyFtrl
from .lars import LARSUpdate
from .norm import clip_by_global_norm, global_norm
from .rmsprop import ApplyCenteredRMSProp, ApplyRMSProp
from .runtime.bags.tensor import BagTensor
from .runtime.errors import ConversionError, RejectedValueError, UnknownArgumentError
from .runtime.row_tensor import RowTensor
from .sgd import SGD, ApplyMomentum

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
    "BagTensor",
    "ConversionError",
    "EmbeddingBags",
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
