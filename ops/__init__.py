"""Primitive operators: checked, stateless, in place, under their published names."""

from .adam import (
    Adam,
    AdamNoUpdateParam,
    AdamWeightDecay,
    ApplyAdamWithAmsgrad,
    ApplyAdamWithAmsgradV2,
    FusedSparseAdam,
    FusedSparseLazyAdam,
)
from .arrays import RowTensor
from .embedding import SparseGatherV2
from .errors import ConversionError, RejectedValueError, UnknownArgumentError

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
