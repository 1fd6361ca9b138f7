"""Primitive operators: checked, stateless, in place, under their published names."""

from .adam import Adam, AdamNoUpdateParam, AdamWeightDecay
from .amsgrad import ApplyAdamWithAmsgrad, ApplyAdamWithAmsgradV2
from .arrays import RowTensor
from .embedding import SparseGatherV2
from .errors import ConversionError, RejectedValueError, UnknownArgumentError
from .fused_sparse_adam import FusedSparseAdam, FusedSparseLazyAdam

__all__ = [
    "Adam",
    "AdamNoUpdateParam",
    "AdamWeightDecay",
    "ApplyAdamWithAmsgrad",
    "ApplyAdamWithAmsgradV2",
    "ConversionError",
    "FusedSparseAdam",
    "FusedSparseLazyAdam",
    "RejectedValueError",
    "RowTensor",
    "SparseGatherV2",
    "UnknownArgumentError",
]
